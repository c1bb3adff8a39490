"""Runs an experiment: trains and measures its grid's runs, and writes results.json, table.md, plot.png and plot.svg.

    python -m experiments.run ablations    # the grid "cpu", one run after the other
    python -m experiments.run retrieval --grid=gpu --side_by_side=8    # a GPU each
    python -m experiments.run ablations --grid=tpu --cost    # its FLOPs and hours

The same command continues a grid that was stopped: each run has a workdir of its own (WORKDIR/NAME/GRID/VARIANT/seed_SEED), and finished
runs are skipped. A grid changed by --steps or --set has another WORKDIR. Several hosts that share the workdir can each take a --slice;
afterwards the command without it collects the results. A run that needs several hosts is started by their launcher, with the line that
--print gives.
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
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags

from diffjax import command
from diffjax.config import Config, UserError
from diffjax.progress import say
from experiments import cost, draw, launch, results
from experiments import grid as grids
from experiments.grid import Experiment, Run
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
# The fields that `Experiment.prepare` may set
_PLACES = ("data.source", "data.validation_source", "data.tokenizer")


def main(name: str) -> None:
  """Runs the experiment of that name as the flags say."""
  try:
    _main(name)
  except (
    OSError
  ) as error:  # a disk that is full, a directory that cannot be written
    raise UserError(
      f"{error.filename or 'writing'}: {error.strerror or error}"
    ) from error


def _main(name: str) -> None:
  if not name:
    raise app.UsageError(
      f"name an experiment: python -m experiments.run NAME; there are {', '.join(grids.names())}"
    )
  experiment = grids.load(name, _GRID.value)
  everything = grids.expand(name, experiment.grids[_GRID.value], _changes())
  if _STEPS.value is not None:
    everything = [_few_steps(run, _STEPS.value) for run in everything]
  chosen = grids.choose(everything, _ONLY.value, _SLICE.value)
  for flag in (_WORKDIR, _OUT):
    if "://" in (flag.value or ""):
      raise UserError(f"--{flag.name}={flag.value}: must be a local directory")
  if _COST.value:
    print(_cost(name, experiment, everything, chosen))
  elif _AOT.value:
    if not (experiment.trains or experiment.pretrained or experiment.plan):
      raise UserError(
        f"{name} takes no step of diffjax.train, so there is nothing to compile"
      )
    _compile(experiment, chosen, _AOT.value)
  else:
    places: tuple[str, ...] = ()
    if experiment.prepare:
      fields = dict(experiment.prepare(_base(name), everything[0].config))
      places = tuple(fields)
      everything, chosen = (
        [grids.with_fields(run, fields) for run in runs]
        for runs in (everything, chosen)
      )
    if _PRINT.value:
      if not (experiment.trains or experiment.pretrained):
        raise UserError(
          f"{name} has no commands that train; run it without --print"
        )
      print(
        "\n".join(
          shlex.join(training)
          for run in chosen
          for training, _, _ in _trainings(name, experiment, run)
        )
      )
    else:
      _run(name, experiment, everything, chosen, places)


def _run(
  name: str,
  experiment: Experiment,
  everything: list[Run],
  chosen: list[Run],
  places: tuple[str, ...],
) -> None:
  """Does the chosen runs that are missing, then collects the results of all runs, unless this host has only a slice of them."""
  base, out = _base(name), _results_folder(name)
  kept, read = _stored(name, experiment, everything, places)
  # Else rows were brought along, or `measure` makes its own data
  own_text = not everything[0].config.data.prepared_dir and (
    experiment.trains or experiment.pretrained is not None
  )
  missing = [
    run for run in chosen if run.name not in kept and read(run) is None
  ]
  if missing:  # errors that would otherwise come after hours
    if own_text:
      results.check_text(kept.values(), platform.python_version())
    _check_writable(_WORKDIR.name, base)
    _check_writable(_OUT.name, out)
  say(f"{name}: {experiment.question}")
  say(
    f"grid {_GRID.value}: {len(missing)} of {len(chosen)} runs to do, in {base}; results in {out}"
  )
  if missing:
    before = _finished(
      everything, kept, read
    )  # refuses what could not be collected beside them
    _do(name, experiment, missing, places, before, len(chosen))
  if _SLICE.value != "0/1":
    say(
      "this slice is done; run the command without --slice to collect the results"
    )
    return
  entries = [entry for _, entry in _finished(everything, kept, read)]
  if own_text:
    results.check_text(entries)
  print(
    f"{_collect(name, experiment, entries, out)} ({len(entries)} of {len(everything)} runs)"
  )


def _stored(
  name: str,
  experiment: Experiment,
  everything: list[Run],
  places: tuple[str, ...],
) -> tuple[dict[str, dict[str, Any]], Callable[[Run], dict[str, Any] | None]]:
  """The runs in results.json by name, and a function that reads a run's results from its workdir, None if it has not finished."""
  path = _results_folder(name) / "results.json"
  kept = results.read_folder(
    path, name, _GRID.value, everything, experiment.task, places
  )
  return kept, lambda run: results.read_run(
    _base(name) / run.name, run, experiment.task, places
  )


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
    name,
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


