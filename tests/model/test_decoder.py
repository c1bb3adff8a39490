"""The decoder: its parameters, λ_init, masks, remat and initialisation."""

import dataclasses
import functools
import itertools
import operator
from typing import Any

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig
from diffjax.model import decoder
from diffjax.model.attention import ATTENTION, lambda_init_schedule
from diffjax.model.decoder import (
  Block,
  Decoder,
  WindowSwitch,
  lambda_inits,
  logits,
)
from diffjax.model.shapes import axis_sizes, parameter_shapes
from diffjax.ops.diff_attention import diff_attention
from tests.harness.parameters import parameters
from tests.harness.tiers import full
from tests.harness.variants import EXPECTED, models

CONFIG = ModelConfig(
  vocab_size=64,
  num_layers=3,
  embed_dim=32,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  ffn_dim=48,
  max_length=32,
)
VARIANTS = models(CONFIG)


@functools.cache
def random_parameters(config: ModelConfig) -> dict[str, Any]:
  """Returns parameters of a decoder, without compiling its initialisation."""
  return parameters(Decoder(config), jnp.zeros((1, 1), jnp.int32))


@functools.cache
def initial_parameters(config: ModelConfig) -> dict[str, Any]:
  """Returns the parameters that training starts from."""
  init = jax.jit(Decoder(config).init)
  return init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def random_tokens(*shape: int, seed: int = 1) -> jax.Array:
  """Returns uniformly distributed token ids."""
  return jax.random.randint(jax.random.key(seed), shape, 0, CONFIG.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def apply(config, params, ids, segment_ids=None, positions=None):
  """Returns the logits of a decoder in float32."""
  model = Decoder(config)
  hidden = model.apply({"params": params}, ids, segment_ids, positions)
  return logits(params, hidden)


# Parameters.


def test_parameters_have_the_documented_layout():
  L, E, H, D, F = 3, 32, 2, 8, 48

  shapes = jax.tree.map(jnp.shape, initial_parameters(CONFIG))

  assert shapes == {
    "embedding": (64, E),
    "final_norm": (E,),
    "layers": {
      "attention": {
        "query": (L, E, H, 2, D),
        "key": (L, E, H, 2, D),
        "value": (L, E, H, 2 * D),
        "out": (L, H, 2 * D, E),
        "lambda_q1": (L, D),
        "lambda_k1": (L, D),
        "lambda_q2": (L, D),
        "lambda_k2": (L, D),
        "head_gain": (L, 2 * D),
      },
      "attention_norm": (L, E),
      "ffn": {"gate": (L, E, F), "up": (L, E, F), "down": (L, F, E)},
      "ffn_norm": (L, E),
    },
  }


def test_parameters_are_in_float32():
  for leaf in jax.tree.leaves(initial_parameters(CONFIG)):
    assert leaf.dtype == jnp.float32


def test_untied_embeddings_have_an_unembedding():
  untied = dataclasses.replace(CONFIG, tie_embeddings=False)

  assert "unembedding" in random_parameters(untied)
  assert "unembedding" not in random_parameters(CONFIG)


def test_diff_has_only_lambdas_and_gains_more_than_its_transformer():
  extra_names = {
    "lambda_q1",
    "lambda_k1",
    "lambda_q2",
    "lambda_k2",
    "head_gain",
  }
  num_common = 0
  num_extra = 0
  diff = random_parameters(CONFIG)
  for path, leaf in jax.tree_util.tree_leaves_with_path(diff):
    if path[-1].key in extra_names:
      num_extra += leaf.size
    else:
      num_common += leaf.size

  transformer = random_parameters(VARIANTS["softmax"])

  leaves = jax.tree.leaves(transformer)
  assert num_common == sum(leaf.size for leaf in leaves)
  # Four vectors λ of D numbers, and a gain of 2D numbers, in each layer.
  assert num_extra == CONFIG.num_layers * 6 * CONFIG.head_dim


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("remat", ["none", "full"])
def test_init_returns_only_parameters(name, remat):
  """Other arrays of `init` would be inputs of every later call."""
  model = Decoder(dataclasses.replace(VARIANTS[name], remat=remat))
  init = functools.partial(model.init, mutable=True)

  variables = jax.eval_shape(
    init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32)
  )

  assert variables.keys() == {"params"}


