"""The final metrics of a training run, from its workdir."""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from typing import Any

from diffjax.config import Config, UserError
from diffjax.training import manifest
from diffjax.training.metrics import read_log
from experiments import compatibility
from experiments.grid import comparable


def final_metrics(
  workdir: pathlib.Path, config: Config, location_fields: Collection[str]
) -> dict[str, float] | None:
  """Returns the last value of every metric of a finished training run.

  A run has finished if there is a checkpoint of the last step, and
  metrics.jsonl has the validation of that step. Both are required, because
  either of them can be missing if the disk was full.

  Args:
    workdir: The run's directory.
    config: The config of the run.
    location_fields: Config fields that are not compared, because they only say
      where data is.

  Returns:
    The metrics by name. None if the run has not finished.

  Raises:
    UserError: if the workdir has a checkpoint of another config.
  """
  checkpoint = _latest_checkpoint(workdir)
  if checkpoint is None:
    return None
  step, stored_config = checkpoint

  # `train.init_from` says where the pretrained run is.
  ignored_fields = [*location_fields, "train.init_from"]
  differences = compatibility.differing_fields(
    comparable(stored_config, ignored_fields),
    comparable(config.to_dict(), ignored_fields),
  )
  if differences:
    raise UserError(
      f"{workdir} holds a run of another config:"
      f" {compatibility.summarize(differences)}; choose another place with"
      " --workdir=DIR, or delete it"
    )
  if step != config.train.steps:
    return None
  return _last_values(workdir, step)


def _latest_checkpoint(
  workdir: pathlib.Path,
) -> tuple[int, dict[str, Any]] | None:
  """Returns the step and the config of the latest undamaged checkpoint."""
  checkpoint_dir = manifest.checkpoint_directory(workdir)
  for step in reversed(manifest.steps(checkpoint_dir)):
    step_dir = checkpoint_dir / str(step)
    try:
      manifest.verify(step_dir, step, contents=False)
      return step, manifest.read_json(step_dir)["config"]
    except manifest.Damage:
      continue
  return None


def _last_values(workdir: pathlib.Path, step: int) -> dict[str, float] | None:
  """Returns the last value of every metric in metrics.jsonl.

  Returns None if the validation of `step` is missing.
  """
  try:
    entries = read_log(workdir / "metrics.jsonl")
  except OSError:
    return None
  last_values: dict[str, float] = {}
  has_validation = False
  for entry in entries:
    if entry["step"] == step and "validation/loss" in entry:
      has_validation = True
    last_values.update(entry)
  if not has_validation:
    return None
  return last_values
