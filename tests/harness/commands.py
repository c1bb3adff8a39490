"""Runs commands in processes of their own: the fixture `command`."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from tests.harness import ROOT


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
      environment: environment variables, in addition to those of the tests.
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
      "arguments": [str(argument) for argument in arguments],
      "directory": str(cwd),
      "environment": variables,
      "output": str(self._output),
      "errors": str(self._errors),
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
  """Returns the exit code of a task, or None if its time was over.

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
