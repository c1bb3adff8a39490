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
from tests.harness.tolerances import FLOAT32_LAYER, FLOAT32_MODEL

# Batch, tokens, width and vocabulary.
B, T, E, N = 3, 37, 16, 50


def make_arguments() -> tuple[np.ndarray, ...]:
  """Returns random hidden states, embedding, targets and weights."""
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal((B, T, E), np.float32)
  embedding = rng.standard_normal((N, E), np.float32)
  targets = rng.integers(0, N, (B, T), np.int32)
  weights = rng.random((B, T), np.float32)
  return hidden, embedding, targets, weights


def value_and_gradients(
  function, hidden, embedding, targets, weights, **options
):
  """Returns ((loss, z_loss), gradients of hidden, embedding and weights)."""

  def loss(hidden, embedding, weights):
    return function(hidden, embedding, targets, weights, **options)

  program = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
  return program(hidden, embedding, weights)


CHUNKS = [
  pytest.param(None, 1e-2, id="one_chunk"),
  pytest.param(64, 1e-2, id="last_chunk_is_shorter"),
  pytest.param(12, 0.0, id="without_z_loss"),
  pytest.param(1, 1e-2, id="chunks_of_a_token"),
]


@pytest.mark.parametrize(("chunk", "z_loss"), CHUNKS)
def test_value_and_gradients_equal_the_reference(chunk, z_loss):
  arguments = make_arguments()

  actual = value_and_gradients(
    fused_cross_entropy, *arguments, z_loss=z_loss, chunk=chunk
  )

  expected = value_and_gradients(
    reference_cross_entropy, *arguments, z_loss=z_loss
  )
  chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)


@pytest.mark.parametrize(("chunk", "z_loss"), CHUNKS)
def test_value_without_gradients_equals_the_reference(chunk, z_loss):
  arguments = make_arguments()

  fused = functools.partial(fused_cross_entropy, z_loss=z_loss, chunk=chunk)
  actual = jax.jit(fused)(*arguments)

  reference = functools.partial(reference_cross_entropy, z_loss=z_loss)
  expected = jax.jit(reference)(*arguments)
  chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def expected_losses() -> tuple[np.ndarray, np.ndarray]:
  """Returns the loss and the log-sum-exp of each token, by NumPy."""
  hidden, embedding, targets, _ = make_arguments()
  logits = np.einsum("bte,ne->btn", hidden, embedding).astype(np.float64)
  log_sum_exp = np.log(np.exp(logits).sum(axis=-1))
  target_logits = np.take_along_axis(logits, targets[..., None], axis=-1)
  return log_sum_exp - target_logits[..., 0], log_sum_exp


def test_losses_equal_numpys():
  """The z-loss is a penalty on the log-sum-exp of the logits.

  The result `loss` is the sum of the weighted losses and of the z-loss.
  """
  hidden, embedding, targets, weights = make_arguments()

  program = jax.jit(functools.partial(fused_cross_entropy, z_loss=0.5))
  loss, z_loss = program(hidden, embedding, targets, weights)

  losses, log_sum_exp = expected_losses()
  expected_loss = np.sum(weights * losses)
  expected_z_loss = 0.5 * np.sum(weights * log_sum_exp**2)
  np.testing.assert_allclose(z_loss, expected_z_loss, rtol=1e-5)
  loss_without_z_loss = np.asarray(loss) - np.asarray(z_loss)
  np.testing.assert_allclose(loss_without_z_loss, expected_loss, rtol=1e-4)


@pytest.mark.parametrize("chunk", [None, 30])
def test_losses_per_token_equal_numpys(chunk):
  """A chunk has at most this many tokens. By default, all are in one chunk."""
  hidden, embedding, targets, _ = make_arguments()

  program = jax.jit(functools.partial(per_token_cross_entropy, chunk=chunk))
  losses = program(hidden, embedding, targets)

  expected, _ = expected_losses()
  np.testing.assert_allclose(losses, expected, **FLOAT32_MODEL)


@pytest.fixture
def tpu(monkeypatch):
  """A TPU whose memory is so small that a chunk has 16 tokens.

  The logits of a chunk take at most a 16th of the memory, and each token has N
  logits of 4 bytes.
  """
  device = types.SimpleNamespace(hbm_capacity_bytes=16 * 16 * 4 * N)
  monkeypatch.setattr(cross_entropy, "platform", lambda: "tpu")
  monkeypatch.setattr(cross_entropy, "tpu_info", lambda: device)
  monkeypatch.setattr(cross_entropy, "MIN_CHUNK_TOKENS", 1)
  return device


