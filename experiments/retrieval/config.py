"""Small models for associative recall.

A variant is one of `ROWS`. `python -m experiments.run retrieval` writes the
data and sets data.source, data.validation_source and data.tokenizer.
"""

import ml_collections

from diffjax.configs import base
from experiments import architectures

ROWS = architectures.ROWS


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the config of a variant, which is one of `ROWS`."""
  (row,) = base.read_variant(
    variant, row=base.Option(default="diff", allowed=ROWS)
  )
  config = base.get_config()
  config.model.update(
    vocab_size=912,
    num_layers=2,
    embed_dim=64,
    head_dim=16,
    ffn_dim=176,
    max_length=128,
  )
  config.data.update(
    length=116,
    prompt_field="context",
    text_field="answer",
    prompt_template="{prompt}",
  )
  config.optimizer.update(
    learning_rate=3e-3, schedule="cosine", warmup_steps=100
  )
  config.train.update(
    steps=1000,
    batch_size=32,
    checkpoint_interval=100,
    keep_checkpoints=100,
    sample_tokens=0,
  )
  config.eval.update(interval=100, rows=64)
  return architectures.set_row(config, row)
