"""The loss by position in long rows, before and after a length extension with a larger RoPE base (README.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import matplotlib.ticker
from matplotlib.figure import Figure

from diffjax.config import Config
from experiments import plots
from experiments.ablations.experiment import twins
from experiments.grid import Experiment


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Cumulative NLL (nats per token) by position, before and after the extension, on the same documents."""
  from diffjax.evals.position_nll import PositionNLL
  from diffjax.inference.trained import load

  extended = load(workdir)
  start = load(extended.config.train.init_from)
  own = start.config.data.length  # of the rows that it was trained on
  start = dataclasses.replace(
    start, config=dataclasses.replace(start.config, data=extended.config.data)
  )
  suite = PositionNLL(
    length=config.data.length,
    rows=config.eval.rows,
    rows_of="long",
    first=max(1, own // 4),
    per_octave=2,
    beyond_limit=True,
  )
  curves = {}
  for name, trained in (("before", start), ("after", extended)):
    curves[name] = {
      figure.at["position"]: figure.statistic(figure.units)
      for figure in suite.evaluate(trained)
    }
  before, after = curves["before"], curves["after"]
  return {
    "after": after[config.data.length],
    "after_short": after[own],
    "gain": after[own] - after[config.data.length],
    "before": before[config.data.length],
    "before_short": before[own],
    "own_length": own,
    "positions": list(after),
    "curve_before": list(before.values()),
    "curve_after": list(after.values()),
  }


def plot(results: Mapping[str, Any]) -> Figure:
  """Draws the cumulative NLL by position: before and after the extension, and after it alone."""
  runs = plots.runs_by_variant(results)
  positions = results["runs"][0]["results"]["positions"]
  before, after = (
    {
      variant: [run[f"curve_{name}"] for run in own]
      for variant, own in runs.items()
    }
    for name in ("before", "after")
  )
  figure = Figure((11, 4.2), layout="constrained")
  both, alone = figure.subplots(1, 2)
  plots.over_seeds(both, positions, before, ":", ", before")
  plots.over_seeds(both, positions, after, "-", ", after")
  plots.over_seeds(alone, positions, after)
  for axes, title in (
    (both, "Before and after the extension"),
    (alone, "After the extension"),
  ):
    axes.axvline(
      results["runs"][0]["results"]["own_length"],
      color="0.6",
      linewidth=0.8,
      zorder=0,
    )
    axes.set(
      title=title,
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
  question="Does DIFF gain more from longer rows, before and after a length extension?",
  grids={
    "cpu": twins("tiny", seeds=5),
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
