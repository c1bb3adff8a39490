"""What makes a class an attention variant: its weights and its declarations."""

import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.model.attention import (
  ATTENTION,
  FEATURES,
  Attention,
  DiffAttention,
  DiffAttentionV2,
  register,
)
from diffjax.model.registry import imported_modules
from diffjax.parameters import PARAMETERS, Parameter
from tests.harness.parameters import parameters as random_parameters
from tests.harness.tolerances import assert_close_in_norm


def subclass(
  parent: type[Attention], name: str = "Own", **attributes: Any
) -> type[Attention]:
  """Returns a subclass with these attributes."""
  return type(name, (parent,), attributes)


def init(layer: Attention, embed_dim: int = 16) -> dict[str, Any]:
  """Returns the initial parameters of a layer."""
  x = np.ones((1, 3, embed_dim), np.float32)
  params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
  return jax.device_get(params)


# The fused operation.


def output_and_gradients(
  layer: Attention, params: dict[str, Any], x: np.ndarray
) -> tuple[jax.Array, Any]:
  """Returns a layer's output, and its gradients for a sum of squares."""
  # Each row has two segments. 0 is padding.
  segment_ids = np.array([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2])

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
    # The default tier has a window for each variant, and all options for DIFF.
    marks = [] if name == "diff" else [pytest.mark.full]
    for title, fields in layers.items():
      if "num_noise_heads" in fields and not layer_class.has_noise_map:
        continue
      case = pytest.param(
        name,
        fields,
        "float64",
        1e-12,
        id=f"{name}, {title}",
        marks=[] if title == "window" else marks,
      )
      cases.append(case)
    case = pytest.param(
      name, {}, "float32", 1e-5, id=f"{name}, float32", marks=marks
    )
    cases.append(case)
  return cases


@pytest.mark.parametrize(
  ("name", "options", "dtype", "tolerance"), fused_cases()
)
def test_the_fused_operation_computes_the_weights_times_the_values(
  name, options, dtype, tolerance
):
  """A fused operation does not store the weights of attention.

  The reference is a subclass that computes its weights, and multiplies them
  with the values.
  """
  layer_class = ATTENTION[name]

  class UnfusedLayer(layer_class):
    fused = False

  fields = dict(num_heads=4, num_kv_heads=2, head_dim=4, **options)
  float64_x = np.random.default_rng(0).normal(size=(2, 9, 16))
  float32_params = random_parameters(
    layer_class(**fields), float64_x, lambda_init=0.3
  )

  # Without this context, JAX has no float64.
  with jax.enable_x64(True):
    x = float64_x.astype(dtype)
    to_dtype = functools.partial(np.asarray, dtype=dtype)
    params = jax.tree.map(to_dtype, float32_params)
    fused_layer = layer_class(**fields, dtype=dtype)
    unfused_layer = UnfusedLayer(**fields, dtype=dtype)
    actual = output_and_gradients(fused_layer, params, x)
    expected = output_and_gradients(unfused_layer, params, x)

  output, _ = actual
  assert output.dtype == dtype
  assert_close_in_norm(actual, expected, tolerance)


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


def test_a_class_with_the_weights_of_a_mixin_inherits_no_declarations():
  """The fused operation and the features of `Attention` are for its weights."""

  class Mixin:
    def weights(self, q, k, lam, mask):
      raise NotImplementedError

  class Own(Mixin, Attention):
    pass

  assert Attention.fused
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
  """The tables of variants and of parameters stay as they were.

  A parameter has one letter for each axis: L for layers, E for the width of the
  model, H for heads.
  """
  own_class = type("Own", (Attention,), declarations)
  variants_before = dict(ATTENTION)
  parameters_before = dict(PARAMETERS)

  with pytest.raises(ValueError, match=message):
    register(name)(own_class)

  assert variants_before == ATTENTION
  assert parameters_before == PARAMETERS


def run_cell_that_registers_a_class(initial_bias: float) -> type[Attention]:
  """Registers a class as a cell of a notebook does, each time it is run."""

  @register("own")
  class Own(Attention):
    # A matrix [H, R] in each layer, with R = 3.
    extra_parameters = {"own_bias": Parameter("LHR")}
    extra_axes = {"R": 3}

    def scale_heads(self, heads, x, lambda_init):
      self.parameter("own_bias", nn.initializers.constant(initial_bias))
      return heads

  return Own


def test_a_class_that_is_defined_again_replaces_the_old_one(restored_registry):
  run_cell_that_registers_a_class(initial_bias=1.0)
  new_class = run_cell_that_registers_a_class(initial_bias=2.0)

  assert ATTENTION["own"] is new_class
  params = init(ATTENTION["own"](num_heads=2, head_dim=4))
  expected_bias = np.full((2, 3), 2.0, np.float32)
  chex.assert_trees_all_equal(params["own_bias"], expected_bias)


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
  """λ may be one number, one for each head, or one for each token and head."""

  class Own(DiffAttentionV2):
    # The fused operation has a check of its own.
    fused = False

    def compute_lambda(self, x, lambda_init):
      return jnp.zeros((self.num_heads, 3))

  layer = Own(num_heads=2, head_dim=4)
  with pytest.raises(ValueError, match="compute_lambda must return a scalar"):
    init(layer)


def test_a_matrix_starts_with_the_standard_deviation_of_its_inputs(
  restored_registry,
):
  """A matrix with n inputs starts with the standard deviation 1/√n."""
  embed_dim = 64
  num_heads = 4
  # The matrix is large, so its standard deviation is precise.
  num_outputs_of_head = 40

  @register("own")
  class Own(Attention):
    # The axes are layers, inputs, heads and outputs. A layer has no axis L.
    extra_parameters = {"own_gate": Parameter("LEHR", inputs="E")}
    extra_axes = {"R": num_outputs_of_head}

    def scale_heads(self, heads, x, lambda_init):
      self.parameter("own_gate")
      return heads

  params = init(Own(num_heads=num_heads, head_dim=8), embed_dim=embed_dim)

  gate = params["own_gate"]
  chex.assert_shape(gate, (embed_dim, num_heads, num_outputs_of_head))
  assert float(gate.std()) == pytest.approx(1 / np.sqrt(embed_dim), rel=0.05)


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
    jax.eval_shape(layer.apply, {"params": params}, np.ones((1, 3, 16)))
