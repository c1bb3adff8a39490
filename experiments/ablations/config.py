"""The rows of the paper's ablation table and of the V2 post's.

A variant is ROW, with size=SIZE and heads=NUMBER if wanted:

    python -m diffjax.train \
      --config=experiments/ablations/config.py:diff_without_norm \
      --workdir=runs/diff_without_norm
    python -m diffjax.train \
      --config=experiments/ablations/config.py:diff,size=1b,heads=4 \
      --workdir=runs/diff_of_4_heads_1b

ROW is one of `ROWS`. SIZE is tiny (the default), 125m or 1b (the paper's).
heads=NUMBER divides the width among that number of heads: d = E / 2N for DIFF
with N heads. diffjax/configs has the learning rates.
"""

import ml_collections

from experiments import architectures

ROWS = architectures.ROWS


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the config of a variant such as "diff,size=1b,heads=4"."""
  row, size, heads = architectures.read_variant(variant)
  return architectures.language_model(row, size, heads)
