"""What the configs share: defaults, twins, variants and the web text.

A config file sets the fields of a DIFF V1 run and ends with
`return base.twin(config, variant)`. The variant is the text after the colon:
`--config=configs/diff_1b.py:transformer,heads=8`.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import ml_collections

from diffjax.config import ModelConfig, UserError, to_config_dict, to_dataclass

# The name in variants of what config.model.attention calls "softmax".
_TRANSFORMER = "transformer"

_FINEWEB_EDU = "hf://datasets/HuggingFaceFW/fineweb-edu"
_FINEWEB_EDU_REVISION = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"

# What a field of a variant may be: one of some strings, or a positive number.
_Allowed = Collection[str] | type[int] | type[float]


class _Architectures(Collection[str]):
  """The architectures of variants: all registered attention variants.

  Importing the registry imports jax. "diff", the default, needs no import.
  """

  def __contains__(self, name: object) -> bool:
    return name == "diff" or name in self._names()

  def __iter__(self) -> Iterator[str]:
    return iter(self._names())

  def __len__(self) -> int:
    return len(self._names())

  def _names(self) -> tuple[str, ...]:
    from diffjax.model.attention import ATTENTION

    names = dict.fromkeys(["diff", _TRANSFORMER, *ATTENTION])
    return tuple(names)


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

  `Attention.twin` says how. The Transformer has twice the heads, whose values
  are half as wide, so that all matrices keep their sizes. DIFF V2 has the
  Transformer's heads with two queries each. That adds an E × E and an E × h
  matrix to each layer, which are taken from the feed-forward layer.

  Args:
    config: The config of DIFF V1. It is changed in place.
    variant: "diff", which changes nothing, "transformer", or another name that
      config.model.attention can have. ",heads=8" sets the number of heads.

  Returns:
    The config.

  Raises:
    UserError: if there is no such variant, or if it cannot be as large.
  """
  try:
    architecture, heads = read_variant(
      variant, architecture=("diff", _Architectures()), heads=(None, int)
    )
  except UserError as error:
    raise UserError(
      f"{error}; a variant of your own needs --import=MODULE"
    ) from None
  if architecture != "diff":
    _become(config, architecture)
  return with_heads(config, heads)


def _become(config: ml_collections.ConfigDict, architecture: str) -> None:
  """Changes the model to one of another architecture with equal size."""
  from diffjax.model.attention import layer_class_of

  attention = "softmax" if architecture == _TRANSFORMER else architecture
  model = to_dataclass(config.model, ModelConfig, "config.model")
  twin_model = layer_class_of(attention).twin(model)
  for field in dataclasses.fields(twin_model):
    value = getattr(twin_model, field.name)
    if value != getattr(model, field.name):
      config.model[field.name] = value


def narrow_ffn(config: ml_collections.ConfigDict, columns: int) -> None:
  """Makes room for an E × columns matrix in each layer. Deprecated.

  `twin` does this for every attention variant.
  """
  from diffjax.model.attention import FFN_MULTIPLE

  warnings.warn(
    "narrow_ffn is deprecated: twin makes room for the matrices of a variant",
    DeprecationWarning,
    stacklevel=2,
  )
  # The feed-forward layer has three matrices of E × F.
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


class Option(NamedTuple):
  """A field of a variant, for `read_variant`.

  Attributes:
    default: The value of a variant that does not name the field.
    allowed: The strings that are allowed, or int or float for a positive
      number.
  """

  default: Any
  allowed: _Allowed


def read_variant(text: str, **fields: tuple[Any, _Allowed]) -> tuple[Any, ...]:
  """Reads a variant such as "transformer,heads=8".

  Args:
    text: NAME=VALUE with commas between, in any order. A value without a name
      belongs to the first field.
    **fields: An `Option` for each name.

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
