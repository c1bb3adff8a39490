"""Whole training steps of three variants: loss, gradients and update.

    python -m benchmarks.train_step --config=configs/tiny.py

Prints the median seconds of a step, and the ratio to the Transformer's. The
variants take turns in one process.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from benchmarks import machine
from benchmarks.timing import median_seconds
from diffjax.config import Config
from diffjax.host.runtime import keep_freed_memory
from diffjax.model.flops import parameter_count, step_flops
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.program import build

VARIANTS = ("transformer", "diff", "diff_v2")


def stepper(config: Config, packed: bool = True) -> Callable[[], None]:
  """Returns a compiled function that takes one training step and waits for it.

  Args:
    config: The config of the run.
    packed: Whether rows have up to three documents. Otherwise, they have no
      segment ids. Segment ids of a single document would have a cost.
  """
  mesh = make_mesh(config.mesh)
  program = build(config, mesh)
  batch = put_batch(random_batch(config), mesh)
  if not packed:
    batch["segment_ids"] = None
  state = program.init()

  def run() -> None:
    nonlocal state
    state, metrics = program.train_step(state, batch)
    jax.block_until_ready(metrics)

  # The first step compiles.
  run()
  return run


def random_batch(config: Config) -> dict[str, np.ndarray]:
  """Returns rows of random tokens, with up to three documents each."""
  rng = np.random.default_rng(0)
  shape = (config.train.batch_size, config.data.length)
  segment_ids = np.sort(rng.integers(1, 4, shape, np.int32), axis=1)
  vocab_size = config.model.vocab_size
  tokens, targets = rng.integers(0, vocab_size, (2, *shape), np.int32)
  positions = np.arange(config.data.length, dtype=np.int32)
  return {
    "tokens": tokens,
    "targets": targets,
    "segment_ids": segment_ids,
    "positions": np.broadcast_to(positions, shape),
    "weights": np.ones(shape, np.float32),
  }


def main() -> None:
  """Times a step of each variant, relative to the Transformer's."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", default="configs/tiny.py")
  parser.add_argument("--repetitions", type=int, default=30)
  flags = parser.parse_args()
  # Not at the top, because importers of `stepper` need no configs.
  from diffjax.config import from_config_dict

  keep_freed_memory()
  config_name = pathlib.Path(flags.config).stem
  module = importlib.import_module(f"diffjax.configs.{config_name}")
  configs = {}
  for variant in VARIANTS:
    configs[variant] = from_config_dict(module.get_config(variant))
  candidates = {name: stepper(config) for name, config in configs.items()}
  seconds = median_seconds(candidates, flags.repetitions, warmups=0)

  print(
    f"{flags.config}: JAX {jax.__version__}, {jax.devices()[0].device_kind},"
    f" {machine()}"
  )
  for variant, config in configs.items():
    num_tokens = config.train.batch_size * config.data.length
    flops = step_flops(config.model, config.data.length, num_tokens).training
    ratio = seconds[variant] / seconds["transformer"]
    parameters = parameter_count(config.model) / 1e6
    gigaflops_per_second = flops / seconds[variant] / 1e9
    print(
      f"{variant:12} {seconds[variant]:.4f} s/step"
      f"  {ratio:.3f} of the Transformer's"
      f"  {parameters:.3f} M parameters"
      f"  {gigaflops_per_second:.0f} GFLOP/s"
    )


if __name__ == "__main__":
  main()
