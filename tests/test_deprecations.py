"""Tests fail at deprecated calls of this project, but not of libraries."""

import importlib
import sys
import textwrap
import types
from typing import Any

import pytest

import diffjax
from diffjax.inference import notebook
from tests.harness.in_process import own_flags


def library(stacklevel: int) -> dict[str, Any]:
  """Returns the globals of a made-up library with a deprecated function."""
  code = f"""
    import warnings

    def deprecated():
      warnings.warn("use another", DeprecationWarning, {stacklevel})

    def uses_a_deprecated_function():
      deprecated()
  """
  module = {"__name__": "library"}
  exec(textwrap.dedent(code), module)
  return module


@pytest.mark.parametrize("stacklevel", [1, 2])
def test_only_deprecated_calls_of_our_own_are_errors(stacklevel):
  """The library may call its deprecated function, and this test may not.

  A library attributes the warning to itself (`stacklevel` 1) or to the caller
  of the function (2).
  """
  module = library(stacklevel)

  module["uses_a_deprecated_function"]()
  with pytest.raises(DeprecationWarning, match="use another"):
    module["deprecated"]()


def test_a_warning_that_a_library_attributes_to_our_call_is_an_error():
  """The library's function calls another one of its own, which warns.

  With `stacklevel` 3, the warning names the caller of the first: this test.
  """
  module = library(stacklevel=3)

  with pytest.raises(DeprecationWarning, match="use another"):
    module["uses_a_deprecated_function"]()


def run_as_user(code: str, **variables: Any) -> dict[str, Any]:
  """Runs code in a module "user", and returns the module's variables.

  Deprecated calls in the project's own modules would be errors.
  """
  module = {"__name__": "user", **variables}
  exec(code, module)
  return module


def test_the_deprecated_table_of_matrices_works_and_warns():
  with pytest.warns(DeprecationWarning, match="use is_matrix"):
    user = run_as_user("from diffjax.parameters import MATRICES")

  assert "query" in user["MATRICES"]


def test_the_deprecated_table_of_specs_works_and_warns():
  with pytest.warns(DeprecationWarning, match="parameter_spec"):
    user = run_as_user("from diffjax.parallel.rules import SPECS")

  assert "query" in user["SPECS"]


def test_the_deprecated_table_of_architectures_works_and_warns():
  with pytest.warns(DeprecationWarning, match="variant_styles"):
    user = run_as_user("from diffjax.styles import ARCHITECTURES")

  assert "diff" in user["ARCHITECTURES"]


@pytest.mark.parametrize(
  ("name", "replacement"),
  [
    ("style", "variant_styles"),
    ("together", "variant_styles"),
    ("Style", "diffjax.plots.styles"),
  ],
)
def test_a_deprecated_name_of_styles_works_and_warns(name, replacement):
  """The warning says what to use in its place."""
  with pytest.warns(DeprecationWarning, match=replacement):
    user = run_as_user(f"from diffjax.styles import {name}")

  assert callable(user[name])


NARROW_FFN = """
from diffjax.configs.base import get_config, narrow_ffn

config = get_config()
narrow_ffn(config, 48)
"""


def test_narrow_ffn_works_and_warns():
  with pytest.warns(DeprecationWarning, match="narrow_ffn is deprecated"):
    user = run_as_user(NARROW_FFN)

  # Each of the three feed-forward matrices, of width 352, gives 16 columns.
  assert user["config"].model.ffn_dim == 352 - 48 / 3


@pytest.mark.parametrize("module", ["parameters", "parallel.rules", "styles"])
def test_an_unknown_name_cannot_be_imported(module):
  with pytest.raises(ImportError, match="cannot import name 'unknown'"):
    run_as_user(f"from diffjax.{module} import unknown")


# Commands that were functions, and the functions' new names.
OLD_NAMES = [("train", "fit"), ("generate", "complete")]


@pytest.fixture
def forget_module():
  """forget_module("train") undoes `import diffjax.train` after the test."""
  names = []
  yield names.append
  for name in names:
    sys.modules.pop(f"diffjax.{name}", None)
    vars(diffjax).pop(name, None)


@pytest.mark.parametrize("imported", ["diffjax", "diffjax.{command}"])
@pytest.mark.parametrize(("command", "new_name"), OLD_NAMES)
def test_a_command_can_be_called_as_the_function_that_it_was(
  command, new_name, imported, forget_module, monkeypatch
):
  """diffjax.train is a module. In earlier versions, it was a function.

  Calling the module calls the function, which has a new name.
  """
  calls = []

  def new_function(*arguments, **options):
    calls.append((arguments, options))

  monkeypatch.setattr(notebook, new_name, new_function)
  code = f"""
import {imported.format(command=command)}
diffjax.{command}("first", second=2)
"""

  # After the test, the module is as if it had not been imported. Its flags can
  # be defined again.
  forget_module(command)
  with own_flags():
    with pytest.warns(DeprecationWarning, match=f"call diffjax.{new_name}"):
      run_as_user(code)

  assert calls == [(("first",), {"second": 2})]


@pytest.mark.parametrize("name", ["train", "generate"])
def test_an_imported_command_is_its_module(name, forget_module):
  # After the test, the module is as if it had not been imported.
  forget_module(name)
  with own_flags():
    module = importlib.import_module(f"diffjax.{name}")

  assert getattr(diffjax, name) is module
  assert callable(module.main)


@pytest.mark.parametrize("name", ["train", "generate"])
def test_a_command_that_is_not_imported_is_a_module(name, forget_module):
  """Until the command is imported, diffjax.train is an empty module."""
  # After the test, the module is as if it had not been imported.
  forget_module(name)
  with own_flags():
    assert isinstance(getattr(diffjax, name), types.ModuleType)
