"""Pallas's interpreters run long programs on the CPU: here optimised machine code is worth its compilation."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _optimised(optimised):
  pass
