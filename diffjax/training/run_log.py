"""The log of a run: metrics to files, its progress to the terminal, and skipped steps to its user."""

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
  """A line for the user, from the first of several processes alone."""
  if jax.process_index() == 0:
    say(message)


@dataclasses.dataclass
class _Pending:
  """A step that has been dispatched, and is not logged yet.

  Attributes:
    step: its number.
    results: its metrics, which may not have been computed yet.
    end: the moment when it ended; None if it was not seen to end.
  """

  step: int
  results: dict[str, jax.Array]
  end: Moment | None = None

  def is_over(self) -> bool:
    """Returns True if the step has ended, without waiting for it."""
    return self.results["skipped_in_a_row"].is_ready()  # type: ignore[attr-defined]


class RunLog:
  """The log of a run. A step's metrics are fetched once the next step has been dispatched, so that the device never waits for the host."""

  def __init__(
    self,
    config: Config,
    workdir: str,
    mesh: Mesh,
    checkpoints: Checkpoints,
    *,
    first_step: int,
  ):
    """Opens the files and the terminal's line.

    Args:
      config: The run's config.
      workdir: The run's directory, local or gs://.
      mesh: The devices that share a step.
      checkpoints: The run's, which name the last good one if too many steps are skipped.
      first_step: Steps done before this process began; what the files hold of later ones is dropped.
    """
    self._config, self._workdir, self._checkpoints = (
      config,
      workdir,
      checkpoints,
    )
    self._metrics = MetricWriter(
      workdir,
      config.to_dict(),
      resume_step=first_step,
      wandb_project=config.train.wandb_project,
      is_writer=jax.process_index() == 0,
    )
    self._status = StatusLine(
      config,
      first_step=first_step,
      num_devices=mesh.size,
      device_kind=mesh.devices.flat[0].device_kind,
    )
    self._first_step = first_step
    self._pending: _Pending | None = None

  def batch_ready(self, waited: float) -> None:
    """Notes whether the last step has ended. Call it before the next dispatch.

    Args:
      waited: Seconds that the next step waited for its batch.
    """
    pending = self._pending
    if pending is None or pending.end is not None or not pending.is_over():
      return
    # It was not seen to end. It is taken to have ended before the wait, which
    # `stepped` will add to the status line.
    pending.end = self._status.moment(ago=waited)
    if pending.step == self._first_step + 1:
      # Neither its beginning, after compiling, nor its end was seen exactly.
      self._status.measure_from(pending.step, pending.end)

  def stepped(
    self, step: int, measured: dict[str, jax.Array], waited: float
  ) -> None:
    """Takes the metrics of a step that has been dispatched, and logs those of the step before.

    Args:
      step: Steps dispatched so far.
      measured: The step's metrics, which may not have been computed yet.
      waited: Seconds that the step waited for its batch.

    Raises:
      UserError: as `flush`.
    """
    dispatched = _Pending(step, measured)
    # A dispatch may return when the step is over, as on CPU.
    is_over = dispatched.is_over()
    self._status.stepped(step, waited, is_over=is_over)
    if is_over:
      dispatched.end = self._status.moment()
    self.flush()
    self._pending = dispatched

  def flush(self) -> None:
    """Logs the metrics of the last step.

    Raises:
      UserError: if `train.max_skipped_in_a_row` steps in a row have been skipped.
    """
    if self._pending is None:
      return
    pending, self._pending = self._pending, None
    step, results = pending.step, pending.results
    train = self._config.train
    in_a_row = int(jax.device_get(results["skipped_in_a_row"]))
    reporting = step % train.log_interval == 0 or step == train.steps
    if in_a_row or reporting or step == 1:  # a plot begins where training does
      measured = jax.device_get(results)
      values = _by_layer(measured)
      self._metrics.write(
        step,
        self._status.report(step, values, pending.end) if reporting else values,
      )
    if not in_a_row:
      return
    reason = skip_reason(measured)
    if 0 < train.max_skipped_in_a_row <= in_a_row:
      raise UserError(self._too_many_skipped(step, in_a_row, reason))
    count = f"{int(measured['skipped_steps'])} so far"
    if in_a_row > 1:
      count += f", {in_a_row} in a row"
    note(f"step {step}: update skipped ({reason}); {count}, training continues")

  def evaluated(self, step: int, scores: dict[str, float], rows: int) -> None:
    """Logs the losses of an evaluation and excludes its time from the speeds.

    Args:
      step: Steps done so far.
      scores: The losses by the names that they are logged under.
      rows: Number of validation rows that were measured.
    """
    self._metrics.write(step, scores)
    is_last = step >= self._config.train.steps
    if scores and is_last:
      self._status.note(step, validation.explained(scores, rows))
    elif scores:
      self._status.note(step, validation.one_line(scores, rows))
    self._status.restart_window(step)

  def saved(self, step: int) -> None:
    """Excludes the time of a save from the speeds."""
    self._status.restart_window(step)

  def end_line(self) -> None:
    """Ends the terminal's live line."""
    self._status.close()

  def close(self) -> None:
    """Ends the line and closes the files."""
    self._status.close()
    self._metrics.close()

  def _too_many_skipped(self, step: int, in_a_row: int, reason: str) -> str:
    good = self._checkpoints.newest(before=step - in_a_row + 1)
    if (
      good is None
    ):  # one saved among the skipped steps is as good: they change no parameter
      good = self._checkpoints.newest()
    checkpoint = (
      f"the last good checkpoint is {epath.Path(self._workdir) / 'checkpoints' / str(good)}"
      if good is not None
      else "there is no checkpoint"
    )
    return (
      f"stopped at step {step}: {in_a_row} steps in a row were skipped (config.train.max_skipped_in_a_row), the last one has "
      f"{reason}; {checkpoint}. Lower config.optimizer.learning_rate or change config.data.seed, "
      + (
        f"with --workdir=NEW --config.train.init_from={self._workdir}; "
        if good is not None
        else "with --workdir=NEW; "
      )
      + "if the loss or the norm has only moved to another level, go on with config.optimizer.spike_sigmas raised, or 0"
    )


def _by_layer(measured: dict[str, Any]) -> dict[str, float]:
  """Returns a step's metrics by the names under which they are logged.

  The metrics of layers [L], such as λ, have a name for each layer.

  Example: {"loss": 2.5, "lambda": [0.2, 0.4]} → {"train/loss": 2.5,
  "lambda/layer_00": 0.2, "lambda/layer_01": 0.4}
  """
  values: dict[str, float] = {}
  for name, value in measured.items():
    if np.ndim(value) == 0:
      values[f"train/{name}"] = float(value)
      continue
    for layer, number in enumerate(value):
      values[f"{name}/layer_{layer:02d}"] = float(number)
  return values
