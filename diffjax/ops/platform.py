"""The hardware that a program is compiled for."""

from __future__ import annotations

from typing import Any

import jax


def platform() -> str:
  """The platform of the mesh, whose devices need not be there (ahead of time), or the default backend."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
  """The name of the kind of device, as JAX has it: "NVIDIA H100 80GB HBM3". Of the same device as `platform`."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return (jax.devices()[0] if device is None else device).device_kind


def tpu_generation() -> str:
  """The name of the TPU that the program is compiled for: "v5e"."""
  return str(tpu_info().chip_version)


def tpu_info() -> Any:
  """The TPU that the program is compiled for, a `pltpu.TpuInfo`: the device's, or the abstract mesh's when compiling ahead of time.

  Raises:
    ValueError: the program is not for a TPU.
  """
  # Not at the top: this import is slow, and most programs do not need it.
  from jax.experimental.pallas import tpu as pltpu

  return pltpu.get_tpu_info()
