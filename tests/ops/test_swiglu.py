from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.swiglu import swiglu
from tests.harness.tolerances import FLOAT32


def reference_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns silu(gate) * up, by the definition."""
  return gate / (1 + jnp.exp(-gate)) * up


def value_and_gradients(function, gate, up, d_out):
  """Returns the output of a function, and the gradients of gate and up."""
  out, vjp = jax.vjp(function, gate, up)
  return out, vjp(d_out)


@pytest.mark.parametrize(
  ("platform", "generation", "num_barriers"),
  [
    pytest.param("cpu", "", 0, id="cpu"),
    # For the gradients.
    pytest.param("tpu", "v5e", 1, id="tpu_v5e"),
    # For the gradients, and for the result.
    pytest.param("tpu", "v6e", 2, id="tpu_v6e"),
  ],
)
def test_barriers_on_tpus_do_not_change_values_and_gradients(
  platform, generation, num_barriers, monkeypatch
):
  """A barrier keeps XLA from computing an array again in each later product."""
  monkeypatch.setattr("diffjax.ops.swiglu.platform", lambda: platform)
  monkeypatch.setattr("diffjax.ops.swiglu.tpu_generation", lambda: generation)
  rng = np.random.default_rng(0)
  gate, up, d_out = rng.standard_normal((3, 2, 5, 7), np.float32)

  # JAX would reuse the program of another platform for the same function.
  def swiglu_of_platform(gate, up):
    return swiglu(gate, up)

  program = functools.partial(value_and_gradients, swiglu_of_platform)

  actual = jax.jit(program)(gate, up, d_out)

  reference = functools.partial(value_and_gradients, reference_swiglu)
  expected = jax.jit(reference)(gate, up, d_out)
  chex.assert_trees_all_close(actual, expected, **FLOAT32)
  text = str(jax.make_jaxpr(program)(gate, up, d_out))
  assert text.count("optimization_barrier") == num_barriers
