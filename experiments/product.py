"""The factors of `Grid.product`: all combinations of some fields' values."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diffjax.cli import config_file
from diffjax.config import UserError

# A row's name is the name of a directory. File systems allow 255 bytes.
_MAX_NAME = 200
_MAX_VALUE = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")
# The factor that is no field: the variant of the base config, after its colon.
VARIANT = "variant"
# The fields that `Grid.seeds` sets.
SEED_FIELDS = ("train.seed", "data.seed")


@dataclasses.dataclass(frozen=True)
class Product:
  """All combinations of the values of some config fields.

  Attributes:
    base: The config that the fields are set in, as --config takes it: a config
      of the package such as "tiny:transformer", or a file. A relative path
      starts at the experiment's folder, or at the current directory.
    factors: The values of each field, by the field's dotted name. The key
      "variant" is no field, but the part of --config after the colon.
  """

  base: str
  factors: Mapping[str, tuple[Any, ...]]

  def rows(self) -> dict[str, dict[str, Any]]:
    """Returns the factors' values of each combination by the row's name.

    The last factor varies fastest. A name is readable and safe as the name of a
    directory, such as "lambda_init=0.2,head_norm=True".
    """
    names = short_names(self.factors)
    parts = {}
    for field, values in self.factors.items():
      texts = _value_texts(values)
      parts[field] = [f"{names[field]}={text}" for text in texts]
    combinations = itertools.product(*self.factors.values())
    names_of_rows = map(",".join, itertools.product(*parts.values()))
    rows = {}
    for name, values in zip(names_of_rows, combinations, strict=True):
      rows[_shortened(name)] = dict(zip(self.factors, values, strict=True))
    return rows

  def base_path(self, folder: pathlib.Path) -> str:
    """Returns `base` with an absolute path if it is a file.

    Training runs in another directory.
    """
    name, colon, variant = self.base.partition(":")
    if "://" in self.base or name in config_file.names():
      return self.base
    path = pathlib.Path(name).expanduser()
    for candidate in (folder / path, path.absolute()):
      if candidate.is_file():
        return f"{candidate}{colon}{variant}"
    return self.base


def make(base: str, factors: Mapping[str, Iterable[Any]]) -> Product:
  """Returns a product whose values are tuples of Python's own types.

  Raises:
    UserError: if the base is not the value of --config, or if a factor is a
      seed, or has no value, or the same value twice.
  """
  if not isinstance(base, str):
    raise UserError(
      f"Grid.product: the base must be what --config takes, such as"
      f' "tiny:transformer" or a file; got {type(base).__name__}'
    )
  if not factors:
    raise UserError("Grid.product: there are no factors")
  if VARIANT in factors and ":" in base.replace("://", ""):
    raise UserError(
      f"Grid.product: the base {base!r} has a variant, and {VARIANT!r} is a"
      " factor; leave one of them out"
    )
  checked = {}
  for field, values in factors.items():
    checked[field] = _checked_values(field, values)
  return Product(base, checked)


def short_names(fields: Iterable[str]) -> dict[str, str]:
  """Returns the last part of each dotted name, or all of it if two agree."""
  last_parts = {field: field.rpartition(".")[2] for field in fields}
  counts = collections.Counter(last_parts.values())
  names = {}
  for field, last_part in last_parts.items():
    names[field] = last_part if counts[last_part] == 1 else field
  return names


def command_line_fields(
  fields: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the fields that the command line has to set.

  The command line has no word for None, so a field can only be None if it is
  None in the base.

  Args:
    fields: One row's values by dotted name.
    base: The sections of the base config.

  Raises:
    UserError: if a field shall be None and is not None in the base.
  """
  settable = {}
  for field, value in fields.items():
    if value is not None:
      settable[field] = value
      continue
    section, _, name = field.partition(".")
    base_value = base.get(section, {}).get(name)
    if base_value is not None:
      raise UserError(
        f"{field} = None: the command line cannot set None; choose a base where"
        f" {field} is None (here it is {base_value!r})"
      )
  return settable


def _checked_values(field: str, values: Iterable[Any]) -> tuple[Any, ...]:
  if field in SEED_FIELDS:
    raise UserError(
      f"Grid.product: {field} cannot be a factor; set seeds=range(2)"
    )
  if isinstance(values, str) or not isinstance(values, Iterable):
    raise UserError(
      f"Grid.product: {field} must have a list of values; got {values!r}"
    )
  checked: list[Any] = []
  for value in values:
    if hasattr(value, "item"):  # a number of NumPy
      value = value.item()
    # True == 1, and 1 == 1.0, but these are different values.
    if any(type(old) is type(value) and old == value for old in checked):
      raise UserError(f"Grid.product: {field} has the value {value!r} twice")
    checked.append(value)
  if not checked:
    raise UserError(f"Grid.product: {field} has no values")
  return tuple(checked)


def _value_texts(values: Sequence[Any]) -> list[str]:
  """Returns a distinct text for each value, without special characters."""
  texts: list[str] = []
  for value in values:
    text = _UNSAFE.sub("_", str(value))[:_MAX_VALUE]
    distinct = text
    number = 2
    while distinct in texts:
      distinct = f"{text}_{number}"
      number += 1
    texts.append(distinct)
  return texts


def _shortened(name: str) -> str:
  if len(name) <= _MAX_NAME:
    return name
  digest = hashlib.sha256(name.encode()).hexdigest()[:8]
  return f"{name[:_MAX_NAME]}_{digest}"
