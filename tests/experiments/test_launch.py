"""Commands side by side: their devices, their errors and their end.

A slot is an equal share of this machine's devices. The commands of a slot get
environment variables, with which they see only these devices.
"""

import concurrent.futures
import os
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


@pytest.fixture(autouse=True)
def all_devices_are_visible(monkeypatch):
  """Removes the variables by which this process would see fewer devices."""
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  monkeypatch.delenv("TPU_VISIBLE_DEVICES", raising=False)


def test_two_slots_share_the_gpus():
  eight_gpus = Devices(backend="gpu", kind="H100", number=8)

  first = environment(eight_gpus, slot=0, slots=2)
  second = environment(eight_gpus, slot=1, slots=2)

  assert first == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
  assert second == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_slots_share_only_the_visible_gpus(monkeypatch):
  # This process sees half of the GPUs of a machine.
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
  visible_gpus = Devices(backend="gpu", kind="H100", number=4)

  first = environment(visible_gpus, slot=0, slots=2)
  second = environment(visible_gpus, slot=1, slots=2)

  assert first == {"CUDA_VISIBLE_DEVICES": "4,5"}
  assert second == {"CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize("slot", range(4))
def test_each_slot_has_one_tpu(slot):
  four_tpus = Devices(backend="tpu", kind="v5p", number=4)

  variables = environment(four_tpus, slot, slots=4)

  assert variables["TPU_VISIBLE_DEVICES"] == str(slot)


def test_slots_divide_the_cores_of_a_cpu(monkeypatch):
  """XLA starts as many threads as NPROC says."""
  monkeypatch.setattr(os, "cpu_count", lambda: 16)
  cpu = Devices(backend="cpu", kind="cpu", number=1)

  variables = environment(cpu, slot=1, slots=2)

  # Half of the 16 cores.
  assert variables == {"NPROC": "8"}


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_a_single_slot_has_the_whole_machine(backend):
  """Its commands see all devices without an environment variable."""
  machine = Devices(backend, kind="a device", number=4)

  assert environment(machine, slot=0, slots=1) == {}


@pytest.mark.parametrize("slots", [3, 16])
def test_slots_that_do_not_divide_the_gpus_are_an_error(slots):
  eight_gpus = Devices(backend="gpu", kind="H100", number=8)
  message = rf"--side_by_side={slots}: there are 8 devices \(H100\)"

  with pytest.raises(UserError, match=message):
    environment(eight_gpus, slot=0, slots=slots)


def test_two_tpus_in_a_slot_are_an_error():
  four_tpus = Devices(backend="tpu", kind="v5p", number=4)
  message = r"--side_by_side=2: there are 4 devices \(v5p\)"

  with pytest.raises(UserError, match=message):
    environment(four_tpus, slot=0, slots=2)


def test_devices_are_those_of_this_machine():
  local_devices = devices()

  assert local_devices.backend == "cpu"
  assert local_devices.number >= 1


def test_two_slots_run_two_jobs_at_a_time_in_order():
  """A job ends when a second job has started, or fails after 30 seconds."""
  started_jobs = []
  used_slots = set()
  two_started_jobs = threading.Barrier(parties=2, timeout=30)

  def make_job(name):
    def job(slot):
      started_jobs.append(name)
      used_slots.add(slot)
      two_started_jobs.wait()

    return name, job

  jobs = [make_job("a"), make_job("b"), make_job("c"), make_job("d")]
  Launcher().side_by_side(jobs, slots=2)

  first, second, third, fourth = started_jobs
  assert {first, second} == {"a", "b"}
  assert {third, fourth} == {"c", "d"}
  assert used_slots == {0, 1}


def test_no_job_starts_after_one_has_failed():
  """With one slot, the second job waits for the first."""
  started_jobs = []

  def failing_job(slot):
    raise UserError("out of memory")

  def next_job(slot):
    started_jobs.append("next")

  jobs = [("failing", failing_job), ("next", next_job)]
  with pytest.raises(UserError, match="out of memory"):
    Launcher().side_by_side(jobs, slots=1)

  assert not started_jobs


def python(program):
  """Returns the command that runs a program in a Python process."""
  return [sys.executable, "-X", "utf8", "-c", program]


FAILS_AFTER_AN_ERROR = """
import sys
print("error: no λ", file=sys.stderr)
print("bye", file=sys.stderr)
sys.exit(3)
"""

FAILS_WITHOUT_AN_ERROR = """
import sys
print("one", file=sys.stderr)
print("two", file=sys.stderr)
sys.exit(3)
"""

FAILS_SILENTLY = "raise SystemExit(3)"

KILLS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_the_error_of_a_failed_command_names_its_log(tmp_path):
  log = tmp_path / "log.txt"

  with pytest.raises(Failed) as failure:
    Launcher().call(python(FAILS_AFTER_AN_ERROR), log=log)

  assert str(failure.value).endswith(
    f"failed with exit code 3: error: no λ (more in {log})"
  )


@pytest.mark.parametrize(
  "program, reason",
  [
    pytest.param(FAILS_AFTER_AN_ERROR, "no λ", id="error line"),
    pytest.param(FAILS_WITHOUT_AN_ERROR, "two", id="last line"),
    pytest.param(FAILS_SILENTLY, "exit code 3", id="no output"),
    pytest.param(KILLS_ITSELF, "ended by signal 9 (Killed)", id="signal"),
  ],
)
def test_the_reason_of_a_failure_is_read_from_standard_error(program, reason):
  """The reason is the last line "error: …", or otherwise the last line."""
  with pytest.raises(Failed) as failure:
    Launcher().call(python(program), tail=True)

  assert failure.value.reason == reason


@pytest.mark.parametrize(
  "program, reason",
  [
    pytest.param(FAILS_AFTER_AN_ERROR, "no λ", id="error line"),
    pytest.param(FAILS_WITHOUT_AN_ERROR, "two", id="last line"),
    pytest.param(FAILS_SILENTLY, "exit code 3", id="no output"),
  ],
)
def test_the_reason_of_a_failure_is_read_from_its_part_of_the_log(
  tmp_path, program, reason
):
  """The commands of a run append to one log. Earlier lines do not count."""
  log = tmp_path / "log.txt"
  log.write_text("error: of an earlier command\n")

  with pytest.raises(Failed) as failure:
    Launcher().call(python(program), log=log, tail=True)

  assert failure.value.reason == reason


PRINTS_TO_STANDARD_ERROR = """
import sys
print("error: no λ", file=sys.stderr)
print("bye", file=sys.stderr)
"""


def test_standard_error_is_shown_without_a_log(capsys):
  Launcher().call(python(PRINTS_TO_STANDARD_ERROR), tail=True)

  assert capsys.readouterr().err == "error: no λ\nbye\n"


FAILS_AND_LEAVES_A_PROCESS_OF_30_SECONDS = """
import subprocess
import sys
print("error: gone", file=sys.stderr, flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
sys.exit(1)
"""


def test_the_launcher_does_not_wait_for_processes_that_a_command_leaves():
  """Such a process keeps the standard error of the command open."""
  command = python(FAILS_AND_LEAVES_A_PROCESS_OF_30_SECONDS)
  launcher = Launcher(tail_seconds=0.5)
  start = time.monotonic()

  with pytest.raises(Failed, match="as said above") as failure:
    launcher.call(command, tail=True)

  seconds = time.monotonic() - start
  assert failure.value.reason == "gone"
  # The process that is left ends after 30 seconds.
  assert seconds < 25


def wait_for(path):
  """Waits until a file exists."""
  deadline = time.monotonic() + 60
  while not path.exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)


