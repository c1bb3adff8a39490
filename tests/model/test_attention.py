"""The attention layers, alone and as parts of a user's module."""

import ast
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.model.attention import (
  ATTENTION,
  Attention,
  DiffAttention,
  DiffAttentionV2,
  attention_class,
  lambda_init_schedule,
)
from diffjax.model.definition import apply_weights, attention_from_weights
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.rope import rope
from diffjax.parameters import BIASES
from tests.harness.parameters import parameters
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32_LAYER, assert_close_in_norm
from tests.harness.variants import supporting

GOLDEN = pathlib.Path(__file__).parent / "golden"
LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def normal(*shape: int) -> np.ndarray:
  """Returns normally distributed numbers in float32."""
  return np.random.default_rng(0).standard_normal(shape, np.float32)


def random_parameters(layer: nn.Module, *inputs: Any, **options: Any) -> Any:
  """Returns random parameters of a layer, as NumPy arrays."""
  return jax.device_get(parameters(layer, *inputs, **options))


def apply(
  layer: nn.Module,
  params: Any,
  x: np.ndarray,
  lambda_init: float | None = None,
) -> np.ndarray:
  """Returns the output of a layer."""
  output = jax.jit(layer.apply)({"params": params}, x, lambda_init)
  return np.asarray(output)


def mean_lambda(
  layer: nn.Module,
  params: Any,
  x: np.ndarray,
  lambda_init: float | None = None,
) -> Any:
  """Returns the mean λ that a layer records as a metric."""
  apply_layer = functools.partial(layer.apply, mutable=["metrics"])
  _, variables = jax.jit(apply_layer)({"params": params}, x, lambda_init)
  (mean,) = variables["metrics"]["lambda"]
  return mean


# The authors' layers. golden/ has their inputs, outputs and gradients.


def interleaved_to_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
  """Reorders the rows of each sub-head for another layout of RoPE.

  The authors rotate the pairs (2j, 2j + 1), and diffjax rotates (j, j + D/2).
  So the rows (0, 1, 2, …) become (0, 2, …, 1, 3, …).
  """
  pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
  return pairs.swapaxes(1, 2).reshape(rows.shape)


def to_diffjax(
  arrays: dict[str, np.ndarray], meta: dict[str, Any]
) -> dict[str, np.ndarray]:
  """Converts parameters of the authors' layers, or their gradients.

  PyTorch's Linear has weights [out, in].
  """
  E = meta["embed_dim"]
  H = meta["num_heads"]
  K = meta["num_kv_heads"]
  D = meta["head_dim"]
  is_v1 = meta["kind"] == "v1"
  M = 2 if is_v1 else 1
  V = 2 * D if is_v1 else D
  out = arrays["out_proj.weight" if is_v1 else "o_proj.weight"]
  query = interleaved_to_halves(arrays["q_proj.weight"], D)
  key = interleaved_to_halves(arrays["k_proj.weight"], D)
  params = {
    "query": query.T.reshape(E, H, 2, D),
    "key": key.T.reshape(E, K, M, D),
    "value": arrays["v_proj.weight"].T.reshape(E, K, V),
    "out": out.T.reshape(H, V, E),
  }
  if is_v1:
    for name in LAMBDA_VECTORS:
      params[name] = arrays[name]
    params["head_gain"] = arrays["subln.weight"]
  else:
    params["lambda_hat"] = arrays["lambda_proj.weight"].T
  return params


def arrays_below(data: Any, prefix: str) -> dict[str, np.ndarray]:
  """Returns the arrays below a prefix of names, such as "grad/"."""
  arrays = {}
  for name in data.files:
    if name.startswith(prefix):
      arrays[name.removeprefix(prefix)] = data[name]
  return arrays


@pytest.mark.parametrize(
  ("name", "implementation"),
  [
    ("v1_gqa_depth5", "chunked"),
    ("v2_gqa", "chunked"),
    ("v1_mha_depth0", "reference"),
    *full(
      [
        ("v1_gqa_depth5", "reference"),
        ("v2_gqa", "reference"),
        ("v1_mha_depth0", "chunked"),
      ]
    ),
  ],
)
def test_output_and_gradients_equal_the_authors_layers(name, implementation):
  data = np.load(GOLDEN / f"{name}.npz", allow_pickle=False)
  meta = ast.literal_eval(str(data["meta"]))
  params = to_diffjax(arrays_below(data, "param/"), meta)
  expected = {
    "output": data["y"],
    "input gradient": data["dx"],
    **to_diffjax(arrays_below(data, "grad/"), meta),
  }
  layer_class = {"v1": DiffAttention, "v2": DiffAttentionV2}[meta["kind"]]
  layer = layer_class(
    num_heads=meta["num_heads"],
    num_kv_heads=meta["num_kv_heads"],
    head_dim=meta["head_dim"],
    rope_base=meta["rope_base"],
    norm_eps=meta["norm_eps"],
    attention_fn=functools.partial(
      diff_attention, implementation=implementation
    ),
  )
  lambda_init = None
  if meta["kind"] == "v1":
    lambda_init = lambda_init_schedule(meta["depth"])

  def output(params, x):
    return layer.apply({"params": params}, x, lambda_init)

  @jax.jit
  def output_and_gradients(params, x, dy):
    y, vjp = jax.vjp(output, params, x)
    return y, *vjp(dy)

  inputs = (params, data["x"], data["dy"])
  inputs = jax.tree.map(np.float32, inputs)
  y, dparams, dx = output_and_gradients(*inputs)

  actual = {"output": y, "input gradient": dx, **dparams}
  assert_close_in_norm(actual, expected, 2e-6)


