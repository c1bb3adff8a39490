"""Variants from outside the package work in every part of the package.

A part that knows only the package's variants would compute another variant.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

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
from diffjax.model.attention import ATTENTION, register
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
from diffjax.parameters import PARAMETERS, Parameter
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
  return model, parameters(model, jnp.asarray(TOKENS))


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


def expected_heads(
  params: dict[str, np.ndarray],
  x: np.ndarray,
  visible: np.ndarray,
  *,
  has_sum: bool,
) -> np.ndarray:
  """Returns the outputs of a strange layer's heads [T, H, V].

  Args:
    params: the parameters of the layer.
    x: one row of inputs [T, E].
    visible: which keys each query sees [T, S].
    has_sum: whether the weights of earlier queries are added.
  """
  q = np.einsum("TE,EHGD->THGD", x, params["query"])
  k = np.einsum("TE,EKGD->TKGD", x, params["key"])
  v = np.einsum("TE,EKV->TKV", x, params["value"])
  mix = np.tanh(x @ params["strange_mix"])
  bias = params["strange_bias"][..., None, None]
  # Two heads share their keys and values.
  k = np.repeat(k, 2, axis=1)
  v = np.repeat(v, 2, axis=1)

  s = np.einsum("THGD,SHGD->HGTS", q, k) / np.sqrt(q.shape[-1])
  sigmoid = 1 / (1 + np.exp(-(s[:, 0] + bias[:, 0])))
  tanh = np.tanh(s[:, 1] + bias[:, 1]) / 4
  third_map = mix.T[..., None] * s[:, 2] / 8
  weights = np.where(visible, sigmoid - tanh + third_map, 0)
  if has_sum:
    weights = weights + visible.astype(float) @ weights / 16
  return np.einsum("HTS,SHV->THV", weights, v)


@pytest.mark.parametrize("name", own_variants.NAMES)
@pytest.mark.parametrize("window", [None, 4])
def test_a_layer_equals_its_definition(name, window):
  segment_ids = np.array([1] * 7 + [2] * 5)
  rng = np.random.default_rng(1)
  x = rng.normal(size=(1, 12, 16)).astype(np.float32)
  layer = ATTENTION[name](
    num_heads=4, num_kv_heads=2, head_dim=8, rope=False, window=window
  )
  params = parameters(layer, jnp.asarray(x))
  bias = rng.normal(size=(4, 2)).astype(np.float32)
  params["strange_bias"] = jnp.asarray(bias)

  actual = jax.jit(layer.apply)(
    {"params": params}, x, segment_ids=segment_ids[None]
  )

  exact_params = jax.tree.map(np.float64, params)
  visible = visible_keys(12, window=window, segment_ids=segment_ids)
  heads = expected_heads(
    exact_params, np.float64(x[0]), visible, has_sum=name == "strange_sum"
  )
  expected = np.einsum("THV,HVE->TE", heads, exact_params["out"])
  chex.assert_trees_all_close(np.float64(actual[0]), expected, **FLOAT32)


@pytest.mark.parametrize("window", [None, 5])
def test_the_documented_dint_equals_its_equations(window):
  """The weights are A₁ − λA₂ + λA₃.

  Row i of A₃ is the mean of the rows of A₁ that query i sees as keys.
  """
  lambda_init = 0.3
  segment_ids = np.array([1] * 7 + [2] * 5)
  rng = np.random.default_rng(3)
  x = rng.normal(size=(1, 12, 16)).astype(np.float32)
  layer = ATTENTION["dint"](
    num_heads=2, head_dim=8, rope=False, window=window, head_norm=False
  )
  params = parameters(layer, x, lambda_init)

  actual = jax.jit(layer.apply)(
    {"params": params},
    x,
    lambda_init,
    segment_ids=segment_ids[None],
  )

  exact_params = jax.tree.map(np.float64, params)
  row = np.float64(x[0])
  q = np.einsum("TE,EHGD->THGD", row, exact_params["query"])
  k = np.einsum("TE,EHGD->THGD", row, exact_params["key"])
  v = np.einsum("TE,EHV->THV", row, exact_params["value"])
  first = np.exp(exact_params["lambda_q1"] @ exact_params["lambda_k1"])
  second = np.exp(exact_params["lambda_q2"] @ exact_params["lambda_k2"])
  lam = first - second + lambda_init
  visible = visible_keys(12, window=window, segment_ids=segment_ids)
  scores = np.einsum("THGD,SHGD->HGTS", q, k) / np.sqrt(8)
  exponentials = np.where(visible, np.exp(scores), 0)
  maps = exponentials / exponentials.sum(axis=-1, keepdims=True)
  a1 = maps[:, 0]
  a2 = maps[:, 1]
  a3 = np.zeros_like(a1)
  for query in range(12):
    a3[:, query] = a1[:, visible[query]].mean(axis=1)
  weights = a1 - lam * a2 + lam * a3
  # The weights of each query sum to 1, which is the purpose of DINT.
  chex.assert_trees_all_close(weights.sum(axis=-1), np.ones((2, 12)), **FLOAT64)
  heads = np.einsum("HTS,SHV->THV", weights, v)
  expected = np.einsum("THV,HVE->TE", heads, exact_params["out"])
  chex.assert_trees_all_close(np.float64(actual[0]), expected, **FLOAT32)


@pytest.mark.parametrize("window", [None, 3])
def test_key_distances_count_tokens_between_a_query_and_its_keys(window):
  """Distances follow from the mask. They count only for visible keys."""
  # Two documents, of 4 and 3 tokens.
  segment_ids = np.array([1] * 4 + [2] * 3)
  visible = visible_keys(7, window=window, segment_ids=segment_ids)

  (distances,) = np.asarray(key_distances(jnp.asarray(visible)[None]))

  query, key = np.indices((7, 7))
  expected = query - key
  np.testing.assert_array_equal(distances[visible], expected[visible])


# Whole models.


@pytest.mark.parametrize("name", own_variants.NAMES)
def test_parameter_shapes_include_those_that_a_variant_declares(name):
  """The variants declare strange_bias with the axes L, H and R = 2."""
  model, params = decoder(name, num_layers=2, num_heads=4)
  expected = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    expected[path[-1].key] = leaf.shape

  shapes = parameter_shapes(model.config)

  assert shapes == expected
  assert shapes["strange_bias"] == (2, 4, 2)


@pytest.mark.parametrize("name", own_variants.NAMES)
def test_a_token_sees_only_earlier_tokens_of_its_document(name):
  # The first layer has a window, and the second one has none.
  model, params = decoder(name, window=4, window_pattern="wf")
  apply = jax.jit(functools.partial(model.apply, {"params": params}))
  # Each row has a document of 7 tokens and one of 5.
  segment_ids = np.array([[1] * 7 + [2] * 5] * 2)
  positions = np.array([[*range(7), *range(5)]] * 2)
  hidden = apply(TOKENS, segment_ids, positions)

  with_documents_swapped = apply(
    np.roll(TOKENS, 5, axis=1),
    np.roll(segment_ids, 5, axis=1),
    np.roll(positions, 5, axis=1),
  )
  other_tokens = TOKENS.copy()
  other_tokens[:, 6:] = (TOKENS[:, 6:] + 1) % 64
  with_later_tokens_changed = apply(other_tokens, segment_ids, positions)

  chex.assert_trees_all_close(
    with_documents_swapped[:, :5], hidden[:, 7:], **FLOAT32
  )
  chex.assert_trees_all_close(
    with_later_tokens_changed[:, :6], hidden[:, :6], **FLOAT32
  )


@pytest.mark.parametrize("name", ["strange", "distance_sigmoid"])
def test_a_cache_does_not_change_the_hidden_states(name):
  """A row can be read in two parts, of which the cache keeps the first."""
  model, params = decoder(name, window=4, window_pattern="wf")
  if name == "distance_sigmoid":
    # A slope of 0 would hide the distances.
    params["layers"]["attention"]["sigmoid_slope"] = jnp.full((2, 4), 0.3)
  layers = unstack(model, params)
  extend_cache = jax.jit(functools.partial(extend, model))

  # A cache for two rows of up to 16 tokens.
  cache = empty_cache(model, 2, 16)
  first, cache = extend_cache(layers, TOKENS[:, :6], cache)
  second, _ = extend_cache(layers, TOKENS[:, 6:], cache)

  actual = np.concatenate([first, second], axis=1)
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
      ids.append(int(np.argmax(all_logits(row)[0, len(ids) - 1])))
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
  # A new variant, for which no other test has constructed a sampler.
  register("warned")(type("Warned", (ATTENTION["strange_sum"],), {}))
  model, params = decoder("warned")

  Sampler(model, params, batch_size=2, capacity=24)
  Sampler(model, params, batch_size=2, capacity=24)

  errors = capfd.readouterr().err
  assert errors.count("every new token computes its whole") == 1


def test_generation_with_cache_does_not_warn(capfd):
  model, params = decoder("strange")

  Sampler(model, params, batch_size=2, capacity=24)

  assert "every new token" not in capfd.readouterr().err


def test_recomputing_rows_gives_the_tokens_and_logits_of_the_cache(monkeypatch):
  """A sampler computes whole rows for a variant without `cached_decoding`."""
  model, params = decoder("strange")
  prompts = [TOKENS[0, :9].tolist(), TOKENS[1, :4].tolist()]

  def answers_and_logits():
    sampler = Sampler(model, params, batch_size=2, capacity=32)
    answers = sampler.generate(prompts, 12, temperature=0.8, top_p=0.9, seed=3)
    state = sampler.prefill(prompts)
    # Further tokens of each row: first several, and then one.
    state = sampler.read(state, [[1, 2, 3], [4]])
    state = sampler.step(state, np.array([5, 6]))
    return answers, np.asarray(state.logits)

  answers, logits_of_cache = answers_and_logits()
  # Without the feature "cached_decoding", the sampler uses no cache.
  monkeypatch.setattr(ATTENTION["strange"], "supports", set())
  recomputed_answers, recomputed_logits = answers_and_logits()

  assert recomputed_answers == answers
  chex.assert_trees_all_close(recomputed_logits, logits_of_cache, **FLOAT32)


def negated_forward(arrays, mask, options):
  """Returns attention with the opposite sign.

  An implementation should not change the function. This one does, so that a
  test can tell whether it was called.
  """
  saved = IMPLEMENTATION.forward(arrays, mask, options)
  return saved._replace(out=-saved.out)


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

  "strange_sum" is computed from its own weights.
  """
  model, params = decoder("strange_sum")
  config = dataclasses.replace(model.config, attention_implementation="chunked")
  with pytest.raises(UserError, match="'auto' for 'strange_sum'"):
    trace(Decoder(config), params)


