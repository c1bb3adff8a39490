"""The estimated time of compiled programs.

Most tests read programs that are written by hand. One test compiles programs
whose time is known.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from diffjax.compiled.collectives import Collective
from diffjax.compiled.estimate import Estimate, estimate
from diffjax.compiled.hardware import CHIPS, Chip, Topology, Torus
from diffjax.compiled.plan import call_with_devices, kernel_cycles
from diffjax.config import Config, DataConfig, ModelConfig, TrainConfig
from diffjax.ops.diff_attention.tpu import cycles as tpu_cycles
from diffjax.ops.diff_attention.tpu.cycles import cycles

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
  """The scope is the JAX function that an instruction comes from.

  An instruction with CALLS_PRODUCT computes a matrix product.
  """
  line = instruction("f.1", cycles=100, scope=scope, attributes=attributes)

  result = estimate_program([line], computations=[PRODUCT])

  # The chip of these tests has 1000 cycles per second.
  assert result.parts == pytest.approx({part: 100 / 1000})


@pytest.mark.parametrize(
  "line",
  [
    pytest.param(
      instruction("copy.7", 7, "copy", scope="layers/ffn/transpose"), id="copy"
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
  """A copy does not count for the part of its scope, such as "feed-forward"."""
  result = estimate_program([line], computations=[NO_PRODUCT])

  # The line has 7 cycles. The chip has 1000 cycles per second.
  assert result.parts == pytest.approx({"copies": 7 / 1000})


def test_a_fusion_of_a_copy_and_a_product_is_a_product():
  """The name says that the fusion copies. But it calls a matrix product."""
  line = instruction(
    "bitcast_dynamic-update-slice_fusion.9",
    cycles=30,
    scope="jvp(Decoder)/layers/ffn/dot_general",
    attributes=CALLS_PRODUCT,
  )

  result = estimate_program([line], computations=[PRODUCT])

  # The chip of these tests has 1000 cycles per second.
  assert result.parts == pytest.approx({"feed-forward": 30 / 1000})


def test_kernels_have_the_given_cycles():
  """The caller passes the cycles of Pallas kernels.

  The compiler does not estimate them. The keys are the beginnings of the
  kernels' names in the program.
  """
  kernel = ', custom_call_target="tpu_custom_call"'
  lines = [
    instruction("forward_v1.2", operation="custom-call", attributes=kernel),
    instruction("backward_v1", operation="custom-call", attributes=kernel),
    # A program in which no instruction has cycles would have no estimate.
    instruction("f.1", cycles=1, scope="optimizer/add"),
  ]

  result = estimate_program(lines, kernels={"forward": 1000, "backward": 2000})

  cycles_per_second = 1000
  kernel_seconds = (1000 + 2000) / cycles_per_second
  assert result.parts["attention kernels"] == pytest.approx(kernel_seconds)


def test_the_time_of_a_step_is_the_sum_of_its_parts():
  """The chip of these tests has 1000 cycles per second."""
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
  """The outer loop has 3 iterations. In each, the inner loop has 5 iterations.

  The chip has 1000 cycles per second.
  """
  inner = computation("inner", instruction("f.2", cycles=10))
  outer = computation(
    "outer", instruction("f.1", cycles=1), loop("inner", num_iterations=5)
  )
  lines = [loop("outer", num_iterations=3), instruction("f.3", cycles=100)]

  result = estimate_program(lines, computations=[inner, outer])

  cycles_of_inner = 5 * 10
  cycles_of_outer = 3 * (1 + cycles_of_inner)
  cycles_of_program = cycles_of_outer + 100
  assert result.seconds == pytest.approx(cycles_of_program / 1000)


def test_the_iterations_of_a_loop_are_read_from_its_counter():
  """This loop does not state its number of iterations.

  The program is `i = 1; while i < 6: i += 2`. Its body has 10 cycles.
  """
  condition = computation(
    "i_is_less_than_6",
    "%i.2 = s32[] get-tuple-element(%x), index=0",
    "%bound = s32[] constant(6)",
    "ROOT %less = pred[] compare(%i.2, %bound), direction=LT",
  )
  body = computation(
    "add_2_to_i",
    instruction("f.1", cycles=10),
    "%i.1 = s32[] get-tuple-element(%x), index=0",
    "%step = s32[] constant(2)",
    "%next = s32[] add(%i.1, %step)",
    "ROOT %r = (s32[]) tuple(%next)",
  )
  lines = [
    "%start = s32[] constant(1)",
    "%t = (s32[]) tuple(%start)",
    "%w = (s32[]) while(%t), condition=%i_is_less_than_6, body=%add_2_to_i",
  ]

  result = estimate_program(lines, computations=[condition, body])

  # The body runs for i = 1, 3 and 5. The chip has 1000 cycles per second.
  num_iterations = 3
  seconds_per_iteration = 10 / 1000
  expected = num_iterations * seconds_per_iteration
  assert result.seconds == pytest.approx(expected)


def test_a_loop_with_an_unknown_number_of_iterations_is_an_error():
  """The loop does not state the number, and its condition %c is missing."""
  inner = computation("inner", instruction("f.2", cycles=10))
  loop_line = "%w = (s32[]) while(%t), condition=%c, body=%inner"

  with pytest.raises(ValueError, match="iterations"):
    estimate_program([loop_line], computations=[inner])


@pytest.mark.parametrize(
  "branches",
  [
    "branch_computations={%short, %long}",
    "true_computation=%short, false_computation=%long",
  ],
)
def test_a_condition_takes_as_long_as_its_longest_branch(branches):
  computations = [
    computation("short", instruction("f", cycles=1000, scope="layers/ffn/mul")),
    computation("long", instruction("g", cycles=2000)),
  ]
  condition = f"%condition = (bf16[8]) conditional(%n, %x, %x), {branches}"

  result = estimate_program([condition], computations)

  # The long branch has no scope. The chip has 1000 cycles per second.
  assert result.parts == pytest.approx({"other": 2000 / 1000})


def test_a_condition_covers_a_collective():
  """The chip sends while it computes a branch, so only the rest is exposed."""
  lines = [
    "%start = bf16[8,16]{1,0} collective-permute-start(%x),"
    " source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
    "%condition = (bf16[8]) conditional(%n, %x, %x),"
    " branch_computations={%branch, %branch}",
    "%done = bf16[8,16]{1,0} collective-permute-done(%start)",
  ]
  branch = computation("branch", instruction("f", cycles=2000))

  result = estimate_program(lines, [branch])

  # 8 x 16 elements of two bytes, over one link of 100 bytes per second.
  permute_seconds = (8 * 16 * 2) / 100
  # 2000 cycles, at 1000 cycles per second.
  branch_seconds = 2.0
  exposed = result.parts["exposed collectives"]
  assert exposed == pytest.approx(permute_seconds - branch_seconds)


# Collectives.


def assert_all_gathers_take(
  result: Estimate, seconds: float, exposed_seconds: float
) -> None:
  """Checks the seconds of all-gathers, and how many are not covered."""
  assert result.collectives["all-gather"] == pytest.approx(
    (seconds, exposed_seconds)
  )
  exposed = result.parts.get("exposed collectives", 0)
  assert exposed == pytest.approx(exposed_seconds)


def test_a_blocking_collective_is_exposed():
  """The chip computes nothing while it waits for a blocking all-gather."""
  all_gather = (
    "%a = bf16[8,16]{1,0} all-gather(%x), channel_id=1,"
    " replica_groups={{0,1,2,3}}, dimensions={0}"
  )

  result = estimate_program([all_gather, instruction("f", cycles=5000)])

  bytes_per_element = 2
  num_bytes = 8 * 16 * bytes_per_element
  # A chip has a quarter of them, and receives the others over its two links of
  # 100 bytes per second.
  seconds = (num_bytes * 3 / 4) / (2 * 100)
  assert seconds == pytest.approx(0.96)
  assert_all_gathers_take(result, seconds=seconds, exposed_seconds=seconds)


@pytest.mark.parametrize(
  ("cycles_in_between", "exposed_seconds"),
  [
    pytest.param(0, 0.96, id="not covered"),
    pytest.param(500, 0.96 - 0.5, id="partly covered"),
    pytest.param(5000, 0, id="covered"),
  ],
)
def test_instructions_between_start_and_done_cover_a_collective(
  cycles_in_between, exposed_seconds
):
  """Data is sent while the chip computes. Only the rest of the time is exposed.

  A chip receives 192 bytes over two links of 100 bytes per second, which takes
  0.96 seconds. The chip has 1000 cycles per second.
  """
  lines = [
    gather("start", operation="all-gather-start"),
    instruction("f", cycles=cycles_in_between),
    "%done = bf16[8,16] all-gather-done(%start)",
    # This comes too late to cover the all-gather.
    instruction("g", cycles=5000),
  ]

  result = estimate_program(lines)

  assert_all_gathers_take(result, seconds=0.96, exposed_seconds=exposed_seconds)


def test_collectives_at_the_same_time_share_the_links():
  """Two collectives take as long as one after the other.

  In an all-gather, a chip receives 192 bytes over two links of 100 bytes per
  second.
  """
  lines = [
    gather("start.1", operation="all-gather-start"),
    gather("start.2", operation="all-gather-start"),
    instruction("f", cycles=1000),
    "%done.1 = bf16[8,16] all-gather-done(%start.1)",
    "%done.2 = bf16[8,16] all-gather-done(%start.2)",
  ]

  result = estimate_program(lines)

  both_seconds = 2 * 192 / (2 * 100)
  # "f" has 1000 cycles. The chip has 1000 cycles per second.
  covered_seconds = 1.0
  assert_all_gathers_take(result, both_seconds, both_seconds - covered_seconds)


def test_parts_of_a_collective_in_fusions_are_one_collective():
  """The compiler puts the start, the middle and the end into three fusions.

  The same chain_id says that they are one all-gather.
  """
  chain = ', frontend_attributes={chain_id="7"}'
  computations = [
    computation(
      "start",
      gather("g.1", attributes=chain),
      "ROOT %q = bf16[8] custom-call(%g.1),"
      ' custom_call_target="AsyncCollectiveStart"',
    ),
    computation("middle", gather("g.2", attributes=chain)),
    computation(
      "done",
      gather("g.3", attributes=chain),
      "ROOT %q = bf16[8] custom-call(%g.3),"
      ' custom_call_target="AsyncCollectiveDone"',
    ),
  ]
  lines = [
    instruction("f.1", attributes=", calls=%start"),
    instruction("f.2", cycles=700, attributes=", calls=%middle"),
    instruction("f.3", attributes=", calls=%done"),
  ]

  result = estimate_program(lines, computations)

  # A chip receives 192 bytes over two links of 100 bytes per second.
  seconds = 192 / (2 * 100)
  # "f.2" has 700 cycles. The chip has 1000 cycles per second.
  covered_seconds = 0.7
  assert_all_gathers_take(result, seconds, seconds - covered_seconds)


def test_a_collective_on_a_sparse_core_is_covered():
  """A sparse core communicates while the other cores of the chip compute."""
  sparse_core = computation("sparse_core", gather("g"))
  lines = [
    instruction(
      "start", operation="call-start", attributes=", to_apply=%sparse_core"
    ),
    instruction("f", cycles=500),
    "%done = bf16[8] call-done(%start)",
  ]

  result = estimate_program(lines, [sparse_core])

  # A chip receives 192 bytes over two links of 100 bytes per second.
  seconds = 192 / (2 * 100)
  # "f" has 500 cycles. The chip has 1000 cycles per second.
  covered_seconds = 0.5
  assert_all_gathers_take(result, seconds, seconds - covered_seconds)


def collective_seconds(topology: str, kind: str) -> float:
  """Returns the time of a collective in which each chip receives 1 GB."""
  collective = Collective(kind, axes=("fsdp",), bytes=1e9, times=1)
  num_chips = Topology.parse(topology).num_chips
  torus = Torus.from_topology(topology)
  return torus.collective_seconds(collective, num_chips)


@pytest.mark.parametrize(
  ("kind", "topology", "num_links", "link_gb_per_second"),
  [
    # A chip has one link along a line, and two along a ring.
    ("all-gather", "v5e:4x4", 1 + 1, 45),
    ("all-gather", "v5e:8x16", 1 + 2, 45),
    ("all-gather", "v5e:16x16", 2 + 2, 45),
    ("all-gather", "v5p:2x2x4", 1 + 1 + 1, 90),
    ("all-gather", "v5p:4x4x4", 2 + 2 + 2, 90),
    # In a permutation, a chip receives from only one neighbour.
    ("collective-permute", "v5e:4x4", 1, 45),
    ("collective-permute", "v5e:8x16", 1, 45),
    ("collective-permute", "v5e:16x16", 1, 45),
    ("collective-permute", "v5p:2x2x4", 1, 90),
    ("collective-permute", "v5p:4x4x4", 1, 90),
  ],
)
def test_a_collective_takes_the_time_of_its_links(
  kind, topology, num_links, link_gb_per_second
):
  """Every chip receives 1 GB over all its links at the same time."""
  seconds = collective_seconds(topology, kind)

  assert seconds == pytest.approx(1 / (num_links * link_gb_per_second))


@pytest.mark.parametrize(
  ("topology", "num_chips", "num_middle_links", "link_gb_per_second"),
  [
    # A line crosses the middle of the slice once, and a ring twice.
    ("v5e:4x4", 16, 4 * 1, 45),
    ("v5e:8x16", 128, 8 * 2, 45),
    ("v5e:16x16", 256, 16 * 2, 45),
    ("v5p:2x2x4", 16, 2 * 2 * 1, 90),
    ("v5p:4x4x4", 64, 4 * 4 * 2, 90),
  ],
)
def test_an_all_to_all_is_limited_by_the_middle_of_the_slice(
  topology, num_chips, num_middle_links, link_gb_per_second
):
  """Half of the chips send to the other half over the links in the middle."""
  seconds = collective_seconds(topology, "all-to-all")

  # A chip receives 1 GB in equal parts from all other chips.
  gb_per_pair = 1 / (num_chips - 1)
  half = num_chips / 2
  crossing_gb = half * half * gb_per_pair
  expected = crossing_gb / (num_middle_links * link_gb_per_second)
  assert seconds == pytest.approx(expected)


@pytest.mark.parametrize(
  "kind", ["all-gather", "all-to-all", "collective-permute"]
)
def test_collectives_of_a_single_chip_take_no_time(kind):
  assert collective_seconds("v6e:1x1", kind) == 0


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
  """The table is a file with estimates of the compiler."""
  assert forward_cycles(length=2048, D=128, V=256) == 36335
  assert forward_cycles(length=4096, D=128, V=256) == 122670
  assert forward_cycles(length=2048, D=64, V=128) == 26290


def test_a_width_without_an_estimate_is_rounded_up():
  """The next larger widths in the table are 128 of keys and 256 of values."""
  assert forward_cycles(length=2048, D=96, V=192) == forward_cycles(
    length=2048, D=128, V=256
  )


def test_a_generation_with_the_same_core_has_the_same_cycles():
  """The table has no estimates for v5p, whose cores are those of v5e."""
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
  """Only the cycles of our kernels with a causal mask are used.

  The table of cycles is a file that benchmarks write. It also has kernels of
  other libraries, such as splash attention, and of full masks.
  """
  # The widths of keys (D) and values (V), two maps in a head (G, M), 2048
  # tokens (T). Kernels compute blocks of 1024×1024 in parts of 256×256.
  sizes = "v6e D 128 V 256 G 2 M 2 T 2048"
  blocks = "forward 256×256 of 1024×1024; backward 256×256 of 1024×1024"
  table = {
    "estimated cycles, libtpu 1, jax 1, kernels ab": {
      f"{sizes} causal; {blocks}": {"forward": 2},
      f"{sizes} full; {blocks}": {"forward": 1},
    },
    "estimated cycles, libtpu 1, jax 1, splash of jax 1": {
      f"{sizes} causal; {blocks}": {"forward": 0.5}
    },
  }
  path = tmp_path / "cycles.json"
  path.write_text(json.dumps(table, ensure_ascii=False), encoding="utf-8")
  monkeypatch.setattr(tpu_cycles, "TABLE", path)

  cycles_of_causal_kernel = cycles(
    "v6e", "forward", length=2048, D=128, V=256, G=2, M=2
  )

  assert cycles_of_causal_kernel == 2


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


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_kind_of_layer_has_the_cycles_of_its_kernels(direction):
  """`cycles` is for one head and one row. A device has several of each.

  The model has a plain layer with 16 heads, and a DIFF layer with 2 heads. A
  DIFF head has 4 signal maps and the noise map that they share, and values of
  twice the width.
  """
  model = dataclasses.replace(
    MODEL,
    num_layers=2,
    plain_layers=1,
    num_heads=8,
    num_noise_heads=2,
    head_dim=128,
  )
  data = DataConfig(length=1024)
  train = TrainConfig(batch_size=16, accumulation=2)
  config = Config(model=model, data=data, train=train)
  mesh = {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}

  result = kernel_cycles(config, mesh, "v6e", num_cores=1)

  # A device has 2 of the 16 rows: there are 2 micro-batches, which the axes
  # data and fsdp divide by 4. The axis tensor divides the heads by 2.
  num_rows = 16 / 2 / 4
  num_plain_heads = 16 / 2
  num_diff_heads = 2 / 2
  # Keys have width D, and values V. Queries have G maps, and keys have M.
  cycles_of_plain_head = cycles(
    "v6e", direction, length=1024, D=128, V=128, G=1, M=1
  )
  cycles_of_diff_head = cycles(
    "v6e", direction, length=1024, D=128, V=256, G=4 + 1, M=2
  )
  assert cycles_of_plain_head > 0
  assert cycles_of_diff_head > 0
  assert result[f"diff_attention_{direction}_plain"] == (
    num_rows * num_plain_heads * cycles_of_plain_head
  )
  assert result[f"diff_attention_{direction}_v1"] == (
    num_rows * num_diff_heads * cycles_of_diff_head
  )


def test_the_cores_of_a_chip_share_the_cycles_of_its_kernels():
  config_of_one_diff_layer = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(MODEL, plain_layers=0, num_noise_heads=None),
  )

  on_one_core = kernel_cycles(
    config_of_one_diff_layer, ONE_DEVICE, "v6e", num_cores=1
  )
  on_two_cores = kernel_cycles(
    config_of_one_diff_layer, ONE_DEVICE, "v6e", num_cores=2
  )

  for kernel in ("diff_attention_forward_v1", "diff_attention_backward_v1"):
    assert on_one_core[kernel] > 0
    assert on_two_cores[kernel] == on_one_core[kernel] / 2


def test_kernels_without_an_estimate_have_no_entry():
  """The table has no cycles for two heads that share a noise map."""
  model = dataclasses.replace(MODEL, plain_layers=0, num_noise_heads=4)
  config = dataclasses.replace(CONFIG, model=model)

  result = kernel_cycles(config, ONE_DEVICE, "v6e", num_cores=1)

  # Only the fallback kernel for overflow, which counts as no time.
  assert result == {"_online": 0.0}


# Compiled programs.

GENERATIONS = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU v5": "v5p"}


class ChainEstimates(NamedTuple):
  """Estimates of a loop over a chain of matrix products.

  Attributes:
    peak_seconds: the time of the products at the chip's peak FLOP/s.
    seconds: the estimated time.
    parts: the names of its parts.
    copied_bytes: the bytes that are read and written by the copies, if there is
      a copy after each product.
    seconds_with_copies: the estimated time with these copies.
  """

  peak_seconds: float
  seconds: float
  parts: set[str]
  copied_bytes: int
  seconds_with_copies: float


def estimate_chains(
  devices: Any, num_chips: int, memory_bytes: float
) -> ChainEstimates:
  """Returns the estimates for one of the devices."""
  # Runs in another process, which should not import more than it needs.
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from diffjax.model.flops import peak_flops

  del num_chips, memory_bytes
  num_rows = 16384
  width = 4096
  num_products = 8
  num_iterations = 3
  kind = devices[0].device_kind
  mesh = Mesh(devices[:1], ("data",))
  sharding = NamedSharding(mesh, PartitionSpec())
  barrier = jax.lax.optimization_barrier

  def products(x, w):
    for _ in range(num_products):
      x = jnp.dot(x, w)
    return x

  def products_and_copies(x, w):
    for _ in range(num_products):
      x = jnp.dot(x, w)
      # The barriers keep the compiler from fusing the copy with a product.
      x = barrier(barrier(x) + 1)
    return x

  def estimate_loop(body):
    def run(x, w):
      def iterate(_, x):
        return body(x, w)

      return jax.lax.fori_loop(0, num_iterations, iterate, x)

    x = jax.ShapeDtypeStruct((num_rows, width), jnp.bfloat16, sharding=sharding)
    w = jax.ShapeDtypeStruct((width, width), jnp.bfloat16, sharding=sharding)
    text = jax.jit(run).lower(x, w).compile().as_text()
    chip = CHIPS[GENERATIONS[kind]]
    torus = Torus.from_topology("v5e:1x1")
    return estimate(text, mesh.shape, chip, torus, {})

  num_flops = num_iterations * num_products * 2 * num_rows * width**2
  # A copy reads and writes an array.
  bytes_per_element = 2
  bytes_per_copy = 2 * num_rows * width * bytes_per_element
  without_copies = estimate_loop(products)
  with_copies = estimate_loop(products_and_copies)
  return ChainEstimates(
    peak_seconds=num_flops / peak_flops(kind),
    seconds=without_copies.seconds,
    parts=set(without_copies.parts),
    copied_bytes=num_iterations * num_products * bytes_per_copy,
    seconds_with_copies=with_copies.seconds,
  )


@pytest.mark.full
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
@pytest.mark.parametrize(
  ("topology", "memory_bandwidth"),
  [("v5e:2x2", 819e9), ("v6e:2x2", 1640e9), ("v5p:2x2x1", 2765e9)],
)
def test_estimates_of_products_and_copies_are_near_the_limits_of_the_chip(
  topology, memory_bandwidth
):
  """`estimate_chains` compiles a loop of products, with and without copies."""
  result = call_with_devices(estimate_chains, topology=topology)

  assert result.parts <= {"other products", "copies", "other"}
  # The products are estimated to reach at least 85% of the peak.
  assert result.peak_seconds <= result.seconds
  assert result.peak_seconds >= 0.85 * result.seconds
  # The copies are estimated to reach at least a quarter of the bandwidth.
  copy_seconds = result.seconds_with_copies - result.seconds
  copied_bytes_per_second = result.copied_bytes / copy_seconds
  assert copied_bytes_per_second <= memory_bandwidth
  assert copied_bytes_per_second >= memory_bandwidth / 4
