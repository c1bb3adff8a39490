r"""Motif-2-12.7B, to be tuned from its published weights.

It is grouped DIFF V1 with PolyNorm: four signal maps share a noise map.

Convert the weights first. The run starts from runs/motif_2_12b and takes its
tokenizer:

    python -m diffjax.convert --from=motif:downloaded \
      --to=diffjax:runs/motif_2_12b
    python -m diffjax.train --config=configs/motif_2_12b.py \
      --workdir=runs/motif_2_12b_tuned

This command estimates what it takes on 16 TPU chips:

    python -m diffjax.aot --config=configs/motif_2_12b.py --topology=v5p:2x2x4

The estimate is 48.3 of 95.74 GiB a chip. With --config.model.remat=ffn it is
87.3 GiB, and a step takes a tenth less time.
"""

import ml_collections

from diffjax.configs import base


def get_config() -> ml_collections.ConfigDict:
  """Returns the run's config."""
  config = base.get_config()
  config.model.update(
    vocab_size=219_520,
    num_layers=40,
    embed_dim=4096,
    num_heads=32,
    num_noise_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=16_384,
    max_length=32_768,
    rope_base=1_000_000.0,
    tie_embeddings=False,
    norm_eps=1e-6,
    head_norm_eps=1e-5,
    lambda_init_offset=1,
    ffn_activation="poly_norm",
    remat="attention",
  )
  config.data.update(
    source="jsonl:data/tuning/*.jsonl",
    tokenizer="runs/motif_2_12b/tokenizer.json",
    length=4096,
  )
  config.optimizer.update(
    learning_rate=1e-5,
    final_fraction=0.1,
    schedule="cosine",
    warmup_steps=50,
  )
  config.train.update(
    init_from="runs/motif_2_12b",
    steps=1000,
    batch_size=64,  # 0.26 M tokens a step
    checkpoint_interval=250,
    keep_checkpoints=1,
    sample_prompt="The ",
  )
  config.eval.update(interval=250, rows=64)
  config.mesh.update(data=1, fsdp=-1)
  return config
