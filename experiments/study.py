"""A study: the runs of an experiment's grid, with their directories.

The command `python -m experiments.run` only reads flags. A notebook calls the
same functions:

    from experiments import collect, execute, study

    options = study.Options(steps=20, only=("diff/seed_0",))
    ablations = study.plan("ablations", options)
    ablations = study.prepare(ablations)
    missing = collect.missing_runs(ablations)
    failed = execute.run_all(ablations, missing)
    print(collect.write_results(ablations))

`plan` says which runs there are, and `prepare` writes their data. Both train
nothing. `execute.run_all` trains and measures: `execute.train` and
`execute.measure` do so for a single run, and `execute.time_spent` returns its
time. `cost.estimate` estimates the hours of a study.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diffjax.config import Config, UserError
from experiments import folders, grid, imports
from experiments.grid import Experiment, Grid, Run


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of a study: its runs and its directories.

  Attributes:
    grid: The name of one of the experiment's grids.
    only: Patterns of runs or variants, such as "diff*/seed_0". Empty for all.
    slice: "INDEX/COUNT", this host's part of the runs.
    steps: The number of steps of every run. None for the number in its config.
    changes: Values of config fields, by FIELD for all runs or by VARIANT:FIELD
      for the runs of one variant.
    slots: The number of runs at a time. Each has its share of the devices.
    workdir: The directory of the runs. By default runs/experiments, or
      runs/experiments_CODE for a grid with changes that affect results.
    out: The directory of the results. By default the experiment's folder. For a
      grid with changes that affect results, the directory of its runs.
  """

  grid: str = "cpu"
  only: tuple[str, ...] = ()
  slice: str = "0/1"
  steps: int | None = None
  changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  slots: int = 1
  workdir: str | None = None
  out: str | None = None


@dataclasses.dataclass(frozen=True)
class Study:
  """The runs of an experiment's grid, with their directories.

  Attributes:
    name: The experiment's name: its folder, as `grid.resolve` returns it.
    experiment: The experiment.
    options: The options that were given to `plan`.
    runs: All runs of the grid.
    chosen: The runs that `options` chooses.
    runs_dir: The directory of the runs.
    results_dir: The directory of the results.
    places: Config fields that only say where data is. They are not compared
      with the fields of stored results.
  """

  name: str
  experiment: Experiment
  options: Options
  runs: Sequence[Run]
  chosen: Sequence[Run]
  runs_dir: pathlib.Path
  results_dir: pathlib.Path
  places: tuple[str, ...] = ()

  def workdir(self, run: Run) -> pathlib.Path:
    """Returns the workdir of a run."""
    return self.runs_dir / run.name


class Training(NamedTuple):
  """A training that a run needs.

  Attributes:
    command: The command that starts it.
    workdir: Its workdir.
    config: Its whole config.
  """

  command: list[str]
  workdir: pathlib.Path
  config: Config


def plan(name: str, options: Options) -> Study:
  """Returns the study of an experiment's grid.

  Args:
    name: The experiment's name, or the path of its folder.
    options: Its runs and its directories.

  Raises:
    UserError: for an unknown experiment or grid, for changes that the grid does
      not allow, for a pattern that matches no run, and for a directory that is
      not local.
  """
  name = grid.resolve(name)
  experiment = grid.load(name, options.grid)
  runs = _all_runs(name, experiment.grids[options.grid], options)
  chosen = grid.choose(runs, options.only, options.slice)
  for flag, directory in (("workdir", options.workdir), ("out", options.out)):
    if directory and "://" in directory:
      raise UserError(f"--{flag}={directory}: must be a local directory")
  return Study(
    name=name,
    experiment=experiment,
    options=options,
    runs=runs,
    chosen=chosen,
    runs_dir=_runs_dir(name, options),
    results_dir=_results_dir(name, options),
  )


def prepare(study: Study) -> Study:
  """Writes the data of an experiment that makes its own.

  Returns:
    The study with runs that read this data.
  """
  if study.experiment.prepare is None:
    return study
  data_fields = dict(
    study.experiment.prepare(study.runs_dir, study.runs[0].config)
  )
  return dataclasses.replace(
    study,
    runs=[grid.with_fields(run, data_fields) for run in study.runs],
    chosen=[grid.with_fields(run, data_fields) for run in study.chosen],
    places=tuple(data_fields),
  )


