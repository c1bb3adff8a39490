"""The config fields that may change between a checkpoint and the run that goes on from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from diffjax.config import OF_THE_RUN, Config, UserError
from diffjax.training.checkpoint import Checkpoint
from diffjax.training.optimizer import make_schedule

# A name ending in "." is a section.
_MAY_CHANGE = (
  "mesh.",
  "eval.",
  "train.steps",
  "optimizer.spike_sigmas",
  "train.max_skipped_in_a_row",
  "train.log_interval",
  "train.checkpoint_interval",
  "train.keep_checkpoints",
  "train.profile_step",
  "train.profile_steps",
  "train.wandb_project",
  "train.sample_prompt",
  "train.sample_tokens",
  "train.init_from",
  "train.loss_chunk",
  "data.prepared_dir",
  "data.timeout",
  "model.attention_implementation",
  "model.remat",
)
# Fields of the model that do not change what it computes from its parameters.
_SAME_FUNCTION = ("model.max_length", *(f"model.{name}" for name in OF_THE_RUN))


def check_checkpoint(
  checkpoint: Checkpoint, workdir: epath.PathLike, config: Config
) -> None:
  """Raises UserError if a run cannot continue from a checkpoint.

  Reads only the checkpoint's config.

  Args:
    checkpoint: The newest checkpoint of the workdir.
    workdir: The run's directory, for the message.
    config: The run's config.
  """
  if not checkpoint.data_state:
    raise UserError(
      f"the checkpoint in {workdir} holds parameters alone, as diffjax.convert writes them: to start from it, use another --workdir and "
      f"--config.train.init_from={workdir}"
    )
  check_resume(checkpoint.config, config.to_dict())


def check_resume(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
  """Refuses to go on from a checkpoint of another model, tokenizer, optimizer, data or batch.

  `train.steps` may change; the learning rate's schedule then ends at the new last step. A field that the checkpoint, being older,
  does not have counts as its default.

  Args:
    saved: The checkpoint's config as nested dicts.
    current: The run's.

  Raises:
    UserError: listing every field that differs and may not.
  """
  old, new, default = (
    dict(_fields(config)) for config in (saved, current, Config().to_dict())
  )
  differing: dict[str, str] = {}
  for field in sorted({*old, *new}):
    before, after = (
      old.get(field, default.get(field)),
      new.get(field, default.get(field)),
    )
    may_change = (
      field in _MAY_CHANGE or f"{field.partition('.')[0]}." in _MAY_CHANGE
    )
    if field == "data.num_workers":
      # A prepared batch is a function of seed and step; a stream's order depends on its workers.
      may_change = old.get("data.mode") == new.get("data.mode") == "prepared"
    if before != after and not may_change:
      differing[field] = f"{field} was {before!r} and is {after!r}"
  if list(differing) == ["data.files"]:
    raise _other_files(saved, current)
  if differing:
    changes = "; ".join(differing.values())
    raise UserError(
      f"the checkpoint in this workdir is of another run: {changes}; use another --workdir or set them back"
    )


def _other_files(
  saved: Mapping[str, Any], current: Mapping[str, Any]
) -> UserError:
  """Returns the error for a run that would read another number of files.

  The number follows from train.steps if the config leaves it at 0, so the user
  may not have set it.
  """
  before = saved["data"].get("files", 0)
  after = current["data"]["files"]
  return UserError(
    f"config.data.files was {before} when the checkpoint in this workdir was"
    f" saved, and is {after}: the run would read other files. To continue on the"
    f" same files, pass --config.data.files={before}; to read {after}, use"
    " another --workdir"
  )


def new_schedule(saved: Mapping[str, Any], config: Config, step: int) -> str:
  """What another `train.steps` does to the learning rate, in a sentence; "" if it is the checkpoint's own.

  Args:
    saved: The checkpoint's config as nested dicts.
    config: The run's.
    step: The checkpoint's step.
  """
  before, now = saved["train"]["steps"], config.train.steps
  if before == now:
    return ""
  old, new = (
    float(make_schedule(config.optimizer, steps)(step))
    for steps in (before, now)
  )
  return f"config.train.steps was {before} and is {now}: the learning rate's schedule now ends there, and goes on at {new:.3g}, not at {old:.3g}"


def other_model(saved: Mapping[str, Any], config: Config) -> str:
  """The fields of the model that differ between a run and the one whose parameters it starts from, in a clause; "" if none does.

  Args:
    saved: The config that the parameters were saved with, as nested dicts.
    config: The run's.
  """
  default, new = (
    dict(_fields({"model": config.to_dict()["model"]}))
    for config in (Config(), config)
  )
  old = default | dict(_fields({"model": saved["model"]}))
  changed = [
    f"config.{field} is {new[field]}, and was {old[field]} there"
    for field in new
    if field not in _SAME_FUNCTION and new[field] != old[field]
  ]
  return "; ".join(changed)


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  for section, values in config.items():
    for name, value in values.items():
      yield f"{section}.{name}", value
