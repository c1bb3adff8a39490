"""Compiles a run's training step for TPUs that are not there, in a process of its own, and sums up what it takes of a chip.

It needs the TPU's compiler, libtpu ('.[tpu]', Linux on x86-64), and no TPU.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from diffjax.compiled.collectives import collectives
from diffjax.compiled.estimate import CHIPS, Estimate, Torus, estimate
from diffjax.compiled.text import windowed_einsums
from diffjax.config import Config, UserError
from diffjax.host.workers import end_with_parent, starting_workers
from diffjax.model.flops import peak_flops, step_flops
from diffjax.model.registry import import_modules, imported_modules
from diffjax.training.optimizer import frozen_names

# Slices by generation, from small to large (cloud.google.com/tpu/docs).
_PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
  "2x2x1",
  "2x2x2",
  "2x2x4",
  "2x4x4",
  "4x4x4",
  "4x4x8",
  "4x8x8",
  "8x8x8",
  "8x8x16",
  "8x16x16",
)
TOPOLOGIES = {
  "v4": _CUBES,
  "v5e": _PLANES,
  "v5p": (*_CUBES, "16x16x16", "16x16x24"),
  "v6e": _PLANES,
  "tpu7x": _CUBES,
}

# GiB of a chip's memory that the compiler has for a program; v7x's as sold.
MEMORY = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 192}

# Environment that lets libtpu load without a TPU. It logs fatal errors only, and none into files: in /tmp/tpu_logs they grow to gigabytes.
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_MIN_LOG_LEVEL": "3",
  "TPU_STDERR_LOG_LEVEL": "3",
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "TPU_LOG_DIR": "disabled",
}

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Plan:
  """Memory and time of a compiled training step. All sizes are bytes per chip."""

  chips: int
  # As JAX calls it: "TPU v5 lite"
  device_kind: str
  # Devices along each axis; v7x has two devices a chip
  mesh: dict[str, int]
  parameters: int
  optimizer: int
  # The batch, and the padding of the layouts of all three
  batch: int
  # Everything that lives inside the step alone: activations, gradients, gathered parameters
  temporaries: int
  # The machine code
  program: int
  # The memory that there is for all of these
  available: int
  # Received in a step, by mesh axes and kind; nothing where the compiler refused
  received: dict[tuple[tuple[str, ...], str], float]
  # The part of the compiled program that could not be read, so that nothing is counted; "" if all could
  unread: str
  # Names of our Pallas kernels in it, one a call
  kernels: tuple[str, ...]
  # Seconds that compilation took
  seconds: float
  # Time of a step by the compiler's estimate; None where the compiler makes none, or has refused the step
  estimate: Estimate | None = None
  # Seconds of a step whose nominal FLOPs run at the chip's peak
  peak_seconds: float = 0.0
  # Products that became loops over a parameter's shards
  windowed: int = 0

  @property
  def total(self) -> int:
    return (
      self.parameters
      + self.optimizer
      + self.batch
      + self.temporaries
      + self.program
    )

  @property
  def mfu_bound(self) -> float | None:
    """The MFU that the step would have if it took as long as estimated; None without an estimate."""
    return (
      self.peak_seconds / self.estimate.seconds
      if self.estimate and self.peak_seconds
      else None
    )

  @property
  def fits(self) -> bool:
    """True if the step fits. The compiler does not tell: it refuses temporaries that are too large, but accepts parameters that are."""
    return self.total <= self.available


def compile_apart(config: Config, topology: str, slices: int = 1) -> Plan:
  """Compiles the training step for TPUs that are not there.

  Args:
    config: the run's config.
    topology: generation and chips of a slice, a name and a member of TOPOLOGIES: "v5e:4x4".
    slices: number of such slices.

  Raises:
    UserError: if there is no such topology, it does not go with the config, or the compiler cannot be had or refuses.
  """
  return apart(_compile, config, topology, topology=topology, slices=slices)


def apart(
  function: Callable[..., _T], *args: Any, topology: str, slices: int = 1
) -> _T:
  """Calls function(devices, chips, bytes of memory a chip, *args) in a process of its own, since libtpu may end its process.

  Args:
    function: uses the compiler; a function of a module, so that it can be pickled.
    args: its other arguments, which can be pickled.
    topology: generation and chips of a slice, a name and a member of TOPOLOGIES: "v5e:4x4".
    slices: number of such slices.

  Raises:
    UserError: if there is no such topology, or the compiler cannot be had or ends the process; and what the function raises.
  """
  generation, _, shape = topology.partition(":")
  if shape not in TOPOLOGIES.get(generation, ()):
    there = ", ".join(
      f"{generation}:{known}" for known in TOPOLOGIES.get(generation, ())
    ) or ", ".join(
      f"{name}:{shapes[0]} to {name}:{shapes[-1]}"
      for name, shapes in TOPOLOGIES.items()
    )
    raise UserError(
      f"--topology={topology}: there is no such slice; there are {there}"
    )
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(
      "the TPU's compiler is not installed: pip install -e '.[tpu]' (Linux on x86-64)"
    )
  with starting_workers():
    pool = concurrent.futures.ProcessPoolExecutor(
      1, multiprocessing.get_context("spawn"), end_with_parent
    )
    result = pool.submit(
      _call, function, args, topology, slices, imported_modules()
    )
  with pool:
    try:
      return result.result()
    except concurrent.futures.process.BrokenProcessPool as error:
      raise UserError(
        f"the TPU's compiler ended its process, compiling for {topology}; what it said is above, if anything"
      ) from error


def _call(
  function: Callable[..., _T],
  args: tuple[Any, ...],
  topology: str,
  slices: int,
  modules: list[str],
) -> _T:
  """Runs in the other process, which imports the modules of attention variants first."""
  os.environ.update(ENVIRONMENT)
  import_modules(modules)
  import jax
  from jax.experimental import topologies

  jax.config.update(
    "jax_platforms", "cpu"
  )  # where the caller's module has imported JAX already
  generation, shape = topology.split(":")
  options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
  options |= (
    {"chip_config_name": "megacore"} if generation == "v4" else {}
  )  # two cores as one device, as on the TPU itself
  options |= {"chips_per_host_bounds": (1, 1, 1)} if shape == "1x1" else {}
  devices: Any = topologies.get_topology_desc(
    platform="tpu", topology_name=topology, **options
  ).devices
  chips = slices * math.prod(map(int, shape.split("x")))
  return function(devices, chips, round(MEMORY[generation] * 2**30), *args)


def _compile(
  devices: Any, chips: int, available: int, config: Config, topology: str
) -> Plan:
  """The plan of a config's training step on devices with so many available bytes a chip."""
  import jax

  from diffjax.parallel.mesh import make_mesh
  from diffjax.training.program import build

  program, a_chip = (
    build(config, make_mesh(config.mesh, devices)),
    len(devices) // chips,
  )
  lowered, state = program.lower_train_step(), program.abstract_state
  parameters, optimizer = (
    _shard_bytes(tree) * a_chip for tree in (state.params, state.opt_state)
  )
  tokens = config.train.batch_size * config.data.length
  flops = step_flops(
    config.model, config.data.length, tokens, frozen_names(config.optimizer)
  ).training
  kind = devices[0].device_kind
  peak_seconds = (
    flops / len(devices) / peak if (peak := peak_flops(kind)) else 0.0
  )
  plan = Plan(
    chips,
    kind,
    dict(program.mesh.shape),
    parameters,
    optimizer,
    0,
    0,
    0,
    available,
    {},
    "",
    (),
    0.0,
    None,
    peak_seconds,
  )
  start = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    plan = _refused(plan, str(error), a_chip)
  else:
    plan = _read(plan, compiled, config, topology, a_chip)
  return dataclasses.replace(plan, seconds=time.perf_counter() - start)


