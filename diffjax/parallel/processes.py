"""Several processes that train one model: they connect, agree and end together.

The processes use JAX's multi-controller runtime: a coordination service, which
runs in process 0, and XLA's collectives. JAX detects the processes on Cloud
TPU, under Slurm and Open MPI, and in indexed Kubernetes Jobs. Elsewhere, flags
name the address of process 0.

All processes decide alike, because they decide on the same numbers. Whether a
step is skipped depends on sums over all rows. Whether the run stops depends on
an `Agreement`.

An error in one process ends all of them, with the reason of that process. If a
process is killed, JAX ends the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

# The client of the coordination service has no public name.
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.config import UserError
from diffjax.host import signals

# If a process sends no heartbeat for this long, JAX counts it as dead and ends
# the others. JAX notices a broken connection at once.
_HEARTBEAT_TIMEOUT_SECONDS = 30
# How long processes may finish writing after all know that one has failed.
_GRACE_SECONDS = 5.0
# How long one request for the reason of the end waits before it is repeated.
_REASON_REQUEST_SECONDS = 3600.0
# The coordination service's key for the reason why the run ends.
_REASON_KEY = "diffjax/ending"
# The barrier at which processes wait until all know that reason.
_REASON_BARRIER = "diffjax/heard"
_RESTART = (
  "start all processes again with the same command to continue from the last"
  " complete checkpoint"
)
# How many differences and how many processes an error message names.
_MAX_NAMED = 4
# Collectives and the coordination service use one of these words in their
# errors if another process is gone.
_LOST_CONNECTION_WORDS = (
  "Gloo",
  "NCCL",
  "oordination",
  "UNAVAILABLE",
  "Connection",
)


@contextlib.contextmanager
def connected(
  coordinator: str = "",
  num_processes: int = 0,
  process_id: int = -1,
  *,
  timeout: int = 300,
) -> Iterator[None]:
  """Connects this process with the others of the run, inside the context.

  Without arguments, JAX looks for a cluster. If it detects no cluster, this
  process runs alone. If there are several processes, an error inside the
  context ends all of them, each with one line and exit code 1.

  Enter the context before JAX creates its backend.

  Args:
    coordinator: HOST:PORT at which process 0 listens. "" to look for a cluster.
    num_processes: the number of processes. 1 to run alone, even in a cluster.
    process_id: the number of this process, from 0.
    timeout: how many seconds to wait for the others. JAX waits 5 s longer.

  Raises:
    UserError: if the arguments contradict each other, or if the port is in use.
  """
  if num_processes == 1 and not coordinator:
    yield
    return
  peers = "the other processes"
  if coordinator or num_processes > 0 or process_id >= 0:
    _check_flags(coordinator, num_processes, process_id)
    if process_id == 0:
      _check_port(coordinator)
    peers = (
      f"the other processes ({num_processes} in all; process 0 listens at"
      f" {coordinator})"
    )

  # While JAX connects, its C++ code may abort the process.
  terminator = _Terminator(
    f"could not connect with {peers} within {timeout} s: start all processes"
    " with the same --coordinator and --num_processes, and check that they can"
    " reach process 0; --connect_timeout sets how long to wait"
  )
  try:
    is_connected = _initialize(coordinator, num_processes, process_id, timeout)
  except (RuntimeError, ValueError, OSError) as error:
    terminator.end(f"cannot connect with {peers}: {_first_line(error)}")
  if not is_connected:
    terminator.restore_abort_handler()
    yield
    return
  with _ending_together(terminator):
    yield


@contextlib.contextmanager
def _ending_together(terminator: _Terminator) -> Iterator[None]:
  """Ends all connected processes as soon as one of them fails.

  A process fails if the body raises, or if a signal ends it. It tells the
  reason to the others, and every process prints it and exits with code 1. If
  the body does not fail, this process waits for the others and disconnects.

  Args:
    terminator: ends this process.
  """
  shared_reason = _SharedReason(distributed.global_state.client)
  member = _Member(
    distributed.global_state.process_id, shared_reason, terminator
  )
  terminator.abort_message = member.lost_connection_message(
    "see JAX's message above"
  )
  # This thread ends the process if another process fails. Meanwhile, the main
  # thread runs the body.
  watcher = threading.Thread(
    target=member.end_with_others, name="diffjax-processes", daemon=True
  )
  watcher.start()
  ending_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  try:
    with signals.Watch(ending_signals, member.end_by_signal):
      yield
  except BaseException as error:
    member.end_by_error(error)  # does not return
  member.leave(watcher)


def _check_flags(coordinator: str, num_processes: int, process_id: int) -> None:
  """Checks the flags that connect processes without a cluster.

  Args:
    coordinator: --coordinator. "" if it was not given.
    num_processes: --num_processes. 0 if it was not given.
    process_id: --process_id. Negative if it was not given.

  Raises:
    UserError: if a flag is missing or has an invalid value.
  """
  missing = []
  if not coordinator:
    missing.append("--coordinator=HOST:PORT")
  if num_processes <= 0:
    missing.append("--num_processes=N")
  if process_id < 0:
    missing.append("--process_id=I")
  if missing:
    raise UserError(
      f"{' and '.join(missing)}: missing; pass --coordinator=HOST:PORT,"
      " --num_processes=N and --process_id=I together to every process"
    )
  if process_id >= num_processes:
    raise UserError(
      f"--process_id={process_id}: must be less than"
      f" --num_processes={num_processes}; the first process is 0"
    )
  if not _port_of(coordinator).isdecimal():
    raise UserError(
      f"--coordinator={coordinator}: must be HOST:PORT of process 0,"
      " such as 10.0.0.2:9476"
    )


def _port_of(coordinator: str) -> str:
  """Returns PORT of "HOST:PORT", which may be no number."""
  return coordinator.rpartition(":")[2]


def _check_port(coordinator: str) -> None:
  """Checks that process 0 can listen at the port of "HOST:PORT".

  Opens the port for a moment. JAX would crash without a useful message.

  Raises:
    UserError: if it cannot, for example because another program does.
  """
  address = ("", int(_port_of(coordinator)))  # "" stands for all interfaces.
  try:
    if socket.has_dualstack_ipv6():
      server = socket.create_server(
        address, family=socket.AF_INET6, dualstack_ipv6=True
      )
    else:
      server = socket.create_server(address)
  except (OSError, OverflowError) as error:
    raise UserError(
      f"--coordinator={coordinator}: process 0 cannot listen at this port"
      f" ({error}); end the program that uses it, or choose another port"
    ) from error
  server.close()


def _initialize(
  coordinator: str, num_processes: int, process_id: int, timeout: int
) -> bool:
  """Connects with the other processes. Returns False if there are none.

  Args:
    coordinator: HOST:PORT of process 0. "" if JAX should detect a cluster.
    num_processes: the number of processes, if there is a coordinator.
    process_id: the number of this process, if there is a coordinator.
    timeout: how many seconds to wait for the others.

  Raises:
    RuntimeError: if JAX detects a cluster but cannot connect.
  """
  # JAX's preemption service would catch SIGTERM, and stop the run only at its
  # first step.
  jax.config.update("jax_enable_preemption_service", False)
  initialize = functools.partial(
    jax.distributed.initialize,
    initialization_timeout=timeout,
    heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_SECONDS,
  )
  if coordinator:
    initialize(
      coordinator,
      num_processes,
      process_id,
      cluster_detection_method="deactivate",
    )
    return True
  try:
    initialize()
  except Exception as error:  # The client of each cluster has its own errors.
    # Kubernetes sets this in a Job whose pods have indices.
    if "JOB_COMPLETION_INDEX" in os.environ:
      raise RuntimeError(
        "JAX detects no other processes in this indexed Kubernetes Job"
        f" ({error}): pip install 'jax[k8s]', or pass --num_processes=1 to run"
        " alone"
      ) from error
    if "coordinator_address should be defined" in str(error):
      return False  # This is JAX's error if it detects no cluster.
    if "KUBERNETES_SERVICE_HOST" in os.environ:
      return False  # This pod is not part of an indexed Job.
    raise RuntimeError(
      f"{error}; pass --num_processes=1 to run alone"
    ) from error
  return True


class _Terminator:
  """Ends this process with one line, even if JAX's C++ code aborts it.

  Attributes:
    abort_message: the line in that case.
  """

  def __init__(self, abort_message: str):
    """Installs a handler for SIGABRT."""
    self.abort_message = abort_message
    self._end_lock = threading.Lock()
    # ctypes does not keep its callbacks alive, so this object does.
    callback_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    self._abort_handler = callback_type(self._on_abort)
    # Python's own signal handlers do not run while the main thread is in C++,
    # so the handler is installed with the C library's signal().
    self._c_signal = ctypes.CDLL(None).signal
    self._c_signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    self._c_signal.restype = ctypes.c_void_p
    self._previous_abort_handler = self._c_signal(
      signal.SIGABRT, ctypes.cast(self._abort_handler, ctypes.c_void_p)
    )

  def end(
    self,
    message: str,
    code: int = 1,
    before_exit: Callable[[], None] | None = None,
  ) -> NoReturn:
    """Calls `before_exit`, prints the message and ends this process."""
    # The lock is never released: a second caller waits until the process ends.
    self._end_lock.acquire()
    try:
      if before_exit is not None:
        before_exit()
    finally:
      signals.end(message, code)

  def is_ending(self) -> bool:
    """Returns whether `end` has been called, and waits for other processes."""
    return self._end_lock.locked()

  def restore_abort_handler(self) -> None:
    """Restores the handler of SIGABRT that the process had before."""
    self._c_signal(signal.SIGABRT, self._previous_abort_handler)

  def _on_abort(self, signal_number: int) -> None:
    """Handles SIGABRT. The C library passes the number of the signal."""
    self.end(self.abort_message)


class _SharedReason:
  """The reason why the run ends, shared through the coordination service.

  The reason is the first one that a process publishes. It is empty if the run
  ends without an error.
  """

  def __init__(self, client: Any):
    self._client = client

  def publish(self, reason: str) -> None:
    """Sets the reason, unless another process was first."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._client.key_value_set(_REASON_KEY, reason)

  def publish_to_all(self, reason: str) -> None:
    """Publishes the reason, and waits until all processes can end.

    Process 0 serves the reason, and collectives need every process. So this
    process waits until all processes know the reason and had time to finish
    writing.
    """
    self.publish(reason)
    # The barrier fails if a process was killed.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      timeout_ms = _HEARTBEAT_TIMEOUT_SECONDS * 1000
      self._client.wait_at_barrier(_REASON_BARRIER, timeout_ms)
    time.sleep(_GRACE_SECONDS)

  def wait(self, seconds: float) -> str | None:
    """Returns the reason, or None if none is published within the time."""
    timeout_ms = int(seconds * 1000)
    try:
      return self._client.blocking_key_value_get(_REASON_KEY, timeout_ms)
    except jax.errors.JaxRuntimeError:
      return None


