"""A small DIFF Transformer on the Python standard library's source, as bytes: minutes on a laptop's CPU.

Launch:

    python -m diffjax.train --config=configs/tiny.py --workdir=runs/tiny
"""

import ml_collections

from configs import base


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = base.get_config()
  config.optimizer.update(learning_rate=3e-3, schedule="cosine")
  config.train.update(steps=600, batch_size=16, checkpoint_interval=200)
  config.eval.update(interval=200, ngram=8)
  return base.twin(config, variant)
