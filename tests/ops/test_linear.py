from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.linear import linear


@pytest.mark.parametrize(
  ("num_inputs", "num_outputs"),
  [
    pytest.param(3, 7, id="wider"),
    pytest.param(7, 3, id="narrower"),
    pytest.param(4, 4, id="square"),
  ],
)
@pytest.mark.parametrize(
  ("dtype", "tolerance"),
  [
    pytest.param(jnp.float32, 1e-6, id="float32"),
    pytest.param(jnp.bfloat16, 2e-2, id="bfloat16"),
  ],
)
def test_values_and_gradients_equal_numpys(
  num_inputs, num_outputs, dtype, tolerance
):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, 5, num_inputs))
  w = rng.standard_normal((num_inputs, num_outputs))
  dy = rng.standard_normal((2, 5, num_outputs))

  @jax.jit
  def value_and_gradients(x, w, dy):
    y, vjp = jax.vjp(linear, x, w)
    return y, *vjp(dy)

  y, dx, dw = value_and_gradients(
    x.astype(dtype), w.astype(dtype), dy.astype(dtype)
  )

  # y = x w, and the gradients of x and w for a gradient dy of y.
  actual = {"y": y, "dx": dx, "dw": dw}
  expected = {
    "y": x @ w,
    "dx": dy @ w.T,
    "dw": np.einsum("bti,bto->io", x, dy),
  }
  for name, array in actual.items():
    assert array.dtype == dtype
    chex.assert_trees_all_close(
      np.asarray(array, np.float64),
      expected[name],
      rtol=tolerance,
      atol=tolerance * np.abs(expected[name]).max(),
    )
