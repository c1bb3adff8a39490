"""The reader reports workers that die and reads that hang, in time.

Afterwards the process can end.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grain
import pytest
from array_record.python import array_record_module

from diffjax.config import UserError
from diffjax.data import reader
from diffjax.host import address_space

# The seconds after which a read counts as a hang.
TIMEOUT = 0.5


def kill_this_process():
  os.kill(os.getpid(), signal.SIGKILL)


def exit_this_process():
  os._exit(0)


def stop_this_process():
  os.kill(os.getpid(), signal.SIGSTOP)


def hang():
  time.sleep(1000)


def work_for_two_timeouts():
  """Uses the CPU for a fixed time, also if the machine is busy."""
  end = time.monotonic() + 2 * TIMEOUT
  while time.monotonic() < end:
    pass


@dataclasses.dataclass(frozen=True)
class ActAt:
  """Returns elements unchanged, but calls a function before one of them.

  It is a class with a function of the module, because both are sent to workers.
  """

  index: int
  action: Callable[[], None]

  def __call__(self, element: int) -> int:
    if element == self.index:
      self.action()
    return element


@pytest.fixture
def make_reader(monkeypatch) -> Iterator[Callable[..., reader.Reader]]:
  """Returns a function that makes readers of the elements 0, 1, 2, …

  A function, such as `hang`, is called before the element `at` is returned.
  """
  reader.let_grain_read_flags()
  monkeypatch.setattr(reader, "GRACE_SECONDS", 0.5)
  readers = []

  def make(
    action: Callable[[], None],
    at: int,
    num_workers: int = 0,
    timeout: float = TIMEOUT,
  ) -> reader.Reader:
    elements = grain.MapDataset.range(1_000_000).map(ActAt(at, action))
    dataset = reader.read_sequentially(elements)
    if num_workers > 0:
      options = grain.MultiprocessingOptions(
        num_workers=num_workers, per_worker_buffer_size=1
      )
      dataset = dataset.mp_prefetch(options)
    batches = reader.Reader(iter(dataset), "SOURCE", num_workers, timeout)
    readers.append(batches)
    return batches

  yield make
  for batches in readers:
    batches.close()


@pytest.fixture
def one_minute() -> Iterator[None]:
  """Ends the test with an error after a minute."""

  def raise_timeout_error(*_):
    raise TimeoutError

  previous = signal.signal(signal.SIGALRM, raise_timeout_error)
  signal.alarm(60)
  yield
  signal.alarm(0)
  signal.signal(signal.SIGALRM, previous)


def read_five(batches):
  """Reads the elements 0 to 4."""
  for expected in range(5):
    assert next(batches) == expected


# Workers that die.


def check_death_is_reported(batches, exit_description):
  """Checks that reading raises an error of one line within 20 seconds."""
  message = (
    rf"data worker \d+ \({re.escape(exit_description)}\) died while reading"
    " SOURCE; run the same command again"
  )
  start = time.monotonic()
  with pytest.raises(UserError, match=message) as caught:
    read_five(batches)
  assert time.monotonic() - start < 20
  assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("one_minute")
def test_a_killed_worker_is_reported(make_reader):
  """The operating system kills processes if the memory is full.

  The error comes long before the timeout of a minute.
  """
  batches = make_reader(kill_this_process, at=4, num_workers=1, timeout=60.0)

  check_death_is_reported(batches, "SIGKILL: out of memory?")


@pytest.mark.full
@pytest.mark.usefixtures("one_minute")
def test_a_worker_that_exits_is_reported(make_reader):
  """Grain reports workers that fail, but not exit code 0.

  The error comes long before the timeout of a minute.
  """
  batches = make_reader(exit_this_process, at=4, num_workers=2, timeout=60.0)

  check_death_is_reported(batches, "exit code 0")


# Reads that hang.


def hang_message(readers):
  """Returns a pattern for the error of a hang."""
  return (
    f"no batch for .* s from SOURCE, read {readers}.*"
    f"config.data.timeout = {TIMEOUT:g} "
  )


def test_a_hang_in_the_training_process_is_reported(make_reader):
  """Without workers, the training process itself reads."""
  batches = make_reader(hang, at=4, num_workers=0)

  with pytest.raises(UserError, match=hang_message("in the training process")):
    read_five(batches)


@pytest.mark.full
def test_a_stopped_worker_is_reported(make_reader):
  """A stopped process exists, but does nothing."""
  batches = make_reader(stop_this_process, at=4, num_workers=1)

  with pytest.raises(UserError, match=hang_message("by the data workers")):
    read_five(batches)


@pytest.mark.full
def test_a_hang_in_a_worker_is_reported(make_reader):
  batches = make_reader(hang, at=4, num_workers=2)

  with pytest.raises(UserError, match=hang_message("by the data workers")):
    read_five(batches)


def test_a_hang_of_the_first_read_is_reported(make_reader):
  """The first read also starts the threads of the reader."""
  batches = make_reader(hang, at=0)

  with pytest.raises(UserError, match="no batch for"):
    next(batches)


def test_a_slow_start_is_not_a_hang(make_reader):
  """Importing modules takes long, but the process uses the CPU meanwhile."""
  batches = make_reader(work_for_two_timeouts, at=0)

  assert next(batches) == 0


@contextlib.contextmanager
def keyboard_interrupt_after(seconds) -> Iterator[None]:
  """Raises KeyboardInterrupt in the block after a time, as Ctrl-C does."""

  def raise_keyboard_interrupt(*_):
    raise KeyboardInterrupt

  previous = signal.signal(signal.SIGALRM, raise_keyboard_interrupt)
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_an_interrupted_wait_loses_no_element(make_reader):
  """After Ctrl-C in a notebook, reading continues with the same element."""
  # The reader calls the function before it returns element 1.
  may_continue = threading.Event()
  batches = make_reader(may_continue.wait, at=1, timeout=60.0)
  assert next(batches) == 0

  with keyboard_interrupt_after(0.1), pytest.raises(KeyboardInterrupt):
    next(batches)
  state_after_interrupt = batches.get_state()
  may_continue.set()

  assert state_after_interrupt["next_index"] == 1
  assert next(batches) == 1
  assert next(batches) == 2


# A limited address space.


@pytest.fixture
def limited_address_space(monkeypatch):
  """Makes the limit of the address space 3 GiB, for messages."""
  limits = (3 << 30, 3 << 30)
  monkeypatch.setattr(resource, "getrlimit", lambda _: limits)


@pytest.mark.usefixtures("limited_address_space")
def test_a_hang_in_a_limited_address_space_names_the_limit(make_reader):
  """Reading hangs if its threads cannot start in the limited address space."""
  batches = make_reader(hang, at=0)

  message = (
    "reading hangs; the address space is limited to 3.0 GiB"
    r" \(ulimit -v\): raise the limit.*; or see"
  )
  with pytest.raises(UserError, match=message):
    next(batches)


@pytest.mark.usefixtures("limited_address_space")
@pytest.mark.parametrize(
  "error",
  [
    pytest.param(MemoryError(), id="memory"),
    pytest.param(RuntimeError("can't start new thread"), id="thread"),
  ],
)
def test_a_lack_of_memory_names_the_limit(make_reader, error):
  """A small limit of the address space is the usual reason."""

  def raise_error():
    raise error

  batches = make_reader(raise_error, at=0, timeout=60.0)

  message = (
    "out of memory while reading SOURCE:"
    " the address space is limited to 3.0 GiB"
  )
  with pytest.raises(UserError, match=message):
    next(batches)


@pytest.fixture
def blocked_array_record(monkeypatch):
  """Makes ArrayRecord wait for its threads longer than is allowed."""

  def wait(path, options):
    time.sleep(1000)

  monkeypatch.setattr(array_record_module, "ArrayRecordReader", wait)
  monkeypatch.setattr(address_space, "START_TIMEOUT_SECONDS", 0.1)


@pytest.mark.usefixtures("limited_address_space", "blocked_array_record")
def test_array_record_threads_that_do_not_start_are_reported():
  """In a small address space, ArrayRecord waits for its threads forever.

  The fixture `blocked_array_record` makes opening any file do the same.
  """
  message = (
    "rows: the threads that read this file do not start;"
    " the address space is limited to 3.0 GiB"
  )
  with pytest.raises(UserError, match=message):
    address_space.check_array_record("rows")


@pytest.mark.usefixtures("blocked_array_record")
def test_array_record_is_not_checked_without_a_limit(monkeypatch):
  """The check would raise an error, because opening a file is blocked."""
  no_limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
  monkeypatch.setattr(resource, "getrlimit", lambda _: no_limits)

  address_space.check_array_record("rows")


@pytest.mark.usefixtures("limited_address_space")
def test_a_missing_file_is_not_an_error_of_the_threads():
  """The check raises no error. Reading the file will."""
  address_space.check_array_record("/nowhere")


# The end of the process.


# The arguments of this program: the source.
PROGRAM_WHOSE_FIFTH_READ_HANGS = """
import sys
import threading

