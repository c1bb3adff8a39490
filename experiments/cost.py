"""What a grid costs: FLOPs, and hours of this machine or of chips (--cost of experiments.run)."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Hashable, Mapping, Sequence

from diffjax.config import Config, UserError, from_config_dict
from diffjax.host.progress import say
from diffjax.model.flops import parameter_count, peak_flops
from diffjax.model.registry import import_modules
from experiments import imports, pace
from experiments.grid import FOLDER, Experiment, Run
from experiments.results import cell

# The share of a chip's peak that is assumed for training, as others report it for dense models of these sizes
_UTILISATION = 0.4
# FLOPs of the largest step that is timed: a minute on a few cores
_LARGEST_STEP = 1e12
_TIMED_STEPS = 3


def for_this_machine(runs: Sequence[Run]) -> bool:
  """True if the runs are small enough for a machine without an accelerator."""
  return all(
    pace.training_flops(run.config) <= _LARGEST_STEP * run.config.train.steps
    for run in runs
  )


def on_chips(runs: Sequence[Run]) -> str:
  """A table of the tokens, FLOPs and chip-hours of each variant's runs together."""
  chips = {"v5p": peak_flops("TPU v5"), "H100": peak_flops("NVIDIA H100")}
  lines = [
    f"chip-hours at {_UTILISATION:.0%} of the peak",
    *_head("tokens", "FLOPs", *chips),
  ]
  total = dict.fromkeys(chips, 0.0)
  for variant, own in _by_variant(runs).items():
    flops = sum(pace.training_flops(run.config) for run in own)
    hours = {
      chip: flops / (peak * _UTILISATION) / 3600
      for chip, peak in chips.items()
      if peak
    }
    total = {chip: total[chip] + hours[chip] for chip in chips}
    lines.append(
      _line(variant, own, *_tokens_and_flops(own), *map(cell, hours.values()))
    )
  lines.append(
    "| all | "
    + f"{len(runs)} | | | | "
    + " | ".join(map(cell, total.values()))
    + " |"
  )
  return "\n".join(lines)


def here(
  experiment: Experiment,
  runs: Sequence[Run],
  finished: Sequence[tuple[Run, float]],
  machine: str,
  slots: int,
  env: Mapping[str, str],
) -> str:
  """A table of the tokens, FLOPs and hours on this machine of each variant's runs together.

  Finished runs say how long a run takes, or else a few steps of its shape. Runs that take no steps of diffjax.train cannot be timed by
  steps; finished runs of other shapes stand in for them.

  Args:
    experiment: the runs' experiment.
    runs: the runs.
    finished: runs that have finished on this machine, and the seconds that each took.
    machine: the machine, in words.
    slots: runs at a time.
    env: environment variables for the process that times steps.
  """
  known = pace.Pace(finished, (), slots, experiment.trains)
  first = {variant: own[0] for variant, own in _by_variant(runs).items()}
  by_runs = {
    variant: expected
    for variant, run in first.items()
    if (expected := known.expected(run))
    and (expected[1] or not experiment.trains)
  }
  shapes = (
    {
      pace.shape(run.config): run.config
      for variant, run in first.items()
      if variant not in by_runs
    }
    if experiment.trains
    else {}
  )
  steps = _time_steps(shapes, env)
  lines = [
    f"hours of {machine}, {slots} at a time",
    *_head("tokens", "FLOPs", "seconds a run", "hours", "by"),
  ]
  total: float | None = 0.0
  for variant, own in _by_variant(runs).items():
    config, seconds, source = own[0].config, None, "–"
    if variant in by_runs:
      seconds, number = by_runs[variant]
      source = (
        f"{number} finished {'run' if number == 1 else 'runs'}"
        if number
        else "finished runs of other shapes"
      )
    elif experiment.trains:
      step = steps[pace.shape(config)]
      seconds, source = step * config.train.steps, f"steps of {cell(step)} s"
    hours = seconds and seconds * len(own) / slots / 3600
    total = None if total is None or hours is None else total + hours
    training = _tokens_and_flops(own) if experiment.trains else ("–", "–")
    lines.append(
      _line(variant, own, *training, cell(seconds), cell(hours), source)
    )
  return "\n".join(
    [
      *lines,
      f"| all | {len(runs)} | | | | | {cell(total)} | |",
      *_remarks(experiment, bool(steps), total),
    ]
  )


