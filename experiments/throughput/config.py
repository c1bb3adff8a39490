"""Shapes whose speed is measured: SIZE,length=LENGTH.

SIZE is tiny, 125m, 3b or 13b. The size 125m has the widths of that model, but
only two layers and a vocabulary of 256 tokens.

train.steps is the number of repetitions. A call takes train.batch_size ×
data.length tokens.
"""

import importlib

import ml_collections

from diffjax.configs import base

# The config of diffjax/configs and the number of tokens of a call, by size.
SIZES = {
  "tiny": ("tiny", 4096),
  "125m": ("diff_125m", 1024),
  "3b": ("diff_3b", 8192),
  "13b": ("diff_13b", 8192),
}


def get_config(variant: str = "tiny,length=256") -> ml_collections.ConfigDict:
  """Returns the config of a variant such as "3b,length=2048"."""
  size, length = base.read_variant(
    variant,
    size=base.Option(default="tiny", allowed=SIZES),
    length=base.Option(default=256, allowed=int),
  )
  name, tokens_per_call = SIZES[size]
  config = importlib.import_module(f"diffjax.configs.{name}").get_config()
  if size == "125m":
    # A CPU computes this in seconds. With the whole vocabulary, it would spend
    # most of them on the logits.
    config.model.update(num_layers=2, vocab_size=256)
  config.model.max_length = length
  config.data.length = length
  if size != "tiny":
    # The results were recorded with this source. Its text is never read.
    config.data.update(source="tfds:c4/en", mode="prepared")
  config.train.update(steps=10, batch_size=max(1, tokens_per_call // length))
  config.optimizer.warmup_steps = 0
  return config
