"""Models of 4.9 M parameters, with eight heads of width 16 in DIFF.

A variant is one of `ROWS`:

    python -m diffjax.train --config=experiments/eight_heads/config.py:diff \
      --workdir=runs/diff_of_eight_heads
"""

import ml_collections

from diffjax.configs import base
from experiments import architectures

# Half of the rates that `python -m experiments.run fairness --grid=tune` chose.
# The models here are twice as wide, and the best rate falls with the width
# (scaling/README.md). The comments name the chosen variants of that grid. It
# has no row transformer_wide. It chose the same settings for the row without
# wide heads (transformer) and for the one with head norm (transformer_norm).
LEARNING_RATES = {
  # transformer,scale=1,rate=0.003
  "transformer": 0.0015,
  # transformer_norm,scale=1,rate=0.003
  "transformer_wide": 0.0015,
  # transformer_norm,scale=1,rate=0.003
  "transformer_norm": 0.0015,
  # diff,scale=1,rate=0.003
  "diff": 0.0015,
  # diff_v2,scale=root,rate=0.006
  "diff_v2": 0.003,
}
# The rows for which that grid chose scale=root: model.embed_scale = √E.
ROOT_SCALED = ("diff_v2",)
ROWS = tuple(LEARNING_RATES)


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the config of a variant, which is one of `ROWS`."""
  (row,) = base.read_variant(
    variant, row=base.Option(default="diff", allowed=ROWS)
  )
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
  config.optimizer.update(
    learning_rate=LEARNING_RATES[row], schedule="cosine", warmup_steps=240
  )
  config.model.embed_scale = 1.0
  if row in ROOT_SCALED:
    config.model.embed_scale = config.model.embed_dim**0.5
  return architectures.set_row(config, row)
