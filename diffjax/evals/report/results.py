"""Results of a suite: JSON, a Markdown table, and a summary on the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import rich.box
import rich.console
import rich.table
import rich.text
from etils import epath

from diffjax.config import UserError
from diffjax.host.files import write_atomically

# What the tables call the first and the second model, because names are long.
_MODEL_LABELS = ("model", "against")

# A width in characters that no table needs.
_UNLIMITED = 10_000

# The width in characters of a summary that is not printed on a terminal.
_WIDTH_OF_FILES = 80


def check_writable(directory: epath.Path) -> None:
  """Checks that files can be written in a directory. Creates the directory.

  Measurements can take hours, so this is checked before the first one.

  Raises:
    UserError: if no file can be written.
  """
  try:
    directory.mkdir(parents=True, exist_ok=True)
    test_file = directory / ".writable"
    test_file.write_text("", encoding="utf-8")
    test_file.unlink()
  except OSError as error:
    raise UserError(
      f"cannot write results in {directory}: {error.strerror or error};"
      " choose another place with --out=DIR"
    ) from error


def write(path: epath.Path, results: Mapping[str, Any]) -> None:
  """Writes results as JSON. An error leaves no part of a file.

  Args:
    path: The file.
    results: The results, from `finite`.

  Raises:
    UserError: if the file cannot be written.
  """
  text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
  _write_text(path, text + "\n")


def _write_text(path: epath.Path, text: str) -> None:
  try:
    write_atomically(path, text)
  except OSError as error:
    raise UserError(
      f"cannot write {path}: {error.strerror or error}"
    ) from error


def finite(value: Any) -> Any:
  """Returns the value with None in place of NaN and infinity.

  JSON has no such numbers.

  Args:
    value: A plain value, or nested mappings and sequences of them.
  """
  if isinstance(value, Mapping):
    return {key: finite(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [finite(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


@dataclasses.dataclass(frozen=True)
class TableSpec:
  """Describes the tables of a suite.

  Attributes:
    unit: The units of the suite's measurements, in the plural, such as
      "prompts".
    summary: The settings (`figure["at"]`) of the figures that the terminal
      shows, such as {"depth": "mean"}; {} for all figures.
    headers: Shorter names for columns of the terminal's table. "" hides the
      column.
    notes: Lines that explain the terms of the tables. They stand below the
      tables of the terminal, of SUITE.md and of the report.
  """

  unit: str
  summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  notes: tuple[str, ...] = ()


class MainFigure(NamedTuple):
  """Selects a figure of a suite for the report's first screen.

  If several figures of the suite match, the last one is shown.

  Attributes:
    title: What the first screen calls it.
    name_prefix: The beginning of the figure's name.
    better: "lower" or "higher". "" if neither is better.
    settings: Settings that the figure has (`figure["at"]`), such as
      {"depth": "mean"}.
  """

  title: str
  name_prefix: str
  better: str
  settings: Mapping[str, Any] = {}

  def matches(self, figure: Mapping[str, Any]) -> bool:
    """Returns True if this selects the figure of the suite's results."""
    if not figure["name"].startswith(self.name_prefix):
      return False
    return self.settings.items() <= figure["at"].items()


def print_summary(results: Mapping[str, Any], spec: TableSpec) -> None:
  """Prints the main figures of a suite on standard output."""
  console = rich.console.Console(highlight=False)
  if not console.is_terminal:
    # Output in files and pipes does not depend on the terminal's width.
    console = rich.console.Console(highlight=False, width=_WIDTH_OF_FILES)
  # If the output is a closed pipe, rich would end the process, while `print`
  # raises an error.
  with console.capture() as capture:
    draw_summary(console, results, spec)
  print(capture.get(), end="")


def draw_summary(
  console: rich.console.Console, results: Mapping[str, Any], spec: TableSpec
) -> None:
  """Prints the main figures of a suite in a table that fits 80 columns.

  One model is shown with its intervals. Two models are shown with the interval
  of their paired difference, which is bold if it excludes 0.

  Args:
    console: Where to print.
    results: A suite's results.
    spec: The suite's `table`.
  """
  figures = []
  for figure in results["figures"]:
    if spec.summary.items() <= figure["at"].items():
      figures.append(figure)
  settings = _split_settings(figures, spec)
  columns = _Columns(
    settings=settings.varying,
    has_units=not has_equal_units(figures),
    is_comparison=is_comparison(results),
  )

  heading = results["suite"]
  if settings.equal:
    heading += f": {', '.join(settings.equal)}"
  _print_line(console, heading)
  for line in _model_lines(results):
    _print_line(console, line)
  _print_figures(console, figures, columns, spec)
  for note in spec.notes:
    _print_line(console, note)


