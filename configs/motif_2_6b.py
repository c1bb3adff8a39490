r"""Motif-2.6B, to be tuned from its published weights.

It is DIFF V1 with PolyNorm: 2.60B parameters with a tied vocabulary matrix.

Convert the weights first. The run starts from runs/motif_2_6b and takes its
tokenizer:

    python -m diffjax.convert --from=motif:downloaded \
      --to=diffjax:runs/motif_2_6b
    python -m diffjax.train --config=configs/motif_2_6b.py \
      --workdir=runs/motif_2_6b_tuned

The sizes are those of the version for long contexts (2.6b-v1.1-LC), as far as
public code states them. `convert` prints the model's own fields as flags, and
a run prints which of them differ from its config.
"""

import ml_collections

from diffjax.configs import base


def get_config() -> ml_collections.ConfigDict:
  """Returns the run's config."""
  config = base.get_config()
  config.model.update(
    vocab_size=219_520,
    num_layers=32,
    embed_dim=2048,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=8192,
    max_length=16_384,
    rope_base=500_000.0,
    tie_embeddings=True,
    norm_eps=1e-6,
    head_norm_eps=1e-5,
    lambda_init_offset=1,
    ffn_activation="poly_norm",
    remat="attention",
  )
  config.data.update(
    source="jsonl:data/tuning/*.jsonl",
    tokenizer="runs/motif_2_6b/tokenizer.json",
    length=4096,
  )
  config.optimizer.update(
    learning_rate=1e-5,
    final_fraction=0.1,
    schedule="cosine",
    warmup_steps=50,
  )
  config.train.update(
    init_from="runs/motif_2_6b",
    steps=1000,
    batch_size=64,  # 0.26 M tokens a step
    checkpoint_interval=250,
    keep_checkpoints=1,
    sample_prompt="The ",
  )
  config.eval.update(interval=250, rows=64)
  config.mesh.update(data=1, fsdp=-1)
  return config
