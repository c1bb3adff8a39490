"""The products of a layer on a mesh: values, gradients and communication."""

import dataclasses
import functools
import importlib.util
import math
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.compiled.estimate import estimate
from diffjax.compiled.hardware import CHIPS, Torus
from diffjax.compiled.plan import call_with_devices
from diffjax.config import (
  REMAT,
  Config,
  DataConfig,
  MeshConfig,
  ModelConfig,
  TrainConfig,
)
from diffjax.parallel.mesh import make_mesh
from diffjax.parallel.product import (
  gather_and_cast,
  gather_parameter,
  product,
  uses_exchange,
)
from diffjax.parallel.rules import parameter_spec
from diffjax.training.program import build, compiler_options
from tests.harness.tolerances import FLOAT32_LAYER

pytestmark = pytest.mark.usefixtures("optimised")

B, T, E, H, D, F = 8, 4, 32, 4, 8, 48
# The axes of a parameter: the inputs that its product sums over, and the
# outputs.
SHAPES = {
  "query": ((E,), (H, 2, D)),
  "value": ((E,), (H, D)),
  "out": ((H, D), (E,)),
  "gate": ((E,), (F,)),
  "down": ((F,), (E,)),
}
ALL_AXES = MeshConfig(data=1, fsdp=2, context=2, tensor=2)


