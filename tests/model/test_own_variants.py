"""Variants from outside the package work in every part of the package.

A part that knows only the package's variants would compute another variant.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import (
  Config,
  DataConfig,
  MeshConfig,
  ModelConfig,
  TrainConfig,
  UserError,
)
from diffjax.inference.cache import empty_cache, extend, unstack
from diffjax.inference.sampler import Sampler
from diffjax.model.attention import ATTENTION, Attention, register
from diffjax.model.decoder import Decoder, logits
from diffjax.model.definition import key_distances
from diffjax.model.shapes import parameter_shapes
from diffjax.ops.diff_attention import (
  Implementation,
  diff_attention,
  implementations,
)
from diffjax.ops.diff_attention.reference import IMPLEMENTATION
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.parameters import Parameter
from diffjax.training.program import Program, build
from tests.harness import own_variants
from tests.harness.parameters import parameters
from tests.harness.tolerances import FLOAT32, FLOAT64

CONFIG = ModelConfig(
  vocab_size=64,
  num_layers=2,
  embed_dim=16,
  head_dim=8,
  ffn_dim=32,
  max_length=64,
  **own_variants.FIELDS,
)
# Two rows of 12 token ids.
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)


@pytest.fixture(autouse=True, scope="module")
def registered_variants(tmp_path_factory):
  """Registers "strange", "strange_sum" and the documentation's examples."""
  with own_variants.registered(tmp_path_factory.mktemp("own")):
    yield


def decoder(name: str, **fields: Any) -> tuple[Decoder, dict[str, Any]]:
  """Returns a small model of a variant, and its parameters."""
  config = dataclasses.replace(CONFIG, attention=name, **fields)
  model = Decoder(config)
  return model, jax.device_get(parameters(model, TOKENS))


def trace(model: Decoder, params: dict[str, Any]) -> None:
  """Traces the model, which raises the errors of its configuration."""
  jax.eval_shape(model.apply, {"params": params}, TOKENS)


def visible_keys(
  length: int, *, window: int | None, segment_ids: np.ndarray
) -> np.ndarray:
  """Returns which keys each query sees [T, S]."""
  query, key = np.indices((length, length))
  visible = (key <= query) & (segment_ids[query] == segment_ids[key])
  if window is not None:
    visible &= query - key < window
  return visible


# A layer equals its definition.


class LayerCase(NamedTuple):
  """A layer's output for one row of inputs, and its parameters, in float64."""

  output: np.ndarray  # [T, E]
  params: dict[str, np.ndarray]
  x: np.ndarray  # [T, E]
  visible: np.ndarray  # Which keys each query sees [T, S].


def random_case(
  name: str, window: int | None, lambda_init: float | None = None
) -> LayerCase:
  """Returns the output of a layer for two documents, of 7 and 5 tokens.

  Two heads share their keys and values.
  """
  segment_ids = np.array([1] * 7 + [2] * 5)
  rng = np.random.default_rng(1)
  x = rng.normal(size=(1, 12, 16)).astype(np.float32)
  layer = ATTENTION[name](
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=False,
    window=window,
    head_norm=False,
  )
  params = parameters(layer, x, lambda_init)
  if "strange_bias" in params:
    params["strange_bias"] = rng.normal(size=(4, 2)).astype(np.float32)
  output = jax.jit(layer.apply)(
    {"params": params}, x, lambda_init, segment_ids=segment_ids[None]
  )
  return LayerCase(
    output=np.asarray(output, np.float64)[0],
    params=jax.tree.map(np.float64, params),
    x=np.float64(x[0]),
    visible=visible_keys(12, window=window, segment_ids=segment_ids),
  )


def logits_of_maps(case: LayerCase) -> np.ndarray:
  """Returns the logits of each head and map [H, G, T, S]."""
  q = np.einsum("TE,EHGD->THGD", case.x, case.params["query"])
  k = np.einsum("TE,EKGD->TKGD", case.x, case.params["key"])
  k = np.repeat(k, 2, axis=1)
  return np.einsum("THGD,SHGD->HGTS", q, k) / np.sqrt(q.shape[-1])