class _Member:
  """This process as one of several, which end together."""

  def __init__(
    self, process_id: int, shared_reason: _SharedReason, terminator: _Terminator
  ):
    self._process_id = process_id
    self._shared_reason = shared_reason
    self._terminator = terminator

  def lost_connection_message(self, detail: str) -> str:
    """Returns the message if another process ended without a reason."""
    return (
      f"process {self._process_id} has lost the connection with the others:"
      f" one has ended or cannot be reached ({detail}); {_RESTART}"
    )

  def end_with_others(self) -> None:
    """Waits for the shared reason, and ends this process if it is an error.

    This runs in a thread. The main thread may be waiting for the failed process
    in a collective, where no Python runs.
    """
    reason = self._shared_reason.wait(_REASON_REQUEST_SECONDS)
    while reason is None:
      time.sleep(1.0)
      reason = self._shared_reason.wait(_REASON_REQUEST_SECONDS)
    if reason:  # The reason is empty if the run ends without an error.
      self._end(message=reason, shared_reason=reason)

  def end_by_signal(self, signal_number: int) -> None:
    """Ends all processes, in a thread. A second signal ends this one at once.

    A signal handler must not wait, and ending takes several seconds.
    """
    if self._terminator.is_ending():
      signals.end_at_once(signal_number)
    exit_code = 128 + signal_number  # the convention of shells
    threading.Thread(
      target=self._end_all,
      args=(signals.reason(signal_number), exit_code),
      daemon=True,
    ).start()

  def end_by_error(self, error: BaseException) -> NoReturn:
    """Ends all processes because of an error in this one.

    A collective fails here if another process ends. Then the message is the
    reason of that process. Each call of an `end` method ends this process and
    does not return.
    """
    if isinstance(error, UserError):
      self._end_all(str(error))
    # The error may only be the consequence of another process's end.
    reason = self._shared_reason.wait(_GRACE_SECONDS)
    if reason:
      self._end(message=reason, shared_reason=reason)
    # A process that was killed gives no reason.
    if any(word in str(error) for word in _LOST_CONNECTION_WORDS):
      self._terminator.end(self.lost_connection_message(_first_line(error)))
    # The error is this process's own.
    traceback.print_exception(error)
    self._end_all(f"{type(error).__name__}: {error}")

  def leave(self, watcher: threading.Thread) -> None:
    """Disconnects after a run without an error.

    Args:
      watcher: the thread that runs `end_with_others`.
    """
    self._shared_reason.publish("")
    watcher.join()
    jax.distributed.shutdown()  # waits for the other processes
    self._terminator.restore_abort_handler()

  def _end_all(self, reason: str, code: int = 1) -> NoReturn:
    """Ends all processes for a reason of this process."""
    self._end(reason, f"process {self._process_id} stopped: {reason}", code)

  def _end(self, message: str, shared_reason: str, code: int = 1) -> NoReturn:
    """Prints the message and ends this process after all know the reason."""
    publish = functools.partial(
      self._shared_reason.publish_to_all, shared_reason
    )
    self._terminator.end(message, code, before_exit=publish)


