"""The sections of the report that show the results of the suites."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from diffjax.config import UserError
from diffjax.evals.report import pictures, plots, results, summary
from diffjax.evals.report.pictures import Picture
from diffjax.evals.report.summary import Number
from diffjax.evals.suite import suite_class


@dataclasses.dataclass(frozen=True)
class FigureRow:
  """A row of a table of figures.

  Attributes:
    name: the name of the figure.
    settings: its settings, in the order of the table's columns.
    numbers: its values: for one model the value, for two models both values and
      the difference.
  """

  name: str
  settings: list[str]
  numbers: list[Number]


@dataclasses.dataclass(frozen=True)
class FiguresTable:
  """A table of figures.

  Attributes:
    header: the titles of the columns after the figure's name.
    rows: the rows.
  """

  header: list[str]
  rows: list[FigureRow]


@dataclasses.dataclass(frozen=True)
class Section:
  """The section of a suite.

  Attributes:
    suite: the name of the suite, which is the section's id.
    link: the title in links.
    heading: the title above the section.
    description: what the suite measures.
    warning: a warning if the results are of other models, or "".
    plot: the suite's plot, if it has one.
    main: the figures that are shown.
    folded: the figures that are shown on demand, because they do not differ
      clearly or are 0.
    folded_title: the number of folded figures and why they are folded.
    settings: the settings of the suite, as JSON.
  """

  suite: str
  link: str
  heading: str
  description: str
  warning: str
  plot: Picture | None
  main: FiguresTable
  folded: FiguresTable
  folded_title: str
  settings: str


def read_results(
  directory: epath.Path, suites: Sequence[str]
) -> dict[str, dict[str, Any]]:
  """Returns the results of each suite that was measured, by suite.

  Args:
    directory: contains SUITE.json for each suite that was measured.
    suites: the names of the suites, in the order of the result.

  Raises:
    UserError: if a file does not contain the results of its suite.
  """
  results_by_suite = {}
  for suite in suites:
    path = directory / f"{suite}.json"
    if path.exists():
      results_by_suite[suite] = _read_suite_results(path, suite)
  return results_by_suite


def _read_suite_results(path: epath.Path, suite: str) -> dict[str, Any]:
  """Reads and checks the results of a suite."""
  try:
    suite_results = json.loads(path.read_text(encoding="utf-8"))
    is_of_suite = _are_results_of(suite_results, suite)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"{path} holds no results of a suite ({error}); measure again, or move it"
      " away"
    ) from error
  if not is_of_suite:
    raise UserError(
      f"{path} holds no results of the suite {suite}; measure again, or move it"
      " away"
    )
  return suite_results


def _are_results_of(suite_results: Any, suite: str) -> bool:
  """Returns True if a file's content has the form of a suite's results.

  Raises KeyError or TypeError if it has another form.
  """
  if suite_results["suite"] != suite or not suite_results["models"]:
    return False
  for figure in suite_results["figures"]:
    if "at" not in figure or "value" not in figure:
      return False
  return True


def model_names(suite_results: Mapping[str, Any]) -> list[str]:
  """Returns the names of the models that were measured."""
  return [str(model["name"]) for model in suite_results["models"]]


def section(
  suite_results: Mapping[str, Any],
  names: list[str],
  directory: epath.Path,
) -> Section:
  """Returns the section of a suite.

  Args:
    suite_results: the results of the suite.
    names: the names of the page's models.
    directory: contains SUITE.png if the suite has a plot.

  Raises:
    OSError: if the plot cannot be read.
  """
  suite = suite_results["suite"]
  warning = ""
  measured_names = model_names(suite_results)
  if measured_names != names:
    warning = (
      f"Measured of {' and '.join(measured_names)}, not of this page's models."
    )
  plot = None
  plot_path = directory / f"{suite}.png"
  if plot_path.exists():
    address = pictures.png_address(plot_path.read_bytes())
    plot = Picture(address, f"plot of {suite}")

  main_figures, folded_figures = _split_figures(suite_results)
  words = suite.replace("_", " ")
  return Section(
    suite=suite,
    link=_abbreviations_in_capitals(words),
    heading=_abbreviations_in_capitals(words.capitalize()),
    description=_description(suite),
    warning=warning,
    plot=plot,
    main=_table(main_figures, suite_results),
    folded=_table(folded_figures, suite_results),
    folded_title=_folded_title(len(folded_figures), suite_results),
    settings=json.dumps(
      suite_results["settings"], indent=1, ensure_ascii=False
    ),
  )


def _description(suite: str) -> str:
  """Returns the first line of the docstring of a suite's class."""
  docstring = suite_class(suite).__doc__ or ""
  return docstring.partition("\n")[0]


def _abbreviations_in_capitals(words: str) -> str:
  """Returns the words of a suite's name with NLL in capitals."""
  return words.replace("nll", "NLL")


def _is_pair(suite_results: Mapping[str, Any]) -> bool:
  """Returns True if the results compare two models."""
  return len(suite_results["models"]) > 1


def _split_figures(
  suite_results: Mapping[str, Any],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
  """Returns the figures of a suite to show, and the figures to fold.

  The shown figures are the main figures, clear differences, and numbers other
  than 0 without a difference.
  """
  headlines = summary.headlines({suite_results["suite"]: suite_results})
  headline_figures = [headline.figure for headline in headlines]
  shown = []
  folded = []
  for figure in suite_results["figures"]:
    if "difference" in figure:
      is_informative = results.excludes_zero(figure["difference"])
    else:
      is_informative = figure["value"] != 0
    if is_informative or figure in headline_figures:
      shown.append(figure)
    else:
      folded.append(figure)
  return shown, folded


def _folded_title(num_rows: int, suite_results: Mapping[str, Any]) -> str:
  """Returns the line that unfolds the table of folded figures."""
  noun = "row" if num_rows == 1 else "rows"
  if _is_pair(suite_results):
    return f"{num_rows} {noun} without a clear difference"
  return f"{num_rows} {noun} of 0"


def _table(
  figures: Sequence[Mapping[str, Any]], suite_results: Mapping[str, Any]
) -> FiguresTable:
  """Returns a table of some figures.

  It has a column for each setting that any figure of the suite has.
  """
  setting_names: dict[str, None] = {}
  for figure in suite_results["figures"]:
    setting_names |= dict.fromkeys(figure["at"])
  header = list(setting_names)
  for style in plots.styles_of(suite_results["models"]):
    header.append(style.name)
  is_pair = _is_pair(suite_results)
  if is_pair:
    header.append("difference")

  rows = []
  for figure in figures:
    settings = [str(figure["at"].get(name, "")) for name in setting_names]
    numbers = [summary.number(figure)]
    if is_pair:
      numbers.append(summary.number(figure.get("against")))
      numbers.append(summary.difference_number(figure.get("difference")))
    rows.append(FigureRow(figure["name"], settings, numbers))
  return FiguresTable(header, rows)
