"""The order in which the TPU kernels visit blocks of queries and keys.

A tile is a block of queries against a block of keys. Along the inner axis of a
kernel's grid, one block is stationary: it stays in vector memory, together with
the sums that belong to it. The blocks of the other kind are the moving blocks,
which are loaded one after the other:

  forward: a block of queries is stationary, and blocks of keys move.
  backward: a block of keys is stationary, and blocks of queries move.

Each step of the grid loads a span, which is one or more consecutive moving
blocks. Only spans with visible blocks are loaded.

A tile is computed in sub-tiles, whose logits fit the registers. Sub-tiles that
the mask hides are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from diffjax.ops.diff_attention.mask import PER_ROW, Mask
from diffjax.ops.diff_attention.tiles import (
  Condition,
  Scalar,
  block_index,
  logical_and,
  logical_not,
  pad_axis,
)
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

# A kernel is compiled with one body for each way in which the mask cuts a tile
# by position, up to this many.
_MAX_CUT_BODIES = 4


class Interval(NamedTuple):
  """Consecutive queries or keys of a tile."""

  start: Scalar  # counted from the first query or key of the tile
  size: int


class Scalars(NamedTuple):
  """What kernels and index maps must know about a mask that depends on data.

  Flat int32 arrays, and in the kernel refs to scalar memory. All are None if
  positions are known and there are no segments. Without segments, only the
  first three are given. So the None fields are always the last ones, and
  Scalars(*arrays) restores the fields from a list without them.
  """

  offsets: Int[Array, "B"] | None = (
    None  # position of each sequence's first query
  )
  # First and last visible moving block of each stationary block.
  first_blocks: Int[Array, "B*stationary"] | None = None
  last_blocks: Int[Array, "B*stationary"] | None = None
  # Smallest and largest segment id of each sub-tile's queries and keys.
  q_min_ids: Int[Array, "B*q_subtiles"] | None = None
  q_max_ids: Int[Array, "B*q_subtiles"] | None = None
  kv_min_ids: Int[Array, "B*kv_subtiles"] | None = None
  kv_max_ids: Int[Array, "B*kv_subtiles"] | None = None


class TileCounts(NamedTuple):
  """The work of one head."""

  tiles: int  # tiles with positions that are visible
  spans: int  # spans with such tiles, summed over the stationary blocks


class SegmentComparison(NamedTuple):
  """A comparison of the segment ids of queries and keys."""

  do_overlap: Condition  # whether the ranges of the ids overlap
  are_equal: Condition  # whether all ids of queries and keys are equal


class _Tile(NamedTuple):
  """A block of queries of one sequence against a block of keys."""

  b: Scalar  # index of the sequence in the batch
  i: Scalar  # index of the block of queries
  j: Scalar  # index of the block of keys
  first_position: Scalar  # of the queries
  first_key: Scalar

  def corners(
    self, rows: Interval, keys: Interval
  ) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Returns the limits of a part of the tile, for `Mask.any_visible`.

    Example:
      With first_position = 512, the rows Interval(start=128, size=64) have the
      positions 640 to 703.

    Args:
      rows: the queries of the part, counted from the tile's first query.
      keys: the keys of the part, counted from the tile's first key.

    Returns:
      The first and the last position of the queries, and the first and the last
      key. All four are inclusive.
    """
    first_position = self.first_position + rows.start
    first_key = self.first_key + keys.start
    return (
      first_position,
      first_position + rows.size - 1,
      first_key,
      first_key + keys.size - 1,
    )


