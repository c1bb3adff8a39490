"""Throughput: how many tokens per second does DIFF process?

Times the forward pass, and forward and backward, of DIFF, DIFF V2 and the
Transformer on one device: the paper's Table 7 on this machine. See README.md.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from diffjax.config import (
  Config,
  MeshConfig,
  UserError,
  from_config_dict,
  to_config_dict,
)
from diffjax.configs import base
from experiments import plots
from experiments.grid import Experiment, Grid

if TYPE_CHECKING:
  from jax.sharding import Mesh
  from jaxtyping import Array, Int

# The architectures, in the order in which they take turns.
NAMES = {
  "transformer": "Transformer",
  "diff": "DIFF",
  "diff_v2": "DIFF V2",
}
BASELINE = "transformer"

# The timed programs.
PASSES = {"forward": "forward", "both": "forward + backward"}

# DIFF's tokens/s over the Transformer's in the paper's Table 7, on an H100 of
# 80 GB. The percentages in the paper are of DIFF's tokens/s instead.
PAPER_RATIOS = {
  ("3b,length=2048", "both"): 6635 / 7247,
  ("3b,length=2048", "forward"): 46811 / 51228,
  ("3b,length=4096", "both"): 6718 / 7491,
  ("3b,length=4096", "forward"): 44521 / 48762,
  ("13b,length=2048", "both"): 942 / 998,
  ("13b,length=2048", "forward"): 13653 / 14346,
}

# The share of the device's memory that programs can use. Fragmentation takes
# the rest.
USABLE_MEMORY = 0.9

# The fewest layers that are compiled to see how much memory a layer takes. One
# layer is compiled without a loop, so it says nothing about further layers.
MIN_LAYERS = 2

# Returns the bytes that a pass takes: needed(config, mesh, name of the pass).
NeededBytes = Callable[[Config, "Mesh", str], float]


class Functions(NamedTuple):
  """The functions of a model, before compilation.

  Attributes:
    make_params: Returns the initial parameters.
    loss: The mean loss of (parameters, tokens, targets).
    arguments: The shapes of the arguments of `loss`.
  """

  make_params: Callable[[], Any]
  loss: Callable[..., Any]
  arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Programs:
  """Programs of an architecture on one device.

  Attributes:
    make_params: Returns the initial parameters.
    passes: The compiled programs, by name in PASSES. "forward" returns the
      loss of (parameters, tokens, targets), "both" the loss and its gradient.
  """

  make_params: Callable[[], Any]
  passes: Mapping[str, Callable[..., Any]]


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Times all architectures on the first device of this process.

  Args:
    workdir: Not used.
    config: The config of the shape. `train.steps` is the number of repetitions.

  Returns:
    The number of layers that fit the device, all times in seconds, the tokens
    per second by their medians, and the ratios to the Transformer's
    ("diff_forward" and so on).

  Raises:
    UserError: if several runs share the cores of a CPU, or if not even two
      layers fit the device.
  """
  # Listing experiments does not need JAX.
  import jax

  from diffjax.host.runtime import keep_freed_memory
  from diffjax.parallel.mesh import make_mesh

  del workdir
  if os.environ.get("NPROC"):
    raise UserError(
      "--side_by_side: runs that share a CPU's cores cannot be timed;"
      " measure one at a time"
    )
  keep_freed_memory()
  device = jax.local_devices()[0]
  mesh = make_mesh(MeshConfig(), [device])
  layers = layers_on_device(config, mesh, memory_limit(device))
  programs = {}
  for name, twin in _twins(config).items():
    programs[name] = compile_programs(with_layers(twin, layers), mesh)
  seconds = _time_in_turns(programs, config)

  tokens_per_call = config.train.batch_size * config.data.length
  speeds = _tokens_per_second(seconds, tokens_per_call)
  measured: dict[str, Any] = {
    "layers": layers,
    "seconds": seconds,
    "tokens_per_second": speeds,
  }
  for name in ("diff", "diff_v2"):
    for kind in PASSES:
      ratio = speeds[name][kind] / speeds[BASELINE][kind]
      measured[f"{name}_{kind}"] = ratio
  return measured


def _tokens_per_second(
  seconds: Mapping[str, Mapping[str, Sequence[float]]], tokens_per_call: int
) -> dict[str, dict[str, float]]:
  """Returns the tokens per second by architecture and pass.

  Args:
    seconds: The seconds of every call, by architecture and pass.
    tokens_per_call: The tokens of a call.
  """
  speeds: dict[str, dict[str, float]] = {}
  for name in NAMES:
    speeds[name] = {}
    for kind in PASSES:
      median = statistics.median(seconds[name][kind])
      speeds[name][kind] = tokens_per_call / median
  return speeds


