"""125M on 10.5 B tokens: eight chips of v5e, or one GPU with accumulation.

Launch:

    python -m diffjax.train --config=configs/diff_125m.py
"""

import ml_collections

from diffjax.configs import base


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the run's config, or that of a twin of the same size."""
  config = base.get_config()
  config.model.update(
    vocab_size=100_288,
    num_layers=12,
    embed_dim=768,
    num_heads=6,
    num_kv_heads=6,
    head_dim=64,
    ffn_dim=2048,
    max_length=2048,
    remat="none",
  )
  config.data.update(
    source=base.fineweb_edu("sample/100BT/*.parquet"),
    tokenizer="cl100k_base",
    length=2048,
    mode="auto",
    timeout=600.0,  # seconds: the Hub may pause a reader for 300
  )
  config.optimizer.update(
    learning_rate=6e-4,
    schedule="linear",
    warmup_steps=375,
    b1=0.9,
    b2=0.95,
    weight_decay=0.1,
  )
  config.train.update(
    steps=40_000,
    batch_size=128,  # 0.26 M tokens a step
  )
  config.eval.update(interval=1000, rows=1024)
  config.mesh.update(data=1, fsdp=-1)
  return base.twin(config, variant)
