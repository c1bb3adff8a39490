"""The files of metrics survive restarts, kills and full disks."""

import errno
import io
import json
import math
import os
import pathlib
import sys
import time
from typing import Any

import jax.numpy as jnp
import pytest
from etils import epath

from diffjax.config import UserError
from diffjax.training import metrics


def read_log(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the entries of a run's log, which must all be complete."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def logged_steps(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of the log."""
  return [entry["step"] for entry in read_log(workdir)]


def open_writer(
  workdir: pathlib.Path, start_step: int = 0, **options: Any
) -> metrics.MetricWriter:
  """Opens the metrics of a run that starts from a step."""
  config = {"train": {"steps": 9}}
  return metrics.MetricWriter(workdir, config, start_step=start_step, **options)


def write_steps(workdir: pathlib.Path, steps: list[int]) -> None:
  """Writes the metrics of a new run."""
  writer = open_writer(workdir)
  for step in steps:
    writer.write(step, {"train/loss": 1 / step})
  writer.close()


# The log, metrics.jsonl.


def test_an_entry_has_its_values_and_its_time(tmp_path):
  values = {"train/loss": jnp.float32(0.1), "train/grad_norm": math.inf}
  writer = open_writer(tmp_path)

  writer.write(10, values)
  writer.close()

  [entry] = read_log(tmp_path)
  assert entry["step"] == 10
  assert entry["train/loss"] == pytest.approx(0.1)
  # JSON has no infinity.
  assert entry["train/grad_norm"] is None
  # Seconds since 1970. This is a time in November 2023.
  assert entry["time"] > 1.7e9


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_resume_removes_the_entries_of_steps_that_it_repeats(
  tmp_path, monkeypatch, is_remote
):
  """The run is killed after step 30, and is resumed from step 20.

  It behaves the same in a directory and in an object store (`is_remote`).
  """
  monkeypatch.setattr(metrics, "is_remote", lambda path: is_remote)
  write_steps(tmp_path, [10, 20, 30])
  # A killed run leaves an incomplete line.
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 31, "tra')

  writer = open_writer(tmp_path, start_step=20)
  writer.write(25, {"train/loss": 7.0})
  writer.close()

  assert logged_steps(tmp_path) == [10, 20, 25]
  # Each run has a TensorBoard file of its own, and no other files remain.
  assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2
  assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "tensorboard"]


def test_an_entry_is_on_disk_as_soon_as_it_is_written(tmp_path):
  """A kill of the run loses no entries."""
  writer = open_writer(tmp_path)

  writer.write(25, {"train/loss": 7.0})

  assert logged_steps(tmp_path) == [25]
  writer.close()


def test_a_step_without_metrics_has_no_entry(tmp_path):
  writer = open_writer(tmp_path)

  writer.write(26, {})
  writer.close()

  assert read_log(tmp_path) == []


