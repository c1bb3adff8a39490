"""Experiments in folders outside the repository.

Such a folder has an experiment.py, which defines EXPERIMENT. It may have a
config.py and further modules. The folder comes first on sys.path, so both files
import those with `import task`. Relative imports do not work. One process should
load one folder only: two folders with a task.py would share the first one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import sys
import traceback
import types

from diffjax.config import UserError


def is_outside(name: str) -> bool:
  """Returns True if an experiment's name is the path of a folder."""
  return os.path.isabs(name)


def identifier(name: str) -> str:
  """Returns a directory name for an experiment's runs.

  Two folders of the same name have different identifiers.
  """
  if not is_outside(name):
    return name
  digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
  return f"{pathlib.Path(name).name}_{digest}"


def add_to_path(folder: pathlib.Path) -> None:
  """Puts the folder first on sys.path."""
  if str(folder) not in sys.path:
    sys.path.insert(0, str(folder))


def load(folder: pathlib.Path) -> types.ModuleType:
  """Returns the module of a folder's experiment.py.

  Raises:
    UserError: in one line, with the file and the line, if the module raises.
  """
  module_name = f"experiment_{identifier(str(folder))}"
  if module_name in sys.modules:
    return sys.modules[module_name]
  path = folder / "experiment.py"
  add_to_path(folder)
  spec = importlib.util.spec_from_file_location(module_name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[module_name] = module
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    del sys.modules[module_name]
    if isinstance(error, UserError):
      raise
    raise _located(path, error) from error
  if not hasattr(module, "EXPERIMENT"):
    raise UserError(f"{path} does not define EXPERIMENT")
  return module


def environment(name: str, modules: list[str]) -> dict[str, str]:
  """Returns the environment of commands that run in another directory.

  Args:
    name: The experiment's name. The modules in an outside folder can be
      imported there.
    modules: The values of --import, which may lie in the current directory.
  """
  paths = []
  if is_outside(name):
    paths.append(name)
  if modules:
    paths.append(os.getcwd())
  python_path = os.environ.get("PYTHONPATH", "")
  if python_path:
    paths += [os.path.abspath(path) for path in python_path.split(os.pathsep)]
  if not paths:
    return {}
  return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _located(path: pathlib.Path, error: Exception) -> UserError:
  """Returns an error that names the last line of the folder's own code."""
  place = str(path)
  if isinstance(error, SyntaxError) and error.filename:
    place = f"{error.filename}:{error.lineno}"
  for frame in traceback.extract_tb(error.__traceback__):
    if frame.filename.startswith(str(path.parent)):
      place = f"{frame.filename}:{frame.lineno}"
  message = " ".join(str(error).split())
  return UserError(f"{place}: {type(error).__name__}: {message}")
