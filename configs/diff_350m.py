"""350M: one GPU, or a v5e-8.

Launch:

    python -m diffjax.train --config=configs/diff_350m.py --workdir=runs/diff_350m
"""

import ml_collections

from configs import base, diff_830m


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = diff_830m.get_config()
  config.model.update(
    embed_dim=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn_dim=2736,
    remat="none",
  )
  config.optimizer.update(learning_rate=3e-4, b2=0.95, weight_decay=0.1)
  return base.twin(config, variant)