def test_a_log_in_an_object_store_is_uploaded_once_a_minute(
  tmp_path, monkeypatch
):
  """Such a store cannot append to a file, so the whole log is uploaded."""
  now = 1000.0
  monkeypatch.setattr(metrics, "is_remote", lambda path: True)
  monkeypatch.setattr(time, "monotonic", lambda: now)
  writer = open_writer(tmp_path)

  writer.write(1, {"train/loss": 1.0})
  # The first minute is not over.
  assert logged_steps(tmp_path) == []

  # The next entry is written 61 seconds later.
  now += 61
  writer.write(2, {"train/loss": 1.0})
  assert logged_steps(tmp_path) == [1, 2]
  assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_resume_that_cannot_write_the_log_does_not_change_it(
  tmp_path, monkeypatch
):
  """A resume rewrites the log, and the disk is full after half of it."""
  write_steps(tmp_path, [10, 20, 30])
  log = tmp_path / "metrics.jsonl"
  old_content = log.read_text()

  def write_half(path, data):
    with open(path, "wb") as file:
      file.write(data[: len(data) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(type(epath.Path(tmp_path)), "write_bytes", write_half)
  message = "cannot write metrics in .*No space left"
  with pytest.raises(UserError, match=message):
    open_writer(tmp_path, start_step=20)

  assert log.read_text() == old_content


def test_lines_that_are_no_entries_are_not_read(tmp_path):
  """A kill, a full disk or a power cut leaves such lines."""
  log = tmp_path / "metrics.jsonl"
  lines = [
    b'{"step": 1, "train/loss": 3.0}',
    b'{"step": 2, "tr',
    b"\xff\xfe",
    b"[2]",
    b'{"train/loss": 1.0}',
    b"\0\0",
    b'{"step": 3, "train/loss": 2.0}',
  ]
  log.write_bytes(b"\n".join(lines))

  assert metrics.read_log(log) == [
    {"step": 1, "train/loss": 3.0},
    {"step": 3, "train/loss": 2.0},
  ]


# TensorBoard.


def read_events(workdir: pathlib.Path) -> list[Any]:
  """Returns the events of all TensorBoard files, in order of their names."""
  from tensorboardX.proto import event_pb2

  events = []
  for file in sorted((workdir / "tensorboard").glob("events*")):
    data = file.read_bytes()
    start = 0
    while start < len(data):
      # A TFRecord: length, its checksum, the record, its checksum.
      size = int.from_bytes(data[start : start + 8], "little")
      record = data[start + 12 : start + 12 + size]
      events.append(event_pb2.Event.FromString(record))
      start += size + 16
  return events


@pytest.fixture
def events_of_a_resumed_run(tmp_path):
  """A run writes step 3. It is resumed from step 2 and writes step 5."""
  for start_step, step in ((0, 3), (2, 5)):
    writer = open_writer(tmp_path, start_step=start_step)
    writer.write(step, {"train/loss": 0.5})
    writer.close()
  return read_events(tmp_path)


def test_tensorboard_has_the_metrics(events_of_a_resumed_run):
  """Both sessions of the run write a loss of 0.5, at step 3 and at step 5."""
  points = []
  for event in events_of_a_resumed_run:
    for value in event.summary.value:
      if value.tag == "train/loss":
        points.append((event.step, value.simple_value))
  assert points == [(3, 0.5), (5, 0.5)]


def test_tensorboard_hides_the_steps_that_a_resume_repeats(
  events_of_a_resumed_run,
):
  """The run starts from step 0, and is resumed from step 2.

  TensorBoard hides the older events from the step of a session's start on. The
  first step of a session is the one after that from which it starts.
  """
  session_starts = []
  for event in events_of_a_resumed_run:
    if event.WhichOneof("what") == "session_log":
      session_starts.append(event.step)
  assert session_starts == [1, 3]


# A full disk.


class FileOnFullDisk(io.FileIO):
  """A file on a disk with a limited number of free bytes."""

  free_bytes = 1 << 30

  def write(self, data):
    if FileOnFullDisk.free_bytes == 0:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    written = super().write(data[: FileOnFullDisk.free_bytes])
    FileOnFullDisk.free_bytes -= written
    return written


def steps_of_events(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of TensorBoard's events with values."""
  return [event.step for event in read_events(workdir) if event.summary.value]


@pytest.mark.parametrize("free_bytes", [0, 10, 100])
def test_no_entry_is_lost_or_cut_on_a_full_disk(
  tmp_path, monkeypatch, free_bytes
):
  """The disk is full during steps 2 to 299, after it took a few more bytes.

  These entries are more than the buffers of Python hold.
  """

  def open_file_on_full_disk(path, mode, buffering):
    assert buffering == 0
    return FileOnFullDisk(path, mode)

  # The module has no name "open", so this hides Python's function from it.
  monkeypatch.setattr(metrics, "open", open_file_on_full_disk, raising=False)
  writer = open_writer(tmp_path)

  writer.write(1, {"train/loss": 1.0})
  with monkeypatch.context() as patch:
    patch.setattr(FileOnFullDisk, "free_bytes", free_bytes)
    for step in range(2, 300):
      writer.write(step, {"train/loss": 1.0, "train/grad_norm": 1.0})
    assert FileOnFullDisk.free_bytes == 0
  writer.write(300, {"train/loss": 1.0})
  writer.close()

  steps_1_to_300 = list(range(1, 301))
  assert logged_steps(tmp_path) == steps_1_to_300
  # TensorBoard also has an event of step 0, with the config.
  assert steps_of_events(tmp_path) == [0, *steps_1_to_300]


def test_other_processes_write_nothing(tmp_path):
  """In a run of several processes, one of them is the writer."""
  writer = open_writer(tmp_path, is_writer=False)

  writer.write(1, {"train/loss": 1.0})
  writer.close()

  assert not list(tmp_path.iterdir())


# Weights & Biases.


def test_a_missing_wandb_is_an_error(tmp_path, monkeypatch):
  """The config names a project of Weights & Biases, without the package."""
  # Importing the module then raises ImportError.
  monkeypatch.setitem(sys.modules, "wandb", None)

  message = (
    r"config.train.wandb_project = 'mine' needs wandb: pip install"
    r" 'diffjax\[wandb\]'"
  )
  with pytest.raises(UserError, match=message):
    open_writer(tmp_path, wandb_project="mine")


class FakeWandb:
  """Stands for the module wandb, and for a run of it."""

  def __init__(self):
    self.run_ids = []
    self.logged = []
    self.num_finished = 0

  def init(self, **options):
    self.run_ids.append(options["id"])
    return self

  def log(self, values, step):
    self.logged.append((step, values))

  def finish(self):
    self.num_finished += 1


def test_a_resume_continues_the_run_of_wandb(tmp_path, monkeypatch):
  """The two sessions of a run pass the same id to `wandb.init`."""
  wandb = FakeWandb()
  monkeypatch.setitem(sys.modules, "wandb", wandb)

  # The first session takes step 1, and the second session step 2.
  for start_step in (0, 1):
    writer = open_writer(tmp_path, wandb_project="mine", start_step=start_step)
    writer.write(start_step + 1, {"train/loss": 2.0})
    writer.close()

  first_id, second_id = wandb.run_ids
  assert first_id == second_id
  assert wandb.logged == [(1, {"train/loss": 2.0}), (2, {"train/loss": 2.0})]
  assert wandb.num_finished == 2
