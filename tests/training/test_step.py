"""One training step against the plain formula, and what it leaves of its input."""

import dataclasses
import functools

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
from diffjax.training.program import build
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
OPTIMIZER = OptimizerConfig(
  learning_rate=1e-2, warmup_steps=0, clip_norm=0.0, weight_decay=0.0
)
CONFIG = Config(
  model=MODEL,
  optimizer=OPTIMIZER,
  train=TrainConfig(steps=10, batch_size=4, z_loss=0.1),
)


def make_batch():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 64, (2, 4, 16), np.int32)
  segments = np.sort(rng.integers(1, 3, (4, 16), np.int32), axis=1)
  positions = np.broadcast_to(np.arange(16, dtype=np.int32), (4, 16))
  weights = rng.choice(np.float32([0, 1, 2]), (4, 16))
  return dict(
    tokens=tokens[0],
    targets=tokens[1],
    segment_ids=segments,
    positions=positions,
    weights=weights,
  )


@functools.cache
def program(config):
  """Compiled once for all tests."""
  return build(config, make_mesh(config.mesh, jax.devices()[:1]))


def start(config):
  built = program(config)
  return built.init(), built.train_step, built.mesh


def plain(params, batch, z_loss):
  """Σ w·(nll + z_loss·lse²) / Σ w, and the first part alone."""
  hidden = Decoder(MODEL).apply(
    {"params": params},
    batch["tokens"],
    batch["segment_ids"],
    batch["positions"],
  )
  lse = jax.nn.logsumexp(logits(params, hidden), axis=-1)
  nll = (
    lse
    - jnp.take_along_axis(
      logits(params, hidden), batch["targets"][..., None], axis=-1
    )[..., 0]
  )
  mean = lambda x: jnp.sum(batch["weights"] * x) / jnp.sum(batch["weights"])
  return mean(nll + z_loss * lse**2), (mean(nll), mean(z_loss * lse**2))


def test_tokens_that_see_their_targets_are_not_trained_on():
  with pytest.raises(
    UserError,
    match="config.model.causal = False: every token would see the next one",
  ):
    program(
      dataclasses.replace(
        CONFIG, model=dataclasses.replace(MODEL, causal=False)
      )
    )


def test_the_optimizer_is_shown_the_loss():
  """What it holds the second step against is what the first one measured."""
  state, step, mesh = start(CONFIG)
  state, first = step(state, put_batch(make_batch(), mesh))
  _, second = step(state, put_batch(make_batch(), mesh))
  assert float(second["loss_mean"]) == pytest.approx(
    float(first["loss"]), rel=1e-5
  )
  assert float(second["grad_norm_mean"]) == pytest.approx(
    float(first["grad_norm"]), rel=1e-5
  )


def test_parameters_follow_the_seed_of_training_and_no_other():
  def embedding(**sections):
    state, *_ = start(dataclasses.replace(CONFIG, **sections))
    return np.asarray(state.params["embedding"])

  expected = embedding()
  np.testing.assert_array_equal(
    embedding(data=dataclasses.replace(CONFIG.data, seed=3)), expected
  )
  assert (
    embedding(train=dataclasses.replace(CONFIG.train, seed=3)) != expected
  ).all()


@pytest.mark.parametrize("tied", [True, *full([False])])
def test_losses_and_gradient_equal_the_plain_formula(tied):
  config = dataclasses.replace(
    CONFIG, model=dataclasses.replace(MODEL, tie_embeddings=tied)
  )
  state, step, mesh = start(config)
  batch = make_batch()
  gradient, (loss, z_loss) = jax.jit(jax.grad(plain, has_aux=True))(
    state.params, batch, config.train.z_loss
  )
  params, norm = (
    jax.tree.map(np.asarray, state.params),
    optax.tree.norm(gradient),
  )
  state, metrics = step(state, put_batch(batch, mesh))
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
  np.testing.assert_allclose(metrics["z_loss"], z_loss, rtol=1e-6)
  np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
  np.testing.assert_allclose(metrics["tokens"], batch["weights"].sum())
  # Adam's first step is the learning rate against the gradient's sign, where that is not near zero.
  for (path, new), old, slope in zip(
    jax.tree_util.tree_leaves_with_path(state.params),
    jax.tree.leaves(params),
    jax.tree.leaves(gradient),
    strict=True,
  ):
    clear = np.abs(slope) > 1e-5
    np.testing.assert_allclose(
      (np.asarray(new) - old)[clear],
      -1e-2 * np.sign(slope)[clear],
      rtol=2e-3,
      err_msg=str(path),
    )


def test_the_state_is_donated():
  state, step, mesh = start(CONFIG)
  step(state, put_batch(make_batch(), mesh))
  assert state.params["embedding"].is_deleted()


def test_a_non_finite_step_is_skipped_and_counted():
  state, step, mesh = start(CONFIG)
  before = jax.tree.map(np.asarray, state.params)
  batch = make_batch()
  batch["weights"][0, 0] = np.nan
  state, metrics = step(state, put_batch(batch, mesh))
  assert int(metrics["skipped_steps"]) == 1 and int(state.step) == 1
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.tree.map(np.asarray, state.params),
    before,
  )
  state, metrics = step(state, put_batch(make_batch(), mesh))
  assert int(metrics["skipped_steps"]) == 1 and np.isfinite(metrics["loss"])


def test_a_batch_without_weight_changes_nothing_but_moments():
  """Padding alone: a loss of zero, not NaN."""
  state, step, mesh = start(CONFIG)
  _, metrics = step(
    state,
    put_batch(make_batch() | {"weights": np.zeros((4, 16), np.float32)}, mesh),
  )
  assert float(metrics["loss"]) == 0.0 and float(metrics["grad_norm"]) == 0.0


def test_targets_in_prompts_are_not_learnt():
  """Other targets there give the same step, bit for bit; another one in an answer does not. A batch of prompts alone has no gradient."""
  lengths = np.array([9, 8], np.int32)
  row = rows.Row(
    np.arange(1, 18, dtype=np.int32), lengths, np.array([5, 4], np.int32)
  )
  batch = rows.make_batch([row] * 4, 16)
  assert batch["weights"][0].tolist() == [
    0,
    0,
    0,
    0,
    1,
    1,
    1,
    1,
    0,
    0,
    0,
    0,
    1,
    1,
    1,
    1,
  ]

  def after(batch):
    state, step, mesh = start(CONFIG)
    state, metrics = step(state, put_batch(batch, mesh))
    return jax.tree.map(np.asarray, state.params), metrics

  params, metrics = after(batch)
  assert float(metrics["tokens"]) == 4 * 8 and float(metrics["grad_norm"]) > 0
  others, _ = after(
    batch
    | {
      "targets": np.where(
        batch["weights"] > 0, batch["targets"], 63 - batch["targets"]
      )
    }
  )
  jax.tree.map(np.testing.assert_array_equal, others, params)
  changed, _ = after(
    batch | {"targets": np.where(batch["targets"] == 6, 7, batch["targets"])}
  )
  assert not np.array_equal(changed["embedding"], params["embedding"])
  _, metrics = after(
    rows.make_batch([row._replace(prompt_lengths=lengths)] * 4, 16)
  )
  assert float(metrics["grad_norm"]) == 0.0 == float(metrics["tokens"])


def test_compiled_once():
  """The second step takes the first one's output as it is."""
  built = program.__wrapped__(CONFIG)
  state = built.init()
  for _ in range(3):
    state, _ = built.train_step(state, put_batch(make_batch(), built.mesh))
  assert built._jitted.train_step._cache_size() == 1
