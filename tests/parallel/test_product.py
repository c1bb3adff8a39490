"""A layer's products over a mesh: what is gathered, what its gradient is and in which dtype each travels."""

import dataclasses
import importlib.util
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
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

pytestmark = pytest.mark.usefixtures("optimised")
B, T, E, H, D, F = 8, 4, 32, 4, 8, 48
# Shapes of activations beyond [B, T] and of the parameter.
SHAPES = {
  "query": ((E,), (E, H, 2, D)),
  "value": ((E,), (E, H, D)),
  "out": ((H, D), (H, D, E)),
  "gate": ((E,), (E, F)),
  "down": ((F,), (F, E)),
}
MESHES = {
  "fsdp": MeshConfig(data=1, fsdp=8),
  "all": MeshConfig(data=1, fsdp=2, context=2, tensor=2),
  "data": MeshConfig(data=8),
}


def arguments(name):
  inputs, shape = SHAPES[name]
  keys = jax.random.split(jax.random.key(0), 3)
  outputs = shape[len(inputs) :]
  return [
    jax.random.normal(key, shape)
    for key, shape in zip(
      keys, ((B, T, *inputs), shape, (B, T, *outputs)), strict=True
    )
  ]


def program(name, mesh, dtype):
  """x, w, dy → y, dx, dw, jitted with the shardings of training."""
  inputs, _ = SHAPES[name]
  spec = parameter_spec(name)[1:]
  kept = [None if axis == "fsdp" else axis for axis in (*spec, *[None] * 3)]
  shard = lambda *axes: NamedSharding(mesh, P(*axes))
  x = shard(("data", "fsdp"), "context", *kept[: len(inputs)])
  dy = shard(
    ("data", "fsdp"), "context", *kept[len(inputs) : len(SHAPES[name][1])]
  )

  def both(x, w, dy):
    y, pull = jax.vjp(lambda x, w: product(x, w, name), x.astype(dtype), w)
    return y, *pull(dy.astype(dtype))

  return jax.jit(
    both,
    in_shardings=(x, shard(*spec), dy),
    out_shardings=(dy, x, shard(*spec)),
  )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SHAPES)
def test_value_and_gradients_equal_one_devices(name, mesh):
  x, w, dy = arguments(name)
  mesh = make_mesh(MESHES[mesh])
  with jax.set_mesh(mesh):
    actual = program(name, mesh, jnp.float32)(x, w, dy)
  inputs = x.ndim - 2
  double = [np.asarray(z, np.float64) for z in (x, w, dy)]
  plain = (
    np.tensordot(double[0], double[1], inputs),
    np.tensordot(
      double[2], double[1], (range(2, dy.ndim), range(inputs, w.ndim))
    ),
    np.tensordot(double[0], double[2], ((0, 1), (0, 1))),
  )
  chex.assert_trees_all_close(
    [np.asarray(z, np.float64) for z in actual],
    list(plain),
    rtol=1e-5,
    atol=1e-4,
  )
  y, pull = jax.vjp(lambda x, w: product(x, w, name), x, w)  # without a mesh
  chex.assert_trees_all_close((y, *pull(dy)), actual, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["query", "down"])
