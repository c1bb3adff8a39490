"""The rows of the paper's ablation table and of the V2 post's. A variant is ROW, with size=SIZE and heads=NUMBER if wanted.

    python -m diffjax.train --config=experiments/ablations/config.py:diff_without_norm --workdir=runs/diff_without_norm
    python -m diffjax.train --config=experiments/ablations/config.py:diff,size=1b,heads=4 --workdir=runs/diff_of_4_heads_1b

ROW is a key of ROWS. SIZE is tiny (the default), 125m or 1b (the paper's). heads=NUMBER divides the width among so many heads: d = E / 2N
for DIFF with N heads.
"""

import importlib

import ml_collections

from diffjax.configs import base

LAMBDAS = "lambda_q1,lambda_k1,lambda_q2,lambda_k2"


def _diff(config, **model):
  config.model.update(model)
  return config


def _wide(config, head_norm):
  """The Transformer with DIFF's number of heads, each as wide as a pair of DIFF's: the same matrices."""
  config.model.update(
    attention="softmax", head_dim=2 * config.model.head_dim, head_norm=head_norm
  )
  return config


def _frozen(config):
  config.optimizer.frozen = LAMBDAS
  return config


# From the rows to functions that turn a DIFF config into them
ROWS = {
  "transformer": lambda config: base.twin(config, "transformer"),
  "transformer_wide": lambda config: _wide(config, head_norm=False),
  "transformer_norm": lambda config: _wide(config, head_norm=True),
  "diff": _diff,
  "diff_without_norm": lambda config: _diff(config, head_norm=False),
  "diff_lambda_0.8": lambda config: _diff(config, lambda_init=0.8),
  "diff_lambda_0.5": lambda config: _diff(config, lambda_init=0.5),
  "diff_frozen_lambda": _frozen,
  "diff_v2": lambda config: base.twin(config, "diff_v2"),
  "diff_v2_linear": lambda config: base.twin(config, "diff_v2_linear"),
}
SIZES = {"tiny": "tiny", "125m": "diff_125m", "1b": "diff_1b"}


def parts(variant: str) -> tuple[str, str, int | None]:
  """The row, the size and the number of heads (None for the row's own) that a variant names."""
  row, size, heads = base.read_variant(
    variant, row=("diff", ROWS), size=("tiny", SIZES), heads=(None, int)
  )
  return row, size, heads


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  row, size, heads = parts(variant)
  config = importlib.import_module(
    f"diffjax.configs.{SIZES[size]}"
  ).get_config()
  if (
    config.data.tokenizer == "bytes"
  ):  # one validation, at the end, with enough rows to see small differences
    config.eval.update(interval=config.train.steps, rows=2048)
  config.train.sample_tokens = 0
  return base.with_heads(ROWS[row](config), heads)