class _Settings(NamedTuple):
  """The settings of figures.

  Attributes:
    equal: The settings that are equal in all figures, such as "length 256". If
      the number of units is equal, it is the first, such as "50 prompts".
    varying: The names of the other settings.
  """

  equal: list[str]
  varying: list[str]


def _split_settings(
  figures: Sequence[Mapping[str, Any]], spec: TableSpec
) -> _Settings:
  """Splits the settings into those equal in all figures and those that vary.

  The equal ones are shown in the heading, so that the table is narrow. Settings
  by which `spec` selects the figures, or that it hides, are not shown.
  """
  settings = _Settings(equal=[], varying=[])
  if has_equal_units(figures):
    settings.equal.append(format_units(figures[0], spec.unit))
  for name in list_settings(figures):
    # An empty header hides a column (see `TableSpec`).
    is_hidden = spec.headers.get(name) == ""
    if name in spec.summary or is_hidden:
      continue
    values = {figure["at"].get(name) for figure in figures}
    if len(values) == 1:
      settings.equal.append(f"{name} {values.pop()}")
    else:
      settings.varying.append(name)
  return settings


def has_equal_units(figures: Sequence[Mapping[str, Any]]) -> bool:
  """Returns True if there are figures, and all have one number of units."""
  return len({figure["units"] for figure in figures}) == 1


def format_units(figure: Mapping[str, Any], unit: str) -> str:
  """Returns the number of a figure's units, such as "1,000 prompts"."""
  return f"{figure['units']:,} {unit}"


class _Columns(NamedTuple):
  """The columns of the terminal's table that depend on the suite.

  Attributes:
    settings: The names of the settings that have a column.
    has_units: Whether the number of units has a column.
    is_comparison: Whether there are columns for two models.
  """

  settings: list[str]
  has_units: bool
  is_comparison: bool


def _print_figures(
  console: rich.console.Console,
  figures: Sequence[Mapping[str, Any]],
  columns: _Columns,
  spec: TableSpec,
) -> None:
  """Prints figures of a suite as a table, with a row for each."""
  rows = []
  previous_name = ""
  for figure in figures:
    cells = _summary_cells(figure, columns)
    # Consecutive figures of one name show it once.
    if figure["name"] == previous_name:
      cells[0] = ""
    previous_name = figure["name"]
    # rich would read brackets in a string as a style, but not in a Text.
    row = [rich.text.Text(cell) for cell in cells]
    if excludes_zero(figure.get("difference")):
      row[-1].stylize("bold")
    rows.append(row)
  _print_table(console, _summary_header(columns, spec), rows)


def _summary_header(columns: _Columns, spec: TableSpec) -> list[str]:
  """Returns the titles of the columns. The column of names has no title."""
  titles = [""]
  for name in columns.settings:
    titles.append(spec.headers.get(name, name))
  if columns.has_units:
    titles.append(spec.headers.get(spec.unit, spec.unit))
  if columns.is_comparison:
    titles += [*_MODEL_LABELS, "difference [95% interval]"]
  else:
    titles.append("value [95% interval]")
  return titles


def _summary_cells(figure: Mapping[str, Any], columns: _Columns) -> list[str]:
  """Returns the cells of a figure's row: its name, settings and numbers."""
  cells = [figure["name"]]
  for name in columns.settings:
    cells.append(format_setting(figure, name))
  if columns.has_units:
    cells.append(f"{figure['units']:,}")
  if columns.is_comparison:
    # The terminal has room for one interval, the one of the difference.
    cells.append(_value(figure))
    cells.append(_value(figure.get("against")))
    cells.append(number(figure.get("difference")))
  else:
    cells.append(number(figure))
  return cells


