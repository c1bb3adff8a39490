"""Parts of plots that the experiments share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def runs_by_variant(results: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
  """The results of each variant's runs, in the order of results.json."""
  variants = dict.fromkeys(run["variant"] for run in results["runs"])
  return {variant: [run["results"] for run in results["runs"] if run["variant"] == variant] for variant in variants}


def over_seeds(axes: Any, x: Sequence[Any], rows: Any, color: str, label: str | None = None, linestyle: str = "-") -> None:
  """Draws a line for the mean over seeds and a thin one for each seed; rows are [seeds, x]."""
  rows = np.asarray(rows, float)
  axes.plot(x, rows.T, color=color, linewidth=0.5, alpha=0.5, linestyle=linestyle)
  axes.plot(x, rows.mean(axis=0), color=color, marker="o", markersize=3, label=label, linestyle=linestyle)
  axes.tick_params(which="both", labelsize=8)
