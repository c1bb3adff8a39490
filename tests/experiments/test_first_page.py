"""The figure of experiments/README.md."""

import json
import math

import pytest
from matplotlib.markers import CARETDOWNBASE, CARETUPBASE

from experiments import comparison, first_page, grid, results


def write_results(path, losses, baseline):
  """Writes a results.json with a run for each loss of each variant."""
  runs = []
  for variant, losses_of_variant in losses.items():
    for loss in losses_of_variant:
      run = {
        "variant": variant,
        "parameters": 838_000,
        "config": {},
        "results": {"validation/loss": loss},
      }
      runs.append(run)
  config = {"train.steps": 600, "train.batch_size": 16, "data.length": 256}
  results.write(path, {"baseline": baseline, "config": config, "runs": runs})


@pytest.fixture(scope="module")
def panels():
  """The axes of DIFF and of DIFF V2."""
  return first_page.draw().axes


def points_of_row(points, row):
  """Returns the points of an architecture, such as "diff"."""
  return [point for point in points if point.row == row]


def points_of_source(source):
  """Returns the published points of a source."""
  points = first_page.published_points()
  return [point for point in points if point.source == source]


def test_points_are_differences_from_the_baseline(tmp_path):
  """A point is a variant's mean loss minus the baseline's."""
  path = tmp_path / "ablations/results.json"
  losses = {"transformer": [2.0, 2.1], "diff": [1.9, 1.8]}
  write_results(path, losses, baseline="transformer")

  # The baseline has no point.
  (point,) = first_page.project_points(folder=tmp_path)

  assert point.row == "diff"
  assert point.against == "transformer"
  assert point.estimate.value == pytest.approx(1.85 - 2.05)
  stored = json.loads(path.read_text())
  loss = "validation/loss"
  assert point.estimate == comparison.difference(stored, "diff", loss)
  config = stored["config"]
  tokens_per_step = config["train.batch_size"] * config["data.length"]
  assert point.tokens == config["train.steps"] * tokens_per_step


def test_variants_with_other_numbers_of_heads_are_left_out(tmp_path):
  losses = {
    "transformer": [2.0, 2.1],
    "diff": [1.9, 1.8],
    "diff,heads=4": [1.7, 1.6],
  }
  path = tmp_path / "ablations/results.json"
  write_results(path, losses, baseline="transformer")

  points = first_page.project_points(folder=tmp_path)

  (diff_point,) = points_of_row(points, "diff")
  assert diff_point.estimate.value == pytest.approx(1.85 - 2.05)


def test_the_points_of_variants_with_options_name_the_architectures(tmp_path):
  """In the experiment "tokens", "times=4" stands for 4 times the tokens."""
  losses = {"transformer_norm,times=4": [2.0, 2.1], "diff,times=4": [1.9, 1.8]}
  # Each variant is compared with transformer_norm at the same options.
  path = tmp_path / "tokens/results.json"
  write_results(path, losses, baseline="transformer_norm,*")

  (point,) = first_page.project_points(folder=tmp_path)

  assert point.row == "diff"
  assert point.against == "transformer_norm"


def test_published_losses_have_sources():
  published = json.loads((grid.FOLDER / "elsewhere.json").read_text())

  for source in published:
    assert source["link"].startswith("https://")
    assert source["note"]
    assert source["source"]


@pytest.mark.parametrize(
  "source, difference, tolerance",
  [
    pytest.param("diff-mlx, one seed", 0.035, 5e-4, id="one_run"),
    pytest.param("diff-mlx, four seeds", -0.016, 5e-4, id="four_runs"),
    pytest.param(
      "Multi-Token Attention",
      math.log(11.15 / 11.25),
      1e-4,
      id="from_perplexities",
    ),
  ],
)
def test_published_differences_are_those_of_their_source(
  source, difference, tolerance
):
  """A difference is the loss of DIFF minus the loss of the Transformer.

  A loss is the logarithm of a perplexity.
  """
  (point,) = points_of_row(points_of_source(source), "diff")

  assert point.estimate.value == pytest.approx(difference, abs=tolerance)


def test_only_published_results_of_several_runs_have_intervals():
  (four_runs,) = points_of_source("diff-mlx, four seeds")
  (one_run,) = points_of_source("diff-mlx, one seed")

  assert four_runs.estimate.low < four_runs.estimate.value
  assert four_runs.estimate.value < four_runs.estimate.high
  assert math.isnan(one_run.estimate.low)
  assert math.isnan(one_run.estimate.high)


def architectures_in_legend(axes):
  """Returns the legend's entries up to the first comma."""
  _, labels = axes.get_legend_handles_labels()
  return {label.partition(",")[0] for label in labels}


def test_each_panel_shows_its_architectures(panels):
  diff_panel, v2_panel = panels

  names = architectures_in_legend(diff_panel)
  assert {"DIFF", "Transformer with wide heads and head norm"} <= names
  assert "DIFF V2" in architectures_in_legend(v2_panel)


def test_every_published_source_is_named(panels):
  texts = []
  for axes in panels:
    texts += [text.get_text() for text in axes.texts]

  for point in first_page.published_points():
    assert point.source in texts


def test_every_point_is_in_the_frame():
  """The frame has the limits of the y-axis."""
  bottom, top = first_page.FRAME

  for point in [*first_page.project_points(), *first_page.published_points()]:
    assert bottom < point.estimate.value < top


def test_every_interval_that_leaves_the_frame_has_an_arrow(panels):
  """Arrows are markers at the lower or the upper edge of the frame."""
  bottom, top = first_page.FRAME
  intervals_below = []
  intervals_above = []
  for point in [*first_page.project_points(), *first_page.published_points()]:
    if point.estimate.low < bottom:
      intervals_below.append(point)
    if point.estimate.high > top:
      intervals_above.append(point)

  markers = []
  for axes in panels:
    markers += [line.get_marker() for line in axes.lines]

  downward_arrow = CARETDOWNBASE
  upward_arrow = CARETUPBASE
  assert markers.count(downward_arrow) == len(intervals_below)
  assert markers.count(upward_arrow) == len(intervals_above)
  # Otherwise, this test would check nothing.
  assert intervals_below or intervals_above
