"""python -m diffjax.aot compiles for absent TPUs and reports what it finds.

The default tier reads programs that were compiled for eight CPU devices, and
text as TPU compilers write it. The full tier compiles whole training steps for
TPUs.
"""

import dataclasses
import importlib.util
import itertools
import math
import re
import subprocess
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from benchmarks import topologies
from diffjax.compiled import plan as planning
from diffjax.compiled import report
from diffjax.compiled.collectives import Collective, collectives
from diffjax.compiled.estimate import CollectiveSeconds, Estimate
from diffjax.compiled.hardware import Topology
from diffjax.compiled.text import windowed_einsums
from diffjax.config import (
  REMAT,
  Config,
  MeshConfig,
  TrainConfig,
  UserError,
  from_config_dict,
)
from diffjax.configs import tiny
from diffjax.ops.platform import platform
from diffjax.parallel.mesh import make_mesh
from diffjax.training.program import build
from tests.harness import ROOT, in_process
from tests.harness.tiers import full

GIB = 2**30
pytestmark = pytest.mark.usefixtures("optimised")
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)


# The collectives of programs for eight CPU devices.

KINDS = [
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
]


def communicate(kind: str, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Applies the collective `kind` along mesh axes, inside `shard_map`."""
  if kind == "all-reduce":
    return jax.lax.psum(x, axes)
  if kind == "all-gather":
    return jax.lax.all_gather(x, axes)
  if kind == "reduce-scatter":
    return jax.lax.psum_scatter(x, axes, tiled=True)
  if kind == "all-to-all":
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
  # Each device sends its shard to the next one.
  num_devices = jax.lax.axis_size(axes)
  pairs = [(n, (n + 1) % num_devices) for n in range(num_devices)]
  return jax.lax.ppermute(x, axes, pairs)


def bytes_received_in_a_ring(
  kind: str, shard_bytes: int, num_devices: int
) -> float:
  """Returns the bytes that each of `num_devices` receives in `communicate`."""
  if kind == "all-reduce":
    return shard_bytes * 2 * (num_devices - 1) / num_devices
  if kind == "all-gather":
    return shard_bytes * (num_devices - 1)
  if kind == "collective-permute":
    return shard_bytes
  return shard_bytes * (num_devices - 1) / num_devices


def compiled_collectives(
  function, mesh_shape: dict[str, int], shard_shape: tuple[int, int]
) -> list[Collective]:
  """Compiles a function for eight CPU devices, and reads its collectives.

  Args:
    function: is called inside `shard_map` with a device's shard of a float32
      array.
    mesh_shape: the number of devices along each axis.
    shard_shape: the shape of a shard.
  """
  mesh = jax.make_mesh(
    tuple(mesh_shape.values()),
    tuple(mesh_shape),
    axis_types=(AxisType.Auto,) * len(mesh_shape),
  )
  sharded = jax.shard_map(
    function,
    mesh=mesh,
    in_specs=P(mesh.axis_names),
    out_specs=P(mesh.axis_names),
    check_vma=False,
  )
  rows, columns = shard_shape
  x = np.ones((mesh.size * rows, columns), np.float32)
  text = jax.jit(sharded).lower(x).compile().as_text()
  return collectives(text, mesh.shape)


AXES = [
  ("data",),
  ("fsdp",),
  ("tensor",),
  ("data", "fsdp"),
  ("data", "tensor"),
  ("data", "fsdp", "tensor"),
]


def kinds_and_axes() -> list:
  """Returns all pairs of a kind and some axes, as parameters of a test.

  The default tier has an all-gather along all of these axes, and all kinds
  along two axes that are not neighbours.
  """
  parameters = []
  for kind, axes in itertools.product(KINDS, AXES):
    marks = pytest.mark.full
    if kind == "all-gather" or axes == ("data", "tensor"):
      marks = ()
    name = f"{kind}-{'-'.join(axes)}"
    parameters.append(pytest.param(kind, axes, id=name, marks=marks))
  return parameters


@pytest.mark.parametrize(("kind", "axes"), kinds_and_axes())
def test_a_collective_is_read_with_its_axes_and_bytes(kind, axes):
  """Devices communicate along some axes of the mesh."""
  mesh_shape = {"data": 2, "fsdp": 2, "tensor": 2}
  shard_shape = (32, 4)

  def program(shard):
    return communicate(kind, shard, axes)

  actual = compiled_collectives(program, mesh_shape, shard_shape)

  num_devices = math.prod(mesh_shape[axis] for axis in axes)
  shard_bytes = math.prod(shard_shape) * np.dtype(np.float32).itemsize
  expected_bytes = bytes_received_in_a_ring(kind, shard_bytes, num_devices)
  assert actual == [Collective(kind, axes, expected_bytes, times=1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_in_nested_loops_counts_each_iteration(kind):
  mesh_shape = {"data": 2, "fsdp": 2, "tensor": 2}
  shard_shape = (32, 4)
  axes = ("data", "fsdp")

  # The sine and the sum keep the collective inside the loop.
  def inner_step(x, _):
    return x + jnp.sum(jnp.sin(communicate(kind, x, axes))), None

  def outer_step(x, _):
    x, _ = jax.lax.scan(inner_step, x, None, length=3)
    return x, None

  def program(x):
    x, _ = jax.lax.scan(outer_step, x, None, length=5)
    return x

  actual = compiled_collectives(program, mesh_shape, shard_shape)

  num_devices = mesh_shape["data"] * mesh_shape["fsdp"]
  shard_bytes = math.prod(shard_shape) * np.dtype(np.float32).itemsize
  expected_bytes = bytes_received_in_a_ring(kind, shard_bytes, num_devices)
  assert actual == [Collective(kind, axes, expected_bytes, times=5 * 3)]


# The collectives in text as TPU compilers write it. Eight devices, in a mesh
# with data = 2 and fsdp = 4: "replica_groups=[2,4]<=[8]" are two groups of four
# neighbours, {{0,1,2,3},{4,5,6,7}}.


def program_text(*instructions: str, computations: str = "") -> str:
  """Returns the text of a program."""
  lines = [computations, "ENTRY %main (x: f32[8]) -> f32[8] {"]
  for instruction in instructions:
    lines.append(f"  {instruction}")
  lines.append("}\n")
  return "\n".join(lines)


def computation_text(name: str, *instructions: str) -> str:
  """Returns the text of a computation that instructions of a program call."""
  lines = [f"%{name} (x: bf16[4,8]) -> bf16[16,8] {{"]
  for instruction in instructions:
    lines.append(f"  {instruction}")
  lines.append("}\n")
  return "\n".join(lines) + "\n"


# A loop with the computation "body". Its counter is 2, 4, … 22.
LOOP_WITH_11_ITERATIONS = [
  "%start = s32[]{:T(128)} constant(2)",
  "%copy = s32[]{:T(128)} copy(%start)",
  "%tuple = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%copy, %x)",
  "%loop = (s32[], f32[8]) while(%tuple), condition=%condition, body=%body,"
  " metadata={}",
]


def loop_body(*instructions: str) -> str:
  """Returns the body and the condition of LOOP_WITH_11_ITERATIONS."""
  condition = computation_text(
    "condition",
    "%n = s32[]{:T(128)} get-tuple-element(%state), index=0",
    "%bound = s32[]{:T(128)} constant(24)",
    "ROOT %lt = pred[]{:T(512)} compare(%n, %bound), direction=LT",
  )
  body = computation_text(
    "body",
    *instructions,
    "%m = s32[]{:T(128)} get-tuple-element(%state), index=0",
    "%step = s32[]{:T(128)} constant(2)",
    "%next = s32[]{:T(128)} add(%m, %step)",
    "ROOT %t = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%next, %y)",
  )
  return body + condition


@pytest.mark.parametrize(
  ("groups", "axes"),
  [
    pytest.param(
      "replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), id="listed data"
    ),
    pytest.param(
      "replica_groups={{0,1,2,3},{4,5,6,7}}", ("fsdp",), id="listed fsdp"
    ),
    # [2,4]<=[8] reshapes the devices 0 to 7 to two groups of four.
    pytest.param("replica_groups=[2,4]<=[8]", ("fsdp",), id="iota"),
    pytest.param("replica_groups=[2,4]<=[2,4]", ("fsdp",), id="iota of a mesh"),
    # [2,4]T(1,0) transposes the devices [[0,1,2,3],[4,5,6,7]] first.
    pytest.param(
      "replica_groups=[4,2]<=[2,4]T(1,0)", ("data",), id="transposed iota"
    ),
    pytest.param(
      "replica_groups=[1,8]<=[8]", ("data", "fsdp"), id="iota of all"
    ),
    # The compiler's mesh of the transposed devices has other names of axes. The
    # axes of the groups are in braces: axis_0 is fsdp, and axis_2 is data.
    pytest.param(
      "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2],"
      " device_ids=([2,4]T(1,0)) {'axis_0'}",
      ("fsdp",),
      id="first mesh axis",
    ),
    pytest.param(
      "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2],"
      " device_ids=([2,4]T(1,0)) {'axis_2'}",
      ("data",),
      id="last mesh axis",
    ),
    pytest.param(
      "replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0','axis_1'}",
      ("data", "fsdp"),
      id="all mesh axes",
    ),
    # No groups are one group of all devices.
    pytest.param("replica_groups={}", ("data", "fsdp"), id="empty"),
  ],
)
def test_every_notation_of_groups_is_read(groups, axes):
  """A group of devices communicates. It determines the axes of the mesh.

  The mesh is [[0,1,2,3],[4,5,6,7]]: its rows are along fsdp.
  """
  mesh = {"data": 2, "fsdp": 4}
  text = program_text(
    "%a = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=1,"
    f" {groups}, dimensions={{0}}"
  )

  actual = collectives(text, mesh)

  group_size = math.prod(mesh[axis] for axis in axes)
  result_bytes = 8 * 16 * 2
  # Each device already has its own part of the result.
  received = result_bytes * (group_size - 1) / group_size
  assert actual == [Collective("all-gather", axes, received, times=1)]


def test_an_all_reduce_of_several_arrays_counts_all_of_them():
  mesh = {"data": 2, "fsdp": 4}
  # The result is a tuple of f32[16] and the scalar f32[]. Braces after a shape
  # are its layout in memory. The groups are pairs of devices along `data`.
  text = program_text(
    "%r = (f32[16]{0:T(128)S(1)}, /*index=1*/f32[]{:T(128)}) all-reduce(%x,"
    " %y), channel_id=9, replica_groups={{0,4},{1,5},{2,6},{3,7}},"
    " to_apply=%add"
  )

  actual = collectives(text, mesh)

  float32_bytes = 4
  arrays_bytes = (16 + 1) * float32_bytes
  # In a ring of n devices, each receives (n − 1) / n of the sums, and as much
  # of the gathered result.
  received = 2 * arrays_bytes * (mesh["data"] - 1) / mesh["data"]
  assert actual == [Collective("all-reduce", ("data",), received, times=1)]


def test_an_asynchronous_collective_counts_once():
  """A program starts it with one instruction, and ends it with another.

  The result of the first one is a tuple: the inputs, the result, and flags
  (u32). All devices of a group are along `fsdp`.
  """
  start_and_end_of_permute = [
    "%p = (bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[]{:S(2)}, u32[]{:S(2)})"
    " collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}",
    "%q = bf16[8,16]{1,0} collective-permute-done(%p)",
  ]
  start_and_end_of_all_to_all = [
    "%s = ((bf16[8,16]{1,0}), bf16[8,16]{1,0}, u32[]{:S(2)})"
    " all-to-all-start(%x), channel_id=8,"
    " replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
    "%t = bf16[8,16]{1,0} all-to-all-done(%s)",
  ]
  text = program_text(*start_and_end_of_permute, *start_and_end_of_all_to_all)

  actual = collectives(text, {"data": 2, "fsdp": 4})

  bfloat16_bytes = 2
  array_bytes = 8 * 16 * bfloat16_bytes
  assert actual == [
    # Device 0 receives the whole array of device 1.
    Collective("collective-permute", ("fsdp",), array_bytes, times=1),
    # A device keeps one of four parts, and receives three.
    Collective("all-to-all", ("fsdp",), array_bytes * 3 / 4, times=1),
  ]


def test_a_fusion_of_an_all_reduce_and_a_slice_is_a_reduce_scatter():
  """The TPU compiler writes a reduce-scatter as a fusion.

  It consists of an all-reduce and a slice of the result, the part that a device
  keeps. Here, the body of a loop calls the fusion.
  """
  all_reduce_and_slice = computation_text(
    "all-reduce-scatter.4.clone",
    "%b = f32[16,8]{1,0} all-reduce(%x), channel_id=4,"
    " replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add",
    "ROOT %s = f32[4,8]{1,0} dynamic-slice(%b, %i, %zero),"
    " dynamic_slice_sizes={4,8}",
  )
  body = loop_body(
    "%f.3 = f32[4,8]{1,0} fusion(%x), kind=kCustom,"
    " calls=%all-reduce-scatter.4.clone"
  )
  text = program_text(
    *LOOP_WITH_11_ITERATIONS, computations=all_reduce_and_slice + body
  )

  actual = collectives(text, {"data": 2, "fsdp": 4})

  float32_bytes = 4
  reduced_bytes = 16 * 8 * float32_bytes
  # In a ring of four devices, each receives three quarters of the array.
  received = reduced_bytes * 3 / 4
  assert actual == [Collective("reduce-scatter", ("fsdp",), received, times=11)]


def part_of_gather(name: str, chain: int) -> str:
  """Returns a computation with a part of an all-gather along `fsdp`.

  Parts of the same gather have the same chain. Each describes the whole gather.
  """
  return computation_text(
    name,
    f"%{name}.gather = bf16[16,8]{{1,0}} all-gather(%x), channel_id={chain},"
    " replica_groups=[2,4]<=[8], dimensions={0},"
    f' frontend_attributes={{chain_id="{chain}"}}',
  )


def test_the_parts_of_a_gather_count_once():
  """The compiler may cut a gather into a chain of parts, one in each fusion.

  A gather runs as often as its least frequent part: chain 0 in each iteration
  of a loop, and chain 1 once, because its first part comes before the loop.
  """
  parts = (
    part_of_gather("chain_0.part_1", chain=0)
    + part_of_gather("chain_0.part_2", chain=0)
    + part_of_gather("chain_1.part_1", chain=1)
    + part_of_gather("chain_1.part_2", chain=1)
  )
  body = loop_body(
    "%f.1 = (bf16[16,8]) fusion(%x), kind=kCustom, calls=%chain_0.part_1",
    "%f.2 = (bf16[16,8]) fusion(%x), kind=kCustom, calls=%chain_0.part_2",
    "%h.2 = (bf16[16,8]) fusion(%x), kind=kCustom, calls=%chain_1.part_2",
  )
  text = program_text(
    "%h.1 = (bf16[16,8]) fusion(%x), kind=kCustom, calls=%chain_1.part_1",
    *LOOP_WITH_11_ITERATIONS,
    computations=parts + body,
  )

  actual = collectives(text, {"data": 2, "fsdp": 4})

  bfloat16_bytes = 2
  gathered_bytes = 16 * 8 * bfloat16_bytes
  # Each of four devices along `fsdp` already has a quarter.
  received = gathered_bytes * 3 / 4
  assert actual == [
    Collective("all-gather", ("fsdp",), received, times=1),
    Collective("all-gather", ("fsdp",), received, times=11),
  ]


def test_the_exchange_between_slices_is_along_the_axis_of_slices():
  """Two slices of four TPUs each: `data` = 2 is the axis of slices.

  A program numbers only the four devices of its slice. Data of the other slice
  arrives through the host, by the instruction "recv". Its attribute
  "transfer_type" names the collective.
  """
  mesh = {"data": 2, "fsdp": 4}
  gather_in_the_slice = (
    "%g = bf16[16,8]{1,0} all-gather(%x), channel_id=3,"
    " replica_groups={{0,1,2,3}}, dimensions={0}"
  )
  reduce_in_the_slice = (
    "%a = f32[16]{0} all-reduce(%x), channel_id=4, replica_groups={},"
    " to_apply=%add"
  )
  receive_from_the_other_slice = (
    "%r = (bf16[23,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) recv(%t),"
    " channel_id=3, frontend_attributes={"
    '_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="ALL_REDUCE"}'
  )
  end_of_receive = (
    "%d = (bf16[23,8,128], token[]) recv-done(%r), frontend_attributes={"
    '_xla_host_transfer_handler_name="xla_megascale_runtime"}'
  )
  text = "HloModule jit_step, num_partitions=4\n" + program_text(
    gather_in_the_slice,
    reduce_in_the_slice,
    receive_from_the_other_slice,
    end_of_receive,
  )

  actual = collectives(text, mesh)

  bfloat16_bytes = 2
  float32_bytes = 4
  gathered_bytes = 16 * 8 * bfloat16_bytes
  reduced_bytes = 16 * float32_bytes
  exchanged_bytes = 23 * 8 * 128 * bfloat16_bytes
  # In a ring of n devices, each receives (n − 1) / n of a gather, and twice as
  # much of a reduction.
  assert actual == [
    Collective("all-gather", ("fsdp",), gathered_bytes * 3 / 4, times=1),
    Collective("all-reduce", ("fsdp",), 2 * reduced_bytes * 3 / 4, times=1),
    Collective("all-reduce", ("data",), 2 * exchanged_bytes * 1 / 2, times=1),
  ]


def test_windowed_einsums_are_counted():
  """A windowed einsum is a matrix product that loops over shards.

  The first two loops are such products, and the third is not.
  """
  text = program_text(
    "%w.1 = (bf16[8]) while(%t), condition=%c,"
    " body=%wide.windowed_dot_general_body_ag.1.clone, metadata={}",
    "%w.2 = (bf16[8]) while(%t), condition=%c,"
    " body=%wide.windowed_dot_general_body_ag.2.clone, metadata={}",
    "%x = (s32[]) while(%t), condition=%c, body=%body",
  )

  assert windowed_einsums(text) == 2


def test_a_loop_without_collectives_needs_no_count():
  """The condition is empty, so the number of iterations is unknown."""
  body = computation_text("body", "%y = s32[] add(%x, %x)")
  condition = computation_text("condition")
  text = program_text(
    "%loop = (s32[]) while(%t), condition=%condition, body=%body",
    computations=body + condition,
  )

  assert collectives(text, {"data": 2, "fsdp": 4}) == []


def test_a_collective_in_a_loop_without_a_count_is_an_error():
  """The condition is empty, so the number of iterations is unknown."""
  body = computation_text(
    "body", "%y = s32[8] all-reduce(%x), replica_groups={}, to_apply=%add"
  )
  condition = computation_text("condition")
  text = program_text(
    "%loop = (s32[]) while(%t), condition=%condition, body=%body",
    computations=body + condition,
  )

  with pytest.raises(ValueError, match="iterations"):
    collectives(text, {"data": 2, "fsdp": 4})


def test_groups_in_an_unknown_notation_are_an_error():
  text = program_text(
    "%y = s32[8] all-reduce(%x), replica_groups=mesh['x'=8] {'x':(1)2},"
    " to_apply=%add"
  )

  with pytest.raises(ValueError, match="devices"):
    collectives(text, {"data": 2, "fsdp": 4})


def test_the_platform_is_that_of_the_meshs_devices():
  """Programs can be compiled for TPUs in a process that has only CPUs."""
  cpu_mesh = jax.make_mesh((1,), ("data",)).abstract_mesh
  tpu = dataclasses.replace(cpu_mesh.abstract_device, platform="tpu")
  tpu_mesh = AbstractMesh((1,), ("data",), abstract_device=tpu)

  assert platform() == "cpu"
  with jax.sharding.use_abstract_mesh(tpu_mesh):
    assert platform() == "tpu"


# The compiler's messages.


def test_a_message_about_temporaries_is_read():
  refusal = planning.read_refusal(
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required"
    " for HLO temporaries (9.25G) exceeds available HBM (15.75G)."
  )

  assert refusal.needed == 9.25 * GIB
  assert refusal.available == 15.75 * GIB
  # The message counts only the temporaries, without parameters.
  assert refusal.is_temporaries


def test_a_message_about_all_memory_is_read():
  refusal = planning.read_refusal(
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 1.50T of"
    " 95.25G hbm. Exceeded hbm capacity by 1G."
  )

  # "T" are tebibytes.
  assert refusal.needed == 1.5 * 1024 * GIB
  assert refusal.available == 95.25 * GIB
  assert not refusal.is_temporaries


def test_another_message_of_the_compiler_is_an_error():
  """Only messages about memory say that a step does not fit."""
  message = "refuses the step: INTERNAL: Mosaic failed"
  with pytest.raises(UserError, match=message):
    planning.read_refusal("INTERNAL: Mosaic failed to compile TPU kernel")


# Whether a step fits, and suggestions if it does not.

# A step for four chips whose temporaries take the most memory.
PLAN = planning.Plan(
  chips=4,
  device_kind="TPU v5 lite",
  mesh={"data": 4, "fsdp": 1},
  parameters=4 * GIB,
  optimizer=8 * GIB,
  batch=0,
  temporaries=16 * GIB,
  program=0,
  available=15 * GIB,
  received={},
  unread="",
  kernels=(),
  seconds=1.0,
)


def test_a_step_fits_if_it_needs_at_most_the_available_memory():
  # The parameters and the optimizer leave 15 − 4 − 8 = 3 GiB for temporaries.
  plan = dataclasses.replace(
    PLAN, parameters=4 * GIB, optimizer=8 * GIB, available=15 * GIB
  )

  fitting = dataclasses.replace(plan, temporaries=3 * GIB)
  too_large = dataclasses.replace(plan, temporaries=3 * GIB + 1)

  assert fitting.fits
  assert not too_large.fits


def test_changes_that_reduce_temporaries_come_first_if_they_are_large():
  """Temporaries, such as activations, take more than the training state."""
  num_chips = 4
  batch_size = 128
  config = Config(
    train=TrainConfig(batch_size=batch_size, accumulation=1, loss_chunk=0),
    mesh=MeshConfig(data=-1),
  )
  plan = dataclasses.replace(
    PLAN,
    chips=num_chips,
    mesh={"data": num_chips, "fsdp": 1},
    parameters=4 * GIB,
    optimizer=8 * GIB,
    temporaries=16 * GIB,
    available=15 * GIB,
  )

  suggestions = report.changes(config, "v5e:2x2", slices=1, plan=plan)

  # A suggestion is a flag and its reason.
  flags = []
  for suggestion in suggestions:
    flag, _, _ = suggestion.partition(" ")
    flags.append(flag)
  reduce_temporaries = [
    "--config.model.remat=full",
    # A chip then computes one row at a time.
    f"--config.train.accumulation={batch_size // num_chips}",
    # The logits of 512 tokens at a time.
    "--config.train.loss_chunk=512",
  ]
  # The whole flag is "--config.mesh.data=1 --config.mesh.fsdp=4", which divides
  # parameters and optimizer among the chips.
  reduce_training_state = ["--config.mesh.data=1"]
  # Each of these 8 chips needs half of 4 + 8 + 16 GiB, which is less than 15.
  larger_topology = ["--topology=v5e:2x4"]
  assert flags == reduce_temporaries + reduce_training_state + larger_topology


def test_changes_that_reduce_the_training_state_come_first_if_it_is_large():
  """The training state needs 4 + 8 GiB of a chip, and the temporaries 4."""
  config = Config(train=TrainConfig(batch_size=128), mesh=MeshConfig(data=-1))
  plan = dataclasses.replace(
    PLAN, parameters=4 * GIB, optimizer=8 * GIB, temporaries=4 * GIB
  )

  suggestions = report.changes(config, "v5e:2x2", slices=1, plan=plan)

  # This shards the training state over all chips.
  assert suggestions[0].startswith("--config.mesh.data=1")


@pytest.mark.parametrize(
  ("chips", "mesh", "num_slices"),
  [
    pytest.param(4, {"data": 1, "fsdp": 4}, 1, id="one slice"),
    pytest.param(8, {"data": 2, "fsdp": 4}, 2, id="two slices"),
  ],
)
def test_the_suggested_topology_has_sufficient_memory(chips, mesh, num_slices):
  """Each of 4 chips needs 4 + 8 + 100 = 112 GiB, so each of 32 needs 14.

  A chip has 15 GiB. The topology is the shape of each slice.
  """
  config = Config(train=TrainConfig(batch_size=128), mesh=MeshConfig(data=-1))
  plan = dataclasses.replace(
    PLAN,
    chips=chips,
    mesh=mesh,
    parameters=4 * GIB,
    optimizer=8 * GIB,
    temporaries=100 * GIB,
    available=15 * GIB,
  )

  suggestions = report.changes(
    config, topology="v5e:2x2", slices=num_slices, plan=plan
  )

  assert suggestions[-1] == "--topology=v5e:4x8"


# The printed report.


def printed_report(capsys, **changes) -> str:
  """Returns what is printed for a plan with some changes."""
  plan = dataclasses.replace(PLAN, program=1, **changes)
  config = Config(train=TrainConfig(batch_size=128), mesh=MeshConfig(data=-1))
  report.print_plan(config, plan)
  return capsys.readouterr().out


def test_the_report_shows_the_estimated_seconds_and_the_bound_on_mfu(capsys):
  estimate = Estimate(
    parts={"feed-forward": 0.5, "attention kernels": 0.5},
    collectives={},
    longest=[],
  )

  text = printed_report(capsys, estimate=estimate, peak_seconds=0.6)

  rows = [line.split() for line in text.splitlines()]
  assert ["feed-forward", "0.5000"] in rows
  assert ["total", "1.0000"] in rows
  # The seconds at the peak of the chip, 0.6, over the estimated 1.0.
  assert "bound on MFU, the compiler's estimate: 60.0%\n" in text


def test_the_report_shows_the_exposed_part_of_collectives(capsys):
  """Computation overlaps the other part, so that it takes no time."""
  estimate = Estimate(
    parts={"feed-forward": 0.75, "exposed collectives": 0.25},
    collectives={
      "all-gather": CollectiveSeconds(total=0.5, exposed=0.125),
      "all-reduce": CollectiveSeconds(total=0.125, exposed=0.125),
    },
    longest=[],
  )

  text = printed_report(capsys, estimate=estimate, peak_seconds=0.6)

  # Nothing overlaps 0.25 of the 0.5 + 0.125 seconds, which is 40%.
  assert (
    "0.2500: 40% of all collectives; all-gather 0.1250 of 0.5000,"
    " all-reduce 0.1250 of 0.1250\n"
  ) in text


def test_the_report_shows_windowed_einsums_if_there_are_any(capsys):
  """A windowed einsum is a matrix product that loops over shards."""
  with_three = printed_report(capsys, windowed=3)
  without = printed_report(capsys, windowed=0)

  assert "windowed einsums: 3" in with_three
  assert "windowed" not in without


def test_the_report_says_that_kernels_have_no_estimate(capsys):
  """Then the bound on MFU is computed from the other operations."""
  estimate = Estimate(
    parts={"feed-forward": 0.5, "other": 0.25}, collectives={}, longest=[]
  )

  text = printed_report(
    capsys,
    estimate=estimate,
    peak_seconds=0.6,
    kernels=("diff_attention_forward_v1",),
  )

  # 0.6 seconds at the peak of the chip, over 0.5 + 0.25.
  assert (
    "80.0% (without attention kernels, for whose shape there is no estimate)"
  ) in text


def test_the_report_counts_the_calls_of_each_kernel(capsys):
  forward_calls = ("diff_attention_forward_v1",) * 3
  kernels = ("diff_attention_backward_v1", *forward_calls)

  text = printed_report(capsys, kernels=kernels)

  assert (
    "attention kernels: diff_attention_backward_v1,"
    " diff_attention_forward_v1 × 3\n"
  ) in text


@pytest.mark.parametrize(
  ("unread", "reason"),
  [
    pytest.param(
      "", "since there is none for this generation\n", id="no estimate"
    ),
    pytest.param(
      "a loop whose iterations cannot be read: x",
      "since the program has a loop whose",
      id="unread program",
    ),
  ],
)
def test_the_report_says_why_there_is_no_estimate(capsys, unread, reason):
  """`unread` is the part of the program that could not be read, or ""."""
  text = printed_report(capsys, unread=unread)

  assert f"the compiler's estimate: none, {reason}" in text


# The comparison of rematerialisation policies.


def plan_of_policy(
  gib: float, available_gib: float, seconds: float, seconds_at_peak: float = 0.5
) -> planning.Plan:
  """Returns the plan of a step, with its memory and its estimated time."""
  return dataclasses.replace(
    PLAN,
    parameters=0,
    optimizer=0,
    temporaries=gib * GIB,
    available=available_gib * GIB,
    estimate=Estimate(parts={"other": seconds}, collectives={}, longest=[]),
    peak_seconds=seconds_at_peak,
  )


def compare_policies(
  monkeypatch, plans: dict[str, planning.Plan]
) -> subprocess.CompletedProcess:
  """Runs the command with --remat, with these plans in place of a compiler."""

  def find_plan(config, topology, num_slices):
    return plans[config.model.remat]

  monkeypatch.setattr(planning, "compile_plan", find_plan)
  # This runs the command in the same process, so that it calls the fake.
  return in_process.call(
    "diffjax.aot", "--config=configs/tiny.py", "--topology=v5e:2x2", "--remat"
  )


def test_the_quickest_policy_that_fits_is_named(monkeypatch):
  plans = {
    # This is the quickest, but it needs more memory than a chip has.
    "none": plan_of_policy(gib=20, available_gib=15, seconds=1.0),
    "dots": plan_of_policy(gib=12, available_gib=15, seconds=2.0),
    "ffn": plan_of_policy(gib=11, available_gib=15, seconds=1.5),
    "gate": plan_of_policy(gib=10, available_gib=15, seconds=1.75),
    "attention": plan_of_policy(gib=9, available_gib=15, seconds=3.0),
    "full": plan_of_policy(gib=8, available_gib=15, seconds=4.0),
  }

  result = compare_policies(monkeypatch, plans)

  last_line = result.stdout.splitlines()[-1]
  assert last_line == "quickest that fits: --config.model.remat=ffn"


def test_each_policy_has_a_row_with_its_memory_time_and_bound(monkeypatch):
  """The bound on MFU is the time at the peak, relative to the whole time."""
  fitting = plan_of_policy(
    gib=12, available_gib=15, seconds=2.0, seconds_at_peak=0.5
  )
  too_large = plan_of_policy(gib=20, available_gib=15, seconds=2.0)
  plans = dict.fromkeys(REMAT, fitting) | {"none": too_large}

  result = compare_policies(monkeypatch, plans)

  header, *rows, _ = result.stdout.splitlines()
  assert "bound on MFU" in header
  expected = ["none 20.00 of 15.00 2.0000 25.0% does not fit"]
  for policy in ("dots", "ffn", "gate", "attention", "full"):
    expected.append(f"{policy} 12.00 of 15.00 2.0000 25.0%")
  assert [" ".join(row.split()) for row in rows] == expected


def test_a_comparison_in_which_no_policy_fits_is_an_error(monkeypatch):
  too_large = plan_of_policy(gib=16, available_gib=15, seconds=1.0)

  result = compare_policies(monkeypatch, dict.fromkeys(REMAT, too_large))

  assert result.returncode == 1
  assert "no policy fits" in result.stderr


# Errors of the command.


@pytest.mark.parametrize(
  ("arguments", "returncode", "message"),
  [
    pytest.param(
      [], 2, "error: pass --topology=GENERATION:CHIPS", id="no topology"
    ),
    pytest.param(
      ["--topology=v5e:3x3"],
      1,
      "error: --topology=v5e:3x3: there is no such slice;"
      " there are v5e:1x1, v5e:2x2, v5e:2x4, v5e:4x4",
      id="unknown slice",
    ),
    pytest.param(
      ["--topology=v9:2x2"],
      1,
      "there are v4:2x2x1 to v4:8x16x16, v5e:1x1 to v5e:16x16, v5p:2x2x1 to",
      id="unknown generation",
    ),
    pytest.param(
      ["--topology=v5e:2x2", "--slices=0"], 2, "--slices=0", id="no slices"
    ),
  ],
)
def test_the_error_for_an_invalid_flag_is_one_line(
  arguments, returncode, message
):
  result = in_process.call(
    "diffjax.aot", "--config=configs/tiny.py", *arguments
  )

  assert result.returncode == returncode, result.stderr
  [line] = result.stderr.splitlines()
  assert message in line


@needs_libtpu
@pytest.mark.parametrize(
  ("flag", "message"),
  [
    pytest.param(
      "--config.mesh.tensor=4",
      "config.mesh.tensor = 4 does not divide the 2 of layers/attention/key",
      id="heads",
    ),
    pytest.param(
      "--config.mesh.data=3",
      "config.mesh.data = 3, config.mesh.fsdp = 1",
      id="devices",
      marks=pytest.mark.full,
    ),
    pytest.param(
      "--config.train.batch_size=6",
      "config.train.batch_size = 6 over config.train.accumulation = 1 gives"
      " 6 rows, which the 4 parts of the batch",
      id="batch",
      marks=pytest.mark.full,
    ),
  ],
)
def test_the_error_for_a_config_that_does_not_fit_the_chips_is_one_line(
  flag, message
):
  """v5e:2x2 has four chips. The tiny config has two key-value heads."""
  result = in_process.call(
    "diffjax.aot", "--config=configs/tiny.py", "--topology=v5e:2x2", flag
  )

  assert result.returncode == 1, result.stderr
  [line] = result.stderr.splitlines()
  assert f"error: {message}" in line


@needs_libtpu
def test_a_compiler_that_ends_its_process_is_an_error(monkeypatch):
  """For an unknown flag, libtpu ends the process without an exception."""
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")

  result = in_process.call(
    "diffjax.aot", "--config=configs/tiny.py", "--topology=v5e:2x2"
  )

  assert result.returncode == 1, result.stderr
  last_line = result.stderr.splitlines()[-1]
  assert last_line.startswith("error: the TPU's compiler ended its process")


# The search for the smallest slice.


class Step(NamedTuple):
  """A training step that is compiled for a slice.

  Attributes:
    num_chips: the chips of the slice.
    rows: the rows of the batch that a chip computes at once.
    remat: the policy of rematerialisation.
  """

  num_chips: int
  rows: float
  remat: str


@pytest.fixture
def search_slices(monkeypatch, tmp_path):
  """Searches slices of v5e for the config diff_1b, without a compiler.

  search_slices(needed_gib) returns the steps that were compiled. The function
  `needed_gib` tells the memory of a step for each chip. The bound on MFU is
  7% for each row.
  """
  monkeypatch.setattr(topologies, "RESULTS", tmp_path / "compiled.json")
  flags = ["--configs", "diff_1b", "--generations", "v5e"]
  monkeypatch.setattr(sys, "argv", ["topologies", *flags])

  def search(needed_gib):
    compiled_steps = []

    def compile_plan(config, topology):
      num_chips = Topology.parse(topology).num_chips
      rows = config.train.batch_size / num_chips / config.train.accumulation
      step = Step(num_chips, rows, config.model.remat)
      compiled_steps.append(step)
      return types.SimpleNamespace(
        total=needed_gib(step) * GIB,
        # A chip of v5e has 15.75 GiB.
        fits=needed_gib(step) <= 15.75,
        estimate=types.SimpleNamespace(has_kernels=True),
        mfu_bound=0.07 * rows,
        seconds=1,
      )

    monkeypatch.setattr(topologies, "compile_plan", compile_plan)
    topologies.main()
    return compiled_steps

  return search


def test_the_table_has_the_smallest_slices_that_fit_and_reach_half_of_mfu(
  search_slices, capsys
):
  """On each slice, the config has the fewest changes with which it fits.

  First, accumulation divides the batch, which has 128 rows. The last change is
  full rematerialisation. The bound on MFU is 7% for each row that a chip
  computes at once.
  """

  def needed_gib(step):
    # All chips share the training state.
    state_gib = 60 / step.num_chips
    gib_of_a_row = 1.0
    if step.remat == "full":
      gib_of_a_row = 0.5
    return state_gib + step.rows * gib_of_a_row

  search_slices(needed_gib)

  # A chip has 15.75 GiB. Each of 4 chips has 128 / 4 = 32 rows, and can compute
  # them one by one: 60 / 4 + 1 · 0.5 GiB.
  smallest_slice = "`v5e:2x2`, accumulation 32, remat full: 15.5 GiB, 7%"
  # Each of 8 chips has 128 / 8 = 16 rows, and can compute half of them at once:
  # 60 / 8 + 8 · 1.0 GiB.
  slice_with_half_of_mfu = "`v5e:2x4`, accumulation 2: 15.5 GiB, 56%"
  printed = capsys.readouterr().out
  assert f"| {smallest_slice}<br>{slice_with_half_of_mfu} |" in printed


def test_slices_are_searched_with_few_compilations(search_slices):
  compiled_steps = search_slices(
    lambda step: 60 / step.num_chips + 0.5 * step.rows
  )

  # The config fits v5e:2x2 with accumulation, and v5e:2x4. There are 7 and 6
  # changes to try. A binary search tries the last, and 3 of the others.
  num_slices = 2
  assert len(compiled_steps) <= num_slices * (1 + 3)
  # No step is compiled twice.
  assert len(set(compiled_steps)) == len(compiled_steps)


def test_the_results_of_a_search_are_not_compiled_again(search_slices):
  def needed_gib(step):
    return 60 / step.num_chips

  assert len(search_slices(needed_gib)) > 0
  assert search_slices(needed_gib) == []


def test_configs_that_the_flag_does_not_name_are_not_compiled(
  search_slices, capsys
):
  """`search_slices` sets --configs=diff_1b."""
  search_slices(lambda step: 60 / step.num_chips)

  assert "not compiled: diff_3b v5e:2x2" in capsys.readouterr().out


# Steps that are compiled for TPUs.


class MeshDescription(NamedTuple):
  """A mesh, described for another process than the compiler's.

  Attributes:
    shape: the number of devices along data, fsdp, context and tensor.
    num_devices: the number of different devices.
    slices_of_parts: for each index of `data`, how many slices its devices
      belong to.
  """

  shape: tuple[int, ...]
  num_devices: int
  slices_of_parts: list[int]


def describe_mesh(
  devices, num_chips, chip_memory, num_slices
) -> MeshDescription:
  """Describes a mesh of TPUs. It is called in the compiler's process."""
  mesh = make_mesh(MeshConfig(data=num_slices, fsdp=8, context=2), devices)
  slices_of_parts = []
  for part in mesh.devices:
    slice_indices = set()
    for device in part.flat:
      # Devices of a single slice have no index.
      slice_indices.add(getattr(device, "slice_index", 0))
    slices_of_parts.append(len(slice_indices))
  return MeshDescription(
    shape=mesh.devices.shape,
    num_devices=len(set(mesh.devices.flat)),
    slices_of_parts=slices_of_parts,
  )


@needs_libtpu
@pytest.mark.parametrize("num_slices", [*full([1]), 2])
def test_axes_may_share_a_dimension_of_the_torus(num_slices):
  """A slice of v6e:4x4 is a torus of 4 × 4 chips.

  The axes fsdp = 8 and context = 2 share these chips.
  """
  mesh = planning.call_with_devices(
    describe_mesh, num_slices, topology="v6e:4x4", slices=num_slices
  )

  # The sizes of data, fsdp, context and tensor.
  assert mesh.shape == (num_slices, 8, 2, 1)
  # Every device occurs once.
  assert mesh.num_devices == 16 * num_slices
  # Only `data` crosses slices.
  assert mesh.slices_of_parts == [1] * num_slices


def run_as_typed(*arguments: str) -> subprocess.CompletedProcess:
  """Runs `python -m diffjax.aot ARGUMENTS`, as a user does.

  The test needs a process whose main module is the command, because the
  compiler's process returns objects of that module.
  """
  return subprocess.run(
    [sys.executable, "-m", "diffjax.aot", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1800,
  )


# A call of a kernel has no "× 2": the backward pass does not run the forward
# kernel a second time. "online" is a fallback.
LINE_WITH_ONE_CALL_OF_EACH_KERNEL = (
  "\nattention kernels: diff_attention_backward_v1, diff_attention_forward_v1,"
  " diff_attention_forward_v1_online\n"
)


@needs_libtpu
@pytest.mark.full
def test_a_step_of_the_tiny_config_compiles_with_the_kernels():
  """It runs the forward kernel once, not again in the backward pass."""
  result = run_as_typed(
    "--config=configs/tiny.py",
    "--topology=v5e:2x2",
    "--config.model.num_layers=1",
    "--config.mesh.fsdp=2",
  )

  assert result.returncode == 0, result.stderr
  assert "4 chips (TPU v5 lite), mesh data 2 × fsdp 2" in result.stdout
  assert LINE_WITH_ONE_CALL_OF_EACH_KERNEL in result.stdout
  assert re.search(r"\n  fsdp +0\.\d+: all-gather ", result.stdout)
  assert result.stdout.endswith("\nfits\n")


@needs_libtpu
@pytest.mark.full
def test_a_step_that_does_not_fit_is_an_error_with_suggestions():
  result = run_as_typed(
    "--config=configs/tiny.py",
    "--topology=v5e:2x2",
    "--config.train.batch_size=65536",
  )

  assert result.returncode == 1, result.stderr
  assert "error: does not fit: " in result.stderr
  assert "--config.model.remat=full" in result.stderr


def printed_bound_on_mfu(output: str) -> float:
  """Returns the bound on MFU that the command printed, in percent."""
  pattern = r"\nbound on MFU, the compiler's estimate: ([\d.]+)%\n"
  match = re.search(pattern, output)
  assert match is not None, output
  return float(match[1])


def printed_exposed_fraction(output: str, kind: str) -> float:
  """Returns the fraction of a kind of collective that nothing overlaps.

  The command prints, for example, "all-gather 0.1250 of 0.5000" seconds.
  """
  match = re.search(rf"{kind} ([\d.]+) of ([\d.]+)", output)
  assert match is not None, output
  exposed_seconds = float(match[1])
  total_seconds = float(match[2])
  return exposed_seconds / total_seconds


@needs_libtpu
@pytest.mark.full
@pytest.mark.parametrize(
  ("arguments", "least_mfu_percent", "largest_exposed_fractions"),
  [
    pytest.param(
      ["--config=configs/diff_1b.py", "--topology=v5e:4x4"],
      58,
      {"all-gather": 0.2, "all-to-all": 0.2},
      id="diff_1b",
    ),
    pytest.param(
      [
        "--config=configs/diff_13b.py",
        "--topology=v5p:4x4x4",
        "--config.mesh.data=4",
        "--config.mesh.fsdp=16",
      ],
      63,
      {"all-gather": 0.05, "reduce-scatter": 0.05},
      id="diff_13b",
    ),
  ],
)
def test_the_paper_configs_fit_and_keep_their_bound_on_mfu(
  arguments, least_mfu_percent, largest_exposed_fractions
):
  """The step has not become slower than it was when the limits were written.

  Then the compiler's estimates were at these limits, rounded. A collective is
  exposed while no computation overlaps it.
  """
  result = run_as_typed(*arguments)

  assert result.returncode == 0, result.stderr
  assert result.stdout.endswith("\nfits\n")
  assert LINE_WITH_ONE_CALL_OF_EACH_KERNEL in result.stdout
  # "windowed einsums" would be matrix products that loop over shards.
  assert "windowed" not in result.stdout
  assert printed_bound_on_mfu(result.stdout) >= least_mfu_percent
  for kind, limit in largest_exposed_fractions.items():
    assert printed_exposed_fraction(result.stdout, kind) <= limit, kind


@pytest.mark.longest
@needs_libtpu
@pytest.mark.full
def test_a_published_model_of_12_billion_can_be_tuned_on_16_chips():
  result = run_as_typed(
    "--config=configs/motif_2_12b.py", "--topology=v5p:2x2x4"
  )

  assert result.returncode == 0, result.stderr
  assert result.stdout.endswith("\nfits\n")
  assert LINE_WITH_ONE_CALL_OF_EACH_KERNEL in result.stdout
  assert "windowed" not in result.stdout


def compile_policies(devices, num_chips, chip_memory) -> list[str]:
  """Returns the remat policies whose steps compile with a backward kernel.

  It is called in the compiler's process.
  """
  policies = []
  for policy in REMAT:
    values = tiny.get_config()
    # A small step, which compiles quickly.
    values.update_from_flattened_dict(
      {
        "model.remat": policy,
        "model.num_layers": 1,
        "data.length": 128,
        # A row for each chip.
        "train.batch_size": 4,
      }
    )
    config = from_config_dict(values)
    program = build(config, make_mesh(config.mesh, devices))
    text = program.lower_train_step().compile().as_text()
    if "diff_attention_backward_v1" in text:
      policies.append(policy)
  return policies


@needs_libtpu
@pytest.mark.full
def test_every_remat_policy_compiles_for_a_tpu():
  policies = planning.call_with_devices(compile_policies, topology="v5e:2x2")

  assert policies == list(REMAT)
