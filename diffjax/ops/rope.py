"""Rotary position embedding with the half-split layout."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from diffjax.ops.platform import platform

# The name of the sines and cosines, for remat policies. All layers share them,
# so they are kept once.
ANGLES = "rope_angles"

# Bounds of "llama3" and "yarn", in rotations within the original length. Pairs
# with fewer rotations than the low bound are scaled, pairs with more than the
# high bound are not, and pairs between the bounds are scaled in part.
_LLAMA3_LOW = 1
_LLAMA3_HIGH = 4
_YARN_LOW = 1  # α
_YARN_HIGH = 32  # β


@dataclasses.dataclass(frozen=True)
class Scaling:
  """How rotary angles are scaled for rows that are longer than in training.

  Attributes:
    kind: "linear" scales all angles (position interpolation, arXiv:2306.15595).
      "llama3" scales only the slow ones (Llama 3.1). "yarn" does the same with
      other bounds, and also scales sines and cosines (arXiv:2309.00071).
    factor: how many times as long the rows become.
    original_length: the length of a row in training, in tokens.

  Raises:
    ValueError: if the kind is unknown.
  """

  kind: str
  factor: float
  original_length: int

  def __post_init__(self):
    if self.kind not in ("linear", "llama3", "yarn"):
      raise ValueError(
        f"kind must be 'linear', 'llama3' or 'yarn'; got {self.kind!r}"
      )

  def scale_frequencies(
    self, frequencies: Float[Array, "half"], base: float
  ) -> tuple[Float[Array, "half"], float]:
    """Returns the scaled frequencies, and the factor on sines and cosines.

    A scaled frequency is divided by `factor`, the new row length relative to
    the length in training. "linear" scales all frequencies. The other kinds do
    not scale pairs that rotate often in a row, and scale some pairs in part.

    Args:
      frequencies: the angle of each pair per position.
      base: the base of the frequencies.
    """
    amplitude = 1.0
    if self.kind == "linear":
      return frequencies / self.factor, amplitude
    if self.kind == "llama3":
      unscaled_share = self._llama3_unscaled_share(frequencies)
    else:
      unscaled_share = self._yarn_unscaled_share(frequencies, base)
      if self.factor > 1:
        amplitude = 0.1 * math.log(self.factor) + 1  # YaRN's temperature
    # 1 keeps a frequency, and 0 divides it by the factor.
    multiplier = unscaled_share + (1 - unscaled_share) / self.factor
    return frequencies * multiplier, amplitude

  def _llama3_unscaled_share(
    self, frequencies: Float[Array, "half"]
  ) -> Float[Array, "half"]:
    """Returns 1 for pairs that are not scaled, and 0 for scaled ones."""
    rotations = self.original_length * frequencies / (2 * math.pi)
    share = (rotations - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return jnp.clip(share, 0, 1)

  def _yarn_unscaled_share(
    self, frequencies: Float[Array, "half"], base: float
  ) -> Float[Array, "half"]:
    """Returns 1 for pairs that are not scaled, and 0 for scaled ones.

    Pairs with 32 or more rotations within the row of training are not scaled,
    and pairs with at most one are. Between them, the share falls linearly with
    the pair's index, unlike in "llama3".

    Args:
      frequencies: the angle of each pair per position, which falls with the
        index.
      base: the base of the frequencies.
    """
    half = frequencies.shape[0]  # the number of pairs
    # The share is 1 up to pair `first`, and 0 from pair `last` on.
    first = math.floor(self._pair_with_rotations(_YARN_HIGH, half, base))
    last = math.ceil(self._pair_with_rotations(_YARN_LOW, half, base))
    first = max(first, 0)
    last = min(last, 2 * half - 1)  # as in the authors' code
    pairs = jnp.arange(half, dtype=frequencies.dtype)
    # 0.001 prevents a division by 0, as in the authors' code.
    scaled_share = (pairs - first) / max(last - first, 0.001)
    return 1 - jnp.clip(scaled_share, 0, 1)

  def _pair_with_rotations(
    self, rotations: float, half: int, base: float
  ) -> float:
    """Returns the index j of the pair that rotates so often.

    Pair j rotates original_length · base^(−j/half) / 2π times within a row.
    """
    longest = self.original_length / (rotations * 2 * math.pi)
    return half * math.log(longest) / math.log(base)


@jax.named_scope("rope")
def rope(
  x: Float[Array, "B T *heads D"],
  positions: Int[Array, "B T"],
  base: float = 10_000.0,
  scaling: Scaling | None = None,
) -> Float[Array, "B T *heads D"]:
  """Rotates the pairs (j, j + D/2) of each head by position · base^(−2j/D).

  Source: RoFormer, arXiv:2104.09864, §3.2. Models with interleaved pairs
  (2j, 2j + 1) have the same numbers in permuted rows of W_Q and W_K.

  Args:
    x: queries or keys, with any number of axes between T and D.
    positions: the position of each token. It need not start at 0.
    base: the longest wavelength is 2π·base^(1 − 2/D).
    scaling: how the angles are scaled. None for unscaled.

  Returns:
    The rotated x in its dtype. Angles and rotation are computed in float32, or
    in x's float64.

  Raises:
    ValueError: if D is odd, or if positions are not x's [B, T].
  """
  width = x.shape[-1]
  if width % 2 != 0:
    raise ValueError(
      f"x's last axis must be even, to be rotated in pairs;"
      f" got {width} in shape {x.shape}"
    )
  if positions.shape != x.shape[:2]:
    raise ValueError(
      f"positions must be [B, T] = {x.shape[:2]}; got shape {positions.shape}"
    )
  dtype = jnp.promote_types(jnp.float32, x.dtype)

  exponents = -jnp.arange(0, width, 2, dtype=dtype) / width
  frequencies = jnp.asarray(base, dtype) ** exponents  # [D/2]
  amplitude = 1.0
  if scaling is not None:
    frequencies, amplitude = scaling.scale_frequencies(frequencies, base)

  angles = positions.astype(dtype)[..., None] * frequencies  # [B, T, D/2]
  # All heads have the same angles.
  num_head_axes = x.ndim - 3
  head_axes = (1,) * num_head_axes
  angles = angles.reshape(*positions.shape, *head_axes, width // 2)
  sin = checkpoint_name(amplitude * jnp.sin(angles), ANGLES)
  cos = checkpoint_name(amplitude * jnp.cos(angles), ANGLES)

  if platform() == "tpu":
    return rotate_by_product(x, sin, cos)  # the same, faster there
  return rotate_halves(x, sin, cos)


def rotate_halves(
  x: Float[Array, "B T *heads D"],
  sin: Float[Array, "B T *ones half"],
  cos: Float[Array, "B T *ones half"],
) -> Float[Array, "B T *heads D"]:
  """Returns (x₁ cos − x₂ sin, x₂ cos + x₁ sin) for the halves x₁, x₂ of x.

  Number j of x₁ and number j of x₂ are a pair, which is rotated by its angle.

  Args:
    x: queries or keys.
    sin: the sines of the D/2 angles, equal for all heads.
    cos: their cosines.
  """
  first, second = jnp.split(x.astype(sin.dtype), 2, axis=-1)
  rotated_first = first * cos - second * sin
  rotated_second = second * cos + first * sin
  rotated = jnp.concatenate([rotated_first, rotated_second], axis=-1)
  return rotated.astype(x.dtype)


@jax.custom_vjp
def rotate_by_product(
  x: Float[Array, "B T *heads D"],
  sin: Float[Array, "B T *ones half"],
  cos: Float[Array, "B T *ones half"],
) -> Float[Array, "B T *heads D"]:
  """Returns the same as `rotate_halves`, as x cos + (−x₂, x₁) sin.

  A product with a matrix of 0, 1 and −1 exchanges the halves, without rounding.

  This form is for TPUs, where halves of 128 lanes do not fill the registers. In
  `rotate_halves`, XLA writes the halves to memory separately, padded to twice
  their size, and joins them in another pass. That takes 145 ms of a step of
  1,442 for diff_1b on v5e:4x4, by the compiler's estimate. This form takes
  63 ms.
  """
  half = x.shape[-1] // 2
  eye = jnp.eye(half, dtype=x.dtype)
  zeros = jnp.zeros_like(eye)
  exchange = jnp.block([[zeros, eye], [-eye, zeros]])  # [D, D]
  precision = lax.Precision.HIGHEST
  if x.dtype == jnp.bfloat16:
    precision = lax.Precision.DEFAULT
  exchanged = jnp.einsum(
    "...d,de->...e",
    x,
    exchange,
    precision=precision,
    preferred_element_type=sin.dtype,
  )
  sin = jnp.concatenate([sin, sin], axis=-1)  # [B, T, ..., D]
  cos = jnp.concatenate([cos, cos], axis=-1)
  rotated = x.astype(sin.dtype) * cos + exchanged * sin
  return rotated.astype(x.dtype)


def _rotate_by_product_forward(x, sin, cos):
  return rotate_by_product(x, sin, cos), (sin, cos)


def _rotate_by_product_backward(residuals, d_rotated):
  sin, cos = residuals
  # The gradient is rotated in the opposite direction.
  dx = rotate_by_product(d_rotated, -sin, cos)
  # Positions have no gradient.
  return dx, jnp.zeros_like(sin), jnp.zeros_like(cos)


rotate_by_product.defvjp(
  _rotate_by_product_forward, _rotate_by_product_backward
)
