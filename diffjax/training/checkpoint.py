"""Checkpoints: the only file that touches Orbax, and the arrays that it writes.

`workdir/checkpoints/STEP` is one atomic Orbax save: the train state as arrays, the data iterator's state and the config as JSON.
Orbax commits it by renaming a temporary directory; then a manifest is written into it, which makes it complete (see manifest.py).
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
import tensorstore
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from diffjax.config import UserError
from diffjax.host import runtime
from diffjax.host.lock import LostWorkdir, WorkdirLock
from diffjax.parallel.processes import gather_objects
from diffjax.training import manifest

# Bytes of an array that are written at once where it is not to be held in memory.
_PIECE = 1 << 26

# Seconds to spend, at most, on removing files that a failed save goes on writing.
_STRAGGLING = 5.0


class Checkpoints:
  """Writes the checkpoints of one run. Every process of a run makes the same calls in the same order."""

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    keep: int,
    restored: Checkpoint | None = None,
    lock: WorkdirLock | None = None,
  ):
    """Makes the directory, and removes what a killed save has left there. The caller holds the workdir's lock (lock.py).

    Args:
      workdir: The run's directory, local or gs://.
      keep: Newest complete checkpoints to keep; the best one by "validation/loss" is kept too.
      restored: The checkpoint that the run goes on from, of `find_checkpoint`.
        `save` does not save its step again.
      lock: The workdir's lock, which process 0 holds. Before each write it is
        checked that the workdir is still the locked one.

    Raises:
      UserError: if the directory cannot be written.
    """
    self._lock = lock
    self.check_lock()
    self._workdir, self._directory, self._keep = (
      workdir,
      manifest.checkpoint_directory(workdir),
      keep,
    )
    self._pending: concurrent.futures.Future[None] | None = None
    self._saved: int | None = None
    # Steps whose manifests are in order but whose files are not. Only reading
    # the files tells.
    self._damaged: set[int] = set()
    if restored is not None:
      self._saved = restored.step
      self._damaged = set(restored.passed_over)
    # Orbax logs a failure as one traceback per thread, and raises it too.
    logging.get_absl_logger().addFilter(_not_orbax)
    # One worker hashes and prunes in the order of the saves, while training goes on.
    self._worker = concurrent.futures.ThreadPoolExecutor(
      max_workers=1, thread_name_prefix="checkpoint"
    )
    if jax.process_index() == 0:
      with _explained(self._directory):
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in manifest.temporaries(self._directory):
          logging.warning("removing %s: a save that was interrupted", path)
          manifest.delete(path)

  def check_lock(self) -> None:
    """Raises LostWorkdir, in all processes, if the workdir is not the locked one.

    All processes call it together.
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
    """Raises LostWorkdir in the process that holds the lock."""
    if self._lock is not None:
      self._lock.check()

  def save(
    self,
    step: int,
    state: Any,
    *,
    data_state: dict[str, Any],
    config: dict[str, Any],
    metrics: Mapping[str, float] | None = None,
    in_pieces: bool = False,
  ) -> bool:
    """Starts a save and returns as soon as the caller may donate `state`; the files are written meanwhile.

    It waits for the previous save, if that one is still under way. A save that fails is a warning, and its files are removed: the run can
    go on, the older checkpoints are untouched, and the next save tries again. Only `wait` raises the last save's error. If one of several
    processes fails, Orbax fails in the others too, at most 5 minutes later, the limit of its barriers.

    Args:
      step: Updates done.
      state: The train state: a pytree of jax arrays, PRNG keys included, with its parameters under "params".
      data_state: State of the data iterator, as JSON; the same in every process. Empty if no run can go on from here.
      config: The run's config as nested dicts.
      metrics: Measured at this step; "validation/loss", if there, competes for the best.
      in_pieces: The state is of NumPy arrays that nobody changes before `wait` returns, such as files: they are read as they are written, a
        piece at a time, and never held in memory.

    Returns:
      Whether there was anything to save: not if this step is the last one saved or restored.

    Raises:
      LostWorkdir: if the workdir is not the locked one any more.
    """
    with contextlib.suppress(UserError):
      self.wait()
    self.check_lock()
    if step == self._saved:
      return False
    self._saved = step
    self._damaged.discard(step)
    try:
      self._check_room(
        step, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
      )
      # overwrite: a step that `restore` has passed over may lie there.
      with _pieces() if in_pieces else contextlib.nullcontext():
        finish = ocp.save_checkpointables_async(
          self._directory / str(step),
          {"state": state},
          overwrite=True,
          custom_metadata={"data_state": data_state, "config": config},
        ).result
    except _FAILURES as error:
      finish = functools.partial(_raise, error)
    self._pending = self._worker.submit(
      self._complete, finish, step, dict(metrics or {})
    )
    self._worker.submit(
      runtime.trim_freed_memory
    )  # as soon as nothing holds the copies that were saved
    return True

  def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds metrics to a complete checkpoint. Every process calls it.

    Args:
      step: The checkpoint's step.
      metrics: Measured at this step, as for `save`.

    Raises:
      UserError: if the checkpoint is damaged or cannot be written.
    """
    self.wait()
    self.check_lock()
    path = self._directory / str(step)
    if jax.process_index() == 0:
      with _explained(path):
        manifest.add_metrics(path, step, metrics)

  def newest(self, before: int | None = None) -> int | None:
    """The newest step whose save is complete, and which is less than `before`; None if there is none. Its arrays are not verified."""
    self.wait()
    found = find_checkpoint(self._workdir, before=before, config_only=True)
    return None if found is None else found.step

  def wait(self) -> None:
    """Returns once the last save is complete, its manifest included.

    Raises:
      UserError: if it failed.
    """
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  def close(self) -> None:
    """Waits for the last save, failed or not, and ends the worker."""
    self._worker.shutdown()

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
    if (
      jax.process_count() > 1
      and kind is not None
      and not issubclass(kind, UserError)
    ):
      self._worker.shutdown(
        wait=False
      )  # another process may be dead: Orbax would wait for its part of the save
    else:
      self.close()

  def _check_room(self, step: int, size: int) -> None:
    """Raises OSError before Orbax fails: without a directory its threads wait for minutes, and a full disk makes it print tracebacks.

    Process 0 looks, and all processes raise: one that went on alone would run its next step while the others save.
    """
    problem = ""
    if jax.process_index() == 0:
      try:
        path = self._directory / str(step)
        if not path.is_dir():  # a file or a broken link
          manifest.delete(path)
        probe = manifest.temporary(path)
        probe.mkdir(parents=True, exist_ok=True)
        manifest.delete(probe)
        if "://" not in os.fspath(path):
          disk = shutil.disk_usage(self._directory)
          if (
            disk.total and disk.free < size
          ):  # some network file systems do not know, and report 0 for both
            problem = f"no space left: it takes {_in_words(size)}, and {_in_words(disk.free)} are free"
      except OSError as error:
        problem = str(error)
    if problem := gather_objects(problem)[0]:
      raise OSError(problem)

  @runtime.release_freed_memory()
  def _complete(
    self, finish: Callable[[], Any], step: int, metrics: dict[str, float]
  ) -> None:
    """Completes a save in the worker: first the files, then the manifest, then the pruning, so that a kill at any moment leaves a complete
    step."""
    path = self._directory / str(step)
    try:
      with _explained(path):
        finish()
        self._check_lock_here()
        if jax.process_index() == 0:
          manifest.write(path, step, metrics)
    except LostWorkdir:
      raise
    except UserError as error:
      logging.warning(
        "not saved: %s; the checkpoints before are as they were", error
      )
      self._saved = None
      if jax.process_index() == 0:
        self._remove_failed(path, step)
      raise
    if jax.process_index() == 0:
      try:
        self._prune(step)
      except LostWorkdir:
        raise
      except (OSError, UserError) as error:
        logging.warning("cannot delete old checkpoints: %s", error)

  def _remove_failed(self, path: epath.Path, step: int) -> None:
    """Removes a half-written save, which would fill a full disk further. Orbax's threads may still write: it takes several tries."""
    deadline = time.monotonic() + _STRAGGLING
    while time.monotonic() < deadline:
      # Nothing may be deleted in a directory that another run has locked.
      self._check_lock_here()
      with contextlib.suppress(OSError, UserError):
        for temporary in manifest.temporaries(self._directory):
          manifest.delete(temporary)
        try:
          manifest.read(path, step)
        except manifest.Damage:
          manifest.delete(path)
        time.sleep(0.1)
        if not manifest.temporaries(self._directory):
          return

  def _prune(self, newest: int) -> None:
    among = [step for step in manifest.steps(self._directory) if step <= newest]
    manifests = {}
    for step in among:
      if step not in self._damaged:
        with contextlib.suppress(manifest.Damage):
          manifests[step] = manifest.read(self._directory / str(step), step)
    # Yields before each deletion.
    for _ in manifest.prune(
      self._directory, manifests, keep=self._keep, among=among
    ):
      self._check_lock_here()


