"""One training step equals the plain formulas of its loss and its update."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diffjax.config import (
  Config,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  UserError,
)
from diffjax.data import row as rows
from diffjax.model.decoder import Decoder, logits
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.program import Program, build
from diffjax.training.step import TrainState
from tests.harness.tiers import full

MODEL = ModelConfig(
  vocab_size=64,
  num_layers=2,
  embed_dim=32,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  ffn_dim=48,
  dtype="float32",
)
LEARNING_RATE = 1e-2
Z_LOSS = 0.1
CONFIG = Config(
  model=MODEL,
  optimizer=OptimizerConfig(
    learning_rate=LEARNING_RATE, warmup_steps=0, clip_norm=0.0, weight_decay=0.0
  ),
  train=TrainConfig(steps=10, batch_size=4, z_loss=Z_LOSS),
)


def make_batch() -> dict[str, np.ndarray]:
  """Returns four random rows of two segments, with weights of 0, 1 or 2."""
  rng = np.random.default_rng(0)
  shape = (4, 16)
  return {
    "tokens": rng.integers(0, 64, shape, np.int32),
    "targets": rng.integers(0, 64, shape, np.int32),
    "segment_ids": np.sort(rng.integers(1, 3, shape, np.int32), axis=1),
    "positions": np.broadcast_to(np.arange(16, dtype=np.int32), shape),
    "weights": rng.choice(np.float32([0, 1, 2]), shape),
  }


@functools.cache
def compiled_program(config: Config) -> Program:
  """Returns a program on one device, which all tests of a config share."""
  return build(config, make_mesh(config.mesh, jax.devices()[:1]))


def take_step(
  program: Program, state: TrainState, batch: dict[str, np.ndarray]
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Returns the state after a step, and the metrics of the step."""
  return program.train_step(state, put_batch(batch, program.mesh))


def to_numpy(tree: Any) -> Any:
  """Returns copies of arrays, which remain when a step donates them."""
  return jax.tree.map(np.array, tree)


def test_a_model_that_sees_the_next_token_is_refused():
  """It could copy the next token instead of predicting it."""
  model = dataclasses.replace(MODEL, causal=False)
  config = dataclasses.replace(CONFIG, model=model)

  message = "config.model.causal = False: every token would see the next one"
  with pytest.raises(UserError, match=message):
    compiled_program(config)


# Losses, gradients and updates.


