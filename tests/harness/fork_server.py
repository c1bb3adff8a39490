"""Runs commands in forked processes, so that slow imports happen only once.

    python -m tests.harness.fork_server

This process imports everything that commands import, and then reads tasks from
standard input. For each task it forks a child, which runs the command as
`python -m MODULE` would. It writes the command's exit code to standard output.
Tests use it through the fixture `command`.

A task is one line of JSON:

    module: the command, for example "diffjax.train".
    code: null, or a program that runs in place of the module.
    arguments: its command-line arguments.
    directory: its working directory.
    environment: all of its environment variables.
    output, errors: files that receive its standard output and standard error.
      null is a pipe that nothing reads.
    exit_code: null, or the file that receives the exit code. With a file, this
      process does not wait for the command, and writes the command's process id
      to standard output in place of the exit code.

This process never creates a JAX backend. Each command creates its own, because
a backend does not survive a fork.
"""

import gc
import json
import os
import pathlib
import runpy
import sys
import types
import warnings
from typing import Any

# Commands import these slow modules only when they need them. They are imported
# here so that each forked process has them.
import matplotlib.backends.backend_agg  # noqa: F401
import scipy.stats  # noqa: F401
import tensorflow_datasets  # noqa: F401

import diffjax.cli.command
import diffjax.evals.validation
import diffjax.inference.finish  # noqa: F401
import diffjax.interop.workdir
import diffjax.training.loop  # noqa: F401


def main() -> None:
  """Runs one task after the other until standard input ends."""
  # JAX warns about forks because of its threads, which only a backend starts.
  warnings.filterwarnings("ignore", message="os.fork")
  # Imported objects are never freed. The garbage collectors of forked processes
  # do not need to visit them.
  gc.freeze()
  for line in sys.stdin:
    task = json.loads(line)
    if task["exit_code"] is None:
      print(_run_in_child(task), flush=True)
    else:
      print(_start_child(task), flush=True)


def _run_in_child(task: dict[str, Any]) -> int:
  """Runs a task in a forked process and returns its exit code."""
  child = os.fork()
  if child == 0:
    _run_command(task)
    sys.exit()
  _, status = os.waitpid(child, 0)
  return os.waitstatus_to_exitcode(status)


def _start_child(task: dict[str, Any]) -> int:
  """Starts a task in a forked process and returns the id of the process.

  Another forked process waits for it and writes its exit code.
  """
  reader, writer = os.pipe()
  if os.fork() == 0:
    child = os.fork()
    if child == 0:
      os.close(reader)
      os.close(writer)
      _run_command(task)
      sys.exit()
    os.write(writer, str(child).encode())
    _, status = os.waitpid(child, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    # The file is complete when it has its name.
    incomplete = pathlib.Path(task["exit_code"] + ".incomplete")
    incomplete.write_text(str(exit_code))
    incomplete.rename(task["exit_code"])
    os._exit(0)
  os.close(writer)
  child_id = int(os.read(reader, 100))
  os.close(reader)
  return child_id


def _run_command(task: dict[str, Any]) -> None:
  """Makes this process the process of a command, and runs the command."""
  os.chdir(task["directory"])
  os.environ.clear()
  os.environ.update(task["environment"])
  _redirect(sys.stdin.fileno(), os.devnull, os.O_RDONLY)
  for stream, path in (
    (sys.stdout, task["output"]),
    (sys.stderr, task["errors"]),
  ):
    if path is None:
      os.dup2(_unread_pipe(), stream.fileno())
    else:
      _redirect(stream.fileno(), path, os.O_WRONLY | os.O_APPEND)

  # In a spawned child of a command, multiprocessing calls the command's module
  # `__mp_main__`. Pickles that name it must find the command's objects.
  spawned_main = types.ModuleType("__mp_main__")
  spawned_main.__getattr__ = _attribute_of_main  # type: ignore[method-assign]
  sys.modules["__mp_main__"] = spawned_main

  sys.path[0] = task["directory"]
  _insert_python_path(task["environment"].get("PYTHONPATH", ""))
  if task["code"] is not None:
    sys.argv = ["-c", *task["arguments"]]
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    exec(task["code"], main_module.__dict__)
    return
  sys.argv = [task["module"], *task["arguments"]]
  runpy.run_module(task["module"], run_name="__main__", alter_sys=True)


def _redirect(descriptor: int, path: str, mode: int) -> None:
  """Makes a file descriptor refer to the file at a path."""
  os.dup2(os.open(path, mode), descriptor)


def _unread_pipe() -> int:
  """Returns the file descriptor to write to, of a pipe whose reader ended."""
  reader, writer = os.pipe()
  os.close(reader)
  return writer


def _attribute_of_main(name: str) -> Any:
  return getattr(sys.modules["__main__"], name)


def _insert_python_path(python_path: str) -> None:
  """Inserts PYTHONPATH after the first entry of sys.path, as Python does."""
  directories = []
  for directory in python_path.split(os.pathsep):
    if directory and directory not in sys.path:
      directories.append(directory)
  sys.path[1:1] = directories


if __name__ == "__main__":
  main()
