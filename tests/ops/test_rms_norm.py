from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.rms_norm import rms_norm
from tests.harness.tolerances import FLOAT32


def numpy_rms_norm(x: jax.Array, eps: float) -> np.ndarray:
  """Returns x divided by the root of its mean square."""
  x = np.asarray(x)
  mean_square = np.mean(x**2, axis=-1, keepdims=True)
  return x / np.sqrt(mean_square + eps)


def test_rms_norm_equals_the_formula():
  x = jax.random.normal(jax.random.key(0), (3, 5, 8))

  actual = rms_norm(x, eps=0.1)

  expected = numpy_rms_norm(x, eps=0.1)
  chex.assert_trees_all_close(actual, expected, **FLOAT32)


def test_gain_is_a_factor():
  x = jax.random.normal(jax.random.key(0), (3, 5, 8))
  gain = np.arange(8, dtype=np.float32)

  actual = rms_norm(x, gain, eps=0.1)

  expected = numpy_rms_norm(x, eps=0.1) * gain
  chex.assert_trees_all_close(actual, expected, **FLOAT32)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
  x = 1e3 * jax.random.normal(jax.random.key(0), (4, 512))
  x = x.astype(jnp.bfloat16)
  # The gain is float32. It is not rounded before the product.
  gain = 1 + jax.random.normal(jax.random.key(1), (512,))

  actual = rms_norm(x, gain)

  expected = rms_norm(x.astype(jnp.float32), gain).astype(jnp.bfloat16)
  # chex also compares the dtypes.
  chex.assert_trees_all_equal(actual, expected)


def test_gradient_of_zeros_is_finite():
  """Without ε, the norm would divide by 0."""

  def sum_of_norm(x):
    return jnp.sum(rms_norm(x))

  gradient = jax.grad(sum_of_norm)(jnp.zeros((2, 8)))

  chex.assert_tree_all_finite(gradient)


def test_gain_must_be_as_wide_as_x():
  x = jnp.ones((2, 8))
  gain = jnp.ones(4)

  with pytest.raises(ValueError, match="gain"):
    rms_norm(x, gain)
