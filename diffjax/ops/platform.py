"""What a program is compiled for."""

from __future__ import annotations

import jax


def platform() -> str:
  """The platform of the mesh, whose devices need not be there (ahead of time), or the default backend."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform
