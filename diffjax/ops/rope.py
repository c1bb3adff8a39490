"""Rotary position embedding, half-split layout."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from diffjax.ops.platform import platform

# The name of the sines and cosines, for remat policies. All layers share them, so that they are kept once.
ANGLES = "rope_angles"


@dataclasses.dataclass(frozen=True)
class Scaling:
  """How angles are stretched, so that a model trained on rows of `original_length` reads rows that are `factor` times as long.

  Attributes:
    kind: "linear" (position interpolation, arXiv:2306.15595), "llama3" (Llama 3.1: only long waves; low and high frequency factors 1 and 4)
      or "yarn" (arXiv:2309.00071: likewise, with α = 1 and β = 32, and sines and cosines times 0.1·ln(factor) + 1).
    factor: how many times.
    original_length: tokens.

  Raises:
    ValueError: if there is no such kind.
  """

  kind: str
  factor: float
  original_length: int

  def __post_init__(self):
    if self.kind not in ("linear", "llama3", "yarn"):
      raise ValueError(
        f"kind must be 'linear', 'llama3' or 'yarn', got {self.kind!r}"
      )

  def apply(
    self, frequencies: Float[Array, "half"], base: float
  ) -> tuple[Float[Array, "half"], float]:
    """The stretched frequencies, and the factor on sines and cosines."""
    if self.kind == "linear":
      return frequencies / self.factor, 1.0
    if self.kind == "llama3":
      waves = (
        self.original_length * frequencies / (2 * math.pi)
      )  # in the original length
      kept = jnp.clip((waves - 1) / (4 - 1), 0, 1)
      return frequencies * (kept + (1 - kept) / self.factor), 1.0
    half = frequencies.shape[0]
    place = lambda waves: (
      half
      * math.log(self.original_length / (waves * 2 * math.pi))
      / math.log(base)
    )  # of the pair with so many waves
    low, high = (
      max(math.floor(place(32)), 0),
      min(math.ceil(place(1)), 2 * half - 1),
    )
    kept = 1 - jnp.clip(
      (jnp.arange(half, dtype=frequencies.dtype) - low)
      / (max(high - low, 0.001)),
      0,
      1,
    )
    return frequencies * (kept + (1 - kept) / self.factor), 0.1 * math.log(
      self.factor
    ) + 1 if self.factor > 1 else 1.0


@jax.named_scope("rope")
def rope(
  x: Float[Array, "B T *heads D"],
  positions: Int[Array, "B T"],
  base: float = 10_000.0,
  scaling: Scaling | None = None,
) -> Float[Array, "B T *heads D"]:
  """Rotates dimensions j and j + D/2 of every head by the angle position · base^(−2j/D) (RoFormer, arXiv:2104.09864, §3.2).

  Layouts that interleave (pairs 2j, 2j+1) hold the same numbers in permuted rows of W_Q and W_K.

  Args:
    x: queries or keys, any number of head axes between T and D.
    positions: position of each token; it need not start at 0.
    base: the longest wavelength is 2π·base^(1 − 2/D).
    scaling: of the angles; None for none.

  Returns:
    The rotated x in its own dtype; angles and the rotation are float32 (or x's float64).

  Raises:
    ValueError: D is odd, or positions are not x's [B, T].
  """
  width = x.shape[-1]
  if width % 2:
    raise ValueError(
      f"x's last axis must be even to be rotated in halves, got {width} in shape {x.shape}"
    )
  if positions.shape != x.shape[:2]:
    raise ValueError(
      f"positions must be [B, T] = {x.shape[:2]}, got shape {positions.shape}"
    )
  dtype = jnp.promote_types(jnp.float32, x.dtype)
  frequencies = jnp.asarray(base, dtype) ** (
    -jnp.arange(0, width, 2, dtype=dtype) / width
  )
  frequencies, size = (
    (frequencies, 1.0) if scaling is None else scaling.apply(frequencies, base)
  )
  angles = positions.astype(dtype)[..., None] * frequencies
  angles = angles.reshape(*positions.shape, *[1] * (x.ndim - 3), width // 2)
  rotate = rotate_by_product if platform() == "tpu" else rotate_halves
  return rotate(
    x,
    *(
      checkpoint_name(part, ANGLES)
      for part in (size * jnp.sin(angles), size * jnp.cos(angles))
    ),
  )


def rotate_halves(
  x: Float[Array, "B T *heads D"],
  sin: Float[Array, "B T *ones half"],
  cos: Float[Array, "B T *ones half"],
) -> Float[Array, "B T *heads D"]:
  """(x₁ cos − x₂ sin, x₂ cos + x₁ sin), where x₁ and x₂ are the halves of x's last axis."""
  first, second = jnp.split(x.astype(sin.dtype), 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  ).astype(x.dtype)


@jax.custom_vjp
def rotate_by_product(
  x: Float[Array, "B T *heads D"],
  sin: Float[Array, "B T *ones half"],
  cos: Float[Array, "B T *ones half"],
) -> Float[Array, "B T *heads D"]:
  """x cos + (−x₂, x₁) sin. A product with a matrix of 0, 1 and −1 exchanges the halves, without rounding.

  It is for TPUs, where halves of 128 lanes do not fill the registers. In `rotate_halves` XLA writes the two halves to memory separately,
  padded to twice their size, and joins them in another pass: 145 ms of 1,442 by the compiler's estimate for diff_1b on v5e:4x4. This form
  takes 63 ms.
  """
  half = x.shape[-1] // 2
  eye = jnp.eye(half, dtype=x.dtype)
  exchange = jnp.block(
    [[jnp.zeros_like(eye), eye], [-eye, jnp.zeros_like(eye)]]
  )
  precision = (
    lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
  )
  exchanged = jnp.einsum(
    "...d,de->...e",
    x,
    exchange,
    precision=precision,
    preferred_element_type=sin.dtype,
  )
  sin, cos = (jnp.concatenate([part, part], axis=-1) for part in (sin, cos))
  return (x.astype(sin.dtype) * cos + exchanged * sin).astype(x.dtype)


def _rotate_forward(x, sin, cos):
  return rotate_by_product(x, sin, cos), (sin, cos)


def _rotate_backward(angles, d_out):
  """Rotates back. Positions have no gradient."""
  sin, cos = angles
  return (
    rotate_by_product(d_out, -sin, cos),
    jnp.zeros_like(sin),
    jnp.zeros_like(cos),
  )


rotate_by_product.defvjp(_rotate_forward, _rotate_backward)
