"""Plots of λ over training, from the logs of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.figure
import matplotlib.ticker
from matplotlib.axes import Axes

from diffjax.plots import styles
from diffjax.plots.curves import Log, series

# The beginning of the metrics of λ in a log, such as "lambda/layer_03".
_PREFIX = "lambda/layer_"

# In inches.
_WIDTH = 10
_HEIGHT_PER_RUN = 3.6

# The last quarter of the colormap is too bright for lines on white.
_LAST_COLOR = 0.75
_LEGEND_ROWS = 10


def lambda_curves(logs: Sequence[Log]) -> matplotlib.figure.Figure | None:
  """Returns a plot of each layer's λ over steps, or None if no run has λ.

  Each run with λ has its own axes.

  Args:
    logs: The style and the log entries of each run.
  """
  logs_with_lambda = []
  for style, lines in logs:
    if _lambda_metrics(lines):
      logs_with_lambda.append((style, lines))
  if not logs_with_lambda:
    return None
  num_runs = len(logs_with_lambda)
  figure = matplotlib.figure.Figure(
    (_WIDTH, _HEIGHT_PER_RUN * num_runs), layout="constrained"
  )
  column = figure.subplots(num_runs, 1, squeeze=False)[:, 0]
  for axes, (style, lines) in zip(column, logs_with_lambda, strict=True):
    _draw_layers(axes, lines)
    axes.set_title(f"λ of {style.name}")
  styles.tidy(figure)
  return figure


def _lambda_metrics(lines: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the names of the metrics in a log that hold λ, one for each layer.

  Args:
    lines: The entries of the log, which are metrics by name.
  """
  metrics: set[str] = set()
  for line in lines:
    metrics.update(name for name in line if name.startswith(_PREFIX))
  return sorted(metrics)


def _draw_layers(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
  """Draws λ of each layer, with darker lines for lower layers."""
  colormap = matplotlib.colormaps["viridis"]
  metrics = _lambda_metrics(lines)
  last_index = max(len(metrics) - 1, 1)
  for index, metric in enumerate(metrics):
    layer = int(metric.removeprefix(_PREFIX))
    steps, values = series(lines, metric)
    axes.plot(
      steps,
      values,
      color=colormap(_LAST_COLOR * index / last_index),
      linewidth=1.4,
      label=f"layer {layer}",
    )
  axes.set(xlabel="step", ylabel="λ")
  axes.xaxis.set_major_formatter(
    matplotlib.ticker.StrMethodFormatter("{x:,.0f}")
  )
  num_columns = math.ceil(len(metrics) / _LEGEND_ROWS)
  axes.legend(
    fontsize=9,
    ncols=num_columns,
    loc="center left",
    bbox_to_anchor=(1, 0.5),
  )