def output_from_weights(case: LayerCase, weights: np.ndarray) -> np.ndarray:
  """Returns the projected sum of the heads' weighted values [T, E]."""
  v = np.einsum("TE,EKV->TKV", case.x, case.params["value"])
  v = np.repeat(v, 2, axis=1)
  heads = np.einsum("HTS,SHV->THV", weights, v)
  return np.einsum("THV,HVE->TE", heads, case.params["out"])


@pytest.mark.parametrize("window", [None, 4])
def test_the_layer_strange_equals_its_definition(window):
  """The weights are σ(s₁ + b₁) − tanh(s₂ + b₂) / 4 + mix · s₃ / 8.

  The variant "strange" has three maps with logits s₁, s₂ and s₃. The biases b₁
  and b₂ belong to a head, and `mix` to a head and a query.
  """
  case = random_case("strange", window)
  s1, s2, s3 = np.moveaxis(logits_of_maps(case), 1, 0)
  b1, b2 = case.params["strange_bias"].T[..., None, None]
  mix = np.tanh(case.x @ case.params["strange_mix"])

  weights = (
    1 / (1 + np.exp(-(s1 + b1)))
    - np.tanh(s2 + b2) / 4
    + mix.T[..., None] * s3 / 8
  )
  visible_weights = np.where(case.visible, weights, 0)
  expected = output_from_weights(case, visible_weights)

  chex.assert_trees_all_close(case.output, expected, **FLOAT32)


@pytest.mark.parametrize("window", [None, 4])
def test_the_layer_strange_sum_equals_its_definition(window):
  """The weights are W + M W / 16, with the weights W of the variant "strange".

  M[i, j] is 1 if query i sees key j, and 0 if not. The output is linear in the
  weights. So an output y of "strange" becomes y + M y / 16.
  """
  strange = random_case("strange", window)
  strange_sum = random_case("strange_sum", window)

  expected = strange.output + strange.visible @ strange.output / 16

  chex.assert_trees_all_close(strange_sum.output, expected, **FLOAT32)


@pytest.mark.parametrize("window", [None, 5])
def test_the_documented_dint_equals_its_equations(window):
  """The weights are A₁ − λA₂ + λA₃, with two softmax maps A₁ and A₂.

  Row i of A₃ is the mean of the rows of A₁ that query i sees as keys.
  """
  lambda_init = 0.3
  case = random_case("dint", window, lambda_init)

  exponentials = np.where(case.visible, np.exp(logits_of_maps(case)), 0)
  maps = exponentials / exponentials.sum(axis=-1, keepdims=True)
  a1 = maps[:, 0]
  a2 = maps[:, 1]
  a3 = np.zeros_like(a1)
  for query in range(12):
    a3[:, query] = a1[:, case.visible[query]].mean(axis=1)
  first = np.exp(case.params["lambda_q1"] @ case.params["lambda_k1"])
  second = np.exp(case.params["lambda_q2"] @ case.params["lambda_k2"])
  lam = first - second + lambda_init
  weights = a1 - lam * a2 + lam * a3
  expected = output_from_weights(case, weights)

  # The weights of each query sum to 1, which is the purpose of DINT.
  chex.assert_trees_all_close(weights.sum(axis=-1), np.ones((4, 12)), **FLOAT64)
  chex.assert_trees_all_close(case.output, expected, **FLOAT32)


@pytest.mark.parametrize("window", [None, 3])
def test_key_distances_count_tokens_between_a_query_and_its_keys(window):
  """`key_distances` computes distances from a mask, without positions.

  Only distances of keys that a query sees have a meaning.
  """
  # Two documents, of 4 and 3 tokens.
  segment_ids = np.array([1, 1, 1, 1, 2, 2, 2])
  visible = visible_keys(7, window=window, segment_ids=segment_ids)
  mask_of_one_row = visible[None]

  (distances,) = jax.device_get(jax.jit(key_distances)(mask_of_one_row))

  query, key = np.indices((7, 7))
  expected = query - key
  np.testing.assert_array_equal(distances[visible], expected[visible])


