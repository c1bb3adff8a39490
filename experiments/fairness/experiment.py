"""Fairness: does DIFF differ from the Transformer if both are tuned?

The grid "tune" chooses a learning rate and a scale of the embeddings for each
row, on seeds of its own. The grid "cpu" compares the rows with these settings
on fresh seeds. See README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments import comparison, plots
from experiments.ablations.experiment import plot_losses
from experiments.fairness.config import RATES, ROWS, SCALES
from experiments.grid import Experiment, Grid

LOSS = "validation/loss"

# Further comparisons. The table compares every row with the Transformer.
PAIRS = (
  ("diff", "transformer_norm"),
  ("diff_v2", "gated"),
  ("diff", "diff_without_norm"),
)


def summarise(grid_results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns a table row for the difference in loss of each pair in PAIRS.

  The grid "tune" has none: its variants have other names.
  """
  return comparison.contrasts(grid_results, "loss", LOSS, PAIRS)


def plot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the differences in loss from the Transformer.

  For the grid "tune", draws the loss over the learning rates instead.
  """
  if grid_results["grid"] == "tune":
    title = "validation loss (nats per token)"
    return plots.over_rates(grid_results, LOSS, title)
  return plot_losses(grid_results)


def _tuning_variants() -> tuple[str, ...]:
  """Returns every row at every scale of embeddings and learning rate."""
  variants = []
  for row in ROWS:
    for scale in SCALES:
      for rate in RATES:
        variants.append(f"{row},scale={scale},rate={rate:g}")
  return tuple(variants)


EXPERIMENT = Experiment(
  question="Does DIFF, tuned, differ from the Transformer, tuned?",
  grids={
    "tune": Grid(
      variants=_tuning_variants(), baseline="transformer,*", seeds=(100, 101)
    ),
    "cpu": Grid(
      variants=tuple(ROWS),
      baseline="transformer",
      seeds=(10, 11, 12, 13, 14, 15, 16, 17, 18, 19),
    ),
  },
  metrics={
    "loss": LOSS,
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
  },
  summarise=summarise,
  plot=plot,
)
