"""The types that `shard_map` gives arrays: which mesh axes an array's value varies over."""

from __future__ import annotations

import jax
from jax import lax


def vary_like(x: jax.Array, *others: jax.Array | None) -> jax.Array:
  """x, typed as varying over every mesh axis that it or one of the others varies over; x itself outside `shard_map`.

  Its transpose is one sum over the mesh axes added. So an array that all devices share gets its gradient summed once, after a custom VJP
  that each device runs on its own.
  """
  axes = frozenset().union(
    *(_axes(other) for other in others if other is not None)
  ) - _axes(x)
  return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def _axes(x: jax.Array) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying
