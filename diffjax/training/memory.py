"""How to change a config whose training step does not fit in memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import jax

from diffjax.config import Config, UserError

# The advice if no flag reduces the memory.
SMALLER_MODEL = "fewer layers, a smaller width or shorter rows"


def flags_for_activations(config: Config, num_devices: int) -> list[str]:
  """Returns command-line flags that reduce the memory of activations.

  They do not change the losses, except for rounding. The list is empty if the
  config has all of them.

  Args:
    config: the run's config.
    num_devices: the number of devices that share a step.
  """
  flags = []
  if config.model.remat != "full":
    flags.append("--config.model.remat=full (activations computed again)")
  # With this many micro-batches, a device computes one row at a time.
  rows_per_device = config.train.batch_size // num_devices
  if rows_per_device > config.train.accumulation:
    flags.append(
      f"--config.train.accumulation={rows_per_device}"
      " (one row a device at a time)"
    )
  if not config.train.loss_chunk:
    flags.append(
      "--config.train.loss_chunk=512 (logits of fewer tokens at a time)"
    )
  return flags


def flags_for_state(
  config: Config, mesh_shape: Mapping[str, int], num_slices: int = 1
) -> list[str]:
  """Returns command-line flags that reduce the memory of the training state.

  They shard parameters and optimizer state over all devices of a slice. The
  list is empty if that is already so, or not possible.

  Args:
    config: the run's config.
    mesh_shape: the number of devices along each axis.
    num_slices: the number of TPU slices.
  """
  devices_per_slice = math.prod(mesh_shape.values()) // num_slices
  # The fsdp axis splits the model's width.
  is_sharded_fully = mesh_shape["fsdp"] >= devices_per_slice
  is_divisible = config.model.embed_dim % devices_per_slice == 0
  if is_sharded_fully or not is_divisible:
    return []
  return [
    f"--config.mesh.data={num_slices} --config.mesh.fsdp={devices_per_slice}"
    " (parameters and optimizer over all chips of a slice)"
  ]


@contextlib.contextmanager
def explain_out_of_memory(
  config: Config, mesh_shape: Mapping[str, int]
) -> Iterator[None]:
  """Turns XLA's error for lack of memory into a UserError with advice.

  Other errors in the context are not changed.

  Args:
    config: the run's config.
    mesh_shape: the number of devices along each axis.

  Raises:
    UserError: if the body runs out of memory. It names flags that reduce the
      memory.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    num_devices = math.prod(mesh_shape.values())
    flags = flags_for_activations(config, num_devices)
    flags += flags_for_state(config, mesh_shape)
    remedy = ", ".join(flags) if flags else SMALLER_MODEL
    first_line = str(error).strip().splitlines()[0]
    raise UserError(
      f"out of memory ({first_line}). To reduce memory: {remedy}"
    ) from error
