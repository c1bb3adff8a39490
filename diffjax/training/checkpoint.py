"""Checkpoints: the only file that touches Orbax.

`workdir/checkpoints/STEP` is one atomic Orbax save: the train state as arrays, the data iterator's state and the config as JSON.
Orbax commits it by renaming a temporary directory; then `manifest.json` is written into it, with the size and sha256 of every file.
Orbax reads a flipped bit without a word, so a step counts as complete only if its manifest is there and every file fits it.
The manifest lies inside the step, so that it is deleted, moved and copied with it; Orbax ignores names it does not know.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from diffjax.config import Config, UserError

_MANIFEST = "manifest.json"
_BEST_METRIC = "validation/loss"
# Names that Orbax gives: what lies in every step and holds our JSON, and what a save is called until it is committed.
_METADATA = "_CHECKPOINT_METADATA"
_TEMPORARY = ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True)
class Restored:
  """What a checkpoint held."""

  step: int
  # The train state, on the shardings of the abstract state
  state: Any
  data_state: dict[str, Any]
  config: dict[str, Any]


class Checkpoints:
  """The checkpoints of one run. Every process of a run makes the same calls in the same order."""

  def __init__(self, workdir: epath.PathLike, *, keep: int):
    """Makes the directory and clears away what a killed save left.

    Args:
      workdir: The run's directory, local or gs://.
      keep: Newest complete checkpoints to keep; the best one by "validation/loss" is kept too.

    Raises:
      UserError: if the directory cannot be written.
    """
    self._directory, self._keep = _directory(workdir), keep
    self._pending: concurrent.futures.Future[None] | None = None
    self._saved: int | None = None
    self._damaged: set[int] = set()
    # One worker: a save is hashed and pruned in the order of the saves, off the training path.
    self._worker = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    if jax.process_index() == 0:
      with _explained(self._directory):
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.iterdir():
          if _TEMPORARY in path.name:
            logging.warning("removing %s: a save that was interrupted", path)
            path.rmtree()

  def save(
    self,
    step: int,
    state: Any,
    *,
    data_state: dict[str, Any],
    config: dict[str, Any],
    metrics: Mapping[str, float] | None = None,
    force: bool = False,
  ) -> bool:
    """Starts a save and returns as soon as the caller may donate `state`; the files are written meanwhile.

    It waits for the save before, if that one is still under way, and reports that one's failure.

    Args:
      step: Updates done.
      state: The train state: a pytree of jax arrays, PRNG keys included, with its parameters under "params".
      data_state: State of the data iterator, as JSON; the same in every process.
      config: The run's config as nested dicts.
      metrics: Measured at this step; "validation/loss", if there, competes for the best.
      force: Whether to save again a step that this object has saved or restored last.

    Returns:
      Whether a save was started: not if this step is the last one saved or restored.

    Raises:
      UserError: if this save cannot start, or the one before failed.
    """
    self.wait()
    if step == self._saved and not force:
      return False
    path = self._directory / str(step)
    with _explained(path):
      # overwrite: what may lie there is a step that restore passed over.
      response = ocp.save_checkpointables_async(
        path, {"state": state}, overwrite=True, custom_metadata={"data_state": data_state, "config": config}
      )
    self._saved = step
    self._damaged.discard(step)
    self._pending = self._worker.submit(self._complete, response, step, dict(metrics or {}))
    return True

  def restore(self, abstract_state: Any) -> Restored | None:
    """The newest complete checkpoint; a warning names every newer one that it passes over, and why.

    Args:
      abstract_state: The state's structure, as jax.ShapeDtypeStruct with the shardings that the arrays shall have.

    Returns:
      What it held, or None if there is none.

    Raises:
      UserError: if it holds other parameters or another optimizer's state.
    """
    self.wait()
    step, self._damaged = _newest(self._directory)
    if step is None:
      return None
    path = self._directory / str(step)
    metadata = ocp.checkpointables_metadata(path)
    _check_shapes(metadata.metadata["state"], abstract_state, path)
    with _explained(path):
      state = ocp.load_checkpointables(path, {"state": abstract_state})["state"]
    self._saved = step
    return Restored(step, state, metadata.custom_metadata["data_state"], metadata.custom_metadata["config"])

  def wait(self) -> None:
    """Returns once the last save is complete, its manifest included.

    Raises:
      UserError: if it failed.
    """
    pending, self._pending = self._pending, None
    if pending is not None:
      with _explained(self._directory):
        pending.result()

  def close(self) -> None:
    """Waits, and ends the worker."""
    try:
      self.wait()
    finally:
      self._worker.shutdown()

  def _complete(self, response: Any, step: int, metrics: dict[str, float]) -> None:
    """In the worker: the end of the save, then the manifest, then the pruning, so that a kill at any moment leaves a complete step."""
    response.result()
    if jax.process_index() == 0:
      _write_manifest(self._directory / str(step), step, metrics)
      self._prune(step)

  def _prune(self, newest: int) -> None:
    manifests = {}
    for step in _steps(self._directory):
      if step <= newest and step not in self._damaged:
        try:
          manifests[step] = _read_manifest(self._directory / str(step))
        except _Damage:
          continue
    scores = {step: manifest["metrics"][_BEST_METRIC] for step, manifest in manifests.items() if _BEST_METRIC in manifest["metrics"]}
    kept = {*sorted(manifests)[-self._keep :], *sorted(scores, key=scores.__getitem__)[:1]}
    for step in _steps(self._directory):
      if step <= newest and step not in kept:
        path = self._directory / str(step)
        # First the manifest: a deletion that is interrupted leaves an incomplete step, not a damaged one.
        (path / _MANIFEST).unlink(missing_ok=True)
        path.rmtree(missing_ok=True)


def load_params(workdir: epath.PathLike, abstract_params: Any, step: int | None = None) -> Any:
  """The parameters alone of another run's checkpoint.

  Args:
    workdir: That run's directory, local or gs://.
    abstract_params: Tree of jax.ShapeDtypeStruct; where one has no sharding, the array goes to the first device.
    step: Which checkpoint; None for the newest complete one.

  Returns:
    The parameters, as arrays with the shardings asked for.

  Raises:
    UserError: if there is no such complete checkpoint, or its parameters have other names or shapes.
  """
  directory = _directory(workdir)
  if step is None:
    step, _ = _newest(directory)
    if step is None:
      raise UserError(f"there is no complete checkpoint in {directory}")
  else:
    try:
      _verify(directory / str(step), step)
    except _Damage as damage:
      raise UserError(f"there is no complete checkpoint of step {step} in {directory}: {damage}") from damage
  path = directory / str(step)
  _check_shapes(ocp.checkpointables_metadata(path).metadata["state"].get("params", {}), abstract_params, path)
  first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  wanted = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or first), abstract_params
  )
  context = ocp.Context()
  context.pytree.loading.partial_load = True
  with context, _explained(path):
    return ocp.load_checkpointables(path, {"state": {"params": wanted}})["state"]["params"]


def latest_config(workdir: epath.PathLike) -> dict[str, Any] | None:
  """The config that the newest complete checkpoint was trained with, as nested dicts; None if there is no checkpoint.

  Args:
    workdir: The run's directory, local or gs://.
  """
  directory = _directory(workdir)
  # Only the file with the config is checked: restore will read everything, and say what it passes over.
  step, _ = _newest(directory, only=_METADATA, quiet=True)
  return None if step is None else ocp.checkpointables_metadata(directory / str(step)).custom_metadata["config"]


# What may change between a checkpoint and the run that goes on from it; a name ending in "." is a section.
_MAY_CHANGE = (
  "mesh.",
  "eval.",
  "train.steps",
  "train.log_interval",
  "train.checkpoint_interval",
  "train.keep_checkpoints",
  "train.profile_step",
  "train.profile_steps",
  "train.wandb_project",
  "train.sample_prompt",
  "train.sample_tokens",
  "train.init_from",
  "data.prepared_dir",
  "model.attention_implementation",
  "model.remat",
)


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
  old, new, default = (dict(_fields(config)) for config in (saved, current, Config().to_dict()))
  differing = []
  for field in sorted({*old, *new}):
    before, after = old.get(field, default.get(field)), new.get(field, default.get(field))
    may_change = field in _MAY_CHANGE or f"{field.partition('.')[0]}." in _MAY_CHANGE
    if field == "data.num_workers":
      # A prepared batch is a function of seed and step; a stream's order depends on its workers.
      may_change = old.get("data.mode") == new.get("data.mode") == "prepared"
    if before != after and not may_change:
      differing.append(f"{field} was {before!r} and is {after!r}")
  if differing:
    raise UserError(f"the checkpoint in this workdir is of another run: {'; '.join(differing)}; use another --workdir or set them back")


class _Damage(Exception):
  """Why a step is not complete."""


def _directory(workdir: epath.PathLike) -> epath.Path:
  path = epath.Path(workdir)
  # TensorStore takes absolute paths only.
  return (path if "://" in os.fspath(path) else path.expanduser().absolute()) / "checkpoints"


def _steps(directory: epath.Path) -> list[int]:
  if not directory.exists():
    return []
  return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and str(int(path.name)) == path.name)


def _newest(directory: epath.Path, *, only: str | None = None, quiet: bool = False) -> tuple[int | None, set[int]]:
  """The newest step that verifies, and those passed over on the way. Process 0 looks, the others are told."""
  found, passed_over = -1, set()
  for step in reversed(_steps(directory) if jax.process_index() == 0 else []):
    try:
      _verify(directory / str(step), step, only=only)
    except _Damage as damage:
      passed_over.add(step)
      if not quiet:
        logging.warning("passing over checkpoint %s: %s", directory / str(step), damage)
    else:
      found = step
      break
  if jax.process_count() > 1:
    found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
  return (None if found < 0 else found), passed_over


def _verify(path: epath.Path, step: int, *, only: str | None = None) -> None:
  """Raises _Damage unless every file of the step (or the one asked for) is as its manifest says."""
  manifest = _read_manifest(path)
  if manifest["step"] != step:
    raise _Damage(f"its {_MANIFEST} is of step {manifest['step']}")
  names = [name for name in manifest["files"] if only in (None, name)]
  with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
    found = pool.map(functools.partial(_fingerprint, path), names)
    for name, fingerprint in zip(names, found, strict=True):
      expected = manifest["files"][name]
      if fingerprint["size"] != expected["size"]:
        raise _Damage(f"{name} has {fingerprint['size']} bytes instead of {expected['size']}")
      if fingerprint != expected:
        raise _Damage(f"{name} is not as it was written: its sha256 differs")


def _write_manifest(path: epath.Path, step: int, metrics: Mapping[str, float]) -> None:
  names = list(_files(path))
  with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
    fingerprints = list(pool.map(functools.partial(_fingerprint, path), names))
  finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
  body = {"step": step, "metrics": finite, "files": dict(zip(names, fingerprints, strict=True))}
  # Written in place: if that is interrupted, the manifest does not fit its own checksum.
  (path / _MANIFEST).write_text(_render(body))


def _read_manifest(path: epath.Path) -> dict[str, Any]:
  try:
    text = (path / _MANIFEST).read_text()
  except FileNotFoundError as error:
    raise _Damage(f"it has no {_MANIFEST}: its save or its deletion was interrupted") from error
  except (OSError, ValueError) as error:  # ValueError: not UTF-8
    raise _Damage(f"{_MANIFEST} cannot be read: {error}") from error
  try:
    body = json.loads(text)
    body.pop("sha256")
    if text == _render(body):
      return body
  except (ValueError, KeyError, AttributeError, TypeError):
    pass  # Not a manifest of ours; said below.
  raise _Damage(f"{_MANIFEST} is damaged")


def _render(body: Mapping[str, Any]) -> str:
  """The manifest's text, its own checksum in it."""
  checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
  return json.dumps({**body, "sha256": checksum}, sort_keys=True, indent=1)