def _time_in_turns(
  programs: Mapping[str, Programs], config: Config
) -> dict[str, dict[str, list[float]]]:
  """Returns the seconds of every call, by architecture and pass.

  The architectures take turns, so that slow changes of the machine affect all.
  Each turn makes new parameters, so that only one architecture's parameters are
  in memory.
  """
  import jax

  tokens, targets = batch(config)
  seconds: dict[str, dict[str, list[float]]] = {}
  for name in programs:
    seconds[name] = {kind: [] for kind in PASSES}
  for repetition in range(config.train.steps + 1):
    for name, program in programs.items():
      params = jax.block_until_ready(program.make_params())
      for kind, compiled in program.passes.items():
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, tokens, targets))
        duration = time.perf_counter() - start
        # The first call also loads the program.
        if repetition > 0:
          seconds[name][kind].append(duration)
      del params
  return seconds


def batch(config: Config) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
  """Returns random tokens and targets. Each row is one document."""
  import jax

  shape = (2, config.train.batch_size, config.data.length)
  key = jax.random.key(config.data.seed)
  tokens, targets = jax.random.randint(key, shape, 0, config.model.vocab_size)
  return tokens, targets


def compile_programs(config: Config, mesh: Mesh) -> Programs:
  """Compiles the programs of an architecture.

  They compute as training does: with parameters in float32, and with the
  config's compute dtype, rematerialization and attention implementation.

  Args:
    config: The config of the run.
    mesh: A mesh of one device. The device need not be attached.
  """
  import jax

  make_params = jax.jit(make_functions(config, mesh).make_params)
  passes = {}
  for kind in PASSES:
    passes[kind] = _compile_pass(config, mesh, kind)
  return Programs(make_params, passes)


def _compile_pass(config: Config, mesh: Mesh, kind: str) -> Any:
  """Compiles a pass, which is one of PASSES."""
  import jax

  functions = make_functions(config, mesh)
  function = functions.loss
  if kind == "both":
    function = jax.value_and_grad(functions.loss)
  with jax.set_mesh(mesh):
    return jax.jit(function).lower(*functions.arguments).compile()


