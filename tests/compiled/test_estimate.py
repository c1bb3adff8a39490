"""The estimated time of compiled programs.

Most tests read programs that are written by hand. One test compiles programs
whose time is known.
"""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from diffjax.compiled.collectives import Collective
from diffjax.compiled.estimate import Estimate, estimate
from diffjax.compiled.hardware import CHIPS, Chip, Torus
from diffjax.compiled.plan import call_with_devices, kernel_cycles
from diffjax.config import Config, DataConfig, ModelConfig, TrainConfig
from diffjax.ops.diff_attention.tpu import cycles as tpu_cycles
from diffjax.ops.diff_attention.tpu.cycles import cycles
from tests.harness.tiers import full

# A cycle of this chip is a millisecond.
CHIP = Chip(
  cycles_per_second=1e3,
  link_bytes_per_second=100.0,
  num_cores=1,
  ring_multiple=16,
)
# Each chip has two links of 100 bytes per second.
TORUS = Torus(sizes=(2, 2), num_links=(1, 1), link_bytes_per_second=100.0)
MESH = {"fsdp": 4}

# An all-gather results in 8 x 16 elements of two bytes. A chip receives three
# quarters of them (192 bytes) over its two links.
GATHER_SECONDS = (8 * 16 * 2) * 3 / 4 / (2 * 100)


