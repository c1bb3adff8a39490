"""The hardware that a program is compiled for."""

from __future__ import annotations

import jax


def platform() -> str:
  """The platform of the mesh, whose devices need not be there (ahead of time), or the default backend."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def tpu_generation() -> str:
  """The TPU that the program is compiled for ("v5e"): the device's, or the abstract mesh's when compiling ahead of time.

  Raises:
    ValueError: the program is not for a TPU.
  """
  from jax.experimental.pallas import tpu as pltpu  # not at the top: it takes long, and most programs do not ask

  return str(pltpu.get_tpu_info().chip_version)
