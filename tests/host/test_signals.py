"""Ctrl-C ends every command at once, and a dead reader or terminal keeps none from ending."""

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from diffjax.host.workers import starting_workers
from tests.conftest import ROOT
from tests.tiers import full

COMMANDS = [
  "train",
  *full(["aot", "checkpoints", "convert", "evaluate", "generate", "prepare"]),
]
READY = "from diffjax.host import signals; signals.end_at_ctrl_c(); print('ready', flush=True); "


@pytest.fixture
def started():
  """started("-c", "…"): a Python process, which is gone after the test."""
  processes = []

  def start(*arguments):
    environment = os.environ | {"PYTHONUNBUFFERED": ""}  # as users have it
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes.append(
      subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, **pipes
      )
    )
    return processes[-1]

  yield start
  for process in processes:
    process.kill()
    process.wait()


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_a_command_imports(started, name):
  """From its first line on; the second thread is the one that hears it."""
  process = started("-m", f"diffjax.{name}", "--help")
  while (
    len(os.listdir(f"/proc/{process.pid}/task")) < 2 and process.poll() is None
  ):
    time.sleep(0.001)
  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=60)
  assert (process.returncode, errors) == (130, "error: interrupted\n")


def test_importing_the_package_leaves_ctrl_c_alone(started):
  code = """if True:
    import signal, threading
    before = signal.getsignal(signal.SIGINT)
    import diffjax
    print(signal.getsignal(signal.SIGINT) == before, threading.active_count())"""
  process = started("-c", code)
  assert (*process.communicate(timeout=60), process.returncode) == (
    "True 1\n",
    "",
    0,
  )


@pytest.mark.parametrize(
  "work",
  [
    "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",  # no Python runs
    "import gc; gc.callbacks.append(lambda *_: None); exec('while True: gc.collect()')",  # where KeyboardInterrupt is swallowed
    "print('x' * 10**6, flush=True)",  # nobody reads
  ],
)
def test_ctrl_c_whatever_the_main_thread_does(started, work):
  process = started("-c", READY + work)
  assert process.stdout.readline() == "ready\n"
  time.sleep(0.2)
  process.send_signal(signal.SIGINT)
  assert process.wait(timeout=30) == 130
  assert process.stderr.read() == "error: interrupted\n"


def test_the_end_needs_no_terminal(started):
  process = started("-c", READY + "import time; time.sleep(100)")
  process.stdout.readline()
  process.stdout.close()
  process.stderr.close()
  process.send_signal(signal.SIGINT)
  assert process.wait(timeout=30) == 130


RUN = """
import os, signal, sys, time
from diffjax.host import signals
from diffjax.host.interruption import Interruption
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
if "command" in sys.argv:
  signals.end_at_ctrl_c()
with Interruption() as interrupted:
  interrupted.started = "started" in sys.argv
  os.kill(os.getpid(), signal.Signals[sys.argv[1]])
  deadline = time.monotonic() + 30
  while not interrupted() and "nohup" not in sys.argv:
    assert time.monotonic() < deadline
    time.sleep(0.01)
  time.sleep(0.5)
print("stops" if interrupted() else "goes on")
"""


@pytest.mark.parametrize(
  "arguments, code, out, errors",
  [
    (
      "SIGINT command",
      130,
      "",
      "error: interrupted\n",
    ),  # there is nothing to save
    ("SIGHUP command", 129, "", "error: ended by SIGHUP\n"),
    (
      "SIGHUP command started",
      0,
      "stops\n",
      "diffjax: SIGHUP: saving after this step (once more to stop at once)\n",
    ),
    (
      "SIGINT notebook",
      0,
      "stops\n",
      "diffjax: SIGINT: saving after this step (once more to stop at once)\n",
    ),
  ],
)
def test_a_run_saves_what_there_is_to_save(
  started, arguments, code, out, errors
):
  process = started("-c", RUN, *arguments.split())
  assert (*process.communicate(timeout=60), process.returncode) == (
    out,
    errors,
    code,
  )


def test_nohup_is_respected(started):
  process = started("-c", RUN, "SIGHUP", "started", "nohup")
  assert (*process.communicate(timeout=60), process.returncode) == (
    "goes on\n",
    "",
    0,
  )


def mask(queue):
  queue.put(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_workers_are_born_deaf_to_ctrl_c():
  context, before = (
    multiprocessing.get_context("spawn"),
    signal.pthread_sigmask(signal.SIG_BLOCK, []),
  )
  with starting_workers():
    queue = context.SimpleQueue()
    worker = context.Process(target=mask, args=(queue,))
    worker.start()
  assert (
    signal.SIGINT in queue.get()
    and signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
  )
  worker.join()


OUTPUT = """
import pathlib, sys, time
from diffjax.host import output
output.outlive()
print("begun", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
  time.sleep(0.01)
for step in range(3):
  print("step", step, flush=True)
  print("warning", step, file=sys.stderr)
pathlib.Path(sys.argv[2]).touch()
"""


@pytest.mark.parametrize(
  "closed", [("stdout",), ("stderr",), ("stdout", "stderr")], ids=str
)
def test_a_closed_pipe_ends_nothing(started, tmp_path, closed):
  process = started("-c", OUTPUT, tmp_path / "closed", tmp_path / "ended")
  process.stdout.readline()
  for name in closed:
    getattr(process, name).close()
  (tmp_path / "closed").touch()
  assert process.wait(timeout=60) == 0 and (tmp_path / "ended").exists()
  if closed == ("stdout",):
    lines = process.stderr.read().splitlines()
    assert (
      "cannot write to standard output (Broken pipe); training goes on"
      in lines[0]
      and lines[1:] == [f"warning {n}" for n in range(3)]
    )
  if closed == ("stderr",):
    assert (
      "cannot write to standard error (Broken pipe); training goes on"
      in process.stdout.read()
    )


def test_a_full_disk_under_the_output_ends_nothing(tmp_path):
  (tmp_path / "closed").touch()
  with open("/dev/full", "w") as full_disk:
    process = subprocess.run(
      [sys.executable, "-c", OUTPUT, tmp_path / "closed", tmp_path / "ended"],
      cwd=ROOT,
      stdout=full_disk,
      stderr=subprocess.PIPE,
      text=True,
    )
  assert (
    process.returncode == 0
    and pathlib.Path(tmp_path / "ended").exists()
    and "No space left on device" in process.stderr
  )
