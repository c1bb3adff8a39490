"""The attention variants by name, as `config.model.attention` selects them.

A module registers its variants when it is imported. The package's own are in
diffjax/model/attention.py. Nothing imports the module of another variant by
itself: a checkpoint stores only the name.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from diffjax.config import UserError
from diffjax.parameters import PARAMETERS, Parameter, add_parameters

LayerClass = TypeVar("LayerClass", bound=type)

# The layer class of each name: subclasses of
# `diffjax.model.attention.Attention`, which this module cannot import.
ATTENTION: dict[str, Any] = {}


def register(name: str) -> Callable[[LayerClass], LayerClass]:
  """Returns a decorator that makes an attention variant available by name.

  Example:
    @diffjax.register("sigmoid")
    class SigmoidAttention(diffjax.Attention):
      def weights(self, q, k, lam, mask): …

  A config selects it with `config.model.attention = "sigmoid"`. Commands import
  its module with `--import=MODULE`, and `diffjax.load` with `imports=[MODULE]`.

  A class that is defined again, as in a notebook, replaces the old one.

  Args:
    name: the name, in small letters, digits and underscores.

  Raises:
    ValueError: if the name is malformed or in use, or if the class has a
      parameter that contradicts the table of parameters.
  """
  if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
    raise ValueError(
      f"name = {name!r}: must begin with a small letter and consist of small"
      " letters, digits and underscores"
    )

  def add(layer_class: LayerClass) -> LayerClass:
    new_class: Any = layer_class
    replaced_class = ATTENTION.get(name)
    if replaced_class is None:
      add_parameters(new_class.extra_parameters, new_class.extra_axes)
      ATTENTION[name] = layer_class
      return layer_class

    if not _is_redefinition(replaced_class, layer_class):
      raise ValueError(
        f"name = {name!r}: {replaced_class.__module__}."
        f"{replaced_class.__qualname__} has this name; choose another one"
      )
    # The new class may have other parameters of the same names.
    del ATTENTION[name]
    removed = _remove_unused_parameters(replaced_class)
    try:
      add_parameters(new_class.extra_parameters, new_class.extra_axes)
    except ValueError:
      PARAMETERS.update(removed)
      ATTENTION[name] = replaced_class
      raise
    ATTENTION[name] = layer_class
    # Compiled functions of the old class would be used for equal configs.
    jax.clear_caches()
    return layer_class

  return add


def _remove_unused_parameters(layer_class: Any) -> dict[str, Parameter]:
  """Removes parameters that only a replaced class has, and returns them."""
  used: set[str] = set()
  for other_class in ATTENTION.values():
    used |= other_class.extra_parameters.keys()
  removed = {}
  for name in layer_class.extra_parameters:
    if name not in used:
      removed[name] = PARAMETERS.pop(name)
  return removed


def _is_redefinition(old: type, new: type) -> bool:
  """Returns whether two classes come from the same place in the source."""
  return (old.__module__, old.__qualname__) == (
    new.__module__,
    new.__qualname__,
  )


def import_modules(modules: Iterable[str]) -> None:
  """Imports the modules that register attention variants.

  Args:
    modules: names such as "my_package.dint". Each must be installed, or lie
      below the current directory or another one of Python's path.

  Raises:
    UserError: if a module cannot be imported.
  """
  for module in modules:
    try:
      importlib.import_module(module)
    except Exception as error:  # A module may raise anything.
      message = f"cannot import {module!r}: {type(error).__name__}: {error}"
      if isinstance(error, ModuleNotFoundError) and _is_part(
        error.name, module
      ):
        message += (
          "; name a module that Python can import from the current directory,"
          " such as my_package.dint"
        )
      raise UserError(message) from error


def _is_part(missing: str | None, module: str) -> bool:
  """Returns whether a missing module is the given one or a package around it.

  Otherwise the module exists, and what it imports is missing.
  """
  return missing is not None and f"{module}.".startswith(f"{missing}.")


def imported_modules() -> list[str]:
  """Returns the modules of all variants from outside the package.

  Another process passes them to `import_modules`.

  Raises:
    UserError: if a variant is defined where another process cannot import it
      from, such as a notebook.
  """
  modules = []
  for name, layer_class in ATTENTION.items():
    module = layer_class.__module__
    if module.partition(".")[0] == "diffjax" or module in modules:
      continue
    if not _is_importable(module):
      raise UserError(
        f"{name!r} is defined in {module}, which another process cannot import;"
        " move the class to a module of its own, and import that"
      )
    modules.append(module)
  return modules


def _is_importable(module: str) -> bool:
  """Returns whether Python can import a module that is loaded by its name."""
  if module == "__main__":  # a script or a notebook
    return False
  try:
    return importlib.util.find_spec(module) is not None
  except (ImportError, ValueError):  # A loaded module may have no spec.
    return False


def name_of(layer_class: type) -> str:
  """Returns the name under which a layer class is registered.

  Raises:
    ValueError: if the class is not registered.
  """
  for name, registered in ATTENTION.items():
    if registered is layer_class:
      return name
  raise ValueError(
    f"{layer_class.__qualname__} has no name: decorate it with"
    ' @diffjax.register("name")'
  )


def layer_class_of(name: str) -> Any:
  """Returns the layer class that is registered under a name.

  Raises:
    UserError: if no class has this name.
  """
  if name in ATTENTION:
    return ATTENTION[name]
  raise UserError(
    f"config.model.attention = {name!r}: no such variant is registered; there"
    f" are {', '.join(ATTENTION)}. For a variant of your own, import the module"
    " that registers it: --import=MODULE for commands, or"
    " diffjax.load(workdir, imports=[MODULE])"
  )
