"""Compares architectures, each at its own learning rate, on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments import plots
from experiments.ablations.experiment import plot_losses
from experiments.grid import Experiment, Grid
from experiments.one_gpu.config import ARCHITECTURES, RATES

_LOSS = "validation/loss"
_SEEDS = (0, 1, 2)
# No seed that chose a learning rate is a seed of the comparison.
_TUNE_SEEDS = (100,)


def _plot(results: Mapping[str, Any]) -> Figure:
  """Draws losses over learning rates, or differences from the Transformer."""
  if results["grid"] == "tune":
    return plots.over_rates(results, _LOSS, "validation loss (nats per token)")
  return plot_losses(results)


def _tune_variants() -> tuple[str, ...]:
  variants = []
  for rate in RATES:
    for architecture in ARCHITECTURES:
      variants.append(f"{architecture},rate={rate:g}")
  return tuple(variants)


EXPERIMENT = Experiment(
  question=(
    "Does DIFF at its best learning rate beat the Transformer at its own, with"
    " 27M parameters?"
  ),
  grids={
    "tune": Grid(_tune_variants(), "transformer,*", _TUNE_SEEDS),
    "gpu": Grid(ARCHITECTURES, "transformer", _SEEDS),
  },
  metrics={
    "loss": _LOSS,
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
    "s/step": "train/step_seconds",
  },
  plot=_plot,
)
