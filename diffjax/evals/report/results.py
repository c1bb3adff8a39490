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
_ROLES = ("model", "against")

# A width in characters that no table reaches.
_UNLIMITED = 10_000

# The width in characters of a summary that is not printed on a terminal.
_WIDTH_OF_FILES = 80


def check_writable(directory: epath.Path) -> None:
  """Checks that files can be written in a directory, which may be created.

  Measurements can take hours, so this is checked before the first of them.

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
  """Returns the value with None in place of NaN and infinity, for JSON.

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
    unit: What the intervals are over, in the plural, such as "prompts".
    summary: The settings (`figure["at"]`) of the figures that the terminal
      shows, such as {"depth": "mean"}; {} for all figures.
    headers: Shorter names for columns of the terminal's table. "" hides the
      column.
    notes: Lines below both tables that explain their terms.
  """

  unit: str
  summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  notes: tuple[str, ...] = ()


class MainFigure(NamedTuple):
  """A figure that stands for its suite on the report's first screen.

  If several figures of the suite match, the last one is shown.

  Attributes:
    title: what the first screen calls it.
    name_prefix: the beginning of the figure's name.
    better: "lower" or "higher". "" if neither is better.
    settings: the settings that the figure's `at` contains.
  """

  title: str
  name_prefix: str
  better: str
  settings: Mapping[str, Any] = {}

  def matches(self, figure: Mapping[str, Any]) -> bool:
    """Returns True if a figure of the suite's results is this one."""
    if not figure["name"].startswith(self.name_prefix):
      return False
    return self.settings.items() <= figure["at"].items()


def print_summary(results: Mapping[str, Any], spec: TableSpec) -> None:
  """Prints the main figures of a suite on standard output."""
  console = rich.console.Console(highlight=False)
  if not console.is_terminal:
    # Output in files and pipes does not depend on the terminal's width.
    console = rich.console.Console(highlight=False, width=_WIDTH_OF_FILES)
  # rich would end the process if the output is a closed pipe. `print` raises an
  # error.
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
  shared, columns = _shared_and_columns(figures, spec)
  heading = results["suite"]
  if shared:
    heading += f": {', '.join(shared)}"
  _print_line(console, heading)
  for role, model in zip(_ROLES, results["models"], strict=False):
    _print_line(console, f"{role}: {model['name']}")

  is_pair = len(results["models"]) > 1
  header = [""]
  header += [spec.headers.get(name, name) for name in columns]
  if is_pair:
    header += [*_ROLES, "difference [95% interval]"]
  else:
    header.append("value [95% interval]")
  rows = _summary_rows(figures, columns, spec.unit, is_pair)
  _print_table(console, header, rows)
  for note in spec.notes:
    _print_line(console, note)


def _shared_and_columns(
  figures: Sequence[Mapping[str, Any]], spec: TableSpec
) -> tuple[list[str], list[str]]:
  """Splits the settings into those equal in all figures and those that vary.

  Equal settings go into the heading, which keeps the table narrow.

  Args:
    figures: The figures of a table.
    spec: The suite's `table`.

  Returns:
    Texts such as "50 prompts" or "length 256", and the names of columns. Columns
    are settings. The unit is the last column if figures differ in their number
    of samples.
  """
  shared = []
  columns = []
  counts = {figure["units"] for figure in figures}
  has_one_count = len(counts) == 1
  if has_one_count:
    shared.append(f"{counts.pop():,} {spec.unit}")
  for name in _setting_names(figures):
    if name in spec.summary or spec.headers.get(name) == "":
      continue
    values = {figure["at"].get(name) for figure in figures}
    if len(values) == 1:
      shared.append(f"{name} {values.pop()}")
    else:
      columns.append(name)
  if not has_one_count:
    columns.append(spec.unit)
  return shared, columns


def _summary_rows(
  figures: Sequence[Mapping[str, Any]],
  columns: Sequence[str],
  unit: str,
  is_pair: bool,
) -> list[list[rich.text.Text]]:
  """Returns the cells of the terminal's table, a row for each figure."""
  rows = []
  previous_name = ""
  for figure in figures:
    is_repeated = figure["name"] == previous_name
    previous_name = figure["name"]
    cells = ["" if is_repeated else figure["name"]]
    for column in columns:
      if column == unit:
        cells.append(f"{figure['units']:,}")
      else:
        cells.append(str(figure["at"].get(column, "")))
    if is_pair:
      cells += [_value(figure), _value(figure.get("against"))]
      cells.append(number(figure.get("difference")))
    else:
      cells.append(number(figure))
    row = [rich.text.Text(cell) for cell in cells]
    if is_pair and excludes_zero(figure.get("difference")):
      row[-1].stylize("bold")
    rows.append(row)
  return rows


def _print_table(
  console: rich.console.Console,
  header: Sequence[str],
  rows: Sequence[Sequence[rich.text.Text]],
) -> None:
  """Prints a table of which only the first column may be wrapped."""
  table = rich.table.Table(
    box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
  )
  table.add_column(header[0])
  for index, name in enumerate(header[1:], start=1):
    longest = max((len(row[index]) for row in rows), default=0)
    table.add_column(name, justify="right", no_wrap=True, min_width=longest)
  for row in rows:
    table.add_row(*row)
  # On a terminal narrower than the table, lines wrap instead of losing digits.
  unlimited = console.options.update(width=_UNLIMITED)
  least_width = console.measure(table, options=unlimited).minimum
  if least_width > console.width:
    table.width = least_width
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
    UserError: If the file cannot be written.
  """
  figures = results["figures"]
  is_pair = len(results["models"]) > 1
  settings = _setting_names(figures)
  header = ["figure", *settings, spec.unit]
  if is_pair:
    header += [*_ROLES, "difference"]
  else:
    header.append("value")
  lines = [f"# {results['suite']}", ""]
  for role, model in zip(_ROLES, results["models"], strict=False):
    lines.append(f"- {role}: {model['name']}")
  lines += ["", "Values have 95% intervals.", ""]
  lines.append(_markdown_row(header))
  lines.append(_markdown_row(["---"] + ["---:"] * (len(header) - 1)))
  for figure in figures:
    cells = [figure["name"]]
    cells += [str(figure["at"].get(name, "")) for name in settings]
    cells += [str(figure["units"]), number(figure)]
    if is_pair:
      cells.append(number(figure.get("against")))
      cells.append(number(figure.get("difference")))
    lines.append(_markdown_row(cells))
  lines.append("")
  for note in spec.notes:
    lines.append(f"- {note}")
  _write_text(path, "\n".join(lines) + "\n")


def _setting_names(figures: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the names of the settings in `figure["at"]`, in their order."""
  names: dict[str, None] = {}
  for figure in figures:
    names |= dict.fromkeys(figure["at"])
  return list(names)


def _print_line(console: rich.console.Console, line: str) -> None:
  """Prints a line without wrapping it."""
  # A path must stay whole, so that it can be copied.
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
