"""Checkpoints: saves and loads the state of a run with Orbax.

The directory `workdir/checkpoints/STEP` is written by one Orbax save. It holds
the arrays of the train state, and as JSON the state of the data iterator and
the config. Orbax writes into a temporary directory and renames it at the end.
After that, a manifest is written into it, which makes the checkpoint complete
(see manifest.py).

No other module uses Orbax.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import os
import shutil
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import tensorstore
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from diffjax.config import UserError
from diffjax.host import runtime
from diffjax.host.files import is_remote
from diffjax.host.lock import LostWorkdir, WorkdirLock
from diffjax.parallel.processes import gather_objects
from diffjax.training import manifest

# The size of the chunks of arrays that are saved with `in_pieces`.
CHUNK_BYTES = 1 << 26

# How long the files of a failed save are deleted again, because Orbax's threads
# may still write some.
_CLEANUP_SECONDS = 5.0
_CLEANUP_INTERVAL_SECONDS = 0.1

# The errors of failed reads and writes. TensorStore reports a full disk as a
# ValueError. Orbax raises a KeyError for a directory that it cannot interpret.
_STORAGE_ERRORS = (OSError, ValueError, RuntimeError, KeyError)


class _OrbaxSave(Protocol):
  """A save by Orbax that may still be running.

  It is Orbax's own object. If the save could not start, it is a failed Future,
  so that all failures are handled when the result is read.
  """

  def result(self) -> Any:
    """Waits until the files are written. Raises the error of the save."""


class Checkpoints:
  """Writes the checkpoints of one run.

  All processes of a run make the same calls in the same order.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    keep: int,
    restored: Checkpoint | None = None,
    lock: WorkdirLock | None = None,
  ):
    """Creates the directory, and deletes the files of interrupted saves.

    Args:
      workdir: The run's directory, local or gs://. The caller holds its lock.
      keep: How many of the newest complete checkpoints to keep. The one with
        the lowest "validation/loss" is kept too.
      restored: The checkpoint from `find_checkpoint` that the run resumes from.
        `save` does not save its step again. None for a new run: steps without
        a manifest are then deleted.
      lock: The workdir's lock, in process 0. Before each write, it is checked
        that the workdir was not moved or replaced.

    Raises:
      UserError: if the directory cannot be written.
    """
    self._lock = lock
    self.check_lock()
    self._workdir = workdir
    self._directory = manifest.checkpoint_directory(workdir)
    self._keep = keep
    # The last save. None if `wait` was called since.
    self._running_save: concurrent.futures.Future[None] | None = None
    # The last step that was saved or restored. None if its save failed.
    self._last_saved_step: int | None = None
    # Steps with damaged files. They are stored, because all files would have to
    # be read to find them again.
    self._damaged_steps: set[int] = set()
    if restored is not None:
      self._last_saved_step = restored.step
      self._damaged_steps = set(restored.damaged_steps)
    # Orbax raises its errors, and also logs a traceback per thread. The logs
    # are hidden.
    logging.get_absl_logger().addFilter(_is_not_from_orbax)
    # A single worker, so that saves are completed in their order.
    self._worker = concurrent.futures.ThreadPoolExecutor(
      max_workers=1, thread_name_prefix="checkpoint"
    )
    if jax.process_index() == 0:
      self._prepare_directory(is_new_run=restored is None)

  def _prepare_directory(self, is_new_run: bool) -> None:
    """Creates the directory, and deletes the files of interrupted saves."""
    with _user_errors(self._directory):
      self._directory.mkdir(parents=True, exist_ok=True)
      interrupted = manifest.unfinished_saves(self._directory)
      if is_new_run:
        # The first save may have been interrupted before its manifest. If it
        # stayed, and the first save of this run were interrupted at another
        # step, `find_checkpoint` would take both for a run that has lost all
        # its manifests.
        interrupted += manifest.steps_without_manifest(self._directory)
      for path in interrupted:
        logging.warning("removing %s: a save that was interrupted", path)
        manifest.delete(path)

  def check_lock(self) -> None:
    """Raises LostWorkdir if the workdir was moved or replaced.

    All processes must call this together. Process 0, which holds the lock,
    tells the others, so that all of them raise.
    """
    problem = ""
    try:
      self._check_lock_here()
    except LostWorkdir as error:
      problem = str(error)
    problem = gather_objects(problem)[0]
    if problem:
      raise LostWorkdir(problem)

  def _check_lock_here(self) -> None:
    """Raises LostWorkdir, in process 0 only.

    Unlike `check_lock`, this may be called in a thread, since it does not
    communicate with other processes.
    """
    if self._lock is not None:
      self._lock.check()

  def save(
    self,
    step: int,
    state: Any,
    *,
    data_state: dict[str, Any],
    config: dict[str, Any],
    scores: Mapping[str, float] | None = None,
    in_pieces: bool = False,
  ) -> bool:
    """Starts a save, which writes the files in the background.

    When this returns, the caller may donate the arrays of `state`, unless
    `in_pieces` is set. If the previous save is still running, this waits for it
    first.

    A failed save prints a warning and deletes its files. Older checkpoints are
    unchanged, and the run can continue. Only `wait` raises the error. If one of
    several processes fails, the others fail when Orbax's barriers time out,
    after at most 5 minutes.

    Args:
      step: The number of updates that led to this state.
      state: The train state: a pytree of JAX arrays, including PRNG keys, with
        the parameters under "params".
      data_state: The state of the data iterator as JSON, the same in all
        processes. Empty if no run can resume from this checkpoint.
      config: The run's config as nested dicts.
      scores: Validation losses of this step, by name. "validation/loss"
        determines the best checkpoint.
      in_pieces: Whether to read and write each array in chunks, for NumPy
        arrays that may not fit into memory, such as memory-mapped files. The
        arrays must not change until `wait` returns.

    Returns:
      Whether a save was started. False if this step was the last one that was
      saved or restored.

    Raises:
      LostWorkdir: if the workdir was moved or replaced.
    """
    # If the previous save failed, the worker has already printed a warning.
    with contextlib.suppress(UserError):
      self.wait()
    self.check_lock()
    if step == self._last_saved_step:
      return False
    self._last_saved_step = step
    self._damaged_steps.discard(step)

    orbax_save = self._start_save(step, state, data_state, config, in_pieces)
    self._running_save = self._worker.submit(
      self._complete, orbax_save, step, dict(scores or {})
    )
    # Orbax's copies of the arrays are free after the save.
    self._worker.submit(runtime.trim_freed_memory)
    return True

  def _start_save(
    self,
    step: int,
    state: Any,
    data_state: dict[str, Any],
    config: dict[str, Any],
    in_pieces: bool,
  ) -> _OrbaxSave:
    """Starts Orbax's save of the arrays and the JSON, and returns it.

    If it cannot start, returns a failed save, whose `result` raises the error.
    """
    context = _chunked_saving() if in_pieces else contextlib.nullcontext()
    try:
      num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
      self._check_space(step, num_bytes)
      with context:
        return ocp.save_checkpointables_async(
          self._directory / str(step),
          {"state": state},
          # The step may exist: it is damaged, and the search for the newest
          # checkpoint passed over it.
          overwrite=True,
          custom_metadata={"data_state": data_state, "config": config},
        )
    except _STORAGE_ERRORS as error:
      # `_complete` handles this error too, because `result` raises it.
      failed: concurrent.futures.Future[None] = concurrent.futures.Future()
      failed.set_exception(error)
      return failed

  def add_scores(self, step: int, scores: Mapping[str, float]) -> None:
    """Adds scores to a complete checkpoint. All processes call it together.

    Args:
      step: The checkpoint's step.
      scores: Validation losses of this step, by name. "validation/loss"
        determines the best checkpoint.

    Raises:
      UserError: if the checkpoint is damaged or cannot be written.
    """
    self.wait()
    self.check_lock()
    path = self._directory / str(step)
    if jax.process_index() == 0:
      with _user_errors(path):
        manifest.add_scores(path, step, scores)

  def newest(self, before: int | None = None) -> int | None:
    """Returns the step of the newest complete checkpoint.

    Its arrays are not verified.

    Args:
      before: Only lower steps count. None for all steps. `RunLog` passes the
        first of too many skipped steps, to name the last good checkpoint.

    Returns:
      The step, or None if there is no complete checkpoint.
    """
    self.wait()
    checkpoint = find_checkpoint(self._workdir, before=before, json_only=True)
    return None if checkpoint is None else checkpoint.step

  def wait(self) -> None:
    """Waits until the last save is complete, or has failed.

    Raises:
      UserError: if the save failed. A second call does not raise it again.
    """
    save = self._running_save
    # Forgotten first, so that an error is raised only once.
    self._running_save = None
    if save is not None:
      save.result()

  def close(self) -> None:
    """Waits for the last save and ends the worker. Ignores its error."""
    self._worker.shutdown()

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(
    self, exception_type: type[BaseException] | None, *_: Any
  ) -> None:
    """Waits for the last save, unless another process may have died."""
    is_expected = exception_type is None or issubclass(
      exception_type, UserError
    )
    if is_expected or jax.process_count() == 1:
      self.close()
    else:
      # The save might wait endlessly for the files of a dead process.
      self._worker.shutdown(wait=False)

  def _check_space(self, step: int, num_bytes: int) -> None:
    """Raises OSError if the directory is not writable or the disk is full.

    Without this check, Orbax's threads would wait for minutes, or print
    tracebacks. Process 0 tells the others, so that all of them raise.
    Otherwise, one of them would run its next step while the others save.
    """
    problem = ""
    if jax.process_index() == 0:
      try:
        problem = self._find_space_problem(step, num_bytes)
      except OSError as error:
        problem = str(error)
    problem = gather_objects(problem)[0]
    if problem:
      raise OSError(problem)

  def _find_space_problem(self, step: int, num_bytes: int) -> str:
    """Returns an error message if the disk is full, or "".

    Raises OSError if the directory is not writable.
    """
    path = self._directory / str(step)
    if not path.is_dir():
      # There may be a file or a broken link in place of the step's directory.
      manifest.delete(path)
    # Tests whether a directory can be created.
    probe = manifest.probe_path(path)
    probe.mkdir(parents=True, exist_ok=True)
    manifest.delete(probe)

    if is_remote(self._directory):
      return ""
    disk = shutil.disk_usage(self._directory)
    # Some network file systems report a total of 0.
    if disk.total == 0 or disk.free >= num_bytes:
      return ""
    return (
      f"no space left: it takes {_format_bytes(num_bytes)}, and"
      f" {_format_bytes(disk.free)} are free"
    )

  # A context manager as a decorator is active during the whole method.
  @runtime.release_freed_memory()
  def _complete(
    self, orbax_save: _OrbaxSave, step: int, scores: dict[str, float]
  ) -> None:
    """Finishes a save and deletes old checkpoints, in the background thread.

    The manifest is written after Orbax's files, and makes the checkpoint
    complete. Old checkpoints are deleted last. If the process is killed, at
    least one checkpoint is complete.
    """
    try:
      self._write_manifest(orbax_save, step, scores)
    except LostWorkdir:
      # The path may belong to another run now, so nothing is deleted.
      raise
    except UserError as error:
      logging.warning(
        "not saved: %s; the checkpoints before are as they were", error
      )
      # The step may be saved again.
      self._last_saved_step = None
      if jax.process_index() == 0:
        self._delete_failed(step)
      raise

    if jax.process_index() == 0:
      try:
        self._prune(step)
      except LostWorkdir:
        raise
      except (OSError, UserError) as error:
        logging.warning("cannot delete old checkpoints: %s", error)

  def _write_manifest(
    self, orbax_save: _OrbaxSave, step: int, scores: dict[str, float]
  ) -> None:
    """Waits for Orbax's files, then writes the manifest with their hashes."""
    path = self._directory / str(step)
    with _user_errors(path):
      orbax_save.result()
      self._check_lock_here()
      if jax.process_index() == 0:
        manifest.write(path, step, scores)

  def _delete_failed(self, step: int) -> None:
    """Deletes the files of a failed save, since they may fill the disk.

    Orbax's threads may still write files. This repeats until there are none, or
    for at most _CLEANUP_SECONDS.
    """
    deadline = time.monotonic() + _CLEANUP_SECONDS
    while time.monotonic() < deadline:
      # Another run may have locked this path. Its files must not be deleted.
      self._check_lock_here()
      with contextlib.suppress(OSError, UserError):
        self._delete_incomplete(step)
        time.sleep(_CLEANUP_INTERVAL_SECONDS)
        if not manifest.unfinished_saves(self._directory):
          return

  def _delete_incomplete(self, step: int) -> None:
    """Deletes unfinished saves, and a step if it has no intact manifest."""
    for unfinished in manifest.unfinished_saves(self._directory):
      manifest.delete(unfinished)
    path = self._directory / str(step)
    try:
      manifest.read(path, step)
    except manifest.Damage:
      manifest.delete(path)

  def _prune(self, newest: int) -> None:
    """Deletes damaged checkpoints and superseded ones, up to the newest step.

    The newest `keep` complete checkpoints and the best one stay. A higher step
    is a damaged one that the run will reach and write again.
    """
    steps = manifest.steps(self._directory)
    candidates = [step for step in steps if step <= newest]
    # Steps without a manifest in this dict are deleted.
    manifests = {}
    for step in candidates:
      if step in self._damaged_steps:
        continue
      with contextlib.suppress(manifest.Damage):
        manifests[step] = manifest.read(self._directory / str(step), step)
    for step in manifest.steps_to_prune(manifests, candidates, keep=self._keep):
      self._check_lock_here()
      manifest.delete(self._directory / str(step))