def trainings(study: Study, run: Run) -> list[Training]:
  """Returns the trainings that a run needs, in order.

  The last one is the run's own, if its experiment trains. Before it comes the
  run from which it starts, if there is one.
  """
  return _trainings(study.name, study.experiment, study.options, run)


def _trainings(
  name: str, experiment: Experiment, options: Options, run: Run
) -> list[Training]:
  """Returns the trainings that a run of an experiment needs, in order."""
  needed = []
  if run.pretrained:
    assert experiment.pretrained is not None
    pretrained_name = grid.resolve(experiment.pretrained)
    pretrained_experiment = grid.load(pretrained_name, options.grid)
    needed += _trainings(
      pretrained_name, pretrained_experiment, options, run.pretrained
    )
  if not experiment.trains:
    return needed
  workdir = _runs_dir(name, options) / run.name
  fields = dict(run.fields)
  if needed:
    fields["train.init_from"] = str(needed[-1].workdir)
  command = [
    sys.executable,
    "-m",
    "diffjax.train",
    *imports.arguments(),
    f"--config={run.base}",
    f"--workdir={workdir}",
  ]
  for field, value in fields.items():
    command.append(f"--config.{field}={value}")
  needed.append(Training(command, workdir, run.config))
  return needed


def check_validations(study: Study) -> None:
  """Checks that every training ends with a validation.

  Raises:
    UserError: if one has no validations. Its results would be missing.
  """
  for run in study.chosen:
    for training in trainings(study, run):
      if training.config.eval.interval == 0:
        raise UserError(
          f"{run.name}: config.eval.interval = 0: results are those of the last"
          " validation; it must be at least 1"
        )


def _all_runs(name: str, chosen_grid: Grid, options: Options) -> list[Run]:
  """Returns the runs of a grid with the changes and steps of the options."""
  runs = grid.expand(name, chosen_grid, options.changes)
  steps = options.steps
  if steps is None:
    return runs
  product = chosen_grid.crossed
  if product is not None and "train.steps" in product.factors:
    raise UserError(
      f"--steps={steps}: train.steps is a factor of the grid; --only chooses"
      " rows of it"
    )
  return [_with_steps(run, steps) for run in runs]


def _with_steps(run: Run, steps: int) -> Run:
  """Returns a run with another number of steps. It ends with a validation."""
  # An interval of 0 means that the run has no validations.
  interval = run.config.eval.interval or steps
  fields = {"train.steps": steps, "eval.interval": min(interval, steps)}
  pretrained = None
  if run.pretrained:
    pretrained = _with_steps(run.pretrained, steps)
  changed = grid.with_fields(run, fields)
  return dataclasses.replace(changed, pretrained=pretrained)


def _runs_dir(name: str, options: Options) -> pathlib.Path:
  """Returns the directory of an experiment's runs."""
  workdir = options.workdir
  if not workdir:
    workdir = "runs/experiments"
    code = _code_of_changes(options)
    if code:
      workdir += f"_{code}"
  directory = pathlib.Path(workdir).absolute()
  return directory / folders.identifier(name) / options.grid


def _results_dir(name: str, options: Options) -> pathlib.Path:
  """Returns the directory of an experiment's results.

  The results of the unchanged grid are in the experiment's folder. The results
  of a grid that --steps or --set changed are in the directory of its runs, so
  that a trial does not block the folder.
  """
  if options.out:
    return pathlib.Path(options.out).absolute()
  if _code_of_changes(options):
    return _runs_dir(name, options)
  # If the name is an absolute path, this is the path.
  folder = grid.FOLDER / name
  if options.grid == "cpu":
    return folder
  return folder / options.grid


def _code_of_changes(options: Options) -> str:
  """Returns a hash of the changes that affect results. Empty without any."""
  changes = {}
  for field, value in options.changes.items():
    if grid.decides(field):
      changes[field] = value
  if options.steps is not None:
    changes["--steps"] = options.steps
  if not changes:
    return ""
  content = json.dumps(changes, sort_keys=True)
  return hashlib.sha256(content.encode()).hexdigest()[:8]
