"""Which folder of diffjax/ may import which one.

Folders and files do not import each other in circles.
"""

import ast
import functools
import graphlib
import pathlib
import sys

import pytest

from tests.harness import ROOT

# Files of diffjax/ itself that all folders except ops may import. They import
# only each other. The other files are commands.
BASE = {"config", "int8", "parameters"}
# Modules that have moved. They warn, and go with the next version.
MOVED = {"styles"}

_BELOW_TRAINING = {
  "base",
  "host",
  "cli",
  "plots",
  "ops",
  "parallel",
  "model",
  "data",
}
# Which other folders each folder may import. "base", "commands" and "moved" are
# files of diffjax/ itself.
ALLOWED = {
  "base": set(),
  "host": {"base"},
  # cli.command imports the modules that --import names, through the registry.
  "cli": {"base", "host", "model"},
  "plots": {"base"},
  "ops": set(),
  "parallel": {"base", "host", "ops"},
  # parallel.product multiplies by a parameter that a mesh may have split.
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
  "moved": {"plots"},
}
ALLOWED["commands"] = {*ALLOWED}


def module_name(path: pathlib.Path) -> str:
  """Returns the name of a file's module, or of an __init__.py's package."""
  parts = path.relative_to(ROOT).with_suffix("").parts
  if parts[-1] == "__init__":
    parts = parts[:-1]
  return ".".join(parts)


def package_files() -> dict[str, pathlib.Path]:
  """Returns the files of the package by the names of their modules."""
  paths = sorted((ROOT / "diffjax").rglob("*.py"))
  # A link, which rglob does not follow.
  paths += sorted((ROOT / "diffjax/configs").glob("*.py"))
  return {module_name(path): path for path in paths}


FILES = package_files()


def imported_modules(module: str) -> set[str]:
  """Returns the modules that a module's file imports, also within functions.

  `from package import name` imports the module package.name if there is one,
  and the package otherwise.
  """
  imported = set()
  for node in ast.walk(ast.parse(FILES[module].read_text())):
    if isinstance(node, ast.Import):
      imported |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f"{module}: imports are absolute"
      for alias in node.names:
        name = f"{node.module}.{alias.name}"
        if name in FILES:
          imported.add(name)
        else:
          imported.add(node.module)
  return imported


@functools.cache
def all_imports() -> dict[str, set[str]]:
  """Returns what each module of the package imports, by the module's name.

  Parsing 250 files takes half a second, so the tests call this, and not the
  collection of tests.
  """
  return {module: imported_modules(module) for module in FILES}


def folder_of(module: str) -> str:
  """Returns the folder of a module of the package, as ALLOWED names it."""
  # The package's own __init__.py offers what all folders hold, as commands do.
  if module == "diffjax":
    return "commands"
  name = module.split(".")[1]
  if name in BASE:
    return "base"
  if name in MOVED:
    return "moved"
  path = FILES.get(f"diffjax.{name}")
  if path is not None and path.name == "__init__.py":
    return name
  return "commands"


FOLDERS = sorted({folder_of(module) for module in FILES})


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_allowed_folders(folder):
  """ALLOWED has the folders that each folder may import."""
  assert folder in ALLOWED, f"diffjax/{folder} is not in the table of this file"
  allowed = ALLOWED[folder] | {folder}
  for module, imported in all_imports().items():
    if folder_of(module) != folder:
      continue
    for other in imported & FILES.keys():
      assert folder_of(other) in allowed, f"{module} imports {other}"


def test_folders_are_not_allowed_to_import_each_other_in_a_circle():
  """ALLOWED has the folders that each folder may import."""
  # This raises CycleError if there is a circle.
  graphlib.TopologicalSorter(ALLOWED).prepare()


def test_files_do_not_import_each_other_in_a_circle():
  """In a circle, Python would import a module that is not yet complete."""
  graph = {}
  for module, imported in all_imports().items():
    graph[module] = imported & FILES.keys()

  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    _, circle = error.args
    pytest.fail(" is imported by ".join(circle))


def test_ops_needs_few_libraries():
  """The folder of the kernels needs only JAX, jaxtyping and NumPy."""
  allowed = {"jax", "jaxtyping", "numpy", "diffjax"} | sys.stdlib_module_names

  for module, imported in all_imports().items():
    if folder_of(module) != "ops":
      continue
    for other in imported:
      library, _, _ = other.partition(".")
      assert library in allowed, f"{module} imports {other}"


def test_the_package_does_not_import_other_folders_of_the_repository():
  """An installed package has no folder but diffjax/."""
  folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
  folders.remove("diffjax")
  assert {"experiments", "benchmarks", "tests"} <= folders

  for module, imported in all_imports().items():
    for other in imported:
      package, _, _ = other.partition(".")
      assert package not in folders, f"{module} imports {other}"
