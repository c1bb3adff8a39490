"""Reads batches ahead, with a time limit for each batch.

Grain waits endlessly for a worker that is stopped, blocked or has ended with
exit code 0, and for a read that hangs in the process itself. Then its iterators
cannot be closed, and the process does not end. `Reader` turns these cases into
errors.
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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import grain
from absl import flags

from diffjax.config import UserError
from diffjax.host import address_space
from diffjax.host.workers import end_with_parent, starting_workers

# Batches that are read ahead. More would only take memory.
_BATCHES_AHEAD = 4
_BATCHES_AHEAD_PER_WORKER = 2

# Seconds between two looks at the workers while waiting.
_POLL_SECONDS = 1.0
# Seconds to receive the batches that a dead worker has sent, and seconds for
# workers to end without being killed.
_GRACE_SECONDS = 3.0
# The wait for a first batch is limited to this many times the time limit.
_MAX_TIMEOUTS_AT_START = 10
# CPU seconds between two looks from which a starting process counts as busy.
_BUSY_CPU_SECONDS = 0.02

# Grain gives its workers names that begin with this.
_WORKER_NAME = "grain-process-prefetch"


class Interrupted(Exception):
  """The wait for a batch was ended. The next call waits for the same batch."""


def read_sequentially(dataset: grain.MapDataset) -> grain.IterDataset:
  """Returns the elements in order, read one by one without Grain's threads.

  Grain's thread pool would keep the process from ending if a read hangs.
  `prefetch` and `Reader` use daemon threads.
  """
  return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0))


def prefetch(batches: grain.IterDataset, num_workers: int) -> grain.IterDataset:
  """Returns a dataset that reads batches ahead.

  Args:
    batches: The batches.
    num_workers: Number of worker processes; 0 for a daemon thread.
  """
  if num_workers == 0:
    return grain.experimental.ThreadPrefetchIterDataset(
      batches, prefetch_buffer_size=_BATCHES_AHEAD
    )
  let_grain_read_flags()
  options = grain.MultiprocessingOptions(
    num_workers=num_workers, per_worker_buffer_size=_BATCHES_AHEAD_PER_WORKER
  )
  return batches.mp_prefetch(options, start_worker)


def let_grain_read_flags() -> None:
  """Marks absl's flags as parsed, with their defaults, if they are not.

  Grain reads a flag (--grain_enable_multiprocess_worker_profiling) when it
  creates workers, in threads of its own. absl raises an error if flags are not
  parsed. Only commands parse them: notebooks and scripts do not.
  """
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def start_worker(worker_index: int, num_workers: int) -> None:
  """Sets up a worker process. Grain calls it in the worker.

  Without it, a worker could outlive the process that it reads for.
  """
  del worker_index, num_workers
  end_with_parent()


class _Reply(NamedTuple):
  """The answer of the reading thread to one request.

  Attributes:
    element: The next element of the iterator. None after an error.
    state: Grain's state after the element. None after an error.
    error: The exception that reading raised, or None.
  """

  element: Any
  state: Any
  error: Exception | None


class _Channel(NamedTuple):
  """The queues between a reader and its thread.

  Attributes:
    requests: True asks for an element, False for the end of the thread.
    replies: One reply for each request. The reply to False is None.
  """

  requests: queue.SimpleQueue[bool]
  replies: queue.SimpleQueue[_Reply | None]


class Reader:
  """Reads a Grain iterator in a thread, so that a wait for it can end.

  The thread reads one element for each request. The first elements take longer:
  workers import modules for seconds, and a resumed stream reads its parts
  again. Therefore the time limit starts anew whenever the reading processes
  have used the CPU, until a first element has arrived from each worker.
  """

  def __init__(
    self,
    iterator: grain.DatasetIterator,
    source: str,
    num_workers: int,
    timeout: float,
    interrupted: Callable[[], bool] | None = None,
  ):
    """Starts the thread. It reads nothing before the first request.

    Args:
      iterator: The iterator.
      source: The source of its elements, for messages.
      num_workers: Number of its worker processes.
      timeout: Seconds without an element that count as a hang.
      interrupted: Returns whether to end the wait. Called during the wait, and
        after errors, because Ctrl-C ends the workers too. None for never.
    """
    self._iterator: grain.DatasetIterator | None = iterator
    self._source = source
    self._num_workers = num_workers
    self._timeout = timeout
    self._interrupted = interrupted
    # Elements to wait for until each worker has sent one.
    self._num_first_elements = max(1, num_workers)
    # Grain's state after the last element, None before the first one.
    self._state: Any = None
    # Whether the thread has a request without a reply.
    self._has_request = False
    # The worker processes that have been found. They start with the first
    # request. Child processes that were there before are not workers.
    self._workers: list[Any] = []
    self._other_children: set[Any] = set()
    self._has_started = False
    self._channel = _Channel(queue.SimpleQueue(), queue.SimpleQueue())
    threading.Thread(
      target=_serve,
      args=(iterator, num_workers > 0, self._channel),
      name="diffjax-data",
      daemon=True,
    ).start()
    # Also runs when this object is deleted, and when the interpreter ends.
    self._finalizer = weakref.finalize(
      self, _close, self._channel, self._workers
    )

  def get_state(self) -> Any:
    """Returns Grain's state after the last element that was returned."""
    if self._state is None:
      assert self._iterator is not None, "closed"
      self._state = self._iterator.get_state()
    return self._state

  def close(self) -> None:
    """Ends the workers. No element can be read after this."""
    self._finalizer()
    self._iterator = None

  def __next__(self) -> Any:
    """Returns the next element.

    Raises:
      UserError: if a worker died or the source hangs. The message names the
        worker or the time, and what to do.
      Interrupted: if `interrupted` ended the wait.
    """
    assert self._iterator is not None, "closed"
    if not self._has_started:
      self._other_children = set(multiprocessing.active_children())
      self._has_started = True
    # After an interrupted wait, the reply to its request is still to come.
    if not self._has_request:
      self._channel.requests.put(True)
      self._has_request = True
    reply = self._wait()
    self._has_request = False
    if reply.error is not None:
      self._raise(reply.error)
    self._state = reply.state
    if self._num_first_elements > 0:
      self._find_workers()
      self._num_first_elements -= 1
    return reply.element

  def _wait(self) -> _Reply:
    """Waits for the reply of the thread, and watches the workers."""
    start = time.monotonic()
    deadline = start + self._timeout
    last_deadline = start + _MAX_TIMEOUTS_AT_START * self._timeout
    poll_seconds = min(_POLL_SECONDS, self._timeout / 4)
    cpu_seconds = 0.0
    while True:
      try:
        reply = self._channel.replies.get(timeout=poll_seconds)
      except queue.Empty:
        pass
      else:
        assert reply is not None, "the thread has ended"
        return reply

      now = time.monotonic()
      if self._is_interrupted():
        raise Interrupted
      self._find_workers()
      if self._dead_workers():
        # Elements that a worker has sent before its death may still arrive.
        deadline = min(deadline, now + _GRACE_SECONDS)
      elif self._num_first_elements > 0:
        # A busy process does not hang. It may still import modules.
        previous_cpu_seconds = cpu_seconds
        cpu_seconds = self._cpu_seconds()
        is_busy = cpu_seconds - previous_cpu_seconds > _BUSY_CPU_SECONDS
        new_deadline = now + self._timeout
        if is_busy and new_deadline < last_deadline:
          deadline = new_deadline
      if now >= deadline:
        raise self._end_after_timeout(now - start)

  def _is_interrupted(self) -> bool:
    return self._interrupted is not None and self._interrupted()

  def _find_workers(self) -> None:
    """Looks for new worker processes. Grain starts them late, and unlisted."""
    if len(self._workers) == self._num_workers:
      return
    known = self._other_children.union(self._workers)
    for child in multiprocessing.active_children():
      if child not in known and child.name.startswith(_WORKER_NAME):
        self._workers.append(child)

  def _dead_workers(self) -> list[Any]:
    """Returns the workers that have ended."""
    return [worker for worker in self._workers if worker.exitcode is not None]

  def _cpu_seconds(self) -> float:
    """Returns the CPU time of the workers, or of this process without any."""
    pids = [worker.pid for worker in self._workers]
    if not pids:
      pids = [os.getpid()]
    return _cpu_seconds(pids)

  def _raise(self, error: Exception) -> NoReturn:
    """Closes the reader, and raises the error that the thread has caught."""
    if self._is_interrupted():
      raise Interrupted from error
    self._find_workers()
    dead_workers = self._dead_workers()
    self.close()
    if dead_workers and not isinstance(error, UserError):
      raise self._dead_worker_error(dead_workers) from error
    with address_space.explained(
      f"reading {self._source}", "fewer config.data.num_workers take less"
    ):
      raise error

  def _end_after_timeout(self, seconds: float) -> UserError:
    """Closes the reader, and returns the error to raise.

    Args:
      seconds: The time without an element.
    """
    dead_workers = self._dead_workers()
    if dead_workers:
      self.close()
      return self._dead_worker_error(dead_workers)
    error = self._hang_error(seconds)
    if self._workers:
      _kill(self._workers)
    else:
      # The thread hangs and cannot be ended. Waiting for it when the
      # interpreter ends would take long. As a daemon, it ends with the process.
      self._finalizer.detach()
    self.close()
    return error

  def _dead_worker_error(self, dead_workers: Sequence[Any]) -> UserError:
    """Returns the error for workers that have ended."""
    ends = []
    for worker in dead_workers:
      ends.append(f"{worker.pid} ({_describe_exit(worker.exitcode)})")
    return UserError(
      f"data worker {' and '.join(ends)} died while reading {self._source};"
      " run the same command again to continue from the last checkpoint;"
      " config.data.num_workers sets the number of workers"
    )

  def _hang_error(self, seconds: float) -> UserError:
    """Returns the error for a read without an end."""
    readers = "in the training process"
    if self._workers:
      pids = ", ".join(str(worker.pid) for worker in self._workers)
      readers = f"by the data workers {pids}"
    advice = (
      "see whether its disk or network answers, and run the same command again"
      " to continue from the last checkpoint; if it is only slow, raise"
      f" config.data.timeout = {self._timeout:g} (seconds)"
    )
    limit = address_space.limit()
    if limit:
      advice = f"{limit}; or {advice}"
    return UserError(
      f"no batch for {seconds:.0f} s from {self._source}, read {readers}:"
      f" reading hangs; {advice}"
    )


