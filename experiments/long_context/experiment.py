"""Long context: does DIFF gain more from longer rows?

Continues the training of ablations' models on longer rows, with a larger RoPE
base, and measures the loss by position before and after. See README.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import matplotlib.ticker
from matplotlib.figure import Figure

from diffjax.config import Config
from experiments import plots, series
from experiments.ablations.experiment import twins
from experiments.grid import Experiment

if TYPE_CHECKING:
  from diffjax.evals.position_nll import PositionNLL
  from diffjax.inference.trained import Trained


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Returns the loss by position before and after the length extension.

  The loss is the cumulative negative log-likelihood: the mean over the first p
  tokens of each document, in nats per token. Both models are measured on the
  same documents, which fill a long row.

  Args:
    workdir: The directory of the extended run. The run that it started from is
      `config.train.init_from`.
    config: The config of the extended run.

  Returns:
    The curves, and their values at two positions: the length before the
    extension (`own_length`) and the length after it.
  """
  # Listing experiments does not need JAX.
  from diffjax.evals.position_nll import PositionNLL
  from diffjax.inference.trained import load

  extended = load(workdir)
  start = load(extended.config.train.init_from)
  own_length = start.config.data.length
  new_length = config.data.length
  # Both are measured on the documents of the extended run.
  start_config = dataclasses.replace(start.config, data=extended.config.data)
  start = dataclasses.replace(start, config=start_config)
  suite = PositionNLL(
    length=new_length,
    rows=config.eval.rows,
    rows_of="long",
    first=max(1, own_length // 4),
    per_octave=2,
    beyond_limit=True,
  )
  before = _nll_by_position(suite, start)
  after = _nll_by_position(suite, extended)
  return {
    "after": after[new_length],
    "after_short": after[own_length],
    "gain": after[own_length] - after[new_length],
    "before": before[new_length],
    "before_short": before[own_length],
    "own_length": own_length,
    "positions": list(after),
    "curve_before": list(before.values()),
    "curve_after": list(after.values()),
  }


def _nll_by_position(suite: PositionNLL, trained: Trained) -> dict[int, float]:
  """Returns a model's cumulative NLL by position."""
  nll = {}
  for figure in suite.evaluate(trained):
    nll[figure.at["position"]] = figure.statistic(figure.units)
  return nll


def plot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the cumulative NLL by position.

  The left panel has the curves before and after the extension. The right panel
  has the curves after it, on a scale of their own.
  """
  first_run = series.first_run(grid_results)
  positions = first_run["positions"]
  before = series.curves(grid_results, "curve_before")
  after = series.curves(grid_results, "curve_after")

  figure = Figure((11, 4.2), layout="constrained")
  left, right = figure.subplots(1, 2)
  plots.over_seeds(left, positions, before, linestyle=":", suffix=", before")
  plots.over_seeds(left, positions, after, linestyle="-", suffix=", after")
  plots.over_seeds(right, positions, after)
  left.set_title("Before and after the extension")
  right.set_title("After the extension")
  for axes in (left, right):
    axes.axvline(first_run["own_length"], color="0.6", linewidth=0.8, zorder=0)
    axes.set(
      xlabel="position (tokens); the line is the length before",
      ylabel="cumulative NLL (nats per token)",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(
      matplotlib.ticker.StrMethodFormatter("{x:g}")
    )
    axes.legend(fontsize=8)
  return figure


EXPERIMENT = Experiment(
  question=(
    "Does DIFF gain more from longer rows, before and after a length extension?"
  ),
  grids={
    "cpu": twins("tiny", num_seeds=5),
    "gpu": twins("125m"),
    "tpu": twins("1b"),
  },
  metrics={
    "NLL after": "after",
    "after, own length": "after_short",
    "gain from own length to new": "gain",
    "before": "before",
    "before, own length": "before_short",
  },
  pretrained="ablations",
  measure=measure,
  plot=plot,
)
