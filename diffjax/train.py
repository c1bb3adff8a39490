"""Trains a model, or goes on with one that was stopped.

    python -m diffjax.train --config=configs/tiny.py --workdir=runs/tiny
    python -m diffjax.train --config=configs/tiny.py:transformer --workdir=runs/twin

Any field of the config can be overridden (--config.train.steps=100). Run again with the same command, it goes on from the last checkpoint.
It ends with a checkpoint, a plot of the loss (loss.png) and a sample of text (sample.txt) in the workdir, which also holds the run's config
(config.toml).

Several processes, each started with the same command, train one model on all their devices. On Cloud TPU, under Slurm and in Kubernetes
they find each other by themselves; elsewhere each is told how: --coordinator=HOST:PORT --num_processes=N --process_id=I
"""

from __future__ import annotations

from absl import app, flags

from diffjax import command
from diffjax.config import Config

_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Directory of checkpoints, metrics, plot and sample; local or gs://.",
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator",
  "",
  "HOST:PORT of process 0, where the processes are not found by themselves.",
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes",
  0,
  "Processes that train together; 1 to be alone wherever this is.",
  lower_bound=0,
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", -1, "Which of them this is, from 0."
)
_CONNECT_TIMEOUT = flags.DEFINE_integer(
  "connect_timeout",
  300,
  "Seconds to wait for the other processes.",
  lower_bound=1,
)


def main(config: Config) -> None:
  """Trains in --workdir."""
  if not _WORKDIR.value:
    raise app.UsageError(
      "pass --workdir=DIR: where checkpoints, metrics, plot and sample go"
    )
  from diffjax.parallel.processes import (
    connected,  # after the flags: a mistyped one should not wait for these imports
  )
  from diffjax.training import loop, output, runtime

  output.outlive()
  runtime.keep_compiled_programs()
  runtime.keep_freed_memory()
  with connected(
    _COORDINATOR.value,
    _NUM_PROCESSES.value,
    _PROCESS_ID.value,
    timeout=_CONNECT_TIMEOUT.value,
  ):
    loop.train(config, _WORKDIR.value)


if __name__ == "__main__":
  command.run(main)
