"""Compiles a run's training step for TPUs that are not there, and says what it takes of them, what bounds its time and whether it fits.

    python -m diffjax.aot --config=configs/diff_1b.py --topology=v5e:4x4
    python -m diffjax.aot --config=configs/diff_13b.py --topology=v5p:4x4x4 --slices=2 --config.mesh.data=2
    python -m diffjax.aot --config=configs/diff_1b.py --topology=v6e:4x4 --remat

It needs the TPU's compiler, libtpu ('.[tpu]', Linux on x86-64), and no TPU. It exits with 1 if the step does not fit.
"""

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

from absl import app, flags

from diffjax import command
from diffjax.config import REMAT, Config, UserError
from diffjax.parallel.estimate import Estimate
from diffjax.training.flops import peak_flops, step_flops

_TOPOLOGY = flags.DEFINE_string("topology", None, "Generation and chips of a slice, such as v5e:4x4 or v5p:4x4x4.")
_SLICES = flags.DEFINE_integer("slices", 1, "Slices of that topology, joined by the data-centre network.", lower_bound=1)
_REMAT = flags.DEFINE_bool("remat", False, "Compare all values of config.model.remat, and name the quickest that fits.")

# Slices by generation, from small to large (cloud.google.com/tpu/docs).
_PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
TOPOLOGIES = {"v4": _CUBES, "v5e": _PLANES, "v5p": (*_CUBES, "16x16x16", "16x16x24"), "v6e": _PLANES, "tpu7x": _CUBES}

# GiB of a chip's memory that the compiler has for a program; v7x's as sold.
MEMORY = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 192}

