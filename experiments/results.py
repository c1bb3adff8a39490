"""The files with the results of runs.

A run that finished has result.json in its workdir, and a run that failed has
failed.json. The results of all runs of a grid are collected in results.json.
It holds one experiment, one grid and one version of the settings, so that its
runs can be compared.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from diffjax.config import UserError
from diffjax.host.files import write_atomically
from diffjax.model.flops import parameter_count
from experiments import compatibility
from experiments.grid import Experiment, Run, comparable

_RESULT_FILE = "result.json"
_FAILURE_FILE = "failed.json"

# The packages whose versions are stored.
_PACKAGES = ("jax", "flax", "optax", "numpy")

# The keys that every entry must have: the content of result.json.
_ENTRY_KEYS = (
  "name",
  "variant",
  "seed",
  "versions",
  "parameters",
  "task",
  "config",
  "results",
)


def write_run(
  workdir: pathlib.Path,
  run: Run,
  task: Mapping[str, Any],
  results: Mapping[str, Any],
  seconds: float | None,
  machine: str,
) -> None:
  """Writes result.json of a finished run.

  Args:
    workdir: The run's directory.
    run: The run.
    task: The constants of the experiment's task.
    results: The results by metric.
    seconds: The wall time of the run. None if it is unknown.
    machine: The machine, from `experiments.machine`.
  """
  entry = _new_entry(run, task, results)
  entry["machine"] = machine
  if seconds is not None:
    entry["seconds"] = round(seconds, 1)
  write(workdir / _RESULT_FILE, entry)


def write_failure(
  workdir: pathlib.Path, run: Run, experiment: Experiment, reason: str
) -> None:
  """Writes failed.json of a run that ended with an error.

  It has the keys of result.json, and every metric is None.

  Args:
    workdir: The run's directory.
    run: The run.
    experiment: Its experiment.
    reason: The last error line.
  """
  no_results = dict.fromkeys(experiment.metrics.values())
  entry = _new_entry(run, experiment.task, no_results)
  entry["failed"] = reason
  write(workdir / _FAILURE_FILE, entry)


def forget_failure(workdir: pathlib.Path) -> None:
  """Deletes failed.json, before the run is tried again."""
  (workdir / _FAILURE_FILE).unlink(missing_ok=True)


def _new_entry(
  run: Run, task: Mapping[str, Any], results: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the entry of a run, without its machine and its seconds."""
  versions = {"python": platform.python_version()}
  for package in _PACKAGES:
    versions[package] = importlib.metadata.version(package)
  entry = {
    "name": run.name,
    "variant": run.variant,
    "seed": run.seed,
    "date": str(datetime.date.today()),
    "machine": None,
    "versions": versions,
    "seconds": None,
    "parameters": parameter_count(run.config.model),
    "task": dict(task),
    "config": run.settings(),
    "results": dict(results),
  }
  if run.factors:
    entry["factors"] = dict(run.factors)
  return entry


def read_run(
  workdir: pathlib.Path,
  run: Run,
  task: Mapping[str, Any],
  location_fields: Collection[str],
) -> dict[str, Any] | None:
  """Returns the entry in a run's result.json.

  Args:
    workdir: The run's directory.
    run: The run, with its current settings.
    task: The constants of the experiment's task.
    location_fields: Config fields that are not compared, because they only say
      where data is.

  Returns:
    The entry, with the config's fields by dotted name. None if the run has not
    finished.

  Raises:
    UserError: if the entry has another config or task.
  """
  path = workdir / _RESULT_FILE
  entry = read(path, *_ENTRY_KEYS)
  if entry is None:
    return None
  entry["config"] = comparable(entry["config"], location_fields)
  _check_settings(path, entry, run, task, location_fields)
  return entry


def read_folder(
  path: pathlib.Path,
  name: str,
  grid: str,
  runs: Sequence[Run],
  task: Mapping[str, Any],
  location_fields: Collection[str],
) -> dict[str, dict[str, Any]]:
  """Returns the entries of the finished runs in a results.json, by name.

  Raises an error rather than mixing results of different settings.

  Args:
    path: The file.
    name: The experiment's name.
    grid: The grid's name.
    runs: All runs of the grid, with their current settings.
    task: The constants of the experiment's task.
    location_fields: Config fields that are not compared, because they only say
      where data is.

  Returns:
    The entries. An empty dict if there is no such file.

  Raises:
    UserError: if the file holds another experiment, grid, config or task, or a
      run that the grid does not have.
  """
  stored = read(path, "experiment", "grid", "task", "config", "runs")
  if stored is None:
    return {}
  for key, value in (("experiment", name), ("grid", grid)):
    if stored[key] != value:
      raise UserError(
        f"{path} holds results of another {key}, {stored[key]!r}; choose"
        " another place with --out=DIR"
      )

  run_by_name = {run.name: run for run in runs}
  entries = {}
  for entry in _complete_entries(stored):
    if "failed" in entry:
      continue
    run_name = entry["name"]
    if run_name not in run_by_name:
      raise UserError(
        f"{path} holds results of {run_name!r}, which the grid does not have"
        " now; choose another place with --out=DIR"
      )
    run = run_by_name[run_name]
    _check_settings(path, entry, run, task, location_fields)
    entries[run_name] = entry
  return entries


