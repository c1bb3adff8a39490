"""Noisy lookup: the contexts, the layer, the training and the endpoints."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import from_config_dict
from diffjax.model.decoder import Block, embed, lambda_inits, logits
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.rms_norm import rms_norm
from experiments import series
from experiments.noisy_lookup import experiment, task
from experiments.noisy_lookup.config import get_config
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32_LAYER

PAIRS = 40


def make_config(row: str, **train_fields):
  """Returns the config of a short run."""
  config = get_config(f"{row},rate=0.01")
  config.train.update(steps=4, batch_size=3)
  config.train.update(train_fields)
  config.optimizer.warmup_steps = 1
  return from_config_dict(config.to_dict())


def make_batch(noise: float) -> task.Batch:
  """Returns four contexts of one σ."""
  noises = jnp.full(4, noise)
  return task.make_batch(jax.random.key(3), noises, PAIRS, width=64)


def test_questions_are_about_different_pairs_of_the_context():
  batch = make_batch(0.5)

  chex.assert_shape(batch.keys, (4, PAIRS + task.ASKED, 64))
  tokens = np.asarray(batch.tokens)
  assert (tokens[:, PAIRS:] == task.QUESTION).all()
  assert tokens[:, :PAIRS].max() < task.VALUES
  for places in np.asarray(batch.places):
    assert len(set(places.tolist())) == task.ASKED
  answers = np.take_along_axis(tokens, np.asarray(batch.places), axis=1)
  chex.assert_trees_all_equal(np.asarray(batch.values), answers)


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_only_the_keys_of_pairs_have_noise(noise):
  batch = make_batch(noise)

  questions = batch.keys[:, PAIRS:]
  pairs = jnp.take_along_axis(batch.keys, batch.places[..., None], axis=1)
  error_rms = np.sqrt(np.mean((pairs - questions) ** 2))
  assert error_rms == pytest.approx(noise, rel=0.02)
  question_rms = np.sqrt(np.mean(questions**2))
  assert question_rms == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
  "row", ["diff", "diff_v2", *full(["transformer_norm", "diff_without_norm"])]
)
def test_the_questions_have_the_logits_of_the_decoders_layer(row):
  config = make_config(row)
  model = config.model
  params = task.init(config)
  batch = make_batch(0.5)

  @jax.jit
  def decoder_logits(params):
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    x = batch.keys + embed(params["embedding"], batch.tokens, model)
    block = Block(model, jnp.float32, diff_attention)
    x, _ = block.apply(
      {"params": layer}, x, lambda_inits(model)[0], 0, None, None
    )
    questions = x[:, -task.ASKED :]
    final = rms_norm(questions, params["final_norm"], model.norm_eps)
    return logits(params, final)

  forward = jax.jit(task.forward, static_argnums=0)
  answers, weights = forward(model, params, batch)

  chex.assert_trees_all_close(answers, decoder_logits(params), **FLOAT32_LAYER)
  num_keys = PAIRS + task.ASKED
  chex.assert_shape(weights, (4, model.num_heads, task.ASKED, num_keys))


def with_changed_second_map(params):
  """Returns parameters with other queries and keys of the second map."""
  changed = jax.tree.map(jnp.copy, params)
  attention = changed["layers"]["attention"]
  for name in ("query", "key"):
    attention[name] = attention[name].at[..., 1, :].add(1.0)
  return changed


def test_without_lambda_the_second_map_has_no_effect():
  config = make_config("diff_lambda_zero")
  batch = make_batch(0.5)
  params = task.init(config)
  changed = with_changed_second_map(params)
  forward = jax.jit(task.forward, static_argnums=0)

  chex.assert_trees_all_equal(
    forward(config.model, params, batch)[0],
    forward(config.model, changed, batch)[0],
  )

  # With DIFF's λ, the same change has an effect.
  diff = make_config("diff").model
  answers, _ = forward(diff, params, batch)
  changed_answers, _ = forward(diff, changed, batch)
  assert np.abs(answers - changed_answers).max() > 1e-3


def test_training_leaves_frozen_lambda_vectors_at_zero():
  config = make_config("diff_lambda_zero", steps=2)
  sizes = task.Task(
    pairs=PAIRS, noises=(0.5,), multiples=(1,), contexts=2, followed=2
  )

  trained, _ = task.train(config, sizes)

  for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
    assert not trained["layers"]["attention"][name].any()


@pytest.fixture(scope="module")
def learning_run():
  """Returns a config and sizes with which a model begins to learn."""
  config = make_config("transformer_norm", steps=30, batch_size=8)
  sizes = task.Task(
    pairs=PAIRS,
    noises=(0.0,),
    multiples=(1,),
    contexts=16,
    followed=16,
    interval=15,
  )
  return config, sizes


def test_an_untrained_model_guesses(learning_run):
  config, _ = learning_run
  contexts = 16

  answers = task.ask(config, task.init(config), 0.0, PAIRS, contexts)

  chance = 1 / task.VALUES
  questions = contexts * task.ASKED
  standard_error = (chance * (1 - chance) / questions) ** 0.5
  assert answers["accuracy"] == pytest.approx(chance, abs=5 * standard_error)


def test_training_lowers_the_loss_and_can_be_repeated(learning_run):
  config, sizes = learning_run
  untrained = task.ask(config, task.init(config), 0.0, PAIRS, sizes.followed)

  _, answers = task.train(config, sizes)
  _, repeated = task.train(config, sizes)

  assert series.column(answers["curve"], "step") == [15, 30]
  assert answers["curve"][-1]["loss"] < untrained["loss"]
  assert repeated == answers


def test_the_endpoints_are_means_over_the_noise_at_most_pairs():
  grid = []
  for noise in (0.0, 1.0):
    for pairs in (40, 80):
      record = {
        "noise": noise,
        "pairs": pairs,
        "accuracy": pairs / 100 + noise / 10,
        "signed": 0.3,
        "absolute": 0.2,
      }
      grid.append(record)
  curve = [{"step": 2, "accuracy": 0.8}, {"step": 4, "accuracy": 0.9}]
  sizes = task.Task(pairs=40, multiples=(1, 2))

  endpoints = experiment.summary({"grid": grid, "curve": curve}, sizes)

  assert endpoints["accuracy"] == pytest.approx(0.85)
  assert endpoints["accuracy_n"] == pytest.approx(0.45)
  assert endpoints["accuracy_1.0"] == pytest.approx(0.9)
  assert endpoints["signed"] == pytest.approx(0.3)
  assert endpoints["steps_to_90"] == 4
