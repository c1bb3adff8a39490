"""The TPU kernels' cost: fused differential attention, and two calls of a kernel with one map: our own, JAX's splash, tokamax's.

    python -m benchmarks.tpu                            # table, and diffjax/ops/diff_attention/tpu/cycles.json
    python -m benchmarks.tpu --generations v6e --lengths 4096 --masks causal
    python -m benchmarks.tpu --shapes 64,128,2,2 128,128,2,1 --lengths 1024 2048 --masks causal     # D,V,G,M of single calls
    python -m benchmarks.tpu --search --minutes 30      # fills diffjax/ops/diff_attention/tpu/block_sizes.json

On a TPU these are times: medians of calls after warm-up, on inputs that rotate. Anywhere else they are a compiler's estimate that ranks
variants, not a time: libtpu compiles the kernels for a chip that is not there and walks through their instructions and loops. At T 4096
that takes minutes and up to 14 GB of memory a case, and more with every tile: a case that takes longer than --timeout is missing, and
lengths beyond --simulate are computed from two shorter ones (a·n + b·n² for n rows of tiles) and marked ~. libtpu has no estimate for v4,
none that is whole for v5p and v7x (forward at T 2048 it says 1.4 times what it says at 1024, or nothing), and none that is right where the
mask is data (segment ids, offsets known at run time). What diffjax/ops/diff_attention/tpu/cycles.json holds for the same kernels
and blocks, or for the same version of a library, is not estimated again: tokamax's figures are there where it is not installed.

All is for one head of differential attention, D 128, V 256, bfloat16, and for what stands in its place: two calls with one map each, either
with V whole or with each half of V apart (four calls), whichever is less; and the Transformer's two heads of D 128, V 128. A library's
figure is its best over the tiles tried (benchmarks/tpu_baselines.py), each direction for itself; a causal one is composed of two
estimates, and marked ~, too.

The search tries tiles and sub-tiles for each direction, those next to the table's first, and all shapes' first candidates before any
second. It writes what it finds at once, and stops after --minutes. On a TPU it fills the table of the chip that it finds. Elsewhere, for
v5p and v7x, it tries sub-tiles alone, in one step of a full mask: of that alone their estimate is whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from benchmarks import tpu_baselines
from benchmarks.tpu_baselines import LIBRARIES, Splash
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.tpu import block_sizes, cycles
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

RESULTS = cycles.TABLE
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
DIRECTIONS = ("forward", "backward")
HEADS_TIMED = 32  # on a TPU: enough work that starting a call does not count

_Cost = tuple[float, str] | None  # of one call, with "~" where it is computed and not measured or estimated; None where nothing is known

# D, V, G, M
FUSED, WIDE, PLAIN = (128, 256, 2, 2), (128, 256, 1, 1), (128, 128, 1, 1)
SEARCHED = (FUSED, PLAIN, WIDE, (64, 128, 2, 2), (96, 192, 2, 2), (128, 128, 2, 1), (256, 256, 1, 1))
KERNELS = {way: (f"diff_attention_{way}",) for way in DIRECTIONS}  # names of the kernels whose estimates belong to a direction
# Tile, and a sub-tile's queries and keys. One compilation tries them in both directions, and each takes what is best for it.
CANDIDATES = tuple(itertools.product((1024, 2048, 512), (256, 512, 128), (256, 512, 1024)))
ONE_STEP = {
  "v5p": 1024,
  "7x": 1024,
}  # chips of which the estimate is whole for one step alone: the length of a search, a tile of a full mask


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


def attention(case: Case | Splash, heads: int):
  """The operation, and its arguments as shapes."""
  if isinstance(case, Splash):
    return tpu_baselines.operation(case), tpu_baselines.shapes(case, heads)
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, case.length, heads, *shape), dtype)
  arguments = [struct(case.G, case.D), struct(case.M, case.D), struct(case.V)] + ([struct(dtype=jnp.float32)] if case.G == 2 else [])
  attend = lambda *a: diff_attention(*a, causal=case.causal, implementation="pallas_tpu")
  return attend, arguments


def compile_case(case: Case | Splash) -> None:
  """The other process: compiles, and libtpu writes its estimates on the way."""
  from jax.experimental import topologies
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.generation]).devices[0]
  mesh = Mesh([device], ("x",))
  attend, arguments = attention(case, heads=1)
  arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())) for x in arguments]
  grads = jax.grad(lambda *a: jnp.sum(attend(*a).astype(jnp.float32)), tuple(range(len(arguments))))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), block_sizes.use(**_forced(case)):
    jax.jit(grads).lower(*arguments).compile(compiler_options=_options(case))


def estimate(case: Case | Splash, timeout: float) -> dict[str, int]:
  """Estimated cycles by direction; a direction without an estimate is not there."""
  environment = {
    "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  }  # fmt: skip
  with tempfile.TemporaryDirectory() as folder:
    environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_static_llo_profile_to={folder}"
    command = [sys.executable, "-m", "benchmarks.tpu", "--child", json.dumps([type(case).__name__, dataclasses.asdict(case)])]
    try:
      # It may crash after an estimate is written: what was written counts.
      subprocess.run(command, env=os.environ | environment, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
      pass
    written = "\n".join(path.read_text(errors="replace", encoding="utf-8") for path in pathlib.Path(folder).iterdir() if path.is_file())
  if isinstance(case, Splash):
    return tpu_baselines.plausible(read_profile(written, case.kernels), case)
  return read_profile(written, KERNELS)


def read_profile(written: str, kernels: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
  """Cycles by direction from libtpu's profile: of all kernels that bear one of a direction's names. A direction is not there unless each of
  its names has cycles; an estimate of 0 is none."""
  found = [(name, int(count)) for name, count in re.findall(r'hlo_op_name: "([^"]*)"\s*estimated_cycles: (\d+)', written)]
  sums = {way: [sum(count for name, count in found if part in name) for part in parts] for way, parts in kernels.items()}
  return {way: sum(counts) for way, counts in sums.items() if all(counts)}


def _forced(case: Case | Splash) -> dict[str, Blocks]:
  return {direction: _blocks(case, direction) for direction in DIRECTIONS} if isinstance(case, Case) and case.blocks else {}


def _options(case: Case | Splash) -> dict[str, str]:
  return tpu_baselines.COMPILER_OPTIONS if isinstance(case, Splash) else {}


def seconds(case: Case | Splash, repetitions: int = 20) -> dict[str, float]:
  """Measured on the TPU: medians of the seconds of one head."""
  attend, shapes = attention(case, HEADS_TIMED)
  forward = jax.jit(lambda *a: jax.vjp(attend, *a), compiler_options=_options(case))
  backward = jax.jit(lambda pull, d_out: pull(d_out), compiler_options=_options(case))
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
  """Cycles or seconds by direction: found before for the same kernels, or now and written down."""
  blocks = "; ".join(f"{name} {b.q_inner}×{b.kv_inner} of {b.q}×{b.kv}" for name in DIRECTIONS for b in [_blocks(case, name)])
  mask = "causal" if case.causal else "full"
  key = f"{case.generation} D {case.D} V {case.V} G {case.G} M {case.M} T {case.length} {mask}; {blocks}"
  return _remembered(f"{_what()}, {_kernels()}", key, lambda: _measured(case, timeout))


def cost_of_library(case: Splash, timeout: float) -> dict[str, float] | None:
  """The same, found before for the same version; of a library that is not installed, for any version. None if nothing was."""
  version = tpu_baselines.version(case.library)
  if version is None:
    kinds = [kind for kind in _read() if kind.startswith(_what()) and tpu_baselines.library_of(kind) == case.library]
    return next((known[case.key] for kind in reversed(kinds) if case.key in (known := _read()[kind])), None)
  return _remembered(f"{_what()}, {version}", case.key, lambda: _measured(case, timeout))


def _measured(case: Case | Splash, timeout: float) -> dict[str, float]:
  return seconds(case) if _on_tpu() else estimate(case, timeout)


def _on_tpu() -> bool:
  return jax.default_backend() == "tpu"


def _what() -> str:
  what = f"seconds on {jax.devices()[0].device_kind}" if _on_tpu() else f"estimated cycles, libtpu {importlib.metadata.version('libtpu')}"
  return f"{what}, jax {jax.__version__}"


def _kernels() -> str:
  """The kernels as they are now, by their source."""
  room = pathlib.Path(block_sizes.__file__).parent
  names = ("attention.py", "schedule.py", "chip.py", "../mask.py", "../tiles.py")
  return f"kernels {hashlib.sha256(b''.join((room / name).read_bytes() for name in names)).hexdigest()[:8]}"


def _read() -> dict[str, dict[str, dict[str, float]]]:
  """What was found before. Of kernels that have changed since it is of no use; of a library's versions it is."""
  found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
  return {kind: known for kind, known in found.items() if kind.endswith(_kernels()) or tpu_baselines.library_of(kind)}


