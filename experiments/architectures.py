"""The architectures that several experiments compare, called rows.

A row is the Transformer, DIFF or DIFF V2, or one of these with a single change.
All rows of a table have about as many parameters. The config files of the
experiments build on this module, and not on each other.
"""

from __future__ import annotations

import importlib

import ml_collections

from diffjax.configs import base

# The rows of the paper's ablation table and of the V2 post's.
ROWS = (
  "transformer",
  "transformer_wide",
  "transformer_norm",
  "diff",
  "diff_without_norm",
  "diff_lambda_0.8",
  "diff_lambda_0.5",
  "diff_frozen_lambda",
  "diff_v2",
  "diff_v2_linear",
)
# The config of diffjax/configs for each size of the language models.
SIZES = {"tiny": "tiny", "125m": "diff_125m", "1b": "diff_1b"}

_LAMBDAS = "lambda_q1,lambda_k1,lambda_q2,lambda_k2"


def set_row(
  config: ml_collections.ConfigDict, row: str
) -> ml_collections.ConfigDict:
  """Changes a config of DIFF into the config of a row.

  Args:
    config: A config of DIFF. It is changed in place.
    row: One of ROWS, or the name of another attention variant of diffjax, such
      as "gated".

  Returns:
    The config.

  Raises:
    UserError: if there is no such row.
  """
  model = config.model
  if row == "transformer_wide":
    _set_wide_heads(config, head_norm=False)
  elif row == "transformer_norm":
    _set_wide_heads(config, head_norm=True)
  elif row == "diff_without_norm":
    model.head_norm = False
  elif row == "diff_lambda_0.8":
    model.lambda_init = 0.8
  elif row == "diff_lambda_0.5":
    model.lambda_init = 0.5
  elif row == "diff_frozen_lambda":
    config.optimizer.frozen = _LAMBDAS
  else:
    base.twin(config, row)
  return config


def _set_wide_heads(
  config: ml_collections.ConfigDict, *, head_norm: bool
) -> None:
  """Makes the model a Transformer with DIFF's number of heads.

  Each head is as wide as a pair of DIFF's heads, so the matrices have the same
  sizes.
  """
  config.model.update(
    attention="softmax",
    head_dim=2 * config.model.head_dim,
    head_norm=head_norm,
  )


def read_variant(variant: str) -> tuple[str, str, int | None]:
  """Reads a variant of the language models: "ROW,size=SIZE,heads=NUMBER".

  Returns:
    The row, the size and the number of heads. The size is "tiny" by default.
    The number is None if the row keeps its own.

  Raises:
    UserError: if a part is not allowed.
  """
  row, size, heads = base.read_variant(
    variant,
    row=base.Option(default="diff", allowed=ROWS),
    size=base.Option(default="tiny", allowed=SIZES),
    heads=base.Option(default=None, allowed=int),
  )
  return row, size, heads


def language_model(
  row: str, size: str = "tiny", heads: int | None = None
) -> ml_collections.ConfigDict:
  """Returns the config of a row's language model.

  Args:
    row: As for `set_row`.
    size: One of SIZES.
    heads: The number of heads, which divide the width: d = E / 2N for DIFF with
      N heads. The row's own number by default.
  """
  module = importlib.import_module(f"diffjax.configs.{SIZES[size]}")
  config = module.get_config()
  if size == "tiny":
    # One validation, at the end, with enough rows to show small differences.
    config.eval.update(interval=config.train.steps, rows=2048)
  config.train.sample_tokens = 0
  return base.with_heads(set_row(config, row), heads)
