"""The decoder: its parameters, λ_init, masks, remat and initialisation."""

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any
from unittest import mock

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
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

# DIFF, in three layers with two heads each.
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
# A model of every variant with these sizes, by the name of the variant.
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
  """The layers are stacked: their number L is the first axis."""
  L, E, H, D, F = 3, 32, 2, 8, 48
  config = ModelConfig(
    attention="diff",
    vocab_size=64,
    num_layers=L,
    embed_dim=E,
    num_heads=H,
    num_kv_heads=H,
    head_dim=D,
    ffn_dim=F,
  )
  init = Decoder(config).init

  variables = jax.eval_shape(
    init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )

  shapes = jax.tree.map(jnp.shape, variables["params"])
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
  num_layers = 3
  head_dim = 8
  diff_config = dataclasses.replace(
    CONFIG, num_layers=num_layers, head_dim=head_dim
  )
  # A DIFF head has two maps, so the Transformer has twice as many heads.
  transformer_config = dataclasses.replace(
    diff_config,
    attention="softmax",
    num_heads=4,
    num_kv_heads=4,
    head_norm=False,
  )

  diff = random_parameters(diff_config)
  transformer = random_parameters(transformer_config)

  num_diff = sum(leaf.size for leaf in jax.tree.leaves(diff))
  num_transformer = sum(leaf.size for leaf in jax.tree.leaves(transformer))
  lambda_vectors = 4 * head_dim
  gain = 2 * head_dim
  assert num_diff - num_transformer == num_layers * (lambda_vectors + gain)


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


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_call_records_each_array_once(name, remat):
  """Flax appends to a tuple if a layer records a name again."""
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
  for path, _ in jax.tree_util.tree_leaves_with_path(recorded):
    # The last part of a path is the index in the tuple.
    assert path[-1].idx == 0


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
  """`parameter_shapes` reads a table of axes, and not the layers' code."""
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
  """A scan is a loop, so its program has the same size for any depth."""
  config = dataclasses.replace(CONFIG, num_layers=9)

  assert has_loop(config)


@pytest.mark.parametrize(
  ("remat", "expected"), [("none", False), ("full", True)]
)
def test_few_layers_are_unrolled_without_remat(remat, expected):
  """The model has three layers."""
  config = dataclasses.replace(CONFIG, remat=remat)

  assert has_loop(config) is expected


