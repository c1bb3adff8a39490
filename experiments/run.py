"""Runs an experiment: trains what its grid asks for, and makes results.json, table.md and plot.png of it.

    python -m experiments.run ablations                               # the grid "cpu", one run after the other
    python -m experiments.run ablations --only='diff*' --steps=2
    python -m experiments.run retrieval --grid=gpu --side_by_side=8   # a GPU each
    python -m experiments.run ablations --grid=tpu --cost             # what it would take; --print lists the commands
    python -m experiments.run ablations --grid=tpu --aot=v5p:4x4x4    # whether its steps fit these TPUs, which need not be there

Stopped, the same command goes on where it was: runs have workdirs of their own (WORKDIR/NAME/GRID/VARIANT/seed_SEED), and what is done is
skipped. On several hosts that share the workdir, each takes its own part of the grid, and who comes last collects:

    srun --ntasks=4 bash -c 'python -m experiments.run ablations --workdir=/shared/runs --slice=$SLURM_PROCID/$SLURM_NTASKS'
    python -m experiments.run ablations --workdir=/shared/runs

A run that takes several hosts by itself is started by their launcher with the line that --print gives; the same command then collects it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Iterator

from absl import app, flags

from diffjax import command
from diffjax.config import Config, UserError
from diffjax.data.progress import say
from experiments import grid as grids
from experiments import launch, results
from experiments.grid import Experiment, Run

_GRID = flags.DEFINE_string("grid", "cpu", "Which of the experiment's grids.")
_ONLY = flags.DEFINE_list("only", [], "Runs or variants, with commas between; * stands for anything.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps of every run, instead of what its config says.", lower_bound=1)
_SET = flags.DEFINE_multi_string("set", [], "A field of every run's config, as in --set=eval.rows=64; may be repeated.")
_SLICE = flags.DEFINE_string("slice", "0/1", "INDEX/COUNT: this host's part of the runs.")
_SIDE_BY_SIDE = flags.DEFINE_integer("side_by_side", 1, "Runs at a time, each on its share of this machine's devices.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", "runs/experiments", "Directory of the runs.")
_OUT = flags.DEFINE_string("out", None, "Directory of the results; the experiment's own folder by default.")
_PRINT = flags.DEFINE_bool("print", False, "Print the commands that train, and do nothing.")
_COST = flags.DEFINE_bool("cost", False, "Print what the runs would take, and do nothing.")
_AOT = flags.DEFINE_string("aot", None, "Compile each variant's training step for a slice, such as v5p:4x4x4, and do nothing.")

# Of a chip's peak that a training step of these sizes is taken to reach, for --cost: what others report for dense models.
_UTILISATION = 0.4
# The file of a workdir that holds its wall time
_SECONDS = "seconds.txt"


def main(name: str) -> None:
  """Does what the flags say with the experiment of that name."""
  if not name:
    raise app.UsageError(f"name an experiment: python -m experiments.run NAME; there are {', '.join(grids.names())}")
  experiment = grids.load(name, _GRID.value)
  everything = grids.expand(name, experiment.grids[_GRID.value], _changes())
  if _STEPS.value is not None:
    everything = [_few_steps(run, _STEPS.value) for run in everything]
  chosen = grids.choose(everything, _ONLY.value, _SLICE.value)
  base = _base(name)
  own_folder = grids.FOLDER / name / ("" if _GRID.value == "cpu" else _GRID.value)
  out = pathlib.Path(_OUT.value).absolute() if _OUT.value else own_folder
  if _COST.value:
    print(_cost(chosen))
    return
  if _AOT.value:
    _compile(chosen, _AOT.value)
    return
  places: tuple[str, ...] = ()
  if experiment.prepare:
    fields = dict(experiment.prepare(base, everything[0].config))
    places = tuple(fields)
    everything, chosen = ([grids.with_fields(run, fields) for run in runs] for runs in (everything, chosen))
  if _PRINT.value:
    print("\n".join(shlex.join(training) for run in chosen for training, _, _ in _trainings(name, experiment, run)))
    return

  kept = results.read_folder(out / "results.json", name, _GRID.value, everything, experiment.task, places)
  read = lambda run: results.read_run(base / run.name, run, experiment.task, places)
  missing = [run for run in chosen if run.name not in kept and read(run) is None]
  say(f"{name}, grid {_GRID.value}: {len(missing)} of {len(chosen)} runs to do, in {base}")
  if missing:
    _do(name, experiment, missing)
  if _SLICE.value != "0/1":
    say("this slice is done; run the command without --slice to collect the results")
    return
  entries = [entry for run in everything if (entry := read(run) or kept.get(run.name)) is not None]
  found = results.write_folder(
    out / "results.json", name, _GRID.value, experiment.grids[_GRID.value].baseline, entries, experiment.summarise
  )
  (out / "table.md").write_text(text := results.table(experiment, found))
  written = ["results.json", "table.md"]
  if experiment.plot:
    experiment.plot(found, out / "plot.png")
    written.append("plot.png")
  print(f"{text}\n{out}: {', '.join(written)} ({len(entries)} of {len(everything)} runs)")


def _changes() -> dict[str, object]:
  changes = {}
  for setting in _SET.value:
    field, separator, value = setting.partition("=")
    if not separator:
      raise UserError(f"--set={setting}: must be FIELD=VALUE, such as eval.rows=64")
    changes[field.removeprefix("config.")] = grids.read_value(value)
  return changes


def _few_steps(run: Run, steps: int) -> Run:
  """The run with no longer warmup than that, and evaluated when it ends."""
  config = run.config
  fields = {
    "train.steps": steps,
    "optimizer.warmup_steps": min(config.optimizer.warmup_steps, steps),
    "eval.interval": min(config.eval.interval, steps) or steps,
  }
  start = _few_steps(run.pretrained, steps) if run.pretrained else None
  return dataclasses.replace(grids.with_fields(run, fields), pretrained=start)


def _base(name: str) -> pathlib.Path:
  """Directory of an experiment's runs."""
  return pathlib.Path(_WORKDIR.value).absolute() / name / _GRID.value


