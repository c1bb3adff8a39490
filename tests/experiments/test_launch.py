"""Processes side by side: each on its own devices, none left behind."""

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

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_every_slot_has_devices_of_its_own(monkeypatch):
  for name in ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_DEVICES"):
    monkeypatch.delenv(name, raising=False)
  gpus, tpus, cpu = (
    Devices("gpu", "H100", 8),
    Devices("tpu", "v5p", 4),
    Devices("cpu", "cpu", 1),
  )
  assert environment(gpus, 0, 1) == {} and [
    environment(gpus, slot, 2) for slot in range(2)
  ] == [
    {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
    {"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
  ]
  assert [
    environment(tpus, slot, 4)["TPU_VISIBLE_DEVICES"] for slot in range(4)
  ] == ["0", "1", "2", "3"]
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
  assert [
    environment(Devices("gpu", "H100", 4), slot, 2)["CUDA_VISIBLE_DEVICES"]
    for slot in range(2)
  ] == ["4,5", "6,7"], "not another user's"
  assert (
    environment(cpu, 1, 2) == {"NPROC": str(max(1, (os.cpu_count() or 1) // 2))}
    and environment(cpu, 0, 1) == {}
  )
  for found, slots in ((gpus, 3), (tpus, 2), (gpus, 16)):
    with pytest.raises(
      UserError,
      match=f"--side_by_side={slots}: there are {found.number} devices",
    ):
      environment(found, 0, slots)


def test_devices_are_asked_for_in_another_process():
  found = devices()
  assert found.backend == "cpu" and found.number >= 1


def test_jobs_run_side_by_side_in_order_on_free_slots():
  begun, together, lock, meeting = (
    [],
    [],
    threading.Lock(),
    threading.Barrier(2, timeout=30),
  )

  def job(name):
    def run(slot):
      with lock:
        begun.append(name)
      together.append(slot)
      meeting.wait()  # nobody goes on alone

    return run

  Launcher().side_by_side(
    [(str(number), job(number)) for number in range(4)], 2
  )
  assert (
    sorted(begun) == [0, 1, 2, 3]
    and set(begun[:2]) == {0, 1}
    and set(together) == {0, 1}
  )


def test_after_a_failure_none_begins(tmp_path):
  launcher, begun = Launcher(), []
  log = tmp_path / "log.txt"

  def fail(slot):
    launcher.call(
      [
        sys.executable,
        "-c",
        "print('error: such is life'); raise SystemExit(3)",
      ],
      log=log,
    )

  with pytest.raises(
    UserError,
    match=r"failed with exit code 3: error: such is life \(more in .*log.txt\)",
  ):
    launcher.side_by_side([("one", fail), ("two", begun.append)], 1)
  assert not begun


@pytest.mark.parametrize(
  "code, reason",
  [
    ("print('error: no λ', file=stderr); print('bye', file=stderr)", "no λ"),
    ("print('one\\ntwo\\n', file=stderr)", "two"),
    ("pass", "exit code 3"),
    ("os.kill(os.getpid(), 9)", r"ended by signal 9 \(Killed\)"),
  ],
)
@pytest.mark.parametrize("has_log", [True, False])
def test_the_reason_of_a_failure_is_its_last_error_line(
  tmp_path, capsys, code, reason, has_log
):
  """A log may hold errors of earlier commands; without one the user sees standard error."""
  log = tmp_path / "log.txt" if has_log else None
  if log:
    log.write_text("error: of an earlier command\n")
  program = f"import os, sys; from sys import stderr\n{code}\nsys.exit(3)"
  command = [sys.executable, "-X", "utf8", "-c", program]
  with pytest.raises(Failed) as caught:
    Launcher().call(command, log=log, tail=True)
  assert re.fullmatch(reason, caught.value.reason)
  if not has_log:
    shown = capsys.readouterr().err
    assert ("error: no λ\nbye\n" == shown) == ("λ" in code)


def test_a_command_with_a_tail_is_waited_for_not_its_children():
  """A process that a command left behind keeps its standard error open."""
  code = (
    "import subprocess, sys; print('error: gone', file=sys.stderr, flush=True);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)']);"
    "sys.exit(1)"
  )
  start = time.monotonic()
  with pytest.raises(Failed, match="as said above") as caught:
    Launcher().call([sys.executable, "-c", code], tail=True)
  assert caught.value.reason == "gone" and time.monotonic() - start < 25


def test_stopping_ends_what_runs():
  launcher, seen = Launcher(), []

  def run():
    try:
      launcher.call(SLEEP)
    except Stopped:
      seen.append("stopped")

  thread = threading.Thread(target=run)
  thread.start()
  while not launcher._running:
    time.sleep(0.01)
  start = time.monotonic()
  launcher.stop()
  thread.join()
  assert seen == ["stopped"] and time.monotonic() - start < 30
  with pytest.raises(Stopped):
    launcher.call(SLEEP)


@pytest.mark.parametrize(
  "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
)
@pytest.mark.parametrize(
  "how",
  ["launcher.side_by_side([('a', lambda slot: call())] * 2, 1)", "call()"],
)
def test_a_signal_reaches_the_processes(tmp_path, number, how):
  """The processes get SIGTERM, at which training saves, and are waited for."""
  child = (
    "import pathlib, signal, sys, time; here = pathlib.Path(sys.argv[1])\n"
    "signal.signal(signal.SIGTERM, lambda *_: ((here / 'saved').write_text(''), sys.exit(0)))\n"
    "(here / 'begun').write_text(''); time.sleep(60)\n"
  )
  parent = (
    "import signal, sys; from experiments.launch import Launcher\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell's background jobs ignore
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # which nohup ignores
    f"with Launcher() as launcher:\n  call = lambda: launcher.call([sys.executable, '-c', sys.argv[1], sys.argv[2]])\n  {how}\n"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", parent, child, str(tmp_path)],
    cwd=FOLDER.parent,
    stderr=subprocess.PIPE,
  )
  deadline = time.monotonic() + 60
  while not (tmp_path / "begun").exists():
    assert time.monotonic() < deadline and process.poll() is None
    time.sleep(0.02)
  os.kill(process.pid, number)
  _, errors = process.communicate(timeout=30)
  assert process.returncode and (tmp_path / "saved").exists(), errors
