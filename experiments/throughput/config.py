"""Shapes whose speed is measured: SIZE,length=LENGTH.

SIZE is tiny, 125m (its widths: two layers, 256 tokens in the vocabulary), 3b or 13b.

train.steps are the repetitions, train.batch_size × data.length the tokens of a call.
"""

import importlib

import ml_collections

from diffjax.configs import base

SIZES = {
  "tiny": ("tiny", 4096),
  "125m": ("diff_125m", 1024),
  "3b": ("diff_3b", 8192),
  "13b": ("diff_13b", 8192),
}  # and the tokens of a call


def get_config(variant: str = "tiny,length=256") -> ml_collections.ConfigDict:
  size, length = base.read_variant(
    variant, size=("tiny", SIZES), length=(256, int)
  )
  name, tokens = SIZES[size]
  config = importlib.import_module(f"diffjax.configs.{name}").get_config()
  if (
    size == "125m"
  ):  # what a CPU does in seconds, and not the vocabulary's time alone
    config.model.update(num_layers=2, vocab_size=256)
  config.model.max_length = config.data.length = length
  if size != "tiny":
    # The results were recorded with this source. Its text is never read.
    config.data.update(source="tfds:c4/en", mode="prepared")
  config.train.update(steps=10, batch_size=max(1, tokens // length))
  config.optimizer.warmup_steps = 0
  return config
