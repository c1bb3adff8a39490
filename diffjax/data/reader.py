"""Reading batches with a time limit: a worker that dies or a source that hangs becomes an error.

Grain alone waits for ever for a worker that is stopped, blocked or has ended with exit code 0, and for a read that hangs in the process
itself. Closing its iterators, or ending the process, then hangs too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import grain

from diffjax.config import UserError
from diffjax.host import address_space
from diffjax.host.workers import end_with_parent, starting_workers

_POLL = 1.0  # seconds between looks at the workers while waiting
_GRACE = 3.0  # seconds to receive batches that a dead worker had sent, and for workers to end by themselves
_PATIENCE = (
  10  # time limits, at most, for a first batch while the CPU is in use
)


class Interrupted(Exception):
  """The wait for a batch was ended. The next call waits for the same batch."""


class Reader:
  """A Grain iterator that a thread reads, one element a request, so that a wait for an element can end.

  The first batches take longer: workers import for seconds, and a resumed stream reads its parts again. So until a first batch has come
  (from each worker, if there are workers), the time limit starts anew whenever the reading processes have used the CPU.

  Args:
    iterator: The iterator.
    source: Its source, for messages.
    num_workers: Number of its worker processes.
    timeout: Seconds without a batch that count as a hang.
    interrupted: Whether to end the wait. Called while waiting, and when reading fails, since Ctrl-C ends the workers too.
  """

  def __init__(
    self,
    iterator: grain.DatasetIterator,
    source: str,
    num_workers: int,
    timeout: float,
    interrupted: Callable[[], bool] = lambda: False,
  ):
    self._iterator: grain.DatasetIterator | None = iterator
    self._source, self._num_workers, self._timeout, self._interrupted = (
      source,
      num_workers,
      timeout,
      interrupted,
    )
    self._starting = max(
      1, num_workers
    )  # batches until all workers have given one
    self._workers: list[Any] = []
    self._not_ours = set(multiprocessing.active_children())
    self._state: Any = None
    self._asked, self._given = (
      queue.SimpleQueue[bool](),
      queue.SimpleQueue[tuple[Any, Any, Exception | None]](),
    )
    self._is_asked = False
    serving = (iterator, num_workers > 0, self._asked, self._given)
    threading.Thread(
      target=_serve, args=serving, name="diffjax-data", daemon=True
    ).start()
    # Runs too when this object is deleted and when the interpreter ends
    self._finalizer = weakref.finalize(
      self, _close, self._asked, self._given, self._workers
    )

  def get_state(self) -> Any:
    """Grain's state after the last element that was handed out."""
    if self._state is None:
      assert self._iterator is not None, "closed"
      self._state = self._iterator.get_state()
    return self._state

  def close(self) -> None:
    """Ends the workers. There is no next element after this."""
    self._finalizer()
    self._iterator = None

  def __next__(self) -> Any:
    """The next element.

    Raises:
      UserError: for a worker that died or a source that hangs. Names the worker or the time, and a remedy.
      Interrupted: if `interrupted` ended the wait.
    """
    if not self._is_asked:  # an interrupted wait has asked already
      self._asked.put(True)
      self._is_asked = True
    element, state, error = self._wait()
    self._is_asked = False
    if error is not None:
      if self._interrupted():
        raise Interrupted from error
      self._find_workers()
      if (dead := self._dead()) and not isinstance(error, UserError):
        raise self._failure(dead) from error
      self.close()
      with address_space.explained(
        f"reading {self._source}", "fewer config.data.num_workers take less"
      ):
        raise error
    self._state = state
    if self._starting:
      self._find_workers()
      self._starting -= 1
    return element

  def _wait(self) -> tuple[Any, Any, Exception | None]:
    start = time.monotonic()
    deadline, used = start + self._timeout, 0.0
    while True:
      try:
        return self._given.get(timeout=min(_POLL, self._timeout / 4))
      except queue.Empty:
        now = time.monotonic()
      if self._interrupted():
        raise Interrupted
      self._find_workers()
      if self._dead():
        deadline = min(deadline, now + _GRACE)
      elif self._starting:
        before, used = (
          used,
          _cpu_seconds(
            [worker.pid for worker in self._workers] or [os.getpid()]
          ),
        )
        if (
          used - before > 0.02 and now < start + (_PATIENCE - 1) * self._timeout
        ):
          deadline = now + self._timeout
      if now >= deadline:
        raise self._failure(self._dead(), now - start)

  def _find_workers(self) -> None:
    """Notes worker processes, which Grain starts late and does not list."""
    if len(self._workers) < self._num_workers:
      known = self._not_ours.union(self._workers)
      self._workers += [
        child
        for child in multiprocessing.active_children()
        if child not in known
        and child.name.startswith("grain-process-prefetch")
      ]

  def _dead(self) -> list[Any]:
    return [worker for worker in self._workers if worker.exitcode is not None]

  def _failure(self, dead: list[Any], seconds: float = 0.0) -> UserError:
    """The error to raise. Ends all that would keep the process from ending."""
    if dead:
      ends = [f"{worker.pid} ({_end(worker.exitcode)})" for worker in dead]
      message = (
        f"data worker {' and '.join(ends)} died while reading {self._source}"
      )
      remedy = "run the same command again to continue from the last checkpoint; config.data.num_workers sets the number of workers"
    else:
      pids = ", ".join(str(worker.pid) for worker in self._workers)
      where = (
        f"by the data workers {pids}" if pids else "in the training process"
      )
      limited = f"{limit}; or " if (limit := address_space.limit()) else ""
      message = f"no batch for {seconds:.0f} s from {self._source}, read {where}: reading hangs"
      remedy = (
        f"{limited}see whether its disk or network answers, and run the same command again to continue from the last checkpoint; "
        f"if it is only slow, raise config.data.timeout = {self._timeout:g} (seconds)"
      )
      _kill(self._workers)
      if not self._workers:  # a thread that hangs cannot be ended; as a daemon, it does not keep the process from ending
        self._finalizer.detach()
    self.close()
    return UserError(f"{message}; {remedy}")