def _changes() -> dict[str, object]:
  changes = {}
  for setting in _SET.value:
    match = _SETTING.fullmatch(setting)
    if match is None:
      raise UserError(
        f"--set={setting}: must be FIELD=VALUE, such as eval.rows=64, or VARIANT:FIELD=VALUE"
      )
    variant, field, value = match.groups(default="")
    changes[variant + field.removeprefix("config.")] = grids.read_value(value)
  return changes


def _few_steps(run: Run, steps: int) -> Run:
  """The run with so many steps, and an evaluation at the end."""
  config = run.config
  fields = {
    "train.steps": steps,
    "eval.interval": min(config.eval.interval, steps) or steps,
  }
  start = _few_steps(run.pretrained, steps) if run.pretrained else None
  return dataclasses.replace(grids.with_fields(run, fields), pretrained=start)


def _changed() -> str:
  """A hash of the changes by --steps and --set that affect results; "" if there are none."""
  changes = {
    field: value for field, value in _changes().items() if grids.decides(field)
  }
  changes |= {"--steps": _STEPS.value} if _STEPS.value is not None else {}
  return (
    hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:8]
    if changes
    else ""
  )


def _base(name: str) -> pathlib.Path:
  """Directory of an experiment's runs."""
  default = (
    f"runs/experiments_{_changed()}" if _changed() else "runs/experiments"
  )
  return pathlib.Path(_WORKDIR.value or default).absolute() / name / _GRID.value


def _results_folder(name: str) -> pathlib.Path:
  """Directory of an experiment's results. The committed one belongs to the unchanged grid."""
  if _OUT.value:
    return pathlib.Path(_OUT.value).absolute()
  return (
    _base(name)
    if _changed()
    else grids.FOLDER / name / ("" if _GRID.value == "cpu" else _GRID.value)
  )


def _training(name: str, run: Run, workdir: pathlib.Path) -> list[str]:
  """The command that trains a run."""
  config = f"--config={(grids.FOLDER / name / 'config.py').relative_to(grids.FOLDER.parent)}:{run.variant}"
  fields = [f"--config.{field}={value}" for field, value in run.fields.items()]
  return [
    sys.executable,
    "-m",
    "diffjax.train",
    config,
    f"--workdir={workdir}",
    *fields,
  ]


def _trainings(
  name: str, experiment: Experiment, run: Run
) -> list[tuple[list[str], pathlib.Path, Config]]:
  """The trainings that a run needs, in order: the command, the workdir and the config of each."""
  commands = []
  if run.pretrained:
    assert experiment.pretrained is not None
    commands += _trainings(
      experiment.pretrained,
      grids.load(experiment.pretrained, _GRID.value),
      run.pretrained,
    )
  if experiment.trains:
    start = {"train.init_from": str(commands[-1][1])} if commands else {}
    workdir = _base(name) / run.name
    commands.append(
      (
        _training(name, grids.with_fields(run, start), workdir),
        workdir,
        run.config,
      )
    )
  return commands


