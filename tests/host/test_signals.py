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
READY = (
  "from diffjax.host import signals; signals.end_at_ctrl_c();"
  " print('ready', flush=True); "
)


@pytest.fixture
def start():
  """Returns a function that starts Python. The processes end after the test.

  Example:
    process = start("-c", "print(1)")
  """
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


def assert_result(process, *, out="", errors="", code=0):
  """Waits for a process, and compares its output and exit code."""
  actual_out, actual_errors = process.communicate(timeout=60)
  assert (actual_out, actual_errors) == (out, errors)
  assert process.returncode == code


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_a_command_imports(start, name):
  """Ctrl-C works from the moment when the thread for signals exists."""
  process = start("-m", f"diffjax.{name}", "--help")
  tasks = f"/proc/{process.pid}/task"
  while len(os.listdir(tasks)) < 2 and process.poll() is None:
    time.sleep(0.001)
  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=60)
  assert errors == "error: interrupted\n"
  assert process.returncode == 130


def test_importing_the_package_leaves_ctrl_c_alone(start):
  code = """
import signal
import threading
before = signal.getsignal(signal.SIGINT)
import diffjax
after = signal.getsignal(signal.SIGINT)
print(after == before, threading.active_count())
"""
  assert_result(start("-c", code), out="True 1\n")


NO_PYTHON = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
# A KeyboardInterrupt in such a callback is swallowed.
CALLBACK_OF_C = (
  "import gc; gc.callbacks.append(lambda *_: None);"
  " exec('while True: gc.collect()')"
)
# The test does not read it.
FULL_PIPE = "print('x' * 10**6, flush=True)"


@pytest.mark.parametrize(
  "work",
  [
    pytest.param(NO_PYTHON, id="long call without Python"),
    pytest.param(CALLBACK_OF_C, id="callback of C"),
    pytest.param(FULL_PIPE, id="full pipe"),
  ],
)
def test_ctrl_c_does_not_wait_for_the_main_thread(start, work):
  process = start("-c", READY + work)
  assert process.stdout.readline() == "ready\n"
  time.sleep(0.2)
  process.send_signal(signal.SIGINT)
  assert process.wait(timeout=30) == 130
  assert process.stderr.read() == "error: interrupted\n"


def test_the_end_needs_no_terminal(start):
  process = start("-c", READY + "import time; time.sleep(100)")
  process.stdout.readline()
  process.stdout.close()
  process.stderr.close()
  process.send_signal(signal.SIGINT)
  assert process.wait(timeout=30) == 130


RUN = """
import os, signal, sys, time
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


def saving(name):
  """Returns the line about a signal after which a run saves."""
  return (
    f"diffjax: {name}: saving after this step (send it again to stop at once)\n"
  )


@pytest.mark.parametrize(
  "arguments, code, out, errors",
  [
    # There is nothing to save.
    ("SIGINT command", 130, "", "error: interrupted\n"),
    ("SIGHUP command", 129, "", "error: ended by SIGHUP\n"),
    ("SIGHUP command started", 0, "stops\n", saving("SIGHUP")),
    ("SIGINT notebook", 0, "stops\n", saving("SIGINT")),
  ],
)
def test_a_run_saves_if_it_has_started(start, arguments, code, out, errors):
  process = start("-c", RUN, *arguments.split())
  assert_result(process, out=out, errors=errors, code=code)


def test_nohup_is_respected(start):
  process = start("-c", RUN, "SIGHUP", "started", "nohup")
  assert_result(process, out="goes on\n")


WATCHES = """
import os, signal, time
from diffjax.host.signals import Watch
received = []
def wait_for(expected):
  deadline = time.monotonic() + 30
  while received != expected:
    assert time.monotonic() < deadline, received
    time.sleep(0.01)
before = signal.getsignal(signal.SIGTERM), len(os.listdir("/proc/self/fd"))
def react_outside(number):
  received.append("outer")
def react_inside(number):
  received.append("inner")
with Watch([signal.SIGTERM], react_outside):
  with Watch([signal.SIGTERM], react_inside) as inner:
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(["inner"])
    inner.outer(signal.SIGTERM)
    wait_for(["inner", "outer"])
  os.kill(os.getpid(), signal.SIGTERM)
  wait_for(["inner", "outer", "outer"])
after = signal.getsignal(signal.SIGTERM), len(os.listdir("/proc/self/fd"))
print(after == before)
"""


def test_the_inner_one_of_two_watches_reacts_to_a_signal(start):
  """Handlers and file descriptors are as before after the end of both."""
  assert_result(start("-c", WATCHES), out="True\n")


def put_signal_mask(queue):
  """Sends the signals that the main thread of this process blocks."""
  queue.put(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_workers_ignore_ctrl_c_from_their_start():
  context = multiprocessing.get_context("spawn")
  mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
  with starting_workers():
    queue = context.SimpleQueue()
    worker = context.Process(target=put_signal_mask, args=(queue,))
    worker.start()
  assert signal.SIGINT in queue.get()
  assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask_before
  worker.join()


OUTPUT = """
import pathlib, sys, time
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


@pytest.fixture
def printing_process(start, tmp_path):
  """A process that prints more as soon as the file "closed" exists."""
  process = start("-c", OUTPUT, tmp_path / "closed", tmp_path / "ended")
  process.stdout.readline()
  return process


def test_a_closed_standard_output_is_reported_once(printing_process, tmp_path):
  printing_process.stdout.close()
  (tmp_path / "closed").touch()

  assert printing_process.wait(timeout=60) == 0
  assert (tmp_path / "ended").exists()
  first_line, *lines = printing_process.stderr.read().splitlines()
  message = "cannot write to standard output (Broken pipe); training goes on"
  assert message in first_line
  assert lines == ["warning 0", "warning 1", "warning 2"]


def test_a_closed_standard_error_is_reported(printing_process, tmp_path):
  printing_process.stderr.close()
  (tmp_path / "closed").touch()

  assert printing_process.wait(timeout=60) == 0
  assert (tmp_path / "ended").exists()
  message = "cannot write to standard error (Broken pipe); training goes on"
  assert message in printing_process.stdout.read()


def test_a_process_without_any_output_continues(printing_process, tmp_path):
  printing_process.stdout.close()
  printing_process.stderr.close()
  (tmp_path / "closed").touch()

  assert printing_process.wait(timeout=60) == 0
  assert (tmp_path / "ended").exists()


def test_a_process_whose_output_is_on_a_full_disk_continues(tmp_path):
  (tmp_path / "closed").touch()
  with open("/dev/full", "w") as full_disk:
    process = subprocess.run(
      [sys.executable, "-c", OUTPUT, tmp_path / "closed", tmp_path / "ended"],
      cwd=ROOT,
      stdout=full_disk,
      stderr=subprocess.PIPE,
      text=True,
    )
  assert process.returncode == 0
  assert (tmp_path / "ended").exists()
  assert "No space left on device" in process.stderr