# Whole models.


@pytest.mark.parametrize("name", own_variants.NAMES)
def test_parameter_shapes_include_those_that_a_variant_declares(name):
  """A class may declare parameters that other variants do not have.

  The variants of these tests declare "strange_bias", two numbers for each head.
  """
  num_layers = 2
  num_heads = 4
  model, params = decoder(name, num_layers=num_layers, num_heads=num_heads)

  shapes = parameter_shapes(model.config)

  assert shapes["strange_bias"] == (num_layers, num_heads, 2)
  shapes_of_model = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    shapes_of_model[path[-1].key] = leaf.shape
  assert shapes == shapes_of_model


@pytest.mark.parametrize("name", own_variants.NAMES)
def test_a_token_sees_no_later_tokens(name):
  """The first layer has a window of 4 tokens, and the second one has none."""
  model, params = decoder(name, num_layers=2, window=4, window_pattern="wf")
  other_tokens = TOKENS.copy()
  # The vocabulary has the ids 0 to 63, so all of these tokens change.
  other_tokens[:, 6:] = 63 - TOKENS[:, 6:]
  apply = jax.jit(model.apply)

  hidden = np.asarray(apply({"params": params}, TOKENS))
  other_hidden = np.asarray(apply({"params": params}, other_tokens))

  chex.assert_trees_all_close(hidden[:, :6], other_hidden[:, :6], **FLOAT32)


@pytest.mark.parametrize("name", own_variants.NAMES)
def test_a_document_has_the_same_hidden_states_first_or_second_in_a_row(name):
  """The first layer has a window of 4 tokens, and the second one has none."""
  model, params = decoder(name, num_layers=2, window=4, window_pattern="wf")
  apply = jax.jit(model.apply)
  seven, five = TOKENS[:, :7], TOKENS[:, 7:]
  seven_then_five = np.concatenate([seven, five], axis=1)
  five_then_seven = np.concatenate([five, seven], axis=1)

  hidden = apply(
    {"params": params},
    seven_then_five,
    segment_ids=np.array([[1] * 7 + [2] * 5] * 2),
    positions=np.array([[*range(7), *range(5)]] * 2),
  )
  hidden_of_swapped = apply(
    {"params": params},
    five_then_seven,
    segment_ids=np.array([[1] * 5 + [2] * 7] * 2),
    positions=np.array([[*range(5), *range(7)]] * 2),
  )

  five_as_second = np.asarray(hidden)[:, 7:]
  five_as_first = np.asarray(hidden_of_swapped)[:, :5]
  chex.assert_trees_all_close(five_as_first, five_as_second, **FLOAT32)


@pytest.mark.parametrize(
  ("name", "changed_params"),
  [
    ("strange", {}),
    # With a slope of 0, its first value, distances would have no effect.
    ("distance_sigmoid", {"sigmoid_slope": np.full((2, 4), 0.3)}),
  ],
)
def test_a_cache_does_not_change_the_hidden_states(name, changed_params):
  """Rows of 12 tokens are read at once, or in two halves with a cache.

  The first layer has a window of 4 tokens, and the second one has none.
  """
  model, params = decoder(name, num_layers=2, window=4, window_pattern="wf")
  params["layers"]["attention"].update(changed_params)
  layers = unstack(model, params)
  cache = empty_cache(model, batch_size=2, capacity=16)
  extend_cache = jax.jit(functools.partial(extend, model))

  first_half, cache = extend_cache(layers, TOKENS[:, :6], cache)
  second_half, _ = extend_cache(layers, TOKENS[:, 6:], cache)

  actual = np.concatenate([first_half, second_half], axis=1)
  expected = jax.jit(model.apply)({"params": params}, TOKENS)
  chex.assert_trees_all_close(actual, expected, **FLOAT32)


# Generation.


