"""Lists, verifies and prunes the checkpoints of a run.

    python -m diffjax.checkpoints --workdir=runs/tiny
    python -m diffjax.checkpoints --workdir=runs/tiny --verify
    python -m diffjax.checkpoints --workdir=runs/tiny --prune --keep=1

Without further flags, it lists the checkpoints and compares the sizes of their
files. --verify reads the files. --prune deletes incomplete checkpoints, and all
complete ones except the newest (--keep of them) and the best by validation
loss.
"""

from __future__ import annotations

if __name__ == "__main__":
  # This comes before the slow imports, so that Ctrl-C also ends the command
  # during them.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import app, flags
from etils import epath

from diffjax.cli import command
from diffjax.config import UserError
from diffjax.host.lock import lock
from diffjax.training import manifest

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "The run's directory; local or gs://."
)
_VERIFY = flags.DEFINE_bool(
  "verify",
  False,
  "Read every file, and exit with 1 if a checkpoint is not complete.",
)
_PRUNE = flags.DEFINE_bool(
  "prune",
  False,
  "Delete incomplete checkpoints, and all but the newest --keep and the best.",
)
_KEEP = flags.DEFINE_integer(
  "keep", 3, "With --prune: newest complete checkpoints to keep.", lower_bound=1
)

_MIB = 2**20


class _VerifiedSteps(NamedTuple):
  """The checkpoints of a run, by step.

  Attributes:
    manifests: The manifest of each complete checkpoint: its metrics, and the
      sizes and hashes of its files.
    damages: What is wrong with each incomplete checkpoint.
  """

  manifests: dict[int, dict[str, Any]]
  damages: dict[int, str]


def main() -> None:
  """Lists, verifies or prunes the checkpoints in --workdir."""
  if not _WORKDIR.value:
    raise app.UsageError("pass --workdir=DIR: the directory of a run")
  directory = manifest.checkpoint_directory(_WORKDIR.value)
  if not directory.exists():
    raise UserError(
      f"there are no checkpoints in {_WORKDIR.value}: {directory} is missing"
    )
  if _PRUNE.value:
    with lock(_WORKDIR.value):
      _prune(directory, keep=_KEEP.value)
  else:
    _print_list(directory, verify=_VERIFY.value)


def _verify_steps(directory: epath.Path, *, contents: bool) -> _VerifiedSteps:
  """Checks which checkpoints are complete.

  Args:
    directory: The directory of the checkpoints.
    contents: Whether to read the files. If False, only their sizes are checked.
  """
  manifests = {}
  damages = {}
  for step in manifest.steps(directory):
    path = directory / str(step)
    try:
      manifests[step] = manifest.verify(path, step, contents=contents)
    except manifest.Damage as damage:
      damages[step] = str(damage)
  return _VerifiedSteps(manifests, damages)


def _print_list(directory: epath.Path, *, verify: bool) -> None:
  """Prints a table of the checkpoints, and the names of unfinished saves.

  Args:
    directory: The directory of the checkpoints.
    verify: Whether to read all files, and to raise UserError if a checkpoint is
      not complete.
  """
  manifests, damages = _verify_steps(directory, contents=verify)
  unfinished_saves = manifest.unfinished_saves(directory)
  if not (manifests or damages or unfinished_saves):
    raise UserError(f"there are no checkpoints in {directory}")

  _print_row("step", "saved", "MiB", manifest.BEST_SCORE, "state")
  newest = max(manifests, default=None)
  best = manifest.best(manifests)
  for step in sorted([*manifests, *damages]):
    if step in damages:
      _print_row(str(step), "", "", "", f"not complete: {damages[step]}")
      continue
    state = "complete"
    if step == newest:
      state += ", newest"
    if step == best:
      state += ", best"
    _print_complete_row(step, manifests[step], state)
  for path in unfinished_saves:
    print(f"{path.name}: a save that is under way, or was interrupted")

  if verify and damages:
    incomplete_steps = ", ".join(str(step) for step in damages)
    raise UserError(f"not complete: {incomplete_steps}")


def _print_complete_row(
  step: int, content: Mapping[str, Any], state: str
) -> None:
  """Prints the table's row of a complete checkpoint.

  Args:
    step: The checkpoint's step.
    content: Its manifest.
    state: The last column, such as "complete, newest".
  """
  saved = ""
  # Manifests of older versions have no time.
  if "time" in content:
    local_time = time.localtime(content["time"])
    saved = time.strftime("%Y-%m-%d %H:%M", local_time)
  num_bytes = sum(file["size"] for file in content["files"].values())
  loss = content["metrics"].get(manifest.BEST_SCORE)
  loss_text = "" if loss is None else f"{loss:.4f}"
  _print_row(str(step), saved, f"{num_bytes / _MIB:.1f}", loss_text, state)


def _print_row(
  step: str, saved: str, mebibytes: str, loss: str, state: str
) -> None:
  """Prints a row of the table."""
  print(f"{step:>10}  {saved:<16}  {mebibytes:>10}  {loss:<15}  {state}")


def _prune(directory: epath.Path, *, keep: int) -> None:
  """Deletes unfinished saves, and incomplete and old checkpoints.

  Prints the path of each one, and why it is deleted.

  Args:
    directory: The directory of the checkpoints.
    keep: How many of the newest complete checkpoints to keep. The best one is
      kept too.
  """
  manifests, damages = _verify_steps(directory, contents=True)
  if not manifests:
    raise UserError(
      f"no checkpoint in {directory} is complete: nothing is deleted, since one"
      " may be worth repairing"
    )
  all_steps = [*manifests, *damages]
  steps_to_delete = manifest.steps_to_prune(manifests, all_steps, keep=keep)
  try:
    for path in manifest.unfinished_saves(directory):
      print(f"deleting {path}: a save that was interrupted")
      manifest.delete(path)
    for step in steps_to_delete:
      path = directory / str(step)
      reason = damages.get(step, "neither the best nor among the newest")
      print(f"deleting {path}: {reason}", flush=True)
      manifest.delete(path)
  except OSError as error:
    raise UserError(f"cannot delete: {error}") from error


if __name__ == "__main__":
  command.run(main, with_config=False)
