"""The factors of `Grid.product`, and the rows that they make."""

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

# The factor that is not a config field. Its values follow the colon in
# --config=CONFIG:VARIANT.
VARIANT = "variant"
# The fields that `Grid.seeds` sets.
SEED_FIELDS = ("train.seed", "data.seed")

# The maximum numbers of characters in a row's name and in a value's text. A
# row's name is the name of a directory, which may have 255 bytes.
_MAX_NAME_LENGTH = 200
_MAX_VALUE_LENGTH = 40
_UNSAFE_CHARACTER = re.compile(r"[^A-Za-z0-9._+-]")


@dataclasses.dataclass(frozen=True)
class Product:
  """All combinations of the values of some config fields.

  Attributes:
    base: The config in which the fields are set, in the form of --config: a
      config of the package such as "tiny:transformer", or a file. A relative
      path starts at the experiment's folder or at the current directory.
    factors: The values of each field, by the field's dotted name. The key
      "variant" is not a field, but the part of --config after the colon.
  """

  base: str
  factors: Mapping[str, tuple[Any, ...]]

  def rows(self) -> dict[str, dict[str, Any]]:
    """Returns the values of each combination of factors, by the row's name.

    The last factor varies fastest. A row's name is readable and can be the name
    of a directory, for example "lambda_init=0.2,head_norm=True".
    """
    names = short_names(self.factors)
    # For each factor, its values with their parts of the row's name.
    choices = []
    for field, values in self.factors.items():
      texts = _value_texts(values)
      named_values = []
      for value, text in zip(values, texts, strict=True):
        named_values.append((field, value, f"{names[field]}={text}"))
      choices.append(named_values)

    rows = {}
    for combination in itertools.product(*choices):
      row_values = {}
      name_parts = []
      for field, value, name_part in combination:
        row_values[field] = value
        name_parts.append(name_part)
      rows[_shorten(",".join(name_parts))] = row_values
    return rows

  def base_path(self, folder: pathlib.Path) -> str:
    """Returns `base`. If it is a file, its path is absolute.

    The path must be absolute because training runs in another directory.

    Args:
      folder: The experiment's folder.
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
  """Returns a product of checked factors, with numbers of NumPy as Python's.

  Args:
    base: The config in which the fields are set, in the form of --config.
    factors: The values of each field, by the field's dotted name.

  Raises:
    UserError: if the base is not a text, or if a factor is a seed, has no
      values, or has the same value twice.
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
  """Returns short names of config fields, by their dotted names.

  A short name is the part after the last dot. Names with the same last part
  stay whole.
  """
  last_parts = {field: field.rpartition(".")[2] for field in fields}
  counts = collections.Counter(last_parts.values())
  names = {}
  for field, last_part in last_parts.items():
    if counts[last_part] == 1:
      names[field] = last_part
    else:
      names[field] = field
  return names


def command_line_fields(
  fields: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the fields that the command line has to set.

  The command line cannot express None. A field can therefore be None only if it
  is None in the base, and is then left out.

  Args:
    fields: The values of a row by dotted name.
    base: The sections of the base config.

  Raises:
    UserError: if a field is None, but not in the base.
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
  """Returns a factor's values. Raises UserError if they are wrong."""
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
    # Numbers of NumPy have this method, which returns Python's number.
    if hasattr(value, "item"):
      value = value.item()
    # True == 1 and 1 == 1.0, but they are different values of a factor.
    if any(type(old) is type(value) and old == value for old in checked):
      raise UserError(f"Grid.product: {field} has the value {value!r} twice")
    checked.append(value)
  if not checked:
    raise UserError(f"Grid.product: {field} has no values")
  return tuple(checked)


def _value_texts(values: Sequence[Any]) -> list[str]:
  """Returns a different text for each value, without special characters."""
  texts: list[str] = []
  for value in values:
    safe_text = _UNSAFE_CHARACTER.sub("_", str(value))[:_MAX_VALUE_LENGTH]
    text = safe_text
    number = 2
    while text in texts:
      text = f"{safe_text}_{number}"
      number += 1
    texts.append(text)
  return texts


def _shorten(name: str) -> str:
  """Returns a name, cut and with a hash at its end if it is too long."""
  if len(name) <= _MAX_NAME_LENGTH:
    return name
  digest = hashlib.sha256(name.encode()).hexdigest()[:8]
  return f"{name[:_MAX_NAME_LENGTH]}_{digest}"
