from __future__ import annotations

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops import cross_entropy
from diffjax.ops.cross_entropy import (
  fused_cross_entropy,
  per_token_cross_entropy,
  reference_cross_entropy,
)

B, T, E, N = 3, 37, 16, 50


def _arguments():
  keys = jax.random.split(jax.random.key(0), 4)
  hidden, embedding = (
    jax.random.normal(keys[0], (B, T, E)),
    jax.random.normal(keys[1], (N, E)),
  )
  return (
    hidden,
    embedding,
    jax.random.randint(keys[2], (B, T), 0, N),
    jax.random.uniform(keys[3], (B, T)),
  )


def _value_and_grad(function, hidden, embedding, targets, weights, **options):
  loss = lambda hidden, embedding, weights: function(
    hidden, embedding, targets, weights, **options
  )
  return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(
    hidden, embedding, weights
  )


@pytest.mark.parametrize(
  ("chunk", "z_loss"),
  [(None, 1e-2), (64, 1e-2), (12, 0.0), (1, 1e-2)],
  ids=["one", "ragged", "even", "tokens"],
)
def test_value_and_gradients_equal_the_plain_formula(chunk, z_loss):
  arguments = _arguments()
  actual = _value_and_grad(
    fused_cross_entropy, *arguments, z_loss=z_loss, chunk=chunk
  )
  chex.assert_trees_all_close(
    actual,
    _value_and_grad(reference_cross_entropy, *arguments, z_loss=z_loss),
    rtol=1e-5,
    atol=1e-5,
  )
  value = jax.jit(
    lambda *a: fused_cross_entropy(*a, z_loss=z_loss, chunk=chunk)
  )(*arguments)  # without gradients it is other code
  chex.assert_trees_all_close(value, actual[0], rtol=1e-5)


@pytest.fixture
def for_tpu(monkeypatch):
  """As a TPU with so little memory is given the loss: a chunk of 16 tokens, since 4 bytes × 50 logits of each are a 16th of it."""
  chip = types.SimpleNamespace(hbm_capacity_bytes=16 * 4 * N * 16)
  monkeypatch.setattr(cross_entropy, "platform", lambda: "tpu")
  monkeypatch.setattr(cross_entropy, "_MIN_CHUNK_TOKENS", 1)
  monkeypatch.setattr(cross_entropy, "tpu_info", lambda: chip)
  return chip


def test_a_tpus_form_has_the_same_value_and_gradients(for_tpu):
  arguments = _arguments()
  program = jax.make_jaxpr(
    lambda *a: jax.value_and_grad(lambda h: fused_cross_entropy(h, *a[1:])[0])(
      a[0]
    )
  )(*arguments)
  assert f"f32[{B},4,{N}]" in str(
    program
  )  # 16 tokens of 3 rows are 5 of each, of which the next power of two is 4
  assert "scatter" not in str(program) and "optimization_barrier" in str(
    program
  )
  actual = _value_and_grad(fused_cross_entropy, *arguments, z_loss=1e-2)
  chex.assert_trees_all_close(
    actual,
    _value_and_grad(reference_cross_entropy, *arguments, z_loss=1e-2),
    rtol=1e-5,
    atol=1e-5,
  )


def test_a_tpu_with_memory_has_one_chunk(for_tpu):
  for_tpu.hbm_capacity_bytes *= B * T
  assert f"f32[{B},{T},{N}]" in str(
    jax.make_jaxpr(lambda *a: fused_cross_entropy(*a)[0])(*_arguments())
  )