# Parameters.


class ModuleOfAUser(nn.Module):
  """A module with a projection and an attention layer."""

  attention: str

  @nn.compact
  def __call__(self, x):
    layer = ATTENTION[self.attention](num_heads=2, head_dim=8, name="attention")
    return layer(nn.Dense(32)(x), lambda_init=0.8)


@pytest.mark.parametrize(
  "name", ["diff", *full(name for name in ATTENTION if name != "diff")]
)
def test_a_layer_can_be_part_of_a_users_module(name):
  x = normal(2, 6, 16)
  module = ModuleOfAUser(name)

  y, _ = jax.jit(module.init_with_output)(jax.random.key(1), x)

  chex.assert_shape(y, (2, 6, 32))
  chex.assert_tree_all_finite(y)


@pytest.mark.parametrize(
  ("name", "query_maps", "key_maps", "other_shapes"),
  [
    ("softmax", 1, 1, {}),
    ("gated", 1, 1, {"head_gate": (32, 2, 8)}),
    ("dex", 1, 1, {"dex_matrix": (8, 8), "dex_lambda": (2,)}),
    ("diff_v2", 2, 1, {"lambda_hat": (32, 2)}),
    ("diff_v2_linear", 2, 1, {"lambda_hat": (32, 2)}),
    ("diff_v2_gated", 2, 1, {"lambda_hat": (32, 2), "head_gate": (32, 2, 8)}),
    ("diff_per_token", 2, 2, {"lambda_hat": (32, 2), "head_gain": (16,)}),
    (
      "diff",
      2,
      2,
      {
        "lambda_q1": (8,),
        "lambda_k1": (8,),
        "lambda_q2": (8,),
        "lambda_k2": (8,),
        "head_gain": (16,),
      },
    ),
  ],
)
def test_parameters_have_the_shapes_of_the_paper(
  name, query_maps, key_maps, other_shapes
):
  """A head has one or two maps. If a map has its own keys, values are wider."""
  embed_dim = 32
  num_heads = 2
  head_dim = 8
  value_dim = key_maps * head_dim
  layer = ATTENTION[name](num_heads=num_heads, head_dim=head_dim)
  x = np.zeros((1, 6, embed_dim), np.float32)

  variables = jax.eval_shape(layer.init, jax.random.key(0), x, 0.8)

  assert jax.tree.map(jnp.shape, variables["params"]) == {
    "query": (embed_dim, num_heads, query_maps, head_dim),
    "key": (embed_dim, num_heads, key_maps, head_dim),
    "value": (embed_dim, num_heads, value_dim),
    "out": (num_heads, value_dim, embed_dim),
    **other_shapes,
  }


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(
  "mutable",
  [
    pytest.param(True, id="all collections"),
    pytest.param(nn.DenyList("intermediates"), id="default of Flax"),
  ],
)
def test_init_of_a_layer_returns_only_parameters(name, mutable):
  """A call records metrics and queries. `init` records nothing."""
  x = np.ones((1, 6, 16), np.float32)
  layer = ATTENTION[name](num_heads=2, head_dim=4)
  init = functools.partial(layer.init, lambda_init=0.3, mutable=mutable)

  variables = jax.eval_shape(init, jax.random.key(0), x)

  assert variables.keys() == {"params"}


def recorded_by_a_call(name: str) -> dict[str, Any]:
  """Returns what a layer of a variant records: tuples of metrics and arrays.

  Flax appends to a tuple if a name is recorded again.
  """
  layer = ATTENTION[name](num_heads=2, head_dim=4)
  x = np.ones((1, 6, 16), np.float32)
  params = random_parameters(layer, x, lambda_init=0.3)
  apply_layer = functools.partial(layer.apply, mutable=True)
  _, recorded = jax.eval_shape(apply_layer, {"params": params}, x, 0.3)
  return recorded


@pytest.mark.parametrize("name", ATTENTION)
def test_a_layer_records_its_queries_once(name):
  recorded = recorded_by_a_call(name)

  assert len(recorded["intermediates"]["query"]) == 1


