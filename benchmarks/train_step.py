"""Whole training steps of a config's twins, in turn in one process: loss, gradients and update.

    python -m benchmarks.train_step --config=configs/tiny.py

Prints the median seconds of a step, and the ratio to the Transformer's.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import statistics
import time

import jax
import numpy as np

from benchmarks import cpu_name
from diffjax.host.runtime import keep_freed_memory
from diffjax.model.flops import parameter_count, step_flops
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.program import build


def stepper(config, packed: bool = True):
  """A function of no arguments that takes one step on random rows, packed ones or of one document each, and waits for it."""
  mesh = make_mesh(config.mesh)
  program = build(config, mesh)
  state = program.init()
  rows, length = config.train.batch_size, config.data.length
  rng = np.random.default_rng(0)
  segments = np.sort(rng.integers(1, 4, (rows, length), np.int32), axis=1)
  tokens = rng.integers(0, config.model.vocab_size, (2, rows, length), np.int32)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
  weights = np.ones((rows, length), np.float32)
  batch = put_batch(
    dict(
      tokens=tokens[0],
      targets=tokens[1],
      segment_ids=segments,
      positions=positions,
      weights=weights,
    ),
    mesh,
  )
  if not packed:
    batch["segment_ids"] = (
      None  # attention that is told of no documents, which ids of one document would not be
    )

  def run():
    nonlocal state
    state, metrics = program.train_step(state, batch)
    jax.block_until_ready(metrics)

  run()
  return run


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", default="configs/tiny.py")
  parser.add_argument("--repetitions", type=int, default=30)
  flags = parser.parse_args()
  # Here, because `stepper` needs nothing that reads configs.
  from diffjax.config import from_config_dict

  keep_freed_memory()
  module = importlib.import_module(
    f"diffjax.configs.{pathlib.Path(flags.config).stem}"
  )
  configs = {
    variant: from_config_dict(module.get_config(variant))
    for variant in ("transformer", "diff", "diff_v2")
  }
  runs = {variant: stepper(config) for variant, config in configs.items()}
  seconds = {variant: [] for variant in runs}
  for _ in range(flags.repetitions):
    for (
      variant,
      run,
    ) in runs.items():  # in turn, so that a busy machine slows all alike
      start = time.perf_counter()
      run()
      seconds[variant].append(time.perf_counter() - start)
  print(
    f"{flags.config}: JAX {jax.__version__}, {jax.devices()[0].device_kind}, {cpu_name()}, {len(os.sched_getaffinity(0))} threads"
  )
  baseline = statistics.median(seconds["transformer"])
  for variant, config in configs.items():
    median = statistics.median(seconds[variant])
    flops = step_flops(
      config.model,
      config.data.length,
      config.train.batch_size * config.data.length,
    ).training
    print(
      f"{variant:12} {median:.4f} s/step  {median / baseline:.3f} of the Transformer's  "
      f"{parameter_count(config.model) / 1e6:.3f} M parameters  {flops / median / 1e9:.0f} GFLOP/s"
    )


if __name__ == "__main__":
  main()
