"""Decoding: differential attention of one new token per row of a batch against its cache of keys and values.

Three implementations that agree. Reading the cache is the whole cost, so all read keys and values once for both maps and for all query
heads that share them. Where each map has keys of its own, the cache holds them side by side, and a query is padded with zeros where the
other map's keys stand: one matrix product then gives the logits of both maps, and the cache is never sliced or copied.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import decode_gpu, gpu
from diffjax.ops.diff_attention.pallas_tpu import takes
from diffjax.ops.diff_attention.tiles import Scalar, block_of
from diffjax.ops.diff_attention.tpu import HIDDEN, LANES, LOG2E, dot, generation, interpret_mode, repeat, round_up
from diffjax.ops.platform import platform
from diffjax.ops.varying import vary_like

IMPLEMENTATIONS = ("auto", "xla", "pallas_tpu", "pallas_gpu")
_ARRAYS = (jax.Array, np.ndarray)
_BLOCK_BYTES = 1 << 20  # of keys and values a step: with less the steps themselves show, with more short rows read what they do not see
_BLOCK_LOGITS = 1 << 18  # a step: 1 MiB each for logits and weights


def decode_attention(
  q: Float[Array, "B H G D"],
  k: Float[Array, "B K S M*D"],
  v: Float[Array, "B K S V"],
  lam: float | Float[Array, ""] | Float[Array, "H"] | Float[Array, "B H"] | None,
  lengths: Int[Array, "B"],
  *,
  window: int | None = None,
  scale: float | None = None,
  implementation: str = "auto",
) -> Float[Array, "B H V"]:
  """Differential attention of the newest token, out = softmax(q₁k₁ᵀ·scale)v − λ·softmax(q₂k₂ᵀ·scale)v (paper §1; §2 with M = 1).

  The token of row b has position lengths[b] − 1, and its own key and value are in the cache already. It sees keys 0 … lengths[b] − 1; what
  the cache holds beyond them is never used, not even where it is not finite. Head h reads keys and values of group ⌊h / (H/K)⌋. On a mesh,
  wrap the call in `shard_map`. The kernel has no gradient.

  Args:
    q: queries of G = 2 maps, or of G = 1 for plain attention.
    k: cached keys. M = G: each map's own, those of map 1 in the first D places of the last axis, those of map 2 in the others (V1). M = 1:
      shared by the maps (V2). On TPU, S should be a multiple of 128: else XLA may store the cache otherwise than the kernel reads it, and
      copy it for every token.
    v: cached values, shared by the maps.
    lam: λ as a scalar, per head, or per row and head, for G = 2; None for G = 1. Made float32 (or q's float64).
    lengths: number of tokens in each row's cache, the new one included; 0 gives zeros, more than S counts as S.
    window: number of keys visible to the token, itself included: the last ones of its row. None for all.
    scale: factor on q·k; 1/√D by default.
    implementation: "auto" (the fastest for the backend), "xla" (any backend), "pallas_tpu" (bfloat16 and float32, D up to 256, V up to 512)
      or "pallas_gpu" (Hopper; bfloat16 and float16, D up to 128, V up to 256, G·H/K up to 64). The kernels read only the blocks of the
      cache that a row sees. A name given never falls back.

  Returns:
    The heads' outputs, accumulated in at least float32, in q's dtype.

  Raises:
    ValueError: an argument is unusable, or the implementation cannot take it; the message says which, and what would work.
  """
  _check_shapes(q, k, v)
  q, k, v = map(jnp.asarray, (q, k, v))
  lam = _broadcast_lambda(lam, q)
  batch, cached = q.shape[0], k.shape[2]
  if not isinstance(lengths, _ARRAYS) or lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
    raise ValueError(f"lengths must be int32[{batch}], the tokens in each row's cache, got {_describe(lengths)}")
  if window is not None and (not isinstance(window, numbers.Integral) or isinstance(window, bool) or window < 1):
    raise ValueError(f"window must be None or an int ≥ 1 (keys the token sees, itself included), got {window!r}")
  if scale is not None and (not isinstance(scale, numbers.Real) or isinstance(scale, bool) or not math.isfinite(scale)):
    raise ValueError(f"scale must be None (1/√D) or a finite number, got {scale!r}")
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
  if implementation == "auto":
    implementation = _pick(platform(), takes(q, v))
  return {"xla": _xla, "pallas_tpu": _pallas_tpu, "pallas_gpu": _pallas_gpu}[implementation](
    q, k, v, lam, jnp.clip(jnp.asarray(lengths).astype(jnp.int32), 0, cached),
    window=None if window is None else min(int(window), cached), scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
  )  # fmt: skip


@functools.cache
def _pick(backend: str, kernel_takes: bool) -> str:
  """Cached, so that what was picked is logged once per backend. "pallas_gpu" is not picked before it has run on a GPU."""
  picked = "pallas_tpu" if backend == "tpu" and kernel_takes else "xla"
  logging.getLogger(__name__).info("decode_attention: implementation %r on backend %r", picked, backend)
  return picked


def _describe(x) -> str:
  return f"{x.dtype} of shape {x.shape}" if isinstance(x, _ARRAYS) else repr(x)


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
  for name, array, layout in (("q", q, "[B, H, G, D]"), ("k", k, "[B, K, S, M·D]"), ("v", v, "[B, K, S, V]")):
    if not isinstance(array, _ARRAYS) or array.ndim != 4:
      raise ValueError(f"{name} must be an array {layout}, got {_describe(array)}")
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype != q.dtype:
      raise ValueError(f"{name} must be floating point and of q's dtype {q.dtype}, got {array.dtype}; cast it")
    if 0 in array.shape:
      raise ValueError(f"{name} must have no axis of size 0, got shape {array.shape}")
  (batch, heads, num_maps, width), groups = q.shape, k.shape[1]
  if num_maps not in (1, 2):
    raise ValueError(f"q must have 1 or 2 maps (axis 2), got {num_maps} in shape {q.shape}")
  if k.shape[0] != batch:
    raise ValueError(f"k must share B = {batch} with q, got shape {k.shape}")
  if heads % groups:
    raise ValueError(f"k has K = {groups} heads, which must divide q's H = {heads}")
  if k.shape[3] not in (width, num_maps * width):
    raise ValueError(f"k must have D = {width} (keys shared by the maps) or {num_maps}·D in its last axis, got shape {k.shape}")
  if v.shape[:3] != k.shape[:3]:
    raise ValueError(f"v must share [B, K, S] = {k.shape[:3]} with k, got shape {v.shape}")


def _broadcast_lambda(lam, q: jax.Array) -> Float[Array, "B H"] | None:
  batch, heads, num_maps = q.shape[:3]
  if num_maps == 1:
    if lam is not None:
      raise ValueError(f"lam must be None with one map (q's axis 2 is 1), got {_describe(lam)}")
    return None
  wanted = f"lam must be a float, or floats of shape [{heads}] or [{batch}, {heads}], with two maps (q's axis 2 is 2)"
  number = isinstance(lam, numbers.Real) and not isinstance(lam, bool)
  if not number and (
    not isinstance(lam, _ARRAYS) or lam.shape not in ((), (heads,), (batch, heads)) or not jnp.issubdtype(lam.dtype, jnp.floating)
  ):
    raise ValueError(f"{wanted}, got {_describe(lam)}")
  lam = jnp.asarray(lam)
  return jnp.broadcast_to(lam.astype(jnp.promote_types(jnp.float32, q.dtype)), (batch, heads))


def _stack(q: Float[Array, "B H G D"], k: Float[Array, "B K S M*D"], rows: int) -> Float[Array, "B K G*rows M*D"]:
  """A group's queries, map after map, each map's filled up to `rows`; a query is zero where keys of the other map stand."""
  (B, H, G, D), K, M = q.shape, k.shape[1], k.shape[3] // q.shape[3]
  q = q.reshape(B, K, H // K, G, D)
  place = lambda g: (g % M * D, (M - 1 - g % M) * D)
  maps = [jnp.pad(q[:, :, :, g], ((0, 0), (0, 0), (0, rows - H // K), place(g))) for g in range(G)]
  return jnp.concatenate(maps, axis=2)


def _xla(q, k, v, lam, lengths, *, window: int | None, scale: float):
  (B, H, G, _), (K, S), V = q.shape, k.shape[1:3], v.shape[-1]
  dtype = jnp.promote_types(jnp.float32, q.dtype)
  precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
  distance = lengths[:, None] - 1 - jnp.arange(S)
  visible = (distance >= 0) & (distance < (S if window is None else window))  # [B, S]
  logits = jnp.einsum("bknd,bksd->bkns", _stack(q, k, H // K), k, preferred_element_type=dtype, precision=precision) * scale
  maps = jax.nn.softmax(jnp.where(visible[:, None, None], logits, HIDDEN), axis=-1).reshape(B, K, G, H // K, S)
  weights = maps[:, :, 0] if lam is None else maps[:, :, 0] - lam.reshape(B, K, H // K, 1) * maps[:, :, 1]
  weights = jnp.where(visible[:, None, None], weights, 0).astype(q.dtype)  # a row that sees no key has weights until here

  product = lambda v: jnp.einsum("bkrs,bksv->bkrv", weights, v, preferred_element_type=dtype, precision=precision)
  seen = lambda v: product(jnp.where(visible[:, None, :, None], v, 0))  # without it, hidden values that are not finite would spoil the sum

  def unless_spoilt(v):
    out = product(v)
    return lax.cond(jnp.all(jnp.isfinite(out)), lambda v: out, seen, v)

  # A TPU blends hidden values out while it multiplies. A CPU would copy the values first and take three times as long over everything, so
  # there the copy is made only if the sum came out spoilt; elsewhere the host would have to wait for that answer.
  out = lax.platform_dependent(v, cpu=unless_spoilt, default=seen)
  return out.reshape(B, H, V).astype(q.dtype)


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


def _pallas_tpu(q, k, v, lam, lengths, *, window: int | None, scale: float):
  try:
    generation()
  except ValueError as error:
    backend = jax.default_backend()
    raise ValueError(f"implementation = 'pallas_tpu' needs a TPU, got backend {backend!r}; use implementation='xla' or 'auto'") from error
  if not takes(q, v):
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}) and v (V = {v.shape[-1]}) are not taken by implementation 'pallas_tpu', which takes bfloat16 and "
      "float32, D up to 256 and V up to 512: cast them, or use implementation='xla'"
    )
  (B, H, G, _), (K, S, width), V = q.shape, k.shape[1:], v.shape[-1]
  rows = round_up(H // K, 16 // G if q.dtype == jnp.bfloat16 else 8)  # of a map: the maps begin at tiles, and fill a tile of q's dtype
  key_bytes = (width + V) * q.dtype.itemsize
  walk = _Walk.choose(S, window, key_bytes, G * rows)
  queries = _stack((q.astype(jnp.float32) * (scale * LOG2E)).astype(q.dtype), k, rows)
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
    interpret=interpret_mode.get(),
    name=f"diff_attention_decode_{'plain' if G == 1 else 'v2' if width == q.shape[-1] else 'v1'}",
  )(lengths, *inputs)
  return out[:, :, : H // K].reshape(B, H, V)


def _pallas_gpu(q, k, v, lam, lengths, *, window: int | None, scale: float):
  if problem := gpu.refusal():
    raise ValueError(f"implementation = 'pallas_gpu' {problem}; use implementation='xla' or 'auto'")
  (B, H, G, _), K, V = q.shape, k.shape[1], v.shape[-1]
  rows = H // K
  if not gpu.takes(q, v) or G * rows > gpu.BLOCK:
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}, {G * rows} queries a key head) and v (V = {V}) are not taken by implementation 'pallas_gpu', "
      f"which takes bfloat16 and float16, D up to 128, {gpu.BLOCK} queries a key head and V up to 256: cast them, or use "
      "implementation='xla'"
    )
  queries = _stack((q.astype(jnp.float32) * (scale * LOG2E)).astype(q.dtype), k, rows)
  maps = decode_gpu.attend(queries, k, v, lengths, window=window).reshape(B, K, G, rows, V)
  out = maps[:, :, 0] if lam is None else maps[:, :, 0] - lam.reshape(B, K, rows, 1) * maps[:, :, 1]
  return out.reshape(B, H, V).astype(q.dtype)


def _key_axis(cache: Float[Array, "B K S X"]) -> int:
  """Where keys lie in a block of the cache as the kernel takes it, [S, X] or [X, S]: as XLA stores it, in tiles of 8 × 128 padded least.

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
