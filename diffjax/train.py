"""Trains a model: python -m diffjax.train --config=configs/tiny.py --workdir=runs/tiny

Any field of the config can be overridden (--config.train.steps=100). Run again with the same command, it goes on from the last
checkpoint. It ends with a checkpoint, a plot of the loss (loss.png) and a sample of text (sample.txt) in the workdir.
"""

from absl import app, flags

from diffjax import command
from diffjax.config import Config

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of checkpoints, metrics, plot and sample; local or gs://.")


def main(config: Config) -> None:
  """Trains in --workdir."""
  if not WORKDIR.value:
    raise app.UsageError("pass --workdir=DIR: where checkpoints, metrics, plot and sample go")
  from diffjax.training import loop, runtime  # after the flags: a mistyped one should not wait for these imports

  runtime.keep_compiled_programs()
  runtime.keep_freed_pages()
  loop.train(config, WORKDIR.value)


if __name__ == "__main__":
  command.run(main)
