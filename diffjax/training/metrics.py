"""Writes metrics to a JSONL file, to TensorBoard and to Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from absl import logging
from etils import epath
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import register_writer_factory

from diffjax.config import UserError
from diffjax.host.files import is_remote, write_atomically

# How often files in an object store are written.
_UPLOAD_INTERVAL_SECONDS = 60.0

# tensorboardX opens a path such as "diffjax:/a/b" with our `_FileFactory`.
_FACTORY_PREFIX = "diffjax"


def read_log(path: epath.PathLike) -> list[dict[str, Any]]:
  """Returns the entries of a metrics.jsonl file.

  Args:
    path: The file, local or gs://.

  Returns:
    Dicts with "step", "time" and metrics by name. Incomplete lines, which a
    killed run or a full disk may leave, are left out.

  Raises:
    OSError: if the file cannot be read.
  """
  entries = []
  for line in epath.Path(path).read_bytes().splitlines():
    try:
      entry = json.loads(line)
    except ValueError:
      # An incomplete line.
      continue
    if isinstance(entry, dict) and "step" in entry:
      entries.append(entry)
  return entries


class MetricWriter:
  """Writes metrics to `workdir/metrics.jsonl`, TensorBoard and optionally W&B.

  A line of metrics.jsonl is an object with "step", "time" (seconds since 1970)
  and the metrics. Values that are not finite are null, because JSON has no
  number for them. TensorBoard's files are in `workdir/tensorboard`.

  A resumed run measures the steps after its checkpoint again. The first
  measurements of these steps are removed from metrics.jsonl when it is opened.
  TensorBoard's files keep them, and TensorBoard hides them. W&B keeps them, and
  ignores the second ones.

  Local files have every step as soon as `write` returns. On gs://, they are
  uploaded at most once a minute and by `close`, so a killed run may lose its
  last entries.

  If a write fails, for example because the disk is full, a warning is printed
  and the run continues. The next write tries again.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    config: Mapping[str, Any],
    *,
    start_step: int,
    wandb_project: str = "",
    is_writer: bool = True,
  ):
    """Opens the files, and removes the lines of steps after `start_step`.

    Args:
      workdir: The run's directory, local or gs://.
      config: The run's config as nested dicts, for TensorBoard and W&B.
      start_step: The number of steps done before this process started: the
        step of the restored checkpoint, or 0.
      wandb_project: The W&B project, or "".
      is_writer: Whether this process writes. If False, all methods do nothing.

    Raises:
      UserError: if the files cannot be written, or if `wandb_project` is set
        and wandb is not installed.
    """
    self._workdir = epath.Path(workdir)
    self._has_warned = False
    self._destinations: list[_Destination] = []
    if not is_writer:
      return
    try:
      self._destinations = _open_destinations(
        self._workdir, config, start_step, wandb_project
      )
    except OSError as error:
      raise UserError(f"cannot write metrics in {workdir}: {error}") from error

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes the metrics of one step. Does nothing if there are none.

    Args:
      step: The number of updates before they were measured.
      values: Numbers or scalar arrays by name, such as "train/loss".
    """
    if not values:
      return
    numbers = {name: float(value) for name, value in values.items()}
    for destination in self._destinations:
      with self._warn_on_error():
        destination.write(step, numbers)

  def close(self) -> None:
    """Writes what was not written yet, and closes the files."""
    for destination in self._destinations:
      with self._warn_on_error():
        destination.close()
    self._destinations = []

  @contextlib.contextmanager
  def _warn_on_error(self) -> Iterator[None]:
    """Catches OSErrors of the body. Only the first one prints a warning."""
    try:
      yield
    except OSError as error:
      if self._has_warned:
        return
      self._has_warned = True
      logging.warning(
        "cannot write metrics in %s: %s; the run goes on, and tries again",
        self._workdir,
        error,
      )


class _Destination(Protocol):
  """A place to which metrics are written."""

  def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

  def close(self) -> None: ...


def _open_destinations(
  workdir: epath.Path,
  config: Mapping[str, Any],
  start_step: int,
  wandb_project: str,
) -> list[_Destination]:
  """Opens metrics.jsonl, TensorBoard's file and, if there is a project, W&B."""
  workdir.mkdir(parents=True, exist_ok=True)
  wandb_run = None
  if wandb_project:
    # W&B is opened first: if it fails, the files are still unchanged.
    wandb_run = _open_wandb(wandb_project, workdir, config)
  destinations: list[_Destination] = [
    _JsonLines(workdir, start_step),
    _TensorBoard(workdir, config, start_step),
  ]
  if wandb_run is not None:
    destinations.append(wandb_run)
  return destinations


class _JsonLines:
  """The file metrics.jsonl."""

  def __init__(self, workdir: epath.Path, start_step: int):
    """Deletes the lines of later steps, and opens the file."""
    path = workdir / "metrics.jsonl"
    content = _lines_until(path, start_step)
    write_atomically(path, content)
    self._file = _open_file(path, content)

  def write(self, step: int, numbers: Mapping[str, float]) -> None:
    entry: dict[str, Any] = {"step": int(step), "time": round(time.time(), 3)}
    for name, number in numbers.items():
      entry[name] = number if math.isfinite(number) else None
    line = json.dumps(entry, allow_nan=False)
    self._file.write(f"{line}\n".encode())
    self._file.flush()

  def close(self) -> None:
    self._file.close()


def _lines_until(path: epath.Path, start_step: int) -> bytes:
  """Returns the complete lines of a log up to a step.

  Returns b"" if the file does not exist.
  """
  if not path.exists():
    return b""
  lines = []
  for line in path.read_bytes().splitlines():
    try:
      if json.loads(line)["step"] <= start_step:
        lines.append(line + b"\n")
    except (ValueError, KeyError, TypeError):
      # The run was killed while it wrote this line.
      continue
  return b"".join(lines)