# The argument is the path of a file that tells that the program has started.
SLEEPS_FOR_60_SECONDS = """
import pathlib
import sys
import time
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_stop_ends_the_running_command(tmp_path):
  launcher = Launcher()
  command = [*python(SLEEPS_FOR_60_SECONDS), str(tmp_path / "started")]

  with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
    call = pool.submit(launcher.call, command)
    wait_for(tmp_path / "started")
    start = time.monotonic()
    launcher.stop()

    # The call ends with this error.
    with pytest.raises(Stopped):
      call.result()

  seconds = time.monotonic() - start
  # Without a stop, the command would sleep for 60 seconds.
  assert seconds < 30


def test_a_stopped_launcher_starts_no_command():
  launcher = Launcher()
  launcher.stop()

  with pytest.raises(Stopped):
    launcher.call(python("print('started')"))


# Training saves a checkpoint at SIGTERM. This program writes a file instead.
SAVES_AT_SIGTERM = """
import pathlib
import signal
import sys
import time

directory = pathlib.Path(sys.argv[1])

def save(number, frame):
  (directory / "saved").touch()
  sys.exit(0)

signal.signal(signal.SIGTERM, save)
(directory / "started").touch()
time.sleep(60)
"""

# The arguments are "directly" or "in a job", and then a command.
LAUNCHES_A_COMMAND = """
import signal
import sys
from experiments.launch import Launcher

# Background jobs of a shell ignore SIGINT, and nohup ignores SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

way, *command = sys.argv[1:]

with Launcher() as launcher:

  def job(slot):
    launcher.call(command)

  if way == "in a job":
    launcher.side_by_side([("a", job), ("b", job)], slots=1)
  else:
    launcher.call(command)
"""


@pytest.mark.parametrize(
  "signal_number, way",
  [
    (signal.SIGTERM, "directly"),
    (signal.SIGHUP, "directly"),
    (signal.SIGTERM, "in a job"),
    (signal.SIGINT, "in a job"),
  ],
)
def test_at_a_signal_the_command_gets_sigterm_and_can_save(
  tmp_path, signal_number, way
):
  """The process of a launcher gets a signal while a command runs in it.

  The command writes "started" and, at SIGTERM, "saved". It runs directly in the
  launcher, or in one of several jobs.
  """
  command = [*python(SAVES_AT_SIGTERM), str(tmp_path)]
  process = subprocess.Popen(
    [*python(LAUNCHES_A_COMMAND), way, *command],
    cwd=FOLDER.parent,
    stderr=subprocess.PIPE,
  )
  wait_for(tmp_path / "started")

  process.send_signal(signal_number)

  _, errors = process.communicate(timeout=30)
  assert (tmp_path / "saved").exists(), errors
  # The launcher fails, so that the caller does not take the run for finished.
  assert process.returncode != 0, errors
