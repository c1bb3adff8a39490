"""What a compiled program takes by its compiler's estimate: programs written by hand, and two of which the answer is known, compiled."""

import dataclasses
import importlib.util
import json
import math
import textwrap

import jax
import jax.numpy as jnp
import pytest

from diffjax.compiled.collectives import Collective
from diffjax.compiled.estimate import estimate
from diffjax.compiled.hardware import CHIPS, Chip, Torus
from diffjax.compiled.plan import call_with_devices, kernel_cycles
from diffjax.config import Config, DataConfig, ModelConfig, TrainConfig
from diffjax.ops.diff_attention.tpu import cycles as tpu_cycles
from diffjax.ops.diff_attention.tpu.cycles import cycles
from tests.harness.tiers import full

# A cycle is a millisecond.
CHIP = Chip(
  cycles_per_second=1e3,
  link_bytes_per_second=100.0,
  num_cores=1,
  ring_multiple=16,
)
# A chip has two links of 100 bytes per second.
TORUS = Torus(sizes=(2, 2), num_links=(1, 1), link_bytes_per_second=100.0)
MESH = {"fsdp": 4}
GROUPS = "replica_groups={{0,1,2,3}}"


def instruction(name, cycles=0, operation="fusion", scope="", extra=""):
  source = f', metadata={{op_name="jit(step)/{scope}"}}' if scope else ""
  counted = (
    f', backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    if cycles
    else ""
  )
  return f"%{name} = bf16[8,16]{{1,0}} {operation}(%x){extra}{source}{counted}"


def program(*lines, computations=""):
  body = "".join(f"  {line}\n" for line in lines)
  return (
    textwrap.dedent(computations)
    + f"\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}}}\n"
  )


def read(text, **kernels):
  return estimate(text, MESH, CHIP, TORUS, kernels)


def computation(name, *lines):
  return (
    f"%{name} (x: bf16[8]) -> bf16[8] {{\n"
    + "".join(f"  {line}\n" for line in lines)
    + "}\n\n"
  )


NO_PRODUCT = computation("no", "%a = bf16[8,16]{1,0} add(%x, %y)")
PRODUCT = computation(
  "product", "%c = bf16[8,16]{1,0} convolution(%x, %y), dim_labels=bf_io->bf"
)


def test_parts_and_a_kernel():
  found = read(
    program(
      instruction(
        "f.1",
        100,
        scope="jvp(Decoder)/layers/attention/dot_general",
        extra=", calls=%product",
      ),
      instruction("f.2", 20, scope="jvp(Decoder)/layers/attention/exp"),
      instruction(
        "f.3",
        3,
        scope="jvp(Decoder)/layers/attention/rope/dot_general",
        extra=", calls=%product",
      ),
      instruction("f.4", 400, scope="transpose(jvp(Decoder))/layers/ffn/mul"),
      instruction(
        "f.5",
        5000,
        scope="jvp(loss)/shard_map/dot_general",
        extra=", calls=%product",
      ),
      instruction("f.6", 60, scope="optimizer/add"),
      instruction(
        "copy.7", 7, "copy", scope="jvp(Decoder)/layers/ffn/transpose"
      ),
      instruction("f.8", 10, extra=", calls=%product"),
      instruction(
        "bitcast_dynamic-update-slice_fusion.9",
        30_000,
        scope="jvp(Decoder)/layers/ffn/dot_general",
        extra=", calls=%product",
      ),
      instruction(
        "bitcast_dynamic-update-slice_fusion.10",
        1,
        scope="jvp(Decoder)/while/body/dynamic_update_slice",
        extra=", calls=%no",
      ),
      instruction(
        "diff_attention_forward_v1.2",
        0,
        "custom-call",
        extra=', custom_call_target="tpu_custom_call"',
      ),
      instruction(
        "diff_attention_backward_v1",
        0,
        "custom-call",
        extra=', custom_call_target="tpu_custom_call"',
      ),
      computations=PRODUCT + NO_PRODUCT,
    ),
    diff_attention_forward=1000,
    diff_attention_backward=2000,
  )
  assert {
    part: round(1000 * seconds) for part, seconds in found.parts.items()
  } == {
    "projections": 100,
    "attention, other": 20,
    "norms, RoPE, residuals": 3,
    "feed-forward": 30_400,
    "loss": 5000,
    "optimizer": 60,
    "copies": 8,
    "other products": 10,
    "attention kernels": 3000,
  }
  assert found.seconds == pytest.approx(38.601)
  assert found.longest[0][0] == 30


