"""Runs commands side by side.

Each command has its own process and its own share of this machine's devices.
"""

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
import types
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from diffjax.config import UserError
from diffjax.host.progress import say
from experiments.grid import FOLDER

# The end of a command's standard error that is searched for its error.
_TAIL_CHARACTERS = 8000
_PRINT_DEVICES = """
import json
import jax
devices = jax.local_devices()
values = [jax.default_backend(), devices[0].device_kind, len(devices)]
print(json.dumps(values))
"""


class Devices(NamedTuple):
  """The devices of this machine.

  Attributes:
    backend: The backend of JAX: "cpu", "gpu" or "tpu".
    kind: The kind of a device, such as "NVIDIA H100".
    number: The number of devices.
  """

  backend: str
  kind: str
  number: int


def devices() -> Devices:
  """Returns this machine's devices.

  Asks JAX in another process, since this one must not hold the devices.

  Raises:
    UserError: if JAX does not start.
  """
  result = subprocess.run(
    [sys.executable, "-c", _PRINT_DEVICES], capture_output=True, text=True
  )
  if result.returncode:
    lines = result.stderr.strip().splitlines()
    reason = lines[-1] if lines else "no message"
    raise UserError(f"JAX does not start: {reason}")
  last_line = result.stdout.splitlines()[-1]
  return Devices(*json.loads(last_line))


