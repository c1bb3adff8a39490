"""A small DIFF Transformer on the Python standard library's source, as bytes: minutes on a laptop's CPU.

    python -m diffjax.train --config=configs/tiny.py --workdir=runs/tiny
"""

import ml_collections

from configs import base


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = base.get_config()
  config.train.steps = 1500
  config.train.batch_size = 16
  config.optimizer.learning_rate = 3e-3
  config.optimizer.schedule = "cosine"
  return base.twin(config, variant)
