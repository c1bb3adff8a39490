"""Noisy lookup: the contexts, the layer, the training and the endpoints."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import from_config_dict
from diffjax.model.decoder import (
  Block,
  Decoder,
  embed,
  lambda_inits,
  logits,
)
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.rms_norm import rms_norm
from experiments.noisy_lookup import experiment, task
from experiments.noisy_lookup.config import get_config
from tests.harness.parameters import parameters
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32_LAYER

# A context is a sequence of pairs of a key and a value, then of questions. A
# question is the key of a pair, and its answer is the value of that pair.
NUM_CONTEXTS = 4
NUM_PAIRS = 40


def make_config(row: str, steps: int = 4, batch_size: int = 3):
  """Returns the config of a short run of a row of the experiment's table."""
  config = get_config(f"{row},rate=0.01")
  config.train.update(steps=steps, batch_size=batch_size)
  config.optimizer.warmup_steps = 1
  return from_config_dict(config.to_dict())


# Compiled once for all tests.
_forward = jax.jit(task.forward, static_argnums=0)


@functools.cache
def make_batch(noise: float) -> task.Batch:
  """Returns four contexts of 40 pairs, with one noise on the pairs' keys."""
  noises = np.full(NUM_CONTEXTS, noise, np.float32)
  key = jax.random.key(3)
  return jax.device_get(task.make_batch(key, noises, NUM_PAIRS, width=64))


def test_a_context_has_pairs_and_then_questions():
  batch = make_batch(noise=0.5)

  num_tokens = NUM_PAIRS + task.ASKED
  chex.assert_shape(batch.keys, (NUM_CONTEXTS, num_tokens, 64))
  pairs = batch.tokens[:, :NUM_PAIRS]
  questions = batch.tokens[:, NUM_PAIRS:]
  # The token of a pair is its value.
  assert pairs.max() < task.VALUES
  assert (questions == task.QUESTION).all()


def test_the_questions_of_a_context_are_about_different_pairs():
  batch = make_batch(noise=0.5)

  for places in batch.places:
    assert len(set(places.tolist())) == task.ASKED


def test_the_answers_are_the_values_of_the_pairs_that_are_asked_for():
  batch = make_batch(noise=0.5)

  answers = np.take_along_axis(batch.tokens, batch.places, axis=1)
  chex.assert_trees_all_equal(batch.values, answers)


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_only_the_keys_of_pairs_have_noise(noise):
  """A question is the key of a pair without the noise."""
  batch = make_batch(noise)

  pair_keys = batch.keys[:, :NUM_PAIRS]
  question_keys = batch.keys[:, NUM_PAIRS:]
  differences = []
  for context in range(NUM_CONTEXTS):
    asked_keys = pair_keys[context][batch.places[context]]
    differences.append(asked_keys - question_keys[context])

  # The RMS of 4 · 32 · 64 random numbers has a standard error of 0.8%.
  noise_rms = np.sqrt(np.mean(np.square(differences)))
  assert noise_rms == pytest.approx(noise, rel=0.02)
  question_rms = np.sqrt(np.mean(np.square(question_keys)))
  assert question_rms == pytest.approx(1, rel=0.02)


def decoder_logits(model, params, batch):
  """Returns the logits of the questions by the parts of the decoder."""
  # The model has one layer. Its parameters are stacked along axis 0.
  layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
  embeddings = embed(params["embedding"], batch.tokens, model)
  block = Block(model, jnp.float32, diff_attention)
  hidden, _ = block.apply(
    {"params": layer},
    batch.keys + embeddings,
    lambda_inits(model)[0],
    0,
    None,
    None,
  )
  questions = hidden[:, -task.ASKED :]
  final = rms_norm(questions, params["final_norm"], model.norm_eps)
  return logits(params, final)


# `full` leaves its rows to the full tier.
@pytest.mark.parametrize(
  "row", ["diff", "diff_v2", *full(["transformer_norm", "diff_without_norm"])]
)
def test_the_logits_are_those_of_the_decoders_layer(row):
  """`task.forward` computes the layer itself, to record attention weights."""
  config = make_config(row)
  params = parameters(Decoder(config.model), np.zeros((1, 1), np.int32))
  batch = make_batch(noise=0.5)

  actual, weights = _forward(config.model, params, batch)

  forward_of_decoder = jax.jit(functools.partial(decoder_logits, config.model))
  expected = forward_of_decoder(params, batch)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)
  num_heads = config.model.num_heads
  num_keys = NUM_PAIRS + task.ASKED
  chex.assert_shape(weights, (NUM_CONTEXTS, num_heads, task.ASKED, num_keys))


