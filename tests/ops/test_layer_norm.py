from __future__ import annotations

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from diffjax.ops.layer_norm import layer_norm


def test_layer_norm_equals_flax():
  x = 3 + jax.random.normal(jax.random.key(0), (3, 5, 8))
  gain = jax.random.normal(jax.random.key(1), (8,))
  shift = jax.random.normal(jax.random.key(2), (8,))

  actual = layer_norm(x, gain, shift, eps=0.1)

  params = {"scale": gain, "bias": shift}
  expected = nn.LayerNorm(epsilon=0.1).apply({"params": params}, x)
  # Flax computes the variance as E[x²] − E[x]², which is less accurate.
  chex.assert_trees_all_close(actual, expected, rtol=0, atol=1e-5)


def test_layer_norm_of_bfloat16_is_computed_in_float32():
  x = 1e3 + jax.random.normal(jax.random.key(0), (4, 512))
  x = x.astype(jnp.bfloat16)
  gain, shift = 1 + jax.random.normal(jax.random.key(1), (2, 512))

  actual = layer_norm(x, gain, shift)

  expected = layer_norm(x.astype(jnp.float32), gain, shift)
  # chex also compares the dtypes.
  chex.assert_trees_all_equal(actual, expected.astype(jnp.bfloat16))


def test_gradient_of_equal_numbers_is_finite():
  """Their variance is 0. Without ε, the norm would divide by 0."""

  def sum_of_norm(x):
    return jnp.sum(layer_norm(x, jnp.ones(8), jnp.zeros(8)))

  gradient = jax.grad(sum_of_norm)(jnp.ones((2, 8)))

  chex.assert_tree_all_finite(gradient)
