"""Workers that die and reads that hang are reported in time and do not keep the process from ending."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import grain
import pytest

from diffjax.config import UserError
from diffjax.data import reader
from diffjax.host import address_space
from tests.harness.tiers import full


class Trouble:
  """Passes elements on until the one with trouble. It is a class, so that it can be sent to workers."""

  def __init__(self, how, at=4):
    self._how, self._at = how, at

  def __call__(self, index):
    if index == self._at:
      match self._how:
        case "kill":
          os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
          os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
          time.sleep(1000)
        case "work":
          end = time.process_time() + 1
          while time.process_time() < end:
            pass
        case code:
          os._exit(code)
    return index


@pytest.fixture
def make_reader(monkeypatch):
  """Reader over 0, 1, 2, … with trouble at an element."""
  reader.let_grain_read_flags()
  monkeypatch.setattr(reader, "GRACE_SECONDS", 0.5)
  readers = []

  def make(how, num_workers, at=4, timeout=1.0):
    dataset = (
      grain.MapDataset.range(1_000_000)
      .map(Trouble(how, at))
      .to_iter_dataset(grain.ReadOptions(num_threads=0))
    )
    if num_workers:
      dataset = dataset.mp_prefetch(
        grain.MultiprocessingOptions(
          num_workers=num_workers, per_worker_buffer_size=1
        )
      )
    readers.append(reader.Reader(iter(dataset), "SOURCE", num_workers, timeout))
    return readers[-1]

  yield make
  for each in readers:
    each.close()


@pytest.fixture
def a_minute():
  """Ends a test that waits for longer."""

  def stop(*_):
    raise TimeoutError

  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(60)
  yield
  signal.alarm(0)
  signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("a_minute")
@pytest.mark.parametrize(
  ("how", "end"),
  [("kill", "SIGKILL: out of memory?"), *full([(0, "exit code 0")])],
)
def test_a_worker_that_dies_is_reported(make_reader, how, end):
  batches = make_reader(how, num_workers=2, timeout=60.0)
  start = time.monotonic()
  with pytest.raises(
    UserError,
    match=rf"data worker \d+ \({re.escape(end)}\) died while reading SOURCE; run the same command again",
  ) as caught:
    for expected in range(5):
      assert next(batches) == expected
  assert time.monotonic() - start < 20 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("how", "num_workers"), [("stop", 2), ("hang", 0), *full([("hang", 2)])]
)
def test_a_hang_is_reported(make_reader, how, num_workers):
  batches = make_reader(how, num_workers)
  with pytest.raises(
    UserError, match="no batch for .* s from SOURCE, .*config.data.timeout = 1 "
  ) as caught:
    for expected in range(5):
      assert next(batches) == expected
  assert (
    "by the data workers" if num_workers else "in the training process"
  ) in str(caught.value)


@pytest.fixture
def limited(monkeypatch):
  """An address space of 3 GiB."""
  monkeypatch.setattr(
    address_space.resource, "getrlimit", lambda _: (3 << 30, 3 << 30)
  )


@pytest.mark.usefixtures("limited")
def test_a_hang_in_a_limited_address_space_names_the_limit(make_reader):
  with pytest.raises(
    UserError,
    match=r"reading hangs; the address space is limited to 3.0 GiB \(ulimit -v\): raise the limit.*; or see",
  ):
    next(make_reader("hang", 0, at=0, timeout=0.5))


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
  "error", [MemoryError(), RuntimeError("can't start new thread")]
)
def test_lack_of_memory_is_one_line(error):
  def fail(_):
    raise error

  dataset = (
    grain.MapDataset.range(9)
    .map(fail)
    .to_iter_dataset(grain.ReadOptions(num_threads=0))
  )
  with pytest.raises(
    UserError,
    match="out of memory while reading SOURCE: the address space is limited to 3.0 GiB",
  ):
    next(reader.Reader(iter(dataset), "SOURCE", 0, 60.0))


def test_threads_that_do_not_start_are_found_out(monkeypatch, limited):
  """ArrayRecord's reader waits for ever for threads that the address space has no room for. Anything else it reports itself."""
  address_space.check_array_record("/nowhere")
  monkeypatch.setattr(address_space, "START_TIMEOUT_SECONDS", 0.1)
  monkeypatch.setattr(address_space, "_open", lambda path, opened: None)
  with pytest.raises(
    UserError,
    match=r"rows: the threads that read this file do not start; the address space is limited to 3.0 GiB",
  ):
    address_space.check_array_record("rows")
  monkeypatch.setattr(
    address_space.resource,
    "getrlimit",
    lambda _: (address_space.resource.RLIM_INFINITY,) * 2,
  )
  address_space.check_array_record("rows")


