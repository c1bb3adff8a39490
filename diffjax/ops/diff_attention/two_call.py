"""Differential attention as two calls of stock attention and a subtraction.

This is the usual way to compute it, and the baseline for the fused kernels.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from diffjax.ops.diff_attention.mask import PER_ROW, Mask, positions
from diffjax.ops.diff_attention.tiles import round_up
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  Options,
  Saved,
)

# Up to this width, cuDNN's attention is fast, and has a backward pass on all
# GPUs that it supports.
_CUDNN_WIDTH = 128
# cuDNN's attention requires that widths are multiples of this number.
_CUDNN_WIDTH_MULTIPLE = 8
# cuDNN reads a mask as biases of 2 bytes, which must take less than 2 GiB.
_CUDNN_MAX_BIASES = 2**30


def _forward(arrays: Arrays, mask: Mask, options: Options) -> Saved:
  """Returns A₁V − λA₂V, or A₁V with one map.

  A₁V and A₂V are two calls of stock attention, with the queries and keys of the
  signal map and of the noise map.
  """
  q = arrays.q
  k = arrays.k
  lam = arrays.lam
  visible = None
  has_visible_key = None
  if mask.segments:
    # Stock attention has a causal mask, but needs an array for documents.
    q_positions = positions(q.shape[1], offset=0)
    k_positions = positions(k.shape[1], offset=0)
    visible = mask.between(
      q_positions, k_positions, arrays.q_ids, arrays.kv_ids
    )  # [B, T, S]
    assert visible is not None
    has_visible_key = jnp.any(visible, axis=-1)[:, :, None, None]
    # A softmax without any key is NaN. A query that sees no key attends to all
    # keys instead, and its output is replaced by zeros below.
    visible = visible | ~jnp.any(visible, axis=-1, keepdims=True)
    visible = visible[:, None]  # [B, 1, T, S]

  outputs = []  # of each map, [B, T, H, V]
  num_maps = q.shape[3]
  num_key_maps = k.shape[3]
  for index in range(num_maps):
    map_output = stock_attention(
      q[:, :, :, index],
      k[:, :, :, index % num_key_maps],  # the only key map is shared
      arrays.v,
      visible,
      causal=mask.causal,
      scale=options.scale,
    )
    outputs.append(map_output)

  if lam is None:
    out = outputs[0]
  else:
    signal_output, noise_output = outputs
    out = signal_output - lam[..., None] * noise_output
  if has_visible_key is not None:
    out = jnp.where(has_visible_key, out, 0)
  return Saved(out.astype(q.dtype))


def _prepare(arrays: Arrays, mask: Mask) -> None:
  """Raises ValueError for windows and offsets.

  Not all stock implementations support them.
  """
  if mask.window is not None:
    raise ValueError(
      f"window = {mask.window} is not supported by implementation='two_call';"
      " use implementation='chunked'"
    )
  if mask.offset != 0:
    offset = "an array" if mask.offset == PER_ROW else mask.offset
    raise ValueError(
      f"q_offset = {offset} is not supported by implementation='two_call';"
      " use implementation='chunked'"
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
  """Returns the attention of one map by `jax.nn.dot_product_attention`.

  It runs through cuDNN if that supports the arrays. Stock attention requires
  D = V. So the narrower arrays are padded with zeros, which change neither q·k
  nor the output.

  Args:
    q: queries.
    k: keys.
    v: values.
    mask: where a query sees a key. It must include the causal mask.
    causal: whether a query sees only keys up to its own index. It has no effect
      if there is a mask.
    scale: factor on q·k.
    parts: the number of calls among which the columns of V are divided. None
      for one call, or through cuDNN for as many as limit the width of a call to
      128. The backward pass of wider calls is slow, and GPUs before Hopper do
      not have one.
  """
  use_cudnn = cudnn_takes(q, v, mask is not None)
  if parts is None:
    parts = 1
    if use_cudnn:
      parts = math.ceil(v.shape[-1] / _CUDNN_WIDTH)

  outputs = []  # of each part of the columns of V
  for values in jnp.array_split(v, parts, axis=-1):
    value_width = values.shape[-1]
    width = max(q.shape[-1], value_width)
    if use_cudnn:
      width = round_up(width, _CUDNN_WIDTH_MULTIPLE)

    # If there is a mask, it includes causality.
    is_causal = causal and mask is None
    out = jax.nn.dot_product_attention(
      _pad_width(q, width),
      _pad_width(k, width),
      _pad_width(values, width),
      mask=mask,
      scale=scale,
      is_causal=is_causal,
      implementation="cudnn" if use_cudnn else None,
    )
    outputs.append(out[..., :value_width])
  return jnp.concatenate(outputs, axis=-1)


def _pad_width(
  x: Float[Array, "B T heads X"], width: int
) -> Float[Array, "B T heads width"]:
  padding = width - x.shape[-1]
  return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding)))


def cudnn_takes(
  q: Float[Array, "B T *heads D"],
  v: Float[Array, "B S *heads V"],
  masked: bool,
) -> bool:
  """Returns whether `stock_attention` runs through cuDNN in this process.

  It does for 16-bit floats and a width of at most 128, on NVIDIA GPUs since
  Ampere.

  Args:
    q: queries, of one map or of several.
    v: values.
    masked: whether there is a mask. cuDNN reads it as B·T·S biases, and
      requires that T and S are even and that the biases take less than 2 GiB.
  """
  if q.dtype not in (jnp.bfloat16, jnp.float16) or q.shape[-1] > _CUDNN_WIDTH:
    return False
  if masked:
    batch, q_length = q.shape[:2]
    kv_length = v.shape[1]
    if q_length % 2 != 0 or kv_length % 2 != 0:
      return False
    if batch * q_length * kv_length >= _CUDNN_MAX_BIASES:
      return False
  return has_cudnn(jax.default_backend())


@functools.cache
def has_cudnn(backend: str) -> bool:
  """Returns whether cuDNN's attention runs on the GPU: Ampere or newer.

  JAX does not start on an NVIDIA GPU without cuDNN.
  """
  if backend != "gpu":
    return False
  capability = jax.devices()[0].compute_capability
  # AMD's GPUs have names such as "gfx942" instead of numbers.
  if re.fullmatch(r"\d+\.\d+", capability) is None:
    return False
  return float(capability) >= 8.0
