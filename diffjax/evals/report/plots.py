"""Plots of a suite's results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def by_model(results: Mapping[str, Any], name: str | None = None) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
  """The name and the figures of each model.

  Args:
    results: A suite's results.
    name: Of the figures; None for all.

  Yields:
    The model's name, and its figures: name, at, value, low, high.
  """
  rows = [row for row in results["figures"] if name in (None, row["name"])]
  yield results["models"][0]["name"], rows
  if len(results["models"]) > 1:
    yield results["models"][1]["name"], [{**row, **row["against"]} for row in rows if "against" in row]


def draw_line(axes: Axes, x: Sequence[float], rows: Sequence[Mapping[str, Any]], **style: Any) -> None:
  """Draws a line of figures over x, with their intervals as a band."""
  value, low, high = (np.array([row[key] for row in rows], float) for key in ("value", "low", "high"))
  (line,) = axes.plot(x, value, marker="o", markersize=3, linewidth=1, **style)
  axes.fill_between(np.asarray(x, float), low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def save(figure: Figure, path: epath.PathLike) -> None:
  """Writes a plot as PNG."""
  with epath.Path(path).open("wb") as file:
    figure.savefig(file, format="png", dpi=150)