def greedy_function(
  model: Decoder, params: dict[str, Any]
) -> Callable[[list[int], int], list[int]]:
  """Returns a function that generates tokens from whole rows, without a cache.

  It is compiled once for all prompts and lengths.
  """

  @jax.jit
  def all_logits(row):
    return logits(params, model.apply({"params": params}, row))

  def generate(prompt, num_tokens):
    ids = list(prompt)
    for _ in range(num_tokens):
      row = np.zeros((1, 24), np.int32)
      row[0, : len(ids)] = ids
      logits_of_row = np.asarray(all_logits(row))
      ids.append(int(np.argmax(logits_of_row[0, len(ids) - 1])))
    return ids[len(prompt) :]

  return generate


@pytest.mark.parametrize(
  "name",
  [
    pytest.param("strange", id="with cache"),
    pytest.param("strange_sum", id="without cache"),
  ],
)
def test_greedy_generation_equals_a_loop_over_the_model(name):
  """The loop computes the whole row again for each token, without a cache."""
  model, params = decoder(name)
  generate_greedily = greedy_function(model, params)
  sampler = Sampler(model, params, batch_size=2, capacity=24)
  first_prompt = TOKENS[0, :9].tolist()
  second_prompt = TOKENS[1, :4].tolist()

  answers = sampler.generate([first_prompt, second_prompt], 10)

  assert answers == [
    generate_greedily(first_prompt, 10),
    generate_greedily(second_prompt, 10),
  ]


def test_generation_without_cache_warns_once_for_a_variant(capfd):
  # The class "strange_sum" has no cache. No other test generates with "warned".
  @register("warned")
  class Warned(ATTENTION["strange_sum"]):
    pass

  model, params = decoder("warned")

  Sampler(model, params, batch_size=2, capacity=24)
  Sampler(model, params, batch_size=2, capacity=24)

  errors = capfd.readouterr().err
  warning = "slow, since every new token computes its whole row again"
  assert errors.count(warning) == 1


def test_generation_with_cache_does_not_warn(capfd):
  model, params = decoder("strange")

  Sampler(model, params, batch_size=2, capacity=24)

  assert "every new token" not in capfd.readouterr().err


def answers_and_logits(
  model: Decoder, params: dict[str, Any]
) -> tuple[list[list[int]], jax.Array]:
  """Returns random answers to two prompts, and logits after other tokens."""
  prompts = [TOKENS[0, :9].tolist(), TOKENS[1, :4].tolist()]
  sampler = Sampler(model, params, batch_size=2, capacity=32)
  answers = sampler.generate(prompts, 12, temperature=0.8, top_p=0.9, seed=3)
  state = sampler.prefill(prompts)
  # Further tokens of each row: first several, and then one.
  state = sampler.read(state, [[1, 2, 3], [4]])
  state = sampler.step(state, np.array([5, 6]))
  return answers, state.logits


@pytest.mark.full
def test_generation_is_the_same_with_and_without_a_cache(monkeypatch):
  """A class declares in `supports` that it can be decoded with a cache.

  Without a cache, the sampler computes the whole row for each new token.
  """
  model, params = decoder("strange")
  answers, logits_with_cache = answers_and_logits(model, params)

  monkeypatch.setattr(ATTENTION["strange"], "supports", set())
  answers_without_cache, actual_logits = answers_and_logits(model, params)

  assert answers_without_cache == answers
  chex.assert_trees_all_close(actual_logits, logits_with_cache, **FLOAT32)


def negated_forward(arrays, mask, options):
  """Returns attention with the opposite sign.

  An implementation should not change the function. This one does, so that a
  test can tell whether it was called.
  """
  saved = IMPLEMENTATION.forward(arrays, mask, options)
  return saved._replace(out=-saved.out)


@pytest.mark.full
def test_generation_calls_an_implementation_that_a_user_registered():
  implementations.register("negated", Implementation(negated_forward))
  attention_fn = functools.partial(diff_attention, implementation="negated")
  plain_model, params = decoder("softmax")
  model = plain_model.clone(attention_fn=attention_fn)
  sampler = Sampler(model, params, capacity=24)

  prompt = TOKENS[0, :9].tolist()
  (answer,) = sampler.generate([prompt], 10)

  assert answer == greedy_function(model, params)(prompt, 10)
  assert answer != greedy_function(plain_model, params)(prompt, 10)