def _remarks(
  experiment: Experiment, timed: bool, total: float | None
) -> list[str]:
  """What the table does not count, in lines below it."""
  lines = [
    "Steps are timed with the machine as busy as it is now, and without start, compilation, reading and validation."
  ] * timed
  if total is None:
    lines.append(
      "No run has finished on this machine, and these runs take no training steps that could be timed."
    )
  if experiment.pretrained:
    lines.append(
      f"Not counted are the runs of {experiment.pretrained} that these start from: python -m experiments.run {experiment.pretrained} --cost"
    )
  return lines


def _by_variant(runs: Sequence[Run]) -> dict[str, list[Run]]:
  return {
    variant: [run for run in runs if run.variant == variant]
    for variant in dict.fromkeys(run.variant for run in runs)
  }


def _head(*columns: str) -> list[str]:
  names = ["", "runs", "parameters", *columns]
  return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def _line(variant: str, runs: Sequence[Run], *cells: str) -> str:
  return f"| {' | '.join([variant, str(len(runs)), f'{cell(parameter_count(runs[0].config.model) / 1e6)} M', *cells])} |"


def _tokens_and_flops(runs: Sequence[Run]) -> tuple[str, str]:
  """The tokens of one run, and the FLOPs of all."""
  config = runs[0].config
  tokens = config.train.steps * config.train.batch_size * config.data.length
  shown = f"{tokens / 1e9:.3g} B" if tokens >= 1e9 else f"{tokens / 1e6:.3g} M"
  return shown, f"{sum(pace.training_flops(run.config) for run in runs):.2e}"


def _time_steps(
  shapes: Mapping[Hashable, Config], env: Mapping[str, str]
) -> dict[Hashable, float]:
  """Seconds of a training step of each shape, by a process of its own: this one must not hold the devices."""
  if not shapes:
    return {}
  say(
    f"timing steps of {len(shapes)} {'shape' if len(shapes) == 1 else 'shapes'}"
  )
  result = subprocess.run(
    [sys.executable, "-m", "experiments.cost", *imports.arguments()],
    input=json.dumps([config.to_dict() for config in shapes.values()]),
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, **env},
    cwd=FOLDER.parent,
  )
  if result.returncode:
    raise UserError("timing steps failed, as said above")
  return dict(
    zip(shapes, json.loads(result.stdout.splitlines()[-1]), strict=True)
  )


def step_seconds(config: Config) -> float:
  """The median time of a few training steps on random tokens, after the first, which is compiled."""
  import jax
  import numpy as np

  from diffjax.parallel.mesh import make_mesh, put_batch
  from diffjax.training.program import build

  program = build(config, make_mesh(config.mesh))
  shape = (config.train.batch_size, config.data.length)
  tokens = np.random.default_rng(0).integers(
    0, config.model.vocab_size, (2, *shape), np.int32
  )
  ones = np.ones(shape, np.int32)
  rows = {
    "tokens": tokens[0],
    "targets": tokens[1],
    "segment_ids": ones,
    "positions": np.cumsum(ones, axis=1, dtype=np.int32) - 1,
  }
  batch = put_batch(
    {**rows, "weights": np.ones(shape, np.float32)}, program.mesh
  )
  state, taken = program.init(), []
  for _ in range(1 + _TIMED_STEPS):
    start = time.perf_counter()
    state, metrics = program.train_step(state, batch)
    jax.block_until_ready((state, metrics))
    taken.append(time.perf_counter() - start)
  return statistics.median(taken[1:])


if __name__ == "__main__":
  from diffjax.host import runtime

  runtime.keep_compiled_programs()
  try:
    modules, _ = imports.split(sys.argv[1:])
    import_modules(modules)
    print(
      json.dumps(
        [
          step_seconds(from_config_dict(values))
          for values in json.load(sys.stdin)
        ]
      )
    )
  except UserError as error:
    sys.exit(f"error: {error}")
