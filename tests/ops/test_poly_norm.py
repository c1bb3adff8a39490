from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from diffjax.ops.poly_norm import poly_norm
from tests.harness.tolerances import FLOAT32

WEIGHTS = np.array([0.2, -0.7, 1.5], np.float32)
CONSTANT = np.float32(0.3)


def normal(*shape: int) -> np.ndarray:
  """Returns normally distributed numbers in float32."""
  return np.random.default_rng(0).standard_normal(shape, np.float32)


def numpy_poly_norm(x: np.ndarray, eps: float) -> np.ndarray:
  """Returns the weighted sum of normalized powers of x, in float64."""
  x = np.asarray(x, np.float64)
  result = np.full(x.shape, np.float64(CONSTANT))
  for weight, power in zip(np.float64(WEIGHTS), (x**3, x**2, x), strict=True):
    mean_square = np.mean(power**2, axis=-1, keepdims=True)
    result += weight * power / np.sqrt(mean_square + eps)
  return result


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_poly_norm_equals_the_formula(eps):
  x = normal(3, 5, 8)

  actual = jax.jit(poly_norm)(x, WEIGHTS, CONSTANT, eps)

  expected = numpy_poly_norm(x, eps)
  chex.assert_trees_all_close(
    np.asarray(actual, np.float64), expected, **FLOAT32
  )


def test_default_eps_is_1e_6():
  x = normal(3, 5, 8)

  norm = jax.jit(poly_norm)

  actual = norm(x, WEIGHTS, CONSTANT)

  expected = norm(x, WEIGHTS, CONSTANT, eps=1e-6)
  chex.assert_trees_all_equal(actual, expected)


def test_cubes_of_large_bfloat16_numbers_do_not_overflow():
  """Cubes of numbers near 10⁴ are near 10¹², and their squares near 10²⁴."""
  x = 1e4 * normal(4, 64)
  x = x.astype(jnp.bfloat16)

  actual = jax.jit(poly_norm)(x, WEIGHTS, CONSTANT)

  assert actual.dtype == jnp.bfloat16
  expected = numpy_poly_norm(x, eps=1e-6)
  chex.assert_trees_all_close(
    np.asarray(actual, np.float64), expected, rtol=2e-2, atol=1e-2
  )


def test_gradients_equal_finite_differences():
  with jax.enable_x64(True):
    x = np.random.default_rng(0).standard_normal((2, 5))
    weights = np.array([0.2, -0.7, 1.5])
    constant = np.array(0.3)

    @jax.jit
    def function(x, weights, constant):
      return poly_norm(x, weights, constant, eps=1e-3)

    # JAX compares the gradients with finite differences.
    check_grads(function, (x, weights, constant), order=1, modes=["rev"])


def test_gradient_of_zeros_is_finite():
  def sum_of_norm(x):
    return jnp.sum(poly_norm(x, jnp.ones(3), jnp.float32(0)))

  gradient = jax.jit(jax.grad(sum_of_norm))(np.zeros((2, 8), np.float32))

  chex.assert_tree_all_finite(gradient)


def test_means_are_over_the_columns_of_all_shards():
  """The columns have different sizes, and each shard holds four of them."""
  x = normal(2, 3, 32) * np.arange(32, dtype=np.float32)
  mesh = jax.make_mesh((8,), ("tensor",))
  sharding = NamedSharding(mesh, P(None, None, "tensor"))
  program = jax.jit(poly_norm)

  actual = program(jax.device_put(x, sharding), WEIGHTS, CONSTANT)

  expected = program(x, WEIGHTS, CONSTANT)
  chex.assert_trees_all_close(
    np.asarray(actual), np.asarray(expected), **FLOAT32
  )