@pytest.mark.parametrize(
  "name", sorted(ATTENTION.keys() - {"softmax", "gated"})
)
def test_a_layer_with_a_lambda_records_it_once(name):
  recorded = recorded_by_a_call(name)

  assert len(recorded["metrics"]["lambda"]) == 1


@pytest.mark.parametrize("name", ["softmax", "gated"])
def test_a_layer_without_a_lambda_records_no_metrics(name):
  recorded = recorded_by_a_call(name)

  assert "metrics" not in recorded


# Wrong configurations.


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    pytest.param(
      dict(attention="diff_v3"),
      "config.model.attention = 'diff_v3': no such variant is registered;"
      " there are softmax, diff",
      id="unknown variant",
    ),
    pytest.param(
      dict(attention="softmax", lambda_init=0.8),
      "config.model.lambda_init = 0.8: 'softmax' has no λ_init; leave it None",
      id="λ_init without λ",
    ),
    pytest.param(
      dict(attention="softmax", num_noise_heads=2),
      "config.model.num_noise_heads = 2: 'softmax' has no noise map; leave it"
      " None",
      id="noise heads without noise map",
    ),
    pytest.param(
      dict(attention="diff_v2", lambda_init_offset=1),
      "config.model.lambda_init_offset = 1: 'diff_v2' has no λ_init; leave it"
      " 0",
      id="offset without λ_init",
    ),
    pytest.param(
      dict(attention="dex", lambda_init=0.0),
      "config.model.lambda_init = 0.0: must not be 0 for 'dex'",
      id="λ_init of DEX is 0",
    ),
    pytest.param(
      dict(attention="diff_per_token", lambda_init=1.5),
      "config.model.lambda_init = 1.5: must be between 0 and 1",
      id="λ_init is no share",
    ),
  ],
)
def test_a_config_that_contradicts_its_variant_is_rejected(fields, message):
  with pytest.raises(UserError, match=message):
    attention_class(ModelConfig(**fields))


def test_attention_without_a_noise_map_rejects_noise_heads():
  layer = Attention(num_heads=4, head_dim=8, num_noise_heads=2)
  message = "num_noise_heads must be None for Attention, .*; got 2"
  with pytest.raises(ValueError, match=message):
    random_parameters(layer, np.zeros((1, 4, 16), np.float32))


@pytest.mark.parametrize("num_noise_heads", [0, 3])
def test_the_number_of_noise_heads_must_divide_the_number_of_heads(
  num_noise_heads,
):
  layer = DiffAttention(
    num_heads=4, head_dim=8, num_noise_heads=num_noise_heads
  )
  message = (
    "num_noise_heads must divide num_heads = 4, or be None for one noise map"
    f" per head; got {num_noise_heads}"
  )
  with pytest.raises(ValueError, match=message):
    random_parameters(layer, np.zeros((1, 4, 16), np.float32), lambda_init=0.5)


@pytest.mark.parametrize("rope_dim", [3, 10])
def test_rope_dim_must_be_even_and_at_most_head_dim(rope_dim):
  layer = DiffAttentionV2(num_heads=4, head_dim=8, rope_dim=rope_dim)
  message = (
    "rope_dim must be even and from 2 to head_dim = 8, or None for all; got"
    f" {rope_dim}"
  )
  with pytest.raises(ValueError, match=message):
    random_parameters(layer, np.zeros((1, 4, 16), np.float32))


@pytest.mark.parametrize("name", ["diff", "diff_per_token", "dex"])
def test_a_layer_with_lambda_init_requires_it(name):
  layer = ATTENTION[name](num_heads=2, head_dim=8)
  message = f"{type(layer).__name__} needs lambda_init.*lambda_init_schedule"
  with pytest.raises(ValueError, match=message):
    random_parameters(layer, np.zeros((1, 4, 16), np.float32))


# λ.


def test_lambda_init_schedule_has_the_values_of_the_paper():
  """λ_init of layer l is 0.8 − 0.6·exp(−0.3·l)."""
  schedule = jax.jit(lambda_init_schedule)(np.arange(5))

  expected = [0.2, 0.3555, 0.4707, 0.5561, 0.6193]
  np.testing.assert_allclose(schedule, expected, atol=5e-5)


def test_diff_with_lambda_0_ignores_its_second_map():
  x = normal(2, 8, 16)
  layer = DiffAttention(num_heads=2, head_dim=4, head_norm=False)
  params = random_parameters(layer, x, lambda_init=0.0)
  # λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init is 1 − 1 + 0.
  for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
    params[name] = np.zeros(4, np.float32)
  # The third axis has the two maps of a head.
  change_of_second_map = np.float32([[0.0], [1.0]])
  other_second_map = params | {
    "query": params["query"] + change_of_second_map,
    "key": params["key"] + change_of_second_map,
  }
  apply_layer = jax.jit(functools.partial(layer.apply, lambda_init=0.0))

  actual = apply_layer({"params": other_second_map}, x)

  expected = apply_layer({"params": params}, x)
  chex.assert_trees_all_equal(actual, expected)


