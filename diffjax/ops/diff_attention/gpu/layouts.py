"""Layouts of arrays in the registers of a warpgroup, and arrays in them.

The accumulator of a wgmma is a matrix whose elements are spread over the 128
threads of a warpgroup. Arrays that are combined with it must be in the same
layout, or in its reduction over rows or columns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from diffjax.ops.diff_attention.gpu.chip import BLOCK, Ref, plgpu


def matrix() -> Any:
  """Returns the layout of a matrix that wgmma computes or reads."""
  return plgpu.Layout.WGMMA


def row() -> Any:
  """Returns the layout of a vector with one value per row of a matrix."""
  return plgpu.Layout.WGMMA.reduce(1)


def column() -> Any:
  """Returns the layout of a vector with one value per column of a matrix."""
  return plgpu.Layout.WGMMA.reduce(0)


def broadcast_over_columns(
  x: Num[Array, "rows"], shape: tuple[int, ...]
) -> Num[Array, "rows columns"]:
  """Returns a matrix with x[i] in all columns of row i."""
  return lax.broadcast_in_dim(x, shape, [0])


def broadcast_over_rows(
  x: Num[Array, "columns"], shape: tuple[int, ...]
) -> Num[Array, "rows columns"]:
  """Returns a matrix with x[j] in all rows of column j."""
  return lax.broadcast_in_dim(x, shape, [1])


def full(
  shape: tuple[int, ...], value: float, layout: Any
) -> Float[Array, "..."]:
  """Returns a float32 array that is filled with one value."""
  return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def block_iota(layout: Any) -> Int[Array, "64"]:
  """Returns 0, 1, …, BLOCK − 1."""
  return plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=layout)


def load_global(ref: Ref, layout: Any) -> jax.Array:
  """Reads a small array from global memory, without shared memory."""
  # There is no optimized load into these layouts, and `optimized=True` would
  # raise an error.
  return plgpu.load(ref, layout=layout, optimized=False)
