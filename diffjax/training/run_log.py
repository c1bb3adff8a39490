"""The log of a run: metrics in files, and progress on the terminal."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from diffjax.config import Config, UserError
from diffjax.host.progress import say
from diffjax.training import validation
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.metrics import MetricWriter
from diffjax.training.optimizer import skip_reason
from diffjax.training.status_line import Moment, StatusLine


def note(message: str) -> None:
  """Prints a line for the user. Only process 0 prints."""
  if jax.process_index() == 0:
    say(message)


@dataclasses.dataclass
class _PendingStep:
  """A step that has been dispatched, but not logged yet.

  Attributes:
    step: its number.
    metrics: its metrics, which may not have been computed yet.
    end: when it ended. None if that is not known.
  """

  step: int
  metrics: dict[str, jax.Array]
  end: Moment | None = None

  def is_over(self) -> bool:
    """Returns True if the step has ended, without waiting for it."""
    # JAX's type stubs lack `is_ready`.
    metric: Any = self.metrics["skipped_in_a_row"]
    return metric.is_ready()


class RunLog:
  """The log of a run.

  The metrics of a step are fetched after the next step has been dispatched, so
  the device never waits for the host.
  """

  def __init__(
    self,
    config: Config,
    workdir: str,
    mesh: Mesh,
    checkpoints: Checkpoints,
    *,
    first_step: int,
  ):
    """Opens the files and starts the status line.

    Drops the lines of steps after `first_step` from the files.

    Args:
      config: the run's config.
      workdir: the run's directory, local or gs://.
      mesh: the devices that share a step.
      checkpoints: the run's checkpoints. If too many steps are skipped, the
        error names the last good one.
      first_step: the number of steps done before this process started.
    """
    self._config = config
    self._workdir = workdir
    self._checkpoints = checkpoints
    self._first_step = first_step
    self._metric_writer = MetricWriter(
      workdir,
      config.to_dict(),
      resume_step=first_step,
      wandb_project=config.train.wandb_project,
      is_writer=jax.process_index() == 0,
    )
    self._status_line = StatusLine(
      config,
      first_step=first_step,
      num_devices=mesh.size,
      device_kind=mesh.devices.flat[0].device_kind,
    )
    self._pending: _PendingStep | None = None
    # Seconds that the next step has waited for its batch.
    self._seconds_waited = 0.0

  def batch_ready(self, seconds_waited: float) -> None:
    """Checks whether the previous step has ended.

    Must be called when the batch of a step is ready, before its dispatch.

    Args:
      seconds_waited: how long the step has waited for its batch.
    """
    self._seconds_waited = seconds_waited
    pending = self._pending
    if pending is None or pending.end is not None or not pending.is_over():
      return
    # It is not known when the step ended during the wait. The log assumes that
    # it ended at the start of the wait.
    pending.end = self._status_line.moment(seconds_ago=seconds_waited)
    if pending.step == self._first_step + 1:
      # The start of the first step, after compilation, is not known either. So
      # the first step does not count.
      self._status_line.measure_from(pending.step, pending.end)

  def stepped(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Logs the metrics of the previous step, and keeps those of this step.

    Args:
      step: the number of the step that has just been dispatched.
      metrics: its metrics, which may not have been computed yet.

    Raises:
      UserError: as `flush`.
    """
    dispatched = _PendingStep(step, metrics)
    # On CPU, a dispatch may return only when the step is over.
    is_over = dispatched.is_over()
    self._status_line.stepped(step, self._seconds_waited, is_over=is_over)
    if is_over:
      dispatched.end = self._status_line.moment()
    self.flush()
    self._pending = dispatched

  def flush(self) -> None:
    """Logs the metrics of the last step, and reports it if it was skipped.

    Raises:
      UserError: if `train.max_skipped_in_a_row` consecutive steps were skipped.
    """
    if self._pending is None:
      return
    pending = self._pending
    self._pending = None
    step = pending.step
    # Fetching one number waits for the step.
    num_in_a_row = int(jax.device_get(pending.metrics["skipped_in_a_row"]))

    train = self._config.train
    should_report = step % train.log_interval == 0 or step == train.steps
    # The first step is written as the first point of the plot of the loss.
    if should_report or num_in_a_row > 0 or step == 1:
      metrics = jax.device_get(pending.metrics)
      values = _named_values(metrics)
      if should_report:
        values = self._status_line.report(step, values, pending.end)
      self._metric_writer.write(step, values)
      if num_in_a_row > 0:
        self._report_skipped(step, metrics, num_in_a_row)

  def _report_skipped(
    self, step: int, metrics: dict[str, Any], num_in_a_row: int
  ) -> None:
    """Prints that a step was skipped. Raises UserError if there are too many."""
    reason = skip_reason(metrics)
    max_in_a_row = self._config.train.max_skipped_in_a_row
    if max_in_a_row > 0 and num_in_a_row >= max_in_a_row:
      raise UserError(self._too_many_skipped(step, num_in_a_row, reason))
    count = f"{int(metrics['skipped_steps'])} so far"
    if num_in_a_row > 1:
      count += f", {num_in_a_row} in a row"
    note(f"step {step}: update skipped ({reason}); {count}, training continues")

  def _too_many_skipped(self, step: int, num_in_a_row: int, reason: str) -> str:
    """Returns the message of the error that ends the run."""
    first_skipped = step - num_in_a_row + 1
    good_step = self._checkpoints.newest(before=first_skipped)
    if good_step is None:
      # A checkpoint of a skipped step is also good: a skipped step changes no
      # parameter.
      good_step = self._checkpoints.newest()

    checkpoint = "there is no checkpoint"
    flags = "--workdir=NEW"
    if good_step is not None:
      path = epath.Path(self._workdir) / "checkpoints" / str(good_step)
      checkpoint = f"the last good checkpoint is {path}"
      flags += f" --config.train.init_from={self._workdir}"
    return (
      f"stopped at step {step}: {num_in_a_row} steps in a row were skipped"
      " (config.train.max_skipped_in_a_row), the last one has"
      f" {reason}; {checkpoint}."
      " Lower config.optimizer.learning_rate or change config.data.seed, with"
      f" {flags}. If the loss or the norm has only moved to another level,"
      " continue with a higher config.optimizer.spike_sigmas, or 0"
    )

  def evaluated(self, step: int, scores: dict[str, float], rows: int) -> None:
    """Logs the losses of an evaluation. Speeds do not include its time.

    Args:
      step: the number of steps done.
      scores: the losses by the names under which they are logged.
      rows: the number of validation rows that were measured.
    """
    self._metric_writer.write(step, scores)
    is_last = step >= self._config.train.steps
    if scores and is_last:
      self._status_line.note(step, validation.explained(scores, rows))
    elif scores:
      self._status_line.note(step, validation.one_line(scores, rows))
    self._status_line.restart_window(step)

  def saved(self, step: int) -> None:
    """Excludes the time of a save from the speeds."""
    self._status_line.restart_window(step)

  def end_line(self) -> None:
    """Ends the status line on the terminal."""
    self._status_line.close()

  def close(self) -> None:
    """Ends the status line and closes the files."""
    self._status_line.close()
    self._metric_writer.close()


def _named_values(metrics: dict[str, Any]) -> dict[str, float]:
  """Returns a step's metrics by the names under which they are logged.

  A metric of the layers [L], such as λ, has a name for each layer.

  Example: {"loss": 2.5, "lambda": [0.2, 0.4]} → {"train/loss": 2.5,
  "lambda/layer_00": 0.2, "lambda/layer_01": 0.4}
  """
  values: dict[str, float] = {}
  for name, value in metrics.items():
    if np.ndim(value) == 0:
      values[f"train/{name}"] = float(value)
      continue
    for layer, number in enumerate(value):
      values[f"{name}/layer_{layer:02d}"] = float(number)
  return values