# What libtpu wants to hear where there is no TPU; and its log, of which only what ends a process is of use here.
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3",
}  # fmt: skip

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a compiled training step takes of a chip. All sizes are bytes a chip."""

  chips: int
  # As JAX calls it: "TPU v5 lite"
  device_kind: str
  # Devices along each axis; v7x has two devices a chip
  mesh: dict[str, int]
  parameters: int
  optimizer: int
  # With what layouts pad all three by
  batch: int
  # All that is alive only inside the step: activations, gradients, gathered parameters
  temporaries: int
  # The machine code
  program: int
  # What there is for all of these
  available: int
  # Received in a step, by mesh axes and kind; nothing where the compiler refused
  received: dict[tuple[tuple[str, ...], str], float]
  # What of the compiled program could not be read, so that nothing is counted; "" if all was
  unread: str
  # Names of our Pallas kernels in it, one a call
  kernels: tuple[str, ...]
  # Of compilation
  seconds: float
  # What a step takes by the compiler's estimate; None where it makes none, or has refused
  estimate: Estimate | None = None
  # Of a step, for nominal FLOPs at the chip's peak
  peak_seconds: float = 0.0
  # Products that became loops over a parameter's shards
  windowed: int = 0

  @property
  def total(self) -> int:
    return self.parameters + self.optimizer + self.batch + self.temporaries + self.program

  @property
  def mfu_bound(self) -> float | None:
    """The MFU that the step would have if it took as long as estimated; None without an estimate."""
    return self.peak_seconds / self.estimate.seconds if self.estimate and self.peak_seconds else None

  @property
  def fits(self) -> bool:
    """Not left to the compiler, which may refuse temporaries that are too large alone, but takes them beside parameters that are."""
    return self.total <= self.available


def main(config: Config) -> None:
  """Prints the plan for --topology."""
  if not _TOPOLOGY.value:
    raise app.UsageError("pass --topology=GENERATION:CHIPS, for example --topology=v5e:4x4")
  if _REMAT.value:
    _compare_remat(config, _TOPOLOGY.value, _SLICES.value)
    return
  plan = compile_apart(config, _TOPOLOGY.value, _SLICES.value)
  _report(config, plan)
  if not plan.fits:
    changes = "; or ".join(_changes(config, _TOPOLOGY.value, _SLICES.value, plan))
    raise UserError(f"does not fit: {plan.total / 2**30:.2f} GiB of {plan.available / 2**30:.2f} GiB a chip. Change {changes}")
  print("fits")


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


def apart(function: Callable[..., _T], *args: Any, topology: str, slices: int = 1) -> _T:
  """Calls function(devices, chips, bytes of memory a chip, *args) in a process of its own, since libtpu may end the process that it is in.

  Args:
    function: what uses the compiler; a module's, as are args picklable.
    args: what else it is given.
    topology: generation and chips of a slice, a name and a member of TOPOLOGIES: "v5e:4x4".
    slices: number of such slices.

  Raises:
    UserError: if there is no such topology, or the compiler cannot be had or ends the process; and what the function raises.
  """
  generation, _, shape = topology.partition(":")
  if shape not in TOPOLOGIES.get(generation, ()):
    there = ", ".join(f"{generation}:{known}" for known in TOPOLOGIES.get(generation, ())) or ", ".join(
      f"{name}:{shapes[0]} to {name}:{shapes[-1]}" for name, shapes in TOPOLOGIES.items()
    )
    raise UserError(f"--topology={topology}: there is no such slice; there are {there}")
  if importlib.util.find_spec("libtpu") is None:
    raise UserError("the TPU's compiler is not installed: pip install -e '.[tpu]' (Linux on x86-64)")
  with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
    try:
      return pool.submit(_call, function, args, topology, slices).result()
    except concurrent.futures.process.BrokenProcessPool as error:
      raise UserError(f"the TPU's compiler ended its process, compiling for {topology}; what it said is above, if anything") from error


def _call(function: Callable[..., _T], args: tuple[Any, ...], topology: str, slices: int) -> _T:
  """In the other process."""
  os.environ.update(_ENVIRONMENT)
  import jax
  from jax.experimental import topologies

  jax.config.update("jax_platforms", "cpu")  # where the caller's module has imported JAX already
  generation, shape = topology.split(":")
  options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
  options |= {"chip_config_name": "megacore"} if generation == "v4" else {}  # two cores as one device, as on the TPU itself
  options |= {"chips_per_host_bounds": (1, 1, 1)} if shape == "1x1" else {}
  devices: Any = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
  chips = slices * math.prod(map(int, shape.split("x")))
  return function(devices, chips, round(MEMORY[generation] * 2**30), *args)


def _compile(devices: Any, chips: int, available: int, config: Config, topology: str) -> Plan:
  """The plan of a config's training step on devices with so many available bytes a chip."""
  import jax

  from diffjax.parallel.collectives import collectives
  from diffjax.parallel.estimate import CHIPS, Torus, estimate
  from diffjax.parallel.mesh import make_mesh
  from diffjax.parallel.program import windowed_einsums
  from diffjax.training.step import lower_train_step

  a_chip = len(devices) // chips
  mesh = make_mesh(config.mesh, devices)
  lowered, state = lower_train_step(config, mesh)
  parameters, optimizer = (_shard_bytes(tree) * a_chip for tree in (state.params, state.opt_state))
  generation = topology.partition(":")[0]
  batch, temporaries, program, kernels, unread, estimated, windowed = 0, 0, 0, (), "", None, 0
  received: dict[tuple[tuple[str, ...], str], float] = collections.defaultdict(float)
  start = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    needed, available, of_temporaries = _out_of_memory(str(error))
    needed, available = needed * a_chip, available * a_chip
    temporaries = needed if of_temporaries else needed - parameters - optimizer
  else:
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    kernels = tuple(sorted(re.findall(r"%(diff_attention_[a-z]+_[a-z0-9]+)[.\d]* = .* custom-call\(", text)))
    windowed = windowed_einsums(text)
    program, temporaries = memory.generated_code_size_in_bytes * a_chip, memory.temp_size_in_bytes * a_chip
    batch = memory.argument_size_in_bytes * a_chip - parameters - optimizer
    try:
      for collective in collectives(text, mesh.shape):
        received[collective.axes, collective.kind] += collective.bytes * collective.times * a_chip
      if generation in CHIPS:
        chip = CHIPS[generation]
        estimated = estimate(text, mesh.shape, chip, Torus.of(topology), _kernel_cycles(config, mesh.shape, generation, chip.cores))
    except ValueError as error:
      unread = str(error)
  seconds = time.perf_counter() - start
  kind, axes = devices[0].device_kind, dict(mesh.shape)
  sizes = parameters, optimizer, batch, temporaries, program, available
  flops = step_flops(config.model, config.data.length, config.train.batch_size * config.data.length).training
  peak_seconds = flops / len(devices) / peak if (peak := peak_flops(kind)) else 0.0
  return Plan(chips, kind, axes, *sizes, dict(received), unread, kernels, seconds, estimated, peak_seconds, windowed)


