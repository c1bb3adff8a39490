"""13.1B: the largest of the paper's scaling runs.

Launch:

    python -m diffjax.train --config=configs/diff_13b.py --workdir=runs/diff_13b
"""

import ml_collections

from configs import base, diff_830m


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = diff_830m.get_config()
  config.model.update(
    num_layers=40,
    embed_dim=5120,
    num_heads=20,
    num_kv_heads=20,
    head_dim=128,
    ffn_dim=13_696,
  )
  config.optimizer.learning_rate = 7.5e-5
  return base.twin(config, variant)
