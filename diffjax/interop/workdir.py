"""diffjax's own layout: a workdir, of which the model's parameters, its config and its tokenizer are read and written."""

from __future__ import annotations

from diffjax.config import Config, DataConfig
from diffjax.host.lock import lock
from diffjax.inference.trained import load_piecewise
from diffjax.interop.layout import Model, allocate
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.workdir_tokenizer import keep_tokenizer

# The largest config.data.length of a written workdir. The length that the model was trained with elsewhere is not known.
_LENGTH = 2048


def read(path: str) -> Model:
  """Reads the newest complete checkpoint.

  Raises:
    UserError: if there is none, its parameters are not finite, or its tokenizer is missing.
  """
  config, params, tokenizer = load_piecewise(path, allocate)
  return Model(config.model, params, tokenizer)


def write(path: str, model: Model) -> Config:
  """Writes a workdir with a checkpoint of step 0, without an optimizer: for `config.train.init_from`, not a run to resume.

  Returns:
    The config of the checkpoint.

  Raises:
    UserError: if it cannot be written.
  """
  with (
    lock(path) as held,
    Checkpoints(path, keep=1, lock=held) as checkpoints,
  ):
    spec = keep_tokenizer(path, model.tokenizer)
    config = Config(
      model=model.config,
      data=DataConfig(
        tokenizer=spec, length=min(_LENGTH, model.config.max_length)
      ),
    )
    checkpoints.save(
      0,
      {"params": model.params},
      data_state={},
      config=config.to_dict(),
      in_pieces=True,
    )
    checkpoints.wait()
  return config
