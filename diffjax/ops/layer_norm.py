"""Layer normalisation."""

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
  """(x − mean(x)) / √(var(x) + eps) · gain + shift over the last axis (arXiv:1607.06450, eq. 4), computed in float32 (or x's float64).

  Args:
    x: the input.
    gain: a factor per channel.
    shift: what is added per channel.
    eps: added to the variance.
  """
  return _formula(x, gain, shift, eps)


# Without the checkpoint JAX would keep float32 arrays of x's size.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
@jax.named_scope("layer_norm")
def _formula(x, gain, shift, eps):
  dtype = jnp.promote_types(jnp.float32, x.dtype)
  wide = x.astype(dtype)
  wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
  wide = wide * lax.rsqrt(
    jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps
  )
  return (wide * gain.astype(dtype) + shift.astype(dtype)).astype(x.dtype)