# Features that a variant does not support.


def test_a_variant_without_cached_decoding_has_no_cache():
  """The weights of "strange_sum" need the queries of earlier tokens."""
  model, _ = decoder("strange_sum")
  with pytest.raises(UserError, match="does not declare .* cached_decoding"):
    empty_cache(model, 1, 16)


def test_a_variant_without_cached_decoding_rejects_a_cache_dtype():
  """The weights of "strange_sum" need the queries of earlier tokens."""
  model, params = decoder("strange_sum")
  with pytest.raises(UserError, match="cache_dtype = 'int8': must be None"):
    Sampler(model, params, cache_dtype="int8")


def test_a_variant_without_an_implementation_rejects_one():
  """Implementations such as "chunked" compute softmax maps.

  The variant "strange_sum" has weights of its own instead.
  """
  model, params = decoder("strange_sum")
  config = dataclasses.replace(model.config, attention_implementation="chunked")
  with pytest.raises(UserError, match="'auto' for 'strange_sum'"):
    trace(Decoder(config), params)


def test_a_variant_with_its_own_weights_rejects_another_attention_fn():
  """The variant "strange_sum" would ignore the scale of `scaled_attention`."""
  model, params = decoder("strange_sum")
  scaled_attention = functools.partial(diff_attention, scale=0.5)
  model = model.clone(attention_fn=scaled_attention)
  with pytest.raises(ValueError, match="must be diff_attention, without"):
    trace(model, params)


def test_a_variant_without_windows_rejects_one(restored_registry):
  @register("without_windows")
  class WithoutWindows(ATTENTION["strange"]):
    # Windows are an optional feature, which a class must name here.
    supports = set()

  model, params = decoder("without_windows")
  config = dataclasses.replace(model.config, window=4)

  message = "config.model.window = 4: 'without_windows'"
  with pytest.raises(UserError, match=message):
    trace(Decoder(config), params)


def test_a_variant_without_quantized_logits_rejects_a_transform(
  restored_registry,
):
  """A `logits_transform` changes attention logits, for example by rounding."""

  @register("without_transforms")
  class WithoutTransforms(ATTENTION["strange"]):
    # To accept a transform, a class must name the feature "quantized_logits".
    supports = set()

  def unchanged(logits, mask):
    return logits

  model, params = decoder("without_transforms")
  model = model.clone(logits_transform=unchanged)

  with pytest.raises(ValueError, match="logits_transform: WithoutTransforms"):
    trace(model, params)


def test_a_cache_requires_that_a_layer_calls_its_attention_fn(
  restored_registry,
):
  """A cache stores the keys and values that `attention_fn` is called with."""

  @register("uncalled")
  class Uncalled(Attention):
    supports = {"cached_decoding"}

    def attend(self, q, k, v, lam, mask):
      # The attention of DIFF or of a Transformer would be called here.
      return jnp.zeros((*q.shape[:2], self.num_heads, v.shape[-1]))

  model, params = decoder("uncalled")
  layers = unstack(model, params)
  cache = empty_cache(model, batch_size=2, capacity=16)
  read = functools.partial(extend, model)

  with pytest.raises(ValueError, match="called its attention_fn 0 times"):
    jax.eval_shape(read, layers, TOKENS, cache)


# Training.


def train_config(
  name: str, mesh: MeshConfig | None = None, accumulation: int = 1
) -> Config:
  """Returns a training run of a variant, with windows in some layers."""
  return Config(
    model=dataclasses.replace(
      CONFIG, attention=name, window=4, window_pattern="wf"
    ),
    data=DataConfig(length=16),
    train=TrainConfig(batch_size=4, accumulation=accumulation),
    mesh=mesh or MeshConfig(),
  )


def build_program(config: Config, num_devices: int = 1) -> Program:
  """Returns the training program of a run on some devices."""
  mesh = make_mesh(config.mesh, jax.devices()[:num_devices])
  return build(config, mesh)