def _refused(plan: Plan, message: str, a_chip: int) -> Plan:
  """The plan of a step that the compiler refuses for its memory, on chips of so many devices."""
  needed, available, of_temporaries = _out_of_memory(message)
  temporaries = (
    needed * a_chip
    if of_temporaries
    else needed * a_chip - plan.parameters - plan.optimizer
  )
  return dataclasses.replace(
    plan, available=available * a_chip, temporaries=temporaries
  )


def _read(
  plan: Plan, compiled: Any, config: Config, topology: str, a_chip: int
) -> Plan:
  """The plan of a compiled step."""
  memory, text, generation = (
    compiled.memory_analysis(),
    compiled.as_text() or "",
    topology.partition(":")[0],
  )
  received: dict[tuple[tuple[str, ...], str], float] = collections.defaultdict(
    float
  )
  estimated, unread = None, ""
  try:
    for collective in collectives(text, plan.mesh):
      received[collective.axes, collective.kind] += (
        collective.bytes * collective.times * a_chip
      )
    if generation in CHIPS:
      chip = CHIPS[generation]
      estimated = estimate(
        text,
        plan.mesh,
        chip,
        Torus.of(topology),
        kernel_cycles(config, plan.mesh, generation, chip.cores),
      )
  except ValueError as error:
    unread = str(error)
  return dataclasses.replace(
    plan,
    batch=memory.argument_size_in_bytes * a_chip
    - plan.parameters
    - plan.optimizer,
    temporaries=memory.temp_size_in_bytes * a_chip,
    program=memory.generated_code_size_in_bytes * a_chip,
    received=dict(received),
    unread=unread,
    kernels=tuple(
      sorted(
        re.findall(
          r"%(diff_attention_[a-z]+_[a-z0-9]+(?:_online)?)[.\d]* = .* custom-call\(",
          text,
        )
      )
    ),
    estimate=estimated,
    windowed=windowed_einsums(text),
  )


