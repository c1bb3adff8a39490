"""Pallas's interpreters in half of their time."""

from collections.abc import Iterator

import pytest

from tests.harness.host_callbacks import host_callbacks


@pytest.fixture(autouse=True, scope="session")
def quick_interpreters() -> Iterator[None]:
  """Keeps the arguments of the interpreters' callbacks on the host."""
  with host_callbacks():
    yield
