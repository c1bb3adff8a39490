"""The result of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from diffjax.config import Config
from diffjax.data.tokenizer import Tokenizer
from diffjax.model.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """The result of a training run.

  Attributes:
    config: the run's config.
    workdir: the run's directory, local or gs://.
    mesh: the devices of the run.
    model: the decoder.
    params: its parameters after the last step, on the mesh.
    tokenizer: the run's tokenizer.
    step: the number of steps done.
    check_lock: raises LostWorkdir, in all processes, if the workdir is not the
      directory that the run has locked, because it was deleted or replaced. All
      processes must call it together.
  """

  config: Config
  workdir: str
  mesh: Mesh
  model: Decoder
  params: Any
  tokenizer: Tokenizer
  step: int
  check_lock: Callable[[], None]

  @property
  def is_finished(self) -> bool:
    """True if the run has taken all steps, False if a signal stopped it."""
    return self.step >= self.config.train.steps