def make_functions(config: Config, mesh: Mesh) -> Functions:
  """Returns a model's functions for initialization and for the mean loss.

  Args:
    config: The config of the run.
    mesh: A mesh of one device, which need not be attached.
  """
  import jax
  import jax.numpy as jnp

  from diffjax.model.decoder import output_embedding
  from diffjax.ops.cross_entropy import fused_cross_entropy
  from diffjax.training.program import build
  from diffjax.training.step import init_params

  model = build(config, mesh).model

  def make_params():
    return init_params(model, jax.random.key(config.train.seed))

  def loss(params, tokens, targets):
    hidden = model.apply({"params": params}, tokens)
    embedding = output_embedding(params).astype(hidden.dtype)
    weights = jnp.ones(targets.shape, jnp.float32)
    total, *_ = fused_cross_entropy(hidden, embedding, targets, weights)
    return total / targets.size

  # The program is compiled for shapes on the mesh's device.
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def with_sharding(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

  params = jax.eval_shape(make_params)
  tokens, targets = jax.eval_shape(lambda: batch(config))
  arguments = jax.tree.map(with_sharding, (params, tokens, targets))
  return Functions(make_params, loss, arguments)


def _twins(config: Config) -> dict[str, Config]:
  """Returns the config of each architecture at the size of a config."""
  twins = {}
  for name in NAMES:
    twin = base.twin(to_config_dict(config), name)
    twins[name] = from_config_dict(twin)
  return twins


def with_layers(config: Config, layers: int) -> Config:
  """Returns a config with another number of layers."""
  model = dataclasses.replace(config.model, num_layers=layers)
  return dataclasses.replace(config, model=model)


def memory_limit(device: Any) -> float | None:
  """Returns the bytes that JAX can allocate on a device, None if unknown."""
  stats = device.memory_stats() or {}
  return stats.get("bytes_limit")


def compiled_bytes(config: Config, mesh: Mesh, kind: str) -> float:
  """Returns the memory of the device that a pass takes.

  Args:
    config: The config of the run.
    mesh: A mesh of one device.
    kind: The name of the pass in PASSES.

  Returns:
    Bytes by the compiler's plan. Infinite if the compiler needs more than the
    device has.
  """
  import jax

  try:
    plan = _compile_pass(config, mesh, kind).memory_analysis()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return math.inf
  return (
    plan.argument_size_in_bytes
    + plan.output_size_in_bytes
    + plan.temp_size_in_bytes
    + plan.generated_code_size_in_bytes
  )


def layers_on_device(
  config: Config,
  mesh: Mesh,
  memory: float | None,
  needed_bytes: NeededBytes = compiled_bytes,
) -> int:
  """Returns the number of layers with which every architecture fits a device.

  Args:
    config: The config of the run.
    mesh: A mesh of the device.
    memory: The bytes of the device, or None if they are unknown. Then all
      layers are used.
    needed_bytes: Returns the bytes that a pass takes.

  Raises:
    UserError: if not even two layers fit.
  """
  all_layers = config.model.num_layers
  if not memory:
    return all_layers
  limit = USABLE_MEMORY * memory
  fitting_layers = []
  for twin in _twins(config).values():
    needed = _bytes_by_layers(twin, mesh, needed_bytes)
    fitting_layers.append(layers_that_fit(all_layers, limit, needed))
  return min(fitting_layers)


def _bytes_by_layers(
  config: Config, mesh: Mesh, needed_bytes: NeededBytes
) -> Callable[[int], float]:
  """Returns a function from a number of layers to the bytes of "both"."""

  def needed(layers: int) -> float:
    return needed_bytes(with_layers(config, layers), mesh, "both")

  return needed


def layers_that_fit(
  layers: int, limit: float, needed: Callable[[int], float]
) -> int:
  """Returns the largest number of layers that fits a memory limit.

  Measures two numbers of layers. All layers take the same memory, so the others
  follow from these.

  Args:
    layers: The number of layers of the model, which is not exceeded.
    limit: The limit in bytes.
    needed: Returns the bytes that a number of layers takes. Infinite if they
      certainly do not fit.

  Raises:
    UserError: if not even two layers fit.
  """
  if layers <= MIN_LAYERS:
    return layers
  least = needed(MIN_LAYERS)
  if least > limit:
    raise UserError(
      f"{MIN_LAYERS} layers take more than the {limit / 2**30:.1f} GiB of the"
      " device that can be used; make train.batch_size smaller"
    )
  per_layer = needed(MIN_LAYERS + 1) - least
  further_layers = int((limit - least) // per_layer)
  return min(layers, MIN_LAYERS + further_layers)


def plan(config: Config, topology: str) -> list[dict[str, str]]:
  """Compiles what `measure` would time, for a TPU that need not be attached.

  Args:
    config: The config of the shape.
    topology: The TPU slice, such as "v5e:1x1". One device of it is used.

  Returns:
    A table row for each architecture, with the memory of each pass.

  Raises:
    UserError: if not even two layers fit, and for the reasons of
      `diffjax.compiled.plan.call_with_devices`.
  """
  from diffjax.compiled.plan import call_with_devices

  return call_with_devices(_plan_first_device, config, topology=topology)


def _plan_first_device(
  devices: Sequence[Any], chips: int, memory: int, config: Config
) -> list[dict[str, str]]:
  """Returns the rows of `plan` for the first device of a slice.

  Args:
    devices: The devices of the slice.
    chips: The number of chips of the slice.
    memory: The bytes of a chip.
    config: The config of the shape.
  """
  from diffjax.parallel.mesh import make_mesh

  mesh = make_mesh(MeshConfig(), devices[:1])
  # A chip can have two devices, each with half of the memory.
  return plan_rows(config, mesh, memory * chips // len(devices))


def plan_rows(
  config: Config,
  mesh: Mesh,
  memory: float,
  needed_bytes: NeededBytes = compiled_bytes,
) -> list[dict[str, str]]:
  """Returns a table row for each architecture, with the memory of each pass.

  Args:
    config: The config of the shape.
    mesh: A mesh of one device.
    memory: The bytes of the device.
    needed_bytes: Returns the bytes that a pass takes.

  Raises:
    UserError: if not even two layers fit.
  """
  layers = layers_on_device(config, mesh, memory, needed_bytes)
  rows = []
  for name, twin in _twins(config).items():
    row = {
      "architecture": name,
      "layers": f"{layers} of {config.model.num_layers}",
    }
    start = time.perf_counter()
    for kind, title in PASSES.items():
      needed = needed_bytes(with_layers(twin, layers), mesh, kind)
      row[f"{title}, GiB"] = f"{needed / 2**30:.2f}"
    seconds = time.perf_counter() - start
    row["of"] = f"{memory / 2**30:.2f}"
    row["compiled in"] = f"{seconds:.0f} s"
    rows.append(row)
  return rows


def summarise(grid_results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns a table row for each shape and pass.

  It has the tokens per second of every architecture, and their difference from
  the Transformer's in percent, here and in the paper.
  """
  rows = []
  for run in grid_results["runs"]:
    measured = run["results"]
    config = {**grid_results["config"], **run["config"]}
    layers = f"{measured['layers']} of {config['model.num_layers']}"
    for kind, title in PASSES.items():
      row = {"shape": run["variant"], "layers": layers, "": title}
      for name, label in NAMES.items():
        speed = measured["tokens_per_second"][name][kind]
        row[f"{label} (tokens/s)"] = speed
      row["DIFF − Transformer"] = _percent(measured[f"diff_{kind}"])
      paper_ratio = PAPER_RATIOS.get((run["variant"], kind))
      row["paper's"] = None
      if paper_ratio is not None:
        row["paper's"] = _percent(paper_ratio)
      row["V2 − Transformer"] = _percent(measured[f"diff_v2_{kind}"])
      rows.append(row)
  return rows


def _percent(ratio: float) -> str:
  """Returns the difference of a ratio from 1 in percent, as text."""
  return f"{ratio - 1:+.0%}".replace("-", "−")


class _FigureRow(NamedTuple):
  """A row of the figure.

  Attributes:
    variant: The shape.
    kind: The pass, a key of PASSES.
    measured: The results of `measure` for the shape.
  """

  variant: str
  kind: str
  measured: Mapping[str, Any]


def plot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the tokens per second relative to the Transformer's.

  Large markers are medians, dots are single turns, and crosses are the paper's
  ratios.
  """
  rows = []
  for run in grid_results["runs"]:
    for kind in PASSES:
      rows.append(_FigureRow(run["variant"], kind, run["results"]))

  figure = Figure((7, 1.4 + 0.35 * len(rows)), layout="constrained")
  axes = figure.subplots()
  for name in ("diff", "diff_v2"):
    style = plots.style(name)
    medians = []
    for y, row in enumerate(rows):
      medians.append(row.measured[f"{name}_{row.kind}"])
      ratios = _turn_ratios(row.measured["seconds"], name, row.kind)
      heights = [y] * len(ratios)
      axes.plot(ratios, heights, ".", color=style.color, alpha=0.3)
    axes.plot(
      medians,
      range(len(rows)),
      style.marker,
      color=style.color,
      label=style.name,
    )

  paper_ratios = []
  labels = []
  for row in rows:
    paper_ratio = PAPER_RATIOS.get((row.variant, row.kind), math.nan)
    paper_ratios.append(paper_ratio)
    shape = row.variant.replace(",", ", ").replace("=", " ")
    labels.append(f"{shape}, {PASSES[row.kind]}")
  if not np.all(np.isnan(paper_ratios)):
    axes.plot(paper_ratios, range(len(rows)), "kx", label="DIFF in the paper")
  axes.axvline(1, color="black", linewidth=0.8)
  axes.set_yticks(range(len(rows)), labels)
  axes.invert_yaxis()
  axes.set_xlabel("tokens/s over the Transformer's; dots: single turns")
  axes.legend(fontsize=8)
  return figure


def _turn_ratios(
  seconds: Mapping[str, Mapping[str, Sequence[float]]], name: str, kind: str
) -> list[float]:
  """Returns the tokens per second relative to the Transformer's, by turn."""
  ratios = []
  for baseline_seconds, own_seconds in zip(
    seconds[BASELINE][kind], seconds[name][kind], strict=True
  ):
    ratios.append(baseline_seconds / own_seconds)
  return ratios


def _table_columns() -> dict[str, str]:
  """Returns the columns of the table: their titles and keys of the results."""
  columns = {}
  for name in ("diff", "diff_v2"):
    for kind, title in PASSES.items():
      columns[f"{NAMES[name]} / Transformer, {title}"] = f"{name}_{kind}"
  return columns


LARGE_GRID = Grid(
  variants=("3b,length=2048", "3b,length=4096", "13b,length=2048"),
  baseline="3b,length=2048",
)

EXPERIMENT = Experiment(
  question="How many tokens a second does DIFF take beside the Transformer?",
  grids={
    "cpu": Grid(
      variants=("tiny,length=256", "tiny,length=2048", "125m,length=1024"),
      baseline="tiny,length=256",
    ),
    "gpu": LARGE_GRID,
    "tpu": LARGE_GRID,
  },
  metrics=_table_columns(),
  trains=False,
  measure=measure,
  plan=plan,
  summarise=summarise,
  plot=plot,
)
