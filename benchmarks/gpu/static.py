"""Compiles the Hopper kernels without a GPU, and reads their machine code.

    python -m benchmarks.gpu.static

Prints a table of all kernels, compiled for sm_90a. The columns are:

- registers: per thread, on average over the warpgroups.
- spilled bytes: stores and loads of registers in the whole kernel.
- spills in loops: the instructions among them in inner loops. The second number
  is for blocks that a causal mask cuts.
- instructions, tensor cycles, schedule: a step of each inner loop.
- serialized: whether each product waits for the one before.

An inner loop is an innermost loop with products of the tensor cores. Its step
is the shortest path around the loop that contains all its products: the step
that finds its barriers open.

The compiler needs these packages, but neither a GPU nor a driver (JAX stands
for the version of JAX):

    pip install --no-deps jax-cuda13-plugin==JAX jax-cuda13-pjrt==JAX \\
      nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.ops.diff_attention import (
  RESIDUAL_NAMES,
  decode_attention,
  diff_attention,
)
from diffjax.ops.diff_attention.gpu import assembler, chip

# The GPU that is compiled for, as XLA describes it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# The rows of the table, as arguments of `lower`.
TABLE_CASES = [
  {"D": 128},
  {"D": 64},
  {"D": 128, "V": 128, "M": 1},
  {"D": 64, "V": 64, "M": 1},
  {"D": 128, "V": 128, "G": 1, "M": 1},
  {"D": 64, "V": 64, "G": 1, "M": 1},
]
COLUMNS = (
  "kernel",
  "registers",
  "spilled bytes",
  "spills in loops",
  "instructions",
  "tensor cycles",
  "serialized",
  "schedule",
)

# The multiply-adds per cycle of the tensor cores of a multiprocessor, with
# operands of 16 bits.
_PRODUCTS_PER_CYCLE = 2048
# The rows of a product of a warpgroup.
_PRODUCT_ROWS = 64

_INSTRUCTION = re.compile(
  r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\d+)\s+)?([A-Z][\w.]*)\s*([^;]*)"
)
_LABEL = re.compile(r"^(\.L_x_\d+):")
_JUMP_TARGET = re.compile(r"\((\.L_x_\d+)\)")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x(\d+)")
_JUMPS = ("BRA", "WARPSYNC.COLLECTIVE", "CALL")
_ENDS = ("BRA", "EXIT", "RET")
_EXPONENTIAL = "MUFU.EX2"
_WAIT = "WARPGROUP.DEPBAR"
_GLOBAL_LOADS = ("LD.", "LDG")
_SPILLS = ("STL", "LDL")


def main(arguments: Sequence[str]) -> None:
  """Prints the table, or compiles cases for `compiled` in its process."""
  if arguments:
    _compile_cases(json.loads(arguments[0]))
    return
  problem = missing()
  if problem is not None:
    sys.exit(f"error: {problem}")
  print_table()


def missing() -> str | None:
  """Returns what has to be installed to compile the kernels, or None."""
  if importlib.util.find_spec("jax_cuda13_plugin") is None:
    return (
      "the compiler for Hopper is not installed;"
      " benchmarks/gpu/static.py names the packages"
    )
  return None


def kind_of(case: dict[str, Any]) -> str:
  """Returns the kind of attention of arguments of `lower`."""
  if case.get("G") == 1:
    return "plain"
  if case.get("M") == 1:
    return "v2"
  return "v1"


@dataclasses.dataclass(frozen=True)
class Loop:
  """A step of an inner loop.

  Attributes:
    instructions: the number of instructions of each warp.
    tensor_cycles: the cycles that the tensor cores need for its products.
    global_loads: the number of instructions that load from global memory.
    spills: the number of instructions that store or load spilled registers.
    serialized: whether each product waits for the one before.
    schedule: its products, exponentials and waits, in order. "4 N64" is four
      products with 64 columns, "exp" is an exponential, and "wait 1" waits
      until only the last group of products is still running.
  """

  instructions: int
  tensor_cycles: int
  global_loads: int
  spills: int
  serialized: bool
  schedule: str


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A compiled kernel.

  Attributes:
    name: such as "d_q_v1".
    registers: registers per thread, on average over its warpgroups.
    spilled: the bytes of spilled registers that are stored or loaded.
    serialized: whether ptxas reports that it has serialized products.
    loops: the inner loops.
  """

  name: str
  registers: int
  spilled: int
  serialized: bool
  loops: tuple[Loop, ...]

  @property
  def spills(self) -> int:
    """The number of instructions that spill in inner loops."""
    return sum(loop.spills for loop in self.loops)


