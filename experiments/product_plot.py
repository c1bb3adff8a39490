"""The default figure of `Grid.product`.

It shows a metric over the first factor. There is a line for each combination of
the other factors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments import plots, product

# The x-axis is logarithmic if the ratio of its values is at least this.
_MIN_LOG_RATIO = 10
_LINE_STYLES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))

# The values of all factors but the first.
_LineKey = tuple[Any, ...]
# The numbers of a line's runs, by the value of the first factor.
_NumbersByX = dict[Any, list[float]]


class _LineLook(NamedTuple):
  """How a line is drawn, in matplotlib's terms."""

  color: str
  marker: str
  line_style: Any


def plot(
  results: Mapping[str, Any],
  factors: Sequence[str],
  metric: str,
  title: str,
) -> Figure:
  """Draws a metric over the first factor of a grid.

  There is a dot for each run, and a line through the means over seeds. The
  second factor determines the colour. The combination of further factors
  determines the line style. If the first factor's values are not numbers, they
  are categories. Runs that failed or lack the metric are left out, and the
  figure's title counts them.

  Args:
    results: The content of a results.json.
    factors: The dotted names of the grid's factors.
    metric: The name of a number in the runs' results.
    title: The metric's name in the figure.
  """
  lines, num_missing = _numbers_by_line(results, factors, metric)
  first_factor = factors[0]
  x_values = dict.fromkeys(
    run["factors"][first_factor] for run in results["runs"]
  )
  positions = _positions(list(x_values))
  looks = _line_looks(list(lines))

  figure = Figure((7, 4.5), layout="constrained")
  axes = figure.subplots()
  for key, numbers_by_x in lines.items():
    _draw_line(axes, numbers_by_x, positions, looks[key], _label(factors, key))
  _set_x_axis(axes, positions)
  axes.set(xlabel=first_factor, ylabel=title)
  if num_missing:
    num_runs = len(results["runs"])
    axes.set_title(
      f"{num_missing} of {num_runs} runs failed or have no number", fontsize=8
    )
  axes.legend(fontsize=7, handlelength=4)
  return figure


def _numbers_by_line(
  results: Mapping[str, Any], factors: Sequence[str], metric: str
) -> tuple[dict[_LineKey, _NumbersByX], int]:
  """Returns the numbers of each line, and the number of runs without one."""
  lines: dict[_LineKey, _NumbersByX] = {}
  num_missing = 0
  for run in results["runs"]:
    x, *other_values = [run["factors"][field] for field in factors]
    numbers_by_x = lines.setdefault(tuple(other_values), {})
    number = run["results"].get(metric)
    if number is None or not math.isfinite(number):
      num_missing += 1
    else:
      numbers_by_x.setdefault(x, []).append(number)
  return lines, num_missing


def _draw_line(
  axes: Any,
  numbers_by_x: _NumbersByX,
  positions: Mapping[Any, float],
  look: _LineLook,
  label: str,
) -> None:
  """Draws a line through the means over seeds, and a dot for each run.

  Args:
    axes: The axes.
    numbers_by_x: The numbers of the runs, by the value of the first factor.
    positions: The position of each value on the x-axis.
    look: The line's colour, marker and style.
    label: The name in the legend.
  """
  x_in_order = sorted(numbers_by_x, key=positions.__getitem__)
  line_positions = []
  means = []
  for x in x_in_order:
    line_positions.append(positions[x])
    means.append(statistics.mean(numbers_by_x[x]))
  axes.plot(line_positions, means, color=look.color, linestyle=look.line_style)
  # The legend shows the line and the dots together.
  axes.plot(
    [],
    [],
    color=look.color,
    linestyle=look.line_style,
    marker=look.marker,
    markersize=4,
    label=label,
  )
  for x in x_in_order:
    numbers = numbers_by_x[x]
    axes.plot(
      [positions[x]] * len(numbers),
      numbers,
      linestyle="none",
      marker=look.marker,
      markersize=4,
      color=look.color,
      alpha=0.6,
    )


def _are_numbers(values: Iterable[Any]) -> bool:
  """Returns True if all values are numbers. Booleans are not."""
  for value in values:
    if isinstance(value, bool) or not isinstance(value, int | float):
      return False
  return True


def _positions(x_values: Sequence[Any]) -> dict[Any, float]:
  """Returns the position of each value on the x-axis.

  A number is its own position. Other values are at 0, 1, 2, ….
  """
  if _are_numbers(x_values):
    return {value: value for value in x_values}
  return {value: index for index, value in enumerate(x_values)}


def _set_x_axis(axes: Any, positions: Mapping[Any, float]) -> None:
  """Puts a tick at each value, and chooses the scale."""
  places = list(positions.values())
  has_numbers = _are_numbers(positions)
  if has_numbers and min(places) > 0:
    if max(places) / min(places) >= _MIN_LOG_RATIO:
      axes.set_xscale("log")
      axes.minorticks_off()
  texts = [plots.legend_text(str(value)) for value in positions]
  axes.set_xticks(places, texts)
  if not has_numbers:
    axes.set_xlim(-0.5, len(places) - 0.5)


def _line_looks(keys: Sequence[_LineKey]) -> dict[_LineKey, _LineLook]:
  """Returns the colour, marker and style of each line.

  The second factor determines the colour, and further factors the style.
  """
  # The indices count the second factor's values, and the combinations of the
  # further factors' values, in the order of their appearance.
  color_indices: dict[_LineKey, int] = {}
  style_indices: dict[_LineKey, int] = {}
  looks = {}
  for key in keys:
    color_index = color_indices.setdefault(key[:1], len(color_indices))
    style_index = style_indices.setdefault(key[1:], len(style_indices))
    # Lines of one colour have different markers too.
    marker_index = color_index + style_index
    looks[key] = _LineLook(
      plots.COLORS[color_index % len(plots.COLORS)],
      plots.MARKERS[marker_index % len(plots.MARKERS)],
      _LINE_STYLES[style_index % len(_LINE_STYLES)],
    )
  return looks


def _label(factors: Sequence[str], key: _LineKey) -> str:
  """Returns a line's name in the legend."""
  if not key:
    return "mean over seeds"
  names = product.short_names(factors)
  parts = []
  for field, value in zip(factors[1:], key, strict=True):
    parts.append(f"{names[field]} = {value}")
  return plots.legend_text(", ".join(parts))
