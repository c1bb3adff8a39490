"""A small DIFF Transformer on the Python standard library's source, as bytes.

It trains on a laptop's CPU in minutes.

Launch:

    python -m diffjax.train --config=configs/tiny.py
"""

import ml_collections

from diffjax.configs import base


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the run's config, or that of a twin of the same size."""
  config = base.get_config()
  config.model.update(
    vocab_size=256,
    num_layers=4,
    embed_dim=128,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    ffn_dim=352,
  )
  config.data.update(
    source="stdlib",
    tokenizer="bytes",
    length=256,
  )
  config.optimizer.update(
    learning_rate=3e-3,
    schedule="cosine",
    warmup_steps=100,
  )
  config.train.update(
    steps=600,
    batch_size=16,  # 4.1 K tokens a step
    checkpoint_interval=200,
  )
  config.eval.update(interval=200, ngram=8)
  return base.twin(config, variant)
