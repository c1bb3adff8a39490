"""Resident memory of a training process over its steps.

    python -m benchmarks.growth

Trains configs/tiny.py for 2,000 steps, with an evaluation and a checkpoint
every 100, which is twice as often as its own. Prints the resident memory at
step 200, the largest after it, and their ratio. Exits with 1 if the ratio is
more than 1.05. Linux only.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from typing import Any

from diffjax.config import Config, from_config_dict
from diffjax.configs import tiny
from diffjax.host import runtime
from diffjax.training import loop, session

MAX_RATIO = 1.05
# Number of intervals into which the printed steps divide a run.
NUM_PRINTED = 20


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags of the command.

  Attributes:
    steps: Steps of the run.
    start: The step with which later steps are compared.
    batch_size: Rows of a step. None for the config's own.
  """

  steps: int
  start: int
  batch_size: int | None


def resident_mib() -> float:
  """Returns the resident memory of this process, in MiB."""
  status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
  for line in status.splitlines():
    if line.startswith("VmRSS:"):
      return int(line.split()[1]) / 1024
  raise RuntimeError("/proc/self/status has no line VmRSS; run this on Linux")


def make_config(settings: Settings) -> Config:
  """Returns the config of tiny, with frequent evaluations and checkpoints."""
  config = from_config_dict(tiny.get_config())
  train = dataclasses.replace(
    config.train,
    steps=settings.steps,
    batch_size=settings.batch_size or config.train.batch_size,
    checkpoint_interval=100,
    sample_tokens=0,
  )
  evaluation = dataclasses.replace(config.eval, interval=100)
  return dataclasses.replace(config, train=train, eval=evaluation)


def memory_by_step(config: Config) -> list[float]:
  """Trains, and returns the resident memory before each step, in MiB.

  It is measured where the training loop moves a batch to the device.

  Args:
    config: The config of the run.
  """
  memory = []
  original_put_batch = session.put_batch

  def measuring_put_batch(batch: Any, mesh: Any) -> Any:
    memory.append(resident_mib())
    return original_put_batch(batch, mesh)

  # The training loop calls this function once for each step.
  session.put_batch = measuring_put_batch
  try:
    with tempfile.TemporaryDirectory() as workdir:
      loop.train(config, workdir)
  finally:
    session.put_batch = original_put_batch
  return memory


def main() -> None:
  """Trains, prints the memory, and exits with 1 if it grows too much."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=2000)
  parser.add_argument(
    "--start",
    type=int,
    default=200,
    help="step with which later ones are compared",
  )
  parser.add_argument(
    "--batch_size", type=int, help="rows of a step; the config's own by default"
  )
  settings = Settings(**vars(parser.parse_args()))

  runtime.keep_compiled_programs()
  runtime.keep_freed_memory()
  memory = memory_by_step(make_config(settings))

  interval = max(1, settings.steps // NUM_PRINTED)
  for step in range(0, len(memory), interval):
    print(f"step {step}: {memory[step]:.0f} MiB")
  start = memory[settings.start]
  largest = max(memory[settings.start :])
  ratio = largest / start
  print(
    f"resident memory: {start:.0f} MiB at step {settings.start},"
    f" at most {largest:.0f} MiB until step {settings.steps},"
    f" ratio {ratio:.3f}"
  )
  sys.exit(1 if ratio > MAX_RATIO else 0)


if __name__ == "__main__":
  main()
