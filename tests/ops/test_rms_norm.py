from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.rms_norm import rms_norm
from tests.harness.tolerances import FLOAT32


def normal(*shape: int) -> np.ndarray:
  """Returns normally distributed numbers in float32."""
  return np.random.default_rng(0).standard_normal(shape, np.float32)


def numpy_rms_norm(x: np.ndarray, eps: float) -> np.ndarray:
  """Returns x divided by the root of its mean square."""
  mean_square = np.mean(x**2, axis=-1, keepdims=True)
  return x / np.sqrt(mean_square + eps)


def test_rms_norm_equals_the_formula():
  x = normal(3, 5, 8)

  actual = jax.jit(rms_norm)(x, eps=0.1)

  expected = numpy_rms_norm(x, eps=0.1)
  chex.assert_trees_all_close(actual, expected, **FLOAT32)


def test_gain_is_a_factor():
  x = normal(3, 5, 8)
  gain = np.arange(8, dtype=np.float32)

  actual = jax.jit(rms_norm)(x, gain, eps=0.1)

  expected = numpy_rms_norm(x, eps=0.1) * gain
  chex.assert_trees_all_close(actual, expected, **FLOAT32)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
  x = 1e3 * normal(4, 512)
  x = x.astype(jnp.bfloat16)
  # The gain is float32. It is not rounded before the product.
  gain = 1 + normal(512)
  norm = jax.jit(rms_norm)

  actual = norm(x, gain)

  expected = np.asarray(norm(x.astype(np.float32), gain))
  # chex also compares the dtypes.
  chex.assert_trees_all_equal(actual, expected.astype(jnp.bfloat16))


def test_gradient_of_zeros_is_finite():
  """Without ε, the norm would divide by 0."""

  def sum_of_norm(x):
    return jnp.sum(rms_norm(x))

  gradient = jax.jit(jax.grad(sum_of_norm))(np.zeros((2, 8), np.float32))

  chex.assert_tree_all_finite(gradient)


def test_gain_must_be_as_wide_as_x():
  x = np.ones((2, 8), np.float32)
  gain = np.ones(4, np.float32)

  with pytest.raises(ValueError, match="gain"):
    rms_norm(x, gain)
