"""Trains a model, or continues a run that was stopped.

    python -m diffjax.train --config=tiny
    python -m diffjax.train --config=tiny:transformer --workdir=runs/twin

Any field of the config can be overridden, for example --config.train.steps=100.
The same command continues a stopped run from its last checkpoint. A finished
run has a checkpoint, a plot of the loss (loss.png), a sample of text
(sample.txt) and its config (config.toml) in the workdir.

Several processes that are started with the same command train one model on all
their devices. On Cloud TPU, under Slurm and in Kubernetes they find each other.
Elsewhere, each one needs flags:
--coordinator=HOST:PORT --num_processes=N --process_id=I
"""

from __future__ import annotations

if __name__ == "__main__":
  # This comes before the slow imports, so that Ctrl-C also ends the command
  # during them.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import os

from absl import app, flags
from ml_collections import config_flags

from diffjax import allow_deprecated_call
from diffjax.cli import command, config_file
from diffjax.config import Config, UserError

_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Directory of checkpoints, metrics, plot and sample; local or gs://."
  " runs/CONFIG or runs/CONFIG_VARIANT by default.",
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator",
  "",
  "HOST:PORT of process 0, if the processes do not find each other.",
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes",
  0,
  "Processes that train together; 1 for a single process on a cluster.",
  lower_bound=0,
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", -1, "The number of this process, from 0."
)
_CONNECT_TIMEOUT = flags.DEFINE_integer(
  "connect_timeout",
  300,
  "Seconds to wait for the other processes.",
  lower_bound=1,
)


def main(config: Config) -> None:
  """Trains in --workdir, or in the default directory of the config.

  Raises:
    UserError: if the user can fix the problem.
  """
  workdir = _WORKDIR.value or _default_workdir()
  _check_workdir_flag(_NUM_PROCESSES.value)

  # These imports take seconds. They come after the checks, so that an error in
  # the flags is printed at once.
  import jax

  from diffjax.host import output, runtime
  from diffjax.inference.finish import finish
  from diffjax.parallel.processes import connected
  from diffjax.training import loop

  # Training continues if its output can no longer be written.
  output.drop_unwritable_output()
  # The rest must be called before JAX computes.
  runtime.keep_compiled_programs()
  runtime.keep_freed_memory()
  with connected(
    _COORDINATOR.value,
    _NUM_PROCESSES.value,
    _PROCESS_ID.value,
    timeout=_CONNECT_TIMEOUT.value,
  ):
    # In a cluster, the number of processes is known only now.
    _check_workdir_flag(jax.process_count())
    result = loop.train(config, workdir)
    # Writes the plot and the sample, unless a signal has stopped the run early.
    finish(result)


def _default_workdir() -> str:
  """Returns the directory that is named after --config.

  Example: --config=tiny:transformer → "runs/tiny_transformer"

  Raises:
    app.UsageError: if the config is a TOML file, which has no such name.
  """
  spec = config_flags.get_config_filename(flags.FLAGS["config"])
  name = config_file.run_name(spec)
  if name is None:
    raise app.UsageError(
      f"pass --workdir=DIR: a run with --config={spec} has no default"
    )
  return os.path.join("runs", name)


def _check_workdir_flag(num_processes: int) -> None:
  """Raises UserError if there are several processes, but no --workdir.

  The default directory is relative. Processes on several hosts would each use
  their own.
  """
  if num_processes > 1 and not _WORKDIR.value:
    raise UserError(
      f"pass --workdir=DIR: {num_processes} processes need a directory that all"
      " of them see, on a shared disk or gs://"
    )


# diffjax.train() was the function that is diffjax.fit() today. Once this module
# is imported, `diffjax.train` is this module, so it must be callable.
allow_deprecated_call(__name__)

if __name__ == "__main__":
  command.run(main)
