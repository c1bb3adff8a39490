"""As many heads as the paper advises, at 4.9 M parameters (README.md)."""

from experiments import results
from experiments.ablations.experiment import plot_losses
from experiments.eight_heads.config import ROWS
from experiments.grid import Experiment, Grid

_PAIRS = [
  ("diff", "transformer_norm"),
  ("transformer_norm", "transformer_wide"),
  ("diff", "transformer_wide"),
  ("diff_v2", "diff"),
]

EXPERIMENT = Experiment(
  question="Does DIFF gain on the Transformer once it has eight heads?",
  grids={"cpu": Grid(ROWS, "transformer", (20, 21, 22))},
  metrics={
    "loss": "validation/loss",
    "AR-Hit": "validation/ar_hit",
    "Others": "validation/others",
  },
  summarise=lambda found: results.contrasts(
    found, "loss", "validation/loss", _PAIRS
  ),
  plot=plot_losses,
)
