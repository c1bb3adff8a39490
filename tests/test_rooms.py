"""Who may import whom: the table of the rooms, and that neither rooms nor files import each other in circles."""

import ast
import graphlib
import pathlib
import sys

import pytest

from tests.harness import ROOT

# Files of diffjax/ itself that all rooms except ops may import. They import only
# each other. The other files there are commands.
BASE = {"config", "int8", "parameters"}
# Modules that have moved, for one version.
MOVED = {"styles"}
_BELOW_TRAINING = {"base", "host", "cli", "plots"}
_BELOW_TRAINING |= {"ops", "parallel", "model", "data"}
# The rooms, and which others each may import.
TABLE = {
  "base": set(),
  "host": {"base"},
  # cli.command imports the modules that --import names, through the registry.
  "cli": {"base", "host", "model"},
  "plots": {"base"},
  "ops": set(),
  "parallel": {"base", "host", "ops"},
  # parallel.product multiplies by a parameter that a mesh may have split, and
  # plots.styles is how plots show a variant.
  "model": {"base", "ops", "parallel", "plots"},
  # diffjax.model.attention turns a config into another variant.
  "configs": {"base", "model"},
  "data": {"base", "host", "ops"},
  "training": _BELOW_TRAINING,
  "inference": _BELOW_TRAINING | {"training"},
  "compiled": _BELOW_TRAINING | {"training"},
  "evals": _BELOW_TRAINING | {"training", "inference"},
  # interop.card writes the results of measurements into the model card.
  "interop": _BELOW_TRAINING | {"training", "inference", "evals"},
}
TABLE["commands"] = set(TABLE) | {"moved"}
TABLE["moved"] = {"plots"}
# All that ops imports from outside the standard library.
OPS_LIBRARIES = {"jax", "jaxtyping", "numpy"}


def name_of(path: pathlib.Path) -> str:
  """diffjax/evals/needle.py is diffjax.evals.needle; an __init__.py is its package."""
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# rglob does not follow the link diffjax/configs.
FILES = {
  name_of(path): path
  for path in [
    *sorted((ROOT / "diffjax").rglob("*.py")),
    *sorted((ROOT / "diffjax/configs").glob("*.py")),
  ]
}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}


def imports(name: str) -> set[str]:
  """All modules that a file imports, at its top, within functions and for type checkers.

  A name from a package is the package's module of that name if there is one, else the package. The packages around a module do not count.
  """
  found = set()
  for node in ast.walk(ast.parse(FILES[name].read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f"{name}: imports are absolute"
      found |= {
        whole
        if (whole := f"{node.module}.{alias.name}") in FILES
        else node.module
        for alias in node.names
      }
  return found


def room_of(name: str) -> str:
  """The room of one of our modules. The package's own __init__.py offers what all rooms hold, as commands do."""
  if name == "diffjax":
    return "commands"
  first = name.split(".")[1]
  if f"diffjax.{first}" in PACKAGES:
    return first
  if first in BASE:
    return "base"
  if first in MOVED:
    return "moved"
  return "commands"


IMPORTS = {name: imports(name) for name in FILES}
OURS = {
  name: {other for other in found if other in FILES}
  for name, found in IMPORTS.items()
}


@pytest.mark.parametrize("room", sorted({room_of(name) for name in FILES}))
def test_a_room_imports_what_the_table_allows(room):
  assert room in TABLE, (
    f"diffjax/{room} is not in the table of {pathlib.Path(__file__).name}"
  )
  wrong = [
    f"{name} imports {other}, of {room_of(other)}"
    for name, found in OURS.items()
    for other in sorted(found)
    if room_of(name) == room and room_of(other) not in TABLE[room] | {room}
  ]
  assert not wrong, "\n".join(wrong)


def test_the_table_has_no_circle():
  list(graphlib.TopologicalSorter(TABLE).static_order())


def test_no_circle_between_files():
  try:
    list(graphlib.TopologicalSorter(OURS).static_order())
  except graphlib.CycleError as error:
    pytest.fail(" is imported by ".join(error.args[1]))


def test_operations_need_no_other_library():
  wrong = [
    f"{name} imports {other}"
    for name, found in IMPORTS.items()
    for other in sorted(found)
    if room_of(name) == "ops"
    and other.split(".")[0]
    not in OPS_LIBRARIES | {"diffjax"} | sys.stdlib_module_names
  ]
  assert not wrong, "\n".join(wrong)


def test_the_package_does_not_import_what_uses_it():
  users = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"diffjax"}
  assert {"experiments", "benchmarks", "tests"} <= users
  wrong = [
    f"{name} imports {other}"
    for name, found in IMPORTS.items()
    for other in sorted(found)
    if other.split(".")[0] in users
  ]
  assert not wrong, "\n".join(wrong)
