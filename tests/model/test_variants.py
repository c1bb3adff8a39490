"""What makes a class an attention variant: its weights and its declarations."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from tests.harness.parameters import parameters as random_parameters


def subclass(
  parent: type[Attention], name: str = "Own", **attributes: Any
) -> type[Attention]:
  """Returns a subclass with these attributes."""
  return type(name, (parent,), attributes)


def init(layer: Attention, embed_dim: int = 16) -> dict[str, Any]:
  """Returns the initial parameters of a layer."""
  x = jnp.ones((1, 3, embed_dim))
  return jax.jit(layer.init)(jax.random.key(0), x)["params"]


# The fused operation.


def output_and_gradients(
  layer: Attention, params: dict[str, Any], x: jax.Array
) -> tuple[jax.Array, Any]:
  """Returns a layer's output, and its gradients for a sum of squares."""
  # Each row has two segments. 0 is padding.
  segment_ids = jnp.array([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2])

  def loss(params, x):
    y = layer.apply({"params": params}, x, 0.3, segment_ids=segment_ids)
    return jnp.sum(y**2), y

  gradient_function = jax.grad(loss, argnums=(0, 1), has_aux=True)
  gradients, y = jax.jit(gradient_function)(params, x)
  return y, gradients


def fused_cases() -> list[Any]:
  """Returns a variant, fields of its layer, a dtype and a tolerance for each.

  float64 shows every difference. The case without options is in float32.
  """
  layers = {
    "window": dict(window=3),
    "not causal": dict(causal=False, window=3),
    "shared noise": dict(num_noise_heads=2),
  }
  cases = []
  for name, layer_class in ATTENTION.items():
    if not layer_class.fused:
      continue
    for title, fields in layers.items():
      if "num_noise_heads" in fields and not layer_class.has_noise_map:
        continue
      case = pytest.param(name, fields, "float64", 1e-12, id=f"{name}, {title}")
      cases.append(case)
    case = pytest.param(name, {}, "float32", 1e-5, id=f"{name}, float32")
    cases.append(case)
  return cases


@pytest.mark.parametrize(
  ("name", "fields", "dtype", "tolerance"), fused_cases()
)
def test_the_fused_operation_computes_the_weights_times_the_values(
  name, fields, dtype, tolerance
):
  """A fused operation does not store the weights of attention."""
  layer_class = ATTENTION[name]
  # This class computes its weights, and multiplies them with the values.
  unfused_class = type("Unfused", (layer_class,), {"fused": False})
  fields = dict(num_heads=4, num_kv_heads=2, head_dim=4, **fields)
  x = np.random.default_rng(0).normal(size=(2, 9, 16))
  params = random_parameters(layer_class(**fields), x, lambda_init=0.3)

  with jax.enable_x64(True):
    x = jnp.asarray(x, dtype)
    params = optax.tree.cast(params, dtype)
    fused_layer = layer_class(**fields, dtype=dtype)
    unfused_layer = unfused_class(**fields, dtype=dtype)
    output, gradients = output_and_gradients(fused_layer, params, x)
    expected = output_and_gradients(unfused_layer, params, x)

  assert output.dtype == dtype
  arrays = jax.tree.leaves((output, gradients))
  expected_arrays = jax.tree.leaves(expected)
  for actual_array, expected_array in zip(arrays, expected_arrays, strict=True):
    error = np.linalg.norm(actual_array - expected_array)
    assert error <= tolerance * np.linalg.norm(expected_array)


# What a subclass inherits.


@pytest.mark.parametrize("method", ["weights", "maps", "logits"])
def test_a_class_with_its_own_weights_is_not_fused(method):
  """A fused operation would compute the weights of the parent class."""
  own_class = subclass(DiffAttention, **{method: lambda self: None})

  assert DiffAttention.fused
  assert not own_class.fused


@pytest.mark.parametrize("method", ["weights", "maps", "logits"])
def test_a_class_with_its_own_weights_can_declare_that_it_is_fused(method):
  own_class = subclass(DiffAttention, fused=True, **{method: lambda self: None})

  assert own_class.fused


COMPUTATIONS = [
  "weights",
  "maps",
  "logits",
  "attend",
  "compute_heads",
  "compute_lambda",
  "scale_heads",
  "project",
  "rotate",
]


@pytest.mark.parametrize("method", COMPUTATIONS)
def test_a_class_with_its_own_computation_inherits_no_features(method):
  """Features, such as windows, work only if the computation allows them."""
  own_class = subclass(DiffAttention, **{method: lambda self: None})

  assert DiffAttention.supports == FEATURES
  assert own_class.supports == set()


