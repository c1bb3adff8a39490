"""Compares a run's config with that of the checkpoint that it starts from.

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
  """Checks that a run can continue from a checkpoint.

  Reads only the checkpoint's config.

  Args:
    checkpoint: the newest checkpoint of the workdir.
    workdir: the run's directory, for the message.
    config: the run's config.

  Raises:
    UserError: if it cannot.
  """
  if not checkpoint.data_state:
    raise UserError(
      f"the checkpoint in {workdir} holds parameters alone, as diffjax.convert"
      " writes them: to start from it, use another --workdir and"
      f" --config.train.init_from={workdir}"
    )
  check_resume(checkpoint.config, config.to_dict())


def check_resume(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
  """Checks that only fields that may change have changed.

  The model, tokenizer, optimizer, data and batch must be the same. `train.steps`
  may change: the schedule of the learning rate then ends at the new last step.
  A field that an older checkpoint lacks counts as its default.

  Args:
    saved: the checkpoint's config as nested dicts.
    current: the run's.

  Raises:
    UserError: with all fields that differ and may not.
  """
  old_values = _with_defaults(saved)
  new_values = _with_defaults(current)
  changes = {}
  for field in sorted(old_values.keys() | new_values.keys()):
    old_value = old_values.get(field)
    new_value = new_values.get(field)
    if old_value == new_value or _may_change(field, old_values, new_values):
      continue
    changes[field] = f"{field} was {old_value!r} and is {new_value!r}"
  if list(changes) == ["data.files"]:
    raise _other_files(old_values["data.files"], new_values["data.files"])
  if changes:
    raise UserError(
      "the checkpoint in this workdir is of another run:"
      f" {'; '.join(changes.values())}; use another --workdir or set them back"
    )


def _may_change(
  field: str, old_values: Mapping[str, Any], new_values: Mapping[str, Any]
) -> bool:
  """Returns True if a run can resume with another value of a field."""
  if field == "data.num_workers":
    # A prepared batch is a function of seed and step. The order of a stream
    # depends on its workers.
    return old_values["data.mode"] == new_values["data.mode"] == "prepared"
  return field in FIELDS and FIELDS[field].may_change


def _other_files(before: int, after: int) -> UserError:
  """Returns the error for a run that would read another number of files.

  The number follows from train.steps if the config leaves it at 0, so the user
  may not have set it.
  """
  return UserError(
    f"config.data.files was {before} when the checkpoint in this workdir was"
    f" saved, and is {after}: the run would read other files. To continue on the"
    f" same files, pass --config.data.files={before}; to read {after}, use"
    " another --workdir"
  )


def new_schedule(saved: Mapping[str, Any], config: Config, step: int) -> str:
  """Returns a sentence on how the schedule changes with `train.steps`.

  Args:
    saved: the checkpoint's config as nested dicts.
    config: the run's.
    step: the checkpoint's step.

  Returns:
    The sentence, or "" if `train.steps` is unchanged.
  """
  old_steps = saved["train"]["steps"]
  new_steps = config.train.steps
  if old_steps == new_steps:
    return ""
  old_rate = float(make_schedule(config.optimizer, old_steps)(step))
  new_rate = float(make_schedule(config.optimizer, new_steps)(step))
  return (
    f"config.train.steps was {old_steps} and is {new_steps}: the learning rate's"
    f" schedule now ends there, and goes on at {new_rate:.3g}, not at"
    f" {old_rate:.3g}"
  )


def other_model(saved: Mapping[str, Any], config: Config) -> str:
  """Returns a clause on how the model differs from the one it starts from.

  Args:
    saved: the config that the parameters were saved with, as nested dicts.
    config: the run's.

  Returns:
    All fields that differ and change what the model computes from its
    parameters. "" if there are none.
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
  """Returns values by dotted name. Missing fields have their defaults."""
  return _by_dotted_name(Config().to_dict()) | _by_dotted_name(config)


def _by_dotted_name(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of nested dicts, such as {"train.steps": 100}."""
  values_by_name = {}
  for section, values in config.items():
    for name, value in values.items():
      values_by_name[f"{section}.{name}"] = value
  return values_by_name
