"""Checkpoints: the only file that touches Orbax.

`workdir/checkpoints/STEP` is one atomic Orbax save: the train state as arrays, the data iterator's state and the config as JSON.
Orbax commits it by renaming a temporary directory; then a manifest is written into it, which makes it complete (see manifest.py).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from diffjax.config import Config, UserError
from diffjax.parallel.processes import gather
from diffjax.training import manifest, runtime

# Seconds that are spent, at most, on removing what a failed save goes on writing.
_STRAGGLING = 5.0


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
    """Makes the directory and clears away what a killed save left. The caller holds the workdir's lock (lock.py).

    Args:
      workdir: The run's directory, local or gs://.
      keep: Newest complete checkpoints to keep; the best one by "validation/loss" is kept too.

    Raises:
      UserError: if the directory cannot be written.
    """
    self._directory, self._keep = manifest.checkpoint_directory(workdir), keep
    self._pending: concurrent.futures.Future[None] | None = None
    self._saved: int | None = None
    self._damaged: set[int] = set()  # known only by reading them: their manifests are in order
    # Orbax logs a failure as tracebacks, one a thread; as an exception it reaches us anyway.
    logging.get_absl_logger().addFilter(_not_orbax)
    # One worker: a save is hashed and pruned in the order of the saves, off the training path.
    self._worker = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    if jax.process_index() == 0:
      with _explained(self._directory):
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in manifest.temporaries(self._directory):
          logging.warning("removing %s: a save that was interrupted", path)
          manifest.delete(path)

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

    It waits for the save before, if that one is still under way. A save that fails is a warning, and what it wrote is removed: the run
    can go on, the checkpoints before are as they were, and the next save tries again. Only `wait` raises the last one's error.
    If one of several processes fails, Orbax fails in the others too, by a limit of 5 minutes to its barriers.

    Args:
      step: Updates done.
      state: The train state: a pytree of jax arrays, PRNG keys included, with its parameters under "params".
      data_state: State of the data iterator, as JSON; the same in every process. Empty if no run can go on from here.
      config: The run's config as nested dicts.
      metrics: Measured at this step; "validation/loss", if there, competes for the best.
      force: Whether to save again a step that this object has saved or restored last.

    Returns:
      Whether there was anything to save: not if this step is the last one saved or restored.
    """
    with contextlib.suppress(UserError):
      self.wait()
    if step == self._saved and not force:
      return False
    self._saved = step
    self._damaged.discard(step)
    try:
      self._check_room(step, sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
      # overwrite: what may lie there is a step that restore passed over.
      finish = ocp.save_checkpointables_async(
        self._directory / str(step), {"state": state}, overwrite=True, custom_metadata={"data_state": data_state, "config": config}
      ).result
    except _FAILURES as error:
      finish = functools.partial(_raise, error)
    self._pending = self._worker.submit(self._complete, finish, step, dict(metrics or {}))
    self._worker.submit(runtime.give_back_freed_pages)  # as soon as nothing holds the copies that were saved
    return True

  def restore(self, abstract_state: Any) -> Restored | None:
    """The newest complete checkpoint; a warning names every newer one that it passes over, and why.

    Args:
      abstract_state: The state's structure, as jax.ShapeDtypeStruct with the shardings that the arrays shall have.

    Returns:
      What it held, or None if there is none.

    Raises:
      UserError: if it holds other parameters or another optimizer's state, or if there are checkpoints, but all of them are damaged.
    """
    self.wait()
    step, self._damaged = _newest(self._directory)
    if step is None:
      return None
    path = self._directory / str(step)
    with _explained(path):
      metadata = ocp.checkpointables_metadata(path)
      _check_shapes(metadata.metadata["state"], abstract_state, path)
      state = ocp.load_checkpointables(path, {"state": abstract_state})["state"]
    self._saved = step
    return Restored(step, state, metadata.custom_metadata["data_state"], metadata.custom_metadata["config"])

  def newest(self, before: int | None = None) -> int | None:
    """The newest step whose save is complete, and which is less than `before`; None if there is none. What it holds is not read."""
    self.wait()
    return _newest(self._directory, before=before, only=manifest.METADATA, quiet=True)[0]

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
    if jax.process_count() > 1 and kind is not None and not issubclass(kind, UserError):
      self._worker.shutdown(wait=False)  # another process may be dead: Orbax would wait for its part of the save
    else:
      self.close()

  def _check_room(self, step: int, size: int) -> None:
    """Fails before Orbax does: without a directory its threads wait for minutes, even after the run; a full disk is tracebacks there.

    Process 0 looks, and all fail: one that went on alone would meet the others' saving with its next step.
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
          if disk.total and disk.free < size:  # Some network file systems do not know, and say 0 of both.
            problem = f"no space left: it takes {size / 2**20:.0f} MiB, and {disk.free / 2**20:.0f} are free"
      except OSError as error:
        problem = str(error)
    if problem := gather(problem)[0]:
      raise OSError(problem)

  @runtime.freed_pages_not_kept()
  def _complete(self, finish: Callable[[], Any], step: int, metrics: dict[str, float]) -> None:
    """In the worker: the end of the save, then the manifest, then the pruning, so that a kill at any moment leaves a complete step."""
    path = self._directory / str(step)
    try:
      with _explained(path):
        finish()
        if jax.process_index() == 0:
          manifest.write(path, step, metrics)
    except UserError as error:
      logging.warning("not saved: %s; the checkpoints before are as they were", error)
      self._saved = None
      if jax.process_index() == 0:
        self._remove_failed(path, step)
      raise
    if jax.process_index() == 0:
      try:
        self._prune(step)
      except (OSError, UserError) as error:
        logging.warning("cannot delete old checkpoints: %s", error)

  def _remove_failed(self, path: epath.Path, step: int) -> None:
    """A half-written save would fill a full disk further. Threads of Orbax's may still write, so it may take more than one try."""
    deadline = time.monotonic() + _STRAGGLING
    while time.monotonic() < deadline:
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
    for _ in manifest.prune(self._directory, manifests, keep=self._keep, among=among):
      pass


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
  return _read_params(_complete_step(workdir, step), abstract_params)


def load_run(
  workdir: epath.PathLike, make_abstract_params: Callable[[dict[str, Any]], Any], step: int | None = None
) -> tuple[int, dict[str, Any], Any]:
  """The step, config and parameters of another run's checkpoint; what is not said is as in `load_params`.

  Args:
    workdir: That run's directory.
    make_abstract_params: Called with the config, as nested dicts, that the checkpoint was trained with.
    step: Which checkpoint.
  """
  path = _complete_step(workdir, step)
  config = _read_metadata(path)["config"]
  return int(path.name), config, _read_params(path, make_abstract_params(config))


def latest_config(workdir: epath.PathLike) -> dict[str, Any] | None:
  """The config that the newest complete checkpoint was trained with, as nested dicts; None if there is no checkpoint.

  Args:
    workdir: The run's directory, local or gs://.

  Raises:
    UserError: if there are checkpoints, but all of them are damaged, or they are of no run that could go on.
  """
  directory = manifest.checkpoint_directory(workdir)
  # Only the file with the config is checked, and read: restore will read everything, and say what it passes over.
  step, _ = _newest(directory, only=manifest.METADATA, quiet=True)
  if step is None:
    return None
  metadata = _read_metadata(directory / str(step))
  if not metadata["data_state"]:
    raise UserError(
      f"the checkpoint in {workdir} holds parameters alone, as diffjax.convert writes them: to start from it, use another --workdir and "
      f"--config.train.init_from={workdir}"
    )
  return metadata["config"]


def _complete_step(workdir: epath.PathLike, step: int | None) -> epath.Path:
  """The directory of a step's checkpoint, or of the newest complete one; UserError if there is no such complete checkpoint."""
  directory = manifest.checkpoint_directory(workdir)
  if step is None:
    step, _ = _newest(directory)
    if step is None:
      raise UserError(f"there is no complete checkpoint in {directory}")
  else:
    try:
      manifest.verify(directory / str(step), step)
    except manifest.Damage as damage:
      raise UserError(f"there is no complete checkpoint of step {step} in {directory}: {damage}") from damage
  return directory / str(step)


def _read_metadata(path: epath.Path) -> dict[str, Any]:
  try:
    return manifest.metadata(path)
  except manifest.Damage as damage:
    raise UserError(f"cannot read or write the checkpoint {path}: {damage}") from damage


def _read_params(path: epath.Path, abstract_params: Any) -> Any:
  _check_shapes(ocp.checkpointables_metadata(path).metadata["state"].get("params", {}), abstract_params, path)
  first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  wanted = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or first), abstract_params
  )
  context = ocp.Context()
  context.pytree.loading.partial_load = True
  with context, _explained(path):
    return ocp.load_checkpointables(path, {"state": {"params": wanted}})["state"]["params"]


