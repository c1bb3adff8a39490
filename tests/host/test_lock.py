"""A workdir has one writer, until that process ends or dies."""

import os
import pathlib
import signal
import subprocess
import sys
from typing import NamedTuple

import pytest

from diffjax.config import Config, DataConfig, TrainConfig, UserError
from diffjax.host.lock import LostWorkdir, lock
from diffjax.training import loop

# Locks a workdir, and prints the numbers of three children that outlive it.
HOLD_LOCK_WITH_CHILDREN = """
import multiprocessing
import os
import subprocess
import sys
import time

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


class Holder(NamedTuple):
  """A process that holds the lock of a workdir, and its children."""

  workdir: pathlib.Path
  process: subprocess.Popen
  children: list[int]


@pytest.fixture
def holder(tmp_path):
  """Another process that holds the lock of tmp_path / "run"."""
  workdir = tmp_path / "run"
  script = tmp_path / "holder.py"
  script.write_text(HOLD_LOCK_WITH_CHILDREN)
  process = subprocess.Popen(
    [sys.executable, script, workdir], stdout=subprocess.PIPE, text=True
  )
  children = [int(number) for number in process.stdout.readline().split()]
  yield Holder(workdir, process, children)
  process.kill()
  process.wait()
  process.stdout.close()
  for child in children:
    os.kill(child, signal.SIGKILL)


def test_a_workdir_in_use_by_another_process_is_refused(holder):
  message = (
    rf"{holder.workdir} is in use by process {holder.process.pid} on .*:"
    " wait until it ends, .*another --workdir"
  )

  with pytest.raises(UserError, match=message):
    with lock(holder.workdir):
      pass


def test_a_killed_process_frees_its_workdir_although_its_children_live(holder):
  """The children inherit the open lock file, but not the lock itself."""
  holder.process.kill()
  holder.process.wait()

  # Signal 0 raises an error if a process does not exist.
  for child in holder.children:
    os.kill(child, 0)
  # This raises an error if another process holds the lock.
  with lock(holder.workdir):
    pass


def test_training_in_a_workdir_in_use_is_refused(holder, tmp_path):
  """Another process holds the lock, which stays the only file there."""
  # The data are prepared before the workdir is locked.
  for index in range(20):
    (tmp_path / f"{index}.txt").write_text(f"document {index}\n" * 20)
  data = DataConfig(
    source=f"text:{tmp_path}/*.txt",
    validation_fraction=0.2,
    length=32,
    prepared_dir=str(tmp_path / "rows"),
  )
  config = Config(data=data, train=TrainConfig(steps=1))

  with pytest.raises(UserError, match="is in use by process"):
    loop.train(config, str(holder.workdir))

  assert os.listdir(holder.workdir) == ["lock"]


@pytest.mark.full
def test_deleting_checkpoints_of_a_workdir_in_use_is_refused(command, holder):
  (holder.workdir / "checkpoints").mkdir()

  result = command(
    "diffjax.checkpoints", f"--workdir={holder.workdir}", "--prune"
  )

  assert result.returncode == 1
  assert result.stderr.startswith("error: ")
  assert "is in use by process" in result.stderr


def test_a_process_can_lock_two_workdirs(tmp_path):
  with lock(tmp_path / "run"), lock(tmp_path / "other"):
    pass


def test_a_second_run_of_a_process_in_a_workdir_is_refused(tmp_path):
  """It is refused by each path of the same directory, also through a link."""
  workdir = tmp_path / "run"
  link = tmp_path / "link"
  link.symlink_to(workdir)

  with lock(workdir):
    for path in (workdir, f"{tmp_path}/./run", link):
      with pytest.raises(UserError, match="in use by another run of this proc"):
        with lock(path):
          pass

  # The lock is free after the first run.
  with lock(link):
    pass


# Locks the workdir of the first argument.
LOCK_WORKDIR = """
import sys
from diffjax.host.lock import lock

with lock(sys.argv[1]):
  pass
"""


def test_a_refused_second_run_does_not_free_the_lock(tmp_path):
  """Otherwise, another process could write in the workdir."""
  workdir = tmp_path / "run"

  with lock(workdir):
    with pytest.raises(UserError):
      with lock(workdir):
        pass
    # A third run, in another process, is refused too.
    result = subprocess.run(
      [sys.executable, "-c", LOCK_WORKDIR, workdir],
      capture_output=True,
      text=True,
    )

  assert f"is in use by process {os.getpid()} on " in result.stderr


def test_a_renamed_workdir_is_lost_until_it_is_renamed_back(tmp_path):
  """`check` raises LostWorkdir if the run must not write at its path."""
  workdir = tmp_path / "run"
  renamed_workdir = tmp_path / "renamed"

  with lock(workdir) as run_lock:
    run_lock.check()
    workdir.rename(renamed_workdir)
    with pytest.raises(LostWorkdir, match=f"{workdir} is no longer the dir"):
      run_lock.check()

    renamed_workdir.rename(workdir)
    run_lock.check()


def test_a_workdir_with_a_new_directory_in_its_place_is_lost(tmp_path):
  """A new run may write there, which has a lock of its own."""
  workdir = tmp_path / "run"

  with lock(workdir) as old_lock:
    workdir.rename(tmp_path / "renamed")
    workdir.mkdir()
    with lock(workdir) as new_lock:
      new_lock.check()
      with pytest.raises(LostWorkdir):
        old_lock.check()


def test_a_workdir_whose_link_points_elsewhere_is_lost(tmp_path):
  """The link then leads to a directory that another run has locked."""
  workdir = tmp_path / "run"
  other_workdir = tmp_path / "other"
  workdir.mkdir()
  link = tmp_path / "link"
  link.symlink_to(workdir)

  with lock(link) as run_lock, lock(other_workdir):
    run_lock.check()
    link.unlink()
    link.symlink_to(other_workdir)
    with pytest.raises(LostWorkdir):
      run_lock.check()


def test_a_workdir_without_its_lock_file_is_lost(tmp_path):
  """Another run could make the file again and lock it."""
  workdir = tmp_path / "run"

  with lock(workdir) as run_lock:
    (workdir / "lock").unlink()
    with pytest.raises(LostWorkdir):
      run_lock.check()


def test_a_workdir_that_cannot_be_made_is_an_error(tmp_path):
  file = tmp_path / "file"
  file.write_text("")

  message = "cannot write in the workdir .*/file/run: Not a directory"
  with pytest.raises(UserError, match=message):
    with lock(file / "run"):
      pass


def test_object_stores_have_no_lock(tmp_path, monkeypatch):
  """Two runs can have the same workdir there, and no file is written."""
  monkeypatch.chdir(tmp_path)

  with lock("gs://bucket/run"), lock("gs://bucket/run"):
    # A local directory named "gs:" would be a mistake.
    assert not list(tmp_path.iterdir())
