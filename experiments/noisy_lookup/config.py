"""Models of one layer whose maps are 8 wide. A variant is ROW, with rate=LEARNING_RATE if wanted; without, the one that tuning chose.

python -m experiments.run noisy_lookup --grid=tune --side_by_side=2
"""

import ml_collections

from diffjax.configs import base
from experiments import tuned
from experiments.ablations.config import ROWS as ABLATIONS
from experiments.noisy_lookup.task import VALUES


def _lambda_zero(
  config: ml_collections.ConfigDict,
) -> ml_collections.ConfigDict:
  """DIFF without its second map: λ is 0 and stays so; head norm, wide values and maps of 8 are DIFF's."""
  config = ABLATIONS["diff_frozen_lambda"](config)
  config.model.lambda_init = 0.0
  return config


NAMES = (
  "transformer",
  "transformer_wide",
  "transformer_norm",
  "diff_without_norm",
  "diff",
  "diff_v2",
  "diff_lambda_0.8",
)
ROWS = {name: ABLATIONS[name] for name in NAMES} | {
  "diff_lambda_zero": _lambda_zero
}
RATES = (0.002, 0.004, 0.008, 0.016)


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  row, rate = base.read_variant(variant, row=("diff", ROWS), rate=(None, float))
  if rate is None:
    return get_config(tuned.best("noisy_lookup", row, "accuracy", max))
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
  config.model.embed_scale = 8.0  # √E, so that a value is as long as a key
  config.optimizer.update(schedule="cosine", warmup_steps=100)
  config.train.update(steps=1000, batch_size=32)
  config.optimizer.learning_rate = rate
  return ROWS[row](config)
