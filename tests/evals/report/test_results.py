"""Results as JSON and as a table."""

import io
import json
import math
from typing import Any

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


def make_results(num_models: int) -> dict[str, Any]:
  """Returns results of "accuracy" and "single".

  The second of two models has no "single".
  """
  rng = np.random.default_rng(0)
  base = rng.normal(size=50)
  first = [mean_of("accuracy", base + 1, depth=0.5), mean_of("single", [2.0])]
  second = None
  if num_models == 2:
    noise = 0.01 * rng.normal(size=50)
    second = [mean_of("accuracy", base + noise, depth=0.5)]
  return results.finite(
    {
      "suite": "x",
      "settings": {"lengths": (1, 2)},
      "models": MODELS[:num_models],
      "figures": list(compare(first, second)),
    }
  )


def make_depth_results(num_models: int) -> dict[str, Any]:
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


def draw_summary(
  suite_results: dict[str, Any],
  spec: results.TableSpec = TABLE,
  width: int = 80,
  *,
  styles: bool = True,
) -> str:
  """Returns what a terminal of this width shows, if wanted with its styles."""
  console = rich.console.Console(width=width, record=True, file=io.StringIO())
  results.draw_summary(console, suite_results, spec)
  return console.export_text(styles=styles)


def mean_over_depths(suite_results: dict[str, Any]) -> dict[str, Any]:
  """Returns the only figure with the depth "mean"."""
  figures = suite_results["figures"]
  (mean,) = [figure for figure in figures if figure["at"]["depth"] == "mean"]
  return mean


def line_with(text: str, lines: list[str]) -> str:
  """Returns the only line that contains a text."""
  (line,) = [line for line in lines if text in line]
  return line


def test_nan_is_null_in_json(tmp_path):
  """The bounds of the second figure are NaN, because it has only one unit."""
  path = epath.Path(tmp_path) / "x.json"

  results.write(path, make_results(num_models=2))

  text = path.read_text()
  assert "NaN" not in text
  _, single = json.loads(text)["figures"]
  assert single["low"] is None


def test_a_file_that_cannot_be_written_whole_is_not_replaced(tmp_path):
  """NaN is no JSON, so the second result cannot be written."""
  path = epath.Path(tmp_path) / "x.json"
  results.write(path, {"value": 1.0})
  text = path.read_text()

  with pytest.raises(ValueError):
    results.write(path, {"value": math.nan})

  assert path.read_text() == text
  # No temporary file remains.
  assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_missing_directory_of_results_raises(tmp_path):
  directory = epath.Path(tmp_path) / "missing"

  with pytest.raises(UserError, match="cannot write"):
    results.write(directory / "x.json", {})


def test_a_missing_directory_of_a_table_raises(tmp_path):
  directory = epath.Path(tmp_path) / "missing"
  suite_results = make_depth_results(num_models=2)

  with pytest.raises(UserError, match="cannot write"):
    results.write_table(directory / "x.md", suite_results, TABLE)


def test_one_model_is_shown_with_its_interval():
  spec = results.TableSpec(unit="prompts", summary={"depth": "mean"})
  suite_results = make_depth_results(num_models=1)

  lines = draw_summary(suite_results, spec).splitlines()

  # A number with its interval, such as "0.5 [0.4, 0.6]".
  number = results.number(mean_over_depths(suite_results))
  assert number in line_with("answer", lines)


def test_notes_are_below_the_table():
  spec = results.TableSpec(unit="prompts", notes=("noise: the rest",))

  text = draw_summary(make_depth_results(num_models=1), spec)

  assert text.endswith("\nnoise: the rest\n")


def test_the_table_begins_with_the_suite_and_the_models():
  suite_results = make_depth_results(num_models=2)
  first_model, second_model = suite_results["models"]

  lines = draw_summary(suite_results).splitlines()

  heading, first_line, second_line, *_ = lines
  assert heading == "x: 50 prompts"
  assert first_line == f"model: {first_model['name']}"
  assert second_line == f"against: {second_model['name']}"


