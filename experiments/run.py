"""Runs an experiment: trains and measures a grid, and writes results and plots.

    python -m experiments.run ablations  # the grid "cpu"
    python -m experiments.run /home/me/lambda_study  # your own experiment.py
    python -m experiments.run retrieval --grid=gpu --side_by_side=8
    python -m experiments.run ablations --grid=tpu --cost  # FLOPs and hours

The same command continues a grid: each run has its own workdir, finished runs
are skipped, and failed ones are tried again. A grid changed by --steps or --set
has another WORKDIR. Hosts that share a WORKDIR can each take a --slice; the
command without it collects the results. Runs on several hosts are started with
--print's lines. experiments/study.py shows how a notebook runs a grid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from diffjax.cli import command
from diffjax.config import UserError
from diffjax.host.progress import say
from experiments import aot, collect, cost, execute, folders, grid
from experiments.study import (
  Options,
  Study,
  check_validations,
  plan,
  prepare,
  trainings,
)

_GRID = flags.DEFINE_string("grid", "cpu", "One of the experiment's grids.")
_ONLY = flags.DEFINE_multi_string(
  "only",
  [],
  "A run or a variant, where * stands for anything; may be repeated.",
)
_STEPS = flags.DEFINE_integer(
  "steps", None, "Steps of every run, instead of its config's.", lower_bound=1
)
_SET = flags.DEFINE_multi_string(
  "set",
  [],
  "A field of every run's config, as in --set=eval.rows=64, or of one"
  " variant's, as in --set=diff:eval.rows=64; may be repeated.",
)
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
  "Directory of the runs; runs/experiments, or for changed grids"
  " runs/experiments_CODE.",
)
_OUT = flags.DEFINE_string(
  "out",
  None,
  "Directory of the results; the experiment's own folder, or for changed grids"
  " one beside the runs.",
)
_PRINT = flags.DEFINE_bool(
  "print", False, "Print the commands that train, and train nothing."
)
_COST = flags.DEFINE_bool(
  "cost",
  False,
  "Print the FLOPs and the hours of the runs, on this machine or on chips, and"
  " run nothing.",
)
_AOT = flags.DEFINE_string(
  "aot",
  None,
  "Compile each variant's step for a slice of TPUs, such as v5p:4x4x4, and run"
  " nothing.",
)

# VARIANT:FIELD=VALUE. A value may have colons, and a variant may have "=".
_SETTING = re.compile(r"((?!\w+\.\w+=)[^:]+:)?([\w.]+)=(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Request:
  """What a command line asks for.

  Attributes:
    options: The runs.
    prints_cost: Whether to print what the runs cost.
    aot_topology: The slice of TPUs to compile for; None to compile nothing.
    prints_commands: Whether to print the commands that train.
  """

  options: Options
  prints_cost: bool
  aot_topology: str | None
  prints_commands: bool


def main(argument: str) -> None:
  """Runs the command with the flags of this process.

  Args:
    argument: The experiment's name, or the path of its folder.
  """
  if not argument:
    raise app.UsageError(
      "name an experiment: python -m experiments.run NAME; there are"
      f" {', '.join(grid.names())}, and the path of a folder works too"
    )
  try:
    answer(argument, read_flags(argument))
  except OSError as error:
    # The disk is full, or a directory cannot be written.
    raise UserError(
      f"{error.filename or 'writing'}: {error.strerror or error}"
    ) from error


def read_flags(argument: str) -> Request:
  """Returns what the flags of this command ask for.

  Args:
    argument: The experiment's name, or the path of its folder. --set may name
      its variants.

  Raises:
    UserError: for an unknown experiment or grid, and for a malformed --set.
  """
  options = Options(
    grid=_GRID.value,
    only=tuple(_ONLY.value),
    slice=_SLICE.value,
    steps=_STEPS.value,
    changes=_read_changes(argument, _GRID.value, _SET.value),
    slots=_SIDE_BY_SIDE.value,
    workdir=_WORKDIR.value,
    out=_OUT.value,
  )
  return Request(
    options=options,
    prints_cost=_COST.value,
    aot_topology=_AOT.value,
    prints_commands=_PRINT.value,
  )


def answer(argument: str, request: Request) -> None:
  """Prints costs or commands, compiles, or runs the experiment.

  Args:
    argument: The experiment's name, or the path of its folder.
    request: What the flags ask for.
  """
  study = plan(argument, request.options)
  if request.prints_cost:
    print(cost.estimate(study))
  elif request.aot_topology:
    aot.compile_variants(study, request.aot_topology)
  elif request.prints_commands:
    print_commands(prepare(study))
  else:
    run_and_collect(prepare(study))


def print_commands(study: Study) -> None:
  """Prints the commands that train the chosen runs.

  Raises:
    UserError: if the experiment trains nothing.
  """
  if not (study.experiment.trains or study.experiment.pretrained):
    raise UserError(
      f"{study.name} has no commands that train; run it without --print"
    )
  for run in study.chosen:
    for training in trainings(study, run):
      print(shlex.join(training.command))


def run_and_collect(study: Study) -> None:
  """Trains and measures the chosen runs that are missing, and writes results.

  With --slice, which gives each host a part of the runs, no results are
  written.

  Raises:
    UserError: before training, if something is wrong; and after the results are
      written, if a run failed.
  """
  check_validations(study)
  missing = collect.missing_runs(study)
  if missing:
    collect.check_before_training(study)
  say(f"{study.name}: {study.experiment.question}")
  say(
    f"grid {study.options.grid}: {len(missing)} of {len(study.chosen)} runs to"
    f" do, in {study.runs_dir}; results in {study.results_dir}"
  )
  failed: list[str] = []
  if missing:
    failed = execute.run_all(study, missing)
  if study.options.slice == "0/1":
    print(collect.write_results(study))
  else:
    say(
      "this slice is done; run the command without --slice to collect the"
      " results"
    )
  if failed:
    raise UserError(
      f"{len(failed)} of {len(missing)} runs failed: {', '.join(failed)}; the"
      " same command tries them again"
    )


def _read_changes(
  argument: str, grid_name: str, settings: Sequence[str]
) -> dict[str, Any]:
  """Returns the values of --set by FIELD or VARIANT:FIELD."""
  variants = grid.load(argument, grid_name).grids[grid_name].variants
  changes = {}
  for setting in settings:
    field, value = split_setting(setting, variants)
    changes[field] = grid.read_value(value)
  return changes


def split_setting(setting: str, variants: Sequence[str]) -> tuple[str, str]:
  """Returns the FIELD or VARIANT:FIELD of a --set, and the text of its value.

  Example: "diff:eval.rows=64" → ("diff:eval.rows", "64")

  Args:
    setting: The value of --set.
    variants: The variants of the grid. One may look like a setting itself:
      "model.num_layers=2:eval.rows=64".

  Raises:
    UserError: if it is malformed.
  """
  # The variant with its colon, if the setting starts with one of the grid's.
  known_variant = ""
  for variant in variants:
    if setting.startswith(f"{variant}:"):
      known_variant = f"{variant}:"
  match = _SETTING.fullmatch(setting.removeprefix(known_variant))
  if match is None:
    raise UserError(
      f"--set={setting}: must be FIELD=VALUE, such as eval.rows=64, or"
      " VARIANT:FIELD=VALUE"
    )
  variant, field, value = match.groups(default="")
  return known_variant + variant + field.removeprefix("config."), value


def _pop_experiment(argv: list[str]) -> str:
  """Removes the first argument that is no flag from a command line."""
  for argument in argv[1:]:
    if not argument.startswith("-"):
      argv.remove(argument)
      return argument
  return ""


def _add_to_path(argument: str) -> None:
  """Lets --import find the modules in an outside folder."""
  with contextlib.suppress(UserError):
    name = grid.resolve(argument)
    if folders.is_outside(name):
      folders.add_to_path(pathlib.Path(name))


if __name__ == "__main__":
  experiment_argument = _pop_experiment(sys.argv)
  if experiment_argument:
    _add_to_path(experiment_argument)
  command.run(functools.partial(main, experiment_argument), with_config=False)
