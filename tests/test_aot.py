"""The command that compiles for absent TPUs: what a program sends, read from its text; what it says of bad input; two configs that fit.

The default tier reads programs compiled for eight CPU devices and lines as TPU compilers write them; the full one compiles whole steps.
"""

import dataclasses
import functools
import importlib.util
import math
import pathlib
import re
import subprocess
import sys
import textwrap
import types

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
from diffjax.compiled.text import windowed_einsums
from diffjax.config import REMAT, Config, MeshConfig, TrainConfig, UserError
from diffjax.ops.platform import platform
from tests.harness.tiers import full

ROOT = pathlib.Path(__file__).parents[1]
MESH = {"data": 2, "fsdp": 4}
pytestmark = pytest.mark.usefixtures("optimised")
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)


@pytest.fixture
def run(command):
  return lambda *args: command("diffjax.aot", *args)


def compile_(*args):
  """The command in a process as a user starts it: what the compiler's process hands back is of this one's main module."""
  return subprocess.run(
    [sys.executable, "-m", "diffjax.aot", *args],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1800,
  )


ARRAY = (
  32 * 4 * 4
)  # bytes of the shard that a device holds in the programs below


def _ring(axis):
  return [
    (n, (n + 1) % jax.lax.axis_size(axis))
    for n in range(jax.lax.axis_size(axis))
  ]


@pytest.mark.parametrize(
  "axes",
  [
    ("data",),
    ("fsdp",),
    ("tensor",),
    ("data", "fsdp"),
    ("data", "tensor"),
    ("data", "fsdp", "tensor"),
  ],
  ids="-".join,
)
@pytest.mark.parametrize(
  "kind, function, shares",  # bytes received in shards, from the number n of devices
  [
    (
      "all-reduce",
      lambda x, axes: jax.lax.psum(x, axes),
      lambda n: 2 * (n - 1) / n,
    ),
    (
      "all-gather",
      lambda x, axes: jax.lax.all_gather(x, axes),
      lambda n: n - 1,
    ),
    (
      "reduce-scatter",
      lambda x, axes: jax.lax.psum_scatter(x, axes, tiled=True),
      lambda n: (n - 1) / n,
    ),
    (
      "all-to-all",
      lambda x, axes: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
      lambda n: (n - 1) / n,
    ),
    (
      "collective-permute",
      lambda x, axes: jax.lax.ppermute(x, axes, _ring(axes)),
      lambda n: 1,
    ),
  ],
)
def test_every_collective_over_every_axis(kind, function, shares, axes):
  """Once, and in a loop inside a loop of 5 and 3."""
  mesh = jax.make_mesh(
    (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
  )
  sharded = functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=P(mesh.axis_names),
    out_specs=P(mesh.axis_names),
    check_vma=False,
  )

  def loop(x):
    inner = lambda x: jax.lax.scan(
      lambda x, _: (x + jnp.sum(jnp.sin(function(x, axes))), None),
      x,
      None,
      length=3,
    )[0]
    return jax.lax.scan(lambda x, _: (inner(x), None), x, None, length=5)[0]

  expected = Collective(kind, axes, ARRAY * shares(2 ** len(axes)), 1)
  for program, times in ((lambda x: function(x, axes), 1), (loop, 15)):
    text = (
      jax.jit(sharded(program))
      .lower(np.ones((8 * 32, 4), np.float32))
      .compile()
      .as_text()
    )
    assert collectives(text, mesh.shape) == [expected._replace(times=times)]


def program(*lines, computations=""):
  """A program's text with these instructions and computations."""
  return (
    textwrap.dedent(computations)
    + "\nENTRY %main (x: f32[8]) -> f32[8] {\n"
    + "".join(f"  {line}\n" for line in lines)
    + "}\n"
  )