def start_worker(worker: int, num_workers: int) -> None:
  """Sets up a worker process, called by Grain. Grain's own worker would outlive the process that it reads for, for minutes or for ever."""
  del worker, num_workers
  end_with_parent()


def _serve(
  iterator: grain.DatasetIterator,
  has_workers: bool,
  asked: queue.SimpleQueue,
  given: queue.SimpleQueue,
) -> None:
  while asked.get():
    try:
      with (
        starting_workers() if has_workers else contextlib.nullcontext()
      ):  # at the first batch
        given.put((next(iterator), iterator.get_state(), None))
    except Exception as error:  # the waiting thread raises it
      given.put((None, None, error))
  iterator.close()
  given.put(None)


def _close(
  asked: queue.SimpleQueue, given: queue.SimpleQueue, workers: list[Any]
) -> None:
  """Ends the thread and Grain's workers. Workers that do not end by themselves are killed. A thread whose read hangs is left."""
  asked.put(False)
  for _ in range(2):
    deadline = time.monotonic() + _GRACE
    try:
      while (
        given.get(timeout=max(0.0, deadline - time.monotonic())) is not None
      ):
        pass
      return
    except queue.Empty:
      _kill(workers)


def _kill(workers: list[Any]) -> None:
  for worker in workers:
    if worker.is_alive():
      worker.kill()  # ends a stopped process too


def _end(exit_code: int) -> str:
  if exit_code >= 0:
    return f"exit code {exit_code}"
  name = (
    signal.Signals(-exit_code).name
    if -exit_code in {*signal.Signals}
    else f"signal {-exit_code}"
  )
  return name + ": out of memory?" * (name == "SIGKILL")


def _cpu_seconds(pids: list[int]) -> float:
  """CPU time that processes have used, in seconds. Without /proc, the seconds of a clock, as if they were always busy."""
  total = 0.0
  for pid in pids:
    try:
      fields = (
        pathlib.Path(f"/proc/{pid}/stat")
        .read_text(encoding="utf-8")
        .rpartition(")")[2]
        .split()
      )
    except OSError:
      return time.monotonic()
    total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
  return total
