"""3B on mathematics, stage 1 of the paper's two: 20B tokens of synthetic mathematical text, all of them learnt.

The paper names neither the text, which is a path of yours here, nor the run that it goes on from: the 64K model is taken, since the
answers of stage 2 are longer than 4K. Pass that run with --config.train.init_from=runs/diff_3b_64k.

    python -m diffjax.train --config=configs/math_stage1.py --workdir=runs/math_stage1
"""

import ml_collections

from configs import base, diff_3b


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = diff_3b.get_config()
  config.model.update(max_length=65_536, rope_base=640_000.0)
  config.data.source = "jsonl:data/math_stage1/*.jsonl.zst"
  config.optimizer.update(learning_rate=8e-5, warmup_steps=100)
  config.train.update(
    steps=4_770, batch_size=1024, checkpoint_interval=500
  )  # 4.2M tokens a step
  return base.twin(config, variant)
