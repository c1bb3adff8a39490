"""The paper's ablation table and a few further rows (README.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import plots
from experiments import results as found
from experiments.ablations.config import ROWS
from experiments.grid import Experiment, Grid

_LOSS = "validation/loss"


def _variant(row: str, size: str) -> str:
  return row if size == "tiny" else f"{row},size={size}"


def _grid(size: str, heads: tuple[int, ...], seeds: int) -> Grid:
  """All rows, and DIFF with other numbers of heads."""
  diff = _variant("diff", size)
  variants = [
    *(_variant(row, size) for row in ROWS),
    *(f"{diff},heads={number}" for number in heads),
  ]
  return Grid(
    tuple(variants), _variant("transformer", size), tuple(range(seeds))
  )


def twins(size: str, seeds: int = 1) -> Grid:
  """The Transformer, DIFF and DIFF V2: for experiments that measure these runs or start from them."""
  rows = ("transformer", "diff", "diff_v2")
  return Grid(
    tuple(_variant(row, size) for row in rows),
    _variant("transformer", size),
    tuple(range(seeds)),
  )


def plot_losses(results: Mapping[str, Any]) -> Figure:
  """Draws each row's loss minus the baseline's mean: single runs, and the difference with its interval."""
  rows = {}
  for variant, runs in plots.runs_by_variant(results).items():
    rows[variant] = [run[_LOSS] for run in runs if run[_LOSS] is not None]
  styles = plots.styles_of(rows)
  baseline = rows.get(results["baseline"]) or [math.nan]
  significant = found.significant(results, _LOSS)
  figure = Figure((9, 1.4 + 0.35 * len(rows)), layout="constrained")
  axes = figure.subplots()
  for place, (variant, losses) in enumerate(rows.items()):
    style = styles[variant]
    axes.plot(
      np.array(losses) - np.mean(baseline),
      [place + 0.25] * len(losses),
      ".",
      color=style.color,
      alpha=0.5,
      markersize=5,
    )
    interval = found.difference(results, variant, _LOSS)
    if interval is not None:
      mean, low, high = interval
      fill = style.color if variant in significant else "white"
      axes.errorbar(
        [mean],
        [place],
        xerr=[[mean - low], [high - mean]],
        color=style.color,
        marker=style.marker,
        markerfacecolor=fill,
        capsize=3,
      )
  axes.axvline(0, color="black", linewidth=0.8)
  axes.set_yticks(range(len(rows)), [style.name for style in styles.values()])
  axes.invert_yaxis()
  axes.set_xlabel(
    f"validation loss minus that of the {plots.style(results['baseline']).name} (nats per token)\n"
    "bars: Welch's 95% interval; filled: also Dunnett's p < 0.05; dots: single runs"
  )
  return figure


EXPERIMENT = Experiment(
  question="Which parts of DIFF make it better than the Transformer?",
  grids={
    "cpu": _grid("tiny", (4, 8, 16), seeds=5),
    "gpu": _grid("125m", (2, 4, 8, 16), seeds=1),
    "tpu": _grid("1b", (2, 4, 16), seeds=1),
  },
  metrics={
    "loss": _LOSS,
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
  },
  plot=plot_losses,
)