def _serve(
  iterator: grain.DatasetIterator, has_workers: bool, channel: _Channel
) -> None:
  """Answers the requests for elements. Runs in the reader's thread."""
  # Workers start with the first element.
  context: Callable[[], contextlib.AbstractContextManager[None]]
  context = starting_workers if has_workers else contextlib.nullcontext
  while channel.requests.get():
    try:
      with context():
        reply = _Reply(next(iterator), iterator.get_state(), None)
    except Exception as error:
      # The waiting thread raises it.
      reply = _Reply(None, None, error)
    channel.replies.put(reply)
  iterator.close()
  channel.replies.put(None)


def _close(channel: _Channel, workers: Sequence[Any]) -> None:
  """Ends the thread and Grain's workers.

  Workers that do not end are killed. A thread that hangs is left.
  """
  channel.requests.put(False)
  for _ in range(2):
    if _has_ended(channel):
      return
    _kill(workers)


def _has_ended(channel: _Channel) -> bool:
  """Returns whether the thread ends within the grace period."""
  deadline = time.monotonic() + _GRACE_SECONDS
  while True:
    remaining = max(0.0, deadline - time.monotonic())
    try:
      reply = channel.replies.get(timeout=remaining)
    except queue.Empty:
      return False
    if reply is None:
      return True


def _kill(workers: Sequence[Any]) -> None:
  """Kills the workers that are alive, even if they are stopped."""
  for worker in workers:
    if worker.is_alive():
      worker.kill()


def _describe_exit(exit_code: int) -> str:
  """Returns how a process ended, for example "exit code 1" or "SIGTERM"."""
  if exit_code >= 0:
    return f"exit code {exit_code}"
  number = -exit_code
  if number not in list(signal.Signals):
    return f"signal {number}"
  if number == signal.SIGKILL:
    return "SIGKILL: out of memory?"
  return signal.Signals(number).name


def _cpu_seconds(pids: Sequence[int]) -> float:
  """Returns the CPU time that processes have used.

  Without /proc, the result is the time of a clock, as if the processes were
  always busy.
  """
  ticks = 0
  for pid in pids:
    try:
      stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
      return time.monotonic()
    # The second field, the name in parentheses, may contain spaces. The fields
    # after it start with number 3. Numbers 14 and 15 are utime and stime.
    fields = stat.rpartition(")")[2].split()
    utime, stime = fields[14 - 3], fields[15 - 3]
    ticks += int(utime) + int(stime)
  return ticks / os.sysconf("SC_CLK_TCK")
