"""Signals end a process at once, and output that cannot be written does not."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from diffjax.host.workers import starting_workers
from tests.harness import ROOT
from tests.harness.tiers import full

COMMANDS = [
  "train",
  *full(["aot", "checkpoints", "convert", "evaluate", "generate", "prepare"]),
]


@pytest.fixture
def start():
  """start("-c", "print(1)"): a Python process, which ends with the test."""
  processes = []

  def start_python(*arguments):
    process = subprocess.Popen(
      [sys.executable, *arguments],
      cwd=ROOT,
      # Users have buffered output.
      env=os.environ | {"PYTHONUNBUFFERED": ""},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    processes.append(process)
    return process

  yield start_python
  for process in processes:
    process.kill()
    process.wait()


def assert_result(
  process: subprocess.Popen, *, out: str = "", errors: str = "", code: int = 0
) -> None:
  """Waits for a process, and compares its output and exit code."""
  actual_out, actual_errors = process.communicate(timeout=60)
  assert actual_errors == errors
  assert actual_out == out
  assert process.returncode == code


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_a_command_while_it_imports_modules(start, name):
  """The command ends with a message instead of a traceback.

  It first starts a thread that handles signals, and then imports modules.
  """
  process = start("-m", f"diffjax.{name}", "--help")
  # Linux has a directory with an entry for each thread of a process.
  threads_dir = f"/proc/{process.pid}/task"
  while len(os.listdir(threads_dir)) < 2 and process.poll() is None:
    time.sleep(0.001)

  process.send_signal(signal.SIGINT)

  _, errors = process.communicate(timeout=60)
  assert errors == "error: interrupted\n"
  assert process.returncode == 128 + signal.SIGINT


# Prints whether the handler of SIGINT is as before, and the number of threads.
COMPARE_HANDLERS = """
import signal
import threading

before = signal.getsignal(signal.SIGINT)
import diffjax
after = signal.getsignal(signal.SIGINT)
print(after == before, threading.active_count())
"""


def test_importing_the_package_changes_no_signal_handler(start):
  """The process also has no other thread than the main one."""
  process = start("-c", COMPARE_HANDLERS)

  assert_result(process, out="True 1\n")


# The beginning of a command.
READY = """
from diffjax.host import signals
signals.end_at_ctrl_c()
print("ready", flush=True)
"""

# A call of C code that takes minutes.
COMPUTE_IN_C = """
import hashlib
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""

# Python swallows a KeyboardInterrupt in such a callback.
CALL_PYTHON_FROM_C = """
import gc

def callback(phase, info):
  pass

gc.callbacks.append(callback)
while True:
  gc.collect()
"""

# Blocks until the test reads it.
WRITE_TO_A_FULL_PIPE = """
print("x" * 10**6, flush=True)
"""

SLEEP = """
import time
time.sleep(100)
"""


@pytest.mark.parametrize(
  "work", [COMPUTE_IN_C, CALL_PYTHON_FROM_C, WRITE_TO_A_FULL_PIPE]
)
def test_ctrl_c_ends_a_command_whatever_its_main_thread_does(start, work):
  """The main thread may be in C code, in which Python handles no signals."""
  process = start("-c", READY + work)
  assert process.stdout.readline() == "ready\n"
  # The work begins within 0.2 s.
  time.sleep(0.2)

  process.send_signal(signal.SIGINT)

  assert process.wait(timeout=30) == 128 + signal.SIGINT
  assert process.stderr.read() == "error: interrupted\n"


def test_ctrl_c_ends_a_command_whose_terminal_is_closed(start):
  process = start("-c", READY + SLEEP)
  assert process.stdout.readline() == "ready\n"
  process.stdout.close()
  process.stderr.close()

  process.send_signal(signal.SIGINT)

  assert process.wait(timeout=30) == 128 + signal.SIGINT


# Sends itself the signal of its first argument. Prints whether the run stops.
# The other arguments are "command", "started" (training) and "nohup".
RUN_WITH_A_SIGNAL = """
import os
import signal
import sys
import time

from diffjax.host import signals
from diffjax.host.interruption import Interruption

signal.signal(signal.SIGHUP, signal.SIG_DFL)
if "nohup" in sys.argv:
  signal.signal(signal.SIGHUP, signal.SIG_IGN)
if "command" in sys.argv:
  signals.end_at_ctrl_c()

with Interruption() as interruption:
  interruption.started = "started" in sys.argv
  os.kill(os.getpid(), signal.Signals[sys.argv[1]])
  deadline = time.monotonic() + 30
  while not interruption.is_stop_requested() and "nohup" not in sys.argv:
    assert time.monotonic() < deadline
    time.sleep(0.01)
  time.sleep(0.5)

print("stops" if interruption.is_stop_requested() else "goes on")
"""


SAVING_AFTER = (
  "diffjax: {}: saving after this step (send it again to stop at once)\n"
)


def test_ctrl_c_ends_a_run_that_has_not_started(start):
  process = start("-c", RUN_WITH_A_SIGNAL, "SIGINT", "command")

  assert_result(
    process, errors="error: interrupted\n", code=128 + signal.SIGINT
  )


def test_sighup_ends_a_run_that_has_not_started(start):
  process = start("-c", RUN_WITH_A_SIGNAL, "SIGHUP", "command")

  assert_result(
    process, errors="error: ended by SIGHUP\n", code=128 + signal.SIGHUP
  )


