"""Runs an experiment: trains and measures a grid's runs, and writes results.json, a table and a plot.

    python -m experiments.run ablations    # the grid "cpu", one run after the other
    python -m experiments.run /home/me/lambda_study    # a folder with an experiment.py
    python -m experiments.run retrieval --grid=gpu --side_by_side=8    # a GPU each
    python -m experiments.run ablations --grid=tpu --cost    # its FLOPs and hours

The same command continues a grid: each run has its own workdir, and finished runs are skipped. A run that fails is a row of the table and
is tried again. A grid changed by --steps or --set has another WORKDIR. Hosts that share a WORKDIR can each take a --slice; the command
without it collects the results. Runs on several hosts are started with --print's lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import platform
import re
import shlex
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import app, flags

from diffjax.cli import command
from diffjax.config import Config, UserError
from diffjax.host.progress import say
from experiments import cost, draw, folders, imports, launch, results
from experiments import grid as grids
from experiments.grid import Experiment, Grid, Run
from experiments.pace import Pace

_SET_HELP = "A field of every run's config, as in --set=eval.rows=64, or of one variant's, as in --set=diff:eval.rows=64; may be repeated."
_GRID = flags.DEFINE_string("grid", "cpu", "One of the experiment's grids.")
_ONLY = flags.DEFINE_multi_string(
  "only",
  [],
  "A run or a variant, where * stands for anything; may be repeated.",
)
_STEPS = flags.DEFINE_integer(
  "steps", None, "Steps of every run, instead of its config's.", lower_bound=1
)
_SET = flags.DEFINE_multi_string("set", [], _SET_HELP)
_SLICE = flags.DEFINE_string(
  "slice", "0/1", "INDEX/COUNT: this host's part of the runs."
)
_SIDE_BY_SIDE = flags.DEFINE_integer(
  "side_by_side",
  1,
  "Runs at a time, each on its share of this machine's devices.",
  lower_bound=1,
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Directory of the runs; runs/experiments, or for changed grids runs/experiments_CODE.",
)
_OUT = flags.DEFINE_string(
  "out",
  None,
  "Directory of the results; the experiment's own folder, or for changed grids one beside the runs.",
)
_PRINT = flags.DEFINE_bool(
  "print", False, "Print the commands that train, and train nothing."
)
_COST = flags.DEFINE_bool(
  "cost",
  False,
  "Print the FLOPs and the hours of the runs, on this machine or on chips, and run nothing.",
)
_AOT = flags.DEFINE_string(
  "aot",
  None,
  "Compile each variant's step for a slice of TPUs, such as v5p:4x4x4, and run nothing.",
)

# VARIANT:FIELD=VALUE; a value may hold colons, and a variant "="
_SETTING = re.compile(r"((?!\w+\.\w+=)[^:]+:)?([\w.]+)=(.*)", re.DOTALL)
# The file in a workdir with the time spent on it, and the machine
_SPENT = "spent.json"
# Characters of an error in a line of progress.
_REASON_WIDTH = 120
# The fields that `Experiment.prepare` may set
_PLACES = ("data.source", "data.validation_source", "data.tokenizer")


def main(argument: str) -> None:
  """Runs an experiment as the flags say.

  Args:
    argument: The experiment's name, or the path of its folder.
  """
  try:
    _main(argument)
  except OSError as error:
    # A disk that is full, or a directory that cannot be written.
    raise UserError(
      f"{error.filename or 'writing'}: {error.strerror or error}"
    ) from error


def _main(argument: str) -> None:
  if not argument:
    raise app.UsageError(
      f"name an experiment: python -m experiments.run NAME; there are {', '.join(grids.names())}, and the path of a folder works too"
    )
  name = grids.resolve(argument)
  experiment = grids.load(name, _GRID.value)
  everything = _all_runs(name, experiment.grids[_GRID.value])
  chosen = grids.choose(everything, _ONLY.value, _SLICE.value)
  for flag in (_WORKDIR, _OUT):
    if "://" in (flag.value or ""):
      raise UserError(f"--{flag.name}={flag.value}: must be a local directory")
  if _COST.value:
    print(_cost(name, experiment, everything, chosen))
    return
  if _AOT.value:
    if not (experiment.trains or experiment.pretrained or experiment.plan):
      raise UserError(
        f"{name} takes no step of diffjax.train, so there is nothing to compile"
      )
    _compile(experiment, chosen, _AOT.value)
    return
  places: tuple[str, ...] = ()
  if experiment.prepare:
    data_fields = dict(experiment.prepare(_base(name), everything[0].config))
    places = tuple(data_fields)
    everything = [grids.with_fields(run, data_fields) for run in everything]
    chosen = [grids.with_fields(run, data_fields) for run in chosen]
  if _PRINT.value:
    _print_commands(name, experiment, chosen)
  else:
    _run(name, experiment, everything, chosen, places)


def _all_runs(name: str, grid: Grid) -> list[Run]:
  """Returns the runs of a grid with the changes of --set and --steps."""
  runs = grids.expand(name, grid, _changes(name))
  steps = _STEPS.value
  if steps is None:
    return runs
  if grid.crossed is not None and "train.steps" in grid.crossed.factors:
    raise UserError(
      f"--steps={steps}: train.steps is a factor of the grid; --only chooses rows of it"
    )
  return [_few_steps(run, steps) for run in runs]


def _print_commands(
  name: str, experiment: Experiment, runs: Sequence[Run]
) -> None:
  if not (experiment.trains or experiment.pretrained):
    raise UserError(
      f"{name} has no commands that train; run it without --print"
    )
  for run in runs:
    for training in _trainings(name, experiment, run):
      print(shlex.join(training.command))


def _run(
  name: str,
  experiment: Experiment,
  everything: list[Run],
  chosen: list[Run],
  places: tuple[str, ...],
) -> None:
  """Does the chosen runs that are missing, then collects the results of all runs, unless this host has only a slice of them.

  A run that ends with an error is reported in the table and in results.json, and the other runs go on. The same command tries such a run
  again. It resumes from the last checkpoint, so a run that diverged diverges again unless its workdir is deleted.

  Raises:
    UserError: before training, if something is wrong; and after the results are written, if a run failed.
  """
  base, out = _base(name), _results_folder(name)
  _check_validations(name, experiment, chosen)
  kept, read = _stored(name, experiment, everything, places)
  # Otherwise rows were brought along, or `measure` makes its own data.
  reads_text = experiment.trains or experiment.pretrained is not None
  own_text = reads_text and not everything[0].config.data.prepared_dir
  missing = []
  for run in chosen:
    if run.name not in kept and read(run) is None:
      missing.append(run)
  if missing:
    # These errors would otherwise come after hours.
    if own_text:
      results.check_text(kept.values(), platform.python_version())
    _check_writable(_WORKDIR.name, base)
    _check_writable(_OUT.name, out)
  say(f"{name}: {experiment.question}")
  say(
    f"grid {_GRID.value}: {len(missing)} of {len(chosen)} runs to do, in {base}; results in {out}"
  )
  failed: list[str] = []
  if missing:
    # Raises an error if new results could not be collected beside these.
    before = _finished(everything, kept, read)
    failed = _do(name, experiment, missing, places, before, len(chosen))
  if _SLICE.value != "0/1":
    say(
      "this slice is done; run the command without --slice to collect the results"
    )
  else:
    finished = _finished(everything, kept, read)
    if own_text:
      results.check_text([entry for _, entry in finished])
    entries = _with_failures(name, experiment, everything, places, finished)
    tables = _collect(name, experiment, entries, out)
    print(f"{tables} ({len(finished)} of {len(everything)} runs)")
  if failed:
    raise UserError(
      f"{len(failed)} of {len(missing)} runs failed: {', '.join(failed)}; the same command tries them again"
    )


def _check_validations(
  name: str, experiment: Experiment, runs: Sequence[Run]
) -> None:
  """Raises UserError for a training without the validation that ends it."""
  for run in runs:
    for training in _trainings(name, experiment, run):
      if training.config.eval.interval == 0:
        raise UserError(
          f"{run.name}: config.eval.interval = 0: results are those of the last validation; it must be at least 1"
        )


def _with_failures(
  name: str,
  experiment: Experiment,
  everything: Sequence[Run],
  places: tuple[str, ...],
  finished: Sequence[tuple[Run, dict[str, Any]]],
) -> list[dict[str, Any]]:
  """Returns the entries of the runs that have finished or failed, in the grid's order."""
  entry_by_name = results.read_failures(
    _results_folder(name) / "results.json",
    _base(name),
    everything,
    experiment.task,
    places,
  )
  for run, entry in finished:
    entry_by_name[run.name] = entry
  entries = []
  for run in everything:
    if run.name in entry_by_name:
      entries.append(entry_by_name[run.name])
  return entries


