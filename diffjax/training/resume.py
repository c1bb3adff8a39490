"""The config fields that may change between a checkpoint and the run that goes on from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from diffjax.config import OF_THE_RUN, Config, UserError
from diffjax.training.checkpoint import find_checkpoint
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


def check_workdir(workdir: epath.PathLike, config: Config) -> None:
  """Refuses to go on from the newest complete checkpoint if it is of another run, or of none. It reads the checkpoint's config alone.

  Raises:
    UserError: saying what differs; also if there are checkpoints, but all of them are damaged.
  """
  if (found := find_checkpoint(workdir, config_only=True)) is None:
    return
  if not found.data_state:
    raise UserError(
      f"the checkpoint in {workdir} holds parameters alone, as diffjax.convert writes them: to start from it, use another --workdir and "
      f"--config.train.init_from={workdir}"
    )
  check_resume(found.config, config.to_dict())


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
  differing = []
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
      differing.append(f"{field} was {before!r} and is {after!r}")
  if differing:
    raise UserError(
      f"the checkpoint in this workdir is of another run: {'; '.join(differing)}; use another --workdir or set them back"
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
