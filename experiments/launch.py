"""Runs commands side by side, each in a process of its own with its own share of this machine's devices."""

from __future__ import annotations

import codecs
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from diffjax.config import UserError
from diffjax.host.progress import say
from experiments.grid import FOLDER

# The end of a command's standard error that is searched for its error.
_TAIL_CHARACTERS = 8000
# A process that a command left behind may keep its standard error open.
_TAIL_SECONDS = 5.0


class Devices(NamedTuple):
  """The devices of this machine: JAX's backend, the kind of a device, and their number."""

  backend: str
  kind: str
  number: int


def devices() -> Devices:
  """This machine's devices. A process of its own asks JAX, since this one must not hold the devices."""
  code = "import jax, json; d = jax.local_devices(); print(json.dumps([jax.default_backend(), d[0].device_kind, len(d)]))"
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True
  )
  if result.returncode:
    raise UserError(
      f"JAX does not start: {(result.stderr.strip().splitlines() or ['no message'])[-1]}"
    )
  return Devices(*json.loads(result.stdout.splitlines()[-1]))


def environment(found: Devices, slot: int, slots: int) -> dict[str, str]:
  """The environment variables that show a slot's process only its own share of the devices.

  Raises:
    UserError: if the devices cannot be divided among so many slots.
  """
  if slots == 1:
    return {}
  if (
    found.backend == "cpu"
  ):  # XLA's number of threads: processes that each use all cores wait for one another
    return {"NPROC": str(max(1, (os.cpu_count() or 1) // slots))}
  if found.number % slots or (found.backend == "tpu" and found.number != slots):
    fit = (
      "1 or as many as there are"
      if found.backend == "tpu"
      else "a divisor of their number"
    )
    raise UserError(
      f"--side_by_side={slots}: there are {found.number} devices ({found.kind}); choose {fit}"
    )
  name = (
    "CUDA_VISIBLE_DEVICES" if found.backend == "gpu" else "TPU_VISIBLE_DEVICES"
  )
  visible = (
    os.environ[name].split(",")
    if os.environ.get(name)
    else [str(index) for index in range(found.number)]
  )
  share = found.number // slots
  chosen = {name: ",".join(visible[slot * share : (slot + 1) * share])}
  if found.backend == "tpu":
    chosen |= {
      "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
      "TPU_PROCESS_BOUNDS": "1,1,1",
    }
  return chosen


class Stopped(Exception):
  """The launcher has been stopped."""


class Failed(UserError):
  """A command failed.

  Attributes:
    reason: Its last error line, without "error: ".
  """

  def __init__(self, message: str, reason: str):
    super().__init__(message)
    self.reason = reason


class Launcher:
  """Starts processes that end with this one: at the end of the context, at SIGTERM, SIGHUP and Ctrl-C they get SIGTERM and are waited for.

  Training saves a checkpoint at SIGTERM."""

  def __init__(self) -> None:
    self._running: set[subprocess.Popen] = set()
    self._lock = threading.Lock()
    self._stopped = False

  def __enter__(self) -> Launcher:
    def interrupt(*_):
      raise KeyboardInterrupt

    numbers = [
      number
      for number in (signal.SIGTERM, signal.SIGHUP)
      if signal.getsignal(number) != signal.SIG_IGN
    ]  # as under nohup
    self._previous = {
      number: signal.signal(number, interrupt) for number in numbers
    }
    return self

  def __exit__(self, *_: object) -> None:
    self.stop()
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def call(
    self,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    log: pathlib.Path | None = None,
    *,
    tail: bool = False,
  ) -> None:
    """Runs a command to its end.

    Args:
      command: The command.
      env: Environment variables that it gets beside this process's.
      log: A file that its output is appended to, instead of the terminal.
      tail: True to know the command's error also without a log. Its standard
        error goes to the terminal through a pipe then, so that its progress
        consists of lines instead of a bar.

    Raises:
      Failed: if it fails.
      Stopped: if this launcher has been stopped meanwhile.
    """
    with contextlib.ExitStack() as stack:
      stdout, stderr, log_start = None, None, 0
      if log:
        stdout = stack.enter_context(log.open("ab"))
        stderr = subprocess.STDOUT
        log_start = log.stat().st_size
      elif tail:
        stderr = subprocess.PIPE
      process = self._start(command, env, stdout, stderr)
      echo = None
      if process.stderr is not None:
        echo = _Echo(process.stderr)
        echo.start()
      try:
        exit_code = process.wait()
      finally:
        # After an interrupt the process may still run. `stop` ends it.
        if process.returncode is not None:
          with self._lock:
            self._running.discard(process)
        if echo is not None and process.returncode is not None:
          echo.join(_TAIL_SECONDS)
    if self._stopped:
      raise Stopped
    if exit_code == 0:
      return
    output = ""
    if log:
      with log.open("rb") as file:
        file.seek(log_start)
        output = file.read().decode(errors="replace")
    elif echo is not None:
      output = echo.text
    raise _failure(command, exit_code, output, log)

  def _start(
    self,
    command: Sequence[str],
    env: Mapping[str, str] | None,
    stdout: IO[bytes] | None,
    stderr: int | None,
  ) -> subprocess.Popen[bytes]:
    """Starts a process, unless this launcher has been stopped."""
    with self._lock:
      if self._stopped:
        raise Stopped
      process = subprocess.Popen(
        command,
        env={**os.environ, **(env or {})},
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        cwd=FOLDER.parent,
      )
      self._running.add(process)
    return process

  def stop(self) -> None:
    """Ends all processes, and starts no more."""
    with self._lock:
      self._stopped = True
      running = list(self._running)
    for process in running:
      process.terminate()
    for process in running:
      process.wait()

  def side_by_side(
    self, jobs: Sequence[tuple[str, Callable[[int], str | None]]], slots: int
  ) -> None:
    """Calls the jobs in order, each with the number of a free slot, at most `slots` at a time.

    Args:
      jobs: names, for progress lines, and what to call. The line that says how long a job took ends with the text that the job returned.
      slots: jobs at a time.

    Raises:
      UserError: the first that a job raised. No further job starts then; running ones are waited for.
    """
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(slots):
      free.put(slot)
    failed = threading.Event()

    def work(number: int) -> None:
      if failed.is_set():
        return
      name, job = jobs[number]
      slot, start = free.get(), time.monotonic()
      try:
        say(f"{number + 1} of {len(jobs)}: {name}")
        text = job(slot)
        say(
          f"{number + 1} of {len(jobs)}: {name} took {time.monotonic() - start:.0f} s{f'; {text}' if text else ''}"
        )
      except BaseException:
        failed.set()
        raise
      finally:
        free.put(slot)

    with concurrent.futures.ThreadPoolExecutor(slots) as pool:
      try:
        for future in [
          pool.submit(work, number) for number in range(len(jobs))
        ]:
          future.result()
      except KeyboardInterrupt:  # before the pool waits for its threads, which wait for their processes
        failed.set()
        self.stop()
        raise


class _Echo(threading.Thread):
  """Copies a pipe to this process's standard error.

  Attributes:
    text: The end of what was read.
  """

  def __init__(self, pipe: IO[bytes]):
    super().__init__(name="standard error", daemon=True)
    self._pipe = pipe
    self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    self.text = ""

  def run(self) -> None:
    with self._pipe:
      while chunk := os.read(self._pipe.fileno(), 4096):
        self._copy(self._decoder.decode(chunk))

  def _copy(self, text: str) -> None:
    self.text = (self.text + text)[-_TAIL_CHARACTERS:]
    # The command goes on if the terminal is gone.
    with contextlib.suppress(OSError, ValueError):
      sys.stderr.write(text)
      sys.stderr.flush()


def _failure(
  command: Sequence[str], exit_code: int, output: str, log: pathlib.Path | None
) -> Failed:
  """Returns the error for a command that failed, with its last error line."""
  lines = [line.strip() for line in output.splitlines() if line.strip()]
  errors = [line for line in lines if line.startswith("error: ")]
  reason = f"exit code {exit_code}"
  if errors:
    reason = errors[-1].removeprefix("error: ")
  elif exit_code < 0:
    reason = f"ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
  elif lines:
    reason = lines[-1]
  shown = ", as said above"
  if log and lines:
    last_line = errors[-1] if errors else lines[-1]
    shown = f": {last_line} (more in {log})"
  return Failed(
    f"{' '.join(command[1:])} failed with exit code {exit_code}{shown}", reason
  )
