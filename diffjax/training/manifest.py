"""Manifests: which checkpoints are complete, and which ones are kept.

A step is a number of updates, and its directory is `workdir/checkpoints/STEP`.
It is in one of these states:

- unfinished: Orbax is writing the files, or was interrupted. The directory has
  a temporary name (`unfinished_saves`).
- without a manifest: Orbax has finished, but `manifest.json` is not written
  yet. The save was interrupted there, or the deletion of the step was.
- complete: It has a manifest, and each file has the size and the SHA-256 that
  the manifest names. Orbax itself does not notice a flipped bit.
- damaged: The manifest cannot be read or is of another step, or a file differs.

A step without a manifest or with damage is incomplete. `verify` then raises
`Damage`.

The manifest is inside the step's directory, so it is moved, copied and deleted
together with the step. Additional files next to the manifest are allowed. In
subdirectories they count as damage, because Orbax reads all files in some of
them.

This module imports neither JAX nor Orbax, so that commands start fast.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import json
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from diffjax.config import UserError
from diffjax.host.files import is_remote, write_atomically

# The file in each step in which Orbax stores our JSON: the config and the state
# of the data iterator.
JSON_FILE = "_CHECKPOINT_METADATA"
# Scores are the validation losses. Their names in logs and manifests begin with
# this.
SCORE_PREFIX = "validation/"
# The score that determines the best checkpoint. The lowest value is the best.
BEST_SCORE = f"{SCORE_PREFIX}loss"

_MANIFEST = "manifest.json"
# Part of a directory's name until Orbax has finished the save.
_UNFINISHED = ".orbax-checkpoint-tmp"
# How much of a file is read and hashed at once.
_READ_BYTES = 1 << 22
# Reading many small files of an object store mostly waits for the network.
_NUM_READERS = 8
# Hashing after a save runs next to the training steps.
_NUM_HASHERS = 2


class Damage(Exception):
  """The reason why a step is not a complete checkpoint."""


def checkpoint_directory(workdir: epath.PathLike) -> epath.Path:
  """Returns `workdir/checkpoints` as an absolute path.

  Raises:
    UserError: if the path starts with gs:// and gcsfs is not installed.
  """
  path = epath.Path(workdir)
  needs_gcsfs = os.fspath(path).startswith("gs://")
  if needs_gcsfs and importlib.util.find_spec("gcsfs") is None:
    raise UserError(
      f"the workdir {workdir} needs gcsfs: pip install 'diffjax[gcs]'"
    )
  if not is_remote(path):
    # TensorStore accepts only absolute paths.
    path = path.expanduser().absolute()
  return path / "checkpoints"


def steps(directory: epath.Path) -> list[int]:
  """Returns the steps in a checkpoint directory, in ascending order.

  The steps may be incomplete.
  """
  found_steps = []
  for name in _names(directory):
    # Excludes other directories, such as "020" or "20.bak".
    if name.isdecimal() and str(int(name)) == name:
      found_steps.append(int(name))
  return sorted(found_steps)


def unfinished_saves(directory: epath.Path) -> list[epath.Path]:
  """Returns the directories of saves that are running or were interrupted."""
  names = [name for name in _names(directory) if _UNFINISHED in name]
  return [directory / name for name in sorted(names)]


def steps_without_manifest(directory: epath.Path) -> list[epath.Path]:
  """Returns the directories of steps that have no manifest."""
  paths = [directory / str(step) for step in steps(directory)]
  return [path for path in paths if not has_manifest(path)]


def probe_path(path: epath.Path) -> epath.Path:
  """Returns a path for testing whether a step can be written.

  `unfinished_saves` includes it, so the next run deletes it if this process is
  killed.
  """
  return path.parent / f"{path.name}{_UNFINISHED}-probe"


def _names(directory: epath.Path) -> list[str]:
  """Returns the names in a directory, or nothing if it does not exist."""
  try:
    return [path.name for path in directory.iterdir()]
  except FileNotFoundError:
    return []
  except OSError as error:
    raise UserError(
      f"cannot read {directory}: {error.strerror or error}"
    ) from error


def has_manifest(path: epath.Path) -> bool:
  """Returns whether a step has a manifest, which may be damaged."""
  return (path / _MANIFEST).exists()


def read(path: epath.Path, step: int) -> dict[str, Any]:
  """Reads a step's manifest, which lists its files and their hashes.

  Args:
    path: The step's directory.
    step: The step's number.

  Returns:
    A dict with these keys:

    - "step": The number.
    - "time": When it was saved, in seconds since 1970.
    - "metrics": Scores by name. None stands for a value that was not finite.
    - "files": {"size": …, "sha256": …} by the name of the file.

  Raises:
    Damage: if the manifest is missing, damaged or of another step.
  """
  try:
    text = (path / _MANIFEST).read_text(encoding="utf-8")
  except FileNotFoundError as error:
    raise Damage(
      f"it has no {_MANIFEST}: its save or its deletion was interrupted"
    ) from error
  except UnicodeDecodeError as error:
    raise Damage(f"{_MANIFEST} is damaged") from error
  except OSError as error:
    raise Damage(
      f"{_MANIFEST} cannot be read: {error.strerror or error}"
    ) from error

  try:
    body = json.loads(text)
    body.pop("sha256")
    # The text includes a checksum, which is computed again.
    is_intact = text == _render(body)
  except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
    # Not JSON, or JSON of another form.
    is_intact = False
  if not is_intact:
    raise Damage(f"{_MANIFEST} is damaged")
  if body["step"] != step:
    raise Damage(f"its {_MANIFEST} is of step {body['step']}")
  return body


def read_json(path: epath.Path) -> dict[str, Any]:
  """Returns the JSON saved beside the arrays, with "data_state" and "config".

  Args:
    path: The step's directory.

  Raises:
    Damage: if it cannot be read.
  """
  try:
    orbax_metadata = json.loads((path / JSON_FILE).read_text(encoding="utf-8"))
    return orbax_metadata["custom_metadata"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise Damage(f"{JSON_FILE} cannot be read: {error}") from error


def verify(
  path: epath.Path, step: int, *, only: str | None = None, contents: bool = True
) -> dict[str, Any]:
  """Checks the files of a step against the hashes in its manifest.

  Args:
    path: The step's directory.
    step: The step's number.
    only: The name of the only file to compare, which the manifest must name.
      None for all files.
    contents: Whether to compare the contents of files. If False, only their
      sizes are compared.

  Returns:
    The manifest.

  Raises:
    Damage: for the first file that differs, or that is not in the manifest.
  """
  body = read(path, step)
  files = body["files"]
  names = list(files)
  if only is not None:
    if only not in files:
      raise Damage(f"{only} is not in its {_MANIFEST}")
    names = [only]

  def check(name: str) -> None:
    _check_file(path, name, files[name], contents=contents)

  with concurrent.futures.ThreadPoolExecutor(_NUM_READERS) as pool:
    # The loop waits for the checks and raises the first error.
    for _ in pool.map(check, names):
      pass

  if only is None:
    _check_no_other_files(path, files)
  return body


def _check_file(
  path: epath.Path, name: str, expected: Mapping[str, Any], *, contents: bool
) -> None:
  """Raises Damage if a file differs from its entry in the manifest.

  Args:
    path: The step's directory.
    name: The file's name in the directory.
    expected: Its "size" and "sha256" in the manifest.
    contents: Whether to read the file. If False, only its size is compared.
  """
  try:
    size = _size(path / name)
    if size is None:
      raise Damage(f"{name} is not a file any more")
    if size != expected["size"]:
      raise Damage(f"{name} has {size} bytes instead of {expected['size']}")
    if contents and _fingerprint(path, name) != expected:
      raise Damage(f"{name} is not as it was written: its sha256 differs")
  except FileNotFoundError as error:
    raise Damage(f"{name} is missing") from error
  except OSError as error:
    raise Damage(f"{name} cannot be read: {error.strerror or error}") from error


def _check_no_other_files(path: epath.Path, files: Mapping[str, Any]) -> None:
  """Raises Damage if a subdirectory has a file that is not in the manifest.

  Orbax might read it as a part of the checkpoint.
  """
  try:
    for name in _file_names(path):
      is_in_subdirectory = "/" in name
      if is_in_subdirectory and name not in files:
        raise Damage(f"{name} is not of this checkpoint")
  except OSError as error:
    raise Damage(f"it cannot be read: {error}") from error


def _size(file: epath.Path) -> int | None:
  """Returns the size of a regular file in bytes, or None for anything else.

  Reading a pipe or a socket would wait endlessly.
  """
  if is_remote(file):
    return file.stat().length
  # epath's `stat` fails if the owner has no name, which happens in containers.
  status = os.stat(file)
  if not stat.S_ISREG(status.st_mode):
    return None
  return status.st_size


def write(path: epath.Path, step: int, scores: Mapping[str, float]) -> None:
  """Writes the manifest of a step atomically, which makes the step complete.

  Args:
    path: The step's directory, with all its files.
    step: The step's number.
    scores: Validation losses of this step, by name.
  """
  names = list(_file_names(path))
  # Hashing takes most of the time, so several files are hashed at once.
  fingerprint = functools.partial(_fingerprint, path)
  with concurrent.futures.ThreadPoolExecutor(_NUM_HASHERS) as pool:
    fingerprints = list(pool.map(fingerprint, names))
  body = {
    "step": step,
    "time": round(time.time(), 3),
    "metrics": _json_scores(scores),
    "files": dict(zip(names, fingerprints, strict=True)),
  }
  write_atomically(path / _MANIFEST, _render(body))


def add_scores(
  path: epath.Path, step: int, scores: Mapping[str, float]
) -> None:
  """Adds scores to the manifest of a complete step.

  The manifest is replaced atomically, so the step stays complete.

  Args:
    path: The step's directory.
    step: The step's number.
    scores: Validation losses of this step, by name.

  Raises:
    Damage: if the manifest is damaged.
  """
  body = read(path, step)
  body["metrics"] |= _json_scores(scores)
  write_atomically(path / _MANIFEST, _render(body))


def _json_scores(scores: Mapping[str, float]) -> dict[str, float | None]:
  """Returns scores for JSON, with None for values that are not finite."""
  json_scores: dict[str, float | None] = {}
  for name, value in scores.items():
    json_scores[name] = float(value) if math.isfinite(value) else None
  return json_scores


def _render(body: Mapping[str, Any]) -> str:
  """Returns the text of a manifest, with the checksum of its content."""
  content = json.dumps(body, sort_keys=True)
  checksum = hashlib.sha256(content.encode()).hexdigest()
  return json.dumps({**body, "sha256": checksum}, sort_keys=True, indent=1)


def _file_names(path: epath.Path, prefix: str = "") -> Iterator[str]:
  """Yields the names of a step's files, such as "state/d/0123", sorted.

  The manifest and its temporary files are left out.

  Args:
    path: The step's directory, or a directory in it.
    prefix: What precedes the names, such as "state/d/". "" for the step's
      directory.
  """
  for name in sorted(child.name for child in path.iterdir()):
    child = path / name
    if child.is_dir():
      yield from _file_names(child, f"{prefix}{name}/")
      continue
    is_manifest = prefix == "" and name.startswith(_MANIFEST)
    if not is_manifest:
      yield prefix + name


def _fingerprint(path: epath.Path, name: str) -> dict[str, Any]:
  """Returns the size and the SHA-256 of a step's file."""
  size = 0
  digest = hashlib.sha256()
  with (path / name).open("rb") as file:
    while chunk := file.read(_READ_BYTES):
      size += len(chunk)
      digest.update(chunk)
  return {"size": size, "sha256": digest.hexdigest()}