@dataclasses.dataclass(frozen=True)
class SubtileMask:
  """The elementwise mask of a sub-tile.

  Attributes:
    mask: the mask of the attention map.
    rows: the queries of the sub-tile.
    keys: the keys of the sub-tile.
    distance: position of the tile's first query, minus its first key.
    first_key: the tile's first key. It matters only where keys may be padding.
    compares_segments: whether queries and keys may differ in their segment ids.
  """

  mask: Mask
  rows: Interval
  keys: Interval
  distance: Scalar
  first_key: Scalar
  compares_segments: bool

  def visible(
    self, q_axis: int, has_same_segment: Bool[Array, "x y"] | None
  ) -> Bool[Array, "x y"]:
    """Returns a boolean matrix: where a query of the sub-tile sees a key.

    Args:
      q_axis: the axis of the queries. 0 for [rows, keys], 1 for [keys, rows].
      has_same_segment: where the segment ids of query and key are equal, in the
        shape of the result. None unless `compares_segments`.
    """
    shape = (self.rows.size, self.keys.size)
    if q_axis == 1:
      shape = (self.keys.size, self.rows.size)
    # The mask depends on the distance of a query from a key, which is
    # query − key in positions. `first_distance` is the one of element [0, 0].
    row_indices = lax.broadcasted_iota(jnp.int32, shape, q_axis)
    key_indices = lax.broadcasted_iota(jnp.int32, shape, 1 - q_axis)
    first_distance = self.distance + self.rows.start - self.keys.start
    visible = self.mask.visible(
      row_indices - key_indices + first_distance,
      keys=key_indices + (self.first_key + self.keys.start),
      same=has_same_segment,
    )
    # Sub-tiles whose keys are all visible have no SubtileMask.
    assert visible is not None
    return visible


# Computes one sub-tile. None stands for a mask that hides nothing.
SubtileBody = Callable[[Interval, Interval, SubtileMask | None], None]