from diffjax.config import Config, DataConfig, TrainConfig, UserError
from diffjax.data import pipeline, prepared


def hang(self, index):
  threading.Event().wait()


if __name__ == "__main__":
  data = DataConfig(source=sys.argv[1], length=64, timeout=3.0)
  config = Config(data=data, train=TrainConfig(batch_size=2))
  batches = pipeline.training_batches(config)
  for _ in range(4):
    next(batches)
  prepared.PreparedRows.__getitem__ = hang
  try:
    while True:
      next(batches)
  except UserError as error:
    print(error)
    sys.exit(1)
"""

# The arguments of this program: the source.
PROGRAM_THAT_STOPS_ITS_WORKERS = """
import multiprocessing
import os
import signal
import sys

from diffjax.config import Config, DataConfig, TrainConfig, UserError
from diffjax.data import pipeline

if __name__ == "__main__":
  data = DataConfig(
    source=sys.argv[1],
    length=64,
    mode="streamed",
    num_workers=2,
    timeout=3.0,
  )
  config = Config(data=data, train=TrainConfig(batch_size=2))
  batches = pipeline.training_batches(config)
  for _ in range(4):
    next(batches)
  for child in multiprocessing.active_children():
    os.kill(child.pid, signal.SIGSTOP)
  try:
    while True:
      next(batches)
  except UserError as error:
    print(error)
    sys.exit(1)
