from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import pytest

from diffjax.ops.swiglu import swiglu


@pytest.mark.parametrize(
  ("platform", "generation", "held"),
  [("cpu", "", 0), ("tpu", "v5e", 1), ("tpu", "v6e", 2)],
)
def test_value_and_gradients_are_the_formulas(
  platform, generation, held, monkeypatch
):
  """On TPU each is held together, which changes no number."""
  monkeypatch.setattr("diffjax.ops.swiglu.platform", lambda: platform)
  monkeypatch.setattr("diffjax.ops.swiglu.tpu_generation", lambda: generation)
  gate, up, d_out = jax.random.normal(jax.random.key(0), (3, 2, 5, 7))
  formula = lambda gate, up: gate / (1 + jnp.exp(-gate)) * up
  of = lambda function: jax.jit(
    lambda: (function(gate, up), *jax.vjp(function, gate, up)[1](d_out))
  )()
  chex.assert_trees_all_close(
    of(lambda gate, up: swiglu(gate, up)), of(formula), rtol=1e-5, atol=1e-6
  )
  program = jax.make_jaxpr(
    lambda gate, up, d_out: (
      swiglu(gate, up),
      jax.vjp(swiglu, gate, up)[1](d_out),
    )
  )(gate, up, d_out)
  assert str(program).count("optimization_barrier") >= held and (
    "optimization_barrier" in str(program)
  ) == (held > 0)
