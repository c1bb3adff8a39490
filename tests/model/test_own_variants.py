"""Variants from outside the package: every way to run one computes its weights, and none another variant's."""

import dataclasses
import functools

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
from diffjax.inference import sampler as sampler_module
from diffjax.inference.cache import empty_cache, extend, unstack
from diffjax.inference.sampler import Sampler
from diffjax.model.attention import ATTENTION
from diffjax.model.decoder import Decoder, logits
from diffjax.model.definition import key_distances
from diffjax.model.shapes import parameter_shapes
from diffjax.ops.diff_attention import Implementation, diff_attention
from diffjax.ops.diff_attention.implementations import REGISTRY
from diffjax.ops.diff_attention.reference import IMPLEMENTATION
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.parameters import PARAMETERS, Parameter
from diffjax.training.program import build
from tests.harness import own_variants
from tests.harness.parameters import parameters

CONFIG = ModelConfig(
  vocab_size=64,
  num_layers=3,
  embed_dim=16,
  head_dim=8,
  ffn_dim=32,
  max_length=64,
  **own_variants.FIELDS,
)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)


@pytest.fixture(autouse=True, scope="module")
def strange(tmp_path_factory):
  with own_variants.registered(tmp_path_factory.mktemp("own")):
    yield


def decoder(name, **fields):
  """Returns a model of a strange variant, and its parameters."""
  config = dataclasses.replace(CONFIG, attention=name, **fields)
  model = Decoder(config)
  return model, parameters(model, jnp.asarray(TOKENS))


def hidden_states(model, params, tokens, *options):
  return jax.jit(model.apply)({"params": params}, tokens, *options)


def visible(length, *, window=None, ids=None):
  """Returns which keys each query sees [T, S], from the definition."""
  query, key = np.indices((length, length))
  seen = key <= query
  if window is not None:
    seen &= query - key < window
  if ids is not None:
    seen &= ids[query] == ids[key]
  return seen


def expected_heads(params, q, k, v, mix, seen, *, with_sum):
  """Returns the outputs of the heads of one row [T, H, V], in float64.

  Args:
    params: of the layer.
    q: queries [T, H, 3, D].
    k: keys [S, K, 3, D].
    v: values [S, K, V].
    mix: tanh(x W), [T, H].
    seen: which keys each query sees [T, S].
    with_sum: whether the weights of earlier queries are added.
  """
  bias = np.asarray(params["strange_bias"], np.float64)
  k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
  s = np.einsum("THGD,SHGD->HGTS", q, k) / np.sqrt(q.shape[-1])
  sigmoid = 1 / (1 + np.exp(-(s[:, 0] + bias[:, 0, None, None])))
  tanh = np.tanh(s[:, 1] + bias[:, 1, None, None]) / 4
  weights = np.where(seen, sigmoid - tanh + mix.T[..., None] * s[:, 2] / 8, 0)
  if with_sum:
    weights = weights + seen.astype(float) @ weights / 16
  return np.einsum("HTS,SHV->THV", weights, v)


