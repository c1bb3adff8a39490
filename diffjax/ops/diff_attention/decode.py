"""Decoding: differential attention of one new token per row of a batch against its cache of keys and values.

Three implementations that agree: XLA's stands here, the kernels in the rooms `tpu` and `gpu`. Reading the cache is the whole cost, so all
read keys and values once for both maps and for all query heads that share them. Where each map has keys of its own, the cache holds them
side by side, and a query is padded with zeros where the other map's keys stand: one matrix product then gives the logits of both maps, and
the cache is never sliced or copied.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import arguments
from diffjax.ops.diff_attention.sharded import Layout
from diffjax.ops.diff_attention.tiles import HIDDEN
from diffjax.ops.platform import platform

IMPLEMENTATIONS = ("auto", "xla", "pallas_tpu", "pallas_gpu")
_ROOMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}  # whose module `decode` has a function `attend`


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
  sharding: NamedSharding | PartitionSpec | None = None,
) -> Float[Array, "B H V"]:
  """Differential attention of the newest token, out = softmax(q₁k₁ᵀ·scale)v − λ·softmax(q₂k₂ᵀ·scale)v (paper §1; §2 with M = 1).

  The token of row b has position lengths[b] − 1, and its own key and value are in the cache already. It sees keys 0 … lengths[b] − 1; what
  the cache holds beyond them is never used, not even where it is not finite. Head h reads keys and values of group ⌊h / (H/K)⌋. On a mesh,
  pass `sharding`, or wrap the call in `shard_map` yourself. The kernels have no gradient.

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
    sharding: of [B, H] over a mesh, whose axes may have any names: a NamedSharding, or a PartitionSpec for the mesh of `jax.set_mesh`.
      The cache, λ and lengths are sharded likewise. The call then runs inside `shard_map`, each device on its own rows and heads.

  Returns:
    The heads' outputs, accumulated in at least float32, in q's dtype.

  Raises:
    ValueError: an argument is unusable, or the implementation cannot take it; the message says which, and what would work.
  """
  _check_shapes(q, k, v)
  q, k, v = map(jnp.asarray, (q, k, v))
  lam = arguments.broadcast_lambda(lam, q)
  batch, cached = q.shape[0], k.shape[2]
  if not isinstance(lengths, arguments.ARRAYS) or lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
    raise ValueError(f"lengths must be int32[{batch}], the tokens in each row's cache, got {arguments.describe(lengths)}")
  lengths = jnp.clip(jnp.asarray(lengths).astype(jnp.int32), 0, cached)
  window, scale = arguments.check_window(window), arguments.check_scale(scale, q.shape[-1])
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
  if implementation == "auto":
    implementation = _pick(platform(), q, v)
  attend = functools.partial(_attend(implementation), window=None if window is None else min(window, cached), scale=scale)
  layout = None if sharding is None else Layout.of(sharding, "B H")
  if layout is None:
    return attend(q, k, v, lam, lengths)
  layout.check(0, {"B": batch})
  layout.check(1, {"H": q.shape[1], "K": k.shape[1]})
  heads = layout.spec(0, 1)
  return layout.map(attend, [(q, heads), (k, heads), (v, heads), (lam, heads), (lengths, layout.spec(0))], heads)


def _attend(implementation: str) -> Callable[..., jax.Array]:
  """(q, k, v, λ [B, H], lengths, window, scale) → [B, H, V]."""
  if implementation == "xla":
    return _xla
  return importlib.import_module(f"diffjax.ops.diff_attention.{_ROOMS[implementation]}.decode").attend


def _pick(backend: str, q: jax.Array, v: jax.Array) -> str:
  """The fastest implementation. "pallas_gpu" is not picked before it has run on a GPU."""
  picked = "xla"
  if backend == "tpu":
    from diffjax.ops.diff_attention.tpu import chip

    picked = "pallas_tpu" if chip.takes(q, v) else picked
  _log_once(picked, backend)
  return picked


@functools.cache
def _log_once(picked: str, backend: str) -> None:
  logging.getLogger(__name__).info("decode_attention: implementation %r on backend %r", picked, backend)


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
  arguments.check_arrays(q, k, v, ("B H G D", "B K S M·D", "B K S V"))
  batch, heads, num_maps, width = q.shape
  if k.shape[0] != batch:
    raise ValueError(f"k must share B = {batch} with q, got shape {k.shape}")
  arguments.check_heads(heads, k.shape[1])
  if k.shape[3] not in (width, num_maps * width):
    raise ValueError(f"k must have D = {width} (keys shared by the maps) or {num_maps}·D in its last axis, got shape {k.shape}")
  if v.shape[:3] != k.shape[:3]:
    raise ValueError(f"v must share [B, K, S] = {k.shape[:3]} with k, got shape {v.shape}")


def stack(q: Float[Array, "B H G D"], k: Float[Array, "B K S M*D"], rows: int) -> Float[Array, "B K G*rows M*D"]:
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
  logits = jnp.einsum("bknd,bksd->bkns", stack(q, k, H // K), k, preferred_element_type=dtype, precision=precision) * scale
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
