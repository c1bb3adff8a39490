"""Which blocks of queries and keys meet in the Hopper kernels.

A thread block of a kernel holds a tile of stationary blocks in shared memory.
The other operand is streamed past it, block by block. Forward and for dQ,
queries are stationary and keys are streamed. For dK and dV it is the other way
round. All blocks have 64 rows.

For a mask, a pair of a stationary and a streamed block is
  hidden, if no query sees any key,
  full, if every query sees every key, and
  partial otherwise: logits must be masked.

`block_ranges` computes a table of these pairs before a kernel starts. The
kernel reads its entry with `BlockRanges.read`, and `BlockRanges.fold` is the
loop over the streamed blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from diffjax.ops.diff_attention.gpu import layouts
from diffjax.ops.diff_attention.gpu.chip import BLOCK
from diffjax.ops.diff_attention.mask import PER_ROW, Mask
from diffjax.ops.diff_attention.tiles import Scalar, pad_axis, round_up

# The warpgroups of a thread block that compute. Another one loads.
NUM_CONSUMERS = 2


def block_ranges(
  mask: Mask,
  offset: Int[Array, "B"] | None,
  q_ids: Int[Array, "B T"] | None,
  kv_ids: Int[Array, "B S"] | None,
  *,
  blocks_per_tile: int,
  keys_are_stationary: bool = False,
) -> Int[Array, "X blocks 6"]:
  """Returns the ranges of streamed blocks for every stationary block.

  Args:
    mask: the mask.
    offset: the position of each row's first query. None if the mask knows it.
    q_ids: segment ids of the queries, or None.
    kv_ids: segment ids of the keys, or None.
    blocks_per_tile: how many stationary blocks share what is loaded.
    keys_are_stationary: whether keys are stationary, or queries.

  Returns:
    The fields of `BlockRanges` along the last axis. X is B, or 1 if all rows of
    the batch have the same ranges.
  """
  # NumPy computes the table while the program is compiled, unless the table
  # depends on data.
  depends_on_data = mask.offset == PER_ROW or q_ids is not None
  xp: Any = jnp if depends_on_data else np
  is_visible, is_full = _classify_pairs(xp, mask, offset, q_ids, kv_ids)
  if keys_are_stationary:
    is_visible = xp.swapaxes(is_visible, 1, 2)
    is_full = xp.swapaxes(is_full, 1, 2)
  is_full = is_full & is_visible  # not a block of padding
  num_streamed = is_visible.shape[2]

  # The range from the first to the last visible block.
  has_visible = xp.any(is_visible, axis=2)  # [X, blocks]
  first_visible = xp.argmax(is_visible, axis=2)
  num_hidden_at_end = xp.argmax(xp.flip(is_visible, 2), axis=2)
  stop_visible = num_streamed - num_hidden_at_end

  # A tile loads the union of its blocks' ranges. A block without visible blocks
  # does not extend it. If the whole tile has none, the range is empty.
  loaded_stop = xp.where(has_visible, stop_visible, 0)
  loaded_stop = _reduce_over_tile(xp, xp.max, loaded_stop, blocks_per_tile)
  loaded_start = xp.where(has_visible, first_visible, num_streamed)
  loaded_start = _reduce_over_tile(xp, xp.min, loaded_start, blocks_per_tile)
  loaded_start = xp.minimum(loaded_start, loaded_stop)
  # An empty range of visible blocks starts where the loaded range does.
  visible_start = xp.where(has_visible, first_visible, loaded_start)
  visible_stop = xp.where(has_visible, stop_visible, loaded_start)

  # The first run of full blocks ends before the next block that is not full.
  has_full = xp.any(is_full, axis=2)
  first_full = xp.argmax(is_full, axis=2)
  is_after_first_full = xp.arange(num_streamed) > first_full[:, :, None]
  ends_run = ~is_full & is_after_first_full
  stop_full = xp.where(
    xp.any(ends_run, axis=2), xp.argmax(ends_run, axis=2), num_streamed
  )
  ranges = BlockRanges(
    loaded_start=loaded_start,
    loaded_stop=loaded_stop,
    visible_start=visible_start,
    visible_stop=visible_stop,
    full_start=xp.where(has_full, first_full, visible_stop),
    full_stop=xp.where(has_full, stop_full, visible_start),
  )
  return jnp.asarray(xp.stack(ranges, axis=2), jnp.int32)


def _classify_pairs(
  xp: Any,
  mask: Mask,
  offset: Int[Array, "B"] | None,
  q_ids: Int[Array, "B T"] | None,
  kv_ids: Int[Array, "B S"] | None,
) -> tuple[Bool[Array, "X q_blocks k_blocks"], Bool[Array, "..."]]:
  """Returns which pairs of blocks may be visible, and which are full.

  Pairs with a block of padded queries are not visible, but may be full.

  Args:
    xp: the module that computes, numpy or jax.numpy.
    mask: as for `block_ranges`, and so are the other arguments.
  """
  first_queries = BLOCK * xp.arange(_num_blocks(mask.q_length))[:, None]
  first_keys = BLOCK * xp.arange(_num_blocks(mask.kv_length))
  if offset is None:
    offset = xp.zeros((1,), xp.int32) + mask.offset
  first_positions = offset[:, None, None] + first_queries  # [X, q_blocks, 1]
  positions = (
    first_positions,
    first_positions + BLOCK - 1,
    first_keys,
    first_keys + BLOCK - 1,
  )
  # The mask's answers may lack an axis that they do not depend on.
  shape = (offset.shape[0], first_queries.size, first_keys.size)
  has_queries = first_queries < mask.q_length  # a block of padding has none
  is_visible = (
    xp.broadcast_to(mask.any_visible(*positions), shape) & has_queries
  )
  is_full = xp.broadcast_to(mask.all_visible(*positions), shape)

  if q_ids is not None and kv_ids is not None:
    # Blocks can have a common id only if their ranges of ids overlap. All ids
    # are equal if both ranges are the same single id.
    q_low, q_high = _id_ranges(q_ids, first_queries.size)
    kv_low, kv_high = _id_ranges(kv_ids, first_keys.size)
    q_low = q_low[:, :, None]
    q_high = q_high[:, :, None]
    kv_low = kv_low[:, None]
    kv_high = kv_high[:, None]
    is_visible = is_visible & (q_low <= kv_high) & (kv_low <= q_high)
    is_full = is_full & (q_low == q_high) & (kv_low == kv_high)
    is_full = is_full & (q_low == kv_low)
  return is_visible, is_full


def _num_blocks(length: int) -> int:
  """Returns the blocks of an axis, which is padded to whole tiles."""
  return round_up(length, NUM_CONSUMERS * BLOCK) // BLOCK


def _id_ranges(
  ids: Int[Array, "B length"], num_blocks: int
) -> tuple[Int[Array, "B blocks"], Int[Array, "B blocks"]]:
  """Returns the smallest and the largest segment id of each block."""
  padded = pad_axis(ids, 1, num_blocks * BLOCK)
  ids_of_block = padded.reshape(ids.shape[0], num_blocks, BLOCK)
  return jnp.min(ids_of_block, axis=2), jnp.max(ids_of_block, axis=2)


def _reduce_over_tile(
  xp: Any,
  reduction: Callable[..., Any],
  x: Int[Array, "X blocks"],
  blocks_per_tile: int,
) -> Int[Array, "X blocks"]:
  """Returns, for each block, a reduction over the blocks of its tile."""
  tiles = x.reshape(x.shape[0], -1, blocks_per_tile)
  return xp.repeat(reduction(tiles, axis=2), blocks_per_tile, axis=1)


class BlockRanges(NamedTuple):
  """The ranges [start, stop) of streamed blocks for a stationary block.

  loaded_start ≤ visible_start ≤ visible_stop ≤ loaded_stop
  """

  # The blocks that are loaded for all stationary blocks of the tile.
  loaded_start: jax.Array
  loaded_stop: jax.Array
  # The blocks from the first to the last one that is visible. It may include
  # hidden blocks, which are treated as partial.
  visible_start: jax.Array
  visible_stop: jax.Array
  # The first run of full blocks. All blocks after the run are treated as
  # partial. If there is no full block, the range is
  # [visible_stop, visible_start), which is why `fold` needs no special case.
  full_start: jax.Array
  full_stop: jax.Array

  @classmethod
  def read(
    cls, table: Int[Array, "X blocks 6"], batch: Scalar, block: Scalar
  ) -> BlockRanges:
    """Reads the ranges of a stationary block, inside a kernel.

    Args:
      table: the result of `block_ranges`. Its last axis has the fields of this
        class. It has one row if all rows of the batch have the same ranges.
      batch: the row of the batch.
      block: the index of the stationary block.
    """
    row = 0 if table.shape[0] == 1 else batch
    fields = []
    for column in range(table.shape[2]):
      value = table[row, block, column]
      # JAX rejects a loop whose carry mixes values read from memory with
      # computed ones, since inside shard_map only the former are typed as
      # varying over the mesh. A sum with 0 counts as computed.
      fields.append(lax.add(value, jnp.int32(0)))
    return cls(*fields)  # The columns have the order of the fields.

  def fold(
    self,
    partial_blocks: PartialBlocks,
    process_first_block: Callable[[Scalar, Any], Any],
    process_block: Callable[[bool, Scalar, Any], Any],
    finish: Callable[[Any], Any],
    skip_block: Callable[[Scalar], None],
    initial_state: Any,
  ) -> Any:
    """Returns the state after a loop over the visible blocks.

    In a full block every query sees every key, in a partial block some. The
    loop is split in up to three: partial blocks, full blocks, partial blocks.
    So no loop needs a branch that decides whether to apply the mask.

    Args:
      partial_blocks: where the mask may leave partial blocks.
      process_first_block: (block, initial state) → state, for the first visible
        block. It may be partial.
      process_block: (is_full, block, state) → state, for later visible blocks.
      finish: state → state, called once after the last block.
      skip_block: block → None. It frees a block that was loaded for another
        stationary block of the tile, and is not visible here.
      initial_state: the state before the first block. It is returned if no
        block is visible.
    """
    has_visible = self.visible_start < self.visible_stop
    after_first = self.visible_start + 1
    process_partial_block = functools.partial(process_block, False)
    process_full_block = functools.partial(process_block, True)

    def skip_in_loop(block: Scalar, carry: None) -> None:
      skip_block(block)

    lax.fori_loop(self.loaded_start, self.visible_start, skip_in_loop, None)
    state = lax.cond(
      has_visible,
      functools.partial(process_first_block, self.visible_start),
      _identity,
      initial_state,
    )
    # Where the mask cannot leave partial blocks, all blocks are full.
    full_start = after_first
    full_stop = self.visible_stop
    if partial_blocks.before_full:
      full_start = lax.max(after_first, self.full_start)
      state = lax.fori_loop(
        after_first, full_start, process_partial_block, state
      )
    if partial_blocks.after_full:
      full_stop = lax.max(full_start, self.full_stop)
    state = lax.fori_loop(full_start, full_stop, process_full_block, state)
    if partial_blocks.after_full:
      state = lax.fori_loop(
        full_stop, self.visible_stop, process_partial_block, state
      )
    state = lax.cond(has_visible, finish, _identity, state)
    lax.fori_loop(self.visible_stop, self.loaded_stop, skip_in_loop, None)
    return state


def _identity(state: Any) -> Any:
  return state


class PartialBlocks(NamedTuple):
  """Where a mask may leave partial blocks, among streamed blocks in order."""

  before_full: bool  # before the first run of full blocks
  after_full: bool

  @classmethod
  def of(
    cls, mask: Mask, *, keys_are_stationary: bool = False
  ) -> PartialBlocks:
    """Returns where a mask may leave partial blocks.

    A stationary block meets the streamed blocks in order. Some are full: every
    query sees every key. This tells, while the kernel is compiled, whether
    partial blocks can come before the full ones, and after them.

    Args:
      mask: the mask.
      keys_are_stationary: whether blocks of queries are streamed past a block
        of keys, or blocks of keys past a block of queries.
    """
    has_window = mask.window is not None
    # Segments may begin and end anywhere.
    if keys_are_stationary:
      # Under a causal mask, the first queries that see a block of keys see only
      # some of them. Padding needs no mask: gradients of padded keys are not
      # used, and padded queries have weights of 0.
      return cls(
        before_full=mask.segments or mask.causal or has_window,
        after_full=mask.segments or has_window,
      )
    # Under a causal mask, some queries of a block do not see the last keys. The
    # last block of keys may also contain padding.
    has_padding = mask.kv_length % BLOCK > 0
    return cls(
      before_full=mask.segments or has_window,
      after_full=mask.segments or mask.causal or has_window or has_padding,
    )

  @property
  def may_exist(self) -> bool:
    """Whether any block may be partial."""
    return self.before_full or self.after_full


def first_position(
  mask: Mask, offset: Int[Array, "B"] | None, batch: Scalar
) -> Scalar:
  """Returns the position of a row's first query inside a kernel.

  Args:
    mask: the mask.
    offset: a reference to the positions. None if the mask knows the position.
    batch: the row of the batch.
  """
  if offset is None:
    return mask.offset
  return offset[batch]


def key_limits(
  mask: Mask, offset: Int[Array, "B"] | None, batch: Scalar, block: Scalar
) -> tuple[Scalar, Scalar]:
  """Returns the first and the last key that each query of a block may see.

  Both are inclusive. Segments are not considered.

  Args:
    mask: the mask.
    offset: a reference to the position of each row's first query. None if the
      mask knows it.
    batch: the row of the batch.
    block: the index of the block of queries.

  Returns:
    Two limits. A limit is an int if all queries have the same one, otherwise
    int32[BLOCK] in the layout of matrix rows.
  """
  if not mask.causal and mask.window is None:
    # The limits do not depend on positions, so any position will do. Mosaic GPU
    # cannot compile an array that is not used, so no positions are computed.
    return mask.keys_of(0, 0)
  query_index = layouts.block_iota(layouts.row())
  positions = query_index + (
    block * BLOCK + first_position(mask, offset, batch)
  )
  return mask.keys_of(positions, positions)


def query_limits(
  mask: Mask, block: Scalar
) -> tuple[jax.Array | None, jax.Array | None]:
  """Returns the positions of the first and the last query that see each key.

  Both are inclusive. Padding is not considered, because gradients of padded
  keys are not used.

  Args:
    mask: the mask.
    block: the index of the block of keys.

  Returns:
    Two limits, int32[BLOCK] in the layout of matrix rows, or None if there is
    no limit.
  """
  if not mask.causal and mask.window is None:
    return None, None
  keys = layouts.block_iota(layouts.row()) + block * BLOCK  # their positions
  if mask.window is None:
    return keys, None
  reach = mask.window - 1  # the window includes the position itself
  # A key at position p is seen from p − reach to p + reach, or under a causal
  # mask from p to p + reach.
  first_query = keys if mask.causal else keys - reach
  return first_query, keys + reach
