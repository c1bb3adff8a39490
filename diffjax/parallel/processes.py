"""Several processes that train one model: they find each other, agree, and end together.

They are JAX's own multi-controller runtime: its coordination service, which process 0 serves, and XLA's collectives. On Cloud TPU, under
Slurm and Open MPI and in indexed Kubernetes Jobs JAX finds the processes by itself; elsewhere flags say where process 0 is.

All decide alike because they decide on the same numbers: a step is skipped by sums over all rows, and the run is stopped by an `Agreement`.
What goes wrong in one process alone ends all of them, with its reason; JAX ends those that outlive a killed one.
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

# The key-value store of its client has no public name.
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax import signals
from diffjax.config import UserError

# Seconds without a sign of life after which JAX counts a process as dead, and ends the others. A connection that breaks is seen at once.
_HEARTBEAT = 30
# Seconds for all to finish writing once each has heard that one has failed.
_GRACE = 5.0
# The coordination service's key for the reason why the run ends; empty for a normal end.
_ENDING = "diffjax/ending"
# The barrier at which each process waits until all have heard that reason.
_HEARD = "diffjax/heard"
_AGAIN = "start all processes again with the same command to go on from the last complete checkpoint"
# The largest number of differences, and of processes, that a message names.
_NUM_NAMED = 4
# Words in the errors that collectives and the coordination service raise when another process is gone.
_LOST = ("Gloo", "NCCL", "oordination", "UNAVAILABLE", "Connection")


@contextlib.contextmanager
def connected(
  coordinator: str = "",
  num_processes: int = 0,
  process_id: int = -1,
  *,
  timeout: int = 300,
) -> Iterator[None]:
  """Joins the other processes of the run for the duration of the context. Enter it before JAX makes its backend.

  Without arguments JAX looks for a cluster; where there is none, this process runs alone. With several processes, an error in the context,
  in any of them, ends this process with one line and exit code 1.

  Args:
    coordinator: HOST:PORT at which process 0 is to listen; "" to look for a cluster.
    num_processes: The number of processes; 1 to run alone, also inside a cluster.
    process_id: This process's number, from 0.
    timeout: Seconds (and 5 more) to wait for the others.

  Raises:
    UserError: for arguments that do not fit each other, and a port that is in use.
  """
  given = {
    "--coordinator=HOST:PORT": bool(coordinator),
    "--num_processes=N": num_processes > 0,
    "--process_id=I": process_id >= 0,
  }
  if num_processes == 1 and not coordinator:
    yield
    return
  if any(given.values()):
    if missing := [flag for flag, is_given in given.items() if not is_given]:
      raise UserError(
        f"{' and '.join(missing)}: missing; {', '.join(given)} go together, in every process"
      )
    if process_id >= num_processes:
      raise UserError(
        f"--process_id={process_id}: must be less than --num_processes={num_processes}; the first process is 0"
      )
    if not coordinator.rpartition(":")[2].isdecimal():
      raise UserError(
        f"--coordinator={coordinator}: must be HOST:PORT of process 0, such as 10.0.0.2:9476"
      )
    if process_id == 0:
      _check_port(coordinator)
  where = (
    f" of {num_processes} at {coordinator}, where process 0 listens"
    * any(given.values())
  )
  end = _End(
    f"this process could not join the others{where}, within {timeout} s: start all of them, with the same --coordinator and "
    "--num_processes, and see that the others can reach process 0 there; --connect_timeout sets how long to wait"
  )
  try:
    joined = _initialize(coordinator, num_processes, process_id, timeout)
  except (RuntimeError, ValueError, OSError) as error:
    end(f"this process cannot join the others{where}: {_first_line(error)}")
  if not joined:
    end.forget()
    yield
    return
  client, me = (
    distributed.global_state.client,
    distributed.global_state.process_id,
  )
  end.if_aborted = f"process {me} has lost the others: one has ended or cannot be reached, as JAX says above; {_AGAIN}"
  watcher = threading.Thread(
    target=_watch, args=(client, end), name="diffjax-processes", daemon=True
  )
  watcher.start()
  try:
    with signals.Watch(
      (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
      functools.partial(_interrupted, me, client, end),
    ):
      yield
  except BaseException as error:
    _fail(error, me, client, end)
  _tell(client, "")
  watcher.join()
  jax.distributed.shutdown()  # waits for the others
  end.forget()


def _check_port(coordinator: str) -> None:
  """Refuses a port on which JAX could not listen: it would crash."""
  port, both = int(coordinator.rpartition(":")[2]), socket.has_dualstack_ipv6()
  try:
    socket.create_server(
      ("", port),
      family=socket.AF_INET6 if both else socket.AF_INET,
      dualstack_ipv6=both,
    ).close()
  except (OSError, OverflowError) as error:
    raise UserError(
      f"--coordinator={coordinator}: process 0 cannot listen there ({error}); end what does, or take another port"
    ) from error


def _initialize(
  coordinator: str, num_processes: int, process_id: int, timeout: int
) -> bool:
  """Joins the other processes, if there are any or a cluster says that there may be. Returns whether it did."""
  jax.config.update(
    "jax_enable_preemption_service", False
  )  # it would take SIGTERM, and keep it until the first step
  limits: dict[str, Any] = dict(
    initialization_timeout=timeout, heartbeat_timeout_seconds=_HEARTBEAT
  )
  if coordinator:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      cluster_detection_method="deactivate",
      **limits,
    )
    return True
  indexed = "JOB_COMPLETION_INDEX" in os.environ
  try:
    jax.distributed.initialize(**limits)
    return True
  except Exception as error:  # a cluster's own client has errors of its own
    if indexed:
      raise RuntimeError(
        f"in this indexed Kubernetes Job JAX finds no others ({error}): pip install 'jax[k8s]', or pass --num_processes=1 to be alone"
      ) from error
    if (
      "coordinator_address should be defined" in str(error)
      or "KUBERNETES_SERVICE_HOST" in os.environ
    ):
      return False
    raise RuntimeError(
      f"{error}; pass --num_processes=1 to be alone"
    ) from error


class _End:
  """Ends this process with one line, once, even if JAX's C++ code aborts it.

  Attributes:
    if_aborted: The message in that case.
  """

  def __init__(self, if_aborted: str):
    self.if_aborted, self._once = if_aborted, threading.Lock()
    # libc's signal(), not Python's: Python's handlers do not run once the main thread is stuck in C++.
    self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(
      lambda _: self(self.if_aborted)
    )
    self._signal = ctypes.CDLL(None).signal
    self._signal.argtypes, self._signal.restype = (
      (ctypes.c_int, ctypes.c_void_p),
      ctypes.c_void_p,
    )
    self._previous = self._signal(
      signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p)
    )

  def __call__(
    self, message: str, before: Callable[[], None] = lambda: None, code: int = 1
  ) -> NoReturn:
    self._once.acquire()  # never released: a second caller waits until the process ends
    try:
      before()
    finally:
      signals.end(message, code)

  def has_begun(self) -> bool:
    """Whether it waits for the other processes, to end this one."""
    return self._once.locked()

  def forget(self) -> None:
    """Restores the default: the process then ends like any other."""
    self._signal(signal.SIGABRT, self._previous)


def _watch(client: Any, end: _End) -> None:
  """Waits until a process says why the run ends. The main thread may be waiting for that process in a collective, where no Python runs."""
  while (told := _told(client, seconds=3600.0)) is None:
    time.sleep(1.0)
  if told:
    end(told, lambda: _leave(client, told))


def _interrupted(me: int, client: Any, end: _End, number: int) -> None:
  """Ends all processes because of a signal to this one; a second signal ends this one at once."""
  if end.has_begun():
    signals.end_at_once(number)
  reason = signals.reason(number)
  leave = functools.partial(_leave, client, f"process {me} stopped: {reason}")
  threading.Thread(
    target=end, args=(reason, leave, 128 + number), daemon=True
  ).start()


def _fail(error: BaseException, me: int, client: Any, end: _End) -> NoReturn:
  """Ends this process, with its own reason or with that of another process whose end made a collective fail here."""
  reason = str(error)
  if not isinstance(error, UserError):
    if told := _told(client, seconds=_GRACE):
      end(told, lambda: _leave(client, told))
    if any(word in reason for word in _LOST):
      end(
        f"process {me} has lost the others: one has ended or cannot be reached ({_first_line(error)}); {_AGAIN}"
      )
    traceback.print_exception(error)
    reason = f"{type(error).__name__}: {reason}"
  end(reason, lambda: _leave(client, f"process {me} stopped: {reason}"))


def _first_line(error: BaseException) -> str:
  return (str(error).strip() or type(error).__name__).splitlines()[0]


def _leave(client: Any, why: str) -> None:
  """Tells the others, and waits until all have heard and finished writing: process 0 serves the message, and collectives need everyone."""
  _tell(client, why)
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # one has been killed
    client.wait_at_barrier(_HEARD, _HEARTBEAT * 1000)
  time.sleep(_GRACE)


def _tell(client: Any, message: str) -> None:
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first
    client.key_value_set(_ENDING, message)


def _told(client: Any, seconds: float) -> str | None:
  try:
    return client.blocking_key_value_get(_ENDING, int(seconds * 1000))
  except jax.errors.JaxRuntimeError:
    return None


class Agreement:
  """An "or" over all processes' answers to a question, which all know before the same step.

  It is an all-reduce of one number a device, queued before a step. The loop reads the result a step later, when the step before is over,
  whose metrics the loop waits for anyway. So no device ever waits for a host. A single process decides alone.
  """

  def __init__(self, mesh: Mesh, wish: Callable[[], bool]):
    """Asks nothing yet.

    Args:
      mesh: The mesh of all processes' devices.
      wish: This process's answer when it is called.
    """
    self._wish, self._alone, self._answer = wish, jax.process_count() == 1, None
    self._devices = NamedSharding(mesh, P(mesh.axis_names))
    self._any = jax.jit(
      lambda wishes: wishes.max(), out_shardings=NamedSharding(mesh, P())
    )

  def ask(self) -> None:
    """Starts the all-reduce. Every process calls it before it starts a step."""
    if not self._alone:
      wishes = np.full(
        len(self._devices.addressable_devices), self._wish(), np.int32
      )
      self._answer = self._any(
        jax.make_array_from_process_local_data(self._devices, wishes)
      )

  def __call__(self) -> bool:
    """The result of the last `ask`; the same in every process."""
    return (
      self._wish()
      if self._alone
      else self._answer is not None and bool(self._answer)
    )


def gather_objects(value: Any) -> list[Any]:
  """Every process's value (JSON), in the order of the processes. All processes call it together."""
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(text.size))
  texts = multihost_utils.process_allgather(
    np.pad(text, (0, int(sizes.max()) - text.size))
  )
  return [
    json.loads(texts[process, :size].tobytes())
    for process, size in enumerate(sizes)
  ]