def _pieces() -> ocp.Context:
  """Orbax's options for arrays that are not to be copied. Its default format, OCDBT, would hold all of them, compressed, until the end."""
  context = ocp.Context()
  context.memory.deepcopy_host_arrays = False
  context.array.saving.use_ocdbt = False
  context.array.saving.storage_options.chunk_byte_size = _PIECE
  return context


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A complete checkpoint, to be read; `find_checkpoint` and `open_checkpoint` return one.

  Attributes:
    path: its directory.
    step: updates done when it was saved.
    passed_over: newer steps that are damaged; known to process 0 alone.
  """

  path: epath.Path
  step: int
  passed_over: frozenset[int] = frozenset()

  @functools.cached_property
  def _beside_the_state(self) -> dict[str, Any]:
    with _explained(self.path):
      return manifest.metadata(self.path)

  @property
  def config(self) -> dict[str, Any]:
    """The config that it was trained with, as nested dicts."""
    return self._beside_the_state["config"]

  @property
  def data_state(self) -> dict[str, Any]:
    """State of the data iterator; empty if no run can go on from here."""
    return self._beside_the_state["data_state"]

  @property
  def metrics(self) -> dict[str, float | None]:
    """What was measured at its step; None for a value that is not finite."""
    with _explained(self.path):
      return manifest.read(self.path, self.step)["metrics"]

  def state(self, abstract_state: Any) -> Any:
    """Reads the train state.

    Args:
      abstract_state: its structure, as jax.ShapeDtypeStruct with the shardings that the arrays shall have.

    Raises:
      UserError: if the checkpoint holds other parameters or another optimizer's state.
    """
    with _explained(self.path):
      _check_shapes(
        ocp.checkpointables_metadata(self.path).metadata["state"],
        abstract_state,
        self.path,
      )
      return ocp.load_checkpointables(self.path, {"state": abstract_state})[
        "state"
      ]

  def params(self, abstract_params: Any) -> Any:
    """Reads the parameters alone.

    Args:
      abstract_params: tree of jax.ShapeDtypeStruct; where one has no sharding, the array goes to the first device.

    Raises:
      UserError: if the checkpoint's parameters have other names or shapes.
    """
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=getattr(leaf, "sharding", None) or first,
      ),
      abstract_params,
    )
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context, _explained(self.path):
      _check_shapes(
        ocp.checkpointables_metadata(self.path)
        .metadata["state"]
        .get("params", {}),
        abstract_params,
        self.path,
      )
      return ocp.load_checkpointables(self.path, {"state": {"params": wanted}})[
        "state"
      ]["params"]

  def copied_params(
    self, abstract_params: Any, room: Callable[[tuple[int, ...]], np.ndarray]
  ) -> Any:
    """Copies the parameters into arrays of the caller's, a stored piece at a time, so that they need not fit the memory.

    Args:
      abstract_params: tree of jax.ShapeDtypeStruct.
      room: makes an array of a shape, to be filled.

    Raises:
      UserError: if the checkpoint's parameters have other names or shapes.
    """
    directory = self.path / "state"
    url = _url(directory)
    is_ocdbt = (directory / "manifest.ocdbt").exists()

    def copy(path: Any, leaf: Any) -> np.ndarray:
      name = f"params.{jax.tree_util.keystr(path, simple=True, separator='.')}/"
      store = (
        {"driver": "ocdbt", "base": f"{url}/", "path": name}
        if is_ocdbt
        else f"{url}/{name}"
      )
      stored, filled = (
        tensorstore.open({"driver": "auto", "kvstore": store}).result(),
        room(leaf.shape),
      )
      sizes: Any = stored.chunk_layout.read_chunk.shape
      starts = (
        range(0, length, size)
        for length, size in zip(leaf.shape, sizes, strict=True)
      )
      for start in itertools.product(*starts):
        piece = tuple(
          slice(at, min(at + size, length))
          for at, size, length in zip(start, sizes, leaf.shape, strict=True)
        )
        filled[piece] = stored[piece].read().result()
      return filled

    with _explained(self.path):
      _check_shapes(
        ocp.checkpointables_metadata(self.path)
        .metadata["state"]
        .get("params", {}),
        abstract_params,
        self.path,
      )
      return jax.tree_util.tree_map_with_path(copy, abstract_params)


def check_path(workdir: epath.PathLike) -> None:
  """Raises UserError if Orbax would write checkpoints that cannot be read.

  Orbax looks for its own files by a glob of the whole path. It finds none, and
  saves no arrays, in a directory whose name is a pattern of other names.
  """
  for name in manifest.checkpoint_directory(workdir).parts:
    if not fnmatch.fnmatchcase(name, name):
      raise UserError(
        f"the workdir {workdir}: checkpoints cannot be written below the"
        f" directory {name!r}, since [ and ] enclose a wildcard; use a --workdir"
        " without them"
      )


def _url(directory: epath.Path) -> str:
  """Returns a directory's URL for TensorStore, with special characters escaped.

  TensorStore decodes %20 and takes what follows #, ? and | for other parts.
  """
  scheme, separator, path = os.fspath(directory).partition("://")
  if not separator:
    scheme = "file"
    path = os.path.abspath(directory)
  return f"{scheme}://{urllib.parse.quote(os.fsencode(path))}"


def open_checkpoint(
  workdir: epath.PathLike, step: int | None = None
) -> Checkpoint:
  """A run's newest complete checkpoint, or that of a step.

  Args:
    workdir: The run's directory, local or gs://.
    step: The checkpoint's step; None for the newest complete one.

  Raises:
    UserError: if there is no such complete checkpoint.
  """
  directory = manifest.checkpoint_directory(workdir)
  if step is None:
    if (found := find_checkpoint(workdir)) is None:
      raise UserError(f"there is no complete checkpoint in {directory}")
    return found
  try:
    manifest.verify(directory / str(step), step)
  except manifest.Damage as damage:
    raise UserError(
      f"there is no complete checkpoint of step {step} in {directory}: {damage}"
    ) from damage
  return Checkpoint(directory / str(step), step)


def find_checkpoint(
  workdir: epath.PathLike,
  *,
  before: int | None = None,
  config_only: bool = False,
) -> Checkpoint | None:
  """The newest complete checkpoint, if there is one. Process 0 looks, and tells the others.

  Args:
    workdir: The run's directory, local or gs://.
    before: Only steps less than this one count; None for all.
    config_only: Whether to verify and read its config alone. No warning names what is passed over then.

  Raises:
    UserError: if there are checkpoints, but all of them are damaged, unless `before` leaves some out: to start anew in silence would be
      the end of a run.
  """
  directory = manifest.checkpoint_directory(workdir)
  found, passed_over, reason = -1, set(), ""
  steps = manifest.steps(directory) if jax.process_index() == 0 else []
  for step in reversed(
    steps if before is None else [step for step in steps if step < before]
  ):
    path = directory / str(step)
    try:
      manifest.verify(
        path, step, only=manifest.METADATA if config_only else None
      )
    except manifest.Damage as damage:
      passed_over.add(step)
      reason = reason or f"{step}: {damage}"
      if not config_only:
        logging.warning("passing over checkpoint %s: %s", path, damage)
    else:
      found = step
      break
  else:
    # A step alone and without a manifest is the run's first save, interrupted.
    if len(passed_over) > 1 or any(
      manifest.has_manifest(directory / str(step)) for step in passed_over
    ):
      found = -2
  found, reason = gather_objects((found, reason))[0]
  if found == -2 and before is None:
    raise UserError(
      f"every checkpoint in {directory} is damaged ({reason}): put an intact copy of one there, or start from the beginning with "
      "another --workdir"
    )
  return (
    None
    if found < 0
    else Checkpoint(directory / str(found), found, frozenset(passed_over))
  )


def _check_shapes(saved: Any, wanted: Any, path: epath.Path) -> None:
  """Raises UserError for the first array that only one side has, or whose shapes differ. Orbax itself reports neither legibly."""
  there, here = (dict(_shapes(tree)) for tree in (saved, wanted))
  for name in sorted({*there, *here}):
    if there.get(name) == here.get(name):
      continue
    if name not in there:
      difference = f"it has no {name}, which is {here[name]} here"
    elif name not in here:
      difference = f"it has {name} {there[name]}, which is not there here"
    else:
      difference = f"{name} is {there[name]} there and {here[name]} here"
    of_optimizer = (
      "; config.train.init_from starts another --workdir from its parameters"
      * name.startswith("opt_state")
    )
    raise UserError(
      f"checkpoint {path} is of another model or optimizer: {difference}{of_optimizer}"
    )


def _shapes(tree: Any) -> Iterator[tuple[str, list[int]]]:
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
      leaf = jax.eval_shape(jax.random.key_data, leaf)  # as Orbax stores it
    yield (
      jax.tree_util.keystr(path, simple=True, separator="/"),
      list(leaf.shape),
    )


# TensorStore reports a full disk as a ValueError; Orbax says of anything else that it finds no handler, which is a KeyError.
_FAILURES = (OSError, ValueError, RuntimeError, KeyError)


def _not_orbax(record: Any) -> bool:
  return "/orbax/" not in record.pathname.replace(os.sep, "/")


def _in_words(size: float) -> str:
  """Bytes, in a unit in which they are more than 0."""
  for unit in ("bytes", "KiB", "MiB"):
    if size < 1024:
      return f"{size:.4g} {unit}"
    size /= 1024
  return f"{size:,.1f} GiB"


def _raise(error: BaseException) -> NoReturn:
  raise error


@contextlib.contextmanager
def _explained(path: epath.Path) -> Iterator[None]:
  """Turns an error of the file system, or damage, into a one-line UserError."""
  try:
    yield
  except (*_FAILURES, manifest.Damage) as error:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise UserError(
      f"cannot read or write the checkpoint {path}: {reason}"
    ) from error