def make_arrays(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns activations x, a parameter w, and a gradient dy of x w."""
  inputs, outputs = SHAPES[name]
  rng = np.random.default_rng(0)
  x = rng.standard_normal((B, T, *inputs), np.float32)
  w = rng.standard_normal((*inputs, *outputs), np.float32)
  dy = rng.standard_normal((B, T, *outputs), np.float32)
  return x, w, dy


def value_and_gradients(name, dtype, x, w, dy):
  """Returns y = x w, computed in a dtype, and the gradients dx and dw."""

  def multiply(x, w):
    return product(x, w, name)

  y, vjp = jax.vjp(multiply, x.astype(dtype), w)
  dx, dw = vjp(dy.astype(dtype))
  return y, dx, dw


def sharded_value_and_gradients(name: str, mesh: Mesh, dtype: Any) -> Any:
  """Returns `value_and_gradients`, jitted with the shardings of training."""
  inputs, outputs = SHAPES[name]
  # The spec of the parameter omits unsplit axes at the end.
  w_axes = parameter_spec(name)[1:]
  num_unsplit = len(inputs) + len(outputs) - len(w_axes)
  # fsdp splits the batch, and tensor splits other axes of activations.
  axes = []
  for axis in (*w_axes, *[None] * num_unsplit):
    axes.append(None if axis == "fsdp" else axis)

  def shard(*spec):
    return NamedSharding(mesh, P(*spec))

  x_sharding = shard(("data", "fsdp"), "context", *axes[: len(inputs)])
  y_sharding = shard(("data", "fsdp"), "context", *axes[len(inputs) :])
  w_sharding = shard(*w_axes)
  return jax.jit(
    functools.partial(value_and_gradients, name, dtype),
    in_shardings=(x_sharding, w_sharding, y_sharding),
    out_shardings=(y_sharding, x_sharding, w_sharding),
  )


def expected_value_and_gradients(name: str) -> tuple[np.ndarray, ...]:
  """Returns y, dx and dw, computed in float64."""
  x, w, dy = (np.float64(array) for array in make_arrays(name))
  inputs, outputs = SHAPES[name]
  output_axes_of_dy = range(2, 2 + len(outputs))
  output_axes_of_w = range(len(inputs), w.ndim)
  y = np.tensordot(x, w, len(inputs))
  dx = np.tensordot(dy, w, (output_axes_of_dy, output_axes_of_w))
  dw = np.tensordot(x, dy, ((0, 1), (0, 1)))
  return y, dx, dw


def as_float64(arrays: Any) -> Any:
  """Returns the arrays of a tree in float64."""
  return jax.tree.map(np.float64, arrays)


# Values and gradients.


@pytest.mark.parametrize("name", SHAPES)
def test_a_product_without_a_mesh_equals_float64(name):
  """The product of activations x with a parameter, and both gradients."""
  run = jax.jit(functools.partial(value_and_gradients, name, jnp.float32))

  actual = run(*make_arrays(name))

  expected = expected_value_and_gradients(name)
  chex.assert_trees_all_close(as_float64(actual), expected, **FLOAT32_LAYER)


@pytest.mark.parametrize(
  ("name", "mesh_config"),
  [
    ("query", ALL_AXES),
    ("value", ALL_AXES),
    ("out", ALL_AXES),
    ("gate", ALL_AXES),
    ("down", ALL_AXES),
    ("query", MeshConfig(data=1, fsdp=8)),
    ("down", MeshConfig(data=1, fsdp=8)),
    ("gate", MeshConfig(data=8)),
  ],
)
def test_a_product_on_a_mesh_equals_float64(name, mesh_config):
  """The product y = x w with a parameter w, and the gradients dx and dw.

  The mesh divides x, w and dy, the gradient of y, as in training. NumPy
  computes the expected arrays in float64.
  """
  x, w, dy = make_arrays(name)
  mesh = make_mesh(mesh_config)

  with jax.set_mesh(mesh):
    run = sharded_value_and_gradients(name, mesh, jnp.float32)
    actual_y, actual_dx, actual_dw = run(x, w, dy)

  y, dx, dw = expected_value_and_gradients(name)
  np.testing.assert_allclose(actual_y, y, **FLOAT32_LAYER)
  np.testing.assert_allclose(actual_dx, dx, **FLOAT32_LAYER)
  np.testing.assert_allclose(actual_dw, dw, **FLOAT32_LAYER)


@pytest.mark.parametrize(
  ("device_kind", "data", "fsdp", "should_exchange"),
  [
    pytest.param("TPU v5 lite", 1, 16, True, id="v5e-16"),
    pytest.param("TPU v5 lite", 4, 8, False, id="v5e-32"),
    pytest.param("TPU v6 lite", 1, 16, False, id="v6e-16, sparse cores"),
    pytest.param("TPU v5", 1, 8, False, id="v5p-8, sparse cores"),
    pytest.param("TPU v4", 1, 64, True, id="v4-64"),
    pytest.param("TPU v4", 1, 128, False, id="v4-128"),
  ],
)
def test_small_meshes_without_sparse_cores_exchange_gradients(
  device_kind, data, fsdp, should_exchange
):
  """Devices sum gradients after an all-to-all, or by a reduce-scatter.

  `data` and `fsdp` are the sizes of the mesh.
  """
  device = jax.sharding.AbstractDevice(
    device_kind=device_kind, num_cores=None, platform="tpu"
  )
  mesh = AbstractMesh((data, fsdp), ("data", "fsdp"), abstract_device=device)

  assert uses_exchange(mesh) is should_exchange


def test_a_mesh_of_an_unknown_device_exchanges_gradients():
  """An abstract mesh has a device kind only if it is given one."""
  mesh = AbstractMesh((1, 8), ("data", "fsdp"))

  assert uses_exchange(mesh)


def use_reduce_scatter(
  monkeypatch: pytest.MonkeyPatch, *, has_sparse_cores: bool
) -> None:
  """Makes products sum gradients as on large meshes, or with sparse cores."""
  product_module = "diffjax.parallel.product"
  monkeypatch.setattr(f"{product_module}.uses_exchange", lambda mesh: False)
  monkeypatch.setattr(
    f"{product_module}.uses_sparse_cores", lambda mesh: has_sparse_cores
  )
  # Functions that were traced before sum gradients in another way.
  jax.clear_caches()


@pytest.fixture(params=["exchange", "sparse_cores"])
def has_sparse_cores(request, monkeypatch):
  """Whether sparse cores sum gradients, or devices after an exchange."""
  if request.param == "exchange":
    jax.clear_caches()
    return False
  use_reduce_scatter(monkeypatch, has_sparse_cores=True)
  return True


# One parameter for each position of the axis that fsdp splits.
@pytest.mark.parametrize("name", ["query", "down", "out"])
def test_a_product_with_a_reduce_scatter_equals_float64(name, monkeypatch):
  """Small meshes exchange gradients by an all-to-all instead."""
  use_reduce_scatter(monkeypatch, has_sparse_cores=False)
  mesh = make_mesh(ALL_AXES)
  arrays = make_arrays(name)

  with jax.set_mesh(mesh):
    run = sharded_value_and_gradients(name, mesh, jnp.float32)
    lowered = run.lower(*arrays)
    actual = lowered.compile()(*arrays)

  assert "reduce_scatter" in lowered.as_text()
  expected = expected_value_and_gradients(name)
  chex.assert_trees_all_close(as_float64(actual), expected, **FLOAT32_LAYER)


# How gradients are rounded.


def test_sums_over_devices_are_not_rounded(has_sparse_cores):
  """The gradient dw of a bfloat16 product y = x w is summed in float32.

  E and F are the widths of x and y.
  """
  mesh = make_mesh(MeshConfig(data=1, fsdp=8))
  # The gradient dy of y [rows, tokens]. Each of eight devices has a row.
  dy_of_tokens = np.array([[512, 0]] + 7 * [[1 + 2**-7, 0]])
  if has_sparse_cores:
    # The sum of a device's two tokens has too many digits for bfloat16, too.
    dy_of_tokens[1:, 1] = 2**-9
  dy = np.broadcast_to(dy_of_tokens[:, :, None], (8, 2, F))
  dy = dy.astype(jnp.bfloat16)
  # With x = 1, dw is the sum of dy over all tokens.
  x = np.ones((8, 2, E), jnp.bfloat16)
  w = np.zeros((E, F), np.float32)

  with jax.set_mesh(mesh):
    run = sharded_value_and_gradients("gate", mesh, jnp.bfloat16)
    _, _, dw = run(x, w, dy)

  assert dw.dtype == jnp.float32
  # bfloat16 has 8 binary digits: near the sum, 519, only multiples of 4.
  np.testing.assert_array_equal(dw, dy_of_tokens.sum())


@pytest.mark.usefixtures("has_sparse_cores")
def test_sums_of_gather_parameter_are_not_rounded():
  """The gradient of a gathered parameter is summed over devices in float32."""
  mesh = make_mesh(MeshConfig(data=1, fsdp=8))
  # A number for each of eight devices. The sum is not a bfloat16 number, which
  # has 8 binary digits.
  dy_of_devices = np.array([512] + 7 * [1 + 2**-7])
  length = 16

  def local_gradient(shard, dy):
    def gather_and_multiply(shard):
      gathered = gather_parameter(shard, 0, "fsdp", jnp.bfloat16)
      return jnp.sum(gathered * dy)

    return jax.grad(gather_and_multiply)(shard)

  with jax.set_mesh(mesh):
    run = jax.shard_map(
      local_gradient,
      in_specs=(P("fsdp"), P("fsdp")),
      out_specs=P("fsdp"),
      check_vma=False,
    )
    parameter = np.zeros(length, np.float32)
    gradient = jax.jit(run)(parameter, dy_of_devices.astype(jnp.bfloat16))

  assert gradient.dtype == jnp.float32
  np.testing.assert_array_equal(gradient, dy_of_devices.sum())


# What devices send.


def sizes_and_dtypes(pattern: str, text: str) -> list[tuple[int, str]]:
  """Returns the size and dtype of each tensor of StableHLO that matches.

  Args:
    pattern: has a group for the shape, such as 8x4, and one for the dtype.
    text: a program.
  """
  tensors = []
  for shape, dtype in re.findall(pattern, text):
    size = math.prod(int(length) for length in shape.split("x"))
    tensors.append((size, dtype))
  return tensors


@pytest.fixture(scope="module")
def lowered_product(optimised):
  """Returns a function that lowers a product in bfloat16, once per name."""
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

  @functools.cache
  def lower(name):
    with jax.set_mesh(mesh):
      run = sharded_value_and_gradients(name, mesh, jnp.bfloat16)
      return run.lower(*make_arrays(name))

  return lower


@pytest.mark.parametrize("name", ["query", "down"])
def test_gradients_are_exchanged_in_bfloat16(lowered_product, name):
  """The axes data, fsdp and tensor have two devices each.

  XLA's CPU backend may send bfloat16 as float32, so this reads the program
  before XLA.
  """
  text = lowered_product(name).as_text()

  # For example, the end of a line is "-> tensor<32x8xbf16>".
  exchanged = sizes_and_dtypes(r"all_to_all.*?-> tensor<([\dx]+)x(\w+)>", text)

  _, parameter, _ = make_arrays(name)
  # The tensor axis splits the gradient in two. Each device sends a half.
  assert exchanged == [(parameter.size // 2, "bf16")]


@pytest.mark.parametrize("name", ["query", "down"])
def test_sums_over_the_data_axis_are_in_float32(lowered_product, name):
  """The axes data, fsdp and tensor have two devices each."""
  text = lowered_product(name).as_text()

  # For example, the end of an all-reduce is ") -> tensor<24x16xf32>".
  summed = sizes_and_dtypes(
    r"stablehlo.all_reduce[\s\S]*?\) -> tensor<([\dx]+)x(\w+)>", text
  )

  _, parameter, _ = make_arrays(name)
  # The axes fsdp and tensor split the gradient in four.
  assert set(summed) == {(parameter.size // 4, "f32")}


@pytest.mark.parametrize("name", ["query", "down"])
def test_parameters_are_gathered_only_along_fsdp_and_in_one_piece(
  lowered_product, name
):
  """The mesh has two devices along each of the axes data, fsdp and tensor."""
  text = lowered_product(name).compile().as_text()

  # For example, "bf16[32,24]{1,0} all-gather(" is a tensor of 32 * 24 numbers.
  shapes = re.findall(r"\[([\d,]+)\]\S* all-gather\(", text)
  gathered_sizes = set()
  for shape in shapes:
    gathered_sizes.add(math.prod(int(length) for length in shape.split(",")))
  _, parameter, _ = make_arrays(name)
  # The tensor axis still splits the parameter in two.
  assert gathered_sizes == {parameter.size // 2}
  # A loop would gather a parameter in several pieces.
  assert "while(" not in text


def test_gather_and_cast_without_a_mesh_only_casts():
  w = jnp.ones((E, F))

  cast = gather_and_cast(w, "gate", jnp.bfloat16)

  chex.assert_trees_all_equal(cast, np.ones((E, F), jnp.bfloat16))
  assert cast.dtype == jnp.bfloat16


def test_gather_and_cast_gathers_only_along_fsdp():
  """The tensor axis still splits the result."""
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  w = jax.device_put(
    np.ones((E, F), np.float32), NamedSharding(mesh, P("fsdp", "tensor"))
  )

  def gather(w):
    return gather_and_cast(w, "gate", jnp.bfloat16)

  with jax.set_mesh(mesh):
    gathered = jax.jit(gather)(w)

  assert gathered.sharding.spec == P(None, "tensor")


# Remat.


def remat_config(remat: str, mesh_config: MeshConfig) -> Config:
  """Returns a run of a small Transformer with this option of remat."""
  model = ModelConfig(
    attention="softmax",
    vocab_size=64,
    # With 9 layers, every policy scans the layers.
    num_layers=9,
    embed_dim=E,
    num_heads=4,
    num_kv_heads=4,
    head_dim=D,
    ffn_dim=F,
    head_norm=False,
    remat=remat,
  )
  return Config(
    model=model,
    data=DataConfig(length=16),
    mesh=mesh_config,
    train=TrainConfig(batch_size=8, steps=200),
  )


@pytest.mark.full
@pytest.mark.parametrize(
  "mesh_config",
  [
    pytest.param(MeshConfig(data=1), id="one device"),
    pytest.param(ALL_AXES, id="all axes"),
  ],
)
def test_remat_repeats_the_products_of_its_policy(mesh_config):
  """Remat computes some activations again in the backward pass, to save memory.

  JAX's own policies do not see products inside `shard_map`.
  """
  num_devices = math.prod(dataclasses.astuple(mesh_config))
  mesh = make_mesh(mesh_config, jax.devices()[:num_devices])

  # The number of products in the program of a training step, by policy.
  num_products = {}
  for remat in REMAT:
    config = remat_config(remat, mesh_config)
    text = build(config, mesh).lower_train_step().as_text()
    num_products[remat] = text.count("stablehlo.dot_general")

  num_repeated = {}
  for remat in REMAT:
    num_repeated[remat] = num_products[remat] - num_products["none"]
  # A product is named after its parameter.
  attention = ["query", "key", "value", "out"]
  # The policy "dots" stores the results of all products.
  assert num_repeated["dots"] == 0
  assert num_repeated["ffn"] == len(attention)
  assert num_repeated["gate"] == len([*attention, "up"])
  assert num_repeated["attention"] == len([*attention, "up", "gate"])
  # "full" also repeats the products of queries with keys, and of weights with
  # values.
  assert num_repeated["full"] > num_repeated["attention"]


# The overlap with computation, as the TPU compiler schedules it.


def estimate_collectives(
  devices: Any, num_chips: int, memory: int, topology: str
) -> dict[str, tuple[float, float]]:
  """Returns the seconds of the collectives of four layers and their gradients.

  `call_with_devices` calls it.

  Returns:
    For each kind of collective: its seconds, and those that no computation
    hides.
  """
  mesh = make_mesh(MeshConfig(fsdp=num_chips), devices)
  shapes = {"gate": (4, 1024, 2048), "down": (4, 2048, 1024)}
  shardings = {}
  params = {}
  for name, shape in shapes.items():
    shardings[name] = NamedSharding(mesh, P(None, *parameter_spec(name)[1:]))
    params[name] = jax.ShapeDtypeStruct(
      shape, jnp.float32, sharding=shardings[name]
    )
  x = jax.ShapeDtypeStruct(
    (8 * num_chips, 2048, 1024),
    jnp.bfloat16,
    sharding=NamedSharding(mesh, P(("data", "fsdp"))),
  )

  def layer(x, params):
    for name in shapes:
      x = jax.nn.relu(product(x, params[name], name))
    return x, None

  def loss(params, x):
    output, _ = jax.lax.scan(layer, x, params)
    return output.astype(jnp.float32).sum()

  with jax.set_mesh(mesh):
    gradients = jax.jit(
      jax.grad(loss),
      out_shardings=shardings,
      compiler_options=compiler_options(mesh),
    )
    text = gradients.lower(params, x).compile().as_text()
  chip = CHIPS[topology[:3]]
  torus = Torus.from_topology(topology)
  return estimate(text, mesh.shape, chip, torus, {}).collectives


@pytest.mark.full
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
@pytest.mark.parametrize(
  ("topology", "kind_of_gradients"),
  [
    # v5e exchanges gradients. Other chips have sparse cores, which sum them.
    ("v5e:4x4", "all-to-all"),
    ("v5p:2x2x2", "reduce-scatter"),
    ("v6e:4x8", "reduce-scatter"),
  ],
)
def test_computation_hides_communication(topology, kind_of_gradients):
  """The TPU compiler runs products while data is sent between chips."""
  collectives = call_with_devices(
    estimate_collectives, topology, topology=topology
  )

  assert collectives.keys() == {"all-gather", kind_of_gradients}
  # Each layer gathers two parameters of equal size. No product can run during
  # the first gather, so half of the time is exposed. 1% more is allowed.
  seconds, exposed_seconds = collectives["all-gather"]
  assert exposed_seconds < 0.51 * seconds
  # No product runs after the last one, so a part of the time is exposed.
  seconds, exposed_seconds = collectives[kind_of_gradients]
  assert exposed_seconds < 0.2 * seconds
