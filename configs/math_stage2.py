"""3B on mathematics, stage 2 of the paper's two: 2B tokens of OpenThoughts-114K-Math (89K samples), the loss on the answers only.

The data are the Parquet files of open-r1/OpenThoughts-114k-math: `problem` is the prompt, and the last turn of `conversations` the model's
answer (`solution` is only the short reference). A row holds a sample of up to 16K tokens, or several; what is longer is cut, and counted by
`prepare`. Pass the run of stage 1 with --config.train.init_from=runs/math_stage1.

    python -m diffjax.train --config=configs/math_stage2.py --workdir=runs/math_stage2
"""

import ml_collections

from configs import base, math_stage1


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  config = math_stage1.get_config()
  config.model.remat = "full"
  config.data.update(
    source="parquet:data/OpenThoughts-114k-math/data/*.parquet", length=16_384
  )
  config.data.update(
    prompt_field="problem", text_field="conversations.-1.value"
  )
  config.optimizer.update(learning_rate=1e-5, warmup_steps=50)
  config.train.update(
    steps=1_900, batch_size=64, accumulation=8, checkpoint_interval=100
  )  # 1.05M tokens a step, 8 rows at a time
  config.train.sample_prompt = (
    "Question: What is the sum of the first ten odd numbers?\nAnswer:\n"
  )
  config.eval.update(interval=100, rows=64)
  return base.twin(config, variant)
