"""The products of a layer on a mesh: values, gradients and communication."""

import dataclasses
import functools
import importlib.util
import math
import re
from typing import Any
from unittest import mock

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
from tests.harness.tiers import full
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
FSDP = MeshConfig(data=1, fsdp=8)
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
  run = jax.jit(functools.partial(value_and_gradients, name, jnp.float32))

  actual = run(*make_arrays(name))

  chex.assert_trees_all_close(
    as_float64(actual), expected_value_and_gradients(name), **FLOAT32_LAYER
  )


@pytest.mark.parametrize(
  ("name", "mesh_config"),
  [
    *[pytest.param(name, ALL_AXES, id=f"{name}, all axes") for name in SHAPES],
    pytest.param("query", FSDP, id="query, fsdp"),
    pytest.param("down", FSDP, id="down, fsdp"),
    pytest.param("gate", MeshConfig(data=8), id="gate, data"),
  ],
)
def test_a_product_on_a_mesh_equals_float64(name, mesh_config):
  mesh = make_mesh(mesh_config)
  with jax.set_mesh(mesh):
    run = sharded_value_and_gradients(name, mesh, jnp.float32)
    actual = run(*make_arrays(name))

  chex.assert_trees_all_close(
    as_float64(actual), expected_value_and_gradients(name), **FLOAT32_LAYER
  )


