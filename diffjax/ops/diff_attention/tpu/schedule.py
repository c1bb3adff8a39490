"""The order in which blocks of queries and keys meet in a TPU kernel, and the part of each pair that is computed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from diffjax.ops.diff_attention.mask import PER_ROW, Mask
from diffjax.ops.diff_attention.tiles import Scalar, block_of, both, negate, pad
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

_MAX_BODIES = 4  # bodies for tiles that the mask cuts, each compiled for one position of the cut


@dataclasses.dataclass(frozen=True)
class Schedule:
  """All that a kernel knows while it is compiled: sizes, mask, and the order in which blocks meet.

  Forward, keys pass by a block of queries, which stays; backward, queries pass by a block of keys.
  """

  mask: Mask
  blocks: Blocks
  num_maps: int  # G
  num_key_maps: int  # M
  q_blocks: int
  kv_blocks: int
  keys_pass: bool
  steps: int  # blocks that pass, at most

  @property
  def variant(self) -> str:
    return "plain" if self.num_maps == 1 else "v2" if self.num_key_maps == 1 else "v1"

  @property
  def num_scalars(self) -> int:
    return 3 * (self.mask.offset == PER_ROW or self.mask.segments) + 4 * self.mask.segments

  def area(self) -> int:
    """Pairs of query and key in the tiles that positions alone do not hide."""
    blocks, offset = self.blocks, 0 if self.mask.offset == PER_ROW else self.mask.offset
    p0, k0 = offset + blocks.q * np.arange(self.q_blocks)[:, None], blocks.kv * np.arange(self.kv_blocks)
    tiles = np.broadcast_to(self.mask.some(p0, p0 + blocks.q - 1, k0, k0 + blocks.kv - 1), (self.q_blocks, self.kv_blocks))
    return int(np.sum(tiles)) * blocks.q * blocks.kv

  def passing(self, scalars, b: Scalar, stays: Scalar) -> tuple[Scalar, Scalar]:
    """First and last block that pass by block `stays`; none if the last lies before the first."""
    blocks = self.blocks
    if scalars:
      index = b * (self.q_blocks if self.keys_pass else self.kv_blocks) + stays
      return scalars[1][index], scalars[2][index]
    if self.keys_pass:
      p0 = self.mask.known_offset + stays * blocks.q
      first, last = self.mask.keys_of(p0, p0 + blocks.q - 1)
      return block_of(first, blocks.kv), block_of(last, blocks.kv)
    first, last = self.mask.rows_of(stays * blocks.kv, (stays + 1) * blocks.kv - 1)
    return block_of(first, blocks.q), block_of(last, blocks.q)

  def block(self, scalars, b: Scalar, stays: Scalar, step: Scalar) -> Scalar:
    """The block to have at hand at a step: the last one stays where no more are to come, so that nothing is loaded."""
    first, last = self.passing(scalars, b, stays)
    return jnp.minimum(first + step, jnp.maximum(last, 0))

  def position(self, scalars, b: Scalar, i: Scalar) -> Scalar:
    """Position of the first query of block i."""
    offset = scalars[0][b] if self.mask.offset == PER_ROW else self.mask.offset
    return offset + i * self.blocks.q

  def visit(self, scalars, b: Scalar, i: Scalar, j: Scalar, live: Scalar, body: Callable) -> None:
    """Runs body(row, key, mask) for the sub-tiles of tile (i, j) that a query may see into, unless the tile is not `live`.

    row and key say where in the tile the sub-tile begins; mask(q_axis, ids) gives its elementwise mask, and is None where all is seen.

    Sub-tiles that stand in one run of instructions overlap, and cost half to three quarters of one under a condition of its own. Where
    the mask is data, a tile is therefore computed in one run if more than three fifths of what positions show can be seen.
    """
    blocks = self.blocks
    p0, k0 = self.position(scalars, b, i), j * blocks.kv
    subtiles = list(itertools.product(range(0, blocks.q, blocks.q_inner), range(0, blocks.kv, blocks.kv_inner)))
    corners = lambda row, key, p0, k0: (p0 + row, p0 + row + blocks.q_inner - 1, k0 + key, k0 + key + blocks.kv_inner - 1)

    def known(row: int, key: int, difference: Scalar) -> tuple[bool, bool]:
      """`some` and `every` of a sub-tile as far as they are known now, where the tile's first query lies so far behind its first key. A
      difference of None says that positions hide nothing of the whole tile."""
      if not isinstance(difference, int):
        return True, difference is None
      corner = corners(row, key, difference, 0)
      return self.mask.some(*corner), self.mask.every(*corner)

    def run(difference: Scalar, k0: Scalar) -> None:
      for row, key in subtiles:
        some, every = known(row, key, difference)
        if some:
          free = every and not self.mask.segments
          body(row, key, None if free else functools.partial(self._visible, row, key, None if every else difference, k0))

    tile = p0, p0 + blocks.q - 1, k0, k0 + blocks.kv - 1
    some, every = both(live, self.mask.some(*tile)), self.mask.every(*tile)
    equal: Scalar = True
    if self.mask.segments:
      overlap, equal = self._ids(scalars, b, i, j, subtiles)
      some = both(some, overlap)

    @_when(both(some, every, equal))
    def _():
      for row, key in subtiles:
        body(row, key, None)

    partial = both(some, negate(both(every, equal)))
    differences = self.mask.partial_differences(blocks.q, blocks.kv, _MAX_BODIES)
    if differences is not None and not self.mask.segments:
      for difference in differences:  # every tile whose first query lies so far behind its first key is cut in the same way
        _when(both(partial, p0 - k0 == difference))(functools.partial(run, difference, 0))
      return

    @_when(partial)
    def _():
      seen = [self.mask.some(*corners(*x, p0, k0)) for x in subtiles]
      if self.mask.segments:
        seen = [both(positions, self._ids(scalars, b, i, j, [x])[0]) for positions, x in zip(seen, subtiles, strict=True)]
      count = sum(jnp.asarray(x).astype(jnp.int32) for x in seen)
      runs: list[tuple[Scalar, Scalar]] = [(True, p0 - k0)]
      if differences is not None:
        runs = [(every, None)] + [(both(negate(every), p0 - k0 == difference), difference) for difference in differences]
      one_by_one: Scalar = True
      for condition, difference in runs:
        whole = both(condition, 5 * count > 3 * sum(known(*x, difference)[0] for x in subtiles))
        one_by_one = both(one_by_one, negate(whole))
        _when(whole)(functools.partial(run, difference, k0))
      for (row, key), visible in zip(subtiles, seen, strict=True):
        _when(both(visible, one_by_one))(functools.partial(body, row, key, functools.partial(self._visible, row, key, p0 - k0, k0)))

  def _visible(self, row: int, key: int, difference: Scalar, k0: Scalar, q_axis: int, q_ids=None, kv_ids=None) -> jax.Array | None:
    """The elementwise mask of a sub-tile, with queries along `q_axis`; a difference of None says that positions hide nothing."""
    blocks = self.blocks
    shape = (blocks.q_inner, blocks.kv_inner) if q_axis == 0 else (blocks.kv_inner, blocks.q_inner)
    rows, keys = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (q_axis, 1 - q_axis))
    distance = positions = None
    if difference is not None:
      distance, positions = rows - keys + (difference + row - key), keys + (k0 + key)
    return self.mask.visible(distance, keys=positions, same=q_ids == kv_ids if self.mask.segments else None)

  def _ids(self, scalars, b: Scalar, i: Scalar, j: Scalar, subtiles) -> tuple[Scalar, Scalar]:
    """Two conditions: the ranges of queries' and keys' segment ids overlap; all ids are equal."""
    q_low, q_high, kv_low, kv_high = scalars[3:]
    blocks = self.blocks
    q_start, q_size = (b * self.q_blocks + i) * (blocks.q // blocks.q_inner), blocks.q_inner
    kv_start, kv_size = (b * self.kv_blocks + j) * (blocks.kv // blocks.kv_inner), blocks.kv_inner
    q_indices = [q_start + row // q_size for row in sorted({row for row, _ in subtiles})]
    kv_indices = [kv_start + key // kv_size for key in sorted({key for _, key in subtiles})]
    q_low = functools.reduce(jnp.minimum, [q_low[n] for n in q_indices])
    q_high = functools.reduce(jnp.maximum, [q_high[n] for n in q_indices])
    kv_low = functools.reduce(jnp.minimum, [kv_low[n] for n in kv_indices])
    kv_high = functools.reduce(jnp.maximum, [kv_high[n] for n in kv_indices])
    return both(q_low <= kv_high, kv_low <= q_high), both(q_low == q_high, kv_low == kv_high, q_low == kv_low)


def _when(condition: Scalar) -> Callable:
  if isinstance(condition, bool):
    return (lambda function: function()) if condition else (lambda function: None)
  return pl.when(condition)


def make_schedule(mask: Mask, blocks: Blocks, q, k, *, keys_pass: bool) -> Schedule:
  """The schedule of queries [B, T, …, G, D] against keys [B, S, K, M, D], with as few steps as the mask allows where it is known."""
  q_blocks, kv_blocks = pl.cdiv(q.shape[1], blocks.q), pl.cdiv(k.shape[1], blocks.kv)
  schedule = Schedule(mask, blocks, q.shape[-2], k.shape[3], q_blocks, kv_blocks, keys_pass, 0)
  stay, most = (q_blocks, kv_blocks) if keys_pass else (kv_blocks, q_blocks)
  if mask.offset != PER_ROW:
    most = max(1, *(last - first + 1 for first, last in (schedule.passing((), 0, n) for n in range(stay))))
  elif mask.window is not None:
    sides = 1 if mask.causal else 2
    span, size = (blocks.q, blocks.kv) if keys_pass else (blocks.kv, blocks.q)
    most = min(most, pl.cdiv(span + sides * (mask.window - 1), size) + 1)
  return dataclasses.replace(schedule, steps=most)


def scalars_of(schedule: Schedule, q_ids, kv_ids, offset, batch: int) -> list[jax.Array]:
  """Flat int32 arrays that index maps and kernels read if the mask is data: offsets, first and last passing block, ranges of ids."""
  if not schedule.num_scalars:
    return []
  mask, blocks = schedule.mask, schedule.blocks
  offset = jnp.full((batch,), mask.known_offset, jnp.int32) if offset is None else offset
  p0 = (offset[:, None] + blocks.q * jnp.arange(schedule.q_blocks, dtype=jnp.int32))[:, :, None]
  k0 = blocks.kv * jnp.arange(schedule.kv_blocks, dtype=jnp.int32)
  visible = jnp.broadcast_to(mask.some(p0, p0 + blocks.q - 1, k0, k0 + blocks.kv - 1), (batch, schedule.q_blocks, schedule.kv_blocks))
  ranges = []
  if q_ids is not None:
    tiles = lambda ids, count, size: pad(ids, 1, count * size).reshape(batch, count, size)
    q_tiles, kv_tiles = tiles(q_ids, schedule.q_blocks, blocks.q), tiles(kv_ids, schedule.kv_blocks, blocks.kv)
    low, high = lambda x: jnp.min(x, axis=-1), lambda x: jnp.max(x, axis=-1)
    visible &= (low(q_tiles)[:, :, None] <= high(kv_tiles)[:, None]) & (low(kv_tiles)[:, None] <= high(q_tiles)[:, :, None])
    for ids, size in ((q_tiles, blocks.q_inner), (kv_tiles, blocks.kv_inner)):
      ranges += [low(ids.reshape(-1, size)), high(ids.reshape(-1, size))]
  axis = 2 if schedule.keys_pass else 1
  some = jnp.any(visible, axis=axis)
  first = jnp.where(some, jnp.argmax(visible, axis=axis), 0)
  last = jnp.where(some, visible.shape[axis] - 1 - jnp.argmax(jnp.flip(visible, axis), axis=axis), -1)
  return [x.astype(jnp.int32).reshape(-1) for x in (offset, first, last, *ranges)]
