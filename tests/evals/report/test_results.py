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
from diffjax.config import UserError
from diffjax.evals.measurement import mean_of
from diffjax.evals.report import plots, results
from diffjax.evals.report.intervals import compare
from diffjax.model import variant_styles

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


TABLE = results.TableSpec(
  unit="prompts", summary={"depth": "mean"}, notes=("noise: the rest",)
)


def shown(found, spec=TABLE, width=80):
  """Returns what a terminal of this width shows, with its styles."""
  console = rich.console.Console(
    width=width, record=True, file=open("/dev/null", "w")
  )
  results.draw_summary(console, found, spec)
  return console.export_text(styles=True)


def grid(num_models):
  """Returns results over a grid, with long numbers and long names."""
  rng = np.random.default_rng(0)
  models = [
    {"name": f"/home/somebody/runs/an_experiment/model_{index} at step 19000"}
    for index in range(num_models)
  ]
  figures = []
  for _ in models:
    figures.append(
      [
        mean_of("answer (share)", -0.01234 * rng.normal(size=50), depth=depth)
        for depth in (0.0, 0.5, "mean")
      ]
    )
  rows = list(compare(*figures))
  return results.finite(
    {"suite": "x", "settings": {}, "models": models, "figures": rows}
  )


def test_one_model_is_shown_with_its_intervals_and_the_number_of_samples():
  found = grid(1)
  lines = shown(found).splitlines()
  assert lines[0] == "x: 50 prompts"
  assert lines[1] == f"model: {found['models'][0]['name']}"
  (row,) = [line for line in lines if "answer" in line]
  assert results.number(found["figures"][-1]) in row
  assert lines[-1] == "noise: the rest"


def test_two_models_are_shown_with_the_interval_of_their_difference():
  found = grid(2)
  lines = shown(found).splitlines()
  assert lines[1] == f"model: {found['models'][0]['name']}"
  assert lines[2] == f"against: {found['models'][1]['name']}"
  (row,) = [line for line in lines if "answer" in line]
  last = found["figures"][-1]
  assert f" {last['value']:.4g}  {last['against']['value']:.4g} " in row
  assert results.number(last["difference"]) in row
  assert "\x1b[1m" not in row


def test_a_difference_whose_interval_excludes_zero_is_bold():
  spec = results.TableSpec(unit="prompts")
  text = shown(found(MODELS), spec)
  (row,) = [line for line in text.splitlines() if "accuracy" in line]
  assert "\x1b[1m" in row
  assert "difference" not in shown(found(MODELS[:1]), spec)


def test_an_interval_without_a_bound_excludes_nothing():
  assert results.excludes_zero({"value": 2.0, "low": 1.0, "high": 3.0})
  assert not results.excludes_zero({"value": 1.0, "low": -1.0, "high": None})
  assert not results.excludes_zero({"value": 2.0, "low": 1.0, "high": None})


def test_a_suite_without_figures_for_the_summary_prints_its_heading():
  spec = results.TableSpec(unit="prompts", summary={"depth": "none"})
  assert shown(grid(2), spec).startswith("x\n")


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("name", ["answer", "cumulative NLL (nats/token)"])
def test_the_table_fits_80_columns(num_models, name):
  """Also with a long name of the figures, which is wrapped."""
  found = grid(num_models)
  for figure in found["figures"]:
    figure["name"] = name
  for spec in (TABLE, results.TableSpec(unit="prompts")):
    text = re.sub(r"\x1b\[\d*m", "", shown(found, spec))
    for line in text.splitlines():
      assert len(line) <= 80 or line.startswith(("model: ", "against: "))


def test_a_narrow_terminal_cuts_no_number():
  found = grid(2)
  text = shown(found, width=30)
  assert results.number(found["figures"][-1]["difference"]) in text


def test_the_number_of_samples_is_a_column_where_figures_differ_in_it():
  spec = results.TableSpec(unit="prompts")
  lines = shown(found(MODELS[:1]), spec).splitlines()
  assert lines[0] == "x"
  for name, units in (("accuracy", 50), ("single", 1)):
    (row,) = [line for line in lines if name in line]
    assert f" {units} " in row


def test_a_place_that_all_figures_share_is_in_the_heading():
  results_of_one_depth = grid(1)
  del results_of_one_depth["figures"][1:]
  spec = results.TableSpec(unit="prompts")
  lines = shown(results_of_one_depth, spec).splitlines()
  assert lines[0] == "x: 50 prompts, depth 0.0"
  assert "depth" not in "".join(lines[1:])


def test_columns_can_be_renamed_and_hidden():
  spec = results.TableSpec(unit="prompts", headers={"depth": "at"})
  assert "depth" not in shown(grid(1), spec) and " at " in shown(grid(1), spec)
  hidden = results.TableSpec(unit="prompts", headers={"depth": ""})
  assert "0.5" not in shown(grid(1), hidden)


def test_a_name_is_shown_in_the_first_of_its_rows():
  rows = shown(grid(1), results.TableSpec(unit="prompts")).splitlines()[-3:]
  assert rows[0].startswith("answer (share)") and " 0.0 " in rows[0]
  assert rows[1].startswith("               ") and " 0.5 " in rows[1]
  assert rows[2].startswith("               ") and " mean " in rows[2]


def test_the_file_has_the_whole_table(tmp_path):
  path = epath.Path(tmp_path) / "x.md"
  found = grid(2)
  results.write_table(path, found, TABLE)
  lines = path.read_text().splitlines()
  assert lines[0].startswith("# x")
  header, rule, *rows = [line for line in lines if line.startswith("|")]
  assert set(rule) == {"|", "-", " ", ":"} and len(rows) == 3
  for row, figure in zip(rows, found["figures"], strict=True):
    assert f"| {figure['at']['depth']} |" in row and "| 50 |" in row
    for interval in (figure, figure["against"], figure["difference"]):
      assert f"| {results.number(interval)} |" in row
    assert row.count("|") == header.count("|") == rule.count("|")
  with pytest.raises(UserError, match="cannot write"):
    results.write_table(epath.Path(tmp_path) / "no" / "x.md", found, TABLE)


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
  for row in ("diff", "diff_v2", "gated"):
    assert experiments.plots.ROWS[row] == variant_styles.style(row)
  assert experiments.plots.ROWS["transformer"] == variant_styles.style(
    "softmax"
  )


def test_categories_are_not_joined_by_lines_and_have_intervals():
  axes = matplotlib.figure.Figure().subplots()
  rows = [
    {"value": 2.0, "low": 1.0, "high": 4.0},
    {"value": 3.0, "low": 3.0, "high": 3.0},
  ]
  plots.draw_points(
    axes, ["top-1", "median"], rows, variant_styles.style("diff"), 0.1
  )
  (drawn,) = axes.containers
  assert drawn.lines[0].get_linestyle() == "None" and [
    label.get_text() for label in axes.get_xticklabels()
  ] == ["top-1", "median"]
  assert [
    segment[:, 1].tolist() for segment in drawn.lines[2][0].get_segments()
  ] == [[1.0, 4.0], [3.0, 3.0]]