def test_two_models_are_shown_with_the_interval_of_their_difference():
  """The summary shows the only figure with the depth "mean"."""
  spec = results.TableSpec(unit="prompts", summary={"depth": "mean"})
  suite_results = make_depth_results(num_models=2)

  lines = draw_summary(suite_results, spec).splitlines()

  row = line_with("answer", lines)
  mean = mean_over_depths(suite_results)
  value = f"{mean['value']:.4g}"
  against = f"{mean['against']['value']:.4g}"
  assert value in row.split()
  assert against in row.split()
  # A number with its interval, such as "0.5 [0.4, 0.6]".
  assert results.number(mean["difference"]) in row


def test_a_difference_whose_interval_excludes_zero_is_bold():
  """The accuracies differ clearly. The answers at several depths do not."""
  spec = results.TableSpec(unit="prompts")

  accuracies = draw_summary(make_results(num_models=2), spec).splitlines()
  answers = draw_summary(make_depth_results(num_models=2)).splitlines()

  assert BOLD in line_with("accuracy", accuracies)
  assert BOLD not in line_with("answer", answers)


def test_one_model_has_no_column_of_differences():
  spec = results.TableSpec(unit="prompts")

  assert "difference" not in draw_summary(make_results(num_models=1), spec)


def test_an_interval_without_a_bound_excludes_nothing():
  assert results.excludes_zero({"value": 2.0, "low": 1.0, "high": 3.0})
  assert not results.excludes_zero({"value": 1.0, "low": -1.0, "high": None})
  assert not results.excludes_zero({"value": 2.0, "low": 1.0, "high": None})


def test_a_suite_without_figures_for_the_summary_prints_its_heading():
  """No figure of the suite "x" has the depth "none"."""
  spec = results.TableSpec(unit="prompts", summary={"depth": "none"})

  text = draw_summary(make_depth_results(num_models=2), spec)

  assert text.startswith("x\n")


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("name", ["answer", "cumulative NLL (nats/token)"])
@pytest.mark.parametrize(
  "spec",
  [
    pytest.param(TABLE, id="mean over depths"),
    pytest.param(results.TableSpec(unit="prompts"), id="all depths"),
  ],
)
def test_the_table_fits_80_columns(num_models, name, spec):
  """Long names of figures are wrapped. The paths of models are not."""
  suite_results = make_depth_results(num_models)
  for figure in suite_results["figures"]:
    figure["name"] = name

  text = draw_summary(suite_results, spec, width=80, styles=False)

  for line in text.splitlines():
    is_path = line.startswith(("model: ", "against: "))
    assert is_path or len(line) <= 80


def test_a_narrow_terminal_cuts_no_number():
  suite_results = make_depth_results(num_models=2)

  text = draw_summary(suite_results, width=30)

  difference = suite_results["figures"][-1]["difference"]
  assert results.number(difference) in text


def test_the_number_of_samples_is_a_column_where_figures_differ_in_it():
  """The figure "accuracy" is of 50 prompts, and "single" is of one."""
  spec = results.TableSpec(unit="prompts")

  lines = draw_summary(make_results(num_models=1), spec).splitlines()

  # The heading is the name of the suite only.
  assert lines[0] == "x"
  assert " 50 " in line_with("accuracy", lines)
  assert " 1 " in line_with("single", lines)


def test_a_setting_that_all_figures_share_is_in_the_heading():
  """Of three figures, only the first one is left. Its depth is 0.0."""
  results_of_one_depth = make_depth_results(num_models=1)
  del results_of_one_depth["figures"][1:]
  spec = results.TableSpec(unit="prompts")

  lines = draw_summary(results_of_one_depth, spec).splitlines()

  assert lines[0] == "x: 50 prompts, depth 0.0"
  assert "depth" not in "".join(lines[1:])


def test_a_column_can_be_renamed():
  spec = results.TableSpec(unit="prompts", headers={"depth": "at"})

  text = draw_summary(make_depth_results(num_models=1), spec)

  assert "depth" not in text
  assert " at " in text


def test_a_column_can_be_hidden():
  """An empty header hides the column of depths. One depth is 0.5."""
  spec = results.TableSpec(unit="prompts", headers={"depth": ""})

  text = draw_summary(make_depth_results(num_models=1), spec)

  assert "0.5" not in text


