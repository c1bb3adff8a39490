"""Reads records from JSON lines. Every error names the file and the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from diffjax.config import UserError

# The names of JSON's types in messages.
_TYPE_NAMES = {
  str: "a string",
  int: "a whole number",
  list: "a list",
  dict: "an object",
  bool: "true or false",
}

# Messages quote at most this many characters of a wrong value.
_MAX_QUOTED = 40


class Record(NamedTuple):
  """One object of a file.

  Attributes:
    location: "FILE:LINE", for messages.
    value: The object.
  """

  location: str
  value: dict[str, Any]


def read(path: epath.PathLike, fields: Mapping[str, type]) -> list[Record]:
  """Returns the objects of a file with one JSON object per line.

  Blank lines are skipped.

      read("test.jsonl", {"question": str, "choices.text": list})

  Args:
    path: The file, which may be remote (gs://).
    fields: The fields that every object must have, and their types. The type
      `object` accepts any value. "choices.text" is the field `text` of the
      object in the field `choices`.

  Raises:
    UserError: if the file cannot be read or has no records, or if a line is not
      an object with these fields.
  """
  expected = "it must hold one JSON object a line"
  if fields:
    expected += f", with the fields {', '.join(fields)}"
  try:
    content = epath.Path(path).expanduser().read_bytes()
  except OSError as error:
    reason = error.strerror or error
    raise UserError(f"{path}: cannot be read ({reason}); {expected}") from error

  records = []
  for number, line in enumerate(content.split(b"\n"), 1):
    if line.strip():
      records.append(_parse_line(line, f"{path}:{number}", fields))
  if not records:
    raise UserError(f"{path}: is empty; {expected}")
  return records


def _parse_line(
  line: bytes, location: str, fields: Mapping[str, type]
) -> Record:
  """Returns the JSON object of a line.

  Args:
    line: The line in UTF-8.
    location: "FILE:LINE", for messages.
    fields: As in `read`.

  Raises:
    UserError: if the line is not a JSON object with these fields.
  """
  try:
    value = json.loads(line.decode("utf-8"))
  except ValueError as error:
    # Not JSON, or not UTF-8 (UnicodeDecodeError is a ValueError).
    raise UserError(f"{location}: not JSON ({error})") from error
  if not isinstance(value, dict):
    raise UserError(f"{location}: not a JSON object, but {_quote(value)}")
  record = Record(location, value)
  for field, field_type in fields.items():
    _check_field(record, field, field_type)
  return record


def _check_field(record: Record, field: str, field_type: type) -> None:
  """Raises UserError if a field is missing or has another type.

  Args:
    record: The record.
    field: The name of the field. "choices.text" is the field `text` of the
      object in the field `choices`.
    field_type: The type that the value must have.
  """
  value: object = record.value
  for name in field.split("."):
    if not isinstance(value, dict) or name not in value:
      names = ", ".join(map(repr, record.value))
      raise UserError(
        f"{record.location}: the field {field!r} is missing; there are {names}"
      )
    value = value[name]

  # In Python, True and False are ints.
  is_bool_for_int = isinstance(value, bool) and field_type is int
  if not isinstance(value, field_type) or is_bool_for_int:
    type_name = _TYPE_NAMES.get(field_type, field_type.__name__)
    raise UserError(
      f"{record.location}: the field {field!r} must be {type_name};"
      f" got {_quote(value)}"
    )


def _quote(value: object) -> str:
  """Returns the beginning of a value in quotes, for a message."""
  return repr(str(value)[:_MAX_QUOTED])
