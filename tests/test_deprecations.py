"""Deprecated calls of this project fail its tests; those of libraries do not."""

import textwrap

import pytest


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
