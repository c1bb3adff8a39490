"""What makes a class an attention variant: its weights and its declarations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.model.attention import (
  ATTENTION,
  FEATURES,
  Attention,
  DiffAttention,
  attention_class,
  register,
)
from diffjax.model.registry import imported_modules
from diffjax.parameters import PARAMETERS, Parameter
from tests.harness.parameters import parameters

LAMBDA_INIT = 0.3
# Fields of layers. All rows hold several documents.
LAYERS = {
  "documents": dict(),
  "window": dict(window=3),
  "not causal": dict(causal=False, window=3),
  "shared noise": dict(num_noise_heads=2),
}


def computed_from_weights(layer_class):
  """Returns a subclass that multiplies its weights with the values."""

  class FromWeights(layer_class):
    fused = False

  return FromWeights


def output_and_gradients(layer, params, x):
  """Returns a layer's output, and its gradients for a sum of squares."""
  segment_ids = jnp.array([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2])

  @jax.jit
  def run(params, x):
    def loss(params, x):
      y = layer.apply(
        {"params": params}, x, LAMBDA_INIT, segment_ids=segment_ids
      )
      return jnp.sum(y**2), y

    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    gradients, y = gradient(params, x)
    return y, gradients

  return run(params, x)


def fused_cases():
  """Returns a variant, fields of its layer, a dtype and a tolerance for each.

  float64 shows every difference. One case of each variant is in float32.
  """
  cases = []
  for name, layer_class in ATTENTION.items():
    if not layer_class.fused:
      continue
    for title, fields in LAYERS.items():
      if "num_noise_heads" in fields and not layer_class.has_noise_map:
        continue
      case = pytest.param(name, fields, "float64", 1e-12, id=f"{name}, {title}")
      cases.append(case)
    case = pytest.param(name, {}, "float32", 1e-5, id=f"{name}, float32")
    cases.append(case)
  return cases


