"""Experiments in folders outside the repository.

Such a folder has an experiment.py, which defines EXPERIMENT. It may also have a
config.py and further modules. The folder is first on sys.path, so a module
task.py is imported with `import task`. Relative imports do not work. A process
should load only one folder: a second folder with a task.py would get the first
folder's task.py.
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
  """Returns True if an experiment's name is the path of an outside folder."""
  return os.path.isabs(name)


def identifier(name: str) -> str:
  """Returns the name of the directory for an experiment's runs.

  It includes a hash of an outside folder's path, so that folders with the same
  name have different directories.
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

  Args:
    folder: The folder of an experiment outside the repository.

  Raises:
    UserError: if the module raises an error, with the file and the line, or if
      it does not define EXPERIMENT.
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
    raise _error_with_location(path, error) from error
  if not hasattr(module, "EXPERIMENT"):
    raise UserError(f"{path} does not define EXPERIMENT")
  return module


def environment(name: str, modules: list[str]) -> dict[str, str]:
  """Returns the environment variables of commands in another directory.

  PYTHONPATH contains the experiment's folder if it is outside the repository,
  the current directory if --import is used, and the absolute paths of this
  process's PYTHONPATH.

  Args:
    name: The experiment's name.
    modules: The values of --import.
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


def _error_with_location(path: pathlib.Path, error: Exception) -> UserError:
  """Returns an error in one line, with the file and the line in the folder."""
  location = str(path)
  if isinstance(error, SyntaxError) and error.filename:
    location = f"{error.filename}:{error.lineno}"
  # The last of these frames is the innermost one.
  for frame in traceback.extract_tb(error.__traceback__):
    if frame.filename.startswith(str(path.parent)):
      location = f"{frame.filename}:{frame.lineno}"
  message = " ".join(str(error).split())
  return UserError(f"{location}: {type(error).__name__}: {message}")
