"""Compiles a run's training step for absent TPUs, and reads what it needs.

It needs the TPU compiler, libtpu ('.[tpu]', Linux on x86-64), and no TPU.
docs/estimates.md says what the memory and the time include.
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

_T = TypeVar("_T")


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
    batch: The batch, and the padding of all three in the compiler's layouts.
    temporaries: Values that exist only within the step: activations, gradients
      and gathered parameters.
    program: The machine code.
    available: The memory for all of these.
    received: Bytes received in a step, by mesh axes and kind of collective.
    unread: The part of the program that could not be read, so that there are no
      received bytes or no estimate. "" if all could be read.
    kernels: Names of diffjax's Pallas kernels, one for each call.
    seconds: Seconds that compilation took.
    estimate: Estimated time of a step; None without an estimate.
    peak_seconds: Seconds of the step's nominal FLOPs at the chip's peak.
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
  received: dict[tuple[tuple[str, ...], str], float]
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
    """The MFU if the step took as long as estimated; None without an estimate.

    The unit is 1: 0.5 is half of the chip's peak.
    """
    if not self.estimate or not self.peak_seconds:
      return None
    return self.peak_seconds / self.estimate.seconds

  @property
  def fits(self) -> bool:
    """Whether the step fits.

    The compiler refuses temporaries that are too large. It accepts parameters
    that are too large.
    """
    return self.total <= self.available


def compile_plan(config: Config, topology: str, slices: int = 1) -> Plan:
  """Returns the memory and time of the training step on absent TPUs.

  Args:
    config: The run's config.
    topology: Generation and chips of a slice, of `TOPOLOGIES`: "v5e:4x4".
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
  """Calls a function in another process, with devices of absent TPUs.

  It is another process because libtpu may end its process.

  Args:
    function: Called as function(devices, chips, memory, *args), where chips is
      the number of chips and memory the bytes of memory per chip. A function of
      a module, so that it can be pickled.
    args: Further arguments, which can be pickled.
    topology: Generation and chips of a slice, of `TOPOLOGIES`: "v5e:4x4".
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
  with starting_workers():
    pool = concurrent.futures.ProcessPoolExecutor(
      max_workers=1,
      mp_context=multiprocessing.get_context("spawn"),
      initializer=end_with_parent,
    )
    result = pool.submit(
      _call, function, args, topology, slices, imported_modules()
    )
  with pool:
    try:
      return result.result()
    except concurrent.futures.process.BrokenProcessPool as error:
      raise UserError(
        "the TPU's compiler ended its process, compiling for"
        f" {topology}; its messages, if any, are above"
      ) from error


def _check_topology(topology: str) -> None:
  """Raises UserError if no such slice exists."""
  generation, _, shape = topology.partition(":")
  if shape in TOPOLOGIES.get(generation, ()):
    return
  slices = []
  if generation in TOPOLOGIES:
    for known_shape in TOPOLOGIES[generation]:
      slices.append(f"{generation}:{known_shape}")
  else:
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
  modules: list[str],
) -> _T:
  """Calls the function of `call_with_devices`, in the compiler's process.

  `modules` define attention variants.
  """
  os.environ.update(ENVIRONMENT)
  # JAX was imported before the environment was set.
  jax.config.update("jax_platforms", "cpu")
  import_modules(modules)
  slice_topology = Topology.parse(topology)
  memory_bytes = round(MEMORY_GIB[slice_topology.generation] * 2**30)
  return function(
    _absent_devices(topology, slices),
    slices * slice_topology.num_chips,
    memory_bytes,
    *args,
  )


def _absent_devices(topology: str, slices: int) -> Sequence[jax.Device]:
  """Returns the devices of slices that are not there, to compile for."""
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
  """Compiles a training step, in the compiler's process.

  Args:
    devices: All devices.
    chips: Number of chips.
    available: Bytes of memory per chip.
    config: The run's config.
    topology: Generation and chips of a slice: "v5e:4x4".
  """
  # Only this process needs these imports, which are slow.
  from diffjax.parallel.mesh import make_mesh
  from diffjax.training.program import build

  program = build(config, make_mesh(config.mesh, devices))
  lowered = program.lower_train_step()
  devices_per_chip = len(devices) // chips
  state = program.abstract_state
  plan = Plan(
    chips=chips,
    device_kind=devices[0].device_kind,
    mesh=dict(program.mesh.shape),
    parameters=_shard_bytes(state.params) * devices_per_chip,
    optimizer=_shard_bytes(state.opt_state) * devices_per_chip,
    batch=0,
    temporaries=0,
    program=0,
    available=available,
    received={},
    unread="",
    kernels=(),
    seconds=0.0,
    peak_seconds=_peak_seconds(config, devices),
  )
  start = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    plan = _add_refusal(plan, str(error), devices_per_chip)
  else:
    plan = _add_memory(plan, compiled.memory_analysis(), devices_per_chip)
    text = compiled.as_text() or ""
    plan = _add_text(plan, text, config, topology, devices_per_chip)
  return dataclasses.replace(plan, seconds=time.perf_counter() - start)


def _peak_seconds(config: Config, devices: Sequence[jax.Device]) -> float:
  """Returns the seconds of a step's nominal FLOPs at the devices' peak.

  It is 0 if the peak is unknown.
  """
  peak = peak_flops(devices[0].device_kind)
  if peak is None:
    return 0.0
  return training_flops(config) / len(devices) / peak


def training_flops(config: Config) -> int:
  """Returns the nominal FLOPs of a training step, without rematerialization."""
  length = config.data.length
  tokens = config.train.batch_size * length
  frozen = frozen_names(config.optimizer)
  return step_flops(config.model, length, tokens, frozen).training


def _shard_bytes(tree: Any) -> int:
  """Returns the bytes of abstract arrays that one device holds."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    shard_shape = leaf.sharding.shard_shape(leaf.shape)
    total += math.prod(shard_shape) * leaf.dtype.itemsize
  return total