@pytest.mark.parametrize(
  "groups, axes",
  [
    ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("fsdp",)),
    ("replica_groups=[2,4]<=[8]", ("fsdp",)),
    ("replica_groups=[2,4]<=[2,4]", ("fsdp",)),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
    ("replica_groups=[1,8]<=[8]", ("data", "fsdp")),
    (
      "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
      ("fsdp",),
    ),
    (
      "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_2'}",
      ("data",),
    ),
    (
      "replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0','axis_1'}",
      ("data", "fsdp"),
    ),
    ("replica_groups={}", ("data", "fsdp")),
  ],
)
def test_groups_however_they_are_written(groups, axes):
  line = f"%a = bf16[8,16]{{1,0:T(8,128)(2,1)}} all-gather(%x), channel_id=1, {groups}, dimensions={{0}}"
  devices = {("data",): 2, ("fsdp",): 4}.get(axes, 8)
  assert collectives(program(line), MESH) == [
    Collective("all-gather", axes, 256 * (devices - 1) / devices, 1)
  ]


def test_as_tpu_compilers_write():
  """A loop that counts from 2 to 24 by 2; gathers in parts, one of them in that loop; a reduce-scatter as all-reduce and slice."""
  fsdp, data = "replica_groups=[2,4]<=[8]", "replica_groups=[4,2]<=[2,4]T(1,0)"
  text = program(
    "%start = s32[]{:T(128)} constant(2)",
    "%copy = s32[]{:T(128)} copy(%start)",
    "%tuple = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%copy, %x)",
    "%started = (bf16[16,8]) fusion(%x), kind=kCustom, calls=%other.1",
    "%loop = (s32[], f32[8]) while(%tuple), condition=%condition, body=%body, metadata={}",
    f"%r = (f32[16]{{0:T(128)S(1)}}, /*index=1*/f32[]{{:T(128)}}) all-reduce(%x, %y), channel_id=9, {data}, to_apply=%add",
    "%p = (bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}",
    "%q = bf16[8,16]{1,0} collective-permute-done(%p)",
    f"%s = ((bf16[8,16]{{1,0}}), bf16[8,16]{{1,0}}, u32[]{{:S(2)}}) all-to-all-start(%x), channel_id=8, {fsdp}, dimensions={{0}}",
    "%t = bf16[8,16]{1,0} all-to-all-done(%s)",
    computations=f"""
      %part.1 (x: bf16[4,8]) -> bf16[16,8] {{
        %a.1 = bf16[16,8]{{1,0}} all-gather(%x), channel_id=3, {fsdp}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
      }}

      %part.2 (x: bf16[4,8]) -> bf16[16,8] {{
        %a.2 = bf16[16,8]{{1,0}} all-gather(%x), channel_id=3, {fsdp}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
      }}

      %other.1 (x: bf16[4,8]) -> bf16[16,8] {{
        %h.1 = bf16[16,8]{{1,0}} all-gather(%x), channel_id=5, {fsdp}, dimensions={{0}}, frontend_attributes={{chain_id="1"}}
      }}

      %other.2 (x: bf16[4,8]) -> bf16[16,8] {{
        %h.2 = bf16[16,8]{{1,0}} all-gather(%x), channel_id=5, {fsdp}, dimensions={{0}}, frontend_attributes={{chain_id="1"}}
      }}

      %all-reduce-scatter.4.clone (x: f32[16,8]) -> f32[4,8] {{
        %b = f32[16,8]{{1,0}} all-reduce(%x), channel_id=4, {fsdp}, to_apply=%add
        ROOT %s = f32[4,8]{{1,0}} dynamic-slice(%b, %i, %zero), dynamic_slice_sizes={{4,8}}
      }}

      %body (state: (s32[], f32[8])) -> (s32[], f32[8]) {{
        %f.1 = (bf16[16,8]) fusion(%x), kind=kCustom, calls=%part.1
        %f.2 = (bf16[16,8]) fusion(%x), kind=kCustom, calls=%part.2
        %h.2 = (bf16[16,8]) fusion(%x), kind=kCustom, calls=%other.2
        %f.3 = f32[4,8]{{1,0}} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.4.clone
        %m = s32[]{{:T(128)}} get-tuple-element(%state), index=0
        %step = s32[]{{:T(128)}} constant(2)
        %next = s32[]{{:T(128)}} add(%m, %step)
        ROOT %t = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%next, %y)
      }}

      %condition (state: (s32[], f32[8])) -> pred[] {{
        %n = s32[]{{:T(128)}} get-tuple-element(%state), index=0
        %bound = s32[]{{:T(128)}} constant(24)
        ROOT %lt = pred[]{{:T(512)}} compare(%n, %bound), direction=LT
      }}
      """.replace("\n      ", "\n"),
  )
  assert collectives(text, MESH) == [
    Collective("reduce-scatter", ("fsdp",), 512 * 3 / 4, 11),
    Collective("all-reduce", ("data",), 2 * (64 + 4) / 2, 1),
    Collective("collective-permute", ("fsdp",), 256, 1),
    Collective("all-to-all", ("fsdp",), 256 * 3 / 4, 1),
    Collective("all-gather", ("fsdp",), 256 * 3 / 4, 1),
    Collective("all-gather", ("fsdp",), 256 * 3 / 4, 11),
  ]


