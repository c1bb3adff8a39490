"""The two tiers of the tests: the default one, and the full one.

`pytest` runs the default tier. CI also runs the full tier (`pytest -m full`),
which has further combinations and tests that take minutes. A test joins the
full tier with `@pytest.mark.full`. Single cases of a test join it with `full`:

    @pytest.mark.parametrize("length", [16, *full([1024, 4096])])
"""

from collections.abc import Iterable
from typing import Any

import pytest


def full(cases: Iterable[Any]) -> list:
  """Returns the cases as parameters that only the full tier runs.

  Args:
    cases: values for `pytest.mark.parametrize`. A tuple is one case of a test
      with several parameters.
  """
  parameters = []
  for case in cases:
    values = case if isinstance(case, tuple) else (case,)
    parameters.append(pytest.param(*values, marks=pytest.mark.full))
  return parameters
