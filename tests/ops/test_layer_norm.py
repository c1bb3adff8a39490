from __future__ import annotations

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from diffjax.ops.layer_norm import layer_norm


def test_layer_norm_equals_flax():
  rng = np.random.default_rng(0)
  x = 3 + rng.standard_normal((3, 5, 8), np.float32)
  gain = rng.standard_normal(8, np.float32)
  shift = rng.standard_normal(8, np.float32)

  actual = jax.jit(layer_norm)(x, gain, shift, eps=0.1)

  params = {"scale": gain, "bias": shift}
  flax_norm = nn.LayerNorm(epsilon=0.1)
  expected = jax.jit(flax_norm.apply)({"params": params}, x)
  # Flax computes the variance as E[x²] − E[x]², which is less accurate.
  chex.assert_trees_all_close(actual, expected, rtol=0, atol=1e-5)


def test_layer_norm_of_bfloat16_is_computed_in_float32():
  rng = np.random.default_rng(0)
  x = 1e3 + rng.standard_normal((4, 512), np.float32)
  x = x.astype(jnp.bfloat16)
  gain, shift = 1 + rng.standard_normal((2, 512), np.float32)
  norm = jax.jit(layer_norm)

  actual = norm(x, gain, shift)

  expected = np.asarray(norm(x.astype(np.float32), gain, shift))
  # chex also compares the dtypes.
  chex.assert_trees_all_equal(actual, expected.astype(jnp.bfloat16))


def test_gradient_of_equal_numbers_is_finite():
  """Their variance is 0. Without ε, the norm would divide by 0."""

  def sum_of_norm(x):
    return jnp.sum(layer_norm(x, jnp.ones(8), jnp.zeros(8)))

  gradient = jax.jit(jax.grad(sum_of_norm))(np.ones((2, 8), np.float32))

  chex.assert_tree_all_finite(gradient)