@dataclasses.dataclass(frozen=True)
class Schedule:
  """What a kernel knows at compile time: its sizes, mask and order of blocks.

  Attributes:
    mask: the mask of the attention maps.
    blocks: the sizes of tiles and sub-tiles. A tile has `blocks.q` queries and
      `blocks.kv` keys.
    num_maps: G, the number of query maps.
    num_key_maps: M, the number of key maps.
    num_q_blocks: the number of query blocks.
    num_kv_blocks: the number of key blocks.
    keys_move: whether the keys move and the queries are stationary, as in the
      forward pass. In the backward pass the queries move.
    span: the number of moving blocks that are loaded together.
    steps: the number of spans that a stationary block meets, at most.
  """

  mask: Mask
  blocks: Blocks
  num_maps: int
  num_key_maps: int
  num_q_blocks: int
  num_kv_blocks: int
  keys_move: bool
  span: int
  steps: int

  @property
  def needs_scalars(self) -> bool:
    """Whether the visible blocks depend on data."""
    return self.mask.offset == PER_ROW or self.mask.segments

  def maps_of_key_map(self, key_map: int) -> slice:
    """Returns the query maps that attend to a key map.

    The last query map is the noise map. It attends to the last key map, and all
    others attend to the first. With one key map, all attend to it.

    Example:
      With G = 3 and two key maps, 0 → slice(0, 2) and 1 → slice(2, 3).
    """
    if self.num_key_maps == 1:
      return slice(0, self.num_maps)
    if key_map == 0:
      return slice(0, self.num_maps - 1)
    return slice(self.num_maps - 1, self.num_maps)

  def count_tiles(self) -> TileCounts:
    """Counts a head's tiles with visible keys, and the spans to load for them.

    A tile is a block of queries against a block of keys. One of the two blocks
    is stationary. Blocks of the other kind move: they are loaded in spans of
    `self.span` consecutive blocks. A span is counted once for each stationary
    block with which it has a visible tile.

    This is for the cost estimate, which is made at compile time. So it ignores
    segments, and counts offsets that are data as 0.
    """
    blocks = self.blocks
    offset = 0
    if self.mask.offset != PER_ROW:
      offset = self.mask.offset
    first_positions = offset + blocks.q * np.arange(self.num_q_blocks)[:, None]
    first_keys = blocks.kv * np.arange(self.num_kv_blocks)
    is_visible = self.mask.any_visible(
      first_positions,
      first_positions + blocks.q - 1,
      first_keys,
      first_keys + blocks.kv - 1,
    )
    is_visible = np.broadcast_to(
      is_visible, (self.num_q_blocks, self.num_kv_blocks)
    )

    # [stationary blocks, moving blocks]
    by_stationary_block = is_visible if self.keys_move else is_visible.T
    num_moving_blocks = by_stationary_block.shape[1]
    span_starts = np.arange(0, num_moving_blocks, self.span)
    # Sum the tiles of each span. [stationary blocks, spans]
    tiles_per_span = np.add.reduceat(by_stationary_block, span_starts, axis=1)
    return TileCounts(
      tiles=int(np.sum(is_visible)), spans=int(np.sum(tiles_per_span > 0))
    )

  def moving_blocks(
    self, scalars: Scalars, b: Scalar, stationary: Scalar
  ) -> tuple[Scalar, Scalar]:
    """Returns the first and the last moving block that a stationary one needs.

    In the forward pass, a block of queries is stationary, and the result is the
    range of key blocks that it sees. In the backward pass, a block of keys is
    stationary, and the result is the range of query blocks that see it. Both
    limits are inclusive. The range is empty if the last is below the first.

    Args:
      scalars: the ranges, if they depend on data. Otherwise its fields are
        None, and the mask alone decides.
      b: index of the sequence in the batch.
      stationary: index of the stationary block.
    """
    if scalars.first_blocks is None or scalars.last_blocks is None:
      return _moving_blocks_by_position(
        self.mask, self.blocks, self.keys_move, stationary
      )
    num_stationary = self.num_kv_blocks
    if self.keys_move:
      num_stationary = self.num_q_blocks
    # The ranges of all sequences of the batch are in one flat array.
    index = b * num_stationary + stationary
    return scalars.first_blocks[index], scalars.last_blocks[index]

  def span_to_load(
    self, scalars: Scalars, b: Scalar, stationary: Scalar, step: Scalar
  ) -> Scalar:
    """Returns the index of the span that a step of the grid loads.

    A stationary block stays in memory while the grid steps over the blocks that
    move past it, such as the keys that a block of queries sees. They are loaded
    in spans of `self.span` consecutive blocks. Step 0 loads the first span with
    a visible block, and step 1 the next one. Steps after the last visible span
    return it again. It is in memory already, so nothing is loaded.

    Example:
      If spans 2 to 4 have visible blocks, steps 0, 1, 2, 3, 4 return
      2, 3, 4, 4, 4.

    Args:
      scalars: the visible blocks, if they depend on data.
      b: index of the sequence in the batch.
      stationary: index of the stationary block.
      step: index of the step, counted from 0 for each stationary block.
    """
    first_block, last_block = self.moving_blocks(scalars, b, stationary)
    first_span = block_index(first_block, self.span)
    last_span = block_index(last_block, self.span)
    # If no block is visible, the last one is −1. The index of a span must not
    # be negative, so span 0 is loaded, and not used.
    last_span = jnp.maximum(last_span, 0)
    return jnp.minimum(first_span + step, last_span)

  def for_each_moving_block(
    self,
    scalars: Scalars,
    b: Scalar,
    stationary: Scalar,
    step: Scalar,
    body: Callable[[Scalar, Scalar], None],
  ) -> None:
    """Runs a function for each visible block of the span that a step loads.

    A span is a group of `self.span` consecutive blocks that are loaded together
    (`span_to_load`). The first and the last span may have hidden blocks.

    Example:
      If blocks 5 to 9 are visible and a span has 4 blocks, step 0 has blocks 5,
      6, 7 with the indices 1, 2, 3. Step 1 has blocks 8, 9 with 0, 1.

    Args:
      scalars: the visible blocks, if they depend on data.
      b: index of the sequence in the batch.
      stationary: index of the block that stays in memory.
      step: index of the step, counted from 0 for each stationary block.
      body: a function of a block's index, and of its index within the span.
    """
    first_block, last_block = self.moving_blocks(scalars, b, stationary)
    first_span = block_index(first_block, self.span)
    span_start = (first_span + step) * self.span  # index of its first block
    if self.span == 1:
      # One condition is cheaper than a loop. Step 0 has the first visible
      # block, so only the last one must be compared.

      @_when(span_start <= last_block)
      def _run_block() -> None:
        body(span_start, 0)

      return

    def run_block(block: Scalar, carry: None) -> None:
      del carry
      body(block, block - span_start)

    start = jnp.maximum(first_block, span_start)
    stop = jnp.minimum(last_block + 1, span_start + self.span)
    lax.fori_loop(start, stop, run_block, None)

  def for_each_subtile(
    self, scalars: Scalars, b: Scalar, i: Scalar, j: Scalar, body: SubtileBody
  ) -> None:
    """Runs body(rows, keys, mask) for the visible sub-tiles of tile (i, j).

    Consecutive sub-tiles without a condition between them overlap in time. They
    cost half to three quarters of sub-tiles under a condition each. So there
    are three kinds of tiles:

    1. All of the tile is visible. Its sub-tiles run without a mask, and have
       their own size. Larger sub-tiles use the matrix unit better, smaller ones
       skip more.
    2. The tile has one segment, and positions hide a part of it. Which part is
       known at compile time from the distance between queries and keys. Each
       such distance has its own body, without conditions.
    3. All other tiles are computed strip by strip (`_run_strip`).

    `b` is the index of a sequence in the batch. `i` is the index of a query
    block, and `j` of a key block.
    """
    blocks = self.blocks
    first_position = self._first_position(scalars, b, i)
    tile = _Tile(b, i, j, first_position, first_key=j * blocks.kv)
    last_position = tile.first_position + blocks.q - 1
    last_key = tile.first_key + blocks.kv - 1
    corners = (tile.first_position, last_position, tile.first_key, last_key)
    # A condition is a bool if the mask alone decides it.
    is_any_visible = self.mask.any_visible(*corners)
    is_all_visible = self.mask.all_visible(*corners)
    has_one_segment: Condition = True
    if self.mask.segments:
      all_rows = Interval(0, blocks.q)
      all_keys = Interval(0, blocks.kv)
      ids = self._compare_segments(scalars, tile, all_rows, all_keys)
      is_any_visible = logical_and(is_any_visible, ids.do_overlap)
      has_one_segment = ids.are_equal

    @_when(logical_and(is_any_visible, is_all_visible, has_one_segment))
    def _compute_visible_tile() -> None:
      self._run_visible_tile(body)

    cut_distances = self.mask.partial_differences(
      blocks.q, blocks.kv, _MAX_CUT_BODIES
    )
    if cut_distances is None:  # Too many distances for a body each.
      is_computed = logical_and(is_all_visible, has_one_segment)
    else:
      is_computed = has_one_segment
      for cut_distance in cut_distances:
        is_cut_here = logical_and(
          is_any_visible,
          logical_not(is_all_visible),
          has_one_segment,
          tile.first_position - tile.first_key == cut_distance,
        )
        run_cut_tile = functools.partial(self._run_cut_tile, cut_distance, body)
        _when(is_cut_here)(run_cut_tile)
    needs_strips = logical_not(is_computed)
    if needs_strips is False:
      return

    @_when(logical_and(is_any_visible, needs_strips))
    def _run_strips() -> None:
      run_strip = functools.partial(self._run_strip, scalars, tile, body)
      num_strips = blocks.kv // blocks.kv_inner
      if self.keys_move:
        num_strips = blocks.q // blocks.q_inner
      lax.fori_loop(0, num_strips, run_strip, None)

  def _run_visible_tile(self, body: SubtileBody) -> None:
    """Runs all sub-tiles of a tile in which every query sees every key.

    A sub-tile is a part of a tile whose logits fit the registers.

    Args:
      body: computes a sub-tile, given its queries, its keys and its mask. The
        mask is None here, because nothing is hidden.
    """
    blocks = self.blocks
    num_rows, num_keys = blocks.subtile(is_full=True)
    for row in range(0, blocks.q, num_rows):
      for key in range(0, blocks.kv, num_keys):
        body(Interval(row, num_rows), Interval(key, num_keys), None)

  def _run_cut_tile(self, distance: int, body: SubtileBody) -> None:
    """Runs the visible sub-tiles of a tile that positions hide in part.

    Tiles with the same distance hide the same part. So it is known at
    compile time which sub-tiles are hidden, and which need a mask.

    Args:
      distance: the position of the tile's first query, minus its first key.
      body: computes a sub-tile, given its queries, its keys and its mask, which
        is None if nothing is hidden. All tokens have the same segment.
    """
    blocks = self.blocks
    # Only the distance matters, so the keys count from 0.
    tile = _Tile(b=0, i=0, j=0, first_position=distance, first_key=0)
    for row in range(0, blocks.q, blocks.q_inner):
      for key in range(0, blocks.kv, blocks.kv_inner):
        rows = Interval(row, blocks.q_inner)
        keys = Interval(key, blocks.kv_inner)
        corners = tile.corners(rows, keys)
        if not self.mask.any_visible(*corners):
          continue
        mask = None
        if not self.mask.all_visible(*corners):
          mask = SubtileMask(
            mask=self.mask,
            rows=rows,
            keys=keys,
            distance=distance,
            first_key=0,
            compares_segments=False,
          )
        body(rows, keys, mask)

  def _run_strip(
    self,
    scalars: Scalars,
    tile: _Tile,
    body: SubtileBody,
    strip: Scalar,
    carry: None,
  ) -> None:
    """Runs the visible sub-tiles of a strip, each with a mask.

    A strip is a row of sub-tiles of a tile. Sub-tiles without a condition
    between them overlap in time. So if more than half of the strip is visible,
    all of it runs, and masks hide the rest. Otherwise, each sub-tile runs under
    a condition of its own.

    This is the body of a loop over the strips, which share the compiled code.
    That keeps kernels small.

    Args:
      scalars: segment ids, if there are segments.
      tile: the tile.
      body: computes a sub-tile, given its queries, its keys and its mask.
      strip: index of the strip in the tile.
      carry: None, because the loop has no state.
    """
    del carry
    conditions: list[Condition] = []  # whether a sub-tile is visible
    runs: list[Callable[[], None]] = []  # each computes a sub-tile
    for rows, keys in self._subtiles_of_strip(strip):
      visible = self.mask.any_visible(*tile.corners(rows, keys))
      if self.mask.segments:
        ids = self._compare_segments(scalars, tile, rows, keys)
        visible = logical_and(visible, ids.do_overlap)
      mask = SubtileMask(
        mask=self.mask,
        rows=rows,
        keys=keys,
        distance=tile.first_position - tile.first_key,
        first_key=tile.first_key,
        compares_segments=self.mask.segments,
      )
      conditions.append(visible)
      runs.append(functools.partial(body, rows, keys, mask))

    num_visible: Scalar = 0
    for visible in conditions:
      num_visible = num_visible + jnp.asarray(visible).astype(jnp.int32)
    is_mostly_visible = 2 * num_visible > len(conditions)

    @pl.when(is_mostly_visible)
    def _run_all() -> None:
      for run in runs:
        run()

    for visible, run in zip(conditions, runs, strict=True):
      pl.when(logical_and(visible, ~is_mostly_visible))(run)

  def _subtiles_of_strip(
    self, strip: Scalar
  ) -> list[tuple[Interval, Interval]]:
    """Returns the rows and keys of each sub-tile of a strip.

    A strip has all moving tokens of a tile, and a sub-tile's worth of the
    stationary ones. In the forward pass it is some queries against all keys of
    the tile, and in the backward pass some keys against all queries.
    """
    blocks = self.blocks
    if self.keys_move:  # forward
      rows = Interval(strip * blocks.q_inner, blocks.q_inner)
      starts = range(0, blocks.kv, blocks.kv_inner)
      return [(rows, Interval(start, blocks.kv_inner)) for start in starts]
    keys = Interval(strip * blocks.kv_inner, blocks.kv_inner)
    starts = range(0, blocks.q, blocks.q_inner)
    return [(Interval(start, blocks.q_inner), keys) for start in starts]

  def _first_position(self, scalars: Scalars, b: Scalar, i: Scalar) -> Scalar:
    """Returns the position of the first query of block i."""
    if self.mask.offset == PER_ROW:
      assert scalars.offsets is not None
      return scalars.offsets[b] + i * self.blocks.q
    return self.mask.offset + i * self.blocks.q

  def _compare_segments(
    self, scalars: Scalars, tile: _Tile, rows: Interval, keys: Interval
  ) -> SegmentComparison:
    """Compares the segment ids of some queries and keys of a tile.

    It compares the ranges of the ids, from the smallest to the largest. The
    ranges of all sub-tiles are in scalar memory, so no vector is read.

    Args:
      scalars: the smallest and the largest ids of all sub-tiles.
      tile: the tile.
      rows: some of its queries, which are whole sub-tiles.
      keys: some of its keys, which are whole sub-tiles.
    """
    blocks = self.blocks
    q_min, q_max = _id_range(
      scalars.q_min_ids,
      scalars.q_max_ids,
      block=tile.b * self.num_q_blocks + tile.i,
      subtiles_per_block=blocks.q // blocks.q_inner,
      subtile_size=blocks.q_inner,
      part=rows,
    )
    kv_min, kv_max = _id_range(
      scalars.kv_min_ids,
      scalars.kv_max_ids,
      block=tile.b * self.num_kv_blocks + tile.j,
      subtiles_per_block=blocks.kv // blocks.kv_inner,
      subtile_size=blocks.kv_inner,
      part=keys,
    )
    return SegmentComparison(
      # If the ranges do not overlap, no query sees any key.
      do_overlap=logical_and(q_min <= kv_max, kv_min <= q_max),
      # All ids are one id if both ranges are that single id.
      are_equal=logical_and(q_min == q_max, kv_min == kv_max, q_min == kv_min),
    )