def _add_refusal(plan: Plan, message: str, devices_per_chip: int) -> Plan:
  """Returns the plan of a step that the compiler refuses for its memory."""
  refusal = _out_of_memory(message)
  temporaries = refusal.needed * devices_per_chip
  if not refusal.is_temporaries:
    temporaries -= plan.parameters + plan.optimizer
  return dataclasses.replace(
    plan,
    available=refusal.available * devices_per_chip,
    temporaries=temporaries,
  )


def _add_memory(plan: Plan, memory: Any, devices_per_chip: int) -> Plan:
  """Returns the plan with the memory of a compiled step.

  `memory` is from `jax.stages.Compiled.memory_analysis`.
  """
  arguments = memory.argument_size_in_bytes * devices_per_chip
  return dataclasses.replace(
    plan,
    batch=arguments - plan.parameters - plan.optimizer,
    temporaries=memory.temp_size_in_bytes * devices_per_chip,
    program=memory.generated_code_size_in_bytes * devices_per_chip,
  )


def _add_text(
  plan: Plan, text: str, config: Config, topology: str, devices_per_chip: int
) -> Plan:
  """Returns the plan with what the text of a compiled step shows."""
  received: dict[tuple[tuple[str, ...], str], float] = {}
  step_estimate = None
  unread = ""
  try:
    received = _received_bytes(text, plan.mesh, devices_per_chip)
    step_estimate = _estimate(text, plan.mesh, config, topology)
  except ValueError as error:
    unread = str(error)
  return dataclasses.replace(
    plan,
    received=received,
    unread=unread,
    kernels=tuple(sorted(_KERNEL.findall(text))),
    estimate=step_estimate,
    windowed=windowed_einsums(text),
  )


def _received_bytes(
  text: str, mesh: Mapping[str, int], devices_per_chip: int
) -> dict[tuple[tuple[str, ...], str], float]:
  """Returns the bytes that a chip receives, by mesh axes and kind."""
  received: dict[tuple[tuple[str, ...], str], float] = {}
  for collective in collectives(text, mesh):
    key = (collective.axes, collective.kind)
    device_bytes = collective.bytes * collective.times
    received[key] = received.get(key, 0.0) + device_bytes * devices_per_chip
  return received


def _estimate(
  text: str, mesh: Mapping[str, int], config: Config, topology: str
) -> Estimate | None:
  """Returns the estimated time of a step; None for v7x, which has none."""
  generation = Topology.parse(topology).generation
  if generation not in CHIPS:
    return None
  chip = CHIPS[generation]
  return estimate(
    text,
    mesh,
    chip,
    Torus.from_topology(topology),
    kernel_cycles(config, mesh, generation, chip.num_cores),
  )


def kernel_cycles(
  config: Config, mesh: Mapping[str, int], generation: str, num_cores: int
) -> dict[str, float]:
  """Returns the cycles of one call of each attention kernel on a device.

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
  # If devices share rows, the order of the tokens is balanced: each step of the
  # ring is as much work as the first one, which is causal.
  length = config.data.length // mesh["context"]

  # The kernel with a running maximum runs only if the result of the other one
  # cannot be used.
  cycles_by_name = {"_online": 0.0}
  for stack in stacks(config.model).values():
    sizes = axis_sizes(stack)
    G = sizes["G"]
    M = sizes["M"]
    calls = rows * sizes["Q"] / mesh["tensor"] / num_cores
    for direction in ("forward", "backward"):
      cycles_per_call = cycles(
        generation, direction, length, stack.head_dim, sizes["V"], G, M
      )
      if cycles_per_call is not None:
        name = f"diff_attention_{direction}_{variant_name(G, M)}"
        cycles_by_name[name] = cycles_per_call * calls
  return cycles_by_name


class _Refusal(NamedTuple):
  """The compiler's message about a step that is too large.

  Attributes:
    needed: Bytes that a device would need.
    available: Bytes that a device has.
    is_temporaries: Whether `needed` is only for temporaries.
  """

  needed: int
  available: int
  is_temporaries: bool


def _out_of_memory(message: str) -> _Refusal:
  """Reads the compiler's message about a step that is too large.

  Raises:
    UserError: if the compiler refuses the step for another reason.
  """
  match = _TEMPORARIES_TOO_LARGE.search(message)
  if match:
    needed, available = match.groups()
    return _Refusal(_amount_bytes(needed), _amount_bytes(available), True)
  match = _TOTAL_TOO_LARGE.search(message)
  if match:
    needed, available = match.groups()
    return _Refusal(_amount_bytes(needed), _amount_bytes(available), False)
  raise UserError(f"the TPU's compiler refuses the step: {message}")


def _amount_bytes(amount: str) -> int:
  """Returns the bytes of an amount such as "15.75G"."""
  exponent = 10 + 10 * "KMGT".index(amount[-1])
  return round(float(amount[:-1]) * 2**exponent)
