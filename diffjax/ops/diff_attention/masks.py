"""Which key a query sees: the one definition that the implementations share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def positions(length: int, offset: int | Int[Array, ""] | Int[Array, "B"], start: int | Int[Array, ""] = 0) -> Int[Array, "X length"]:
  """Positions of rows start … start + length − 1: [1, length] for one offset, [B, length] for an offset per row of the batch."""
  rows = jnp.arange(length, dtype=jnp.int32) + start
  return jnp.reshape(jnp.asarray(offset, jnp.int32), (-1, 1)) + rows


def visible(
  q_positions: Int[Array, "X T"],
  k_positions: Int[Array, "Y S"],
  q_segment_ids: Int[Array, "B T"] | None,
  kv_segment_ids: Int[Array, "B S"] | None,
  *,
  causal: bool,
  window: int | None,
) -> Bool[Array, "Z T S"] | None:
  """Whether query t sees key s; the leading axis is 1 or B. None where everything is visible.

  Args:
    q_positions: [1 or B, T].
    k_positions: [1 or B, S].
    q_segment_ids: documents of the queries, or None.
    kv_segment_ids: documents of the keys, or None.
    causal: query p sees keys at positions ≤ p.
    window: query p sees keys in (p − window, p] if causal, else those with |p − key| < window.
  """
  mask = None
  distance = q_positions[:, :, None] - k_positions[:, None, :]
  if causal:
    mask = distance >= 0
  if window is not None:
    near = distance < window
    mask = near if mask is None else mask & near
    if not causal:
      mask = mask & (distance > -window)
  if q_segment_ids is not None and kv_segment_ids is not None:
    same = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    mask = same if mask is None else mask & same
  return mask


def apply(mask: Bool[Array, "..."] | None, logits: jax.Array) -> jax.Array:
  """Logits with −∞ where the mask forbids."""
  return logits if mask is None else jnp.where(mask, logits, -jnp.inf)
