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
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, NoReturn

import grain
from absl import flags

from diffjax.config import UserError
from diffjax.host import address_space
from diffjax.host.workers import end_with_parent, starting_workers

# Batches that are read ahead. More would only take memory.
_BATCHES_AHEAD = 4
_BATCHES_AHEAD_PER_WORKER = 2

# Seconds between two checks of the workers during a wait.
_POLL_SECONDS = 1.0
# Seconds to receive the batches that a dead worker has sent, and seconds for
# workers to end without being killed.
GRACE_SECONDS = 3.0
# The wait for a first batch is limited to this many times the time limit.
_MAX_TIMEOUTS_AT_START = 10
# A starting process that uses more CPU seconds between two checks is busy.
_BUSY_CPU_SECONDS = 0.02

# Grain gives its workers names that begin with this.
_WORKER_NAME = "grain-process-prefetch"


class Interrupted(Exception):
  """The caller ended the wait for a batch. The next call continues it."""


def read_sequentially(dataset: grain.MapDataset) -> grain.IterDataset:
  """Returns a dataset that reads the elements one by one, in order.

  It does not use Grain's thread pool, because a read that hangs in the pool
  would keep the process from ending.
  """
  return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0))


def prefetch(batches: grain.IterDataset, num_workers: int) -> grain.IterDataset:
  """Returns a dataset that reads batches ahead.

  Workers read different elements: Grain cuts the MapDataset at the beginning of
  `batches`, and gives worker i of n its elements i, i + n, i + 2n, …

  Args:
    batches: The batches.
    num_workers: Number of worker processes that read. 0 to read in a daemon
      thread of this process.
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

  Grain reads the flag --grain_enable_multiprocess_worker_profiling when it
  starts workers, and absl raises an error if flags are not parsed yet. Commands
  parse them, but notebooks and scripts do not.
  """
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def start_worker(worker_index: int, num_workers: int) -> None:
  """Makes a worker process end with its parent. Grain calls it in the worker.

  Without it, a worker could outlive the process that it reads for.
  """
  del worker_index, num_workers
  end_with_parent()


