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
  """Prints a line for the user in process 0 alone. `say` prints in each."""
  if jax.process_index() == 0:
    say(message)


@dataclasses.dataclass
class _PendingStep:
  """A step that has been dispatched, but not logged yet.

  Attributes:
    step: the number of the step.
    metrics: its metrics, which may not have been computed yet.
    end: when it ended. None as long as that is not known.
  """

  step: int
  metrics: dict[str, jax.Array]
  end: Moment | None = None

  def is_over(self) -> bool:
    """Returns True if the step has ended, without waiting for it."""
    # All metrics become ready when the step ends. JAX's type stubs lack
    # `is_ready`, so the type is Any.
    metric: Any = self.metrics["skipped_in_a_row"]
    return metric.is_ready()


class RunLog:
  """Logs a run: writes metrics to files, and prints progress.

  Calls to JAX return before the device has computed. So the log keeps the
  metrics of each step, and fetches them after the next step has been
  dispatched. The device then never waits for the host.
  """

  def __init__(
    self,
    config: Config,
    workdir: str,
    mesh: Mesh,
    checkpoints: Checkpoints,
    *,
    start_step: int,
  ):
    """Opens the files, and shows the status line.

    Removes the lines of steps after `start_step` from metrics.jsonl, because
    the run takes these steps again. `MetricWriter` says what TensorBoard and
    W&B do with them.

    Args:
      config: the run's config.
      workdir: the run's directory, local or gs://.
      mesh: the devices that share a step.
      checkpoints: the run's checkpoints. If too many steps are skipped, the
        error names the last good one.
      start_step: the number of steps done before this process started: the
        step of the restored checkpoint, or 0.
    """
    self._config = config
    self._workdir = workdir
    self._checkpoints = checkpoints
    self._start_step = start_step
    self._metric_writer = MetricWriter(
      workdir,
      config.to_dict(),
      start_step=start_step,
      wandb_project=config.train.wandb_project,
      is_writer=jax.process_index() == 0,
    )
    self._status_line = StatusLine(
      config,
      start_step=start_step,
      num_devices=mesh.size,
      device_kind=mesh.devices.flat[0].device_kind,
    )
    # The last step that has been dispatched. None once it has been logged.
    self._pending: _PendingStep | None = None

  def add_wait(self, seconds: float) -> None:
    """Adds the time that a step has waited for its batch.

    Must be called when the batch is ready, before the step is dispatched. Also
    notes when the previous step ended, if it has.
    """
    pending = self._pending
    if pending is not None and pending.end is None and pending.is_over():
      # The step ended at some time before or during the wait. The log counts
      # the wait to the next step.
      pending.end = self._status_line.moment(seconds_ago=seconds)
      if pending.step == self._start_step + 1:
        # The first step includes the compilation. Speeds are measured from its
        # end.
        self._status_line.start_window(pending.step, pending.end)
    self._status_line.add_wait(seconds)

  def record_dispatched_step(
    self, step: int, metrics: dict[str, jax.Array]
  ) -> None:
    """Keeps a step's metrics, and logs the metrics of the previous step.

    Args:
      step: the number of the step that has just been dispatched.
      metrics: its metrics, which may not have been computed yet.

    Raises:
      UserError: as `flush`.
    """
    dispatched = _PendingStep(step, metrics)
    # On CPU, a dispatch may return only when the step is over.
    is_over = dispatched.is_over()
    self._status_line.add_step(step, is_over=is_over)
    if is_over:
      dispatched.end = self._status_line.moment()
    # Log the previous step.
    self.flush()
    self._pending = dispatched

  def flush(self) -> None:
    """Waits for the last step, and logs its metrics if they are due.

    They are due every `train.log_interval` steps, in the first and the last
    step, and if the optimizer has skipped the step because of a spike or NaN.
    Does nothing if this method has already been called for the last step.

    Raises:
      UserError: if `train.max_skipped_in_a_row` consecutive steps were skipped.
    """
    pending = self._pending
    if pending is None:
      return
    self._pending = None
    step = pending.step
    # Fetching one number waits for the step. The others are fetched if needed.
    num_in_a_row = int(jax.device_get(pending.metrics["skipped_in_a_row"]))
    is_skipped = num_in_a_row > 0
    train = self._config.train
    should_print = step % train.log_interval == 0 or step == train.steps
    # The first step is the first point in the plot of the loss.
    should_write = should_print or is_skipped or step == 1
    if not should_write:
      return

    metrics = jax.device_get(pending.metrics)
    values = _named_values(metrics)
    if should_print:
      # Adds the speeds to the values.
      values = self._status_line.report(step, values, pending.end)
    self._metric_writer.write(step, values)
    if is_skipped:
      self._report_skipped(step, metrics, num_in_a_row)

  def _report_skipped(
    self, step: int, metrics: dict[str, Any], num_in_a_row: int
  ) -> None:
    """Prints that a step was skipped, or ends the run after too many.

    Args:
      step: the number of the step.
      metrics: its metrics, on the host.
      num_in_a_row: the number of consecutive skipped steps up to this one.

    Raises:
      UserError: if that number has reached `train.max_skipped_in_a_row`.
    """
    reason = skip_reason(metrics)
    max_in_a_row = self._config.train.max_skipped_in_a_row
    if max_in_a_row > 0 and num_in_a_row >= max_in_a_row:
      message = self._too_many_skipped_message(step, num_in_a_row, reason)
      raise UserError(message)
    count = f"{int(metrics['skipped_steps'])} so far"
    if num_in_a_row > 1:
      count += f", {num_in_a_row} in a row"
    note(f"step {step}: update skipped ({reason}); {count}, training continues")

  def _too_many_skipped_message(
    self, step: int, num_in_a_row: int, reason: str
  ) -> str:
    """Returns the error message for too many skipped steps in a row.

    It names the last checkpoint before the skipped steps, and how to continue
    from it.

    Args:
      step: the last step that was skipped.
      num_in_a_row: the number of consecutive skipped steps up to it.
      reason: why it was skipped, from `skip_reason`.
    """
    first_skipped = step - num_in_a_row + 1
    checkpoint_step = self._checkpoints.newest(before=first_skipped)
    if checkpoint_step is None:
      # A checkpoint of a skipped step is also good: a skipped step changes no
      # parameter.
      checkpoint_step = self._checkpoints.newest()

    checkpoint = "there is no checkpoint"
    flags = "--workdir=NEW"
    if checkpoint_step is not None:
      path = epath.Path(self._workdir) / "checkpoints" / str(checkpoint_step)
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

  def add_evaluation(
    self, step: int, scores: dict[str, float], num_rows: int
  ) -> None:
    """Logs the losses of an evaluation. Its time does not count in speeds.

    Prints one line, or after the last step a table that explains the losses.

    Args:
      step: the number of steps done.
      scores: the losses by the names under which they are logged.
      num_rows: the number of validation rows that were measured.
    """
    self._metric_writer.write(step, scores)
    is_last = step >= self._config.train.steps
    # There are no losses if no validation token has weight.
    if scores and is_last:
      text = validation.format_table(scores, num_rows)
      self._status_line.note(step, text)
    elif scores:
      text = validation.format_line(scores, num_rows)
      self._status_line.note(step, text)
    self._status_line.restart_window(step)

  def add_save(self, step: int) -> None:
    """Notes a save. The time before this call does not count in speeds."""
    self._status_line.restart_window(step)

  def end_status_line(self) -> None:
    """Stops updating the status line, before other output follows."""
    self._status_line.close()

  def close(self) -> None:
    """Stops updating the status line, and closes the files."""
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
    is_layer_metric = np.ndim(value) == 1
    if is_layer_metric:
      for layer, number in enumerate(value):
        values[f"{name}/layer_{layer:02d}"] = float(number)
    else:
      values[f"train/{name}"] = float(value)
  return values
