"""What a kernel costs, and the file that keeps costs.

On a TPU, costs are seconds. Elsewhere they are estimated cycles. The file has a
heading for each kind of measurement: the versions of libtpu and jax, and the
source of our kernels or the version of a library. Costs of the same kernels are
not measured again. A library that is not installed has the costs of any of its
versions in the file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from benchmarks.timing import median_seconds
from benchmarks.tpu import splash
from benchmarks.tpu.case import DIRECTIONS, Case, KernelCase
from benchmarks.tpu.estimate import estimate
from benchmarks.tpu.splash import Splash
from diffjax.ops.diff_attention.tpu import block_sizes, cycles

RESULTS = cycles.TABLE
# Key heads of a call that is timed, so that starting it does not count.
HEADS_TIMED = 32
REPETITIONS = 20
# Calls of a kernel take these inputs in turn, one after the other.
NUM_INPUTS = 3
# The modules of our kernels. If their text changes, so may the costs.
KERNEL_MODULES = (
  "attention.py",
  "backward.py",
  "chip.py",
  "forward.py",
  "kernel_call.py",
  "schedule.py",
  "../mask.py",
  "../tiles.py",
)

# Seconds or cycles of one key head, by direction.
Costs = dict[str, float]


def on_tpu() -> bool:
  """Returns whether this machine has a TPU."""
  return jax.default_backend() == "tpu"


def generation_here() -> str:
  """Returns the generation of this machine's TPU."""
  return str(pltpu.get_tpu_info().chip_version)


def unit() -> str:
  """Returns what the tables print: the unit of `format_cost`."""
  if on_tpu():
    return "µs"
  return "kilocycles that the compiler estimates, which are not a time"


def format_cost(value: float) -> str:
  """Returns a cost in the unit of the tables."""
  if on_tpu():
    return f"{value * 1e6:.1f}"
  return f"{value * 1e-3:.1f}"


def cost(case: Case, timeout: float, path: pathlib.Path = RESULTS) -> Costs:
  """Returns the costs of a case, from the file or measured now.

  Args:
    case: A call of our kernels.
    timeout: Seconds after which an estimate is given up.
    path: The file of costs.

  Returns:
    Costs by direction. Directions without an estimate are missing.
  """
  kind = f"{measurement_name()}, {kernels_name()}"
  return _find_or_measure(kind, case, timeout, path)


def cost_of_library(
  case: Splash, timeout: float, path: pathlib.Path = RESULTS
) -> Costs | None:
  """Returns the costs of a library's kernel, from the file or measured now.

  Args:
    case: A call of the library's kernel.
    timeout: Seconds after which an estimate is given up.
    path: The file of costs.

  Returns:
    Costs by direction. None if the library is not installed and the file has no
    costs of any version.
  """
  version = splash.version(case.library)
  if version is not None:
    kind = f"{measurement_name()}, {version}"
    return _find_or_measure(kind, case, timeout, path)

  costs = None
  # The last version counts.
  for kind, costs_by_key in _read(path).items():
    is_same_library = splash.library_of(kind) == case.library
    is_same_measurement = kind.startswith(measurement_name())
    if is_same_library and is_same_measurement:
      costs = costs_by_key.get(case.key, costs)
  return costs


def measurement_name() -> str:
  """Returns how costs are measured here, the beginning of a heading."""
  if on_tpu():
    name = f"seconds on {jax.devices()[0].device_kind}"
  else:
    name = f"estimated cycles, libtpu {importlib.metadata.version('libtpu')}"
  return f"{name}, jax {jax.__version__}"


@functools.cache
def kernels_name() -> str:
  """Returns a name of our kernels that depends on their source."""
  folder = pathlib.Path(block_sizes.__file__).parent
  digest = hashlib.sha256()
  for module in KERNEL_MODULES:
    digest.update((folder / module).read_bytes())
  return f"kernels {digest.hexdigest()[:8]}"


