"""Decoding on TPU: the newest tokens of each row against its cache, in a kernel that reads only the blocks that the row sees.

A block is a page of all heads, or a part of it. The grid is the list of the rows' own blocks, one after another: it is as long as they are
together, which is known when the program runs, and no step of it is idle, however short a row is beside the others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.arguments import variant_name
from diffjax.ops.diff_attention.decode import stack, unstack
from diffjax.ops.diff_attention.tiles import (
  LOG2E,
  MASKED_LOGIT,
  Scalar,
  round_up,
)
from diffjax.ops.diff_attention.tpu import chip
from diffjax.ops.diff_attention.tpu.chip import LANES, dot, repeat
from diffjax.ops.varying import vary_like

_BLOCK_BYTES = (
  1 << 20
)  # of keys and values a step: with less the steps themselves show, with more short rows read what they do not see
_BLOCK_LOGITS = 1 << 18  # a step: 1 MiB each for logits and weights
_MOST_HEADS = 8  # a step: the body is written out for each


def attend(
  q,
  k,
  v,
  lam,
  starts,
  tables,
  k_scale,
  v_scale,
  *,
  window: int | None,
  scale: float,
):
  """`decode_attention` on TPU; the arguments are checked there.

  Raises:
    ValueError: the program is not for a TPU, or a dtype or width is not taken.
  """
  chip.generation(otherwise="xla")
  chip.check(q, v, otherwise="xla")
  cores = chip.cores()  # which share out the heads
  (B, T, H, G, _), (K, page, width), V = q.shape, k.shape[1:], v.shape[-1]
  group, itemsize = H // K, k.dtype.itemsize
  rows = round_up(
    T * group, 16 // G if q.dtype == jnp.bfloat16 else 8
  )  # of a map: the maps begin at tiles, and fill a tile of q's dtype
  tables = jnp.arange(B, dtype=jnp.int32)[:, None] if tables is None else tables
  walk = _Walk.choose(
    page, tables.shape[1], window, T, (width + V) * itemsize, K, G * rows, cores
  )
  queries = stack(
    (q.astype(jnp.float32) * (scale * LOG2E)).astype(q.dtype), k, rows
  )
  axes = _key_axis(k), _key_axis(v)
  inputs = [
    queries,
    *(
      jnp.swapaxes(x, 2, 3) if axis == 1 else x
      for x, axis in zip((k, v), axes, strict=True)
    ),
  ]
  for scales in (k_scale, v_scale):
    if scales is not None:
      inputs.append(scales.reshape(-1, K // walk.heads, 1, walk.heads))
  if lam is not None:
    by_group = jnp.swapaxes(lam.reshape(B, T, K, group), 1, 2).reshape(
      B, K, T * group, 1
    )
    inputs.append(
      jnp.pad(by_group, ((0, 0), (0, 0), (0, rows - T * group), (0, 0)))
    )
  starts, tables, *inputs = [
    vary_like(x, starts, tables, *inputs) for x in (starts, tables, *inputs)
  ]
  places = walk.places(starts, tables)

  stays = lambda heads, step, row, *_: (row[step], heads, 0, 0)
  page_of, part_of = (
    lambda step, place, f=f: f(place[step], walk.per_page)
    for f in (lax.div, lax.rem)
  )
  passes = lambda axis: (
    lambda heads, step, row, place, *_: (
      page_of(step, place),
      heads,
      *_ordered(part_of(step, place), 0, axis),
    )
  )
  spec = lambda index, *shape: pl.BlockSpec((None, walk.heads, *shape), index)
  in_specs = [spec(stays, G * rows, width)]
  in_specs += [
    spec(passes(axis), *_ordered(walk.block, n, axis))
    for n, axis in zip((width, V), axes, strict=True)
  ]
  if k_scale is not None:
    of_page = lambda heads, step, row, place, *_: (
      page_of(step, place),
      heads,
      0,
      0,
    )
    in_specs += [
      pl.BlockSpec(
        (None, None, 1, walk.heads), of_page, memory_space=pltpu.SMEM
      )
    ] * 2
  if lam is not None:
    in_specs.append(spec(stays, rows, 1))
  pairs = (
    K * G * rows * B * tables.shape[1] * page
  )  # of a query and a key, at most
  out = pl.pallas_call(
    functools.partial(
      _kernel, walk, axes, group, k_scale is not None, lam is not None
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(K // walk.heads, places.steps),
      in_specs=in_specs,
      out_specs=spec(stays, rows, V),
      scratch_shapes=[
        pltpu.VMEM((walk.heads, G * rows, lanes), jnp.float32)
        for lanes in (LANES, LANES, V)
      ],
    ),
    out_shape=jax.ShapeDtypeStruct(
      (B, K, rows, V),
      q.dtype,
      manual_axis_type=jax.typeof(inputs[0]).manual_axis_type,
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * pairs * (width + V),
      transcendentals=pairs,
      bytes_accessed=pairs // (G * rows) * (width + V) * itemsize,
    ),
    interpret=chip.interpret_mode.get(),
    name=f"diff_attention_decode_{variant_name(G, width // q.shape[-1])}",
  )(places.row, places.place, places.block, starts, *inputs)
  return unstack(out, T, group)


@dataclasses.dataclass(frozen=True)
class _Places:
  """The grid: which block of which row is read at a step.

  Attributes:
    steps: how many there are.
    row: of each step.
    place: the block of the pool that is read then: page · blocks a page + block of the page.
    block: the same, counted along the row.
  """

  steps: Int[Array, ""]
  row: Int[Array, "steps"]
  place: Int[Array, "steps"]
  block: Int[Array, "steps"]


@dataclasses.dataclass(frozen=True)
class _Walk:
  """The blocks of the cache that rows of given lengths see."""

  window: int | None
  tokens: int  # new ones a row
  page: int  # keys of a page
  pages: int  # of a row
  block: int  # keys of a block
  heads: int  # key heads of a block

  @classmethod
  def choose(
    cls,
    page: int,
    pages: int,
    window: int | None,
    tokens: int,
    key_bytes: int,
    kv_heads: int,
    rows: int,
    cores: int,
  ) -> _Walk:
    """The walk for pages of so many keys, of key_bytes bytes a head (with their values), and so many rows of queries a head."""
    fitting = min(
      _MOST_HEADS,
      _BLOCK_BYTES // (LANES * key_bytes),
      _BLOCK_LOGITS // (LANES * rows),
      max(1, kv_heads // cores),
    )
    heads = max(n for n in range(1, max(1, fitting) + 1) if kv_heads % n == 0)
    most = max(
      LANES,
      min(_BLOCK_BYTES // (heads * key_bytes), _BLOCK_LOGITS // (heads * rows))
      // LANES
      * LANES,
    )
    seen = (
      page if window is None or pages > 1 else min(page, window + tokens - 1)
    )
    return cls(
      window,
      tokens,
      page,
      pages,
      round_up(pl.cdiv(seen, pl.cdiv(seen, most)), LANES),
      heads,
    )

  @property
  def per_page(self) -> int:
    return pl.cdiv(self.page, self.block)

  def span(self, start: Scalar) -> tuple[Scalar, Scalar]:
    """The first and the last block that a row's new tokens see, of which `start` is the first one's position; 0 and 0 at least."""
    last = jnp.maximum(start + self.tokens - 1, 0)
    first = (
      0 * start
      if self.window is None
      else jnp.maximum(start - self.window + 1, 0)
    )
    block_index = lambda key: (
      lax.div(key, self.page) * self.per_page
      + lax.div(lax.rem(key, self.page), self.block)
    )
    return block_index(first), block_index(
      jnp.minimum(last, self.pages * self.page - 1)
    )

  def places(
    self, starts: Int[Array, "B"], tables: Int[Array, "B N"]
  ) -> _Places:
    """The grid for rows of these lengths. Every row has a step, in which its output is written."""
    first, last = self.span(starts)
    ends = jnp.cumsum(last - first + 1)
    most = self.pages * self.per_page
    if self.window is not None:
      apart = (
        self.window + self.tokens - 2
      )  # the last key seen from the first one
      most = min(
        most,
        pl.cdiv(apart, self.block)
        + 1
        + (pl.cdiv(apart, self.page) if self.page % self.block else 0),
      )
    step = jnp.arange(len(starts) * most)
    row = jnp.minimum(
      jnp.sum(step[:, None] >= ends, axis=1, dtype=jnp.int32), len(starts) - 1
    )
    block = jnp.minimum(
      step - ends[row] + 1 + last[row], self.pages * self.per_page - 1
    )
    return _Places(
      ends[-1],
      row,
      tables[row, block // self.per_page] * self.per_page
      + block % self.per_page,
      block,
    )


def _ordered(key: Scalar, other: Scalar, axis: int) -> tuple[Scalar, Scalar]:
  return (key, other) if axis == 0 else (other, key)


def _key_axis(cache: Float[Array, "P K S X"]) -> int:
  """The axis of keys in a block of the cache as the kernel takes it, [S, X] or [X, S]: as XLA stores it, in tiles of 8 × 128 padded least.

  Where they agree the transposition is free; where they do not, the whole cache is copied for every token.
  """
  S, X = cache.shape[2:]
  padded = lambda sublanes, lanes: (
    round_up(sublanes, 8) * round_up(lanes, LANES)
  )
  return 1 if padded(X, S) < padded(S, X) else 0


def _kernel(
  walk: _Walk,
  axes: tuple[int, int],
  group: int,
  scaled: bool,
  two_maps: bool,
  row,
  place,
  block,
  starts,
  q,
  k,
  v,
  *refs: Any,
) -> None:
  """Grid [groups of key heads, blocks of all rows]."""
  del place
  k_scale, v_scale = refs[:2] if scaled else (None, None)
  lam, out = refs[-5:-3] if two_maps else (None, refs[-4])
  peak, total, acc = refs[
    -3:
  ]  # scratch [heads, G·rows, 128] twice, and [heads, G·rows, V]; a total is spread over the lanes until the end
  heads, rows = out.shape[:2]
  step = pl.program_id(
    1
  )  # a step only indexes: in shard_map, the interpreter adds nothing to it
  start, at = starts[row[step]], block[step]
  (first, last), page = walk.span(start), lax.div(at, walk.per_page)
  begin = page * walk.page + lax.rem(at, walk.per_page) * walk.block
  end = jnp.minimum(
    begin + walk.block, (page + 1) * walk.page
  )  # of the block's keys
  every = (start + 1 >= begin + walk.block) & (
    end == begin + walk.block
  )  # whether all of its tokens see all of them
  if walk.window is not None:
    every &= start + walk.tokens - walk.window <= begin

  @pl.when(at == first)
  def _():
    peak[...] = jnp.full_like(peak, MASKED_LOGIT)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

  def attend(masked: bool) -> None:
    for head in range(heads):
      logits, values = (
        dot(q[head], k[head].astype(q.dtype), (1, 1 - axes[0])),
        v[head].astype(q.dtype),
      )
      if scaled:
        logits *= k_scale[0, head]
      if masked:
        # Row t·group + … of a map is of token t, which sees the keys up to start + t: what lies behind it is compared in rows.
        key = begin + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        of_map = lax.broadcasted_iota(jnp.int32, logits.shape, 0)
        of_map = jnp.where(of_map >= rows, of_map - rows, of_map)
        visible = (key < end) & ((key - start) * group <= of_map)
        if walk.window is not None:
          visible &= (key - start + walk.window) * group > of_map
        logits = jnp.where(visible, logits, MASKED_LOGIT)
        # Hidden values may be anything, and 0·NaN is NaN. In float32, since not every TPU selects in bfloat16.
        key = begin + lax.broadcasted_iota(jnp.int32, values.shape, axes[1])
        kept = (key < end) & (key < start + walk.tokens)
        if walk.window is not None:
          kept &= key > start - walk.window
        values = jnp.where(kept, values.astype(jnp.float32), 0).astype(
          values.dtype
        )
      before = peak[head]
      after = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
      weights, shrink = (
        jnp.exp2(logits - repeat(after, walk.block)),
        jnp.exp2(before - after),
      )
      if masked:
        weights = jnp.where(
          visible, weights, 0
        )  # a token that sees no key has weights until here
      parts = [
        weights[:, lane : lane + LANES] for lane in range(0, walk.block, LANES)
      ]
      total[head] = total[head] * shrink + functools.reduce(jnp.add, parts)
      peak[head] = after
      if scaled:
        weights *= v_scale[0, head]
      acc[head] = acc[head] * repeat(shrink, acc.shape[2]) + dot(
        weights, values, (1, axes[1])
      )

  pl.when(every)(functools.partial(attend, False))
  pl.when(~every & (start + walk.tokens > 0))(functools.partial(attend, True))

  @pl.when(at == last)
  def _():
    for head in range(heads):
      sums = jnp.sum(total[head], axis=1, keepdims=True)
      maps = acc[head] / jnp.where(
        sums == 0, 1.0, sums
      )  # 0 where the row saw no key
      out[head] = (
        maps[:rows] - lam[head] * maps[rows:] if two_maps else maps
      ).astype(out.dtype)
