"""A mesh changes where arrays lie, and nothing else."""

import dataclasses
import functools
import math
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import mesh_utils
from jax.sharding import NamedSharding

from diffjax.config import (
  Config,
  DataConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  UserError,
)
from diffjax.model.stacks import is_supported
from diffjax.ops import cross_entropy
from diffjax.ops.diff_attention import balanced_order, diff_attention
from diffjax.parallel import rules
from diffjax.parallel.mesh import (
  AXES,
  batch_share,
  make_mesh,
  put_batch,
  sharded_attention,
  sharded_cross_entropy,
)
from diffjax.parameters import PARAMETERS
from diffjax.training.program import build
from tests.harness.tiers import full
from tests.harness.variants import models

B, T = 16, 32
DATA = MeshConfig(data=-1)
MODEL = ModelConfig(
  vocab_size=64,
  num_layers=2,
  embed_dim=32,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  ffn_dim=48,
  dtype="float32",
)
VARIANTS = models(MODEL)


def make_config(model=MODEL, mesh=DATA, **train):
  # A large ε: Adam divides by |gradient|, which would blow rounding up to the learning rate where a gradient is near zero.
  optimizer = OptimizerConfig(
    learning_rate=1e-2, warmup_steps=0, schedule="linear", eps=1e-2
  )
  return Config(
    model=model,
    mesh=mesh,
    optimizer=optimizer,
    train=TrainConfig(steps=10, batch_size=B, z_loss=1e-4, **train),
  )