def instruction(
  name: str,
  cycles: int = 0,
  operation: str = "fusion",
  scope: str = "",
  attributes: str = "",
) -> str:
  """Returns an instruction of a compiled program.

  Args:
    name: its name.
    cycles: the compiler's estimate of its cycles. 0 for no estimate.
    operation: its operation.
    scope: the JAX scope of its source.
    attributes: further attributes.
  """
  line = f"%{name} = bf16[8,16]{{1,0}} {operation}(%x){attributes}"
  if scope:
    line += f', metadata={{op_name="jit(step)/{scope}"}}'
  if cycles:
    line += (
      f', backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )
  return line


def gather(
  name: str, operation: str = "all-gather", attributes: str = ""
) -> str:
  """Returns an all-gather over all four chips."""
  return (
    f"%{name} = bf16[8,16]{{1,0}} {operation}(%x), channel_id=1,"
    f" replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}{attributes}"
  )


def computation(name: str, *lines: str) -> str:
  """Returns a computation that instructions of a program call."""
  body = "".join(f"  {line}\n" for line in lines)
  return f"%{name} (x: bf16[8]) -> bf16[8] {{\n{body}}}\n\n"


def estimate_program(
  lines: Sequence[str],
  computations: Sequence[str] = (),
  kernels: dict[str, float] | None = None,
) -> Estimate | None:
  """Returns the estimate of a program.

  Args:
    lines: the instructions of its main computation.
    computations: the computations that they call.
    kernels: the cycles of Pallas kernels, by their names.
  """
  body = "".join(f"  {line}\n" for line in lines)
  text = (
    "".join(computations)
    + f"\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}}}\n"
  )
  return estimate(text, MESH, CHIP, TORUS, kernels or {})


# The parts of a step.

NO_PRODUCT = computation("no_product", "%a = bf16[8,16]{1,0} add(%x, %y)")
PRODUCT = computation(
  "product", "%c = bf16[8,16]{1,0} convolution(%x, %y), dim_labels=bf_io->bf"
)
CALLS_PRODUCT = ", calls=%product"


@pytest.mark.parametrize(
  ("scope", "attributes", "part"),
  [
    pytest.param(
      "jvp(Decoder)/layers/attention/dot_general",
      CALLS_PRODUCT,
      "projections",
      id="product in attention",
    ),
    pytest.param(
      "jvp(Decoder)/layers/attention/exp",
      "",
      "attention, other",
      id="no product in attention",
    ),
    pytest.param(
      "jvp(Decoder)/layers/attention/rope/dot_general",
      CALLS_PRODUCT,
      "norms, RoPE, residuals",
      id="product in RoPE",
    ),
    pytest.param(
      "transpose(jvp(Decoder))/layers/ffn/mul",
      "",
      "feed-forward",
      id="feed-forward",
    ),
    pytest.param(
      "jvp(loss)/shard_map/dot_general", CALLS_PRODUCT, "loss", id="loss"
    ),
    pytest.param("optimizer/add", "", "optimizer", id="optimizer"),
    pytest.param("", CALLS_PRODUCT, "other products", id="no scope"),
  ],
)
def test_an_instruction_belongs_to_the_part_of_its_scope(
  scope, attributes, part
):
  """The scope is the JAX function that an instruction comes from."""
  line = instruction("f.1", cycles=100, scope=scope, attributes=attributes)

  result = estimate_program([line], computations=[PRODUCT])

  # 100 cycles of a millisecond are 0.1 seconds.
  assert result.parts == pytest.approx({part: 0.1})


@pytest.mark.parametrize(
  "line",
  [
    pytest.param(
      instruction("copy.7", 7, "copy", scope="layers/ffn/transpose"),
      id="copy",
    ),
    pytest.param(
      instruction(
        "bitcast_dynamic-update-slice_fusion.10",
        7,
        scope="jvp(Decoder)/while/body/dynamic_update_slice",
        attributes=", calls=%no_product",
      ),
      id="fusion of a copy",
    ),
  ],
)
def test_copies_are_a_part_of_their_own(line):
  """They do not count for the part of their scope, such as "feed-forward"."""
  result = estimate_program([line], computations=[NO_PRODUCT])

  # The line has 7 cycles, and a cycle takes a millisecond.
  assert result.parts == pytest.approx({"copies": 0.007})


def test_a_fusion_of_a_copy_and_a_product_is_a_product():
  """Its name is that of a copy, but it calls a computation with a product."""
  line = instruction(
    "bitcast_dynamic-update-slice_fusion.9",
    cycles=30,
    scope="jvp(Decoder)/layers/ffn/dot_general",
    attributes=CALLS_PRODUCT,
  )

  result = estimate_program([line], computations=[PRODUCT])

  # 30 cycles of a millisecond are 0.03 seconds.
  assert result.parts == pytest.approx({"feed-forward": 0.03})


def test_kernels_have_the_given_cycles():
  """The compiler does not estimate the cycles of Pallas kernels.

  So the caller passes them, by the beginning of a kernel's name.
  """
  target = ', custom_call_target="tpu_custom_call"'
  lines = [
    instruction(
      "diff_attention_forward_v1.2", operation="custom-call", attributes=target
    ),
    instruction(
      "diff_attention_backward_v1", operation="custom-call", attributes=target
    ),
    # A program in which no instruction has cycles would have no estimate.
    instruction("f.1", cycles=1, scope="optimizer/add"),
  ]

  result = estimate_program(
    lines,
    kernels={"diff_attention_forward": 1000, "diff_attention_backward": 2000},
  )

  # The kernels have 3000 cycles, and a cycle takes a millisecond here.
  assert result.parts["attention kernels"] == pytest.approx(3.0)


def test_the_time_of_a_step_is_the_sum_of_its_parts():
  """A cycle takes a millisecond here."""
  lines = [
    instruction("f.1", cycles=100, scope="optimizer/add"),
    instruction("f.2", cycles=5000, scope="jvp(loss)/add"),
  ]

  result = estimate_program(lines)

  assert result.seconds == pytest.approx(0.1 + 5.0)
  longest_seconds, *_ = result.longest[0]
  assert longest_seconds == pytest.approx(5.0)


def test_a_program_without_cycles_has_no_estimate():
  """The compiler writes the cycles of fusions. This program has none."""
  lines = [gather("a")]

  assert estimate_program(lines) is None


# Loops and conditions.


def loop(body: str, num_iterations: int) -> str:
  """Returns a loop whose number of iterations the compiler states."""
  return (
    f"%w = (s32[]) while(%t), condition=%c, body=%{body},"
    f' backend_config={{"known_trip_count":{{"n":"{num_iterations}"}}}}'
  )


def test_the_time_of_a_loop_is_multiplied_by_its_iterations():
  """The program has a loop of 3 iterations, and in it one of 5 iterations.

  A cycle takes a millisecond here.
  """
  inner = computation("inner", instruction("f.2", cycles=10))
  outer = computation(
    "outer", instruction("f.1", cycles=1), loop("inner", num_iterations=5)
  )
  lines = [loop("outer", num_iterations=3), instruction("f.3", cycles=100)]

  result = estimate_program(lines, computations=[inner, outer])

  seconds_of_inner = 5 * 0.010
  seconds_of_outer = 3 * (0.001 + seconds_of_inner)
  assert result.seconds == pytest.approx(seconds_of_outer + 0.100)


def test_the_iterations_of_a_loop_are_read_from_its_counter():
  """The compiler does not state them here.

  The program is `i = 1; while i < 6: i += 2`, so the body runs for i = 1, 3 and
  5.
  """
  body = computation(
    "body",
    instruction("f.1", cycles=10),
    "%i.1 = s32[] get-tuple-element(%x), index=0",
    "%step = s32[] constant(2)",
    "%next = s32[] add(%i.1, %step)",
    "ROOT %r = (s32[]) tuple(%next)",
  )
  condition = computation(
    "condition",
    "%i.2 = s32[] get-tuple-element(%x), index=0",
    "%bound = s32[] constant(6)",
    "ROOT %less = pred[] compare(%i.2, %bound), direction=LT",
  )
  lines = [
    "%start = s32[] constant(1)",
    "%t = (s32[]) tuple(%start)",
    "%w = (s32[]) while(%t), condition=%condition, body=%body",
  ]

  result = estimate_program(lines, computations=[body, condition])

  assert result.seconds == pytest.approx(3 * 0.010)


def test_a_loop_with_an_unknown_number_of_iterations_is_an_error():
  """The compiler does not state it here, and the condition %c is missing."""
  inner = computation("inner", instruction("f.2", cycles=10))
  loop_line = "%w = (s32[]) while(%t), condition=%c, body=%inner"

  with pytest.raises(ValueError, match="iterations"):
    estimate_program([loop_line], computations=[inner])


@pytest.mark.parametrize(
  "branches",
  ["branch_computations={%f, %g}", "true_computation=%f, false_computation=%g"],
)
def test_a_condition_takes_as_long_as_its_longest_branch(branches):
  """For that time, it also hides a collective that runs at the same time."""
  computations = [
    computation("f", instruction("f.1", cycles=1000, scope="layers/ffn/mul")),
    computation("g", instruction("g.1", cycles=2000)),
  ]
  start = (
    "%p = bf16[8,16]{1,0} collective-permute-start(%x),"
    " source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
  )
  condition = f"%c = (bf16[8]) conditional(%n, %x, %x), {branches}"
  done = "%q = bf16[8,16]{1,0} collective-permute-done(%p)"

  result = estimate_program([start, condition, done], computations)

  # The longest branch has 2000 cycles of a millisecond.
  branch_seconds = 2.0
  # 8 x 16 elements of two bytes, over one link of 100 bytes per second.
  permute_seconds = 8 * 16 * 2 / 100
  expected = {
    "other": branch_seconds,
    "exposed collectives": permute_seconds - branch_seconds,
  }
  assert result.parts == pytest.approx(expected)


# Collectives.

START = gather("s", "all-gather-start")
DONE = "%d = bf16[8,16] all-gather-done(%s)"
SECOND_START = gather("t", "all-gather-start")
SECOND_DONE = "%e = bf16[8,16] all-gather-done(%t)"


@pytest.mark.parametrize(
  ("lines", "num_gathers", "exposed_seconds"),
  [
    pytest.param(
      [gather("a"), instruction("f", 5000)], 1, GATHER_SECONDS, id="blocking"
    ),
    pytest.param(
      [START, DONE, instruction("f", 5000)],
      1,
      GATHER_SECONDS,
      id="nothing between start and done",
    ),
    pytest.param([START, instruction("f", 5000), DONE], 1, 0, id="covered"),
    pytest.param(
      [START, instruction("f", 500), DONE],
      1,
      GATHER_SECONDS - 0.5,
      id="partly covered",
    ),
    # Two gathers share the links, so a second covers one second of both.
    pytest.param(
      [
        START,
        SECOND_START,
        instruction("f", 1000),
        DONE,
        SECOND_DONE,
      ],
      2,
      2 * GATHER_SECONDS - 1,
      id="two at a time",
    ),
    # One of the parts is inside of a product's fusion.
    pytest.param(
      [
        instruction("s", attributes=", calls=%start"),
        instruction("f", 700, attributes=", calls=%part"),
        instruction("d", attributes=", calls=%done"),
      ],
      1,
      GATHER_SECONDS - 0.7,
      id="in parts",
    ),
    pytest.param(
      [
        instruction(
          "s", operation="call-start", attributes=", to_apply=%other_core"
        ),
        instruction("f", 500),
        "%d = bf16[8] call-done(%s)",
      ],
      1,
      GATHER_SECONDS - 0.5,
      id="on a sparse core",
    ),
  ],
)
def test_a_collective_is_exposed_where_no_computation_covers_it(
  lines, num_gathers, exposed_seconds
):
  """Instructions between its start and its done cover it.

  A cycle takes a millisecond here.
  """
  chain = ', frontend_attributes={chain_id="7"}'
  computations = [
    computation(
      "start",
      gather("g.1", attributes=chain),
      "ROOT %q = bf16[8] custom-call(%g.1),"
      ' custom_call_target="AsyncCollectiveStart"',
    ),
    computation("part", gather("g.2", attributes=chain)),
    computation(
      "done",
      gather("g.3", attributes=chain),
      "ROOT %q = bf16[8] custom-call(%g.3),"
      ' custom_call_target="AsyncCollectiveDone"',
    ),
    computation("other_core", gather("g.4")),
  ]

  result = estimate_program([*lines, instruction("last", 1)], computations)

  exposed = result.parts.get("exposed collectives", 0)
  assert exposed == pytest.approx(exposed_seconds)
  expected = (num_gathers * GATHER_SECONDS, exposed_seconds)
  assert result.collectives["all-gather"] == pytest.approx(expected)


# The expected seconds follow from the links of a chip, with 45 GB/s each on v5e
# and 90 GB/s on v5p. For an all-gather, all links of a corner receive. For an
# all-to-all, the middle of the torus limits: in v5e:4x4, 64 of the 240 pairs of
# chips cross it in each direction, over four links.
@pytest.mark.parametrize(
  ("topology", "gather_seconds", "exchange_seconds"),
  [
    ("v5e:4x4", 1 / 90, 16 / 15 / 45),
    ("v5e:16x16", 1 / 180, 256 * 16 / (255 * 8) / 45),
    ("v5e:8x16", 1 / 135, 128 * 16 / (127 * 8) / 45),
    ("v5p:4x4x4", 1 / 540, 64 * 4 / (63 * 8) / 90),
    ("v5p:2x2x4", 1 / 270, 16 * 4 / (15 * 4) / 90),
    ("v6e:1x1", 0, 0),
  ],
)
def test_a_collective_takes_the_time_of_its_links(
  topology, gather_seconds, exchange_seconds
):
  """Every chip receives 1 GB, over all links that the topology has.

  In a permutation, it uses only one link.
  """
  sizes = topology.partition(":")[2].split("x")
  num_chips = math.prod(int(size) for size in sizes)
  torus = Torus.from_topology(topology)

  def seconds(kind):
    collective = Collective(kind, ("fsdp",), 1e9, 1)
    return torus.collective_seconds(collective, num_chips)

  # A single chip has nothing to exchange.
  permute_seconds = 0.0
  if num_chips > 1:
    permute_seconds = 1e9 / torus.link_bytes_per_second
  assert seconds("all-gather") == pytest.approx(gather_seconds)
  assert seconds("all-to-all") == pytest.approx(exchange_seconds)
  assert seconds("collective-permute") == pytest.approx(permute_seconds)


# The cycles of the attention kernels.


def forward_cycles(
  length: int, D: int, V: int, generation: str = "v5e"
) -> float | None:
  """Returns the cycles of the forward kernel with two maps in each head.

  Args:
    length: the number of tokens of a row.
    D: the width of queries and keys.
    V: the width of values.
    generation: the TPU generation.
  """
  return cycles(generation, "forward", length=length, D=D, V=V, G=2, M=2)


def test_cycles_of_estimated_kernels_are_those_of_the_table():
  """The numbers are the compiler's, in a committed table."""
  assert forward_cycles(length=2048, D=128, V=256) == 36335
  assert forward_cycles(length=4096, D=128, V=256) == 122670
  assert forward_cycles(length=2048, D=64, V=128) == 26290


def test_a_width_without_an_estimate_is_rounded_up():
  """The next larger widths in the table are 128 of keys and 256 of values."""
  assert forward_cycles(length=2048, D=96, V=192) == forward_cycles(
    length=2048, D=128, V=256
  )


def test_a_generation_with_the_same_core_has_the_same_cycles():
  """The table has no estimates for v5p. Its cores are like those of v5e."""
  v5p_cycles = forward_cycles(length=2048, D=128, V=256, generation="v5p")

  assert v5p_cycles == forward_cycles(length=2048, D=128, V=256)


def test_cycles_of_longer_rows_are_extrapolated():
  """The table ends at 4096 tokens.

  A row of n * 2048 tokens takes linear * n + square * n**2 cycles. The two
  coefficients follow from the cycles for n = 1 and n = 2.
  """
  cycles_of_1 = forward_cycles(length=2048, D=128, V=256)
  cycles_of_2 = forward_cycles(length=4096, D=128, V=256)
  square = (cycles_of_2 - 2 * cycles_of_1) / 2
  linear = cycles_of_1 - square

  n = 65536 / 2048
  expected = linear * n + square * n**2
  assert forward_cycles(length=65536, D=128, V=256) == pytest.approx(expected)


def test_a_kernel_without_any_estimate_has_no_cycles():
  """The table has no widths as large as 512."""
  assert forward_cycles(length=2048, D=512, V=512) is None


def test_cycles_of_other_libraries_and_of_other_masks_are_not_used(
  tmp_path, monkeypatch
):
  """The table has cycles of other kernels ("splash") and of full attention."""
  shapes = "v6e D 128 V 256 G 2 M 2 T 2048"
  blocks = "forward 256×256 of 1024×1024; backward 256×256 of 1024×1024"
  causal = f"{shapes} causal; {blocks}"
  unmasked = f"{shapes} full; {blocks}"
  table = {
    "estimated cycles, libtpu 1, jax 1, kernels ab": {
      causal: {"forward": 2},
      unmasked: {"forward": 1},
    },
    "estimated cycles, libtpu 1, jax 1, splash of jax 1": {
      causal: {"forward": 0.5}
    },
  }
  path = tmp_path / "cycles.json"
  path.write_text(json.dumps(table, ensure_ascii=False), encoding="utf-8")
  monkeypatch.setattr(tpu_cycles, "TABLE", path)

  assert forward_cycles(length=2048, D=128, V=256, generation="v6e") == 2


MODEL = ModelConfig(
  num_layers=2,
  plain_layers=1,
  vocab_size=64,
  embed_dim=64,
  num_heads=8,
  num_noise_heads=2,
  num_kv_heads=2,
  head_dim=128,
  ffn_dim=64,
)
CONFIG = Config(
  model=MODEL,
  data=DataConfig(length=1024),
  train=TrainConfig(batch_size=16, accumulation=2),
)
ONE_DEVICE = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1}


