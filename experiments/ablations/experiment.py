"""The paper's ablation table and a few further rows (README.md)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib.figure

from experiments import results as found
from experiments.ablations.config import ROWS
from experiments.grid import Experiment, Grid

_LOSS = "validation/loss"


def _variant(row: str, size: str) -> str:
  return row if size == "tiny" else f"{row},size={size}"


def _grid(size: str, heads: tuple[int, ...], seeds: int) -> Grid:
  """All rows, and DIFF with other numbers of heads."""
  diff = _variant("diff", size)
  variants = [*(_variant(row, size) for row in ROWS), *(f"{diff},heads={number}" for number in heads)]
  return Grid(tuple(variants), _variant("transformer", size), tuple(range(seeds)))


def twins(size: str, seeds: int = 1) -> Grid:
  """The Transformer, DIFF and DIFF V2: for experiments that measure these runs or start from them."""
  rows = ("transformer", "diff", "diff_v2")
  return Grid(tuple(_variant(row, size) for row in rows), _variant("transformer", size), tuple(range(seeds)))


def _plot(results: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws each variant's loss minus the baseline's: single seeds, and their mean with its 95% interval."""
  variants = [variant for variant in dict.fromkeys(run["variant"] for run in results["runs"]) if found.differences(results, variant, _LOSS)]
  figure = matplotlib.figure.Figure((7, 1 + 0.35 * max(1, len(variants))), layout="constrained")
  axes = figure.subplots()
  for row, variant in enumerate(variants):
    each = found.differences(results, variant, _LOSS)
    axes.plot(each, [row] * len(each), "o", color="0.7", markersize=4)
    if (interval := found.difference(results, variant, _LOSS)) is not None:
      mean, low, high = interval
      axes.errorbar([mean], [row], xerr=[[mean - low], [high - mean]], fmt="o", color="C0", capsize=3)
  axes.axvline(0, color="black", linewidth=0.8)
  axes.set_yticks(range(len(variants)), variants)
  axes.invert_yaxis()
  axes.set_xlabel(f"validation loss − {results['baseline']}'s (nats per token), 95% interval over seeds")
  figure.savefig(path, dpi=150)


EXPERIMENT = Experiment(
  question="Which parts of DIFF make it better than the Transformer?",
  grids={
    "cpu": _grid("tiny", (4, 8, 16), seeds=5),
    "session": twins("session", seeds=5),
    "gpu": _grid("125m", (2, 4, 8, 16), seeds=1),
    "tpu": _grid("1b", (2, 4, 16), seeds=1),
  },
  metrics={"loss": _LOSS, "AR-Hit": "validation/ar_hit", "Others": "validation/others"},
  plot=_plot,
)
