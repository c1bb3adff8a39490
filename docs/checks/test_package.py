"""The package documents its names, and has one version."""

import re
import tomllib

import pytest

import diffjax
from tests.harness import ROOT


@pytest.mark.parametrize("name", diffjax.__all__)
def test_a_public_name_has_a_docstring(name):
  assert getattr(diffjax, name).__doc__


@pytest.mark.parametrize("name", diffjax.__all__)
def test_the_docstring_of_the_package_lists_a_public_name(name):
  if name != "__version__":
    assert f"`{name}`" in diffjax.__doc__


def test_pyproject_takes_the_version_from_the_package():
  settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
  assert settings["project"]["dynamic"] == ["version"]
  assert "version" not in settings["project"]
  dynamic = settings["tool"]["setuptools"]["dynamic"]
  assert dynamic["version"] == {"attr": "diffjax.__version__"}


def test_the_citation_has_the_version_of_the_package():
  citation = (ROOT / "CITATION.cff").read_text()
  [version] = re.findall(r"^version: (.*)$", citation, re.MULTILINE)
  assert version == diffjax.__version__


def test_the_changelog_has_the_version_of_the_package():
  changelog = (ROOT / "CHANGELOG.md").read_text()
  newest, *_ = re.findall(r"^## \[(\d.*?)\]", changelog, re.MULTILINE)
  assert newest == diffjax.__version__