def is_tuple(value: Any) -> bool:
  return isinstance(value, tuple)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_call_records_each_array_once(name, remat):
  config = dataclasses.replace(VARIANTS[name], remat=remat)
  apply_model = functools.partial(
    Decoder(config).apply, mutable=["metrics", "intermediates"]
  )

  _, recorded = jax.eval_shape(
    apply_model,
    {"params": random_parameters(config)},
    jnp.zeros((1, 8), jnp.int32),
  )

  assert "hidden" in recorded["intermediates"]["layers"]
  for collection in recorded.values():
    tuples = jax.tree.leaves(collection, is_leaf=is_tuple)
    for values in tuples:
      assert len(values) == 1


# Every axis has another size, so the shapes tell which letter an axis has.
DISTINCT_SIZES = dict(
  vocab_size=64,
  num_layers=5,
  embed_dim=40,
  num_heads=36,
  num_kv_heads=6,
  head_dim=10,
  value_dim=14,
  ffn_dim=48,
)


def with_distinct_sizes(name: str, **fields: Any) -> ModelConfig:
  """Returns a config of a variant in which all sizes are different."""
  num_noise_heads = None
  if ATTENTION[name].has_noise_map:
    num_noise_heads = 12
  return ModelConfig(
    attention=name,
    num_noise_heads=num_noise_heads,
    **DISTINCT_SIZES,
    **fields,
  )


@pytest.mark.parametrize("name", EXPECTED)
def test_distinct_sizes_tell_axes_apart(name):
  """Only sizes that are equal by definition are equal.

  These are V and U, and with one map also H and Q, and G and M.
  """
  sizes = axis_sizes(with_distinct_sizes(name))

  num_equal = 1 if ATTENTION[name].has_noise_map else 3
  assert len(set(sizes.values())) == len(sizes) - num_equal


def shape_cases() -> list[Any]:
  """Returns small models of all variants with all parameters that exist."""
  cases = []
  for name, config in VARIANTS.items():
    cases.append(pytest.param(config, id=name))
  options = {
    "head norm": dict(head_norm=True),
    "untied, biases": dict(
      head_norm=False, tie_embeddings=False, projection_biases=True
    ),
    "layer norm, PolyNorm": dict(
      head_norm=True, norm="layer", ffn_activation="poly_norm"
    ),
    "plain layers, biases": dict(
      head_norm=True, plain_layers=1, projection_biases=True
    ),
  }
  for name, (title, fields) in itertools.product(ATTENTION, options.items()):
    config = with_distinct_sizes(name, **fields)
    cases.append(pytest.param(config, id=f"{name}, {title}"))
  return cases


@pytest.mark.parametrize("config", shape_cases())
def test_the_table_has_the_shape_of_every_parameter(config):
  """The layers state shapes, and diffjax/parameters.py states axes."""
  init = Decoder(config).init
  variables = jax.eval_shape(
    init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )

  shapes = {}
  leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
  for path, leaf in leaves:
    name = path[-1].key
    if path[0].key == "plain_layers":
      name = f"plain_layers/{name}"
    shapes[name] = leaf.shape
  assert shapes == parameter_shapes(config)


# The loop over layers.


def has_loop(config: ModelConfig) -> bool:
  """Returns whether the program loops. Small models only loop over layers."""
  lowered = apply.lower(config, random_parameters(config), random_tokens(2, 16))
  return "stablehlo.while" in lowered.as_text()


def test_many_layers_are_scanned():
  assert has_loop(dataclasses.replace(CONFIG, num_layers=9))