def test_loops_by_their_own_counts():
  loop = '%w = (s32[]) while(%t), condition=%c, body={}, backend_config={{"known_trip_count":{{"n":"{}"}}}}'
  inner = computation("inner", instruction("f.2", 10))
  outer = computation("outer", instruction("f.1", 1), loop.format("%inner", 5))
  found = read(
    program(
      loop.format("%outer", 3),
      instruction("f.3", 100),
      computations=inner + outer,
    )
  )
  assert found.seconds == pytest.approx(0.100 + 3 * (0.001 + 5 * 0.010))
  with pytest.raises(ValueError, match="iterations"):
    read(
      program(
        "%w = (s32[]) while(%t), condition=%c, body=%inner", computations=inner
      )
    )


def test_loops_by_their_counters():
  """From the start, the bound and the step, where the compiler has not written down how often a loop runs: 1, 3 and 5 are below 6."""
  body = computation(
    "body",
    instruction("f.1", 10),
    "%i.1 = s32[] get-tuple-element(%x), index=0",
    "%step = s32[] constant(2)",
    "%next = s32[] add(%i.1, %step)",
    "ROOT %r = (s32[]) tuple(%next)",
  )
  less = "ROOT %less = pred[] compare(%i.2, %bound), direction=LT"
  condition = computation(
    "condition",
    "%i.2 = s32[] get-tuple-element(%x), index=0",
    "%bound = s32[] constant(6)",
    less,
  )
  lines = (
    "%start = s32[] constant(1)",
    "%t = (s32[]) tuple(%start)",
    "%w = (s32[]) while(%t), condition=%condition, body=%body",
  )
  assert read(
    program(*lines, computations=body + condition)
  ).seconds == pytest.approx(3 * 0.010)


@pytest.mark.parametrize(
  "branches",
  ["branch_computations={%f, %g}", "true_computation=%f, false_computation=%g"],
)
def test_a_condition_takes_what_its_longest_branch_takes(branches):
  """And hides as much of what is under way."""
  computations = computation(
    "f", instruction("f.1", 1000, scope="layers/ffn/mul")
  ) + computation("g", instruction("g.1", 2000))
  permute = "%p = bf16[8,16]{1,0} collective-permute-start(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
  done = "%q = bf16[8,16]{1,0} collective-permute-done(%p)"
  found = read(
    program(
      permute,
      f"%c = (bf16[8]) conditional(%n, %x, %x), {branches}",
      done,
      computations=computations,
    )
  )
  assert found.parts == pytest.approx(
    {"other": 2.0, "exposed collectives": 0.56}
  )  # 256 bytes over one link take 2.56 s


def gather(name, operation="all-gather", chain=""):
  return f"%{name} = bf16[8,16]{{1,0}} {operation}(%x), channel_id=1, {GROUPS}, dimensions={{0}}{chain}"


SECONDS = (
  8 * 16 * 2 * 3 / 4 / 200
)  # of one such gather: 192 bytes over two links


