"""Differential attention as two stock attention calls and a subtraction: what everyone else does, kept as the baseline to beat."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from diffjax.ops.diff_attention import masks

_CUDNN_WIDTH = 128


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
  """`diff_attention` by `stock_attention`, once a map; arguments as in `api.diff_attention`, checked there.

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
  outs = [stock_attention(q[:, :, :, g], k[:, :, :, g % k.shape[3]], v, mask, causal=causal, scale=scale) for g in range(q.shape[3])]
  out = outs[0] if lam is None else outs[0] - lam[..., None] * outs[1]
  return (out if any_key is None else jnp.where(any_key, out, 0)).astype(q.dtype)


def stock_attention(
  q: Float[Array, "B T H D"],
  k: Float[Array, "B S K D"],
  v: Float[Array, "B S K V"],
  mask: Bool[Array, "B 1 T S"] | None = None,
  *,
  causal: bool,
  scale: float,
  parts: int | None = None,
) -> Float[Array, "B T H V"]:
  """The strongest stock attention of one map: `jax.nn.dot_product_attention`, on GPU through cuDNN where cuDNN takes the arrays.

  It takes heads of one width only: the narrower side is padded with zeros, which change neither q·k nor the output.

  Args:
    q: queries.
    k: keys.
    v: values.
    mask: what a query sees; it includes the causal mask.
    causal: whether a query sees only keys up to its own index; not used with a mask.
    scale: factor on q·k.
    parts: calls that share V's columns. None: through cuDNN as many as keep each call's width to 128, above which its backward pass is
      slow and GPUs before Hopper have none; else one.
  """
  cudnn = cudnn_takes(q, v, mask is not None)
  if parts is None:
    parts = -(-v.shape[-1] // _CUDNN_WIDTH) if cudnn else 1
  outs = []
  for part in jnp.array_split(v, parts, axis=-1):
    width = max(q.shape[-1], part.shape[-1])
    width += -width % 8 if cudnn else 0
    pad = lambda x, width=width: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
    out = jax.nn.dot_product_attention(
      pad(q), pad(k), pad(part), mask=mask, scale=scale, is_causal=causal and mask is None, implementation="cudnn" if cudnn else None
    )
    outs.append(out[..., : part.shape[-1]])
  return jnp.concatenate(outs, axis=-1)


def cudnn_takes(q: jax.Array, v: jax.Array, masked: bool) -> bool:
  """Whether `stock_attention` of q [B, T, …, D] and v [B, S, …, V] runs through cuDNN, in this program.

  With a mask, which cuDNN reads as B·T·S biases, lengths must be even, and the biases less than 2 GiB.
  """
  (batch, length), keys = q.shape[:2], v.shape[1]
  fits = not masked or (length % 2 == 0 and keys % 2 == 0 and batch * length * keys < 2**30)
  return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] <= _CUDNN_WIDTH and fits and _has_cudnn(jax.default_backend())


@functools.cache
def _has_cudnn(backend: str) -> bool:
  """Whether the backend is an NVIDIA GPU that cuDNN's attention runs on: Ampere or newer. JAX runs on none without cuDNN."""
  capability = jax.devices()[0].compute_capability if backend == "gpu" else ""
  return re.fullmatch(r"\d+\.\d+", capability) is not None and float(capability) >= 8.0  # AMD's have names