def _moving_blocks_by_position(
  mask: Mask, blocks: Blocks, keys_move: bool, stationary: Scalar
) -> tuple[Scalar, Scalar]:
  """Returns the first and the last block that a stationary block needs.

  It considers only positions, which are known at compile time.

  Args:
    mask: the mask. Its offset is an int.
    blocks: the sizes of blocks of queries and of keys.
    keys_move: True if the stationary block has queries and needs keys, as in
      the forward pass. False if it has keys and needs queries.
    stationary: index of the stationary block.
  """
  if keys_move:
    return _visible_key_blocks(mask, blocks, stationary)
  return _visible_query_blocks(mask, blocks, stationary)


def _visible_key_blocks(
  mask: Mask, blocks: Blocks, query_block: Scalar
) -> tuple[Scalar, Scalar]:
  """Returns the first and the last block of keys that a block of queries sees.

  Example:
    Under a causal mask with blocks of 256 queries and 128 keys, query block 1
    has positions 256 to 511 and sees key blocks 0 to 3.
  """
  first_position = mask.known_offset + query_block * blocks.q
  last_position = first_position + blocks.q - 1
  first_key, last_key = mask.keys_of(first_position, last_position)
  return block_index(first_key, blocks.kv), block_index(last_key, blocks.kv)


