"""Plots of logged metrics over steps.

Importing this module imports matplotlib, which takes about a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.figure
import matplotlib.ticker
from matplotlib.axes import Axes

from diffjax.plots import styles
from diffjax.plots.styles import Style

# The style of a run, and the entries of its log.
Log = tuple[Style, Sequence[Mapping[str, Any]]]

# If the last step is at most this many times the first, a log axis has ticks at
# 1, 2 and 5 times a power of ten. Otherwise these ticks would be too close.
_MAX_RATIO_WITH_MORE_TICKS = 500


def series(
  lines: Sequence[Mapping[str, Any]], metric: str
) -> tuple[list[int], list[float]]:
  """Returns the steps and the values of a metric in a log.

  Entries without the metric are left out, and so are values that were not
  finite, which a log has as None.

  Args:
    lines: The entries of a log. Each has "step" and metrics by name.
    metric: The name of the metric, such as "train/loss".
  """
  steps = []
  values = []
  for line in lines:
    value = line.get(metric)
    if value is not None:
      steps.append(line["step"])
      values.append(value)
  return steps, values


def loss_curves(logs: Sequence[Log]) -> matplotlib.figure.Figure:
  """Returns a figure of the training and validation losses over steps.

  The left side shows all steps on a log axis, so that the steep beginning is
  visible. The right side shows the second half of the steps.

  Args:
    logs: The style and the log entries of each run.
  """
  figure = matplotlib.figure.Figure((10, 4), layout="constrained")
  left, right = figure.subplots(1, 2)
  steps = [line["step"] for _, lines in logs for line in lines]
  first_step = min(steps, default=1)
  last_step = max(steps, default=0)
  for style, lines in logs:
    second_half = [line for line in lines if line["step"] >= last_step / 2]
    _plot_losses(left, style, lines)
    _plot_losses(right, style, second_half)

  left.set(title="the whole run, steps on a log axis")
  right.set(title="its second half")
  # This resets the formatters, so it comes before them.
  left.set_xscale("log")
  for axes in (left, right):
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.xaxis.set_major_formatter(
      matplotlib.ticker.StrMethodFormatter("{x:,.0f}")
    )
  # The multiples of powers of ten that have a tick.
  multiples: tuple[int, ...] = (1,)
  if last_step < _MAX_RATIO_WITH_MORE_TICKS * first_step:
    multiples = (1, 2, 5)
  left.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=multiples))
  left.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
  if left.lines:
    left.legend(fontsize=9)
  styles.tidy(figure)
  return figure


def _plot_losses(
  axes: Axes, style: Style, lines: Sequence[Mapping[str, Any]]
) -> None:
  """Draws a run's training losses as a line, validation losses as a dashed one.

  Args:
    axes: the plot.
    style: the name, colour and marker of the run.
    lines: the entries of its log. Losses that are not in it are not drawn.
  """
  steps, losses = series(lines, "train/loss")
  if steps:
    axes.plot(
      steps,
      losses,
      color=style.color,
      label=f"{style.name}, training",
      linewidth=0.9,
      alpha=0.7,
    )
  steps, losses = series(lines, "validation/loss")
  if steps:
    axes.plot(
      steps,
      losses,
      color=style.color,
      label=f"{style.name}, validation",
      linewidth=1.4,
      linestyle="--",
      marker=style.marker,
      markersize=5,
    )