@pytest.mark.parametrize(
  ("remat", "expected"), [("none", False), ("full", True)]
)
def test_few_layers_are_unrolled_without_remat(remat, expected):
  assert has_loop(dataclasses.replace(CONFIG, remat=remat)) is expected


def test_the_initialisation_is_scanned():
  """The program of the initialisation has the same size for any depth."""

  def count_lines(num_layers):
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    init = jax.jit(Decoder(config).init)
    lowered = init.lower(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return len(lowered.as_text().splitlines())

  assert count_lines(num_layers=2) == count_lines(num_layers=4)


def test_a_layer_is_traced_once(monkeypatch):
  """The loop over the layers does not trace their code again to check it."""
  num_traces = 0
  call_block = Block.__call__

  def counted_call(*args):
    nonlocal num_traces
    num_traces += 1
    return call_block(*args)

  params = random_parameters(CONFIG)
  monkeypatch.setattr(Block, "__call__", counted_call)
  jax.eval_shape(Decoder(CONFIG).apply, {"params": params}, random_tokens(2, 8))

  assert num_traces == 1


@pytest.mark.parametrize(
  ("remat", "num_layers"),
  [
    pytest.param("none", 5, id="unrolled"),
    pytest.param("attention", 9, id="scanned"),
  ],
)
def test_each_layer_has_its_own_window_and_kind(remat, num_layers):
  """The decoder equals a Python loop over layers of several kinds."""
  config = dataclasses.replace(
    VARIANTS["public"],
    num_layers=num_layers,
    plain_layers=2,
    window=3,
    window_pattern="wwf",
    remat=remat,
  )
  plain_fields = dict(
    attention="softmax",
    num_heads=8,
    num_kv_heads=4,
    num_noise_heads=None,
    head_norm=False,
    lambda_init_offset=0,
  )
  params = random_parameters(config)
  ids = random_tokens(2, 16)

  @jax.jit
  def logits_of_loop(params):
    x = jnp.take(params["embedding"], ids, axis=0)
    for layer in range(num_layers):
      is_plain = layer < 2
      fields = plain_fields if is_plain else {}
      layers = params["plain_layers"] if is_plain else params["layers"]
      index = layer if is_plain else layer - 2
      layer_params = jax.tree.map(operator.itemgetter(index), layers)
      has_window = layer % 3 < 2
      layer_config = dataclasses.replace(
        config,
        plain_layers=0,
        window_pattern="",
        window=3 if has_window else None,
        **fields,
      )
      block = Block(layer_config, jnp.float32, diff_attention)
      # The model has lambda_init_offset = 1.
      lambda_init = lambda_init_schedule(layer - 1)
      x, _ = block.apply(
        {"params": layer_params}, x, lambda_init, 0, None, None
      )
    return logits(params, decoder.apply_norm(params, "final_norm", x, config))

  actual = apply(config, params, ids)

  chex.assert_trees_all_close(actual, logits_of_loop(params), rtol=0, atol=2e-5)
  all_windows = dataclasses.replace(config, window_pattern="w")
  assert np.abs(apply(all_windows, params, ids) - actual).max() > 1e-3


@pytest.mark.parametrize("name", ["softmax", "diff"])
def test_a_window_switch_replaces_the_window_of_the_layer(name):
  x = jax.random.normal(jax.random.key(0), (2, 9, 16))
  layer = ATTENTION[name](num_heads=4, num_kv_heads=2, head_dim=4, window=5)
  params = parameters(layer, x, 0.3)

  @jax.jit
  def apply_switch(index):
    switch = WindowSwitch(diff_attention, (3, None), index)
    return layer.clone(attention_fn=switch).apply({"params": params}, x, 0.3)

  for index, window in enumerate((3, None)):
    windowed = layer.clone(window=window)
    expected = jax.jit(windowed.apply)({"params": params}, x, 0.3)
    chex.assert_trees_all_close(
      apply_switch(index), expected, rtol=1e-5, atol=1e-6
    )
  assert np.abs(apply_switch(0) - apply_switch(1)).max() > 1e-2


def test_remat_of_attention_repeats_no_window():
  """Layers with two windows have two programs, each with one forward pass."""

  def count_maxima(window_pattern):
    config = dataclasses.replace(
      CONFIG,
      num_layers=9,
      window=3,
      window_pattern=window_pattern,
      remat="attention",
    )

    def loss(params):
      return jnp.sum(apply(config, params, random_tokens(1, 8)))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(random_parameters(config))
    # A softmax begins with a maximum.
    return str(jaxpr).count("reduce_max")

  assert count_maxima("wf") == 2 * count_maxima("w")


# λ_init and λ.


@pytest.mark.parametrize(
  "remat",
  [pytest.param("full", id="scanned"), pytest.param("none", id="unrolled")],
)
def test_each_layer_has_its_own_lambda_init(remat):
  """The decoder equals a Python loop over layers."""
  config = dataclasses.replace(CONFIG, remat=remat)
  params = random_parameters(CONFIG)
  ids = random_tokens(2, 16)

  @jax.jit
  def logits_of_loop(lambda_init_of_layers):
    x = params["embedding"][ids]
    block = Block(CONFIG, jnp.float32, diff_attention)
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    for layer in range(CONFIG.num_layers):
      layer_params = jax.tree.map(operator.itemgetter(layer), params["layers"])
      lambda_init = lambda_init_of_layers[layer]
      x, _ = block.apply(
        {"params": layer_params}, x, lambda_init, 0, None, positions
      )
    x = decoder.rms_norm(x, params["final_norm"], CONFIG.norm_eps)
    return logits(params, x)

  actual = apply(config, params, ids)

  expected = logits_of_loop(lambda_init_schedule(jnp.arange(3)))
  with_lambda_init_of_first_layer = logits_of_loop(
    lambda_init_schedule(jnp.zeros(3))
  )
  chex.assert_trees_all_close(actual, expected, rtol=0, atol=1e-5)
  assert np.abs(actual - with_lambda_init_of_first_layer).max() > 1e-3


def test_lambda_init_follows_the_schedule():
  np.testing.assert_allclose(
    lambda_inits(CONFIG), [0.2, 0.3555, 0.4707], atol=5e-5
  )


@pytest.mark.parametrize("constant", [0.5, 0.0])
def test_lambda_init_can_be_a_constant(constant):
  config = dataclasses.replace(CONFIG, lambda_init=constant)

  np.testing.assert_allclose(lambda_inits(config), [constant] * 3)


def test_lambda_init_offset_delays_the_schedule():
  """The first layer of Motif has 0.8 − 0.6·exp(0.3)."""
  config = dataclasses.replace(CONFIG, lambda_init_offset=1)

  np.testing.assert_allclose(
    lambda_inits(config), [-0.00992, 0.2, 0.3555], atol=5e-5
  )


def test_metrics_have_the_lambda_of_each_layer():
  params = random_parameters(CONFIG)
  apply_model = functools.partial(Decoder(CONFIG).apply, mutable=["metrics"])

  _, variables = jax.jit(apply_model)({"params": params}, random_tokens(2, 8))

  (lambdas,) = variables["metrics"]["layers"]["attention"]["lambda"]
  attention = params["layers"]["attention"]
  first = jnp.sum(attention["lambda_q1"] * attention["lambda_k1"], axis=-1)
  second = jnp.sum(attention["lambda_q2"] * attention["lambda_k2"], axis=-1)
  expected = jnp.exp(first) - jnp.exp(second) + lambda_inits(CONFIG)
  chex.assert_trees_all_close(lambdas, expected, rtol=1e-6)


def test_metrics_are_those_of_the_call_and_not_of_init():
  """Flax's examples pass all variables of `init` to `apply`."""
  ids = random_tokens(1, 8)
  model = Decoder(CONFIG)
  variables = jax.jit(model.init)(jax.random.key(0), ids)
  attention = variables["params"]["layers"]["attention"]
  for name in ("lambda_q1", "lambda_k1"):
    attention[name] = jnp.ones_like(attention[name])

  apply_model = functools.partial(model.apply, mutable=["metrics"])
  _, metrics = jax.jit(apply_model)(variables, ids)

  lambdas = metrics["metrics"]["layers"]["attention"]["lambda"][0]
  # These vectors give exp(8) = 2981.
  assert lambdas.min() > 100


# Positions, embeddings and logits.


def test_only_distances_between_positions_matter():
  """Queries and keys are rotated by the same angles, for every base of RoPE."""
  config = dataclasses.replace(CONFIG, rope_base=20.0)
  params = random_parameters(CONFIG)
  ids = random_tokens(2, 16)
  positions = np.broadcast_to(np.arange(16), (2, 16))

  expected = apply(config, params, ids, positions=positions)
  shifted = apply(config, params, ids, positions=positions + 9)
  stretched = apply(config, params, ids, positions=2 * positions)

  chex.assert_trees_all_close(shifted, expected, rtol=0, atol=1e-5)
  assert np.abs(stretched - expected).max() > 1e-3


def test_more_tokens_than_max_length_are_rejected():
  with pytest.raises(ValueError, match="max_length is 32"):
    apply(CONFIG, random_parameters(CONFIG), random_tokens(1, 33))


@pytest.mark.parametrize("matrix", ["embedding", "unembedding"])
def test_logits_are_products_with_the_output_matrix(matrix):
  """This is the unembedding if there is one, and otherwise the embedding."""
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal((2, 3, 8), np.float32)
  params = {"embedding": rng.standard_normal((5, 8), np.float32)}
  params[matrix] = rng.standard_normal((5, 8), np.float32)

  np.testing.assert_allclose(
    logits(params, hidden), hidden @ params[matrix].T, rtol=1e-5
  )


def test_embed_scale_scales_the_input_and_not_the_logits():
  config = dataclasses.replace(CONFIG, embed_scale=5.0)
  untied_config = dataclasses.replace(CONFIG, tie_embeddings=False)
  params = random_parameters(CONFIG)
  ids = random_tokens(2, 16)

  actual = apply(config, params, ids)

  untied_params = {
    **params,
    "embedding": 5 * params["embedding"],
    "unembedding": params["embedding"],
  }
  expected = apply(untied_config, untied_params, ids)
  chex.assert_trees_all_close(actual, expected, rtol=0, atol=1e-5)
  assert np.abs(apply(CONFIG, params, ids) - expected).max() > 1e-2


# Which tokens a token sees.


def influence_on(position: int, config: ModelConfig) -> jax.Array:
  """Returns the sum of |gradient| of one output for each of 12 inputs.

  The embedding matrix has one row per position, so its gradient is the gradient
  of the embedded tokens.
  """
  config = dataclasses.replace(config, vocab_size=12, tie_embeddings=True)
  params = random_parameters(config)
  embedded = jax.random.normal(jax.random.key(3), (12, config.embed_dim))

  def output(embedded):
    variables = {"params": params | {"embedding": embedded}}
    hidden = Decoder(config).apply(variables, jnp.arange(12)[None])
    return hidden[0, position].sum()

  gradient = jax.jit(jax.grad(output))(embedded)
  return jnp.abs(gradient).sum(axis=-1)


@pytest.mark.parametrize(
  "name",
  ["diff", "softmax", *full(sorted(VARIANTS.keys() - {"diff", "softmax"}))],
)
def test_a_token_sees_all_earlier_tokens_and_no_later_ones(name):
  influence = influence_on(5, VARIANTS[name])

  assert np.flatnonzero(influence).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
  ("fields", "expected"),
  [
    (dict(window=3), [3, 4, 5]),
    (dict(causal=False), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
    (dict(causal=False, window=3), [3, 4, 5, 6, 7]),
    (dict(rope=False, projection_biases=True), [0, 1, 2, 3, 4, 5]),
  ],
  ids=str,
)
def test_the_config_defines_which_tokens_a_token_sees(fields, expected):
  config = dataclasses.replace(CONFIG, num_layers=1, **fields)

  influence = influence_on(5, config)

  assert np.flatnonzero(influence).tolist() == expected


@pytest.mark.parametrize(
  "name",
  ["diff", "diff_v2", *full(sorted(VARIANTS.keys() - {"diff", "diff_v2"}))],
)
def test_packed_documents_do_not_see_each_other(name):
  """Each of two documents in a row gets the logits that it has alone.

  The logits are computed in float64. For rows of another length a CPU may sum
  products in another order, which changes float32 logits by up to 5e-6.
  """
  config = VARIANTS[name]
  first = random_tokens(1, 7, seed=1)
  second = random_tokens(1, 9, seed=2)
  packed = jnp.concatenate([first, second], axis=1)
  segment_ids = jnp.asarray([[1] * 7 + [2] * 9])
  positions = jnp.asarray([[*range(7), *range(9)]])

  with jax.enable_x64(True):
    params = jax.tree.map(np.float64, random_parameters(config))

    @jax.jit
    def run(*batch):
      model = Decoder(config, jnp.float64)
      return logits(params, model.apply({"params": params}, *batch))

    actual = run(packed, segment_ids, positions)
    expected = jnp.concatenate([run(first), run(second)], axis=1)
    without_segments = run(packed)

  chex.assert_trees_all_close(actual, expected, rtol=0, atol=1e-6)
  assert np.abs(actual - without_segments)[:, 7:].max() > 1e-3


# Remat and memory.


DEFAULT_REMAT = [
  ("diff", "attention"),
  ("diff_v2", "dots"),
  ("softmax", "full"),
]
OTHER_REMAT = [
  case
  for case in itertools.product(VARIANTS, ("attention", "dots", "full"))
  if case not in DEFAULT_REMAT
]


@pytest.mark.parametrize(
  ("name", "remat"), [*DEFAULT_REMAT, *full(OTHER_REMAT)]
)
def test_remat_does_not_change_loss_or_gradients(name, remat):
  config = VARIANTS[name]
  params = random_parameters(config)
  ids = random_tokens(2, 16)

  @functools.partial(jax.jit, static_argnums=0)
  def loss_and_gradient(config, params):
    def loss(params):
      return jnp.mean(apply(config, params, ids) ** 2)

    return jax.value_and_grad(loss)(params)

  actual = loss_and_gradient(dataclasses.replace(config, remat=remat), params)

  expected = loss_and_gradient(config, params)
  chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-7)