def largest_change_by_the_second_map(row: str) -> float:
  """Returns how much logits change with the parameters of the second map."""
  model = make_config(row).model
  batch = make_batch(noise=0.5)
  # The rows "diff" and "diff_lambda_zero" have the same parameters.
  params = task.init(make_config("diff_lambda_zero"))
  changed = jax.tree.map(np.array, params)
  attention = changed["layers"]["attention"]
  # The last axes of queries and keys are the map and the width of a head.
  attention["query"][..., 1, :] += 1.0
  attention["key"][..., 1, :] += 1.0

  logits_before, _ = _forward(model, params, batch)
  logits_after, _ = _forward(model, changed, batch)
  change = np.asarray(logits_after) - np.asarray(logits_before)
  return float(np.abs(change).max())


def test_diff_uses_its_second_attention_map():
  """DIFF attends with its first map minus λ times its second one."""
  assert largest_change_by_the_second_map("diff") > 1e-3


def test_the_second_attention_map_has_no_effect_if_lambda_is_zero():
  assert largest_change_by_the_second_map("diff_lambda_zero") == 0


@pytest.mark.full
def test_training_leaves_frozen_lambda_vectors_at_zero():
  config = make_config("diff_lambda_zero", steps=2)
  # The evaluations, which this test does not read, have two contexts each.
  sizes = task.Task(
    pairs=NUM_PAIRS, noises=(0.5,), multiples=(1,), contexts=2, followed=2
  )

  trained, _ = task.train(config, sizes)

  for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
    assert not np.any(trained["layers"]["attention"][name])


def test_an_untrained_model_guesses():
  """Random values have the same accuracy, up to five standard errors."""
  config = make_config("transformer_norm")
  num_contexts = 16

  answers = task.ask(
    config, task.init(config), noise=0.0, pairs=NUM_PAIRS, contexts=num_contexts
  )

  chance = 1 / task.VALUES
  num_questions = num_contexts * task.ASKED
  standard_error = (chance * (1 - chance) / num_questions) ** 0.5
  assert answers["accuracy"] == pytest.approx(chance, abs=5 * standard_error)


TRAINED = make_config("transformer_norm", steps=30, batch_size=8)


def train_for_30_steps():
  """Returns the evaluations. The curve has those at the steps 15 and 30."""
  sizes = task.Task(
    pairs=NUM_PAIRS,
    noises=(0.0,),
    multiples=(1,),
    contexts=16,
    followed=16,
    interval=15,
  )
  _, evaluations = task.train(TRAINED, sizes)
  return evaluations


@pytest.fixture(scope="module")
def evaluations():
  """The evaluations of a run of 30 steps."""
  return train_for_30_steps()


def test_training_lowers_the_loss(evaluations):
  before_training = task.ask(
    TRAINED, task.init(TRAINED), noise=0.0, pairs=NUM_PAIRS, contexts=16
  )

  at_step_15, at_step_30 = evaluations["curve"]
  assert at_step_15["step"] == 15
  assert at_step_30["step"] == 30
  assert at_step_30["loss"] < before_training["loss"]


def test_training_can_be_repeated(evaluations):
  assert train_for_30_steps() == evaluations


def evaluation(noise, pairs, accuracy, attention):
  """Returns a record of `task.train` with the attention on the answers."""
  return {
    "noise": noise,
    "pairs": pairs,
    "accuracy": accuracy,
    "signed": attention,
    "absolute": attention,
  }


def test_the_accuracies_of_a_run_are_means_over_its_evaluations():
  """Contexts of the training have 40 pairs. Evaluations also have 80."""
  sizes = task.Task(pairs=40, multiples=(1, 2))
  evaluations = [
    evaluation(noise=0.0, pairs=40, accuracy=0.4, attention=0.1),
    evaluation(noise=1.0, pairs=40, accuracy=0.5, attention=0.1),
    evaluation(noise=0.0, pairs=80, accuracy=0.8, attention=0.2),
    evaluation(noise=1.0, pairs=80, accuracy=0.9, attention=0.4),
  ]

  numbers = experiment.summary({"grid": evaluations, "curve": []}, sizes)

  # With 80 pairs, both noises and then only the noise 1.0.
  assert numbers["accuracy"] == pytest.approx((0.8 + 0.9) / 2)
  assert numbers["accuracy_1.0"] == pytest.approx(0.9)
  assert numbers["signed"] == pytest.approx((0.2 + 0.4) / 2)
  # With 40 pairs, as in training.
  assert numbers["accuracy_n"] == pytest.approx((0.4 + 0.5) / 2)


def test_a_run_has_the_first_step_whose_accuracy_reached_90_percent():
  """The curve has the accuracies at some steps of the training."""
  curve = [
    {"step": 2, "accuracy": 0.8},
    {"step": 4, "accuracy": 0.9},
    {"step": 6, "accuracy": 0.95},
  ]
  final = evaluation(noise=0.0, pairs=40, accuracy=0.95, attention=0.3)
  sizes = task.Task(pairs=40, multiples=(1,))

  numbers = experiment.summary({"grid": [final], "curve": curve}, sizes)

  assert numbers["steps_to_90"] == 4
