"""The one door to differential attention: checks the arguments, broadcasts λ, picks an implementation."""

from __future__ import annotations

import functools
import logging
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import pallas_gpu, pallas_tpu
from diffjax.ops.diff_attention.chunked import chunked
from diffjax.ops.diff_attention.reference import reference
from diffjax.ops.diff_attention.two_call import cudnn_takes, two_call
from diffjax.ops.platform import platform

_FUNCTIONS = {
  "reference": reference, "chunked": chunked, "two_call": two_call,
  "pallas_tpu": pallas_tpu.pallas_tpu, "pallas_gpu": pallas_gpu.pallas_gpu,
}  # fmt: skip
IMPLEMENTATIONS = ("auto", *_FUNCTIONS)


def diff_attention(
  q: Float[Array, "B T H G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: float | Float[Array, ""] | Float[Array, "H"] | Float[Array, "B T H"] | None = None,
  *,
  q_segment_ids: Int[Array, "B T"] | None = None,
  kv_segment_ids: Int[Array, "B S"] | None = None,
  q_offset: int | Int[Array, "B"] = 0,
  causal: bool = True,
  window: int | None = None,
  scale: float | None = None,
  implementation: str = "auto",
) -> Float[Array, "B T H V"]:
  """Differential attention, out = softmax(q₁k₁ᵀ·scale)v − λ·softmax(q₂k₂ᵀ·scale)v (paper §1; §2 with M = 1).

  Head h reads keys and values of group ⌊h / (H/K)⌋. The key at index s has position s, the query at row t has position q_offset + t.
  A query that sees no key returns zeros and passes no gradient. On a mesh, wrap the call in `shard_map`: block sizes are chosen from the
  shapes seen here.

  Args:
    q: queries of G = 2 maps, or of G = 1 for plain attention.
    k: keys; M = G gives each map its own (V1), M = 1 shares them (V2).
    v: values, shared by the maps.
    lam: λ as a scalar, per head, or per token and head, for G = 2; None for G = 1. Made float32 (or q's float64).
    q_segment_ids: document of each query: a query sees only keys with an equal id. 0 is an id like any other.
    kv_segment_ids: document of each key. Defaults to q_segment_ids where T = S.
    q_offset: position of the first query: an int, which lets blocks that the mask hides be skipped, or int32[B].
    causal: whether a query sees only keys up to its own position.
    window: number of keys visible to a query, itself included: query p sees keys in (p − window, p]. Without causal it is symmetric:
      |p − key position| < window.
    scale: factor on q·k; 1/√D by default.
    implementation: "auto" (the fastest for the backend), "reference", "chunked", "two_call", "pallas_tpu" or "pallas_gpu" (Hopper). A name
      given never falls back.

  Returns:
    The heads' outputs, in q's dtype.

  Raises:
    ValueError: an argument is unusable, or the implementation cannot take it; the message says which, and what would work.
  """
  _check_shapes(q, k, v)
  batch, length, heads = q.shape[:3]
  lam = _broadcast_lambda(lam, q)
  q_segment_ids, kv_segment_ids = _check_segments(q_segment_ids, kv_segment_ids, batch, length, k.shape[1])
  q_offset = _check_offset(q_offset, batch)
  if window is not None and (not isinstance(window, numbers.Integral) or isinstance(window, bool) or window < 1):
    raise ValueError(f"window must be None or an int ≥ 1 (keys a query sees, itself included), got {window!r}")
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
  if implementation == "auto":
    stock = isinstance(q_offset, int) and q_offset == 0 and window is None and cudnn_takes(q, v, q_segment_ids is not None)
    implementation = _pick(platform(), pallas_tpu.takes(q, v), stock)
  return _FUNCTIONS[implementation](
    q, k, v, lam,
    q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids, q_offset=q_offset,
    causal=bool(causal), window=None if window is None else int(window), scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
  )  # fmt: skip


@functools.cache
def _pick(backend: str, kernel_takes: bool, cudnn_takes: bool) -> str:
  """Cached, so that what was picked is logged once per backend. "pallas_gpu" is not picked before it has run on a GPU."""
  picked = "pallas_tpu" if backend == "tpu" and kernel_takes else "two_call" if backend == "gpu" and cudnn_takes else "chunked"
  logging.getLogger(__name__).info("diff_attention: implementation %r on backend %r", picked, backend)
  return picked


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
  for name, array, layout in (("q", q, "B T H G D"), ("k", k, "B S K M D"), ("v", v, "B S K V")):
    if array.ndim != len(layout.split()):
      raise ValueError(f"{name} must be [{layout.replace(' ', ', ')}], got shape {array.shape}")
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype != q.dtype:
      raise ValueError(f"{name} must be floating point and of q's dtype {q.dtype}, got {array.dtype}; cast it")
    if 0 in array.shape:
      raise ValueError(f"{name} must have no axis of size 0, got shape {array.shape}")
  if q.shape[3] not in (1, 2):
    raise ValueError(f"q must have 1 or 2 maps (axis 3), got {q.shape[3]} in shape {q.shape}")
  if k.shape[3] not in (1, q.shape[3]):
    raise ValueError(f"k must have 1 map or q's {q.shape[3]} (axis 3), got {k.shape[3]} in shape {k.shape}")
  if k.shape[0] != q.shape[0] or k.shape[4] != q.shape[4]:
    raise ValueError(f"k must share B and D with q, got shape {k.shape} beside {q.shape}")
  if q.shape[2] % k.shape[2]:
    raise ValueError(f"k has K = {k.shape[2]} heads, which must divide q's H = {q.shape[2]}")
  if v.shape[:3] != k.shape[:3]:
    raise ValueError(f"v must share [B, S, K] = {k.shape[:3]} with k, got shape {v.shape}")


def _broadcast_lambda(lam, q: jax.Array) -> jax.Array | None:
  """λ as [B, T, H], broadcast outside the custom VJP, so that autodiff reduces its gradient to whatever shape it had."""
  batch, length, heads, num_maps = q.shape[:4]
  if num_maps == 1:
    if lam is not None:
      raise ValueError(f"lam must be None with one map (q's axis 3 is 1), got {lam!r}")
    return None
  if lam is None:
    raise ValueError("lam must be a scalar, [H] or [B, T, H] with two maps (q's axis 3 is 2), got None")
  lam = jnp.asarray(lam)
  if lam.shape not in ((), (heads,), (batch, length, heads)):
    raise ValueError(f"lam must be a scalar, [{heads}] or [{batch}, {length}, {heads}], got shape {lam.shape}")
  return jnp.broadcast_to(lam.astype(jnp.promote_types(jnp.float32, q.dtype)), (batch, length, heads))


def _check_segments(q_ids, kv_ids, batch: int, q_length: int, kv_length: int):
  if q_ids is None and kv_ids is not None:
    raise ValueError("q_segment_ids must be given with kv_segment_ids, got None")
  if q_ids is not None and kv_ids is None:
    if q_length != kv_length:
      raise ValueError(f"kv_segment_ids must be given where T ≠ S (here {q_length} and {kv_length}), got None")
    kv_ids = q_ids
  for name, ids, length in (("q_segment_ids", q_ids, q_length), ("kv_segment_ids", kv_ids, kv_length)):
    if ids is None:
      continue
    if ids.shape != (batch, length) or not jnp.issubdtype(ids.dtype, jnp.integer):
      raise ValueError(f"{name} must be integers [{batch}, {length}], got {ids.dtype} of shape {ids.shape}")
  return q_ids, kv_ids


def _check_offset(q_offset, batch: int):
  if isinstance(q_offset, numbers.Integral) and not isinstance(q_offset, bool):
    return int(q_offset)
  if isinstance(q_offset, (jax.Array, np.ndarray)) and q_offset.shape in ((), (batch,)) and jnp.issubdtype(q_offset.dtype, jnp.integer):
    return jnp.broadcast_to(q_offset, (batch,)).astype(jnp.int32)
  got = f"{q_offset.dtype} of shape {q_offset.shape}" if hasattr(q_offset, "shape") else repr(q_offset)
  raise ValueError(f"q_offset must be an int or int32[B] with B = {batch}, got {got}")