def _print_table(
  console: rich.console.Console,
  header: Sequence[str],
  rows: Sequence[Sequence[rich.text.Text]],
) -> None:
  """Prints a table in which no number is wrapped or cut.

  If the terminal is too narrow, long names in the first column are wrapped. If
  that is not enough, the table is wider than the terminal.
  """
  table = rich.table.Table(
    box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
  )
  table.add_column(header[0])
  for index, title in enumerate(header[1:], start=1):
    # The longest cell decides the width, so that no number is wrapped.
    width = max((len(row[index]) for row in rows), default=0)
    table.add_column(title, justify="right", no_wrap=True, min_width=width)
  for row in rows:
    table.add_row(*row)

  # rich cuts numbers to fit a table into the terminal, unless it has a width.
  unlimited = console.options.update(width=_UNLIMITED)
  minimum_width = console.measure(table, options=unlimited).minimum
  if minimum_width > console.width:
    table.width = minimum_width
  console.print(table, crop=False)


def write_table(
  path: epath.Path, results: Mapping[str, Any], spec: TableSpec
) -> None:
  """Writes all figures of a suite with their intervals as a Markdown table.

  Args:
    path: The file to write.
    results: A suite's results.
    spec: The suite's `table`.

  Raises:
    UserError: if the file cannot be written.
  """
  lines = [f"# {results['suite']}", ""]
  for line in _model_lines(results):
    lines.append(f"- {line}")
  lines += ["", "Values have 95% intervals.", ""]
  lines += _markdown_table(results, spec.unit)
  lines.append("")
  for note in spec.notes:
    lines.append(f"- {note}")
  _write_text(path, "\n".join(lines) + "\n")


def _markdown_table(results: Mapping[str, Any], unit: str) -> list[str]:
  """Returns the lines of a table with a row for each figure."""
  setting_names = list_settings(results["figures"])
  header = ["figure", *setting_names, unit]
  if is_comparison(results):
    header += [*_MODEL_LABELS, "difference"]
  else:
    header.append("value")
  alignments = ["---"] + ["---:"] * (len(header) - 1)
  lines = [_markdown_row(header), _markdown_row(alignments)]

  for figure in results["figures"]:
    cells = [figure["name"]]
    for name in setting_names:
      cells.append(format_setting(figure, name))
    cells += [str(figure["units"]), number(figure)]
    if is_comparison(results):
      cells.append(number(figure.get("against")))
      cells.append(number(figure.get("difference")))
    lines.append(_markdown_row(cells))
  return lines


def list_settings(figures: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the names of all settings of the figures, without repetition.

  The settings of a figure are in `figure["at"]`, such as {"depth": 0.5}.
  """
  # A dict keeps the order of the names. A set would not.
  names: dict[str, None] = {}
  for figure in figures:
    names |= dict.fromkeys(figure["at"])
  return list(names)


def format_setting(figure: Mapping[str, Any], name: str) -> str:
  """Returns a setting of a figure as text, or "" if it has no such setting."""
  return str(figure["at"].get(name, ""))


def _model_lines(results: Mapping[str, Any]) -> list[str]:
  """Returns a line with the name of each model, such as "model: diff"."""
  lines = []
  # If there is one model, the second label is unused.
  for label, model in zip(_MODEL_LABELS, results["models"], strict=False):
    lines.append(f"{label}: {model['name']}")
  return lines


def is_comparison(results: Mapping[str, Any]) -> bool:
  """Returns True if the results compare two models."""
  return len(results["models"]) > 1


def _print_line(console: rich.console.Console, line: str) -> None:
  """Prints a line without wrapping it, so that paths can be copied."""
  console.print(rich.text.Text(line), soft_wrap=True)


def _markdown_row(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"


def _value(interval: Mapping[str, Any] | None) -> str:
  """Returns the value of an interval as text, or a dash for a missing value."""
  if interval is None or not _is_number(interval["value"]):
    return "–"
  return f"{interval['value']:.4g}"


def number(interval: Mapping[str, Any] | None) -> str:
  """Returns an interval as text, such as "0.5 [0.4, 0.6]".

  A dash stands for a missing value. Missing bounds are left out.
  """
  value = _value(interval)
  if interval is None or not _has_bounds(interval):
    return value
  return f"{value} [{interval['low']:.4g}, {interval['high']:.4g}]"


def excludes_zero(interval: Mapping[str, Any] | None) -> bool:
  """Returns True if an interval lies on one side of 0."""
  if interval is None or not _has_bounds(interval):
    return False
  return interval["low"] > 0 or interval["high"] < 0


def _has_bounds(interval: Mapping[str, Any]) -> bool:
  """Returns True if both bounds of an interval are known."""
  return _is_number(interval["low"]) and _is_number(interval["high"])


def _is_number(value: float | None) -> bool:
  return value is not None and math.isfinite(value)
