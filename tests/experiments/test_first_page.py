"""The figure of experiments/README.md."""

import json
import math

import pytest
from matplotlib.markers import CARETDOWNBASE, CARETUPBASE

from experiments import comparison, first_page, grid, results

LOSS = "validation/loss"


@pytest.fixture(scope="module")
def ablations():
  """The committed results of ablations."""
  return json.loads((grid.FOLDER / "ablations/results.json").read_text())


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


def test_points_are_differences_from_the_baseline(ablations, tmp_path):
  # The directory stands for the folder of all experiments.
  results.write(tmp_path / "ablations/results.json", ablations)

  points = first_page.project_points(tmp_path)

  (point,) = points_of_row(points, "diff")
  assert point.against == "transformer"
  assert point.estimate == comparison.difference(ablations, "diff", LOSS)
  # 600 steps of 16 rows of 256 tokens.
  assert point.tokens == 600 * 16 * 256
  # The baseline itself has no point.
  assert points_of_row(points, "transformer") == []


def test_variants_with_other_numbers_of_heads_are_left_out(ablations, tmp_path):
  # The committed results have such a variant.
  assert "diff,heads=4" in comparison.variant_names(ablations)
  results.write(tmp_path / "ablations/results.json", ablations)

  points = first_page.project_points(tmp_path)

  # Only "diff" itself has a point.
  assert len(points_of_row(points, "diff")) == 1


def test_points_of_an_experiment_appear_with_its_results(ablations, tmp_path):
  """The experiment "tokens" trains on more tokens.

  For example, its variant "diff,times=4" is trained on 4 times as many.
  """
  results.write(tmp_path / "ablations/results.json", ablations)
  points_before = first_page.project_points(tmp_path)
  runs = []
  for run in ablations["runs"]:
    if run["variant"] in ("diff", "transformer_norm"):
      runs.append({**run, "variant": f"{run['variant']},times=4"})
  tokens = {**ablations, "baseline": "transformer_norm,*", "runs": runs}
  results.write(tmp_path / "tokens/results.json", tokens)

  points = first_page.project_points(tmp_path)

  # DIFF is compared with transformer_norm, the baseline of "tokens".
  (added,) = set(points) - set(points_before)
  assert added.row == "diff"
  assert added.against == "transformer_norm"


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
  """A difference is the loss of DIFF − that of the Transformer.

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
  num_below = 0
  num_above = 0
  for point in [*first_page.project_points(), *first_page.published_points()]:
    if point.estimate.low < bottom:
      num_below += 1
    if point.estimate.high > top:
      num_above += 1

  markers = []
  for axes in panels:
    markers += [line.get_marker() for line in axes.lines]

  assert markers.count(CARETDOWNBASE) == num_below
  assert markers.count(CARETUPBASE) == num_above
  assert num_below + num_above > 0
