"""The two tiers of the suite: what everybody runs, and what CI runs besides (`pytest -m full`)."""

import pytest


def full(cases):
  """Cases for `pytest.mark.parametrize` that the full tier alone runs. A tuple is a case of several arguments."""
  return [
    pytest.param(
      *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full
    )
    for case in cases
  ]
