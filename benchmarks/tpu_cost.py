"""What a kernel costs: times on a TPU, elsewhere estimates of its compiler, and the file that keeps both; see benchmarks/tpu.py."""

from __future__ import annotations

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

from benchmarks import tpu_baselines
from benchmarks.tpu_baselines import Splash
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.tpu import block_sizes, cycles
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

RESULTS = cycles.TABLE
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
DIRECTIONS = ("forward", "backward")
KERNELS = {way: (f"diff_attention_{way}",) for way in DIRECTIONS}  # names of the kernels whose estimates belong to a direction
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
  blocks: tuple[int, int, int] | None = None  # tile, and a sub-tile's queries and keys, instead of the table's


def attention(case: Case | Splash, heads: int):
  """The operation, and its arguments as shapes."""
  if isinstance(case, Splash):
    return tpu_baselines.operation(case), tpu_baselines.shapes(case, heads)
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, case.length, heads, *shape), dtype)
  arguments = [struct(case.G, case.D), struct(case.M, case.D), struct(case.V)] + ([struct(dtype=jnp.float32)] if case.G == 2 else [])
  attend = lambda *a: diff_attention(*a, causal=case.causal, implementation="pallas_tpu")
  return attend, arguments


def compile_case(case: Case | Splash, alone: bool) -> None:
  """The other process: compiles both directions in one program, or the backward one alone; libtpu writes its estimates on the way."""
  from jax.experimental import topologies
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.generation]).devices[0]
  mesh = Mesh([device], ("x",))
  attend, arguments = attention(case, heads=1)
  function = jax.grad(lambda *a: jnp.sum(attend(*a).astype(jnp.float32)), tuple(range(len(arguments))))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), block_sizes.use(**_forced(case)):
    if alone:
      out, pull = jax.eval_shape(lambda *a: jax.vjp(attend, *a), *arguments)
      function, arguments = lambda pull, d_out: pull(d_out), [pull, out]
    of_chip = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    jax.jit(function).lower(*jax.tree.map(of_chip, arguments)).compile(compiler_options=_options(case))


def estimate(case: Case | Splash, timeout: float) -> dict[str, int]:
  """Estimated cycles by direction; a direction without an estimate is not there."""
  found = _estimate(case, timeout, alone=False)
  if "forward" in found and "backward" not in found:  # for v5e and v5p libtpu may end once it has written the estimate of one kernel
    found |= _estimate(case, timeout, alone=True)
  return found


def _estimate(case: Case | Splash, timeout: float, alone: bool) -> dict[str, int]:
  environment = {
    "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  }  # fmt: skip
  with tempfile.TemporaryDirectory() as folder:
    environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_static_llo_profile_to={folder}"
    command = [sys.executable, "-m", "benchmarks.tpu", "--child", json.dumps([type(case).__name__, dataclasses.asdict(case), alone])]
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
  found = [(name, count) for name, count in found if "_online" not in name]  # it runs only where the quick one's result is of no use
  sums = {way: [sum(count for name, count in found if part in name) for part in parts] for way, parts in kernels.items()}
  return {way: sum(counts) for way, counts in sums.items() if all(counts)}


def _forced(case: Case | Splash) -> dict[str, Blocks]:
  return {direction: blocks_of(case, direction) for direction in DIRECTIONS} if isinstance(case, Case) and case.blocks else {}


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
  blocks = "; ".join(f"{name} {b.q_inner}×{b.kv_inner} of {b.q}×{b.kv}" for name in DIRECTIONS for b in [blocks_of(case, name)])
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
  return seconds(case) if on_tpu() else estimate(case, timeout)


def on_tpu() -> bool:
  return jax.default_backend() == "tpu"


def _what() -> str:
  what = f"seconds on {jax.devices()[0].device_kind}" if on_tpu() else f"estimated cycles, libtpu {importlib.metadata.version('libtpu')}"
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


def blocks_of(case: Case, direction: str) -> Blocks:
  if case.blocks:
    tile, *parts = case.blocks
    return Blocks(tile, tile, *parts, resident=case.length, span=max(1, min(block_sizes.SPAN, case.length) // tile))
  blocks = block_sizes.choose(case.generation, direction, case.length, case.length, case.D, case.V, case.G, "bfloat16")
  return dataclasses.replace(blocks, resident=min(blocks.resident, case.length))