@pytest.mark.parametrize("method", COMPUTATIONS)
def test_a_class_with_its_own_computation_can_declare_features(method):
  own_class = subclass(
    DiffAttention, supports={"windows"}, **{method: lambda self: None}
  )

  assert own_class.supports == {"windows"}


def test_a_class_with_another_default_inherits_features_but_no_names():
  class Same(DiffAttention):
    """Has another default, and the computation of DIFF."""

    head_norm: bool = False

  assert Same.fused
  assert Same.supports == FEATURES
  assert Same.style is None
  assert Same.model_name is None


def test_the_weights_of_a_mixin_count_as_the_class_own():
  """A class with weights of its own is not fused and inherits no features."""

  class Mixin:
    def weights(self, q, k, lam, mask):
      return jnp.zeros((q.shape[0], self.num_heads, *mask.shape[1:]))

  class Own(Mixin, Attention):
    pass

  assert not Own.fused
  assert Own.supports == set()


def test_transforms_of_flax_keep_the_declarations():
  """Flax makes a subclass with methods of its own."""
  lifted = nn.remat(DiffAttention)

  assert lifted.fused
  assert lifted.supports == FEATURES


def test_an_unknown_feature_is_rejected():
  """The feature has the name "windows", with an s."""
  with pytest.raises(ValueError, match="Own.supports has 'window': must be"):
    subclass(Attention, supports={"window"})


# Registration.


@pytest.mark.parametrize(
  ("name", "declarations", "message"),
  [
    pytest.param(
      "Own",
      {},
      "name = 'Own': must begin with a small letter",
      id="capital letter",
    ),
    pytest.param(
      "own-map",
      {},
      "name = 'own-map': must begin with a small letter",
      id="hyphen",
    ),
    pytest.param(
      "diff",
      {},
      r"name = 'diff': .*\.DiffAttention has this name",
      id="name in use",
    ),
    pytest.param(
      "own",
      {"extra_parameters": {"lambda_hat": Parameter("LH")}},
      "parameter 'lambda_hat' is .*'LEH'.* already: rename it",
      id="parameter in use",
    ),
    pytest.param(
      "own",
      {"extra_parameters": {"own_bias": Parameter("LR")}},
      "parameter 'own_bias' has the axis 'R': it may have the axes",
      id="unknown axis",
    ),
    pytest.param(
      "own",
      {"extra_parameters": {"own_bias": Parameter("H")}},
      "parameter 'own_bias' has the axes 'H': the first one must be L",
      id="no axis of layers",
    ),
    pytest.param(
      "own",
      {"extra_parameters": {"own_bias": Parameter("LH", inputs="E")}},
      "parameter 'own_bias': inputs = 'E' must be axes of 'LH'",
      id="inputs are no axes",
    ),
    pytest.param(
      "own",
      {"extra_axes": {"H": 3}},
      "extra_axes has 'H': must be a capital letter that is not in use",
      id="axis in use",
    ),
  ],
)
def test_a_rejected_registration_changes_nothing(
  name, declarations, message, restored_registry
):
  """The registry and the table of parameters stay as they were."""
  own_class = subclass(Attention, **declarations)
  classes = dict(ATTENTION)
  table = dict(PARAMETERS)

  with pytest.raises(ValueError, match=message):
    register(name)(own_class)

  assert classes == ATTENTION
  assert table == PARAMETERS


def register_with_bias(bias: float) -> type[Attention]:
  """Registers a class as a cell of a notebook does, each time it is run."""

  @register("own")
  class Own(Attention):
    extra_parameters = {"own_bias": Parameter("LHR")}
    extra_axes = {"R": 3}

    def scale_heads(self, heads, x, lambda_init):
      own_bias = self.parameter("own_bias", nn.initializers.constant(bias))
      return heads + own_bias.sum(axis=-1)[:, None]

  return Own


def test_a_class_that_is_defined_again_replaces_the_old_one(restored_registry):
  register_with_bias(1.0)
  own_class = register_with_bias(2.0)

  layer_class = attention_class(ModelConfig(attention="own", head_norm=False))

  assert layer_class is own_class
  params = init(layer_class(num_heads=2, head_dim=4))
  chex.assert_trees_all_equal(params["own_bias"], jnp.full((2, 3), 2.0))


def register_with_parameters(
  **extra_parameters: Parameter,
) -> type[Attention]:
  """Registers a class "own" that declares these parameters."""
  own_class = subclass(Attention, extra_parameters=extra_parameters)
  return register("own")(own_class)


