from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.rope import Scaling, rope, rotate_by_product, rotate_halves
from tests.harness.tolerances import FLOAT32


def normal(*shape: int) -> np.ndarray:
  return np.random.default_rng(0).standard_normal(shape, np.float32)


def rotate_in_numpy(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
  """Returns x whose halves are rotated as real and imaginary parts."""
  real, imaginary = np.split(x, 2, axis=-1)
  rotated = (real + 1j * imaginary) * np.exp(1j * angles)
  rotated = np.concatenate([rotated.real, rotated.imag], axis=-1)
  return rotated.astype(np.float32)


@pytest.mark.parametrize(
  ("positions", "tolerance"),
  [
    ([[0, 1, 2, 0, 1], [2, 3, 0, 1, 2]], FLOAT32),
    # An angle of thousands has an error of 1e-4 in float32.
    ([[0, 1, 2, 0, 1], [7, 8, 9, 4000, 3]], {"rtol": 0, "atol": 2e-3}),
  ],
)
def test_rope_equals_complex_rotation(positions, tolerance):
  """Pair i of N is rotated by an angle of position · base^(−i / N)."""
  x = normal(2, 5, 3, 2, 8)  # [batch, tokens, heads, maps, width]

  actual = jax.jit(rope)(x, np.array(positions), base=100.0)

  # The 8 numbers of a head are 4 pairs.
  frequencies = np.array([1, 100**-0.25, 100**-0.5, 100**-0.75])
  angles = np.multiply.outer(positions, frequencies)  # [batch, tokens, pairs]
  expected = rotate_in_numpy(x, angles[:, :, None, None])
  chex.assert_trees_all_close(actual, expected, **tolerance)


@pytest.mark.parametrize(
  ("kind", "high_frequencies", "factor"),
  [
    ("linear", [0.4, 0.0775691, 0.0150424, 0.00291707], 1.0),
    ("llama3", [1.0, 0.193923, 0.037606, 0.0031514], 1.0),
    (
      "yarn",
      [1.0, 0.164834, 0.0263242, 0.00401097],
      # YaRN multiplies queries and keys by 1 + 0.1 log 2.5.
      1.0916290731874154,
    ),
  ],
)
def test_scaling_equals_transformers(kind, high_frequencies, factor):
  """The expected frequencies were computed with transformers 5.24."""
  # All kinds divide the frequencies of long waves, base^(−i / N), by 2.5.
  low_frequencies = [0.000565685, 0.000109699, 2.12732e-05, 4.12535e-06]
  frequencies = high_frequencies + low_frequencies
  positions = [0, 1, 30, 400, 2400]
  x = normal(1, 5, 1, 16)  # [batch, tokens, heads, width]

  scaling = Scaling(kind, factor=2.5, original_length=1000)
  rotate = functools.partial(rope, base=500_000.0, scaling=scaling)
  actual = np.asarray(jax.jit(rotate)(x, np.array([positions])))

  angles = np.outer(positions, frequencies)
  expected = rotate_in_numpy(x, angles[None, :, None]) * np.float32(factor)
  # The frequencies have six digits, so errors of angles grow with the position.
  chex.assert_trees_all_close(actual, expected, rtol=1e-7, atol=4e-3)
  chex.assert_trees_all_close(
    actual[:, :3], expected[:, :3], rtol=1e-7, atol=1e-4
  )


def test_error_lists_the_kinds_of_scaling():
  message = "kind must be 'linear', 'llama3' or 'yarn'; got 'dynamic'"
  with pytest.raises(ValueError, match=message):
    Scaling("dynamic", 2.0, 1000)


def test_products_depend_only_on_distance():
  """Products of queries and keys stay if all tokens move by 500 positions."""
  q = normal(1, 6, 2, 16)
  k = normal(1, 6, 2, 16) + 1

  @jax.jit
  def products(first_position):
    positions = first_position + jnp.arange(6)[None]
    rotated_q = rope(q, positions, 1e4)
    rotated_k = rope(k, positions, 1e4)
    return jnp.einsum("bthd,bshd->bhts", rotated_q, rotated_k)

  at_start = products(first_position=0)
  moved = products(first_position=500)

  chex.assert_trees_all_close(moved, at_start, atol=1e-3)
  # They would also stay if nothing were rotated.
  without_rope = np.einsum("bthd,bshd->bhts", q, k)
  assert not np.allclose(at_start, without_rope, atol=1e-1)


def test_rope_of_bfloat16_is_computed_in_float32():
  x = normal(1, 4, 2, 8).astype(jnp.bfloat16)
  # bfloat16 cannot represent this position.
  positions = np.full((1, 4), 30_001)
  rotate = jax.jit(rope)

  actual = rotate(x, positions, 1e4)

  expected = np.asarray(rotate(x.astype(np.float32), positions, 1e4))
  # chex also compares the dtypes.
  chex.assert_trees_all_equal(actual, expected.astype(jnp.bfloat16))


def rotation_and_gradient(rotate, dtype):
  """Returns the result and the gradient of one of the two rotations."""
  x = normal(2, 5, 3, 2, 8).astype(dtype)
  rng = np.random.default_rng(1)
  angles = rng.uniform(0, 3, (2, 5, 1, 1, 4)).astype(np.float32)
  d_out = rng.standard_normal(x.shape, np.float32).astype(dtype)

  @jax.jit
  def program(x, d_out):
    out, vjp = jax.vjp(lambda x: rotate(x, jnp.sin(angles), jnp.cos(angles)), x)
    return out, vjp(d_out)[0]

  return program(x, d_out)


@pytest.mark.parametrize(
  "dtype",
  [
    pytest.param(jnp.bfloat16, id="bfloat16"),
    pytest.param(jnp.float32, id="float32"),
  ],
)
def test_rotation_for_tpus_equals_the_other_one(dtype):
  """`rotate_by_product` is for TPUs, and `rotate_halves` for other devices."""
  actual = rotation_and_gradient(rotate_by_product, dtype)

  expected = rotation_and_gradient(rotate_halves, dtype)
  # They differ only in the order of an addition, so in at most one bit.
  chex.assert_trees_all_close(
    actual, expected, rtol=float(jnp.finfo(dtype).eps), atol=1e-6
  )


def test_program_for_tpus_rotates_by_products(monkeypatch):
  """On other devices, x is split into halves.

  Half of a head would not fill the registers of a TPU.
  """
  monkeypatch.setattr("diffjax.ops.rope.platform", lambda: "tpu")
  x = normal(1, 4, 2, 8)
  positions = np.zeros((1, 4), np.int32)

  program = str(jax.make_jaxpr(rope)(x, positions))

  assert "dot_general" in program
  assert "split" not in program


def test_width_must_be_even():
  """RoPE rotates pairs of numbers."""
  x = normal(1, 4, 2, 7)
  positions = np.zeros((1, 4), np.int32)

  with pytest.raises(ValueError, match="x's last axis"):
    rope(x, positions)


def test_positions_must_have_a_batch():
  """Each sequence has positions of its own."""
  x = normal(1, 4, 2, 8)
  positions = np.zeros((4,), np.int32)

  with pytest.raises(ValueError, match="positions"):
    rope(x, positions)