def test_lambda_of_v2_is_the_sigmoid_of_its_logit():
  x = normal(1, 6, 16)
  layer = ATTENTION["diff_v2"](num_heads=2, head_dim=4)
  params = random_parameters(layer, x)

  actual = mean_lambda(layer, params, x)

  logits_of_lambda = x @ params["lambda_hat"]
  expected = np.mean(1 / (1 + np.exp(-logits_of_lambda)))
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_lambda_of_linear_v2_is_its_logit():
  x = normal(1, 6, 16)
  layer = ATTENTION["diff_v2_linear"](num_heads=2, head_dim=4)
  params = random_parameters(layer, x)

  actual = mean_lambda(layer, params, x)

  expected = np.mean(x @ params["lambda_hat"])
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_the_output_of_linear_v2_is_linear_in_lambda():
  x = normal(1, 6, 16)
  layer = ATTENTION["diff_v2_linear"](num_heads=2, head_dim=4)
  params = random_parameters(layer, x)
  apply_layer = jax.jit(layer.apply)

  def output_with_scaled_lambda(scale):
    scaled = params | {"lambda_hat": scale * params["lambda_hat"]}
    return np.asarray(apply_layer({"params": scaled}, x))

  output_without_lambda = output_with_scaled_lambda(0.0)
  change = output_with_scaled_lambda(1.0) - output_without_lambda
  triple_change = output_with_scaled_lambda(3.0) - output_without_lambda
  chex.assert_trees_all_close(triple_change, 3 * change, rtol=1e-3, atol=1e-5)


def test_lambda_per_token_is_lambda_init_if_its_matrix_is_0():
  """The layer is compared with a DIFF layer that also has λ = λ_init."""
  lambda_init = 0.3
  x = normal(1, 6, 16)
  layer = ATTENTION["diff_per_token"](num_heads=2, head_dim=4)
  params = random_parameters(layer, x, lambda_init)
  params["lambda_hat"] = np.zeros((16, 2), np.float32)

  actual = apply(layer, params, x, lambda_init)

  # λ of DIFF is exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init = 1 − 1 + λ_init.
  diff = DiffAttention(num_heads=2, head_dim=4)
  diff_params = params | {
    "lambda_q1": np.zeros(4, np.float32),
    "lambda_k1": np.zeros(4, np.float32),
    "lambda_q2": np.zeros(4, np.float32),
    "lambda_k2": np.zeros(4, np.float32),
  }
  del diff_params["lambda_hat"]
  expected = apply(diff, diff_params, x, lambda_init)
  chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_lambda_per_token_is_a_sigmoid_around_lambda_init():
  """λ = sigmoid(x W_λ + log(λ_init / (1 − λ_init)))."""
  x = normal(1, 6, 16)
  lambda_init = 0.3
  layer = ATTENTION["diff_per_token"](num_heads=2, head_dim=4)
  params = random_parameters(layer, x, lambda_init)

  actual = mean_lambda(layer, params, x, lambda_init)

  logits = x @ params["lambda_hat"]
  offset = np.log(lambda_init / (1 - lambda_init))
  expected = 1 / (1 + np.exp(-logits - offset))
  # The tokens have different λ.
  assert expected.std() > 0.05
  np.testing.assert_allclose(actual, expected.mean(), rtol=1e-5)


# DEX and gates.


def test_dex_is_attention_with_another_output_projection():
  """DEX replaces the output O of a head by O − λ O W = O (I − λ W).

  So it equals attention whose output projection is (I − λ W) W_out. Each head
  has its own λ and W_out. All heads share the matrix W.
  """
  num_heads = 4
  value_dim = 5
  sizes = dict(
    num_heads=num_heads, num_kv_heads=2, head_dim=6, value_dim=value_dim
  )
  lambda_init = 0.7
  learned_lambda = np.array([0.4, -0.7, 0.0, 1.1], np.float32)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 9, 16)).astype(np.float32)
  dex = ATTENTION["dex"](**sizes)
  params = random_parameters(dex, x, lambda_init)
  params["dex_matrix"] = rng.normal(size=(value_dim, value_dim))
  params["dex_lambda"] = learned_lambda

  actual = apply(dex, params, x, lambda_init)

  projections = []
  for head in range(num_heads):
    head_lambda = lambda_init + learned_lambda[head]
    change = np.eye(value_dim) - head_lambda * params["dex_matrix"]
    projections.append(change @ params["out"][head])
  plain_params = {
    "query": params["query"],
    "key": params["key"],
    "value": params["value"],
    "out": np.stack(projections).astype(np.float32),
  }
  expected = apply(Attention(**sizes), plain_params, x)
  assert_close_in_norm(actual, expected, 2e-6)


