"""How the difference in loss moves with the number of tokens (README.md)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.stats
from matplotlib.figure import Figure

from experiments import plots
from experiments import results as found
from experiments.grid import Experiment, Grid
from experiments.tokens.config import ROWS

_LOSS = "validation/loss"
_TIMES = (1, 4, 12)
_BASELINE = "transformer_norm"


def slope(results: Mapping[str, Any], row: str, against: str = _BASELINE) -> tuple[float, float, float] | None:
  """The slope of a row's difference in loss over the logarithm of the tokens, in nats per factor e, with its 95% interval.

  Least squares on the means of the cells (a row at a number of tokens) is a weighted sum of these means. Its variance is the sum of their
  variances, each estimated from its own cell's runs; the degrees of freedom are Satterthwaite's (1946), as in Welch's test. None while
  a cell has fewer than two runs, and if a run lacks the loss.
  """
  x = np.log(_TIMES) - np.mean(np.log(_TIMES))
  weights = x / np.sum(x**2)
  total, variances = 0.0, []
  for sign, name in ((1, row), (-1, against)):
    for weight, times in zip(weights, _TIMES, strict=True):
      losses = found.sample(results, f"{name},times={times}", _LOSS)
      if losses is None:
        return None
      total += sign * weight * statistics.mean(losses)
      variances.append((weight**2 * statistics.variance(losses) / len(losses), len(losses) - 1))
  variance = sum(part for part, _ in variances)
  freedom = variance**2 / sum(part**2 / degrees for part, degrees in variances)
  reach = float(scipy.stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
  return total, total - reach, total + reach


def summarise(results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """For each other row: the slope of its difference from the baseline, and the differences."""
  rows = []
  for row in ROWS:
    if row != _BASELINE and (found_slope := slope(results, row)) is not None:
      differences = {f"at {2.5 * times:g} M tokens": found.difference(results, f"{row},times={times}", _LOSS) for times in _TIMES}
      rows.append(
        {f"loss − {plots.style(_BASELINE).name}'s": plots.style(row).name, "slope, nats per factor e": found_slope, **differences}
      )
  return rows


def _plot(results: Mapping[str, Any]) -> Figure:
  """Draws the losses, and the differences from the baseline with their intervals, over the tokens."""
  figure = Figure((9, 4), layout="constrained")
  losses, differences = figure.subplots(1, 2)
  tokens = [2.4576 * times for times in _TIMES]
  for row in ROWS:
    cells = [cell for times in _TIMES if (cell := found.sample(results, f"{row},times={times}", _LOSS))]
    if len(cells) == len(_TIMES):
      style = plots.style(row)
      means, low, high = np.transpose([found.mean_interval(cell) for cell in cells])
      losses.errorbar(tokens, means, yerr=[means - low, high - means], color=style.color, marker=style.marker, capsize=2, label=style.name)
      if row != _BASELINE:
        gap = np.transpose([found.difference(results, f"{row},times={times}", _LOSS) or [math.nan] * 3 for times in _TIMES])
        differences.errorbar(tokens, gap[0], yerr=[gap[0] - gap[1], gap[2] - gap[0]], color=style.color, marker=style.marker, capsize=2)
  differences.axhline(0, color=plots.style(_BASELINE).color, linewidth=0.8)
  for axes, title in ((losses, "validation loss"), (differences, "difference from the Transformer with wide heads and head norm")):
    axes.set_xscale("log")
    axes.set_xticks(tokens, [f"{number:.2g}" for number in tokens], minor=False)
    axes.set(xlabel="tokens (millions)", ylabel=f"{title}\n(nats per token)" if axes is differences else f"{title} (nats per token)")
  losses.legend(fontsize=7)
  return figure


EXPERIMENT = Experiment(
  question="Does DIFF's difference from the Transformer shrink with more tokens?",
  grids={"cpu": Grid(tuple(f"{row},times={times}" for times in _TIMES for row in ROWS), f"{_BASELINE},*", (30, 31, 32))},
  metrics={"loss": _LOSS, "AR-Hit": "validation/ar_hit", "Others": "validation/others"},
  summarise=summarise,
  plot=_plot,
)