def test_a_variant_with_its_own_weights_rejects_another_attention_fn():
  """The weights of "strange_sum" would ignore the scale."""
  model, params = decoder("strange_sum")
  scaled_attention = functools.partial(diff_attention, scale=0.5)
  model = model.clone(attention_fn=scaled_attention)
  with pytest.raises(ValueError, match="must be diff_attention, without"):
    trace(model, params)


def test_a_variant_without_windows_rejects_one(monkeypatch):
  # A class names the optional features that it supports.
  monkeypatch.setattr(ATTENTION["strange_sum"], "supports", set())
  model, params = decoder("strange_sum")
  config = dataclasses.replace(model.config, window=4)
  with pytest.raises(UserError, match="config.model.window = 4: 'strange_sum'"):
    trace(Decoder(config), params)


def test_a_variant_without_quantized_logits_rejects_a_transform(monkeypatch):
  """A `logits_transform` changes attention logits, for example by rounding.

  A class has it only if it declares the feature "quantized_logits".
  """

  def unchanged(logits, mask):
    return logits

  monkeypatch.setattr(ATTENTION["strange_sum"], "supports", set())
  model, params = decoder("strange_sum")
  model = model.clone(logits_transform=unchanged)
  with pytest.raises(ValueError, match="logits_transform: StrangeSum"):
    trace(model, params)


