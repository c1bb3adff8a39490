"""A mesh changes where arrays are, and not what is computed."""

import dataclasses
import functools
import math
import re
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

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
from diffjax.training.program import Program, build
from diffjax.training.step import TrainState
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32_MODEL
from tests.harness.variants import models

# Rows of a batch, and tokens of a row.
B = 16
T = 32
# The data axis has all devices.
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
VARIANTS["options"] = dataclasses.replace(
  VARIANTS["diff_v2"],
  window=11,
  rope=False,
  projection_biases=True,
  embed_scale=6.0,
)


def make_config(
  model: ModelConfig = MODEL, mesh: MeshConfig = DATA, **train: Any
) -> Config:
  """Returns a short training run.

  Adam divides by |gradient| + ε. Its ε is large, so that rounding errors of
  small gradients do not become as large as the learning rate.
  """
  optimizer = OptimizerConfig(
    learning_rate=1e-2, warmup_steps=0, schedule="linear", eps=1e-2
  )
  return Config(
    model=model,
    mesh=mesh,
    optimizer=optimizer,
    train=TrainConfig(steps=10, batch_size=B, z_loss=1e-4, **train),
  )


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
  """Returns rows of two documents and padding, with different weights."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 64, (B, T + 1)).astype(np.int32)
  segment_ids = np.ones((B, T + 1), np.int32)
  positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
  for row in range(B):
    second_start = rng.integers(2, T - 4)
    end = rng.integers(T - 3, T + 2)
    segment_ids[row, second_start:] = 2
    segment_ids[row, end:] = 0
    positions[row, second_start:end] -= second_start
  inputs = segment_ids[:, :-1]
  targets = segment_ids[:, 1:]
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "segment_ids": inputs,
    "positions": positions,
    "weights": ((targets == inputs) & (targets > 0)).astype(np.float32),
  }


@functools.cache
def program_of(config: Config, num_devices: int = 8) -> Program:
  """Returns the program of a run, which is compiled once for all tests."""
  mesh = make_mesh(config.mesh, jax.devices()[:num_devices])
  return build(config, mesh)


@functools.cache
def first_state(config: Config) -> TrainState:
  """Returns the state before the first step, on one device."""
  return program_of(config, num_devices=1).init()


@jax.jit
def copy_arrays(tree: Any) -> Any:
  """Returns a tree with copies of its arrays."""
  return jax.tree.map(jnp.copy, tree)


def put_first_state(program: Program) -> TrainState:
  """Returns the state of one device before the first step, on a mesh.

  So the initialisation is compiled only for one device.
  """
  config = dataclasses.replace(program.config, mesh=DATA)
  # A step donates its state, so the step gets a copy.
  state = copy_arrays(first_state(config))
  shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state)
  return jax.device_put(state, shardings)


@functools.cache
def run_steps(config: Config, num_devices: int = 8) -> tuple[Any, list[Any]]:
  """Returns the parameters after three steps, and the metrics of each step."""
  program = program_of(config, num_devices)
  state = put_first_state(program)
  metrics_of_steps = []
  for seed in range(3):
    batch = put_batch(make_batch(seed), program.mesh)
    state, metrics = program.train_step(state, batch)
    metrics_of_steps.append(jax.device_get(metrics))
  return jax.device_get(state.params), metrics_of_steps


# Training and evaluation.


def mesh_cases() -> list[tuple[str, tuple[int, ...]]]:
  """Returns variants and sizes of the mesh's axes: data, fsdp, context, tensor.

  The meshes of a variant have every axis that it supports. DIFF also has each
  axis alone.
  """
  cases = []
  for name, config in VARIANTS.items():
    if name == "options":
      continue
    cases.append((name, (4, 1, 1, 2)))
    if is_supported(config, "context_parallelism"):
      cases.append((name, (1, 2, 2, 2)))
    else:
      cases.append((name, (2, 4)))
  for sizes in [(2, 4), (8,), (1, 8), (1, 1, 8), (1, 1, 4, 2)]:
    cases.append(("diff", sizes))
  cases.append(("options", (1, 2, 2, 2)))
  return cases


DEFAULT_TIER = [("diff", (1, 2, 2, 2))]
FULL_TIER = [case for case in mesh_cases() if case not in DEFAULT_TIER]


@pytest.mark.parametrize(
  ("name", "sizes"), [*DEFAULT_TIER, *full(FULL_TIER)], ids=str
)
def test_a_mesh_does_not_change_training(name, sizes):
  """Training on eight devices equals training on one device.

  The sizes are those of the axes data, fsdp, context and tensor.
  """
  model = VARIANTS[name]
  mesh = MeshConfig(*sizes)

  params, metrics = run_steps(make_config(model, mesh), num_devices=8)

  expected_params, expected_metrics = run_steps(
    make_config(model), num_devices=1
  )

  chex.assert_trees_all_close(metrics, expected_metrics, rtol=2e-5)
  chex.assert_trees_all_close(params, expected_params, atol=2e-6)
  # The steps do change the parameters.
  assert expected_metrics[0]["loss"] != expected_metrics[2]["loss"]


@pytest.mark.parametrize("num_devices", [1, *full([4])])
def test_accumulation_does_not_change_training(num_devices):
  """The gradients of four micro-batches are added up before a step.

  The loss is the mean over the tokens of all micro-batches, which may have
  different numbers of tokens.
  """
  whole_batch = make_config(accumulation=1)
  micro_batches = make_config(accumulation=4)

  params, metrics = run_steps(micro_batches, num_devices=num_devices)

  expected_params, expected_metrics = run_steps(
    whole_batch, num_devices=num_devices
  )
  chex.assert_trees_all_close(metrics, expected_metrics, rtol=2e-5)
  chex.assert_trees_all_close(params, expected_params, atol=2e-6)


@functools.cache
def first_state_on_mesh(name: str) -> TrainState:
  """Returns the state that the program of a mesh initialises."""
  mesh = MeshConfig(data=1, fsdp=2, context=2, tensor=2)
  if not is_supported(VARIANTS[name], "context_parallelism"):
    mesh = MeshConfig(data=2, fsdp=2, context=1, tensor=2)
  return program_of(make_config(VARIANTS[name], mesh)).init()


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_a_mesh_does_not_change_the_first_state(name):
  """The program of a mesh draws the same random numbers as one device."""
  state = first_state_on_mesh(name)

  expected = first_state(make_config(VARIANTS[name]))
  chex.assert_trees_all_close(
    (state.params, state.opt_state),
    (expected.params, expected.opt_state),
    rtol=1e-6,
  )


def test_parameters_and_moments_of_adam_are_sharded():
  """Each device has a quarter of every matrix.

  The mesh axes fsdp and tensor, of two devices each, split a matrix.
  """
  state = first_state_on_mesh("diff")

  num_matrices = 0
  for leaf in jax.tree.leaves((state.params, state.opt_state)):
    # The first axis has the layers.
    is_matrix = leaf.ndim >= 3
    if is_matrix:
      num_matrices += 1
      shard = leaf.addressable_shards[0].data
      assert shard.size == leaf.size // 4, leaf.shape
  # The layers have 7 matrices, and Adam has two moments of each.
  assert num_matrices >= 3 * 7


def test_evaluation_is_summed_over_the_mesh():
  """Each device evaluates some rows. The sums are those over all rows."""
  batch = make_batch()
  # 1 for targets that end an n-gram seen before. Their losses are also summed.
  batch["hits"] = (batch["tokens"] % 2).astype(np.float32)
  # The number of bytes of each target.
  batch["bytes"] = np.ones((B, T), np.float32)

  def evaluate(num_devices):
    program = program_of(make_config(), num_devices)
    params = put_first_state(program).params
    sums = program.eval_step(params, put_batch(batch, program.mesh))
    return jax.device_get(sums)

  sums = evaluate(num_devices=8)

  expected = evaluate(num_devices=1)
  chex.assert_trees_all_close(sums, expected, rtol=1e-5)
  assert sums["weight"] == batch["weights"].sum()


def test_a_mesh_skips_a_step_with_a_far_larger_gradient():
  """A skipped step changes neither the parameters nor the moments of Adam."""
  config = make_config(VARIANTS["diff"], MeshConfig(1, 2, 2, 2))
  program = program_of(config)
  state = put_first_state(program)
  # A first step has no history, and is not skipped. It fills Adam's moments.
  first_batch = put_batch(make_batch(seed=0), program.mesh)
  state, metrics = program.train_step(state, first_batch)
  loss_and_norm = np.float32([metrics["loss"], metrics["grad_norm"]])

  # The optimizer skips a step whose loss or gradient norm is far above its
  # history. Here, the history has 100 steps, whose norms were 1000 times
  # smaller.
  skip_state, learning_rate_state = state.opt_state
  history = {
    "seen": np.int32(100),
    "mean": loss_and_norm * np.float32([1, 1e-3]),
    "variance": np.zeros(2, np.float32),
  }
  replicated = skip_state.mean.sharding
  skip_state = skip_state._replace(**jax.device_put(history, replicated))
  state = dataclasses.replace(
    state, opt_state=(skip_state, learning_rate_state)
  )
  # A step donates its state, so the state is copied before.
  params_before = jax.device_get(state.params)
  adam_before = jax.device_get(skip_state.inner)

  second_batch = put_batch(make_batch(seed=1), program.mesh)
  state, metrics = program.train_step(state, second_batch)

  assert int(metrics["skipped_steps"]) == 1
  assert int(metrics["skipped_in_a_row"]) == 1
  skip_state, _ = state.opt_state
  chex.assert_trees_all_equal(jax.device_get(state.params), params_before)
  chex.assert_trees_all_equal(jax.device_get(skip_state.inner), adam_before)


def sizes_of_arrays(pattern: str, text: str) -> list[int]:
  """Returns the number of elements of each shape that a pattern matches."""
  sizes = []
  for shape in re.findall(pattern, text):
    sizes.append(math.prod(int(size) for size in shape.split(",")))
  return sizes


def test_the_loss_communicates_once_outside_its_loop():
  """The loss is a loop over chunks of tokens.

  All devices need the whole embedding for each chunk, and sum its gradient.
  """
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  cross_entropy = sharded_cross_entropy(mesh)
  vocab_size = 64
  embed_dim = 32
  hidden = np.ones((B, T, embed_dim), np.float32)
  batch = put_batch(make_batch() | {"hidden": hidden}, mesh)
  embedding = jax.device_put(
    np.ones((vocab_size, embed_dim), np.float32),
    NamedSharding(mesh, rules.parameter_spec("embedding")),
  )

  def loss(embedding, batch):
    total, _ = cross_entropy(
      batch["hidden"], embedding, batch["targets"], batch["weights"], chunk=8
    )
    return total

  compiled = jax.jit(jax.grad(loss)).lower(embedding, batch).compile()

  # The text has the bodies of loops before the entry computation.
  loop_bodies, _, entry_computation = compiled.as_text().partition("ENTRY")
  assert " while(" in entry_computation
  # The embedding is gathered. The parts of its gradient are exchanged along
  # fsdp, and then summed along the other axes.
  for collective in ("all-gather", "all-to-all", "all-reduce"):
    assert f" {collective}(" in entry_computation
    assert f" {collective}(" not in loop_bodies
  # For example, "f32[16,32]{1,0} all-reduce(" sums 16 * 32 numbers.
  summed_shapes = r"f32\[([0-9,]+)\]\S* all-reduce\("
  summed_sizes = sizes_of_arrays(summed_shapes, entry_computation)
  # fsdp and tensor split the gradient in four.
  size_of_shard = vocab_size * embed_dim // 4
  assert 0 < max(summed_sizes) <= size_of_shard


# Rows that are too long for one device.

LONG_LENGTH = 32_768
NUM_CONTEXT_SHARDS = 8


def program_for_long_rows() -> Program:
  """Returns a program whose eight devices share the tokens of each row."""
  model = dataclasses.replace(
    MODEL,
    num_layers=1,
    embed_dim=16,
    ffn_dim=16,
    num_heads=1,
    num_kv_heads=1,
    max_length=LONG_LENGTH,
  )
  config = Config(
    model=model,
    mesh=MeshConfig(context=NUM_CONTEXT_SHARDS),
    data=DataConfig(length=LONG_LENGTH),
    train=TrainConfig(batch_size=1),
  )
  return build(config, make_mesh(config.mesh))


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
def test_a_device_never_has_all_logits_of_a_long_row():
  """The compiled step needs less than a quarter of their memory."""
  compiled = program_for_long_rows().lower_train_step().compile()

  temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
  # A device has an eighth of the queries, and two maps over all keys.
  num_maps = 2
  queries_of_device = LONG_LENGTH // NUM_CONTEXT_SHARDS
  float32_bytes = 4
  logits_bytes = num_maps * queries_of_device * LONG_LENGTH * float32_bytes
  assert temporary_bytes < logits_bytes / 4


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
def test_rows_too_long_for_a_device_are_split_over_eight():
  program = program_for_long_rows()
  shape = (1, LONG_LENGTH)
  rng = np.random.default_rng(0)
  row = {
    "tokens": rng.integers(0, 64, shape, np.int32),
    "targets": rng.integers(0, 64, shape, np.int32),
    "segment_ids": np.sort(rng.integers(0, 9, shape, np.int32), axis=1),
    "positions": np.arange(LONG_LENGTH, dtype=np.int32)[None],
    "weights": np.ones(shape, np.float32),
  }
  batch = put_batch(row, program.mesh)

  _, metrics = program.train_step(program.init(), batch)

  tokens_of_first_device = batch["tokens"].addressable_shards[0].data
  tokens_per_device = LONG_LENGTH // NUM_CONTEXT_SHARDS
  chex.assert_shape(tokens_of_first_device, (1, tokens_per_device))
  # An untrained model guesses one of 64 tokens: its loss is near log 64 = 4.2.
  assert 4 < float(metrics["loss"]) < 5
  # The norm is not tiny, so gradients reach the parameters.
  assert float(metrics["grad_norm"]) > 1e-3


# Attention.


def random_arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
  """Returns normally distributed arrays."""
  rng = np.random.default_rng(0)
  return [rng.standard_normal(shape, np.float32) for shape in shapes]


def test_attention_with_heads_on_a_tensor_axis_gathers_nothing():
  """Each device computes a part of the heads, and their gradients."""
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  B, T, H, K, num_maps, D, V = 4, 32, 8, 4, 2, 6, 12
  q, k, v = random_arrays(
    (B, T, H, num_maps, D), (B, T, K, num_maps, D), (B, T, K, V)
  )
  lam = np.float32(0.4)
  # Documents of 10 tokens.
  segment_ids = np.tile(np.arange(T, dtype=np.int32) // 10, (B, 1))

  def loss(attention, q, k, v, lam):
    output = attention(
      q, k, v, lam, q_segment_ids=segment_ids, kv_segment_ids=segment_ids
    )
    # The gradient of the sine depends on the output.
    return jnp.sum(jnp.sin(output))

  loss_and_gradients = jax.jit(
    jax.value_and_grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0
  )
  attention = sharded_attention(mesh, "chunked")
  compiled = loss_and_gradients.lower(attention, q, k, v, lam).compile()

  actual = compiled(q, k, v, lam)

  reference = functools.partial(diff_attention, implementation="reference")
  expected = loss_and_gradients(reference, q, k, v, lam)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_MODEL)
  assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize(
  "options",
  [
    pytest.param({"window": 5}, id="window"),
    pytest.param({"causal": False}, id="not causal"),
    pytest.param({"q_offset": np.array([0, 3, 1, 9])}, id="offsets of queries"),
  ],
)
def test_attention_on_a_mesh_has_the_options_of_attention(options):
  """The options of `diff_attention` also work if a mesh axis splits tokens.

  This axis, "context", needs the tokens in balanced order.
  """
  mesh = make_mesh(MeshConfig(data=2, context=2, tensor=2))
  B, T, H, K, num_maps, D, V = 4, 32, 4, 2, 2, 6, 12
  q, k, v = random_arrays(
    (B, T, H, num_maps, D), (B, T, K, num_maps, D), (B, T, K, V)
  )
  lam = 0.4
  order = balanced_order(T, shards=2)
  attention = functools.partial(sharded_attention(mesh, "chunked"), **options)

  actual = jax.jit(attention)(q[:, order], k[:, order], v[:, order], lam)

  reference = functools.partial(
    diff_attention, implementation="reference", **options
  )
  in_given_order = np.asarray(jax.jit(reference)(q, k, v, lam))
  expected = in_given_order[:, order]
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_balanced_order_gives_every_shard_the_same_work():
  """A shard is the part of a row for one device: here, 12 of 48 tokens."""
  order = balanced_order(48, shards=4)

  assert sorted(order) == list(range(48))
  # A causal query sees its own key and all keys before.
  num_keys = order + 1
  work_of_shards = num_keys.reshape(4, 12).sum(axis=1)
  # All queries together see 1 + 2 + … + 48 = 1176 keys, and 1176 / 4 = 294.
  assert work_of_shards.tolist() == [294, 294, 294, 294]


# Sizes that a mesh cannot have.


@pytest.mark.parametrize(
  ("mesh", "message"),
  [
    (MeshConfig(3), "multiply to the 8 devices"),
    (MeshConfig(-1, context=3), "context = 3, .*multiply to the 8 devices"),
  ],
)
def test_axes_must_multiply_to_the_number_of_devices(mesh, message):
  """An axis of -1 has all devices that the other axes leave."""
  with pytest.raises(UserError, match=message):
    make_mesh(mesh)


@pytest.mark.parametrize(
  ("model", "mesh", "message"),
  [
    pytest.param(
      dict(embed_dim=36),
      dict(fsdp=8),
      "config.mesh.fsdp = 8 does not divide the 36 .*config.model.embed_dim",
      id="embed_dim",
    ),
    pytest.param(
      dict(),
      dict(tensor=8),
      "config.mesh.tensor = 8 does not divide the 2"
      " .*config.model.num_kv_heads",
      id="num_kv_heads",
    ),
    pytest.param(
      dict(num_heads=8, num_kv_heads=8, ffn_dim=44),
      dict(tensor=8),
      "config.mesh.tensor = 8 does not divide the 44 .*config.model.ffn_dim",
      id="ffn_dim",
    ),
    pytest.param(
      dict(num_heads=8, num_kv_heads=8, vocab_size=65),
      dict(tensor=8),
      "config.mesh.tensor = 8 does not divide the 65 .*vocab_size",
      id="vocab_size",
    ),
    pytest.param(
      dict(attention_implementation="two_call"),
      dict(context=2),
      "attention_implementation = 'two_call' takes no offset, .*mesh.context",
      id="implementation without offsets",
    ),
  ],
)
def test_a_model_that_a_mesh_cannot_split_is_rejected(model, mesh, message):
  config = make_config(dataclasses.replace(MODEL, **model), MeshConfig(**mesh))
  with pytest.raises(UserError, match=message):
    build(config, make_mesh(config.mesh))


def test_rows_that_the_context_axis_cannot_split_are_rejected():
  """Each of the 4 shards of a row has two pieces: in all, 2 * 4 = 8 pieces."""
  config = make_config(mesh=MeshConfig(context=4, tensor=2))
  config = dataclasses.replace(config, data=DataConfig(length=36))
  message = (
    "config.data.length = 36 must be a multiple of 8 with"
    " config.mesh.context = 4"
  )
  with pytest.raises(UserError, match=message):
    build(config, make_mesh(config.mesh))


def test_a_batch_that_the_devices_cannot_share_is_rejected():
  """The data axis has all eight devices."""
  config = dataclasses.replace(make_config(), train=TrainConfig(batch_size=12))
  with pytest.raises(UserError, match="batch_size = 12 .* multiple of 8"):
    build(config, make_mesh(config.mesh))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_mesh_axis_splits_only_one_axis_of_a_parameter(name):
  """JAX rejects a sharding in which two axes of an array name one mesh axis."""
  mesh_axes = [axis for axis in rules.parameter_spec(name) if axis is not None]

  assert len(mesh_axes) == len(set(mesh_axes))


# Several processes and slices.


class Device:
  """The attributes of a TPU that `batch_share` and `make_mesh` read."""

  platform = "tpu"
  device_kind = "TPU v4"

  def __init__(self, number: int, process_index: int, slice_index: int = 0):
    self.id = number
    self.process_index = process_index
    self.slice_index = slice_index


def mesh_of_processes(mesh: MeshConfig, processes: Sequence[int]) -> Any:
  """Returns the attributes of a mesh whose devices belong to processes."""
  shape = dataclasses.astuple(mesh)
  devices = []
  for number, process in enumerate(processes):
    devices.append(Device(number, process))
  return types.SimpleNamespace(
    devices=np.array(devices).reshape(shape),
    shape=dict(zip(AXES, shape, strict=True)),
  )


@pytest.mark.parametrize(
  ("mesh_config", "processes_of_devices", "expected_shares"),
  [
    pytest.param(
      MeshConfig(data=4, tensor=2),
      [0, 0, 1, 1, 2, 2, 3, 3],
      ["0 of 4", "1 of 4", "2 of 4", "3 of 4"],
      id="each process has rows of its own",
    ),
    pytest.param(
      # Devices 0 to 3 have the first half of the rows.
      MeshConfig(data=2, context=2, tensor=2),
      [0, 0, 1, 1, 2, 2, 3, 3],
      ["0 of 2", "0 of 2", "1 of 2", "1 of 2"],
      id="two processes share the tokens of a row",
    ),
    pytest.param(
      # Process 0 has the first and the third eighth of the rows.
      MeshConfig(data=4, fsdp=2),
      [0, 1, 0, 1, 2, 3, 2, 3],
      ["0 of 4", "1 of 4", "2 of 4", "3 of 4"],
      id="rows of a process are not adjacent",
    ),
    pytest.param(
      MeshConfig(data=1, context=8),
      [0, 0, 0, 0, 1, 1, 1, 1],
      ["0 of 1", "0 of 1"],
      id="all processes share all rows",
    ),
    pytest.param(
      MeshConfig(data=2, fsdp=4),
      [0, 0, 1, 1, 2, 2, 3, 3],
      ["0 of 4", "1 of 4", "2 of 4", "3 of 4"],
      id="fsdp splits rows",
    ),
  ],
)
def test_each_process_reads_its_share_of_the_batch(
  mesh_config, processes_of_devices, expected_shares, monkeypatch
):
  """The axes data and fsdp split the rows of a batch.

  Processes whose devices have the same rows read the same share. The share "1
  of 4" is the second quarter.
  """
  mesh = mesh_of_processes(mesh_config, processes_of_devices)

  shares = []
  for process in range(len(expected_shares)):
    process_index = mock.Mock(return_value=process)
    monkeypatch.setattr(jax, "process_index", process_index)
    index, num_shares = batch_share(mesh)
    shares.append(f"{index} of {num_shares}")

  assert shares == expected_shares


def test_unequal_shares_of_the_batch_are_rejected():
  # Process 0 has three of four devices.
  mesh = mesh_of_processes(MeshConfig(data=4), [0, 0, 0, 1])
  with pytest.raises(UserError, match="cannot split the batch into equal"):
    batch_share(mesh)


@pytest.fixture
def devices_of_two_slices(monkeypatch):
  """Eight TPUs in two slices of two processes each."""

  # JAX's own function reads the coordinates of real TPUs.
  def create_device_mesh(shape, devices, **_):
    return np.array(devices).reshape(shape)

  monkeypatch.setattr(mesh_utils, "create_device_mesh", create_device_mesh)
  devices = []
  for number in range(8):
    devices.append(
      Device(number, process_index=number // 2, slice_index=number // 4)
    )
  return devices


def test_the_data_axis_separates_slices(devices_of_two_slices):
  """The data axis communicates least, and slices have a slow connection."""
  mesh = make_mesh(MeshConfig(data=2, fsdp=4), devices_of_two_slices)

  slices = []
  for row in mesh.devices:
    slices.append([device.slice_index for device in row.flat])
  assert slices == [[0, 0, 0, 0], [1, 1, 1, 1]]


def test_the_data_axis_must_be_a_multiple_of_the_slices(devices_of_two_slices):
  message = "config.mesh.data = 1 must be a multiple of the 2 slices"
  with pytest.raises(UserError, match=message):
    make_mesh(MeshConfig(data=1, fsdp=8), devices_of_two_slices)
