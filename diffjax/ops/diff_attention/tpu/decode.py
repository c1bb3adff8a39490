"""Decoding on TPU: the new token of each row against its cache, in a kernel that reads only the blocks that the row sees."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from diffjax.ops.diff_attention.decode import stack
from diffjax.ops.diff_attention.tiles import HIDDEN, LOG2E, Scalar, block_of, round_up
from diffjax.ops.diff_attention.tpu import chip
from diffjax.ops.diff_attention.tpu.chip import LANES, dot, repeat
from diffjax.ops.varying import vary_like

_BLOCK_BYTES = 1 << 20  # of keys and values a step: with less the steps themselves show, with more short rows read what they do not see
_BLOCK_LOGITS = 1 << 18  # a step: 1 MiB each for logits and weights


def attend(q, k, v, lam, lengths, *, window: int | None, scale: float):
  """`decode_attention` on TPU; the arguments are checked there.

  Raises:
    ValueError: the program is not for a TPU, or a dtype or width is not taken.
  """
  chip.generation(otherwise="xla")
  chip.check(q, v, otherwise="xla")
  (B, H, G, _), (K, S, width), V = q.shape, k.shape[1:], v.shape[-1]
  rows = round_up(H // K, 16 // G if q.dtype == jnp.bfloat16 else 8)  # of a map: the maps begin at tiles, and fill a tile of q's dtype
  key_bytes = (width + V) * q.dtype.itemsize
  walk = _Walk.choose(S, window, key_bytes, G * rows)
  queries = stack((q.astype(jnp.float32) * (scale * LOG2E)).astype(q.dtype), k, rows)
  axes = _key_axis(k), _key_axis(v)
  inputs = [queries, *(jnp.swapaxes(x, 2, 3) if axis == 1 else x for x, axis in zip((k, v), axes, strict=True))]
  if lam is not None:
    inputs.append(jnp.pad(lam.reshape(B, K, H // K, 1), ((0, 0), (0, 0), (0, rows - H // K), (0, 0))))
  lengths, *inputs = [vary_like(x, lengths, *inputs) for x in (lengths, *inputs)]
  place = lambda key, other, axis: (key, other) if axis == 0 else (other, key)
  stays = lambda b, group, step, lengths: (b, group, 0, 0)
  passes = lambda axis: lambda b, group, step, lengths: (b, group, *place(walk.at(lengths[b], step)[0], 0, axis))
  spec = lambda index, *shape: pl.BlockSpec((None, None, *shape), index)
  cached = [spec(passes(axis), *place(walk.block, n, axis)) for n, axis in zip((width, V), axes, strict=True)]
  pairs = B * K * G * rows * walk.steps * walk.block  # of a query and a key, at most
  out = pl.pallas_call(
    functools.partial(_kernel, walk, axes),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(B, K, walk.steps),
      in_specs=[spec(stays, G * rows, width), *cached] + [spec(stays, rows, 1)] * (lam is not None),
      out_specs=spec(stays, rows, V),
      scratch_shapes=[pltpu.VMEM((G * rows, lanes), jnp.float32) for lanes in (LANES, LANES, V)],
    ),
    out_shape=jax.ShapeDtypeStruct((B, K, rows, V), q.dtype, manual_axis_type=jax.typeof(inputs[0]).manual_axis_type),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    cost_estimate=pl.CostEstimate(flops=2 * pairs * (width + V), transcendentals=pairs, bytes_accessed=pairs // (G * rows) * key_bytes),
    interpret=chip.interpret_mode.get(),
    name=f"diff_attention_decode_{'plain' if G == 1 else 'v2' if width == q.shape[-1] else 'v1'}",
  )(lengths, *inputs)
  return out[:, :, : H // K].reshape(B, H, V)


@dataclasses.dataclass(frozen=True)
class _Walk:
  """The blocks of the cache that a row of a given length sees."""

  window: int | None
  block: int  # keys of a block
  steps: int  # blocks that any row sees, at most

  @classmethod
  def choose(cls, cached: int, window: int | None, key_bytes: int, rows: int) -> _Walk:
    """The walk for a cache of so many keys, of key_bytes bytes each (with their values), and so many rows of queries."""
    most = max(LANES, min(_BLOCK_BYTES // key_bytes, _BLOCK_LOGITS // rows) // LANES * LANES)
    seen = cached if window is None else window
    block = round_up(pl.cdiv(seen, pl.cdiv(seen, most)), LANES)
    blocks = pl.cdiv(cached, block)
    return cls(window, block, blocks if window is None else min(blocks, pl.cdiv(window - 1, block) + 1))

  def first_key(self, length: Scalar) -> Scalar:
    return 0 if self.window is None else jnp.maximum(length - self.window, 0)

  def at(self, length: Scalar, step: Scalar) -> tuple[Scalar, Scalar]:
    """The block to have at hand at a step, and whether it is to be computed. The last one stays, so that nothing is loaded in vain."""
    last = block_of(length - 1, self.block)
    block = block_of(self.first_key(length), self.block) + step
    return jnp.minimum(block, jnp.maximum(last, 0)), block <= last


def _key_axis(cache: Float[Array, "B K S X"]) -> int:
  """The axis of keys in a block of the cache as the kernel takes it, [S, X] or [X, S]: as XLA stores it, in tiles of 8 × 128 padded least.

  Where they agree the transposition is free; where they do not, the whole cache is copied for every token.
  """
  S, X = cache.shape[2:]
  padded = lambda sublanes, lanes: round_up(sublanes, 8) * round_up(lanes, LANES)
  return 1 if padded(X, S) < padded(S, X) else 0


def _kernel(walk: _Walk, axes: tuple[int, int], lengths, q, k, v, *refs) -> None:
  """Grid [B, K, blocks that a row sees]."""
  *lam, out, peak, total, acc = refs  # scratch [G·rows, 128] twice, and [G·rows, V]; a row's total is spread over the lanes until the end
  step, length = pl.program_id(2), lengths[pl.program_id(0)]
  block, live = walk.at(length, step)
  first, start = walk.first_key(length), block * walk.block
  every = (start >= first) & (start + walk.block <= length)

  @pl.when(step == 0)
  def _():
    peak[...] = jnp.full_like(peak, HIDDEN)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

  def attend(masked: bool) -> None:
    logits, values = dot(q[...], k[...], (1, 1 - axes[0])), v[...]
    if masked:
      visible = lambda keys: (keys >= first) & (keys < length)
      logits = jnp.where(visible(start + lax.broadcasted_iota(jnp.int32, logits.shape, 1)), logits, HIDDEN)
      # Hidden values may be anything, and 0·NaN is NaN. In float32, since not every TPU selects in bfloat16.
      kept = visible(start + lax.broadcasted_iota(jnp.int32, values.shape, axes[1]))
      values = jnp.where(kept, values.astype(jnp.float32), 0).astype(values.dtype)
    before = peak[...]
    after = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    weights, shrink = jnp.exp2(logits - repeat(after, walk.block)), jnp.exp2(before - after)
    parts = [weights[:, lane : lane + LANES] for lane in range(0, walk.block, LANES)]
    total[...] = total[...] * shrink + functools.reduce(jnp.add, parts)
    peak[...] = after
    acc[...] = acc[...] * repeat(shrink, acc.shape[1]) + dot(weights, values, (1, axes[1]))

  pl.when(live & every)(functools.partial(attend, False))
  pl.when(live & ~every)(functools.partial(attend, True))

  @pl.when(step == walk.steps - 1)
  def _():
    sums = jnp.sum(total[...], axis=1, keepdims=True)
    maps = acc[...] / jnp.where(sums == 0, 1.0, sums)  # 0 where the row saw no key
    rows = out.shape[0]
    out[...] = (maps[:rows] - lam[0][...] * maps[rows:] if lam else maps).astype(out.dtype)
