"""The table of tested versions is compared with what is installed."""

import sys
import tomllib

import pytest

from tools import tested_versions

# The tested version of each package, by version of Python.
TABLE = {
  "3.11": {"jax": "0.10.2", "flax": "0.12.8"},
  "3.13": {"jax": "0.12.0.1", "flax": "0.12.12"},
}
# The section "project" of a pyproject.toml.
PROJECT = {
  "requires-python": ">=3.11",
  "dependencies": ["jax>=0.10.2", "flax>=0.12.8", "numpy>=2.0"],
}
# A part of the file that says what the continuous integration runs.
WORKFLOW = 'matrix:\n  python: ["3.11", "3.13"]\n'


def test_the_page_agrees_with_pyproject_and_the_workflow():
  """This test reads the files of the repository."""
  table = tested_versions.read_table(
    tested_versions.PAGE.read_text(encoding="utf-8")
  )
  pyproject = tested_versions.ROOT / "pyproject.toml"
  project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
  workflow = tested_versions.WORKFLOW.read_text(encoding="utf-8")

  errors = tested_versions.disagreements(table, project, workflow)

  assert errors == []


def test_a_table_is_read_as_it_is_written():
  text_of_table = tested_versions.format_table(TABLE)

  table = tested_versions.read_table(
    f"# Title\n\n{text_of_table}\n\nText | more\n"
  )

  assert table == TABLE


def test_a_newer_installed_version_is_no_failure():
  table = {"3.13": {"jax": "0.12.0.1", "flax": "0.12.12"}}
  installed = {"3.13": {"jax": "0.12.1", "flax": "0.13"}}

  assert tested_versions.untested_claims(table, installed) == []


def test_an_older_installed_version_does_not_support_the_table():
  table = {"3.13": {"jax": "0.12.0.1", "flax": "0.12.12"}}
  # 0.9 is older than 0.12.
  installed = {"3.13": {"jax": "0.9", "flax": "0.12.12"}}

  errors = tested_versions.untested_claims(table, installed)

  assert errors == ["jax 0.12.0.1 on Python 3.13: 0.9 was tested"]


def test_a_python_of_the_table_that_is_not_installed_was_not_tested():
  table = {"3.11": {"jax": "0.10.2"}, "3.13": {"jax": "0.12.0"}}
  installed = {"3.11": {"jax": "0.10.2"}}

  errors = tested_versions.untested_claims(table, installed)

  assert errors == ["Python 3.13 was not tested"]


def test_an_installed_python_has_a_column_in_the_table():
  table = {"3.13": {"jax": "0.12.0"}}
  installed = {"3.13": {"jax": "0.12.0"}, "3.14": {"jax": "0.12.0"}}

  errors = tested_versions.untested_claims(table, installed)

  assert errors == ["there is no column for Python 3.14"]


def test_the_oldest_tested_python_is_the_required_one():
  # The table begins with 3.11.
  project = PROJECT | {"requires-python": ">=3.12"}

  errors = tested_versions.disagreements(TABLE, project, WORKFLOW)

  assert errors == [
    "requires-python = '>=3.12', but the oldest tested Python is 3.11"
  ]


def test_the_oldest_tested_version_of_a_package_is_the_required_one():
  # The oldest version of jax in the table is 0.10.2.
  project = PROJECT | {"dependencies": ["jax>=0.11", "flax>=0.12"]}

  errors = tested_versions.disagreements(TABLE, project, WORKFLOW)

  assert errors == [
    "jax 0.10.2 was tested on Python 3.11, but pyproject.toml requires 0.11"
  ]


def test_the_workflow_tests_the_pythons_of_the_table():
  # The table has 3.11 and 3.13.
  workflow = 'python: ["3.11", "3.14"]'

  errors = tested_versions.disagreements(TABLE, PROJECT, workflow)

  assert errors == ['the workflow\'s matrix is not python: ["3.11", "3.13"]']


def test_the_installed_versions_of_an_environment():
  found = tested_versions.installed_versions(sys.executable, ["pytest"])

  python = f"{sys.version_info.major}.{sys.version_info.minor}"
  assert found == {python: {"pytest": pytest.__version__}}
