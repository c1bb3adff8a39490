"""The default plot of `Grid.product`: a number over the first factor, and a line for each combination of the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments import plots, product

# Positive numbers whose ratio is at least this are drawn on a logarithmic axis.
_LOG_RATIO = 10
_DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))

_Lines = dict[tuple[Any, ...], dict[Any, list[float]]]


def plot(
  results: Mapping[str, Any],
  factors: Sequence[str],
  metric: str,
  title: str,
) -> Figure:
  """Draws a number over the first factor: a dot per run, and lines through the means over seeds.

  The second factor's values are colours, and the combinations of further factors are line styles. Numbers stand at their values, and other
  values are categories. Runs that failed or lack the number are left out. The figure's title counts them.

  Args:
    results: As in results.json.
    factors: The dotted names of the grid's factors.
    metric: The name of the number in the runs' results.
    title: The number's name in the figure.
  """
  lines, num_left_out = _read(results, factors, metric)
  x_values = list(
    dict.fromkeys(run["factors"][factors[0]] for run in results["runs"])
  )
  positions = _positions(x_values)
  looks = _looks(list(lines), factors)
  figure = Figure((7, 4.5), layout="constrained")
  axes = figure.subplots()
  for key, numbers_by_x in lines.items():
    color, marker, dashes = looks[key]
    x_in_order = sorted(numbers_by_x, key=positions.__getitem__)
    axes.plot(
      [positions[x] for x in x_in_order],
      [statistics.mean(numbers_by_x[x]) for x in x_in_order],
      color=color,
      linestyle=dashes,
    )
    # The legend shows the line together with its dots.
    axes.plot(
      [],
      [],
      color=color,
      linestyle=dashes,
      marker=marker,
      markersize=4,
      label=_label(factors, key),
    )
    for x in x_in_order:
      numbers = numbers_by_x[x]
      axes.plot(
        [positions[x]] * len(numbers),
        numbers,
        linestyle="none",
        marker=marker,
        markersize=4,
        color=color,
        alpha=0.6,
      )
  _set_x_axis(axes, positions)
  axes.set(xlabel=factors[0], ylabel=title)
  if num_left_out:
    num_runs = len(results["runs"])
    axes.set_title(
      f"{num_left_out} of {num_runs} runs failed or have no number",
      fontsize=8,
    )
  axes.legend(fontsize=7, handlelength=4)
  return figure


def _read(
  results: Mapping[str, Any], factors: Sequence[str], metric: str
) -> tuple[_Lines, int]:
  """Returns the numbers of each line by the first factor, and the number of runs without one."""
  lines: _Lines = {}
  num_left_out = 0
  for run in results["runs"]:
    x, *others = (run["factors"][field] for field in factors)
    numbers_by_x = lines.setdefault(tuple(others), {})
    number = run["results"].get(metric)
    if number is None or not math.isfinite(number):
      num_left_out += 1
    else:
      numbers_by_x.setdefault(x, []).append(number)
  return lines, num_left_out


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _positions(x_values: Sequence[Any]) -> dict[Any, float]:
  """Returns the place of each value on the x-axis."""
  if all(_is_number(value) for value in x_values):
    return {value: value for value in x_values}
  return {value: index for index, value in enumerate(x_values)}


def _set_x_axis(axes: Any, positions: Mapping[Any, float]) -> None:
  """Puts a tick at each value, on a logarithmic axis if they span an order of magnitude."""
  are_numbers = all(_is_number(value) for value in positions)
  places = list(positions.values())
  if are_numbers and min(places) > 0:
    if max(places) / min(places) >= _LOG_RATIO:
      axes.set_xscale("log")
      axes.minorticks_off()
  texts = [plots.legend_text(str(value)) for value in positions]
  axes.set_xticks(places, texts)
  if not are_numbers:
    axes.set_xlim(-0.5, len(places) - 0.5)


def _looks(
  keys: Sequence[tuple[Any, ...]], factors: Sequence[str]
) -> dict[tuple[Any, ...], tuple[str, str, Any]]:
  """Returns the colour, the marker and the line style of each line."""
  looks = {}
  second_values = list(dict.fromkeys(key[:1] for key in keys))
  further_values = list(dict.fromkeys(key[1:] for key in keys))
  for key in keys:
    color_index = second_values.index(key[:1])
    dash_index = further_values.index(key[1:])
    color = plots.COLORS[color_index % len(plots.COLORS)]
    marker = plots.MARKERS[(color_index + dash_index) % len(plots.MARKERS)]
    looks[key] = (color, marker, _DASHES[dash_index % len(_DASHES)])
  return looks


def _label(factors: Sequence[str], key: tuple[Any, ...]) -> str:
  """Returns a line's name in the legend."""
  if not key:
    return "mean over seeds"
  names = product.short_names(factors)
  parts = []
  for field, value in zip(factors[1:], key, strict=True):
    parts.append(f"{names[field]} = {value}")
  return plots.legend_text(", ".join(parts))
