"""The markdown tables of an experiment's results."""

from __future__ import annotations

import collections
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import comparison
from experiments.grid import Experiment

# The maximum number of characters of an error in a cell, and below the tables.
_MAX_CELL_WIDTH = 80
_MAX_LINE_WIDTH = 400

# The cells of a column, by variant.
_Column = Mapping[str, str]


def markdown(experiment: Experiment, results: Mapping[str, Any]) -> str:
  """Returns the tables of an experiment's results.

  1. A row per variant: each metric's mean ± standard deviation over seeds. With
     several seeds, the last column is the first metric's difference from the
     baseline, with its interval.
  2. The differences of the other metrics.
  3. The experiment's summary, if it has one.

  Below the tables are the errors of failed runs, which no mean includes, and a
  line that explains the intervals and the bold type.

  Args:
    experiment: The experiment.
    results: The content of a results.json.
  """
  differences = {}
  for metric in experiment.metrics.values():
    differences[metric] = _difference_column(results, metric)

  lines = _table_of_means(experiment.metrics, results, differences)
  lines += _table_of_differences(experiment.metrics, results, differences)
  lines += _table_of_summary(results.get("summary"))
  lines += _list_of_failures(results)
  if any(differences.values()):
    lines += ["", _legend(results, differences)]
  return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
  """Returns the text of a cell.

  Args:
    value: A text, a number, a number with the bounds of its interval, or None.
  """
  if value is None:
    return "–"
  if isinstance(value, list | tuple):
    number, low, high = [cell(part) for part in value]
    return f"{number} [{low}, {high}]"
  if not isinstance(value, int | float):
    return value
  if abs(value) >= 1000:
    return f"{value:,.0f}"
  return f"{value:.3g}"


def _table_of_means(
  metrics: Mapping[str, str],
  results: Mapping[str, Any],
  differences: Mapping[str, _Column],
) -> list[str]:
  """Returns the lines of the first table.

  Args:
    metrics: The metrics by title.
    results: The content of a results.json.
    differences: The columns of differences, by metric.
  """
  first_title, first_metric = next(iter(metrics.items()))
  first_differences = differences[first_metric]
  titles = ["", "parameters", "seeds", *metrics]
  if first_differences:
    titles.append(f"{first_title} − {_baseline_name(results)}'s")

  lines = _header(titles)
  for variant in comparison.variant_names(results):
    cells = [variant, *_cells_of_runs(metrics, results, variant)]
    if first_differences:
      cells.append(first_differences.get(variant, ""))
    lines.append(_row(cells))
  return lines


def _cells_of_runs(
  metrics: Mapping[str, str], results: Mapping[str, Any], variant: str
) -> list[str]:
  """Returns a variant's number of parameters, its seeds and its means."""
  runs = comparison.runs_of(results, variant)
  failed_runs = [run for run in runs if "failed" in run]
  num_finished = len(runs) - len(failed_runs)
  parameters = f"{runs[0]['parameters'] / 1e6:.3g} M"
  if not failed_runs:
    seeds = str(len(runs))
  else:
    seeds = f"{num_finished} of {len(runs)}"

  if num_finished == 0:
    reason = _shorten(failed_runs[0]["failed"], _MAX_CELL_WIDTH)
    other_means = ["–"] * (len(metrics) - 1)
    return [parameters, seeds, f"failed: {reason}", *other_means]

  means = []
  for metric in metrics.values():
    means.append(_mean_cell(results, variant, metric))
  return [parameters, seeds, *means]


def _mean_cell(results: Mapping[str, Any], variant: str, metric: str) -> str:
  """Returns the mean ± the standard deviation of a metric over seeds.

  If some runs lack the metric, adds how many have it, as in "0.5 (2 of 3)".
  """
  by_seed = comparison.values_by_seed(results, variant, metric)
  values = list(by_seed.values())
  if not values:
    return "–"
  digits = _decimal_places(values)
  text = f"{statistics.mean(values):.{digits}f}"
  if len(values) > 1:
    text += f" ± {statistics.stdev(values):.{digits}f}"
  num_runs = len(comparison.runs_of(results, variant))
  if len(values) < num_runs:
    text += f" ({len(values)} of {num_runs})"
  return text


