"""Results as JSON and as a table."""

import io
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

# The escape sequence that begins bold text.
BOLD = "\x1b[1m"

MODELS = [{"name": "[one]"}, {"name": "two"}]

TABLE = results.TableSpec(
  unit="prompts", summary={"depth": "mean"}, notes=("noise: the rest",)
)


def suite_results(models=MODELS):
  """Returns results of which the second model has only the first figure."""
  rng = np.random.default_rng(0)
  base = rng.normal(size=50)
  first = [mean_of("accuracy", base + 1, depth=0.5), mean_of("single", [2.0])]
  noise = 0.01 * rng.normal(size=50)
  second = None
  if len(models) > 1:
    second = [mean_of("accuracy", base + noise, depth=0.5)]
  return results.finite(
    {
      "suite": "x",
      "settings": {"lengths": (1, 2)},
      "models": models,
      "figures": list(compare(first, second)),
    }
  )


def grid(num_models):
  """Returns results at three depths, with long numbers and long names."""
  rng = np.random.default_rng(0)
  models = []
  measurements_of_models = []
  for index in range(num_models):
    name = f"/home/somebody/runs/an_experiment/model_{index} at step 19000"
    models.append({"name": name})
    measurements = []
    for depth in (0.0, 0.5, "mean"):
      values = -0.01234 * rng.normal(size=50)
      measurements.append(mean_of("answer (share)", values, depth=depth))
    measurements_of_models.append(measurements)
  return results.finite(
    {
      "suite": "x",
      "settings": {},
      "models": models,
      "figures": list(compare(*measurements_of_models)),
    }
  )


def summary(suite_results, spec=TABLE, width=80):
  """Returns what a terminal of this width shows, with its styles."""
  console = rich.console.Console(width=width, record=True, file=io.StringIO())
  results.draw_summary(console, suite_results, spec)
  return console.export_text(styles=True)


def line_with(text, lines):
  """Returns the only line that contains a text."""
  (line,) = [line for line in lines if text in line]
  return line


def test_json_has_no_nan_and_is_written_whole(tmp_path):
  path = epath.Path(tmp_path) / "x.json"
  results.write(path, suite_results())
  text = path.read_text()
  assert "NaN" not in text
  single = json.loads(text)["figures"][1]
  assert single["low"] is None
  assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
  with pytest.raises(ValueError):
    results.write(path, {"value": math.nan})
  assert path.read_text() == text
  with pytest.raises(UserError, match="cannot write"):
    results.write(epath.Path(tmp_path) / "missing" / "x.json", {})


def test_one_model_is_shown_with_its_intervals_and_the_number_of_samples():
  found = grid(1)
  lines = summary(found).splitlines()
  assert lines[0] == "x: 50 prompts"
  assert lines[1] == f"model: {found['models'][0]['name']}"
  mean = found["figures"][-1]
  assert results.number(mean) in line_with("answer", lines)
  assert lines[-1] == "noise: the rest"


def test_two_models_are_shown_with_the_interval_of_their_difference():
  found = grid(2)
  lines = summary(found).splitlines()
  assert lines[1] == f"model: {found['models'][0]['name']}"
  assert lines[2] == f"against: {found['models'][1]['name']}"
  row = line_with("answer", lines)
  mean = found["figures"][-1]
  assert f" {mean['value']:.4g}  {mean['against']['value']:.4g} " in row
  assert results.number(mean["difference"]) in row
  assert BOLD not in row


def test_a_difference_whose_interval_excludes_zero_is_bold():
  spec = results.TableSpec(unit="prompts")
  lines = summary(suite_results(), spec).splitlines()
  assert BOLD in line_with("accuracy", lines)
  assert "difference" not in summary(suite_results(MODELS[:1]), spec)


def test_an_interval_without_a_bound_excludes_nothing():
  assert results.excludes_zero({"value": 2.0, "low": 1.0, "high": 3.0})
  assert not results.excludes_zero({"value": 1.0, "low": -1.0, "high": None})
  assert not results.excludes_zero({"value": 2.0, "low": 1.0, "high": None})


def test_a_suite_without_figures_for_the_summary_prints_its_heading():
  spec = results.TableSpec(unit="prompts", summary={"depth": "none"})
  assert summary(grid(2), spec).startswith("x\n")


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("name", ["answer", "cumulative NLL (nats/token)"])
def test_the_table_fits_80_columns(num_models, name):
  """Also with a long name of the figures, which is wrapped."""
  found = grid(num_models)
  for figure in found["figures"]:
    figure["name"] = name
  for spec in (TABLE, results.TableSpec(unit="prompts")):
    text = re.sub(r"\x1b\[\d*m", "", summary(found, spec))
    for line in text.splitlines():
      assert len(line) <= 80 or line.startswith(("model: ", "against: "))


