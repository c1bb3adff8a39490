"""Differential attention, the operation that users call: it checks arguments, broadcasts λ, shards the call and picks an implementation."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import arguments, implementations, vjp
from diffjax.ops.diff_attention.choice import choose
from diffjax.ops.diff_attention.mask import PER_ROW, Mask, Windows
from diffjax.ops.diff_attention.ring import ring
from diffjax.ops.diff_attention.sharded import (
  TOKEN_ORDERS,
  AxisSharding,
  TokenSharding,
  gathered_attention,
)
from diffjax.ops.platform import platform


def diff_attention(
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: float
  | Float[Array, ""]
  | Float[Array, "H"]
  | Float[Array, "B T H"]
  | None = None,
  *,
  q_segment_ids: Int[Array, "B T"] | None = None,
  kv_segment_ids: Int[Array, "B S"] | None = None,
  q_offset: int | Int[Array, "B"] = 0,
  causal: bool = True,
  window: int | None | Windows = None,
  scale: float | None = None,
  implementation: str = "auto",
  sharding: NamedSharding | PartitionSpec | None = None,
  token_order: str = "given",
) -> Float[Array, "B T H V"]:
  """Differential attention, out = softmax(q₁k₁ᵀ·scale)v − λ·softmax(q₂k₂ᵀ·scale)v (paper §1; §2 with M = 1).

  Of a group's maps the last is the noise map. Two maps are one head, H = Q. With more, H = Q·(G − 1): each of the others is a signal map
  and a head of its own, and the noise map is subtracted from all (grouped differential attention, arXiv:2510.06949). Group g reads keys and
  values of key head ⌊g / (Q/K)⌋. The key at index s has position s, the query at row t has position q_offset + t.
  A query that sees no key returns zeros and passes no gradient. On a mesh, pass `sharding`, or wrap the call in `shard_map` yourself: block
  sizes are chosen from the shapes that one device sees.

  Args:
    q: queries of G = 2 maps, of more whose last is the noise map, or of G = 1 for plain attention.
    k: keys; M = 2 gives the signal maps and the noise map each their own (V1), M = 1 shares them (V2).
    v: values, shared by the maps.
    lam: λ as a scalar, per head, or per token and head; None for G = 1. Made float32 (or q's float64).
    q_segment_ids: document of each query: a query sees only keys with an equal id. 0 is an id like any other.
    kv_segment_ids: document of each key. Defaults to q_segment_ids where T = S.
    q_offset: position of the first query: an int, which lets blocks that the mask hides be skipped, or int32[B].
    causal: whether a query sees only keys up to its own position.
    window: number of keys visible to a query, itself included: query p sees keys in (p − window, p]. Without causal it is symmetric:
      |p − key position| < window. `Windows` for one of several, which data choose: all are compiled, and one runs.
    scale: factor on q·k; 1/√D by default.
    implementation: "auto" (the fastest for the backend), "reference", "chunked", "two_call", "pallas_tpu" or "pallas_gpu" (Hopper), or a
      name given to `register`. A name given never falls back.
    sharding: of [B, T, H] over a mesh, whose axes may have any names: a NamedSharding, or a PartitionSpec for the mesh of `jax.set_mesh`.
      Keys, values, λ and ids are sharded likewise. The call then runs inside `shard_map`, each device on its own rows and heads. Where T is
      sharded, keys and values travel from device to device, in a ring; they are gathered if the implementation has no partial results (all
      but "chunked" and "pallas_tpu"), q_offset is an array or T ≠ S. None: the call is not sharded, or is inside `shard_map` already.
    token_order: "given"; or "balanced" where T is sharded and the caller has put the tokens of each row in the order of `balanced_order`,
      which gives all devices the same work.

  Returns:
    The heads' outputs, in q's dtype.

  Raises:
    ValueError: an argument is unusable, or the implementation cannot take it; the message says which, and what would work.
  """
  if isinstance(window, Windows):
    of_size = [
      functools.partial(
        diff_attention,
        window=size,
        causal=causal,
        scale=scale,
        implementation=implementation,
        sharding=sharding,
        token_order=token_order,
      )
      for size in window.sizes
    ]
    arrays = dict(
      q=q,
      k=k,
      v=v,
      lam=lam,
      q_segment_ids=q_segment_ids,
      kv_segment_ids=kv_segment_ids,
    )
    branches = [
      lambda arrays, attend=attend: attend(**arrays, q_offset=q_offset)
      for attend in of_size
    ]
    return jax.lax.switch(window.which, branches, arrays)
  _check_shapes(q, k, v)
  lam = arguments.broadcast_lambda(lam, q)
  q_segment_ids, kv_segment_ids = _check_segments(
    q_segment_ids, kv_segment_ids, q.shape[0], q.shape[1], k.shape[1]
  )
  q_offset = _check_offset(q_offset, q.shape[0])
  window, scale = (
    arguments.check_window(window),
    arguments.check_scale(scale, q.shape[-1]),
  )
  if implementation not in implementations.names():
    raise ValueError(
      f"implementation must be one of {', '.join(implementations.names())}, got {implementation!r}"
    )
  if token_order not in TOKEN_ORDERS:
    raise ValueError(
      f"token_order must be one of {', '.join(TOKEN_ORDERS)}, got {token_order!r}"
    )
  attend = functools.partial(
    _attend,
    causal=bool(causal),
    window=window,
    scale=scale,
    implementation=implementation,
  )
  layout = None if sharding is None else AxisSharding.of(sharding, "B T H")
  if layout is None:
    return attend(q, k, v, lam, q_segment_ids, kv_segment_ids, q_offset)
  return _attend_sharded(
    attend,
    layout,
    token_order,
    q,
    k,
    v,
    lam,
    q_segment_ids,
    kv_segment_ids,
    q_offset,
  )


def _attend(
  q,
  k,
  v,
  lam,
  q_ids,
  kv_ids,
  q_offset,
  *,
  causal: bool,
  window: int | None,
  scale: float,
  implementation: str,
  tokens=None,
) -> jax.Array:
  """The operation on one device's arrays; with `tokens` (TokenSharding), on its part of rows that several devices share."""
  pairs = arguments.repeat_noise_maps(q)
  static = isinstance(q_offset, int)
  mask = Mask(
    q.shape[1],
    k.shape[1],
    causal,
    window,
    q_offset if static else PER_ROW,
    segments=q_ids is not None,
  )
  if implementation == "auto":
    device_mask = mask
    if tokens is not None:
      # A device learns the position of its part of a row only at run time.
      device_mask = dataclasses.replace(mask, offset=PER_ROW)
    choice = choose(platform(), pairs, k, v, device_mask)
    implementation = choice.implementation
  chosen = implementations.implementation_of(implementation)
  if tokens is not None:
    if not (
      chosen.partial is not None and static and mask.q_length == mask.kv_length
    ):
      own = functools.partial(
        _attend,
        causal=causal,
        window=window,
        scale=scale,
        implementation=implementation,
      )
      return gathered_attention(
        own, tokens, q, k, v, lam, q_ids, kv_ids, q_offset
      )
    chosen = ring(chosen, tokens)
  q = q if chosen.takes_groups else pairs
  arrays = vjp.Arrays(q, k, v, lam, q_ids, kv_ids, None if static else q_offset)
  return vjp.attend(chosen, arrays, mask, scale)


def _attend_sharded(
  attend,
  layout: AxisSharding,
  token_order: str,
  q,
  k,
  v,
  lam,
  q_ids,
  kv_ids,
  q_offset,
) -> jax.Array:
  """The operation inside `shard_map`."""
  layout.check(0, {"B": q.shape[0]})
  layout.check(
    1,
    {"T": q.shape[1], "S": k.shape[1]},
    multiple=2 if token_order == "balanced" and layout.shards(1) > 1 else 1,
  )
  layout.check(2, {"Q": q.shape[2], "K": k.shape[2]})
  offset = None if isinstance(q_offset, int) else q_offset

  tokens = (
    TokenSharding(layout.axes[1], layout.shards(1), token_order)
    if layout.shards(1) > 1
    else None
  )

  def local(q, k, v, lam, q_ids, kv_ids, offset):
    return attend(
      q,
      k,
      v,
      lam,
      q_ids,
      kv_ids,
      q_offset if offset is None else offset,
      tokens=tokens,
    )

  heads, ids = layout.spec(0, 1, 2), layout.spec(0, 1)
  operands = [
    (q, heads),
    (k, heads),
    (v, heads),
    (lam, heads),
    (q_ids, ids),
    (kv_ids, ids),
    (offset, layout.spec(0)),
  ]
  return layout.map(local, operands, heads)


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
  arguments.check_arrays(q, k, v, ("B T Q G D", "B S K M D", "B S K V"))
  if k.shape[3] not in (1, min(q.shape[3], 2)):
    raise ValueError(
      f"k must have 1 map{', or 2' * (q.shape[3] > 1)} (axis 3), got {k.shape[3]} in shape {k.shape}"
    )
  if k.shape[0] != q.shape[0] or k.shape[4] != q.shape[4]:
    raise ValueError(
      f"k must share B and D with q, got shape {k.shape} beside {q.shape}"
    )
  arguments.check_heads(q.shape[2], k.shape[2])
  if v.shape[:3] != k.shape[:3]:
    raise ValueError(
      f"v must share [B, S, K] = {k.shape[:3]} with k, got shape {v.shape}"
    )


def _check_segments(q_ids, kv_ids, batch: int, q_length: int, kv_length: int):
  if q_ids is None and kv_ids is not None:
    raise ValueError(
      "q_segment_ids must be given with kv_segment_ids, got None"
    )
  if q_ids is not None and kv_ids is None:
    if q_length != kv_length:
      raise ValueError(
        f"kv_segment_ids must be given where T ≠ S (here {q_length} and {kv_length}), got None"
      )
    kv_ids = q_ids
  for name, ids, length in (
    ("q_segment_ids", q_ids, q_length),
    ("kv_segment_ids", kv_ids, kv_length),
  ):
    if ids is None:
      continue
    if ids.shape != (batch, length) or not jnp.issubdtype(
      ids.dtype, jnp.integer
    ):
      raise ValueError(
        f"{name} must be integers [{batch}, {length}], got {ids.dtype} of shape {ids.shape}"
      )
  return q_ids, kv_ids


def _check_offset(q_offset: Any, batch: int) -> int | jax.Array:
  if isinstance(q_offset, numbers.Integral) and not isinstance(q_offset, bool):
    return int(q_offset)
  if (
    isinstance(q_offset, (jax.Array, np.ndarray))
    and q_offset.shape in ((), (batch,))
    and jnp.issubdtype(q_offset.dtype, jnp.integer)
  ):
    return jnp.broadcast_to(q_offset, (batch,)).astype(jnp.int32)
  raise ValueError(
    f"q_offset must be an int or int32[B] with B = {batch}, got {arguments.describe(q_offset)}"
  )
