"""Logs survive restarts."""

import errno
import io
import json
import math
import os
import sys

import jax.numpy as jnp
import pytest
from etils import epath

from diffjax.config import UserError
from diffjax.training import metrics


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def open_metrics(workdir, start_step=0, **kwargs):
  return metrics.MetricWriter(
    workdir, {"train": {"steps": 9}}, start_step=start_step, **kwargs
  )


@pytest.mark.parametrize("remote", [False, True])
def test_jsonl_drops_the_steps_that_are_taken_again(
  tmp_path, monkeypatch, remote
):
  monkeypatch.setattr(metrics, "is_remote", lambda path: remote)
  writer = open_metrics(tmp_path)
  for step in (10, 20, 30):
    writer.write(
      step, {"train/loss": jnp.float32(1 / step), "train/grad_norm": math.inf}
    )
  writer.close()
  path = tmp_path / "metrics.jsonl"
  path.write_text(
    path.read_text() + '{"step": 31, "tra'
  )  # killed while it wrote
  writer = open_metrics(tmp_path, start_step=20)
  writer.write(25, {"train/loss": 7.0})
  writer.write(26, {})
  if not remote:
    assert [line["step"] for line in read(path)] == [10, 20, 25], (
      "a line is on disk at once"
    )
  writer.close()
  lines = read(path)
  assert [line["step"] for line in lines] == [10, 20, 25]
  assert (
    lines[0]["train/loss"] == pytest.approx(0.1)
    and lines[0]["train/grad_norm"] is None
    and lines[0]["time"] > 1.7e9
  )
  assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2
  assert sorted(file.name for file in tmp_path.iterdir()) == [
    "metrics.jsonl",
    "tensorboard",
  ]


def test_a_resume_that_cannot_rewrite_the_log_leaves_it_whole(
  tmp_path, monkeypatch
):
  writer = open_metrics(tmp_path)
  for step in (10, 20, 30):
    writer.write(step, {"train/loss": 1.0})
  writer.close()
  path = tmp_path / "metrics.jsonl"
  before = path.read_text()

  def until_the_disk_is_full(path, data):
    with open(path, "wb") as file:
      file.write(data[: len(data) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(
    type(epath.Path(tmp_path)), "write_bytes", until_the_disk_is_full
  )
  with pytest.raises(
    UserError, match="cannot write metrics in .*No space left"
  ):
    open_metrics(tmp_path, start_step=20)
  assert path.read_text() == before


def test_torn_lines_of_a_log_do_not_count(tmp_path):
  """Whatever a kill, a full disk or a power cut left: the reader of a finished run's log must not end that run."""
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(
    b'{"step": 1, "train/loss": 3.0}\n{"step": 2, "tr\n\xff\xfe\n[2]\n{"train/loss": 1.0}\n\0\0\n{"step": 3, "train/loss": 2.0}'
  )
  assert metrics.read_log(path) == [
    {"step": 1, "train/loss": 3.0},
    {"step": 3, "train/loss": 2.0},
  ]


def test_remote_workdir_is_written_at_intervals(tmp_path, monkeypatch):
  monkeypatch.setattr(metrics, "is_remote", lambda path: True)
  monkeypatch.setattr(metrics, "_UPLOAD_INTERVAL_SECONDS", 0.0)
  writer = open_metrics(tmp_path)
  writer.write(1, {"train/loss": 1.0})
  assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1]
  assert list((tmp_path / "tensorboard").glob("events*"))


def read_events(workdir):
  """Returns the events of all TensorBoard files, in the order of their names."""
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


def test_tensorboard_holds_the_numbers_and_the_purge(tmp_path):
  for start_step, step in ((0, 3), (2, 5)):
    writer = open_metrics(tmp_path, start_step=start_step)
    writer.write(step, {"train/loss": 0.5})
    writer.close()

  events = read_events(tmp_path)
  scalars = [
    (event.step, value.simple_value)
    for event in events
    for value in event.summary.value
    if value.tag == "train/loss"
  ]
  assert scalars == [(3, 0.5), (5, 0.5)]
  starts = [
    event.step for event in events if event.WhichOneof("what") == "session_log"
  ]
  assert starts == [1, 3], (
    "TensorBoard hides what came from step 3 on before the restart"
  )


class FileOnFullDisk(io.FileIO):
  """A file on a disk that has room for some bytes."""

  room = 1 << 30

  def write(self, data):
    if FileOnFullDisk.room == 0:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    written = super().write(data[: FileOnFullDisk.room])
    FileOnFullDisk.room -= written
    return written


@pytest.mark.parametrize("room", [0, 10, 100])
def test_a_full_disk_tears_no_line_and_no_event(tmp_path, monkeypatch, room):
  opened = []

  def open_file(path, mode, buffering):
    assert buffering == 0
    opened.append(path)
    return FileOnFullDisk(path, mode)

  monkeypatch.setattr(metrics, "open", open_file, raising=False)
  writer = open_metrics(tmp_path)
  assert len(opened) == 2
  writer.write(1, {"train/loss": 1.0})
  with monkeypatch.context() as patch:
    patch.setattr(FileOnFullDisk, "room", room)
    # More than the buffers of Python.
    for step in range(2, 300):
      writer.write(step, {"train/loss": 1.0, "train/grad_norm": 1.0})
  writer.write(300, {"train/loss": 1.0})
  writer.close()
  steps = list(range(1, 301))
  assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == steps
  summaries = [event for event in read_events(tmp_path) if event.summary.value]
  assert [event.step for event in summaries] == [0, *steps], "0: the config"


def test_other_processes_write_nothing(tmp_path):
  writer = open_metrics(tmp_path, is_writer=False)
  writer.write(1, {"train/loss": 1.0})
  writer.close()
  assert not list(tmp_path.iterdir())


def test_missing_wandb_is_a_clear_error(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(
    UserError,
    match=r"config.train.wandb_project = 'mine' needs wandb: pip install 'diffjax\[wandb\]'",
  ):
    open_metrics(tmp_path, wandb_project="mine")


def test_wandb_run_goes_on_after_a_restart(tmp_path, monkeypatch):
  seen = []

  class Wandb:
    def init(self, **kwargs):
      seen.append(kwargs["id"])
      return self

    def log(self, values, step):
      seen.append((step, values))

    def finish(self):
      seen.append("finished")

  monkeypatch.setitem(sys.modules, "wandb", Wandb())
  for start_step in (0, 1):
    writer = open_metrics(tmp_path, wandb_project="mine", start_step=start_step)
    writer.write(start_step + 1, {"train/loss": 2.0})
    writer.close()
  assert (
    seen[0] == seen[3]
    and seen[1] == (1, {"train/loss": 2.0})
    and seen[2] == "finished"
  )
