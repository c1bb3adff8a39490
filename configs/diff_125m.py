"""125M: one GPU, or a v5e-8; a day or less.

Launch:

    python -m diffjax.train --config=configs/diff_125m.py --workdir=runs/diff_125m
"""

import ml_collections

from configs import base, diff_830m


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = diff_830m.get_config()
  config.model.update(
    num_layers=12,
    embed_dim=768,
    num_heads=6,
    num_kv_heads=6,
    head_dim=64,
    ffn_dim=2048,
    remat="none",
  )
  config.optimizer.update(learning_rate=6e-4, b2=0.95, weight_decay=0.1)
  return base.twin(config, variant)
