"""Compares the config of a run with the config of its checkpoint.

`diffjax/config.py` declares which fields may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etils import epath

from diffjax.config import FIELDS, Config, UserError
from diffjax.training.checkpoint import Checkpoint
from diffjax.training.optimizer import make_schedule


def check_checkpoint(
  checkpoint: Checkpoint, workdir: epath.PathLike, config: Config
) -> None:
  """Checks that a run can resume from a checkpoint of its workdir.

  Reads only the JSON of the checkpoint, no arrays.

  Args:
    checkpoint: The newest checkpoint of the workdir.
    workdir: The run's directory, for the message.
    config: The run's config.

  Raises:
    UserError: if the checkpoint has only parameters, or was written with
      another config.
  """
  if not checkpoint.data_state:
    raise UserError(
      f"the checkpoint in {workdir} holds parameters alone, as diffjax.convert"
      " writes them: to start from it, use another --workdir and"
      f" --config.train.init_from={workdir}"
    )
  check_resume(checkpoint.config, config.to_dict())


def check_resume(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
  """Checks that a run may resume with the differences between two configs.

  The model, tokenizer, optimizer, data and batch must be the same. The
  number of steps may differ: the learning rate's schedule then ends at the new
  last step. A field that an older checkpoint lacks counts as its default.

  Args:
    saved: The checkpoint's config as nested dicts.
    current: The run's config as nested dicts.

  Raises:
    UserError: if other fields differ. The message names all of them.
  """
  old_values = _with_defaults(saved)
  new_values = _with_defaults(current)
  changed_fields = []
  for field in sorted(old_values.keys() | new_values.keys()):
    is_same = old_values.get(field) == new_values.get(field)
    if not is_same and not _may_change(field, old_values, new_values):
      changed_fields.append(field)
  if not changed_fields:
    return

  if changed_fields == ["data.files"]:
    raise _other_files_error(old_values["data.files"], new_values["data.files"])
  changes = []
  for field in changed_fields:
    old_value = old_values.get(field)
    new_value = new_values.get(field)
    changes.append(f"{field} was {old_value!r} and is {new_value!r}")
  raise UserError(
    "the checkpoint in this workdir is of another run:"
    f" {'; '.join(changes)}; use another --workdir or set them back"
  )


def _may_change(
  field: str, old_values: Mapping[str, Any], new_values: Mapping[str, Any]
) -> bool:
  """Returns whether a run can resume with another value of a field.

  Args:
    field: The dotted name of the field.
    old_values: The checkpoint's config by dotted name.
    new_values: The run's config by dotted name.
  """
  if field == "data.num_workers":
    # The number of workers changes the order of streamed data. The batches of
    # prepared data depend only on the seed and the step.
    return old_values["data.mode"] == new_values["data.mode"] == "prepared"
  return field in FIELDS and FIELDS[field].may_change


def _other_files_error(old_files: int, new_files: int) -> UserError:
  """Returns the error for a run that would read another number of files.

  The user may not have set the number: by default, it follows from train.steps.
  """
  return UserError(
    f"config.data.files was {old_files} when the checkpoint in this workdir was"
    f" saved, and is {new_files}: the run would read other files. To continue"
    f" on the same files, pass --config.data.files={old_files}; to read"
    f" {new_files}, use another --workdir"
  )


def new_schedule(saved: Mapping[str, Any], config: Config, step: int) -> str:
  """Returns a message about a learning rate schedule with a new last step.

  Args:
    saved: The checkpoint's config as nested dicts.
    config: The run's config.
    step: The checkpoint's step.

  Returns:
    A sentence with the learning rates of both schedules at the step. "" if
    `train.steps` is unchanged.
  """
  old_steps = saved["train"]["steps"]
  new_steps = config.train.steps
  if old_steps == new_steps:
    return ""
  old_rate = float(make_schedule(config.optimizer, old_steps)(step))
  new_rate = float(make_schedule(config.optimizer, new_steps)(step))
  return (
    f"config.train.steps was {old_steps} and is {new_steps}: the learning"
    f" rate's schedule now ends there, and goes on at {new_rate:.3g}, not at"
    f" {old_rate:.3g}"
  )


def other_model(saved: Mapping[str, Any], config: Config) -> str:
  """Returns how a model differs from the model that had its parameters.

  Args:
    saved: The config that the parameters were saved with, as nested dicts.
    config: The config of the run that starts from these parameters.

  Returns:
    Clauses about the fields of `config.model` that differ, if they change what
    the model computes from the same parameters. "" if there are none.
  """
  old_values = _with_defaults(saved)
  new_values = _with_defaults(config.to_dict())
  changes = []
  for field, info in FIELDS.items():
    if not field.startswith("model.") or not info.changes_function:
      continue
    old_value = old_values[field]
    new_value = new_values[field]
    if old_value != new_value:
      changes.append(
        f"config.{field} is {new_value}, and was {old_value} there"
      )
  return "; ".join(changes)


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns all values by dotted name. Missing fields get their defaults."""
  return _by_dotted_name(Config().to_dict()) | _by_dotted_name(config)


def _by_dotted_name(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of nested dicts, such as {"train.steps": 100}."""
  values_by_name = {}
  for section, values in config.items():
    for name, value in values.items():
      values_by_name[f"{section}.{name}"] = value
  return values_by_name