@pytest.mark.parametrize("name", own_variants.NAMES)
@pytest.mark.parametrize("window", [None, 4])
def test_a_layer_equals_its_definition(name, window):
  rng = np.random.default_rng(1)
  layer = ATTENTION[name](
    num_heads=4, num_kv_heads=2, head_dim=8, rope=False, window=window
  )
  x = rng.normal(size=(1, 12, 16)).astype(np.float32)
  ids = np.repeat([1, 2], [7, 5])
  params = parameters(layer, jnp.asarray(x))
  params["strange_bias"] = jnp.asarray(
    rng.normal(size=(4, 2)).astype(np.float32)
  )
  out = jax.jit(layer.apply)(
    {"params": params}, x, segment_ids=jnp.asarray(ids)[None]
  )
  exact = {key: np.asarray(leaf, np.float64) for key, leaf in params.items()}
  row = x[0].astype(np.float64)
  heads = expected_heads(
    params,
    np.einsum("TE,EHGD->THGD", row, exact["query"]),
    np.einsum("TE,EKGD->TKGD", row, exact["key"]),
    np.einsum("TE,EKV->TKV", row, exact["value"]),
    np.tanh(row @ exact["strange_mix"]),
    visible(12, window=window, ids=ids),
    with_sum=name == "strange_sum",
  )
  expected = np.einsum("THV,HVE->TE", heads, exact["out"])
  np.testing.assert_allclose(out[0], expected, atol=2e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_the_example_of_dint_equals_its_equations(window):
  """A₁ − λA₂ + λA₃ in float64, where row i of A₃ is the mean of rows that i sees."""
  rng = np.random.default_rng(3)
  layer = ATTENTION["dint"](
    num_heads=2, head_dim=8, rope=False, window=window, head_norm=False
  )
  x = rng.normal(size=(1, 12, 16)).astype(np.float32)
  ids = np.repeat([1, 2], [7, 5])
  lambda_init = 0.3
  params = parameters(layer, jnp.asarray(x), lambda_init)
  out = jax.jit(layer.apply)(
    {"params": params}, x, lambda_init, segment_ids=jnp.asarray(ids)[None]
  )
  exact = {key: np.asarray(leaf, np.float64) for key, leaf in params.items()}
  row = x[0].astype(np.float64)
  q = np.einsum("TE,EHGD->THGD", row, exact["query"])
  k = np.einsum("TE,EHGD->THGD", row, exact["key"])
  v = np.einsum("TE,EHV->THV", row, exact["value"])
  first = np.exp(exact["lambda_q1"] @ exact["lambda_k1"])
  second = np.exp(exact["lambda_q2"] @ exact["lambda_k2"])
  lam = first - second + lambda_init
  seen = visible(12, window=window, ids=ids)
  s = np.einsum("THGD,SHGD->HGTS", q, k) / np.sqrt(8)
  exponentials = np.where(seen, np.exp(s), 0)
  maps = exponentials / exponentials.sum(axis=-1, keepdims=True)
  a1, a2 = maps[:, 0], maps[:, 1]
  a3 = np.stack([a1[:, seen[i]].mean(axis=1) for i in range(12)], axis=1)
  weights = a1 - lam * a2 + lam * a3
  np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-12)
  heads = np.einsum("HTS,SHV->THV", weights, v)
  expected = np.einsum("THV,HVE->TE", heads, exact["out"])
  np.testing.assert_allclose(out[0], expected, atol=2e-5)


@pytest.mark.parametrize("name", own_variants.NAMES)
def test_the_table_knows_its_parameters(name):
  model, params = decoder(name)
  shapes = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    shapes[path[-1].key] = leaf.shape
  assert shapes == parameter_shapes(model.config)
  assert shapes["strange_bias"] == (3, 4, 2)


@pytest.mark.parametrize("name", own_variants.NAMES)
@pytest.mark.parametrize("fields", [{}, dict(window=4, window_pattern="wf")])
def test_packed_documents_do_not_see_each_other(name, fields):
  model, params = decoder(name, **fields)
  ids = np.tile(np.repeat([1, 2], [7, 5]), (2, 1))
  positions = np.tile([*range(7), *range(5)], (2, 1))
  packed = hidden_states(model, params, TOKENS, ids, positions)
  second = hidden_states(model, params, TOKENS[:, 7:])
  np.testing.assert_allclose(packed[:, 7:], second, atol=1e-5)
  causal = hidden_states(model, params, TOKENS[:, :6])
  np.testing.assert_allclose(packed[:, :6], causal, atol=1e-5)


@pytest.mark.parametrize("name", ["strange", "distance_sigmoid"])
@pytest.mark.parametrize("fields", [{}, dict(window=4, window_pattern="wf")])
def test_a_cache_gives_the_same_hidden_states(name, fields):
  model, params = decoder(name, **fields)
  if name == "distance_sigmoid":
    slopes = jnp.full((model.config.num_layers, 4), 0.3)
    params["layers"]["attention"]["sigmoid_slope"] = slopes
  cache = empty_cache(model, 2, 16)
  layers = unstack(model, params)
  read = jax.jit(functools.partial(extend, model))
  first, cache = read(layers, TOKENS[:, :7], cache)
  second, cache = read(layers, TOKENS[:, 7:], cache)
  np.testing.assert_allclose(
    np.concatenate([first, second], axis=1),
    hidden_states(model, params, TOKENS),
    atol=1e-5,
  )


def test_distances_of_keys():
  """In tokens of the document, as far as a query sees them."""
  ids = np.repeat([1, 2], [4, 3])
  for window in (None, 3):
    seen = visible(7, window=window, ids=ids)
    query, key = np.indices((7, 7))
    distances = np.asarray(key_distances(jnp.asarray(seen)[None]))[0]
    np.testing.assert_array_equal(distances[seen], (query - key)[seen])


