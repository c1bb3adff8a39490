"""The defaults, and what may stand behind a config's colon: values with commas between, as in `configs/diff_1b.py:transformer,heads=8`.

A config file sets the shapes of DIFF V1 and ends with `return base.twin(config, variant)`.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import ml_collections

from diffjax.config import UserError, to_config_dict

ARCHITECTURES = ("diff", "transformer", "diff_v2")
# What a twin's feed-forward width is rounded to, so that it stays shardable.
FFN_MULTIPLE = 16

_NUMBERS = {int: "[0-9]+", float: r"[0-9]+|[0-9]*\.[0-9]+"}


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Every field at its default (diffjax/config.py says what each means)."""
  return twin(to_config_dict(), variant)


def twin(
  config: ml_collections.ConfigDict, variant: str
) -> ml_collections.ConfigDict:
  """Turns a DIFF V1 config into a variant of equal size: `diff`, `transformer` or `diff_v2`; `heads=NUMBER` sets the number of heads.

  The Transformer has twice the heads of half the value width, so all matrices keep their sizes. DIFF V2 has the Transformer's heads
  with two queries each: E × E and E × h more a layer, which the feed-forward layer's three matrices give up (paper.md, §3).

  Raises:
    UserError: for another variant.
  """
  architecture, heads = read_variant(
    variant, architecture=("diff", ARCHITECTURES), heads=(None, int)
  )
  model = config.model
  if architecture != "diff":
    model.update(
      num_heads=2 * model.num_heads,
      num_kv_heads=2 * model.num_kv_heads,
      head_norm=False,
    )
  if architecture == "transformer":
    model.attention = "softmax"
  elif architecture == "diff_v2":
    model.attention = "diff_v2"
    narrow_ffn(config, model.num_heads * model.head_dim + model.num_heads)
  return with_heads(config, heads)


def narrow_ffn(config: ml_collections.ConfigDict, extra: int) -> None:
  """Lets the feed-forward layer's three matrices give up the parameters of an E × `extra` matrix."""
  config.model.ffn_dim = (
    round((config.model.ffn_dim - extra / 3) / FFN_MULTIPLE) * FFN_MULTIPLE
  )


def with_heads(
  config: ml_collections.ConfigDict, heads: int | None
) -> ml_collections.ConfigDict:
  """Divides the width of all heads together among another number of heads, each with its own keys and values. None changes nothing.

  Raises:
    UserError: if the width cannot be divided so.
  """
  if heads is not None:
    width = config.model.num_heads * config.model.head_dim
    if width % (2 * heads):
      raise UserError(
        f"variant with heads={heads}: a width of {width} cannot be divided among {heads} heads of an even width"
      )
    config.model.update(
      num_heads=heads, num_kv_heads=heads, head_dim=width // heads
    )
  return config


def read_variant(
  text: str, **fields: tuple[Any, Collection[str] | type]
) -> tuple[Any, ...]:
  """Reads a variant: NAME=VALUE with commas between. A value without a name is the first field's.

  Args:
    text: The variant, such as "diff" or "diff_v2,heads=4".
    fields: By name, the default and what is allowed: a collection of texts, or `int` or `float` for a positive number.

  Returns:
    The value of each field, in the order of `fields`.

  Raises:
    UserError: for a name or a value that there is not; lists those that there are.
  """
  found: dict[str, Any] = {}
  for part in text.split(","):
    name, separator, value = part.partition("=")
    if not separator:
      name, value = next(iter(fields)), part
    if name not in fields:
      raise _wrong(text, f"there is no field {name!r}", fields)
    if name in found:
      raise _wrong(text, f"{name} is there twice", fields)
    allowed = fields[name][1]
    if isinstance(allowed, type):
      if (
        not re.fullmatch(_NUMBERS[allowed], value)
        or not 0 < float(value) < math.inf
      ):
        raise _wrong(
          text,
          f"{name} is {value!r}, but must be a positive {'integer' if allowed is int else 'number'}",
          fields,
        )
      found[name] = allowed(value)
    elif value in allowed:
      found[name] = value
    else:
      raise _wrong(text, f"there is no {name} {value!r}", fields)
  return tuple(
    found.get(name, default) for name, (default, _) in fields.items()
  )


def _wrong(
  text: str, reason: str, fields: dict[str, tuple[Any, Collection[str] | type]]
) -> UserError:
  values = [
    "NUMBER" if isinstance(allowed, type) else "|".join(allowed)
    for _, allowed in fields.values()
  ]
  rest = "".join(
    f"[,{name}={each}]"
    for name, each in zip([*fields][1:], values[1:], strict=True)
  )
  return UserError(
    f"variant {text!r}: {reason}; variants are {values[0]}{rest}"
  )
