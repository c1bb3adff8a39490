"""Rotary position embedding, half-split layout."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope(x: Float[Array, "B T *heads D"], positions: Int[Array, "B T"], base: float = 10_000.0) -> Float[Array, "B T *heads D"]:
  """Rotates dimensions j and j + D/2 of every head by the angle position · base^(−2j/D) (RoFormer, arXiv:2104.09864, §3.2).

  Layouts that interleave (pairs 2j, 2j+1) hold the same numbers in permuted rows of W_Q and W_K.

  Args:
    x: queries or keys, any number of head axes between T and D.
    positions: position of each token; it need not start at 0.
    base: the longest wavelength is 2π·base^(1 − 2/D).

  Returns:
    The rotated x in its own dtype; angles and the rotation are float32 (or x's float64).

  Raises:
    ValueError: D is odd, or positions are not x's [B, T].
  """
  width = x.shape[-1]
  if width % 2:
    raise ValueError(f"x's last axis must be even to be rotated in halves, got {width} in shape {x.shape}")
  if positions.shape != x.shape[:2]:
    raise ValueError(f"positions must be [B, T] = {x.shape[:2]}, got shape {positions.shape}")
  dtype = jnp.promote_types(jnp.float32, x.dtype)
  frequencies = jnp.asarray(base, dtype) ** (-jnp.arange(0, width, 2, dtype=dtype) / width)
  angles = positions.astype(dtype)[..., None] * frequencies
  angles = angles.reshape(*positions.shape, *[1] * (x.ndim - 3), width // 2)
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  first, second = jnp.split(x.astype(dtype), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