def _training(name: str, run: Run, workdir: pathlib.Path) -> list[str]:
  """The command that trains a run."""
  config = f"--config={(grids.FOLDER / name / 'config.py').relative_to(grids.FOLDER.parent)}:{run.variant}"
  fields = [f"--config.{field}={value}" for field, value in run.fields.items()]
  return [sys.executable, "-m", "diffjax.train", config, f"--workdir={workdir}", *fields]


def _trainings(name: str, experiment: Experiment, run: Run) -> list[tuple[list[str], pathlib.Path, Config]]:
  """What must be trained for a run, in order: the command, the workdir, and the config."""
  commands = []
  if run.pretrained:
    assert experiment.pretrained is not None
    commands += _trainings(experiment.pretrained, grids.load(experiment.pretrained, _GRID.value), run.pretrained)
  if experiment.trains:
    start = {"train.init_from": str(commands[-1][1])} if commands else {}
    workdir = _base(name) / run.name
    commands.append((_training(name, grids.with_fields(run, start), workdir), workdir, run.config))
  return commands


def _do(name: str, experiment: Experiment, runs: list[Run]) -> None:
  """Trains and measures what is missing; every run that is done has a result.json."""
  found, slots = launch.devices(), _SIDE_BY_SIDE.value
  environments = [launch.environment(found, slot, slots) for slot in range(slots)]

  def do(run: Run, slot: int) -> None:
    workdir = _base(name) / run.name
    workdir.mkdir(parents=True, exist_ok=True)
    log = workdir / "output.txt" if slots > 1 else None
    trained, measured = workdir, None
    for training, trained, config in _trainings(name, experiment, run):
      if results.logged(trained, config.train.steps) is None:
        with _timed(trained):
          launcher.call(training, environments[slot], log)
      if (measured := results.logged(trained, config.train.steps)) is None:
        raise UserError(f"{trained}: training ended before its last step; run the same command to go on")
    if experiment.measure:
      (workdir / "config.json").write_text(json.dumps(run.config.to_dict()) + "\n")
      with _timed(workdir):
        measure = [sys.executable, "-m", "experiments.measure", name, _GRID.value, str(workdir), str(trained)]
        launcher.call(measure, environments[slot], log)
      chosen = json.loads((workdir / "measured.json").read_text())
    else:
      assert measured is not None
      chosen = {metric: measured.get(metric) for metric in experiment.metrics.values()}
    results.write_run(workdir, run, experiment.task, chosen, _seconds(workdir), found)

  with launch.Launcher() as launcher:
    for preparation in _preparations(name, experiment, runs):  # once, before several runs want the same rows
      launcher.call(preparation)
    launcher.side_by_side([(run.name, functools.partial(do, run)) for run in runs], slots)


