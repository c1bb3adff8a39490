"""How long the runs of a grid take, by those that have finished."""

from __future__ import annotations

import dataclasses
import datetime
import heapq
import statistics
import threading
import time
from collections.abc import Hashable, Iterable, Sequence

from diffjax.config import Config
from diffjax.model.flops import step_flops
from experiments.grid import Run


def shape(config: Config) -> Hashable:
  """What a step's time depends on: the model without its real numbers, such as λ_init, and the rows of a step."""
  model = {
    name: None if isinstance(value, float) else value
    for name, value in dataclasses.asdict(config.model).items()
  }
  return (
    *model.values(),
    config.data.length,
    config.train.batch_size,
    config.train.accumulation,
  )


def training_flops(config: Config) -> float:
  """FLOPs of all training steps."""
  tokens = config.train.steps * config.train.batch_size * config.data.length
  return step_flops(config.model, config.data.length, tokens).training


class Pace:
  """The time that the rest of a grid takes.

  A run is expected to take the median of the finished runs of its shape and steps. Where there are none, it is expected to take as many
  seconds a FLOP as the finished runs of other shapes.

  Args:
    finished: runs that had finished before, and the seconds that each took.
    runs: the runs to do, in order.
    slots: runs at a time.
    resumes: True if a run that is stopped goes on where it was; False if it starts again.
  """

  def __init__(
    self,
    finished: Iterable[tuple[Run, float]],
    runs: Sequence[Run],
    slots: int,
    resumes: bool,
  ):
    self._slots, self._resumes = slots, resumes
    self._seconds: dict[Hashable, list[float]] = {}
    self._seconds_a_flop: list[float] = []
    self._waiting = {run.name: run for run in runs}
    self._begun: dict[str, tuple[Run, float]] = {}
    self._lock = threading.Lock()
    for run, seconds in finished:
      self._count(run, seconds)

  def _count(self, run: Run, seconds: float) -> None:
    self._seconds.setdefault(_kind(run), []).append(seconds)
    self._seconds_a_flop.append(seconds / _size(run))

  def begin(self, run: Run) -> None:
    """A run begins now."""
    with self._lock:
      self._begun[run.name] = self._waiting.pop(run.name), time.monotonic()

  def end(self, run: Run, seconds: float | None) -> str:
    """A run has ended. Returns a text on the runs that are left, "" if there are none.

    Args:
      run: the run.
      seconds: what it took over all its starts; None if that is not known, since another launcher trained it.
    """
    with self._lock:
      _, start = self._begun.pop(run.name)
      if seconds is not None:
        self._count(
          run, max(seconds, time.monotonic() - start)
        )  # the time of the run that it starts from is in the latter
      number = len(self._waiting) + len(self._begun)
      left = (
        f"{number} {'run' if number == 1 else 'runs'} left" if number else ""
      )
      rest = self._rest()
    if not left or rest is None:
      return left
    return f"{left}, about {in_words(rest)}, until {_time_after(rest)}"

  def stopped(self, total: int) -> str:
    """A text for a grid of so many runs that is stopped now."""
    with self._lock:
      rest = self._rest(self._resumes)
      done = total - len(self._waiting) - len(self._begun)
    at_this_pace = (
      f"the rest would take about {in_words(rest)} at this pace; "
      if rest is not None
      else ""
    )
    return (
      f"{done} of {total} runs are done; {at_this_pace}the same command goes on"
    )

  def expected(self, run: Run) -> tuple[float, int] | None:
    """The seconds that a run is expected to take, and the number of finished runs of its shape and steps, which may be 0.

    None if no run has finished."""
    if taken := self._seconds.get(_kind(run)):
      return statistics.median(taken), len(taken)
    if self._seconds_a_flop:
      return statistics.median(self._seconds_a_flop) * _size(run), 0
    return None

  def _rest(self, with_begun: bool = True) -> float | None:
    """Seconds until the last run ends, if waiting runs start in order as slots get free; None if no run has finished.

    Args:
      with_begun: True if what the runs that have begun have done so far counts.
    """
    if not self._seconds_a_flop:
      return None
    now = time.monotonic()
    seconds = lambda run: (self.expected(run) or (0.0, 0))[0]
    ends = [
      max(0.0, seconds(run) - (now - start) * with_begun)
      for run, start in self._begun.values()
    ]
    ends += [0.0] * (self._slots - len(ends))
    heapq.heapify(ends)
    for run in self._waiting.values():
      heapq.heappush(ends, heapq.heappop(ends) + seconds(run))
    return max(ends)


def _size(run: Run) -> float:
  return (
    training_flops(run.config) or 1.0
  )  # a run without steps is as large as any other


def _kind(run: Run) -> Hashable:
  return shape(run.config), run.config.train.steps


def _time_after(seconds: float) -> str:
  """The local time so many seconds from now, with the day if that is not today."""
  now = datetime.datetime.now()
  then = now + datetime.timedelta(seconds=seconds)
  return (
    f"{then:%H:%M}" if then.date() == now.date() else f"{then:%a %d %b %H:%M}"
  )


def in_words(seconds: float) -> str:
  """A time in its two largest units, such as "45 s", "12 min", "3 h 20 min" or "2 days 5 h"."""
  if seconds < 90:
    return f"{seconds:.0f} s"
  minutes = round(seconds / 60)
  if minutes < 60:
    return f"{minutes} min"
  hours, minutes = divmod(minutes, 60)
  return (
    f"{hours} h {minutes} min"
    if hours < 48
    else f"{hours // 24} days {hours % 24} h"
  )