def _stored(
  name: str,
  experiment: Experiment,
  everything: list[Run],
  places: tuple[str, ...],
) -> tuple[dict[str, dict[str, Any]], Callable[[Run], dict[str, Any] | None]]:
  """Returns the finished runs in results.json by name, and a function that reads a run's results from its workdir, None if it has not finished."""
  kept = results.read_folder(
    _results_folder(name) / "results.json",
    grids.label(name),
    _GRID.value,
    everything,
    experiment.task,
    places,
  )

  def read(run: Run) -> dict[str, Any] | None:
    return results.read_run(
      _base(name) / run.name, run, experiment.task, places
    )

  return kept, read


def _finished(
  everything: list[Run],
  kept: dict[str, dict[str, Any]],
  read: Callable[[Run], dict[str, Any] | None],
) -> list[tuple[Run, dict[str, Any]]]:
  """The runs that have finished, with their results."""
  return [
    (run, entry)
    for run in everything
    if (entry := read(run) or kept.get(run.name)) is not None
  ]


def _seconds(
  finished: list[tuple[Run, dict[str, Any]]], machine: str
) -> list[tuple[Run, float]]:
  """The runs that have finished on a machine of this kind, and the seconds that each took."""
  return [
    (run, entry["seconds"])
    for run, entry in finished
    if entry.get("machine") == machine and entry.get("seconds")
  ]