def _preparations(name: str, experiment: Experiment, runs: list[Run]) -> list[list[str]]:
  """What must be prepared for the trainings that are still to come."""
  rows: dict[str, list[str]] = {}
  for run in runs:
    for (python, module, _, *fields), workdir, config in _trainings(name, experiment, run):
      if config.data.mode == "prepared" and not _has_rows(config) and results.logged(workdir, config.train.steps) is None:
        prepare = [python, module, "diffjax.prepare", *(field for field in fields if not field.startswith("--workdir="))]
        rows.setdefault(str(dataclasses.replace(config.data, seed=0)), prepare)
  return list(rows.values())


def _has_rows(config: Config) -> bool:
  """Whether the rows lie where the config says; their source may then be another machine's."""
  from diffjax.data import prepared

  return bool(config.data.prepared_dir) and all(prepared.is_prepared(target) for target in prepared.targets(config.data))


@contextlib.contextmanager
def _timed(workdir: pathlib.Path) -> Iterator[None]:
  """Adds the wall time of what is done to that of the run in a workdir, over all its starts and whoever started it."""
  start = time.monotonic()
  try:
    yield
  finally:
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / _SECONDS).write_text(f"{_seconds(workdir) + time.monotonic() - start}\n")


def _seconds(workdir: pathlib.Path) -> float:
  path = workdir / _SECONDS
  return float(path.read_text()) if path.exists() else 0.0


def _cost(runs: list[Run]) -> str:
  """Tokens, FLOPs and chip-hours of every variant's runs together."""
  from diffjax.training.flops import parameter_count, peak_flops, step_flops

  chips = {"v5p": peak_flops("TPU v5"), "H100": peak_flops("NVIDIA H100")}
  lines = [
    f"chip-hours at {_UTILISATION:.0%} of the peak",
    "| | runs | parameters | tokens | FLOPs | " + " | ".join(chips) + " |",
    "|---" * 7 + "|",
  ]
  total = dict.fromkeys(chips, 0.0)
  for variant in dict.fromkeys(run.variant for run in runs):
    own = [run for run in runs if run.variant == variant]
    config = own[0].config
    tokens = config.train.steps * config.train.batch_size * config.data.length
    spent = len(own) * step_flops(config.model, config.data.length, tokens).training
    hours = {chip: spent / (peak * _UTILISATION) / 3600 for chip, peak in chips.items() if peak}
    total = {chip: total[chip] + hours[chip] for chip in chips}
    cells = [variant, str(len(own)), f"{results.cell(parameter_count(config.model) / 1e6)} M", f"{tokens / 1e9:.3g} B", f"{spent:.2e}"]
    lines.append("| " + " | ".join(cells + [results.cell(value) for value in hours.values()]) + " |")
  lines.append("| all | " + f"{len(runs)} | | | | " + " | ".join(map(results.cell, total.values())) + " |")
  return "\n".join(lines)


def _compile(runs: list[Run], topology: str) -> None:
  """Compiles the training step of every variant for TPUs that are not there, and prints a row as each is done.

  Raises:
    UserError: if one does not fit, at the end; or where one does not go with the topology.
  """
  from diffjax import aot  # here, since it has flags of its own
  from diffjax.training.flops import step_flops

  print(f"a training step on {topology}\n| | GiB a chip | fits | FLOPs | compiled in |\n{'|---' * 5}|", flush=True)
  first = {run.variant: run.config for run in reversed(runs)}
  too_large = []
  for variant in dict.fromkeys(run.variant for run in runs):
    config = first[variant]
    try:
      plan = aot.compile_apart(config, topology)
    except UserError as error:
      raise UserError(f"{variant}: {error}") from error
    flops = step_flops(config.model, config.data.length, config.train.batch_size * config.data.length).training
    sizes = f"{plan.total / 2**30:.2f} of {plan.available / 2**30:.2f}"
    print(f"| {variant} | {sizes} | {'yes' if plan.fits else 'no'} | {flops:.3g} | {plan.seconds:.0f} s |", flush=True)
    too_large += [variant] * (not plan.fits)
  if too_large:
    raise UserError(f"{', '.join(too_large)}: too large for {topology}; python -m diffjax.aot says what would take less")


if __name__ == "__main__":
  named = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
  command.run(functools.partial(main, named), with_config=False)