class _Reply(NamedTuple):
  """The reading thread's answer to one request for an element.

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


class _Deadline:
  """The time at which the wait for one element counts as a hang.

  It is `timeout` seconds after the start of the wait, unless it is moved:

  * `end_after_grace_period` brings it forward, because a worker has died.
  * `restart_if_busy` postpones it, because workers that start take longer.
  """

  def __init__(self, timeout: float):
    """Starts the wait.

    Args:
      timeout: Seconds.
    """
    self._timeout = timeout
    self._start = time.monotonic()
    self._time = self._start + timeout
    self._latest_time = self._start + _MAX_TIMEOUTS_AT_START * timeout
    # CPU time of the reading processes at the last check.
    self._cpu_seconds = 0.0

  def end_after_grace_period(self) -> None:
    """Moves the deadline to the end of a grace period, if that is earlier."""
    grace_end = time.monotonic() + GRACE_SECONDS
    self._time = min(self._time, grace_end)

  def restart_if_busy(self, pids: Sequence[int]) -> None:
    """Starts the timeout anew if processes used the CPU since the last check.

    But never moves the deadline beyond `_MAX_TIMEOUTS_AT_START` timeouts after
    the start of the wait.

    Args:
      pids: The processes that read.
    """
    cpu_seconds = _cpu_seconds(pids)
    is_busy = cpu_seconds - self._cpu_seconds > _BUSY_CPU_SECONDS
    self._cpu_seconds = cpu_seconds
    restarted_time = time.monotonic() + self._timeout
    if is_busy and restarted_time < self._latest_time:
      self._time = restarted_time

  def has_passed(self) -> bool:
    return time.monotonic() >= self._time

  def elapsed_seconds(self) -> float:
    """Returns the time since the start of the wait."""
    return time.monotonic() - self._start


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
    # Elements to read until each worker has sent one.
    self._num_first_elements = max(1, num_workers)
    # Grain's state after the last element, None before the first one.
    self._state: Any = None
    # Whether the thread has a request without a reply.
    self._has_request = False
    # The worker processes that have been found. They start with the first
    # request. Child processes that were there before are not workers.
    self._workers: list[BaseProcess] = []
    self._other_children: set[BaseProcess] = set()
    self._has_started = False
    self._channel = _Channel(queue.SimpleQueue(), queue.SimpleQueue())
    threading.Thread(
      target=_serve,
      args=(iterator, num_workers > 0, self._channel),
      name="diffjax-data",
      daemon=True,
    ).start()
    # `close` calls this. Otherwise, it is called when this object is deleted or
    # the interpreter ends.
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
    # After an interrupted wait, the reply to its request is still to come.
    if not self._has_request:
      self._request_element()
    reply = self._wait_for_reply()
    self._has_request = False
    if reply.error is not None:
      self._raise_read_error(reply.error)
    self._state = reply.state
    if self._is_starting():
      self._find_workers()
      self._num_first_elements -= 1
    return reply.element

  def _request_element(self) -> None:
    """Asks the thread for an element. The first request starts the workers."""
    if not self._has_started:
      self._other_children = set(multiprocessing.active_children())
      self._has_started = True
    self._channel.requests.put(True)
    self._has_request = True

  def _wait_for_reply(self) -> _Reply:
    """Waits until the thread has replied to a request for an element.

    Returns:
      The reply. It may hold an error that reading raised.

    Raises:
      UserError: if no reply arrives in time.
      Interrupted: if the caller ended the wait.
    """
    deadline = _Deadline(self._timeout)
    # Between two polls, the workers and the caller's interruption are checked.
    poll_seconds = min(_POLL_SECONDS, self._timeout / 4)
    while True:
      reply = self._poll_reply(poll_seconds)
      if reply is not None:
        return reply
      if self._is_interrupted():
        raise Interrupted

      self._find_workers()
      if self._dead_workers():
        # Elements that a worker has sent before its death may still arrive.
        deadline.end_after_grace_period()
      elif self._is_starting():
        # A busy process does not hang. It may still import modules.
        deadline.restart_if_busy(self._reading_pids())
      if deadline.has_passed():
        self._raise_timeout_error(deadline.elapsed_seconds())

  def _poll_reply(self, seconds: float) -> _Reply | None:
    """Returns the thread's reply, or None if it takes longer than `seconds`."""
    try:
      reply = self._channel.replies.get(timeout=seconds)
    except queue.Empty:
      return None
    assert reply is not None, "the thread has ended"
    return reply

  def _is_interrupted(self) -> bool:
    return self._interrupted is not None and self._interrupted()

  def _is_starting(self) -> bool:
    """Returns whether some worker may not have sent an element yet."""
    return self._num_first_elements > 0

  def _find_workers(self) -> None:
    """Adds new worker processes to `self._workers`.

    Grain starts them some time after the first request, and does not list them.
    """
    if len(self._workers) == self._num_workers:
      return
    known = self._other_children.union(self._workers)
    for child in multiprocessing.active_children():
      if child not in known and child.name.startswith(_WORKER_NAME):
        self._workers.append(child)

  def _dead_workers(self) -> list[BaseProcess]:
    """Returns the workers that have ended."""
    return [worker for worker in self._workers if worker.exitcode is not None]

  def _reading_pids(self) -> list[int]:
    """Returns the workers' process ids, or this process's without workers."""
    if not self._workers:
      return [os.getpid()]
    return [worker.pid for worker in self._workers if worker.pid is not None]

  def _raise_read_error(self, error: Exception) -> NoReturn:
    """Closes the reader, and raises an error that the thread has caught.

    If workers have died, raises a UserError that says so instead. If the caller
    interrupted the wait, raises `Interrupted` and leaves the reader open.
    """
    if self._is_interrupted():
      raise Interrupted from error
    # `close` ends all workers, so the dead ones are collected before it.
    self._find_workers()
    dead_workers = self._dead_workers()
    self.close()
    if dead_workers and not isinstance(error, UserError):
      raise self._dead_worker_error(dead_workers) from error
    with address_space.explained(
      f"reading {self._source}", "fewer config.data.num_workers take less"
    ):
      raise error

  def _raise_timeout_error(self, seconds: float) -> NoReturn:
    """Closes the reader, and raises the error for a wait that took too long.

    Args:
      seconds: The time without an element.
    """
    dead_workers = self._dead_workers()
    if dead_workers:
      self.close()
      raise self._dead_worker_error(dead_workers)
    error = self._hang_error(seconds)
    if self._workers:
      _kill(self._workers)
    else:
      # The thread hangs and cannot be ended. As a daemon, it ends with the
      # process. Without the finalizer, neither `close` nor the end of the
      # interpreter waits for the thread.
      self._finalizer.detach()
    self.close()
    raise error

  def _dead_worker_error(
    self, dead_workers: Sequence[BaseProcess]
  ) -> UserError:
    """Returns the error for workers that have ended."""
    descriptions = []
    for worker in dead_workers:
      assert worker.exitcode is not None, "the worker is alive"
      description = f"{worker.pid} ({_describe_exit(worker.exitcode)})"
      descriptions.append(description)
    return UserError(
      f"data worker {' and '.join(descriptions)} died while reading"
      f" {self._source}; run the same command again to continue from the last"
      " checkpoint; config.data.num_workers sets the number of workers"
    )

  def _hang_error(self, seconds: float) -> UserError:
    """Returns the error for a read that does not end.

    Args:
      seconds: The time without an element.
    """
    readers = "in the training process"
    if self._workers:
      pids = ", ".join(str(worker.pid) for worker in self._workers)
      readers = f"by the data workers {pids}"
    advice = (
      "see whether its disk or network answers, and run the same command again"
      " to continue from the last checkpoint; if it is only slow, raise"
      f" config.data.timeout = {self._timeout:g} (seconds)"
    )
    # A limited address space can cause the hang, so it is named first.
    address_space_limit = address_space.limit()
    if address_space_limit:
      advice = f"{address_space_limit}; or {advice}"
    return UserError(
      f"no batch for {seconds:.0f} s from {self._source}, read {readers}:"
      f" reading hangs; {advice}"
    )


