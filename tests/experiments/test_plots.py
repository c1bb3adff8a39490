"""Figures: every row has a name and a colour of its own, intervals are drawn, and the files are the same every time."""

import json
import shutil

import matplotlib.category
import numpy as np
import pytest
from matplotlib.figure import Figure

from diffjax.config import UserError
from experiments import draw, grid, plots, results

# Rows that stand in one legend
TOGETHER = (
  "transformer",
  "transformer_wide",
  "transformer_norm",
  "diff",
  "diff_without_norm",
  "diff_lambda_zero",
  "diff_v2",
  "gated",
)


@pytest.mark.parametrize(
  "name", sorted({*grid.names()} - {"throughput"})
)  # whose variants are shapes
def test_every_row_has_a_style(name):
  variants = {
    variant
    for each in grid.experiments_of(name)
    for chosen in each.grids.values()
    for variant in chosen.variants
  }
  names = {variant: plots.style(variant).name for variant in variants}
  assert len(set(names.values())) == len(names) and not any(
    "_" in words.replace("λ_init", "") for words in names.values()
  )


def test_rows_that_stand_together_can_be_told_apart():
  """By their colours; and the Transformer, DIFF and V2 by their markers, too."""
  styles = [plots.ROWS[row] for row in TOGETHER]
  assert (
    len({style.color for style in styles})
    == len({style.name for style in styles})
    == len(TOGETHER)
  )
  main = [plots.ROWS[row] for row in ("transformer", "diff", "diff_v2")]
  assert len({style.marker for style in main}) == 3
  assert (
    plots.style("diff,size=1b,heads=4").name == "DIFF, size 1b, 4 heads"
    and plots.style("diff,heads=4").color == plots.style("diff").color
  )


def test_unknown_rows_get_the_next_free_look():
  """Beside rows that have one, and the same when rows follow."""
  unknown = [f"row {index}" for index in range(40)]
  rows = ["diff", *unknown, "transformer"]
  found = plots.styles_of(rows)
  assert list(found) == rows and found["diff"] == plots.ROWS["diff"]
  looks = {(each.color, each.marker) for each in found.values()}
  assert len(looks) == len(rows)
  first = [found[name].color for name in ("diff", "transformer", *unknown[:7])]
  assert len(set(first)) == 9, "colours before markers"
  further = plots.styles_of([*rows, "one more"])
  assert {name: further[name] for name in rows} == found


@pytest.mark.parametrize(
  "variant, name",
  [
    ("lambda_init=0.2,head_norm=True", "lambda_init=0.2, head norm True"),
    ("mine", "mine"),
    ("diff,wide", "DIFF, wide"),
    ("mine,heads=4", "mine, 4 heads"),
    ("a$b$", r"a\$b\$"),
    ("_a", " _a"),
  ],
)
def test_any_row_has_a_name(variant, name):
  assert plots.style(variant).name == name


def test_rates_of_rows_without_one_are_those_of_their_configs(tmp_path):
  """Any number of other settings is drawn."""
  runs = []
  for index in range(6):
    run = {
      "variant": f"mine,a_{index}",
      "config": {"optimizer.learning_rate": 0.25},
      "results": {"loss": float(index)},
    }
    runs.append(run)
  runs.append({**runs[0], "variant": "diff,rate=0.5"})
  figure = plots.over_rates({"config": {}, "runs": runs}, "loss", "loss")
  assert plots.save(figure, tmp_path) == ["plot.png", "plot.svg"]
  means = figure.axes[0].lines[::2]
  points = [(*line.get_xdata(), *line.get_ydata()) for line in means]
  assert points == [(0.25, index) for index in range(6)] + [(0.5, 0.0)]