@pytest.mark.parametrize("name, fields, dtype, tolerance", fused_cases())
def test_the_fused_operation_computes_the_weights(
  name, fields, dtype, tolerance
):
  """The output and all gradients are those of the weights times the values."""
  layer_class = ATTENTION[name]
  fields = dict(num_heads=4, num_kv_heads=2, head_dim=4, dtype=dtype, **fields)
  x = np.random.default_rng(0).normal(size=(2, 9, 16))
  layer = layer_class(**fields)
  params = parameters(layer.clone(dtype="float32"), x, LAMBDA_INIT)

  with jax.enable_x64(True):
    x = jnp.asarray(x, dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    got = output_and_gradients(layer, params, x)
    defined = computed_from_weights(layer_class)(**fields)
    want = output_and_gradients(defined, params, x)
  output, _ = got
  assert output.dtype == dtype
  leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  for got_leaf, want_leaf in leaves:
    difference = np.linalg.norm(got_leaf - want_leaf)
    assert difference <= tolerance * np.linalg.norm(want_leaf)


@pytest.mark.parametrize("method", ["weights", "maps", "logits"])
def test_a_class_with_its_own_weights_is_not_fused(method):
  own = type("Own", (DiffAttention,), {method: lambda self: None})
  assert DiffAttention.fused and not own.fused
  own = type(
    "Own", (DiffAttention,), {method: lambda self: None, "fused": True}
  )
  assert own.fused


@pytest.mark.parametrize(
  "method",
  [
    "weights",
    "maps",
    "logits",
    "attend",
    "compute_heads",
    "compute_lambda",
    "scale_heads",
    "project",
    "rotate",
  ],
)
def test_a_class_with_its_own_computation_declares_what_it_supports(method):
  own = type("Own", (DiffAttention,), {method: lambda self: None})
  assert DiffAttention.supports == FEATURES and own.supports == set()
  declared = {method: lambda self: None, "supports": {"windows"}}
  assert type("Own", (DiffAttention,), declared).supports == {"windows"}


def test_a_class_that_computes_the_same_inherits():
  class Same(DiffAttention):
    """Only its default differs."""

    head_norm: bool = False

  assert Same.fused and Same.supports == FEATURES
  assert Same.style is None and Same.model_name is None


def test_weights_of_a_mixin_are_the_classes_own():
  class Mixin:
    def weights(self, q, k, lam, mask):
      return jnp.zeros((q.shape[0], self.num_heads, *mask.shape[1:]))

  class Own(Mixin, Attention):
    pass

  assert not Own.fused and Own.supports == set()


def test_wrappers_of_flax_change_no_declaration():
  lifted = nn.remat(DiffAttention)
  assert lifted.fused and lifted.supports == FEATURES


def test_an_unknown_feature_is_refused():
  with pytest.raises(ValueError, match="Own.supports has 'window': must be"):
    type("Own", (Attention,), {"supports": {"window"}})


@pytest.mark.parametrize(
  "name, declarations, message",
  [
    ("Own", {}, "name = 'Own': must begin with a small letter"),
    ("own-map", {}, "name = 'own-map': must begin with a small letter"),
    ("diff", {}, r"name = 'diff': .*\.DiffAttention has this name"),
    (
      "own",
      {"extra_parameters": {"lambda_hat": Parameter("LH")}},
      "parameter 'lambda_hat' is .*'LEH'.* already: rename it",
    ),
    (
      "own",
      {"extra_parameters": {"own_bias": Parameter("LR")}},
      "parameter 'own_bias' has the axis 'R': it may have the axes",
    ),
    (
      "own",
      {"extra_parameters": {"own_bias": Parameter("H")}},
      "parameter 'own_bias' has the axes 'H': the first one must be L",
    ),
    (
      "own",
      {"extra_parameters": {"own_bias": Parameter("LH", inputs="E")}},
      "parameter 'own_bias': inputs = 'E' must be axes of 'LH'",
    ),
    (
      "own",
      {"extra_axes": {"H": 3}},
      "extra_axes has 'H': must be a capital letter that is not in use",
    ),
  ],
)
def test_a_wrong_registration_changes_nothing(
  name, declarations, message, restored_registry
):
  own = type("Own", (Attention,), declarations)
  classes, table = dict(ATTENTION), dict(PARAMETERS)
  with pytest.raises(ValueError, match=message):
    register(name)(own)
  assert classes == ATTENTION and table == PARAMETERS


def define(bias):
  """Returns a class as a cell of a notebook defines it."""

  @register("own")
  class Own(Attention):
    extra_parameters = {"own_bias": Parameter("LHR")}
    extra_axes = {"R": 3}

    def scale_heads(self, heads, x, lambda_init):
      own_bias = self.parameter("own_bias", nn.initializers.constant(bias))
      return heads + own_bias.sum(axis=-1)[:, None]

  return Own


def test_a_class_that_is_defined_again_replaces_the_old_one(restored_registry):
  for bias in (1.0, 2.0):
    own = define(bias)
    config = ModelConfig(attention="own", head_norm=False)
    assert attention_class(config) is own
    layer = attention_class(config)(num_heads=2, head_dim=4)
    params = layer.init(jax.random.key(0), jnp.ones((1, 3, 16)))["params"]
    np.testing.assert_array_equal(params["own_bias"], np.full((2, 3), bias))


def test_a_class_that_is_defined_again_may_have_other_parameters(
  restored_registry,
):
  def define_with(**extra_parameters):
    own = type("Own", (Attention,), {"extra_parameters": extra_parameters})
    return register("own")(own)

  define_with(own_bias=Parameter("LH"), own_gain=Parameter("LV"))
  changed = define_with(own_bias=Parameter("LHV"))
  assert PARAMETERS["own_bias"] == Parameter("LHV")
  assert "own_gain" not in PARAMETERS
  with pytest.raises(ValueError, match="'query' is .* already"):
    define_with(query=Parameter("LH"))
  assert ATTENTION["own"] is changed
  assert PARAMETERS["own_bias"] == Parameter("LHV")


def test_what_a_notebook_defines_is_not_for_another_process(restored_registry):
  own = type("Own", (Attention,), {"__module__": "__main__"})
  register("own")(own)
  with pytest.raises(UserError, match="'own' is defined in __main__"):
    imported_modules()


def test_weights_and_lambda_of_wrong_shapes_are_named():
  class Own(Attention):
    def weights(self, q, k, lam, mask):
      return jnp.zeros((*mask.shape, self.num_heads))

  layer = Own(num_heads=2, head_dim=4)
  with pytest.raises(ValueError, match=r"weights must be \[B, H, T, S\]"):
    layer.init(jax.random.key(0), jnp.ones((1, 3, 16)))

  class WithLambda(Own):
    def compute_lambda(self, x, lambda_init):
      return jnp.zeros((self.num_heads, 3))

  layer = WithLambda(num_heads=2, head_dim=4)
  with pytest.raises(ValueError, match="compute_lambda must return a scalar"):
    layer.init(jax.random.key(0), jnp.ones((1, 3, 16)))


def test_a_parameter_has_the_shape_of_its_axes(restored_registry):
  """A matrix starts from a normal of standard deviation 1/√inputs."""

  @register("own")
  class Own(Attention):
    extra_parameters = {"own_gate": Parameter("LEHR", inputs="E")}
    extra_axes = {"R": 40}

    def scale_heads(self, heads, x, lambda_init):
      gate = jnp.einsum("BTE,EHR->BTH", x, self.parameter("own_gate"))
      return heads * gate[..., None]

  layer = Own(num_heads=4, head_dim=8)
  params = layer.init(jax.random.key(0), jnp.ones((1, 3, 64)))["params"]
  assert params["own_gate"].shape == (64, 4, 40)
  assert float(params["own_gate"].std()) == pytest.approx(1 / 8, rel=0.05)


def call_parameter(name, init=None, params=None):
  """Calls `parameter` in a layer that declares the vector own_bias."""

  class Own(Attention):
    extra_parameters = {"own_bias": Parameter("LH")}

    def scale_heads(self, heads, x, lambda_init):
      self.parameter(name, init)
      return heads

  layer = Own(num_heads=2, head_dim=4)
  x = jnp.ones((1, 3, 16))
  if params is None:
    return layer.init(jax.random.key(0), x)
  return layer.apply({"params": params}, x)


def test_what_parameter_refuses():
  zeros = nn.initializers.zeros
  with pytest.raises(ValueError, match="Own has no parameter 'own_gain': add"):
    call_parameter("own_gain", zeros)
  with pytest.raises(ValueError, match="'own_bias' is no matrix, so it needs"):
    call_parameter("own_bias")
  params = call_parameter("own_bias", zeros)["params"]
  assert params.pop("own_bias").shape == (2,)
  with pytest.raises(ValueError, match="the parameters lack 'own_bias' of Own"):
    call_parameter("own_bias", zeros, params)
