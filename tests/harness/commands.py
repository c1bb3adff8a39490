"""Runs commands in processes of their own: the fixture `command`."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tests.harness import ROOT


class StartedCommand:
  """A process that `Commands.start` has started.

  It has the methods of `subprocess.Popen` that tests use.

  Attributes:
    pid: the id of the process.
  """

  def __init__(self, pid: int, exit_code: pathlib.Path):
    """Creates the object.

    Args:
      pid: the id of the process.
      exit_code: the file that receives the exit code.
    """
    self.pid = pid
    self._exit_code = exit_code

  def poll(self) -> int | None:
    """Returns the exit code, or None while the process runs."""
    if not self._exit_code.exists():
      return None
    return int(self._exit_code.read_text())

  def wait(self, timeout: float) -> int:
    """Waits for the end of the process and returns the exit code.

    Raises:
      AssertionError: if the process does not end within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    exit_code = self.poll()
    while exit_code is None:
      if time.monotonic() > deadline:
        raise AssertionError(f"process {self.pid} runs after {timeout} s")
      time.sleep(0.02)
      exit_code = self.poll()
    return exit_code

  def send_signal(self, number: int) -> None:
    """Sends a signal, if the process has not ended."""
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    """Sends SIGKILL, if the process has not ended."""
    self.send_signal(signal.SIGKILL)


class Commands:
  """Runs commands like `subprocess.run`, but without the time of their imports.

      result = commands("diffjax.convert", "--from=unilm", "--workdir=runs/a")
      assert result.returncode == 0, result.stderr

  The commands run in forked processes of a server (fork_server.py). JAX reads
  its environment variables when it is imported, so commands with other
  variables of JAX need another server. Servers start when they are needed and
  end at `close`.
  """

  def __init__(self, directory: pathlib.Path):
    """Creates the runner.

    Args:
      directory: an existing directory for the output of the running command.
    """
    self._output = directory / "output"
    self._errors = directory / "errors"
    self._servers: dict[frozenset, subprocess.Popen] = {}
    self._num_started = 0

  def __call__(
    self,
    module: str,
    *arguments: Any,
    cwd: str | pathlib.Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
  ) -> subprocess.CompletedProcess:
    """Runs `python -m MODULE ARGUMENTS` and waits for its end.

    Args:
      module: the command's module.
      arguments: its arguments, converted to strings.
      cwd: its working directory.
      environment: environment variables, in addition to the tests' own.
      timeout: seconds after which the command is killed.

    Returns:
      Exit code, standard output and standard error.

    Raises:
      AssertionError: if the command did not end in time.
    """
    self._output.write_bytes(b"")
    self._errors.write_bytes(b"")
    variables = {**os.environ, **(environment or {})}
    task = {
      "module": module,
      "code": None,
      "arguments": [str(argument) for argument in arguments],
      "directory": str(cwd),
      "environment": variables,
      "output": str(self._output),
      "errors": str(self._errors),
      "exit_code": None,
    }
    server = self._server(variables)
    exit_code = _run_task(server, task, timeout)
    if exit_code is None:
      raise AssertionError(
        f"{module} {arguments} did not end within {timeout} s"
      )
    return subprocess.CompletedProcess(
      [module, *arguments],
      exit_code,
      self._output.read_text(),
      self._errors.read_text(),
    )

  def start(
    self,
    module: str,
    *arguments: Any,
    output: pathlib.Path | None,
    code: str | None = None,
  ) -> StartedCommand:
    """Starts `python -m MODULE ARGUMENTS`, and does not wait for its end.

    Several processes can run at the same time.

    Args:
      module: the command's module.
      arguments: its arguments, converted to strings.
      output: an existing file, to which standard output and standard error are
        appended. None is a pipe that nothing reads.
      code: a program that runs in place of the module.
    """
    variables = dict(os.environ)
    self._num_started += 1
    exit_code = self._output.with_name(f"exit_code_{self._num_started}")
    output_name = None if output is None else str(output)
    task = {
      "module": module,
      "code": code,
      "arguments": [str(argument) for argument in arguments],
      "directory": str(ROOT),
      "environment": variables,
      "output": output_name,
      "errors": output_name,
      "exit_code": str(exit_code),
    }
    server = self._server(variables)
    pid = _run_task(server, task, timeout=60)
    if pid is None:
      raise AssertionError(f"{module} {arguments} was not started within 60 s")
    return StartedCommand(pid, exit_code)

  def close(self) -> None:
    """Ends all servers."""
    for server in self._servers.values():
      assert server.stdin is not None
      server.stdin.close()
      server.wait()

  def _server(self, variables: Mapping[str, str]) -> subprocess.Popen:
    """Returns the running server for these environment variables."""
    jax_variables = []
    for name, value in variables.items():
      if name.startswith("JAX_"):
        jax_variables.append((name, value))
    key = frozenset(jax_variables)
    server = self._servers.get(key)
    # A killed server is replaced.
    if server is None or server.poll() is not None:
      server = _start_server(variables)
      self._servers[key] = server
    return server


def _start_server(variables: Mapping[str, str]) -> subprocess.Popen:
  """Starts a server in a process group of its own."""
  return subprocess.Popen(
    [sys.executable, "-m", "tests.harness.fork_server"],
    cwd=ROOT,
    env=variables,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


def _run_task(
  server: subprocess.Popen, task: dict[str, Any], timeout: float
) -> int | None:
  """Returns the answer of a server to a task, or None if its time was over.

  If the time is over, the server is killed together with the command.
  """
  assert server.stdin is not None
  assert server.stdout is not None
  server.stdin.write(json.dumps(task) + "\n")
  server.stdin.flush()
  kill = threading.Timer(timeout, os.killpg, (server.pid, signal.SIGKILL))
  kill.start()
  answer = server.stdout.readline()
  kill.cancel()
  if not answer:
    server.wait()
    return None
  return int(answer)
