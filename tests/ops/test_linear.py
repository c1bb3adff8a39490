"""linear is a matrix product, and so is its gradient."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.linear import linear


@pytest.mark.parametrize("inputs, outputs", [(3, 7), (7, 3), (4, 4)])
@pytest.mark.parametrize(
  "dtype, rtol", [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)]
)
def test_values_and_gradients_equal_numpys(inputs, outputs, dtype, rtol):
  rng = np.random.default_rng(0)
  x, w, dy = (
    rng.standard_normal(shape)
    for shape in ((2, 5, inputs), (inputs, outputs), (2, 5, outputs))
  )
  y, pull = jax.vjp(linear, jnp.asarray(x, dtype), jnp.asarray(w, dtype))
  found = (y, *pull(jnp.asarray(dy, dtype)))
  chex.assert_trees_all_equal_dtypes(found, (dtype(0), dtype(0), dtype(0)))
  expected = (x @ w, dy @ w.T, np.einsum("bti,bto->io", x, dy))
  for mine, theirs in zip(found, expected, strict=True):
    np.testing.assert_allclose(
      np.asarray(mine, np.float64),
      theirs,
      rtol=rtol,
      atol=rtol * np.abs(theirs).max(),
    )
