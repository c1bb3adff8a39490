"""3B: the paper's main model (350B tokens at 4M a step; 1T in its longest run), here from shapes with full heads (3.48B).

Launch:

    python -m diffjax.train --config=configs/diff_3b.py --workdir=runs/diff_3b
"""

import ml_collections

from configs import base, diff_830m


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = diff_830m.get_config()
  config.model.update(
    num_layers=28,
    embed_dim=3072,
    num_heads=12,
    num_kv_heads=12,
    head_dim=128,
    ffn_dim=8192,
    max_length=4096,
  )
  config.data.length = 4096
  config.optimizer.update(
    learning_rate=3.2e-4,
    final_fraction=0.04,
    warmup_steps=1000,
    b2=0.95,
    weight_decay=0.1,
  )
  config.train.update(
    steps=87_500, batch_size=1024, checkpoint_interval=1000
  )  # 4.2M tokens a step
  return base.twin(config, variant)