def test_each_kind_of_layer_has_the_cycles_of_its_kernels():
  """The model has a plain layer and a DIFF layer.

  The kernel of DIFF is called for each group of heads that share a noise map.
  """
  mesh = {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}

  result = kernel_cycles(CONFIG, mesh, "v6e", num_cores=1)

  # 16 rows in 2 micro-batches, over 2 x 2 devices of the axes data and fsdp.
  num_rows = 16 / 2 / (2 * 2)
  # The axis tensor has two devices, with half of the 16 plain heads (two maps
  # for each of 8 heads) and half of the 2 groups each.
  plain_cycles = cycles("v6e", "forward", length=1024, D=128, V=128, G=1, M=1)
  grouped_cycles = cycles("v6e", "forward", length=1024, D=128, V=256, G=5, M=2)
  assert plain_cycles > 0
  assert grouped_cycles > 0
  expected_plain = plain_cycles * num_rows * 16 / 2
  expected_grouped = grouped_cycles * num_rows * 2 / 2
  assert result["diff_attention_forward_plain"] == expected_plain
  assert result["diff_attention_forward_v1"] == expected_grouped


def test_the_cores_of_a_chip_share_the_cycles_of_its_kernels():
  """With two cores, the kernels take half of the cycles."""
  model = dataclasses.replace(MODEL, plain_layers=0, num_noise_heads=None)
  config = dataclasses.replace(CONFIG, model=model)

  result = kernel_cycles(config, ONE_DEVICE, "v6e", num_cores=2)

  backward_cycles = cycles(
    "v6e", "backward", length=1024, D=128, V=256, G=2, M=2
  )
  # 16 rows in 2 micro-batches.
  num_rows = 16 / 2
  num_heads = 8
  num_cores = 2
  expected = backward_cycles * num_rows * num_heads / num_cores
  assert result["diff_attention_backward_v1"] == expected