def test_a_slow_start_is_not_a_hang(make_reader):
  assert next(make_reader("work", 0, at=0, timeout=0.5)) == 0
  batches = make_reader("hang", 0, at=0, timeout=0.5)
  with pytest.raises(UserError, match="no batch for"):
    next(batches)


def test_an_interrupted_wait_loses_nothing(make_reader):
  batches = make_reader("work", 0, at=1, timeout=60.0)
  assert next(batches) == 0

  def interrupt(*_):
    raise KeyboardInterrupt

  previous = signal.signal(signal.SIGALRM, interrupt)
  try:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
      next(batches)
    assert time.monotonic() - start < 1.5
  finally:
    signal.signal(signal.SIGALRM, previous)
  assert batches.get_state()["next_index"] == 1
  assert [next(batches), next(batches)] == [1, 2]


@pytest.mark.full
@pytest.mark.parametrize(
  ("mode", "num_workers"), [("prepared", 0), ("streamed", 2)]
)
def test_the_process_ends(halves, tmp_path, mode, num_workers):
  """Reading hangs in this process, or its worker is stopped: the error comes, and the interpreter exits."""
  script = tmp_path / "script.py"
  script.write_text(f"""
import multiprocessing, os, signal, sys, threading
from diffjax.config import Config, DataConfig, TrainConfig, UserError
from diffjax.data import pipeline, prepared

if __name__ == "__main__":
  data = DataConfig(source="{halves}", length=64, mode="{mode}", num_workers={num_workers}, timeout=3.0)
  batches = pipeline.training_batches(Config(data=data, train=TrainConfig(batch_size=2)))
  for _ in range(4):
    next(batches)
  for child in multiprocessing.active_children():
    os.kill(child.pid, signal.SIGSTOP)
  if not {num_workers}:
    prepared.PreparedRows.__getitem__ = lambda self, index: threading.Event().wait()
  try:
    while True:
      next(batches)
  except UserError as error:
    print(error)
    sys.exit(1)
""")
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  result = subprocess.run(
    [sys.executable, script],
    env=environment,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert result.returncode == 1 and "no batch for" in result.stdout, result
  assert (
    "\n" not in result.stdout.strip() and "Traceback" not in result.stderr
  ), result.stderr


@pytest.mark.full
def test_workers_end_with_a_run_that_is_killed(tmp_path):
  script = tmp_path / "run.py"
  script.write_text("""
import multiprocessing, time
import grain
from diffjax.data.reader import let_grain_read_flags, start_worker

if __name__ == "__main__":
  let_grain_read_flags()
  dataset = grain.MapDataset.range(1_000_000).to_iter_dataset(grain.ReadOptions(num_threads=0))
  numbers = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=1), start_worker))
  next(numbers)
  print(*[child.pid for child in multiprocessing.active_children()], flush=True)
  time.sleep(100)
""")
  run = subprocess.Popen(
    [sys.executable, script], stdout=subprocess.PIPE, text=True
  )
  (worker,) = run.stdout.readline().split()
  assert is_alive(worker)
  run.kill()
  run.wait()
  run.stdout.close()
  deadline = time.monotonic() + 10
  while is_alive(worker) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not is_alive(worker)


def is_alive(pid):
  try:
    return (
      pathlib.Path(f"/proc/{pid}/stat")
      .read_text()
      .rpartition(")")[2]
      .split()[0]
      != "Z"
    )
  except OSError:
    return False