def read_failures(
  path: pathlib.Path,
  runs_dir: pathlib.Path,
  runs: Sequence[Run],
  task: Mapping[str, Any],
  location_fields: Collection[str],
) -> dict[str, dict[str, Any]]:
  """Returns the entries of the runs that ended with an error, by name.

  Failures with another config or task are left out, because the changed
  setting may be the fix.

  Args:
    path: A results.json, which may not exist.
    runs_dir: The directory of the runs. Their failed.json are newer than
      results.json.
    runs: All runs of the grid, with their current settings.
    task: The constants of the experiment's task.
    location_fields: Config fields that are not compared, because they only say
      where data is.
  """
  collected_failures: dict[str, dict[str, Any]] = {}
  stored = read(path, "task", "config", "runs")
  if stored is not None:
    for stored_entry in _complete_entries(stored):
      if "failed" in stored_entry:
        collected_failures[stored_entry["name"]] = stored_entry

  failures: dict[str, dict[str, Any]] = {}
  for run in runs:
    entry = read(runs_dir / run.name / _FAILURE_FILE, *_ENTRY_KEYS, "failed")
    if entry is not None:
      entry["config"] = comparable(entry["config"], location_fields)
    else:
      entry = collected_failures.get(run.name)
    if entry is None:
      continue
    if not compatibility.differences(entry, run, task, location_fields):
      failures[run.name] = entry
  return failures


def _complete_entries(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the entries of a results.json, with the shared settings in each."""
  entries = []
  for run in stored["runs"]:
    config = {**stored["config"], **run["config"]}
    entries.append({**run, "task": stored["task"], "config": config})
  return entries


def write_folder(
  path: pathlib.Path,
  name: str,
  grid: str,
  baseline: str,
  entries: Sequence[Mapping[str, Any]],
  summarise: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
  """Writes the results of a grid's runs to a results.json.

  Config fields with the same value in all runs are stored once.

  Args:
    path: The file.
    name: The experiment's name.
    grid: The grid's name.
    baseline: The variant that the others are compared with.
    entries: The entries of the runs, at least one.
    summarise: Returns the rows of the summary, from the content of the file. It
      gets no variant with a failed run, and is not called if none is left.

  Returns:
    The content of the file.
  """
  shared_config = _shared_fields([entry["config"] for entry in entries])
  runs = []
  for entry in entries:
    run_config = {}
    for field, value in entry["config"].items():
      if field not in shared_config:
        run_config[field] = value
    run = dict(entry)
    # These keys move to the end, and to the top level of the file.
    del run["config"]
    del run["task"]
    run["config"] = run_config
    runs.append(run)
  results = {
    "experiment": name,
    "grid": grid,
    "baseline": baseline,
    # The task of all runs is the same.
    "task": entries[0]["task"],
    "config": shared_config,
    "runs": runs,
  }
  comparable_results = without_failed_rows(results)
  if summarise and comparable_results["runs"]:
    results["summary"] = summarise(comparable_results)
  write(path, results)
  return results


def _shared_fields(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the fields that have the same value in all configs."""
  shared = {}
  for field, value in configs[0].items():
    if all(field in config and config[field] == value for config in configs):
      shared[field] = value
  return shared


def without_failed_rows(results: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the results without the variants that have a failed run.

  The other runs of such a variant would be a biased sample.
  """
  failed = {run["variant"] for run in results["runs"] if "failed" in run}
  runs = [run for run in results["runs"] if run["variant"] not in failed]
  return {**results, "runs": runs}


def _check_settings(
  path: pathlib.Path,
  entry: Mapping[str, Any],
  run: Run,
  task: Mapping[str, Any],
  location_fields: Collection[str],
) -> None:
  """Raises UserError if an entry has another config or task."""
  differences = compatibility.differences(entry, run, task, location_fields)
  if differences:
    raise UserError(
      f"{path} holds results of another config ({run.name}):"
      f" {compatibility.summarize(differences)}; choose other places with"
      " --workdir=DIR and --out=DIR, or delete them"
    )


def read(path: pathlib.Path, *keys: str) -> dict[str, Any] | None:
  """Returns the JSON object in a file, or None if there is no such file.

  Args:
    path: The file.
    *keys: The keys that the object must have.

  Raises:
    UserError: if the file cannot be read or lacks a key.
  """
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return None
  except (OSError, ValueError) as error:
    raise UserError(
      f"{path}: cannot be read ({error}); delete it, and run again"
    ) from error
  if not isinstance(content, dict) or not content.keys() >= set(keys):
    raise UserError(
      f"{path}: cannot be read (it holds other data than results); delete it,"
      " and run again"
    )
  return content


def write(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file atomically, and creates its directory."""
  path.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps(value, indent=1, ensure_ascii=False)
  # Two processes may write results of the same experiment.
  suffix = f".{os.getpid()}.tmp"
  write_atomically(path, text + "\n", temporary_suffix=suffix)
