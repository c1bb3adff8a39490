"""diffjax's own layout: the workdir of a run.

It has a checkpoint with the parameters and the config, and the tokenizer.
"""

from __future__ import annotations

from diffjax.config import Config, DataConfig
from diffjax.host.lock import lock
from diffjax.inference.trained import load_piecewise
from diffjax.interop.layout import Model, allocate
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.workdir_tokenizer import keep_tokenizer

# The maximum config.data.length of a written workdir. The length of the rows
# that the model was trained on is not known.
_MAX_LENGTH = 2048


def read(path: str) -> Model:
  """Reads the newest complete checkpoint of a workdir.

  Args:
    path: The workdir, local or gs://.

  Raises:
    UserError: if there is no complete checkpoint, its parameters are not
      finite, or its tokenizer is missing.
  """
  config, params, tokenizer = load_piecewise(path, allocate)
  return Model(config.model, params, tokenizer)


def write(path: str, model: Model) -> Config:
  """Writes a workdir with a checkpoint of step 0.

  The checkpoint has parameters but no state of an optimizer. A run can start
  from it (`config.train.init_from`), but not resume it.

  Args:
    path: The workdir, local or gs://.
    model: The model.

  Returns:
    The config of the checkpoint.

  Raises:
    UserError: if the workdir cannot be written.
  """
  with (
    lock(path) as workdir_lock,
    Checkpoints(path, keep=1, lock=workdir_lock) as checkpoints,
  ):
    tokenizer_spec = keep_tokenizer(path, model.tokenizer)
    length = min(_MAX_LENGTH, model.config.max_length)
    config = Config(
      model=model.config,
      data=DataConfig(tokenizer=tokenizer_spec, length=length),
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
