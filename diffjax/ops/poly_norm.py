"""PolyNorm, an activation: a learned polynomial of normalized powers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def poly_norm(
  x: Float[Array, "*shape F"],
  weights: Float[Array, "W"],
  constant: Float[Array, ""],
  eps: float = 1e-6,
) -> Float[Array, "*shape F"]:
  """Returns w₀·n(x³) + w₁·n(x²) + w₂·n(x) + c.

  n(z) = z / √(mean(z²) + eps) over the last axis (PolyCom, arXiv:2411.03884,
  eq. 5). Motif has the powers in this order. If F is split over devices, XLA
  sums the means over all of them.

  Args:
    x: the input.
    weights: the weights of the cube, the square and x itself.
    constant: c.
    eps: is added to each mean square.

  Returns:
    The result in x's dtype. It is computed in float32, or in x's float64.
  """
  return _formula(x, weights, constant, eps)


# Without the checkpoint, JAX would keep float32 arrays of x's size.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
@jax.named_scope("poly_norm")
def _formula(x, weights, constant, eps):
  """Returns w₀·n(x³) + w₁·n(x²) + w₂·n(x) + c over the last axis.

  n(z) = z / √(mean(z²) + eps). It is computed in float32, or in x's
  float64, and rounded to x's dtype.
  """
  dtype = jnp.promote_types(jnp.float32, x.dtype)
  wide = x.astype(dtype)
  powers = (wide * wide * wide, wide * wide, wide)
  y = constant.astype(dtype)
  for weight, power in zip(weights.astype(dtype), powers, strict=True):
    mean_square = jnp.mean(jnp.square(power), axis=-1, keepdims=True)
    y = y + weight * power * lax.rsqrt(mean_square + eps)
  return y.astype(x.dtype)