@pytest.mark.parametrize(
  "lines, exposed",
  [
    ([gather("a"), instruction("f", 5000)], SECONDS),
    (
      [
        gather("s", "all-gather-start"),
        "%d = bf16[8,16] all-gather-done(%s)",
        instruction("f", 5000),
      ],
      SECONDS,
    ),
    (
      [
        gather("s", "all-gather-start"),
        instruction("f", 5000),
        "%d = bf16[8,16] all-gather-done(%s)",
      ],
      0,
    ),
    (
      [
        gather("s", "all-gather-start"),
        instruction("f", 500),
        "%d = bf16[8,16] all-gather-done(%s)",
      ],
      SECONDS - 0.5,
    ),
    # Two share the links, so that one second covers what one of them takes of it, not both.
    (
      [
        gather("s", "all-gather-start"),
        gather("t", "all-gather-start"),
        instruction("f", 1000),
        "%d = bf16[8,16] all-gather-done(%s)",
        "%e = bf16[8,16] all-gather-done(%t)",
      ],
      2 * SECONDS - 1,
    ),
    # In parts, one of them inside a product's fusion.
    (
      [
        instruction("s", extra=", calls=%start"),
        instruction("f", 700, extra=", calls=%part"),
        instruction("d", extra=", calls=%done"),
      ],
      SECONDS - 0.7,
    ),
    # By another core.
    (
      [
        instruction("s", operation="call-start", extra=", to_apply=%other"),
        instruction("f", 500),
        "%d = bf16[8] call-done(%s)",
      ],
      SECONDS - 0.5,
    ),
  ],
  ids=[
    "alone",
    "nothing between",
    "covered",
    "half covered",
    "two",
    "in parts",
    "on a sparse core",
  ],
)
def test_collectives_count_where_nothing_covers_them(lines, exposed):
  chain = ', frontend_attributes={chain_id="7"}'
  parts = computation(
    "start",
    gather("g.1", chain=chain),
    'ROOT %q = bf16[8] custom-call(%g.1), custom_call_target="AsyncCollectiveStart"',
  )
  parts += computation("part", gather("g.2", chain=chain))
  parts += computation(
    "done",
    gather("g.3", chain=chain),
    'ROOT %q = bf16[8] custom-call(%g.3), custom_call_target="AsyncCollectiveDone"',
  )
  parts += computation("other", gather("g.4"))
  found = read(program(*lines, instruction("last", 1), computations=parts))
  assert found.parts.get("exposed collectives", 0) == pytest.approx(exposed)
  count = sum(
    "start" in line.partition("(")[0] or "%a " in line or "%s " in line
    for line in lines
  )
  assert found.collectives["all-gather"] == pytest.approx(
    (count * SECONDS, exposed)
  )


def test_a_program_without_estimates():
  assert read(program(gather("a"))) is None


@pytest.mark.parametrize(
  "topology, gather, exchange",  # seconds, if every chip receives 1 GB
  [
    (
      "v5e:4x4",
      1 / 90,
      16 / 15 / 45,
    ),  # two links at a corner; 64 of 240 pairs cross the middle one way, over four links
    ("v5e:16x16", 1 / 180, 256 * 16 / (255 * 8) / 45),
    ("v5e:8x16", 1 / 135, 128 * 16 / (127 * 8) / 45),
    ("v5p:4x4x4", 1 / 540, 64 * 4 / (63 * 8) / 90),
    ("v5p:2x2x4", 1 / 270, 16 * 4 / (15 * 4) / 90),
    ("v6e:1x1", 0, 0),
  ],
)
def test_links(topology, gather, exchange):
  chips = math.prod(map(int, topology.partition(":")[2].split("x")))
  seconds = lambda kind: Torus.from_topology(topology).collective_seconds(
    Collective(kind, ("fsdp",), 1e9, 1), chips
  )
  assert seconds("all-gather") == pytest.approx(gather) and seconds(
    "all-to-all"
  ) == pytest.approx(exchange)
  assert seconds("collective-permute") == pytest.approx(
    1e9 / Torus.from_topology(topology).link_bytes_per_second
    if chips > 1
    else 0
  )


def test_cycles_of_kernels():
  known = (
    cycles("v5e", "forward", 2048, 128, 256, 2, 2),
    cycles("v5e", "forward", 4096, 128, 256, 2, 2),
  )
  assert known == (36335, 122670)
  assert (
    cycles("v5e", "forward", 2048, 96, 192, 2, 2)
    == known[0]
    == cycles("v5p", "forward", 2048, 128, 256, 2, 2)
  )
  assert cycles("v5e", "forward", 65536, 128, 256, 2, 2) == pytest.approx(
    32**2 * (known[1] / 2 - known[0]) + 32 * (2 * known[0] - known[1] / 2)
  )
  assert (
    cycles("v5e", "forward", 2048, 64, 128, 2, 2) == 26290
  )  # its own, and not that of 128, 128 or 128, 256
  assert cycles("v5e", "forward", 2048, 512, 512, 2, 2) is None


def test_cycles_of_libraries_and_of_other_masks_do_not_count(
  tmp_path, monkeypatch
):
  key = "v6e D 128 V 256 G 2 M 2 T 2048 {}; forward 256×256 of 1024×1024; backward 256×256 of 1024×1024"
  ours = {
    key.format("causal"): {"forward": 2},
    key.format("full"): {"forward": 1},
  }
  found = {"estimated cycles, libtpu 1, jax 1, kernels ab": ours}
  found["estimated cycles, libtpu 1, jax 1, splash of jax 1"] = {
    key.format("causal"): {"forward": 0.5}
  }
  table = tmp_path / "cycles.json"
  table.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
  monkeypatch.setattr(tpu_cycles, "TABLE", table)
  tpu_cycles._table.cache_clear()
  try:
    assert cycles("v6e", "forward", 2048, 128, 256, 2, 2) == 2
  finally:
    tpu_cycles._table.cache_clear()