# Other variants store their weights.
FUSED = [
  name for name, config in VARIANTS.items() if ATTENTION[config.attention].fused
]


@functools.cache
def saved_for_backward(config: ModelConfig) -> list[jax.ShapeDtypeStruct]:
  """Returns the arrays that a model in bfloat16 keeps for its backward pass."""
  model = Decoder(config, jnp.bfloat16)

  def backward_function(params):
    def hidden(params):
      return model.apply({"params": params}, random_tokens(5, 16))

    _, backward = jax.vjp(hidden, params)
    return backward

  shapes = jax.eval_shape(backward_function, random_parameters(config))
  return jax.tree.leaves(shapes)


@pytest.mark.parametrize("name", FUSED)
def test_activations_are_kept_in_bfloat16_and_not_in_float32(name):
  config = dataclasses.replace(VARIANTS[name], remat="none")
  num_layers = config.num_layers - config.plain_layers
  hidden_shape = (num_layers, 5, 16, config.embed_dim)

  saved = saved_for_backward(config)

  has_hidden_states = False
  for leaf in saved:
    if leaf.dtype == jnp.bfloat16:
      has_hidden_states |= leaf.shape == hidden_shape
    # Activations have the axes B and T first, or after the axis of layers.
    is_activation = (5, 16) in (leaf.shape[:2], leaf.shape[1:3])
    if leaf.dtype == jnp.float32 and is_activation:
      assert leaf.size < 5 * 16 * config.embed_dim
  assert has_hidden_states


