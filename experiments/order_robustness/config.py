"""Small models that classify by demonstrations.

A variant is one of `ROWS`. `python -m experiments.run order_robustness` writes
the data and sets data.source, data.validation_source and data.tokenizer.
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
    vocab_size=225,
    num_layers=2,
    embed_dim=64,
    head_dim=16,
    ffn_dim=176,
    max_length=128,
  )
  # The fastest implementation on a CPU for rows this short.
  config.model.attention_implementation = "reference"
  config.data.update(
    length=105,
    prompt_field="context",
    text_field="answer",
    prompt_template="{prompt}",
  )
  config.optimizer.update(
    learning_rate=3e-3, schedule="cosine", warmup_steps=50
  )
  config.train.update(
    steps=800,
    batch_size=16,
    log_interval=50,
    checkpoint_interval=400,
    keep_checkpoints=1,
    sample_tokens=0,
  )
  config.eval.update(interval=400, rows=64)
  return architectures.set_row(config, row)