def test_cycles_of_a_models_kernels():
  """Each kind of layer has its kernels' cycles, a call for each group of a noise map."""
  shape = dict(
    vocab_size=64, embed_dim=64, num_kv_heads=2, head_dim=128, ffn_dim=64
  )
  model = ModelConfig(
    num_layers=2, plain_layers=1, num_heads=8, num_noise_heads=2, **shape
  )
  config = Config(
    model=model,
    data=DataConfig(length=1024),
    train=TrainConfig(batch_size=16, accumulation=2),
  )
  found = kernel_cycles(
    config, {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}, "v6e", 1
  )
  rows = 16 / 2 / 4
  plain, shared = (
    cycles("v6e", "forward", 1024, 128, 128, 1, 1),
    cycles("v6e", "forward", 1024, 128, 256, 5, 2),
  )
  assert (
    plain and found["diff_attention_forward_plain"] == plain * rows * 16 / 2
  )
  assert shared and found["diff_attention_forward_v1"] == shared * rows * 2 / 2
  v1 = dataclasses.replace(model, plain_layers=0, num_noise_heads=None)
  found = kernel_cycles(
    dataclasses.replace(config, model=v1),
    {"data": 1, "fsdp": 1, "context": 1, "tensor": 1},
    "v6e",
    2,
  )
  assert (
    found["diff_attention_backward_v1"]
    == cycles("v6e", "backward", 1024, 128, 256, 2, 2) * 8 * 8 / 2
  )
  unknown = dataclasses.replace(
    model, plain_layers=0, num_noise_heads=4
  )  # what was not estimated is not there, rather than another's
  found = kernel_cycles(
    dataclasses.replace(config, model=unknown),
    {"data": 1, "fsdp": 1, "context": 1, "tensor": 1},
    "v6e",
    1,
  )
  assert found == {"_online": 0.0}


ROWS, SIZE, COUNT, TURNS = 16384, 4096, 8, 3


def _chain(devices, chips, available, with_copies):
  """Estimated and nominal seconds of a chain of products in a loop, and seconds by part; with a copy between each that moves everything."""
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from diffjax.model.flops import peak_flops

  mesh = Mesh(devices[:1], ("data",))
  barrier = (
    jax.lax.optimization_barrier
  )  # nothing that a product could take along

  def chain(x, w):
    def step(x, _):
      for _ in range(COUNT):
        x = jnp.dot(x, w)
        x = barrier(barrier(x) + 1) if with_copies else x
      return x, None

    return jax.lax.scan(step, x, None, length=TURNS)[0]

  matrix = lambda rows: jax.ShapeDtypeStruct(
    (rows, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
  )
  text = jax.jit(chain).lower(matrix(ROWS), matrix(SIZE)).compile().as_text()
  generation = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU v5": "v5p"}[
    devices[0].device_kind
  ]
  found = estimate(
    text, mesh.shape, CHIPS[generation], Torus.from_topology("v5e:1x1"), {}
  )
  return (
    found.seconds,
    TURNS * COUNT * 2 * ROWS * SIZE**2 / peak_flops(devices[0].device_kind),
    found.parts,
  )


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
@pytest.mark.parametrize(
  "topology, bandwidth",
  [("v5e:2x2", 819e9), *full([("v6e:2x2", 1640e9), ("v5p:2x2x1", 2765e9)])],
)
def test_a_chain_of_products_is_near_the_peak(topology, bandwidth):
  """And with a copy between each it takes longer, by what the copies cost: at least what the memory takes to read and write everything."""
  alone, peak, parts = call_with_devices(_chain, False, topology=topology)
  assert 0.85 * alone <= peak <= alone and set(parts) <= {
    "other products",
    "copies",
    "other",
  }
  longer, _, parts = call_with_devices(_chain, True, topology=topology)
  moved = TURNS * COUNT * 2 * ROWS * SIZE * 2 / bandwidth
  assert moved <= longer - alone <= 4 * moved
