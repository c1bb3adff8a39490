"""A workdir has one writer, until that writer ends or is killed."""

import os
import signal
import subprocess
import sys

import pytest

from diffjax.config import (
  Config,
  DataConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  UserError,
)
from diffjax.host.lock import LostWorkdir, lock
from diffjax.training import loop

# Holds the lock. Its three children outlive it.
HOLDER = """
import multiprocessing, os, subprocess, sys, time
from diffjax.host.lock import lock

if __name__ == "__main__":
  with lock(sys.argv[1]):
    context = multiprocessing.get_context("spawn")
    spawned = context.Process(target=time.sleep, args=(60,))
    spawned.start()
    executed = subprocess.Popen(
      ["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL
    )
    forked = os.fork()
    if not forked:
      os.close(1)
      time.sleep(60)
    print(spawned.pid, executed.pid, forked, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
  """Another process that holds the lock of a workdir, and its children."""
  script = tmp_path / "holder.py"
  script.write_text(HOLDER)
  process = subprocess.Popen(
    [sys.executable, script, tmp_path / "run"],
    stdout=subprocess.PIPE,
    text=True,
  )
  children = [int(number) for number in process.stdout.readline().split()]
  yield tmp_path / "run", process, children
  process.kill()
  process.wait()
  process.stdout.close()
  for child in children:
    os.kill(child, signal.SIGKILL)


def test_a_second_writer_is_refused_until_the_first_is_killed(holder):
  workdir, process, children = holder
  message = (
    rf"{workdir} is in use by process {process.pid} on .*:"
    " wait until it ends, .*another --workdir"
  )
  with pytest.raises(UserError, match=message):
    with lock(workdir):
      pass
  process.kill()
  process.wait()
  # The children still exist.
  for child in children:
    os.kill(child, 0)
  with lock(workdir):
    pass


def test_training_and_pruning_are_refused(command, holder, tmp_path):
  workdir, _, _ = holder
  (tmp_path / "text").mkdir()
  for index in range(20):
    (tmp_path / "text" / f"{index}.txt").write_text(f"document {index}\n" * 20)
  config = Config(
    model=ModelConfig(
      num_layers=1,
      embed_dim=16,
      num_heads=1,
      num_kv_heads=1,
      head_dim=8,
      ffn_dim=32,
      max_length=64,
    ),
    data=DataConfig(
      source=f"text:{tmp_path}/text/*.txt",
      validation_fraction=0.2,
      length=32,
      prepared_dir=str(tmp_path / "rows"),
    ),
    optimizer=OptimizerConfig(warmup_steps=0),
    train=TrainConfig(steps=1, batch_size=8),
    mesh=MeshConfig(),
  )
  with pytest.raises(UserError, match="is in use by process"):
    loop.train(config, str(workdir))
  assert os.listdir(workdir) == ["lock"]
  (workdir / "checkpoints").mkdir()
  result = command("diffjax.checkpoints", f"--workdir={workdir}", "--prune")
  assert result.returncode == 1
  assert result.stderr.startswith("error: ")
  assert "is in use by process" in result.stderr


def test_a_second_run_of_the_process_is_refused(tmp_path):
  """The refusal does not free the lock for other processes."""
  workdir = tmp_path / "run"
  link = tmp_path / "link"
  link.symlink_to(workdir)
  with lock(workdir):
    for path in (workdir, f"{tmp_path}/./run", link):
      with pytest.raises(UserError, match="in use by another run of this proc"):
        with lock(path):
          pass
    with lock(tmp_path / "other"):
      pass
    code = (
      "import sys; from diffjax.host.lock import lock\n"
      "with lock(sys.argv[1]): pass"
    )
    result = subprocess.run(
      [sys.executable, "-c", code, workdir], capture_output=True, text=True
    )
    assert f"is in use by process {os.getpid()} on " in result.stderr
  with lock(link):
    pass


# A lock of a directory that is no longer the workdir.


def test_a_lock_is_lost_while_its_workdir_is_moved(tmp_path):
  workdir = tmp_path / "run"
  with lock(workdir) as workdir_lock:
    workdir_lock.check()

    workdir.rename(tmp_path / "old")
    with pytest.raises(LostWorkdir, match=f"{workdir} is no longer the dir"):
      workdir_lock.check()

    (tmp_path / "old").rename(workdir)
    workdir_lock.check()


def test_a_lock_is_lost_if_a_new_run_has_its_path(tmp_path):
  workdir = tmp_path / "run"
  with lock(workdir) as old_lock:
    workdir.rename(tmp_path / "old")
    workdir.mkdir()
    with lock(workdir) as new_lock:
      new_lock.check()
      with pytest.raises(LostWorkdir):
        old_lock.check()


def test_a_lock_is_lost_if_its_link_points_to_another_workdir(tmp_path):
  link = tmp_path / "link"
  (tmp_path / "run").mkdir()
  link.symlink_to(tmp_path / "run")
  with lock(link) as link_lock, lock(tmp_path / "other"):
    link_lock.check()

    link.unlink()
    link.symlink_to(tmp_path / "other")
    with pytest.raises(LostWorkdir):
      link_lock.check()


def test_a_lock_is_lost_if_its_file_is_deleted(tmp_path):
  workdir = tmp_path / "run"
  with lock(workdir) as workdir_lock:
    (workdir / "lock").unlink()
    with pytest.raises(LostWorkdir):
      workdir_lock.check()