def test_dex_learns_its_matrix_before_its_lambda():
  """The output of a head is O − λ O W, and the matrix W starts at 0.

  So the first gradient of λ is 0. The first gradient of W is not.
  """
  x = normal(2, 9, 16)
  lambda_init = 0.7
  dex = ATTENTION["dex"](num_heads=4, num_kv_heads=2, head_dim=6, value_dim=5)
  params = jax.jit(dex.init)(jax.random.key(0), x, lambda_init)["params"]
  params = jax.device_get(params)

  def loss(params):
    return jnp.sum(dex.apply({"params": params}, x, lambda_init) ** 2)

  gradient = jax.device_get(jax.jit(jax.grad(loss))(params))

  assert not params["dex_matrix"].any()
  assert gradient["dex_matrix"].all()
  # λ is λ_init plus this parameter.
  assert not params["dex_lambda"].any()
  assert not gradient["dex_lambda"].any()


def test_a_gate_scales_each_number_of_the_heads_outputs():
  """The gate is the sigmoid of a product of the layer's input."""
  num_heads = 4
  head_dim = 4
  embed_dim = num_heads * head_dim
  x = normal(1, 6, embed_dim)
  gated = ATTENTION["gated"](num_heads=num_heads, head_dim=head_dim)
  plain = ATTENTION["softmax"](num_heads=num_heads, head_dim=head_dim)
  params = random_parameters(gated, x)
  # With the identity as projection, a layer returns the outputs of its heads.
  identity = np.eye(embed_dim, dtype=np.float32)
  params["out"] = identity.reshape(num_heads, head_dim, embed_dim)
  plain_params = dict(params)
  gate_matrix = plain_params.pop("head_gate").reshape(embed_dim, embed_dim)

  actual = apply(gated, params, x)

  gates = 1 / (1 + np.exp(-x @ gate_matrix))
  expected = gates * apply(plain, plain_params, x)
  chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


# The norm of the heads.


@pytest.mark.parametrize("layer_class", [Attention, DiffAttention])
def test_head_norm_is_an_option_of_every_layer(layer_class):
  """The paper's ablations have a Transformer with it, and DIFF without it."""
  x = normal(1, 8, 16)
  normed = layer_class(num_heads=2, head_dim=4, head_norm=True)
  unnormed = layer_class(num_heads=2, head_dim=4, head_norm=False)

  params = random_parameters(normed, x, lambda_init=0.5)
  params_without_gain = random_parameters(unnormed, x, lambda_init=0.5)

  assert "head_gain" in params
  assert "head_gain" not in params_without_gain
  output = apply(normed, params, x, lambda_init=0.5)
  output_without_norm = apply(unnormed, params_without_gain, x, lambda_init=0.5)
  assert not np.allclose(output, output_without_norm)


def test_head_norm_has_the_epsilon_of_the_model():
  """The norm divides by √(mean square + ε), which is √ε for a very large ε.

  So an ε that is four times as large halves the output.
  """
  epsilon = 1e6
  x = normal(1, 8, 16)
  layer = DiffAttention(num_heads=2, head_dim=4, norm_eps=epsilon)
  layer_with_larger_epsilon = layer.clone(norm_eps=4 * epsilon)
  params = random_parameters(layer, x, lambda_init=0.5)

  output = apply(layer, params, x, lambda_init=0.5)
  halved = apply(layer_with_larger_epsilon, params, x, lambda_init=0.5)

  assert_close_in_norm(output, 2 * halved, 1e-5)


# Positions.


def capture(
  layer: nn.Module, params: Any, x: np.ndarray, projection: str
) -> np.ndarray:
  """Returns the queries or the keys that a layer records."""
  apply_layer = functools.partial(layer.apply, mutable=["intermediates"])
  _, variables = jax.jit(apply_layer)({"params": params}, x, 0.3)
  (captured,) = variables["intermediates"][projection]
  return np.asarray(captured)


@pytest.mark.parametrize("projection", ["query", "key"])
def test_captured_queries_and_keys_are_rotated(projection):
  x = normal(1, 6, 16)
  layer = DiffAttention(num_heads=2, head_dim=4)
  params = random_parameters(layer, x, lambda_init=0.2)

  captured = capture(layer, params, x, projection)

  unrotated = np.tensordot(x, params[projection], axes=1)
  positions = np.arange(6)[None]
  rotated = jax.jit(rope)(unrotated, positions)
  chex.assert_trees_all_close(captured, rotated, rtol=0, atol=1e-6)
  assert not np.allclose(captured, unrotated)


