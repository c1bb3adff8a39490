"""Root-mean-square normalization."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

# The name of 1/√(mean(x²) + eps), for remat policies. Keeping this one number
# per row saves the backward pass a read of x.
SCALE = "rms_norm_scale"


def rms_norm(
  x: Float[Array, "*shape E"],
  gain: Float[Array, "E"] | None = None,
  eps: float = 1e-5,
) -> Float[Array, "*shape E"]:
  """Returns x / √(mean(x²) + eps) · gain over the last axis.

  Source: arXiv:1910.07467, eq. 4.

  Args:
    x: the input. The backward pass keeps it and one number per row.
    gain: a factor for each channel. None for 1.
    eps: is added to the mean square.

  Returns:
    The result in x's dtype. It is computed in float32, or in x's float64.

  Raises:
    ValueError: if gain is not [E].
  """
  if gain is not None and gain.shape != x.shape[-1:]:
    raise ValueError(
      f"gain must have the shape [{x.shape[-1]}] of x's last axis;"
      f" got shape {gain.shape}"
    )
  return _formula(x, gain, eps)


# Without the checkpoint, JAX would keep three float32 arrays of x's size.
@functools.partial(
  jax.checkpoint,
  policy=jax.checkpoint_policies.save_only_these_names(SCALE),
  prevent_cse=False,
  static_argnums=2,
)
@jax.named_scope("rms_norm")
def _formula(x, gain, eps):
  """Returns x / √(mean(x²) + eps) · gain over the last axis, in x's dtype.

  It is computed in float32, or in x's float64. The backward pass keeps x and
  the scale 1/√(mean(x²) + eps), and computes the rest again.
  """
  dtype = jnp.promote_types(jnp.float32, x.dtype)
  y = x.astype(dtype)
  mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
  scale = checkpoint_name(lax.rsqrt(mean_square + eps), SCALE)
  y = y * scale
  if gain is not None:
    y = y * gain.astype(dtype)
  return y.astype(x.dtype)
