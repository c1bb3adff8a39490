"""Processes for cases, with a limit for each: one that hangs or crashes costs its own case alone."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

START = 120  # seconds for a process to import JAX and find its device
ROOT = pathlib.Path(__file__).resolve().parents[2]

Case = dict[str, Any]
Record = Callable[[Case, dict[str, Any]], None]


class Lost(Exception):
  """A process was late or died; `result` says so, with the end of what it wrote to standard error."""

  def __init__(self, how: str, seconds: float, said: str):
    super().__init__(how)
    self.result = {
      "lost": how,
      "seconds": round(seconds, 1),
      "stderr": said[-1500:],
    }


class Worker:
  """A process that speaks as worker.py does.

  Args:
    command: starts it.
    environment: variables beside this process's own.
  """

  def __init__(
    self, command: Sequence[str], environment: Mapping[str, str] | None = None
  ):
    self._stderr = tempfile.TemporaryFile()
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._stderr,
      cwd=ROOT,
      env={**os.environ, **(environment or {})},
      start_new_session=True,
    )
    self._buffer, self._ended = b"", False

  def send(self, message: Any) -> None:
    assert self._process.stdin
    with contextlib.suppress(BrokenPipeError):  # it died; `receive` says how
      self._process.stdin.write(json.dumps(message).encode() + b"\n")
      self._process.stdin.flush()

  def receive(self, seconds: float, late: str = "hang") -> Any:
    """The next answer.

    Args:
      seconds: to wait for it.
      late: what it is called if there is none by then.

    Raises:
      Lost: there was none in so many seconds, or the process died. It is gone then.
    """
    assert self._process.stdout
    start = time.monotonic()
    while b"\n" not in self._buffer:
      left = start + seconds - time.monotonic()
      readable = (
        left > 0 and select.select([self._process.stdout], [], [], left)[0]
      )
      part = (
        os.read(self._process.stdout.fileno(), 1 << 16) if readable else b""
      )
      if not part:
        how = late if not readable else f"crash, {self._exit()}"
        self.end()
        raise Lost(how, time.monotonic() - start, self._said())
      self._buffer += part
    line, self._buffer = self._buffer.split(b"\n", 1)
    return json.loads(line)

  def _exit(self) -> str:
    try:
      code = self._process.wait(10)
    except subprocess.TimeoutExpired:
      return "its output ended"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"

  def _said(self) -> str:
    self._stderr.seek(0)
    return self._stderr.read().decode(errors="replace")

  def end(self) -> None:
    """Ends it and what it started, a ptxas, say."""
    if self._ended:
      return
    self._ended = True
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    with contextlib.suppress(
      subprocess.TimeoutExpired
    ):  # a kernel that runs for ever can hold its process for a while
      self._process.wait(10)
    for pipe in (self._process.stdin, self._process.stdout):
      with contextlib.suppress(BrokenPipeError):
        pipe.close()


def start(memory: float, rehearse: bool) -> Worker:
  """A worker that shares the GPU with others: it takes memory as it needs it, and at most this fraction of it."""
  environment = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{memory:.3f}",
  }
  if rehearse:
    # The kernels' interpreter blocks a thread of JAX's a warpgroup, and JAX makes NPROC: with two of them it hangs
    environment |= {"JAX_PLATFORMS": "cpu", "NPROC": "8"}
  return Worker(
    [
      sys.executable,
      "-m",
      "benchmarks.gpu.worker",
      *(["--rehearse"] if rehearse else []),
    ],
    environment,
  )


def run_beside(
  cases: Sequence[Case],
  start: Callable[[], Worker],
  processes: int,
  limits: tuple[float, float],
  deadline: float,
  record: Record,
) -> None:
  """Runs cases in several processes at once, each of which takes the next case when it has done one.

  Args:
    cases: in the order in which they are begun.
    start: makes a worker.
    processes: number of them at once.
    limits: seconds for compiling a case, and for running it.
    deadline: by `time.monotonic`; a case that it cuts off is not recorded.
    record: takes a case and its result, which has "lost" if the process hung or crashed and "error" if there was an exception. Called
      from threads.
  """
  left: queue.SimpleQueue[Case] = queue.SimpleQueue()
  for case in cases:
    left.put(case)

  def work() -> None:
    worker = None
    while time.monotonic() < deadline:
      try:
        case = left.get_nowait()
      except queue.Empty:
        break
      again = True
      while again:
        fresh = worker is None
        worker = worker or start()
        result = _run(worker, limits, deadline, case, fresh)
        # An illegal address shows as an error in whatever the process does next, so an error counts in a process of its own alone.
        again = not fresh and result is not None and "error" in result
        if result is None or "error" in result or "lost" in result:
          worker.end()
          worker = None
      if result is not None:
        record(case, result)
    if worker:
      worker.end()

  with concurrent.futures.ThreadPoolExecutor(processes) as pool:
    for future in [
      pool.submit(work) for _ in range(min(processes, len(cases)))
    ]:
      future.result()


def _run(
  worker: Worker,
  limits: tuple[float, float],
  deadline: float,
  case: Case,
  fresh: bool,
) -> dict[str, Any] | None:
  """A case's result; None if the deadline cut it off."""
  begun = time.monotonic()
  try:
    if fresh:
      worker.receive(min(START, deadline - begun), "not started")
    begun = time.monotonic()
    worker.send(case)
    answer = worker.receive(min(limits[0], deadline - begun), "not compiled")
    if answer != "ready":
      return answer
    compiled = time.monotonic()
    worker.send("go")
    return {
      **worker.receive(min(limits[1], deadline - compiled)),
      "compile_seconds": round(compiled - begun, 1),
    }
  except Lost as lost:
    return lost.result if time.monotonic() < deadline else None


def run_in_turn(
  cases: Sequence[Case],
  start: Callable[[], Worker],
  processes: int,
  limits: tuple[float, float],
  deadline: float,
  begin: Callable[[], Any],
  record: Record,
) -> None:
  """Runs cases each in a process of its own: several compile at once, then one after the other runs while nothing else does.

  Args:
    cases: in the order in which they are run.
    start: makes a worker.
    processes: number of cases that are compiled at once, and wait.
    limits, deadline, record: as in `run_beside`.
    begin: called when a case's turn to run has come.
  """

  def compile(pair: tuple[Worker, Case]) -> tuple[Any, float]:
    worker, case = pair
    begun = time.monotonic()
    try:
      worker.receive(min(START, deadline - begun), "not started")
      begun = time.monotonic()
      worker.send(case)
      return worker.receive(
        min(limits[0], deadline - begun), "not compiled"
      ), time.monotonic() - begun
    except Lost as lost:
      return lost.result, time.monotonic() - begun

  for first in range(0, len(cases), processes):
    if time.monotonic() >= deadline:
      return
    wave = [(start(), case) for case in cases[first : first + processes]]
    try:
      with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        answers = list(pool.map(compile, wave))
      for (worker, case), (result, seconds) in zip(wave, answers, strict=True):
        if result == "ready":
          begin()
          worker.send("go")
          try:
            result = {
              **worker.receive(min(limits[1], deadline - time.monotonic())),
              "compile_seconds": round(seconds, 1),
            }
          except Lost as lost:
            result = lost.result
        worker.end()
        if "lost" not in result or time.monotonic() < deadline:
          record(case, result)
    finally:
      for worker, _ in wave:
        worker.end()
