"""The two tiers of the tests: the default one, and the full one.

`pytest` runs the default tier. CI also runs the full tier (`pytest -m full`),
which has further combinations, and tests that take long. A test joins the full
tier with `@pytest.mark.full`. Single cases of a test join it with `full`,
and named cases with `by_name`:

    @pytest.mark.parametrize("length", [16, *full([1024, 4096])])
    @pytest.mark.parametrize("case", by_name([GROUPED], full_cases=[PACKED]))
"""

from collections.abc import Iterable
from typing import Any, Protocol

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


class NamedCase(Protocol):
  """A case of a test that has a name."""

  name: str


def by_name(
  cases: Iterable[NamedCase], full_cases: Iterable[NamedCase] = ()
) -> list:
  """Returns parameters with the names of the cases as ids.

  Args:
    cases: cases of the default tier.
    full_cases: cases that only the full tier runs.
  """
  parameters = [pytest.param(case, id=case.name) for case in cases]
  for case in full_cases:
    parameter = pytest.param(case, id=case.name, marks=pytest.mark.full)
    parameters.append(parameter)
  return parameters
