"""An architecture at a size, trained on a number of tokens.

A variant is ARCHITECTURE, with size=SIZE and times=TIMES if wanted:

    python -m diffjax.train \
      --config=experiments/scaling/config.py:diff,size=0.4m \
      --workdir=runs/diff_0.4m
    python -m diffjax.train \
      --config=experiments/scaling/config.py:diff,size=0.1m,times=4 \
      --workdir=runs/diff_0.1m_4_times

ARCHITECTURE is transformer, diff or diff_v2. SIZE is a key of `SMALL` or of
`PAPER`. TIMES multiplies the number of tokens. The schedule is as long as the
run.
"""

import importlib
from typing import NamedTuple

import ml_collections

from diffjax.configs import base

ARCHITECTURES = ("transformer", "diff", "diff_v2")


class Dimensions(NamedTuple):
  """The sizes of a model."""

  embed_dim: int
  num_layers: int
  ffn_dim: int


SMALL = {
  "0.1m": Dimensions(64, 2, 176),
  "0.2m": Dimensions(96, 2, 256),
  "0.4m": Dimensions(96, 4, 256),
  "0.8m": Dimensions(128, 4, 352),
  "1.2m": Dimensions(160, 4, 432),
}
# The configs of diffjax/configs for the paper's scaling runs, and for its main
# model (3b). The 2.8b model has the training of the 830m one.
PAPER = {
  "830m": "diff_830m",
  "1.4b": "diff_1b",
  "2.8b": "diff_830m",
  "6.8b": "diff_7b",
  "13.1b": "diff_13b",
  "3b": "diff_3b",
}


def parts(variant: str) -> tuple[str, str, float | None]:
  """Splits a variant such as "diff,size=0.1m,times=4".

  Returns:
    The architecture, the size, and the number that multiplies the tokens, which
    is None if the variant does not name it.
  """
  architecture, size, times = base.read_variant(
    variant,
    architecture=base.Option(default="diff", allowed=ARCHITECTURES),
    size=base.Option(default="0.4m", allowed=(*SMALL, *PAPER)),
    times=base.Option(default=None, allowed=float),
  )
  return architecture, size, times


def get_config(variant: str = "diff,size=0.4m") -> ml_collections.ConfigDict:
  """Returns the config of a variant such as "diff,size=0.1m,times=4"."""
  architecture, size, times = parts(variant)
  if size in SMALL:
    config = _small(size)
  else:
    config = _of_paper(size)
  if times is not None:
    config.train.steps = round(config.train.steps * times)
  if size in SMALL:
    config.optimizer.warmup_steps = config.train.steps // 10
    config.eval.interval = config.train.steps
  config.train.sample_tokens = 0
  return base.twin(config, architecture)


def _of_paper(size: str) -> ml_collections.ConfigDict:
  """Returns the config of one of the paper's models."""
  module = importlib.import_module(f"diffjax.configs.{PAPER[size]}")
  config = module.get_config()
  if size == "2.8b":
    config.model.update(
      num_layers=32,
      embed_dim=2560,
      num_heads=10,
      num_kv_heads=10,
      head_dim=128,
      ffn_dim=6912,
    )
  return config


def _small(size: str) -> ml_collections.ConfigDict:
  """Returns the config of a small model.

  It trains on 0.49 M bytes of the standard library.
  """
  dimensions = SMALL[size]
  config = base.get_config()
  # Heads have two maps of width 16, so that the narrowest model has two heads.
  num_heads = dimensions.embed_dim // 32
  config.model.update(
    embed_dim=dimensions.embed_dim,
    num_layers=dimensions.num_layers,
    num_heads=num_heads,
    num_kv_heads=num_heads,
    head_dim=16,
    ffn_dim=dimensions.ffn_dim,
  )
  # The best learning rate falls with the width (README.md).
  config.optimizer.update(
    learning_rate=0.5 / dimensions.embed_dim, schedule="cosine"
  )
  config.train.update(steps=480, batch_size=4)
  config.eval.rows = 1024
  return config
