from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.rope import Scaling, rope, rotate_by_product, rotate_halves


def _x(*shape):
  return jax.random.normal(jax.random.key(0), shape)


def test_against_complex_rotation():
  x, positions = (
    _x(2, 5, 3, 2, 8),
    jnp.array([[0, 1, 2, 0, 1], [7, 8, 9, 4000, 3]]),
  )
  angles = np.asarray(positions)[:, :, None, None, None] * 100.0 ** (
    -np.arange(4) * 2 / 8
  )
  turned = (np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])) * np.exp(
    1j * angles
  )
  chex.assert_trees_all_close(
    rope(x, positions, 100.0),
    np.concatenate([turned.real, turned.imag], -1).astype(np.float32),
    atol=2e-3,
    rtol=0,
  )
  chex.assert_trees_all_close(
    rope(x, positions, 100.0)[0],
    np.concatenate([turned.real, turned.imag], -1).astype(np.float32)[0],
    atol=1e-6,
  )


# What transformers 5.24 gives for D 16, base 500,000, factor 2.5 and rows of 1000 tokens.
STRETCHED = {
  "linear": (
    [
      0.4,
      0.0775691,
      0.0150424,
      0.00291707,
      0.000565685,
      0.000109699,
      2.12732e-05,
      4.12535e-06,
    ],
    1.0,
  ),
  "llama3": (
    [
      1.0,
      0.193923,
      0.037606,
      0.0031514,
      0.000565685,
      0.000109699,
      2.12732e-05,
      4.12535e-06,
    ],
    1.0,
  ),
  "yarn": (
    [
      1.0,
      0.164834,
      0.0263242,
      0.00401097,
      0.000565685,
      0.000109699,
      2.12732e-05,
      4.12535e-06,
    ],
    1.0916290731874154,
  ),
}


def test_an_unknown_way_to_stretch_is_refused():
  with pytest.raises(
    ValueError, match="kind must be 'linear', 'llama3' or 'yarn'; got 'dynamic'"
  ):
    Scaling("dynamic", 2.0, 1000)


@pytest.mark.parametrize("kind", STRETCHED)
def test_angles_are_stretched_as_transformers_does(kind):
  x, positions, (frequencies, size) = (
    _x(1, 5, 1, 16),
    jnp.array([[0, 1, 30, 400, 2400]]),
    STRETCHED[kind],
  )
  angles = np.asarray(positions)[:, :, None, None] * np.array(frequencies)
  turned = (
    (np.asarray(x[..., :8]) + 1j * np.asarray(x[..., 8:]))
    * np.exp(1j * angles)
    * size
  )
  got = rope(x, positions, 500_000.0, Scaling(kind, 2.5, 1000))
  np.testing.assert_allclose(
    got, np.concatenate([turned.real, turned.imag], -1), atol=4e-3
  )
  np.testing.assert_allclose(
    got[:, :3], np.concatenate([turned.real, turned.imag], -1)[:, :3], atol=1e-4
  )


def test_products_depend_on_distance_alone():
  q, k = _x(1, 6, 2, 16), _x(1, 6, 2, 16) + 1
  product = lambda start: jnp.einsum(
    "bthd,bshd->bhts",
    *(rope(x, start + jnp.arange(6)[None], 1e4) for x in (q, k)),
  )
  chex.assert_trees_all_close(product(0), product(500), atol=1e-3)
  assert not np.allclose(
    product(0), jnp.einsum("bthd,bshd->bhts", q, k), atol=1e-1
  )


def test_dtype_and_angles_are_wide():
  x = _x(1, 4, 2, 8).astype(jnp.bfloat16)
  positions = jnp.full((1, 4), 30_001)  # not a bfloat16
  out = rope(x, positions, 1e4)
  assert out.dtype == jnp.bfloat16
  chex.assert_trees_all_equal(
    out, rope(x.astype(jnp.float32), positions, 1e4).astype(jnp.bfloat16)
  )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_form_for_tpus_rounds_as_the_other_does(dtype):
  """Values and gradients, to the bit of the dtype but for the order of one addition."""
  x, angles = (
    _x(2, 5, 3, 2, 8).astype(dtype),
    jax.random.uniform(jax.random.key(1), (2, 5, 1, 1, 4), maxval=3.0),
  )
  d_out = jax.random.normal(jax.random.key(2), x.shape, dtype)
  of = lambda rotate: jax.jit(
    lambda x, d_out: (
      jax.vjp(lambda x: rotate(x, jnp.sin(angles), jnp.cos(angles)), x)[1](
        d_out
      )
      + (rotate(x, jnp.sin(angles), jnp.cos(angles)),)
    )
  )(x, d_out)
  ours, plain = of(rotate_by_product), of(rotate_halves)
  chex.assert_trees_all_close(
    ours, plain, rtol=float(jnp.finfo(dtype).eps), atol=1e-6
  )
  wrong = of(lambda x, sin, cos: rotate_by_product(x, -sin, cos))
  assert not np.allclose(np.float32(wrong[0]), np.float32(plain[0]), atol=1e-2)


def test_a_tpus_program_takes_the_form_for_tpus(monkeypatch):
  monkeypatch.setattr("diffjax.ops.rope.platform", lambda: "tpu")
  text = str(
    jax.make_jaxpr(lambda x: rope(x, jnp.zeros((1, 4), jnp.int32)))(
      _x(1, 4, 2, 8)
    )
  )
  assert "dot_general" in text and "split" not in text


def test_bad_arguments():
  with pytest.raises(ValueError, match="x's last axis"):
    rope(_x(1, 4, 2, 7), jnp.zeros((1, 4), jnp.int32))
  with pytest.raises(ValueError, match="positions"):
    rope(_x(1, 4, 2, 8), jnp.zeros((4,), jnp.int32))