class _TensorBoard:
  """A file in `workdir/tensorboard` that TensorBoard can read.

  tensorboardX's EventsWriter names the file and encodes the events. Its
  SummaryWriter is not used, because it writes in a thread: if that thread
  fails, for example because the disk is full, the run waits for it endlessly.
  """

  def __init__(
    self, workdir: epath.Path, config: Mapping[str, Any], start_step: int
  ):
    """Creates the file, with the config as text at the step of the resume."""
    directory = workdir / "tensorboard"
    directory.mkdir(parents=True, exist_ok=True)
    # tensorboardX begins the name with the time in seconds. A run may restart
    # within the same second, so the suffix is unique.
    unique = uuid.uuid4().hex[:8]
    self._events = EventsWriter(
      f"{_FACTORY_PREFIX}:{os.fspath(directory)}/events",
      filename_suffix=f".{start_step:08d}-{unique}",
    )
    # TensorBoard hides the events of earlier files from this step on, since the
    # run will measure those steps again.
    start = SessionLog(status=SessionLog.START)
    self._write(start_step + 1, session_log=start)
    config_json = json.dumps(config, indent=2, ensure_ascii=False)
    text = summary.text("config", f"```json\n{config_json}\n```")
    self._write(start_step, summary=text)

  def write(self, step: int, numbers: Mapping[str, float]) -> None:
    values = []
    for name, number in numbers.items():
      # Not `summary.scalar`, which prints a warning for each NaN.
      values.append(Summary.Value(tag=name, simple_value=number))
    self._write(step, summary=Summary(value=values))

  def close(self) -> None:
    self._events.close()

  def _write(self, step: int, **content: Any) -> None:
    """Writes an event with a summary or a session log."""
    event = Event(wall_time=time.time(), step=step, **content)
    self._events.write_event(event)
    self._events.flush()


class _File(Protocol):
  """A file to append to. `flush` may fail, and can be called again."""

  def write(self, data: bytes) -> None: ...

  def flush(self) -> None: ...

  def close(self) -> None: ...


def _open_file(path: epath.Path, content: bytes = b"") -> _File:
  """Opens a file for appending.

  Args:
    path: The file, local or gs://. Its directory exists.
    content: What the file contains already.
  """
  if is_remote(path):
    return _RemoteFile(path, content)
  return _LocalFile(path)


class _LocalFile:
  """A local file that loses no data if the disk is full for some time.

  Data that could not be written are kept, and written first by the next
  `flush`. A buffered file of Python would lose a part of a line.
  """

  def __init__(self, path: epath.Path):
    self._file = open(path, "ab", buffering=0)
    self._unwritten = b""

  def write(self, data: bytes) -> None:
    self._unwritten += data

  def flush(self) -> None:
    while self._unwritten:
      # An unbuffered write may write only a part of the data.
      num_bytes = self._file.write(self._unwritten)
      self._unwritten = self._unwritten[num_bytes:]

  def close(self) -> None:
    # The file is closed also if the last write fails.
    with self._file:
      self.flush()


class _RemoteFile:
  """A file in an object store, which cannot append to files.

  The whole file is kept in memory and written from time to time.
  """

  def __init__(self, path: epath.Path, content: bytes):
    self._path = path
    self._content = bytearray(content)
    self._uploaded_at = time.monotonic()

  def write(self, data: bytes) -> None:
    self._content += data

  def flush(self) -> None:
    if time.monotonic() - self._uploaded_at >= _UPLOAD_INTERVAL_SECONDS:
      self._upload()

  def close(self) -> None:
    self._upload()

  def _upload(self) -> None:
    write_atomically(self._path, bytes(self._content))
    self._uploaded_at = time.monotonic()


class _FileFactory:
  """Opens tensorboardX's files, so that it writes into a `_File`."""

  def open(self, path: str) -> _File:
    """Opens a path with this factory's prefix, such as "diffjax:/a/b"."""
    return _open_file(epath.Path(path.removeprefix(f"{_FACTORY_PREFIX}:")))


register_writer_factory(_FACTORY_PREFIX, _FileFactory())


class _WandbRun:
  """A run of Weights & Biases."""

  def __init__(self, run: Any):
    self._run = run

  def write(self, step: int, numbers: Mapping[str, float]) -> None:
    self._run.log(numbers, step=step)

  def close(self) -> None:
    self._run.finish()


def check_wandb(project: str) -> None:
  """Raises UserError if there is a project and wandb is not installed."""
  if not project:
    return
  try:
    import wandb  # noqa: F401
  except ImportError as error:
    raise UserError(
      f"config.train.wandb_project = {project!r} needs wandb:"
      " pip install 'diffjax[wandb]', or leave the field empty"
    ) from error


def _open_wandb(
  project: str, workdir: epath.Path, config: Mapping[str, Any]
) -> _WandbRun:
  """Starts the W&B run of a workdir, or continues it after a restart.

  The id of the W&B run is stored in the workdir.
  """
  check_wandb(project)
  import wandb

  id_file = workdir / "wandb_id.txt"
  if not id_file.exists():
    write_atomically(id_file, uuid.uuid4().hex[:12])
  local_directory = os.fspath(workdir)
  if is_remote(workdir):
    local_directory = tempfile.gettempdir()
  run = wandb.init(
    project=project,
    id=id_file.read_text(encoding="utf-8").strip(),
    resume="allow",
    config=dict(config),
    dir=local_directory,
  )
  return _WandbRun(run)
