"""The sections of the report that show the results of the suites."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from diffjax.config import UserError
from diffjax.evals import SUITES
from diffjax.evals.report import pictures, plots, results, summary
from diffjax.evals.report.pictures import Picture
from diffjax.evals.report.summary import Number
from diffjax.evals.suite import suite_class


@dataclasses.dataclass(frozen=True)
class FigureRow:
  """A row of a table of figures.

  Attributes:
    name: The name of the figure.
    details: Its settings, in the order of the table's columns. Then its number
      of units, if the table has a column for it.
    numbers: Its values: for one model the value, for two models both values and
      the difference.
  """

  name: str
  details: list[str]
  numbers: list[Number]


@dataclasses.dataclass(frozen=True)
class FiguresTable:
  """A table of figures.

  Attributes:
    header: The titles of the columns after the figure's name.
    rows: The rows.
  """

  header: list[str]
  rows: list[FigureRow]


@dataclasses.dataclass(frozen=True)
class Section:
  """The section of the page that shows the results of a suite.

  Attributes:
    suite: The name of the suite, which is the section's id.
    link: The title in the page's navigation, such as "position NLL".
    heading: The title above the section, such as "Position NLL".
    description: What the suite measures.
    warning: A warning if the results are of other models, or "".
    units: The number of units of all figures, such as "1,000 prompts". "" if
      they differ, and the tables have a column for it.
    plot: The suite's plot, if it has one.
    main: The figures that are shown.
    folded: The figures that are shown on demand, because they do not differ
      clearly or are 0.
    folded_title: The number of folded figures and why they are folded.
    notes: Lines that explain the terms of the tables.
    settings: The settings of the suite, as JSON.
  """

  suite: str
  link: str
  heading: str
  description: str
  warning: str
  units: str
  plot: Picture | None
  main: FiguresTable
  folded: FiguresTable
  folded_title: str
  notes: tuple[str, ...]
  settings: str


def read_results(
  directory: epath.Path, suites: Sequence[str]
) -> dict[str, dict[str, Any]]:
  """Returns the results of each suite that was measured, by suite.

  Args:
    directory: Contains SUITE.json for each suite that was measured.
    suites: The names of the suites, in the order of the result.

  Raises:
    UserError: if a file does not contain the results of its suite.
  """
  results_by_suite = {}
  for suite in suites:
    path = directory / f"{suite}.json"
    if path.exists():
      results_by_suite[suite] = _read_suite_results(path, suite)
  return results_by_suite


def unknown_suites(directory: epath.Path) -> list[str]:
  """Returns the suites with results in a directory that are not in `SUITES`.

  They are suites from outside diffjax whose modules were not imported. JSON
  files without results of a suite are left out.
  """
  names = []
  for path in sorted(directory.glob("*.json")):
    name = path.stem
    if name in SUITES:
      continue
    try:
      _read_suite_results(path, name)
    except UserError:
      continue
    names.append(name)
  return names


def _read_suite_results(path: epath.Path, suite: str) -> dict[str, Any]:
  """Reads the results of a suite, and checks that they have all fields."""
  try:
    suite_results = json.loads(path.read_text(encoding="utf-8"))
    measured_suite = suite_results["suite"]
    has_models = len(suite_results["models"]) > 0
    for figure in suite_results["figures"]:
      _check_figure(figure)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"{path} holds no results of a suite ({error}); measure again, or move it"
      " away"
    ) from error
  if measured_suite != suite or not has_models:
    raise UserError(
      f"{path} holds no results of the suite {suite}; measure again, or move it"
      " away"
    )
  return suite_results


def _check_figure(figure: Mapping[str, Any]) -> None:
  """Raises ValueError if a figure lacks a field that the page shows."""
  for field in ("at", "value", "units"):
    if field not in figure:
      raise ValueError(f"a figure has no {field!r}")


def model_names(suite_results: Mapping[str, Any]) -> list[str]:
  """Returns the names of the models that were measured."""
  return [str(model["name"]) for model in suite_results["models"]]


def section(
  suite_results: Mapping[str, Any],
  names: list[str],
  directory: epath.Path,
) -> Section:
  """Returns the section of the page that shows the results of a suite.

  Args:
    suite_results: The results of the suite.
    names: The names of the page's models.
    directory: Contains SUITE.png if the suite has a plot.

  Raises:
    OSError: if the plot cannot be read.
  """
  suite = suite_results["suite"]
  spec = suite_class(suite).table
  words = suite.replace("_", " ")
  figures = _split_figures(suite_results)
  settings = suite_results["settings"]
  return Section(
    suite=suite,
    link=_abbreviations_in_capitals(words),
    heading=_abbreviations_in_capitals(words.capitalize()),
    description=_description(suite),
    warning=_other_models_warning(suite_results, names),
    units=_equal_units(suite_results, spec.unit),
    plot=_read_plot(directory / f"{suite}.png", suite),
    main=_table(figures.shown, suite_results, spec.unit),
    folded=_table(figures.folded, suite_results, spec.unit),
    folded_title=_folded_title(len(figures.folded), suite_results),
    notes=spec.notes,
    settings=json.dumps(settings, indent=1, ensure_ascii=False),
  )


def _other_models_warning(
  suite_results: Mapping[str, Any], names: list[str]
) -> str:
  """Returns a warning if the results are not of the page's models, or ""."""
  measured_names = model_names(suite_results)
  if measured_names == names:
    return ""
  return (
    f"Measured of {' and '.join(measured_names)}, not of this page's models."
  )


