"""Blocks of 64 queries and 64 keys in the Hopper kernels: which of them meet, and what a mask leaves of those that it cuts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diffjax.ops.diff_attention.gpu import layouts
from diffjax.ops.diff_attention.gpu.chip import BLOCK
from diffjax.ops.diff_attention.mask import PER_ROW, Mask
from diffjax.ops.diff_attention.tiles import pad_axis, round_up

CONSUMERS = 2  # warpgroups of a thread block that compute, each with a block of its own or both with the same


def bounds(
  mask: Mask, offset, q_ids, kv_ids, *, shared: int, keys_stay: bool = False
):
  """The blocks that pass by each block that stays, int32[B or 1, blocks, 6].

  The first one and the last one + 1 that are loaded for the `shared` blocks of a tile; those that the block's own mask shows; and those
  of a run that it shows whole.
  """
  count = lambda length: round_up(length, CONSUMERS * BLOCK) // BLOCK
  xp: Any = np if mask.offset != PER_ROW and q_ids is None else jnp
  start = xp.zeros((1,), xp.int32) + mask.offset if offset is None else offset
  rows, k0 = (
    BLOCK * xp.arange(count(mask.q_length))[:, None],
    BLOCK * xp.arange(count(mask.kv_length)),
  )
  p0 = start[:, None, None] + rows
  tile = p0, p0 + BLOCK - 1, k0, k0 + BLOCK - 1
  some = xp.broadcast_to(
    mask.some(*tile), (start.shape[0], rows.size, k0.size)
  ) & (rows < mask.q_length)
  whole = xp.broadcast_to(mask.every(*tile), some.shape)
  if q_ids is not None:
    q_low, q_high, kv_low, kv_high = (
      reduce(
        pad_axis(ids, 1, n * BLOCK).reshape(ids.shape[0], n, BLOCK), axis=2
      )
      for ids, n in ((q_ids, rows.size), (kv_ids, k0.size))
      for reduce in (jnp.min, jnp.max)
    )
    q_low, q_high, kv_low, kv_high = (
      q_low[:, :, None],
      q_high[:, :, None],
      kv_low[:, None],
      kv_high[:, None],
    )
    some = some & (q_low <= kv_high) & (kv_low <= q_high)
    whole = whole & (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
  if keys_stay:
    some, whole = xp.swapaxes(some, 1, 2), xp.swapaxes(whole, 1, 2)
  whole = whole & some
  first, stop = (
    xp.argmax(some, axis=2),
    some.shape[2] - xp.argmax(xp.flip(some, 2), axis=2),
  )
  any_, any_whole = xp.any(some, axis=2), xp.any(whole, axis=2)
  tiles = lambda x, reduce: xp.repeat(
    reduce(x.reshape(x.shape[0], -1, shared), axis=2), shared, axis=1
  )
  shared_stop = tiles(xp.where(any_, stop, 0), xp.max)
  shared_first = xp.minimum(
    tiles(xp.where(any_, first, some.shape[2]), xp.min), shared_stop
  )
  whole_first = xp.argmax(whole, axis=2)
  after = ~whole & (xp.arange(some.shape[2]) > whole_first[:, :, None])
  whole_stop = xp.where(
    xp.any(after, axis=2), xp.argmax(after, axis=2), some.shape[2]
  )
  own_first, own_stop = (
    xp.where(any_, first, shared_first),
    xp.where(any_, stop, shared_first),
  )
  columns = (
    shared_first,
    shared_stop,
    own_first,
    own_stop,
    xp.where(any_whole, whole_first, own_stop),
    xp.where(any_whole, whole_stop, own_first),
  )
  return jnp.asarray(xp.stack(columns, axis=2), jnp.int32)


class Passing(NamedTuple):
  """The blocks that pass by one that stays, as numbers of the first one and of the last one + 1."""

  start: jax.Array  # loaded for all blocks of a tile
  stop: jax.Array
  own_start: jax.Array  # shown by the block's own mask
  own_stop: jax.Array
  whole_start: (
    jax.Array
  )  # in a run that it shows whole; if there is none, own_stop
  whole_stop: jax.Array  # if there is none, own_start

  @classmethod
  def read(cls, table, batch, block) -> Passing:
    """Those of a block, from the table of `bounds` in memory."""
    # Inside shard_map, what a kernel reads is marked as varying over the mesh, and what it computes is not: a loop can begin with the
    # latter.
    return cls._make(
      lax.add(
        table[0 if table.shape[0] == 1 else batch, block, n], jnp.int32(0)
      )
      for n in range(table.shape[2])
    )

  def walk(
    self,
    cut: Cut,
    begin: Callable,
    step: Callable,
    finish: Callable,
    skip: Callable,
    nothing: Any,
  ) -> Any:
    """What finish(state) gives after all blocks that the mask shows; skip(block) is called for the others that are loaded.

    Args:
      cut: where the mask may cut blocks.
      begin: (first block, `nothing`) to the state.
      step: (True if no mask cuts the block, block, state) to the state. Each of its loops has no branch for masks.
      finish: from the last state to the result.
      skip: frees what was loaded of a block.
      nothing: state if the mask shows no block.
    """
    pass_by = lambda block, _: skip(block)
    some = self.own_start < self.own_stop
    rest = self.own_start + 1
    start, stop = rest, self.own_stop
    lax.fori_loop(self.start, self.own_start, pass_by, None)
    state = lax.cond(
      some,
      lambda state: begin(self.own_start, state),
      lambda state: state,
      nothing,
    )
    if cut.before:
      start = lax.max(rest, self.whole_start)
      state = lax.fori_loop(rest, start, functools.partial(step, False), state)
    if cut.after:
      stop = lax.max(start, self.whole_stop)
    state = lax.fori_loop(start, stop, functools.partial(step, True), state)
    if cut.after:
      state = lax.fori_loop(
        stop, self.own_stop, functools.partial(step, False), state
      )
    result = lax.cond(some, finish, lambda state: state, state)
    lax.fori_loop(self.own_stop, self.stop, pass_by, None)
    return result


class Cut(NamedTuple):
  """Where a mask may cut blocks of those that pass by one that stays."""

  before: bool  # the run that it shows whole
  after: bool

  @classmethod
  def of(cls, mask: Mask, *, keys_stay: bool = False) -> Cut:
    window = mask.window is not None
    if keys_stay:  # who sees padding does not matter
      return cls(
        mask.segments or mask.causal or window, mask.segments or window
      )
    return cls(
      mask.segments or window,
      mask.segments or mask.causal or window or mask.kv_length % BLOCK > 0,
    )

  @property
  def ever(self) -> bool:
    return self.before or self.after


def first_position(mask: Mask, offset, batch):
  """Position of a row's first query, from the offsets in memory where the mask does not know it."""
  return mask.offset if offset is None else offset[batch]


def key_limits(mask: Mask, offset, batch, block):
  """First and last key that the queries of a block see, by position: numbers, or one a row."""
  positions: Any = 0
  if mask.causal or mask.window is not None:  # what is not used has no layout
    positions = layouts.block_iota(layouts.row()) + (
      block * BLOCK + first_position(mask, offset, batch)
    )
  return mask.keys_of(positions, positions)


def query_limits(mask: Mask, block):
  """First and last query that see the keys of a block, by position: one a row, or None. Who sees padding does not matter."""
  if not mask.causal and mask.window is None:
    return None, None
  keys, reach = (
    layouts.block_iota(layouts.row()) + block * BLOCK,
    (mask.window or 1) - 1,
  )
  return (
    keys if mask.causal else keys - reach,
    None if mask.window is None else keys + reach,
  )
