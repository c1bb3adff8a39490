"""6.8B of the paper's scaling runs.

Launch:

    python -m diffjax.train --config=configs/diff_7b.py --workdir=runs/diff_7b
"""

import ml_collections

from configs import base, diff_830m


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = diff_830m.get_config()
  config.model.update(
    num_layers=32,
    embed_dim=4096,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn_dim=10_880,
  )
  config.optimizer.learning_rate = 7.5e-5
  return base.twin(config, variant)