def test_a_layer_that_does_not_call_its_attention_cannot_be_cached(monkeypatch):
  """The cache gets keys and values from the calls of `attention_fn`."""

  def attend(self, q, k, v, lam, mask):
    # Each of two key heads serves two query heads.
    return jnp.repeat(v, 2, axis=2)

  model, params = decoder("strange")
  monkeypatch.setattr(ATTENTION["strange"], "attend", attend)
  read = functools.partial(extend, model)
  layers = unstack(model, params)
  cache = empty_cache(model, 2, 16)
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


@pytest.mark.parametrize(
  ("name", "mesh"),
  [
    pytest.param("strange", MeshConfig(data=2, context=2), id="data, context"),
    pytest.param(
      "strange_sum",
      MeshConfig(data=1, fsdp=2, tensor=2),
      id="fsdp, tensor",
    ),
  ],
)
def test_a_mesh_does_not_change_training(name, mesh):
  on_one_device = run_steps(train_config(name))

  on_mesh = run_steps(train_config(name, mesh), num_devices=4)

  for step in range(3):
    actual = on_mesh[step]
    expected = on_one_device[step]
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=2e-6)
    np.testing.assert_allclose(
      actual["grad_norm"], expected["grad_norm"], rtol=2e-5
    )
  # The steps do change the parameters.
  assert on_one_device[0]["loss"] != on_one_device[2]["loss"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_training_step_reports_every_metric_of_a_layer(accumulation):
  """The layers of "strange" record a metric "strangeness" of their own."""
  config = train_config("strange", accumulation=accumulation)

  first_step, *_ = run_steps(config)

  # The model has two layers.
  chex.assert_shape(first_step["strangeness"], (2,))
  chex.assert_shape(first_step["lambda"], (2,))


def test_metrics_of_layers_are_means_over_micro_batches():
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


def test_a_parameter_that_is_used_must_be_declared(monkeypatch):
  """The layer "strange" asks for `strange_mix`, which is removed here."""
  layer_class = ATTENTION["strange"]
  declared = dict(layer_class.extra_parameters)
  del declared["strange_mix"]
  monkeypatch.setattr(layer_class, "extra_parameters", declared)
  with pytest.raises(ValueError, match="no parameter 'strange_mix'"):
    build_program(train_config("strange"))


def test_a_parameter_that_is_declared_must_be_used(monkeypatch):
  layer_class = ATTENTION["strange"]
  # A vector with an element for each head, in each layer.
  unused = Parameter("LH")
  declared = {**layer_class.extra_parameters, "unused": unused}
  monkeypatch.setattr(layer_class, "extra_parameters", declared)
  # Registering the class again would add it to this table.
  monkeypatch.setitem(PARAMETERS, "unused", unused)
  with pytest.raises(UserError, match="the layer does not make it"):
    build_program(train_config("strange"))


def test_a_parameter_of_flax_must_be_declared(monkeypatch):
  """`extra_parameters` declares what a class adds to those of `Attention`.

  Without it, the program does not know how to split a parameter over devices.
  """

  def compute_lambda(self, x, lambda_init):
    zeros = jax.nn.initializers.zeros
    self.param("forgotten", zeros, (self.num_heads,))
    return jnp.zeros(self.num_heads)

  monkeypatch.setattr(ATTENTION["strange"], "compute_lambda", compute_lambda)

  with pytest.raises(
    (UserError, ValueError), match="forgotten.*extra_parameters"
  ):
    build_program(train_config("strange"))
