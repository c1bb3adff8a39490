"""The tolerances of the tests, as keyword arguments of chex's assertions.

    chex.assert_trees_all_close(output, expected, **FLOAT32)

Values count as equal if |actual − expected| ≤ atol + rtol · |expected|. The
names say how the two values were computed, so a comparison uses the first name
below whose sentence is true for it. Use `chex.assert_trees_all_equal` if both
values come from the same operations in the same order.

A tolerance is an upper bound of rounding errors. A mistake, for example a mask
that is wrong by one key, changes values of order one by 1e-2 or more.

Results of attention are compared by their norms: `assert_close_in_norm`.
"""

from typing import Any, TypedDict

import chex
import jax
import numpy as np


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


def assert_close_in_norm(actual: Any, expected: Any, tolerance: float) -> None:
  """Checks ‖actual − expected‖₂ ≤ tolerance · ‖expected‖₂ for each array.

  Attention and its gradients are sums that round a few elements ten times worse
  than the others. A tolerance of single elements would have to allow that error
  for all of them.

  Args:
    actual: an array or a tree of arrays.
    expected: a tree with the same structure and shapes. An array of zeros must
      be reached exactly.
    tolerance: largest error, relative to the norm of an array.
  """
  chex.assert_trees_all_equal_shapes(actual, expected)
  expected_arrays = jax.tree.leaves(expected)
  actual_arrays = jax.tree_util.tree_leaves_with_path(actual)
  for (path, x), y in zip(actual_arrays, expected_arrays, strict=True):
    x = np.asarray(x, np.float64)
    y = np.asarray(y, np.float64)
    error = np.linalg.norm(x - y)
    limit = tolerance * np.linalg.norm(y)
    # This is also false if the error is NaN.
    assert error <= limit, (
      f"array{jax.tree_util.keystr(path)}: the norm of the error is"
      f" {error:.2e}, more than {limit:.2e}"
    )
