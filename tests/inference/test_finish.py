"""The plot of a run's losses."""

import struct

from etils import epath

from diffjax.inference.finish import plot_losses
from diffjax.model import variant_styles
from diffjax.plots.curves import loss_curves
from diffjax.plots.styles import Style
from diffjax.training.metrics import read_log

LOG = [
  '{"step": 1, "train/loss": 5.0}',
  '{"step": 2, "train/loss": null, "validation/loss": 1.9}',
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
  plot_losses(jsonl, png, "diff_v2")
  assert struct.unpack(">II", png.read_bytes()[16:24]) == (2000, 800)
  hex_color = variant_styles.style("diff_v2").color
  color = [int(hex_color[at : at + 2], 16) for at in (1, 3, 5)]
  assert (
    abs(image.imread(png)[..., :3] * 255 - color).max(axis=-1) < 2
  ).sum() > 50
