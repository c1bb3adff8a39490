"""The hardware that a program is compiled for.

Ahead of time, a program is compiled for devices that this machine may not have.
They are the abstract device of the current mesh.
"""

from __future__ import annotations

from typing import Any

import jax


def platform() -> str:
  """Returns "cpu", "gpu" or "tpu": the mesh's platform, or the backend's."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None:
    return jax.default_backend()
  return device.platform


def device_kind() -> str:
  """Returns JAX's name of the device, such as "NVIDIA H100 80GB HBM3"."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None:
    device = jax.devices()[0]
  return device.device_kind


def tpu_generation() -> str:
  """Returns the generation of the TPU, such as "v5e".

  Raises:
    ValueError: if the program is not for a TPU.
  """
  return str(tpu_info().chip_version)


def tpu_info() -> Any:
  """Returns the `pltpu.TpuInfo` of the TPU that the program is compiled for.

  Raises:
    ValueError: if the program is not for a TPU.
  """
  # This import is slow, and most programs do not need it.
  from jax.experimental.pallas import tpu as pltpu

  return pltpu.get_tpu_info()