def test_plain_formula_in_numpy():
  hidden, embedding, targets, weights = map(np.asarray, _arguments())
  logits = np.einsum("bte,ne->btn", hidden, embedding).astype(np.float64)
  lse = np.log(np.exp(logits).sum(-1))
  nll = lse - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
  loss, z_sum = jax.jit(lambda *a: fused_cross_entropy(*a, z_loss=0.5))(
    *_arguments()
  )
  np.testing.assert_allclose(z_sum, 0.5 * (weights * lse**2).sum(), rtol=1e-5)
  np.testing.assert_allclose(loss - z_sum, (weights * nll).sum(), rtol=1e-4)
  for chunk in (None, 30):
    per_token = jax.jit(
      lambda *a, chunk=chunk: per_token_cross_entropy(*a, chunk=chunk)
    )(hidden, embedding, targets)
    chex.assert_trees_all_close(
      per_token, nll.astype(np.float32), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("chunk", [None, 20])
def test_the_embeddings_gradient_is_summed_in_float32(chunk):
  """Of bfloat16 activations too: what comes out is not what bfloat16 can hold."""
  hidden, embedding, targets, weights = _arguments()
  loss = lambda embedding, hidden: fused_cross_entropy(
    hidden, embedding, targets, weights, chunk=chunk
  )[0]
  gradient = jax.jit(jax.grad(loss))(
    embedding, jnp.asarray(hidden, jnp.bfloat16)
  )
  assert gradient.dtype == jnp.float32
  rounded = gradient.astype(jnp.bfloat16).astype(jnp.float32)
  assert np.mean(np.asarray(gradient) != np.asarray(rounded)) > 0.9


def test_the_cotangent_scales():
  hidden, embedding, targets, weights = _arguments()
  loss = lambda h, e, w, factor: (
    factor * fused_cross_entropy(h, e, targets, w, chunk=20)[0]
  )
  gradient = functools.partial(
    jax.jit(jax.grad(loss, (0, 1, 2))), hidden, embedding, weights
  )
  chex.assert_trees_all_close(
    gradient(-3.0), jax.tree.map(lambda x: -3 * x, gradient(1.0)), rtol=1e-5
  )


@pytest.mark.parametrize("chunk", [None, 12])
def test_tokens_without_weight_are_ignored(chunk):
  hidden, embedding, targets, weights = _arguments()
  weights = weights.at[:, 5:11].set(0)
  spoilt = targets.at[:, 5:8].set(-100).at[:, 8:11].set(N + 7)
  actual, expected = (
    _value_and_grad(
      fused_cross_entropy,
      hidden,
      embedding,
      t,
      weights,
      z_loss=0.1,
      chunk=chunk,
    )
    for t in (spoilt, targets)
  )
  chex.assert_trees_all_equal(actual[0], expected[0])
  chex.assert_trees_all_equal(actual[1][:2], expected[1][:2])
  assert (actual[1][0][:, 5:11] == 0).all()


def test_bfloat16_hidden_sums_in_float32():
  hidden, embedding, targets, weights = _arguments()
  narrow = hidden.astype(jnp.bfloat16)
  (loss, _), (d_hidden, d_embedding, _) = _value_and_grad(
    fused_cross_entropy, narrow, embedding, targets, weights, chunk=12
  )
  assert (loss.dtype, d_hidden.dtype, d_embedding.dtype) == (
    jnp.float32,
    jnp.bfloat16,
    jnp.float32,
  )
  wide = (
    narrow.astype(jnp.float32),
    embedding.astype(jnp.bfloat16).astype(jnp.float32),
  )
  (expected, _), gradients = _value_and_grad(
    reference_cross_entropy, *wide, targets, weights
  )
  chex.assert_trees_all_close(
    loss, expected, rtol=1e-5
  )  # the same logits: products of bfloat16 are exact in float32
  chex.assert_trees_all_close(d_embedding, gradients[1], atol=2e-2, rtol=2e-2)
  chex.assert_trees_all_close(
    d_hidden.astype(jnp.float32), gradients[0], atol=4e-2, rtol=2e-2
  )


def test_logits_never_exist_whole():
  shape = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  tokens, vocabulary = 4 * 1024, 8192
  arguments = (
    shape(4, 1024, 32),
    shape(vocabulary, 32),
    shape(4, 1024, dtype=jnp.int32),
    shape(4, 1024),
  )

  def temporaries(function, **options):
    loss = lambda h, e, t, w: function(h, e, t, w, **options)[0]
    return (
      jax.jit(jax.grad(loss, (0, 1)))
      .lower(*arguments)
      .compile()
      .memory_analysis()
      .temp_size_in_bytes
    )

  logits = 4 * tokens * vocabulary
  assert (
    temporaries(fused_cross_entropy, chunk=256)
    < logits / 3
    < temporaries(reference_cross_entropy)
  )


@pytest.mark.parametrize(
  ("named", "changes"),
  [
    ("hidden", dict(hidden=jnp.zeros((T, E)))),
    ("embedding", dict(embedding=jnp.zeros((N, E + 1)))),
    ("targets", dict(targets=jnp.zeros((B, T + 1), jnp.int32))),
    ("targets", dict(targets=jnp.zeros((B, T)))),
    ("weights", dict(weights=jnp.zeros((B,)))),
    ("chunk", dict(chunk=0)),
  ],
)
def test_bad_arguments_are_named(named, changes):
  arguments = (
    dict(
      zip(
        ("hidden", "embedding", "targets", "weights"), _arguments(), strict=True
      )
    )
    | changes
  )
  with pytest.raises(ValueError, match=f"^{named} "):
    fused_cross_entropy(**arguments)