def _visible_query_blocks(
  mask: Mask, blocks: Blocks, key_block: Scalar
) -> tuple[Scalar, Scalar]:
  """Returns the first and the last block of queries that see a block of keys.

  Queries are counted from the first one of the array, whose position is the
  mask's offset.
  """
  first_key = key_block * blocks.kv
  last_key = first_key + blocks.kv - 1
  first_query, last_query = mask.rows_of(first_key, last_key)
  return block_index(first_query, blocks.q), block_index(last_query, blocks.q)


def _id_range(
  min_ids: Any,
  max_ids: Any,
  *,
  block: Scalar,
  subtiles_per_block: int,
  subtile_size: int,
  part: Interval,
) -> tuple[Scalar, Scalar]:
  """Returns the smallest and the largest segment id of a part of a block.

  Args:
    min_ids: the smallest id of each sub-tile, of all blocks of the batch. It is
      in scalar memory, where only single elements can be read.
    max_ids: the largest ids, in the same order.
    block: index of the block in the batch.
    subtiles_per_block: the number of sub-tiles of a block.
    subtile_size: the number of tokens of a sub-tile.
    part: some tokens of the block, which are one or more whole sub-tiles.
  """
  first_subtile: Scalar  # counted from the first one of the block
  if isinstance(part.start, int):
    first_subtile = part.start // subtile_size
  else:
    first_subtile = lax.div(part.start, subtile_size)
  start = block * subtiles_per_block + first_subtile
  num_subtiles = part.size // subtile_size
  subtiles = [start + n for n in range(num_subtiles)]

  smallest = [min_ids[subtile] for subtile in subtiles]
  min_id = functools.reduce(jnp.minimum, smallest)
  largest = [max_ids[subtile] for subtile in subtiles]
  max_id = functools.reduce(jnp.maximum, largest)
  return min_id, max_id


