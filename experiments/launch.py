"""Runs commands side by side, each in a process of its own with its own share of this machine's devices."""

from __future__ import annotations

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
from typing import NamedTuple

from diffjax.config import UserError
from diffjax.progress import say
from experiments.grid import FOLDER


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
  ) -> None:
    """Runs a command to its end. Its output goes to the terminal, or is appended to a file.

    Raises:
      UserError: if it fails.
      Stopped: if this launcher has been stopped meanwhile.
    """
    with contextlib.ExitStack() as stack:
      out = stack.enter_context(log.open("ab")) if log else None
      with self._lock:
        if self._stopped:
          raise Stopped
        process = subprocess.Popen(
          command,
          env={**os.environ, **(env or {})},
          stdout=out,
          stderr=subprocess.STDOUT if out else None,
          start_new_session=True,
          cwd=FOLDER.parent,
        )
        self._running.add(process)
      try:
        code = process.wait()
      finally:
        if (
          process.returncode is not None
        ):  # else this process is interrupted, and the other still runs
          with self._lock:
            self._running.discard(process)
    if self._stopped:
      raise Stopped
    if code:
      last = (
        [
          line
          for line in log.read_text(
            errors="replace", encoding="utf-8"
          ).splitlines()
          if line.strip()
        ]
        if log
        else []
      )
      reason = f": {last[-1]} (more in {log})" if last else ", as said above"
      raise UserError(
        f"{' '.join(command[1:])} failed with exit code {code}{reason}"
      )

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
