"""1.4B: the size of the paper's ablations.

Launch:

    python -m diffjax.train --config=configs/diff_1b.py --workdir=runs/diff_1b
"""

import ml_collections

from configs import base, diff_830m


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = diff_830m.get_config()
  config.model.update(embed_dim=2048, head_dim=128, ffn_dim=5440)
  return base.twin(config, variant)
