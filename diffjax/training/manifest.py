"""Complete checkpoints: how one is told, and which are kept. This file imports neither JAX nor Orbax, so that it loads at once.

`workdir/checkpoints/STEP` is complete if it has a `manifest.json` and every file has the size and sha256 that the manifest gives: Orbax
itself reads a flipped bit without a word. The manifest lies inside the step, so that it is deleted, moved and copied with it. Other files
beside it are harmless. Deeper down they count as damage, since Orbax takes every file in some directories for its own.
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

_MANIFEST = "manifest.json"
# Orbax's name of the file, in every step, that holds our JSON.
METADATA = "_CHECKPOINT_METADATA"
BEST_METRIC = "validation/loss"
# A part of the name that Orbax gives a save until it is committed.
_TEMPORARY = ".orbax-checkpoint-tmp"


class Damage(Exception):
  """Why a step is not complete."""


def checkpoint_directory(workdir: epath.PathLike) -> epath.Path:
  """`workdir/checkpoints`, absolute: TensorStore takes no other paths.

  Raises:
    UserError: if it is a gs:// path and the package that reads those is not installed.
  """
  path = epath.Path(workdir)
  if (
    os.fspath(path).startswith("gs://")
    and importlib.util.find_spec("gcsfs") is None
  ):
    raise UserError(
      f"the workdir {workdir} needs gcsfs: pip install 'diffjax[gcs]'"
    )
  return (
    path if _is_remote(path) else path.expanduser().absolute()
  ) / "checkpoints"


def steps(directory: epath.Path) -> list[int]:
  """The steps in a checkpoint directory, complete or not, in ascending order."""
  return sorted(
    int(name)
    for name in _names(directory)
    if name.isdecimal() and str(int(name)) == name
  )


def temporaries(directory: epath.Path) -> list[epath.Path]:
  """The directories of saves that are under way or were interrupted."""
  return sorted(
    directory / name for name in _names(directory) if _TEMPORARY in name
  )


def temporary(path: epath.Path) -> epath.Path:
  """A path that `temporaries` finds, for files that may be deleted at any time."""
  return path.parent / f"{path.name}{_TEMPORARY}-probe"


def _names(directory: epath.Path) -> list[str]:
  try:
    return [path.name for path in directory.iterdir()]
  except FileNotFoundError:
    return []
  except OSError as error:
    raise UserError(
      f"cannot read {directory}: {error.strerror or error}"
    ) from error


def has_manifest(path: epath.Path) -> bool:
  """True if a step has a manifest, in order or not."""
  return (path / _MANIFEST).exists()


def read(path: epath.Path, step: int) -> dict[str, Any]:
  """A step's manifest: "step", "time" (seconds since 1970), "metrics" and, by name, the "size" and "sha256" of its "files". A metric that was not finite is None.

  Raises:
    Damage: if it is missing, damaged or of another step.
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
    intact = text == _render(body)
  except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
    intact = False  # Not a manifest of ours.
  if not intact:
    raise Damage(f"{_MANIFEST} is damaged")
  if body["step"] != step:
    raise Damage(f"its {_MANIFEST} is of step {body['step']}")
  return body


def metadata(path: epath.Path) -> dict[str, Any]:
  """The JSON that a step was saved with beside its state: "data_state" and "config".

  Raises:
    Damage: if it cannot be read.
  """
  try:
    return json.loads((path / METADATA).read_text(encoding="utf-8"))[
      "custom_metadata"
    ]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise Damage(f"{METADATA} cannot be read: {error}") from error


def verify(
  path: epath.Path, step: int, *, only: str | None = None, contents: bool = True
) -> dict[str, Any]:
  """Compares a step's files with its manifest.

  Args:
    path: The step's directory.
    step: Its number.
    only: The one file to look at; None for all.
    contents: Whether to read them; else only their sizes are compared.

  Returns:
    The manifest.

  Raises:
    Damage: for the first file that differs, or that the manifest does not name.
  """
  body = read(path, step)
  names = [name for name in body["files"] if only in (None, name)]
  with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
    for _ in pool.map(
      lambda name: _compare(path, name, body["files"][name], contents), names
    ):
      pass
  try:
    extra = (
      next(
        (
          name
          for name in _files(path)
          if "/" in name and name not in body["files"]
        ),
        None,
      )
      if only is None
      else None
    )
  except OSError as error:
    raise Damage(f"it cannot be read: {error}") from error
  if extra is not None:
    raise Damage(f"{extra} is not of this checkpoint")
  return body


