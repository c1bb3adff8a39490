"""The status line tells the truth about speed."""

import io
import re
import time

import pytest

from diffjax.config import Config, DataConfig, TrainConfig
from diffjax.model.flops import step_flops
from diffjax.training.status_line import StatusLine

CONFIG = Config(
  data=DataConfig(length=16), train=TrainConfig(steps=100, batch_size=2)
)


def clock(monkeypatch, times):
  monkeypatch.setattr(time, "perf_counter", iter(times).__next__)


def test_plain_lines_and_speeds(monkeypatch):
  file = io.StringIO()
  progress = StatusLine(
    CONFIG, start_step=20, num_devices=2, device_kind="NVIDIA H200", file=file
  )
  clock(monkeypatch, [100.0, 105.0, 200.0, 202.0])
  for step in range(21, 32):
    progress.add_wait(0.1)
    progress.add_step(step)
  values = progress.report(30, {"train/loss": 1.25})
  # Ten steps in five seconds, 32 tokens each; the wait before the first step is compilation's.
  assert (
    values["train/loss"] == 1.25
    and values["train/step_seconds"] == 0.5
    and values["train/tokens_per_second"] == 64
  )
  assert values["train/wait_fraction"] == pytest.approx(1.0 / 5)
  flops = step_flops(CONFIG.model, 16, 32).training
  assert values["train/mfu"] == pytest.approx(flops / (0.5 * 2 * 989.4e12))
  # An evaluation of 95 seconds does not count.
  progress.note(32, "validation: fine")
  progress.restart_window(32)
  values = progress.report(36, {"train/loss": 1.0})
  assert values["train/step_seconds"] == 0.5
  progress.close()
  lines = file.getvalue().splitlines()
  assert (
    lines[0] == "step 30/100  loss 1.2500  64 tokens/s  MFU 0.0%"
    "  waited for data 20%  0:00:35 left"
  )
  assert lines[1] == "step 32/100  validation: fine" and len(lines) == 3


def test_no_mfu_on_an_unknown_chip():
  progress = StatusLine(
    CONFIG, start_step=0, num_devices=1, device_kind="cpu", file=io.StringIO()
  )
  progress.add_step(1)
  assert "train/mfu" not in progress.report(1, {"train/loss": 1.0})


@pytest.fixture
def terminal(monkeypatch):
  """What stands for a terminal of 120 columns, and keeps what is written to it."""

  class Terminal(io.StringIO):
    def isatty(self):
      return True

  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "120")
  return Terminal()


def test_a_long_line_of_a_fast_run_fits_80_columns(monkeypatch):
  file = io.StringIO()
  config = Config(
    data=DataConfig(length=4096), train=TrainConfig(steps=19_000, batch_size=9)
  )
  progress = StatusLine(
    config, start_step=0, num_devices=1, device_kind="NVIDIA H200", file=file
  )
  clock(monkeypatch, [0.0, 40.0])
  progress.add_wait(1.0)
  progress.add_step(1)
  progress.add_wait(0.1)
  progress.add_step(100)
  progress.report(100, {"train/loss": 10.123456})
  # The first step waited for compilation, and 0.1 s of 40 s are negligible.
  assert re.fullmatch(
    r"step 100/19000  loss 10\.1235  92\.2K tokens/s  MFU \d+\.\d%  2:06:00 left\n",
    file.getvalue(),
  )
  assert len(file.getvalue()) <= 80


def test_live_line_on_a_terminal(terminal):
  progress = StatusLine(
    CONFIG, start_step=0, num_devices=1, device_kind="cpu", file=terminal
  )
  progress.add_step(1)
  progress.report(1, {"train/loss": 3.5})
  progress.close()
  assert "1/100" in terminal.getvalue() and "loss 3.5000" in terminal.getvalue()
  assert (
    terminal.getvalue().count("\x1b[?25l")
    == terminal.getvalue().count("\x1b[?25h")
    == 1
  ), "the cursor comes back"


def test_compiling_ends_with_the_first_step(terminal):
  """The next report may be a hundred steps away."""
  progress = StatusLine(
    CONFIG, start_step=0, num_devices=1, device_kind="cpu", file=terminal
  )
  progress.add_step(1)
  progress.close()
  *_, last = terminal.getvalue().rpartition("1/100")
  assert (
    "compiling" in terminal.getvalue()
    and "training" in last
    and "compiling" not in last
  )