def greedy(model, params, prompt, count):
  """Returns the most likely tokens, each computed from the whole row."""
  row = list(prompt)
  for _ in range(count):
    padded = np.zeros((1, 24), np.int32)
    padded[0, : len(row)] = row
    hidden = hidden_states(model, params, padded)
    scores = logits(params, hidden)[0, len(row) - 1]
    row.append(int(np.argmax(scores)))
  return row[len(prompt) :]


@pytest.mark.parametrize("name", own_variants.NAMES)
def test_generation_with_and_without_cache(name, monkeypatch, capfd):
  monkeypatch.setattr(sampler_module, "_warned_of", set())
  model, params = decoder(name)
  prompts = [TOKENS[0, :9].tolist(), TOKENS[1, :4].tolist()]
  expected = [greedy(model, params, prompt, 10) for prompt in prompts]
  for _ in range(2):
    sampler = Sampler(model, params, batch_size=2, capacity=24)
    assert sampler.generate(prompts, 10) == expected
  warnings = capfd.readouterr().err.count("every new token computes its whole")
  assert warnings == (0 if name == "strange" else 1)


def test_a_history_is_the_cache_of_any_variant(monkeypatch):
  """Drawn tokens are the same, and so is a prefix that is read once."""
  model, params = decoder("strange")
  options = dict(temperature=0.8, top_p=0.9, seed=3)
  prompts = [TOKENS[0, :5].tolist(), TOKENS[1, :9].tolist()]
  answers = []
  for supports in ({"cached_decoding"}, set()):
    monkeypatch.setattr(ATTENTION["strange"], "supports", supports)
    sampler = Sampler(model, params, batch_size=2, capacity=32)
    state = sampler.prefill(prompts)
    state = sampler.read(state, [[1, 2, 3], [4]])
    state = sampler.step(state, np.array([5, 6]))
    answers.append(
      (sampler.generate(prompts, 12, **options), np.asarray(state.logits))
    )
  assert answers[0][0] == answers[1][0]
  np.testing.assert_allclose(answers[0][1], answers[1][1], atol=1e-5)


def test_generation_calls_an_implementation_that_a_user_registered(monkeypatch):
  """This one changes the function, which it should not, so that it is seen."""

  def forward(arrays, mask, options):
    saved = IMPLEMENTATION.forward(arrays, mask, options)
    return saved._replace(out=-saved.out)

  monkeypatch.setitem(REGISTRY._registered, "negative", Implementation(forward))
  model, params = decoder("softmax")
  negative = model.clone(
    attention_fn=functools.partial(diff_attention, implementation="negative")
  )
  prompt = TOKENS[0, :9].tolist()
  answers = []
  for each in (model, negative):
    answers.append(greedy(each, params, prompt, 10))
    sampler = Sampler(each, params, capacity=24)
    assert sampler.generate([prompt], 10) == [answers[-1]]
  assert answers[0] != answers[1]


def test_what_is_not_supported_is_refused(monkeypatch):
  model, params = decoder("strange_sum")
  with pytest.raises(UserError, match="does not declare .* cached_decoding"):
    empty_cache(model, 1, 16)
  with pytest.raises(UserError, match="cache_dtype = 'int8': must be None"):
    Sampler(model, params, cache_dtype="int8")
  config = dataclasses.replace(model.config, attention_implementation="chunked")
  with pytest.raises(UserError, match="'auto' for 'strange_sum'"):
    hidden_states(Decoder(config), params, TOKENS)
  custom = model.clone(
    attention_fn=functools.partial(diff_attention, scale=0.5)
  )
  with pytest.raises(ValueError, match="must be diff_attention, without"):
    hidden_states(custom, params, TOKENS)
  monkeypatch.setattr(ATTENTION["strange_sum"], "supports", set())
  config = dataclasses.replace(model.config, window=4)
  with pytest.raises(UserError, match="config.model.window = 4: 'strange_sum'"):
    hidden_states(Decoder(config), params, TOKENS)
  quantized = model.clone(logits_transform=lambda logits, mask: logits)
  with pytest.raises(ValueError, match="logits_transform: StrangeSum"):
    hidden_states(quantized, params, TOKENS)