def _do(
  name: str,
  experiment: Experiment,
  runs: list[Run],
  places: tuple[str, ...],
  before: list[tuple[Run, dict[str, Any]]],
  total: int,
) -> None:
  """Trains and measures the runs, of `total` that are asked for, and writes a result.json for each.

  Runs that had finished `before`, with their results, tell how long the others take."""
  found, slots = launch.devices(), _SIDE_BY_SIDE.value
  machine = results.machine(found, slots)
  environments = [
    launch.environment(found, slot, slots) for slot in range(slots)
  ]
  pace = Pace(_seconds(before, machine), runs, slots, experiment.trains)

  def do(run: Run, slot: int) -> str:
    pace.begin(run)
    workdir = _base(name) / run.name
    workdir.mkdir(parents=True, exist_ok=True)
    log = workdir / "output.txt" if slots > 1 else None
    trained, logged = workdir, None
    for training, trained, config in _trainings(name, experiment, run):
      if (logged := results.trained(trained, config, places)) is None:
        with _timed(trained, machine):
          launcher.call(training, environments[slot], log)
        if (logged := results.trained(trained, config, places)) is None:
          raise UserError(
            f"{trained}: training ended before its last step, or could not save it; run the same command to go on"
          )
    elsewhere = (
      experiment.trains and not (workdir / _SPENT).exists()
    )  # by --print's line
    if experiment.measure:
      (workdir / "config.json").write_text(
        json.dumps(run.config.to_dict()) + "\n", encoding="utf-8"
      )
      with _timed(workdir, machine):
        measure = [
          sys.executable,
          "-m",
          "experiments.measure",
          name,
          _GRID.value,
          str(workdir),
          str(trained),
        ]
        launcher.call(measure, environments[slot], log)
      chosen = json.loads(
        (workdir / "measured.json").read_text(encoding="utf-8")
      )
    else:
      assert logged is not None
      chosen = {
        metric: logged.get(metric) for metric in experiment.metrics.values()
      }
    spent = (
      (None, "not known: trained by another launcher")
      if elsewhere
      else _spent(workdir)
    )
    results.write_run(workdir, run, experiment.task, chosen, *spent)
    return pace.end(run, spent[0])

  with launch.Launcher() as launcher:
    for preparation in _preparations(
      name, experiment, runs, places
    ):  # once, before several runs want the same rows
      launcher.call(preparation)
    try:
      launcher.side_by_side(
        [(run.name, functools.partial(do, run)) for run in runs], slots
      )
    except BaseException:
      say(pace.stopped(total))
      raise


def _preparations(
  name: str, experiment: Experiment, runs: list[Run], places: tuple[str, ...]
) -> list[list[str]]:
  """The commands that prepare rows for the trainings that have not finished, one for each data set."""
  rows: dict[str, list[str]] = {}
  for run in runs:
    for (python, module, _, *fields), workdir, config in _trainings(
      name, experiment, run
    ):
      if (
        config.data.mode == "prepared"
        and not _has_rows(config)
        and results.trained(workdir, config, places) is None
      ):
        prepare = [
          python,
          module,
          "diffjax.prepare",
          *(field for field in fields if not field.startswith("--workdir=")),
        ]
        rows.setdefault(str(dataclasses.replace(config.data, seed=0)), prepare)
  return list(rows.values())


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
  from diffjax.compiled.plan import compile_apart
  from diffjax.training.flops import step_flops

  plan = compile_apart(config, topology)
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


if __name__ == "__main__":
  named = next(
    (argument for argument in sys.argv[1:] if not argument.startswith("-")), ""
  )
  if named:
    sys.argv.remove(named)
  command.run(functools.partial(main, named), with_config=False)
