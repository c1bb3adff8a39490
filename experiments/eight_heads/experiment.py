"""Eight heads: does DIFF gain on the Transformer with the advised head count?

The authors advise eight heads or more. The models have 4.9 M parameters, which
is wide enough for eight heads of DIFF. See README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments import comparison
from experiments.ablations.experiment import plot_losses
from experiments.eight_heads.config import ROWS
from experiments.grid import Experiment, Grid

LOSS = "validation/loss"

# Further comparisons. The table compares every row with the Transformer.
PAIRS = (
  ("diff", "transformer_norm"),
  ("transformer_norm", "transformer_wide"),
  ("diff", "transformer_wide"),
  ("diff_v2", "diff"),
)


def summarise(grid_results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns a table row for the difference in loss of each pair in PAIRS."""
  return comparison.contrasts(grid_results, "loss", LOSS, PAIRS)


EXPERIMENT = Experiment(
  question="Does DIFF gain on the Transformer once it has eight heads?",
  grids={
    "cpu": Grid(variants=ROWS, baseline="transformer", seeds=(20, 21, 22))
  },
  metrics={
    "loss": LOSS,
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
  },
  summarise=summarise,
  plot=plot_losses,
)