# What may change between a checkpoint and the run that goes on from it; a name ending in "." is a section.
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


def _newest(
  directory: epath.Path, *, before: int | None = None, only: str | None = None, quiet: bool = False
) -> tuple[int | None, set[int]]:
  """The newest step (of those before one, if asked) that verifies, and those passed over on the way. Process 0 looks, the others are told.

  Raises:
    UserError: if there are steps, but all are damaged: to start anew in silence would be the end of a run.
  """
  found, passed_over, reason = -1, set(), ""
  steps = manifest.steps(directory) if jax.process_index() == 0 else []
  for step in reversed(steps if before is None else [step for step in steps if step < before]):
    path = directory / str(step)
    try:
      manifest.verify(path, step, only=only)
    except manifest.Damage as damage:
      passed_over.add(step)
      reason = reason or f"{step}: {damage}"
      if not quiet:
        logging.warning("passing over checkpoint %s: %s", path, damage)
    else:
      found = step
      break
  else:
    # A step alone and without a manifest is the run's first save, interrupted.
    if len(passed_over) > 1 or any(manifest.has_manifest(directory / str(step)) for step in passed_over):
      found = -2
  found, reason = gather((found, reason))[0]
  if found == -2 and before is None:
    raise UserError(
      f"every checkpoint in {directory} is damaged ({reason}): put an intact copy of one there, or start from the beginning with "
      "another --workdir"
    )
  return (None if found < 0 else found), passed_over


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


# TensorStore reports a full disk as a ValueError; Orbax says of anything else that it finds no handler, which is a KeyError.
_FAILURES = (OSError, ValueError, RuntimeError, KeyError)


def _not_orbax(record: Any) -> bool:
  return "/orbax/" not in record.pathname.replace(os.sep, "/")


def _raise(error: BaseException) -> NoReturn:
  raise error


@contextlib.contextmanager
def _explained(path: epath.Path) -> Iterator[None]:
  """What goes wrong in the file system, as one line."""
  try:
    yield
  except _FAILURES as error:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise UserError(f"cannot read or write the checkpoint {path}: {reason}") from error
