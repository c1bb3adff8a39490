"""Tokens: does DIFF's difference from the Transformer shrink with more tokens?

Trains fairness's rows on four and twelve times the tokens. The endpoint is the
slope of the difference in loss over the logarithm of the tokens. See README.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.stats
from matplotlib.figure import Figure

from diffjax.evals.report.proportions import Estimate
from experiments import comparison, plots, results
from experiments.grid import FOLDER, Experiment, Grid
from experiments.tokens.config import ROWS

LOSS = "validation/loss"
BASELINE = "transformer"

# The number of tokens, as multiples of fairness's.
TIMES = (1, 4, 12)

# Fairness's tokens in millions: 600 steps of 16 rows of 256.
MILLIONS = 2.4576

# The rows whose difference in loss is fitted. The first pair is the endpoint.
PAIRS = (
  ("diff", BASELINE),
  ("diff", "transformer_norm"),
  ("diff_v2", BASELINE),
  ("transformer_norm", BASELINE),
)

# The numbers of tokens in millions.
TOKENS = [MILLIONS * times for times in TIMES]

_NO_INTERVAL = Estimate(math.nan, math.nan, math.nan)


def with_fairness(
  grid_results: Mapping[str, Any], fairness: Mapping[str, Any] | None
) -> dict[str, Any]:
  """Adds the runs of the experiment fairness, which have once the tokens.

  Args:
    grid_results: The results of this experiment's grid.
    fairness: The results of fairness's grid, or None if there are none.

  Returns:
    The baseline, and the runs of both. Fairness's runs are called
    "ROW,times=1". They come first.
  """
  runs = []
  if fairness is not None:
    for run in fairness["runs"]:
      if run["variant"] in ROWS:
        runs.append({**run, "variant": f"{run['variant']},times=1"})
  runs += grid_results["runs"]
  return {"baseline": f"{BASELINE},*", "runs": runs}


def slope(
  all_results: Mapping[str, Any], row: str, baseline: str
) -> Estimate | None:
  """Fits the slope of a difference in loss over the logarithm of the tokens.

  The fit is least squares on mean losses, one for each row and number of
  tokens. The slope is a weighted sum of these means, so its variance is the sum
  of their variances times the squared weights. Each variance is estimated from
  the runs of its row and number of tokens. The degrees of freedom are
  Satterthwaite's (1946), as in Welch's test.

  Args:
    all_results: The runs from `with_fairness`.
    row: One of ROWS.
    baseline: The row that is subtracted.

  Returns:
    The slope in nats per factor e, and the bounds of its 95% interval. None if
    there are fewer than two runs of a row and number of tokens, or if a run has
    no loss.
  """
  # The slope of least squares is Σ weight · value.
  log_times = np.log(TIMES)
  centered = log_times - np.mean(log_times)
  weights = centered / np.sum(centered**2)

  fitted_slope = 0.0
  variances = []
  degrees_of_freedom = []
  for name, sign in {row: 1, baseline: -1}.items():
    for times, weight in zip(TIMES, weights, strict=True):
      losses = comparison.sample(all_results, f"{name},times={times}", LOSS)
      if losses is None:
        return None
      fitted_slope += sign * weight * statistics.mean(losses)
      variances.append(weight**2 * statistics.variance(losses) / len(losses))
      degrees_of_freedom.append(len(losses) - 1)

  variance = sum(variances)
  # Satterthwaite: Var² / Σ (Varᵢ² / dfᵢ).
  denominator = 0.0
  for part, degrees in zip(variances, degrees_of_freedom, strict=True):
    denominator += part**2 / degrees
  quantile = float(scipy.stats.t.ppf(0.975, variance**2 / denominator))
  reach = quantile * math.sqrt(variance)
  return Estimate(fitted_slope, fitted_slope - reach, fitted_slope + reach)


def summarise(grid_results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns a table row for each pair in PAIRS.

  It has the slope of the difference, and the difference at every number of
  tokens. A pair has no row if its slope cannot be fitted yet.
  """
  all_results = _with_committed_fairness(grid_results)
  rows = []
  for row, baseline in PAIRS:
    fitted = slope(all_results, row, baseline)
    if fitted is None:
      continue
    cells: dict[str, Any] = {
      "loss": f"{plots.style(row).name} − {plots.style(baseline).name}",
      "slope, nats per factor e": fitted,
    }
    for times in TIMES:
      cells[f"at {MILLIONS * times:.1f} M tokens"] = comparison.difference(
        all_results, f"{row},times={times}", LOSS, f"{baseline},times={times}"
      )
    rows.append(cells)
  return rows