def _collect(
  name: str,
  experiment: Experiment,
  entries: list[dict[str, Any]],
  out: pathlib.Path,
) -> str:
  """Writes results.json, the tables and the figure, and returns the tables and the names of the files."""
  baseline = experiment.grids[_GRID.value].baseline
  found = results.write_folder(
    out / "results.json",
    grids.label(name),
    _GRID.value,
    baseline,
    entries,
    experiment.summarise,
  )
  written = ["results.json", *draw.draw(experiment, found, out)]
  return f"{(out / 'table.md').read_text(encoding='utf-8')}\n{out}: {', '.join(written)}"


def _check_writable(flag: str, directory: pathlib.Path) -> None:
  try:
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()
  except OSError as error:
    raise UserError(
      f"cannot write in {directory}: {error.strerror}; choose another place with --{flag}=DIR"
    ) from error


def _changes(name: str) -> dict[str, object]:
  """Returns the values of --set by FIELD or VARIANT:FIELD."""
  variants = grids.load(name, _GRID.value).grids[_GRID.value].variants
  changes = {}
  for setting in _SET.value:
    field, value = _split_setting(setting, variants)
    changes[field] = grids.read_value(value)
  return changes


def _split_setting(setting: str, variants: Sequence[str]) -> tuple[str, str]:
  """Returns the FIELD or VARIANT:FIELD of a --set, and the text of its value.

  A variant may look like a setting: "model.num_layers=2:eval.rows=64".
  """
  known_variant = ""
  for variant in variants:
    if setting.startswith(f"{variant}:"):
      known_variant = f"{variant}:"
  match = _SETTING.fullmatch(setting.removeprefix(known_variant))
  if match is None:
    raise UserError(
      f"--set={setting}: must be FIELD=VALUE, such as eval.rows=64, or VARIANT:FIELD=VALUE"
    )
  variant, field, value = match.groups(default="")
  return known_variant + variant + field.removeprefix("config."), value


def _few_steps(run: Run, steps: int) -> Run:
  """The run with so many steps, and an evaluation at the end."""
  config = run.config
  fields = {
    "train.steps": steps,
    "eval.interval": min(config.eval.interval, steps) or steps,
  }
  start = _few_steps(run.pretrained, steps) if run.pretrained else None
  return dataclasses.replace(grids.with_fields(run, fields), pretrained=start)