def _when(condition: Condition) -> Callable[[Callable[[], None]], None]:
  """Returns `pl.when`, but decides at compile time if the condition is known.

  Code under a condition that is known to be false is never traced.
  """
  if not isinstance(condition, bool):
    return pl.when(condition)

  def run_if_true(function: Callable[[], None]) -> None:
    if condition:
      function()

  return run_if_true


def make_schedule(
  mask: Mask,
  blocks: Blocks,
  q: jax.Array | jax.ShapeDtypeStruct,
  k: jax.Array | jax.ShapeDtypeStruct,
  *,
  keys_move: bool,
) -> Schedule:
  """Returns the order in which a kernel visits blocks of queries and keys.

  One kind of block is stationary: it stays in memory while spans (groups of
  consecutive blocks) of the other kind are loaded, one in each step. The number
  of steps is the largest that any stationary block can need.

  Args:
    mask: the mask of the attention maps.
    blocks: the sizes of tiles and sub-tiles.
    q: queries [B, T, …, G, D]. Only the shape matters.
    k: keys [B, S, K, M, D]. Only the shape matters.
    keys_move: whether the keys move, as in the forward pass.
  """
  num_q_blocks = pl.cdiv(q.shape[1], blocks.q)
  num_kv_blocks = pl.cdiv(k.shape[1], blocks.kv)
  num_moving = num_kv_blocks if keys_move else num_q_blocks
  num_stationary = num_q_blocks if keys_move else num_kv_blocks
  # The blocks of a span: at most blocks.span. The spans are as equal as
  # possible, so that little of the last one is padding. For example, 9 blocks
  # in spans of at most 4 are 3 spans of 3.
  num_spans = pl.cdiv(num_moving, blocks.span)
  span = pl.cdiv(num_moving, num_spans)
  if mask.offset != PER_ROW:
    steps = _max_spans(mask, blocks, keys_move, num_stationary, span)
  else:
    # Positions are data, so any query may see any key within its window.
    steps = pl.cdiv(num_moving, span)
    if mask.window is not None:
      steps = min(steps, _steps_of_window(mask, blocks, keys_move, span))
  return Schedule(
    mask,
    blocks,
    num_maps=q.shape[-2],
    num_key_maps=k.shape[3],
    num_q_blocks=num_q_blocks,
    num_kv_blocks=num_kv_blocks,
    keys_move=keys_move,
    span=span,
    steps=steps,
  )