def _first_line(error: BaseException) -> str:
  """Returns the first line of an error's text, or its type without a text."""
  text = str(error).strip()
  if not text:
    return type(error).__name__
  return text.splitlines()[0]


class Agreement:
  """A decision, such as to stop, that is true if any process votes for it.

  All processes learn the decision between the same two steps. A single process
  decides alone.

  The order in the training loop, around step n:

    1. `start_vote` queues an all-reduce of the votes on the devices.
    2. Step n is queued behind it.
    3. The metrics of step n − 1 are fetched, which waits for that step.
    4. `decision` waits for the all-reduce, while step n is running. If the
       decision is to stop, step n is the last one.

  So no device ever waits for a host.
  """

  def __init__(self, mesh: Mesh, vote: Callable[[], bool]):
    """Prepares votes of all processes on a question, such as whether to stop.

    The decision is yes if any process votes yes. It is no before the first
    vote, which `start_vote` starts.

    Args:
      mesh: the mesh of all processes' devices.
      vote: returns the current vote of this process.
    """
    self._vote = vote
    self._is_alone = jax.process_count() == 1
    self._decision: jax.Array | None = None
    self._one_per_device = NamedSharding(mesh, P(mesh.axis_names))
    replicated = NamedSharding(mesh, P())
    self._reduce = jax.jit(_largest_vote, out_shardings=replicated)

  def start_vote(self) -> None:
    """Starts to collect the votes of all processes, without waiting for them.

    Every process must call this before every step. A device can only take part
    in an all-reduce with an array, so each device gets its process's vote.
    """
    if self._is_alone:
      return
    num_devices = len(self._one_per_device.addressable_devices)
    local_votes = np.full(num_devices, self._vote(), np.int32)
    votes = jax.make_array_from_process_local_data(
      self._one_per_device, local_votes
    )
    self._decision = self._reduce(votes)

  def decision(self) -> bool:
    """Returns the decision of the last vote, the same in every process."""
    if self._is_alone:
      return self._vote()
    if self._decision is None:  # There was no vote yet.
      return False
    return bool(self._decision)  # waits for the all-reduce


