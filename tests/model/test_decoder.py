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
from tests.harness.tolerances import assert_close_in_norm
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
  """Returns parameters of a decoder as NumPy arrays.

  Their initialisation is not compiled.
  """
  params = parameters(Decoder(config), np.zeros((1, 1), np.int32))
  return jax.device_get(params)


@functools.cache
def initial_parameters(config: ModelConfig) -> dict[str, Any]:
  """Returns the parameters that training starts from."""
  init = jax.jit(Decoder(config).init)
  variables = init(jax.random.key(0), np.zeros((1, 1), np.int32))
  return jax.device_get(variables["params"])


def random_tokens(*shape: int, seed: int = 1) -> np.ndarray:
  """Returns uniformly distributed token ids."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, CONFIG.vocab_size, shape, np.int32)


@functools.partial(jax.jit, static_argnums=0)
def compute_logits(config, params, ids, segment_ids=None, positions=None):
  """Returns the logits of a decoder in float32."""
  model = Decoder(config)
  hidden = model.apply({"params": params}, ids, segment_ids, positions)
  return logits(params, hidden)


def apply(config: ModelConfig, *arrays: Any, **named_arrays: Any) -> np.ndarray:
  """Returns the results of `compute_logits` as a NumPy array."""
  return np.asarray(compute_logits(config, *arrays, **named_arrays))


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
    init, jax.random.key(0), np.zeros((1, 1), np.int32)
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


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("remat", ["none", "full"])
def test_init_returns_only_parameters(name, remat):
  """A call records metrics. `init` does not, although it may (`mutable`)."""
  model = Decoder(dataclasses.replace(VARIANTS[name], remat=remat))
  init = functools.partial(model.init, mutable=True)
  ids = np.zeros((1, 8), np.int32)

  variables = jax.eval_shape(init, jax.random.key(0), ids)

  assert variables.keys() == {"params"}


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_call_records_each_array_once(name, remat):
  """Flax stores an array in a tuple, and appends if it is recorded again."""
  config = dataclasses.replace(VARIANTS[name], remat=remat)
  params = random_parameters(config)
  ids = np.zeros((1, 8), np.int32)
  apply_model = functools.partial(
    Decoder(config).apply, mutable=["metrics", "intermediates"]
  )

  _, recorded = jax.eval_shape(apply_model, {"params": params}, ids)

  assert "hidden" in recorded["intermediates"]["layers"]
  for path, _ in jax.tree_util.tree_leaves_with_path(recorded):
    index_in_tuple = path[-1].idx
    assert index_in_tuple == 0


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


def shapes_by_name(params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
  """Returns the shapes by names such as "query" and "plain_layers/query"."""
  shapes = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = path[-1].key
    if path[0].key == "plain_layers":
      name = f"plain_layers/{name}"
    assert name not in shapes
    shapes[name] = leaf.shape
  return shapes


@pytest.mark.parametrize("config", shape_cases())
def test_the_table_has_the_shape_of_every_parameter(config):
  """`parameter_shapes` reads a table of axes, and not the layers' code."""
  init = Decoder(config).init
  ids = np.zeros((1, 1), np.int32)

  variables = jax.eval_shape(init, jax.random.key(0), ids)

  assert parameter_shapes(config) == shapes_by_name(variables["params"])


# The loop over layers.