def test_slices():
  """Two slices of four devices: a slice's own collectives in its own numbers, and what comes from the other one through the host."""
  recv = "%r = (bf16[23,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) recv(%t), channel_id=3, frontend_attributes={_xla_megascale_target="
  text = "HloModule jit_step, num_partitions=4\n" + program(
    "%g = bf16[16,8]{1,0} all-gather(%x), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}",
    "%a = f32[16]{0} all-reduce(%x), channel_id=4, replica_groups={}, to_apply=%add",
    recv + '"{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}',
    '%d = (bf16[23,8,128], token[]) recv-done(%r), frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}',
  )
  assert collectives(text, MESH) == [
    Collective("all-gather", ("fsdp",), 256 * 3 / 4, 1),
    Collective("all-reduce", ("fsdp",), 2 * 64 * 3 / 4, 1),
    Collective("all-reduce", ("data",), 2 * 23 * 8 * 128 * 2 / 2, 1),
  ]


def test_windowed_einsums_are_counted():
  loop = "%w.{0} = (bf16[8]) while(%t), condition=%c, body=%wide.windowed_dot_general_body_ag.{0}.clone, metadata={{}}"
  assert (
    windowed_einsums(
      program(
        loop.format(1),
        loop.format(2),
        "%x = (s32[]) while(%t), condition=%c, body=%body",
      )
    )
    == 2
  )


def test_what_cannot_be_read_is_an_error():
  loop = "%loop = (s32[]) while(%tuple), condition=%condition, body=%body"
  body = "%body (x: s32[]) -> s32[] {{\n  {}\n}}\n%condition (x: s32[]) -> pred[] {{\n}}\n"
  assert (
    collectives(
      program(loop, computations=body.format("%y = s32[] add(%x, %x)")), MESH
    )
    == []
  )
  line = "%y = s32[8] all-reduce(%x), {}, to_apply=%add"
  with pytest.raises(ValueError, match="iterations"):
    collectives(
      program(loop, computations=body.format(line.format("replica_groups={}"))),
      MESH,
    )
  with pytest.raises(ValueError, match="devices"):
    collectives(
      program(line.format("replica_groups=mesh['x'=8] {'x':(1)2}")), MESH
    )


def test_attention_is_picked_for_the_devices_of_the_mesh():
  assert platform() == "cpu"
  device = dataclasses.replace(
    jax.make_mesh((1,), ("data",)).abstract_mesh.abstract_device, platform="tpu"
  )
  with jax.sharding.use_abstract_mesh(
    AbstractMesh((1,), ("data",), abstract_device=device)
  ):
    assert platform() == "tpu"


@pytest.mark.parametrize(
  "message, expected",
  [
    (
      "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (9.25G) exceeds available HBM (15.75G).",
      (9.25, 15.75, True),
    ),
    (
      "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 1.50T of 95.25G hbm. Exceeded hbm capacity by 1G.",
      (1536, 95.25, False),
    ),
  ],
)
def test_a_refusal_is_read(message, expected):
  needed, available, of_temporaries = planning._read_refusal(message)
  assert (needed / 2**30, available / 2**30, of_temporaries) == expected


def test_another_refusal_is_told():
  with pytest.raises(
    UserError, match="refuses the step: INTERNAL: Mosaic failed"
  ):
    planning._read_refusal("INTERNAL: Mosaic failed to compile TPU kernel")


