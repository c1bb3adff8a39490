"""Deprecated calls of this project fail its tests; those of libraries do not."""

import importlib
import sys
import textwrap
import types

import pytest

import diffjax
from tests.harness.in_process import own_flags


def library(stacklevel):
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
  module = library(stacklevel)
  module["uses_a_deprecated_function"]()
  with pytest.raises(DeprecationWarning, match="use another"):
    module["deprecated"]()


def test_a_warning_from_further_down_that_is_attributed_to_us_is_an_error():
  with pytest.raises(DeprecationWarning, match="use another"):
    library(stacklevel=3)["uses_a_deprecated_function"]()


@pytest.mark.parametrize(
  "code, message",
  [
    ("from diffjax.parameters import MATRICES as value", "use is_matrix"),
    ("from diffjax.parallel.rules import SPECS as value", "parameter_spec"),
    ("from diffjax.styles import style as value", "variant_styles"),
    ("from diffjax.styles import together as value", "variant_styles"),
    ("from diffjax.styles import ARCHITECTURES as value", "variant_styles"),
    ("from diffjax.styles import Style as value", "diffjax.plots.styles"),
    (
      "from diffjax.configs.base import get_config, narrow_ffn\n"
      "value = get_config()\n"
      "narrow_ffn(value, 48)",
      "narrow_ffn is deprecated",
    ),
  ],
)
def test_names_of_the_last_version_work_and_warn(code, message):
  names = {"__name__": "user"}
  with pytest.warns(DeprecationWarning, match=message):
    exec(code, names)
  value = names["value"]
  if "MATRICES" in code:
    assert {"query", "lambda_hat"} <= value
  elif "SPECS" in code or "ARCHITECTURES" in code:
    assert {"query", "diff"} & value.keys()
  elif "narrow_ffn" in code:
    assert value.model.ffn_dim == 336
  else:
    assert callable(value)


def test_an_unknown_name_is_an_attribute_error():
  for module in ("parameters", "parallel.rules", "styles"):
    with pytest.raises(ImportError, match="cannot import name 'unknown'"):
      exec(f"from diffjax.{module} import unknown", {"__name__": "user"})


OLD_NAMES = [("train", "fit"), ("generate", "complete")]


@pytest.mark.parametrize("old_name, new_name", OLD_NAMES)
@pytest.mark.parametrize("is_imported", [False, True])
def test_a_command_is_a_module_and_was_a_function(
  old_name, new_name, is_imported, monkeypatch
):
  """The call works and warns, whether or not the command is imported."""
  calls = []
  monkeypatch.setattr(
    f"diffjax.inference.notebook.{new_name}",
    lambda *args, **options: calls.append((args, options)),
  )
  try:
    with own_flags():
      if is_imported:
        module = importlib.import_module(f"diffjax.{old_name}")
        assert getattr(diffjax, old_name) is module
        assert callable(module.main)
      with pytest.warns(DeprecationWarning, match=f"call diffjax.{new_name}"):
        user = {"__name__": "user", "diffjax": diffjax}
        exec(f"diffjax.{old_name}('first', second=2)", user)
  finally:
    forget_module(old_name)
  assert calls == [(("first",), {"second": 2})]
  assert isinstance(getattr(diffjax, old_name), types.ModuleType)


def forget_module(name):
  """Undoes `import diffjax.NAME`."""
  sys.modules.pop(f"diffjax.{name}", None)
  vars(diffjax).pop(name, None)
