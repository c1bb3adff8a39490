"""JSON files that hold an object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from diffjax.config import UserError
from diffjax.host.files import write_atomically

# How much of a wrong content a message shows.
_MAX_SHOWN_CHARACTERS = 40


def read_json(path: epath.Path) -> dict[str, Any]:
  """Returns the JSON object in a file.

  Raises:
    UserError: if the file cannot be read, or does not hold a JSON object.
  """
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror or error}") from error
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path} is not JSON: {error}") from error
  if not isinstance(content, dict):
    shown = str(content)[:_MAX_SHOWN_CHARACTERS]
    raise UserError(f"{path} must hold a JSON object; got {shown}")
  return content


def write_json(path: epath.Path, content: Mapping[str, Any]) -> None:
  """Writes a JSON object to a file, completely or not at all."""
  write_atomically(path, json.dumps(content, indent=2) + "\n")