def _changed(name: str) -> str:
  """Returns a hash of the changes by --steps and --set that affect results; "" if there are none."""
  changes = {}
  for field, value in _changes(name).items():
    if grids.decides(field):
      changes[field] = value
  if _STEPS.value is not None:
    changes["--steps"] = _STEPS.value
  if not changes:
    return ""
  content = json.dumps(changes, sort_keys=True)
  return hashlib.sha256(content.encode()).hexdigest()[:8]


def _base(name: str) -> pathlib.Path:
  """Returns the directory of an experiment's runs."""
  workdir = _WORKDIR.value
  if not workdir:
    code = _changed(name)
    workdir = f"runs/experiments_{code}" if code else "runs/experiments"
  directory = pathlib.Path(workdir).absolute()
  return directory / folders.identifier(name) / _GRID.value


def _results_folder(name: str) -> pathlib.Path:
  """Returns the directory of an experiment's results.

  The experiment's folder belongs to the unchanged grid. The results of a grid
  that --steps or --set changed are beside its runs, so that a trial does not
  stand in the way of the whole.
  """
  if _OUT.value:
    return pathlib.Path(_OUT.value).absolute()
  if _changed(name):
    return _base(name)
  # FOLDER is left out if the name is an absolute path.
  folder = grids.FOLDER / name
  return folder if _GRID.value == "cpu" else folder / _GRID.value


class _Training(NamedTuple):
  """A training that a run needs.

  Attributes:
    command: What starts it.
    workdir: Its workdir.
    config: Its whole config.
  """

  command: list[str]
  workdir: pathlib.Path
  config: Config


def _trainings(name: str, experiment: Experiment, run: Run) -> list[_Training]:
  """Returns the trainings that a run needs, in order."""
  trainings = []
  if run.pretrained:
    assert experiment.pretrained is not None
    pretrained = grids.resolve(experiment.pretrained)
    trainings += _trainings(
      pretrained, grids.load(pretrained, _GRID.value), run.pretrained
    )
  if experiment.trains:
    workdir = _base(name) / run.name
    fields = dict(run.fields)
    if trainings:
      fields["train.init_from"] = str(trainings[-1].workdir)
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
    trainings.append(_Training(command, workdir, run.config))
  return trainings


def _do(
  name: str,
  experiment: Experiment,
  runs: list[Run],
  places: tuple[str, ...],
  before: list[tuple[Run, dict[str, Any]]],
  total: int,
) -> list[str]:
  """Trains and measures runs, and writes a result.json or a failed.json for each.

  Args:
    name: The experiment's name.
    experiment: The experiment.
    runs: The runs to do.
    places: Fields that only say where data lies.
    before: Runs that had finished before, with their results. They tell how
      long the others take.
    total: The number of runs that are asked for, finished ones included.

  Returns:
    The names of the runs that failed.
  """
  found, slots = launch.devices(), _SIDE_BY_SIDE.value
  machine = results.machine(found, slots)
  paths = folders.environment(name, imports.modules())
  environments = []
  for slot in range(slots):
    environments.append({**paths, **launch.environment(found, slot, slots)})
  pace = Pace(_seconds(before, machine), runs, slots, experiment.trains)
  with launch.Launcher() as launcher:
    # Once, before several runs want the same rows.
    for preparation in _preparations(name, experiment, runs, places):
      launcher.call(preparation, paths)
    runner = _Runner(
      name, experiment, places, machine, environments, pace, launcher
    )
    jobs = [(run.name, functools.partial(runner.do, run)) for run in runs]
    try:
      launcher.side_by_side(jobs, slots)
    except BaseException:
      say(pace.stopped(total))
      raise
  return runner.failed