@pytest.mark.parametrize("name", FUSED)
def test_no_bfloat16_copy_of_a_parameter_is_kept(name):
  config = dataclasses.replace(VARIANTS[name], remat="none")
  matrix_shapes = set()
  for leaf in jax.tree.leaves(random_parameters(config)):
    if leaf.size > config.embed_dim**2:
      matrix_shapes.add(leaf.shape)

  for leaf in saved_for_backward(config):
    is_copy = leaf.dtype == jnp.bfloat16 and leaf.shape in matrix_shapes
    assert not is_copy, leaf


# Initial values and precision.


@pytest.mark.parametrize("name", ["diff", "diff_v2"])
def test_initial_matrices_have_the_standard_deviation_of_their_inputs(name):
  """It is 1/√inputs.

  The two matrices that write to the residual stream have a further 1/√(2L).
  """
  params = initial_parameters(VARIANTS[name])
  layers = params["layers"]
  matrices = {**layers["attention"], **layers["ffn"]}
  matrices["embedding"] = params["embedding"]
  per_input = CONFIG.embed_dim**-0.5
  residual = (2 * CONFIG.num_layers) ** -0.5
  expected = {
    "embedding": per_input,
    "query": per_input,
    "key": per_input,
    "value": per_input,
    # H·V is as large as E.
    "out": residual * per_input,
    "gate": per_input,
    "up": per_input,
    "down": residual * CONFIG.ffn_dim**-0.5,
  }

  for matrix, deviation in expected.items():
    actual = float(matrices[matrix].std())
    assert actual == pytest.approx(deviation, rel=0.1), matrix