def _with_committed_fairness(
  grid_results: Mapping[str, Any],
) -> dict[str, Any]:
  """Adds the runs in fairness's results.json, if it exists."""
  fairness = results.read(FOLDER / "fairness/results.json", "runs")
  return with_fairness(grid_results, fairness)


def plot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the losses and the differences from the Transformer over the tokens.

  Cells without two runs are left out.
  """
  all_results = _with_committed_fairness(grid_results)
  figure = Figure((9, 4), layout="constrained")
  left, right = figure.subplots(1, 2)
  for index, row in enumerate(ROWS):
    # Rows at the same number of tokens stand side by side.
    shift = 1.04 ** (index - (len(ROWS) - 1) / 2)
    losses = _losses(all_results, row)
    _draw_row(left, row, shift, losses, label=plots.style(row).name)
    if row != BASELINE:
      differences = _differences(all_results, row)
      _draw_row(right, row, shift, differences, label=None)
  right.axhline(0, color=plots.style(BASELINE).color, linewidth=0.8)

  left.set_ylabel("validation loss (nats per token)")
  right.set_ylabel("loss minus the Transformer's (nats per token)")
  for axes in (left, right):
    _label_tokens(axes)
  left.legend(fontsize=7)
  return figure


def _losses(all_results: Mapping[str, Any], row: str) -> list[Estimate]:
  """Returns a row's mean loss and its interval, by number of tokens."""
  intervals = []
  for times in TIMES:
    losses = comparison.sample(all_results, f"{row},times={times}", LOSS)
    if losses:
      intervals.append(comparison.mean_interval(losses))
    else:
      intervals.append(_NO_INTERVAL)
  return intervals


def _differences(all_results: Mapping[str, Any], row: str) -> list[Estimate]:
  """Returns a row's difference from the baseline, by number of tokens."""
  intervals = []
  for times in TIMES:
    variant = f"{row},times={times}"
    interval = comparison.difference(all_results, variant, LOSS)
    intervals.append(interval or _NO_INTERVAL)
  return intervals


def _draw_row(
  axes: Any,
  row: str,
  shift: float,
  intervals: list[Estimate],
  label: str | None,
) -> None:
  """Draws a row's means and intervals over the tokens.

  Args:
    axes: The axes.
    row: One of ROWS.
    shift: A factor of the x-values.
    intervals: The mean and the bounds at each number of tokens.
    label: The name in the legend. None for no name.
  """
  style = plots.style(row)
  mean, low, high = np.transpose(intervals)
  axes.errorbar(
    np.multiply(TOKENS, shift),
    mean,
    yerr=[mean - low, high - mean],
    label=label,
    color=style.color,
    marker=style.marker,
    capsize=2,
  )


def _label_tokens(axes: Any) -> None:
  """Labels the x-axis with the numbers of tokens that were trained on."""
  axes.set_xscale("log")
  # Without data, matplotlib would choose other limits.
  axes.set_xlim(TOKENS[0] / 1.2, TOKENS[-1] * 1.2)
  # Labels of minor ticks would overlap the labels of major ticks.
  axes.minorticks_off()
  axes.set_xticks(TOKENS, [f"{number:.3g}" for number in TOKENS])
  axes.set_xlabel("tokens (millions)")


def _variants() -> tuple[str, ...]:
  """Returns every row at every number of tokens but fairness's."""
  variants = []
  for times in TIMES[1:]:
    for row in ROWS:
      variants.append(f"{row},times={times}")
  return tuple(variants)


EXPERIMENT = Experiment(
  question=(
    "Does DIFF's difference from the Transformer shrink with more tokens?"
  ),
  grids={
    "cpu": Grid(
      variants=_variants(), baseline=f"{BASELINE},*", seeds=(30, 31, 32)
    )
  },
  metrics={
    "loss": LOSS,
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
  },
  summarise=summarise,
  plot=plot,
)
