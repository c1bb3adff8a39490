"""Estimates how long the rest of a grid takes, from the finished runs."""

from __future__ import annotations

import dataclasses
import datetime
import heapq
import statistics
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from diffjax.config import Config
from diffjax.model.flops import step_flops
from experiments.grid import Run


def shape(config: Config) -> Hashable:
  """Returns the values of a config that determine the time of a step.

  These are the number and length of the rows, and all fields of the model but
  real numbers such as λ_init.
  """
  fields: list[Hashable] = []
  for value in dataclasses.asdict(config.model).values():
    # None keeps the place of the field.
    fields.append(None if isinstance(value, float) else value)
  fields.append(config.data.length)
  fields.append(config.train.batch_size)
  fields.append(config.train.accumulation)
  return tuple(fields)


def training_flops(config: Config) -> float:
  """Returns the FLOPs of all training steps."""
  tokens = config.train.steps * config.train.batch_size * config.data.length
  return step_flops(config.model, config.data.length, tokens).training


class Expected(NamedTuple):
  """The time that a run is expected to take.

  Attributes:
    seconds: The time.
    num_runs: The number of finished runs of the same shape and steps. 0 if the
      time is estimated from runs of other shapes.
  """

  seconds: float
  num_runs: int


class Pace:
  """Estimates the time that the rest of a grid takes.

  A run is expected to take the median time of the finished runs of its shape
  and steps. If there are none, the seconds per FLOP of all finished runs are
  used.
  """

  def __init__(
    self,
    finished: Iterable[tuple[Run, float]],
    runs: Sequence[Run],
    slots: int,
    resumes: bool,
  ):
    """Initializes the estimates.

    Args:
      finished: Runs that had finished before, and the seconds of each.
      runs: The runs to do, in order.
      slots: The number of runs at a time.
      resumes: Whether a run that is stopped continues from where it was. Else
        it starts again.
    """
    self._slots = slots
    self._resumes = resumes
    self._seconds: dict[Hashable, list[float]] = {}
    self._seconds_per_flop: list[float] = []
    self._waiting = {run.name: run for run in runs}
    # The runs that have begun, with their start times.
    self._begun: dict[str, tuple[Run, float]] = {}
    self._lock = threading.Lock()
    for run, seconds in finished:
      self._count(run, seconds)

  def _count(self, run: Run, seconds: float) -> None:
    """Adds the seconds of a finished run."""
    self._seconds.setdefault(_kind(run), []).append(seconds)
    self._seconds_per_flop.append(seconds / _size(run))

  def begin(self, run: Run) -> None:
    """Records that a run begins now."""
    with self._lock:
      waiting = self._waiting.pop(run.name)
      self._begun[run.name] = (waiting, time.monotonic())

  def end(self, run: Run, seconds: float | None) -> str:
    """Records that a run has ended.

    Args:
      run: The run.
      seconds: The seconds of all its starts. None if they are not known,
        because another launcher trained it.

    Returns:
      A text on the runs that are left; "" if there are none.
    """
    with self._lock:
      _, start = self._begun.pop(run.name)
      if seconds is not None:
        # This includes the training of the run from which this one starts.
        elapsed = time.monotonic() - start
        self._count(run, max(seconds, elapsed))
      num_left = len(self._waiting) + len(self._begun)
      seconds_left = self._seconds_left(self._remaining_of_begun())
    if num_left == 0:
      return ""
    text = f"{num_left} {'run' if num_left == 1 else 'runs'} left"
    if seconds_left is None:
      return text
    end_time = _time_after(seconds_left)
    return f"{text}, about {in_words(seconds_left)}, until {end_time}"

  def stopped(self, total: int) -> str:
    """Returns a text for a grid that is stopped now.

    Args:
      total: The number of runs of the grid.
    """
    with self._lock:
      if self._resumes:
        remaining = self._remaining_of_begun()
      else:
        remaining = []
        for run, _ in self._begun.values():
          remaining.append(self._expected_seconds(run))
      seconds_left = self._seconds_left(remaining)
      num_done = total - len(self._waiting) - len(self._begun)
    text = f"{num_done} of {total} runs are done; "
    if seconds_left is not None:
      text += (
        f"the rest would take about {in_words(seconds_left)} at this pace; "
      )
    return f"{text}the same command goes on"

  def expected(self, run: Run) -> Expected | None:
    """Returns how long a run is expected to take; None if no run finished."""
    seconds = self._seconds.get(_kind(run))
    if seconds:
      return Expected(statistics.median(seconds), len(seconds))
    if self._seconds_per_flop:
      per_flop = statistics.median(self._seconds_per_flop)
      return Expected(per_flop * _size(run), 0)
    return None

  def _expected_seconds(self, run: Run) -> float:
    """Returns the expected seconds of a run; 0 if no run has finished."""
    expected = self.expected(run)
    return 0.0 if expected is None else expected.seconds

  def _remaining_of_begun(self) -> list[float]:
    """Returns the remaining seconds of each run that has begun."""
    now = time.monotonic()
    remaining = []
    for run, start in self._begun.values():
      remaining.append(max(0.0, self._expected_seconds(run) - (now - start)))
    return remaining

  def _seconds_left(self, remaining_of_begun: list[float]) -> float | None:
    """Returns the seconds until the last run ends.

    The waiting runs start in order, each in the first slot that gets free.

    Args:
      remaining_of_begun: The remaining seconds of the runs that have begun.

    Returns:
      The seconds. None if no run has finished.
    """
    if not self._seconds_per_flop:
      return None
    # The seconds until each slot gets free. Idle slots are free now.
    free_times = [*remaining_of_begun]
    while len(free_times) < self._slots:
      free_times.append(0.0)
    heapq.heapify(free_times)
    for run in self._waiting.values():
      start = heapq.heappop(free_times)
      heapq.heappush(free_times, start + self._expected_seconds(run))
    return max(free_times)


def _size(run: Run) -> float:
  """Returns the FLOPs of a run. All runs without steps are equally large."""
  return training_flops(run.config) or 1.0


def _kind(run: Run) -> Hashable:
  """Returns what runs must share to take equally long."""
  return shape(run.config), run.config.train.steps


def _time_after(seconds: float) -> str:
  """Returns the local time after some seconds, with the day if not today."""
  now = datetime.datetime.now()
  then = now + datetime.timedelta(seconds=seconds)
  if then.date() == now.date():
    return f"{then:%H:%M}"
  return f"{then:%a %d %b %H:%M}"


def in_words(seconds: float) -> str:
  """Returns a time in its two largest units.

  Examples: "45 s", "12 min", "3 h 20 min", "2 days 5 h".
  """
  if seconds < 90:
    return f"{seconds:.0f} s"
  minutes = round(seconds / 60)
  if minutes < 60:
    return f"{minutes} min"
  hours, minutes = divmod(minutes, 60)
  if hours < 48:
    return f"{hours} h {minutes} min"
  days, hours = divmod(hours, 24)
  return f"{days} days {hours} h"
