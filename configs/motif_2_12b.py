"""Motif-2-12.7B, to be tuned further from its published weights: grouped DIFF V1, four signal maps to a noise map, with PolyNorm.

Convert the weights first. The run then starts from what lies in runs/motif_2_12b, its tokenizer included:

    python -m diffjax.convert --from=motif:downloaded --to=diffjax:runs/motif_2_12b
    python -m diffjax.train --config=configs/motif_2_12b.py --workdir=runs/motif_2_12b_tuned

What it takes of 16 TPU chips:

    python -m diffjax.aot --config=configs/motif_2_12b.py --topology=v5p:2x2x4

By its estimate 48.3 of 95.74 GiB a chip; with --config.model.remat=ffn 87.3 GiB, and a tenth less time.
"""

import ml_collections

from configs import motif_2_6b


def get_config() -> ml_collections.ConfigDict:
  config = motif_2_6b.get_config()
  config.model.update(
    num_layers=40,
    embed_dim=4096,
    num_heads=32,
    num_noise_heads=8,
    num_kv_heads=8,
    ffn_dim=16_384,
  )
  config.model.update(
    max_length=32_768, rope_base=1_000_000.0, tie_embeddings=False
  )
  config.data.tokenizer = "runs/motif_2_12b/tokenizer.json"
  config.train.init_from = "runs/motif_2_12b"
  return config