def test_a_narrow_terminal_cuts_no_number():
  found = grid(2)
  text = summary(found, width=30)
  assert results.number(found["figures"][-1]["difference"]) in text


def test_the_number_of_samples_is_a_column_where_figures_differ_in_it():
  spec = results.TableSpec(unit="prompts")
  lines = summary(suite_results(MODELS[:1]), spec).splitlines()
  assert lines[0] == "x"
  assert " 50 " in line_with("accuracy", lines)
  assert " 1 " in line_with("single", lines)


def test_a_setting_that_all_figures_share_is_in_the_heading():
  results_of_one_depth = grid(1)
  del results_of_one_depth["figures"][1:]
  spec = results.TableSpec(unit="prompts")
  lines = summary(results_of_one_depth, spec).splitlines()
  assert lines[0] == "x: 50 prompts, depth 0.0"
  assert "depth" not in "".join(lines[1:])


def test_columns_can_be_renamed_and_hidden():
  renamed = results.TableSpec(unit="prompts", headers={"depth": "at"})
  text = summary(grid(1), renamed)
  assert "depth" not in text
  assert " at " in text
  hidden = results.TableSpec(unit="prompts", headers={"depth": ""})
  assert "0.5" not in summary(grid(1), hidden)


def test_a_name_is_shown_in_the_first_of_its_rows():
  text = summary(grid(1), results.TableSpec(unit="prompts"))
  first, second, third = text.splitlines()[-3:]
  name = "answer (share)"
  blanks = " " * len(name)
  assert first.startswith(name)
  assert " 0.0 " in first
  assert second.startswith(blanks)
  assert " 0.5 " in second
  assert third.startswith(blanks)
  assert " mean " in third


def test_the_file_has_the_whole_table(tmp_path):
  path = epath.Path(tmp_path) / "x.md"
  found = grid(2)
  results.write_table(path, found, TABLE)
  lines = path.read_text().splitlines()
  assert lines[0].startswith("# x")
  header, rule, *rows = [line for line in lines if line.startswith("|")]
  assert set(rule) == {"|", "-", " ", ":"}
  assert len(rows) == 3
  for row, figure in zip(rows, found["figures"], strict=True):
    assert f"| {figure['at']['depth']} |" in row
    assert "| 50 |" in row
    for interval in (figure, figure["against"], figure["difference"]):
      assert f"| {results.number(interval)} |" in row
    assert row.count("|") == header.count("|") == rule.count("|")
  with pytest.raises(UserError, match="cannot write"):
    results.write_table(epath.Path(tmp_path) / "no" / "x.md", found, TABLE)


def test_by_model_gives_each_model_its_own_numbers():
  first, second = plots.by_model(suite_results())
  first_style, first_figures = first
  second_style, second_figures = second
  assert first_style.name == "[one]"
  assert second_style.name == "two"
  assert first_style.color != second_style.color
  assert len(first_figures) == 2
  # The second model has no "single".
  (accuracy,) = second_figures
  assert first_figures[0]["value"] == pytest.approx(
    accuracy["value"] + 1, abs=0.01
  )


def test_by_model_of_one_model():
  results_of_one = suite_results(MODELS[:1])
  ((style, figures),) = plots.by_model(results_of_one, "single")
  assert style.name == "[one]"
  assert [figure["name"] for figure in figures] == ["single"]


def test_an_architecture_keeps_its_name_and_colour_in_every_figure():
  transformer = {"name": "a", "attention": "softmax"}
  diff = {"name": "b", "attention": "diff"}
  other_diff = {"name": "c", "attention": "diff"}
  transformer_style, diff_style = plots.styles_of([transformer, diff])
  assert transformer_style.name == "Transformer"
  assert diff_style.name == "DIFF"
  assert plots.styles_of([diff]) == [diff_style]

  # Two of one kind have the names of their runs.
  style, other_style = plots.styles_of([diff, other_diff])
  assert style.name == "b"
  assert other_style.name == "c"
  assert style.color == diff_style.color
  assert other_style.color != diff_style.color

  # The experiments have the same styles.
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
  categories = ["top-1", "median"]
  style = variant_styles.style("diff")
  plots.draw_points(axes, categories, rows, style, shift=0.1)
  labels = [label.get_text() for label in axes.get_xticklabels()]
  assert labels == categories

  (container,) = axes.containers
  points, _, (bars,) = container.lines
  assert points.get_linestyle() == "None"
  heights = [segment[:, 1].tolist() for segment in bars.get_segments()]
  assert heights == [[1.0, 4.0], [3.0, 3.0]]
