"""Metric writers: a JSONL file, TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging
from etils import epath
from tensorboardX import summary
from tensorboardX.proto import event_pb2
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from diffjax.config import UserError


def read_log(path: epath.PathLike) -> list[dict[str, Any]]:
  """The lines of a metrics.jsonl that hold a step. A torn one, of a run that was killed or of a full disk, does not count.

  Raises:
    OSError: if it cannot be read.
  """
  lines = []
  for line in epath.Path(path).read_bytes().splitlines():
    try:
      parsed = json.loads(line)
    except ValueError:
      continue
    if isinstance(parsed, dict) and "step" in parsed:
      lines.append(parsed)
  return lines


class MetricWriter:
  """Writes numbers by step to `workdir/metrics.jsonl`, to TensorBoard files in `workdir/tensorboard`, and to W&B if asked.

  A line of the JSONL file is an object with "step", "time" (seconds since 1970) and the metrics; a number that is not finite is
  null, since JSON has no other word for it. An object store cannot append: for one, lines and events are kept here and written as a
  whole every `remote_interval` seconds and at the end. A write that fails, as on a full disk, is a warning, and the next write tries
  again: no run ends because of its log.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    config: Mapping[str, Any],
    *,
    resume_step: int,
    wandb_project: str = "",
    is_writer: bool = True,
    remote_interval: float = 60.0,
  ):
    """Opens the files, and drops what they hold of steps past `resume_step`, since the run takes those steps again.

    Args:
      workdir: The run's directory, local or gs://.
      config: The run's config as nested dicts, for W&B and TensorBoard.
      resume_step: Step of the checkpoint that the run goes on from; 0 for a new run.
      wandb_project: Weights & Biases project, or "".
      is_writer: Whether this process writes; the others do nothing.
      remote_interval: Seconds between writes of the whole file, if the workdir cannot be appended to.

    Raises:
      UserError: if wandb_project is given and wandb is not installed, or if the files cannot be written.
    """
    self._is_writer, self._warned = is_writer, False
    self._wandb: Any = None
    if not is_writer:
      return
    workdir = epath.Path(workdir)
    self._path, self._tensorboard_dir = (
      workdir / "metrics.jsonl",
      workdir / "tensorboard",
    )
    self._remote = _is_remote(workdir)
    self._interval, self._written_at = remote_interval, time.monotonic()
    try:
      workdir.mkdir(parents=True, exist_ok=True)
      if wandb_project:
        self._wandb = _open_wandb(wandb_project, workdir, config)
      self._lines = self._kept_lines(resume_step)
      _replace(self._path, "".join(self._lines))
      self._file = None if self._remote else _Appender(self._path)
      self._open_tensorboard(config, resume_step)
    except OSError as error:
      raise UserError(f"cannot write metrics in {workdir}: {error}") from error

  def _open_tensorboard(
    self, config: Mapping[str, Any], resume_step: int
  ) -> None:
    """tensorboardX.SummaryWriter does not serve: when its thread cannot write, it dies, and the run waits for it for ever."""
    self._local_tensorboard = (
      epath.Path(tempfile.mkdtemp(prefix="diffjax-tensorboard-"))
      if self._remote
      else self._tensorboard_dir
    )
    self._local_tensorboard.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files in the order of their names, hence the time; a quick restart falls into the same second, hence the rest.
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{resume_step:08d}-{uuid.uuid4().hex[:8]}"
    self._tensorboard = _Appender(self._local_tensorboard / name)
    self._tensorboard.write(_record(file_version="brain.Event:2"))
    # Hides what an interrupted run logged after the checkpoint.
    self._tensorboard.write(
      _record(
        step=resume_step + 1,
        session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
      )
    )
    text = f"```json\n{json.dumps(config, indent=2, ensure_ascii=False)}\n```"
    self._tensorboard.write(
      _record(step=resume_step, summary=summary.text("config", text))
    )

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds the metrics of one step; nothing if there are none.

    Args:
      step: Updates done when they were measured.
      values: Numbers (scalars) by name, such as "train/loss".
    """
    if not self._is_writer or not values:
      return
    numbers = {name: float(value) for name, value in values.items()}
    finite = {
      name: value if math.isfinite(value) else None
      for name, value in numbers.items()
    }
    line = (
      json.dumps(
        {"step": int(step), "time": round(time.time(), 3), **finite},
        allow_nan=False,
      )
      + "\n"
    )
    with self._warning():
      if self._file is not None:
        self._file.write(line.encode())
      else:
        self._lines.append(line)
    with self._warning():
      scalars = [
        Summary.Value(tag=name, simple_value=value)
        for name, value in numbers.items()
      ]  # summary.scalar warns of every NaN
      self._tensorboard.write(
        _record(step=step, summary=Summary(value=scalars))
      )
    if self._wandb is not None:
      self._wandb.log(numbers, step=step)
    if self._remote and time.monotonic() - self._written_at >= self._interval:
      with self._warning():
        self._write_remote()

  def close(self) -> None:
    """Writes what is left and closes everything."""
    if not self._is_writer:
      return
    for file in (self._file, self._tensorboard):
      if file is not None:
        with self._warning():
          file.close()
    if self._remote:
      with self._warning():
        self._write_remote()
    if self._wandb is not None:
      self._wandb.finish()
    self._is_writer = False

  @contextlib.contextmanager
  def _warning(self) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      if not self._warned:
        logging.warning(
          "cannot write metrics in %s: %s; the run goes on, and tries again",
          self._path.parent,
          error,
        )
      self._warned = True

  def _kept_lines(self, resume_step: int) -> list[str]:
    kept = []
    for line in (
      self._path.read_bytes().splitlines() if self._path.exists() else []
    ):
      try:
        if json.loads(line)["step"] <= resume_step:
          kept.append(line.decode() + "\n")
      except (ValueError, KeyError, TypeError):
        continue  # The last line may be torn, if the run was killed while it wrote.
    return kept

  def _write_remote(self) -> None:
    self._path.write_text("".join(self._lines), encoding="utf-8")
    self._tensorboard_dir.mkdir(parents=True, exist_ok=True)
    for file in self._local_tensorboard.iterdir():
      file.copy(self._tensorboard_dir / file.name, overwrite=True)
    self._written_at = time.monotonic()


class _Appender:
  """A file that is appended to at once. Data that cannot be written is kept, and written before what follows: no line is lost or torn."""

  def __init__(self, path: epath.Path):
    self._file, self._left = open(path, "ab", buffering=0), b""

  def write(self, data: bytes) -> None:
    self._left += data
    while self._left:
      self._left = self._left[self._file.write(self._left) :]

  def close(self) -> None:
    with self._file:
      self.write(b"")


def _record(**fields: Any) -> bytes:
  """A TensorBoard event as its files hold it: length, the length's checksum, the event, the event's checksum."""
  data = event_pb2.Event(wall_time=time.time(), **fields).SerializeToString()
  length = struct.pack("<Q", len(data))
  return (
    length
    + struct.pack("<I", masked_crc32c(length))
    + data
    + struct.pack("<I", masked_crc32c(data))
  )


def _is_remote(path: epath.Path) -> bool:
  return "://" in os.fspath(path)


def _replace(path: epath.Path, text: str) -> None:
  """Replaces a file at once: a reader, or a run after a kill, finds the old text or the new, never a part of it."""
  if _is_remote(path):  # An object store puts whole objects only.
    path.write_text(text, encoding="utf-8")
  else:
    temporary = path.parent / f"{path.name}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def check_wandb(project: str) -> None:
  """Raises UserError if there is a project and wandb is not installed."""
  if not project:
    return
  try:
    import wandb  # noqa: F401
  except ImportError as error:
    raise UserError(
      f"config.train.wandb_project = {project!r} needs wandb: pip install 'diffjax[wandb]', or leave the field empty"
    ) from error


def _open_wandb(
  project: str, workdir: epath.Path, config: Mapping[str, Any]
) -> Any:
  check_wandb(project)
  import wandb

  # The id lies in the workdir, so that a restart goes on in the same W&B run.
  identity = workdir / "wandb_id.txt"
  if not identity.exists():
    identity.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
  local = tempfile.gettempdir() if _is_remote(workdir) else os.fspath(workdir)
  return wandb.init(
    project=project,
    id=identity.read_text(encoding="utf-8").strip(),
    resume="allow",
    config=dict(config),
    dir=local,
  )
