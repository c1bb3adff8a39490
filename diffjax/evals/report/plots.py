"""Plots of a suite's results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffjax.model import variant_styles
from diffjax.plots import styles
from diffjax.plots.styles import Style

# The width of plots in inches. All suites share it, so that the text of their
# plots has the same size on a page.
WIDTH = 10


def styles_of(models: Sequence[Mapping[str, Any]]) -> list[Style]:
  """Returns styles that distinguish the models of a suite's results.

  Args:
    models: The descriptions of one or two models, with "name" and "attention".
  """
  names = []
  attention_variants = []
  for model in models:
    name = str(model["name"])
    names.append(name)
    # Results that diffjax did not write may have no attention variant. Then the
    # name chooses the style.
    attention_variants.append(str(model.get("attention", name)))
  return variant_styles.distinct_styles(attention_variants, names)


def by_model(
  results: Mapping[str, Any], name: str | None = None
) -> Iterator[tuple[Style, list[Mapping[str, Any]]]]:
  """Yields the style and the figures of each model, of one or two.

  In a suite's results, each figure has the first model's value and interval. If
  the second model has the figure too, its field "against" has the second
  model's value and interval.

  Args:
    results: A suite's results.
    name: The name of the figures. None for all figures.

  Yields:
    The model's style, and its figures with name, at, value, low and high.
  """
  styles_of_models = styles_of(results["models"])
  figures = []
  for figure in results["figures"]:
    if name is None or figure["name"] == name:
      figures.append(figure)
  yield styles_of_models[0], figures
  if len(styles_of_models) == 1:
    return

  figures_of_second: list[Mapping[str, Any]] = []
  for figure in figures:
    if "against" in figure:
      figures_of_second.append({**figure, **figure["against"]})
  yield styles_of_models[1], figures_of_second


def draw_line(
  axes: Axes,
  x: Sequence[float],
  rows: Sequence[Mapping[str, Any]],
  style: Style,
  suffix: str = "",
  linestyle: str = "-",
) -> None:
  """Draws a line of figures over x, with their intervals as a band.

  Args:
    axes: Where to draw.
    x: The x coordinate of each figure.
    rows: The figures of one model, from `by_model`.
    style: The model's style.
    suffix: What follows the model's name in the legend.
    linestyle: A line style of matplotlib.
  """
  axes.plot(
    x,
    _column(rows, "value"),
    linestyle,
    color=style.color,
    marker=style.marker,
    markersize=4,
    linewidth=1.3,
    label=style.name + suffix,
  )
  axes.fill_between(
    np.asarray(x, float),
    _column(rows, "low"),
    _column(rows, "high"),
    color=style.color,
    alpha=0.15,
    linewidth=0,
  )


def draw_points(
  axes: Axes,
  categories: Sequence[str],
  rows: Sequence[Mapping[str, Any]],
  style: Style,
  shift: float,
) -> None:
  """Draws the figures of unordered categories as points with intervals.

  Args:
    axes: Where to draw.
    categories: The labels of the x axis.
    rows: The figures of one model, from `by_model`, one for each category and
      in the same order.
    style: The model's style.
    shift: The distance of the points from the categories' x coordinates, so
      that the points of several models do not overlap.
  """
  value = _column(rows, "value")
  length_below = value - _column(rows, "low")
  length_above = _column(rows, "high") - value
  axes.errorbar(
    np.arange(len(categories)) + shift,
    value,
    yerr=[length_below, length_above],
    linestyle="none",
    color=style.color,
    marker=style.marker,
    markersize=5,
    capsize=3,
    elinewidth=1,
    label=style.name,
  )
  axes.set_xticks(range(len(categories)), categories)


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
  """Returns one field of all figures. None becomes NaN."""
  return np.array([row[key] for row in rows], float)


def save(figure: Figure, path: epath.PathLike) -> None:
  """Writes a plot as PNG."""
  styles.tidy(figure)
  with epath.Path(path).open("wb") as file:
    figure.savefig(file, format="png", dpi=200)
