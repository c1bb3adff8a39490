"""Collects the results of a study's runs."""

from __future__ import annotations

import pathlib
import platform
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from diffjax.config import UserError
from experiments import compatibility, draw, grid, results
from experiments.grid import Run
from experiments.study import Study


def missing_runs(study: Study) -> list[Run]:
  """Returns the chosen runs that have not finished.

  A run has finished if the study's results.json or its workdir has its results.

  Raises:
    UserError: if there are results of another config or task.
  """
  collected = _read_collected(study)
  missing = []
  for run in study.chosen:
    if run.name not in collected and _read_run(study, run) is None:
      missing.append(run)
  return missing


def finished_runs(study: Study) -> list[tuple[Run, dict[str, Any]]]:
  """Returns the runs of the grid that have finished, with their results.

  Raises:
    UserError: if there are results of another config or task.
  """
  collected = _read_collected(study)
  finished = []
  for run in study.runs:
    entry = _read_run(study, run) or collected.get(run.name)
    if entry is not None:
      finished.append((run, entry))
  return finished


def seconds_on_machine(
  finished: Iterable[tuple[Run, Mapping[str, Any]]], machine: str
) -> list[tuple[Run, float]]:
  """Returns the seconds of the runs that have finished on a machine.

  Args:
    finished: Runs with their results.
    machine: The machine in words, as `machine.describe` returns it.
  """
  seconds = []
  for run, entry in finished:
    if entry.get("machine") == machine and entry.get("seconds"):
      seconds.append((run, entry["seconds"]))
  return seconds


def check_before_training(study: Study) -> None:
  """Checks that results of new runs can be written and compared.

  These errors would otherwise come after hours of training.

  Raises:
    UserError: if a directory cannot be written, if there are results of another
      config or task, or if the runs would have another text.
  """
  if _reads_stdlib(study):
    collected = _read_collected(study)
    compatibility.check_python_versions(
      collected.values(), platform.python_version()
    )
  _check_writable("workdir", study.runs_dir)
  _check_writable("out", study.results_dir)
  finished_runs(study)


def write_results(study: Study) -> str:
  """Writes results.json, the tables and the figure of a study.

  A run that ended with an error is a row of the table.

  Returns:
    The tables, the names of the files and the number of finished runs.

  Raises:
    UserError: if the results of the runs cannot be compared.
  """
  finished = finished_runs(study)
  if _reads_stdlib(study):
    compatibility.check_python_versions([entry for _, entry in finished])
  grid_name = study.options.grid
  stored = results.write_folder(
    study.results_dir / "results.json",
    name=grid.label(study.name),
    grid=grid_name,
    baseline=study.experiment.grids[grid_name].baseline,
    entries=_with_failures(study, finished),
    summarise=study.experiment.summarise,
  )
  drawn = draw.draw(study.experiment, stored, study.results_dir)
  tables = (study.results_dir / "table.md").read_text(encoding="utf-8")
  files = ", ".join(["results.json", *drawn])
  return (
    f"{tables}\n{study.results_dir}: {files}"
    f" ({len(finished)} of {len(study.runs)} runs)"
  )


def _read_collected(study: Study) -> dict[str, dict[str, Any]]:
  """Returns the finished runs in the study's results.json, by name."""
  return results.read_folder(
    study.results_dir / "results.json",
    name=grid.label(study.name),
    grid=study.options.grid,
    runs=study.runs,
    task=study.experiment.task,
    location_fields=study.places,
  )


def _read_run(study: Study, run: Run) -> dict[str, Any] | None:
  """Returns the results in a run's workdir; None if it has not finished."""
  workdir = study.workdir(run)
  return results.read_run(workdir, run, study.experiment.task, study.places)


def _with_failures(
  study: Study, finished: Iterable[tuple[Run, dict[str, Any]]]
) -> list[dict[str, Any]]:
  """Returns the entries of finished and failed runs in the grid's order."""
  entry_by_name = results.read_failures(
    study.results_dir / "results.json",
    runs_dir=study.runs_dir,
    runs=study.runs,
    task=study.experiment.task,
    location_fields=study.places,
  )
  for run, entry in finished:
    entry_by_name[run.name] = entry
  entries = []
  for run in study.runs:
    if run.name in entry_by_name:
      entries.append(entry_by_name[run.name])
  return entries


def _reads_stdlib(study: Study) -> bool:
  """Returns True if the runs may read the standard library as their text.

  They do not if their rows were prepared once for all hosts, or if the
  experiment neither trains nor measures trained models.
  """
  experiment = study.experiment
  if not experiment.trains and experiment.pretrained is None:
    return False
  return not study.runs[0].config.data.prepared_dir


def _check_writable(flag: str, directory: pathlib.Path) -> None:
  """Raises UserError if a directory cannot be written.

  Args:
    flag: The flag that chooses another directory.
    directory: The directory. It is created.
  """
  try:
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()
  except OSError as error:
    raise UserError(
      f"cannot write in {directory}: {error.strerror}; choose another place"
      f" with --{flag}=DIR"
    ) from error