class Compilation(NamedTuple):
  """What became of a case that was compiled.

  Attributes:
    case: the arguments of `lower`.
    kernels: the kernels in the order of their names, or the error message.
    forward_calls: the number of calls of the forward kernel in the program.
  """

  case: dict[str, Any]
  kernels: list[Kernel] | str
  forward_calls: int


def print_table() -> None:
  """Compiles all kernels and prints a line for each."""
  print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
  cases = []
  for case in TABLE_CASES:
    cases.append({**case, "causal": False})
    cases.append({**case, "causal": True})
  compilations = compiled(cases)
  for full in compilations:
    # The case with a full mask is followed by the same one with a causal mask.
    causal = next(compilations)
    if isinstance(full.kernels, str):
      print(f"{full.case}: {full.kernels}", flush=True)
      continue
    if isinstance(causal.kernels, str):
      print(f"{full.case}: {causal.kernels}", flush=True)
      continue
    pairs = zip(full.kernels, causal.kernels, strict=True)
    for full_kernel, causal_kernel in pairs:
      title = f"{full_kernel.name} D {full.case['D']}"
      print(_line(title, full_kernel, causal_kernel), flush=True)


def _line(title: str, full: Kernel, causal: Kernel) -> str:
  """Returns a line of the table.

  Args:
    title: the first cell.
    full: the kernel, compiled with a full mask.
    causal: the kernel, compiled with a causal mask.
  """
  instructions = []
  tensor_cycles = []
  schedules = []
  for loop in full.loops:
    instructions.append(str(loop.instructions))
    tensor_cycles.append(str(loop.tensor_cycles))
    schedules.append(loop.schedule)
  is_serialized = full.serialized or causal.serialized
  cells = [
    title,
    str(causal.registers),
    str(causal.spilled),
    f"{full.spills} / {causal.spills}",
    " + ".join(instructions),
    " + ".join(tensor_cycles),
    "yes" if is_serialized else "no",
    "; ".join(schedules),
  ]
  return f"| {' | '.join(cells)} |"


def compiled(cases: Sequence[dict[str, Any]]) -> Iterator[Compilation]:
  """Compiles cases in another process, and yields each when it is done.

  The other process has environment variables that make Mosaic print the machine
  code. If it ends early, the case that it was compiling gets an error message,
  and the cases after it are missing.

  Args:
    cases: arguments of `lower`.
  """
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_SASS": "1",
  }
  # Mosaic takes the first ptxas on PATH.
  ptxas = assembler.packaged()
  if ptxas is not None:
    environment["PATH"] = f"{ptxas.parent}{os.pathsep}{os.environ['PATH']}"
  process = subprocess.Popen(
    [sys.executable, "-m", "benchmarks.gpu.static", json.dumps(cases)],
    cwd=pathlib.Path(__file__).parents[2],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout is not None
  assert process.stderr is not None
  num_done = 0
  # The process prints a line of JSON for each case, in order.
  for line in process.stdout:
    yield _compilation_from_json(cases[num_done], json.loads(line))
    num_done += 1

  errors = process.stderr.read()
  exit_code = process.wait()
  if num_done < len(cases):
    message = f"the compiler ended with {exit_code}\n{errors[-2000:]}"
    yield Compilation(cases[num_done], message, forward_calls=0)


def _compilation_from_json(
  case: dict[str, Any], result: dict[str, Any]
) -> Compilation:
  """Returns the result that `_compile_cases` has printed for a case."""
  if result["error"]:
    return Compilation(case, result["error"], forward_calls=0)
  kernels = [_kernel_from_json(fields) for fields in result["kernels"]]
  return Compilation(case, kernels, result["forward_calls"])


def _kernel_from_json(fields: dict[str, Any]) -> Kernel:
  loops = tuple(Loop(**loop) for loop in fields["loops"])
  return Kernel(**{**fields, "loops": loops})


def _compile_cases(cases: Sequence[dict[str, Any]]) -> None:
  """Compiles cases, and prints a line of JSON for each to standard output."""
  warnings.simplefilter("ignore")
  mesh = h100_mesh()
  # The compiler prints the machine code to file descriptor 1, which is standard
  # output. It is replaced by a file while a case is compiled.
  stdout = os.dup(1)
  for case in cases:
    result: dict[str, Any] = {"error": "", "kernels": [], "forward_calls": 0}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as dump:
      os.dup2(dump.fileno(), 1)
      try:
        program = lower(mesh, **case).compile().as_text()
      except Exception as error:  # The test reports it with the case.
        result["error"] = f"{type(error).__name__}: {error}"[:2000]
      else:
        result["forward_calls"] = _count_forward_calls(program)
      os.dup2(stdout, 1)
      dump.seek(0)
      kernels = parse_kernels(dump.read())
    for kernel in kernels:
      result["kernels"].append(dataclasses.asdict(kernel))
    print(json.dumps(result), flush=True)


def _count_forward_calls(program: str) -> int:
  """Returns the number of calls of the forward kernel in an HLO program."""
  count = 0
  for line in program.splitlines():
    is_kernel = "custom_call_target=" in line and "mosaic_gpu" in line
    if is_kernel and "diff_attention_forward" in line:
      count += 1
  return count


def h100_mesh() -> Mesh:
  """Returns a mesh with an H100 that programs can be compiled for."""
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform="cuda", topology="1x1x1", target_config=H100
  )
  return Mesh([topology.devices[0]], ("data",))


