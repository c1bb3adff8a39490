"""The TPU kernels' cost: fused differential attention, two calls of the same code with one map, and the Transformer's plain attention.

    python -m benchmarks.tpu                            # table, and diffjax/ops/diff_attention/tpu/cycles.json
    python -m benchmarks.tpu --generations v6e --lengths 4096 --masks causal
    python -m benchmarks.tpu --shapes 64,128,2,2 128,128,2,1 --lengths 1024 2048 --masks causal     # D,V,G,M of single calls
    python -m benchmarks.tpu --search                   # fills diffjax/ops/diff_attention/tpu/block_sizes.json

On a TPU these are times: medians of calls after warm-up, on inputs that rotate. Anywhere else they are a compiler's estimate that ranks
variants, not a time: libtpu compiles the kernels for a chip that is not there and walks through their instructions and loops. At T 4096
that takes minutes and up to 14 GB of memory a case, and more with every tile: a case that takes longer than --timeout is missing, and
lengths beyond --simulate are computed from two shorter ones (a·n + b·n² for n rows of tiles) and marked ~. libtpu has no estimate for v4,
none that is whole for v5p and v7x (forward at T 2048 it says 1.4 times what it says at 1024, or nothing), and none that is right where the
mask is data (segment ids, offsets known at run time). What diffjax/ops/diff_attention/tpu/cycles.json holds for the same kernels
and blocks is not estimated again.

All is for one head of differential attention, D 128, V 256, bfloat16, and for what stands in its place: two calls with one map each, either
with V whole or with each half of V apart (four calls), whichever is less; and the Transformer's two heads of D 128, V 128.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.tpu import block_sizes, cycles
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

RESULTS = cycles.TABLE
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
DIRECTIONS = ("forward", "backward")
HEADS_TIMED = 32  # on a TPU: enough work that starting a call does not count

# D, V, G, M
FUSED, WIDE, PLAIN = (128, 256, 2, 2), (128, 256, 1, 1), (128, 128, 1, 1)
SEARCHED = (FUSED, PLAIN, WIDE, (64, 128, 2, 2), (96, 192, 2, 2), (128, 128, 2, 1), (256, 256, 1, 1))
CANDIDATES = ((1024, 256, 256), (1024, 256, 512), (1024, 512, 512))  # tile, and a sub-tile's queries and keys; for both directions at once
SEARCH_LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class Case:
  generation: str
  D: int
  V: int
  G: int
  M: int
  length: int
  causal: bool
  blocks: tuple[int, int, int] | None = None  # tile, and a sub-tile's queries and keys, instead of the table's


def attention(case: Case, heads: int):
  """The operation, and its arguments as shapes."""
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, case.length, heads, *shape), dtype)
  arguments = [struct(case.G, case.D), struct(case.M, case.D), struct(case.V)] + ([struct(dtype=jnp.float32)] if case.G == 2 else [])
  attend = lambda *a: diff_attention(*a, causal=case.causal, implementation="pallas_tpu")
  return attend, arguments


def compile_case(case: Case) -> None:
  """The other process: compiles, and libtpu writes its estimates on the way."""
  from jax.experimental import topologies
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.generation]).devices[0]
  mesh = Mesh([device], ("x",))
  attend, arguments = attention(case, heads=1)
  arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())) for x in arguments]
  grads = jax.grad(lambda *a: jnp.sum(attend(*a).astype(jnp.float32)), tuple(range(len(arguments))))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), block_sizes.use(**_forced(case)):
    jax.jit(grads).lower(*arguments).compile()


def estimate(case: Case, timeout: float) -> dict[str, int]:
  """Estimated cycles by direction; a direction without an estimate is not there."""
  environment = {
    "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  }  # fmt: skip
  with tempfile.TemporaryDirectory() as folder:
    environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_static_llo_profile_to={folder}"
    command = [sys.executable, "-m", "benchmarks.tpu", "--child", json.dumps(dataclasses.asdict(case))]
    try:
      # It may crash after an estimate is written: what was written counts.
      subprocess.run(command, env=os.environ | environment, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
      pass
    written = "\n".join(path.read_text(errors="replace", encoding="utf-8") for path in pathlib.Path(folder).iterdir() if path.is_file())
  cycles: dict[str, int] = {}
  for name, count in re.findall(r'hlo_op_name: "([^"]*)"\s*estimated_cycles: (\d+)', written):
    for direction in DIRECTIONS:
      if f"diff_attention_{direction}" in name and int(count):
        cycles[direction] = cycles.get(direction, 0) + int(count)
  return cycles


def _forced(case: Case) -> dict[str, Blocks]:
  return {direction: _blocks(case, direction) for direction in DIRECTIONS} if case.blocks else {}


def seconds(case: Case, repetitions: int = 20) -> dict[str, float]:
  """Measured on the TPU: medians of the seconds of one head."""
  attend, shapes = attention(case, HEADS_TIMED)
  forward = jax.jit(lambda *a: jax.vjp(attend, *a))
  backward = jax.jit(lambda pull, d_out: pull(d_out))
  inputs = []
  for seed in range(3):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    inputs.append([jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)])
  taken: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
  with block_sizes.use(**_forced(case)):
    for n in range(repetitions + 3):
      start = time.perf_counter()
      out, pull = jax.block_until_ready(forward(*inputs[n % 3]))
      middle = time.perf_counter()
      jax.block_until_ready(backward(pull, out))
      if n >= 3:
        taken["forward"].append(middle - start)
        taken["backward"].append(time.perf_counter() - middle)
  return {direction: statistics.median(times) / HEADS_TIMED for direction, times in taken.items()}


def cost(case: Case, timeout: float) -> dict[str, float]:
  """Cycles or seconds by direction: found before, or now and written down."""
  on_tpu = jax.default_backend() == "tpu"
  room = pathlib.Path(block_sizes.__file__).parent
  names = ("attention.py", "schedule.py", "chip.py", "../mask.py", "../tiles.py")
  sources = [(room / name).read_bytes() for name in names]
  kernels = f"kernels {hashlib.sha256(b''.join(sources)).hexdigest()[:8]}"
  found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
  found = {kind: known for kind, known in found.items() if kind.endswith(kernels)}  # of other kernels is of no use
  what = f"seconds on {jax.devices()[0].device_kind}" if on_tpu else f"estimated cycles, libtpu {importlib.metadata.version('libtpu')}"
  kind = f"{what}, jax {jax.__version__}, {kernels}"
  blocks = "; ".join(f"{name} {b.q_inner}×{b.kv_inner} of {b.q}×{b.kv}" for name in DIRECTIONS for b in [_blocks(case, name)])
  mask = "causal" if case.causal else "full"
  key = f"{case.generation} D {case.D} V {case.V} G {case.G} M {case.M} T {case.length} {mask}; {blocks}"
  known = found.setdefault(kind, {})
  if key not in known or set(known[key]) < set(DIRECTIONS):
    start = time.perf_counter()
    known[key] = seconds(case) if on_tpu else estimate(case, timeout)
    print(f"  {key}: {known[key] or 'nothing'} after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    rows = lambda entries: ",\n".join(f"  {json.dumps(name, ensure_ascii=False)}: {json.dumps(value)}" for name, value in entries.items())
    RESULTS.write_text(
      "{\n" + ",\n".join(f" {json.dumps(name)}: {{\n{rows(entries)}\n }}" for name, entries in found.items()) + "\n}\n", encoding="utf-8"
    )
  return known[key]


def _blocks(case: Case, direction: str) -> Blocks:
  if case.blocks:
    tile, *parts = case.blocks
    return Blocks(tile, tile, *parts, resident=case.length)
  blocks = block_sizes.choose(case.generation, direction, case.length, case.length, case.D, case.V, case.G, "bfloat16")
  return dataclasses.replace(blocks, resident=min(blocks.resident, case.length))


def cost_or_computed(case: Case, flags) -> dict[str, tuple[float, str]]:
  """Cost and its mark by direction: "~" where it is computed from two shorter lengths."""
  if jax.default_backend() == "tpu" or case.length <= flags.simulate:
    return {direction: (value, "") for direction, value in cost(case, flags.timeout).items()}
  result = {}
  for direction in DIRECTIONS:
    blocks = _blocks(case, direction)
    values = []
    for length in (flags.simulate // 2, flags.simulate):
      shorter = dataclasses.replace(case, length=length)
      if dataclasses.astuple(_blocks(shorter, direction))[:4] != dataclasses.astuple(blocks)[:4]:
        shorter = dataclasses.replace(shorter, blocks=(blocks.q, blocks.q_inner, blocks.kv_inner))
      values.append(cost(shorter, flags.timeout).get(direction))
    if None not in values:
      # a·n + b·n² through two points, where n counts the shorter length.
      square = (values[1] - 2 * values[0]) / 2
      n = case.length / (flags.simulate // 2)
      result[direction] = ((values[0] - square) * n + square * n * n, "~")
  return result


def table(generations: list[str], flags) -> None:
  on_tpu = jax.default_backend() == "tpu"
  print(("µs" if on_tpu else "kilocycles, a compiler's estimate that ranks variants, not a time;") + " one head of D 128, V 256")
  line = "{:5}{:>7} {:7}{:9}{:>9}{:>11}{:>9}{:>17}{:>13}  {}"
  print(line.format("chip", "T", "mask", "", "fused", "two calls", "plain", "two calls/fused", "plain/fused", "two calls with V"))
  for generation, length, mask in itertools.product(generations, flags.lengths, flags.masks):
    costs = [cost_or_computed(Case(generation, *shape, length, mask == "causal"), flags) for shape in (FUSED, WIDE, PLAIN)]
    for direction in (*DIRECTIONS, "both"):
      columns = _columns(*(_of(found, direction) for found in costs), 1e6 if on_tpu else 1e-3)
      print(line.format(generation, length, mask, direction, *columns), flush=True)


def _columns(fused, wide, plain, scale: float) -> list[str]:
  """From costs of one call, each with its mark, or None: fused, two calls, plain attention, both as ratios to fused, how V went."""
  mark = "".join({cost[1] for cost in (fused, wide, plain) if cost})
  two, how = min((2 * wide[0], "whole"), (4 * plain[0], "halved")) if wide and plain else (None, "")
  twin = 2 * plain[0] if plain else None
  values = [f"{mark}{value * scale:.1f}" if value else "missing" for value in (fused and fused[0], two, twin)]
  return values + [f"{mark}{value / fused[0]:.2f}" if value and fused else "" for value in (two, twin)] + [how]


def _of(found: dict[str, tuple[float, str]], direction: str) -> tuple[float, str] | None:
  if direction != "both":
    return found.get(direction)
  return (sum(value for value, _ in found.values()), found["forward"][1]) if set(found) == set(DIRECTIONS) else None


def search(generations: list[str], flags) -> None:
  """Puts the best candidate of each shape and direction into the table of block sizes."""
  for generation in generations:
    for D, V, G, M in SEARCHED:
      cases = [Case(generation, D, V, G, M, flags.search_length, True, blocks) for blocks in CANDIDATES if blocks[0] <= flags.search_length]
      costs = {case.blocks: cost(case, flags.timeout) for case in cases}
      for direction in DIRECTIONS:
        if found := [(x[direction], blocks) for blocks, x in costs.items() if direction in x]:
          tile, *parts = min(found)[1]
          entry = {"generation": generation, "direction": direction, "D": D, "V": V, "G": G, "length": flags.search_length}
          others = [x for x in block_sizes.table() if {name: x[name] for name in entry} != entry]
          entries = sorted([*others, entry | {"blocks": [tile, tile, *parts]}], key=_order)
          block_sizes.TABLE.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", encoding="utf-8")
          block_sizes.table.cache_clear()
          print(f"{generation} {direction} D {D} V {V} G {G}: sub-tiles of {parts[0]}×{parts[1]}", flush=True)


def _order(entry) -> tuple:
  return block_sizes.GENERATIONS.index(entry["generation"]), entry["direction"], -entry["G"], entry["D"], entry["V"], entry["length"]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--generations", nargs="+", choices=TOPOLOGIES, default=["v5e", "v6e"], help="not on a TPU")
  parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384])
  parser.add_argument("--masks", nargs="+", choices=("causal", "full"), default=["causal", "full"])
  parser.add_argument("--simulate", type=int, default=4096, help="longest length that is estimated and not computed (a multiple of 2048)")
  parser.add_argument("--timeout", type=float, default=1800, help="seconds a case")
  parser.add_argument("--shapes", nargs="+", help="D,V,G,M of calls that are measured alone, instead of the table")
  parser.add_argument("--search", action="store_true", help="fill the table of block sizes")
  parser.add_argument("--search_length", type=int, default=2048)
  parser.add_argument("--child", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    compile_case(Case(**json.loads(flags.child)))
    return
  generations = flags.generations
  if jax.default_backend() == "tpu":
    generations = [str(pltpu.get_tpu_info().chip_version)]
  if flags.shapes:
    for generation, shape, length, mask in itertools.product(generations, flags.shapes, flags.lengths, flags.masks):
      case = Case(generation, *map(int, shape.split(",")), length, mask == "causal")
      print(generation, shape, length, mask, cost(case, flags.timeout), flush=True)
    return
  (search if flags.search else table)(generations, flags)


if __name__ == "__main__":
  main()