def test_a_layer_that_does_not_call_its_attention_cannot_be_cached(monkeypatch):
  model, params = decoder("strange")
  monkeypatch.setattr(
    ATTENTION["strange"],
    "attend",
    lambda self, q, k, v, lam, mask: jnp.repeat(v, 2, axis=2),
  )
  with pytest.raises(ValueError, match="called its attention_fn 0 times"):
    extend(model, unstack(model, params), TOKENS, empty_cache(model, 2, 16))


def run_steps(config, num_devices):
  """Returns the metrics of each of three training steps."""
  mesh = make_mesh(config.mesh, jax.devices()[:num_devices])
  program = build(config, mesh)
  rng = np.random.default_rng(2)
  batch = {
    "tokens": rng.integers(0, 64, (4, 16)).astype(np.int32),
    "targets": rng.integers(0, 64, (4, 16)).astype(np.int32),
    "segment_ids": np.tile(np.repeat([1, 2], [9, 7]), (4, 1)).astype(np.int32),
    "positions": np.tile([*range(9), *range(7)], (4, 1)).astype(np.int32),
    "weights": np.ones((4, 16), np.float32),
  }
  state = program.init()
  measured = []
  for _ in range(3):
    state, metrics = program.train_step(state, put_batch(batch, mesh))
    measured.append(jax.device_get(metrics))
  return measured


def train_config(name, mesh=None, accumulation=1, **fields):
  return Config(
    model=dataclasses.replace(CONFIG, attention=name, **fields),
    data=DataConfig(length=16),
    train=TrainConfig(batch_size=4, accumulation=accumulation),
    mesh=mesh or MeshConfig(),
  )


MESHES = [
  ("strange", MeshConfig(2, 1, 1, 1)),
  ("strange_sum", MeshConfig(1, 2, 1, 1)),
  ("strange_sum", MeshConfig(1, 1, 1, 2)),
  ("strange", MeshConfig(1, 1, 2, 1)),
]


@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_two_devices_train_as_one(name, mesh):
  fields = dict(window=5, window_pattern="wf")
  one = run_steps(train_config(name, **fields), 1)
  two = run_steps(train_config(name, mesh, **fields), 2)
  for expected, metrics in zip(one, two, strict=True):
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-6)
    np.testing.assert_allclose(
      metrics["grad_norm"], expected["grad_norm"], rtol=2e-5
    )
  assert one[0]["loss"] != one[2]["loss"]


def test_every_sown_metric_is_a_metric_of_the_step():
  """Values by layer, and their mean over micro-batches."""
  whole = run_steps(train_config("strange"), 1)
  parts = run_steps(train_config("strange", accumulation=2), 1)
  for metrics in (whole[0], parts[0]):
    assert metrics["strangeness"].shape == (CONFIG.num_layers,)
    assert metrics["lambda"].shape == (CONFIG.num_layers,)
  np.testing.assert_allclose(
    parts[0]["lambda"], whole[0]["lambda"], rtol=1e-5, atol=1e-7
  )


def test_rows_cannot_be_split_unless_the_variant_supports_it():
  config = train_config("strange_sum", MeshConfig(1, 1, 2, 1))
  with pytest.raises(UserError, match="config.mesh.context = 2: .*strange_sum"):
    run_steps(config, 2)


def test_parameters_that_are_not_declared_are_refused(monkeypatch):
  layer_class = ATTENTION["strange"]
  declared = dict(layer_class.extra_parameters)
  del declared["strange_mix"]
  monkeypatch.setattr(layer_class, "extra_parameters", declared)
  with pytest.raises(ValueError, match="no parameter 'strange_mix'"):
    run_steps(train_config("strange"), 1)

  monkeypatch.undo()
  more = {**layer_class.extra_parameters, "never_made": Parameter("LH")}
  monkeypatch.setattr(layer_class, "extra_parameters", more)
  monkeypatch.setitem(PARAMETERS, "never_made", Parameter("LH"))
  with pytest.raises(UserError, match="the layer does not make it"):
    run_steps(train_config("strange"), 1)
  monkeypatch.undo()

  def compute_lambda(self, x, lambda_init):
    zeros = jax.nn.initializers.zeros
    self.param("forgotten", zeros, (self.num_heads,))
    return jnp.zeros(self.num_heads)

  monkeypatch.setattr(layer_class, "compute_lambda", compute_lambda)
  with pytest.raises(
    (UserError, ValueError), match="forgotten.*extra_parameters"
  ):
    run_steps(train_config("strange"), 1)
