"""3B on 367 B tokens: the paper's main model.

The paper says 350 B tokens, 1 T in its longest run, and "about 2.8B"
parameters. With as many key/value heads as heads they are 3.48B.

Launch:

    python -m diffjax.train --config=configs/diff_3b.py
"""

import ml_collections

from diffjax.configs import base


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the run's config, or that of a twin of the same size."""
  config = base.get_config()
  config.model.update(
    vocab_size=100_288,
    num_layers=28,
    embed_dim=3072,
    num_heads=12,
    num_kv_heads=12,
    head_dim=128,
    ffn_dim=8192,
    max_length=4096,
    remat="attention",
  )
  config.data.update(
    source=base.fineweb_edu("data/*/*.parquet"),
    tokenizer="cl100k_base",
    length=4096,
    mode="auto",
    timeout=600.0,  # seconds: the Hub may pause a reader for 300
  )
  config.optimizer.update(
    learning_rate=3.2e-4,
    final_fraction=0.04,
    schedule="linear",
    warmup_steps=1000,
    b1=0.9,
    b2=0.95,
    weight_decay=0.1,
  )
  config.train.update(
    steps=87_500,
    batch_size=1024,  # 4.2 M tokens a step
    checkpoint_interval=1000,
  )
  config.eval.update(interval=1000, rows=1024)
  config.mesh.update(data=1, fsdp=-1)
  return base.twin(config, variant)