def _remembered(kind: str, key: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
  found = _read()
  known = found.setdefault(kind, {})
  if key not in known or (not tpu_baselines.library_of(kind) and set(known[key]) < set(DIRECTIONS)):
    start = time.perf_counter()
    known[key] = measure()
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
  if _on_tpu() or case.length <= flags.simulate:
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


def library_cost(library: str, generation: str, V: int, length: int, mask: str, flags) -> dict[str, tuple[float, str]]:
  """A library's least cost over the tiles tried, and its mark, by direction; see tpu_baselines for how a causal mask is estimated."""
  best: dict[str, tuple[float, str]] = {}
  shown = length if _on_tpu() else min(length, flags.simulate)
  scale = (length / shown) ** 2
  for tile, two in itertools.product(tpu_baselines.TILES, (False, True) if library == "jax" else (False,)):
    if shown % tile[0] or shown % tile[1]:
      continue
    of = lambda how, tile=tile, two=two: cost_of_library(Splash(library, generation, 128, V, shown, how, tile, two), flags.timeout) or {}
    if _on_tpu() or mask == "full":
      costs = of(mask)
    else:
      full, cut = of("full"), of("cut")
      costs = {way: tpu_baselines.composed(library, tile, length, full[way], cut[way]) for way in DIRECTIONS if way in full and way in cut}
    for way, value in costs.items():
      best[way] = min(best.get(way, (math.inf, "")), (value * scale, "" if scale == 1 and (mask == "full" or _on_tpu()) else "~"))
  return best


def table(generations: list[str], flags) -> None:
  unit = "µs" if _on_tpu() else "kilocycles, a compiler's estimate that ranks variants, not a time;"
  print(
    f"{unit} one head of D 128, V 256; two calls of a kernel with one map, and plain attention's two heads, by the library that is best"
  )
  line = "{:5}{:>7} {:7}{:9}" + "{:>12}" * 6 + "  {:26}{:>10}  {}"
  print(
    line.format(
      "chip", "T", "mask", "", "fused", "two calls", *(f"{x}" for x in LIBRARIES), "best/fused", "best two calls", "plain", "plain/fused"
    )
  )
  for generation, length, mask in itertools.product(generations, flags.lengths, flags.masks):
    fused, wide, plain = (cost_or_computed(Case(generation, *shape, length, mask == "causal"), flags) for shape in (FUSED, WIDE, PLAIN))
    costs = {"ours": (wide, plain)}
    for library in LIBRARIES:
      costs[library] = tuple(library_cost(library, generation, V, length, mask, flags) for V in (256, 128))
    for direction in (*DIRECTIONS, "both"):
      columns = _columns(
        _of(fused, direction), {x: tuple(_of(y, direction) for y in pair) for x, pair in costs.items()}, 1e6 if _on_tpu() else 1e-3
      )
      print(line.format(generation, length, mask, direction, *columns), flush=True)
  if tpu_baselines.version("tokamax") is None:
    print(tpu_baselines.INSTALL)


def two_calls(wide: _Cost, plain: _Cost) -> tuple[float, str, str] | None:
  """What two calls with one map take, with V whole or in halves: the lesser, its mark, and which it is."""
  ways = [(times * found[0], found[1], how) for times, found, how in ((2, wide, "V whole"), (4, plain, "V halved")) if found]
  return min(ways, default=None)


def _columns(fused: _Cost, costs: dict[str, tuple[_Cost, _Cost]], scale: float) -> list[str]:
  """From costs of one call: fused; two calls by each library; the least of those as a ratio to fused, and whose it is; plain attention by
  whichever is best, and as a ratio."""
  shown = lambda found: f"{found[1]}{found[0] * scale:.1f}" if found else "no estimate"
  ratio = lambda found: f"{max(found[1], fused[1])}{found[0] / fused[0]:.2f}" if found and fused else ""
  calls = {library: two_calls(*pair) for library, pair in costs.items()}
  best = min(((*found, library) for library, found in calls.items() if found), default=None)
  plain = min(((2 * pair[1][0], *pair[1][1:], library) for library, pair in costs.items() if pair[1]), default=None)
  whose = f"{best[3]}, {best[2]}" if best else ""
  twin = f"{ratio(plain)} {plain[2]}" if plain else ""
  return [shown(fused), *(shown(calls[library]) for library in costs), ratio(best), whose, shown(plain), twin]


def _of(found: dict[str, tuple[float, str]], direction: str) -> tuple[float, str] | None:
  if direction != "both":
    return found.get(direction)
  return (sum(value for value, _ in found.values()), found["forward"][1]) if set(found) == set(DIRECTIONS) else None


def candidates(generation: str, D: int, V: int, G: int, length: int) -> list[tuple[int, int, int]]:
  """The blocks to try for a shape, those first that are most like the table's; without those that do not fit the chip's memory."""
  known = [block_sizes.choose(generation, way, length, length, D, V, G, "bfloat16") for way in DIRECTIONS]

  def far(blocks: tuple[int, int, int]) -> float:
    return min(sum(abs(math.log2(a / b)) for a, b in zip(blocks, (x.q, x.q_inner, x.kv_inner), strict=True)) for x in known)

  def fits(blocks: tuple[int, int, int]) -> bool:
    tile, q, kv = blocks
    if length % tile or tile % q or tile % kv:
      return False
    sizes = [block_sizes.footprint(way, Blocks(tile, tile, q, kv, resident=length), D, V, G, 2) for way in DIRECTIONS]
    return max(sizes) <= block_sizes.vmem_bytes(generation)

  return sorted(filter(fits, CANDIDATES), key=far)


def search(generations: list[str], flags, clock: Callable[[], float] = time.monotonic) -> None:
  """Puts the best candidate of each shape and direction into the table of block sizes, as soon as it is found."""
  start = clock()
  shapes = list(itertools.product(generations, SEARCHED))
  estimated = {} if _on_tpu() else ONE_STEP
  lengths = {chip: estimated.get(chip, flags.search_length) for chip in generations}
  lists = {
    (chip, shape): [x for x in candidates(chip, *shape[:3], lengths[chip]) if chip not in estimated or x[0] == lengths[chip]]
    for chip, shape in shapes
  }
  turns = [(chip, shape, lists[chip, shape][n]) for n in range(len(CANDIDATES)) for chip, shape in shapes if n < len(lists[chip, shape])]
  found: dict[tuple, tuple[float, tuple[int, int, int]]] = {}
  for n, (chip, shape, blocks) in enumerate(turns):
    spent = (clock() - start) / 60
    if spent >= flags.minutes:
      print(f"{flags.minutes:g} minutes are over: {n} of {len(turns)} candidates were tried", flush=True)
      return
    print(f"{n} of {len(turns)} candidates tried, {flags.minutes - spent:.1f} minutes left", file=sys.stderr, flush=True)
    for way, value in cost(Case(chip, *shape, lengths[chip], chip not in estimated, blocks), flags.timeout).items():
      if (value, blocks) < found.get((chip, shape, way), (math.inf, blocks)):
        found[chip, shape, way] = value, blocks
        _enter(chip, way, shape, lengths[chip], blocks)
        print(
          f"{chip} {way} D {shape[0]} V {shape[1]} G {shape[2]}: sub-tiles of {blocks[1]}×{blocks[2]} in tiles of {blocks[0]}", flush=True
        )


def _enter(generation: str, direction: str, shape: tuple[int, ...], length: int, blocks: tuple[int, int, int]) -> None:
  """Writes an entry of the table of block sizes."""
  tile, *parts = blocks
  entry = {"generation": generation, "direction": direction, **dict(zip("DVG", shape, strict=False)), "length": length}
  others = [x for x in block_sizes.table() if {name: x[name] for name in entry} != entry]
  entries = sorted([*others, entry | {"blocks": [tile, tile, *parts]}], key=_order)
  block_sizes.TABLE.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", encoding="utf-8")
  block_sizes.table.cache_clear()


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
  parser.add_argument("--minutes", type=float, default=60, help="how long the search may go on; the candidate that it is at is finished")
  parser.add_argument("--search_length", type=int, default=2048)
  parser.add_argument("--child", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    name, fields = json.loads(flags.child)
    compile_case({"Case": Case, "Splash": Splash}[name](**fields))
    return
  generations = flags.generations
  if _on_tpu():
    generations = [str(pltpu.get_tpu_info().chip_version)]
  if flags.shapes:
    for generation, shape, length, mask in itertools.product(generations, flags.shapes, flags.lengths, flags.masks):
      case = Case(generation, *map(int, shape.split(",")), length, mask == "causal")
      print(generation, shape, length, mask, cost(case, flags.timeout), flush=True)
    return
  (search if flags.search else table)(generations, flags)


if __name__ == "__main__":
  main()
