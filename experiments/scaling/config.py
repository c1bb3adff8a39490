"""An architecture at a size, trained on a number of tokens: a variant is ARCHITECTURE, with size=SIZE and times=TIMES if wanted.

    python -m diffjax.train --config=experiments/scaling/config.py:diff,size=0.4m --workdir=runs/diff_0.4m
    python -m diffjax.train --config=experiments/scaling/config.py:diff,size=0.1m,times=4 --workdir=runs/diff_0.1m_4_times

ARCHITECTURE is transformer, diff or diff_v2. SIZE is a key of SMALL, 830m, 1.4b, 2.8b, 6.8b or 13.1b (the paper's scaling runs), or 3b (its
main model). TIMES multiplies the tokens; the schedule is as long.
"""

import importlib

import ml_collections

from diffjax.configs import base

ARCHITECTURES = ("transformer", "diff", "diff_v2")
SMALL = {
  "0.1m": (64, 2, 176),
  "0.2m": (96, 2, 256),
  "0.4m": (96, 4, 256),
  "0.8m": (128, 4, 352),
  "1.2m": (160, 4, 432),
}  # E, L, F
PAPER = {
  "830m": "diff_830m",
  "1.4b": "diff_1b",
  "2.8b": "diff_830m",
  "6.8b": "diff_7b",
  "13.1b": "diff_13b",
  "3b": "diff_3b",
}


def parts(variant: str) -> tuple[str, str, float | None]:
  """The architecture, the size and the multiple of the tokens (None where the variant names none)."""
  sizes = (*SMALL, *PAPER)
  architecture, size, times = base.read_variant(
    variant,
    architecture=("diff", ARCHITECTURES),
    size=("0.4m", sizes),
    times=(None, float),
  )
  return architecture, size, times


def get_config(variant: str = "diff,size=0.4m") -> ml_collections.ConfigDict:
  architecture, size, times = parts(variant)
  config = (
    _small(*SMALL[size])
    if size in SMALL
    else importlib.import_module(f"diffjax.configs.{PAPER[size]}").get_config()
  )
  if size == "2.8b":
    config.model.update(
      num_layers=32,
      embed_dim=2560,
      num_heads=10,
      num_kv_heads=10,
      head_dim=128,
      ffn_dim=6912,
    )
  config.train.steps = round(config.train.steps * (times or 1))
  if size in SMALL:
    config.optimizer.warmup_steps = config.train.steps // 10
    config.eval.interval = config.train.steps
  config.train.sample_tokens = 0
  return base.twin(config, architecture)


def _small(
  embed_dim: int, num_layers: int, ffn_dim: int
) -> ml_collections.ConfigDict:
  """Heads of 16, so that the narrowest model has several; 0.49 M bytes of the standard library; a learning rate by width (README.md)."""
  config = base.get_config()
  heads = embed_dim // 32
  config.model.update(
    embed_dim=embed_dim,
    num_layers=num_layers,
    num_heads=heads,
    num_kv_heads=heads,
    head_dim=16,
    ffn_dim=ffn_dim,
  )
  config.optimizer.update(learning_rate=0.5 / embed_dim, schedule="cosine")
  config.train.update(steps=480, batch_size=4)
  config.eval.rows = 1024
  return config