def _max_spans(
  mask: Mask, blocks: Blocks, keys_move: bool, num_stationary: int, span: int
) -> int:
  """Returns the most spans that any stationary block must load, at least 1.

  A span is a group of consecutive blocks that are loaded together.

  Args:
    mask: the mask. Its offset is an int.
    blocks: the sizes of blocks of queries and of keys.
    keys_move: whether the stationary blocks are queries, and keys are loaded.
    num_stationary: the number of stationary blocks.
    span: the number of blocks that are loaded together.
  """
  max_spans = 1
  for stationary in range(num_stationary):
    first_block, last_block = _moving_blocks_by_position(
      mask, blocks, keys_move, stationary
    )
    first_span = block_index(first_block, span)
    last_span = block_index(last_block, span)
    max_spans = max(max_spans, last_span - first_span + 1)
  return max_spans


def _steps_of_window(
  mask: Mask, blocks: Blocks, keys_move: bool, span: int
) -> int:
  """Returns how many spans any block can need at most under a window.

  The bound holds for all positions, so it can be used if they are data.

  Args:
    mask: the mask, which has a window.
    blocks: the sizes of blocks of queries and of keys.
    keys_move: True if a block of queries needs keys, False if a block of keys
      needs queries.
    span: the number of blocks that are loaded together.
  """
  if keys_move:
    stationary_size = blocks.q
    moving_size = blocks.kv
  else:
    stationary_size = blocks.kv
    moving_size = blocks.q
  # With a window of w, a query sees its own position and w − 1 earlier ones,
  # and without a causal mask also w − 1 later ones. So a block of n tokens
  # meets n − 1 tokens more than a single one.
  num_sides = 1 if mask.causal else 2
  num_visible = stationary_size + num_sides * (mask.window - 1)
  # One more, because the visible range may begin in the middle of a span.
  return pl.cdiv(num_visible, moving_size * span) + 1


