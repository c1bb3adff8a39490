from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.rms_norm import rms_norm


def test_formula():
  x, gain = jax.random.normal(jax.random.key(0), (3, 5, 8)), jnp.arange(8.0)
  expected = np.asarray(x) / np.sqrt(
    (np.asarray(x) ** 2).mean(-1, keepdims=True) + 0.1
  )
  chex.assert_trees_all_close(rms_norm(x, eps=0.1), expected, rtol=1e-5)
  chex.assert_trees_all_close(
    rms_norm(x, gain, 0.1),
    expected * np.arange(8.0, dtype=np.float32),
    rtol=1e-5,
  )


def test_computes_in_float32():
  x = (1e3 * jax.random.normal(jax.random.key(0), (4, 512))).astype(
    jnp.bfloat16
  )
  gain = 1 + jax.random.normal(
    jax.random.key(1), (512,)
  )  # float32: must not be rounded before the product
  out = rms_norm(x, gain)
  assert out.dtype == jnp.bfloat16
  chex.assert_trees_all_equal(
    out, rms_norm(x.astype(jnp.float32), gain).astype(jnp.bfloat16)
  )


def test_zeros_have_finite_gradients():
  gradient = jax.grad(lambda x: jnp.sum(rms_norm(x)))(jnp.zeros((2, 8)))
  assert np.isfinite(gradient).all()


def test_bad_gain():
  with pytest.raises(ValueError, match="gain"):
    rms_norm(jnp.ones((2, 8)), jnp.ones(4))