@pytest.mark.parametrize("projection", ["query", "key"])
def test_rope_dim_rotates_only_the_last_numbers_of_a_head(projection):
  """With rope_dim = 4 and head_dim = 8, these are the second half.

  Multi-head latent attention rotates a part of its queries and keys.
  """
  x = normal(1, 6, 16)
  layer = DiffAttention(num_heads=2, head_dim=8, rope_dim=4)
  params = random_parameters(layer, x, lambda_init=0.3)

  captured = capture(layer, params, x, projection)

  first_half, second_half = np.split(captured, 2, axis=-1)
  unrotated = jax.jit(jnp.tensordot, static_argnames="axes")(
    x, params[projection], axes=1
  )
  expected_first_half, unrotated_second_half = np.split(
    np.asarray(unrotated), 2, axis=-1
  )
  positions = np.arange(6)[None]
  expected_second_half = jax.jit(rope)(unrotated_second_half, positions)
  chex.assert_trees_all_equal(first_half, expected_first_half)
  chex.assert_trees_all_close(
    second_half, expected_second_half, rtol=0, atol=1e-6
  )


def test_values_can_have_their_own_width():
  """By default, the values of a DIFF head are twice as wide as its keys."""
  x = np.zeros((1, 6, 16), np.float32)
  layer = DiffAttention(num_heads=2, head_dim=8, value_dim=5)

  params = random_parameters(layer, x, lambda_init=0.3)

  # 16 inputs, and 2 heads of width 5.
  chex.assert_shape(params["value"], (16, 2, 5))
  chex.assert_shape(params["out"], (2, 5, 16))
  chex.assert_shape(params["head_gain"], (5,))


@pytest.mark.parametrize("name", ATTENTION)
def test_without_rope_and_mask_the_order_of_tokens_does_not_matter(name):
  token_order = np.array([3, 8, 0, 5, 1, 7, 2, 6, 4])
  x = normal(1, 9, 16)
  layer = ATTENTION[name](num_heads=2, head_dim=4, rope=False, causal=False)
  params = random_parameters(layer, x, lambda_init=0.3)
  apply_layer = jax.jit(functools.partial(layer.apply, lambda_init=0.3))

  actual = apply_layer({"params": params}, x[:, token_order])

  output = np.asarray(apply_layer({"params": params}, x))
  expected = output[:, token_order]
  chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)


@pytest.mark.parametrize("name", ATTENTION)
def test_rope_makes_the_order_of_tokens_matter(name):
  token_order = np.array([3, 8, 0, 5, 1, 7, 2, 6, 4])
  x = normal(1, 9, 16)
  layer = ATTENTION[name](num_heads=2, head_dim=4, causal=False)
  params = random_parameters(layer, x, lambda_init=0.3)
  apply_layer = jax.jit(functools.partial(layer.apply, lambda_init=0.3))

  output = apply_layer({"params": params}, x[:, token_order])

  output_in_given_order = np.asarray(apply_layer({"params": params}, x))
  reordered = output_in_given_order[:, token_order]
  assert not np.allclose(output, reordered, atol=1e-3)


# Shared noise maps.


