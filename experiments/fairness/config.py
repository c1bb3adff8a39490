"""`tiny` with each architecture at its own settings. A variant is ROW, with scale=1|root and rate=LEARNING_RATE if wanted.

    python -m diffjax.train --config=experiments/fairness/config.py:diff,scale=root,rate=0.003 --workdir=runs/diff_root

ROW is a key of ROWS. scale is model.embed_scale, 1 or √E. A row alone has the settings that the grid `tune` chose.
"""

import ml_collections

from diffjax.configs import base
from experiments import tuned
from experiments.ablations.config import ROWS as ABLATIONS
from experiments.ablations.config import get_config as get_ablation

NAMES = (
  "transformer",
  "transformer_norm",
  "diff",
  "diff_without_norm",
  "diff_v2",
)
ROWS = {name: ABLATIONS[name] for name in NAMES}
# The Transformer with a gate on each head's output, E × E more in each layer.
# The feed-forward layer is narrower by that, as in DIFF V2.
ROWS["gated"] = lambda config: base.twin(config, "gated")
SCALES = ("1", "root")
RATES = (0.0015, 0.003, 0.006)


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  row, scale, rate = base.read_variant(
    variant, row=("diff", ROWS), scale=(None, SCALES), rate=(None, float)
  )
  if scale is None and rate is None:
    return get_config(tuned.best("fairness", row, "validation/loss", min))
  config = ROWS[row](get_ablation())
  config.model.embed_scale = (
    config.model.embed_dim**0.5 if scale == "root" else 1.0
  )
  config.optimizer.learning_rate = rate or config.optimizer.learning_rate
  return config
