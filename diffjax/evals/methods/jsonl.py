"""Reads records from JSON lines. Every error names its file and line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from diffjax.config import UserError

_NAMES = {
  str: "a string",
  int: "a whole number",
  list: "a list",
  dict: "an object",
  bool: "true or false",
}


class Record(NamedTuple):
  """One object of a file.

  Attributes:
    place: "FILE:LINE", for messages.
    value: The object.
  """

  place: str
  value: dict[str, Any]


def read(path: epath.PathLike, fields: Mapping[str, type]) -> list[Record]:
  """Reads a file of one JSON object a line. Blank lines are skipped.

  Args:
    path: The file; gs:// too.
    fields: The fields that every object must have, and their types (`object` for any). "choices.text" is the field text of the field
      choices.

  Raises:
    UserError: for a file that cannot be read or is empty, and for a line that is not an object or lacks a field.
  """
  wanted = "it must hold one JSON object a line" + (
    f", with the fields {', '.join(fields)}" if fields else ""
  )
  try:
    content = epath.Path(path).expanduser().read_bytes()
  except OSError as error:
    raise UserError(
      f"{path}: cannot be read ({error.strerror or error}); {wanted}"
    ) from error
  records = []
  for number, line in enumerate(content.split(b"\n"), 1):
    if not line.strip():
      continue
    place = f"{path}:{number}"
    try:
      value = json.loads(line.decode("utf-8"))
    except ValueError as error:  # UnicodeDecodeError is a ValueError
      raise UserError(f"{place}: not JSON ({error})") from error
    if not isinstance(value, dict):
      raise UserError(f"{place}: not a JSON object, but {str(value)[:40]!r}")
    for field, kind in fields.items():
      _check(place, value, field, kind)
    records.append(Record(place, value))
  if not records:
    raise UserError(f"{path}: is empty; {wanted}")
  return records


def _check(place: str, value: dict[str, Any], field: str, kind: type) -> None:
  found: Any = value
  for name in field.split("."):
    if not isinstance(found, dict) or name not in found:
      raise UserError(
        f"{place}: the field {field!r} is missing; there are {', '.join(map(repr, value))}"
      )
    found = found[name]
  if not isinstance(found, kind) or (isinstance(found, bool) and kind is int):
    raise UserError(
      f"{place}: the field {field!r} must be {_NAMES.get(kind, kind.__name__)}; got {str(found)[:40]!r}"
    )
