"""What the configs share: defaults, twins, variants and the web text.

A config file sets the fields of a DIFF V1 run and ends with
`return base.twin(config, variant)`. The variant is the text after the colon:
`--config=configs/diff_1b.py:transformer,heads=8`.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import ml_collections

from diffjax.config import UserError, to_config_dict

ARCHITECTURES = ("diff", "transformer", "diff_v2")
# A twin's feed-forward width is rounded to a multiple of this, so that it can
# be sharded.
FFN_MULTIPLE = 16

_FINEWEB_EDU = "hf://datasets/HuggingFaceFW/fineweb-edu"
_FINEWEB_EDU_REVISION = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"

# What a field of a variant may be: one of some strings, or a positive number.
_Allowed = Collection[str] | type[int] | type[float]


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the defaults of all fields. diffjax/config.py explains them."""
  return twin(to_config_dict(), variant)


def fineweb_edu(files: str) -> str:
  """Returns the data source of some files of FineWeb-Edu, at one revision.

  Args:
    files: A pattern. The folders sample/100BT and sample/350BT hold about
      100 B and 350 B tokens, and data/* holds all 1.3 T.
  """
  return f"parquet:{_FINEWEB_EDU}@{_FINEWEB_EDU_REVISION}/{files}"


def twin(
  config: ml_collections.ConfigDict, variant: str
) -> ml_collections.ConfigDict:
  """Turns a DIFF V1 config into a variant with as many parameters.

  The Transformer has twice the heads, whose values are half as wide, so that
  all matrices keep their sizes. DIFF V2 has the Transformer's heads with two
  queries each. That adds an E × E and an E × h matrix to each layer, which are
  taken from the feed-forward layer.

  Args:
    config: The config of DIFF V1. It is changed in place.
    variant: "diff", "transformer" or "diff_v2". ",heads=8" sets the number of
      heads.

  Returns:
    The config.

  Raises:
    UserError: if there is no such variant.
  """
  architecture, heads = read_variant(
    variant, architecture=("diff", ARCHITECTURES), heads=(None, int)
  )
  model = config.model
  if architecture != "diff":
    model.num_heads *= 2
    model.num_kv_heads *= 2
    model.head_norm = False
  if architecture == "transformer":
    model.attention = "softmax"
  elif architecture == "diff_v2":
    model.attention = "diff_v2"
    narrow_ffn(config, model.num_heads * model.head_dim + model.num_heads)
  return with_heads(config, heads)


def narrow_ffn(config: ml_collections.ConfigDict, columns: int) -> None:
  """Makes room for an E × columns matrix in each layer.

  The feed-forward layer has three matrices of E × F, so F shrinks by a third
  of the columns.
  """
  ffn_dim = config.model.ffn_dim - columns / 3
  config.model.ffn_dim = round(ffn_dim / FFN_MULTIPLE) * FFN_MULTIPLE


def with_heads(
  config: ml_collections.ConfigDict, heads: int | None
) -> ml_collections.ConfigDict:
  """Divides the width of all heads among another number of heads.

  Each of them has its own keys and values. None changes nothing.

  Raises:
    UserError: if the width cannot be divided by the number of heads.
  """
  if heads is None:
    return config
  width = config.model.num_heads * config.model.head_dim
  if width % (2 * heads):
    raise UserError(
      f"variant with heads={heads}: a width of {width} cannot be divided among"
      f" {heads} heads of an even width"
    )
  config.model.update(
    num_heads=heads, num_kv_heads=heads, head_dim=width // heads
  )
  return config


def read_variant(text: str, **fields: tuple[Any, _Allowed]) -> tuple[Any, ...]:
  """Reads a variant such as "transformer,heads=8".

  Args:
    text: NAME=VALUE with commas between, in any order. A value without a name
      belongs to the first field.
    **fields: For each name the default, and what is allowed: a collection of
      strings, or int or float for a positive number.

  Returns:
    The values of all fields, in the order of `fields`.

  Raises:
    UserError: if a part is not allowed. The message lists what is.
  """
  values = {name: default for name, (default, _) in fields.items()}
  not_yet_given = dict(fields)
  for part in text.split(","):
    name, equals, value = part.partition("=")
    if not equals:
      name, value = next(iter(fields)), part
    parsed = None
    if name in not_yet_given:
      _, allowed = not_yet_given.pop(name)
      parsed = _parse(value, allowed)
    if parsed is None:
      raise UserError(
        f"variant {text!r}: {part!r} is not allowed;"
        f" variants are {_usage(fields)}"
      )
    values[name] = parsed
  return tuple(values.values())


def _parse(value: str, allowed: _Allowed) -> str | float | None:
  """Returns the value, or None if it is not allowed."""
  if not isinstance(allowed, type):
    return value if value in allowed else None
  # int() and float() also accept "1_0" and " 8".
  if not re.fullmatch("[0-9.]+", value):
    return None
  try:
    number = allowed(value)
  except ValueError:
    return None
  return number if 0 < number < math.inf else None


def _usage(fields: dict[str, tuple[Any, _Allowed]]) -> str:
  """Returns all variants in short: "diff|transformer[,heads=NUMBER]"."""
  parts: list[str] = []
  for name, (_, allowed) in fields.items():
    values = "NUMBER" if isinstance(allowed, type) else "|".join(allowed)
    parts.append(f"[,{name}={values}]" if parts else values)
  return "".join(parts)
