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
from experiments.grid import FOLDER, Experiment, Grid
from experiments.tokens.config import ROWS

_LOSS = "validation/loss"
_TIMES = (1, 4, 12)
_MILLIONS = (
  2.4576  # tokens of fairness, in millions: 600 steps of 16 rows of 256
)
_BASELINE = "transformer"


def with_fairness(
  results: Mapping[str, Any], fairness: Mapping[str, Any] | None
) -> dict[str, Any]:
  """The runs of this grid, and fairness's ten seeds of each row as times=1."""
  runs = [
    {**run, "variant": f"{run['variant']},times=1"}
    for run in (fairness or {"runs": []})["runs"]
    if run["variant"] in ROWS
  ]
  return {"baseline": f"{_BASELINE},*", "runs": [*runs, *results["runs"]]}


def _everything(results: Mapping[str, Any]) -> dict[str, Any]:
  return with_fairness(
    results, found.read(FOLDER / "fairness/results.json", "runs")
  )


def slope(
  results: Mapping[str, Any], row: str, against: str
) -> tuple[float, float, float] | None:
  """The slope of a row's difference in loss over the logarithm of the tokens, in nats per factor e, with its 95% interval.

  Least squares on the means of the cells (a row at a number of tokens) is a weighted sum of these means. Its variance is the sum of their
  variances, each estimated from its own cell's runs; the degrees of freedom are Satterthwaite's (1946), as in Welch's test.

  Args:
    results: of `with_fairness`.
    row: one of ROWS.
    against: the row that is subtracted.

  Returns:
    None while a cell has fewer than two runs, and if a run lacks the loss.
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
      variances.append(
        (weight**2 * statistics.variance(losses) / len(losses), len(losses) - 1)
      )
  variance = sum(part for part, _ in variances)
  freedom = variance**2 / sum(part**2 / degrees for part, degrees in variances)
  reach = float(scipy.stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
  return total, total - reach, total + reach


def summarise(results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """The slopes of differences between rows, and the differences at every number of tokens."""
  everything, rows = _everything(results), []
  for row, against in (
    ("diff", _BASELINE),
    ("diff", "transformer_norm"),
    ("diff_v2", _BASELINE),
    ("transformer_norm", _BASELINE),
  ):
    if (found_slope := slope(everything, row, against)) is not None:
      at = lambda times: found.difference(
        everything,
        f"{row},times={times}",  # noqa: B023
        _LOSS,
        f"{against},times={times}",  # noqa: B023
      )
      differences = {
        f"at {_MILLIONS * times:.1f} M tokens": at(times) for times in _TIMES
      }
      names = f"{plots.style(row).name} − {plots.style(against).name}"
      rows.append(
        {"loss": names, "slope, nats per factor e": found_slope, **differences}
      )
  return rows


def _plot(results: Mapping[str, Any]) -> Figure:
  """Draws the losses, and the differences from the Transformer with their intervals, over the tokens; what there is of both."""
  everything = _everything(results)
  figure = Figure((9, 4), layout="constrained")
  losses, differences = figure.subplots(1, 2)
  tokens = [_MILLIONS * times for times in _TIMES]
  for place, row in enumerate(ROWS):
    x = np.multiply(
      tokens, 1.04 ** (place - (len(ROWS) - 1) / 2)
    )  # side by side
    style, cells = (
      plots.style(row),
      [
        found.sample(everything, f"{row},times={times}", _LOSS)
        for times in _TIMES
      ],
    )
    drawn = dict(color=style.color, marker=style.marker, capsize=2)
    mean, low, high = np.transpose(
      [found.mean_interval(cell) if cell else (math.nan,) * 3 for cell in cells]
    )
    losses.errorbar(
      x, mean, yerr=[mean - low, high - mean], label=style.name, **drawn
    )
    if row != _BASELINE:
      gaps = [
        found.difference(everything, f"{row},times={times}", _LOSS)
        or (math.nan,) * 3
        for times in _TIMES
      ]
      mean, low, high = np.transpose(gaps)
      differences.errorbar(x, mean, yerr=[mean - low, high - mean], **drawn)
  differences.axhline(0, color=plots.style(_BASELINE).color, linewidth=0.8)
  for axes, title in (
    (losses, "validation loss"),
    (differences, "loss minus the Transformer's"),
  ):
    axes.set_xscale("log")
    axes.set_xlim(
      tokens[0] / 1.2, tokens[-1] * 1.2
    )  # also while there is nothing to draw
    axes.minorticks_off()  # their labels would run into these
    axes.set_xticks(tokens, [f"{number:.3g}" for number in tokens])
    axes.set(xlabel="tokens (millions)", ylabel=f"{title} (nats per token)")
  losses.legend(fontsize=7)
  return figure


EXPERIMENT = Experiment(
  question="Does DIFF's difference from the Transformer shrink with more tokens?",
  grids={
    "cpu": Grid(
      tuple(f"{row},times={times}" for times in _TIMES[1:] for row in ROWS),
      f"{_BASELINE},*",
      (30, 31, 32),
    )
  },
  metrics={
    "loss": _LOSS,
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
  },
  summarise=summarise,
  plot=_plot,
)