def _kernel_cycles(config: Config, mesh: Mapping[str, int], generation: str, cores: int) -> dict[str, float]:
  """Cycles of one call of each attention kernel on a device, by name; one that was never estimated is not there."""
  from diffjax.model.attention import ATTENTION
  from diffjax.ops.diff_attention.tpu.cycles import cycles

  model, kind = config.model, ATTENTION[config.model.attention]
  rows = config.train.batch_size // config.train.accumulation // (mesh["data"] * mesh["fsdp"])
  # In balanced order a device has two calls, of queries that attend to half of what the whole row's do between them.
  share = 1 / (2 * mesh["context"]) if mesh["context"] > 1 else 1
  calls = rows * model.num_heads / mesh["tensor"] * share / cores
  shape = model.head_dim, kind.value_heads * model.head_dim, kind.num_maps, kind.num_key_maps
  found = {way: cycles(generation, way, config.data.length, *shape) for way in ("forward", "backward")}
  return {f"diff_attention_{way}": cost * calls for way, cost in found.items() if cost is not None}


def _shard_bytes(tree: Any) -> int:
  """What a device holds of abstract arrays."""
  import jax

  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _out_of_memory(message: str) -> tuple[int, int, bool]:
  """Reads the compiler's refusal: bytes needed and available on a device, and whether the first is of temporaries alone.

  "the total memory required for HLO temporaries (30.24G) exceeds available HBM (15.75G)" or "Used 21.43G of 15.75G hbm".

  Raises:
    UserError: if it refuses for another reason.
  """
  amount = r"([\d.]+)([KMGT])"
  match = re.search(rf"(temporaries) \({amount}\) exceeds available HBM \({amount}\)|Used {amount} of {amount} hbm", message)
  if match is None:
    raise UserError(f"the TPU's compiler refuses the step: {message}")
  temporaries, *amounts = match.groups()
  numbers = [
    round(float(number) * 2 ** (10 + 10 * "KMGT".index(unit))) for number, unit in zip(amounts[::2], amounts[1::2], strict=True) if number
  ]
  return numbers[0], numbers[1], temporaries is not None


def _report(config: Config, plan: Plan) -> None:
  axes = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
  print(f"{plan.chips} chips ({plan.device_kind}), mesh {axes}; compiled in {plan.seconds:.0f} s")
  print("memory, GiB a chip")
  for name in ("parameters", "optimizer", "batch", "temporaries", "program", "total"):
    print(f"  {name:<12}{getattr(plan, name) / 2**30:>8.2f}{f' of {plan.available / 2**30:.2f}' if name == 'total' else ''}")
  flops = step_flops(config.model, config.data.length, config.train.batch_size * config.data.length).training
  print(f"FLOPs a step, nominal (without rematerialisation): {flops:.3g}, {flops / plan.chips:.3g} a chip", end="")
  print(f"; {plan.peak_seconds:.3g} s at the chip's peak" if plan.peak_seconds else "")
  if plan.program:
    _report_estimate(plan)
    if plan.windowed:
      print(
        f"windowed einsums: {plan.windowed}, products cut into loops over a parameter's shards; each is slow and rounds its partial sums"
      )
    print(f"attention kernels: {', '.join(plan.kernels) or 'none'}")
    print(f"received in a step, GiB a chip{f': not counted, the program has {plan.unread}' if plan.unread else ''}")
    for crossed in sorted({crossed for crossed, _ in plan.received}):
      kinds = {kind: size for (axes_of_kind, kind), size in sorted(plan.received.items()) if axes_of_kind == crossed}
      parts = ", ".join(f"{kind} {size / 2**30:.3f}" for kind, size in kinds.items())
      print(f"  {' and '.join(crossed):<16}{sum(kinds.values()) / 2**30:>8.3f}: {parts}")


