"""The product of activations with a weight matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def linear(
  x: Float[Array, "B T I"], w: Float[Array, "I O"]
) -> Float[Array, "B T O"]:
  """Matrix product x W whose weight gradient xᵀ dy transposes the narrower operand.

  JAX's own rule computes (dyᵀ x)ᵀ. XLA's CPU backend then writes a transposed copy of dy, fused with the operation that produces dy: a
  training step (E 256, F 688, six layers, 16 rows of 256) took a quarter longer. On GPU and TPU both forms are equal.

  Args:
    x: activations.
    w: weights, of any dtype. The backward pass keeps them in that dtype, without a second copy in x's.

  Returns:
    The product, in x's dtype.
  """
  return x @ w.astype(x.dtype)


def _forward(x, w):
  return linear(x, w), (x, w)


def _backward(saved, dy):
  x, w = saved
  if w.shape[0] <= w.shape[1]:
    dw = jnp.einsum("BTI,BTO->IO", x, dy)
  else:
    dw = jnp.einsum("BTO,BTI->OI", dy, x).T
  return jnp.einsum("BTO,IO->BTI", dy, w.astype(x.dtype)), dw.astype(w.dtype)


linear.defvjp(_forward, _backward)
