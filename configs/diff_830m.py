"""830M: the smallest size of the paper's scaling runs (10B tokens).

Launch:

    python -m diffjax.train --config=configs/diff_830m.py --workdir=runs/diff_830m
"""

import ml_collections

from configs import base


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = base.get_config()
  config.model.update(
    vocab_size=100_288,
    num_layers=24,
    embed_dim=1536,
    num_heads=8,
    num_kv_heads=8,
    head_dim=96,
    ffn_dim=4096,
  )
  config.model.remat = "attention"
  config.data.update(source="tfds:c4/en", tokenizer="cl100k_base", length=2048)
  config.optimizer.update(
    learning_rate=1.5e-4,
    schedule="linear",
    warmup_steps=375,
    b1=0.9,
    b2=0.98,
    weight_decay=0.05,
  )
  config.train.update(steps=40_000, batch_size=128)  # 0.26M tokens a step
  config.eval.update(interval=1000, rows=1024)
  config.mesh.update(data=1, fsdp=-1)
  return base.twin(config, variant)
