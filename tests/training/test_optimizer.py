"""Which parameters an optimizer updates, how, and which steps it skips."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
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
from tests.harness.tolerances import FLOAT32_MODEL

# Layers, width, heads, maps in a head and width of a map. Then key heads, their
# maps and the width of values. Then the width of the feed-forward layers and
# the size of the vocabulary.
L, E, H, G, D = 2, 12, 2, 2, 4
K, M, V = 1, 2, 8
F, N = 20, 16

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
# The matrices of a layer, with their numbers of inputs and outputs.
MATRIX_SHAPES = {
  "query": (E, H * G * D),
  "key": (E, K * M * D),
  "value": (E, K * V),
  "out": (H * V, E),
  "lambda_hat": (E, H),
  "gate": (E, F),
  "up": (E, F),
  "down": (F, E),
}
MATRICES = set(MATRIX_SHAPES)

# A constant learning rate.
CONSTANT_RATE = OptimizerConfig(
  schedule="wsd", decay_fraction=0.0, warmup_steps=0, clip_norm=0.0
)


def random_tree(seed: int, scale: float = 1.0) -> Any:
  """Returns random parameters or gradients of a small model."""
  rng = np.random.default_rng(seed)

  def random_leaf(shape):
    return np.float32(scale * rng.standard_normal(shape))

  return jax.tree.map(
    random_leaf, SHAPES, is_leaf=lambda node: isinstance(node, tuple)
  )


def by_name(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree of parameters by their names."""
  leaves = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    leaves[path[-1].key] = leaf
  return leaves


def make_optimizer(
  config: OptimizerConfig, steps: int = 10
) -> optax.GradientTransformationExtraArgs:
  """Returns the optimizer of a run of some steps."""
  schedule = optimizer.make_schedule(config, steps)
  return optimizer.make_optimizer(config, schedule)


def first_update(
  transformation: optax.GradientTransformation, gradients: Any, params: Any
) -> dict[str, jax.Array]:
  """Returns the updates of the first step, by the names of parameters."""

  # Compiled as one program. Operation by operation, Muon compiles for ten times
  # as long.
  @jax.jit
  def update(gradients, params):
    state = transformation.init(params)
    updates, _ = transformation.update(gradients, state, params)
    return updates

  return by_name(update(gradients, params))


def names_that_differ(
  actual: dict[str, jax.Array], expected: dict[str, jax.Array]
) -> set[str]:
  """Returns the names of the arrays that are not nearly equal."""
  names = set()
  for name in actual:
    if not np.allclose(actual[name], expected[name], rtol=1e-5):
      names.add(name)
  return names


# Which parameters are treated how.


