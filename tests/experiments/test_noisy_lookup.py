"""Noisy lookup: contexts are what they are said to be, the layer is the decoder's, and λ ≡ 0 has no second map."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import from_config_dict
from diffjax.model.decoder import Block, embed, lambda_inits, logits
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.rms_norm import rms_norm
from experiments.noisy_lookup import experiment, task
from experiments.noisy_lookup.config import ROWS, get_config
from tests.harness.tiers import full

SMALL = task.Task(
  pairs=40, multiples=(1, 2), contexts=3, followed=2, interval=2
)


def config_of(row, **fields):
  config = get_config(f"{row},rate=0.01")
  config.train.update(steps=4, batch_size=3)
  config.optimizer.warmup_steps = 1
  config.train.update(fields)
  return from_config_dict(config.to_dict())


def batch_of(noise, pairs=40):
  return task.make_batch(jax.random.key(3), jnp.full(4, noise), pairs, 64)


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_questions_are_pairs_keys_and_noise_is_on_the_pairs_alone(noise):
  keys, tokens, values, places = map(np.asarray, batch_of(noise))
  assert (
    keys.shape == (4, 40 + task.ASKED, 64)
    and (tokens[:, 40:] == task.QUESTION).all()
    and tokens[:, :40].max() < task.VALUES
  )
  assert all(len({*row}) == task.ASKED for row in places), "different pairs"
  np.testing.assert_array_equal(
    values, np.take_along_axis(tokens, places, axis=1)
  )
  error = np.take_along_axis(keys, places[..., None], axis=1) - keys[:, 40:]
  assert np.sqrt(np.mean(error**2)) == pytest.approx(noise, rel=0.02)
  assert np.sqrt(np.mean(keys[:, 40:] ** 2)) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
  "row", ["diff", "diff_v2", *full(sorted({*ROWS} - {"diff", "diff_v2"}))]
)
def test_the_layer_is_the_decoders(row):
  """That only questions attend and go through the feed-forward layer changes nothing of their logits."""
  config = config_of(row)
  model, params, batch = config.model, task.init(config), batch_of(0.5)
  layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])

  @jax.jit
  def whole(keys):
    x = keys + embed(params["embedding"], batch.tokens, model)
    x, _ = Block(model, jnp.float32, diff_attention).apply(
      {"params": layer}, x, lambda_inits(model)[0], 0, None, None
    )
    return logits(
      params,
      rms_norm(x[:, -task.ASKED :], params["final_norm"], model.norm_eps),
    )

  found, weights = jax.jit(lambda batch: task.forward(model, params, batch))(
    batch
  )
  np.testing.assert_allclose(found, whole(batch.keys), atol=1e-5)
  assert weights.shape == (4, model.num_heads, task.ASKED, 40 + task.ASKED)


def test_without_lambda_the_second_map_does_nothing():
  """And λ stays 0 in training, while it moves in DIFF."""
  config, batch = config_of("diff_lambda_zero"), batch_of(0.5)
  params = task.init(config)
  other = jax.tree.map(jnp.copy, params)
  for name in ("query", "key"):
    array = other["layers"]["attention"][name]
    other["layers"]["attention"][name] = array.at[..., 1, :].add(1.0)
  forward = jax.jit(
    lambda params, model: task.forward(model, params, batch)[0],
    static_argnums=1,
  )
  np.testing.assert_array_equal(
    forward(params, config.model), forward(other, config.model)
  )
  diff = config_of("diff").model
  assert np.abs(forward(params, diff) - forward(other, diff)).max() > 1e-3
  trained, _ = task.train(config, SMALL)
  for name in ("lambda_q1", "lambda_k2"):
    assert not trained["layers"]["attention"][name].any()


def test_an_untrained_model_guesses_and_training_teaches():
  config = config_of("transformer_norm", steps=40, batch_size=8)
  task_ = dataclasses.replace(SMALL, noises=(0.0,), contexts=16, interval=20)
  guess = task.ask(config, task.init(config), 0.0, 40, 16)
  assert (
    abs(guess["accuracy"] - 1 / 16)
    < 5 * (1 / 16 * 15 / 16 / (16 * task.ASKED)) ** 0.5
  )
  _, found = task.train(config, task_)
  assert found["curve"][-1]["loss"] < guess["loss"] and [
    row["step"] for row in found["curve"]
  ] == [20, 40]
  assert found == task.train(config, task_)[1], "the same seed"


def test_the_endpoints_are_those_at_most_pairs():
  cell = lambda noise, pairs: dict(
    noise=noise,
    pairs=pairs,
    accuracy=pairs / 100 + noise / 10,
    signed=0.3,
    absolute=0.2,
  )  # noqa: E731
  grid = [cell(noise, pairs) for noise in (0.0, 1.0) for pairs in (40, 80)]
  found = experiment.summary(
    {
      "grid": grid,
      "curve": [{"step": 2, "accuracy": 0.8}, {"step": 4, "accuracy": 0.9}],
    },
    SMALL,
  )
  assert (
    found["accuracy"] == pytest.approx(0.85)
    and found["accuracy_n"] == pytest.approx(0.45)
    and found["accuracy_1.0"] == pytest.approx(0.9)
  )
  assert found["steps_to_90"] == 4 and found["signed"] == pytest.approx(0.3)
