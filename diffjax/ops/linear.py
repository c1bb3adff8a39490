"""The product of activations with a weight matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def linear(
  x: Float[Array, "B T I"], w: Float[Array, "I O"]
) -> Float[Array, "B T O"]:
  """Returns the matrix product x W.

  The custom VJP is for speed on CPUs. JAX computes the weight gradient as
  (dyᵀ x)ᵀ. XLA's CPU backend then writes a transposed copy of dy, fused with
  the operation that produces dy. A training step took a quarter longer (E 256,
  F 688, six layers, 16 rows of 256). On GPUs and TPUs both forms are equal.

  Args:
    x: activations.
    w: weights of any dtype. The backward pass keeps them in that dtype, without
      a second copy in x's dtype.

  Returns:
    The product, in x's dtype.
  """
  return x @ w.astype(x.dtype)


def _linear_forward(x, w):
  return linear(x, w), (x, w)


def _linear_backward(residuals, dy):
  """Returns the gradients of x [B, T, I] and w [I, O], for dy [B, T, O]."""
  x, w = residuals
  # dW = xᵀ dy, or (dyᵀ x)ᵀ. On CPUs, XLA copies and transposes the first
  # operand, so that should be the narrower one.
  num_inputs, num_outputs = w.shape
  if num_inputs <= num_outputs:
    dw = jnp.einsum("BTI,BTO->IO", x, dy)
  else:
    dw = jnp.einsum("BTO,BTI->OI", dy, x).T
  dx = jnp.einsum("BTO,IO->BTI", dy, w.astype(x.dtype))
  return dx, dw.astype(w.dtype)


linear.defvjp(_linear_forward, _linear_backward)
