"""Waiting for batches: a worker that dies or a source that hangs is reported, not waited for.

Grain alone waits for ever for a worker that is stopped, blocked or gone with exit code 0, and for a read that hangs in the process itself;
closing its iterators, or ending the process, then hangs as well.
"""

from __future__ import annotations

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

_POLL = 1.0  # seconds between looks at the workers while waiting
_GRACE = 3.0  # seconds for what a dead worker gave before, and for workers to end by themselves
_PATIENCE = 10  # times the time limit, at most, for a first batch that is being worked on


class Interrupted(Exception):
  """The wait for a batch was called off; the next call waits for the same one."""


class Reader:
  """A Grain iterator, pulled by a thread when asked and no further, so that the wait for it can end.

  At the start, workers import for seconds, and a resumed stream reads again what it had read of its parts. So as long as no batch has come
  (from each worker, where there are some), the time limit starts anew whenever the processes that read have used the CPU.

  Args:
    iterator: What to pull.
    source: What it reads, for messages.
    num_workers: How many worker processes it has.
    timeout: Seconds without a batch that count as a hang.
    interrupted: Asked while waiting, and when reading fails, since Ctrl-C ends the workers too: whether to call the wait off.
  """

  def __init__(
    self, iterator: grain.DatasetIterator, source: str, num_workers: int, timeout: float, interrupted: Callable[[], bool] = lambda: False
  ):
    self._iterator: grain.DatasetIterator | None = iterator
    self._source, self._num_workers, self._timeout, self._interrupted = source, num_workers, timeout, interrupted
    self._starting = max(1, num_workers)  # batches to come until everything has been seen to work
    self._workers: list[Any] = []
    self._not_ours = set(multiprocessing.active_children())
    self._state: Any = None
    self._asked, self._given = queue.SimpleQueue[bool](), queue.SimpleQueue[tuple[Any, Any, Exception | None]]()
    self._is_asked = False
    threading.Thread(target=_serve, args=(iterator, self._asked, self._given), name="diffjax-data", daemon=True).start()
    # Also when this object or the interpreter goes
    self._finalizer = weakref.finalize(self, _close, self._asked, self._given, self._workers)

  def get_state(self) -> Any:
    """Grain's state after the last batch that was handed out."""
    if self._state is None:
      assert self._iterator is not None, "closed"
      self._state = self._iterator.get_state()
    return self._state

  def close(self) -> None:
    """Ends the workers. There is no next element then."""
    self._finalizer()
    self._iterator = None

  def __next__(self) -> Any:
    """The next element.

    Raises:
      UserError: for a worker that died or a source that hangs, with what happened and what to do.
      Interrupted: if the wait was called off.
    """
    if not self._is_asked:  # a wait that was interrupted has asked already
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
        before, used = used, _cpu_seconds([worker.pid for worker in self._workers] or [os.getpid()])
        if used - before > 0.02 and now < start + (_PATIENCE - 1) * self._timeout:
          deadline = now + self._timeout
      if now >= deadline:
        raise self._failure(self._dead(), now - start)

  def _find_workers(self) -> None:
    """Grain starts them late and does not name them."""
    if len(self._workers) < self._num_workers:
      known = self._not_ours.union(self._workers)
      self._workers += [
        child for child in multiprocessing.active_children() if child not in known and child.name.startswith("grain-process-prefetch")
      ]

  def _dead(self) -> list[Any]:
    return [worker for worker in self._workers if worker.exitcode is not None]

  def _failure(self, dead: list[Any], seconds: float = 0.0) -> UserError:
    """What happened; ends whatever else would keep the process from ending."""
    if dead:
      ends = [f"{worker.pid} ({_end(worker.exitcode)})" for worker in dead]
      message = f"data worker {' and '.join(ends)} died while reading {self._source}"
      remedy = "run the same command again to go on from the last checkpoint; config.data.num_workers sets the number of workers"
    else:
      pids = ", ".join(str(worker.pid) for worker in self._workers)
      where = f"by the data workers {pids}" if pids else "in the training process"
      message = f"no batch for {seconds:.0f} s from {self._source}, read {where}: reading hangs"
      remedy = (
        "see whether its disk or network answers, and run the same command again to go on from the last checkpoint; "
        f"if it is only slow, raise config.data.timeout = {self._timeout:g} (seconds)"
      )
      _kill(self._workers)
      if not self._workers:  # nothing ends a thread that hangs; as a daemon, it does not outlive the process
        self._finalizer.detach()
    self.close()
    return UserError(f"{message}; {remedy}")


def start_worker(worker: int, num_workers: int) -> None:
  """For Grain to call in each worker. It ignores Ctrl-C, which a terminal sends to the workers too and the run answers; and it ends once
  the process it reads for has gone, however that ended, where Grain's own would wait for minutes or for ever."""
  del worker, num_workers
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  threading.Thread(target=_watch_parent, name="parent", daemon=True).start()


def _watch_parent() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None, "not a worker"
  parent.join()
  os._exit(1)


def _serve(iterator: grain.DatasetIterator, asked: queue.SimpleQueue, given: queue.SimpleQueue) -> None:
  while asked.get():
    try:
      given.put((next(iterator), iterator.get_state(), None))
    except Exception as error:  # the one who waits raises it
      given.put((None, None, error))
  iterator.close()
  given.put(None)


def _close(asked: queue.SimpleQueue, given: queue.SimpleQueue, workers: list[Any]) -> None:
  """Ends the thread and Grain's workers; those that do not end by themselves are killed, a read that hangs is left behind."""
  asked.put(False)
  for _ in range(2):
    deadline = time.monotonic() + _GRACE
    try:
      while given.get(timeout=max(0.0, deadline - time.monotonic())) is not None:
        pass
      return
    except queue.Empty:
      _kill(workers)


def _kill(workers: list[Any]) -> None:
  for worker in workers:
    if worker.is_alive():
      worker.kill()  # reaches a stopped process too


def _end(exit_code: int) -> str:
  if exit_code >= 0:
    return f"exit code {exit_code}"
  name = signal.Signals(-exit_code).name if -exit_code in {*signal.Signals} else f"signal {-exit_code}"
  return name + ": out of memory?" * (name == "SIGKILL")


def _cpu_seconds(pids: list[int]) -> float:
  """CPU time that processes have used; where the system does not say, they count as busy."""
  total = 0.0
  for pid in pids:
    try:
      fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
      return time.monotonic()
    total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
  return total
