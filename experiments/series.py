"""Numbers of the runs in a results.json, as `plots.over_seeds` draws them.

Each function returns a dict from variants to rows of numbers, one row for each
run of the variant (its seeds).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Rows = dict[str, list[list[Any]]]


def metrics(grid_results: Mapping[str, Any], names: Iterable[str]) -> Rows:
  """Returns some numbers of every run's results.

  Args:
    grid_results: The content of a results.json.
    names: The keys of the numbers in the runs' results.

  Returns:
    By variant, the numbers [seeds, names].
  """
  names = list(names)
  rows: Rows = {}
  for run in grid_results["runs"]:
    numbers = [run["results"][name] for name in names]
    rows.setdefault(run["variant"], []).append(numbers)
  return rows


def curves(grid_results: Mapping[str, Any], name: str) -> Rows:
  """Returns a list of numbers that every run's results hold under one key.

  Args:
    grid_results: The content of a results.json.
    name: The key of the list.

  Returns:
    By variant, the numbers [seeds, points].
  """
  rows: Rows = {}
  for run in grid_results["runs"]:
    rows.setdefault(run["variant"], []).append(run["results"][name])
  return rows


def fields(
  grid_results: Mapping[str, Any], name: str, field: str, **conditions: Any
) -> Rows:
  """Returns a field of the records that every run's results hold.

  For example, `fields(grid_results, "grid", "accuracy", noise=0.5)` has the
  accuracies of the records in "grid" whose "noise" is 0.5.

  Args:
    grid_results: The content of a results.json.
    name: The key of the list of records in a run's results.
    field: The field whose numbers are returned.
    **conditions: The values of other fields that select the records.

  Returns:
    By variant, the numbers [seeds, records].
  """
  rows: Rows = {}
  for run in grid_results["runs"]:
    selected = select(run["results"][name], **conditions)
    rows.setdefault(run["variant"], []).append(column(selected, field))
  return rows


def first_run(grid_results: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the results of the first run.

  The x-values of a figure are in every run, and are the same in all of them.
  """
  return grid_results["runs"][0]["results"]


def column(records: Iterable[Mapping[str, Any]], field: str) -> list[Any]:
  """Returns a field of some records."""
  return [record[field] for record in records]


def select(
  records: Iterable[Mapping[str, Any]], **conditions: Any
) -> list[Mapping[str, Any]]:
  """Returns the records whose fields have these values."""
  selected = []
  for record in records:
    if all(record[key] == value for key, value in conditions.items()):
      selected.append(record)
  return selected