@pytest.mark.parametrize(
  ("device_kind", "num_chips", "fsdp", "expected"),
  [
    ("TPU v5 lite", 16, 16, True),
    ("TPU v5 lite", 32, 8, False),
    ("TPU v6 lite", 16, 16, False),
    ("TPU v5", 8, 8, False),
    ("TPU v4", 64, 64, True),
    ("TPU v4", 128, 128, False),
    (None, 8, 8, True),
  ],
)
def test_small_meshes_without_sparse_cores_exchange_gradients(
  device_kind, num_chips, fsdp, expected
):
  device = None
  if device_kind is not None:
    device = jax.sharding.AbstractDevice(
      device_kind=device_kind, num_cores=None, platform="tpu"
    )
  mesh = AbstractMesh(
    (num_chips // fsdp, fsdp), ("data", "fsdp"), abstract_device=device
  )

  assert uses_exchange(mesh) is expected


def choose_summation(
  monkeypatch: pytest.MonkeyPatch,
  *,
  with_exchange: bool,
  with_sparse_cores: bool,
) -> None:
  """Makes products sum gradients as on other kinds of devices."""
  module = "diffjax.parallel.product"
  monkeypatch.setattr(
    f"{module}.uses_exchange", mock.Mock(return_value=with_exchange)
  )
  monkeypatch.setattr(
    f"{module}.uses_sparse_cores", mock.Mock(return_value=with_sparse_cores)
  )
  # Functions that were traced before sum gradients in another way.
  jax.clear_caches()


# One parameter for each position of the axis that fsdp splits.
@pytest.mark.parametrize("name", ["query", "down", "out"])
def test_a_reduce_scatter_gives_the_gradients_of_an_exchange(name, monkeypatch):
  choose_summation(monkeypatch, with_exchange=False, with_sparse_cores=False)
  mesh = make_mesh(ALL_AXES)
  arrays = make_arrays(name)
  with jax.set_mesh(mesh):
    run = sharded_value_and_gradients(name, mesh, jnp.float32)
    lowered = run.lower(*arrays)
    actual = lowered.compile()(*arrays)

  assert "all_to_all" not in lowered.as_text()
  chex.assert_trees_all_close(
    as_float64(actual), expected_value_and_gradients(name), **FLOAT32_LAYER
  )


# How gradients are rounded.


@pytest.mark.parametrize("has_sparse_cores", [False, True])
def test_sums_over_devices_are_not_rounded(has_sparse_cores, monkeypatch):
  """The sum of eight summands of 1 + 2⁻⁷ or 512 is no bfloat16.

  Sparse cores also get summands in float32, such as 1 + 2⁻⁷ + 2⁻⁹.
  """
  choose_summation(
    monkeypatch,
    with_exchange=not has_sparse_cores,
    with_sparse_cores=has_sparse_cores,
  )
  mesh = make_mesh(FSDP)
  small = 2**-9 if has_sparse_cores else 0.0
  # dW sums over two tokens on each device.
  x = jnp.ones((B, 2, E), jnp.bfloat16)
  w = jnp.zeros((E, F))
  summands = np.tile([1 + 2**-7, small], (B, 1))
  summands[0] = [512, 0]
  dy = jnp.broadcast_to(summands[..., None], (B, 2, F)).astype(jnp.bfloat16)

  with jax.set_mesh(mesh):
    run = sharded_value_and_gradients("gate", mesh, jnp.bfloat16)
    _, _, dw = run(x, w, dy)

  assert dw.dtype == jnp.float32
  expected = np.float32(512 + 7 * (1 + 2**-7 + small))
  np.testing.assert_array_equal(dw, expected)


@pytest.mark.parametrize("has_sparse_cores", [False, True])
def test_sums_of_gather_parameter_are_not_rounded(
  has_sparse_cores, monkeypatch
):
  choose_summation(
    monkeypatch,
    with_exchange=not has_sparse_cores,
    with_sparse_cores=has_sparse_cores,
  )
  mesh = make_mesh(FSDP)
  dy = jnp.full((8, 16), 1 + 2**-7, jnp.bfloat16).at[0].set(512)

  def local_gradient(shard, dy):
    def gather(shard):
      return gather_parameter(shard, 0, "fsdp", jnp.bfloat16)

    _, vjp = jax.vjp(gather, shard)
    (gradient,) = vjp(dy[0])
    return gradient

  with jax.set_mesh(mesh):
    run = jax.shard_map(
      local_gradient,
      in_specs=(P("fsdp"), P("fsdp")),
      out_specs=P("fsdp"),
      check_vma=False,
    )
    gradient = jax.jit(run)(jnp.zeros(16), dy)

  assert gradient.dtype == jnp.float32
  expected = np.float32(512 + 7 * (1 + 2**-7))
  np.testing.assert_array_equal(gradient, expected)


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
  """Each device sends its half of the gradient. tensor has split it in two.

  XLA's CPU backend may send bfloat16 as float32, so this reads the program
  before XLA.
  """
  text = lowered_product(name).as_text()

  exchanged = sizes_and_dtypes(r"all_to_all.*?-> tensor<([\dx]+)x(\w+)>", text)

  _, w, _ = make_arrays(name)
  assert exchanged == [(w.size // 2, "bf16")]


@pytest.mark.parametrize("name", ["query", "down"])
def test_sums_over_the_data_axis_are_in_float32(lowered_product, name):
  """Each device sums the quarter of the gradient that it stores."""
  text = lowered_product(name).as_text()

  summed = sizes_and_dtypes(
    r"stablehlo.all_reduce[\s\S]*?\) -> tensor<([\dx]+)x(\w+)>", text
  )

  _, w, _ = make_arrays(name)
  assert set(summed) == {(w.size // 4, "f32")}


@pytest.mark.parametrize("name", ["query", "down"])
def test_parameters_are_gathered_only_along_fsdp_and_in_one_piece(
  lowered_product, name
):
  text = lowered_product(name).compile().as_text()

  gathered_sizes = set()
  for shape in re.findall(r"\[([\d,]+)\]\S* all-gather\(", text):
    gathered_sizes.add(math.prod(int(size) for size in shape.split(",")))
  _, w, _ = make_arrays(name)
  # The tensor axis still splits the parameter in two.
  assert gathered_sizes == {w.size // 2}
  assert "while(" not in text


def test_gather_and_cast_without_a_mesh_only_casts():
  w = jnp.ones((E, F))

  assert gather_and_cast(w, "gate", jnp.bfloat16).dtype == jnp.bfloat16


def test_gather_and_cast_gathers_only_along_fsdp():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  w = jax.device_put(jnp.ones((E, F)), NamedSharding(mesh, P("fsdp", "tensor")))

  def gather(w):
    return gather_and_cast(w, "gate", jnp.bfloat16)

  with jax.set_mesh(mesh):
    gathered = jax.jit(gather)(w)

  assert gathered.sharding.spec == P(None, "tensor")


# Remat.


@pytest.mark.parametrize(
  "mesh_config",
  [
    pytest.param(MeshConfig(data=1), id="one device"),
    pytest.param(ALL_AXES, id="all axes"),
  ],
)
def test_remat_repeats_the_products_of_its_policy(mesh_config):
  """JAX's own policies do not see products inside `shard_map`."""
  num_devices = math.prod(dataclasses.astuple(mesh_config))
  mesh = make_mesh(mesh_config, jax.devices()[:num_devices])
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
  )

  num_products = {}
  for remat in REMAT:
    config = Config(
      model=dataclasses.replace(model, remat=remat),
      data=DataConfig(length=16),
      mesh=mesh_config,
      train=TrainConfig(batch_size=8, steps=200),
    )
    text = build(config, mesh).lower_train_step().as_text()
    num_products[remat] = text.count("stablehlo.dot_general")

  num_repeated = {}
  for remat in ("none", "dots", "ffn", "gate", "attention"):
    num_repeated[remat] = num_products[remat] - num_products["none"]
  assert num_repeated == {
    "none": 0,
    "dots": 0,
    # Query, key, value and out.
    "ffn": 4,
    # The same and up.
    "gate": 5,
    # The same and gate.
    "attention": 6,
  }
  assert num_products["full"] > num_products["attention"]


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
  shapes = {"gate": (4, 2048, 8192), "down": (4, 8192, 2048)}
  shardings = {}
  params = {}
  for name, shape in shapes.items():
    shardings[name] = NamedSharding(mesh, P(None, *parameter_spec(name)[1:]))
    params[name] = jax.ShapeDtypeStruct(
      shape, jnp.float32, sharding=shardings[name]
    )
  x = jax.ShapeDtypeStruct(
    (8 * num_chips, 2048, 2048),
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


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
@pytest.mark.parametrize(
  "topology",
  ["v5e:4x4", *full(["v5p:2x2x1", "v5p:2x2x2", "v6e:4x4", "v6e:4x8"])],
)
def test_computation_hides_communication(topology):
  """Nothing runs before the first gather of a layer, so it is not hidden.

  The second one has as many bytes and is hidden. So are gradients: their
  exchange on v5e, and elsewhere the reduce-scatter of the sparse cores.
  """
  seconds = call_with_devices(estimate_collectives, topology, topology=topology)

  kind_of_gradients = "reduce-scatter"
  if topology.startswith("v5e"):
    kind_of_gradients = "all-to-all"
  assert seconds.keys() == {"all-gather", kind_of_gradients}
  total, exposed = seconds["all-gather"]
  assert exposed < 0.51 * total
  total, exposed = seconds[kind_of_gradients]
  assert exposed < 0.2 * total
