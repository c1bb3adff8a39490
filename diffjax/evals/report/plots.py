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

WIDTH = 10  # inches of every figure, so that their text has one size on a page


def styles_of(models: Sequence[Mapping[str, Any]]) -> list[Style]:
  """The styles of a result's models."""
  names = [str(model["name"]) for model in models]
  return variant_styles.together(
    [
      str(model.get("attention", name))
      for model, name in zip(models, names, strict=True)
    ],
    names,
  )


def by_model(
  results: Mapping[str, Any], name: str | None = None
) -> Iterator[tuple[Style, list[Mapping[str, Any]]]]:
  """The style and the figures of each model.

  Args:
    results: A suite's results.
    name: Of the figures; None for all.

  Yields:
    The model's style, and its figures: name, at, value, low, high.
  """
  first, *others = styles_of(results["models"])
  rows = [row for row in results["figures"] if name in (None, row["name"])]
  yield first, rows
  for other in others:
    yield other, [{**row, **row["against"]} for row in rows if "against" in row]


def draw_line(
  axes: Axes,
  x: Sequence[float],
  rows: Sequence[Mapping[str, Any]],
  style: Style,
  suffix: str = "",
  linestyle: str = "-",
) -> None:
  """Draws a line of figures over x, with their intervals as a band. The suffix follows the model's name in the legend."""
  value, low, high = _bounds(rows)
  axes.plot(
    x,
    value,
    linestyle,
    color=style.color,
    marker=style.marker,
    markersize=4,
    linewidth=1.3,
    label=style.name + suffix,
  )
  axes.fill_between(
    np.asarray(x, float), low, high, color=style.color, alpha=0.15, linewidth=0
  )


def draw_points(
  axes: Axes,
  categories: Sequence[str],
  rows: Sequence[Mapping[str, Any]],
  style: Style,
  shift: float,
) -> None:
  """Draws figures of categories, which have no order, as points with intervals, a little beside the categories' places."""
  value, low, high = _bounds(rows)
  axes.errorbar(
    np.arange(len(categories)) + shift,
    value,
    yerr=[value - low, high - value],
    linestyle="none",
    color=style.color,
    marker=style.marker,
    markersize=5,
    capsize=3,
    elinewidth=1,
    label=style.name,
  )
  axes.set_xticks(range(len(categories)), categories)


def _bounds(
  rows: Sequence[Mapping[str, Any]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  value, low, high = (
    np.array([row[key] for row in rows], float)
    for key in ("value", "low", "high")
  )
  return value, low, high


def save(figure: Figure, path: epath.PathLike) -> None:
  """Writes a plot as PNG."""
  styles.tidy(figure)
  with epath.Path(path).open("wb") as file:
    figure.savefig(file, format="png", dpi=200)
