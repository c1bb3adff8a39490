"""The definition of differential attention, for tests and measurements.

It follows equation 1 of arXiv:2410.05258, for any number of maps in a group.
It materializes all maps, so it takes too much memory for training.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from diffjax.ops.diff_attention.mask import Mask, apply_mask, positions
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  Options,
  Saved,
)


def attention_logits(
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  scale: float | None = None,
) -> Float[Array, "B Q G T S"]:
  """Returns the logits q·k·scale before any mask.

  They are in float32, or in float64 if q is float64.

  Args:
    q: queries.
    k: keys. With M = 1, all maps share them. With M = G, each map has its own.
    scale: factor on q·k. None for 1/√D.
  """
  num_groups, num_maps, width = q.shape[2:]
  num_kv_heads = k.shape[2]
  if scale is None:
    scale = width**-0.5
  # Several query groups may share a key head: give each group its keys.
  groups_per_kv_head = num_groups // num_kv_heads
  k = jnp.repeat(k, groups_per_kv_head, axis=2)  # [B, S, Q, M, D]
  num_key_maps = k.shape[3]
  if num_key_maps != num_maps:
    # The first key map belongs to the signal maps, and the last one to the
    # noise map, which is the last map of a group. With M = 1 they are the same.
    num_signal_maps = num_maps - 1
    key_map_of_map = jnp.array([0] * num_signal_maps + [-1])
    k = k[:, :, :, key_map_of_map]  # [B, S, Q, G, D]
  logits = jnp.einsum(
    "BTQGD,BSQGD->BQGTS",
    q,
    k,
    preferred_element_type=jnp.promote_types(jnp.float32, q.dtype),
    precision=jax.lax.Precision.HIGHEST,
  )
  return logits * scale


def attention_maps(
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  *,
  q_segment_ids: Int[Array, "B T"] | None = None,
  kv_segment_ids: Int[Array, "B S"] | None = None,
  q_offset: int | Int[Array, "B"] = 0,
  causal: bool = True,
  window: int | Int[Array, ""] | None = None,
  scale: float | None = None,
) -> Float[Array, "B Q G T S"]:
  """Returns the softmax maps A₁, A₂, … of each query group.

  A query group has one or more signal maps, and then a noise map (G maps). Each
  row of a map sums to one. The row of a query that sees no key is zero. The
  maps are in float32, or in float64 if q is float64.

  Args:
    q: queries.
    k: keys. With M = 1, all maps share them.
    q_segment_ids: documents of the queries (see `diff_attention`).
    kv_segment_ids: documents of the keys.
    q_offset: position of the first query.
    causal: whether queries see only keys up to their own position.
    window: number of keys that a query sees. None for all.
    scale: factor on q·k. None for 1/√D.
  """
  logits = attention_logits(q, k, scale)
  q_length = q.shape[1]
  kv_length = k.shape[1]
  mask = Mask(q_length, kv_length, causal=causal, window=window)
  visible = mask.between(
    q_positions=positions(q_length, q_offset),
    k_positions=positions(kv_length, offset=0),
    q_ids=q_segment_ids,
    kv_ids=kv_segment_ids,
  )
  if visible is None:
    return jax.nn.softmax(logits, axis=-1)
  return masked_softmax(logits, visible)


def masked_softmax(
  logits: Float[Array, "B *maps T S"], visible: Bool[Array, "B T S"]
) -> Float[Array, "B *maps T S"]:
  """Returns the softmax of each query's logits over the keys that it sees.

  The row of a query that sees no key is zero.

  Args:
    logits: the scaled products of queries and keys. Axes between B and T, such
      as heads and their maps, have the same mask.
    visible: whether a query sees a key. Its first axis may also be 1.
  """
  # In a row without visible keys, a softmax of −∞ would give NaN gradients.
  # Such a row keeps its finite logits, as if it saw all keys. After softmax,
  # it is set to zero.
  axes_of_maps = tuple(range(1, logits.ndim - 2))
  visible = jnp.expand_dims(visible, axes_of_maps)  # [B, 1, …, T, S]
  has_visible_key = jnp.any(visible, axis=-1, keepdims=True)
  keeps_logit = visible | ~has_visible_key
  logits = apply_mask(keeps_logit, logits)
  maps = jax.nn.softmax(logits, axis=-1)
  return jnp.where(has_visible_key, maps, 0)


def attention_weights(
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  lam: Float[Array, "B T H"] | None,
  **options,
) -> Float[Array, "B H T S"]:
  """Returns A₁ − λA₂ for each head, or A₁ if G = 1.

  With G > 2, λ times the last map of a group is subtracted from each other map.
  A row that sees keys sums to 1 − λ, and may have negative entries.

  Args:
    q: queries.
    k: keys.
    lam: λ for each token and head. None if G = 1.
    **options: keyword arguments of `attention_maps`.
  """
  maps = attention_maps(q, k, **options)  # [B, Q, G, T, S]
  if lam is None:
    return maps[:, :, 0]  # H = Q
  signal_maps, noise_maps = split_maps(maps)
  lam = jnp.moveaxis(lam, 2, 1)[..., None]  # [B, H, T, 1]
  return signal_maps - lam * noise_maps


def split_maps(
  maps: Float[Array, "B Q G T S"],
) -> tuple[Float[Array, "B H T S"], Float[Array, "B H T S"]]:
  """Returns the signal map of each head, and the noise map of each head.

  Heads of a query group have the same noise map.

  Args:
    maps: the maps of each query group, its noise map last. G is at least 2.
  """
  batch, num_groups, _, q_length, kv_length = maps.shape
  signal_maps = maps[:, :, :-1]  # [B, Q, G - 1, T, S]
  signal_maps = signal_maps.reshape(batch, -1, q_length, kv_length)
  heads_per_group = signal_maps.shape[1] // num_groups
  noise_maps = maps[:, :, -1]  # [B, Q, T, S]
  noise_maps = jnp.repeat(noise_maps, heads_per_group, axis=1)  # [B, H, T, S]
  return signal_maps, noise_maps


def reference(
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Float[Array, "B T H"] | None,
  **options,
) -> Float[Array, "B T H V"]:
  """Returns (softmax(q₁k₁ᵀ) − λ · softmax(q₂k₂ᵀ)) v, in q's dtype.

  Args:
    q: queries.
    k: keys.
    v: values.
    lam: λ for each token and head. None if G = 1.
    **options: keyword arguments of `attention_maps`.
  """
  weights = attention_weights(q, k, lam, **options)  # [B, H, T, S]
  num_heads = weights.shape[1]
  num_kv_heads = v.shape[2]
  v = jnp.repeat(v, num_heads // num_kv_heads, axis=2)  # [B, S, H, V]
  out = jnp.einsum(
    "BHTS,BSHV->BTHV",
    weights,
    v.astype(weights.dtype),
    precision=jax.lax.Precision.HIGHEST,
  )
  return out.astype(q.dtype)


def _forward(arrays: Arrays, mask: Mask, options: Options) -> Saved:
  """Returns the output of `reference`, for `Implementation.forward`."""
  out = reference(
    arrays.q,
    arrays.k,
    arrays.v,
    arrays.lam,
    q_segment_ids=arrays.q_ids,
    kv_segment_ids=arrays.kv_ids,
    q_offset=mask.first_position(arrays.offset),
    causal=mask.causal,
    window=mask.window,
    scale=options.scale,
  )
  return Saved(out)


IMPLEMENTATION = Implementation(_forward, takes_groups=True)