def _largest_vote(votes: jax.Array) -> jax.Array:
  """Returns 1 if any vote is 1, else 0."""
  return votes.max()


def gather_objects(value: Any) -> list[Any]:
  """Returns the values of all processes, in the order of their numbers.

  All processes must call this together. The values are sent as JSON.

  Args:
    value: this process's value, of types that JSON has.
  """
  if jax.process_count() == 1:
    return [value]
  encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(encoded.size))
  # An all-gather needs arrays of the same shape from all processes, so shorter
  # texts are padded with zeros.
  padding = int(sizes.max()) - encoded.size
  padded = np.pad(encoded, (0, padding))
  gathered = multihost_utils.process_allgather(padded)  # [processes, bytes]
  values = []
  for row, size in zip(gathered, sizes, strict=True):
    values.append(json.loads(row[:size].tobytes()))
  return values


def check_same(settings: Mapping[str, Any]) -> None:
  """Checks that all processes were started with the same settings.

  All processes must call this together, and all raise the same error.

  Args:
    settings: values by name, of types that JSON has. Mappings may be nested.

  Raises:
    UserError: naming the settings that differ, with their values.
  """
  settings_of_processes = []
  for process_settings in gather_objects(dict(settings)):
    settings_of_processes.append(dict(_flatten(process_settings)))
  differences = _differences(settings_of_processes)
  if differences:
    raise UserError(
      f"the processes have different settings: {'; '.join(differences)}; start"
      " all of them with the same command"
    )


