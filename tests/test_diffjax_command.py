"""`diffjax COMMAND` lists the commands and runs `python -m diffjax.COMMAND`."""

import ast
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from diffjax import __main__ as diffjax_command
from tests.harness import ROOT, in_process

# What the console script of an installed package does.
SCRIPT = "from diffjax.__main__ import main; main()"


@pytest.fixture
def start():
  """start("train", "--help") starts a process, which ends with the test."""
  processes = []

  def run(*arguments):
    process = subprocess.Popen(
      [sys.executable, "-c", SCRIPT, *arguments],
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    processes.append(process)
    return process

  yield run
  for process in processes:
    process.kill()
    process.wait()


def test_every_command_is_listed():
  """A command is a module of diffjax/ that runs as `python -m`."""
  names = set()
  for path in (ROOT / "diffjax").glob("*.py"):
    source = path.read_text()
    if "command.run(" in source and "__main__" in source:
      names.add(path.stem)

  assert set(diffjax_command.COMMANDS) == names


def summary_of(name: str) -> str:
  """Returns the first line of the docstring of a command's module."""
  source = (ROOT / f"diffjax/{name}.py").read_text()
  return ast.get_docstring(ast.parse(source)).splitlines()[0]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_says_what_each_command_does(start, arguments):
  out, errors = start(*arguments).communicate(timeout=60)

  assert not errors
  for line in out.splitlines():
    assert len(line) <= 100
  for name in diffjax_command.COMMANDS:
    pattern = rf"^  {name} .*$"
    # Exactly one line begins with the command.
    [line] = re.findall(pattern, out, re.MULTILINE)
    assert line.endswith(summary_of(name))


def test_help_for_a_closed_pipe_prints_no_error():
  """In `diffjax | true`, nobody reads the output."""
  reader, writer = os.pipe()
  os.close(reader)

  result = subprocess.run(
    [sys.executable, "-c", SCRIPT],
    cwd=ROOT,
    stdout=writer,
    stderr=subprocess.PIPE,
  )
  os.close(writer)

  # The signal has ended the process itself.
  assert result.returncode == -signal.SIGPIPE
  assert not result.stderr


def test_the_error_for_an_unknown_command_lists_the_commands(start):
  process = start("trian")

  out, errors = process.communicate(timeout=60)

  assert process.returncode == 2
  assert not out
  assert errors == (
    "error: 'trian' is no command; the commands are train, generate, evaluate,"
    " convert, checkpoints, prepare, aot\n"
  )


def test_a_command_has_its_own_help(start):
  """`diffjax train --help` prints the help of `python -m diffjax.train`."""
  process = start("train", "--help")

  out, errors = process.communicate(timeout=60)

  assert not errors
  assert out == in_process.call("diffjax.train", "--help").stdout


def test_ctrl_c_ends_the_command(start):
  """Ctrl-C sends the signal SIGINT."""
  process = start("train", "--help")
  directory = pathlib.Path(f"/proc/{process.pid}")
  # `diffjax train` replaces its process by `python -m diffjax.train`. Wait for
  # that, and there for the thread that receives signals.
  while process.poll() is None:
    program = (directory / "cmdline").read_bytes()
    num_threads = len(os.listdir(directory / "task"))
    if b"diffjax.train" in program and num_threads > 1:
      break
    time.sleep(0.001)

  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=60)

  # As in a shell: 128 + SIGINT.
  assert process.returncode == 130
  assert errors == "error: interrupted\n"