def compile_small_kernel() -> None:
  """Compiles a kernel with Mosaic for an H100, which runs the assembler."""

  def double(x_ref: chip.Ref, out_ref: chip.Ref) -> None:
    out_ref[...] = x_ref[...] * 2

  mesh = h100_mesh()
  shape = jax.ShapeDtypeStruct((128,), jnp.float32)
  kernel = chip.plgpu.kernel(double, out_type=shape, kernel_name="double")
  argument = _replicated(mesh, shape.shape, shape.dtype)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jax.jit(kernel).lower(argument).compile()


def lower(
  mesh: Mesh,
  *,
  T: int = 2048,
  D: int = 64,
  V: int | None = None,
  H: int = 2,
  K: int = 1,
  G: int = 2,
  M: int = 2,
  B: int = 2,
  dtype: str = "bfloat16",
  segments: bool = False,
  offsets: bool = False,
  window: int | None = None,
  causal: bool = True,
  remat: bool = False,
  decode: bool = False,
) -> jax.stages.Lowered:
  """Lowers attention for a GPU that is not there.

  The program is a gradient of `diff_attention`, or a call of
  `decode_attention`. The letters are the ones of diffjax/parameters.py.

  Args:
    mesh: the GPU.
    T: the number of tokens, or the capacity of the cache.
    D: the width of queries and keys.
    V: the width of values. None for 2·D.
    H: the number of heads.
    K: the number of key heads.
    G: the number of maps of a head.
    M: the number of maps with their own keys.
    B: the number of rows.
    dtype: the dtype of queries, keys and values.
    segments: whether rows have several documents.
    offsets: whether each row has a position of its first query.
    window: the number of keys that a query sees. None for all.
    causal: whether a query sees only keys up to its own position.
    remat: whether only the named residuals are saved for the backward pass.
    decode: whether to lower `decode_attention`.
  """
  value_dim = V or 2 * D
  # Returns an argument of the program: its shape and dtype.
  struct = functools.partial(_replicated, mesh)
  if decode:
    attend_token = functools.partial(
      decode_attention, window=window, implementation="pallas_gpu"
    )
    q = struct((B, H, G, D), dtype)
    k_cache = struct((B, K, T, M * D), dtype)
    v_cache = struct((B, K, T, value_dim), dtype)
    lam = struct((B, H), jnp.float32) if G == 2 else None
    lengths = struct((B,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.jit(attend_token).lower(q, k_cache, v_cache, lam, lengths)

  arrays = {
    "q": struct((B, T, H, G, D), dtype),
    "k": struct((B, T, K, M, D), dtype),
    "v": struct((B, T, K, value_dim), dtype),
    "lam": struct((B, T, H), jnp.float32) if G == 2 else None,
  }
  mask = {}
  if segments:
    mask["q_segment_ids"] = struct((B, T), jnp.int32)
  if offsets:
    mask["q_offset"] = struct((B,), jnp.int32)

  def loss(arrays: dict[str, Any], mask: dict[str, Any]) -> jax.Array:
    output = diff_attention(
      **arrays,
      **mask,
      window=window,
      causal=causal,
      implementation="pallas_gpu",
    )
    return jnp.sum(jnp.sin(output.astype(jnp.float32)))

  differentiated = loss
  if remat:
    save = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    differentiated = jax.checkpoint(loss, policy=save)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return jax.jit(jax.grad(differentiated)).lower(arrays, mask)


def _replicated(
  mesh: Mesh, shape: tuple[int, ...], dtype: Any
) -> jax.ShapeDtypeStruct:
  """Returns the shape of an array that each device of the mesh holds whole."""
  sharding = NamedSharding(mesh, P())
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def parse_kernels(dump: str) -> list[Kernel]:
  """Returns the kernels in the output of ptxas and nvdisasm.

  They are sorted by the names of their functions.
  """
  # `re.split` returns the text before the first kernel, then the name and the
  # text of each kernel.
  parts = re.split(
    r"^ptxas info.*Compiling entry function '(\w+)'.*$", dump, flags=re.M
  )
  functions = parts[1::2]
  texts = parts[2::2]
  kernels = []
  for function, text in sorted(zip(functions, texts, strict=True)):
    name = re.search(r"diff_attention_(\w+)_mosaic", function)
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(
      r"(\d+) bytes spill stores, (\d+) bytes spill loads", text
    )
    assert registers is not None, text
    assert spills is not None, text
    is_serialized = re.search(f"serializ.*{function}", dump) is not None
    kernel = Kernel(
      name=function if name is None else name[1],
      registers=int(registers[1]),
      spilled=int(spills[1]) + int(spills[2]),
      serialized=is_serialized,
      loops=tuple(inner_loops(text)),
    )
    kernels.append(kernel)
  return kernels


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction of SASS, the machine code of NVIDIA's GPUs.

  Attributes:
    name: the name with its modifiers, such as "BRA.U".
    operands: the text of its operands.
    is_conditional: whether it has a predicate.
  """

  name: str
  operands: str
  is_conditional: bool

  @property
  def jump_target(self) -> str | None:
    """The label that the instruction may jump to."""
    if not self.name.startswith(_JUMPS):
      return None
    target = _JUMP_TARGET.search(self.operands)
    return None if target is None else target[1]

  @property
  def never_continues(self) -> bool:
    """Whether the next instruction is never executed after this one."""
    return not self.is_conditional and self.name.split(".")[0] in _ENDS

  @property
  def tensor_cycles(self) -> int:
    """The cycles of the tensor cores. 0 if it is not a product."""
    product = _PRODUCT.match(self.name)
    if product is None:
      return 0
    columns = int(product[1])
    depth = int(product[2])
    return _PRODUCT_ROWS * columns * depth // _PRODUCTS_PER_CYCLE


@dataclasses.dataclass
class Block:
  """A basic block: only its last instruction may jump.

  Attributes:
    instructions: its instructions.
    successors: the numbers of the blocks that may follow.
  """

  instructions: list[Instruction]
  successors: list[int]

  @property
  def has_product(self) -> bool:
    for instruction in self.instructions:
      if instruction.tensor_cycles > 0:
        return True
    return False


def basic_blocks(sass: str) -> list[Block]:
  """Returns the basic blocks of a kernel, in the order of its SASS.

  A block ends before a label and after an instruction that may jump.
  """
  # The number of the block at each label.
  labels: dict[str, int] = {}
  blocks = [Block([], [])]
  for line in sass.splitlines():
    label = _LABEL.match(line)
    if label is not None:
      if blocks[-1].instructions:
        blocks.append(Block([], []))
      labels[label[1]] = len(blocks) - 1
      continue
    match = _INSTRUCTION.search(line)
    if match is None:
      continue
    predicate, name, operands = match.groups()
    instruction = Instruction(name, operands, predicate is not None)
    blocks[-1].instructions.append(instruction)
    if instruction.jump_target is not None or instruction.never_continues:
      blocks.append(Block([], []))

  # A block is followed by the next one, by the target of its jump, or by both.
  for number, block in enumerate(blocks):
    last = block.instructions[-1] if block.instructions else None
    continues = last is None or not last.never_continues
    if continues and number + 1 < len(blocks):
      block.successors.append(number + 1)
    if last is not None and last.jump_target in labels:
      block.successors.append(labels[last.jump_target])
  return blocks


def find_loops(blocks: Sequence[Block]) -> dict[int, set[int]]:
  """Returns the natural loops of a control-flow graph.

  An edge to a block that dominates the edge's start is a back edge, and that
  block is the header of a loop. The loop has all blocks from which the start of
  the back edge can be reached without passing the header.

  Returns:
    The numbers of the blocks of each loop, by the number of its header.
  """
  dominators = _dominators(blocks)
  predecessors = _predecessors(blocks)
  loops: dict[int, set[int]] = {}
  for number, block in enumerate(blocks):
    for header in block.successors:
      if header not in dominators[number]:
        continue
      # Collects the blocks backwards from the start of the back edge.
      body = loops.setdefault(header, {header})
      stack = [number]
      while stack:
        member = stack.pop()
        if member not in body:
          body.add(member)
          stack += predecessors[member]
  return loops


def _dominators(blocks: Sequence[Block]) -> list[set[int]]:
  """Returns for each block the blocks that are on every path to it.

  Starts from all blocks, and removes blocks until nothing changes.
  """
  predecessors = _predecessors(blocks)
  all_blocks = set(range(len(blocks)))
  dominators = [{0}] + [all_blocks] * (len(blocks) - 1)
  has_changed = True
  while has_changed:
    has_changed = False
    for number in range(1, len(blocks)):
      # No path leads to a block without predecessors.
      shared = all_blocks if predecessors[number] else set()
      for predecessor in predecessors[number]:
        shared = shared & dominators[predecessor]
      updated = shared | {number}
      if updated != dominators[number]:
        dominators[number] = updated
        has_changed = True
  return dominators


def _predecessors(blocks: Sequence[Block]) -> list[list[int]]:
  predecessors: list[list[int]] = [[] for _ in blocks]
  for number, block in enumerate(blocks):
    for successor in block.successors:
      predecessors[successor].append(number)
  return predecessors


def inner_loops(sass: str) -> list[Loop]:
  """Returns the innermost loops with products, in the order of the SASS."""
  blocks = basic_blocks(sass)
  loops_with_products: dict[int, set[int]] = {}
  for header, body in find_loops(blocks).items():
    if _product_blocks(blocks, body):
      loops_with_products[header] = body

  loops = []
  for header, body in sorted(loops_with_products.items()):
    # A proper subset of a loop's blocks is a loop inside it.
    if any(other < body for other in loops_with_products.values()):
      continue
    instructions = []
    for number in _shortest_step(blocks, header, body):
      instructions += blocks[number].instructions
    loops.append(measure_step(instructions))
  return loops


def _product_blocks(blocks: Sequence[Block], body: set[int]) -> set[int]:
  """Returns the blocks of a loop that have products."""
  return {number for number in body if blocks[number].has_product}


def _shortest_step(
  blocks: Sequence[Block], header: int, body: set[int]
) -> tuple[int, ...]:
  """Returns the shortest path around a loop that has all its products.

  Args:
    blocks: all blocks of the kernel.
    header: the first block of the loop.
    body: the blocks of the loop.

  Returns:
    The numbers of the blocks on the path.
  """
  required = _product_blocks(blocks, body)

  def length(path: tuple[int, ...]) -> int:
    return sum(len(blocks[number].instructions) for number in path)

  # Depth-first search over all paths from the header that visit no block twice.
  shortest: tuple[int, ...] | None = None
  stack: list[tuple[int, ...]] = [(header,)]
  while stack:
    path = stack.pop()
    if shortest is not None and length(path) >= length(shortest):
      continue
    for successor in blocks[path[-1]].successors:
      # The path is closed.
      if successor == header and required <= set(path):
        shortest = path
      elif successor in body and successor not in path:
        stack.append((*path, successor))
  assert shortest is not None, "no path around the loop has all its products"
  return shortest


def measure_step(step: Sequence[Instruction]) -> Loop:
  """Returns the counts and the schedule of a loop's step."""
  events = []
  for instruction in step:
    event = _event(instruction)
    if event is not None:
      events.append(event)
  parts = []
  for event, equal_events in itertools.groupby(events):
    count = len(list(equal_events))
    parts.append(event if count == 1 else f"{count} {event}")
  schedule = ", ".join(parts)
  # Three products that are each followed by a wait for all products.
  serialized = re.search(
    r"\bN\d+, wait 0, N\d+, wait 0, N\d+, wait 0", schedule
  )
  return Loop(
    instructions=len(step),
    tensor_cycles=sum(instruction.tensor_cycles for instruction in step),
    global_loads=_count(step, _GLOBAL_LOADS),
    spills=_count(step, _SPILLS),
    serialized=serialized is not None,
    schedule=schedule,
  )


def _event(instruction: Instruction) -> str | None:
  """Returns the name of an instruction in a schedule.

  None if it is neither a product, nor an exponential, nor a wait for products.
  """
  product = _PRODUCT.match(instruction.name)
  if product is not None:
    return f"N{product[1]}"
  if instruction.name.startswith(_EXPONENTIAL):
    return "exp"
  if instruction.name.startswith(_WAIT):
    groups = int(instruction.operands.split(",")[-1], 16)
    return f"wait {groups}"
  return None


def _count(step: Sequence[Instruction], prefixes: tuple[str, ...]) -> int:
  """Returns the number of instructions whose names start with a prefix."""
  count = 0
  for instruction in step:
    if instruction.name.startswith(prefixes):
      count += 1
  return count


if __name__ == "__main__":
  main(sys.argv[1:])
