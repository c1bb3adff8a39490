"""Attention by the definition of a variant: its weights times the values.

`diff_attention` computes some variants without storing their weights. Other
variants define `Attention.weights` alone. `by_definition` makes an
`attention_fn` from that definition. Whoever supplies a layer's `attention_fn`
is covered: a decoder, a mesh, a scan of layers with several windows, and the
key/value cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from diffjax.ops.diff_attention import balanced_order, diff_attention
from diffjax.ops.diff_attention.mask import Mask, positions

# (q, k, lam, mask) → weights [B, H, T, S]; see `Attention.weights`.
WeightsFn = Callable[..., Float[Array, "B H T S"]]

# A window that every key is in, for a window that is an array. It is far from
# the largest int32, so that differences of positions do not overflow.
ALL_KEYS = 2**30

# Options of `diff_attention` that do not change what it computes.
EXECUTION_OPTIONS = {"implementation", "sharding", "token_order"}


def is_diff_attention(attention_fn: Callable[..., jax.Array]) -> bool:
  """Returns True for functions that compute the same as `diff_attention`.

  These are `diff_attention` and a `functools.partial` of it with options that
  choose only how it is executed. Another function of the same result may be
  called in their place.
  """
  if not isinstance(attention_fn, functools.partial):
    return attention_fn is diff_attention
  if attention_fn.args or attention_fn.func is not diff_attention:
    return False
  return attention_fn.keywords.keys() <= EXECUTION_OPTIONS


def by_definition(
  attention_fn: Callable[..., jax.Array],
  weights_fn: WeightsFn,
  supports: Set[str],
) -> Callable[..., jax.Array]:
  """Returns an `attention_fn` that computes the weights, and then the heads.

  It takes the place of an `attention_fn` that calls `diff_attention`. Its λ is
  a result of `broadcast_lambda`.

  Args:
    attention_fn: the layer's `attention_fn`. It is `diff_attention`, perhaps
      with options of its execution, or an object with a method `by_definition`.
    weights_fn: the variant's definition.
    supports: what the variant supports (see `Attention.supports`).

  Raises:
    ValueError: for any other `attention_fn`, since it would not be called; or
      if the variant does not support what the `attention_fn` is for.
  """
  if hasattr(attention_fn, "by_definition"):
    return attention_fn.by_definition(weights_fn, supports)
  if not is_diff_attention(attention_fn):
    raise ValueError(
      f"attention_fn = {attention_fn!r}: must be diff_attention, without"
      " options that change its result, for a variant that is computed from its"
      " weights"
    )
  num_shards = 1
  if isinstance(attention_fn, functools.partial):
    num_shards = _num_balanced_shards(attention_fn.keywords)
  if num_shards > 1 and "context_parallelism" not in supports:
    raise ValueError(
      f"the tokens of a row are split over {num_shards} devices, but the"
      " variant does not support context_parallelism"
    )
  return functools.partial(
    attention_from_weights, weights_fn, num_balanced_shards=num_shards
  )


def _num_balanced_shards(options: dict[str, Any]) -> int:
  """Returns how many shards a row in balanced order has, or 1.

  Args:
    options: keyword arguments of `diff_attention`.
  """
  sharding = options.get("sharding")
  if options.get("token_order") != "balanced":
    return 1
  if not isinstance(sharding, NamedSharding):
    return 1
  if len(sharding.spec) < 2 or sharding.spec[1] is None:  # [B, T, …]
    return 1
  length_axes = sharding.spec[1]
  if isinstance(length_axes, str):
    length_axes = (length_axes,)
  return math.prod(sharding.mesh.shape[axis] for axis in length_axes)


def attention_from_weights(
  weights_fn: WeightsFn,
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Any,
  *,
  q_segment_ids: Int[Array, "B T"] | None = None,
  kv_segment_ids: Int[Array, "B S"] | None = None,
  q_offset: int | Int[Array, "B"] = 0,
  causal: bool = True,
  window: int | Int[Array, ""] | None = None,
  num_balanced_shards: int = 1,
) -> Float[Array, "B T H V"]:
  """Returns weights @ v, which is the definition of attention.

  Args:
    weights_fn: the variant's definition.
    q: queries.
    k: keys.
    v: values.
    lam: λ as `weights_fn` takes it (see `broadcast_lambda`).
    q_segment_ids: documents of the queries (see `diff_attention`).
    kv_segment_ids: documents of the keys.
    q_offset: position of the first query.
    causal: whether queries see only keys up to their own position.
    window: number of keys that a query sees. None for all.
    num_balanced_shards: the shards of a row whose tokens are in balanced order
      (see `balanced_order`). 1 for tokens in their own order.
  """
  if kv_segment_ids is None:
    kv_segment_ids = q_segment_ids
  mask = visible_keys(
    (q.shape[0], q.shape[1], k.shape[1]),
    q_segment_ids=q_segment_ids,
    kv_segment_ids=kv_segment_ids,
    q_offset=q_offset,
    causal=causal,
    window=window,
    num_balanced_shards=num_balanced_shards,
  )  # [B, T, S]
  weights = weights_fn(q, k, lam, mask)  # [B, H, T, S]
  batch, q_length, kv_length = mask.shape
  num_kv_heads = v.shape[2]
  is_valid = weights.ndim == 4 and weights.shape[1] % num_kv_heads == 0
  expected_shape = (batch, *weights.shape[1:2], q_length, kv_length)
  if not is_valid or weights.shape != expected_shape:
    raise ValueError(
      f"weights must be [B, H, T, S] = [{batch}, H, {q_length}, {kv_length}],"
      f" with a multiple of the {num_kv_heads} key and value heads as H; got"
      f" shape {weights.shape}"
    )
  return apply_weights(weights, v)


def visible_keys(
  shape: tuple[int, int, int],
  *,
  q_segment_ids: Int[Array, "B T"] | None,
  kv_segment_ids: Int[Array, "B S"] | None,
  q_offset: int | Int[Array, "B"],
  causal: bool,
  window: int | Int[Array, ""] | None,
  num_balanced_shards: int = 1,
) -> Bool[Array, "B T S"]:
  """Returns whether each query sees each key.

  Args:
    shape: the numbers of rows, queries and keys, (B, T, S).
    q_segment_ids: see `attention_from_weights`, as the others.
    kv_segment_ids: documents of the keys.
    q_offset: position of the first query.
    causal: whether queries see only keys up to their own position.
    window: number of keys that a query sees. None for all.
    num_balanced_shards: the shards of a row in balanced order.
  """
  _, q_length, kv_length = shape
  q_positions = positions(q_length, q_offset)
  k_positions = positions(kv_length, 0)
  if num_balanced_shards > 1:
    order = jnp.asarray(balanced_order(q_length, num_balanced_shards))
    q_positions = q_positions[:, order]
    k_positions = k_positions[:, order]
  mask = Mask(q_length, kv_length, causal=causal, window=window)
  visible = mask.between(
    q_positions, k_positions, q_segment_ids, kv_segment_ids
  )
  if visible is None:
    visible = jnp.ones((1, 1, 1), bool)
  return jnp.broadcast_to(visible, shape)


def key_distances(mask: Bool[Array, "B T S"]) -> Int[Array, "B T S"]:
  """Returns the distance of each query from each visible key, in tokens.

  It is for biases of the logits that depend on the distance. It also works with
  packed documents, windows and a cache, because it counts the visible keys that
  lie after the key. So the mask must be causal and the keys in the order of
  their tokens. They are in another order only if several devices share a row.

  Example: a causal mask of four tokens, last query → [3, 2, 1, 0]

  Args:
    mask: whether a query sees a key. The result has no meaning for other keys.
  """
  visible = mask.astype(jnp.int32)
  return jax.lax.cumsum(visible, axis=2, reverse=True) - visible


def broadcast_lambda(
  lam: Any, q: Float[Array, "B T Q G D"], num_heads: int
) -> Float[Array, "B T H *rest"] | None:
  """Returns λ for each token and head, in float32.

  Args:
    lam: a scalar, [H], or an array that begins with the axes [B, T]. None if
      the variant has no λ. A variant with several factors per head may return
      [B, T, H, number of factors].
    q: queries. In float64, λ is float64 too.
    num_heads: H.

  Raises:
    ValueError: if λ has another shape.
  """
  if lam is None:
    return None
  lam = jnp.asarray(lam)
  lam = lam.astype(jnp.promote_types(jnp.float32, q.dtype))
  if lam.ndim >= 2:
    if lam.shape[:2] != q.shape[:2]:
      raise ValueError(
        "compute_lambda must return a scalar, [H], or an array that begins with"
        f" [B, T] = {list(q.shape[:2])}; got shape {lam.shape}"
      )
    return lam
  return jnp.broadcast_to(lam, (*q.shape[:2], num_heads))


def apply_weights(
  weights: Float[Array, "B H T S"], v: Float[Array, "B S K V"]
) -> Float[Array, "B T H V"]:
  """Returns the sum of the values, weighted by each head, in v's dtype.

  Several heads may share a key and value head.
  """
  num_heads = weights.shape[1]
  num_kv_heads = v.shape[2]
  v = jnp.repeat(v, num_heads // num_kv_heads, axis=2)  # [B, S, H, V]
  heads = jnp.einsum(
    "BHTS,BSHV->BTHV",
    weights.astype(v.dtype),
    v,
    preferred_element_type=jnp.promote_types(jnp.float32, v.dtype),
    precision=jax.lax.Precision.HIGHEST,
  )
  return heads.astype(v.dtype)