@pytest.mark.parametrize(
  ("name", "num_kv_heads"), [("diff", 2), ("diff_v2", 1)]
)
def test_shared_noise_maps_equal_repeated_ones(name, num_kv_heads):
  """Grouped differential attention (arXiv:2510.06949).

  Three signal maps share a noise map. A layer with repeated noise rows of W_q
  has the same output. The gradient of a shared row is the sum of the gradients
  of its copies.
  """
  x = normal(2, 9, 16)
  shared = ATTENTION[name](
    num_heads=6, num_noise_heads=2, num_kv_heads=num_kv_heads, head_dim=4
  )
  single = shared.clone(num_noise_heads=None)
  params = random_parameters(shared, x, 0.3)
  query = params["query"]
  # 16 inputs, 2 groups, 3 signal maps and a noise map each, and head_dim = 4.
  chex.assert_shape(query, (16, 2, 3 + 1, 4))
  chex.assert_shape(params["out"], (6, None, 16))
  signal = query[:, :, :3]
  noise = np.repeat(query[:, :, 3:], 3, axis=2)
  repeated_query = np.stack([signal, noise], axis=3).reshape(16, 6, 2, 4)

  def output_and_gradient(layer, query):
    def loss(query):
      y = layer.apply({"params": params | {"query": query}}, x, 0.3)
      return jnp.sum(jnp.sin(y)), y

    gradient, y = jax.jit(jax.grad(loss, has_aux=True))(query)
    return y, np.asarray(gradient)

  y, gradient = output_and_gradient(shared, query)

  expected_y, repeated_gradient = output_and_gradient(single, repeated_query)
  repeated_gradient = repeated_gradient.reshape(16, 2, 3, 2, 4)
  signal_gradient = repeated_gradient[:, :, :, 0]
  noise_gradient = repeated_gradient[:, :, :, 1].sum(axis=2)
  chex.assert_trees_all_close(y, expected_y, rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_close(
    (gradient[:, :, :3], gradient[:, :, 3]),
    (signal_gradient, noise_gradient),
    rtol=1e-4,
    atol=1e-6,
  )


# Masks.


class MaskedAttention:
  """Attention with a given mask. It ignores the mask of the layer.

  Variants that are computed from their weights call `by_definition`.

  Attributes:
    visible: Bool[T, S], whether a query sees a key.
  """

  def __init__(self, visible: np.ndarray):
    self.visible = visible

  def __call__(self, q, k, v, lam, **_):
    return dense_attention(self.visible, q, k, v, lam)

  def by_definition(self, weights_fn, supports):
    def attention_fn(q, k, v, lam, **_):
      mask = jnp.broadcast_to(self.visible, (len(q), *self.visible.shape))
      return apply_weights(weights_fn(q, k, lam, mask), v)

    return attention_fn


def dense_attention(visible, q, k, v, lam):
  """Returns attention with a mask [T, S], computed from its weights."""
  heads_per_key = q.shape[2] // k.shape[2]
  k = jnp.repeat(k, heads_per_key, axis=2)
  v = jnp.repeat(v, heads_per_key, axis=2)
  # Some variants have two query maps for one key map.
  k = jnp.broadcast_to(k, (*k.shape[:3], *q.shape[3:]))
  scores = jnp.einsum("BTHGD,BSHGD->BHGTS", q, k) / np.sqrt(q.shape[-1])
  maps = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
  weights = maps[:, :, 0]
  if lam is not None:
    lam = jnp.moveaxis(jnp.broadcast_to(lam, q.shape[:3]), 1, 2)
    weights -= lam[..., None] * maps[:, :, 1]
  return jnp.einsum("BHTS,BSHV->BTHV", weights, v)


# The test of the order of tokens covers layers without any mask.
@pytest.mark.parametrize(
  ("name", "causal"),
  [
    *[(name, True) for name in supporting("windows")],
    ("diff", False),
    *full((name, False) for name in supporting("windows") if name != "diff"),
  ],
)
def test_window_and_causality_define_the_mask(name, causal):
  """A window of 3 shows keys that are at most 2 tokens away."""
  x = normal(2, 9, 16)
  layer = ATTENTION[name](
    num_heads=4, num_kv_heads=2, head_dim=4, causal=causal, window=3
  )
  params = random_parameters(layer, x, lambda_init=0.3)
  query_index, key_index = np.indices((9, 9))
  visible = abs(query_index - key_index) < 3
  if causal:
    visible &= key_index <= query_index

  actual = apply(layer, params, x, lambda_init=0.3)

  # This layer ignores its own mask, and uses `visible`.
  layer_with_given_mask = layer.clone(attention_fn=MaskedAttention(visible))
  expected = apply(layer_with_given_mask, params, x, lambda_init=0.3)
  chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


# Biases of the projections.


def with_random_biases(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the parameters with normally distributed biases."""
  rng = np.random.default_rng(2)
  biases = {}
  for name in BIASES:
    shape = params[name].shape
    biases[name] = rng.standard_normal(shape, np.float32)
  return params | biases


def with_biases_as_the_last_row(
  params: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """Returns parameters for one more input, whose weights are the biases."""
  widened = {}
  for name, leaf in params.items():
    if name in BIASES:
      continue
    if f"{name}_bias" in BIASES and name != "out":
      leaf = np.concatenate([leaf, params[f"{name}_bias"][None]])
    elif name == "out":
      leaf = np.pad(leaf, [(0, 0), (0, 0), (0, 1)])
    elif leaf.shape[0] == 16:
      # Other matrices multiply the layer's input too.
      leaf = np.pad(leaf, [(0, 1)] + [(0, 0)] * (leaf.ndim - 1))
    widened[name] = leaf
  return widened


@pytest.mark.parametrize("name", ATTENTION)
def test_projection_biases_equal_the_weights_of_an_input_of_ones(name):
  """x W + b is the product of [x, 1] and a matrix with the rows W and b.

  So a layer with biases equals a layer without biases that has one more input.
  """
  embed_dim = 16
  x = normal(1, 9, embed_dim)
  layer = ATTENTION[name](
    num_heads=4, num_kv_heads=2, head_dim=4, projection_biases=True
  )
  params = with_random_biases(random_parameters(layer, x, lambda_init=0.3))

  actual = apply(layer, params, x, lambda_init=0.3)

  layer_without_biases = layer.clone(projection_biases=False)
  wider_params = with_biases_as_the_last_row(params)
  ones = np.ones((1, 9, 1), np.float32)
  wider_x = np.concatenate([x, ones], axis=-1)
  wider_output = apply(layer_without_biases, wider_params, wider_x, 0.3)
  expected = wider_output[..., :embed_dim] + params["out_bias"]
  chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)


# Layers that get their keys and values from outside.


class StoringAttention:
  """`diff_attention` that stores the keys and values of its last call."""

  def __init__(self):
    self.keys_values = ()

  def __call__(self, q, k, v, lam, **mask):
    self.keys_values = (k, v)
    return diff_attention(q, k, v, lam, **mask)

  def by_definition(self, weights_fn, supports):
    def attention_fn(q, k, v, lam, **mask):
      self.keys_values = (k, v)
      return attention_from_weights(weights_fn, q, k, v, lam, **mask)

    return attention_fn


class CrossAttention(NamedTuple):
  """A layer, its input and output, and keys and values that it computed."""

  layer: nn.Module
  x: np.ndarray
  # Returns the layer's output for given keys and values.
  attend: Callable[[Any], jax.Array]
  output: np.ndarray
  keys_values: tuple[np.ndarray, np.ndarray]
  # Keys and values of another input.
  other_keys_values: tuple[np.ndarray, np.ndarray]


# Variants with windows, so that it is known which keys a query sees.
@pytest.fixture(scope="module", params=supporting("windows", "cached_decoding"))
def cross(request):
  """A layer that can attend to its own keys, or to keys of another input."""
  x, other_x = normal(2, 2, 9, 16)
  layer = ATTENTION[request.param](
    num_heads=4, num_kv_heads=2, head_dim=4, projection_biases=True, window=4
  )
  params = with_random_biases(random_parameters(layer, x, lambda_init=0.3))

  @jax.jit
  def output_and_keys_values(x):
    attention = StoringAttention()
    storing_layer = layer.clone(attention_fn=attention)
    output = storing_layer.apply({"params": params}, x, 0.3)
    return output, attention.keys_values

  output, keys_values = jax.device_get(output_and_keys_values(x))
  _, other_keys_values = jax.device_get(output_and_keys_values(other_x))
  params_without_keys = dict(params)
  for name in ("key", "key_bias", "value", "value_bias"):
    del params_without_keys[name]

  @jax.jit
  def attend(keys_values):
    variables = {"params": params_without_keys}
    return layer.apply(variables, x, 0.3, keys_values=keys_values)

  return CrossAttention(
    layer=layer,
    x=x,
    attend=attend,
    output=output,
    keys_values=keys_values,
    other_keys_values=other_keys_values,
  )


def test_a_layer_with_given_keys_and_values_has_no_matrices_for_them(cross):
  layer = cross.layer
  key = jax.random.key(1)
  init_with_given_keys = functools.partial(
    layer.init, keys_values=cross.keys_values
  )

  usual = jax.eval_shape(layer.init, key, cross.x, 0.3)
  variables = jax.eval_shape(init_with_given_keys, key, cross.x, 0.3)

  omitted = usual["params"].keys() - variables["params"].keys()
  assert omitted == {"key", "key_bias", "value", "value_bias"}


def test_a_layer_uses_given_keys_like_its_own(cross):
  """The layer has computed these keys and values for `output`."""
  actual = cross.attend(cross.keys_values)

  chex.assert_trees_all_close(actual, cross.output, rtol=1e-5, atol=1e-6)


def test_a_query_sees_the_given_keys_and_values_in_its_window(cross):
  """Query 6 has a window of four tokens: 3, 4, 5 and 6 of its own row.

  The gradient of its output is 0 for all keys and values that it does not see.
  """

  def output_of_query_6_in_row_0(keys_values):
    output = cross.attend(keys_values)
    return output[0, 6].sum()

  gradient_function = jax.jit(jax.grad(output_of_query_6_in_row_0))
  gradients = jax.device_get(gradient_function(cross.other_keys_values))

  for gradient in gradients:
    # Two rows of nine tokens. The heads and their numbers are summed.
    gradient_of_tokens = gradient.reshape(2, 9, -1)
    influence = np.abs(gradient_of_tokens).sum(axis=-1)
    assert np.flatnonzero(influence[0]).tolist() == [3, 4, 5, 6]
    assert not influence[1].any()


def test_keys_and_values_of_another_input_change_the_output(cross):
  output = cross.attend(cross.other_keys_values)

  assert not np.allclose(output, cross.output, atol=1e-2)


def test_given_values_of_a_wrong_shape_are_rejected(cross):
  keys, values = cross.keys_values
  # One of two heads is missing.
  values_of_one_head = values[:, :, :1]
  message = (
    r"the values in keys_values must be \[B, T, K, V\] = \[B, T, 2, \d\];"
    r" got shape \(2, 9, 1, "
  )
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(cross.attend, (keys, values_of_one_head))
