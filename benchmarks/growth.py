"""Resident memory of a training process over its steps: python -m benchmarks.growth

Trains configs/tiny.py for 2,000 steps, with an evaluation and a checkpoint every 100 (twice as many as its own), and prints the resident
memory at step 200, the most after it and their ratio. Exits with 1 if that is more than 1.05. Linux only.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile

from diffjax.config import from_config_dict
from diffjax.configs import tiny
from diffjax.host import runtime
from diffjax.training import loop, session


def resident() -> float:
  """Resident memory of this process, MiB."""
  lines = (
    pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
  )
  return (
    next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    / 1024
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=2000)
  parser.add_argument(
    "--start",
    type=int,
    default=200,
    help="step that the later ones are compared with",
  )
  parser.add_argument(
    "--batch_size", type=int, help="rows of a step; the config's own by default"
  )
  flags = parser.parse_args()
  config = from_config_dict(tiny.get_config())
  train = dataclasses.replace(
    config.train,
    steps=flags.steps,
    batch_size=flags.batch_size or config.train.batch_size,
    checkpoint_interval=100,
    sample_tokens=0,
  )
  evaluation = dataclasses.replace(config.eval, interval=100)
  runtime.keep_compiled_programs()
  runtime.keep_freed_memory()
  memory, put_batch = [], session.put_batch

  def measured(batch, mesh):
    memory.append(resident())
    return put_batch(batch, mesh)

  session.put_batch = measured
  with tempfile.TemporaryDirectory() as workdir:
    loop.train(
      dataclasses.replace(config, train=train, eval=evaluation), workdir
    )
  for step in range(0, len(memory), max(1, flags.steps // 20)):
    print(f"step {step}: {memory[step]:.0f} MiB")
  start, most = memory[flags.start], max(memory[flags.start :])
  print(
    f"resident memory: {start:.0f} MiB at step {flags.start}, at most {most:.0f} MiB until step {flags.steps}, ratio {most / start:.3f}"
  )
  sys.exit(1 if most > 1.05 * start else 0)


if __name__ == "__main__":
  main()
