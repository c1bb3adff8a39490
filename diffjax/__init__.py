"""Differential Transformer language models in JAX.

In a notebook:

    trained = diffjax.train(configs.tiny.get_config(), "runs/tiny")
    trained = diffjax.load("runs/tiny")
    print(*diffjax.Sampler(trained).generate(["def "], 100))

Importing the package imports nothing else: `diffjax.ops` needs no more than jax, numpy and jaxtyping.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.argv[0] == "-m":  # so it is while Python looks for the command of `python -m diffjax.train`, and at no other import
  from diffjax.signals import end_at_ctrl_c

  end_at_ctrl_c()

if TYPE_CHECKING:
  from diffjax.model.sampler import Sampler as Sampler
  from diffjax.training.trained import Trained


def train(config: Any, workdir: Any) -> Trained:
  """Trains a model, and loads it: see `diffjax.training.notebook.train`.

  Args:
    config: a `diffjax.config.Config`, or the ConfigDict of a config file.
    workdir: directory of checkpoints, metrics, plot and sample; local or gs://.
  """
  from diffjax.training import notebook

  return notebook.train(config, workdir)


def load(workdir: Any, step: int | None = None) -> Trained:
  """Loads a trained model: see `diffjax.training.trained.load`.

  Args:
    workdir: the run's directory, local or gs://.
    step: the checkpoint's step; None for the newest complete one.
  """
  from diffjax.training import trained

  return trained.load(workdir, step)


def __getattr__(name: str) -> Any:
  if name == "Sampler":
    from diffjax.model.sampler import Sampler

    return Sampler
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
