"""python -m diffjax.checkpoints as typed: one clear line for what cannot be done, and only what may go is deleted."""

import json
import os
import signal
import subprocess
import sys

import pytest
from etils import epath

from diffjax.training import manifest
from tests.harness import in_process


def run(*args):
  result = in_process.call("diffjax.checkpoints", *args)
  assert "Traceback" not in result.stderr
  return result


def save(workdir, step, loss=None):
  """A step as the command sees it: files and their manifest."""
  path = workdir / "checkpoints" / str(step)
  (path / "state").mkdir(parents=True)
  (path / "state" / "data").write_bytes(bytes([step]) * 1000)
  manifest.write(
    epath.Path(path), step, {} if loss is None else {"validation/loss": loss}
  )
  return path


@pytest.fixture
def workdir(tmp_path):
  for step, loss in [(10, 3.0), (20, 2.0), (30, 2.5), (40, None), (50, 2.75)]:
    path = save(tmp_path, step, loss)
  (tmp_path / "checkpoints/40/state/data").write_bytes(bytes(1000))
  (tmp_path / "checkpoints/60.orbax-checkpoint-tmp").mkdir()
  assert json.loads((path / "manifest.json").read_text())["time"] > 1.7e9
  return tmp_path


def test_sizes_are_in_mib(tmp_path):
  with (save(tmp_path, 10) / "state/data").open("wb") as file:
    file.truncate(3 << 20)
  manifest.write(epath.Path(tmp_path / "checkpoints/10"), 10, {})
  lines = run(f"--workdir={tmp_path}").stdout.splitlines()
  assert lines[0].split()[2] == "MiB" and lines[1].split()[3] == "3.0"


def test_list_and_verify(workdir):
  listed = run(f"--workdir={workdir}")
  lines = listed.stdout.splitlines()
  assert listed.returncode == 0 and not listed.stderr
  assert [line.split()[0] for line in lines] == [
    "step",
    "10",
    "20",
    "30",
    "40",
    "50",
    "60.orbax-checkpoint-tmp:",
  ]
  assert (
    lines[2].endswith("2.0000           complete, best")
    and lines[4].endswith(" complete")
    and lines[5].endswith("complete, newest")
  )
  verified = run(f"--workdir={workdir}", "--verify")
  assert (
    "not complete: state/data is not as it was written: its sha256 differs"
    in verified.stdout.splitlines()[4]
  )
  assert (
    verified.returncode == 1 and verified.stderr == "error: not complete: 40\n"
  )


def test_prune_keeps_the_newest_and_the_best_and_names_what_goes(workdir):
  result = run(f"--workdir={workdir}", "--prune", "--keep=1")
  assert result.returncode == 0 and not result.stderr
  assert [
    line.split(":")[0].rsplit("/", 1)[1] for line in result.stdout.splitlines()
  ] == ["60.orbax-checkpoint-tmp", "10", "30", "40"]
  assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == [
    "20",
    "50",
  ]
  verified = run(f"--workdir={workdir}", "--verify")
  assert verified.returncode == 0 and len(verified.stdout.splitlines()) == 3


def test_prune_deletes_nothing_where_nothing_is_complete(tmp_path):
  (save(tmp_path, 10) / "state/data").unlink()
  result = run(f"--workdir={tmp_path}", "--prune", "--keep=1")
  assert (
    result.returncode == 1
    and "is complete: nothing is deleted" in result.stderr
    and (tmp_path / "checkpoints/10").exists()
  )


@pytest.mark.parametrize(
  "args, code, message",
  [
    ([], 2, "error: pass --workdir=DIR"),
    (
      ["--workdir=/nowhere"],
      1,
      "error: there are no checkpoints in /nowhere: /nowhere/checkpoints is missing",
    ),
    (
      ["--workdir=/nowhere", "--prune", "--keep=0"],
      2,
      "error: flag --keep=0: 0 is not a positive integer",
    ),
    (
      ["--workdir=/nowhere", "--keep=x"],
      2,
      "error: flag --keep=x: invalid literal",
    ),
    (
      ["--workdir=/nowhere", "--config=x"],
      2,
      "error: Unknown command line flag 'config'",
    ),
    (["runs/tiny"], 2, "error: unexpected argument 'runs/tiny'"),
  ],
)
def test_bad_input_is_one_line(args, code, message):
  result = run(*args)
  assert (
    result.returncode == code
    and result.stderr.startswith(message)
    and len(result.stderr.splitlines()) == 1
  )


@pytest.mark.parametrize("make", ["empty", "file"])
def test_workdir_without_checkpoints(tmp_path, make):
  path = tmp_path / "checkpoints"
  path.mkdir() if make == "empty" else path.write_text("")
  result = run(f"--workdir={tmp_path}")
  assert (
    result.returncode == 1
    and result.stderr.startswith("error: ")
    and len(result.stderr.splitlines()) == 1
  )


@pytest.mark.parametrize("flags", [[], ["--prune"]])
def test_a_closed_pipe_ends_it_quietly(workdir, flags):
  """Also where errors of writing have an explanation of their own."""
  reader, writer = os.pipe()
  os.close(reader)
  command = [
    sys.executable,
    "-u",
    "-m",
    "diffjax.checkpoints",
    f"--workdir={workdir}",
    *flags,
  ]
  result = subprocess.run(
    command,
    cwd=in_process.ROOT,
    stdout=writer,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(writer)
  assert result.returncode == 128 + signal.SIGPIPE and not result.stderr


def test_it_starts_without_jax():
  code = "import sys, diffjax.checkpoints; sys.exit(bool({'jax', 'orbax', 'numpy'} & set(sys.modules)))"
  assert subprocess.run([sys.executable, "-c", code]).returncode == 0
