from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from diffjax.ops.poly_norm import poly_norm


def by_hand(x, weights, constant, eps):
  x = np.asarray(x, np.float64)
  normed = [
    power / np.sqrt((power**2).mean(-1, keepdims=True) + eps)
    for power in (x**3, x**2, x)
  ]
  return sum(
    weight * power
    for weight, power in zip(
      np.asarray(weights, np.float64), normed, strict=True
    )
  ) + float(constant)


def test_formula():
  x, weights, constant = (
    jax.random.normal(jax.random.key(0), (3, 5, 8)),
    jnp.array([0.2, -0.7, 1.5]),
    jnp.float32(0.3),
  )
  np.testing.assert_allclose(
    poly_norm(x, weights, constant),
    by_hand(x, weights, constant, 1e-6),
    rtol=2e-5,
    atol=1e-6,
  )
  np.testing.assert_allclose(
    poly_norm(x, weights, constant, 0.1),
    by_hand(x, weights, constant, 0.1),
    rtol=2e-5,
    atol=1e-6,
  )


def test_computes_in_float32_and_cubes_do_not_overflow():
  x = (1e4 * jax.random.normal(jax.random.key(0), (4, 64))).astype(jnp.bfloat16)
  weights, constant = jnp.array([0.2, -0.7, 1.5]), jnp.float32(0.3)
  out = poly_norm(x, weights, constant)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(out, np.float64),
    by_hand(np.asarray(x, np.float64), weights, constant, 1e-6),
    rtol=2e-2,
    atol=1e-2,
  )


def test_gradients_and_zeros():
  with jax.enable_x64(True):
    arguments = (
      jax.random.normal(jax.random.key(0), (2, 5), jnp.float64),
      jnp.array([0.2, -0.7, 1.5]),
      jnp.array(0.3),
    )
    check_grads(
      lambda *arguments: poly_norm(*arguments, 1e-3),
      arguments,
      order=1,
      modes=["rev"],
    )
  gradient = jax.grad(
    lambda x: jnp.sum(poly_norm(x, jnp.ones(3), jnp.float32(0)))
  )(jnp.zeros((2, 8)))
  assert np.isfinite(gradient).all()


def test_means_are_of_all_shards():
  """The feed-forward axis over devices: each alone would take the mean of its own columns."""
  x, weights = (
    jax.random.normal(jax.random.key(0), (2, 3, 32)) * jnp.arange(32.0),
    jnp.array([0.2, -0.7, 1.5]),
  )
  mesh = jax.make_mesh((8,), ("tensor",))
  sharded = jax.device_put(x, NamedSharding(mesh, P(None, None, "tensor")))
  run = jax.jit(poly_norm)
  np.testing.assert_allclose(
    run(sharded, weights, jnp.float32(0.3)),
    run(x, weights, jnp.float32(0.3)),
    rtol=1e-5,
    atol=1e-6,
  )
