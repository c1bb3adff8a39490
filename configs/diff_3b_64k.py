"""3B at 64K: the paper's length extension, 1.5B tokens from the parameters of a diff_3b run.

Pass the run to extend with --config.train.init_from=runs/diff_3b.

    python -m diffjax.train --config=configs/diff_3b_64k.py --workdir=runs/diff_3b_64k
"""

import ml_collections

from configs import base, diff_3b


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = diff_3b.get_config()
  config.model.update(max_length=65_536, rope_base=640_000.0, remat="full")
  config.data.update(length=65_536)
  config.optimizer.update(learning_rate=8e-5, warmup_steps=30)
  config.mesh.update(context=2)
  config.train.update(
    steps=360, batch_size=64, accumulation=16, checkpoint_interval=60
  )  # 4.2M tokens a step, 4 rows at a time
  config.eval.update(interval=60, rows=64)
  return base.twin(config, variant)
