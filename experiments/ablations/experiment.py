"""Ablations: which parts of DIFF matter for its loss?

Trains the rows of the paper's ablation table, DIFF V2, and DIFF with other
numbers of heads, and compares their validation losses. See README.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import comparison, plots
from experiments.ablations.config import ROWS
from experiments.grid import Experiment, Grid

LOSS = "validation/loss"


def twins(size: str, num_seeds: int = 1) -> Grid:
  """Returns a grid of the Transformer, DIFF and DIFF V2.

  It is for other experiments, which measure these models after training or
  continue their training.

  Args:
    size: A key of `SIZES` in config.py.
    num_seeds: The number of seeds, from 0.
  """
  transformer = _variant("transformer", size)
  diff = _variant("diff", size)
  diff_v2 = _variant("diff_v2", size)
  return Grid(
    variants=(transformer, diff, diff_v2),
    baseline=transformer,
    seeds=tuple(range(num_seeds)),
  )


def plot_losses(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the loss of each row minus the mean loss of the baseline.

  Dots are single runs. A marker is the mean over seeds, with Welch's 95%
  interval. It is filled if Dunnett's test also finds the difference.

  Args:
    grid_results: The content of a results.json whose runs have the validation
      loss.
  """
  losses = _losses_by_variant(grid_results)
  styles = plots.styles_of(losses)
  baseline = grid_results["baseline"]
  # Without runs of the baseline there are no differences, and nothing is drawn.
  baseline_mean = math.nan
  if losses.get(baseline):
    baseline_mean = float(np.mean(losses[baseline]))
  significant = comparison.significant_variants(grid_results, LOSS)

  figure = Figure((9, 1.4 + 0.35 * len(losses)), layout="constrained")
  axes = figure.subplots()
  for y, (variant, variant_losses) in enumerate(losses.items()):
    style = styles[variant]
    # A dot for each run, beside the marker of the mean.
    differences = np.array(variant_losses) - baseline_mean
    axes.plot(
      differences,
      [y + 0.25] * len(differences),
      ".",
      color=style.color,
      alpha=0.5,
      markersize=5,
    )
    # The baseline, and variants with an incomplete sample, have no marker.
    interval = comparison.difference(grid_results, variant, LOSS)
    if interval is None:
      continue
    mean, low, high = interval
    fill = style.color if variant in significant else "white"
    axes.errorbar(
      [mean],
      [y],
      xerr=[[mean - low], [high - mean]],
      color=style.color,
      marker=style.marker,
      markerfacecolor=fill,
      capsize=3,
    )
  axes.axvline(0, color="black", linewidth=0.8)
  names = [style.name for style in styles.values()]
  axes.set_yticks(range(len(names)), names)
  axes.invert_yaxis()
  axes.set_xlabel(
    f"validation loss minus that of the {plots.style(baseline).name}"
    " (nats per token)\n"
    "bars: Welch's 95% interval; filled: also Dunnett's p < 0.05;"
    " dots: single runs"
  )
  return figure


def _losses_by_variant(
  grid_results: Mapping[str, Any],
) -> dict[str, list[float]]:
  """Returns the losses of each variant's runs. Diverged runs have none."""
  losses = {}
  for variant, runs in plots.runs_by_variant(grid_results).items():
    losses[variant] = [run[LOSS] for run in runs if run[LOSS] is not None]
  return losses


def _variant(row: str, size: str) -> str:
  """Returns the variant of a row at a size. `tiny` is the default size."""
  if size == "tiny":
    return row
  return f"{row},size={size}"


def _all_rows(size: str, head_counts: Sequence[int], num_seeds: int) -> Grid:
  """Returns the grid of all rows, and of DIFF with other numbers of heads."""
  variants = [_variant(row, size) for row in ROWS]
  for count in head_counts:
    variants.append(f"{_variant('diff', size)},heads={count}")
  return Grid(
    variants=tuple(variants),
    baseline=_variant("transformer", size),
    seeds=tuple(range(num_seeds)),
  )


EXPERIMENT = Experiment(
  question="Which parts of DIFF make it better than the Transformer?",
  grids={
    "cpu": _all_rows("tiny", head_counts=(4, 8, 16), num_seeds=5),
    "gpu": _all_rows("125m", head_counts=(2, 4, 8, 16), num_seeds=1),
    "tpu": _all_rows("1b", head_counts=(2, 4, 16), num_seeds=1),
  },
  metrics={
    "loss": LOSS,
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
  },
  plot=plot_losses,
)
