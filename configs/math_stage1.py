r"""3B on mathematics, stage 1 of 2: 20 B tokens of synthetic mathematical text.

The paper names neither the text nor the run that it starts from. Here the text
is a path of yours, and the run is diff_3b_64k, since the answers of stage 2
are longer than 4K. All tokens are learnt.

Launch:

    python -m diffjax.train --config=configs/math_stage1.py \
      --config.train.init_from=runs/diff_3b_64k
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
    remat="attention",
  )
  config.data.update(
    source="jsonl:data/math_stage1/*.jsonl.zst",
    tokenizer="cl100k_base",
    length=4096,
  )
  config.optimizer.update(
    learning_rate=8e-5,
    final_fraction=0.04,
    schedule="linear",
    warmup_steps=100,
    b1=0.9,
    b2=0.95,
    weight_decay=0.1,
  )
  config.train.update(
    steps=4770,
    batch_size=1024,  # 4.2 M tokens a step
    checkpoint_interval=500,
  )
  config.eval.update(interval=1000, rows=1024)
  config.mesh.update(data=1, fsdp=-1)
  return base.twin(config, variant)