class _Runner:
  """Trains and measures the runs of a grid.

  Attributes:
    failed: The names of the runs that failed.
  """

  def __init__(
    self,
    name: str,
    experiment: Experiment,
    places: tuple[str, ...],
    machine: str,
    environments: Sequence[Mapping[str, str]],
    pace: Pace,
    launcher: launch.Launcher,
  ):
    """Stores what all runs have in common.

    Args:
      name: The experiment's name.
      experiment: The experiment.
      places: Fields that only say where data lies.
      machine: The machine in words.
      environments: The environment variables of each slot's commands.
      pace: Tells how long the other runs take.
      launcher: Starts the commands.
    """
    self._name = name
    self._experiment = experiment
    self._places = places
    self._machine = machine
    self._environments = environments
    self._pace = pace
    self._launcher = launcher
    self.failed: list[str] = []

  def do(self, run: Run, slot: int) -> str:
    """Does a run, and returns a text on its end and the runs that are left.

    An error of the run itself is recorded, so that the other runs go on.
    """
    self._pace.begin(run)
    workdir = _base(self._name) / run.name
    workdir.mkdir(parents=True, exist_ok=True)
    results.forget_failure(workdir)
    try:
      seconds = self._train_and_measure(run, slot, workdir)
    except launch.Failed as error:
      results.write_failure(workdir, run, self._experiment, error.reason)
      self.failed.append(run.name)
      reason = textwrap.shorten(error.reason, _REASON_WIDTH, placeholder=" …")
      rest = self._pace.end(run, None)
      return f"failed: {reason}; {rest}" if rest else f"failed: {reason}"
    return self._pace.end(run, seconds)

  def _train_and_measure(
    self, run: Run, slot: int, workdir: pathlib.Path
  ) -> float | None:
    """Writes a run's result.json. Returns its seconds, None if they are not known.

    Raises:
      launch.Failed: if training or measuring fails.
    """
    experiment = self._experiment
    log = workdir / "output.txt" if len(self._environments) > 1 else None
    trained_dir = workdir
    logged: dict[str, float] = {}
    for training in _trainings(self._name, experiment, run):
      logged = self._train(training, slot, log)
      trained_dir = training.workdir
    # Training by --print's line leaves no record of its time.
    is_trained_elsewhere = experiment.trains and not (workdir / _SPENT).exists()
    if experiment.measure:
      measured = self._measure(run, slot, log, workdir, trained_dir)
    else:
      measured = {}
      for metric in experiment.metrics.values():
        measured[metric] = logged.get(metric)
    if is_trained_elsewhere:
      seconds, machine = None, "not known: trained by another launcher"
    else:
      seconds, machine = _spent(workdir)
    results.write_run(workdir, run, experiment.task, measured, seconds, machine)
    return seconds

  def _train(
    self, training: _Training, slot: int, log: pathlib.Path | None
  ) -> dict[str, float]:
    """Trains, unless that is done. Returns the last number of every name in its log."""
    workdir = training.workdir
    logged = results.trained(workdir, training.config, self._places)
    if logged is not None:
      return logged
    with _timed(workdir, self._machine):
      self._launcher.call(
        training.command, self._environments[slot], log, tail=True
      )
    logged = results.trained(workdir, training.config, self._places)
    if logged is None:
      reason = "training ended before its last step, or could not save it"
      raise launch.Failed(f"{workdir}: {reason}", reason)
    return logged

  def _measure(
    self,
    run: Run,
    slot: int,
    log: pathlib.Path | None,
    workdir: pathlib.Path,
    trained_dir: pathlib.Path,
  ) -> dict[str, Any]:
    """Returns what the experiment's `measure` finds, in a process of its own."""
    config = json.dumps(run.config.to_dict())
    (workdir / "config.json").write_text(f"{config}\n", encoding="utf-8")
    command = [
      sys.executable,
      "-m",
      "experiments.measure",
      *imports.arguments(),
      self._name,
      _GRID.value,
      str(workdir),
      str(trained_dir),
    ]
    with _timed(workdir, self._machine):
      self._launcher.call(command, self._environments[slot], log, tail=True)
    content = (workdir / "measured.json").read_text(encoding="utf-8")
    return json.loads(content)


def _preparations(
  name: str, experiment: Experiment, runs: list[Run], places: tuple[str, ...]
) -> list[list[str]]:
  """Returns the commands that prepare rows for the trainings that have not finished, one for each data set."""
  commands: dict[str, list[str]] = {}
  for run in runs:
    for training in _trainings(name, experiment, run):
      data = training.config.data
      if data.mode != "prepared" or _has_rows(training.config):
        continue
      if results.trained(training.workdir, training.config, places) is not None:
        continue
      command = []
      for argument in training.command:
        if argument == "diffjax.train":
          argument = "diffjax.prepare"
        if not argument.startswith("--workdir="):
          command.append(argument)
      commands.setdefault(str(dataclasses.replace(data, seed=0)), command)
  return list(commands.values())


