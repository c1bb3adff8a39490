"""PolyNorm, an activation: a learnt polynomial whose powers are normed."""

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
  """w₀·n(x³) + w₁·n(x²) + w₂·n(x) + c, n(z) = z / √(mean(z²) + eps) over the last axis (PolyCom, arXiv:2411.03884, eq. 5; Motif's order).

  Computed in float32 (or x's float64). Where F is split over devices, XLA sums the means over all of them.

  Args:
    x: the input.
    weights: of the cube, the square and x itself.
    constant: c.
    eps: added to each mean square.
  """
  return _formula(x, weights, constant, eps)


# Without the checkpoint JAX would keep float32 arrays of x's size.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
@jax.named_scope("poly_norm")
def _formula(x, weights, constant, eps):
  dtype = jnp.promote_types(jnp.float32, x.dtype)
  wide, weights = x.astype(dtype), weights.astype(dtype)
  total = constant.astype(dtype)
  for weight, power in zip(
    weights, (wide * wide * wide, wide * wide, wide), strict=True
  ):
    total = total + weight * power * lax.rsqrt(
      jnp.mean(jnp.square(power), axis=-1, keepdims=True) + eps
    )
  return total.astype(x.dtype)
