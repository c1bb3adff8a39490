"""Differential attention as two stock attention calls and a subtraction: what everyone else does, kept as the baseline to beat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import masks


def two_call(
  q: Float[Array, "B T H G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Float[Array, "B T H"] | None,
  *,
  q_segment_ids: Int[Array, "B T"] | None = None,
  kv_segment_ids: Int[Array, "B S"] | None = None,
  q_offset: int | Int[Array, "B"] = 0,
  causal: bool = True,
  window: int | None = None,
  scale: float,
) -> Float[Array, "B T H V"]:
  """`diff_attention` by `jax.nn.dot_product_attention`, once a map; arguments as in `api.diff_attention`, checked there.

  Raises:
    ValueError: a window or a q_offset is asked for, which stock calls do not all take.
  """
  if window is not None:
    raise ValueError(f"window = {window} is not taken by implementation 'two_call'; use implementation='chunked'")
  if not isinstance(q_offset, int) or q_offset != 0:
    got = q_offset if isinstance(q_offset, int) else "an array"
    raise ValueError(f"q_offset = {got} is not taken by implementation 'two_call'; use implementation='chunked'")
  mask, any_key = None, None
  if q_segment_ids is not None:
    mask = masks.visible(
      masks.positions(q.shape[1], 0), masks.positions(k.shape[1], 0), q_segment_ids, kv_segment_ids, causal=causal, window=None
    )
    assert mask is not None
    any_key = jnp.any(mask, axis=-1)[:, :, None, None]
    mask = (mask | ~jnp.any(mask, axis=-1, keepdims=True))[:, None]  # an empty row attends to all, and is zeroed below
  outs = [_stock_attention(q[:, :, :, g], k[:, :, :, g % k.shape[3]], v, mask, causal, scale) for g in range(q.shape[3])]
  out = outs[0] if lam is None else outs[0] - lam[..., None] * outs[1]
  return (out if any_key is None else jnp.where(any_key, out, 0)).astype(q.dtype)


def _stock_attention(q, k, v, mask, causal: bool, scale: float) -> Float[Array, "B T H V"]:
  """The stock call takes heads of one width only: the narrower side is padded with zeros, which change neither q·k nor the output."""
  width = max(q.shape[-1], v.shape[-1])
  pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
  out = jax.nn.dot_product_attention(pad(q), pad(k), pad(v), mask=mask, scale=scale, is_causal=causal and mask is None)
  return out[..., : v.shape[-1]]
