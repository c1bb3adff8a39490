"""What a kernel costs: times on a TPU, elsewhere estimates of its compiler, and the file that keeps both; see benchmarks/tpu.py."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
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

from benchmarks import tpu_baselines, tpu_runs
from benchmarks.tpu_baselines import Splash
from diffjax.compiled.plan import ENVIRONMENT
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.tpu import block_sizes, cycles
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

RESULTS = cycles.TABLE
TOPOLOGIES = {
  "v4": "v4:2x2x1",
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "7x": "tpu7x:2x2x1",
}
DIRECTIONS = ("forward", "backward")
KERNELS = {
  way: (f"diff_attention_{way}",) for way in DIRECTIONS
}  # names of the kernels whose estimates belong to a direction
HEADS_TIMED = 32  # on a TPU: enough work that starting a call does not count


@dataclasses.dataclass(frozen=True)
class Case:
  generation: str
  D: int
  V: int
  G: int
  M: int
  length: int
  causal: bool
  # Instead of the table's: tile, and the queries and keys of a sub-tile where the mask cuts it and where it is whole.
  blocks: tuple[int, int, int, int, int] | None = None
  documents: tuple[int, ...] | None = (
    None  # lengths of the row's documents, which add up to T; None: a row without segment ids
  )
  run: tuple[str, int] | None = (
    None  # for an estimate: one of the kernels' runs of instructions, taken so often, is all that is built
  )
  group: int = 1  # query heads, or groups of heads, of a key head


def attention(case: Case | Splash, heads: int):
  """The operation, and its arguments as shapes."""
  if isinstance(case, Splash):
    return tpu_baselines.operation(case), tpu_baselines.shapes(case, heads)
  struct = lambda count, *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
    (1, case.length, count, *shape), dtype
  )
  queries = heads * case.group
  arguments = [
    struct(queries, case.G, case.D),
    struct(heads, case.M, case.D),
    struct(heads, case.V),
  ]
  if case.G > 1:
    arguments.append(struct(queries * (case.G - 1), dtype=jnp.float32))
  ids = tpu_runs.ids_of(case.documents) if case.documents else None
  attend = lambda *a: diff_attention(
    *a, causal=case.causal, q_segment_ids=ids, implementation="pallas_tpu"
  )
  return attend, arguments


def compile_case(case: Case | Splash, backward_alone: bool) -> None:
  """The other process: compiles both directions in one program, or the backward one alone; libtpu writes its estimates on the way."""
  from jax.experimental import topologies
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  device = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGIES[case.generation]
  ).devices[0]
  mesh = Mesh([device], ("x",))
  attend, arguments = attention(case, heads=1)
  placed = lambda tree: jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())
    ),
    tree,
  )
  total = lambda *a: jnp.sum(attend(*a).astype(jnp.float32))
  run = isinstance(case, Case) and case.run
  built = tpu_runs.only(*run) if run else contextlib.nullcontext()
  with (
    jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    block_sizes.use(**_forced(case)),
    built,
  ):
    function: Callable = jax.grad(total, tuple(range(len(arguments))))
    if backward_alone:
      arguments = [jax.eval_shape(lambda *a: jax.vjp(total, *a)[1], *arguments)]
      function = lambda pull: pull(jnp.float32(1))
    jax.jit(function).lower(*placed(arguments)).compile(
      compiler_options=_options(case)
    )


def estimate(case: Case | Splash, timeout: float) -> dict[str, int]:
  """Estimated cycles by direction; a direction without an estimate is not there."""
  found, ended = _estimate(case, timeout, backward_alone=False)
  if (
    ended and set(found) == {"forward"}
  ):  # for v5e and v5p libtpu may end with an error once it has written the estimate of one kernel
    found |= _estimate(case, timeout, backward_alone=True)[0]
  return (
    tpu_baselines.plausible(found, case) if isinstance(case, Splash) else found
  )


def _estimate(
  case: Case | Splash, timeout: float, backward_alone: bool
) -> tuple[dict[str, int], bool]:
  """Estimates by direction, and whether their process ended in time, be it with an error."""
  fields = json.dumps(
    [type(case).__name__, dataclasses.asdict(case), backward_alone]
  )
  command, ended = (
    [sys.executable, "-m", "benchmarks.tpu", "--child", fields],
    True,
  )
  with tempfile.TemporaryDirectory() as folder:
    environment = (
      os.environ
      | ENVIRONMENT
      | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}"}
    )
    try:
      subprocess.run(
        command, env=environment, capture_output=True, timeout=timeout
      )
    except subprocess.TimeoutExpired:
      ended = False
    written = "\n".join(
      path.read_text(errors="replace", encoding="utf-8")
      for path in pathlib.Path(folder).iterdir()
      if path.is_file()
    )
  return read_profile(
    written, case.kernels if isinstance(case, Splash) else KERNELS
  ), ended


def read_profile(
  written: str, kernels: Mapping[str, tuple[str, ...]]
) -> dict[str, int]:
  """Cycles by direction from libtpu's profile: of all kernels that bear one of a direction's names. A direction is not there unless each of
  its names has cycles; an estimate of 0 is none."""
  found = [
    (name, int(count))
    for name, count in re.findall(
      r'hlo_op_name: "([^"]*)"\s*estimated_cycles: (\d+)', written
    )
  ]
  found = [
    (name, count) for name, count in found if "_online" not in name
  ]  # it runs only where the quick one's result is of no use
  sums = {
    way: [sum(count for name, count in found if part in name) for part in parts]
    for way, parts in kernels.items()
  }
  return {way: sum(counts) for way, counts in sums.items() if all(counts)}


def _forced(case: Case | Splash) -> dict[str, Blocks]:
  return (
    {direction: blocks_of(case, direction) for direction in DIRECTIONS}
    if isinstance(case, Case) and case.blocks
    else {}
  )


def _options(case: Case | Splash) -> dict[str, str]:
  return tpu_baselines.COMPILER_OPTIONS if isinstance(case, Splash) else {}


def seconds(case: Case | Splash, repetitions: int = 20) -> dict[str, float]:
  """Measured on the TPU: medians of the seconds of one key head and its queries."""
  attend, shapes = attention(case, HEADS_TIMED)
  forward = jax.jit(
    lambda *a: jax.vjp(attend, *a), compiler_options=_options(case)
  )
  backward = jax.jit(
    lambda pull, d_out: pull(d_out), compiler_options=_options(case)
  )
  inputs = []
  for seed in range(3):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    inputs.append(
      [
        jax.random.normal(key, x.shape, x.dtype)
        for key, x in zip(keys, shapes, strict=True)
      ]
    )
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
  return {
    direction: statistics.median(times) / HEADS_TIMED
    for direction, times in taken.items()
  }


def cost(case: Case, timeout: float) -> dict[str, float]:
  """Cycles or seconds by direction: found before for the same kernels, or now and written down."""
  named = lambda b: "{}×{} and {}×{} of {}×{}".format(
    *b.subtile(is_full=False), *b.subtile(is_full=True), b.q, b.kv
  )
  blocks = "; ".join(
    f"{direction} {named(blocks_of(case, direction))}"
    for direction in DIRECTIONS
  )
  mask = "causal" if case.causal else "full"
  if case.documents:
    mask += f", documents of {' '.join(map(str, case.documents))}"
  if case.run:
    mask += f", {case.run[1]} × {case.run[0]}"
  shape = f"D {case.D} V {case.V} G {case.G} M {case.M}" + (
    f" R {case.group}" if case.group > 1 else ""
  )
  key = f"{case.generation} {shape} T {case.length} {mask}; {blocks}"
  return _remembered(
    f"{_what()}, {_kernels()}", key, lambda: _measured(case, timeout)
  )


def cost_of_library(case: Splash, timeout: float) -> dict[str, float] | None:
  """The same, found before for the same version; of a library that is not installed, for any version. None if nothing was."""
  version = tpu_baselines.version(case.library)
  if version is None:
    kinds = [
      kind
      for kind in _read()
      if kind.startswith(_what())
      and tpu_baselines.library_of(kind) == case.library
    ]
    return next(
      (
        known[case.key]
        for kind in reversed(kinds)
        if case.key in (known := _read()[kind])
      ),
      None,
    )
  return _remembered(
    f"{_what()}, {version}", case.key, lambda: _measured(case, timeout)
  )


def _measured(case: Case | Splash, timeout: float) -> dict[str, float]:
  return seconds(case) if on_tpu() else estimate(case, timeout)


def on_tpu() -> bool:
  return jax.default_backend() == "tpu"


def _what() -> str:
  what = (
    f"seconds on {jax.devices()[0].device_kind}"
    if on_tpu()
    else f"estimated cycles, libtpu {importlib.metadata.version('libtpu')}"
  )
  return f"{what}, jax {jax.__version__}"


def _kernels() -> str:
  """The kernels as they are now, by their source."""
  room = pathlib.Path(block_sizes.__file__).parent
  names = (
    "attention.py",
    "schedule.py",
    "chip.py",
    "../mask.py",
    "../tiles.py",
  )
  return f"kernels {hashlib.sha256(b''.join((room / name).read_bytes() for name in names)).hexdigest()[:8]}"


def _read() -> dict[str, dict[str, dict[str, float]]]:
  """What was found before. Of kernels that have changed since it is of no use; of a library's versions it is."""
  found = (
    json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
  )
  return {
    kind: known
    for kind, known in found.items()
    if kind.endswith(_kernels()) or tpu_baselines.library_of(kind)
  }


