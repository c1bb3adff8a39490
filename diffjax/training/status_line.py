"""Progress of a training run on the terminal, and its speed."""

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
from diffjax.model.flops import peak_flops, step_flops
from diffjax.training.optimizer import frozen_names

# A smaller share of the time spent waiting for data is not printed, so that the
# line fits 80 columns. metrics.jsonl always has it.
_MIN_PRINTED_WAIT_FRACTION = 0.01

# The least duration of a measurement, because some clocks are coarse. It avoids
# a division by zero.
_MIN_SECONDS = 1e-9


class Moment(NamedTuple):
  """A point in time of a run, with the time waited for data before it.

  Attributes:
    seconds: the time of `time.perf_counter`.
    waited: seconds that this process has waited for batches so far.
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
  """Prints the step, loss and speed of a training run, and measures the speed.

  On a terminal, this is one line that is updated in place. Otherwise each
  report is a line of its own. Only process 0 prints.

  Speeds are averages over a window: the steps since the previous report. A
  window begins and ends at the end of a step. It does not include compilation,
  evaluations and saves.
  """

  def __init__(
    self,
    config: Config,
    *,
    start_step: int,
    num_devices: int,
    device_kind: str,
    file: TextIO | None = None,
  ):
    """Shows the status line, if the output is a terminal.

    Args:
      config: the run's config.
      start_step: the number of steps done before this process started.
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
    self._speeds: dict[str, float] = {}
    # Speeds are averages over the steps after this one. None before the first
    # step.
    self._window_start: _StepEnd | None = None
    self._seconds_waited = 0.0
    self._console = rich.console.Console(
      file=file,
      quiet=jax.process_index() != 0,
      highlight=False,
      # Without this, rich breaks lines after 80 columns if stdout is a pipe.
      soft_wrap=True,
    )
    # The line that is updated in place. None if stdout is not a terminal.
    self._bar: rich.progress.Progress | None = None
    if self._console.is_terminal and not self._console.quiet:
      self._start_bar(start_step)

  def _start_bar(self, start_step: int) -> None:
    """Shows a line with steps, a bar and a status, to be updated in place."""
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn("{task.completed}/{task.total}"),
      rich.progress.BarColumn(bar_width=10),
      rich.progress.TextColumn("{task.fields[status]}"),
      console=self._console,
    )
    self._bar.add_task(
      "", total=self._num_steps, completed=start_step, status="compiling …"
    )
    self._bar.start()
    # The bar hides the terminal's cursor. `close` shows it again, also if the
    # process ends with an error.
    atexit.register(self.close)

  def _update_bar(
    self, *, completed: int | None = None, status: str | None = None
  ) -> None:
    """Updates the bar's steps or status. Does nothing if there is no bar."""
    if self._bar is None:
      return
    [task] = self._bar.task_ids
    if completed is not None:
      self._bar.update(task, completed=completed)
    if status is not None:
      self._bar.update(task, status=status)

  def add_wait(self, seconds: float) -> None:
    """Adds the time that a step has waited for its batch."""
    self._seconds_waited += seconds

  def add_step(self, step: int, *, is_over: bool = False) -> None:
    """Shows that a step has been dispatched to the devices.

    The first call starts the measurement of speeds.

    Args:
      step: the number of the step.
      is_over: whether the step has also ended. On some devices a dispatch
        returns only then.
    """
    if self._window_start is None:
      # The first dispatch includes compilation, so the window begins after it.
      # At this moment the step has either ended or just begun to run.
      last_ended_step = step if is_over else step - 1
      self.start_window(last_ended_step, self.moment())
      self._update_bar(status="training …")
    self._update_bar(completed=step)

  def moment(self, seconds_ago: float = 0.0) -> Moment:
    """Returns the present moment, or an earlier one.

    Args:
      seconds_ago: how long ago it was. Waits since then must not have been
        added yet.
    """
    return Moment(time.perf_counter() - seconds_ago, self._seconds_waited)

  def start_window(self, step: int, end: Moment) -> None:
    """Measures speeds from the end of a step. Earlier time does not count."""
    self._window_start = _StepEnd(step, end)

  def restart_window(self, step: int) -> None:
    """Excludes the time until now from the speeds, for example an evaluation.

    Does nothing if speeds are not measured yet.

    Args:
      step: the number of steps done. All of them have ended.
    """
    if self._window_start is not None:
      self.start_window(step, self.moment())

  def report(
    self, step: int, values: Mapping[str, float], end: Moment | None = None
  ) -> dict[str, float]:
    """Prints a step's loss and speeds, and starts a new window.

    If no step has ended in the window, the last speeds are printed again.

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
      self._speeds = self._compute_speeds(start, _StepEnd(step, end))
      self.start_window(step, end)
    loss = values.get("train/loss", math.nan)
    status = self._status_text(step, loss)
    if self._bar is not None:
      self._update_bar(status=status)
    else:
      self.note(step, status)
    return {**values, **self._speeds}

  def _compute_speeds(self, start: _StepEnd, end: _StepEnd) -> dict[str, float]:
    """Returns the speeds between the ends of two steps, by logged name.

    MFU (model FLOPs utilization) is the time of a step at the devices' peak
    over its true time.
    """
    window_seconds = end.moment.seconds - start.moment.seconds
    window_seconds = max(window_seconds, _MIN_SECONDS)
    step_seconds = window_seconds / (end.step - start.step)
    waited = end.moment.waited - start.moment.waited
    speeds = {
      "train/tokens_per_second": self._tokens_per_step / step_seconds,
      "train/step_seconds": step_seconds,
      "train/wait_fraction": min(waited / window_seconds, 1.0),
    }
    if self._seconds_at_peak is not None:
      speeds["train/mfu"] = self._seconds_at_peak / step_seconds
    return speeds

  def note(self, step: int, text: str) -> None:
    """Prints a line that stays, such as the losses of an evaluation."""
    self._console.print(f"step {step}/{self._num_steps}  {text}", markup=False)

  def close(self) -> None:
    """Stops updating the line, if there is one. May be called repeatedly."""
    if self._bar is not None:
      self._bar.stop()
      self._bar = None
      atexit.unregister(self.close)

  def _status_text(self, step: int, loss: float) -> str:
    """Returns the loss, the speeds and the time left.

    Example: "loss 2.5312  92.2K tokens/s  MFU 41.3%  2:06:00 left"
    """
    parts = [f"loss {loss:.4f}"]
    if not self._speeds:
      return parts[0]
    tokens_per_second = short_number(self._speeds["train/tokens_per_second"])
    parts.append(f"{tokens_per_second} tokens/s")
    if "train/mfu" in self._speeds:
      parts.append(f"MFU {self._speeds['train/mfu']:.1%}")
    wait_fraction = self._speeds["train/wait_fraction"]
    if wait_fraction >= _MIN_PRINTED_WAIT_FRACTION:
      parts.append(f"waited for data {wait_fraction:.0%}")
    seconds_left = self._speeds["train/step_seconds"] * (self._num_steps - step)
    parts.append(f"{datetime.timedelta(seconds=round(seconds_left))} left")
    return "  ".join(parts)


def _step_seconds_at_peak(
  config: Config, num_devices: int, device_kind: str
) -> float | None:
  """Returns the seconds of a training step at the devices' peak FLOP/s.

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
