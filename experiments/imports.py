"""Passes --import=MODULE on to the commands that an experiment starts.

The modules register attention variants (`diffjax.model.registry`).
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from diffjax.model import registry

_PREFIX = "--import="


def modules() -> list[str]:
  """Returns the modules that other commands of an experiment must import.

  These are the modules of this command's --import, and further modules that
  have registered attention variants. experiment.py may import such a module.
  """
  names: list[str] = []
  if "import" in flags.FLAGS:
    for value in flags.FLAGS["import"].value or ():
      names += value.split(",")
  names += registry.imported_modules()
  return list(dict.fromkeys(names))


def arguments() -> list[str]:
  """Returns the flags that make another command import the same modules."""
  return [f"{_PREFIX}{module}" for module in modules()]


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the modules of --import, and the other arguments.

  Example: ["--import=a,b", "ablations"] → (["a", "b"], ["ablations"])
  """
  modules_to_import = []
  other_arguments = []
  for argument in arguments:
    if argument.startswith(_PREFIX):
      modules_to_import += argument.removeprefix(_PREFIX).split(",")
    else:
      other_arguments.append(argument)
  return modules_to_import, other_arguments