def _remembered(
  kind: str, key: str, measure: Callable[[], dict[str, float]]
) -> dict[str, float]:
  found = _read()
  known = found.setdefault(kind, {})
  if key not in known or (
    not tpu_baselines.library_of(kind) and set(known[key]) < set(DIRECTIONS)
  ):
    start = time.perf_counter()
    known[key] = measure()
    print(
      f"  {key}: {known[key] or 'nothing'} after {time.perf_counter() - start:.0f} s",
      file=sys.stderr,
      flush=True,
    )
    rows = lambda entries: ",\n".join(
      f"  {json.dumps(name, ensure_ascii=False)}: {json.dumps(value)}"
      for name, value in entries.items()
    )
    RESULTS.write_text(
      "{\n"
      + ",\n".join(
        f" {json.dumps(name)}: {{\n{rows(entries)}\n }}"
        for name, entries in found.items()
      )
      + "\n}\n",
      encoding="utf-8",
    )
  return known[key]


def sizes(blocks: Blocks) -> tuple[int, int, int, int, int]:
  """Square tiles' blocks, as a case has them."""
  return (
    blocks.q,
    *blocks.subtile(is_full=False),
    *blocks.subtile(is_full=True),
  )


def blocks_of(case: Case, direction: str) -> Blocks:
  if case.blocks:
    tile, q, kv, *whole = case.blocks
    span = max(1, min(block_sizes.SPAN, case.length) // tile)
    return Blocks(
      tile,
      tile,
      q,
      kv,
      resident=case.length,
      span=span,
      full_subtile=(whole[0], whole[1]),
    )
  blocks = block_sizes.choose(
    case.generation,
    direction,
    case.length,
    case.length,
    case.D,
    case.V,
    case.G,
    "bfloat16",
  )
  return dataclasses.replace(blocks, resident=min(blocks.resident, case.length))