def _report_estimate(plan: Plan) -> None:
  if plan.estimate is None:
    print(
      "seconds a step, the compiler's estimate: none, since "
      + (f"the program has {plan.unread}" if plan.unread else "there is none for this generation")
    )
    return
  print("seconds a step, the compiler's estimate (cycles × iterations, which rank programs; not a time)")
  for part, seconds in sorted(plan.estimate.parts.items(), key=lambda entry: -entry[1]):
    note = ""
    if part == "exposed collectives":
      whole = sum(whole for whole, _ in plan.estimate.collectives.values())
      shown = ", ".join(f"{kind} {shown:.4f} of {whole:.4f}" for kind, (whole, shown) in sorted(plan.estimate.collectives.items()))
      note = f": {seconds / whole:.0%} of all collectives; {shown}"
    print(f"  {part:<24}{seconds:>8.4f}{note}")
  without = " (without attention kernels, for whose shape there is no estimate)" if plan.kernels and not plan.estimate.has_kernels else ""
  print(f"  {'total':<24}{plan.estimate.seconds:>8.4f}{without}")
  print(f"bound on MFU, the compiler's estimate: {plan.mfu_bound:.1%}{without}")


def _compare_remat(config: Config, topology: str, slices: int) -> None:
  """Prints a row a policy, from the most memory to the least, and the quickest that fits.

  Raises:
    UserError: if none fits.
  """
  print(f"{'remat':<12}{'GiB a chip':>16}{'seconds a step':>18}{'bound on MFU':>15}  by the compiler's estimate")
  fitting: list[tuple[float, str]] = []
  for order, policy in enumerate(REMAT):
    of_policy = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=policy))
    plan = compile_apart(of_policy, topology, slices)
    estimated = f"{plan.estimate.seconds:>18.4f}{plan.mfu_bound:>15.1%}" if plan.estimate else f"{'none':>18}{'none':>15}"
    memory = f"{plan.total / 2**30:.2f} of {plan.available / 2**30:.2f}"
    print(f"{policy:<12}{memory:>16}{estimated}{'' if plan.fits else '  does not fit'}", flush=True)
    if plan.fits:
      fitting.append((plan.estimate.seconds if plan.estimate else order, policy))
  if not fitting:
    raise UserError("no policy fits; without --remat the command says what else would take less")
  print(f"quickest that fits: --config.model.remat={min(fitting)[1]}")


def _changes(config: Config, topology: str, slices: int, plan: Plan) -> list[str]:
  """What would take less memory, the kind that dominates first."""
  train, devices = config.train, math.prod(plan.mesh.values())
  state, activations = [], []
  in_slice = devices // slices
  if plan.mesh["fsdp"] < in_slice and config.model.embed_dim % in_slice == 0:
    state.append(f"--config.mesh.data={slices} --config.mesh.fsdp={in_slice} (parameters and optimizer over all chips of a slice)")
  if config.model.remat != "full":
    activations.append("--config.model.remat=full (activations computed again)")
  if (parts := train.batch_size // devices) > train.accumulation:
    activations.append(f"--config.train.accumulation={parts} (one row a device at a time)")
  if not train.loss_chunk:
    activations.append("--config.train.loss_chunk=512 (logits of fewer tokens at a time)")
  changes = state + activations if plan.parameters + plan.optimizer > plan.temporaries else activations + state
  generation, _, shape = topology.partition(":")
  for larger in TOPOLOGIES[generation][TOPOLOGIES[generation].index(shape) + 1 :]:
    factor = math.prod(map(int, larger.split("x"))) * slices / plan.chips
    if plan.total <= factor * plan.available and train.batch_size % (devices * factor) == 0:
      changes.append(f"--topology={generation}:{larger}")
      break
  return changes or ["the config: fewer layers, a smaller width or shorter rows; or the generation of TPU"]


if __name__ == "__main__":
  command.run(main)