def environment(
  local_devices: Devices, slot: int, slots: int
) -> dict[str, str]:
  """Returns the environment variables of the commands of a slot.

  A slot is an equal share of this machine's devices. With these variables, a
  process sees only the devices of its slot.

  Args:
    local_devices: The devices of this machine.
    slot: The index of the slot.
    slots: The number of slots.

  Raises:
    UserError: if the devices cannot be divided among the slots.
  """
  if slots == 1:
    return {}
  if local_devices.backend == "cpu":
    # The number of XLA's threads. Processes that each use all cores wait for
    # one another.
    cores = os.cpu_count() or 1
    return {"NPROC": str(max(1, cores // slots))}
  _check_divisible(local_devices, slots)
  name = "CUDA_VISIBLE_DEVICES"
  if local_devices.backend == "tpu":
    name = "TPU_VISIBLE_DEVICES"
  # This process itself may see only a part of the machine's devices.
  if os.environ.get(name):
    visible = os.environ[name].split(",")
  else:
    visible = [str(index) for index in range(local_devices.number)]
  share = local_devices.number // slots
  start = slot * share
  variables = {name: ",".join(visible[start : start + share])}
  if local_devices.backend == "tpu":
    variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] = "1,1,1"
    variables["TPU_PROCESS_BOUNDS"] = "1,1,1"
  return variables


def _check_divisible(local_devices: Devices, slots: int) -> None:
  """Raises UserError if accelerators cannot be divided among the slots."""
  advice = "a divisor of their number"
  is_divisible = local_devices.number % slots == 0
  # A process sees one chip of a TPU, or all of them.
  if local_devices.backend == "tpu":
    advice = "1 or as many as there are"
    is_divisible = local_devices.number == slots
  if not is_divisible:
    raise UserError(
      f"--side_by_side={slots}: there are {local_devices.number} devices"
      f" ({local_devices.kind}); choose {advice}"
    )


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
  """Starts processes that end together with this one.

  At the end of the context, at SIGTERM, at SIGHUP and at Ctrl-C, the processes
  get SIGTERM and are waited for. Training saves a checkpoint at SIGTERM.
  """

  def __init__(self, tail_seconds: float = 5.0) -> None:
    """Initializes the launcher.

    Args:
      tail_seconds: How long to wait for the end of a command's standard error
        after the command has ended. A process that it left behind may keep the
        standard error open.
    """
    self._tail_seconds = tail_seconds
    self._running: set[subprocess.Popen[bytes]] = set()
    self._lock = threading.Lock()
    self._is_stopped = False
    self._previous_handlers: dict[int, Any] = {}

  def __enter__(self) -> Launcher:
    def interrupt(number: int, frame: types.FrameType | None) -> None:
      raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
      # `nohup` makes a process ignore SIGHUP.
      if signal.getsignal(number) != signal.SIG_IGN:
        self._previous_handlers[number] = signal.signal(number, interrupt)
    return self

  def __exit__(self, *_: object) -> None:
    self.stop()
    for number, handler in self._previous_handlers.items():
      signal.signal(number, handler)

  def call(
    self,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    log: pathlib.Path | None = None,
    *,
    tail: bool = False,
  ) -> None:
    """Runs a command to its end. Raises if it fails.

    Args:
      command: The command.
      env: Environment variables that are added to this process's.
      log: A file to which its output is appended, instead of the terminal.
      tail: Whether `Failed` must have the command's error although there is no
        log. Its standard error then goes to the terminal through a pipe, so its
        progress is shown as lines and not as a bar.

    Raises:
      Failed: if it fails.
      Stopped: if this launcher is stopped before the command has ended.
    """
    output = ""
    if log:
      exit_code, output = self._call_with_log(command, env, log)
    elif tail:
      exit_code, output = self._call_with_echo(command, env)
    else:
      process = self._start(command, env, stdout=None, stderr=None)
      exit_code = self._wait(process)
    if self._is_stopped:
      raise Stopped
    if exit_code != 0:
      raise failure(command, exit_code, output, log)

  def _call_with_log(
    self,
    command: Sequence[str],
    env: Mapping[str, str] | None,
    log: pathlib.Path,
  ) -> tuple[int, str]:
    """Runs a command whose output is appended to a file.

    Returns:
      The exit code, and the output of a command that failed.
    """
    with log.open("ab") as file:
      log_start = log.stat().st_size
      process = self._start(command, env, file, subprocess.STDOUT)
      exit_code = self._wait(process)
    if exit_code == 0:
      return exit_code, ""
    with log.open("rb") as file:
      file.seek(log_start)
      return exit_code, file.read().decode(errors="replace")

  def _call_with_echo(
    self, command: Sequence[str], env: Mapping[str, str] | None
  ) -> tuple[int, str]:
    """Runs a command whose standard error is copied to the terminal.

    Returns:
      The exit code, and the end of the standard error.
    """
    process = self._start(command, env, stdout=None, stderr=subprocess.PIPE)
    assert process.stderr is not None
    echo = _Echo(process.stderr)
    echo.start()
    exit_code = self._wait(process)
    echo.join(self._tail_seconds)
    return exit_code, echo.text

  def _wait(self, process: subprocess.Popen[bytes]) -> int:
    """Waits for a process, and returns its exit code."""
    try:
      return process.wait()
    finally:
      # After an interrupt the process may still run. `stop` ends it.
      if process.returncode is not None:
        with self._lock:
          self._running.discard(process)

  def _start(
    self,
    command: Sequence[str],
    env: Mapping[str, str] | None,
    stdout: IO[bytes] | None,
    stderr: int | None,
  ) -> subprocess.Popen[bytes]:
    """Starts a process, unless this launcher has been stopped."""
    with self._lock:
      if self._is_stopped:
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
      self._is_stopped = True
      running = list(self._running)
    for process in running:
      process.terminate()
    for process in running:
      process.wait()

  def side_by_side(
    self, jobs: Sequence[tuple[str, Callable[[int], str | None]]], slots: int
  ) -> None:
    """Calls jobs in order, at most `slots` at a time.

    A job that raises prevents the jobs after it.

    Args:
      jobs: The name of each job, for progress lines, and its function. The
        function gets the index of a free slot. It may return a text, which is
        printed after the time that the job took.
      slots: The number of slots.

    Raises:
      UserError: the first one that a job raised. No further job starts then.
        Running jobs are waited for.
    """
    free_slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(slots):
      free_slots.put(slot)
    has_failed = threading.Event()

    def work(index: int) -> None:
      if has_failed.is_set():
        return
      name, job = jobs[index]
      slot = free_slots.get()
      try:
        _call_job(f"{index + 1} of {len(jobs)}: {name}", job, slot)
      except BaseException:
        has_failed.set()
        raise
      finally:
        free_slots.put(slot)

    with concurrent.futures.ThreadPoolExecutor(slots) as pool:
      futures = [pool.submit(work, index) for index in range(len(jobs))]
      try:
        for future in futures:
          future.result()
      except KeyboardInterrupt:
        # The end of this context waits for the threads, and they wait for their
        # processes. So the processes must end first.
        has_failed.set()
        self.stop()
        raise


def _call_job(label: str, job: Callable[[int], str | None], slot: int) -> None:
  """Calls a job, and prints when it starts and how long it took."""
  start = time.monotonic()
  say(label)
  text = job(slot)
  line = f"{label} took {time.monotonic() - start:.0f} s"
  if text:
    line += f"; {text}"
  say(line)


class _Echo(threading.Thread):
  """A thread that copies a pipe to this process's standard error.

  Attributes:
    text: The last characters that were read.
  """

  def __init__(self, pipe: IO[bytes]):
    super().__init__(name="standard error", daemon=True)
    self._pipe = pipe
    self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    self.text = ""

  def run(self) -> None:
    with self._pipe:
      chunk = os.read(self._pipe.fileno(), 4096)
      while chunk:
        self._copy(self._decoder.decode(chunk))
        chunk = os.read(self._pipe.fileno(), 4096)

  def _copy(self, text: str) -> None:
    """Remembers a text, and writes it to the terminal."""
    self.text = (self.text + text)[-_TAIL_CHARACTERS:]
    # The command goes on if the terminal is gone.
    with contextlib.suppress(OSError, ValueError):
      sys.stderr.write(text)
      sys.stderr.flush()


def failure(
  command: Sequence[str], exit_code: int, output: str, log: pathlib.Path | None
) -> Failed:
  """Returns the error for a command that failed.

  Args:
    command: The command.
    exit_code: Its exit code, or minus the number of the signal that ended it.
    output: The end of its output, in which its last error line is searched.
    log: The file that holds its output. None if the user has seen the output.
  """
  lines = [line.strip() for line in output.splitlines() if line.strip()]
  errors = [line for line in lines if line.startswith("error: ")]
  reason = f"exit code {exit_code}"
  if errors:
    reason = errors[-1].removeprefix("error: ")
  elif exit_code < 0:
    reason = f"ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
  elif lines:
    reason = lines[-1]
  # Without a log, the user has seen the output.
  details = ", as said above"
  if log and lines:
    last_line = errors[-1] if errors else lines[-1]
    details = f": {last_line} (more in {log})"
  return Failed(
    f"{' '.join(command[1:])} failed with exit code {exit_code}{details}",
    reason,
  )
