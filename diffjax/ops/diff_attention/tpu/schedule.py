"""The order in which blocks of queries and keys meet in a TPU kernel, and the part of each pair that is computed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from diffjax.ops.diff_attention.mask import PER_ROW, Mask
from diffjax.ops.diff_attention.tiles import (
  Scalar,
  block_index,
  logical_and,
  logical_not,
  pad_axis,
)
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

Part = tuple[
  Scalar, int
]  # of a tile's rows or keys: where it begins in the tile, and how many they are

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
  span: int  # blocks that pass which are loaded together
  steps: int  # spans that pass, at most

  def maps_of(self, m: int) -> slice:
    """The query maps that look at map m of the keys: at the last one the noise map, at the first one all others."""
    if self.num_key_maps == 1:
      return slice(0, self.num_maps)
    return (
      slice(0, self.num_maps - 1)
      if m == 0
      else slice(self.num_maps - 1, self.num_maps)
    )

  @property
  def num_scalars(self) -> int:
    return (
      3 * (self.mask.offset == PER_ROW or self.mask.segments)
      + 4 * self.mask.segments
    )

  def tiles(self) -> tuple[int, int]:
    """Tiles that positions alone do not hide, and spans that hold any, which are loaded for each block that stays."""
    blocks, offset = (
      self.blocks,
      0 if self.mask.offset == PER_ROW else self.mask.offset,
    )
    p0, k0 = (
      offset + blocks.q * np.arange(self.q_blocks)[:, None],
      blocks.kv * np.arange(self.kv_blocks),
    )
    tiles = np.broadcast_to(
      self.mask.some(p0, p0 + blocks.q - 1, k0, k0 + blocks.kv - 1),
      (self.q_blocks, self.kv_blocks),
    )
    passing = tiles if self.keys_pass else tiles.T
    spans = (
      np.add.reduceat(
        passing, np.arange(0, passing.shape[1], self.span), axis=1
      )
      > 0
    )
    return int(np.sum(tiles)), int(np.sum(spans))

  def passing(self, scalars, b: Scalar, stays: Scalar) -> tuple[Scalar, Scalar]:
    """First and last block that pass by block `stays`; none if the last lies before the first."""
    blocks = self.blocks
    if scalars:
      index = b * (self.q_blocks if self.keys_pass else self.kv_blocks) + stays
      return scalars[1][index], scalars[2][index]
    if self.keys_pass:
      p0 = self.mask.known_offset + stays * blocks.q
      first, last = self.mask.keys_of(p0, p0 + blocks.q - 1)
      return block_index(first, blocks.kv), block_index(last, blocks.kv)
    first, last = self.mask.rows_of(
      stays * blocks.kv, (stays + 1) * blocks.kv - 1
    )
    return block_index(first, blocks.q), block_index(last, blocks.q)

  def loaded(self, scalars, b: Scalar, stays: Scalar, step: Scalar) -> Scalar:
    """The span to have at hand at a step: the last one stays where no more are to come, so that nothing is loaded."""
    first, last = (
      block_index(x, self.span) for x in self.passing(scalars, b, stays)
    )
    return jnp.minimum(first + step, jnp.maximum(last, 0))

  def each_tile(
    self, scalars, b: Scalar, stays: Scalar, step: Scalar, body: Callable
  ) -> None:
    """Runs body(block, place) for the blocks of a step's span that pass by block `stays`; place is a block's index in its span."""
    first, last = self.passing(scalars, b, stays)
    start = (block_index(first, self.span) + step) * self.span
    if self.span == 1:
      return _when(start <= last)(lambda: body(start, 0))
    lax.fori_loop(
      jnp.maximum(first, start),
      jnp.minimum(last + 1, start + self.span),
      lambda n, _: body(n, n - start),
      None,
    )

  def position(self, scalars, b: Scalar, i: Scalar) -> Scalar:
    """Position of the first query of block i."""
    offset = scalars[0][b] if self.mask.offset == PER_ROW else self.mask.offset
    return offset + i * self.blocks.q

  def visit(
    self, scalars, b: Scalar, i: Scalar, j: Scalar, body: Callable
  ) -> None:
    """Runs body(rows, keys, mask) for the sub-tiles of tile (i, j) that a query may see into.

    rows and keys say where in the tile the sub-tile begins, and how many they are; mask(q_axis, ids) gives its elementwise mask, and is
    None where all is seen.

    Sub-tiles that stand in one run of instructions overlap, and cost half to three quarters of one under a condition of its own. A tile of
    one document is one run, of the sub-tiles that positions leave. In any other tile, the sub-tiles of a strip are one run if more than
    half of them can be seen. There is one body for all strips, for the sake of the kernel's size.
    A tile of which all is seen has sub-tiles of a size of its own: larger ones serve the matrix unit better, smaller ones skip more.
    """
    blocks = self.blocks
    p0, k0 = self.position(scalars, b, i), j * blocks.kv
    rows, keys = (
      range(0, blocks.q, blocks.q_inner),
      range(0, blocks.kv, blocks.kv_inner),
    )
    corners = lambda row, key, p0, k0: (
      p0 + row,
      p0 + row + blocks.q_inner - 1,
      k0 + key,
      k0 + key + blocks.kv_inner - 1,
    )
    tile = p0, p0 + blocks.q - 1, k0, k0 + blocks.kv - 1
    some, every, equal = self.mask.some(*tile), self.mask.every(*tile), True
    if self.mask.segments:
      overlap, equal = self._ids(
        scalars, b, i, j, (0, blocks.q), (0, blocks.kv)
      )
      some = logical_and(some, overlap)

    def run(difference: int | None) -> None:
      """A tile of one document, whose first query lies so far behind its first key; None: positions hide nothing of it."""
      if difference is None:
        q, kv = blocks.subtile(is_full=True)
        for row, key in itertools.product(
          range(0, blocks.q, q), range(0, blocks.kv, kv)
        ):
          body((row, q), (key, kv), None)
        return
      for row, key in itertools.product(rows, keys):
        corner = corners(row, key, difference, 0)
        if self.mask.some(*corner):
          mask = (
            None
            if self.mask.every(*corner)
            else functools.partial(
              self._visible, row, key, difference, 0, False
            )
          )
          body((row, blocks.q_inner), (key, blocks.kv_inner), mask)

    _when(logical_and(some, every, equal))(functools.partial(run, None))
    differences = self.mask.partial_differences(
      blocks.q, blocks.kv, _MAX_BODIES
    )
    for difference in (
      differences or ()
    ):  # every tile whose first query lies so far behind its first key is cut in the same way
      _when(
        logical_and(some, logical_not(every), equal, p0 - k0 == difference)
      )(functools.partial(run, difference))
    rest = (
      logical_not(logical_and(every, equal))
      if differences is None
      else logical_not(equal)
    )
    if rest is False:
      return

    def strip(n: Scalar, _) -> None:
      start = n * (blocks.q_inner if self.keys_pass else blocks.kv_inner)
      seen, subtiles = [], []
      for row, key in (
        [(start, key) for key in keys]
        if self.keys_pass
        else [(row, start) for row in rows]
      ):
        visible = self.mask.some(*corners(row, key, p0, k0))
        if self.mask.segments:
          visible = logical_and(
            visible,
            self._ids(
              scalars, b, i, j, (row, blocks.q_inner), (key, blocks.kv_inner)
            )[0],
          )
        seen.append(visible)
        mask = functools.partial(
          self._visible, row, key, p0 - k0, k0, self.mask.segments
        )
        subtiles.append(
          functools.partial(
            body, (row, blocks.q_inner), (key, blocks.kv_inner), mask
          )
        )
      whole = 2 * sum(jnp.asarray(x).astype(jnp.int32) for x in seen) > len(
        seen
      )

      @pl.when(whole)
      def _run():
        for subtile in subtiles:
          subtile()

      for visible, subtile in zip(seen, subtiles, strict=True):
        pl.when(logical_and(visible, ~whole))(subtile)

    strips = len(rows if self.keys_pass else keys)
    _when(logical_and(some, rest))(
      lambda: lax.fori_loop(0, strips, strip, None)
    )

  def _visible(
    self,
    row: Scalar,
    key: Scalar,
    difference: Scalar,
    k0: Scalar,
    segments: bool,
    q_axis: int,
    ids,
  ) -> jax.Array | None:
    """The elementwise mask of a sub-tile, with queries along `q_axis`; ids() gives its queries' and keys' documents."""
    blocks = self.blocks
    shape = (
      (blocks.q_inner, blocks.kv_inner)
      if q_axis == 0
      else (blocks.kv_inner, blocks.q_inner)
    )
    rows, keys = (
      lax.broadcasted_iota(jnp.int32, shape, axis)
      for axis in (q_axis, 1 - q_axis)
    )
    same = operator.eq(*ids()) if segments else None
    return self.mask.visible(
      rows - keys + (difference + row - key), keys=keys + (k0 + key), same=same
    )

  def _ids(
    self, scalars, b: Scalar, i: Scalar, j: Scalar, rows: Part, keys: Part
  ) -> tuple[Scalar, Scalar]:
    """Two conditions on a part of a tile, whose rows and keys begin so far into it and are so many: the ranges of queries' and keys'
    segment ids overlap; all ids are equal."""
    q_low, q_high, kv_low, kv_high = scalars[3:]
    blocks = self.blocks

    def bounds(
      low, high, block: Scalar, size: int, inner: int, part: Part
    ) -> tuple[Scalar, Scalar]:
      start = block * (size // inner) + (
        part[0] // inner
        if isinstance(part[0], int)
        else lax.div(part[0], inner)
      )
      places = [start + n for n in range(part[1] // inner)]
      return functools.reduce(
        jnp.minimum, [low[n] for n in places]
      ), functools.reduce(jnp.maximum, [high[n] for n in places])

    q0, q1 = bounds(
      q_low, q_high, b * self.q_blocks + i, blocks.q, blocks.q_inner, rows
    )
    k0, k1 = bounds(
      kv_low, kv_high, b * self.kv_blocks + j, blocks.kv, blocks.kv_inner, keys
    )
    return logical_and(q0 <= k1, k0 <= q1), logical_and(
      q0 == q1, k0 == k1, q0 == k0
    )


def _when(condition: Scalar) -> Callable:
  if isinstance(condition, bool):
    return (
      (lambda function: function()) if condition else (lambda function: None)
    )
  return pl.when(condition)


def make_schedule(
  mask: Mask, blocks: Blocks, q, k, *, keys_pass: bool
) -> Schedule:
  """The schedule of queries [B, T, …, G, D] against keys [B, S, K, M, D], with as few steps as the mask allows where it is known."""
  q_blocks, kv_blocks = (
    pl.cdiv(q.shape[1], blocks.q),
    pl.cdiv(k.shape[1], blocks.kv),
  )
  stay, most = (q_blocks, kv_blocks) if keys_pass else (kv_blocks, q_blocks)
  span = pl.cdiv(most, pl.cdiv(most, blocks.span))  # as equal as can be
  schedule = Schedule(
    mask,
    blocks,
    q.shape[-2],
    k.shape[3],
    q_blocks,
    kv_blocks,
    keys_pass,
    span,
    0,
  )
  steps = pl.cdiv(most, span)
  if mask.offset != PER_ROW:
    ends = (schedule.passing((), 0, n) for n in range(stay))
    steps = max(
      1,
      *(
        block_index(last, span) - block_index(first, span) + 1
        for first, last in ends
      ),
    )
  elif mask.window is not None:
    sides = 1 if mask.causal else 2
    seen, size = (blocks.q, blocks.kv) if keys_pass else (blocks.kv, blocks.q)
    steps = min(
      steps, pl.cdiv(seen + sides * (mask.window - 1), size * span) + 1
    )
  return dataclasses.replace(schedule, steps=steps)


def scalars_of(
  schedule: Schedule, q_ids, kv_ids, offset, batch: int
) -> list[jax.Array]:
  """Flat int32 arrays that index maps and kernels read if the mask is data: offsets, first and last passing block, ranges of ids."""
  if not schedule.num_scalars:
    return []
  mask, blocks = schedule.mask, schedule.blocks
  offset = (
    jnp.full((batch,), mask.known_offset, jnp.int32)
    if offset is None
    else offset
  )
  p0 = (
    offset[:, None] + blocks.q * jnp.arange(schedule.q_blocks, dtype=jnp.int32)
  )[:, :, None]
  k0 = blocks.kv * jnp.arange(schedule.kv_blocks, dtype=jnp.int32)
  visible = jnp.broadcast_to(
    mask.some(p0, p0 + blocks.q - 1, k0, k0 + blocks.kv - 1),
    (batch, schedule.q_blocks, schedule.kv_blocks),
  )
  ranges = []
  if q_ids is not None:
    tiles = lambda ids, count, size: pad_axis(ids, 1, count * size).reshape(
      batch, count, size
    )
    q_tiles, kv_tiles = (
      tiles(q_ids, schedule.q_blocks, blocks.q),
      tiles(kv_ids, schedule.kv_blocks, blocks.kv),
    )
    low, high = lambda x: jnp.min(x, axis=-1), lambda x: jnp.max(x, axis=-1)
    visible &= (low(q_tiles)[:, :, None] <= high(kv_tiles)[:, None]) & (
      low(kv_tiles)[:, None] <= high(q_tiles)[:, :, None]
    )
    for ids, size in ((q_tiles, blocks.q_inner), (kv_tiles, blocks.kv_inner)):
      ranges += [low(ids.reshape(-1, size)), high(ids.reshape(-1, size))]
  axis = 2 if schedule.keys_pass else 1
  some = jnp.any(visible, axis=axis)
  first = jnp.where(some, jnp.argmax(visible, axis=axis), 0)
  last = jnp.where(
    some,
    visible.shape[axis] - 1 - jnp.argmax(jnp.flip(visible, axis), axis=axis),
    -1,
  )
  return [
    x.astype(jnp.int32).reshape(-1) for x in (offset, first, last, *ranges)
  ]
