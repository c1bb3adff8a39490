"""The status line of a training run on the terminal, and its speed."""

from __future__ import annotations

import atexit
import datetime
import math
import time
from collections.abc import Mapping
from typing import NamedTuple, TextIO

import jax
import rich.console
import rich.progress

from diffjax.config import Config
from diffjax.host.progress import short_number
from diffjax.training.flops import peak_flops, step_flops
from diffjax.training.optimizer import frozen_names

# A smaller share of the time spent waiting for data is not printed, so that the
# line fits 80 columns. metrics.jsonl always has it.
_MIN_PRINTED_WAIT_FRACTION = 0.01

# The least time between two reports, in case that a clock does not advance.
_MIN_SECONDS = 1e-9


class Moment(NamedTuple):
  """A time in a run.

  Attributes:
    seconds: the time of `time.perf_counter`.
    waited: seconds spent waiting for batches since the run began.
  """

  seconds: float
  waited: float


class _StepEnd(NamedTuple):
  """The end of a step.

  Attributes:
    step: the number of the step.
    moment: when it ended.
  """

  step: int
  moment: Moment


class StatusLine:
  """The step, loss and speed of a run.

  On a terminal it is a live line. Otherwise each report is one plain line. Only
  process 0 prints.

  Speeds are averages over the steps since the previous report. They are
  measured from the end of one step to the end of another, and do not include
  compilation, evaluation and saving.
  """

  def __init__(
    self,
    config: Config,
    *,
    first_step: int,
    num_devices: int,
    device_kind: str,
    file: TextIO | None = None,
  ):
    """Starts the line.

    Args:
      config: the run's config.
      first_step: the number of steps done before this process started.
      num_devices: the number of devices that share a step.
      device_kind: their `jax.Device.device_kind`. MFU is reported if the peak
        of this kind is known.
      file: where to print. None for stdout.
    """
    self._num_steps = config.train.steps
    self._tokens_per_step = config.train.batch_size * config.data.length
    self._seconds_at_peak = _step_seconds_at_peak(
      config, num_devices, device_kind
    )
    # The speeds of the last report. Empty before the first measurement.
    self._rates: dict[str, float] = {}
    # The step at whose end the window begins over which speeds are averaged.
    # None before the first step.
    self._window_start: _StepEnd | None = None
    self._total_waited = 0.0
    self._console = rich.console.Console(
      file=file,
      quiet=jax.process_index() != 0,
      highlight=False,
      # Without this, rich breaks lines after 80 columns if stdout is a pipe.
      soft_wrap=True,
    )
    self._bar: rich.progress.Progress | None = None
    if self._console.is_terminal and not self._console.quiet:
      self._start_bar(first_step)

  def _start_bar(self, first_step: int) -> None:
    """Starts the live line."""
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn("{task.completed}/{task.total}"),
      rich.progress.BarColumn(bar_width=10),
      rich.progress.TextColumn("{task.fields[status]}"),
      console=self._console,
    )
    self._bar.add_task(
      "", total=self._num_steps, completed=first_step, status="compiling …"
    )
    self._bar.start()
    # After an error, the terminal would otherwise have no cursor.
    atexit.register(self.close)

  def _update_bar(
    self, *, completed: int | None = None, status: str | None = None
  ) -> None:
    """Changes what the live line shows, if there is one. None for no change."""
    if self._bar is None:
      return
    [task] = self._bar.task_ids
    if completed is not None:
      self._bar.update(task, completed=completed)
    if status is not None:
      self._bar.update(task, status=status)

  def stepped(
    self, step: int, waited: float = 0.0, *, is_over: bool = False
  ) -> None:
    """Notes that a step has been dispatched.

    Args:
      step: the number of the step.
      waited: seconds that the step waited for its batch.
      is_over: whether the step has also ended, as on devices where a dispatch
        waits for the step.
    """
    self._total_waited += waited
    if self._window_start is None:
      # The first step has been compiled. It has just ended or just started to
      # run, which is the end of the step before.
      last_ended = step if is_over else step - 1
      self.measure_from(last_ended, self.moment())
      self._update_bar(status="training …")
    self._update_bar(completed=step)

  def moment(self, seconds_ago: float = 0.0) -> Moment:
    """Returns the moment some seconds ago."""
    return Moment(time.perf_counter() - seconds_ago, self._total_waited)

  def measure_from(self, step: int, end: Moment) -> None:
    """Excludes the time before the end of a step from the speeds."""
    self._window_start = _StepEnd(step, end)

  def restart_window(self, step: int) -> None:
    """Excludes the time before this moment from the speeds.

    Args:
      step: the number of steps done, all of which have ended.
    """
    if self._window_start is not None:
      self.measure_from(step, self.moment())

  def report(
    self, step: int, values: Mapping[str, float], end: Moment | None = None
  ) -> dict[str, float]:
    """Prints a step's loss and the speeds since the previous report.

    Args:
      step: the number of the step, which has ended.
      values: its metrics. "train/loss" is printed.
      end: when the step ended. None if it has just ended.

    Returns:
      The metrics and the speeds: "train/tokens_per_second",
      "train/step_seconds", "train/wait_fraction" (the share of the time spent
      waiting for data) and, on known devices, "train/mfu". There are no speeds
      before the first measurement.
    """
    if end is None:
      end = self.moment()
    start = self._window_start
    if start is not None and step > start.step:
      self._rates = self._measure_rates(start, _StepEnd(step, end))
      self.measure_from(step, end)
    status = self._status(step, values.get("train/loss", math.nan))
    if self._bar is not None:
      self._update_bar(status=status)
    else:
      self.note(step, status)
    return {**values, **self._rates}

  def _measure_rates(self, start: _StepEnd, end: _StepEnd) -> dict[str, float]:
    """Returns the speeds between the ends of two steps, by logged name."""
    window_seconds = end.moment.seconds - start.moment.seconds
    window_seconds = max(window_seconds, _MIN_SECONDS)
    step_seconds = window_seconds / (end.step - start.step)
    waited = end.moment.waited - start.moment.waited
    rates = {
      "train/tokens_per_second": self._tokens_per_step / step_seconds,
      "train/step_seconds": step_seconds,
      "train/wait_fraction": min(waited / window_seconds, 1.0),
    }
    if self._seconds_at_peak is not None:
      rates["train/mfu"] = self._seconds_at_peak / step_seconds
    return rates

  def note(self, step: int, text: str) -> None:
    """Prints text that stays, such as the losses of an evaluation."""
    self._console.print(f"step {step}/{self._num_steps}  {text}", markup=False)

  def close(self) -> None:
    """Ends the live line."""
    if self._bar is not None:
      self._bar.stop()
      self._bar = None
      atexit.unregister(self.close)

  def _status(self, step: int, loss: float) -> str:
    """Returns the loss, the speeds and the time left as text."""
    parts = [f"loss {loss:.4f}"]
    if not self._rates:
      return parts[0]
    tokens_per_second = short_number(self._rates["train/tokens_per_second"])
    parts.append(f"{tokens_per_second} tokens/s")
    if "train/mfu" in self._rates:
      parts.append(f"MFU {self._rates['train/mfu']:.1%}")
    wait_fraction = self._rates["train/wait_fraction"]
    if wait_fraction >= _MIN_PRINTED_WAIT_FRACTION:
      parts.append(f"waited for data {wait_fraction:.0%}")
    seconds_left = self._rates["train/step_seconds"] * (self._num_steps - step)
    parts.append(f"{datetime.timedelta(seconds=round(seconds_left))} left")
    return "  ".join(parts)


def _step_seconds_at_peak(
  config: Config, num_devices: int, device_kind: str
) -> float | None:
  """Returns how long a step would take at the peak FLOP/s of the devices.

  Returns None if the peak of the device kind is not known.
  """
  peak = peak_flops(device_kind)
  if peak is None:
    return None
  tokens_per_step = config.train.batch_size * config.data.length
  flops = step_flops(
    config.model,
    config.data.length,
    tokens_per_step,
    frozen_names(config.optimizer),
  )
  return flops.training / (peak * num_devices)