def _find_or_measure(
  kind: str, case: KernelCase, timeout: float, path: pathlib.Path
) -> Costs:
  """Returns costs from the file. If it has none, measures and adds them.

  Args:
    kind: The heading of the file.
    case: The case.
    timeout: Seconds of an estimate.
    path: The file.
  """
  results = _read(path)
  costs_by_key = results.setdefault(kind, {})
  if case.key in costs_by_key:
    costs = costs_by_key[case.key]
    # An estimate of our kernels may have timed out, so it is tried again.
    is_library = splash.library_of(kind) is not None
    if is_library or costs.keys() == set(DIRECTIONS):
      return costs

  start = time.perf_counter()
  if on_tpu():
    costs = measure_seconds(case)
  else:
    costs = dict(estimate(case, timeout))
  duration = time.perf_counter() - start
  print(
    f"  {case.key}: {costs or 'nothing'} after {duration:.0f} s",
    file=sys.stderr,
    flush=True,
  )
  costs_by_key[case.key] = costs
  path.write_text(_format(results), encoding="utf-8")
  return costs


def _read(path: pathlib.Path) -> dict[str, dict[str, Costs]]:
  """Returns the costs by heading and key, without those of other kernels.

  Costs of our kernels before a change are dropped. Costs of other versions of a
  library are kept.
  """
  if not path.exists():
    return {}
  results = json.loads(path.read_text(encoding="utf-8"))
  kept = {}
  for kind, costs_by_key in results.items():
    is_current = kind.endswith(kernels_name())
    if is_current or splash.library_of(kind) is not None:
      kept[kind] = costs_by_key
  return kept


def _format(results: dict[str, dict[str, Costs]]) -> str:
  """Returns the text of the file, with a line for each case."""
  sections = []
  for kind, costs_by_key in results.items():
    lines = []
    for key, costs in costs_by_key.items():
      name = json.dumps(key, ensure_ascii=False)
      lines.append(f"  {name}: {json.dumps(costs)}")
    body = ",\n".join(lines)
    sections.append(f" {json.dumps(kind)}: {{\n{body}\n }}")
  return "{\n" + ",\n".join(sections) + "\n}\n"


def measure_seconds(case: KernelCase) -> Costs:
  """Measures a case on this machine's TPU.

  Returns:
    Median seconds of one key head and its queries, by direction.
  """
  attend, shapes = case.operation(HEADS_TIMED)

  def run_forward(*arguments: jax.Array) -> Any:
    return jax.vjp(attend, *arguments)

  def run_backward(pull_back: Callable, d_out: jax.Array) -> Any:
    return pull_back(d_out)

  options = case.compiler_options
  forward = jax.jit(run_forward, compiler_options=options)
  backward = jax.jit(run_backward, compiler_options=options)
  with case.building():
    inputs = [_random_inputs(shapes, seed) for seed in range(NUM_INPUTS)]
    # Each is the output of attention, and the function that computes the
    # backward direction. The output serves as its own gradient.
    outputs = [forward(*arguments) for arguments in inputs]
    next_inputs = itertools.cycle(inputs)
    next_outputs = itertools.cycle(outputs)

    def call_forward() -> None:
      jax.block_until_ready(forward(*next(next_inputs)))

    def call_backward() -> None:
      out, pull_back = next(next_outputs)
      jax.block_until_ready(backward(pull_back, out))

    candidates = {"forward": call_forward, "backward": call_backward}
    seconds = median_seconds(candidates, REPETITIONS, warmups=NUM_INPUTS)
  return {way: value / HEADS_TIMED for way, value in seconds.items()}


def _random_inputs(
  shapes: list[jax.ShapeDtypeStruct], seed: int
) -> list[jax.Array]:
  """Returns an array of normal random numbers for each shape."""
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  inputs = []
  for key, shape in zip(keys, shapes, strict=True):
    inputs.append(jax.random.normal(key, shape.shape, shape.dtype))
  return inputs