def test_only_the_matrices_of_layers_decay():
  """Embeddings, norms and lambda vectors have no weight decay."""
  mask = by_name(optimizer.decay_mask(random_tree(0)))

  decaying_names = {name for name, decays in mask.items() if decays}
  assert decaying_names == {
    "query",
    "key",
    "value",
    "out",
    "lambda_hat",
    "gate",
    "up",
    "down",
  }


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_shrinks_only_the_matrices_of_layers(name):
  """Gradients are zero, so only weight decay changes the parameters."""
  config = dataclasses.replace(
    CONSTANT_RATE, name=name, weight_decay=0.25, learning_rate=0.5
  )
  params = random_tree(0)
  gradients = jax.tree.map(np.zeros_like, params)

  updates = first_update(make_optimizer(config), gradients, params)

  expected = {}
  for parameter, leaf in by_name(params).items():
    if parameter in MATRICES:
      # The learning rate times the weight decay.
      expected[parameter] = -0.5 * 0.25 * leaf
    else:
      expected[parameter] = np.zeros_like(leaf)
  chex.assert_trees_all_close(updates, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_parameter_that_is_not_in_the_table_is_an_error(name):
  """A table says how each parameter is updated. It has no "temperature"."""
  attention = {
    "query": np.ones((2, 12, 2, 2, 4), np.float32),
    "temperature": np.ones((2, 2), np.float32),
  }
  params = {"layers": {"attention": attention}}
  transformation = make_optimizer(OptimizerConfig(name=name))

  with pytest.raises(ValueError, match="layers/attention/temperature"):
    transformation.init(params)


@pytest.fixture(scope="module")
def muon_updates():
  """The first updates of Muon with a learning rate of 1, by name.

  The parameters are `random_tree(0)`, and the gradients `random_tree(1)`.
  """
  config = dataclasses.replace(
    CONSTANT_RATE, name="muon", weight_decay=0.0, learning_rate=1.0
  )
  return first_update(make_optimizer(config), random_tree(1), random_tree(0))


def test_muon_updates_the_matrices_and_adam_the_other_parameters(muon_updates):
  """AdamW with the same config computes the other updates."""
  params = random_tree(0)
  gradients = random_tree(1)
  adam_config = dataclasses.replace(
    CONSTANT_RATE, name="adamw", weight_decay=0.0, learning_rate=1.0
  )

  adam_updates = first_update(make_optimizer(adam_config), gradients, params)

  assert names_that_differ(muon_updates, adam_updates) == {
    "query",
    "key",
    "value",
    "out",
    "lambda_hat",
    "gate",
    "up",
    "down",
  }


def test_the_muon_of_optax_would_not_update_stacked_matrices():
  """This is why diffjax selects the matrices for Muon by their names.

  Optax selects arrays of rank 2. The matrices of layers are stacked in arrays
  of rank 3 or more, which it updates by Adam. It would orthogonalize the
  embedding instead.
  """
  num_layers, width, hidden_width, vocab_size = 2, 12, 20, 16
  rng = np.random.default_rng(0)
  gradients = {
    "embedding": np.float32(rng.standard_normal((vocab_size, width))),
    "up": np.float32(rng.standard_normal((num_layers, width, hidden_width))),
  }
  params = jax.tree.map(np.zeros_like, gradients)
  muon = optax.contrib.muon(1.0, adam_b1=0.9, adam_b2=0.95, eps=1e-8)
  # The Adam of optax.contrib.muon also has Nesterov momentum.
  adam = optax.adam(1.0, b1=0.9, b2=0.95, eps=1e-8, nesterov=True)

  muon_updates = first_update(muon, gradients, params)
  adam_updates = first_update(adam, gradients, params)

  differing = names_that_differ(muon_updates, adam_updates)
  assert differing == {"embedding"}


# The updates.


def matrices_by_layer(tree: dict[str, Any]) -> dict[str, np.ndarray]:
  """Returns each matrix of each layer as an array of rank 2, as "up 1"."""
  num_layers = 2
  matrices = {}
  for name, shape in MATRIX_SHAPES.items():
    for layer in range(num_layers):
      matrix = np.asarray(tree[name])[layer]
      matrices[f"{name} {layer}"] = matrix.reshape(shape)
  return matrices


def test_muon_updates_each_matrix_of_each_layer_as_optax_does(muon_updates):
  """Optax gets each matrix of each layer as an array of rank 2 of its own."""
  gradients = random_tree(1)

  momentum = OptimizerConfig().muon_momentum
  optax_muon = optax.contrib.muon(1.0, beta=momentum, consistent_rms=0.2)
  matrix_gradients = matrices_by_layer(by_name(gradients))
  # The parameters do not change the update without weight decay.
  matrix_params = jax.tree.map(np.zeros_like, matrix_gradients)
  expected = first_update(optax_muon, matrix_gradients, matrix_params)
  chex.assert_trees_all_close(
    matrices_by_layer(muon_updates), expected, **FLOAT32_MODEL
  )


def test_the_updates_of_muon_are_nearly_orthogonal(muon_updates):
  """All singular values of an orthogonal matrix are 1.

  Five steps of Newton–Schulz end between about 0.7 and 1.2 (Keller Jordan's
  post on Muon).
  """
  for name, update in matrices_by_layer(muon_updates).items():
    # Muon multiplies a matrix by 0.2 times the root of its longer side.
    longer_side = max(update.shape)
    orthogonal = update / (0.2 * np.sqrt(longer_side))
    singular_values = np.linalg.svd(orthogonal, compute_uv=False)
    assert singular_values.min() > 0.6, name
    assert singular_values.max() < 1.3, name


def adamw_in_float64(
  params: Any, gradients: list[Any], rates: list[float]
) -> dict[str, np.ndarray]:
  """Returns the parameters after some steps of AdamW, by its formulas.

  b1 = 0.9, b2 = 0.95, eps = 1e-6, weight decay 0.3 and clipping at a norm of
  1.5.

  Args:
    params: the initial parameters.
    gradients: the gradients of each step.
    rates: the learning rate of each step.
  """
  values = {}
  for name, leaf in by_name(params).items():
    values[name] = np.asarray(leaf, np.float64)
  first_moments = {name: np.zeros_like(leaf) for name, leaf in values.items()}
  second_moments = {name: np.zeros_like(leaf) for name, leaf in values.items()}
  for step, rate in enumerate(rates, start=1):
    squared_norm = 0.0
    for gradient in by_name(gradients[step - 1]).values():
      squared_norm += np.sum(np.asarray(gradient, np.float64) ** 2)
    clip_factor = min(1.0, 1.5 / np.sqrt(squared_norm))
    for name, leaf in by_name(gradients[step - 1]).items():
      gradient = clip_factor * np.asarray(leaf, np.float64)
      first_moments[name] = 0.9 * first_moments[name] + 0.1 * gradient
      second_moments[name] = 0.95 * second_moments[name] + 0.05 * gradient**2
      mean = first_moments[name] / (1 - 0.9**step)
      variance = second_moments[name] / (1 - 0.95**step)
      direction = mean / (np.sqrt(variance) + 1e-6)
      if name in MATRICES:
        direction += 0.3 * values[name]
      values[name] = values[name] - rate * direction
  return values


def test_adamw_equals_its_formulas_in_float64():
  """Four steps of a warmup and a linear schedule. The first is not clipped."""
  config = OptimizerConfig(
    schedule="linear",
    warmup_steps=2,
    learning_rate=0.02,
    weight_decay=0.3,
    clip_norm=1.5,
    eps=1e-6,
  )
  transformation = make_optimizer(config, steps=6)
  gradients = [
    random_tree(seed=10, scale=0.01),
    random_tree(seed=11, scale=3.0),
    random_tree(seed=12, scale=1.0),
    random_tree(seed=13, scale=0.1),
  ]
  norm = jax.jit(optax.tree.norm)
  is_clipped = [bool(norm(tree) > 1.5) for tree in gradients]
  assert is_clipped == [False, True, True, True]

  @jax.jit
  def take_step(step_gradients, state, params):
    updates, state = transformation.update(step_gradients, state, params)
    return optax.apply_updates(params, updates), state

  params = random_tree(0)
  state = jax.jit(transformation.init)(params)
  for step_gradients in gradients:
    params, state = take_step(step_gradients, state, params)

  # Two steps of warmup to 0.02, then a linear fall to 0 at step 6.
  rates = [0.0, 0.01, 0.02, 0.015]
  expected = adamw_in_float64(random_tree(0), gradients, rates)
  # In float32, four steps round parameters of up to 4 by 1.2e-7 each, and also
  # their updates.
  chex.assert_trees_all_close(by_name(params), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
  ("clip_norm", "expected_norm"),
  [
    pytest.param(1.0, 1.0, id="clipped"),
    pytest.param(0.0, 100.0, id="no limit"),
  ],
)
def test_clipping_limits_the_norm_of_the_gradients(clip_norm, expected_norm):
  """The gradients have a norm of 100. A clip_norm of 0 sets no limit."""
  config = dataclasses.replace(CONSTANT_RATE, clip_norm=clip_norm, b1=0.0)
  params = {"up": np.ones((2, 5, 10), np.float32)}
  # 100 equal elements have a norm of 10 times the element, which is 100.
  gradients = {"up": np.full((2, 5, 10), 10.0, np.float32)}
  transformation = make_optimizer(config)

  @jax.jit
  def state_after_step(gradients, params):
    state = transformation.init(params)
    _, state = transformation.update(gradients, state, params)
    return state

  # With b1 = 0, Adam's first moments are the clipped gradients.
  moments = optax.tree.get(state_after_step(gradients, params), "mu")
  norm = np.linalg.norm(moments["up"])
  assert norm == pytest.approx(expected_norm, rel=1e-5)


@pytest.mark.parametrize(
  "fields",
  [
    dict(b1=0.9999999, b2=0.0, muon_momentum=0.0),
    dict(b1=0.0, b2=0.9999999, muon_momentum=0.9999999),
    dict(eps=SMALLEST_MAGNITUDE, learning_rate=LARGEST_MAGNITUDE),
    dict(
      eps=LARGEST_MAGNITUDE,
      learning_rate=SMALLEST_MAGNITUDE,
      final_fraction=1.0,
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
  ],
  ids=str,
)
def test_the_first_update_is_finite_at_the_limits_of_the_config(fields):
  """Muon updates "gate" and "up", and Adam updates the other parameters."""
  config = dataclasses.replace(CONSTANT_RATE, name="muon", **fields)
  # This raises an error if a field is outside of its limits.
  check(Config(optimizer=config))
  matrix_of_ones = np.ones((1, 2, 2), np.float32)
  params = {
    "embedding": np.ones((2, 2), np.float32),
    "final_norm": np.ones(2, np.float32),
    "layers": {"ffn": {"gate": matrix_of_ones, "up": matrix_of_ones}},
  }
  small_gradient = np.float32([[[1e-3, 2e-3], [3e-3, -1e-3]]])
  no_gradient = np.zeros((1, 2, 2), np.float32)
  gradients = {
    "embedding": np.float32([[1.0, -2.0], [0.0, 0.0]]),
    "final_norm": np.zeros(2, np.float32),
    "layers": {"ffn": {"gate": small_gradient, "up": no_gradient}},
  }

  updates = first_update(make_optimizer(config), gradients, params)

  chex.assert_tree_all_finite(updates)


# Frozen parameters.

FROZEN = {"lambda_q1", "lambda_k2", "value"}
TRAINED = by_name(random_tree(0)).keys() - FROZEN


def config_with_frozen(name: str, field: str) -> OptimizerConfig:
  """Returns a config that freezes FROZEN by one of its two fields."""
  config = dataclasses.replace(
    CONSTANT_RATE, name=name, clip_norm=1.0, weight_decay=0.1
  )
  if field == "frozen":
    return dataclasses.replace(config, frozen=", ".join(sorted(FROZEN)))
  return dataclasses.replace(config, trained=",".join(sorted(TRAINED)))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_other_parameters_move_as_if_the_frozen_ones_had_no_gradient(name):
  """Frozen gradients do not count for the norm that is clipped.

  A run passes only the trained parameters to the optimizer. This must
  equal an update of all parameters with gradients of zero for the frozen ones.
  """
  # This freezes lambda_q1, lambda_k2 and value.
  config = config_with_frozen(name, field="frozen")
  transformation = make_optimizer(config)
  params = random_tree(0)
  gradients = random_tree(1)
  gradients_with_zeros = random_tree(1)
  attention = gradients_with_zeros["layers"]["attention"]
  for frozen in ("lambda_q1", "lambda_k2", "value"):
    attention[frozen] = np.zeros_like(attention[frozen])

  updates = first_update(
    transformation,
    optimizer.trained_part(config, gradients),
    optimizer.trained_part(config, params),
  )

  all_updates = first_update(transformation, gradients_with_zeros, params)
  expected = {key: all_updates[key] for key in updates}
  # The sums of squares in the norm have another order.
  chex.assert_trees_all_close(updates, expected, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("field", ["frozen", "trained"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_parameters_have_no_moments(name, field):
  """Adam and Muon then need no memory for them.

  A moment is an array in the state whose path ends with a parameter's name.
  """
  config = config_with_frozen(name, field=field)
  params = optimizer.trained_part(config, random_tree(0))

  state = jax.eval_shape(make_optimizer(config).init, params)

  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
  path_ends = {jax.tree_util.keystr(path[-1:]) for path in paths}
  for parameter in by_name(random_tree(0)):
    has_moment = f"['{parameter}']" in path_ends
    is_frozen = parameter in ("lambda_q1", "lambda_k2", "value")
    assert has_moment != is_frozen, parameter


@pytest.mark.parametrize("field", ["frozen", "trained"])
def test_updated_and_frozen_parameters_are_merged(field):
  """Here, an update adds 1 to every trained parameter."""
  # This freezes lambda_q1, lambda_k2 and value.
  config = config_with_frozen(name="adamw", field=field)
  params = random_tree(0)

  trained = optimizer.trained_part(config, params)
  updated = jax.tree.map(lambda leaf: leaf + 1, trained)
  merged = by_name(optimizer.with_frozen(updated, params))

  assert by_name(trained).keys() == TRAINED
  expected = {}
  for name, leaf in by_name(params).items():
    if name in FROZEN:
      expected[name] = leaf
    else:
      expected[name] = leaf + 1
  chex.assert_trees_all_equal(merged, expected)


@pytest.mark.parametrize("field", ["frozen", "trained"])
def test_a_frozen_name_that_no_model_has_is_an_error(field):
  """Models have "lambda_q1" and "lambda_q2", but no "lambda_q"."""
  config = OptimizerConfig(**{field: "embedding,lambda_q"})
  params = {"embedding": np.zeros((16, 12), np.float32)}

  message = (
    f"config.optimizer.{field}: 'lambda_q' is no parameter; there are"
    " embedding, .* query, key"
  )
  with pytest.raises(UserError, match=message):
    optimizer.trained_part(config, params)


@pytest.mark.parametrize("field", ["frozen", "trained"])
def test_a_frozen_name_that_this_model_lacks_is_an_error(field):
  """The model has only an embedding. Other models have "lambda_q1"."""
  config = OptimizerConfig(**{field: "lambda_q1,embedding"})
  params = {"embedding": np.zeros((16, 12), np.float32)}

  message = (
    f"config.optimizer.{field}: this model has no 'lambda_q1'; it has"
    " embedding$"
  )
  with pytest.raises(UserError, match=message):
    optimizer.trained_part(config, params)


def test_the_state_has_the_structure_of_older_checkpoints():
  """Orbax restores arrays by their paths, so a new path would lose an array."""
  params = {"embedding": np.zeros(3, np.float32)}

  state = jax.eval_shape(make_optimizer(CONSTANT_RATE).init, params)

  paths = set()
  for path, _ in jax.tree_util.tree_leaves_with_path(state):
    paths.add(jax.tree_util.keystr(path))
  # The state has two parts: Adam within a transformation that skips bad steps,
  # and the schedule.
  path_of_first_moment = "[0].inner[1].mu['embedding']"
  path_of_schedule_step = "[1].count"
  assert path_of_first_moment in paths
  assert path_of_schedule_step in paths


# The learning rate.


def schedule_of_110_steps(name: str) -> optax.Schedule:
  """Returns a schedule that rises to 2 in 10 steps, and falls to 0.2.

  "wsd" (warmup, stable, decay) falls in the last fifth, from step 88 on.
  """
  config = OptimizerConfig(
    schedule=name,
    warmup_steps=10,
    learning_rate=2.0,
    final_fraction=0.1,
    decay_fraction=0.2,
  )
  return optimizer.make_schedule(config, steps=110)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_a_schedule_rises_from_0_in_the_warmup(name):
  """The warmup has 10 steps, and its peak is 2."""
  rate = schedule_of_110_steps(name)

  rates = [float(rate(step)) for step in (0, 5, 10)]

  assert rates == pytest.approx([0.0, 1.0, 2.0], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
  ("name", "first_step_of_fall"), [("linear", 10), ("cosine", 10), ("wsd", 88)]
)
def test_a_schedule_falls_from_its_peak_to_its_final_rate(
  name, first_step_of_fall
):
  """The peak is 2. The final rate is 0.2, at step 110 and later."""
  rate = schedule_of_110_steps(name)

  middle_of_fall = (first_step_of_fall + 110) // 2
  assert float(rate(first_step_of_fall)) == pytest.approx(2.0, rel=1e-5)
  assert float(rate(middle_of_fall)) == pytest.approx(1.1, rel=1e-5)
  assert float(rate(110)) == pytest.approx(0.2, rel=1e-5)
  assert float(rate(200)) == pytest.approx(0.2, rel=1e-5)


def test_a_wsd_schedule_is_constant_before_its_decay():
  """It has its peak of 2 from step 10 to step 88."""
  rate = schedule_of_110_steps("wsd")

  assert float(rate(60)) == pytest.approx(2.0, rel=1e-5)


def test_a_cosine_schedule_follows_a_cosine():
  """It falls from 2 at step 10 to 0.2 at step 110."""
  rate = schedule_of_110_steps("cosine")

  fraction_of_fall = (35 - 10) / (110 - 10)
  height = (1 + np.cos(np.pi * fraction_of_fall)) / 2
  expected = 0.2 + (2.0 - 0.2) * height
  assert float(rate(35)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_schedule_without_warmup_begins_at_its_peak(schedule):
  config = OptimizerConfig(
    schedule=schedule, warmup_steps=0, learning_rate=2.0, final_fraction=0.1
  )

  rate = optimizer.make_schedule(config, steps=100)

  assert float(rate(0)) == pytest.approx(2.0)
  assert float(rate(100)) == pytest.approx(0.1 * 2.0)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_warmup_longer_than_the_run_ends_with_the_run(schedule):
  """The rate reaches its peak of 2 at step 8, instead of step 100."""
  config = OptimizerConfig(
    schedule=schedule, learning_rate=2.0, warmup_steps=100
  )

  rate = optimizer.make_schedule(config, steps=8)

  rates = [float(rate(step)) for step in range(9)]
  expected = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
  assert rates == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_longer_run_has_the_whole_warmup(schedule):
  """The rate rises to 2 in 100 steps, so it is 1 after 50 steps."""
  config = OptimizerConfig(
    schedule=schedule, learning_rate=2.0, warmup_steps=100
  )

  rate = optimizer.make_schedule(config, steps=200)

  assert float(rate(50)) == pytest.approx(1.0)


@pytest.mark.parametrize(
  ("steps", "warmup_steps"), [(0, 0), (0, 100), (1, 0), (5, 5), (5, 6)]
)
@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_the_rates_of_very_short_runs_are_finite(schedule, steps, warmup_steps):
  config = OptimizerConfig(schedule=schedule, warmup_steps=warmup_steps)

  rate = optimizer.make_schedule(config, steps)

  for step in range(steps + 2):
    assert np.isfinite(float(rate(step)))


# Steps that are not finite.


class StartedRun(NamedTuple):
  """The config of an optimizer, its jitted update and its state."""

  config: OptimizerConfig
  update: Callable
  state: Any


@pytest.fixture(scope="module", params=["adamw", "muon"])
def run_after_step_0(request):
  """A run of AdamW or Muon, whose learning rate falls in 10 steps."""
  config = dataclasses.replace(
    CONSTANT_RATE, name=request.param, schedule="linear", clip_norm=1.0
  )
  transformation = make_optimizer(config, steps=10)
  params = random_tree(0)
  update = jax.jit(transformation.update)
  state = jax.jit(transformation.init)(params)
  _, state = update(random_tree(1), state, params, value=np.float32(2.0))
  return StartedRun(config, update, state)


@pytest.mark.parametrize(
  ("element", "loss"),
  [
    pytest.param(np.nan, 2.0, id="gradient nan"),
    pytest.param(np.inf, 2.0, id="gradient inf"),
    pytest.param(1.0, np.nan, id="loss nan"),
    pytest.param(1.0, np.inf, id="loss inf"),
  ],
)
def test_a_step_that_is_not_finite_changes_only_the_counts(
  run_after_step_0, element, loss
):
  """The parameters and the optimizer's moments stay as they were."""
  update, state = run_after_step_0.update, run_after_step_0.state
  params = random_tree(0)
  gradients = random_tree(1)
  gradients["embedding"][0, 0] = element

  updates, new_state = update(gradients, state, params, value=np.float32(loss))

  zeros = jax.tree.map(np.zeros_like, updates)
  chex.assert_trees_all_equal(updates, zeros)
  # The optimizer has two parts: one that skips steps, which has the moments,
  # and the learning rate.
  skip_state, _ = state
  new_skip_state, _ = new_state
  expected = skip_state._replace(skipped=np.int32(1), in_a_row=np.int32(1))
  chex.assert_trees_all_equal(new_skip_state, expected)


def test_a_good_step_after_skipped_ones_has_the_rate_of_its_own_step(
  run_after_step_0,
):
  """Skipped steps count for the learning rate, but not for Adam's moments."""
  update, state_after_step_0 = run_after_step_0.update, run_after_step_0.state
  rate = optimizer.make_schedule(run_after_step_0.config, steps=10)
  params = random_tree(0)
  gradients = random_tree(1)
  loss = np.float32(2.0)

  # Steps 1, 2 and 3 are skipped, and step 4 is taken.
  state = state_after_step_0
  for _ in range(3):
    _, state = update(gradients, state, params, value=np.float32(np.nan))
  update_of_step_4, _ = update(gradients, state, params, value=loss)

  update_of_step_1, _ = update(
    gradients, state_after_step_0, params, value=loss
  )
  rate_change = np.asarray(rate(4)) / np.asarray(rate(1))
  chex.assert_trees_all_close(
    by_name(update_of_step_4)["up"],
    np.asarray(by_name(update_of_step_1)["up"]) * rate_change,
    rtol=1e-5,
  )


def test_a_good_step_ends_a_row_of_skipped_steps(run_after_step_0):
  """Three steps are skipped for a loss of NaN, before a good step."""
  update, state = run_after_step_0.update, run_after_step_0.state
  params = random_tree(0)
  gradients = random_tree(1)

  for _ in range(3):
    _, state = update(gradients, state, params, value=np.float32(np.nan))
  assert optax.tree.get(state, "in_a_row") == 3
  _, state = update(gradients, state, params, value=np.float32(2.0))

  assert optax.tree.get(state, "skipped") == 3
  assert optax.tree.get(state, "in_a_row") == 0


# Spikes of the loss and of the gradient norm.


def run_scalar(
  losses: np.ndarray, norms: np.ndarray, sigmas: float = 6.0
) -> tuple[list[int], Any]:
  """Trains a model with one parameter, whose gradient is the given norm.

  Args:
    losses: the loss of each step.
    norms: the gradient norm of each step.
    sigmas: the standard deviations above the mean that count as a spike.

  Returns:
    The steps that are skipped, and the optimizer's last state.
  """
  state, is_skipped = scan_steps(np.float32(losses), np.float32(norms), sigmas)
  return np.flatnonzero(is_skipped).tolist(), state


@functools.partial(jax.jit, static_argnames="sigmas")
def scan_steps(
  losses: jax.Array, norms: jax.Array, sigmas: float
) -> tuple[Any, jax.Array]:
  """Returns the optimizer's last state, and whether each step is skipped."""
  config = dataclasses.replace(CONSTANT_RATE, spike_sigmas=sigmas)
  transformation = make_optimizer(config)
  params = {"final_norm": np.zeros(1, np.float32)}

  def step(state, measured):
    loss, norm = measured
    _, state = transformation.update(
      {"final_norm": norm[None]}, state, params, value=loss
    )
    return state, state[0].in_a_row > 0

  return jax.lax.scan(step, transformation.init(params), (losses, norms))


def skipped_steps(
  losses: np.ndarray, norms: np.ndarray, sigmas: float = 6.0
) -> list[int]:
  """Returns the steps that are skipped."""
  skipped, _ = run_scalar(losses, norms, sigmas)
  return skipped


def noise(
  num_steps: int, mean: float, deviation: float, seed: int = 0
) -> np.ndarray:
  """Returns a normally distributed value for each step."""
  rng = np.random.default_rng(seed)
  return mean + deviation * rng.standard_normal(num_steps)


@pytest.mark.parametrize("monitored", ["loss", "norm"])
def test_spikes_are_skipped_and_their_neighbours_are_not(monitored):
  """A step is skipped if its loss or gradient norm is far above the mean."""
  losses = noise(num_steps=300, mean=2.0, deviation=0.1)
  norms = noise(num_steps=300, mean=0.5, deviation=0.1, seed=1)
  # The spikes are put into one of the two arrays.
  spiking = losses
  if monitored == "norm":
    spiking = norms
  mean = spiking.mean()
  deviation = spiking.std()
  spiking[150] = mean + 8 * deviation
  spiking[151] = mean + 50 * deviation
  spiking[250] = mean + 1000 * deviation

  assert skipped_steps(losses, norms, sigmas=6.0) == [150, 151, 250]
  # Only two of the spikes are 20 standard deviations above the mean.
  assert skipped_steps(losses, norms, sigmas=20.0) == [151, 250]
  # 0 switches the detection off.
  assert skipped_steps(losses, norms, sigmas=0.0) == []


def weighted_statistics(values: np.ndarray) -> tuple[float, float]:
  """Returns the exponential moving mean and standard deviation of values.

  The average has a span of 128 steps, so a weight falls by 1 - 2 / (128 + 1)
  with each step of age.
  """
  ages = np.arange(len(values))[::-1]
  weights = (1 - 2 / (128 + 1)) ** ages
  mean = np.average(values, weights=weights)
  variance = np.average((values - mean) ** 2, weights=weights)
  return mean, np.sqrt(variance)


def test_a_spike_enters_the_running_averages_at_the_limit():
  """A spike counts as a loss of 6 standard deviations above the running mean.

  Otherwise, one spike would change the averages much.
  """
  losses = noise(num_steps=200, mean=2.0, deviation=0.1)
  norms = noise(num_steps=200, mean=0.5, deviation=0.1, seed=1)
  losses[130] = 50.0

  skipped, state = run_scalar(losses, norms, sigmas=6.0)

  assert skipped == [130]
  mean_before, deviation_before = weighted_statistics(losses[:130])
  losses_with_limit = losses.copy()
  losses_with_limit[130] = mean_before + 6 * deviation_before
  loss_mean, loss_deviation = weighted_statistics(losses_with_limit)
  norm_mean, norm_deviation = weighted_statistics(norms)
  np.testing.assert_allclose(
    optax.tree.get(state, "mean"), [loss_mean, norm_mean], rtol=1e-5
  )
  np.testing.assert_allclose(
    optax.tree.get(state, "variance"),
    [loss_deviation**2, norm_deviation**2],
    rtol=1e-4,
  )


MAX_SKIPPED_IN_A_ROW = TrainConfig().max_skipped_in_a_row


@pytest.mark.parametrize(
  ("loss_factor", "norm_factor", "most_skipped"),
  [
    # The running averages reach a moderate change in less than ten steps.
    pytest.param(1, 4, 10, id="norm 4"),
    pytest.param(1.3, 1, 10, id="loss 1.3"),
    # A large change must not end the run.
    pytest.param(1, 14, MAX_SKIPPED_IN_A_ROW, id="norm 14"),
    pytest.param(1, 100, MAX_SKIPPED_IN_A_ROW, id="norm 100"),
  ],
)
def test_a_lasting_change_is_skipped_only_for_a_while(
  loss_factor, norm_factor, most_skipped
):
  """From step 300 on, the losses or the gradient norms are larger than before.

  If all of those steps were skipped, a healthy run would stop for too many
  skipped steps.
  """
  losses = noise(num_steps=400, mean=2.0, deviation=0.02)
  norms = noise(num_steps=400, mean=0.5, deviation=0.02, seed=1)
  losses[300:] *= loss_factor
  norms[300:] *= norm_factor

  skipped = skipped_steps(losses, norms)

  num_skipped = len(skipped)
  assert 0 < num_skipped < most_skipped
  assert skipped == list(range(300, 300 + num_skipped))


def test_a_small_lasting_change_of_the_norm_is_not_skipped():
  """Only a norm above twice the running mean may be a spike."""
  losses = noise(num_steps=400, mean=2.0, deviation=0.02)
  norms = noise(num_steps=400, mean=0.5, deviation=0.02, seed=1)
  norms[300:] *= 1.6

  assert skipped_steps(losses, norms) == []


def test_a_run_whose_loss_is_lost_skips_too_many_steps_in_a_row():
  """The loss stays a thousand times as large, so training must stop."""
  losses = noise(num_steps=400, mean=2.0, deviation=0.02)
  losses[300:] *= 1000
  norms = noise(num_steps=400, mean=0.5, deviation=0.02, seed=1)

  skipped = skipped_steps(losses, norms)

  assert len(skipped) > MAX_SKIPPED_IN_A_ROW


CONSTANT_NORMS = np.full(400, 0.5)


def test_a_bump_of_the_loss_on_a_plateau_is_no_spike():
  """A spike is at least 6% above the mean of 2, and 2.05 is 2.5% above it."""
  losses = noise(num_steps=400, mean=2.0, deviation=1e-6)
  losses[300] += 0.05

  assert skipped_steps(losses, CONSTANT_NORMS) == []


def test_a_large_rise_of_the_loss_on_a_plateau_is_a_spike():
  """A spike is at least 6% above the mean of 2, and 2.2 is 10% above it."""
  losses = np.full(400, 2.0)
  losses[300] += 0.2

  assert skipped_steps(losses, CONSTANT_NORMS) == [300]


def test_a_falling_loss_has_no_spikes():
  """The loss falls from 6 to 2, and the gradient norm from 5.3 to 0.3."""
  steps = np.arange(400)
  variation = noise(num_steps=400, mean=0, deviation=0.02)
  losses = 2 + 4 * np.exp(-steps / 50) + variation
  norms = 0.3 + 5 * np.exp(-steps / 20) + variation

  assert skipped_steps(losses, norms) == []


def test_the_first_steps_are_not_monitored():
  """Spikes are detected from step 64 on, and this one is at step 60."""
  losses = np.full(400, 2.0)
  losses[60] = 50.0

  assert skipped_steps(losses, CONSTANT_NORMS) == []


def test_a_loss_far_below_the_mean_is_no_spike():
  losses = noise(num_steps=400, mean=2.0, deviation=0.1)
  losses[300] = 0.1

  assert skipped_steps(losses, CONSTANT_NORMS) == []


def test_a_first_batch_with_text_after_padding_is_no_spike():
  """Batches of padding alone have a loss and a gradient norm of zero."""
  losses = np.zeros(400)
  norms = np.zeros(400)
  norms[300] = 1.0

  assert skipped_steps(losses, norms) == []