def _table_of_differences(
  metrics: Mapping[str, str],
  results: Mapping[str, Any],
  differences: Mapping[str, _Column],
) -> list[str]:
  """Returns the lines of the second table: all metrics but the first."""
  other_titles = list(metrics)[1:]
  rows = []
  for variant in comparison.variant_names(results):
    cells = []
    for title in other_titles:
      column = differences[metrics[title]]
      cells.append(column.get(variant, ""))
    if any(cells):
      rows.append(_row([variant, *cells]))
  if not rows:
    return []
  return [
    "",
    *_header([f"− {_baseline_name(results)}'s", *other_titles]),
    *rows,
  ]


def _table_of_summary(summary: Sequence[Mapping[str, Any]] | None) -> list[str]:
  """Returns the lines of the third table."""
  if not summary:
    return []
  lines = ["", *_header(list(summary[0]))]
  for row in summary:
    lines.append(_row([cell(value) for value in row.values()]))
  return lines


def _list_of_failures(results: Mapping[str, Any]) -> list[str]:
  """Returns a line for each failed run."""
  lines = []
  for run in results["runs"]:
    if "failed" in run:
      reason = _shorten(run["failed"], _MAX_LINE_WIDTH)
      lines.append(f"- {run['name']} failed: {reason}")
  if not lines:
    return []
  return ["", *lines]


def _legend(
  results: Mapping[str, Any], differences: Mapping[str, _Column]
) -> str:
  """Returns the line that explains the intervals and the bold type."""
  # Dunnett's test corrects for the number of rows with the same baseline.
  max_rows = 1
  for column in differences.values():
    rows_by_baseline: collections.Counter[str] = collections.Counter()
    for variant in column:
      rows_by_baseline[comparison.baseline_of(results, variant)] += 1
    max_rows = max([max_rows, *rows_by_baseline.values()])

  compared = "the one row"
  if max_rows > 1:
    compared = f"the {max_rows} rows"
  baseline = results["baseline"]
  if baseline.endswith(",*"):
    baseline = f"the {_baseline_name(results)} of the same options"
  return (
    "±: standard deviation over seeds. Intervals: Welch's 95%, each by itself."
    " Bold: the interval excludes 0, and Dunnett's"
    f" p < {comparison.SIGNIFICANCE_LEVEL} among {compared} compared with"
    f" {baseline}, each column by itself."
  )


def _difference_column(results: Mapping[str, Any], metric: str) -> _Column:
  """Returns the cells of a metric's differences. Significant ones are bold."""
  significant = comparison.significant_variants(results, metric)
  cells = {}
  for variant in comparison.variant_names(results):
    estimate = comparison.difference(results, variant, metric)
    if estimate is None:
      continue
    digits = _decimal_places(estimate)
    value, low, high = [f"{number:+.{digits}f}" for number in estimate]
    text = f"{value} [{low}, {high}]"
    if variant in significant:
      text = f"**{text}**"
    cells[variant] = text
  return cells


def _decimal_places(numbers: Sequence[float]) -> int:
  """Returns how many decimal places show the numbers with five digits.

  There are four decimal places if the largest number is below 10, three if it
  is below 100, and so on. Infinite numbers are ignored.
  """
  largest = 1.0
  for number in numbers:
    if math.isfinite(number):
      largest = max(largest, abs(number))
  # log10 is the number of digits before the point, minus 1.
  return max(0, 4 - int(math.log10(largest)))


def _header(titles: Sequence[str]) -> list[str]:
  """Returns the first two lines of a table."""
  return [_row(titles), "|---" * len(titles) + "|"]


def _row(cells: Sequence[str]) -> str:
  """Returns a line of a table. Vertical bars in its cells are escaped."""
  line = "|"
  for text in cells:
    escaped = text.replace("|", "\\|")
    line += f" {escaped} |"
  return line


def _shorten(text: str, width: int) -> str:
  return textwrap.shorten(text, width, placeholder=" …")


def _baseline_name(results: Mapping[str, Any]) -> str:
  return results["baseline"].removesuffix(",*")