def check_same(settings: Mapping[str, Any]) -> None:
  """Refuses processes that were started with different settings. All processes call it together, and all raise.

  Args:
    settings: Values (JSON) by name; a mapping's fields are settings themselves.

  Raises:
    UserError: naming the fields that differ, with their values.
  """
  differing = _differences(
    [dict(_flat(mine)) for mine in gather_objects(dict(settings))]
  )
  if differing:
    raise UserError(
      f"the processes do not fit: {'; '.join(differing)}; start all of them with the same command"
    )


def check_same_data(data_identity: Mapping[str, int | str]) -> None:
  """Refuses processes that read different data.

  All processes call it together, and all raise. They exchange digests, and the
  values only if the digests differ.

  Args:
    data_identity: Values that identify the data of this process, by name for
      the message. For example, the sizes of files.

  Raises:
    UserError: naming the first values that differ, and the directories of the
      processes that differ.
  """
  text = json.dumps(data_identity, sort_keys=True)
  digests = gather_objects(hashlib.sha256(text.encode()).hexdigest())
  if len(set(digests)) == 1:
    return
  differing = _differences(gather_objects(dict(data_identity)))
  if len(differing) > _NUM_NAMED:
    num_others = len(differing) - _NUM_NAMED
    differing = [*differing[:_NUM_NAMED], f"and {num_others} more"]
  places = gather_objects(f"{os.getcwd()} on {socket.gethostname()}")
  where = [f"process 0 runs in {places[0]}"]
  for process, place in enumerate(places):
    if digests[process] != digests[0] and len(where) < _NUM_NAMED:
      where.append(f"process {process} runs in {place}")
  raise UserError(
    f"the processes read different data: {'; '.join(differing)}; give all of"
    " them the same files, on a shared file system or as copies under the same"
    f" paths (relative paths start where a process runs: {', '.join(where)})"
  )


def _differences(everyone: list[dict[str, Any]]) -> list[str]:
  """Returns what differs from process 0, once per name."""
  first, *others = everyone
  differing: dict[str, str] = {}
  for process, theirs in enumerate(others, start=1):
    for name in dict.fromkeys([*first, *theirs]):
      if first.get(name) != theirs.get(name):
        differing.setdefault(
          name,
          f"{name} is {first.get(name)!r} in process 0 and {theirs.get(name)!r} in process {process}",
        )
  return list(differing.values())


def _flat(
  settings: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
  for name, value in settings.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f"{prefix}{name}.")
    else:
      yield prefix + name, value
