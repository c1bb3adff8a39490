"""Differential attention as two stock attention calls and a subtraction: what everyone else does, kept as the baseline to beat."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from diffjax.ops.diff_attention.mask import PER_ROW, Mask, positions
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  Options,
  Saved,
)

_CUDNN_WIDTH = 128


def _forward(arrays: Arrays, mask: Mask, options: Options) -> Saved:
  """Calls `stock_attention` once for each map."""
  q, k, v, lam, q_ids, kv_ids, _ = arrays
  visible, any_key = None, None
  if mask.segments:
    visible = mask.between(
      positions(q.shape[1], 0), positions(k.shape[1], 0), q_ids, kv_ids
    )
    assert visible is not None
    any_key = jnp.any(visible, axis=-1)[:, :, None, None]
    visible = (visible | ~jnp.any(visible, axis=-1, keepdims=True))[
      :, None
    ]  # an empty row attends to all, and is zeroed below
  outs = [
    stock_attention(
      q[:, :, :, g],
      k[:, :, :, g % k.shape[3]],
      v,
      visible,
      causal=mask.causal,
      scale=options.scale,
    )
    for g in range(q.shape[3])
  ]
  out = outs[0] if lam is None else outs[0] - lam[..., None] * outs[1]
  return Saved(
    (out if any_key is None else jnp.where(any_key, out, 0)).astype(q.dtype)
  )


def _prepare(arrays: Arrays, mask: Mask) -> None:
  """Refuses windows and offsets, which stock calls do not all take."""
  if mask.window is not None:
    raise ValueError(
      f"window = {mask.window} is not taken by implementation 'two_call'; use implementation='chunked'"
    )
  if mask.offset != 0:
    got = "an array" if mask.offset == PER_ROW else mask.offset
    raise ValueError(
      f"q_offset = {got} is not taken by implementation 'two_call'; use implementation='chunked'"
    )


IMPLEMENTATION = Implementation(_forward, prepare=_prepare)


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
    pad = lambda x, width=width: jnp.pad(
      x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1]))
    )
    out = jax.nn.dot_product_attention(
      pad(q),
      pad(k),
      pad(part),
      mask=mask,
      scale=scale,
      is_causal=causal and mask is None,
      implementation="cudnn" if cudnn else None,
    )
    outs.append(out[..., : part.shape[-1]])
  return jnp.concatenate(outs, axis=-1)


def cudnn_takes(q: jax.Array, v: jax.Array, masked: bool) -> bool:
  """True if `stock_attention` of q [B, T, …, D] and v [B, S, …, V] runs through cuDNN, in this program.

  With a mask, which cuDNN reads as B·T·S biases, lengths must be even, and the biases less than 2 GiB.
  """
  (batch, length), keys = q.shape[:2], v.shape[1]
  fits = not masked or (
    length % 2 == 0 and keys % 2 == 0 and batch * length * keys < 2**30
  )
  return (
    q.dtype in (jnp.bfloat16, jnp.float16)
    and q.shape[-1] <= _CUDNN_WIDTH
    and fits
    and _has_cudnn(jax.default_backend())
  )


@functools.cache
def _has_cudnn(backend: str) -> bool:
  """True if the backend is an NVIDIA GPU that cuDNN's attention runs on: Ampere or newer. JAX runs on none without cuDNN."""
  capability = jax.devices()[0].compute_capability if backend == "gpu" else ""
  return (
    re.fullmatch(r"\d+\.\d+", capability) is not None
    and float(capability) >= 8.0
  )  # AMD's have names
