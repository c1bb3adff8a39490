"""What a finished run writes, when it may, and the plot of its losses."""

import dataclasses
import struct

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

LOG = [
  '{"step": 1, "train/loss": 5.0}',
  # Written by an earlier version, which measured a trigram model too.
  '{"step": 2, "train/loss": null, "validation/loss": 1.9,'
  ' "validation/trigram_bits_per_byte": 2.57}',
  '{"step": 10, "train/loss": 1.0}',
  '{"step": 11, "tra',
]


def drawn(axes):
  return {
    line.get_label(): [list(line.get_xdata()), list(line.get_ydata())]
    for line in axes.lines
  }


def test_the_whole_run_on_a_log_axis_and_its_second_half(tmp_path):
  """The first steps, where the loss falls steeply, have as much room as the last; the cut line of a killed run is no matter."""
  path = epath.Path(tmp_path) / "metrics.jsonl"
  path.write_text("\n".join(LOG))
  style = Style("DIFF", "#123456", "s")
  whole, half = loss_curves([(style, read_log(path))]).axes
  assert whole.get_xscale() == "log" and half.get_xscale() == "linear"
  assert drawn(whole) == {
    "DIFF, training": [[1, 10], [5.0, 1.0]],
    "DIFF, validation": [[2], [1.9]],
  }
  assert drawn(half) == {"DIFF, training": [[10], [1.0]]}
  assert {line.get_color() for line in whole.lines} == {"#123456"}
  assert all(
    axes.get_xlabel() == "step" and axes.get_ylabel() == "loss (nats per token)"
    for axes in (whole, half)
  )


def test_the_picture_is_sharp_and_in_the_colour_of_the_architecture(tmp_path):
  from matplotlib import image

  jsonl, png = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
  jsonl.write_text("\n".join(LOG))
  finish.plot_losses(jsonl, png, "diff_v2")
  assert struct.unpack(">II", png.read_bytes()[16:24]) == (2000, 800)
  hex_color = variant_styles.style("diff_v2").color
  color = [int(hex_color[at : at + 2], 16) for at in (1, 3, 5)]
  assert (
    abs(image.imread(png)[..., :3] * 255 - color).max(axis=-1) < 2
  ).sum() > 50


@pytest.fixture
def finished(tmp_path):
  """The result of a run that has taken all steps."""
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


def files(result):
  return sorted(path.name for path in epath.Path(result.workdir).iterdir())


def test_a_finished_run_is_plotted_under_the_lock(finished, monkeypatch):
  plotted = []

  def plot(jsonl, png, attention):
    with pytest.raises(UserError, match="in use by another run"):
      with lock(finished.workdir):
        pass
    plotted.append(epath.Path(png).name)

  monkeypatch.setattr(finish, "plot_losses", plot)
  finish.finish(finished)
  assert plotted == ["loss.png"]
  with lock(finished.workdir):
    pass


def test_a_stopped_run_writes_nothing(finished):
  finish.finish(dataclasses.replace(finished, step=1))
  assert files(finished) == ["lock", "metrics.jsonl"]


def test_nothing_is_written_while_another_run_has_the_workdir(finished):
  with lock(finished.workdir):
    with pytest.raises(UserError, match="in use by another run"):
      finish.finish(finished)
  assert files(finished) == ["lock", "metrics.jsonl"]


def test_a_workdir_that_was_deleted_is_not_made_again(finished):
  epath.Path(finished.workdir).rmtree()
  with pytest.raises(LostWorkdir):
    finish.finish(finished)
  assert not epath.Path(finished.workdir).exists()
