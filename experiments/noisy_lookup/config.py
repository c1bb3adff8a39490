"""Models of one layer whose attention maps are 8 wide.

A variant is ROW, with rate=LEARNING_RATE if wanted. ROW is one of `ROWS`. The
default rate was chosen by the grid "tune":

    python -m experiments.run noisy_lookup --grid=tune --side_by_side=2
"""

import ml_collections

from diffjax.configs import base
from experiments import architectures
from experiments.noisy_lookup.task import VALUES

# The rates with the highest mean accuracy in
# `python -m experiments.run noisy_lookup --grid=tune`. The comments name the
# variants of that grid. Their results are in tune/results.json.
LEARNING_RATES = {
  # transformer,rate=0.008
  "transformer": 0.008,
  # transformer_wide,rate=0.008
  "transformer_wide": 0.008,
  # transformer_norm,rate=0.008
  "transformer_norm": 0.008,
  # diff_without_norm,rate=0.008
  "diff_without_norm": 0.008,
  # diff,rate=0.004
  "diff": 0.004,
  # diff_v2,rate=0.008
  "diff_v2": 0.008,
  # diff_lambda_0.8,rate=0.008
  "diff_lambda_0.8": 0.008,
  # diff_lambda_zero,rate=0.004
  "diff_lambda_zero": 0.004,
}
ROWS = tuple(LEARNING_RATES)
# The values that the grid "tune" tries.
RATES = (0.002, 0.004, 0.008, 0.016)


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the config of a variant such as "diff" or "diff,rate=0.008"."""
  row, rate = base.read_variant(
    variant,
    row=base.Option(default="diff", allowed=ROWS),
    rate=base.Option(default=None, allowed=float),
  )
  if rate is None:
    rate = LEARNING_RATES[row]
  config = base.get_config()
  config.model.update(
    vocab_size=VALUES + 1,
    num_layers=1,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    ffn_dim=176,
    rope=False,
    tie_embeddings=False,
  )
  # √E, so that a value is as long as a key.
  config.model.embed_scale = 8.0
  config.optimizer.update(
    learning_rate=rate, schedule="cosine", warmup_steps=100
  )
  config.train.update(steps=1000, batch_size=32)
  if row != "diff_lambda_zero":
    return architectures.set_row(config, row)
  # DIFF without its second map: λ is 0 and not trained. The head norm, the wide
  # values and the maps of width 8 are the same as in DIFF.
  config.model.lambda_init = 0.0
  return architectures.set_row(config, "diff_frozen_lambda")