@pytest.fixture
def program_with_chunks_of_16_tokens(tpu):
  """The program of a loss and its gradient, for the small TPU."""
  hidden, embedding, targets, weights = make_arguments()

  def loss(hidden):
    loss, _ = fused_cross_entropy(hidden, embedding, targets, weights)
    return loss

  return str(jax.make_jaxpr(jax.value_and_grad(loss))(hidden))


def test_value_and_gradients_on_a_tpu_equal_the_reference(tpu):
  arguments = make_arguments()

  actual = value_and_gradients(fused_cross_entropy, *arguments, z_loss=1e-2)

  expected = value_and_gradients(
    reference_cross_entropy, *arguments, z_loss=1e-2
  )
  chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)


def test_program_for_a_tpu_has_chunks(program_with_chunks_of_16_tokens):
  """Each chunk has equally many tokens of each row, a power of two."""
  rows = 3
  vocabulary = 50
  # 5 tokens of each row would be 15 of 16 tokens. The next power of two is 4.
  logits_of_a_chunk = f"f32[{rows},4,{vocabulary}]"
  assert logits_of_a_chunk in program_with_chunks_of_16_tokens


def test_program_for_a_tpu_has_no_scatter(program_with_chunks_of_16_tokens):
  """TPUs are slow at writing to single indices, such as the targets."""
  assert "scatter" not in program_with_chunks_of_16_tokens


def test_program_for_a_tpu_computes_gradients_of_logits_once(
  program_with_chunks_of_16_tokens,
):
  """Without a barrier, each product that reads them computes them again."""
  assert "optimization_barrier" in program_with_chunks_of_16_tokens


def test_tpu_with_enough_memory_has_one_chunk(tpu):
  # The memory of the fixture is enough for 16 tokens. There are 3 · 37.
  tpu.hbm_capacity_bytes *= 3 * 37
  arguments = make_arguments()

  program = str(jax.make_jaxpr(fused_cross_entropy)(*arguments))

  # The logits of 3 rows of 37 tokens, in a vocabulary of 50.
  assert "f32[3,37,50]" in program


@pytest.mark.parametrize("chunk", [None, 20])
def test_gradient_of_the_embedding_is_summed_in_float32(chunk):
  """If hidden states are bfloat16, most sums are not bfloat16 numbers."""
  hidden, embedding, targets, weights = make_arguments()
  hidden = hidden.astype(jnp.bfloat16)

  def loss(embedding):
    loss, _ = fused_cross_entropy(
      hidden, embedding, targets, weights, chunk=chunk
    )
    return loss

  gradient = jax.jit(jax.grad(loss))(embedding)

  assert gradient.dtype == jnp.float32
  # Nearly all numbers would change if they were rounded to bfloat16.
  gradient = np.asarray(gradient)
  rounded = gradient.astype(jnp.bfloat16).astype(np.float32)
  changed_share = np.mean(gradient != rounded)
  assert changed_share > 0.9


def test_gradients_are_multiplied_by_the_factor_of_the_loss():
  """The gradient of −3 times the loss is −3 times its gradient."""
  hidden, embedding, targets, weights = make_arguments()

  def loss(hidden, embedding, weights, factor):
    loss, _ = fused_cross_entropy(hidden, embedding, targets, weights, chunk=20)
    return factor * loss

  gradients = jax.jit(jax.grad(loss, (0, 1, 2)))

  multiplied = gradients(hidden, embedding, weights, -3.0)

  not_multiplied = gradients(hidden, embedding, weights, 1.0)
  d_hidden, d_embedding, d_weights = jax.tree.map(np.asarray, not_multiplied)
  expected = (-3 * d_hidden, -3 * d_embedding, -3 * d_weights)
  chex.assert_trees_all_close(multiplied, expected, rtol=1e-5)


