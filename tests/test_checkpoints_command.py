"""The command diffjax.checkpoints lists, verifies and prunes checkpoints."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from etils import epath

from diffjax.training import manifest
from tests.harness import in_process


def run(*arguments: str) -> subprocess.CompletedProcess:
  """Runs the command."""
  result = in_process.call("diffjax.checkpoints", *arguments)
  assert "Traceback" not in result.stderr
  return result


def save(
  workdir: pathlib.Path,
  step: int,
  loss: float | None = None,
  num_bytes: int = 1000,
) -> pathlib.Path:
  """Writes a file and its manifest, which is a checkpoint to the command."""
  directory = workdir / "checkpoints" / str(step)
  (directory / "state").mkdir(parents=True)
  (directory / "state" / "data").write_bytes(bytes([step]) * num_bytes)
  scores = {}
  if loss is not None:
    scores["validation/loss"] = loss
  manifest.write(epath.Path(directory), step, scores)
  return directory


@pytest.fixture
def workdir(tmp_path):
  """A workdir with five steps and an unfinished save.

  Step 20 is the best one, and step 40 is damaged.
  """
  save(tmp_path, 10, loss=3.0)
  save(tmp_path, 20, loss=2.0)
  save(tmp_path, 30, loss=2.5)
  damaged = save(tmp_path, 40)
  save(tmp_path, 50, loss=2.75)
  (damaged / "state/data").write_bytes(bytes(1000))
  (tmp_path / "checkpoints/60.orbax-checkpoint-tmp").mkdir()
  return tmp_path


def test_a_manifest_has_the_time_of_its_save(workdir):
  text = (workdir / "checkpoints/50/manifest.json").read_text()

  # Seconds since 1970. This is a time in November 2023.
  assert json.loads(text)["time"] > 1.7e9


def test_the_list_has_a_line_for_each_step_and_unfinished_save(workdir):
  """Orbax writes a save into a directory with this ending, and renames it."""
  result = run(f"--workdir={workdir}")

  assert result.returncode == 0
  assert not result.stderr
  lines = result.stdout.splitlines()
  first_words = [line.split()[0] for line in lines]
  steps = ["10", "20", "30", "40", "50"]
  assert first_words == ["step", *steps, "60.orbax-checkpoint-tmp:"]


def test_the_list_marks_the_best_and_the_newest_step(workdir):
  """Step 20 has the lowest loss.

  The list compares only sizes of files, so the damaged step 40 is listed as
  complete.
  """
  lines = run(f"--workdir={workdir}").stdout.splitlines()

  _, _, step_20, _, step_40, step_50, _ = lines
  assert step_20.endswith(" complete, best")
  assert step_40.endswith(" complete")
  assert step_50.endswith(" complete, newest")


def test_the_list_has_the_validation_loss(tmp_path):
  save(tmp_path, 10, loss=2.0)

  heading, line = run(f"--workdir={tmp_path}").stdout.splitlines()

  assert "loss" in heading
  # Losses have four decimals.
  assert "2.0000" in line.split()


def test_sizes_are_in_mib(tmp_path):
  save(tmp_path, 10, num_bytes=3 * 2**20)

  heading, line = run(f"--workdir={tmp_path}").stdout.splitlines()

  # The time, in the second column, has two words.
  assert heading.split()[2] == "MiB"
  assert line.split()[3] == "3.0"


def test_verifying_reports_a_damaged_step(workdir):
  """Step 40 is damaged: its file has other bytes than were saved."""
  result = run(f"--workdir={workdir}", "--verify")

  assert result.returncode == 1
  assert result.stderr == "error: not complete: 40\n"
  # A heading and the steps 10, 20 and 30 come first.
  line_of_step_40 = result.stdout.splitlines()[4]
  assert (
    "not complete: state/data is not as it was written: its sha256 differs"
  ) in line_of_step_40


def test_pruning_keeps_the_newest_and_the_best_step(workdir):
  """Step 50 is the newest one, and step 20 has the lowest loss."""
  result = run(f"--workdir={workdir}", "--prune", "--keep=1")

  assert result.returncode == 0
  assert not result.stderr
  # Each line has the path of a deleted directory, a colon and the reason.
  deleted_names = []
  for line in result.stdout.splitlines():
    path, _, _ = line.partition(":")
    deleted_names.append(pathlib.Path(path).name)
  assert deleted_names == ["60.orbax-checkpoint-tmp", "10", "30", "40"]
  assert sorted(os.listdir(workdir / "checkpoints")) == ["20", "50"]


def test_pruned_checkpoints_are_complete(workdir):
  """The damaged step 40 is deleted, and steps 20 and 50 remain."""
  run(f"--workdir={workdir}", "--prune", "--keep=1")

  result = run(f"--workdir={workdir}", "--verify")

  assert result.returncode == 0
  # A heading and two steps.
  assert len(result.stdout.splitlines()) == 3


def test_pruning_deletes_nothing_if_no_step_is_complete(tmp_path):
  """The only step lacks a file, but its other files may be of use."""
  directory = save(tmp_path, 10)
  (directory / "state/data").unlink()

  result = run(f"--workdir={tmp_path}", "--prune", "--keep=1")

  assert result.returncode == 1
  assert "is complete: nothing is deleted" in result.stderr
  assert directory.exists()


@pytest.mark.parametrize(
  ("arguments", "exit_code", "message"),
  [
    pytest.param([], 2, "error: pass --workdir=DIR", id="no workdir"),
    pytest.param(
      ["--workdir=/nowhere"],
      1,
      "error: there are no checkpoints in /nowhere: /nowhere/checkpoints is"
      " missing",
      id="missing workdir",
    ),
    pytest.param(
      ["--workdir=/nowhere", "--prune", "--keep=0"],
      2,
      "error: flag --keep=0: 0 is not a positive integer",
      id="keep nothing",
    ),
    pytest.param(
      ["--workdir=/nowhere", "--keep=x"],
      2,
      "error: flag --keep=x: invalid literal",
      id="no number",
    ),
    pytest.param(
      ["--workdir=/nowhere", "--config=x"],
      2,
      "error: Unknown command line flag 'config'",
      id="unknown flag",
    ),
    pytest.param(
      ["runs/tiny"], 2, "error: unexpected argument 'runs/tiny'", id="no flag"
    ),
  ],
)
def test_a_wrong_argument_is_explained_in_one_line(
  arguments, exit_code, message
):
  """The exit code is 2 for wrong usage and 1 for other errors."""
  result = run(*arguments)

  assert result.returncode == exit_code
  [line] = result.stderr.splitlines()
  assert line.startswith(message)


def test_an_empty_directory_of_checkpoints_is_an_error(tmp_path):
  """The workdir may be the wrong one."""
  (tmp_path / "checkpoints").mkdir()

  result = run(f"--workdir={tmp_path}")

  assert result.returncode == 1
  [line] = result.stderr.splitlines()
  assert line.startswith("error: ")


def test_a_file_in_place_of_the_checkpoints_is_an_error(tmp_path):
  (tmp_path / "checkpoints").write_text("")

  result = run(f"--workdir={tmp_path}")

  assert result.returncode == 1
  [line] = result.stderr.splitlines()
  assert line.startswith("error: ")


@pytest.mark.parametrize(
  "flags",
  [pytest.param([], id="list"), pytest.param(["--prune"], id="prune")],
)
def test_a_closed_pipe_ends_the_command_without_a_message(workdir, flags):
  """For example in `python -m diffjax.checkpoints --workdir=DIR | head -1`."""
  reader, writer = os.pipe()
  os.close(reader)
  arguments = ["-m", "diffjax.checkpoints", f"--workdir={workdir}", *flags]

  result = subprocess.run(
    [sys.executable, "-u", *arguments],
    cwd=in_process.ROOT,
    stdout=writer,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(writer)

  assert result.returncode == 128 + signal.SIGPIPE
  assert not result.stderr


def test_the_command_does_not_import_jax():
  """Importing JAX takes seconds, which would delay a list of files."""
  print_modules = "import sys, diffjax.checkpoints; print(*sys.modules)"

  result = subprocess.run(
    [sys.executable, "-c", print_modules],
    capture_output=True,
    text=True,
    check=True,
  )

  imported_modules = set(result.stdout.split())
  assert "diffjax.checkpoints" in imported_modules
  assert imported_modules.isdisjoint({"jax", "orbax", "numpy"})