def has_loop(config: ModelConfig) -> bool:
  """Returns whether the program loops. Small models only loop over layers."""
  params = random_parameters(config)
  lowered = compute_logits.lower(config, params, random_tokens(2, 16))
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
    lowered = init.lower(jax.random.key(0), np.zeros((1, 1), np.int32))
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
  "remat",
  [
    pytest.param("none", id="unrolled"),
    pytest.param("attention", id="scanned"),
  ],
)
def test_each_layer_has_its_own_window_and_kind(remat):
  """The decoder equals a Python loop over layers of several kinds.

  Each DIFF layer also has its own λ_init.
  """
  num_layers = 5
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
def test_a_compiled_layer_selects_its_window_by_an_index(name):
  """Layers of a scan share a program, and may have different windows.

  So the program takes the index of a window in a list of all windows.
  """
  x = np.random.default_rng(0).standard_normal((2, 9, 16), np.float32)
  full_layer = ATTENTION[name](num_heads=4, num_kv_heads=2, head_dim=4)
  windowed_layer = full_layer.clone(window=3)
  variables = {"params": parameters(full_layer, x, lambda_init=0.3)}

  @jax.jit
  def output_with_window(index):
    switch = WindowSwitch(diff_attention, windows=(3, None), index=index)
    # The switch replaces this window.
    layer = full_layer.clone(window=5, attention_fn=switch)
    return layer.apply(variables, x, lambda_init=0.3)

  windowed = np.asarray(output_with_window(0))
  full_attention = np.asarray(output_with_window(1))

  expected_windowed = jax.jit(windowed_layer.apply)(variables, x, 0.3)
  expected_full = jax.jit(full_layer.apply)(variables, x, 0.3)
  chex.assert_trees_all_close(windowed, expected_windowed, rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_close(
    full_attention, expected_full, rtol=1e-5, atol=1e-6
  )
  assert np.abs(windowed - full_attention).max() > 1e-2


def test_a_second_window_only_doubles_the_softmaxes_of_the_gradient():
  """A scan has one branch of attention for each window of its layers.

  With remat, a backward pass that computed all windows for each branch would
  have more softmaxes.
  """

  def num_softmaxes_of_gradient(window_pattern):
    config = dataclasses.replace(
      CONFIG,
      num_layers=9,
      window=3,
      window_pattern=window_pattern,
      remat="attention",
    )

    def loss(params):
      return jnp.sum(compute_logits(config, params, random_tokens(1, 8)))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(random_parameters(config))
    # Each softmax subtracts the maximum of its logits.
    return str(jaxpr).count("reduce_max")

  all_layers_with_window = num_softmaxes_of_gradient("w")
  every_other_layer_with_window = num_softmaxes_of_gradient("wf")

  assert every_other_layer_with_window == 2 * all_layers_with_window


# λ_init and λ.


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
  first = np.sum(attention["lambda_q1"] * attention["lambda_k1"], axis=-1)
  second = np.sum(attention["lambda_q2"] * attention["lambda_k2"], axis=-1)
  expected = np.exp(first) - np.exp(second) + np.asarray(lambda_inits(CONFIG))
  chex.assert_trees_all_close(lambdas, expected, rtol=1e-6)


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


def test_logits_of_a_tied_model_are_products_with_the_embedding():
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal((2, 3, 8), np.float32)
  embedding = rng.standard_normal((5, 8), np.float32)

  actual = logits({"embedding": embedding}, hidden)

  np.testing.assert_allclose(actual, hidden @ embedding.T, rtol=1e-5)


def test_logits_of_an_untied_model_are_products_with_the_unembedding():
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal((2, 3, 8), np.float32)
  embedding, unembedding = rng.standard_normal((2, 5, 8), np.float32)

  params = {"embedding": embedding, "unembedding": unembedding}
  actual = logits(params, hidden)

  np.testing.assert_allclose(actual, hidden @ unembedding.T, rtol=1e-5)


def test_embed_scale_scales_only_the_embedded_input():
  """A tied embedding is also the output matrix, which is not scaled."""
  embed_scale = 5.0
  tied_config = dataclasses.replace(CONFIG, embed_scale=embed_scale)
  params = random_parameters(CONFIG)
  ids = random_tokens(2, 16)

  actual = apply(tied_config, params, ids)

  # In this model, only the input has a scaled matrix.
  untied_config = dataclasses.replace(CONFIG, tie_embeddings=False)
  untied_params = params | {
    "embedding": embed_scale * params["embedding"],
    "unembedding": params["embedding"],
  }
  expected = apply(untied_config, untied_params, ids)
  chex.assert_trees_all_close(actual, expected, rtol=0, atol=1e-5)
  # A model that ignores embed_scale has other logits.
  unscaled = apply(CONFIG, params, ids)
  assert np.abs(unscaled - expected).max() > 1e-2


# Which tokens a token sees.


def influence_on(position: int, config: ModelConfig) -> np.ndarray:
  """Returns the sum of |gradient| of one number for each of 12 inputs.

  The embedding matrix has one row per position, so its gradient is the gradient
  of the embedded tokens.
  """
  config = dataclasses.replace(config, vocab_size=12, tie_embeddings=True)
  params = random_parameters(config)
  rng = np.random.default_rng(3)
  embedded = rng.standard_normal((12, config.embed_dim), np.float32)

  def output(embedded):
    variables = {"params": params | {"embedding": embedded}}
    hidden = Decoder(config).apply(variables, jnp.arange(12)[None])
    # The sum of all numbers would not depend on the inputs after a LayerNorm.
    return hidden[0, position, 0]

  gradient = jax.jit(jax.grad(output))(embedded)
  return np.abs(gradient).sum(axis=-1)


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
  "name", ["diff", *full(sorted(VARIANTS.keys() - {"diff"}))]
)
def test_packed_documents_do_not_see_each_other(name):
  """Each of two documents in a row gets the logits that it has alone.

  In float32, rounding errors depend on the length of a row. float64 hides them.
  """
  config = VARIANTS[name]
  float32_params = random_parameters(config)
  first = random_tokens(1, 7, seed=1)
  second = random_tokens(1, 9, seed=2)
  packed = np.concatenate([first, second], axis=1)
  segment_ids = np.array([[1] * 7 + [2] * 9], np.int32)
  positions = np.array([[*range(7), *range(9)]], np.int32)

  with jax.enable_x64(True):
    params = jax.tree.map(np.float64, float32_params)

    @jax.jit
    def float64_logits(ids, segment_ids=None, positions=None):
      model = Decoder(config, jnp.float64)
      hidden = model.apply({"params": params}, ids, segment_ids, positions)
      return logits(params, hidden)

    packed_logits = float64_logits(packed, segment_ids, positions)
    logits_without_segments = float64_logits(packed)
    expected_first = float64_logits(first)
    expected_second = float64_logits(second)

  actual_first, actual_second = np.split(np.asarray(packed_logits), [7], axis=1)
  chex.assert_trees_all_close(actual_first, expected_first, rtol=0, atol=1e-6)
  chex.assert_trees_all_close(actual_second, expected_second, rtol=0, atol=1e-6)
  # Without segments, the second document does see the first one.
  _, second_after_first = np.split(
    np.asarray(logits_without_segments), [7], axis=1
  )
  assert np.abs(actual_second - second_after_first).max() > 1e-3