def _serve(
  iterator: grain.DatasetIterator, has_workers: bool, channel: _Channel
) -> None:
  """Runs in the reader's thread: reads one element for each request.

  Args:
    iterator: The iterator to read.
    has_workers: Whether the iterator starts worker processes.
    channel: The requests and the replies.
  """
  # Workers start with the first element.
  context: Callable[[], contextlib.AbstractContextManager[None]]
  context = starting_workers if has_workers else contextlib.nullcontext
  while channel.requests.get():
    try:
      with context():
        element = next(iterator)
        reply = _Reply(element, iterator.get_state(), error=None)
    except Exception as error:
      # The waiting thread raises it.
      reply = _Reply(None, None, error)
    channel.replies.put(reply)
  iterator.close()
  # Tells that the iterator is closed.
  channel.replies.put(None)


def _close(channel: _Channel, workers: Sequence[BaseProcess]) -> None:
  """Ends the thread and Grain's workers.

  Workers that do not end are killed. A thread that hangs is left.
  """
  channel.requests.put(False)
  if not _wait_for_end(channel):
    # The thread waits for a worker that is stopped or blocked.
    _kill(workers)
    _wait_for_end(channel)


def _wait_for_end(channel: _Channel) -> bool:
  """Waits for the end of the thread, and returns whether it ends in time."""
  deadline = time.monotonic() + GRACE_SECONDS
  while True:
    remaining_seconds = max(0.0, deadline - time.monotonic())
    try:
      reply = channel.replies.get(timeout=remaining_seconds)
    except queue.Empty:
      return False
    # Replies with elements that nobody waited for come first.
    if reply is None:
      return True


def _kill(workers: Sequence[BaseProcess]) -> None:
  """Kills the workers that are alive, even if they are stopped."""
  for worker in workers:
    if worker.is_alive():
      worker.kill()


def _describe_exit(exit_code: int) -> str:
  """Returns how a process ended, for example "exit code 1" or "SIGTERM".

  Args:
    exit_code: As in `multiprocessing`: −N if signal N ended the process.
  """
  if exit_code >= 0:
    return f"exit code {exit_code}"
  signal_number = -exit_code
  if signal_number == signal.SIGKILL:
    return "SIGKILL: out of memory?"
  try:
    return signal.Signals(signal_number).name
  except ValueError:
    # Most real-time signals have no name.
    return f"signal {signal_number}"


def _cpu_seconds(pids: Sequence[int]) -> float:
  """Returns the CPU time that processes have used, in total.

  Without /proc, returns the time of a clock, so that the processes seem to be
  always busy.
  """
  ticks = 0
  for pid in pids:
    try:
      stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
      return time.monotonic()
    # The format is "PID (NAME) STATE …", and NAME may contain spaces and
    # parentheses. The man page proc(5) numbers the fields from 1, so the fields
    # after the name start with number 3.
    fields = stat.rpartition(")")[2].split()
    user_ticks = int(fields[14 - 3])
    system_ticks = int(fields[15 - 3])
    ticks += user_ticks + system_ticks
  return ticks / os.sysconf("SC_CLK_TCK")
