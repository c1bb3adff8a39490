"""What a grid costs: FLOPs, and hours of this machine or of chips.

`python -m experiments.run NAME --cost` prints it. `python -m experiments.cost`
is the process that times steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from diffjax.config import Config, UserError, from_config_dict
from diffjax.host.progress import say
from diffjax.model.flops import parameter_count, peak_flops
from diffjax.model.registry import import_modules
from experiments import collect, imports, launch, machine, pace
from experiments.grid import FOLDER, Experiment, Run
from experiments.study import Study
from experiments.table import cell

# The share of a chip's peak that training is assumed to reach. Others report it
# for dense models of these sizes.
_UTILISATION = 0.4
# FLOPs of the largest step that is timed: a minute on a few cores.
_LARGEST_STEP = 1e12
_TIMED_STEPS = 3
# The chips of the table, and the names by which `peak_flops` knows them.
_CHIPS = {"v5p": "TPU v5", "H100": "NVIDIA H100"}
# The fields that `Experiment.prepare` may set.
_PLACES = ("data.source", "data.validation_source", "data.tokenizer")


def estimate(study: Study) -> str:
  """Returns a table of what the chosen runs of a study cost.

  The table has hours of this machine if the runs are small enough for it, and
  hours of accelerators otherwise.

  Raises:
    UserError: if the runs are too large for this machine and train nothing.
  """
  experiment = study.experiment
  if not for_this_machine(study.chosen):
    if not experiment.trains and not experiment.pretrained:
      raise UserError(
        f"{study.name} trains nothing; its README says how long it takes"
      )
    return on_chips(study.chosen)

  slots = study.options.slots
  local_devices = launch.devices()
  this_machine = machine.describe(local_devices, slots)
  # Where the data are does not matter, since nothing is prepared here.
  study = dataclasses.replace(study, places=_PLACES)
  finished = []
  # Results of another config say nothing about this one.
  with contextlib.suppress(UserError):
    finished = collect.finished_runs(study)
  return on_this_machine(
    experiment,
    runs=study.chosen,
    finished=collect.seconds_on_machine(finished, this_machine),
    machine=this_machine,
    slots=slots,
    env=launch.environment(local_devices, slot=0, slots=slots),
  )


def for_this_machine(runs: Sequence[Run]) -> bool:
  """Returns True if a machine without an accelerator can train the runs."""
  for run in runs:
    limit = _LARGEST_STEP * run.config.train.steps
    if pace.training_flops(run.config) > limit:
      return False
  return True


def on_chips(runs: Sequence[Run]) -> str:
  """Returns a table of the tokens, FLOPs and chip-hours of each variant."""
  lines = [
    f"chip-hours at {_UTILISATION:.0%} of the peak",
    *_head("tokens", "FLOPs", *_CHIPS),
  ]
  totals = dict.fromkeys(_CHIPS, 0.0)
  for variant, variant_runs in _by_variant(runs).items():
    flops = _training_flops(variant_runs)
    cells = [*_tokens_and_flops(variant_runs)]
    for chip, device_kind in _CHIPS.items():
      peak = peak_flops(device_kind)
      assert peak is not None
      hours = flops / (peak * _UTILISATION) / 3600
      totals[chip] += hours
      cells.append(cell(hours))
    lines.append(_line(variant, variant_runs, cells))
  total_cells = [cell(total) for total in totals.values()]
  lines.append(f"| all | {len(runs)} | | | | {' | '.join(total_cells)} |")
  return "\n".join(lines)


class _Estimate(NamedTuple):
  """The estimated time of a variant's run.

  Attributes:
    seconds: The time. None if it is not known.
    source: How it is known, as a cell of the table.
  """

  seconds: float | None
  source: str


def on_this_machine(
  experiment: Experiment,
  runs: Sequence[Run],
  finished: Sequence[tuple[Run, float]],
  machine: str,
  slots: int,
  env: Mapping[str, str],
) -> str:
  """Returns a table of the tokens, FLOPs and hours of each variant.

  A run is expected to take as long as finished runs of its shape and steps. If
  no such run has finished, a few steps of its shape are timed. Runs of an
  experiment that does not train have no steps. Their time is then estimated
  from finished runs of other shapes.

  Args:
    experiment: The experiment of the runs.
    runs: The runs.
    finished: Runs that have finished on this machine, and their seconds.
    machine: The machine in words.
    slots: The number of runs at a time.
    env: Environment variables for the process that times steps.
  """
  runs_by_variant = _by_variant(runs)
  # Steps are timed only for variants without finished runs.
  estimates = _estimates_by_runs(experiment, runs_by_variant, finished, slots)
  is_timed = False
  if experiment.trains and len(estimates) < len(runs_by_variant):
    estimates |= _estimates_by_steps(runs_by_variant, estimates, env)
    is_timed = True

  lines = [
    f"hours of {machine}, {slots} at a time",
    *_head("tokens", "FLOPs", "seconds a run", "hours", "by"),
  ]
  unknown = _Estimate(seconds=None, source="–")
  # None as soon as the time of a variant is not known.
  total: float | None = 0.0
  for variant, variant_runs in runs_by_variant.items():
    seconds, source = estimates.get(variant, unknown)
    hours = None
    if seconds is not None:
      hours = seconds * len(variant_runs) / slots / 3600
    if total is not None and hours is not None:
      total += hours
    else:
      total = None
    tokens_and_flops = ("–", "–")
    if experiment.trains:
      tokens_and_flops = _tokens_and_flops(variant_runs)
    cells = [*tokens_and_flops, cell(seconds), cell(hours), source]
    lines.append(_line(variant, variant_runs, cells))
  lines.append(f"| all | {len(runs)} | | | | | {cell(total)} | |")
  lines += _remarks(experiment, is_timed, total)
  return "\n".join(lines)


def _estimates_by_runs(
  experiment: Experiment,
  runs_by_variant: Mapping[str, Sequence[Run]],
  finished: Sequence[tuple[Run, float]],
  slots: int,
) -> dict[str, _Estimate]:
  """Returns the times that are known from finished runs, by variant."""
  rate = pace.Pace(finished, (), slots, experiment.trains)
  estimates = {}
  for variant, variant_runs in runs_by_variant.items():
    expected = rate.expected(variant_runs[0])
    if expected is None:
      continue
    if expected.num_runs:
      source = f"{expected.num_runs} finished {_runs(expected.num_runs)}"
    elif not experiment.trains:
      source = "finished runs of other shapes"
    else:
      # A few steps of its own shape tell more than runs of other shapes.
      continue
    estimates[variant] = _Estimate(expected.seconds, source)
  return estimates


def _runs(number: int) -> str:
  return "run" if number == 1 else "runs"


def _estimates_by_steps(
  runs_by_variant: Mapping[str, Sequence[Run]],
  estimates_by_runs: Mapping[str, _Estimate],
  env: Mapping[str, str],
) -> dict[str, _Estimate]:
  """Returns estimates of the remaining variants, whose steps it times."""
  config_by_shape: dict[Hashable, Config] = {}
  for variant, variant_runs in runs_by_variant.items():
    if variant not in estimates_by_runs:
      config = variant_runs[0].config
      config_by_shape.setdefault(pace.shape(config), config)
  step_seconds_by_shape = time_steps(config_by_shape, env)
  estimates = {}
  for variant, variant_runs in runs_by_variant.items():
    if variant in estimates_by_runs:
      continue
    config = variant_runs[0].config
    step = step_seconds_by_shape[pace.shape(config)]
    seconds = step * config.train.steps
    estimates[variant] = _Estimate(seconds, f"steps of {cell(step)} s")
  return estimates


def _remarks(
  experiment: Experiment, is_timed: bool, total: float | None
) -> list[str]:
  """Returns lines on what the table does not count."""
  lines = []
  if is_timed:
    lines.append(
      "Steps are timed with the machine as busy as it is now, and without"
      " start, compilation, reading and validation."
    )
  if total is None:
    lines.append(
      "No run has finished on this machine, and these runs take no training"
      " steps that could be timed."
    )
  if experiment.pretrained:
    lines.append(
      f"Not counted are the runs of {experiment.pretrained} that these start"
      f" from: python -m experiments.run {experiment.pretrained} --cost"
    )
  return lines


def _by_variant(runs: Sequence[Run]) -> dict[str, list[Run]]:
  """Returns the runs of each variant."""
  runs_by_variant: dict[str, list[Run]] = {}
  for run in runs:
    runs_by_variant.setdefault(run.variant, []).append(run)
  return runs_by_variant


def _head(*columns: str) -> list[str]:
  """Returns the first two lines of a table."""
  names = ["", "runs", "parameters", *columns]
  return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def _line(variant: str, runs: Sequence[Run], cells: Sequence[str]) -> str:
  """Returns the line of a variant: its size, and further cells."""
  millions = parameter_count(runs[0].config.model) / 1e6
  all_cells = [variant, str(len(runs)), f"{cell(millions)} M", *cells]
  return f"| {' | '.join(all_cells)} |"


def _tokens_and_flops(runs: Sequence[Run]) -> tuple[str, str]:
  """Returns cells with the tokens of one run, and the FLOPs of all."""
  config = runs[0].config
  tokens = config.train.steps * config.train.batch_size * config.data.length
  if tokens >= 1e9:
    tokens_cell = f"{tokens / 1e9:.3g} B"
  else:
    tokens_cell = f"{tokens / 1e6:.3g} M"
  return tokens_cell, f"{_training_flops(runs):.2e}"


def _training_flops(runs: Sequence[Run]) -> float:
  """Returns the FLOPs of all training steps of the runs."""
  return sum(pace.training_flops(run.config) for run in runs)


def time_steps(
  config_by_shape: Mapping[Hashable, Config], env: Mapping[str, str]
) -> dict[Hashable, float]:
  """Returns the seconds of a training step of each shape.

  Another process times them, since this one must not hold the devices.

  Args:
    config_by_shape: A config of each shape.
    env: Environment variables for that process.

  Raises:
    UserError: if timing fails. The process has printed why.
  """
  if not config_by_shape:
    return {}
  number = len(config_by_shape)
  say(f"timing steps of {number} {'shape' if number == 1 else 'shapes'}")
  configs = [config.to_dict() for config in config_by_shape.values()]
  result = subprocess.run(
    [sys.executable, "-m", "experiments.cost", *imports.arguments()],
    input=json.dumps(configs),
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, **env},
    cwd=FOLDER.parent,
  )
  if result.returncode:
    raise UserError("timing steps failed, as said above")
  seconds = json.loads(result.stdout.splitlines()[-1])
  return dict(zip(config_by_shape, seconds, strict=True))


def step_seconds(config: Config) -> float:
  """Returns the median seconds of a few training steps on random tokens.

  The first step is not counted, because it includes compilation.
  """
  import jax
  import numpy as np

  from diffjax.parallel.mesh import make_mesh, put_batch
  from diffjax.training.program import build

  program = build(config, make_mesh(config.mesh))
  shape = (config.train.batch_size, config.data.length)
  rng = np.random.default_rng(0)
  vocab_size = config.model.vocab_size
  tokens, targets = rng.integers(0, vocab_size, (2, *shape), np.int32)
  # Each row is one segment.
  ones = np.ones(shape, np.int32)
  positions = np.cumsum(ones, axis=1, dtype=np.int32) - 1
  rows = {
    "tokens": tokens,
    "targets": targets,
    "segment_ids": ones,
    "positions": positions,
    "weights": np.ones(shape, np.float32),
  }
  batch = put_batch(rows, program.mesh)

  state = program.init()
  seconds = []
  for _ in range(1 + _TIMED_STEPS):
    start = time.perf_counter()
    state, metrics = program.train_step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds[1:])


def main(arguments: Sequence[str]) -> None:
  """Prints the seconds of a step of each config on standard input, as JSON.

  Args:
    arguments: `--import` flags.
  """
  from diffjax.host import runtime

  runtime.keep_compiled_programs()
  modules, _ = imports.split(arguments)
  import_modules(modules)
  seconds = []
  for values in json.load(sys.stdin):
    seconds.append(step_seconds(from_config_dict(values)))
  print(json.dumps(seconds))


if __name__ == "__main__":
  try:
    main(sys.argv[1:])
  except UserError as error:
    sys.exit(f"error: {error}")
