"""Root-mean-square normalisation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

# The name of 1/√(mean(x²) + eps), for remat policies. Keeping it, one number a row, saves the backward pass a read of x.
SCALE = "rms_norm_scale"


def rms_norm(
  x: Float[Array, "*shape E"],
  gain: Float[Array, "E"] | None = None,
  eps: float = 1e-5,
) -> Float[Array, "*shape E"]:
  """x / √(mean(x²) + eps) · gain over the last axis (arXiv:1910.07467, eq. 4).

  Args:
    x: the input.
    gain: a factor per channel; None for 1.
    eps: added to the mean square.

  Returns:
    The normalised x in its own dtype, computed in float32 (or x's float64). The backward pass keeps x itself and one number a row.

  Raises:
    ValueError: gain is not [E].
  """
  if gain is not None and gain.shape != x.shape[-1:]:
    raise ValueError(
      f"gain must be x's last axis [{x.shape[-1]}], got shape {gain.shape}"
    )
  return _formula(x, gain, eps)


# Without the checkpoint JAX would keep three float32 arrays of x's size.
@functools.partial(
  jax.checkpoint,
  policy=jax.checkpoint_policies.save_only_these_names(SCALE),
  prevent_cse=False,
  static_argnums=2,
)
@jax.named_scope("rms_norm")
def _formula(x, gain, eps):
  dtype = jnp.promote_types(jnp.float32, x.dtype)
  wide = x.astype(dtype)
  wide = wide * checkpoint_name(
    lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps), SCALE
  )
  return (wide if gain is None else wide * gain.astype(dtype)).astype(x.dtype)