def test_a_name_is_shown_only_in_its_first_row():
  """The three rows are the depths 0.0 and 0.5, and their mean."""
  spec = results.TableSpec(unit="prompts")

  text = draw_summary(make_depth_results(num_models=1), spec)

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
  """The printed table has only the mean over depths.

  The Markdown table in the file has a row for each depth, of 50 prompts.
  """
  path = epath.Path(tmp_path) / "x.md"
  suite_results = make_depth_results(num_models=2)

  results.write_table(path, suite_results, TABLE)

  rows = [
    "| figure | depth | prompts | model | against | difference |",
    "| --- | ---: | ---: | ---: | ---: | ---: |",
  ]
  for figure in suite_results["figures"]:
    depth = figure["at"]["depth"]
    # Numbers with their intervals, such as "0.5 [0.4, 0.6]".
    model = results.number(figure)
    against = results.number(figure["against"])
    difference = results.number(figure["difference"])
    rows.append(
      f"| answer (share) | {depth} | 50 | {model} | {against} | {difference} |"
    )
  table = "\n".join(rows)
  text = path.read_text()
  assert text.startswith("# x\n")
  assert f"\n\n{table}\n\n" in text


def test_by_model_gives_the_style_and_the_figures_of_each_model():
  """The accuracy of the model "[one]" is 1 higher than for the model "two"."""
  first, second = plots.by_model(make_results(num_models=2))

  first_style, (first_accuracy, single) = first
  second_style, (second_accuracy,) = second
  assert first_style.name == "[one]"
  assert second_style.name == "two"
  assert first_style.color != second_style.color
  # The second model has no figure "single".
  assert single["name"] == "single"
  # The values differ by 1, except for noise of 0.01.
  difference = first_accuracy["value"] - second_accuracy["value"]
  assert difference == pytest.approx(1, abs=0.01)


def test_by_model_can_select_figures_by_name():
  """The model "[one]" has the figures "accuracy" and "single"."""
  suite_results = make_results(num_models=1)

  ((style, figures),) = plots.by_model(suite_results, name="single")

  assert style.name == "[one]"
  assert [figure["name"] for figure in figures] == ["single"]


def test_an_architecture_has_the_same_style_beside_any_other():
  """A style is the name and the color of a model in plots."""
  transformer = {"name": "a", "attention": "softmax"}
  diff = {"name": "b", "attention": "diff"}

  transformer_style, diff_style = plots.styles_of([transformer, diff])
  assert transformer_style.name == "Transformer"
  assert diff_style.name == "DIFF"
  assert plots.styles_of([diff]) == [diff_style]


def test_two_models_of_an_architecture_have_the_names_of_their_runs():
  """Both would be named "DIFF" otherwise. The second one gets another color."""
  diff = {"name": "b", "attention": "diff"}
  other_diff = {"name": "c", "attention": "diff"}

  style, other_style = plots.styles_of([diff, other_diff])

  assert style.name == "b"
  assert other_style.name == "c"
  (diff_style,) = plots.styles_of([diff])
  assert style.color == diff_style.color
  assert other_style.color != diff_style.color


def test_the_experiments_have_the_same_styles():
  for row in ("diff", "diff_v2", "gated"):
    assert experiments.plots.ROWS[row] == variant_styles.style(row)
  assert experiments.plots.ROWS["transformer"] == variant_styles.style(
    "softmax"
  )


def test_categories_are_not_joined_by_lines_and_have_intervals():
  """A line would suggest values between "top-1" and "median"."""
  axes = matplotlib.figure.Figure().subplots()
  rows = [
    {"value": 2.0, "low": 1.0, "high": 4.0},
    {"value": 3.0, "low": 3.0, "high": 3.0},
  ]
  categories = ["top-1", "median"]
  style = variant_styles.style("diff")

  plots.draw_points(axes, categories, rows, style, shift=0.1)

  labels = [label.get_text() for label in axes.get_xticklabels()]
  assert labels == ["top-1", "median"]
  (errorbar,) = axes.containers
  points, _, (intervals,) = errorbar.lines
  assert points.get_linestyle() == "None"
  # An interval is a line with two points (x, y), its bounds.
  first_interval, second_interval = intervals.get_segments()
  _, heights = first_interval.T
  assert heights.tolist() == [1.0, 4.0]
  _, heights = second_interval.T
  assert heights.tolist() == [3.0, 3.0]
