"""4.9 M parameters, wide enough for eight heads of DIFF that are 16 wide. A variant is a row of ROWS, with what fairness chose for it.

python -m diffjax.train --config=experiments/eight_heads/config.py:diff --workdir=runs/diff_of_eight_heads
"""

import ml_collections

from diffjax.configs import base
from experiments.ablations.config import ROWS as ABLATIONS
from experiments.fairness.config import get_config as get_tuned

ROWS = (
  "transformer",
  "transformer_wide",
  "transformer_norm",
  "diff",
  "diff_v2",
)
# fairness has no row with wide heads alone. It chose the same rate and scale for the row without them and for the one with head norm, too
_TUNED_AS = {"transformer_wide": "transformer_norm"}


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  (row,) = base.read_variant(variant, row=("diff", ROWS))
  chosen = get_tuned(_TUNED_AS.get(row, row))
  config = base.get_config()
  config.model.update(
    num_layers=6,
    embed_dim=256,
    num_heads=8,
    num_kv_heads=8,
    head_dim=16,
    ffn_dim=704,
  )
  config.train.update(
    steps=2400, batch_size=16, checkpoint_interval=600, sample_tokens=0
  )
  config.eval.update(interval=2400, rows=2048, ngram=8)
  config.optimizer.update(schedule="cosine", warmup_steps=240)
  config = ABLATIONS[row](config)
  # Twice the width, half the rate: the best rate falls with the width, as in scaling's README
  config.optimizer.learning_rate = (
    chosen.optimizer.learning_rate
    * chosen.model.embed_dim
    / config.model.embed_dim
  )
  config.model.embed_scale = (
    1.0 if chosen.model.embed_scale == 1 else config.model.embed_dim**0.5
  )
  return config