def test_changes_are_of_what_dominates():
  config = Config(train=TrainConfig(batch_size=128), mesh=MeshConfig(data=-1))
  plan = planning.Plan(
    4,
    "TPU v5 lite",
    {"data": 4, "fsdp": 1},
    4 << 30,
    8 << 30,
    0,
    16 << 30,
    0,
    15 << 30,
    {},
    "",
    (),
    1.0,
  )
  changes = report.changes(config, "v5e:2x2", 1, plan)
  assert [change.split(" ")[0] for change in changes] == [
    "--config.model.remat=full",
    "--config.train.accumulation=32",
    "--config.train.loss_chunk=512",
    "--config.mesh.data=1",
    "--topology=v5e:2x4",
  ]
  assert (
    not plan.fits and dataclasses.replace(plan, temporaries=3 << 30).fits
  )  # 15 GiB, as available
  assert report.changes(
    config, "v5e:2x2", 1, dataclasses.replace(plan, temporaries=4 << 30)
  )[0].startswith("--config.mesh.data=1")
  sharded = dataclasses.replace(
    plan, mesh={"data": 1, "fsdp": 4}, temporaries=100 << 30
  )
  assert report.changes(config, "v5e:2x2", 1, sharded)[3:] == [
    "--topology=v5e:4x8"
  ]  # 112 GiB of 4 chips: 14 of 32
  of_two = dataclasses.replace(sharded, chips=8, mesh={"data": 2, "fsdp": 4})
  assert report.changes(config, "v5e:2x2", 2, of_two)[3:] == [
    "--topology=v5e:4x8"
  ]  # as much of 8 chips, twice 4: 14 of twice 32


@pytest.mark.parametrize(
  "args, code, message",
  [
    ([], 2, "error: pass --topology=GENERATION:CHIPS"),
    (
      ["--topology=v5e:3x3"],
      1,
      "error: --topology=v5e:3x3: there is no such slice; there are v5e:1x1, v5e:2x2, v5e:2x4, v5e:4x4",
    ),
    (
      ["--topology=v9:2x2"],
      1,
      "there are v4:2x2x1 to v4:8x16x16, v5e:1x1 to v5e:16x16, v5p:2x2x1 to",
    ),
    (["--topology=v5e:2x2", "--slices=0"], 2, "--slices=0"),
  ],
)
def test_bad_input_is_one_line(run, args, code, message):
  result = run("--config=configs/tiny.py", *args)
  assert (
    result.returncode == code
    and message in result.stderr
    and len(result.stderr.splitlines()) == 1
  ), result.stderr


def test_slices_are_searched_with_few_compilations(monkeypatch, tmp_path):
  """Where a chip takes a share of the state and something for each of its rows, of which rematerialisation saves half."""
  monkeypatch.setattr(topologies, "RESULTS", tmp_path / "compiled.json")
  asked = []

  def compile_plan(config, topology):
    chips = math.prod(map(int, topology.partition(":")[2].split("x")))
    rows = config.train.batch_size / chips / config.train.accumulation
    asked.append((chips, rows, config.model.remat))
    gib = 62 / chips + rows * (0.25 if config.model.remat == "full" else 0.5)
    estimate = types.SimpleNamespace(has_kernels=True)
    return types.SimpleNamespace(
      total=gib * 2**30,
      fits=gib <= 15.75,
      estimate=estimate,
      mfu_bound=0.3 + rows / 40,
      seconds=1,
    )

  monkeypatch.setattr(topologies, "compile_plan", compile_plan)
  compiled = topologies.Compiled()
  first = topologies.smallest(
    "diff_1b", "v5e", compiled
  )  # 22.6 GB of parameters, optimizer and gradients; 128 rows
  changes = {"train.accumulation": 32, "model.remat": "full"}
  assert first == topologies.Result(
    config="diff_1b",
    topology="v5e:2x2",
    overrides=changes,
    gib=15.75,
    fits=True,
    mfu_bound=0.325,
  )
  half = topologies.Result(
    config="diff_1b",
    topology="v5e:2x4",
    overrides={},
    gib=15.75,
    fits=True,
    mfu_bound=0.7,
  )
  assert topologies.smallest_at_half("diff_1b", "v5e", compiled) == (half, half)
  assert len(asked) <= 10 and len(set(asked)) == len(asked)
  assert (
    topologies.smallest("diff_1b", "v5e", topologies.Compiled(offline=True))
    == first
  )
  with pytest.raises(topologies.NotCompiled, match="diff_3b v5e:2x2"):
    topologies.smallest("diff_3b", "v5e", topologies.Compiled(offline=True))