@pytest.mark.parametrize("embed_dim", [32, 128])
def test_initial_logits_have_unit_scale(embed_dim):
  """So the first loss is near log N for every width."""
  config = dataclasses.replace(CONFIG, embed_dim=embed_dim)

  deviation = apply(
    config, initial_parameters(config), random_tokens(4, 32)
  ).std()

  assert 0.7 < float(deviation) < 1.4


@pytest.mark.parametrize(
  "name", ["diff", *full(sorted(VARIANTS.keys() - {"diff"}))]
)
def test_bfloat16_approximates_float32(name):
  """Parameters and gradients are in float32, and activations in bfloat16."""
  config = VARIANTS[name]
  ids = random_tokens(4, 32)
  params = random_parameters(config)

  @functools.partial(jax.jit, static_argnums=0)
  def loss_and_gradient(dtype, params):
    def loss(params):
      hidden = Decoder(config, dtype=dtype).apply({"params": params}, ids)
      assert hidden.dtype == dtype
      log_probabilities = jax.nn.log_softmax(logits(params, hidden))
      of_targets = jnp.take_along_axis(
        log_probabilities[:, :-1], ids[:, 1:, None], axis=-1
      )
      return -of_targets.mean()

    return jax.value_and_grad(loss)(params)

  loss, gradient = loss_and_gradient(jnp.dtype("bfloat16"), params)

  expected_loss, expected_gradient = loss_and_gradient(
    jnp.dtype("float32"), params
  )
  assert loss != expected_loss
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-2)
  for leaf in jax.tree.leaves(gradient):
    assert leaf.dtype == jnp.float32
  vector, _ = jax.flatten_util.ravel_pytree(gradient)
  expected_vector, _ = jax.flatten_util.ravel_pytree(expected_gradient)
  error = np.linalg.norm(vector - expected_vector)
  assert error < 0.05 * np.linalg.norm(expected_vector)