# Remat and memory.


@functools.cache
def loss_and_gradient(
  config: ModelConfig, dtype: str = "float32"
) -> tuple[np.ndarray, dict[str, Any]]:
  """Returns the next-token loss of random parameters, and its gradient."""
  ids = random_tokens(4, 32)
  model = Decoder(config, dtype=jnp.dtype(dtype))

  def compute_loss(params):
    hidden = model.apply({"params": params}, ids)
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits(params, hidden)[:, :-1], ids[:, 1:]
    )
    return losses.mean()

  gradient_function = jax.jit(jax.value_and_grad(compute_loss))
  return jax.device_get(gradient_function(random_parameters(config)))


DEFAULT_REMAT = ("diff", "attention")
OTHER_REMAT = [
  case
  for case in itertools.product(VARIANTS, ("attention", "dots", "full"))
  if case != DEFAULT_REMAT
]


@pytest.mark.parametrize(("name", "remat"), [DEFAULT_REMAT, *full(OTHER_REMAT)])
def test_remat_does_not_change_loss_or_gradients(name, remat):
  """Rematerialisation computes activations again in the backward pass."""
  config = dataclasses.replace(VARIANTS[name], remat="none")
  config_with_remat = dataclasses.replace(config, remat=remat)

  actual = loss_and_gradient(config_with_remat)

  expected = loss_and_gradient(config)
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
def test_the_hidden_states_of_all_layers_are_kept_in_bfloat16(name):
  """The backward pass of a model in bfloat16 reads them."""
  batch_size = 5
  num_tokens = 16
  config = dataclasses.replace(VARIANTS[name], remat="none")
  # The hidden states of plain layers are a separate array.
  num_layers = config.num_layers - config.plain_layers

  saved = saved_for_backward(config, (batch_size, num_tokens))

  shapes = [leaf.shape for leaf in saved if leaf.dtype == jnp.bfloat16]
  assert (num_layers, batch_size, num_tokens, config.embed_dim) in shapes


@pytest.mark.parametrize("name", FUSED)
def test_no_hidden_states_are_kept_in_float32(name):
  """Statistics of norms and of softmax are in float32, and are smaller."""
  batch_shape = (5, 16)
  config = dataclasses.replace(VARIANTS[name], remat="none")

  saved = saved_for_backward(config, batch_shape)

  sizes_of_activations = []
  for leaf in saved:
    # Activations have the axes of the batch first, or after the axis of layers.
    is_activation = batch_shape in (leaf.shape[:2], leaf.shape[1:3])
    if leaf.dtype == jnp.float32 and is_activation:
      sizes_of_activations.append(leaf.size)
  size_of_hidden_states = math.prod(batch_shape) * config.embed_dim
  assert max(sizes_of_activations) < size_of_hidden_states


