"""The pages that are checked."""

import pathlib

import pytest

from tests.harness import ROOT
from tests.harness.pages import DOCUMENTATION

# The last results of the seeded faults. They name files that existed then.
_FAULTS = ROOT / "benchmarks/faults.md"


def _pages() -> list[pathlib.Path]:
  """Returns the documentation and the pages of experiments and benchmarks."""
  pages = [*DOCUMENTATION, ROOT / "CONTRIBUTING.md"]
  for folder in ("experiments", "benchmarks"):
    pages += sorted((ROOT / folder).rglob("*.md"))
  pages.remove(_FAULTS)
  return pages


def _name(page: pathlib.Path) -> str:
  return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", _pages(), ids=_name)
