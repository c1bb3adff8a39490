"""Which mesh axes an array's value varies over, inside `shard_map`."""

from __future__ import annotations

import jax
from jax import lax


def vary_like(x: jax.Array, *arrays: jax.Array | None) -> jax.Array:
  """Returns x, typed as varying over the mesh axes of other arrays too.

  Inside `shard_map`, the type of an array has the mesh axes over which it
  varies. Its values are equal on all devices along the other axes. Some
  functions require arrays that vary over the same axes.

  The transpose of this function sums over the mesh axes that it adds. Applied
  before a custom VJP that each device runs on its own data, it sums the
  gradient of an array that all devices share, once.

  Args:
    x: an array. Outside of `shard_map` it is returned unchanged.
    arrays: arrays whose mesh axes x gets. None is ignored.
  """
  axes: set[str] = set()
  for array in arrays:
    if array is not None:
      axes |= _varying_axes(array)
  added_axes = axes - _varying_axes(x)
  if not added_axes:
    return x  # always so outside of shard_map
  return lax.pcast(x, tuple(sorted(added_axes)), to="varying")


def _varying_axes(x: jax.Array) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying
