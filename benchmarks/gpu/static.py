"""What the compiler makes of the Hopper kernels; no GPU is needed: python -m benchmarks.gpu --static

Every kernel is compiled for sm_90a, and the inner loops of its SASS are read (benchmarks/gpu/sass.py). The table's columns:

- units: products of 64 × 64 × D that are executed for a tile of 64 queries and 64 keys, beside those that the kernel's task needs.
- instructions, tensor cycles and schedule of a step, for each loop of the kernel. No mask cuts the step: one that a mask cuts takes more.
- spills, global loads: instructions in all inner loops. After the slash, in loops of blocks that a causal mask cuts.
- L2: bytes that a multiprocessor loads a cycle if the tensor cores never wait. All that this chip's best kernels load is about 32.
- the estimated rates are no measurements. The higher one is that of two warpgroups that fill each other's gaps: two steps take the longest
  of what both need of the tensor cores, what both issue, what their exponentials take (8 cycles each of a scheduler), and what either does
  one after the other. The lower one is that of two that never do: a step takes its products and its instructions one after the other, but
  for the share of instructions whose exponentials are made beside products. Both are in needed products on H100's 132 multiprocessors at
  1.755 GHz, times 0.75, which is the part of such a bound that the best kernels of others reach. Neither knows of products that run one
  after the other ("serialized"), which take longer.

It needs the compiler's packages, without a GPU or a driver:
  pip install --no-deps jax-cuda13-plugin==JAX jax-cuda13-pjrt==JAX nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu import ptxas, sass

TABLE = [
  dict(D=128),
  dict(D=64),
  dict(D=128, V=128, M=1),
  dict(D=64, V=64, M=1),
  dict(D=128, V=128, G=1, M=1),
  dict(D=64, V=64, G=1, M=1),
]
# In 64 × 64 × D, with V = 2D for V1 and D else: forward, dQ, dK with dV. Both kernels of the backward pass need the logits and dP: together
# they need 14 units for V1, where one kernel would need 10.
NEEDED = {"v1": (6, 6, 8), "v2": (4, 5, 6), "plain": (2, 3, 4)}
KERNELS = ("forward", "d_q", "d_kv")
_MULTIPROCESSORS, _GIGAHERTZ, _REACHED = 132, 1.755, 0.75
_CYCLES_PER_UNIT = 2  # times D: 64·64·D products of 2048 a cycle


def missing() -> str | None:
  """What is needed and not installed, if anything."""
  if importlib.util.find_spec("jax_cuda13_plugin") is None:
    return "the compiler for Hopper is not installed: the packages are named at the top of benchmarks/gpu/static.py"
  return None


def kind_of(case: dict[str, Any]) -> str:
  return "plain" if case.get("G") == 1 else "v2" if case.get("M") == 1 else "v1"


@dataclasses.dataclass(frozen=True)
class Kernel:
  """What ptxas made of one kernel.

  Attributes:
    name: such as "d_q_v1".
    registers: of a thread, on average over its warpgroups.
    spilled: bytes that ptxas says it spills, loads and stores, wherever.
    serialized: True if ptxas says that it had to run products one after the other.
    loops: the inner ones.
  """

  name: str
  registers: int
  spilled: int
  serialized: bool
  loops: tuple[sass.Loop, ...]

  @property
  def spills(self) -> int:
    """Instructions in inner loops."""
    return sum(loop.spills for loop in self.loops)


def compiled(
  cases: Sequence[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], list[Kernel] | str, int]]:
  """Compiles in another process: each case, its kernels or what was wrong, and how often the forward kernel is called.

  Args:
    cases: arguments of `_lower`.
  """
  environment = {
    "JAX_PLATFORMS": "cpu",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_SASS": "1",
  }
  if (
    assembler := ptxas.newest()
  ) is not None:  # Mosaic takes the first one on PATH
    environment["PATH"] = os.pathsep.join(
      [str(assembler.parent), os.environ["PATH"]]
    )
  command = [sys.executable, "-m", "benchmarks.gpu.static", json.dumps(cases)]
  folder = pathlib.Path(__file__).parents[2]
  process = subprocess.Popen(
    command,
    cwd=folder,
    env=os.environ | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout is not None
  assert process.stderr is not None
  done = 0
  for line in process.stdout:
    said = json.loads(line)
    kernels = [
      Kernel(**(k | {"loops": tuple(sass.Loop(**x) for x in k["loops"])}))
      for k in said["kernels"]
    ]
    yield cases[done], said["error"] or kernels, said["forward_calls"]
    done += 1
  errors = process.stderr.read()
  if done < len(cases):
    yield (
      cases[done],
      f"the compiler ended with {process.wait()}\n{errors[-2000:]}",
      0,
    )


def _lower(
  mesh,
  T=2048,
  D=64,
  V=None,
  H=2,
  K=1,
  G=2,
  M=2,
  B=2,
  dtype="bfloat16",
  segments=False,
  offsets=False,
  window=None,
  causal=True,
  remat=False,
  decode=False,
):
  """A gradient through `diff_attention`, or decoding, for the GPU that the mesh names."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  from diffjax.ops.diff_attention import (
    RESIDUAL_NAMES,
    decode_attention,
    diff_attention,
  )

  struct = lambda shape, dtype: jax.ShapeDtypeStruct(
    shape, dtype, sharding=NamedSharding(mesh, P())
  )
  if decode:
    cache = [struct((B, K, T, width), dtype) for width in (M * D, V or 2 * D)]
    arrays = [
      struct((B, H, G, D), dtype),
      *cache,
      struct((B, H), jnp.float32) if G == 2 else None,
      struct((B,), jnp.int32),
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.jit(
        lambda *a: decode_attention(
          *a, window=window, implementation="pallas_gpu"
        )
      ).lower(*arrays)
  arrays = [
    struct((B, T, H, G, D), dtype),
    struct((B, T, K, M, D), dtype),
    struct((B, T, K, V or 2 * D), dtype),
  ]
  arrays += [struct((B, T, H), jnp.float32)] if G == 2 else []
  extra = {}
  if segments:
    extra["q_segment_ids"] = struct((B, T), jnp.int32)
  if offsets:
    extra["q_offset"] = struct((B,), jnp.int32)
  f = lambda arrays, extra: diff_attention(
    *arrays, **extra, window=window, causal=causal, implementation="pallas_gpu"
  )
  loss = lambda arrays, extra: jnp.sum(
    jnp.sin(f(arrays, extra).astype(jnp.float32))
  )
  if remat:
    loss = jax.checkpoint(
      loss,
      policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES),
    )
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return jax.jit(jax.grad(loss)).lower(arrays, extra)


def _compile(cases: Sequence[dict[str, Any]]) -> None:
  """The other process: prints one line of JSON a case."""
  import warnings

  from jax.experimental import topologies
  from jax.sharding import Mesh

  warnings.simplefilter("ignore")
  mesh = Mesh(
    [
      topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=ptxas.H100
      ).devices[0]
    ],
    ("data",),
  )
  stdout = os.dup(1)
  for case in cases:
    result: dict[str, Any] = {"error": "", "kernels": [], "forward_calls": 0}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
      os.dup2(
        said.fileno(), 1
      )  # the compiler prints there what it was asked for
      try:
        program = _lower(mesh, **case).compile()
      except (
        Exception
      ) as error:  # told by the caller, with the case that it belongs to
        result["error"] = f"{type(error).__name__}: {error}"[:2000]
      else:
        calls = [
          line
          for line in program.as_text().splitlines()
          if "custom_call_target=" in line and "mosaic_gpu" in line
        ]
        result["forward_calls"] = sum(
          "diff_attention_forward" in line for line in calls
        )
      os.dup2(stdout, 1)
      said.seek(0)
      result["kernels"] = [
        dataclasses.asdict(kernel) for kernel in _kernels(said.read())
      ]
    print(json.dumps(result), flush=True)


def _kernels(said: str) -> Iterator[Kernel]:
  """Those that ptxas and nvdisasm said something of, in the order of their names."""
  parts = re.split(
    r"^ptxas info.*Compiling entry function '(\w+)'.*$", said, flags=re.M
  )
  for function, text in sorted(zip(parts[1::2], parts[2::2], strict=True)):
    name = re.search(r"diff_attention_(\w+)_mosaic", function)
    stored, loaded = re.findall(
      r"(\d+) bytes spill stores, (\d+) bytes spill loads", text
    )[0]
    yield Kernel(
      name=name[1] if name else function,
      registers=int(re.findall(r"Used (\d+) registers", text)[0]),
      spilled=int(stored) + int(loaded),
      serialized=re.search(f"serializ.*{function}", said) is not None,
      loops=tuple(sass.inner_loops(text)),
    )


def _cycles(name: str, loops: Sequence[sass.Loop]) -> tuple[float, float]:
  """The most and the least that a tile takes of a multiprocessor; the docstring above has its assumptions."""
  most = sum(
    x.tensor_cycles + x.instructions * (1 - x.beside / max(x.exponentials, 1))
    for x in loops
  )
  sums = [
    sum(getattr(x, of) for x in loops)
    for of in ("tensor_cycles", "instructions", "exponentials")
  ]
  tensor, issued, exponentials = sums[0], sums[1], 8 * sums[2]
  if name == "d_kv":  # its two loops are two warpgroups' on one tile
    least = max(
      tensor,
      issued,
      exponentials,
      *(x.tensor_cycles + x.instructions for x in loops),
    )
  else:  # each warpgroup has a tile of its own
    least = max(tensor, issued, exponentials, (tensor + issued) / 2)
  return max(most, least), least


def rate(units: int, D: int, cycles: float) -> float:
  """TFLOP/s of a chip whose multiprocessors each do so many units of 64 × 64 × D in so many cycles, as far as others' kernels get."""
  return (
    _MULTIPROCESSORS
    * _GIGAHERTZ
    * _REACHED
    * units
    * 2
    * 64
    * 64
    * D
    / cycles
    / 1e3
  )


def _bytes(name: str, case: dict[str, Any]) -> float:
  """What is loaded from L2 for a tile."""
  G, M, D = case.get("G", 2), case.get("M", 2), case["D"]
  V = case.get("V", 2 * D)
  if name == "d_kv":
    return 2 * 64 * (G * D + V)
  passes = 2 if name == "forward" and G == 2 and V > 128 else 1
  return 2 * 64 * (M * D + passes * V) / 2  # for two tiles


def table(say=print) -> None:
  """Prints the table, row by row."""
  columns = (
    "kernel",
    "units (needed)",
    "instructions",
    "tensor cycles",
    "schedule",
    "spills",
    "global loads",
    "serialized",
    "L2",
    "estimated TF/s",
  )
  say(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
  cases = [
    case | {"causal": causal} for case in TABLE for causal in (True, False)
  ]
  found = compiled(cases)
  for (case, masked, _), (_, whole, _) in zip(found, found, strict=True):
    if isinstance(masked, str) or isinstance(whole, str):
      say(f"{case}: {masked if isinstance(masked, str) else whole}")
      continue
    kind, D = kind_of(case), case["D"]
    for name, needed in zip(KERNELS, NEEDED[kind], strict=True):
      one, other = (
        next(k for k in kernels if k.name == f"{name}_{kind}")
        for kernels in (whole, masked)
      )
      tensor = sum(x.tensor_cycles for x in one.loops)
      every = lambda attribute, one=one: " + ".join(
        str(getattr(x, attribute)) for x in one.loops
      )
      both = lambda attribute, one=one, other=other: " / ".join(
        str(sum(getattr(x, attribute) for x in k.loops)) for k in (one, other)
      )
      rates = (rate(needed, D, cycles) for cycles in _cycles(name, one.loops))
      row = (
        f"{name} {kind} D {D}",
        f"{tensor / (_CYCLES_PER_UNIT * D):.0f} ({needed})",
        every("instructions"),
        every("tensor_cycles"),
        "; ".join(x.schedule for x in one.loops),
        both("spills"),
        both("global_loads"),
        "yes" if one.serialized or other.serialized else "no",
        f"{_bytes(name, case) / tensor:.0f}",
        " to ".join(f"{x:.0f}" for x in rates),
      )
      say(f"| {' | '.join(map(str, row))} |")


def main(arguments: Sequence[str]) -> None:
  """Prints the table of the kernels as they are now."""
  if arguments:
    sys.exit(
      f"error: --static takes no other arguments, got {' '.join(arguments)}"
    )
  if problem := missing():
    sys.exit(f"error: {problem}")
  table(lambda line: print(line, flush=True))


if __name__ == "__main__":
  _compile(json.loads(sys.argv[1]))