def check_same_data(data_identity: Mapping[str, int | str]) -> None:
  """Checks that all processes read the same data.

  All processes must call this together, and all raise an error. They exchange
  digests, and the values only if the digests differ.

  Args:
    data_identity: values that identify the data of this process, by name for
      the message. For example, the sizes of files.

  Raises:
    UserError: naming the first values that differ, and the directories of the
      processes that differ.
  """
  text = json.dumps(data_identity, sort_keys=True)
  digests = gather_objects(hashlib.sha256(text.encode()).hexdigest())
  if len(set(digests)) == 1:
    return
  # All processes have the same digests, so all of them continue here.
  differences = _differences(gather_objects(dict(data_identity)))
  directories = gather_objects(f"{os.getcwd()} on {socket.gethostname()}")

  if len(differences) > _MAX_NAMED:
    num_unnamed = len(differences) - _MAX_NAMED
    differences = [*differences[:_MAX_NAMED], f"and {num_unnamed} more"]
  difference_text = "; ".join(differences)
  directory_text = ", ".join(_differing_directories(digests, directories))
  raise UserError(
    f"the processes read different data: {difference_text}; give all of"
    " them the same files, on a shared file system or as copies under the same"
    " paths (relative paths start where a process runs:"
    f" {directory_text})"
  )


def _differing_directories(
  digests: list[str], directories: list[str]
) -> list[str]:
  """Returns where process 0 runs, and where processes with other data run.

  Users often started these in the wrong directory.

  Example: (["a", "a", "b"], ["/x", "/x", "/y"]) →
  ["process 0 runs in /x", "process 2 runs in /y"]

  Args:
    digests: the digest of each process's data.
    directories: the directory that each process runs in.

  Returns:
    At most `_MAX_NAMED` texts.
  """
  texts = [f"process 0 runs in {directories[0]}"]
  for process, directory in enumerate(directories):
    if digests[process] != digests[0] and len(texts) < _MAX_NAMED:
      texts.append(f"process {process} runs in {directory}")
  return texts


def _differences(values_of_processes: list[dict[str, Any]]) -> list[str]:
  """Returns a text for each name whose value differs from process 0's.

  The text names the first process with a different value.

  Example: [{"seed": 1}, {"seed": 2}] →
  ["seed is 1 in process 0 and 2 in process 1"]

  Args:
    values_of_processes: the values of each process, by name.
  """
  first_values = values_of_processes[0]
  text_of_name: dict[str, str] = {}
  for process, values in enumerate(values_of_processes[1:], start=1):
    # A name that one of the two processes lacks has the value None in it.
    for name in dict.fromkeys([*first_values, *values]):
      first_value = first_values.get(name)
      value = values.get(name)
      if value != first_value and name not in text_of_name:
        text_of_name[name] = (
          f"{name} is {first_value!r} in process 0"
          f" and {value!r} in process {process}"
        )
  return list(text_of_name.values())


def _flatten(
  settings: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
  """Yields the settings of nested mappings with their dotted names.

  Example: {"data": {"seed": 1}} → ("data.seed", 1)

  Args:
    settings: the settings. Values may be mappings of settings.
    prefix: goes before each name.
  """
  for name, value in settings.items():
    if isinstance(value, Mapping):
      yield from _flatten(value, f"{prefix}{name}.")
    else:
      yield prefix + name, value