def test_the_initialisation_is_scanned():
  """The program of the initialisation has the same size for any depth."""

  def count_lines(num_layers):
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    init = jax.jit(Decoder(config).init)
    lowered = init.lower(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return len(lowered.as_text().splitlines())

  assert count_lines(num_layers=2) == count_lines(num_layers=4)


def test_a_layer_is_traced_once():
  """The loop over the layers does not trace their code again to check it."""
  params = random_parameters(CONFIG)
  model = Decoder(CONFIG)

  # The mock counts the calls of a layer, and passes them on.
  with mock.patch.object(
    Block, "__call__", autospec=True, side_effect=Block.__call__
  ) as call:
    jax.eval_shape(model.apply, {"params": params}, random_tokens(2, 8))

  assert call.call_count == 1


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
  """A scan over layers gives the index of each layer's window to one program."""
  x = jax.random.normal(jax.random.key(0), (2, 9, 16))
  layer = ATTENTION[name](num_heads=4, num_kv_heads=2, head_dim=4, window=5)
  params = parameters(layer, x, lambda_init=0.3)

  def apply_layer(layer):
    return jax.jit(layer.apply)({"params": params}, x, lambda_init=0.3)

  @jax.jit
  def apply_with_switch(index):
    switch = WindowSwitch(diff_attention, windows=(3, None), index=index)
    return apply_layer(layer.clone(attention_fn=switch))

  first = apply_with_switch(0)
  second = apply_with_switch(1)

  expected_first = apply_layer(layer.clone(window=3))
  expected_second = apply_layer(layer.clone(window=None))
  chex.assert_trees_all_close(first, expected_first, rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_close(second, expected_second, rtol=1e-5, atol=1e-6)
  assert np.abs(first - second).max() > 1e-2


def test_remat_of_attention_repeats_no_window():
  """Layers with two windows have two programs, each with one forward pass."""

  def num_softmaxes_of_gradient(window_pattern):
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

  # "w" gives all layers a window, and "wf" every other one.
  with_one_window = num_softmaxes_of_gradient("w")
  with_two_windows = num_softmaxes_of_gradient("wf")
  assert with_two_windows == 2 * with_one_window


# λ_init and λ.


@pytest.mark.parametrize(
  "remat",
  [pytest.param("full", id="scanned"), pytest.param("none", id="unrolled")],
)
def test_each_layer_has_its_own_lambda_init(remat):
  """The decoder equals a Python loop over its three layers."""
  config = dataclasses.replace(CONFIG, remat=remat)
  params = random_parameters(CONFIG)
  ids = random_tokens(2, 16)

  @jax.jit
  def logits_of_loop(lambda_init_of_layers):
    x = params["embedding"][ids]
    block = Block(CONFIG, jnp.float32, diff_attention)
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    for layer in range(3):
      layer_params = jax.tree.map(operator.itemgetter(layer), params["layers"])
      x, _ = block.apply(
        {"params": layer_params},
        x,
        lambda_init=lambda_init_of_layers[layer],
        window_index=0,
        segment_ids=None,
        positions=positions,
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
  """λ_init of layer l is 0.8 − 0.6·exp(−0.3·l)."""
  config = dataclasses.replace(CONFIG, num_layers=3)

  np.testing.assert_allclose(
    lambda_inits(config), [0.2, 0.3555, 0.4707], atol=5e-5
  )


@pytest.mark.parametrize("constant", [0.5, 0.0])
def test_lambda_init_can_be_a_constant(constant):
  config = dataclasses.replace(CONFIG, num_layers=3, lambda_init=constant)

  np.testing.assert_allclose(lambda_inits(config), [constant] * 3)


def test_lambda_init_offset_delays_the_schedule():
  """Layer l gets the λ_init of layer l − 1, that is 0.8 − 0.6·exp(−0.3(l − 1)).

  Motif has such layers.
  """
  config = dataclasses.replace(CONFIG, num_layers=3, lambda_init_offset=1)

  # The first one is 0.8 − 0.6·exp(0.3).
  np.testing.assert_allclose(
    lambda_inits(config), [-0.00992, 0.2, 0.3555], atol=5e-5
  )


def test_metrics_have_the_lambda_of_each_layer():
  """λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init."""
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
  """Flax's examples pass all variables of `init` to `apply`.

  Metrics among them would come before those of the call.
  """
  ids = random_tokens(1, 8)
  model = Decoder(CONFIG)
  variables = jax.jit(model.init)(jax.random.key(0), ids)
  # The first term of λ, exp(λ_q1·λ_k1), becomes exp(8) = 2981.
  attention = variables["params"]["layers"]["attention"]
  attention["lambda_q1"] = jnp.ones((3, 8))
  attention["lambda_k1"] = jnp.ones((3, 8))

  apply_model = functools.partial(model.apply, mutable=["metrics"])
  _, recorded = jax.jit(apply_model)(variables, ids)

  lambdas = recorded["metrics"]["layers"]["attention"]["lambda"][0]
  assert lambdas.min() > 100


# Positions, embeddings and logits.


def test_only_distances_between_positions_matter():
  """RoPE rotates a query and a key by angles proportional to their positions.

  So their product depends only on the difference of the positions.
  """
  # A small base, so that all angles differ clearly between tokens.
  config = dataclasses.replace(CONFIG, rope_base=20.0)
  params = random_parameters(CONFIG)
  ids = random_tokens(2, 16)
  positions = np.broadcast_to(np.arange(16), (2, 16))

  logits_at_start = apply(config, params, ids, positions=positions)
  shifted = apply(config, params, ids, positions=positions + 9)
  stretched = apply(config, params, ids, positions=2 * positions)

  chex.assert_trees_all_close(shifted, logits_at_start, rtol=0, atol=1e-5)
  assert np.abs(stretched - logits_at_start).max() > 1e-3


def test_more_tokens_than_max_length_are_rejected():
  config = dataclasses.replace(CONFIG, max_length=32)
  params = random_parameters(config)
  ids = random_tokens(1, 33)

  with pytest.raises(ValueError, match="max_length is 32"):
    apply(config, params, ids)


@pytest.mark.parametrize("matrix", ["embedding", "unembedding"])
def test_logits_are_products_with_the_output_matrix(matrix):
  """This is the unembedding if there is one, and otherwise the embedding."""
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal((2, 3, 8), np.float32)
  params = {"embedding": rng.standard_normal((5, 8), np.float32)}
  params[matrix] = rng.standard_normal((5, 8), np.float32)

  actual = logits(params, hidden)

  expected = hidden @ params[matrix].T
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_embed_scale_scales_the_input_and_not_the_logits():
  """A tied embedding is also the matrix of the logits."""
  config = dataclasses.replace(CONFIG, embed_scale=5.0)
  params = random_parameters(CONFIG)
  ids = random_tokens(2, 16)

  actual = apply(config, params, ids)

  # An untied model can have the scaled matrix only at its input.
  untied_config = dataclasses.replace(CONFIG, tie_embeddings=False)
  untied_params = params | {
    "embedding": 5 * params["embedding"],
    "unembedding": params["embedding"],
  }
  expected = apply(untied_config, untied_params, ids)
  chex.assert_trees_all_close(actual, expected, rtol=0, atol=1e-5)
  # The scale does change the logits.
  unscaled = apply(CONFIG, params, ids)
  assert np.abs(unscaled - expected).max() > 1e-2


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
  """A row has 12 tokens. The output at position 5 depends on these inputs."""
  influence = influence_on(position=5, config=VARIANTS[name])

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
  """Token 5 of 12 sees the tokens `expected` in a model of one layer."""
  config = dataclasses.replace(CONFIG, num_layers=1, **fields)

  influence = influence_on(position=5, config=config)

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

  # The cached parameters are shared with other tests, which need float32.
  float32_params = random_parameters(config)
  with jax.enable_x64(True):
    params = jax.tree.map(np.float64, float32_params)

    @jax.jit
    def compute_logits(ids, segment_ids=None, positions=None):
      model = Decoder(config, jnp.float64)
      hidden = model.apply({"params": params}, ids, segment_ids, positions)
      return logits(params, hidden)

    actual = compute_logits(packed, segment_ids, positions)
    without_segments = compute_logits(packed)
    expected = jnp.concatenate(
      [compute_logits(first), compute_logits(second)], axis=1
    )

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
  """Rematerialisation computes activations again in the backward pass."""
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
def saved_for_backward(
  config: ModelConfig, batch_shape: tuple[int, int]
) -> list[jax.ShapeDtypeStruct]:
  """Returns the arrays that a model in bfloat16 keeps for its backward pass."""
  model = Decoder(config, jnp.bfloat16)

  def backward_function(params):
    def hidden(params):
      return model.apply({"params": params}, random_tokens(*batch_shape))

    _, backward = jax.vjp(hidden, params)
    return backward

  shapes = jax.eval_shape(backward_function, random_parameters(config))
  return jax.tree.leaves(shapes)


@pytest.mark.parametrize("name", FUSED)
def test_activations_are_kept_in_bfloat16_and_not_in_float32(name):
  """The model keeps them for the gradients of a batch of 5 rows of 16 tokens."""
  batch_shape = (5, 16)
  config = dataclasses.replace(VARIANTS[name], remat="none")
  # Plain layers have stacked activations of their own.
  num_layers = config.num_layers - config.plain_layers

  saved = saved_for_backward(config, batch_shape)

  bfloat16_shapes = {leaf.shape for leaf in saved if leaf.dtype == jnp.bfloat16}
  assert (num_layers, *batch_shape, config.embed_dim) in bfloat16_shapes
  for leaf in saved:
    # Activations have the batch's axes first, or after the axis of layers.
    is_activation = batch_shape in (leaf.shape[:2], leaf.shape[1:3])
    if leaf.dtype == jnp.float32 and is_activation:
      # Statistics of norms and softmax are smaller than hidden states.
      assert leaf.size < math.prod(batch_shape) * config.embed_dim


@pytest.mark.parametrize("name", FUSED)
def test_no_bfloat16_copy_of_a_parameter_is_kept(name):
  """The backward pass casts the float32 parameters again, to save memory."""
  config = dataclasses.replace(VARIANTS[name], remat="none")
  matrix_shapes = set()
  for leaf in jax.tree.leaves(random_parameters(config)):
    if leaf.size > config.embed_dim**2:
      matrix_shapes.add(leaf.shape)

  for leaf in saved_for_backward(config, batch_shape=(5, 16)):
    is_copy = leaf.dtype == jnp.bfloat16 and leaf.shape in matrix_shapes
    assert not is_copy, leaf


# Initial values and precision.


@pytest.mark.parametrize("name", ["diff", "diff_v2"])
def test_initial_matrices_have_the_standard_deviation_of_their_inputs(name):
  """It is 1/√inputs.

  The two matrices that write to the residual stream, `out` and `down`, have a
  further factor of 1/√(2 · layers).
  """
  num_layers = 3
  embed_dim = 32
  ffn_dim = 48
  params = initial_parameters(VARIANTS[name])

  matrices = {
    "embedding": params["embedding"],
    **params["layers"]["attention"],
    **params["layers"]["ffn"],
  }
  residual = 1 / np.sqrt(2 * num_layers)
  expected = {
    "embedding": 1 / np.sqrt(embed_dim),
    "query": 1 / np.sqrt(embed_dim),
    "key": 1 / np.sqrt(embed_dim),
    "value": 1 / np.sqrt(embed_dim),
    # All heads together are as wide as the embedding.
    "out": residual / np.sqrt(embed_dim),
    "gate": 1 / np.sqrt(embed_dim),
    "up": 1 / np.sqrt(embed_dim),
    "down": residual / np.sqrt(ffn_dim),
  }
  for matrix, deviation in expected.items():
    actual = float(matrices[matrix].std())
    assert actual == pytest.approx(deviation, rel=0.1), matrix


@pytest.mark.parametrize("embed_dim", [32, 128])
def test_initial_logits_have_unit_scale(embed_dim):
  """So the first loss is near log(vocab_size) for every width."""
  config = dataclasses.replace(CONFIG, embed_dim=embed_dim)
  params = initial_parameters(config)
  ids = random_tokens(4, 32)

  initial_logits = apply(config, params, ids)

  assert 0.7 < float(initial_logits.std()) < 1.4


@pytest.mark.parametrize(
  "name", ["diff", *full(sorted(VARIANTS.keys() - {"diff"}))]
)
def test_bfloat16_approximates_float32(name):
  """Parameters and gradients are in float32, and activations in bfloat16."""
  config = VARIANTS[name]
  ids = random_tokens(4, 32)
  params = random_parameters(config)

  def compute_loss(params, dtype):
    hidden = Decoder(config, dtype=dtype).apply({"params": params}, ids)
    assert hidden.dtype == dtype
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits(params, hidden)[:, :-1], ids[:, 1:]
    )
    return losses.mean()

  loss_and_gradient = jax.jit(
    jax.value_and_grad(compute_loss), static_argnames="dtype"
  )

  loss, gradient = loss_and_gradient(params, dtype=jnp.dtype("bfloat16"))

  expected_loss, expected_gradient = loss_and_gradient(
    params, dtype=jnp.dtype("float32")
  )
  assert loss != expected_loss
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-2)
  for leaf in jax.tree.leaves(gradient):
    assert leaf.dtype == jnp.float32
  vector, _ = jax.flatten_util.ravel_pytree(gradient)
  expected_vector, _ = jax.flatten_util.ravel_pytree(expected_gradient)
  error = np.linalg.norm(vector - expected_vector)
  assert error < 0.05 * np.linalg.norm(expected_vector)
