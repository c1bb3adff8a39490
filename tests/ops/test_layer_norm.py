from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from diffjax.ops.layer_norm import layer_norm


def test_equals_flax():
  x, gain, shift = (
    jax.random.normal(jax.random.key(seed), shape)
    for seed, shape in enumerate([(3, 5, 8), (8,), (8,)])
  )
  want = nn.LayerNorm(epsilon=0.1).apply(
    {"params": {"scale": gain, "bias": shift}}, 3 + x
  )
  np.testing.assert_allclose(
    layer_norm(3 + x, gain, shift, 0.1), want, atol=1e-5
  )


def test_computes_in_float32():
  x = (1e3 + jax.random.normal(jax.random.key(0), (4, 512))).astype(
    jnp.bfloat16
  )
  gain, shift = 1 + jax.random.normal(jax.random.key(1), (2, 512))
  out = layer_norm(x, gain, shift)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(
    out, layer_norm(x.astype(jnp.float32), gain, shift).astype(jnp.bfloat16)
  )


def test_equal_numbers_have_finite_gradients():
  gradient = jax.grad(
    lambda x: jnp.sum(layer_norm(x, jnp.ones(8), jnp.zeros(8)))
  )(jnp.ones((2, 8)))
  assert np.isfinite(gradient).all()
