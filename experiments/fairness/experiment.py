"""Each architecture at its own learning rate and scale of embeddings (README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments import plots
from experiments import results as stored
from experiments.ablations.experiment import plot_losses
from experiments.fairness.config import RATES, ROWS, SCALES
from experiments.grid import Experiment, Grid

LOSS = "validation/loss"


def _summarise(results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """The differences that the README asks for beside those from the Transformer. Empty for the grid of tuning."""
  pairs = (
    ("diff", "transformer_norm"),
    ("diff_v2", "gated"),
    ("diff", "diff_without_norm"),
  )
  return stored.contrasts(results, "loss", LOSS, pairs)


def _plot(results: Mapping[str, Any]) -> Figure:
  if results["grid"] == "tune":
    return plots.over_rates(results, LOSS, "validation loss (nats per token)")
  return plot_losses(results)


_TUNED = tuple(
  f"{row},scale={scale},rate={rate:g}"
  for row in ROWS
  for scale in SCALES
  for rate in RATES
)

EXPERIMENT = Experiment(
  question="Does DIFF, tuned, differ from the Transformer, tuned?",
  grids={
    "tune": Grid(_TUNED, "transformer,*", (100, 101)),
    "cpu": Grid(tuple(ROWS), "transformer", tuple(range(10, 20))),
  },
  metrics={
    "loss": LOSS,
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
  },
  summarise=_summarise,
  plot=_plot,
)