def make_scalars(
  schedule: Schedule,
  q_ids: Int[Array, "B T"] | None,
  kv_ids: Int[Array, "B S"] | None,
  offset: Int[Array, "B"] | None,
  batch: int,
) -> Scalars:
  """Returns what the kernel must know about a mask that depends on data.

  Args:
    schedule: the schedule of the kernel.
    q_ids: segment ids of the queries. None without segments.
    kv_ids: segment ids of the keys. None without segments.
    offset: position of each sequence's first query. None if the mask knows it.
    batch: B.
  """
  if not schedule.needs_scalars:
    return Scalars()
  mask = schedule.mask
  blocks = schedule.blocks
  if offset is None:
    offset = jnp.full((batch,), mask.known_offset, jnp.int32)
  first_rows = blocks.q * jnp.arange(schedule.num_q_blocks, dtype=jnp.int32)
  first_positions = (offset[:, None] + first_rows)[:, :, None]
  first_keys = blocks.kv * jnp.arange(schedule.num_kv_blocks, dtype=jnp.int32)
  is_visible = jnp.broadcast_to(
    mask.any_visible(
      first_positions,
      first_positions + blocks.q - 1,
      first_keys,
      first_keys + blocks.kv - 1,
    ),
    (batch, schedule.num_q_blocks, schedule.num_kv_blocks),
  )

  id_ranges: list[jax.Array] = []
  if q_ids is not None and kv_ids is not None:
    q_ids = _ids_by_block(q_ids, schedule.num_q_blocks, blocks.q)
    kv_ids = _ids_by_block(kv_ids, schedule.num_kv_blocks, blocks.kv)
    # A tile has equal ids only if the ranges of its queries' ids
    # [B, q_blocks, 1] and of its keys' ids [B, 1, kv_blocks] overlap.
    is_q_min_below = _min_ids(q_ids)[:, :, None] <= _max_ids(kv_ids)[:, None]
    is_kv_min_below = _min_ids(kv_ids)[:, None] <= _max_ids(q_ids)[:, :, None]
    is_visible &= is_q_min_below & is_kv_min_below
    for ids, subtile in ((q_ids, blocks.q_inner), (kv_ids, blocks.kv_inner)):
      id_ranges.append(_min_ids(ids.reshape(-1, subtile)))
      id_ranges.append(_max_ids(ids.reshape(-1, subtile)))

  first_blocks, last_blocks = _visible_range(
    is_visible, axis=2 if schedule.keys_move else 1
  )
  arrays = [offset, first_blocks, last_blocks, *id_ranges]
  return Scalars(*(array.astype(jnp.int32).reshape(-1) for array in arrays))


def _visible_range(
  is_visible: Bool[Array, "B q_blocks kv_blocks"], axis: int
) -> tuple[Int[Array, "B stationary"], Int[Array, "B stationary"]]:
  """Returns the first and the last visible block along an axis.

  Example:
    [False, True, True, False] → (1, 2)
    [False, False, False, False] → (0, −1), an empty range

  Args:
    is_visible: which pairs of blocks have a visible key.
    axis: 2 for the key blocks of each query block, 1 for the query blocks of
      each key block.
  """
  num_blocks = is_visible.shape[axis]
  has_visible = jnp.any(is_visible, axis=axis)
  # argmax returns the index of the first True.
  first = jnp.where(has_visible, jnp.argmax(is_visible, axis=axis), 0)
  blocks_after_last = jnp.argmax(jnp.flip(is_visible, axis), axis=axis)
  last = jnp.where(has_visible, num_blocks - 1 - blocks_after_last, -1)
  return first, last


def _ids_by_block(
  ids: Int[Array, "B length"], num_blocks: int, size: int
) -> Int[Array, "B num_blocks size"]:
  ids = pad_axis(ids, 1, num_blocks * size)
  return ids.reshape(ids.shape[0], num_blocks, size)


def _min_ids(ids: Int[Array, "*blocks size"]) -> Int[Array, "*blocks"]:
  return jnp.min(ids, axis=-1)


def _max_ids(ids: Int[Array, "*blocks size"]) -> Int[Array, "*blocks"]:
  return jnp.max(ids, axis=-1)
