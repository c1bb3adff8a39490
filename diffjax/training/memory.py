"""What to change in a config whose step does not fit the memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import jax

from diffjax.config import Config, UserError

SMALLER = "fewer layers, a smaller width or shorter rows"


def for_activations(config: Config, devices: int) -> list[str]:
  """Flags with which a step keeps fewer activations at a time. The losses stay the same but for rounding."""
  found = []
  if config.model.remat != "full":
    found.append("--config.model.remat=full (activations computed again)")
  if (parts := config.train.batch_size // devices) > config.train.accumulation:
    found.append(
      f"--config.train.accumulation={parts} (one row a device at a time)"
    )
  if not config.train.loss_chunk:
    found.append(
      "--config.train.loss_chunk=512 (logits of fewer tokens at a time)"
    )
  return found


def for_state(
  config: Config, mesh: Mapping[str, int], slices: int = 1
) -> list[str]:
  """Flags with which a device holds less of the parameters and the optimizer."""
  in_slice = math.prod(mesh.values()) // slices
  if mesh["fsdp"] < in_slice and config.model.embed_dim % in_slice == 0:
    return [
      f"--config.mesh.data={slices} --config.mesh.fsdp={in_slice} (parameters and optimizer over all chips of a slice)"
    ]
  return []


@contextlib.contextmanager
def explained(config: Config, mesh: Mapping[str, int]) -> Iterator[None]:
  """Turns XLA's error for memory that is lacking into one that says what takes less.

  Args:
    config: the run's config.
    mesh: devices along each axis.

  Raises:
    UserError: in its place.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    changes = for_activations(config, math.prod(mesh.values())) + for_state(
      config, mesh
    )
    remedy = f"what takes less: {', '.join(changes) or SMALLER}"
    raise UserError(
      f"the memory does not suffice ({str(error).strip().splitlines()[0]}); {remedy}"
    ) from error