def test_a_class_that_is_defined_again_can_have_other_parameters(
  restored_registry,
):
  register_with_parameters(own_bias=Parameter("LH"), own_gain=Parameter("LV"))

  changed = register_with_parameters(own_bias=Parameter("LHV"))

  assert ATTENTION["own"] is changed
  assert PARAMETERS["own_bias"] == Parameter("LHV")
  assert "own_gain" not in PARAMETERS


def test_a_rejected_new_definition_keeps_the_old_one(restored_registry):
  old = register_with_parameters(own_bias=Parameter("LHV"))

  with pytest.raises(ValueError, match="'query' is .* already"):
    register_with_parameters(query=Parameter("LH"))

  assert ATTENTION["own"] is old
  assert PARAMETERS["own_bias"] == Parameter("LHV")


def test_other_processes_cannot_import_a_class_of_a_notebook(restored_registry):
  # Cells of a notebook define classes in the module __main__.
  own_class = subclass(Attention, __module__="__main__")
  register("own")(own_class)

  with pytest.raises(UserError, match="'own' is defined in __main__"):
    imported_modules()


# Results and parameters of a class.


def test_weights_of_a_wrong_shape_are_rejected():
  class Own(Attention):
    def weights(self, q, k, lam, mask):
      # [B, T, S, H]: the axis of heads is the last one.
      return jnp.zeros((*mask.shape, self.num_heads))

  layer = Own(num_heads=2, head_dim=4)
  with pytest.raises(ValueError, match=r"weights must be \[B, H, T, S\]"):
    init(layer)


def test_lambda_of_a_wrong_shape_is_rejected():
  class Own(Attention):
    def weights(self, q, k, lam, mask):
      return jnp.zeros((q.shape[0], self.num_heads, *mask.shape[1:]))

    def compute_lambda(self, x, lambda_init):
      # λ may be one number, or have one for each head, or for each token too.
      return jnp.zeros((self.num_heads, 3))

  layer = Own(num_heads=2, head_dim=4)
  with pytest.raises(ValueError, match="compute_lambda must return a scalar"):
    init(layer)


def test_a_matrix_starts_with_the_standard_deviation_of_its_inputs(
  restored_registry,
):
  """It is 1/√inputs."""

  @register("own")
  class Own(Attention):
    # A matrix [E, H, R] in each of L layers, with R = 40.
    extra_parameters = {"own_gate": Parameter("LEHR", inputs="E")}
    extra_axes = {"R": 40}

    def scale_heads(self, heads, x, lambda_init):
      gate = jnp.einsum("BTE,EHR->BTH", x, self.parameter("own_gate"))
      return heads * gate[..., None]

  params = init(Own(num_heads=4, head_dim=8), embed_dim=64)

  chex.assert_shape(params["own_gate"], (64, 4, 40))
  deviation = float(params["own_gate"].std())
  assert deviation == pytest.approx(1 / np.sqrt(64), rel=0.05)


class Biased(Attention):
  """Declares a vector, and asks for the parameter of a given name."""

  extra_parameters = {"own_bias": Parameter("LH")}
  parameter_name: str = "own_bias"
  has_initializer: bool = True

  def scale_heads(self, heads, x, lambda_init):
    initializer = None
    if self.has_initializer:
      initializer = nn.initializers.zeros
    self.parameter(self.parameter_name, initializer)
    return heads


def init_biased(**fields: Any) -> Any:
  """Returns the parameters of a layer that declares the vector own_bias."""
  return init(Biased(num_heads=2, head_dim=4, **fields))


def test_a_vector_has_the_shape_of_its_axes():
  """The layer has two heads, and the vector has the axis of heads."""
  chex.assert_shape(init_biased()["own_bias"], (2,))


def test_a_parameter_that_is_not_declared_is_rejected():
  message = "Biased has no parameter 'own_gain': add"
  with pytest.raises(ValueError, match=message):
    init_biased(parameter_name="own_gain")


def test_a_vector_without_an_initializer_is_rejected():
  with pytest.raises(ValueError, match="'own_bias' is no matrix, so it needs"):
    init_biased(has_initializer=False)


def test_parameters_without_a_declared_one_are_rejected():
  params = init_biased()
  del params["own_bias"]
  layer = Biased(num_heads=2, head_dim=4)
  message = "the parameters lack 'own_bias' of Biased"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(layer.apply, {"params": params}, jnp.ones((1, 3, 16)))