def kernel_cycles(
  config: Config, mesh: Mapping[str, int], generation: str, cores: int
) -> dict[str, float]:
  """Cycles of one call of each attention kernel on a device, by the kernel's name, as far as they have been estimated: without a window.

  Args:
    config: the run's config.
    mesh: devices along each axis.
    generation: of TPU: "v5e".
    cores: that share a device's work.
  """
  from diffjax.model.shapes import axis_sizes
  from diffjax.model.stacks import stacks
  from diffjax.ops.diff_attention.arguments import variant_name
  from diffjax.ops.diff_attention.tpu.cycles import cycles

  if config.model.window is not None:
    return {}
  rows = (
    config.train.batch_size
    // config.train.accumulation
    // (mesh["data"] * mesh["fsdp"])
  )
  length = (
    config.data.length // mesh["context"]
  )  # in balanced order, every step of the ring is as much work as the first, a causal row
  found = {
    "_online": 0.0
  }  # the kernel with a running maximum runs only where the other one's result is of no use, and counts as nothing
  for stack in stacks(config.model).values():
    sizes = axis_sizes(stack)
    G, M = sizes["G"], sizes["M"]
    calls = rows * sizes["Q"] / mesh["tensor"] / cores
    for way in ("forward", "backward"):
      if (
        cost := cycles(
          generation, way, length, stack.head_dim, sizes["V"], G, M
        )
      ) is not None:
        found[f"diff_attention_{way}_{variant_name(G, M)}"] = cost * calls
  return found


def _shard_bytes(tree: Any) -> int:
  """Bytes of abstract arrays that one device holds."""
  import jax

  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def _out_of_memory(message: str) -> tuple[int, int, bool]:
  """Reads the compiler's refusal: bytes needed and available on a device, and whether the first is of temporaries alone.

  "the total memory required for HLO temporaries (30.24G) exceeds available HBM (15.75G)" or "Used 21.43G of 15.75G hbm".

  Raises:
    UserError: if it refuses for another reason.
  """
  amount = r"([\d.]+)([KMGT])"
  match = re.search(
    rf"(temporaries) \({amount}\) exceeds available HBM \({amount}\)|Used {amount} of {amount} hbm",
    message,
  )
  if match is None:
    raise UserError(f"the TPU's compiler refuses the step: {message}")
  temporaries, *amounts = match.groups()
  numbers = [
    round(float(number) * 2 ** (10 + 10 * "KMGT".index(unit)))
    for number, unit in zip(amounts[::2], amounts[1::2], strict=True)
    if number
  ]
  return numbers[0], numbers[1], temporaries is not None
