"""The first page's figure: its points are the results that exist, with their intervals, and other people's, with their sources."""

import copy
import json
import math

import pytest
from matplotlib.markers import CARETDOWNBASE, CARETUPBASE

from experiments import first_page, grid, results

LOSS = "validation/loss"


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder of experiments with the committed results of ablations alone."""
  stored = json.loads((grid.FOLDER / "ablations/results.json").read_text())
  results.write(tmp_path / "ablations/results.json", stored)
  monkeypatch.setattr(first_page, "FOLDER", tmp_path)
  return tmp_path


def test_points_are_differences_with_intervals(folder):
  stored = json.loads((folder / "ablations/results.json").read_text())
  points = {point.row: point for point in first_page.ours()}
  assert points["diff"][4:7] == results.difference(stored, "diff", LOSS), (
    "not those of other numbers of heads"
  )
  assert (
    points["diff"].tokens == 600 * 16 * 256
    and points["diff"].against == "transformer"
    and "transformer" not in points
  )


def test_new_results_join(folder):
  """A folder that has none yet is passed over; once it has, its points are there, compared with its own baseline."""
  before = first_page.ours()
  stored = json.loads((folder / "ablations/results.json").read_text())
  later = copy.deepcopy({**stored, "baseline": "transformer_norm,*"})
  later["runs"] = [
    {**run, "variant": f"{run['variant']},times=4"}
    for run in stored["runs"]
    if "," not in run["variant"]
  ]
  results.write(folder / "tokens/results.json", later)
  added = [point for point in first_page.ours() if point not in before]
  assert {point.against for point in added} == {
    "transformer_norm"
  } and "diff" in {point.row for point in added}


def test_elsewhere_has_sources_and_intervals_only_where_there_are_runs():
  stored = json.loads((grid.FOLDER / "elsewhere.json").read_text())
  assert all(
    source["link"].startswith("https://")
    and source["note"]
    and source["source"]
    for source in stored
  )
  points = {
    (point.source, point.row): point for point in first_page.elsewhere()
  }
  four, one = (
    points["diff-mlx, four seeds", "diff"],
    points["diff-mlx, one seed", "diff"],
  )
  assert four.low < four.difference < four.high and math.isnan(one.low)
  assert one.difference == pytest.approx(
    0.035, abs=5e-4
  ) and four.difference == pytest.approx(-0.016, abs=5e-4)  # as they say
  assert points["Multi-Token Attention", "diff"].difference == pytest.approx(
    math.log(11.15 / 11.25), abs=1e-4
  )


def test_every_point_is_drawn():
  """Both panels, each with its rows."""
  upper, lower = first_page.draw().axes
  shown = lambda axes: {
    label.split(",")[0] for label in axes.get_legend_handles_labels()[1]
  }
  assert {"DIFF", "Transformer with wide heads and head norm"} <= shown(
    upper
  ) and "DIFF V2" in shown(lower)
  texts = {text.get_text() for axes in (upper, lower) for text in axes.texts}
  assert {point.source for point in first_page.elsewhere()} <= texts


def test_every_point_lies_in_the_frame_and_what_leaves_it_has_an_arrow():
  points, (low, high) = (
    first_page.ours() + first_page.elsewhere(),
    first_page._FRAME,
  )
  assert all(low < point.difference < high for point in points)
  arrows = [
    line
    for axes in first_page.draw().axes
    for line in axes.lines
    if line.get_marker() in (CARETDOWNBASE, CARETUPBASE)
  ]
  assert (
    len(arrows)
    == sum((point.low < low) + (point.high > high) for point in points)
    > 0
  )