@pytest.mark.parametrize("name", FUSED)
def test_no_bfloat16_copy_of_a_parameter_is_kept(name):
  """The backward pass casts the float32 parameters again, to save memory."""
  config = dataclasses.replace(VARIANTS[name], remat="none")
  # Smaller parameters may have the same shape as an activation.
  min_size = config.embed_dim**2 + 1
  matrix_shapes = set()
  for leaf in jax.tree.leaves(random_parameters(config)):
    if leaf.size >= min_size:
      matrix_shapes.add(leaf.shape)

  saved = saved_for_backward(config, batch_shape=(5, 16))

  bfloat16_shapes = {leaf.shape for leaf in saved if leaf.dtype == jnp.bfloat16}
  assert bfloat16_shapes.isdisjoint(matrix_shapes)


# Initial values and precision.


@pytest.mark.parametrize("name", ["diff", "diff_v2"])
def test_initial_matrices_have_the_standard_deviation_of_their_inputs(name):
  """A matrix with n inputs has the standard deviation 1/√n.

  The two matrices that write to the residual stream, `out` and `down`, have a
  further factor of 1/√(2 · layers).
  """
  num_layers = 3
  embed_dim = 32
  ffn_dim = 48
  all_heads_dim = embed_dim
  params = initial_parameters(VARIANTS[name])
  attention = params["layers"]["attention"]
  ffn = params["layers"]["ffn"]

  residual = 1 / np.sqrt(2 * num_layers)
  for matrix, expected in [
    (params["embedding"], 1 / np.sqrt(embed_dim)),
    (attention["query"], 1 / np.sqrt(embed_dim)),
    (attention["key"], 1 / np.sqrt(embed_dim)),
    (attention["value"], 1 / np.sqrt(embed_dim)),
    (attention["out"], residual / np.sqrt(all_heads_dim)),
    (ffn["gate"], 1 / np.sqrt(embed_dim)),
    (ffn["up"], 1 / np.sqrt(embed_dim)),
    (ffn["down"], residual / np.sqrt(ffn_dim)),
  ]:
    assert float(matrix.std()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("embed_dim", [32, *full([128])])
def test_initial_logits_have_unit_scale(embed_dim):
  """So the first loss is near log(vocab_size) for every width."""
  config = dataclasses.replace(CONFIG, embed_dim=embed_dim)
  params = initial_parameters(config)
  ids = random_tokens(4, 32)

  initial_logits = apply(config, params, ids)

  assert 0.7 < float(initial_logits.std()) < 1.4


BFLOAT16_CASES = ["diff", *full(sorted(VARIANTS.keys() - {"diff"}))]


@pytest.mark.parametrize("name", BFLOAT16_CASES)
def test_the_loss_in_bfloat16_approximates_the_loss_in_float32(name):
  loss, _ = loss_and_gradient(VARIANTS[name], dtype="bfloat16")

  expected, _ = loss_and_gradient(VARIANTS[name], dtype="float32")
  # Rounding to the 8 bits of bfloat16 changes a number by up to 0.4%.
  np.testing.assert_allclose(loss, expected, rtol=1e-2)
  assert loss != expected


def flatten(tree: Any) -> np.ndarray:
  """Returns the numbers of all arrays of a tree as one vector."""
  return np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", BFLOAT16_CASES)
def test_the_gradient_in_bfloat16_approximates_the_one_in_float32(name):
  """Parameters and their gradients are in float32 in both models."""
  _, gradient = loss_and_gradient(VARIANTS[name], dtype="bfloat16")

  _, expected = loss_and_gradient(VARIANTS[name], dtype="float32")
  chex.assert_trees_all_equal_dtypes(gradient, expected)
  vector = flatten(gradient)
  expected_vector = flatten(expected)
  # Errors of 0.4% add up over the operations of three layers.
  assert_close_in_norm(vector, expected_vector, 0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_have_the_dtype_of_the_model(name, dtype):
  model = Decoder(VARIANTS[name], dtype=jnp.dtype(dtype))
  params = random_parameters(VARIANTS[name])

  hidden = jax.eval_shape(model.apply, {"params": params}, random_tokens(2, 8))

  assert hidden.dtype == dtype