def test_a_run_that_has_started_saves_and_stops_at_sighup(start):
  process = start("-c", RUN_WITH_A_SIGNAL, "SIGHUP", "command", "started")

  assert_result(process, out="stops\n", errors=SAVING_AFTER.format("SIGHUP"))


def test_a_run_in_a_notebook_saves_and_stops_at_ctrl_c(start):
  process = start("-c", RUN_WITH_A_SIGNAL, "SIGINT")

  assert_result(process, out="stops\n", errors=SAVING_AFTER.format("SIGINT"))


def test_a_run_under_nohup_ignores_sighup(start):
  process = start("-c", RUN_WITH_A_SIGNAL, "SIGHUP", "started", "nohup")

  assert_result(process, out="goes on\n")


NEST_TWO_WATCHES = """
import os
import signal
import time

from diffjax.host.signals import Watch

received = []

def wait_for(expected):
  deadline = time.monotonic() + 30
  while received != expected:
    assert time.monotonic() < deadline, received
    time.sleep(0.01)

def react_outside(number):
  received.append("outer")

def react_inside(number):
  received.append("inner")

def state():
  handler = signal.getsignal(signal.SIGTERM)
  num_open_files = len(os.listdir("/proc/self/fd"))
  return handler, num_open_files

before = state()
with Watch([signal.SIGTERM], react_outside):
  with Watch([signal.SIGTERM], react_inside) as inner:
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(["inner"])
    # The inner one may pass a signal on.
    inner.outer(signal.SIGTERM)
    wait_for(["inner", "outer"])
  os.kill(os.getpid(), signal.SIGTERM)
  wait_for(["inner", "outer", "outer"])
print(state() == before)
"""


def test_of_two_watches_the_inner_one_reacts_to_a_signal(start):
  """Handlers and open files are as before after both have ended."""
  process = start("-c", NEST_TWO_WATCHES)

  assert_result(process, out="True\n")


def blocked_signals() -> set[signal.Signals]:
  """Returns the signals that this thread blocks, so that they do not arrive."""
  # This call blocks no further signals, and returns the blocked ones.
  return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def put_blocked_signals(queue):
  """Puts the signals that this process blocks into a queue."""
  queue.put(blocked_signals())


def test_workers_block_ctrl_c_from_their_start():
  """Ctrl-C reaches all processes of a terminal, but only the main one stops."""
  context = multiprocessing.get_context("spawn")
  queue = context.SimpleQueue()
  worker = context.Process(target=put_blocked_signals, args=(queue,))
  blocked_before = blocked_signals()

  with starting_workers():
    worker.start()

  blocked_in_worker = queue.get()
  worker.join()
  assert signal.SIGINT in blocked_in_worker
  # The main process still receives Ctrl-C.
  assert blocked_signals() == blocked_before


# Waits for the file of the first argument. Then prints three lines to each
# output, and makes the file of the second argument.
PRINT_LATER = """
import pathlib
import sys
import time

from diffjax.host import output

output.drop_unwritable_output()
print("begun", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
  time.sleep(0.01)
for step in range(3):
  print("step", step, flush=True)
  print("warning", step, file=sys.stderr)
pathlib.Path(sys.argv[2]).touch()
"""


def run_with_closed_outputs(start, directory, outputs):
  """Runs PRINT_LATER, which prints after some of its outputs are closed.

  Checks that it goes on to its end, and returns the process.
  """
  closed_file = directory / "outputs_are_closed"
  ended_file = directory / "command_has_ended"
  process = start("-c", PRINT_LATER, closed_file, ended_file)
  assert process.stdout.readline() == "begun\n"
  for output in outputs:
    getattr(process, output).close()
  closed_file.touch()
  assert process.wait(timeout=60) == 0
  assert ended_file.exists()
  return process


def test_a_command_goes_on_if_its_standard_output_is_closed(start, tmp_path):
  """It says that its output is lost, and prints three more warnings."""
  process = run_with_closed_outputs(start, tmp_path, outputs=["stdout"])

  first_line, *lines = process.stderr.read().splitlines()
  assert (
    "cannot write to standard output (Broken pipe); training goes on"
    in first_line
  )
  assert lines == ["warning 0", "warning 1", "warning 2"]


def test_a_command_goes_on_if_its_standard_error_is_closed(start, tmp_path):
  """It says on its standard output that its warnings are lost."""
  process = run_with_closed_outputs(start, tmp_path, outputs=["stderr"])

  assert (
    "cannot write to standard error (Broken pipe); training goes on"
    in process.stdout.read()
  )


def test_a_command_goes_on_if_both_of_its_outputs_are_closed(start, tmp_path):
  """It prints three lines to each output, and fails at neither."""
  process = run_with_closed_outputs(start, tmp_path, ["stdout", "stderr"])

  assert process.returncode == 0


def test_a_command_goes_on_if_the_disk_of_its_output_is_full(tmp_path):
  """Writes to the device /dev/full fail as on a full disk."""
  closed_file = tmp_path / "output_is_closed"
  ended_file = tmp_path / "command_has_ended"
  # The command waits for this file, so it prints at once here.
  closed_file.touch()

  with open("/dev/full", "w") as full_disk:
    process = subprocess.run(
      [sys.executable, "-c", PRINT_LATER, closed_file, ended_file],
      cwd=ROOT,
      stdout=full_disk,
      stderr=subprocess.PIPE,
      text=True,
    )

  assert process.returncode == 0
  assert ended_file.exists()
  assert "No space left on device" in process.stderr