def _files(path: epath.Path, prefix: str = "") -> Iterator[str]:
  for child in sorted(path.iterdir(), key=lambda child: child.name):
    if child.is_dir():
      yield from _files(child, f"{prefix}{child.name}/")
    elif prefix or child.name != _MANIFEST:
      yield prefix + child.name


def _fingerprint(path: epath.Path, name: str) -> dict[str, Any]:
  size, digest = 0, hashlib.sha256()
  try:
    with (path / name).open("rb") as file:
      while chunk := file.read(1 << 22):
        size += len(chunk)
        digest.update(chunk)
  except OSError as error:
    raise _Damage(f"{name} cannot be read: {error.strerror or error}") from error
  return {"size": size, "sha256": digest.hexdigest()}


def _check_shapes(saved: Any, wanted: Any, path: epath.Path) -> None:
  """Raises UserError for the first array that only one side has, or whose shapes differ. Orbax itself reports neither legibly."""
  there, here = (dict(_shapes(tree)) for tree in (saved, wanted))
  for name in sorted({*there, *here}):
    if name not in there:
      raise UserError(f"checkpoint {path} is of another model or optimizer: it has no {name}, which is {here[name]} here")
    if name not in here:
      raise UserError(f"checkpoint {path} is of another model or optimizer: it has {name} {there[name]}, which is not there here")
    if there[name] != here[name]:
      raise UserError(f"checkpoint {path} is of another model or optimizer: {name} is {there[name]} there and {here[name]} here")


def _shapes(tree: Any) -> Iterator[tuple[str, list[int]]]:
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
      leaf = jax.eval_shape(jax.random.key_data, leaf)  # as Orbax stores it
    yield jax.tree_util.keystr(path, simple=True, separator="/"), list(leaf.shape)


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  for section, values in config.items():
    for name, value in values.items():
      yield f"{section}.{name}", value


@contextlib.contextmanager
def _explained(path: epath.Path) -> Iterator[None]:
  """What goes wrong in the file system, as one line."""
  try:
    yield
  except (OSError, ValueError, RuntimeError, _Damage) as error:  # TensorStore reports a full disk as a ValueError.
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise UserError(f"cannot read or write the checkpoint {path}: {reason}") from error