def _has_rows(config: Config) -> bool:
  """True if the rows exist in the config's prepared_dir. Their source may be missing on this machine then."""
  from diffjax.data import prepared

  return bool(config.data.prepared_dir) and all(
    prepared.is_prepared(target) for target in prepared.targets(config.data)
  )


@contextlib.contextmanager
def _timed(workdir: pathlib.Path, machine: str) -> Iterator[None]:
  """Adds the wall time inside the context to the time spent on a workdir."""
  start = time.monotonic()
  try:
    yield
  finally:
    results.write(
      workdir / _SPENT,
      {
        "seconds": _spent(workdir)[0] + time.monotonic() - start,
        "machine": machine,
      },
    )


def _spent(workdir: pathlib.Path) -> tuple[float, str]:
  """The seconds spent on a workdir, over all starts, and the machine of the last one."""
  spent = results.read(workdir / _SPENT, "seconds", "machine") or {
    "seconds": 0.0,
    "machine": "",
  }
  return spent["seconds"], spent["machine"]


def _cost(
  name: str, experiment: Experiment, everything: list[Run], chosen: list[Run]
) -> str:
  """A table of what the chosen runs cost, on this machine if it can train them."""
  if not cost.for_this_machine(chosen):
    if not experiment.trains and not experiment.pretrained:
      raise UserError(
        f"{name} trains nothing; its README says how long it takes"
      )
    return cost.on_chips(chosen)
  found, slots = launch.devices(), _SIDE_BY_SIDE.value
  machine, env = (
    results.machine(found, slots),
    launch.environment(found, 0, slots),
  )
  finished: list[tuple[Run, dict[str, Any]]] = []
  with contextlib.suppress(
    UserError
  ):  # results of another config say nothing about this one
    finished = _finished(
      everything, *_stored(name, experiment, everything, _PLACES)
    )
  return cost.here(
    experiment, chosen, _seconds(finished, machine), machine, slots, env
  )


def _compile(experiment: Experiment, runs: list[Run], topology: str) -> None:
  """Compiles each variant's training step, or what `experiment.plan` compiles, for TPUs that need not be attached; prints rows on the way.

  Raises:
    UserError: for a variant that cannot be compiled for the topology; and, after the last row, for those that are too large.
  """
  print(f"compiling for {topology}", flush=True)
  first = {run.variant: run.config for run in reversed(runs)}
  columns: list[str] = []
  too_large = []
  for variant in dict.fromkeys(run.variant for run in runs):
    try:
      rows = (
        experiment.plan(first[variant], topology)
        if experiment.plan
        else [_plan(first[variant], topology)]
      )
    except UserError as error:
      raise UserError(f"{variant}: {error}") from error
    if not columns:
      columns = ["", *rows[0]]
      print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in rows:
      print(f"| {' | '.join([variant, *row.values()])} |", flush=True)
    too_large += [variant] * any(row.get("fits") == "no" for row in rows)
  if too_large:
    raise UserError(
      f"{', '.join(too_large)}: too large for {topology}; python -m diffjax.aot says what would take less"
    )


def _plan(config: Config, topology: str) -> dict[str, str]:
  """The row of a config's training step: its memory, FLOPs and time of compilation."""
  from diffjax.compiled.plan import compile_plan
  from diffjax.model.flops import step_flops

  plan = compile_plan(config, topology)
  flops = step_flops(
    config.model,
    config.data.length,
    config.train.batch_size * config.data.length,
  ).training
  sizes = f"{plan.total / 2**30:.2f} of {plan.available / 2**30:.2f}"
  return {
    "GiB a chip": sizes,
    "fits": "yes" if plan.fits else "no",
    "FLOPs": f"{flops:.3g}",
    "compiled in": f"{plan.seconds:.0f} s",
  }


def _add_to_path(argument: str) -> None:
  """Lets --import find the modules in an outside folder."""
  with contextlib.suppress(UserError):
    name = grids.resolve(argument)
    if folders.is_outside(name):
      folders.add_to_path(pathlib.Path(name))


if __name__ == "__main__":
  named = next(
    (argument for argument in sys.argv[1:] if not argument.startswith("-")), ""
  )
  if named:
    sys.argv.remove(named)
    _add_to_path(named)
  command.run(functools.partial(main, named), with_config=False)