def test_means_and_intervals_are_drawn():
  """One row's means with their intervals, at every x; no mean where a run lacks the number, and no interval of one run."""
  rows = np.random.default_rng(0).normal(3, 1, (5, 4))
  axes = Figure().subplots()
  plots.over_seeds(
    axes,
    [1, 2, 4, 8],
    {"diff": rows, "diff_v2": rows[:1], "gated": [[1.0, None, 2.0, 3.0]] * 2},
    suffix=", after",
  )
  drawn = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
  assert list(drawn) == [
    "DIFF, after",
    "DIFF V2, after",
    "Gated attention, after",
  ]
  bounds = lambda name: np.array(
    [
      segment[:, 1]
      for segment in drawn[name].lines[2][0].get_segments()
      if len(segment)
    ]
  )
  np.testing.assert_allclose(
    drawn["DIFF, after"].lines[0].get_ydata(), rows.mean(axis=0)
  )
  np.testing.assert_allclose(
    bounds("DIFF, after"),
    [results.mean_interval(column)[1:] for column in rows.T],
  )
  assert len(bounds("DIFF V2, after")) == 0
  np.testing.assert_array_equal(
    drawn["Gated attention, after"].lines[0].get_ydata(),
    [1.0, np.nan, 2.0, 3.0],
  )
  low, high = axes.get_ylim()
  assert (
    low < bounds("DIFF, after").min() and bounds("DIFF, after").max() < high
  ), "the axes hold them"


def test_drawing_again(tmp_path, monkeypatch):
  """Of the results alone, without a run; the results stay as they are, and so do the files. A summary that reads otherwise is renewed."""
  monkeypatch.setattr(grid, "FOLDER", tmp_path)
  monkeypatch.setattr(grid, "names", lambda: ["ablations", "scaling"])
  source = draw.pathlib.Path(draw.__file__).parent
  for name in ("ablations", "scaling", "scaling/again"):
    (tmp_path / name).mkdir()
    shutil.copy(
      source / name.partition("/")[0] / "results.json", tmp_path / name
    )
  path = tmp_path / "scaling/again/results.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), "summary": []}))
  before = (tmp_path / "scaling/results.json").read_bytes()
  draw.main([])
  files = [
    f"{name}/{file}"
    for name in ("ablations", "scaling", "scaling/again")
    for file in ("table.md", "plot.png", "plot.svg")
  ]
  first = {file: (tmp_path / file).read_bytes() for file in files}
  assert (tmp_path / "scaling/results.json").read_bytes() == before and len(
    json.loads(path.read_text())["summary"]
  ) == 6
  assert (
    first["scaling/table.md"]
    == first["scaling/again/table.md"]
    == (source / "scaling/table.md").read_bytes()
  )
  assert b"<dc:date>" not in first["ablations/plot.svg"]
  draw.main(["ablations"])
  assert all(
    (tmp_path / file).read_bytes() == content for file, content in first.items()
  )
  with pytest.raises(
    UserError,
    match="there is no experiment 'nothing'; there are ablations, scaling",
  ):
    draw.main(["nothing"])


@pytest.mark.parametrize(
  "folder",
  [path.parent for path in sorted(grid.FOLDER.rglob("results.json"))],
  ids=lambda folder: folder.name,
)
def test_committed_results_have_figures(folder):
  assert all(
    (folder / file).stat().st_size > 20_000 for file in ("plot.png", "plot.svg")
  )


@pytest.mark.parametrize(
  "folder",
  [path.parent for path in sorted(grid.FOLDER.rglob("results.json"))],
  ids=lambda folder: folder.name,
)
def test_axes_say_what_they_show(folder):
  """Each has a label, or words at its ticks; axes that share one may leave it to the first. Categories are not joined by lines."""
  found = results.read(folder / "results.json", "experiment", "grid", "runs")
  figure = grid.load(found["experiment"], found["grid"]).plot(found)
  for axes in (axes for axes in figure.axes if axes.axison):
    named = axes.get_ylabel() or any(
      label.get_text()[:1].isalpha() for label in axes.get_yticklabels()
    )
    assert axes.get_xlabel() and (
      named or len(axes.get_shared_y_axes().get_siblings(axes)) > 1
    )
    if isinstance(
      axes.xaxis.get_major_locator(), matplotlib.category.StrCategoryLocator
    ) and not axes.get_xlabel().startswith("bits"):
      assert all(
        line.get_linestyle() == "None"
        for line in axes.lines
        if len(line.get_xdata()) > 1
      )
