"""Compiles a run's training step for TPUs that this machine does not have.

The result is a `Plan`: the step's memory and estimated time. This needs the TPU
compiler, libtpu ('.[tpu]', Linux on x86-64). docs/estimates.md says what the
memory and the time include.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from diffjax.compiled.collectives import collectives
from diffjax.compiled.estimate import Estimate, estimate
from diffjax.compiled.hardware import (
  CHIPS,
  MEMORY_GIB,
  TOPOLOGIES,
  Topology,
  Torus,
)
from diffjax.compiled.text import windowed_einsums
from diffjax.config import Config, UserError
from diffjax.host.workers import end_with_parent, starting_workers
from diffjax.model.flops import peak_flops, step_flops
from diffjax.model.registry import import_modules, imported_modules
from diffjax.model.shapes import axis_sizes
from diffjax.model.stacks import stacks
from diffjax.ops.diff_attention.arguments import variant_name
from diffjax.ops.diff_attention.tpu.cycles import cycles
from diffjax.training.optimizer import frozen_names

# Environment variables that let libtpu load without a TPU. It logs only fatal
# errors, and not into files: those in /tmp/tpu_logs grow to gigabytes.
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

# An amount of memory in the compiler's messages: 15.75G
_AMOUNT = r"([\d.]+[KMGT])"
# the total memory required for HLO temporaries (30.24G) exceeds available HBM
# (15.75G)
_TEMPORARIES_TOO_LARGE = re.compile(
  rf"temporaries \({_AMOUNT}\) exceeds available HBM \({_AMOUNT}\)"
)
# Used 21.43G of 15.75G hbm
_TOTAL_TOO_LARGE = re.compile(rf"Used {_AMOUNT} of {_AMOUNT} hbm")
# %diff_attention_forward_v1.2 = (…) custom-call(…)
_KERNEL = re.compile(
  r"%(diff_attention_[a-z]+_[a-z0-9]+(?:_online)?)[.\d]* = .* custom-call\("
)

# The units of amounts
_UNIT_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_T = TypeVar("_T")


class Traffic(NamedTuple):
  """A kind of collective along certain mesh axes.

  Attributes:
    axes: Names of the mesh axes.
    kind: The kind, such as "all-gather".
  """

  axes: tuple[str, ...]
  kind: str


@dataclasses.dataclass(frozen=True)
class Plan:
  """Memory and time of a compiled training step.

  All sizes are bytes per chip. A step that the compiler refuses for its memory
  has no batch, program, received bytes, kernels and estimate.

  Attributes:
    chips: Number of chips.
    device_kind: JAX's name of the chip, such as "TPU v5 lite".
    mesh: Devices along each axis. A v7x chip has two devices.
    parameters: The parameters.
    optimizer: The optimizer's state.
    batch: The batch. It includes the compiler's padding of parameters,
      optimizer and batch.
    temporaries: Values that exist only within the step: activations, gradients
      and gathered parameters.
    program: The machine code.
    available: The memory for all of these.
    received: Bytes that a chip receives in a step.
    unread: The part of the program that could not be read, so that there are no
      received bytes or no estimate. "" if all could be read.
    kernels: Names of diffjax's Pallas kernels, one for each call.
    seconds: Seconds of compiling the step and reading the program.
    estimate: Estimated time of a step; None without an estimate.
    peak_seconds: Seconds of the step's nominal FLOPs at the chip's peak FLOP/s;
      0 if the peak is unknown.
    windowed: Number of windowed einsums.
  """

  chips: int
  device_kind: str
  mesh: dict[str, int]
  parameters: int
  optimizer: int
  batch: int
  temporaries: int
  program: int
  available: int
  received: dict[Traffic, float]
  unread: str
  kernels: tuple[str, ...]
  seconds: float
  estimate: Estimate | None = None
  peak_seconds: float = 0.0
  windowed: int = 0

  @property
  def total(self) -> int:
    """Bytes per chip of everything."""
    return (
      self.parameters
      + self.optimizer
      + self.batch
      + self.temporaries
      + self.program
    )

  @property
  def mfu_bound(self) -> float | None:
    """Model FLOPs utilization, if the step took as long as estimated.

    It is a fraction of the chip's peak FLOP/s, such as 0.5. None if there is no
    estimate or if the peak is unknown.
    """
    if self.estimate is None or self.peak_seconds == 0.0:
      return None
    return self.peak_seconds / self.estimate.seconds

  @property
  def fits(self) -> bool:
    """Whether the step fits into the available memory.

    A step that compiles may still not fit: the compiler refuses temporaries
    that are too large, but accepts parameters that are too large.
    """
    return self.total <= self.available


def compile_plan(config: Config, topology: str, slices: int = 1) -> Plan:
  """Compiles the training step for TPUs; returns its memory and time.

  Args:
    config: The run's config.
    topology: One of `TOPOLOGIES`, as generation:chips, such as "v5e:4x4".
    slices: Number of such slices.

  Raises:
    UserError: if the topology does not exist or does not fit the config, or if
      the compiler is not installed or refuses the step.
  """
  return call_with_devices(
    _compile, config, topology, topology=topology, slices=slices
  )


def call_with_devices(
  function: Callable[..., _T], *args: Any, topology: str, slices: int = 1
) -> _T:
  """Calls a function that compiles for TPUs that this machine does not have.

  The function runs in another process, since libtpu may end its process.

  Args:
    function: Called as function(devices, chips, memory, *args), where devices
      describe the TPUs, chips is the number of chips, and memory the bytes of
      memory per chip. It must be a module-level function, so that it can be
      pickled.
    args: Further arguments, which can be pickled.
    topology: One of `TOPOLOGIES`, as generation:chips, such as "v5e:4x4".
    slices: Number of such slices.

  Returns:
    The function's result.

  Raises:
    UserError: if the topology does not exist, or if the compiler is not
      installed or ends the process. The function's errors are raised as well.
  """
  _check_topology(topology)
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(
      "the TPU's compiler is not installed: pip install -e '.[tpu]'"
      " (Linux on x86-64)"
    )
  # The other process has to register the same attention variants.
  variant_modules = imported_modules()
  # Only this process handles Ctrl-C. `submit` starts the other process.
  with starting_workers():
    pool = concurrent.futures.ProcessPoolExecutor(
      max_workers=1,
      mp_context=multiprocessing.get_context("spawn"),
      initializer=end_with_parent,
    )
    future = pool.submit(
      _call, function, args, topology, slices, variant_modules
    )
  with pool:
    try:
      return future.result()
    except concurrent.futures.process.BrokenProcessPool as error:
      raise UserError(
        "the TPU's compiler ended its process, compiling for"
        f" {topology}; its messages, if any, are above"
      ) from error


def _check_topology(topology: str) -> None:
  """Raises UserError if a topology is not in `TOPOLOGIES`.

  The message lists slices that exist.
  """
  generation, _, shape = topology.partition(":")
  if shape in TOPOLOGIES.get(generation, ()):
    return
  slices = []
  if generation in TOPOLOGIES:
    # List the slices of this generation.
    for known_shape in TOPOLOGIES[generation]:
      slices.append(f"{generation}:{known_shape}")
  else:
    # List the smallest and the largest slice of each generation.
    for name, shapes in TOPOLOGIES.items():
      slices.append(f"{name}:{shapes[0]} to {name}:{shapes[-1]}")
  raise UserError(
    f"--topology={topology}: there is no such slice;"
    f" there are {', '.join(slices)}"
  )


def _call(
  function: Callable[..., _T],
  args: tuple[Any, ...],
  topology: str,
  slices: int,
  variant_modules: list[str],
) -> _T:
  """Sets up libtpu in this process, and calls a function with its devices.

  Args:
    function, args, topology, slices: As in `call_with_devices`.
    variant_modules: Modules to import, which define attention variants.
  """
  os.environ.update(ENVIRONMENT)
  # JAX was imported before the environment was set, and has not read it.
  jax.config.update("jax_platforms", "cpu")
  import_modules(variant_modules)
  devices = _absent_devices(topology, slices)
  slice_topology = Topology.parse(topology)
  num_chips = slices * slice_topology.num_chips
  memory_bytes = round(MEMORY_GIB[slice_topology.generation] * 2**30)
  return function(devices, num_chips, memory_bytes, *args)


def _absent_devices(topology: str, slices: int) -> Sequence[jax.Device]:
  """Returns descriptions of TPUs, for which JAX can compile without them."""
  from jax.experimental import topologies

  options: dict[str, Any] = {}
  if slices > 1:
    options["num_slices"] = slices
  if topology.startswith("v4:"):
    # Two cores are one device, as on the TPU itself.
    options["chip_config_name"] = "megacore"
  if topology.endswith(":1x1"):
    # Without this, a host has more chips than the slice.
    options["chips_per_host_bounds"] = (1, 1, 1)
  return topologies.get_topology_desc(
    platform="tpu", topology_name=topology, **options
  ).devices


def _compile(
  devices: Sequence[jax.Device],
  chips: int,
  available: int,
  config: Config,
  topology: str,
) -> Plan:
  """Compiles a training step, and returns its memory and time.

  Args:
    devices, chips, available: From `call_with_devices`: all devices, the number
      of chips, and the bytes of memory per chip.
    config: The run's config.
    topology: As in `compile_plan`.
  """
  # Only this process needs these imports, which are slow.
  from diffjax.parallel.mesh import make_mesh
  from diffjax.training.program import build

  program = build(config, make_mesh(config.mesh, devices))
  lowered = program.lower_train_step()
  mesh_sizes = dict(program.mesh.shape)
  devices_per_chip = len(devices) // chips
  state = program.abstract_state
  parameter_bytes = _shard_bytes(state.params) * devices_per_chip
  optimizer_bytes = _shard_bytes(state.opt_state) * devices_per_chip
  state_bytes = parameter_bytes + optimizer_bytes

  start = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    refusal = read_refusal(str(error))
    memory = _refused_memory(refusal, state_bytes, devices_per_chip)
    contents = _Contents()
  else:
    memory = _compiled_memory(
      compiled.memory_analysis(), state_bytes, devices_per_chip, available
    )
    text = compiled.as_text() or ""
    contents = _read_contents(
      text, mesh_sizes, config, topology, devices_per_chip
    )
  seconds = time.perf_counter() - start

  return Plan(
    chips=chips,
    device_kind=devices[0].device_kind,
    mesh=mesh_sizes,
    parameters=parameter_bytes,
    optimizer=optimizer_bytes,
    batch=memory.batch,
    temporaries=memory.temporaries,
    program=memory.program,
    available=memory.available,
    received=contents.received,
    unread=contents.unread,
    kernels=contents.kernels,
    seconds=seconds,
    estimate=contents.estimate,
    peak_seconds=_peak_seconds(config, devices),
    windowed=contents.windowed,
  )


def _peak_seconds(config: Config, devices: Sequence[jax.Device]) -> float:
  """Returns the seconds of a step's nominal FLOPs at the devices' peak FLOP/s.

  It is 0 if the peak is unknown.
  """
  peak = peak_flops(devices[0].device_kind)
  if peak is None:
    return 0.0
  return training_flops(config) / len(devices) / peak


def training_flops(config: Config) -> int:
  """Returns the nominal FLOPs of a training step, without rematerialization."""
  length = config.data.length
  num_tokens = config.train.batch_size * length
  frozen_parameters = frozen_names(config.optimizer)
  flops = step_flops(config.model, length, num_tokens, frozen_parameters)
  return flops.training


def _shard_bytes(tree: Any) -> int:
  """Returns the bytes that one device holds of a tree of abstract arrays."""
  total = 0
  for array in jax.tree.leaves(tree):
    shard_shape = array.sharding.shard_shape(array.shape)
    total += math.prod(shard_shape) * array.dtype.itemsize
  return total


class Refusal(NamedTuple):
  """The content of the compiler's message that a step needs too much memory.

  Attributes:
    needed: Bytes that a device would need.
    available: Bytes that a device has.
    is_temporaries: Whether `needed` is for the temporaries only. Otherwise, it
      is the total.
  """

  needed: int
  available: int
  is_temporaries: bool


def read_refusal(message: str) -> Refusal:
  """Reads the compiler's message that a step needs too much memory.

  Raises:
    UserError: if the compiler refuses the step for another reason.
  """
  temporaries = _TEMPORARIES_TOO_LARGE.search(message)
  total = _TOTAL_TOO_LARGE.search(message)
  amounts = temporaries or total
  if amounts is None:
    raise UserError(f"the TPU's compiler refuses the step: {message}")
  needed, available = amounts.groups()
  return Refusal(
    needed=_amount_bytes(needed),
    available=_amount_bytes(available),
    is_temporaries=temporaries is not None,
  )


def _amount_bytes(amount: str) -> int:
  """Returns the bytes of an amount such as "15.75G" (15.75 GiB)."""
  number = float(amount[:-1])
  unit = amount[-1]
  return round(number * _UNIT_BYTES[unit])


class _Memory(NamedTuple):
  """The sizes of a `Plan` that depend on the compiler, in bytes per chip."""

  batch: int
  temporaries: int
  program: int
  available: int


def _refused_memory(
  refusal: Refusal, state_bytes: int, devices_per_chip: int
) -> _Memory:
  """Returns the memory of a step that the compiler refuses to compile.

  The sizes of the batch and of the program are unknown, and count as 0.

  Args:
    refusal: The content of the compiler's message.
    state_bytes: Bytes per chip of parameters and optimizer.
    devices_per_chip: Number of devices that share a chip's memory.
  """
  temporaries = refusal.needed * devices_per_chip
  if not refusal.is_temporaries:
    # The refusal gives the total. All but the state counts as temporaries.
    temporaries -= state_bytes
  return _Memory(
    batch=0,
    temporaries=temporaries,
    program=0,
    available=refusal.available * devices_per_chip,
  )


def _compiled_memory(
  analysis: Any, state_bytes: int, devices_per_chip: int, available: int
) -> _Memory:
  """Returns the memory of a compiled step.

  Args:
    analysis: The result of `jax.stages.Compiled.memory_analysis`: sizes in
      bytes per device.
    state_bytes: Bytes per chip of parameters and optimizer.
    devices_per_chip: Number of devices that share a chip's memory.
    available: Bytes of memory per chip.
  """
  # The step's arguments are the parameters, the optimizer's state and the
  # batch.
  argument_bytes = analysis.argument_size_in_bytes * devices_per_chip
  return _Memory(
    batch=argument_bytes - state_bytes,
    temporaries=analysis.temp_size_in_bytes * devices_per_chip,
    program=analysis.generated_code_size_in_bytes * devices_per_chip,
    available=available,
  )


@dataclasses.dataclass(frozen=True)
class _Contents:
  """The attributes of a `Plan` that come from the program's text.

  The defaults are for a step that was not compiled, and so has no program.
  """

  received: dict[Traffic, float] = dataclasses.field(default_factory=dict)
  unread: str = ""
  kernels: tuple[str, ...] = ()
  estimate: Estimate | None = None
  windowed: int = 0


def _read_contents(
  text: str,
  mesh: Mapping[str, int],
  config: Config,
  topology: str,
  devices_per_chip: int,
) -> _Contents:
  """Reads communication, time and kernels from the text of a program.

  If a part of the text cannot be read, `unread` says which. The received bytes
  remain if only the estimate fails.

  Args:
    text: The program, from `jax.stages.Compiled.as_text`.
    mesh: Devices along each axis.
    config: The run's config.
    topology: As in `compile_plan`.
    devices_per_chip: Number of devices that share a chip's links.
  """
  received: dict[Traffic, float] = {}
  step_estimate = None
  unread = ""
  try:
    received = _received_bytes(text, mesh, devices_per_chip)
    step_estimate = _estimate_step(text, mesh, config, topology)
  except ValueError as error:
    unread = str(error)
  return _Contents(
    received=received,
    unread=unread,
    kernels=tuple(sorted(_KERNEL.findall(text))),
    estimate=step_estimate,
    windowed=windowed_einsums(text),
  )


def _received_bytes(
  text: str, mesh: Mapping[str, int], devices_per_chip: int
) -> dict[Traffic, float]:
  """Returns the bytes that a chip receives in a step."""
  received: dict[Traffic, float] = {}
  for collective in collectives(text, mesh):
    traffic = Traffic(collective.axes, collective.kind)
    device_bytes = collective.bytes * collective.times
    chip_bytes = device_bytes * devices_per_chip
    received[traffic] = received.get(traffic, 0.0) + chip_bytes
  return received


def _estimate_step(
  text: str, mesh: Mapping[str, int], config: Config, topology: str
) -> Estimate | None:
  """Returns the estimated time of a step.

  It is None for v7x, for which the compiler has no estimates.
  """
  generation = Topology.parse(topology).generation
  if generation not in CHIPS:
    return None
  chip = CHIPS[generation]
  torus = Torus.from_topology(topology)
  cycles_by_kernel = kernel_cycles(config, mesh, generation, chip.num_cores)
  return estimate(text, mesh, chip, torus, cycles_by_kernel)


def kernel_cycles(
  config: Config, mesh: Mapping[str, int], generation: str, num_cores: int
) -> dict[str, float]:
  """Returns the cycles of one call of each attention kernel on a device.

  A call computes all rows and query heads of the device. `cycles` looks up the
  cycles of one query head in one row.

  Args:
    config: The run's config.
    mesh: Devices along each axis.
    generation: Generation of the TPU, such as "v5e".
    num_cores: Cores that share a device's work.

  Returns:
    Cycles by a part of the kernel's name. Kernels without an estimate are
    missing, such as kernels with a window.
  """
  if config.model.window is not None:
    return {}
  micro_batch_size = config.train.batch_size // config.train.accumulation
  rows = micro_batch_size // (mesh["data"] * mesh["fsdp"])
  # The devices along "context" share each row. They divide it so that a call
  # has as much work as causal attention over the device's own tokens.
  length = config.data.length // mesh["context"]

  # A program also has a fallback kernel for overflow, which counts as no time.
  # It comes first, since the first name that matches applies.
  cycles_by_name = {"_online": 0.0}
  for stack in stacks(config.model).values():
    # diffjax/parameters.py explains these letters.
    sizes = axis_sizes(stack)
    num_query_heads = sizes["Q"]
    maps_per_query_head = sizes["G"]
    maps_per_key_head = sizes["M"]
    # The heads of each row are divided over "tensor" and over the cores.
    heads_per_core = rows * num_query_heads / mesh["tensor"] / num_cores
    variant = variant_name(maps_per_query_head, maps_per_key_head)
    for direction in ("forward", "backward"):
      cycles_per_head = cycles(
        generation,
        direction,
        length,
        D=sizes["D"],
        V=sizes["V"],
        G=maps_per_query_head,
        M=maps_per_key_head,
      )
      if cycles_per_head is not None:
        name = f"diff_attention_{direction}_{variant}"
        cycles_by_name[name] = cycles_per_head * heads_per_core
  return cycles_by_name
