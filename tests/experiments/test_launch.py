"""Commands side by side: their devices, their errors and their end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from diffjax.config import UserError
from experiments.grid import FOLDER
from experiments.launch import (
  Devices,
  Failed,
  Launcher,
  Stopped,
  devices,
  environment,
)

GPUS = Devices("gpu", "H100", 8)
TPUS = Devices("tpu", "v5p", 4)
CPU = Devices("cpu", "cpu", 1)


@pytest.fixture(autouse=True)
def all_devices_are_visible(monkeypatch):
  """Removes the variables by which this process would see fewer devices."""
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  monkeypatch.delenv("TPU_VISIBLE_DEVICES", raising=False)


def test_two_slots_share_the_gpus():
  assert environment(GPUS, 0, 2) == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
  assert environment(GPUS, 1, 2) == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_slots_share_only_the_visible_gpus(monkeypatch):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
  visible_gpus = Devices("gpu", "H100", 4)

  assert environment(visible_gpus, 0, 2) == {"CUDA_VISIBLE_DEVICES": "4,5"}
  assert environment(visible_gpus, 1, 2) == {"CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize("slot", range(4))
def test_each_slot_has_one_tpu(slot):
  variables = environment(TPUS, slot, 4)

  assert variables["TPU_VISIBLE_DEVICES"] == str(slot)


def test_slots_divide_the_cores():
  cores = os.cpu_count() or 1

  assert environment(CPU, 1, 2) == {"NPROC": str(max(1, cores // 2))}


@pytest.mark.parametrize("machine", [CPU, GPUS, TPUS])
def test_a_single_slot_has_the_whole_machine(machine):
  assert environment(machine, 0, 1) == {}


@pytest.mark.parametrize(
  "machine, slots",
  [
    pytest.param(GPUS, 3, id="no divisor of the GPUs"),
    pytest.param(GPUS, 16, id="more slots than GPUs"),
    pytest.param(TPUS, 2, id="two TPUs in a slot"),
  ],
)
def test_devices_that_cannot_be_divided_are_an_error(machine, slots):
  with pytest.raises(
    UserError,
    match=f"--side_by_side={slots}: there are {machine.number} devices",
  ):
    environment(machine, 0, slots)


def test_devices_are_those_of_this_machine():
  local_devices = devices()

  assert local_devices.backend == "cpu"
  assert local_devices.number >= 1


def test_two_jobs_run_at_a_time_in_order():
  begun = []
  slots = []
  lock = threading.Lock()
  # A job ends only when another one runs at the same time.
  meeting = threading.Barrier(2, timeout=30)

  def make_job(number):
    def job(slot):
      with lock:
        begun.append(number)
        slots.append(slot)
      meeting.wait()

    return str(number), job

  jobs = [make_job(number) for number in range(4)]
  Launcher().side_by_side(jobs, 2)

  assert set(begun[:2]) == {0, 1}
  assert set(begun[2:]) == {2, 3}
  assert set(slots) == {0, 1}


def test_no_job_begins_after_one_has_failed(tmp_path):
  launcher = Launcher()
  begun = []
  log = tmp_path / "log.txt"
  code = "print('error: out of luck'); raise SystemExit(3)"

  def fail(slot):
    launcher.call([sys.executable, "-c", code], log=log)

  with pytest.raises(
    UserError,
    match=r"failed with exit code 3: error: out of luck \(more in .*log.txt\)",
  ):
    launcher.side_by_side([("one", fail), ("two", begun.append)], 1)

  assert not begun


@pytest.mark.parametrize(
  "code, has_log, reason",
  [
    pytest.param(
      "print('error: no λ', file=stderr); print('bye', file=stderr)",
      True,
      "no λ",
      id="error line in a log",
    ),
    pytest.param(
      "print('error: no λ', file=stderr); print('bye', file=stderr)",
      False,
      "no λ",
      id="error line",
    ),
    pytest.param(
      "print('one\\ntwo\\n', file=stderr)", True, "two", id="last line in a log"
    ),
    pytest.param(
      "print('one\\ntwo\\n', file=stderr)", False, "two", id="last line"
    ),
    pytest.param("pass", False, "exit code 3", id="no output"),
    pytest.param(
      "os.kill(os.getpid(), 9)",
      False,
      r"ended by signal 9 \(Killed\)",
      id="signal",
    ),
  ],
)
def test_the_reason_of_a_failure_is_its_last_error_line(
  tmp_path, code, has_log, reason
):
  """A log may hold errors of earlier commands."""
  log = None
  if has_log:
    log = tmp_path / "log.txt"
    log.write_text("error: of an earlier command\n")
  program = f"import os, sys; from sys import stderr\n{code}\nsys.exit(3)"
  command = [sys.executable, "-X", "utf8", "-c", program]

  with pytest.raises(Failed) as failure:
    Launcher().call(command, log=log, tail=True)

  assert re.fullmatch(reason, failure.value.reason)


def test_an_earlier_error_in_a_log_is_not_the_reason(tmp_path):
  log = tmp_path / "log.txt"
  log.write_text("error: of an earlier command\n")

  with pytest.raises(Failed) as failure:
    Launcher().call([sys.executable, "-c", "exit(3)"], log=log, tail=True)

  assert failure.value.reason == "exit code 3"


def test_standard_error_is_shown_without_a_log(capsys):
  code = "import sys; print('error: no λ\\nbye', file=sys.stderr)"

  Launcher().call([sys.executable, "-X", "utf8", "-c", code], tail=True)

  assert capsys.readouterr().err == "error: no λ\nbye\n"


def test_processes_that_a_command_leaves_behind_are_not_waited_for():
  """Such a process keeps the standard error of the command open."""
  code = (
    "import subprocess, sys\n"
    "print('error: gone', file=sys.stderr, flush=True)\n"
    "sleep = 'import time; time.sleep(30)'\n"
    "subprocess.Popen([sys.executable, '-c', sleep])\n"
    "sys.exit(1)\n"
  )
  launcher = Launcher(tail_seconds=0.5)
  start = time.monotonic()

  with pytest.raises(Failed, match="as said above") as failure:
    launcher.call([sys.executable, "-c", code], tail=True)

  assert failure.value.reason == "gone"
  assert time.monotonic() - start < 25


def wait_for(path):
  """Waits until a file exists."""
  deadline = time.monotonic() + 60
  while not path.exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def test_a_stopped_launcher_ends_its_processes_and_starts_no_more(tmp_path):
  launcher = Launcher()
  stopped = []
  code = (
    "import pathlib, sys, time\n"
    "pathlib.Path(sys.argv[1]).touch()\n"
    "time.sleep(60)\n"
  )
  command = [sys.executable, "-c", code, str(tmp_path / "begun")]

  def call():
    try:
      launcher.call(command)
    except Stopped as error:
      stopped.append(error)

  thread = threading.Thread(target=call)
  thread.start()
  wait_for(tmp_path / "begun")
  start = time.monotonic()
  launcher.stop()
  thread.join()

  assert len(stopped) == 1
  assert time.monotonic() - start < 30
  with pytest.raises(Stopped):
    launcher.call(command)


@pytest.mark.parametrize(
  "number, call",
  [
    pytest.param(signal.SIGTERM, "call(0)", id="SIGTERM"),
    pytest.param(signal.SIGHUP, "call(0)", id="SIGHUP"),
    pytest.param(
      signal.SIGTERM,
      "launcher.side_by_side([('a', call), ('b', call)], 1)",
      id="SIGTERM with jobs",
    ),
    pytest.param(
      signal.SIGINT,
      "launcher.side_by_side([('a', call), ('b', call)], 1)",
      id="SIGINT with jobs",
    ),
  ],
)
def test_at_a_signal_the_processes_get_sigterm_and_are_waited_for(
  tmp_path, number, call
):
  """Training saves a checkpoint at SIGTERM. The child writes a file then."""
  child = (
    "import pathlib, signal, sys, time\n"
    "folder = pathlib.Path(sys.argv[1])\n"
    "def save(*_):\n"
    "  (folder / 'saved').touch()\n"
    "  sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "(folder / 'begun').touch()\n"
    "time.sleep(60)\n"
  )
  # Background jobs of a shell ignore SIGINT, and nohup ignores SIGHUP.
  parent = (
    "import signal, sys\n"
    "from experiments.launch import Launcher\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    "def call(slot):\n"
    "  launcher.call([sys.executable, '-c', sys.argv[1], sys.argv[2]])\n"
    "with Launcher() as launcher:\n"
    f"  {call}\n"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", parent, child, str(tmp_path)],
    cwd=FOLDER.parent,
    stderr=subprocess.PIPE,
  )
  wait_for(tmp_path / "begun")

  process.send_signal(number)
  _, errors = process.communicate(timeout=30)

  assert process.returncode != 0, errors
  assert (tmp_path / "saved").exists(), errors
