"""Results as JSON and as a table."""

import json
import math
import re

import matplotlib.figure
import numpy as np
import pytest
import rich.console
from etils import epath

import experiments.plots
from diffjax import styles
from diffjax.config import UserError
from diffjax.evals.report import plots, results
from diffjax.evals.report.figures import compare, mean_of

MODELS = [{"name": "[one]"}, {"name": "two"}]


def found(models=MODELS):
  rng = np.random.default_rng(0)
  base = rng.normal(size=50)
  first = [mean_of("accuracy", base + 1, depth=0.5), mean_of("single", [2.0])]
  second = [mean_of("accuracy", base + 0.01 * rng.normal(size=50), depth=0.5)]
  rows = list(compare(first, second if len(models) > 1 else None))
  return results.finite(
    {
      "suite": "x",
      "settings": {"lengths": (1, 2)},
      "models": models,
      "figures": rows,
    }
  )


def test_json_has_no_nan_and_is_written_whole(tmp_path):
  path = epath.Path(tmp_path) / "x.json"
  results.write(path, found())
  text = path.read_text()
  assert "NaN" not in text and json.loads(text)["figures"][1]["low"] is None
  assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
  with pytest.raises(ValueError):
    results.write(path, {"value": math.nan})
  assert path.read_text() == text
  with pytest.raises(UserError, match="cannot write"):
    results.write(epath.Path(tmp_path) / "missing" / "x.json", {})


def shown(models):
  console = rich.console.Console(
    width=160, record=True, file=open("/dev/null", "w")
  )
  console.print(results.table(found(models)))
  return console.export_text(styles=True)


def test_the_table_has_both_models_and_their_difference():
  text = shown(MODELS)
  row = next(line for line in text.splitlines() if "accuracy" in line)
  assert "[one]" in text and "two" in text and "0.5" in row
  assert len(re.findall(r"(?<!\x1b)\[-?\d", row)) == 3
  assert "\x1b[1m" in row  # the difference excludes 0
  assert "single" in text and "–" in text
  assert "difference" not in shown(MODELS[:1])


def test_by_model_gives_each_model_its_own_numbers():
  (first, rows), (second, others) = plots.by_model(found())
  assert (first.name, second.name) == (
    "[one]",
    "two",
  ) and first.color != second.color
  assert (
    rows[0]["value"] == pytest.approx(others[0]["value"] + 1, abs=0.01)
    and len(rows) == 2
    and len(others) == 1
  )
  assert [
    style.name for style, _ in plots.by_model(found(MODELS[:1]), "single")
  ] == ["[one]"]


def test_an_architecture_keeps_its_name_and_colour_in_every_figure():
  models = [
    {"name": name, "attention": attention}
    for name, attention in (("a", "softmax"), ("b", "diff"), ("c", "diff"))
  ]
  (transformer, diff), (alone,), (same, other) = (
    plots.styles_of(models[:2]),
    plots.styles_of(models[1:2]),
    plots.styles_of(models[1:]),
  )
  assert (transformer.name, diff.name) == (
    "Transformer",
    "DIFF",
  ) and alone == diff
  assert (same.name, other.name) == (
    "b",
    "c",
  ) and same.color == diff.color != other.color, (
    "two of one kind go by their runs' names"
  )
  assert {
    experiments.plots.ROWS[row]
    for row in ("transformer", "diff", "diff_v2", "gated")
  } < set(styles.ARCHITECTURES.values())


def test_categories_are_not_joined_by_lines_and_have_intervals():
  axes = matplotlib.figure.Figure().subplots()
  rows = [
    {"value": 2.0, "low": 1.0, "high": 4.0},
    {"value": 3.0, "low": 3.0, "high": 3.0},
  ]
  plots.draw_points(axes, ["top-1", "median"], rows, styles.style("diff"), 0.1)
  (drawn,) = axes.containers
  assert drawn.lines[0].get_linestyle() == "None" and [
    label.get_text() for label in axes.get_xticklabels()
  ] == ["top-1", "median"]
  assert [
    segment[:, 1].tolist() for segment in drawn.lines[2][0].get_segments()
  ] == [[1.0, 4.0], [3.0, 3.0]]
