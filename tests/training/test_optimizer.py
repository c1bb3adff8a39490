"""Parameters are treated by name; updates equal their definitions; a bad step changes nothing and is counted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

# Attention variants add their parameters to the table.
import diffjax.model.decoder  # noqa: F401
from diffjax.config import (
  LARGEST_MAGNITUDE,
  SMALLEST_MAGNITUDE,
  Config,
  OptimizerConfig,
  TrainConfig,
  UserError,
  check,
)
from diffjax.training import optimizer

L, E, H, G, D, K, M, V, F, N = 2, 12, 2, 2, 4, 1, 2, 8, 20, 16
SHAPES = {
  "embedding": (N, E),
  "unembedding": (N, E),
  "final_norm": (E,),
  "layers": {
    "attention": {
      "query": (L, E, H, G, D),
      "key": (L, E, K, M, D),
      "value": (L, E, K, V),
      "out": (L, H, V, E),
      "lambda_hat": (L, E, H),
      "lambda_q1": (L, D),
      "lambda_k1": (L, D),
      "lambda_q2": (L, D),
      "lambda_k2": (L, D),
      "head_gain": (L, V),
    },
    "attention_norm": (L, E),
    "ffn_norm": (L, E),
    "ffn": {"gate": (L, E, F), "up": (L, E, F), "down": (L, F, E)},
  },
}
MATRICES = {"query", "key", "value", "out", "lambda_hat", "gate", "up", "down"}
FLAT = {
  "query": (E, H * G * D),
  "key": (E, K * M * D),
  "value": (E, K * V),
  "out": (H * V, E),
  "lambda_hat": (E, H),
  "gate": (E, F),
  "up": (E, F),
  "down": (F, E),
}
STILL = OptimizerConfig(
  schedule="wsd", decay_fraction=0.0, warmup_steps=0, clip_norm=0.0
)  # a constant learning rate


def random_tree(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32),
    SHAPES,
    is_leaf=lambda node: isinstance(node, tuple),
  )


def make_optimizer(config, steps):
  return optimizer.make_optimizer(
    config, optimizer.make_schedule(config, steps)
  )


def first_update(tx, gradients, params):
  # Compiled as one program: op by op, Muon compiles for ten times as long.
  return by_name(
    jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(gradients, params)
  )


def by_name(tree):
  return {
    path[-1].key: leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_decay_mask_takes_the_layers_matrices_alone():
  mask = by_name(optimizer.decay_mask(random_tree(0)))
  assert {name for name, decays in mask.items() if decays} == MATRICES


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_unknown_parameter_is_an_error(name):
  params = {
    "layers": {
      "attention": {
        "query": jnp.ones((L, E, H, G, D)),
        "temperature": jnp.ones((L, H)),
      }
    }
  }
  with pytest.raises(ValueError, match="layers/attention/temperature"):
    make_optimizer(dataclasses.replace(STILL, name=name), 10).init(params)


def test_muon_takes_the_matrices_and_adam_the_rest():
  params, gradients = random_tree(0), random_tree(1)
  config = dataclasses.replace(
    STILL, name="muon", weight_decay=0.0, learning_rate=1.0
  )
  muon, adam = (
    make_optimizer(config, 10),
    make_optimizer(dataclasses.replace(config, name="adamw"), 10),
  )
  ours = first_update(muon, gradients, params)
  adams = first_update(adam, gradients, params)
  assert {
    name for name in ours if not np.allclose(ours[name], adams[name], rtol=1e-5)
  } == MATRICES
  # What this file is for: left alone, optax's Muon takes every 2-D array and leaves the stacked matrices out.
  stock = optax.contrib.muon(
    1.0, eps=config.eps, adam_b1=config.b1, adam_b2=config.b2, nesterov=False
  )
  theirs = first_update(stock, gradients, params)
  wrong = {
    name
    for name in theirs
    if not np.allclose(theirs[name], adams[name], rtol=1e-5)
  }
  assert (
    wrong == {name for name, leaf in by_name(params).items() if leaf.ndim == 2}
    and not wrong & MATRICES
  )


EXTREMES = [
  dict(b1=0.9999999, b2=0.0, muon_momentum=0.0),
  dict(b1=0.0, b2=0.9999999, muon_momentum=0.9999999),
  dict(eps=SMALLEST_MAGNITUDE, learning_rate=LARGEST_MAGNITUDE),
  dict(
    eps=LARGEST_MAGNITUDE, learning_rate=SMALLEST_MAGNITUDE, final_fraction=1.0
  ),
  dict(weight_decay=LARGEST_MAGNITUDE, learning_rate=0.0, schedule="cosine"),
  dict(
    clip_norm=SMALLEST_MAGNITUDE,
    spike_sigmas=LARGEST_MAGNITUDE,
    weight_decay=SMALLEST_MAGNITUDE,
  ),
  dict(
    clip_norm=LARGEST_MAGNITUDE,
    spike_sigmas=SMALLEST_MAGNITUDE,
    decay_fraction=1.0,
  ),
]


@pytest.mark.parametrize("fields", EXTREMES, ids=str)
def test_the_first_update_at_the_bounds_is_finite(fields):
  """Muon's matrices and Adam's other parameters, some without a gradient."""
  config = dataclasses.replace(STILL, name="muon", **fields)
  check(Config(optimizer=config))
  matrix = jnp.array([[[1.0, 2.0], [3.0, -1.0]]])
  params = {
    "embedding": matrix[0],
    "final_norm": jnp.ones(2),
    "layers": {"ffn": {"gate": matrix, "up": matrix}},
  }
  gradients = {
    "embedding": jnp.array([[1.0, -2.0], [0.0, 0.0]]),
    "final_norm": jnp.zeros(2),
    "layers": {"ffn": {"gate": 1e-3 * matrix, "up": 0 * matrix}},
  }
  updates = first_update(make_optimizer(config, 10), gradients, params)
  for update in updates.values():
    assert np.isfinite(update).all()


def test_muon_updates_each_layer_as_one_orthogonal_matrix():
  params, gradients = random_tree(0), random_tree(1)
  config = dataclasses.replace(
    STILL, name="muon", weight_decay=0.0, learning_rate=1.0
  )
  tx = make_optimizer(config, 10)
  updates = first_update(tx, gradients, params)
  stock = optax.contrib.muon(1.0, beta=config.muon_momentum, consistent_rms=0.2)
  slices = {
    f"{name}{layer}": by_name(gradients)[name][layer].reshape(shape)
    for name, shape in FLAT.items()
    for layer in range(L)
  }
  alone = jax.jit(lambda g: stock.update(g, stock.init(g), g)[0])(slices)
  for name, shape in FLAT.items():
    for layer in range(L):
      got = np.asarray(updates[name][layer]).reshape(shape)
      np.testing.assert_allclose(
        got, alone[f"{name}{layer}"], rtol=2e-3, atol=2e-4, err_msg=name
      )
      # Newton–Schulz with five steps ends between 0.7 and 1.2 (Keller Jordan's post), around an exactly orthogonal matrix.
      singular = np.linalg.svd(got, compute_uv=False) / (
        0.2 * np.sqrt(max(shape))
      )
      assert singular.min() > 0.6 and singular.max() < 1.3, (name, singular)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_parameters_stay(name):
  """Matrices, which decay, as λ vectors; the others move as if the frozen ones had no gradient, the clip included."""
  frozen = {"lambda_q1", "lambda_k2", "value"}
  config = dataclasses.replace(
    STILL, name=name, clip_norm=1.0, weight_decay=0.1
  )
  params, gradients = random_tree(0), random_tree(1)
  none = jax.tree_util.tree_map_with_path(
    lambda path, leaf: jnp.zeros_like(leaf) if path[-1].key in frozen else leaf,
    gradients,
  )
  moving = first_update(make_optimizer(config, 10), none, params)
  fields = {
    "frozen": ", ".join(sorted(frozen)),
    "trained": ",".join(sorted(moving.keys() - frozen)),
  }
  for field, names in fields.items():
    part = functools.partial(
      optimizer.trained_part, dataclasses.replace(config, **{field: names})
    )
    tx = make_optimizer(config, 10)
    updates, state = jax.jit(tx.update)(
      part(gradients), tx.init(part(params)), part(params)
    )
    assert by_name(updates).keys() == moving.keys() - frozen
    for key, update in by_name(updates).items():
      np.testing.assert_allclose(
        update, moving[key], rtol=2e-6, atol=1e-9, err_msg=key
      )  # the norm is summed in another order
    kept = {
      path[-1].key
      for path, _ in jax.tree_util.tree_leaves_with_path(state)
      if isinstance(path[-1], jax.tree_util.DictKey)
    }
    assert kept & by_name(params).keys() == moving.keys() - frozen, "moments"
    whole = by_name(
      optimizer.with_frozen(optax.apply_updates(part(params), updates), params)
    )
    for key, leaf in by_name(params).items():
      np.testing.assert_array_equal(
        whole[key],
        leaf if key in frozen else leaf + by_name(updates)[key],
        err_msg=key,
      )
  assert np.abs(moving["value"]).max() > 0, "weight decay alone moves it"


@pytest.mark.parametrize("field", ["frozen", "trained"])
def test_frozen_names_are_checked(field):
  params = {"embedding": jnp.zeros((N, E))}
  with pytest.raises(
    UserError,
    match=f"config.optimizer.{field}: 'lambda_q' is no parameter; there are embedding, .* query, key",
  ):
    optimizer.trained_part(
      dataclasses.replace(STILL, **{field: "embedding,lambda_q"}), params
    )
  with pytest.raises(
    UserError,
    match=f"config.optimizer.{field}: this model has no 'lambda_q1'; it has embedding$",
  ):
    optimizer.trained_part(
      dataclasses.replace(STILL, **{field: "lambda_q1,embedding"}), params
    )


def test_the_state_is_as_ever_without_frozen_parameters():
  """Older checkpoints go on."""
  paths = [
    jax.tree_util.keystr(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(
      make_optimizer(STILL, 10).init({"embedding": jnp.zeros(3)})
    )
  ]
  assert paths[-1] == "[1].count" and "[0].inner[1].mu['embedding']" in paths


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_follows_the_mask(name):
  params, zeros = random_tree(0), jax.tree.map(jnp.zeros_like, random_tree(0))
  tx = make_optimizer(
    dataclasses.replace(STILL, name=name, weight_decay=0.25, learning_rate=0.5),
    10,
  )
  updates = first_update(tx, zeros, params)
  for leaf_name, leaf in by_name(params).items():
    np.testing.assert_allclose(
      updates[leaf_name],
      -0.125 * leaf if leaf_name in MATRICES else 0 * leaf,
      rtol=1e-6,
      err_msg=leaf_name,
    )


def test_adamw_equals_float64_by_hand():
  config = OptimizerConfig(
    schedule="linear",
    warmup_steps=2,
    learning_rate=0.02,
    weight_decay=0.3,
    clip_norm=1.5,
    eps=1e-6,
  )
  tx, params = make_optimizer(config, 6), random_tree(0)
  state, rates = tx.init(params), [0.0, 0.01, 0.02, 0.015]
  hand = {
    name: np.asarray(leaf, np.float64) for name, leaf in by_name(params).items()
  }
  first = {name: 0.0 * leaf for name, leaf in hand.items()}
  second = {name: 0.0 * leaf for name, leaf in hand.items()}
  update = jax.jit(tx.update)
  for step, rate in enumerate(rates):
    gradients = random_tree(10 + step, scale=[0.01, 3.0, 1.0, 0.1][step])
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    exact = {
      name: np.asarray(leaf, np.float64)
      for name, leaf in by_name(gradients).items()
    }
    shrink = min(
      1.0, 1.5 / np.sqrt(sum((leaf**2).sum() for leaf in exact.values()))
    )
    for name, leaf in exact.items():
      first[name] = 0.9 * first[name] + 0.1 * shrink * leaf
      second[name] = 0.95 * second[name] + 0.05 * (shrink * leaf) ** 2
      adam = (
        first[name]
        / (1 - 0.9 ** (step + 1))
        / (np.sqrt(second[name] / (1 - 0.95 ** (step + 1))) + 1e-6)
      )
      hand[name] = hand[name] - rate * (
        adam + (0.3 * hand[name] if name in MATRICES else 0.0)
      )
  for name, leaf in by_name(params).items():
    np.testing.assert_allclose(
      leaf, hand[name], rtol=0, atol=2e-6, err_msg=name
    )


def test_clip_limits_the_global_norm_and_zero_means_no_limit():
  params, huge, seen = (
    {"up": jnp.ones((L, E, F))},
    {"up": jnp.full((L, E, F), 100.0)},
    [],
  )
  for clip_norm in (1.0, 0.0):
    tx = make_optimizer(
      dataclasses.replace(STILL, clip_norm=clip_norm, b1=0.0), 10
    )
    _, state = jax.jit(tx.update)(huge, tx.init(params), params)
    (moments,) = [
      node
      for node in jax.tree.leaves(
        state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState)
      )
      if isinstance(node, optax.ScaleByAdamState)
    ]
    seen.append(float(optax.tree.norm(moments.mu)))
  assert seen[0] == pytest.approx(1.0, rel=1e-5) and seen[1] == pytest.approx(
    float(optax.tree.norm(huge)), rel=1e-5
  )


@pytest.mark.parametrize(
  "schedule, points",
  [
    ("linear", {0: 0, 5: 1, 10: 2, 60: 1.1, 110: 0.2, 200: 0.2}),
    (
      "cosine",
      {
        0: 0,
        5: 1,
        10: 2,
        35: 0.2 + 1.8 * (1 + np.sqrt(0.5)) / 2,
        60: 1.1,
        110: 0.2,
        200: 0.2,
      },
    ),
    ("wsd", {0: 0, 5: 1, 10: 2, 60: 2, 88: 2, 99: 1.1, 110: 0.2, 200: 0.2}),
  ],
)
def test_schedule_at_key_points(schedule, points):
  config = OptimizerConfig(
    schedule=schedule,
    warmup_steps=10,
    learning_rate=2.0,
    final_fraction=0.1,
    decay_fraction=0.2,
  )
  rate = optimizer.make_schedule(config, 110)
  for step, want in points.items():
    assert float(rate(step)) == pytest.approx(want, rel=1e-5, abs=1e-7), step
  no_warmup = optimizer.make_schedule(
    dataclasses.replace(config, warmup_steps=0), 100
  )
  assert float(no_warmup(0)) == pytest.approx(2.0) and float(
    no_warmup(100)
  ) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_warmup_longer_than_the_run_is_cut_to_its_steps(schedule):
  config = OptimizerConfig(
    schedule=schedule, learning_rate=2.0, warmup_steps=100
  )
  cut, short = (
    optimizer.make_schedule(dataclasses.replace(config, warmup_steps=steps), 8)
    for steps in (100, 8)
  )
  assert [float(cut(step)) for step in range(9)] == [
    float(short(step)) for step in range(9)
  ]
  assert [float(cut(step)) for step in (0, 4, 8)] == pytest.approx(
    [0.0, 1.0, 2.0]
  )
  assert float(optimizer.make_schedule(config, 200)(50)) == pytest.approx(
    1.0
  ), "a longer run warms up as long as the config says"


@pytest.mark.parametrize(
  "steps, warmup", [(0, 0), (0, 100), (1, 0), (5, 5), (5, 6)]
)
@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_schedule_of_very_short_runs_is_finite(schedule, steps, warmup):
  rate = optimizer.make_schedule(
    OptimizerConfig(schedule=schedule, warmup_steps=warmup), steps
  )
  assert all(np.isfinite(float(rate(step))) for step in range(steps + 2))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_non_finite_steps_are_skipped_and_counted(name):
  config = dataclasses.replace(
    STILL, name=name, schedule="linear", clip_norm=1.0
  )
  tx, params, gradients = (
    make_optimizer(config, 10),
    random_tree(0),
    random_tree(1),
  )
  update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
  _, state = update(gradients, state, params, value=jnp.float32(2.0))
  for count, (element, loss) in enumerate(
    [(jnp.nan, 2.0), (jnp.inf, 2.0), (1.0, jnp.nan), (1.0, jnp.inf)], start=1
  ):
    broken = {
      **gradients,
      "embedding": gradients["embedding"].at[0, 0].set(element),
    }
    before = state
    updates, state = update(broken, state, params, value=jnp.float32(loss))
    assert not any(
      np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(updates)
    )
    kept = before[0]._replace(
      skipped=state[0].skipped, in_a_row=state[0].in_a_row
    )
    jax.tree.map(np.testing.assert_array_equal, state[0], kept)
    assert int(state[0].skipped) == int(state[0].in_a_row) == count
  good, state = update(gradients, state, params, value=jnp.float32(2.0))
  # The learning rate is the step's own: this is step 5 of the run, and the second that Adam or Muon sees.
  _, unbroken = update(
    gradients, jax.jit(tx.init)(params), params, value=jnp.float32(2.0)
  )
  second, _ = update(gradients, unbroken, params, value=jnp.float32(2.0))
  rate = optimizer.make_schedule(config, 10)
  np.testing.assert_allclose(
    by_name(good)["up"] / rate(5), by_name(second)["up"] / rate(1), rtol=1e-5
  )
  assert int(state[0].skipped) == 4 and int(state[0].in_a_row) == 0


def run_scalar(losses, norms, sigmas=6.0):
  """Which steps are skipped, and the last state, for a model of one parameter whose gradient is its norm."""
  tx = make_optimizer(dataclasses.replace(STILL, spike_sigmas=sigmas), 10)
  params = {"final_norm": jnp.zeros(1)}

  def step(state, measured):
    _, state = tx.update(
      {"final_norm": measured[1:]}, state, params, value=measured[0]
    )
    return state, state[0].in_a_row > 0

  measured = jnp.stack(
    [jnp.asarray(losses), jnp.asarray(norms)], axis=1
  ).astype(jnp.float32)
  state, skipped = jax.jit(lambda m: jax.lax.scan(step, tx.init(params), m))(
    measured
  )
  return np.flatnonzero(skipped).tolist(), state


def noise(steps, mean, deviation, seed=0):
  return mean + deviation * np.random.default_rng(seed).standard_normal(steps)


@pytest.mark.parametrize("which", ["loss", "norm"])
def test_a_spike_is_skipped_and_its_neighbours_are_not(which):
  losses, norms = noise(300, 2.0, 0.1), noise(300, 0.5, 0.1, seed=1)
  spiking = losses if which == "loss" else norms
  deviation = spiking.std()
  spiking[[150, 151, 250]] = (
    spiking.mean() + np.array([8, 50, 1000]) * deviation
  )
  assert run_scalar(losses, norms)[0] == [150, 151, 250]
  assert run_scalar(losses, norms, sigmas=0.0)[0] == []
  assert run_scalar(losses, norms, sigmas=20.0)[0] == [151, 250]


def weighted(values):
  """Mean and standard deviation, the newest weighing most."""
  weights = (1 - 2 / 129) ** np.arange(len(values))[::-1]
  mean = np.average(values, weights=weights)
  return mean, np.sqrt(np.average((values - mean) ** 2, weights=weights))


def test_averages_are_the_weighted_mean_and_variance_with_spikes_at_the_limit():
  losses, norms = noise(200, 2.0, 0.1), noise(200, 0.5, 0.1, seed=1)
  losses[130] = 50.0
  skipped, state = run_scalar(losses, norms)
  assert skipped == [130]
  mean, deviation = weighted(losses[:130])
  losses[130] = mean + 6 * deviation
  for index, values in enumerate((losses, norms)):
    mean, deviation = weighted(values)
    np.testing.assert_allclose(state[0].mean[index], mean, rtol=1e-5)
    np.testing.assert_allclose(
      state[0].variance[index], deviation**2, rtol=1e-4
    )


def test_another_level_is_got_used_to():
  """What would otherwise end a healthy run: parameters whose gradients are larger stay as they are for as long as steps are skipped."""
  steps = np.arange(400)
  losses, norms = noise(400, 2.0, 0.02), noise(400, 0.5, 0.02, seed=1)
  patience = TrainConfig().max_skipped_in_a_row
  assert run_scalar(losses, norms * np.where(steps < 300, 1, 1.6))[0] == []
  for times, most in ((4, 10), (14, patience), (100, patience)):
    skipped, _ = run_scalar(losses, norms * np.where(steps < 300, 1, times))
    assert (
      skipped == list(range(300, 300 + len(skipped)))
      and 0 < len(skipped) < most
    )
  skipped, _ = run_scalar(losses * np.where(steps < 300, 1, 1.3), norms)
  assert (
    skipped == list(range(300, 300 + len(skipped))) and 0 < len(skipped) < 10
  )
  assert (
    len(run_scalar(losses * np.where(steps < 300, 1, 1000), norms)[0])
    > patience
  )  # lost


def test_no_spike_on_a_plateau_in_a_falling_loss_or_at_the_start():
  steps = np.arange(400)
  still = np.full(400, 0.5)
  assert (
    run_scalar(noise(400, 2.0, 1e-6) + 0.05 * (steps == 300), still)[0] == []
  )  # a plateau: 2.5% is no spike
  assert run_scalar(np.full(400, 2.0) + 0.2 * (steps == 300), still)[0] == [300]
  assert (
    run_scalar(
      2 + 4 * np.exp(-steps / 50) + noise(400, 0, 0.02),
      0.3 + 5 * np.exp(-steps / 20) + noise(400, 0, 0.02),
    )[0]
    == []
  )
  assert run_scalar(np.where(steps == 60, 50.0, 2.0), still)[0] == []  # asleep
  assert (
    run_scalar(np.where(steps == 300, 0.1, noise(400, 2.0, 0.1)), still)[0]
    == []
  )  # far below the mean
  assert (
    run_scalar(np.zeros(400), np.where(steps == 300, 1.0, 0.0))[0] == []
  )  # padding alone, then a batch with text