@functools.cache
def run_steps(config: Config, num_devices: int = 1) -> list[dict[str, Any]]:
  """Returns the metrics of each of three training steps."""
  program = build_program(config, num_devices)
  rng = np.random.default_rng(2)
  batch = {
    "tokens": rng.integers(0, 64, (4, 16)).astype(np.int32),
    "targets": rng.integers(0, 64, (4, 16)).astype(np.int32),
    "segment_ids": np.tile(np.repeat([1, 2], [9, 7]), (4, 1)).astype(np.int32),
    "positions": np.tile([*range(9), *range(7)], (4, 1)).astype(np.int32),
    "weights": np.ones((4, 16), np.float32),
  }
  batch = put_batch(batch, program.mesh)
  state = program.init()
  metrics_of_steps = []
  for _ in range(3):
    state, metrics = program.train_step(state, batch)
    metrics_of_steps.append(jax.device_get(metrics))
  return metrics_of_steps


@pytest.mark.full
@pytest.mark.parametrize(
  ("name", "mesh"),
  [
    pytest.param("strange", MeshConfig(data=2, context=2), id="data, context"),
    pytest.param(
      "strange_sum", MeshConfig(data=1, fsdp=2, tensor=2), id="fsdp, tensor"
    ),
  ],
)
def test_a_mesh_does_not_change_training(name, mesh):
  """Three steps have the same losses and gradients on one and on four devices.

  The order of float32 sums differs. A gradient norm sums more numbers.
  """
  steps_on_one_device = run_steps(train_config(name))

  steps_on_mesh = run_steps(train_config(name, mesh), num_devices=4)

  for metric, tolerance in [("loss", 2e-6), ("grad_norm", 2e-5)]:
    actual = [step[metric] for step in steps_on_mesh]
    expected = [step[metric] for step in steps_on_one_device]
    np.testing.assert_allclose(actual, expected, rtol=tolerance)
    # The steps do change the parameters.
    assert expected[0] != expected[2]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_training_step_reports_every_metric_of_a_layer(accumulation):
  """A layer of the variant "strange" records a metric named "strangeness"."""
  config = train_config("strange", accumulation=accumulation)

  first_step, *_ = run_steps(config)

  # The model has two layers.
  chex.assert_shape(first_step["strangeness"], (2,))
  chex.assert_shape(first_step["lambda"], (2,))


def test_metrics_of_layers_are_means_over_micro_batches():
  """Two micro-batches have the same rows as the whole batch."""
  whole_batch = train_config("strange", accumulation=1)
  micro_batches = train_config("strange", accumulation=2)

  first_step, *_ = run_steps(micro_batches)

  expected, *_ = run_steps(whole_batch)
  chex.assert_trees_all_close(
    first_step["lambda"], expected["lambda"], rtol=1e-5, atol=1e-7
  )


def test_rows_cannot_be_split_unless_the_variant_supports_it():
  """The axis "context" splits the tokens of a row over devices."""
  config = train_config("strange_sum", MeshConfig(data=1, context=2))
  with pytest.raises(UserError, match="config.mesh.context = 2: .*strange_sum"):
    build_program(config, num_devices=2)


# Parameters that a class declares, and parameters that it makes.


def test_a_parameter_that_is_declared_must_be_used(restored_registry):
  """`extra_parameters` declares what a class adds to those of `Attention`."""

  @register("declaring")
  class Declaring(Attention):
    supports = {"windows"}
    # The class does not override a method that would make this vector.
    extra_parameters = {"unused": Parameter("LH")}

  with pytest.raises(UserError, match="'unused' .* the layer does not make it"):
    build_program(train_config("declaring"))


def test_a_parameter_of_flax_must_be_declared(restored_registry):
  """`extra_parameters` declares what a class adds to those of `Attention`.

  The declared axes say how a parameter is split over devices.
  """

  @register("forgetful")
  class Forgetful(Attention):
    supports = {"windows"}

    def scale_heads(self, heads, x, lambda_init):
      zeros = jax.nn.initializers.zeros
      self.param("forgotten", zeros, (self.num_heads,))
      return heads

  with pytest.raises(ValueError, match="forgotten.*extra_parameters"):
    build_program(train_config("forgetful"))