def _equal_units(suite_results: Mapping[str, Any], unit: str) -> str:
  """Returns the number of units: "1,000 prompts", or "" if it varies."""
  figures = suite_results["figures"]
  if not results.has_equal_units(figures):
    return ""
  return results.format_units(figures[0], unit)


def _read_plot(path: epath.Path, suite: str) -> Picture | None:
  """Returns the plot of a suite, or None if there is no such file."""
  if not path.exists():
    return None
  address = pictures.png_address(path.read_bytes())
  return Picture(address, f"plot of {suite}")


def _description(suite: str) -> str:
  """Returns what a suite measures: the first line of its class's docstring."""
  docstring = suite_class(suite).__doc__ or ""
  return docstring.partition("\n")[0]


def _abbreviations_in_capitals(words: str) -> str:
  """Returns words with "NLL" in place of "nll"."""
  return words.replace("nll", "NLL")


class _SplitFigures(NamedTuple):
  """The figures of a suite, as rows of its section's two tables.

  Attributes:
    shown: The rows of the table that is always visible.
    folded: The rows of the table that is visible on demand.
  """

  shown: list[Mapping[str, Any]]
  folded: list[Mapping[str, Any]]


def _split_figures(suite_results: Mapping[str, Any]) -> _SplitFigures:
  """Decides which figures of a suite are folded.

  Figures without a clear difference are folded, and figures of one model whose
  value is 0. The suite's main figures are never folded.
  """
  headlines = summary.headlines({suite_results["suite"]: suite_results})
  main_figures = [headline.figure for headline in headlines]
  split = _SplitFigures(shown=[], folded=[])
  for figure in suite_results["figures"]:
    if "difference" in figure:
      is_informative = results.excludes_zero(figure["difference"])
    else:
      is_informative = figure["value"] != 0
    if is_informative or figure in main_figures:
      split.shown.append(figure)
    else:
      split.folded.append(figure)
  return split


def _folded_title(num_rows: int, suite_results: Mapping[str, Any]) -> str:
  """Returns the title of the folded table, on which readers click."""
  noun = "row" if num_rows == 1 else "rows"
  if results.is_comparison(suite_results):
    return f"{num_rows} {noun} without a clear difference"
  return f"{num_rows} {noun} of 0"


def _table(
  figures: Sequence[Mapping[str, Any]],
  suite_results: Mapping[str, Any],
  unit: str,
) -> FiguresTable:
  """Returns a table of some figures of a suite.

  The columns are chosen for all figures of the suite, so that its two tables
  have the same ones: a column for each setting that any figure has, and one for
  the number of units if it differs.

  Args:
    figures: The figures to show.
    suite_results: The results of the suite.
    unit: The name of the suite's units, such as "prompts".
  """
  all_figures = suite_results["figures"]
  setting_names = results.list_settings(all_figures)
  has_units_column = not results.has_equal_units(all_figures)
  header = list(setting_names)
  if has_units_column:
    header.append(unit)
  for style in plots.styles_of(suite_results["models"]):
    header.append(style.name)
  is_comparison = results.is_comparison(suite_results)
  if is_comparison:
    header.append("difference")

  rows = []
  for figure in figures:
    details = [results.format_setting(figure, name) for name in setting_names]
    if has_units_column:
      details.append(f"{figure['units']:,}")
    numbers = [summary.number(figure)]
    if is_comparison:
      numbers.append(summary.number(figure.get("against")))
      numbers.append(summary.difference_number(figure.get("difference")))
    rows.append(FigureRow(figure["name"], details, numbers))
  return FiguresTable(header, rows)
