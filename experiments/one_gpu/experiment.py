"""The Transformer, DIFF and DIFF V2, each at its own learning rate, on text of which no token is seen twice (README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments import plots
from experiments import results as found
from experiments.ablations.experiment import plot_losses
from experiments.grid import Experiment, Grid
from experiments.one_gpu.config import ARCHITECTURES, RATES, parts

_LOSS = "validation/loss"
# The seed of the pilots. Runs have others, so that no seed that chose a learning rate is reported.
_PILOT_SEED = 100


def losses(results: Mapping[str, Any]) -> dict[str, dict[float, float]]:
  """The pilots' validation losses, by architecture and learning rate."""
  out: dict[str, dict[float, float]] = {}
  for variant in dict.fromkeys(run["variant"] for run in results["runs"]):
    architecture, rate = parts(variant)
    if rate is not None and (values := found.values(results, variant, _LOSS)):
      out.setdefault(architecture, {})[rate] = values[_PILOT_SEED]
  return out


def best_rates(results: Mapping[str, Any]) -> dict[str, float]:
  """Each architecture's learning rate with the lowest loss.

  Only rates that all architectures have tried count, so that none has had more tries than another. Without any it is the default."""
  tried = losses(results)
  common = [
    rate
    for rate in RATES
    if all(
      rate in tried.get(architecture, {}) for architecture in ARCHITECTURES
    )
  ] or [RATES[0]]
  return {
    architecture: min(
      common, key=lambda rate: tried.get(architecture, {}).get(rate, 0.0)
    )
    for architecture in ARCHITECTURES
  }


def _plot(results: Mapping[str, Any]) -> Figure:
  """Draws the pilots' losses over their learning rates, or the runs' differences from the Transformer."""
  if results["grid"] == "pilot":
    return plots.over_rates(results, _LOSS, "validation loss (nats per token)")
  return plot_losses(results)


EXPERIMENT = Experiment(
  question="Does DIFF at its best learning rate beat the Transformer at its own, with 27M parameters?",
  grids={
    "pilot": Grid(
      tuple(
        f"{name},rate={rate:g}" for rate in RATES for name in ARCHITECTURES
      ),
      "transformer,*",
      (_PILOT_SEED,),
    ),
    "gpu": Grid(ARCHITECTURES, "transformer", (0, 1, 2)),
  },
  metrics={
    "loss": _LOSS,
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
    "s/step": "train/step_seconds",
  },
  plot=_plot,
)
