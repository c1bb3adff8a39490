"""What the end of a run writes: the plot of its losses, if it may write."""

import dataclasses
import struct

import numpy as np
import pytest
from etils import epath

from diffjax.config import Config, TrainConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.host.lock import LostWorkdir, lock
from diffjax.inference import finish
from diffjax.model import variant_styles
from diffjax.parallel.mesh import make_mesh
from diffjax.plots.curves import loss_curves
from diffjax.plots.styles import Style
from diffjax.training.metrics import read_log
from diffjax.training.result import TrainResult

# The lines of metrics.jsonl.
LOG = [
  '{"step": 1, "train/loss": 5.0}',
  # Written by an earlier version, which measured a trigram model too.
  '{"step": 2, "train/loss": null, "validation/loss": 1.9,'
  ' "validation/trigram_bits_per_byte": 2.57}',
  '{"step": 10, "train/loss": 1.0}',
  '{"step": 11, "tra',
]


def lines_of(axes):
  """Returns the x and y values of each line in a plot, by its label."""
  lines = {}
  for line in axes.lines:
    lines[line.get_label()] = [list(line.get_xdata()), list(line.get_ydata())]
  return lines


@pytest.fixture
def loss_axes(tmp_path):
  """The two plots of the losses in LOG."""
  path = epath.Path(tmp_path) / "metrics.jsonl"
  path.write_text("\n".join(LOG))
  style = Style("DIFF", "#123456", "s")
  return loss_curves([(style, read_log(path))]).axes


def test_the_first_plot_shows_the_whole_run_on_a_log_axis(loss_axes):
  """LOG has losses of steps 1, 2 and 10.

  Its last line was cut when the run was killed. Such a line is ignored.
  """
  whole_run, _ = loss_axes

  assert whole_run.get_xscale() == "log"
  # Lists of steps and of losses.
  assert lines_of(whole_run) == {
    "DIFF, training": [[1, 10], [5.0, 1.0]],
    "DIFF, validation": [[2], [1.9]],
  }


def test_the_second_plot_shows_the_second_half(loss_axes):
  """LOG ends at step 10, so this half has only that step."""
  _, second_half = loss_axes

  assert second_half.get_xscale() == "linear"
  assert lines_of(second_half) == {"DIFF, training": [[10], [1.0]]}


def test_the_plots_have_labels_and_the_color_of_the_style(loss_axes):
  for axes in loss_axes:
    assert axes.get_xlabel() == "step"
    assert axes.get_ylabel() == "loss (nats per token)"
    for line in axes.lines:
      assert line.get_color() == "#123456"


@pytest.fixture
def loss_png_of_diff_v2(tmp_path):
  """The file that a finished run of DIFF V2 writes."""
  log_path = tmp_path / "metrics.jsonl"
  log_path.write_text("\n".join(LOG))
  png_path = tmp_path / "loss.png"
  finish.plot_losses(log_path, png_path, "diff_v2")
  return png_path


def test_the_picture_has_the_resolution_of_a_page(loss_png_of_diff_v2):
  header = loss_png_of_diff_v2.read_bytes()[:24]

  # Two integers at the end of this part of a PNG file.
  width, height = struct.unpack(">II", header[16:24])

  assert width == 2000
  assert height == 800


def test_the_picture_has_the_color_of_the_variant(loss_png_of_diff_v2):
  from matplotlib import colors, image

  color = colors.to_rgb(variant_styles.style("diff_v2").color)
  picture = image.imread(loss_png_of_diff_v2)
  pixels = picture[..., :3]

  difference = np.abs(pixels - color).max(axis=-1)
  # Colours have 8 bits. The plotted lines have at least 50 pixels.
  has_color = difference < 2 / 255
  assert np.count_nonzero(has_color) > 50


@pytest.fixture
def finished_run(tmp_path):
  """The result of a run that has taken all of its steps."""
  workdir = tmp_path / "run"
  with lock(workdir) as held:
    pass
  (workdir / "metrics.jsonl").write_text("\n".join(LOG))
  config = Config(train=TrainConfig(steps=2, sample_tokens=0))
  return TrainResult(
    config=config,
    workdir=str(workdir),
    mesh=make_mesh(config.mesh),
    model=None,
    params=None,
    tokenizer=load_tokenizer("bytes"),
    step=2,
    check_lock=held.check,
  )


def file_names(result):
  """Returns the names of the files in the workdir of a run."""
  return sorted(path.name for path in epath.Path(result.workdir).iterdir())


def is_locked(workdir):
  """Returns whether a run has locked a workdir."""
  try:
    with lock(workdir):
      return False
  except UserError:
    return True


def test_the_plot_is_written_while_the_workdir_is_locked(
  finished_run, monkeypatch
):
  """Without the lock, another run could write its log during the plot."""
  plots = []

  def record_plot(log_path, png_path, attention):
    plots.append((epath.Path(png_path).name, is_locked(finished_run.workdir)))

  monkeypatch.setattr(finish, "plot_losses", record_plot)

  finish.finish(finished_run)

  assert plots == [("loss.png", True)]
  assert not is_locked(finished_run.workdir)


def test_a_stopped_run_writes_nothing(finished_run):
  """A run of two steps that was stopped after one will continue."""
  stopped_run = dataclasses.replace(finished_run, step=1)

  finish.finish(stopped_run)

  assert file_names(stopped_run) == ["lock", "metrics.jsonl"]


def test_nothing_is_written_while_another_run_has_the_lock(finished_run):
  with lock(finished_run.workdir):
    with pytest.raises(UserError, match="in use by another run"):
      finish.finish(finished_run)

  assert file_names(finished_run) == ["lock", "metrics.jsonl"]


def test_a_deleted_workdir_is_not_created_again(finished_run):
  workdir = epath.Path(finished_run.workdir)
  workdir.rmtree()

  with pytest.raises(LostWorkdir):
    finish.finish(finished_run)

  assert not workdir.exists()
