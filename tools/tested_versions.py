"""Compares the table of docs/versions.md with what CI has installed.

    python tools/tested_versions.py PYTHON [PYTHON …]

PYTHON are the interpreters of the environments that were tested. The table
fails if it claims what was not tested: a Python without an environment, or an
older installed version than it names. A newer installed version is no failure,
since libraries publish releases at any time: the table is then still true, and
the new one is printed.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/versions.md"
WORKFLOW = ROOT / ".github/workflows/test.yml"

# Prints the versions of Python and of the packages in the arguments.
REPORT = """
import importlib.metadata, sys
print(f"{sys.version_info.major}.{sys.version_info.minor}")
for name in sys.argv[1:]:
  print(importlib.metadata.version(name))
"""

# The versions of packages by the version of Python.
Table = dict[str, dict[str, str]]


def as_numbers(version: str) -> tuple[int, ...]:
  """Returns the release of a version, for comparisons."""
  return tuple(int(part) for part in re.findall(r"\d+", version))


def read_table(text: str) -> Table:
  """Returns the table of the page."""
  rows = []
  for line in text.splitlines():
    if line.startswith("|"):
      cells = line.strip("|").split("|")
      rows.append([cell.strip() for cell in cells])
  header, _, *body = rows
  table: Table = {}
  for index, heading in enumerate(header[1:], start=1):
    python = heading.removeprefix("Python ")
    table[python] = {row[0]: row[index] for row in body}
  return table


def format_table(table: Table) -> str:
  """Returns the table as the page shows it."""
  headings = [f"Python {python}" for python in table]
  lines = [
    " | ".join(["| package", *headings]) + " |",
    "|---" * (1 + len(table)) + "|",
  ]
  for package in next(iter(table.values())):
    versions = [column[package] for column in table.values()]
    lines.append(" | ".join([f"| {package}", *versions]) + " |")
  return "\n".join(lines)


def installed_versions(interpreter: str, packages: list[str]) -> Table:
  """Returns the column of the table for an environment."""
  output = subprocess.run(
    [interpreter, "-c", REPORT, *packages],
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  python, *versions = output.split()
  return {python: dict(zip(packages, versions, strict=True))}


def untested_claims(table: Table, installed: Table) -> list[str]:
  """Returns what the table claims although it was not tested."""
  claims = []
  for python in installed:
    if python not in table:
      claims.append(f"there is no column for Python {python}")
  for python, column in table.items():
    if python not in installed:
      claims.append(f"Python {python} was not tested")
      continue
    for package, version in column.items():
      tested = installed[python][package]
      if as_numbers(tested) < as_numbers(version):
        claims.append(
          f"{package} {version} on Python {python}: {tested} was tested"
        )
  return claims


def disagreements(table: Table, project: dict, workflow: str) -> list[str]:
  """Returns where the table, pyproject.toml and the workflow disagree."""
  claims = []
  pythons = sorted(table, key=as_numbers)
  oldest = pythons[0]
  if project["requires-python"] != f">={oldest}":
    claims.append(
      f"requires-python = {project['requires-python']!r}, but the oldest"
      f" tested Python is {oldest}"
    )
  bounds = {}
  for requirement in project["dependencies"]:
    name, _, bound = requirement.partition(">=")
    bounds[name] = bound
  for package, version in table[oldest].items():
    if as_numbers(version) < as_numbers(bounds[package]):
      claims.append(
        f"{package} {version} was tested on Python {oldest}, but"
        f" pyproject.toml requires {bounds[package]}"
      )
  matrix = ", ".join(f'"{python}"' for python in pythons)
  if f"python: [{matrix}]" not in workflow:
    claims.append(f"the workflow's matrix is not python: [{matrix}]")
  return claims


def main(interpreters: list[str]) -> int:
  table = read_table(PAGE.read_text(encoding="utf-8"))
  packages = list(next(iter(table.values())))
  installed: Table = {}
  for interpreter in interpreters:
    installed |= installed_versions(interpreter, packages)
  claims = untested_claims(table, installed)
  if claims or installed != table:
    print("docs/versions.md differs from the tested versions:")
    print(format_table(installed))
  for claim in claims:
    print(f"docs/versions.md: {claim}; correct the table")
  return 1 if claims else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
