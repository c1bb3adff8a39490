"""The defaults, and the twins that every config offers after a colon: none or `diff`, `transformer`, `diff_v2`.

A config file sets the shapes of DIFF V1 and ends with `return base.twin(config, variant)`.
"""

import ml_collections

from diffjax.config import UserError, to_config_dict

# What a twin's feed-forward width is rounded to, so that it stays shardable.
FFN_MULTIPLE = 16


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Every field at its default (diffjax/config.py says what each means)."""
  return twin(to_config_dict(), variant)


def twin(config: ml_collections.ConfigDict, variant: str) -> ml_collections.ConfigDict:
  """Turns a DIFF V1 config into its twin of equal size.

  The Transformer has twice the heads of half the value width, so all matrices keep their sizes. DIFF V2 has the Transformer's heads
  with two queries each: E × E and E × h more a layer, which the feed-forward layer's three matrices give up (paper.md, §3).
  """
  model = config.model
  if variant == "diff":
    return config
  model.num_heads *= 2
  model.num_kv_heads *= 2
  model.head_norm = False
  if variant == "transformer":
    model.attention = "softmax"
  elif variant == "diff_v2":
    model.attention = "diff_v2"
    extra = model.num_heads * model.head_dim + model.num_heads
    model.ffn_dim = round((model.ffn_dim - extra / 3) / FFN_MULTIPLE) * FFN_MULTIPLE
  else:
    raise UserError(f"variant {variant!r} of a config: must be one of diff, transformer, diff_v2")
  return config
