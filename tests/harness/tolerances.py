"""The tolerances of the tests, as keyword arguments of chex's assertions.

    chex.assert_trees_all_close(output, expected, **FLOAT32)

Values count as equal if |actual − expected| ≤ atol + rtol · |expected|. The
names say how the two values were computed, so a comparison uses the first name
below whose sentence is true for it. Use `chex.assert_trees_all_equal` if both
values come from the same operations in the same order.

A tolerance is an upper bound of rounding errors. A mistake, for example a mask
that is wrong by one key, changes values of order one by 1e-2 or more.
"""

from typing import TypedDict


class Tolerance(TypedDict):
  """Keyword arguments of `chex.assert_trees_all_close`."""

  rtol: float
  atol: float


# Both in float64.
FLOAT64: Tolerance = {"rtol": 1e-12, "atol": 1e-12}

# One operation in float32, for example a norm, against the same in float64 or
# in another order of its sums.
FLOAT32: Tolerance = {"rtol": 1e-6, "atol": 1e-6}

# A layer or a gradient in float32: a sequence of operations and long sums.
FLOAT32_LAYER: Tolerance = {"rtol": 1e-5, "atol": 1e-5}

# A whole model, or a few training steps, in float32.
FLOAT32_MODEL: Tolerance = {"rtol": 1e-4, "atol": 1e-4}

# Attention and its gradients in float16. Weights and outputs are rounded to 10
# bits of mantissa, which is an error of at most 5e-4 of a number below 2.
FLOAT16_ATTENTION: Tolerance = {"rtol": 1e-3, "atol": 2e-3}

# Attention and its gradients in bfloat16, which has 7 bits of mantissa: an
# error of up to 4e-3 of a number below 2, at each of several roundings.
BFLOAT16_ATTENTION: Tolerance = {"rtol": 1e-2, "atol": 2e-2}
