"""Which blocks of 64 queries and 64 keys meet in the Hopper kernels, and what a mask leaves of those that it cuts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diffjax.ops.diff_attention import gpu
from diffjax.ops.diff_attention.gpu import BLOCK
from diffjax.ops.diff_attention.schedule import pad
from diffjax.ops.diff_attention.tiles import Geometry
from diffjax.ops.diff_attention.tpu import round_up

CONSUMERS = 2  # warpgroups of a thread block that compute, each with a block of its own or both with the same


def bounds(geometry: Geometry, offset, q_ids, kv_ids, *, shared: int, keys_stay: bool = False):
  """Which blocks pass by each block that stays, int32[B or 1, blocks, 6].

  The first one and the last one + 1 that are loaded for the `shared` blocks of a tile; those that the block's own mask shows; and those
  of a run that it shows whole.
  """
  count = lambda length: round_up(length, CONSUMERS * BLOCK) // BLOCK
  xp: Any = np if geometry.q_offset is not None and q_ids is None else jnp
  start = xp.zeros((1,), xp.int32) + (geometry.q_offset or 0) if offset is None else offset
  rows, k0 = BLOCK * xp.arange(count(geometry.q_length))[:, None], BLOCK * xp.arange(count(geometry.kv_length))
  p0 = start[:, None, None] + rows
  tile = p0, p0 + BLOCK - 1, k0, k0 + BLOCK - 1
  some = xp.broadcast_to(geometry.some(*tile), (start.shape[0], rows.size, k0.size)) & (rows < geometry.q_length)
  whole = xp.broadcast_to(geometry.every(*tile), some.shape)
  if q_ids is not None:
    q_low, q_high, kv_low, kv_high = (
      reduce(pad(ids, 1, n * BLOCK).reshape(ids.shape[0], n, BLOCK), axis=2)
      for ids, n in ((q_ids, rows.size), (kv_ids, k0.size))
      for reduce in (jnp.min, jnp.max)
    )
    q_low, q_high, kv_low, kv_high = q_low[:, :, None], q_high[:, :, None], kv_low[:, None], kv_high[:, None]
    some = some & (q_low <= kv_high) & (kv_low <= q_high)
    whole = whole & (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
  if keys_stay:
    some, whole = xp.swapaxes(some, 1, 2), xp.swapaxes(whole, 1, 2)
  whole = whole & some
  first, stop = xp.argmax(some, axis=2), some.shape[2] - xp.argmax(xp.flip(some, 2), axis=2)
  any_, any_whole = xp.any(some, axis=2), xp.any(whole, axis=2)
  tiles = lambda x, reduce: xp.repeat(reduce(x.reshape(x.shape[0], -1, shared), axis=2), shared, axis=1)
  shared_stop = tiles(xp.where(any_, stop, 0), xp.max)
  shared_first = xp.minimum(tiles(xp.where(any_, first, some.shape[2]), xp.min), shared_stop)
  whole_first = xp.argmax(whole, axis=2)
  after = ~whole & (xp.arange(some.shape[2]) > whole_first[:, :, None])
  whole_stop = xp.where(xp.any(after, axis=2), xp.argmax(after, axis=2), some.shape[2])
  columns = (
    shared_first, shared_stop, xp.where(any_, first, shared_first), xp.where(any_, stop, shared_first),
    whole_first, xp.where(any_whole, whole_stop, whole_first),
  )  # fmt: skip
  return jnp.asarray(xp.stack(columns, axis=2), jnp.int32)


def scalars(table, batch, block) -> list[jax.Array]:
  """A block's numbers from a table [1 or B, blocks, numbers] in memory."""
  # Inside shard_map, what a kernel reads is marked as varying over the mesh, and what it computes is not: a loop can begin with the latter.
  return [lax.add(table[0 if table.shape[0] == 1 else batch, block, n], jnp.int32(0)) for n in range(table.shape[2])]


def cuts(geometry: Geometry, q_ids) -> bool:
  """Whether the mask can cut a block at all."""
  return q_ids is not None or geometry.causal or geometry.window is not None or geometry.kv_length % BLOCK > 0


def key_limits(geometry: Geometry, offset, batch, block):
  """First and last key that the queries of a block see, by position: numbers, or one a row."""
  positions: Any = 0
  if geometry.causal or geometry.window is not None:  # what is not used has no layout
    positions = gpu.iota(gpu.row()) + (block * BLOCK + (geometry.q_offset if offset is None else offset[batch]))
  return geometry.keys_of(positions, positions)


def query_limits(geometry: Geometry, block):
  """First and last query that see the keys of a block, by position: one a row, or None. Who sees padding does not matter."""
  if not geometry.causal and geometry.window is None:
    return None, None
  keys, reach = gpu.iota(gpu.row()) + block * BLOCK, (geometry.window or 1) - 1
  return keys if geometry.causal else keys - reach, None if geometry.window is None else keys + reach
