"""Layer normalization."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def layer_norm(
  x: Float[Array, "*shape E"],
  gain: Float[Array, "E"],
  shift: Float[Array, "E"],
  eps: float = 1e-5,
) -> Float[Array, "*shape E"]:
  """Returns (x − mean(x)) / √(var(x) + eps) · gain + shift.

  The statistics are over the last axis (arXiv:1607.06450, eq. 4).

  Args:
    x: the input.
    gain: a factor for each channel.
    shift: is added to each channel.
    eps: is added to the variance.

  Returns:
    The result in x's dtype. It is computed in float32, or in x's float64.
  """
  return _formula(x, gain, shift, eps)


# Without the checkpoint, JAX would keep float32 arrays of x's size.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
@jax.named_scope("layer_norm")
def _formula(x, gain, shift, eps):
  """Returns (x − mean(x)) / √(var(x) + eps) · gain + shift, over the last axis.

  It is computed in float32, or in x's float64, and rounded to x's dtype.
  """
  dtype = jnp.promote_types(jnp.float32, x.dtype)
  wide = x.astype(dtype)
  centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
  normalized = centered * lax.rsqrt(variance + eps)
  y = normalized * gain.astype(dtype) + shift.astype(dtype)
  return y.astype(x.dtype)
