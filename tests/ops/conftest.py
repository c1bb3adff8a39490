"""The interpreters of Pallas, in half of their time."""

import pytest

from benchmarks.gpu import rehearsal


@pytest.fixture(autouse=True, scope="session")
def quick_interpreters():
  with rehearsal.callbacks_on_the_host():
    yield