def test_kernels_without_an_estimate_have_no_entry():
  """The table has no cycles for two heads that share a noise map."""
  model = dataclasses.replace(MODEL, plain_layers=0, num_noise_heads=4)
  config = dataclasses.replace(CONFIG, model=model)

  result = kernel_cycles(config, ONE_DEVICE, "v6e", num_cores=1)

  # Only the fallback kernel for overflow, which counts as no time.
  assert result == {"_online": 0.0}


# Compiled programs.

NUM_ROWS = 16384
WIDTH = 4096
NUM_PRODUCTS = 8
NUM_ITERATIONS = 3
GENERATIONS = {
  "TPU v5 lite": "v5e",
  "TPU v6 lite": "v6e",
  "TPU v5": "v5p",
}


class ChainEstimates(NamedTuple):
  """Estimates of a loop over a chain of matrix products.

  Attributes:
    peak_seconds: the time of the products at the chip's peak FLOP/s.
    seconds: the estimated time.
    parts: the names of its parts.
    seconds_with_copies: the estimated time with a copy after each product.
  """

  peak_seconds: float
  seconds: float
  parts: set[str]
  seconds_with_copies: float


def estimate_chains(
  devices: Any, num_chips: int, memory_bytes: float
) -> ChainEstimates:
  """Returns the estimates for one of the devices."""
  # Runs in another process, which should not import more than it needs.
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from diffjax.model.flops import peak_flops

  del num_chips, memory_bytes
  kind = devices[0].device_kind
  mesh = Mesh(devices[:1], ("data",))
  sharding = NamedSharding(mesh, PartitionSpec())
  barrier = jax.lax.optimization_barrier

  def products(x, w):
    for _ in range(NUM_PRODUCTS):
      x = jnp.dot(x, w)
    return x

  def products_and_copies(x, w):
    for _ in range(NUM_PRODUCTS):
      x = jnp.dot(x, w)
      # The barriers keep the compiler from fusing the copy with a product.
      x = barrier(barrier(x) + 1)
    return x

  def estimate_loop(body):
    def run(x, w):
      def iterate(_, x):
        return body(x, w)

      return jax.lax.fori_loop(0, NUM_ITERATIONS, iterate, x)

    x = jax.ShapeDtypeStruct((NUM_ROWS, WIDTH), jnp.bfloat16, sharding=sharding)
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=sharding)
    text = jax.jit(run).lower(x, w).compile().as_text()
    chip = CHIPS[GENERATIONS[kind]]
    torus = Torus.from_topology("v5e:1x1")
    return estimate(text, mesh.shape, chip, torus, {})

  num_flops = NUM_ITERATIONS * NUM_PRODUCTS * 2 * NUM_ROWS * WIDTH**2
  without_copies = estimate_loop(products)
  with_copies = estimate_loop(products_and_copies)
  return ChainEstimates(
    peak_seconds=num_flops / peak_flops(kind),
    seconds=without_copies.seconds,
    parts=set(without_copies.parts),
    seconds_with_copies=with_copies.seconds,
  )


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
@pytest.mark.parametrize(
  ("topology", "bytes_per_second"),
  [
    ("v5e:2x2", 819e9),
    *full([("v6e:2x2", 1640e9), ("v5p:2x2x1", 2765e9)]),
  ],
)
def test_estimates_of_products_and_copies_are_near_the_limits_of_the_chip(
  topology, bytes_per_second
):
  """The products are limited by peak FLOP/s, and the copies by bandwidth."""
  result = call_with_devices(estimate_chains, topology=topology)

  assert 0.85 * result.seconds <= result.peak_seconds <= result.seconds
  assert result.parts <= {"other products", "copies", "other"}
  # A copy follows each product. It reads and writes bfloat16 elements.
  num_copies = NUM_ITERATIONS * NUM_PRODUCTS
  bytes_per_element = 2
  bytes_per_copy = 2 * NUM_ROWS * WIDTH * bytes_per_element
  copy_seconds = num_copies * bytes_per_copy / bytes_per_second
  additional_seconds = result.seconds_with_copies - result.seconds
  assert copy_seconds <= additional_seconds <= 4 * copy_seconds
