"""Blocks of 64 queries and 64 keys in the Hopper kernels: which of them meet, and what a mask leaves of those that it cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diffjax.ops.diff_attention.gpu import chip
from diffjax.ops.diff_attention.gpu.chip import BLOCK
from diffjax.ops.diff_attention.mask import PER_ROW, Mask
from diffjax.ops.diff_attention.tiles import pad, round_up

CONSUMERS = 2  # warpgroups of a thread block that compute, each with a block of its own or both with the same


def bounds(mask: Mask, offset, q_ids, kv_ids, *, shared: int, keys_stay: bool = False):
  """The blocks that pass by each block that stays, int32[B or 1, blocks, 6].

  The first one and the last one + 1 that are loaded for the `shared` blocks of a tile; those that the block's own mask shows; and those
  of a run that it shows whole.
  """
  count = lambda length: round_up(length, CONSUMERS * BLOCK) // BLOCK
  xp: Any = np if mask.offset != PER_ROW and q_ids is None else jnp
  start = xp.zeros((1,), xp.int32) + mask.offset if offset is None else offset
  rows, k0 = BLOCK * xp.arange(count(mask.q_length))[:, None], BLOCK * xp.arange(count(mask.kv_length))
  p0 = start[:, None, None] + rows
  tile = p0, p0 + BLOCK - 1, k0, k0 + BLOCK - 1
  some = xp.broadcast_to(mask.some(*tile), (start.shape[0], rows.size, k0.size)) & (rows < mask.q_length)
  whole = xp.broadcast_to(mask.every(*tile), some.shape)
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


class Passing(NamedTuple):
  """The blocks that pass by one that stays, as numbers of the first one and of the last one + 1."""

  start: jax.Array  # loaded for all blocks of a tile
  stop: jax.Array
  own_start: jax.Array  # shown by the block's own mask
  own_stop: jax.Array
  whole_start: jax.Array  # in a run that it shows whole
  whole_stop: jax.Array

  @classmethod
  def read(cls, table, batch, block) -> Passing:
    """Those of a block, from the table of `bounds` in memory."""
    # Inside shard_map, what a kernel reads is marked as varying over the mesh, and what it computes is not: a loop can begin with the
    # latter.
    return cls._make(lax.add(table[0 if table.shape[0] == 1 else batch, block, n], jnp.int32(0)) for n in range(table.shape[2]))

  def walk(self, step: Callable, skip: Callable, state: Any) -> Any:
    """The state after step(block, state) for each block that the mask shows; skip(block) for the others that are loaded."""
    pass_by = lambda block, _: skip(block)
    lax.fori_loop(self.start, self.own_start, pass_by, None)
    state = lax.fori_loop(self.own_start, self.own_stop, step, state)
    lax.fori_loop(self.own_stop, self.stop, pass_by, None)
    return state

  def unless_whole(self, block, cut: Callable, logits: jax.Array) -> jax.Array:
    """The logits of a block, through `cut` unless it is shown whole."""
    return lax.cond((block >= self.whole_start) & (block < self.whole_stop), lambda x: x, cut, logits)


def cuts(mask: Mask) -> bool:
  """True if the mask can cut a block at all."""
  return mask.segments or mask.causal or mask.window is not None or mask.kv_length % BLOCK > 0


def first_position(mask: Mask, offset, batch):
  """Position of a row's first query, from the offsets in memory where the mask does not know it."""
  return mask.offset if offset is None else offset[batch]


def key_limits(mask: Mask, offset, batch, block):
  """First and last key that the queries of a block see, by position: numbers, or one a row."""
  positions: Any = 0
  if mask.causal or mask.window is not None:  # what is not used has no layout
    positions = chip.iota(chip.row()) + (block * BLOCK + first_position(mask, offset, batch))
  return mask.keys_of(positions, positions)


def query_limits(mask: Mask, block):
  """First and last query that see the keys of a block, by position: one a row, or None. Who sees padding does not matter."""
  if not mask.causal and mask.window is None:
    return None, None
  keys, reach = chip.iota(chip.row()) + block * BLOCK, (mask.window or 1) - 1
  return keys if mask.causal else keys - reach, None if mask.window is None else keys + reach