@pytest.mark.parametrize("chunk", [None, 12])
@pytest.mark.parametrize("invalid_target", [-100, 57])
def test_targets_without_weight_do_not_matter(chunk, invalid_target):
  """Padding has no weight, and may have targets outside the vocabulary.

  The vocabulary has the numbers 0 to 49.
  """
  hidden, embedding, targets, weights = make_arguments()
  padding = slice(5, 11)
  weights[:, padding] = 0
  targets_with_padding = targets.copy()
  targets_with_padding[:, padding] = invalid_target
  options = {"z_loss": 0.1, "chunk": chunk}

  actual = value_and_gradients(
    fused_cross_entropy,
    hidden,
    embedding,
    targets_with_padding,
    weights,
    **options,
  )

  expected = value_and_gradients(
    fused_cross_entropy, hidden, embedding, targets, weights, **options
  )
  value, (d_hidden, d_embedding, _) = actual
  expected_value, (expected_d_hidden, expected_d_embedding, _) = expected
  chex.assert_trees_all_equal(value, expected_value)
  chex.assert_trees_all_equal(d_hidden, expected_d_hidden)
  chex.assert_trees_all_equal(d_embedding, expected_d_embedding)
  assert (np.asarray(d_hidden)[:, padding] == 0).all()


def test_loss_of_bfloat16_hidden_states_is_float32():
  hidden, embedding, targets, weights = make_arguments()

  (loss, _), (d_hidden, d_embedding, _) = value_and_gradients(
    fused_cross_entropy,
    hidden.astype(jnp.bfloat16),
    embedding,
    targets,
    weights,
    chunk=12,
  )

  assert loss.dtype == jnp.float32
  assert d_hidden.dtype == jnp.bfloat16
  assert d_embedding.dtype == jnp.float32


def test_loss_of_bfloat16_hidden_states_equals_the_reference():
  """Hidden states and embedding are rounded before the products, not after."""
  hidden, embedding, targets, weights = make_arguments()
  bfloat16_hidden = hidden.astype(jnp.bfloat16)
  bfloat16_embedding = embedding.astype(jnp.bfloat16)

  (loss, _), (d_hidden, d_embedding, _) = value_and_gradients(
    fused_cross_entropy, bfloat16_hidden, embedding, targets, weights, chunk=12
  )

  (expected_loss, _), (expected_d_hidden, expected_d_embedding, _) = (
    value_and_gradients(
      reference_cross_entropy,
      bfloat16_hidden.astype(np.float32),
      bfloat16_embedding.astype(np.float32),
      targets,
      weights,
    )
  )
  # Products of bfloat16 numbers are exact in float32.
  chex.assert_trees_all_close(loss, expected_loss, rtol=1e-5)
  # The gradients are products with bfloat16 numbers, whose errors of up to 2⁻⁹
  # add up. Those of the hidden states are also rounded to bfloat16.
  chex.assert_trees_all_close(
    d_embedding, expected_d_embedding, atol=2e-2, rtol=2e-2
  )
  chex.assert_trees_all_close(
    np.asarray(d_hidden).astype(np.float32),
    expected_d_hidden,
    atol=4e-2,
    rtol=2e-2,
  )


def test_chunks_need_less_memory_than_all_logits():
  batch = 4
  length = 1024
  vocabulary = 8192
  arguments = (
    jax.ShapeDtypeStruct((batch, length, 32), jnp.float32),
    jax.ShapeDtypeStruct((vocabulary, 32), jnp.float32),
    jax.ShapeDtypeStruct((batch, length), jnp.int32),
    jax.ShapeDtypeStruct((batch, length), jnp.float32),
  )

  def temporary_bytes(function):
    def loss(*arguments):
      return function(*arguments)[0]

    program = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile()
    return program.memory_analysis().temp_size_in_bytes

  in_chunks = temporary_bytes(functools.partial(fused_cross_entropy, chunk=256))
  at_once = temporary_bytes(reference_cross_entropy)

  bytes_of_logits = 4 * batch * length * vocabulary
  assert in_chunks < bytes_of_logits / 3
  assert at_once > bytes_of_logits / 3


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    pytest.param(
      "hidden", np.zeros((T, E), np.float32), id="hidden_without_batch"
    ),
    pytest.param(
      "embedding", np.zeros((N, E + 1), np.float32), id="embedding_width"
    ),
    pytest.param(
      "targets", np.zeros((B, T + 1), np.int32), id="targets_length"
    ),
    pytest.param("targets", np.zeros((B, T), np.float32), id="targets_dtype"),
    pytest.param(
      "weights", np.zeros((B,), np.float32), id="weights_without_tokens"
    ),
    pytest.param("chunk", 0, id="chunk_of_no_token"),
  ],
)
def test_error_names_the_bad_argument(argument, value):
  hidden, embedding, targets, weights = make_arguments()
  arguments = {
    "hidden": hidden,
    "embedding": embedding,
    "targets": targets,
    "weights": weights,
  }
  arguments[argument] = value

  with pytest.raises(ValueError, match=f"^{argument} "):
    fused_cross_entropy(**arguments)