def test_what_travels(name):
  """Forward one gather of the parameter in bfloat16, and the same backward; one exchange of the gradient in bfloat16, of what the tensor
  axis leaves of it; sums over data in float32, of what each device keeps. XLA's CPU backend computes, and may send, bfloat16 as float32, so
  the text before it is read."""
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  x, w, dy = (jax.ShapeDtypeStruct(z.shape, z.dtype) for z in arguments(name))
  with jax.set_mesh(mesh):
    lowered = program(name, mesh, jnp.bfloat16).lower(x, w, dy)
  text = lowered.as_text()
  exchanged = re.findall(r"all_to_all.*?-> tensor<([\dx]+)x(\w+)>", text)
  assert [
    (math.prod(map(int, size.split("x"))), dtype) for size, dtype in exchanged
  ] == [(w.size // 2, "bf16")]
  summed = re.findall(
    r"stablehlo.all_reduce[\s\S]*?\) -> tensor<([\dx]+)x(\w+)>", text
  )
  assert {
    (math.prod(map(int, size.split("x"))), dtype) for size, dtype in summed
  } == {(w.size // 4, "f32")}
  compiled = lowered.compile().as_text()
  gathered = [
    math.prod(map(int, size.split(",")))
    for size in re.findall(r"\[([\d,]+)\]\S* all-gather\(", compiled)
  ]
  assert gathered and set(gathered) == {
    w.size // 2
  }  # along the tensor axis it stays split
  assert "while(" not in compiled


@pytest.mark.parametrize(
  "kind, chips, fsdp, exchanged",
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
def test_where_gradients_are_exchanged(kind, chips, fsdp, exchanged):
  device = kind and jax.sharding.AbstractDevice(
    device_kind=kind, num_cores=None, platform="tpu"
  )
  mesh = AbstractMesh(
    (chips // fsdp, fsdp), ("data", "fsdp"), abstract_device=device
  )
  assert uses_exchange(mesh) == exchanged


@pytest.mark.parametrize("name", SHAPES)
def test_xlas_own_reduce_scatter_gives_the_same(name, monkeypatch):
  x, w, dy = arguments(name)
  mesh = make_mesh(MESHES["all"])
  with jax.set_mesh(mesh):
    exchanged = program(name, mesh, jnp.float32)(x, w, dy)
    monkeypatch.setattr(
      "diffjax.parallel.product.uses_exchange", lambda mesh: False
    )
    jax.clear_caches()
    reduced = program(name, mesh, jnp.float32)
    assert (
      "all_to_all"
      not in reduced.lower(
        *(jax.ShapeDtypeStruct(z.shape, z.dtype) for z in (x, w, dy))
      ).as_text()
    )
    chex.assert_trees_all_close(
      reduced(x, w, dy), exchanged, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("sparse_cores", [False, True])
def test_sums_over_devices_round_nothing(sparse_cores, monkeypatch):
  """Eight devices' shares of 1 + 2⁻⁷ in bfloat16: their sum is not a bfloat16. Where the shares travel in float32 they need not be one."""
  monkeypatch.setattr(
    "diffjax.parallel.product.uses_sparse_cores", lambda mesh: sparse_cores
  )
  monkeypatch.setattr(
    "diffjax.parallel.product.uses_exchange", lambda mesh: not sparse_cores
  )
  jax.clear_caches()
  mesh = make_mesh(MESHES["fsdp"])
  x, w = jnp.ones((B, 2, E), jnp.bfloat16), jnp.zeros((E, F))
  small = (
    2**-9 if sparse_cores else 0.0
  )  # a share of 1 + 2⁻⁷ + 2⁻⁹ is not a bfloat16
  dy = jnp.array([1 + 2**-7, small], jnp.bfloat16)[None, :, None] * jnp.ones(
    (B, 2, F), jnp.bfloat16
  )
  dy = dy.at[0].set(jnp.array([512, 0], jnp.bfloat16)[:, None])
  with jax.set_mesh(mesh):
    dw = program("gate", mesh, jnp.bfloat16)(x, w, dy)[2]
  assert dw.dtype == jnp.float32 and jnp.all(
    dw == 512 + 7 * (1 + 2**-7 + small)
  )


@pytest.mark.parametrize("sparse_cores", [False, True])
def test_sums_of_a_gathers_gradient_round_nothing(sparse_cores, monkeypatch):
  """As above, of `gather_parameter`: eight devices' shares of 1 + 2⁻⁷ in bfloat16."""
  monkeypatch.setattr(
    "diffjax.parallel.product.uses_sparse_cores", lambda mesh: sparse_cores
  )
  monkeypatch.setattr(
    "diffjax.parallel.product.uses_exchange", lambda mesh: not sparse_cores
  )
  mesh = make_mesh(MESHES["fsdp"])

  def local(shard, dy):
    return jax.vjp(
      lambda shard: gather_parameter(shard, 0, "fsdp", jnp.bfloat16), shard
    )[1](dy[0])[0]

  dy = jnp.full((8, 16), 1 + 2**-7, jnp.bfloat16).at[0].set(512)
  with jax.set_mesh(mesh):
    gradient = jax.jit(
      jax.shard_map(
        local,
        in_specs=(P("fsdp"), P("fsdp")),
        out_specs=P("fsdp"),
        check_vma=False,
      )
    )(jnp.zeros(16), dy)
  assert gradient.dtype == jnp.float32 and jnp.all(
    gradient == 512 + 7 * (1 + 2**-7)
  )


def test_whole():
  w = arguments("gate")[1]
  assert (
    gather_and_cast(w, "gate", jnp.bfloat16).dtype == jnp.bfloat16
  )  # without a mesh
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  with jax.set_mesh(mesh):
    out = jax.jit(lambda w: gather_and_cast(w, "gate", jnp.bfloat16))(
      jax.device_put(w, NamedSharding(mesh, P("fsdp", "tensor")))
    )
  assert out.sharding.spec == P(None, "tensor")


@pytest.mark.parametrize(
  "mesh", [MeshConfig(data=1), MESHES["fsdp"], MESHES["all"]]
)
def test_remat_computes_again_what_its_policy_says(mesh):
  """Products in the step by policy, beyond those of a step that keeps all: on shards too, where JAX's policies see none."""
  devices = make_mesh(
    mesh, jax.devices()[: mesh.data * mesh.fsdp * mesh.context * mesh.tensor]
  )
  model = ModelConfig(
    attention="softmax",
    vocab_size=64,
    num_layers=9,
    embed_dim=E,
    num_heads=4,
    num_kv_heads=4,
    head_dim=D,
    ffn_dim=F,
    head_norm=False,
  )

  def products(remat):
    config = Config(
      model=dataclasses.replace(model, remat=remat),
      data=DataConfig(length=16),
      mesh=mesh,
      train=TrainConfig(batch_size=8, steps=200),
    )
    return (
      build(config, devices)
      .lower_train_step()
      .as_text()
      .count("stablehlo.dot_general")
    )

  found = {remat: products(remat) for remat in REMAT}
  assert found.pop("full") > found["attention"]
  # query, key, value and out; up; gate
  assert {remat: count - found["none"] for remat, count in found.items()} == {
    "none": 0,
    "dots": 0,
    "ffn": 4,
    "gate": 5,
    "attention": 6,
  }


def _layers(devices, chips, available, topology):
  """Seconds of the collectives of layers over all chips and of their gradients: of each kind all, and those that nothing covers."""
  mesh, width = make_mesh(MeshConfig(fsdp=chips), devices), (2048, 8192)

  def layer(x, parameters):
    for name, parameter in zip(("gate", "down"), parameters, strict=True):
      x = jax.nn.relu(product(x, parameter, name))
    return x, None

  def loss(parameters, x):
    return jax.lax.scan(layer, x, parameters)[0].astype(jnp.float32).sum()

  shardings = [
    NamedSharding(mesh, P(None, *parameter_spec(name)[1:]))
    for name in ("gate", "down")
  ]
  parameters = [
    jax.ShapeDtypeStruct((4, *shape), jnp.float32, sharding=sharding)
    for shape, sharding in zip((width, width[::-1]), shardings, strict=True)
  ]
  x = jax.ShapeDtypeStruct(
    (8 * chips, 2048, width[0]),
    jnp.bfloat16,
    sharding=NamedSharding(mesh, P(("data", "fsdp"))),
  )
  with jax.set_mesh(mesh):
    gradients = jax.jit(
      jax.grad(loss),
      out_shardings=shardings,
      compiler_options=compiler_options(mesh),
    )
    text = gradients.lower(parameters, x).compile().as_text()
  return estimate(
    text, mesh.shape, CHIPS[topology[:3]], Torus.from_topology(topology), {}
  ).collectives


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
@pytest.mark.parametrize(
  "topology",
  ["v5e:4x4", *full(["v5p:2x2x1", "v5p:2x2x2", "v6e:4x4", "v6e:4x8"])],
)
def test_parameters_and_gradients_travel_while_chips_compute(topology):
  """A layer's first gather waits, since nothing of the layer runs before it; the second, of as many bytes, is covered. Gradients are: by an
  exchange on v5e, by the sparse cores' reduce-scatter elsewhere."""
  seconds = call_with_devices(_layers, topology, topology=topology)
  assert set(seconds) == {
    "all-gather",
    "all-to-all" if topology.startswith("v5e") else "reduce-scatter",
  }
  for kind, (every, exposed) in seconds.items():
    assert exposed < {"all-gather": 0.51}.get(kind, 0.2) * every, (
      kind,
      seconds,
    )
