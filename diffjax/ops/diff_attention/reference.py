"""The definition of differential attention. It materialises both maps: for tests and measurements, not for training."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.mask import Mask, apply, positions
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
  """Logits before any mask, q·k·scale, whose softmax paper §1 takes; in at least float32.

  Args:
    q: queries of G maps.
    k: keys; M = 1 shares them between the maps.
    scale: factor on q·k; 1/√D by default.
  """
  groups, num_maps = q.shape[2:4]
  dtype = jnp.promote_types(jnp.float32, q.dtype)
  k = jnp.repeat(k, groups // k.shape[2], axis=2)
  k = k[
    :, :, :, jnp.array([0] * (num_maps - 1) + [-1])
  ]  # the last map's own are the last
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  return (
    jnp.einsum(
      "btqgd,bsqgd->bqgts",
      q,
      k,
      preferred_element_type=dtype,
      precision=jax.lax.Precision.HIGHEST,
    )
    * scale
  )


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
  logits_transform: Callable[
    [Float[Array, "B Q G T S"]], Float[Array, "B Q G T S"]
  ]
  | None = None,
) -> Float[Array, "B Q G T S"]:
  """The softmax maps A_i of paper §1, in at least float32; a row without visible keys is zero.

  Args:
    q: queries of G maps.
    k: keys; M = 1 shares them between the maps.
    q_segment_ids: see `diff_attention`, like the arguments below.
    kv_segment_ids: documents of the keys.
    q_offset: position of the first query.
    causal: whether queries see only keys up to their own position.
    window: how many keys a query sees.
    scale: factor on q·k; 1/√D by default.
    logits_transform: applied to the scaled logits before mask and softmax, e.g. to quantise them.

  Returns:
    A[b, q, g, t, s], rows summing to one (or zero).
  """
  logits = attention_logits(q, k, scale)
  if logits_transform is not None:
    logits = logits_transform(logits)
  mask = Mask(q.shape[1], k.shape[1], causal=causal, window=window)
  visible = mask.between(
    positions(q.shape[1], q_offset),
    positions(k.shape[1], 0),
    q_segment_ids,
    kv_segment_ids,
  )
  if visible is None:
    return jax.nn.softmax(logits, axis=-1)
  visible = visible[:, None, None]
  # An empty row keeps its finite logits through the softmax and is zeroed after it: −∞ throughout would give NaN gradients.
  any_key = jnp.any(visible, axis=-1, keepdims=True)
  maps = jax.nn.softmax(apply(visible | ~any_key, logits), axis=-1)
  return jnp.where(any_key, maps, 0)


def attention_weights(
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  lam: Float[Array, "B T H"] | None,
  **options,
) -> Float[Array, "B H T S"]:
  """Weights of the values: A₁ − λA₂ (paper §1), or A₁ if G is 1; with more maps, each of a group's others less λ times the last.

  A row that sees keys sums to 1 − λ, and its entries may be negative.

  Args:
    q: queries of G maps.
    k: keys.
    lam: λ per token and head; None if G is 1.
    **options: those of `attention_maps`.
  """
  maps = attention_maps(q, k, **options)
  if lam is None:
    return maps[:, :, 0]
  heads = lambda x: x.reshape(maps.shape[0], -1, *maps.shape[3:])
  signal = heads(maps[:, :, :-1])
  noise = jnp.repeat(maps[:, :, -1], signal.shape[1] // maps.shape[1], axis=1)
  return signal - jnp.moveaxis(lam, 2, 1)[..., None] * noise


def reference(
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Float[Array, "B T H"] | None,
  **options,
) -> Float[Array, "B T H V"]:
  """softmax(q₁k₁ᵀ)v − λ·softmax(q₂k₂ᵀ)v, exactly as written (paper §1).

  Args:
    q: queries of G maps.
    k: keys.
    v: values.
    lam: λ per token and head; None if G is 1.
    **options: those of `attention_maps`.

  Returns:
    The heads' outputs in q's dtype.
  """
  weights = attention_weights(q, k, lam, **options)
  v = jnp.repeat(v, weights.shape[1] // v.shape[2], axis=2).astype(
    weights.dtype
  )
  return jnp.einsum(
    "bhts,bshv->bthv", weights, v, precision=jax.lax.Precision.HIGHEST
  ).astype(q.dtype)


def _forward(arrays: Arrays, mask: Mask, options: Options) -> Saved:
  q, k, v, lam, q_ids, kv_ids, offset = arrays
  return Saved(
    reference(
      q,
      k,
      v,
      lam,
      q_segment_ids=q_ids,
      kv_segment_ids=kv_ids,
      q_offset=mask.first_position(offset),
      causal=mask.causal,
      window=mask.window,
      scale=options.scale,
    )
  )


IMPLEMENTATION = Implementation(_forward, takes_groups=True)