def reference_loss(
  params: Any, batch: dict[str, np.ndarray]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns the objective and its two parts, by their definitions.

  The objective is Σ w·(nll + z_loss·lse²) / Σ w, where lse is the log-sum-exp
  of the logits and nll the negative log-likelihood of the target.
  """
  hidden = Decoder(MODEL).apply(
    {"params": params},
    batch["tokens"],
    batch["segment_ids"],
    batch["positions"],
  )
  log_probabilities = jax.nn.log_softmax(logits(params, hidden))
  targets = batch["targets"][..., None]
  nll = -jnp.take_along_axis(log_probabilities, targets, axis=-1)[..., 0]
  lse = jax.nn.logsumexp(logits(params, hidden), axis=-1)
  weights = batch["weights"] / jnp.sum(batch["weights"])
  mean_nll = jnp.sum(weights * nll)
  mean_z_loss = jnp.sum(weights * Z_LOSS * lse**2)
  return mean_nll + mean_z_loss, (mean_nll, mean_z_loss)


reference_gradients = jax.jit(jax.grad(reference_loss, has_aux=True))


@pytest.mark.parametrize("tie_embeddings", [True, *full([False])])
def test_the_losses_of_a_step_equal_the_plain_formulas(tie_embeddings):
  """`reference_loss` computes the loss and the z-loss by their definitions."""
  model = dataclasses.replace(MODEL, tie_embeddings=tie_embeddings)
  program = compiled_program(dataclasses.replace(CONFIG, model=model))
  batch = make_batch()
  state = program.init()
  params = to_numpy(state.params)

  _, metrics = take_step(program, state, batch)

  gradients, (expected_loss, expected_z_loss) = reference_gradients(
    params, batch
  )
  expected_norm = jax.jit(optax.tree.norm)(gradients)
  chex.assert_trees_all_close(metrics["loss"], expected_loss, rtol=1e-6)
  chex.assert_trees_all_close(metrics["z_loss"], expected_z_loss, rtol=1e-6)
  # The norm is a long sum.
  chex.assert_trees_all_close(metrics["grad_norm"], expected_norm, rtol=1e-5)
  assert metrics["tokens"] == batch["weights"].sum()


@pytest.mark.parametrize("tie_embeddings", [True, *full([False])])
def test_the_first_update_of_adam_has_the_sign_of_the_gradient(tie_embeddings):
  """Each element moves by the learning rate, against its gradient.

  The optimizer has no weight decay and no clipping here.
  """
  model = dataclasses.replace(MODEL, tie_embeddings=tie_embeddings)
  program = compiled_program(dataclasses.replace(CONFIG, model=model))
  batch = make_batch()
  state = program.init()
  params = to_numpy(state.params)

  state, _ = take_step(program, state, batch)

  gradients, _ = reference_gradients(params, batch)
  updates = jax.tree.map(np.subtract, to_numpy(state.params), params)
  gradient_leaves = jax.tree.leaves(to_numpy(gradients))
  update_leaves = jax.tree.leaves(updates)
  for gradient, update in zip(gradient_leaves, update_leaves, strict=True):
    # Adam divides g by |g| + eps, with eps = 1e-8. Only elements for which eps
    # is less than a thousandth of |g| are compared.
    is_large = np.abs(gradient) > 1e-5
    expected = -LEARNING_RATE * np.sign(gradient[is_large])
    np.testing.assert_allclose(update[is_large], expected, rtol=2e-3)


def test_a_batch_of_padding_has_no_loss_and_no_gradient():
  """Padding is a token with a weight of zero."""
  program = compiled_program(CONFIG)
  state = program.init()
  batch = make_batch()
  batch["weights"] = np.zeros_like(batch["weights"])

  _, metrics = take_step(program, state, batch)

  assert float(metrics["loss"]) == 0.0
  assert float(metrics["grad_norm"]) == 0.0


# Targets in prompts.


@pytest.fixture(scope="module")
def prompt_batch():
  """Four equal rows of two documents: 5 + 4 and 4 + 4 tokens.

  The first tokens of a document are a prompt, and the others its answer.
  """
  tokens = np.arange(1, 18, dtype=np.int32)
  document_lengths = np.array([9, 8], np.int32)
  prompt_lengths = np.array([5, 4], np.int32)
  row = rows.Row(tokens, document_lengths, prompt_lengths)
  return rows.make_batch([row] * 4, 16)


def params_after_step(batch: dict[str, np.ndarray]) -> Any:
  """Returns the parameters after a first step."""
  program = compiled_program(CONFIG)
  state, _ = take_step(program, program.init(), batch)
  return to_numpy(state.params)


def test_only_the_tokens_of_answers_are_counted(prompt_batch):
  """Each row has two documents with an answer of four tokens each."""
  program = compiled_program(CONFIG)

  _, metrics = take_step(program, program.init(), prompt_batch)

  # The first token of a row is no target. So each document has four targets in
  # its prompt, whose weight is 0, and four in its answer.
  document_weights = [0, 0, 0, 0, 1, 1, 1, 1]
  assert prompt_batch["weights"][0].tolist() == 2 * document_weights
  num_rows = 4
  answer_tokens_per_row = 2 * 4
  assert float(metrics["tokens"]) == num_rows * answer_tokens_per_row
  assert float(metrics["grad_norm"]) > 0


def test_targets_in_prompts_do_not_change_the_step(prompt_batch):
  """The model is trained to predict answers, not prompts."""
  is_in_answer = prompt_batch["weights"] > 0
  targets = prompt_batch["targets"]
  # Tokens have the ids 0 to 63, so 63 - targets are other tokens.
  other_targets = np.where(is_in_answer, targets, 63 - targets)

  params = params_after_step({**prompt_batch, "targets": other_targets})

  expected = params_after_step(prompt_batch)
  chex.assert_trees_all_equal(params, expected)


def test_targets_in_answers_change_the_step(prompt_batch):
  """Tokens 1 to 5 are the first prompt, so token 6 begins its answer."""
  targets = prompt_batch["targets"]
  other_targets = np.where(targets == 6, 7, targets)

  params = params_after_step({**prompt_batch, "targets": other_targets})

  expected = params_after_step(prompt_batch)
  assert np.any(params["embedding"] != expected["embedding"])


def test_a_batch_of_prompts_has_no_gradient():
  """Each row has two prompts of 9 and 8 tokens, without answers."""
  tokens = np.arange(1, 18, dtype=np.int32)
  document_lengths = np.array([9, 8], np.int32)
  prompt_lengths = np.array([9, 8], np.int32)
  row = rows.Row(tokens, document_lengths, prompt_lengths)
  batch = rows.make_batch([row] * 4, 16)
  program = compiled_program(CONFIG)

  _, metrics = take_step(program, program.init(), batch)

  assert float(metrics["grad_norm"]) == 0.0
  assert float(metrics["tokens"]) == 0.0


# The state.


def test_the_optimizer_compares_a_step_with_the_losses_before_it():
  """It skips steps whose loss or gradient norm is far above a running mean.

  At the second step, that mean is the value of the first one.
  """
  program = compiled_program(CONFIG)
  batch = make_batch()

  state, metrics_1 = take_step(program, program.init(), batch)
  _, metrics_2 = take_step(program, state, batch)

  np.testing.assert_allclose(
    metrics_2["loss_mean"], metrics_1["loss"], rtol=1e-5
  )
  np.testing.assert_allclose(
    metrics_2["grad_norm_mean"], metrics_1["grad_norm"], rtol=1e-5
  )


def test_a_step_that_is_not_finite_is_skipped_and_counted():
  """A weight of NaN makes the loss NaN, and the parameters stay the same."""
  program = compiled_program(CONFIG)
  state = program.init()
  params = to_numpy(state.params)
  bad_batch = make_batch()
  bad_batch["weights"][0, 0] = np.nan

  state, metrics = take_step(program, state, bad_batch)

  assert int(metrics["skipped_steps"]) == 1
  chex.assert_trees_all_equal(to_numpy(state.params), params)
  # The skipped step counts as a step.
  assert int(state.step) == 1


def test_a_step_after_a_skipped_one_is_taken():
  """The count of skipped steps stays at one, and the loss is finite again."""
  program = compiled_program(CONFIG)
  # A weight of NaN makes the loss NaN.
  bad_batch = make_batch()
  bad_batch["weights"][0, 0] = np.nan
  state, _ = take_step(program, program.init(), bad_batch)

  _, metrics = take_step(program, state, make_batch())

  assert int(metrics["skipped_steps"]) == 1
  assert np.isfinite(metrics["loss"])


def test_a_step_donates_its_state():
  """The memory is needed for the new state."""
  program = compiled_program(CONFIG)
  state = program.init()

  take_step(program, state, make_batch())

  assert state.params["embedding"].is_deleted()


def initial_embedding(config: Config) -> np.ndarray:
  """Returns the embedding of a new run."""
  return np.asarray(compiled_program(config).init().params["embedding"])


def test_initial_parameters_depend_on_the_seed_of_training():
  """The default seed is 0."""
  train = dataclasses.replace(CONFIG.train, seed=3)
  config = dataclasses.replace(CONFIG, train=train)

  embedding = initial_embedding(config)

  assert np.all(embedding != initial_embedding(CONFIG))


def test_initial_parameters_do_not_depend_on_the_seed_of_the_data():
  """The default seed is 0."""
  data = dataclasses.replace(CONFIG.data, seed=3)
  config = dataclasses.replace(CONFIG, data=data)

  embedding = initial_embedding(config)

  np.testing.assert_array_equal(embedding, initial_embedding(CONFIG))
