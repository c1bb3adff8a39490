"""The status line shows the loss, the speed and the remaining time."""

import io
import time

import pytest

from diffjax.config import Config, DataConfig, TrainConfig
from diffjax.model.flops import step_flops
from diffjax.training.status_line import StatusLine

CONFIG = Config(
  data=DataConfig(length=16), train=TrainConfig(steps=100, batch_size=2)
)


def set_clock(monkeypatch: pytest.MonkeyPatch, times: list[float]) -> None:
  """Makes the clock return these times, one at each call."""
  monkeypatch.setattr(time, "perf_counter", iter(times).__next__)


@pytest.fixture
def interrupted_line(monkeypatch):
  """Takes steps 21 to 31 and an evaluation, and reports steps 30 and 36.

  Ten steps take five seconds, and the evaluation takes 95 seconds.

  Returns:
    The values of both reports, and the printed lines.
  """
  file = io.StringIO()
  status_line = StatusLine(
    CONFIG, start_step=20, num_devices=2, device_kind="NVIDIA H200", file=file
  )
  # The times of step 21, of the first report, of the end of the evaluation and
  # of the second report.
  set_clock(monkeypatch, [100.0, 105.0, 200.0, 202.0])
  for step in range(21, 32):
    status_line.add_wait(0.1)
    status_line.add_step(step)
  first_values = status_line.report(30, {"train/loss": 1.25})
  status_line.note(32, "validation: fine")
  status_line.restart_window(32)
  second_values = status_line.report(36, {"train/loss": 1.0})
  status_line.close()
  return first_values, second_values, file.getvalue().splitlines()


def test_a_report_has_the_speed_of_the_steps(interrupted_line):
  """Ten steps take five seconds on two H200, whose peak is 989.4 TFLOP/s."""
  values, _, _ = interrupted_line

  assert values["train/loss"] == 1.25
  assert values["train/step_seconds"] == 5 / 10
  tokens_per_step = 2 * 16
  assert values["train/tokens_per_second"] == tokens_per_step / 0.5
  flops = step_flops(CONFIG.model, length=16, tokens=tokens_per_step).training
  peak_flops_per_second = 2 * 989.4e12
  expected_mfu = flops / (0.5 * peak_flops_per_second)
  assert values["train/mfu"] == pytest.approx(expected_mfu)


def test_the_wait_before_the_first_step_is_not_counted(interrupted_line):
  """The first step also waits for compilation.

  The ten later waits of 0.1 s each are counted, in a window of 5 s.
  """
  values, _, _ = interrupted_line

  assert values["train/wait_fraction"] == pytest.approx(10 * 0.1 / 5)


def test_the_time_of_an_evaluation_is_not_counted(interrupted_line):
  """The evaluation takes 95 s, and the four steps after it take 2 s."""
  _, values, _ = interrupted_line

  assert values["train/step_seconds"] == 2 / 4


def test_reports_and_notes_are_lines_of_a_file(interrupted_line):
  """On a terminal, a single line changes instead."""
  _, _, lines = interrupted_line

  report_line, note_line, _ = lines
  # A step has 2 x 16 = 32 tokens and takes 0.5 s, so 64 tokens take 1 s. The 70
  # steps that are left take 35 s. The ten steps waited 1 s of 5 s for data.
  assert report_line == (
    "step 30/100  loss 1.2500  64 tokens/s  MFU 0.0%"
    "  waited for data 20%  0:00:35 left"
  )
  assert note_line == "step 32/100  validation: fine"


def test_a_chip_without_a_known_peak_has_no_mfu():
  """Model FLOPs utilization (MFU) is a fraction of the chip's peak FLOP/s."""
  status_line = StatusLine(
    CONFIG, start_step=0, num_devices=1, device_kind="cpu", file=io.StringIO()
  )
  status_line.add_step(1)

  assert "train/mfu" not in status_line.report(1, {"train/loss": 1.0})


def test_a_long_line_of_a_fast_run_fits_80_columns(monkeypatch):
  """Large numbers are printed with units, and small waits not at all."""
  file = io.StringIO()
  config = Config(
    data=DataConfig(length=4096), train=TrainConfig(steps=19_000, batch_size=9)
  )
  status_line = StatusLine(
    config, start_step=0, num_devices=1, device_kind="NVIDIA H200", file=file
  )
  # The first step begins at 0 s, and step 100 ends at 40 s.
  set_clock(monkeypatch, [0.0, 40.0])

  status_line.add_wait(1.0)
  status_line.add_step(1)
  # A wait of 0.1 s is not shown, because it is a small part of 40 s.
  status_line.add_wait(0.1)
  status_line.add_step(100)
  status_line.report(100, {"train/loss": 10.123456})

  seconds_per_step = 40 / 100
  assert 9 * 4096 / seconds_per_step == 92_160
  seconds_left = (19_000 - 100) * seconds_per_step
  assert seconds_left == 2 * 3600 + 6 * 60
  line = file.getvalue()
  text, mfu_and_time = line.split("MFU ")
  assert text == "step 100/19000  loss 10.1235  92.2K tokens/s  "
  assert mfu_and_time.endswith("%  2:06:00 left\n")
  assert len(line) <= 80


# A terminal.

HIDE_CURSOR = "\x1b[?25l"
SHOW_CURSOR = "\x1b[?25h"


class Terminal(io.StringIO):
  """Keeps what is written to a terminal."""

  def isatty(self):
    return True


@pytest.fixture
def terminal(monkeypatch):
  """A terminal of 120 columns."""
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "120")
  return Terminal()


def test_a_terminal_shows_the_step_and_the_loss(terminal):
  status_line = StatusLine(
    CONFIG, start_step=0, num_devices=1, device_kind="cpu", file=terminal
  )
  status_line.add_step(1)
  status_line.report(1, {"train/loss": 3.5})
  status_line.close()

  assert "1/100" in terminal.getvalue()
  assert "loss 3.5000" in terminal.getvalue()


def test_the_cursor_is_visible_at_the_end(terminal):
  """It is hidden only while the line may change."""
  status_line = StatusLine(
    CONFIG, start_step=0, num_devices=1, device_kind="cpu", file=terminal
  )
  status_line.add_step(1)
  status_line.close()

  text = terminal.getvalue()
  assert text.count(HIDE_CURSOR) == 1
  assert text.count(SHOW_CURSOR) == 1
  assert text.index(HIDE_CURSOR) < text.index(SHOW_CURSOR)


def test_the_line_no_longer_says_compiling_after_the_first_step(terminal):
  """The next report may be a hundred steps away."""
  status_line = StatusLine(
    CONFIG, start_step=0, num_devices=1, device_kind="cpu", file=terminal
  )
  status_line.add_step(1)
  status_line.close()

  text_before, _, text_after = terminal.getvalue().rpartition("1/100")
  assert "compiling" in text_before
  assert "training" in text_after
  assert "compiling" not in text_after