def _chunked_saving() -> ocp.Context:
  """Returns Orbax's options for arrays that may not fit into memory."""
  context = ocp.Context()
  # NumPy arrays are read during the save, not copied before it.
  context.memory.deepcopy_host_arrays = False
  # The default format, OCDBT, would hold all arrays in compressed form until
  # the end of the save.
  context.array.saving.use_ocdbt = False
  context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
  return context


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A complete checkpoint, from `find_checkpoint` or `open_checkpoint`.

  Attributes:
    path: Its directory.
    step: The number of updates that led to its state.
    damaged_steps: Newer steps that are not complete. Empty in all processes but
      0, which searches for the checkpoint and deletes these steps.
  """

  path: epath.Path
  step: int
  damaged_steps: frozenset[int] = frozenset()

  @functools.cached_property
  def _json(self) -> dict[str, Any]:
    with _user_errors(self.path):
      return manifest.read_json(self.path)

  @property
  def config(self) -> dict[str, Any]:
    """The config that it was trained with, as nested dicts."""
    return self._json["config"]

  @property
  def data_state(self) -> dict[str, Any]:
    """The state of the data iterator. Empty if no run can resume from it."""
    return self._json["data_state"]

  @property
  def scores(self) -> dict[str, float | None]:
    """Validation losses of its step. None for a value that was not finite."""
    with _user_errors(self.path):
      return manifest.read(self.path, self.step)["metrics"]

  def state(self, abstract_state: Any) -> Any:
    """Loads the train state.

    Args:
      abstract_state: The tree of the state, with a jax.ShapeDtypeStruct for
        each array. The arrays are loaded with its sharding.

    Raises:
      UserError: if the checkpoint has other parameters, or the state of another
        optimizer.
    """
    with _user_errors(self.path):
      _check_shapes(self._saved_abstract_state(), abstract_state, self.path)
      loaded = ocp.load_checkpointables(self.path, {"state": abstract_state})
    return loaded["state"]

  def params(self, abstract_params: Any) -> Any:
    """Loads only the parameters.

    Args:
      abstract_params: The tree of the parameters, with a jax.ShapeDtypeStruct
        for each one. Those without a sharding are loaded to the first device.

    Raises:
      UserError: if the checkpoint's parameters have other names or shapes.
    """
    with_shardings = jax.tree.map(_with_sharding, abstract_params)
    wanted = {"state": {"params": with_shardings}}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context, _user_errors(self.path):
      self._check_params(abstract_params)
      loaded = ocp.load_checkpointables(self.path, wanted)
    return loaded["state"]["params"]

  def copied_params(
    self,
    abstract_params: Any,
    make_array: Callable[[tuple[int, ...]], np.ndarray],
  ) -> Any:
    """Copies the parameters into new arrays, chunk by chunk.

    The parameters may be larger than the memory, if `make_array` returns
    memory-mapped files.

    Args:
      abstract_params: The tree of the parameters, with a jax.ShapeDtypeStruct
        for each one.
      make_array: Returns a new array of a shape.

    Raises:
      UserError: if the checkpoint's parameters have other names or shapes.
    """

    def copy_param(
      key_path: tuple[Any, ...], abstract_param: jax.ShapeDtypeStruct
    ) -> np.ndarray:
      name = jax.tree_util.keystr(key_path, simple=True, separator=".")
      stored = _open_stored(self.path / "state", f"params.{name}")
      array = make_array(abstract_param.shape)
      _copy_chunks(stored, array)
      return array

    with _user_errors(self.path):
      self._check_params(abstract_params)
      return jax.tree_util.tree_map_with_path(copy_param, abstract_params)

  def _saved_abstract_state(self) -> Any:
    """Returns the tree of the saved train state, with shapes and dtypes."""
    return ocp.checkpointables_metadata(self.path).metadata["state"]

  def _check_params(self, abstract_params: Any) -> None:
    """Raises UserError if the saved parameters have other names or shapes."""
    saved_params = self._saved_abstract_state().get("params", {})
    _check_shapes(saved_params, abstract_params, self.path)


def _with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """Returns a leaf that has a sharding: its own, or the first device."""
  sharding = getattr(leaf, "sharding", None)
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _open_stored(directory: epath.Path, name: str) -> tensorstore.TensorStore:
  """Opens an array that Orbax has written, without reading its values.

  Args:
    directory: The directory of the saved train state.
    name: The array's name, such as "params.embedding".
  """
  url = _url(directory)
  kvstore: Any
  if (directory / "manifest.ocdbt").exists():
    # All arrays are in one OCDBT database.
    kvstore = {"driver": "ocdbt", "base": f"{url}/", "path": f"{name}/"}
  else:
    # Each array has its own directory.
    kvstore = f"{url}/{name}/"
  return tensorstore.open({"driver": "auto", "kvstore": kvstore}).result()


def _copy_chunks(stored: tensorstore.TensorStore, target: np.ndarray) -> None:
  """Copies a stored array into an array of its shape, one chunk at a time."""
  chunk_shape: Any = stored.chunk_layout.read_chunk.shape
  for slices in _chunk_slices(target.shape, chunk_shape):
    target[slices] = stored[slices].read().result()


def _chunk_slices(
  shape: Sequence[int], chunk_shape: Sequence[int]
) -> Iterator[tuple[slice, ...]]:
  """Returns the position of each chunk of an array, as a slice per axis."""
  slices_by_axis = []
  for length, chunk_length in zip(shape, chunk_shape, strict=True):
    slices = []
    for start in range(0, length, chunk_length):
      # The last chunk may be shorter.
      end = min(start + chunk_length, length)
      slices.append(slice(start, end))
    slices_by_axis.append(slices)
  return itertools.product(*slices_by_axis)


def check_path(workdir: epath.PathLike) -> None:
  """Raises UserError if the path has a wildcard in brackets, such as "a[b]".

  Orbax uses the path as a glob pattern to find its own files. If a directory's
  name does not match itself as a pattern, Orbax saves no arrays.
  """
  for name in manifest.checkpoint_directory(workdir).parts:
    if not fnmatch.fnmatchcase(name, name):
      raise UserError(
        f"the workdir {workdir}: checkpoints cannot be written below the"
        f" directory {name!r}, since [ and ] enclose a wildcard; use a"
        " --workdir without them"
      )


def _url(directory: epath.Path) -> str:
  """Returns a directory's URL for TensorStore, with special characters quoted.

  TensorStore decodes %20, and the characters #, ? and | end a path.
  """
  scheme, separator, path = os.fspath(directory).partition("://")
  if not separator:
    scheme = "file"
    path = os.path.abspath(directory)
  return f"{scheme}://{urllib.parse.quote(os.fsencode(path))}"


def open_checkpoint(
  workdir: epath.PathLike, step: int | None = None
) -> Checkpoint:
  """Returns a complete checkpoint of a run.

  Args:
    workdir: The run's directory, local or gs://.
    step: The checkpoint's step. None for the newest complete checkpoint.

  Raises:
    UserError: if there is no such complete checkpoint.
  """
  directory = manifest.checkpoint_directory(workdir)
  if step is None:
    newest = find_checkpoint(workdir)
    if newest is None:
      raise UserError(f"there is no complete checkpoint in {directory}")
    return newest
  path = directory / str(step)
  try:
    manifest.verify(path, step)
  except manifest.Damage as damage:
    raise UserError(
      f"there is no complete checkpoint of step {step} in {directory}: {damage}"
    ) from damage
  return Checkpoint(path, step)


def find_checkpoint(
  workdir: epath.PathLike,
  *,
  before: int | None = None,
  json_only: bool = False,
) -> Checkpoint | None:
  """Returns the newest complete checkpoint, or None if the run has none.

  A checkpoint is complete if its files have the hashes in its manifest. Process
  0 searches and sends the result to the others.

  Args:
    workdir: The run's directory, local or gs://.
    before: Only lower steps count. None for all steps. See
      `Checkpoints.newest`.
    json_only: Whether only the file with the config and the data state is
      verified. Damaged checkpoints are then passed over without a warning.

  Raises:
    UserError: if all checkpoints are damaged and `before` is None. Starting
      from step 0 without an error would lose the run.
  """
  directory = manifest.checkpoint_directory(workdir)
  search = _SearchResult(None, {}, "")
  if jax.process_index() == 0:
    # This raises if the directory cannot be read. The others then wait in
    # `gather_objects`, until `processes.connected` ends them with this error.
    search = _search_newest(directory, before, json_only)
  # The result of process 0.
  step, problem = gather_objects((search.step, search.problem))[0]
  if problem and before is None:
    raise UserError(problem)
  if step is None:
    return None
  return Checkpoint(directory / str(step), step, frozenset(search.damages))


class _SearchResult(NamedTuple):
  """The result of a search for the newest complete checkpoint.

  Attributes:
    step: Its step. None if there is no complete checkpoint.
    damages: What is wrong with each newer step.
    problem: An error message if the run has only damaged checkpoints, or "".
  """

  step: int | None
  damages: dict[int, str]
  problem: str


def _search_newest(
  directory: epath.Path, before: int | None, json_only: bool
) -> _SearchResult:
  """Searches for the newest complete checkpoint, from the highest step on.

  Args:
    directory: The directory of the checkpoints.
    before: Only lower steps count. None for all steps.
    json_only: Whether only the file with the config and the data state is
      verified.
  """
  only_file = manifest.JSON_FILE if json_only else None
  damages: dict[int, str] = {}
  for step in reversed(manifest.steps(directory)):
    if before is not None and step >= before:
      continue
    path = directory / str(step)
    try:
      manifest.verify(path, step, only=only_file)
      return _SearchResult(step, damages, "")
    except manifest.Damage as damage:
      damages[step] = str(damage)
      if not json_only:
        logging.warning("passing over checkpoint %s: %s", path, damage)
  return _SearchResult(None, damages, _all_damaged_message(directory, damages))


def _all_damaged_message(directory: epath.Path, damages: dict[int, str]) -> str:
  """Returns an error message if a run has lost all its checkpoints, or "".

  Args:
    directory: The directory of the checkpoints.
    damages: What is wrong with each step in it.
  """
  if not damages:
    return ""
  newest = max(damages)
  if len(damages) == 1 and not manifest.has_manifest(directory / str(newest)):
    # The first save of the run was interrupted, so nothing is lost. With
    # several steps, manifests have been lost: a new run deletes the step of an
    # interrupted first save before it saves another one.
    return ""
  return (
    f"every checkpoint in {directory} is damaged ({newest}: {damages[newest]}):"
    " put an intact copy of one there, or start from the beginning with another"
    " --workdir"
  )


def _check_shapes(saved: Any, wanted: Any, path: epath.Path) -> None:
  """Raises UserError if two trees differ in the names or shapes of arrays.

  The error names the first one that differs, unlike Orbax's errors.

  Args:
    saved: The tree in the checkpoint.
    wanted: The tree to load.
    path: The checkpoint, for the message.
  """
  saved_shapes = _shapes(saved)
  wanted_shapes = _shapes(wanted)
  for name in sorted(saved_shapes.keys() | wanted_shapes.keys()):
    saved_shape = saved_shapes.get(name)
    wanted_shape = wanted_shapes.get(name)
    if saved_shape == wanted_shape:
      continue
    difference = _describe_difference(name, saved_shape, wanted_shape)
    message = (
      f"checkpoint {path} is of another model or optimizer: {difference}"
    )
    is_of_optimizer = name.startswith("opt_state")
    if is_of_optimizer:
      message += (
        "; config.train.init_from starts another --workdir from its parameters"
      )
    raise UserError(message)


def _describe_difference(
  name: str, saved_shape: list[int] | None, wanted_shape: list[int] | None
) -> str:
  """Returns how an array differs. A shape is None if there is no such array."""
  if saved_shape is None:
    return f"it has no {name}, which is {wanted_shape} here"
  if wanted_shape is None:
    return f"it has {name} {saved_shape}, which is not there here"
  return f"{name} is {saved_shape} there and {wanted_shape} here"


def _shapes(tree: Any) -> dict[str, list[int]]:
  """Returns the shape of each leaf by its name, such as "params/embedding"."""
  shapes = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    dtype = getattr(leaf, "dtype", None)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
      # Orbax stores the key's data.
      leaf = jax.eval_shape(jax.random.key_data, leaf)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    shapes[name] = list(leaf.shape)
  return shapes


def _is_not_from_orbax(record: Any) -> bool:
  """Returns whether a log record comes from other code than Orbax."""
  return "/orbax/" not in record.pathname.replace(os.sep, "/")


def _format_bytes(num_bytes: float) -> str:
  """Returns a number of bytes as text, such as "12.5 KiB"."""
  for unit in ("bytes", "KiB", "MiB"):
    if num_bytes < 1024:
      return f"{num_bytes:.4g} {unit}"
    num_bytes /= 1024
  return f"{num_bytes:,.1f} GiB"


@contextlib.contextmanager
def _user_errors(path: epath.Path) -> Iterator[None]:
  """Turns storage errors and damage into a UserError of one line."""
  try:
    yield
  except (*_STORAGE_ERRORS, manifest.Damage) as error:
    message = str(error).strip() or type(error).__name__
    first_line = message.splitlines()[0]
    raise UserError(
      f"cannot read or write the checkpoint {path}: {first_line}"
    ) from error
