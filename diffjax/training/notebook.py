"""Training as a notebook calls it: `diffjax.train`."""

from __future__ import annotations

from typing import Any

import ml_collections
from etils import epath

from diffjax.config import Config, check, from_config_dict
from diffjax.training import loop
from diffjax.training.trained import Trained, load


def train(config: Config | ml_collections.ConfigDict | dict[str, Any], workdir: epath.PathLike) -> Trained:
  """Trains to `config.train.steps`, from the newest checkpoint in `workdir` if there is one, and loads what has been trained.

  It may be called again and again, and in any thread. In the main thread Ctrl-C ends it after the step in hand, with a checkpoint;
  a second one ends the process.

  Args:
    config: the run's config; or the ConfigDict of a config file (`configs.tiny.get_config()`).
    workdir: directory of checkpoints, metrics, plot and sample; local or gs://.

  Returns:
    The model of the newest checkpoint.

  Raises:
    UserError: for whatever the user can fix, as `training.loop.train`; and if the run was stopped before its first step.
  """
  if isinstance(config, Config):
    check(config)
  else:
    config = from_config_dict(config)
  loop.train(config, str(workdir))
  return load(workdir)