def make_batch(seed=0):
  """Packed rows: two documents each, padding at the end of some, so that rows weigh differently."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 64, (B, T + 1)).astype(np.int32)
  segments = np.ones((B, T + 1), np.int32)
  for row in range(B):
    cut, end = rng.integers(2, T - 4), rng.integers(T - 3, T + 2)
    segments[row, cut:] = 2
    segments[row, end:] = 0
  weights = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
  positions = np.where(
    segments[:, :-1] == 2,
    np.arange(T) - (segments[:, :-1] == 1).sum(1, keepdims=True),
    np.arange(T),
  )
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "segment_ids": segments[:, :-1],
    "positions": positions.astype(np.int32),
    "weights": weights.astype(np.float32),
  }


@functools.cache
def first_state(config):
  """The state before the first step, on one device."""
  return build(config, make_mesh(DATA, jax.devices()[:1])).init()


@functools.cache
def run_steps(config, num_devices, steps=3):
  """Parameters after some steps, and each step's metrics.

  Every mesh starts from the state of one device, whose program is compiled once.
  """
  program = build(config, make_mesh(config.mesh, jax.devices()[:num_devices]))
  first = first_state(dataclasses.replace(config, mesh=DATA))
  state = jax.device_put(
    jax.tree.map(jnp.copy, first),  # a step donates its state
    jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state),
  )
  losses = []
  for n in range(steps):
    state, metrics = program.train_step(
      state, put_batch(make_batch(n), program.mesh)
    )
    losses.append(jax.tree.map(np.asarray, metrics))
  return jax.tree.map(np.asarray, jax.device_get(state.params)), losses


# Sizes of data, fsdp, context and tensor.
PAIRS = [(2, 4), (4, 1, 1, 2), (1, 2, 2, 2)]  # of axes, with every variant
MESHES = []
for name, config in VARIANTS.items():
  for mesh in PAIRS:
    is_context_parallel = MeshConfig(*mesh).context > 1
    if not is_context_parallel or is_supported(config, "context_parallelism"):
      MESHES.append((name, mesh))
MESHES += [("diff", mesh) for mesh in ((8,), (1, 8), (1, 1, 8), (1, 1, 4, 2))]
MESHES += [("options", (1, 2, 2, 2))]
VARIANTS["options"] = dataclasses.replace(
  VARIANTS["diff_v2"],
  window=11,
  rope=False,
  projection_biases=True,
  embed_scale=6.0,
)
FIRST = [("diff", (1, 2, 2, 2)), ("diff_v2", (2, 4))]


@pytest.mark.parametrize(
  "name, mesh",
  [*FIRST, *full(case for case in MESHES if case not in FIRST)],
  ids=str,
)
def test_eight_devices_give_one_devices_losses(name, mesh):
  one = run_steps(make_config(VARIANTS[name]), 1)
  many = run_steps(make_config(VARIANTS[name], MeshConfig(*mesh)), 8)
  chex.assert_trees_all_close(one[1], many[1], rtol=2e-5)
  chex.assert_trees_all_close(one[0], many[0], atol=2e-6)
  assert one[1][0]["loss"] != one[1][2]["loss"]


@pytest.mark.parametrize(
  "name", ["diff", *full(name for name in VARIANTS if name != "diff")]
)
def test_the_first_state_is_the_same_on_a_mesh(name):
  mesh = MeshConfig(data=1, fsdp=2, context=2, tensor=2)
  if not is_supported(VARIANTS[name], "context_parallelism"):
    mesh = MeshConfig(data=2, fsdp=2, context=1, tensor=2)
  config = make_config(VARIANTS[name], mesh)
  state = build(config, make_mesh(config.mesh)).init()
  one = first_state(make_config(VARIANTS[name]))
  chex.assert_trees_all_close(
    (state.params, state.opt_state), (one.params, one.opt_state), rtol=1e-6
  )


@pytest.mark.parametrize("devices", [1, *full([4])])
def test_accumulation_equals_the_full_batch(devices):
  """Micro-batches of unequal token counts: Σ loss / Σ tokens, not a mean of means."""
  whole = run_steps(make_config(), devices)
  split = run_steps(make_config(accumulation=4), devices)
  chex.assert_trees_all_close(whole[1], split[1], rtol=2e-5)
  chex.assert_trees_all_close(whole[0], split[0], atol=2e-6)


def test_parameters_and_optimizer_are_sharded():
  config = make_config(mesh=MeshConfig(data=2, fsdp=4))
  state = build(config, make_mesh(config.mesh)).init()
  leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state))
  matrices = [(path, leaf) for path, leaf in leaves if leaf.ndim >= 3]
  assert len(matrices) >= 3 * 7  # parameters and both of Adam's moments
  for path, leaf in matrices:
    assert leaf.addressable_shards[0].data.size * 4 == leaf.size, (
      jax.tree_util.keystr(path)
    )


def test_the_embedding_is_gathered_and_its_gradient_scattered_once(monkeypatch):
  """The wrapped loss, made to loop over chunks: every collective of the compiled program stands outside the loop, and no device is sent a
  whole gradient."""
  for limit in ("_CHUNK_LOGITS", "_MIN_CHUNK_TOKENS"):
    monkeypatch.setattr(cross_entropy, limit, 8)
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  loss = sharded_cross_entropy(mesh)
  batch = put_batch(
    make_batch() | {"hidden": np.ones((B, T, 32), np.float32)}, mesh
  )
  gradient = jax.jit(
    jax.grad(
      lambda embedding, batch: loss(
        batch["hidden"], embedding, batch["targets"], batch["weights"]
      )[0]
    )
  )
  embedding = jax.device_put(
    np.ones((64, 32), np.float32),
    NamedSharding(mesh, rules.parameter_spec("embedding")),
  )
  program = gradient.lower(embedding, batch).compile().as_text()
  entry = program[
    program.index("ENTRY") :
  ]  # a loop's body is a computation of its own
  assert " while(" in entry
  for collective in ("all-gather", "all-to-all", "all-reduce"):
    assert (
      program.count(f" {collective}(") == entry.count(f" {collective}(") > 0
    )
  sizes = [
    math.prod(map(int, shape.split(",")))
    for shape in re.findall(r"f32\[([0-9,]+)\]\S* all-reduce\(", entry)
  ]
  assert sizes and max(sizes) <= 64 * 32 // 4


def test_evaluation_adds_up_over_the_mesh():
  config = make_config()
  batch = make_batch()
  batch |= {
    "hits": (batch["tokens"] % 2).astype(np.float32),
    "bytes": np.ones((B, T), np.float32),
  }
  sums = []
  for devices in (jax.devices()[:1], jax.devices()):
    program = build(config, make_mesh(config.mesh, devices))
    params = program.init().params
    found = program.eval_step(params, put_batch(batch, program.mesh))
    sums.append(jax.tree.map(float, found))
  chex.assert_trees_all_close(*sums, rtol=1e-5)
  assert sums[0]["weight"] == batch["weights"].sum()
  assert 3 < sums[0]["nll"] / sums[0]["weight"] < 6  # near log 64


@pytest.mark.parametrize(
  "mesh, message",
  [
    (MeshConfig(3), "multiply to the 8 devices"),
    (MeshConfig(-1, context=3), "context = 3, .*multiply to the 8 devices"),
  ],
)
def test_sizes_that_do_not_multiply_to_the_devices(mesh, message):
  with pytest.raises(UserError, match=message):
    make_mesh(mesh)


@pytest.mark.parametrize(
  "model, mesh, message",
  [
    (
      dict(embed_dim=36),
      dict(fsdp=8),
      "config.mesh.fsdp = 8 does not divide the 36 .*config.model.embed_dim",
    ),
    (
      dict(),
      dict(tensor=8),
      "config.mesh.tensor = 8 does not divide the 2 .*config.model.num_kv_heads",
    ),
    (
      dict(num_heads=8, num_kv_heads=8, ffn_dim=44),
      dict(tensor=8),
      "config.mesh.tensor = 8 does not divide the 44 .*config.model.ffn_dim",
    ),
    (
      dict(attention_implementation="two_call"),
      dict(context=2),
      "attention_implementation = 'two_call' takes no offset, .*mesh.context",
    ),
    (
      dict(num_heads=8, num_kv_heads=8, vocab_size=65),
      dict(tensor=8),
      "config.mesh.tensor = 8 does not divide the 65 .*vocab_size",
    ),
  ],
  ids=str,
)
def test_sizes_that_an_axis_does_not_divide(model, mesh, message):
  config = make_config(dataclasses.replace(MODEL, **model), MeshConfig(**mesh))
  with pytest.raises(UserError, match=message):
    build(config, make_mesh(config.mesh))


def test_rows_that_the_context_axis_cannot_cut():
  config = dataclasses.replace(
    make_config(mesh=MeshConfig(context=4, tensor=2)),
    data=DataConfig(length=36),
  )
  with pytest.raises(
    UserError,
    match="config.data.length = 36 must be a multiple of 8 with config.mesh.context = 4",
  ):
    build(config, make_mesh(config.mesh))


def test_no_parameter_is_split_twice_along_an_axis():
  for name in PARAMETERS:
    spec = rules.parameter_spec(name)
    axes = [axis for axis in spec if axis]
    assert len(axes) == len(set(axes)), name


class Device:
  """What `batch_share` and `make_mesh` read of a device."""

  platform, device_kind = "tpu", "TPU v4"

  def __init__(self, number, process_index=0, slice_index=0):
    self.id, self.process_index, self.slice_index = (
      number,
      process_index,
      slice_index,
    )


def fake_mesh(shape, processes):
  devices = np.array([Device(*x) for x in enumerate(processes)]).reshape(shape)
  return types.SimpleNamespace(
    devices=devices, shape=dict(zip(AXES, shape, strict=True))
  )


@pytest.mark.parametrize(
  "shape, processes, shares",
  [
    ((4, 1, 1, 2), [0, 0, 1, 1, 2, 2, 3, 3], [(0, 4), (1, 4), (2, 4), (3, 4)]),
    (
      (2, 1, 2, 2),
      [0, 0, 1, 1, 2, 2, 3, 3],
      [(0, 2), (0, 2), (1, 2), (1, 2)],
    ),  # a row's tokens lie on two processes
    (
      (4, 2, 1, 1),
      [0, 1, 0, 1, 2, 3, 2, 3],
      [(0, 4), (1, 4), (2, 4), (3, 4)],
    ),  # rows that do not lie side by side
    ((1, 1, 8, 1), [0, 0, 0, 0, 1, 1, 1, 1], [(0, 1), (0, 1)]),
    ((2, 4, 1, 1), [0, 0, 1, 1, 2, 2, 3, 3], [(0, 4), (1, 4), (2, 4), (3, 4)]),
  ],
)
def test_each_process_feeds_its_share(shape, processes, shares, monkeypatch):
  mesh = fake_mesh(shape, processes)
  for process, share in enumerate(shares):
    monkeypatch.setattr(jax, "process_index", lambda process=process: process)
    assert batch_share(mesh) == share


def test_shares_that_are_not_equal_are_refused(monkeypatch):
  with pytest.raises(
    UserError, match="cannot split the batch into equal shares"
  ):
    batch_share(fake_mesh((4, 1, 1, 1), [0, 0, 0, 1]))


def test_slices_lie_along_data(monkeypatch):
  monkeypatch.setattr(
    mesh_utils,
    "create_device_mesh",
    lambda shape, devices, **_: np.array(devices).reshape(shape),
  )
  devices = [Device(n, n // 2, n // 4) for n in range(8)]
  mesh = make_mesh(MeshConfig(data=-1, fsdp=4), devices)
  assert [
    [device.slice_index for device in row.flat] for row in mesh.devices
  ] == [[0] * 4, [1] * 4]
  with pytest.raises(
    UserError, match="config.mesh.data = 1 must be a multiple of the 2 slices"
  ):
    make_mesh(MeshConfig(data=1, fsdp=8), devices)


def test_context_order_gives_every_shard_the_same_work():
  order = balanced_order(48, 4)
  assert sorted(order) == list(range(48))
  assert (
    len({sum(shard + 1) for shard in order.reshape(4, 12)}) == 1
  )  # keys that a causal mask shows to its queries


def test_batch_that_the_devices_cannot_share():
  config = dataclasses.replace(make_config(), train=TrainConfig(batch_size=12))
  with pytest.raises(UserError, match="batch_size = 12 .* multiple of 8"):
    build(config, make_mesh(config.mesh))


def test_a_spike_is_skipped_on_a_mesh():
  config = make_config(mesh=MeshConfig(data=2, fsdp=4))
  program = build(config, make_mesh(config.mesh))
  state = program.init()
  for n in range(2):
    state, _ = program.train_step(state, put_batch(make_batch(n), program.mesh))
  (skip, rate) = state.opt_state
  # As after many steps whose gradients were far smaller; the loss lies where it was.
  mean = skip.mean * np.float32([1, 1e-3])
  skip = skip._replace(
    seen=skip.seen + 100,
    mean=jax.device_put(mean, skip.mean.sharding),
    variance=0 * skip.variance,
  )
  before = jax.tree.map(np.asarray, (state.params, skip.inner))
  state, metrics = program.train_step(
    dataclasses.replace(state, opt_state=(skip, rate)),
    put_batch(make_batch(2), program.mesh),
  )
  assert int(metrics["skipped_steps"]) == int(metrics["skipped_in_a_row"]) == 1
  after = state.opt_state[0]
  chex.assert_trees_all_equal(
    jax.tree.map(np.asarray, (state.params, after.inner)), before
  )


def test_attention_with_heads_on_a_tensor_axis():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
  arguments = (
    normal(0, 4, T, 8, 2, 6),
    normal(1, 4, T, 4, 2, 6),
    normal(2, 4, T, 4, 12),
    jnp.float32(0.4),
  )
  ids = jnp.broadcast_to(jnp.arange(T) // 10, (4, T))
  loss = lambda attention: (
    lambda *a: jnp.sum(
      jnp.sin(attention(*a, q_segment_ids=ids, kv_segment_ids=ids))
    )
  )
  compiled = (
    jax.jit(
      jax.value_and_grad(loss(sharded_attention(mesh, "chunked")), (0, 1, 2, 3))
    )
    .lower(*arguments)
    .compile()
  )
  expected = jax.value_and_grad(
    loss(functools.partial(diff_attention, implementation="reference")),
    (0, 1, 2, 3),
  )(*arguments)
  chex.assert_trees_all_close(
    compiled(*arguments), expected, rtol=1e-4, atol=1e-4
  )
  assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize(
  "options",
  [{"window": 5}, {"causal": False}, {"q_offset": jnp.array([0, 3, 1, 9])}],
  ids=lambda options: [*options][0],
)
def test_attention_on_a_mesh_takes_what_attention_takes(options):
  """With the tokens of each row over a context axis, in balanced order."""
  mesh, order = (
    make_mesh(MeshConfig(data=2, context=2, tensor=2)),
    balanced_order(T, 2),
  )
  normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
  q, k, v = (
    normal(0, 4, T, 4, 2, 6),
    normal(1, 4, T, 2, 2, 6),
    normal(2, 4, T, 2, 12),
  )
  run = jax.jit(
    functools.partial(sharded_attention(mesh, "chunked"), **options)
  )
  expected = diff_attention(q, k, v, 0.4, implementation="reference", **options)
  chex.assert_trees_all_close(
    run(*(x[:, order] for x in (q, k, v)), 0.4),
    expected[:, order],
    rtol=1e-4,
    atol=1e-5,
  )


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
def test_long_rows_over_eight_shards():
  """65,536 tokens a row, which no device holds whole: a step is taken, and its gradients are not nothing. 7 GB of memory."""
  model = dataclasses.replace(
    MODEL,
    num_layers=1,
    embed_dim=16,
    ffn_dim=16,
    num_heads=1,
    num_kv_heads=1,
    max_length=65_536,
  )
  config = Config(
    model=model,
    mesh=MeshConfig(context=8),
    data=DataConfig(length=65_536),
    train=TrainConfig(batch_size=1),
  )
  program = build(config, make_mesh(config.mesh))
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 64, (2, 1, 65_536), np.int32)
  ids = np.sort(rng.integers(0, 9, (1, 65_536), np.int32), axis=1)
  positions, weights = (
    np.arange(65_536, dtype=np.int32)[None],
    np.ones((1, 65_536), np.float32),
  )
  batch = put_batch(
    dict(
      tokens=tokens[0],
      targets=tokens[1],
      segment_ids=ids,
      positions=positions,
      weights=weights,
    ),
    program.mesh,
  )
  assert batch["tokens"].addressable_shards[0].data.shape == (1, 8192)
  _, metrics = program.train_step(program.init(), batch)
  assert 4 < float(metrics["loss"]) < 5 and float(metrics["grad_norm"]) > 1e-3