def best(manifests: Mapping[int, Mapping[str, Any]]) -> int | None:
  """Returns the step with the lowest validation loss.

  Args:
    manifests: The manifests by step. They contain the scores.

  Returns:
    The lowest of several equally good steps. None if no step has a loss.
  """
  best_step = None
  best_loss = None
  for step in sorted(manifests):
    loss = manifests[step]["metrics"].get(BEST_SCORE)
    if loss is None:
      continue
    if best_loss is None or loss < best_loss:
      best_step = step
      best_loss = loss
  return best_step


def steps_to_prune(
  manifests: Mapping[int, Mapping[str, Any]],
  candidates: Iterable[int],
  *,
  keep: int,
) -> list[int]:
  """Returns the steps to delete, complete or not.

  Args:
    manifests: The manifests of the complete steps.
    candidates: The steps that may be deleted.
    keep: How many of the newest complete steps are kept. The best step is kept
      too.
  """
  newest_steps = sorted(manifests)[-keep:]
  kept_steps = {*newest_steps, best(manifests)}
  return [step for step in candidates if step not in kept_steps]


def delete(path: epath.Path) -> None:
  """Deletes the directory of a step or of an unfinished save.

  If there is a file or a link in its place, deletes that. The target of a link
  is kept.
  """
  is_link = not is_remote(path) and os.path.islink(path)
  if is_link or not path.is_dir():
    path.unlink(missing_ok=True)
    return
  # The manifest is deleted first. If the deletion is interrupted, the step then
  # counts as an interrupted save, not as a damaged checkpoint.
  with contextlib.suppress(OSError):
    (path / _MANIFEST).unlink()
  path.rmtree(missing_ok=True)
