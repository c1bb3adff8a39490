"""--import=MODULE: modules that every command imports before it reads a config.

They may register attention variants.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

from absl import flags

from diffjax.config import UserError

_PREFIX = "--import="


def modules() -> list[str]:
  """Returns the values of this command's --import."""
  if "import" not in flags.FLAGS:
    return []
  return list(flags.FLAGS["import"].value or ())


def arguments() -> list[str]:
  """Returns the flags that make another command import the same modules."""
  return [f"{_PREFIX}{module}" for module in modules()]


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the modules of --import, and the other arguments."""
  named = []
  others = []
  for argument in arguments:
    if argument.startswith(_PREFIX):
      named.append(argument.removeprefix(_PREFIX))
    else:
      others.append(argument)
  return named, others


def load(names: Iterable[str]) -> None:
  """Imports the modules.

  Raises:
    UserError: if a module cannot be imported.
  """
  for name in names:
    try:
      importlib.import_module(name)
    except UserError:
      raise
    except Exception as error:  # raised by the user's own code
      message = " ".join(str(error).split())
      raise UserError(
        f"{_PREFIX}{name}: {type(error).__name__}: {message}"
      ) from error