"""


def check_ends_with_a_timeout_error(program, source, tmp_path):
  """Runs a program on a source, and checks that it ends with a UserError."""
  # Worker processes import the script again, so it must be a file.
  script = tmp_path / "script.py"
  script.write_text(program)
  result = subprocess.run(
    [sys.executable, script, source],
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert result.returncode == 1, result.stderr
  assert "no batch for" in result.stdout
  assert len(result.stdout.splitlines()) == 1
  assert "Traceback" not in result.stderr


@pytest.mark.full
def test_the_process_ends_after_a_hang_of_its_own(two_files, tmp_path):
  """The thread that hangs must not keep the process alive."""
  check_ends_with_a_timeout_error(
    PROGRAM_WHOSE_FIFTH_READ_HANGS, two_files, tmp_path
  )


@pytest.mark.full
def test_the_process_ends_after_its_workers_were_stopped(two_files, tmp_path):
  """The process must not wait for its stopped workers at its end."""
  check_ends_with_a_timeout_error(
    PROGRAM_THAT_STOPS_ITS_WORKERS, two_files, tmp_path
  )


def is_alive(pid) -> bool:
  """Returns whether a process exists and has not ended."""
  try:
    status = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  # The state follows the name, which is in parentheses. Z is a zombie.
  state = status.rpartition(")")[2].split()[0]
  return state != "Z"


PROGRAM_THAT_PRINTS_THE_ID_OF_ITS_WORKER = """
import multiprocessing
import time

import grain

from diffjax.data import reader

if __name__ == "__main__":
  dataset = reader.read_sequentially(grain.MapDataset.range(1_000_000))
  elements = iter(reader.prefetch(dataset, num_workers=1))
  next(elements)
  for worker in multiprocessing.active_children():
    print(worker.pid, flush=True)
  time.sleep(100)
"""


@pytest.mark.full
def test_workers_end_with_a_run_that_is_killed(tmp_path):
  """SIGKILL leaves a run no time to end its workers."""
  script = tmp_path / "run.py"
  script.write_text(PROGRAM_THAT_PRINTS_THE_ID_OF_ITS_WORKER)
  run = subprocess.Popen(
    [sys.executable, script],
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    stdout=subprocess.PIPE,
    text=True,
  )
  # The program prints the process id of its worker.
  worker_pid = run.stdout.readline().strip()
  assert is_alive(worker_pid)

  run.kill()
  run.wait()
  run.stdout.close()

  deadline = time.monotonic() + 10
  while is_alive(worker_pid) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not is_alive(worker_pid)
