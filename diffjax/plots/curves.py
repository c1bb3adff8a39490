"""Curves of runs' logs: the loss as a figure. It imports matplotlib, which takes a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.figure
import matplotlib.ticker

from diffjax.plots import styles
from diffjax.plots.styles import Style

# A run's style, and the lines of its log.
Log = tuple[Style, Sequence[Mapping[str, Any]]]


def series(
  lines: Sequence[Mapping[str, Any]], metric: str
) -> tuple[list[int], list[float]]:
  """The steps at which a metric was logged, and its values. Values that were not finite are left out."""
  points = [
    (line["step"], line[metric])
    for line in lines
    if line.get(metric) is not None
  ]
  return [step for step, _ in points], [value for _, value in points]


def loss_curves(logs: Sequence[Log]) -> matplotlib.figure.Figure:
  """Training and validation loss over steps: the whole run on a log axis, which shows its steep beginning, and the second half."""
  figure = matplotlib.figure.Figure((10, 4), layout="constrained")
  whole, half = figure.subplots(1, 2)
  last = max((line["step"] for _, lines in logs for line in lines), default=0)
  for axes, first in ((whole, 0), (half, last / 2)):
    for style, lines in logs:
      late = [line for line in lines if line["step"] >= first]
      for metric, look, label in (
        ("train/loss", {"linewidth": 0.9, "alpha": 0.7}, "training"),
        (
          "validation/loss",
          {
            "linewidth": 1.4,
            "linestyle": "--",
            "marker": style.marker,
            "markersize": 5,
          },
          "validation",
        ),
      ):
        steps, values = series(late, metric)
        if steps:
          axes.plot(
            steps,
            values,
            color=style.color,
            label=f"{style.name}, {label}",
            **look,
          )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
  whole.set(title="the whole run, steps on a log axis")
  half.set(title="its second half")
  whole.set_xscale("log")
  first = min((line["step"] for _, lines in logs for line in lines), default=1)
  whole.xaxis.set_major_locator(
    matplotlib.ticker.LogLocator(subs=(1, 2, 5) if last < 500 * first else (1,))
  )  # as many as have room
  whole.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
  whole.xaxis.set_major_formatter(
    matplotlib.ticker.StrMethodFormatter("{x:,.0f}")
  )
  half.xaxis.set_major_formatter(
    matplotlib.ticker.StrMethodFormatter("{x:,.0f}")
  )
  if whole.lines:
    whole.legend(fontsize=9)
  styles.tidy(figure)
  return figure