def _compare(
  path: epath.Path, name: str, expected: Mapping[str, Any], contents: bool
) -> None:
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


def _size(file: epath.Path) -> int | None:
  """Bytes, or None if it is a directory, or a pipe or socket, which would be waited for for ever."""
  if _is_remote(file):
    return file.stat().length
  found = os.stat(
    file
  )  # epath's fails for a user without a name, as in containers.
  return found.st_size if stat.S_ISREG(found.st_mode) else None


def write(path: epath.Path, step: int, metrics: Mapping[str, float]) -> None:
  """Makes a step complete: writes its manifest, by way of a temporary file, so that it is there entire or not at all.

  Args:
    path: The step's directory, with all its files.
    step: Its number.
    metrics: Measured at this step.
  """
  names = list(_files(path))
  with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
    fingerprints = list(pool.map(functools.partial(_fingerprint, path), names))
  body = {
    "step": step,
    "time": round(time.time(), 3),
    "metrics": _json_metrics(metrics),
    "files": dict(zip(names, fingerprints, strict=True)),
  }
  _replace(path, body)


def add_metrics(
  path: epath.Path, step: int, metrics: Mapping[str, float]
) -> None:
  """Adds metrics to a complete step: it is complete at every moment.

  Args:
    path: The step's directory.
    step: Its number.
    metrics: Measured at this step.

  Raises:
    Damage: if its manifest is not in order.
  """
  body = read(path, step)
  body["metrics"] |= _json_metrics(metrics)
  _replace(path, body)


def _json_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
  """Returns metrics as JSON has them: None for what is not finite."""
  return {
    name: float(value) if math.isfinite(value) else None
    for name, value in metrics.items()
  }


def _replace(path: epath.Path, body: Mapping[str, Any]) -> None:
  """Writes a step's manifest completely or not at all."""
  unfinished = path / f"{_MANIFEST}.tmp"
  unfinished.write_text(_render(body), encoding="utf-8")
  unfinished.replace(path / _MANIFEST)


def _render(body: Mapping[str, Any]) -> str:
  """The manifest's text, its own checksum in it."""
  checksum = hashlib.sha256(
    json.dumps(body, sort_keys=True).encode()
  ).hexdigest()
  return json.dumps({**body, "sha256": checksum}, sort_keys=True, indent=1)


def _files(path: epath.Path, prefix: str = "") -> Iterator[str]:
  for child in sorted(path.iterdir(), key=lambda child: child.name):
    if child.is_dir():
      yield from _files(child, f"{prefix}{child.name}/")
    elif prefix or not child.name.startswith(_MANIFEST):
      yield prefix + child.name


def _fingerprint(path: epath.Path, name: str) -> dict[str, Any]:
  size, digest = 0, hashlib.sha256()
  with (path / name).open("rb") as file:
    while chunk := file.read(1 << 22):
      size += len(chunk)
      digest.update(chunk)
  return {"size": size, "sha256": digest.hexdigest()}


def best(manifests: Mapping[int, Mapping[str, Any]]) -> int | None:
  """The step with the least "validation/loss" (the first of equals), or None if none has one."""
  scores = {
    step: body["metrics"][BEST_METRIC]
    for step, body in sorted(manifests.items())
    if body["metrics"].get(BEST_METRIC) is not None
  }
  return min(scores, key=scores.__getitem__, default=None)


def prune(
  directory: epath.Path,
  manifests: Mapping[int, Mapping[str, Any]],
  *,
  keep: int,
  among: Iterable[int],
) -> Iterator[epath.Path]:
  """Deletes steps, complete or not, except the newest complete ones and the best.

  Args:
    directory: The checkpoint directory.
    manifests: Those of the complete steps.
    keep: How many of the newest to keep.
    among: Steps that may be deleted.

  Yields:
    Each step's path, just before it is deleted.
  """
  kept = {*sorted(manifests)[-keep:], best(manifests)}
  for step in among:
    if step not in kept:
      path = directory / str(step)
      yield path
      delete(path)


def delete(path: epath.Path) -> None:
  """Deletes a step or a temporary directory, or a file or link in its place. A link's target stays."""
  if not path.is_dir() or (not _is_remote(path) and os.path.islink(path)):
    path.unlink(missing_ok=True)
    return
  # The manifest goes first: an interrupted deletion then leaves an interrupted step, not a damaged one.
  with contextlib.suppress(OSError):
    (path / _MANIFEST).unlink()
  path.rmtree(missing_ok=True)


def _is_remote(path: epath.Path) -> bool:
  return "://" in os.fspath(path)
