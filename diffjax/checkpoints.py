"""Lists, verifies and prunes a run's checkpoints.

    python -m diffjax.checkpoints --workdir=runs/tiny              # what there is
    python -m diffjax.checkpoints --workdir=runs/tiny --verify
    python -m diffjax.checkpoints --workdir=runs/tiny --prune --keep=1

A list compares the sizes of the files; --verify reads them. --prune deletes what is not complete, and every complete checkpoint but the
newest --keep and the best by validation loss.
"""

if __name__ == "__main__":
  # Before the other imports, which take a while: Ctrl-C ends them too.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import time

from absl import app, flags

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
  "Delete what is not complete, and all but the newest --keep and the best.",
)
_KEEP = flags.DEFINE_integer(
  "keep", 3, "With --prune: newest complete checkpoints to keep.", lower_bound=1
)


def main() -> None:
  """Lists, verifies or prunes the checkpoints of the flags."""
  if not _WORKDIR.value:
    raise app.UsageError("pass --workdir=DIR: the directory of a run")
  directory = manifest.checkpoint_directory(_WORKDIR.value)
  if not directory.exists():
    raise UserError(
      f"there are no checkpoints in {_WORKDIR.value}: {directory} is missing"
    )
  if _PRUNE.value:
    with lock(_WORKDIR.value):
      _prune(directory)
  else:
    _list(directory)


def _inspect(directory, contents: bool) -> tuple[dict, dict]:
  """The manifests of the complete steps, and why the others are not complete."""
  manifests, damages = {}, {}
  for step in manifest.steps(directory):
    try:
      manifests[step] = manifest.verify(
        directory / str(step), step, contents=contents
      )
    except manifest.Damage as damage:
      damages[step] = str(damage)
  return manifests, damages


def _list(directory) -> None:
  manifests, damages = _inspect(directory, contents=_VERIFY.value)
  temporaries = manifest.temporaries(directory)
  if not (manifests or damages or temporaries):
    raise UserError(f"there are no checkpoints in {directory}")
  print(
    f"{'step':>10}  {'saved':<16}  {'MiB':>10}  {'validation/loss':<15}  state"
  )
  for step in sorted({*manifests, *damages}):
    if step in damages:
      print(
        f"{step:>10}  {'':<16}  {'':>10}  {'':<15}  not complete: {damages[step]}"
      )
      continue
    body = manifests[step]
    saved = (
      time.strftime("%Y-%m-%d %H:%M", time.localtime(body["time"]))
      if "time" in body
      else ""
    )
    size = sum(file["size"] for file in body["files"].values()) / 2**20
    score = body["metrics"].get(manifest.BEST_METRIC)
    loss = "" if score is None else f"{score:.4f}"
    marks = ", newest" * (step == max(manifests)) + ", best" * (
      step == manifest.best(manifests)
    )
    print(
      f"{step:>10}  {saved:<16}  {size:>10.1f}  {loss:<15}  complete{marks}"
    )
  for path in temporaries:
    print(f"{path.name}: a save that is under way, or was interrupted")
  if _VERIFY.value and damages:
    raise UserError(f"not complete: {', '.join(map(str, damages))}")


def _prune(directory) -> None:
  manifests, damages = _inspect(directory, contents=True)
  if not manifests:
    raise UserError(
      f"no checkpoint in {directory} is complete: nothing is deleted, since one may be worth repairing"
    )
  try:
    for path in manifest.temporaries(directory):
      print(f"deleting {path}: a save that was interrupted")
      manifest.delete(path)
    for path in manifest.prune(
      directory, manifests, keep=_KEEP.value, among=[*manifests, *damages]
    ):
      print(
        f"deleting {path}: {damages.get(int(path.name), 'neither the best nor among the newest')}",
        flush=True,
      )
  except OSError as error:
    raise UserError(f"cannot delete: {error}") from error


if __name__ == "__main__":
  command.run(main, with_config=False)
