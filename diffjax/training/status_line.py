"""The line of a training run on the terminal, and the measurement of its speed."""

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
_NOTABLE_WAIT = 0.01


class Moment(NamedTuple):
  """A time in a run.

  Attributes:
    seconds: the clock's.
    waited: seconds waited for batches since the run began.
  """

  seconds: float
  waited: float


class StatusLine:
  """The step, loss and speed of a run: a live line on a terminal, else one plain line per report. Only process 0 prints.

  Speeds are means over the steps since the report before, from the end of one
  step to the end of another, without compilation, evaluation and saving.
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
      config: The run's config.
      first_step: Steps done before this process began.
      num_devices: Devices that share a step.
      device_kind: Their `jax.Device.device_kind`; MFU is reported if its peak is known.
      file: Where to print; stdout by default.
    """
    self._total, self._step = config.train.steps, first_step
    self._tokens = config.train.batch_size * config.data.length
    peak = peak_flops(device_kind)
    self._least_seconds = (
      None
      if peak is None
      else (
        step_flops(
          config.model,
          config.data.length,
          self._tokens,
          frozen_names(config.optimizer),
        ).training
        / (peak * num_devices)
      )
    )
    self._rates: dict[str, float] = {}
    # The step whose end begins the window, and that moment.
    self._window: tuple[int, Moment] | None = None
    self._waited = 0.0
    # soft_wrap: rich must not break a plain line at the 80 columns that it assumes of a pipe.
    self._console = rich.console.Console(
      file=file, quiet=jax.process_index() != 0, highlight=False, soft_wrap=True
    )
    self._bar: rich.progress.Progress | None = None
    if self._console.is_terminal and not self._console.quiet:
      self._bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.completed}/{task.total}"),
        rich.progress.BarColumn(bar_width=10),
        rich.progress.TextColumn("{task.fields[status]}"),
        console=self._console,
      )
      self._task = self._bar.add_task(
        "", total=self._total, completed=first_step, status="compiling …"
      )
      self._bar.start()
      atexit.register(
        self.close
      )  # or an error would leave the terminal without a cursor

  def stepped(
    self, step: int, waited: float = 0.0, *, is_over: bool = False
  ) -> None:
    """Call it once a step is dispatched.

    Args:
      step: Steps dispatched so far.
      waited: Seconds that the step waited for its batch.
      is_over: True if the step has also ended, as it has where a dispatch
        blocks.
    """
    self._waited += waited
    if self._window is None:
      # The first step has been compiled, and has just begun to run or just ended.
      self._window = (step if is_over else step - 1, self.moment())
      if self._bar is not None:
        self._bar.update(
          self._task, status="training …"
        )  # until the first report
    self._step = step
    if self._bar is not None:
      self._bar.update(self._task, completed=step)

  def moment(self, seconds_ago: float = 0.0) -> Moment:
    """Returns the moment some seconds ago."""
    return Moment(time.perf_counter() - seconds_ago, self._waited)

  def measure_from(self, step: int, end: Moment) -> None:
    """Excludes the time before the end of a step from the speeds."""
    self._window = (step, end)

  def report(
    self, step: int, values: Mapping[str, float], end: Moment | None = None
  ) -> dict[str, float]:
    """Call it with a step's metrics, once they have been fetched (and so the step is over).

    Args:
      step: The step that they belong to.
      values: Its metrics; "train/loss" is shown.
      end: The moment when the step ended; None if it has ended just now.

    Returns:
      The metrics with the speeds: "train/tokens_per_second", "train/step_seconds", "train/wait_fraction" (the share of the time
      spent waiting for data) and, on known chips, "train/mfu". If no step has
      been measured yet, without speeds.
    """
    if end is None:
      end = self.moment()
    if self._window is not None and step > self._window[0]:
      done, start = self._window
      window_seconds = max(end.seconds - start.seconds, 1e-9)
      seconds = window_seconds / (step - done)
      waited = end.waited - start.waited
      self._rates = {
        "train/tokens_per_second": self._tokens / seconds,
        "train/step_seconds": seconds,
        "train/wait_fraction": min(waited / window_seconds, 1.0),
      }
      if self._least_seconds is not None:
        self._rates["train/mfu"] = self._least_seconds / seconds
      self.measure_from(step, end)
    status = self._status(step, values.get("train/loss", math.nan))
    if self._bar is not None:
      self._bar.update(self._task, status=status)
    else:
      self._console.print(f"step {step}/{self._total}  {status}", markup=False)
    return {**values, **self._rates}

  def note(self, step: int, text: str) -> None:
    """Prints text that stays, such as the losses of an evaluation."""
    self._console.print(f"step {step}/{self._total}  {text}", markup=False)

  def restart_window(self, step: int) -> None:
    """Excludes the time before this moment from the speeds.

    Args:
      step: The steps done so far, which are all over.
    """
    if self._window is not None:
      self.measure_from(step, self.moment())

  def close(self) -> None:
    """Ends the live line."""
    if self._bar is not None:
      self._bar.stop()
      self._bar = None
      atexit.unregister(self.close)

  def _status(self, step: int, loss: float) -> str:
    parts = [f"loss {loss:.4f}"]
    if not self._rates:
      return parts[0]
    tokens_per_second = short_number(self._rates["train/tokens_per_second"])
    parts.append(f"{tokens_per_second} tokens/s")
    if "train/mfu" in self._rates:
      parts.append(f"MFU {self._rates['train/mfu']:.1%}")
    waited = self._rates["train/wait_fraction"]
    if waited >= _NOTABLE_WAIT:
      parts.append(f"waited for data {waited:.0%}")
    seconds = self._rates["train/step_seconds"] * (self._total - step)
    parts.append(f"{datetime.timedelta(seconds=round(seconds))} left")
    return "  ".join(parts)
