r"""3B on mathematics, stage 2 of 2: 2 B tokens of OpenThoughts-114K-Math.

The data are the Parquet files of open-r1/OpenThoughts-114k-math (89K samples).
The prompt is `problem`, and the answer is the last turn of `conversations`
(`solution` is only the short reference). Only answers are learnt. A row holds
one or more samples, of up to 16K tokens. `prepare` cuts longer samples and
counts them. The run starts from a run of math_stage1.

Launch:

    python -m diffjax.train --config=configs/math_stage2.py \
      --config.train.init_from=runs/math_stage1
"""

import ml_collections

from diffjax.configs import base


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the run's config, or that of a twin of the same size."""
  config = base.get_config()
  config.model.update(
    vocab_size=100_288,
    num_layers=28,
    embed_dim=3072,
    num_heads=12,
    num_kv_heads=12,
    head_dim=128,
    ffn_dim=8192,
    max_length=65_536,
    rope_base=640_000.0,
    remat="full",
  )
  config.data.update(
    source="parquet:data/OpenThoughts-114k-math/data/*.parquet",
    prompt_field="problem",
    text_field="conversations.-1.value",
    tokenizer="cl100k_base",
    length=16_384,
  )
  config.optimizer.update(
    learning_rate=1e-5,
    final_fraction=0.04,
    schedule="linear",
    warmup_steps=50,
    b1=0.9,
    b2=0.95,
    weight_decay=0.1,
  )
  question = "What is the sum of the first ten odd numbers?"
  config.train.update(
    steps=1900,
    batch_size=64,  # 1.05 M tokens a step, 8 rows at a time
    accumulation=8,
    checkpoint_interval=100,
    sample_prompt=f"Question: {question}\nAnswer:\n",
  )
  config.eval.update(interval=100, rows=64)
  config.mesh.update(data=1, fsdp=-1)
  return base.twin(config, variant)