@needs_libtpu
@pytest.mark.parametrize(
  "args, message",
  [
    (
      ["--config.mesh.tensor=4"],
      "config.mesh.tensor = 4 does not divide the 2 of layers/attention/key",
    ),
    *full(
      [
        (
          ["--config.mesh.data=3"],
          "config.mesh.data = 3, config.mesh.fsdp = 1",
        ),
        (
          ["--config.train.batch_size=6"],
          "config.train.batch_size = 6 over config.train.accumulation = 1 gives 6 rows, which the 4 parts of the batch",
        ),
      ]
    ),
  ],
)
def test_what_does_not_go_with_the_topology_is_one_line(run, args, message):
  result = run("--config=configs/tiny.py", "--topology=v5e:2x2", *args)
  assert (
    result.returncode == 1
    and f"error: {message}" in result.stderr
    and len(result.stderr.splitlines()) == 1
  ), result.stderr


@needs_libtpu
@pytest.mark.parametrize("slices", [1, 2])
def test_axes_may_share_a_dimension_of_the_torus(slices):
  """fsdp 8 × context 2 on a plane of 4 × 4; every device is there once."""
  code = f"""if True:
    import os
    from diffjax.compiled import plan
    os.environ.update(plan.ENVIRONMENT)
    import jax
    from jax.experimental import topologies
    from diffjax.config import MeshConfig
    from diffjax.parallel.mesh import make_mesh
    jax.config.update("jax_platforms", "cpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:4x4", num_slices={slices}).devices
    mesh = make_mesh(MeshConfig(data={slices}, fsdp=8, context=2), devices)
    slices_of = [len({{getattr(device, "slice_index", 0) for device in part.flat}}) for part in mesh.devices]
    print(mesh.devices.shape, len(set(mesh.devices.flat)), slices_of)"""
  result = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert (
    result.stdout == f"({slices}, 8, 2, 1) {16 * slices} {[1] * slices}\n"
  ), result.stderr


@needs_libtpu
def test_a_compiler_that_ends_its_process_is_an_error(run, monkeypatch):
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")
  result = run("--config=configs/tiny.py", "--topology=v5e:2x2")
  assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith(
    "error: the TPU's compiler ended its process"
  ), result.stderr


@needs_libtpu
@pytest.mark.full
def test_tiny_compiles_with_the_kernels():
  result = compile_(
    "--config=configs/tiny.py",
    "--topology=v5e:2x2",
    "--config.model.num_layers=1",
    "--config.mesh.fsdp=2",
  )
  assert result.returncode == 0, result.stderr
  assert "4 chips (TPU v5 lite), mesh data 2 × fsdp 2" in result.stdout
  assert (
    "attention kernels: diff_attention_backward_v1, diff_attention_forward_v1, diff_attention_forward_v1_online"
    in result.stdout
  )
  assert re.search(
    r"\n  fsdp +0\.\d+: all-gather ", result.stdout
  ) and result.stdout.endswith("\nfits\n")


@needs_libtpu
@pytest.mark.full
def test_what_does_not_fit_is_told_with_the_remedy():
  result = compile_("--config=configs/diff_1b.py", "--topology=v5e:2x2")
  assert (
    result.returncode == 1
    and "error: does not fit: " in result.stderr
    and "--config.model.remat=full" in result.stderr
  ), result.stderr


