r"""3B at 64K: the paper's length extension of diff_3b, on 1.5 B tokens.

It starts from the parameters of a run of diff_3b.

Launch:

    python -m diffjax.train --config=configs/diff_3b_64k.py \
      --config.train.init_from=runs/diff_3b
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
    max_length=65_536,
    rope_base=640_000.0,
    remat="full",
  )
  config.data.update(
    source=base.fineweb_edu("sample/100BT/*.parquet"),
    tokenizer="cl100k_base",
    length=65_536,
    mode="auto",
    timeout=600.0,  # seconds: the Hub may pause a reader for 300
  )
  config.optimizer.update(
    learning_rate=8e-5,
    final_fraction=0.04,
    schedule="linear",
    warmup_steps=30,
    b1=0.9,
    b2=0.95,
    weight_decay=0.1,
  )
  config.train.update(
    steps=360,
    batch_size=64,  # 4.2 M tokens a step, 4 rows at a time
    accumulation=16,
    checkpoint_interval=60,
  )
  config.eval.update(interval=60, rows=64)
  config.mesh.update(data=1, fsdp=-1, context=2)
  return base.twin(config, variant)
