"""Compares the settings of stored results with the current ones of a run.

Results can be reused only if the run has the same settings: the fields of its
config that affect results, and the constants of its task.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from diffjax.config import Config, UserError
from experiments.grid import Run, comparable

# How many differences an error message names.
_MAX_DIFFERENCES = 2


def differing_fields(
  stored: Mapping[str, Any], current: Mapping[str, Any]
) -> list[str]:
  """Returns a description of each config field that differs.

  Args:
    stored: The fields of the stored config by dotted name. A field that is
      missing is newer than the results, and counts as its default.
    current: The fields of the run's config by dotted name.
  """
  defaults = comparable(Config().to_dict(), ())
  descriptions = []
  for field, value in current.items():
    default = defaults.get(field.removeprefix("pretrained."))
    stored_value = stored.get(field, default)
    if stored_value != value:
      descriptions.append(
        f"{field} is {stored_value!r} there and {value!r} now"
      )
  return descriptions


def differences(
  entry: Mapping[str, Any],
  run: Run,
  task: Mapping[str, Any],
  location_fields: Collection[str],
) -> list[str]:
  """Returns a description of each field and constant that differs.

  Args:
    entry: The stored results of a run, with "config" and "task".
    run: The run.
    task: The constants of the experiment's task.
    location_fields: Config fields that are not compared, because they only say
      where data is.
  """
  fields = comparable(run.settings(), location_fields)
  descriptions = differing_fields(entry["config"], fields)
  stored_task = _as_json(entry["task"])
  current_task = _as_json(task)
  for key in {**stored_task, **current_task}:
    stored_value = stored_task.get(key)
    value = current_task.get(key)
    if stored_value != value:
      descriptions.append(
        f"the task's {key} is {stored_value!r} there and {value!r} now"
      )
  return descriptions


def check_python_versions(
  entries: Iterable[Mapping[str, Any]], python: str | None = None
) -> None:
  """Checks that all runs on the standard library's text can be compared.

  Each version of Python has a different standard library, so losses on it
  cannot be compared.

  Args:
    entries: The results of runs.
    python: The version of Python for further runs.

  Raises:
    UserError: if runs on `data.source = stdlib` have different versions.
  """
  versions = set()
  for entry in entries:
    if entry["config"].get("data.source") == "stdlib":
      versions.add(entry["versions"]["python"])
  if versions and python is not None:
    versions.add(python)
  if len(versions) > 1:
    raise UserError(
      "runs on data.source = stdlib under Python"
      f" {' and '.join(sorted(versions))} cannot be compared, since their texts"
      " differ: use one Python, or other places with --workdir=DIR and"
      " --out=DIR"
    )


def summarize(descriptions: Sequence[str]) -> str:
  """Returns the first differences, and how many more there are."""
  text = "; ".join(descriptions[:_MAX_DIFFERENCES])
  num_others = len(descriptions) - _MAX_DIFFERENCES
  if num_others > 0:
    text += f" and {num_others} more"
  return text


def _as_json(task: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a task as JSON stores it: tuples are lists, and keys are texts."""
  return json.loads(json.dumps(dict(task)))