@needs_libtpu
@pytest.mark.full
@pytest.mark.parametrize(
  "config, topology, overrides, bound, exposed",
  [
    ("diff_1b", "v5e:4x4", [], 0.58, {"all-gather": 0.2, "all-to-all": 0.2}),
    (
      "diff_13b",
      "v5p:4x4x4",
      ["--config.mesh.data=4", "--config.mesh.fsdp=16"],
      0.63,
      {"all-gather": 0.05, "reduce-scatter": 0.05},
    ),
  ],
)
def test_the_paper_configs_fit_and_are_not_bound_more_than_before(
  config, topology, overrides, bound, exposed
):
  """One kernel each way: the forward pass runs once. No product is a loop over shards. The bound is what was reached, rounded down."""
  result = compile_(
    f"--config=configs/{config}.py", f"--topology={topology}", *overrides
  )
  assert result.returncode == 0 and result.stdout.endswith("\nfits\n"), (
    result.stdout + result.stderr
  )
  assert (
    "\nattention kernels: diff_attention_backward_v1, diff_attention_forward_v1, diff_attention_forward_v1_online\n"
    in result.stdout
  )
  assert "windowed" not in result.stdout
  assert (
    float(
      re.search(
        r"\nbound on MFU, the compiler's estimate: ([\d.]+)%\n", result.stdout
      )[1]
    )
    >= 100 * bound
  ), result.stdout
  # What is exposed of the gathers where they overlap is the first of each pass through a layer, and the embedding's. Gradients overlap.
  for kind, share in exposed.items():
    waited, whole = map(
      float, re.search(rf"{kind} ([\d.]+) of ([\d.]+)", result.stdout).groups()
    )
    assert waited <= share * whole


@pytest.mark.longest
@needs_libtpu
@pytest.mark.full
def test_a_published_model_of_12_billion_can_be_tuned_on_16_chips():
  result = compile_("--config=configs/motif_2_12b.py", "--topology=v5p:2x2x4")
  assert result.returncode == 0 and result.stdout.endswith("\nfits\n"), (
    result.stdout + result.stderr
  )
  assert (
    "\nattention kernels: diff_attention_backward_v1, diff_attention_forward_v1, diff_attention_forward_v1_online\n"
    in result.stdout
  )
  assert "windowed" not in result.stdout


@needs_libtpu
@pytest.mark.full
def test_policies_are_compared():
  result = compile_("--config=configs/tiny.py", "--topology=v5e:2x2", "--remat")
  assert result.returncode == 0, result.stderr
  rows = [line.split()[0] for line in result.stdout.splitlines()]
  assert rows[:7] == ["remat", *REMAT] and rows[7:] == ["quickest"]
  assert result.stdout.splitlines()[-1].partition("=")[2] in REMAT


def _report(capsys, **changes):
  plan = planning.Plan(
    4,
    "TPU v5 lite",
    {"fsdp": 4},
    1 << 30,
    1 << 30,
    0,
    1 << 30,
    1,
    15 << 30,
    {},
    "",
    ("diff_attention_forward_v1",),
    1.0,
  )
  report.print_plan(Config(), dataclasses.replace(plan, **changes))
  return capsys.readouterr().out


def test_the_estimate_is_told(capsys):
  parts = {
    "feed-forward": 0.5,
    "attention kernels": 0.25,
    "exposed collectives": 0.25,
  }
  found = Estimate(
    parts,
    {
      "all-gather": CollectiveSeconds(0.5, 0.125),
      "all-reduce": CollectiveSeconds(0.125, 0.125),
    },
    [],
  )
  out = _report(capsys, estimate=found, peak_seconds=0.6, windowed=3)
  assert re.search(r"\n  feed-forward +0\.5000\n", out) and re.search(
    r"\n  total +1\.0000\n", out
  )
  assert (
    "0.2500: 40% of all collectives; all-gather 0.1250 of 0.5000, all-reduce 0.1250 of 0.1250\n"
    in out
  )
  assert (
    "bound on MFU, the compiler's estimate: 60.0%\n" in out
    and "windowed einsums: 3" in out
  )
  del parts["attention kernels"]
  out = _report(capsys, estimate=found._replace(parts=parts), peak_seconds=0.6)
  assert (
    "80.0% (without attention kernels, for whose shape there is no estimate)"
    in out
    and "windowed" not in out
  )


def test_kernels_are_told_with_their_numbers(capsys):
  out = _report(
    capsys,
    kernels=("diff_attention_backward_v1",)
    + ("diff_attention_forward_v1",) * 3,
  )
  assert (
    "attention kernels: diff_attention_backward_v1, diff_attention_forward_v1 × 3\n"
    in out
  )


def test_no_estimate_is_told(capsys):
  assert (
    "the compiler's estimate: none, since there is none for this generation\n"
    in _report(capsys)
  )
  assert "none, since the program has a loop whose" in _report(
    capsys, unread="a loop whose iterations cannot be read: x"
  )
