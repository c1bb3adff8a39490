"""The time of DIFF beside the Transformer's: the authors' Table 7 on the accelerator at hand (README.md)."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

_ARCHITECTURES = {
  "transformer": "Transformer",
  "diff": "DIFF",
  "diff_v2": "DIFF V2",
}
_PASSES = {"forward": "forward", "both": "forward + backward"}
# DIFF's tokens/s over the Transformer's in the authors' Table 7 (an H100 of 80 GB), whose percentages are of DIFF's instead
_PAPER = {
  ("3b,length=2048", "both"): 6635 / 7247,
  ("3b,length=2048", "forward"): 46811 / 51228,
  ("3b,length=4096", "both"): 6718 / 7491,
  ("3b,length=4096", "forward"): 44521 / 48762,
  ("13b,length=2048", "both"): 942 / 998,
  ("13b,length=2048", "forward"): 13653 / 14346,
}
_USABLE = 0.9  # of the device's memory: the rest is lost between its arrays


@dataclasses.dataclass(frozen=True)
class Programs:
  """Compiled for one device: parameters from nothing, the loss of a batch, and the loss with its gradient."""

  make: Callable[[], Any]
  forward: Callable[..., Any]
  both: Callable[..., Any]


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Seconds of each architecture's calls, taken in turn, and tokens/s by their medians.

  Each turn makes its parameters anew, so that only one architecture's are in memory.
  """
  import jax

  from diffjax.host.runtime import keep_freed_memory
  from diffjax.parallel.mesh import make_mesh

  if os.environ.get("NPROC"):
    raise UserError(
      "--side_by_side: runs that share a CPU's cores cannot be timed; measure one at a time"
    )
  keep_freed_memory()
  device = jax.local_devices()[0]
  mesh = make_mesh(MeshConfig(), [device])
  layers = _layers(
    config, mesh, (device.memory_stats() or {}).get("bytes_limit")
  )
  programs = {
    name: compile_programs(_with_layers(twin, layers), mesh)
    for name, twin in _twins(config).items()
  }
  tokens, targets = batch(config)
  seconds: dict[str, dict[str, list[float]]] = {
    name: {kind: [] for kind in _PASSES} for name in programs
  }
  for repetition in range(config.train.steps + 1):
    for name, program in programs.items():
      params = jax.block_until_ready(program.make())
      for kind in _PASSES:
        start = time.perf_counter()
        jax.block_until_ready(getattr(program, kind)(params, tokens, targets))
        if repetition:  # the first calls load what the others find loaded
          seconds[name][kind].append(time.perf_counter() - start)
      del params
  speed = {
    name: {
      kind: tokens.size / statistics.median(taken)
      for kind, taken in kinds.items()
    }
    for name, kinds in seconds.items()
  }
  ratios = {
    f"{name}_{kind}": speed[name][kind] / speed["transformer"][kind]
    for name in ("diff", "diff_v2")
    for kind in _PASSES
  }
  return {
    "layers": layers,
    "seconds": seconds,
    "tokens_per_second": speed,
    **ratios,
  }


def batch(config: Config) -> tuple[Any, Any]:
  """Tokens and targets [B, T], drawn at random: one document a row."""
  import jax

  shape = (2, config.train.batch_size, config.data.length)
  return tuple(
    jax.random.randint(
      jax.random.key(config.data.seed), shape, 0, config.model.vocab_size
    )
  )


def compile_programs(config: Config, mesh: Mesh) -> Programs:
  """Compiles the programs, which compute as training does: parameters in float32, the config's compute dtype, remat and attention.

  Args:
    config: the run's.
    mesh: of one device, which need not be there.
  """
  import jax

  return Programs(
    jax.jit(_parts(config, mesh)[0]),
    *(_compile(config, mesh, kind) for kind in _PASSES),
  )


def _compile(config: Config, mesh: Mesh, kind: str) -> Any:
  """The program of a pass, one of _PASSES."""
  import jax

  _, loss, arguments = _parts(config, mesh)
  with jax.set_mesh(mesh):
    return (
      jax.jit(loss if kind == "forward" else jax.value_and_grad(loss))
      .lower(*arguments)
      .compile()
    )


def _parts(
  config: Config, mesh: Mesh
) -> tuple[Callable[[], Any], Callable[..., Any], tuple[Any, ...]]:
  """The function that makes parameters, the loss of (parameters, tokens, targets), and the shapes of these."""
  import jax
  import jax.numpy as jnp

  from diffjax.model.decoder import output_embedding
  from diffjax.ops.cross_entropy import fused_cross_entropy
  from diffjax.training.program import build
  from diffjax.training.step import init_params

  model = build(config, mesh).model

  def make():
    return init_params(model, jax.random.key(config.train.seed))

  def loss(params, tokens, targets):
    hidden = model.apply({"params": params}, tokens)
    embedding = output_embedding(params).astype(hidden.dtype)
    return (
      fused_cross_entropy(
        hidden, embedding, targets, jnp.ones(targets.shape, jnp.float32)
      )[0]
      / targets.size
    )

  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  shapes = (jax.eval_shape(make), *jax.eval_shape(lambda: batch(config)))
  return (
    make,
    loss,
    jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
      shapes,
    ),
  )


def _twins(config: Config) -> dict[str, Config]:
  """Each architecture's config of this size."""
  return {
    name: from_config_dict(base.twin(to_config_dict(config), name))
    for name in _ARCHITECTURES
  }


def _with_layers(config: Config, layers: int) -> Config:
  return dataclasses.replace(
    config, model=dataclasses.replace(config.model, num_layers=layers)
  )


def _layers(config: Config, mesh: Mesh, memory: float | None) -> int:
  """The number of layers that all three get on a device of so many bytes; all layers where the bytes are not known."""
  layers = config.model.num_layers
  if memory:
    layers = min(
      layers_that_fit(
        layers, _USABLE * memory, functools.partial(_bytes, twin, mesh)
      )
      for twin in _twins(config).values()
    )
  return layers


def _bytes(config: Config, mesh: Mesh, layers: int) -> float:
  """Bytes of the device's memory that forward + backward takes with so many layers; infinite where the compiler refuses."""
  import jax

  try:
    return _planned(_compile(_with_layers(config, layers), mesh, "both"))
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return math.inf


def _planned(program: Any) -> float:
  """Bytes that a program takes of the device's memory, by the compiler's plan."""
  plan = program.memory_analysis()
  return (
    plan.argument_size_in_bytes
    + plan.output_size_in_bytes
    + plan.temp_size_in_bytes
    + plan.generated_code_size_in_bytes
  )


def layers_that_fit(
  layers: int, limit: float, needed: Callable[[int], float]
) -> int:
  """The largest number of a model's layers that fits. Each layer needs the same memory.

  Args:
    layers: the model's.
    limit: bytes.
    needed: bytes by layers, infinite where they are certainly too many.

  Raises:
    UserError: if not even two do.
  """
  few = 2  # one layer is compiled without a loop, otherwise than several
  if layers <= few:
    return layers
  least = needed(few)
  if least > limit:
    raise UserError(
      f"{few} layers take more than the {limit / 2**30:.1f} GiB of the device that can be used; make train.batch_size smaller"
    )
  return min(layers, few + int((limit - least) // (needed(few + 1) - least)))


def plan(config: Config, topology: str) -> list[dict[str, str]]:
  """The programs that `measure` would compile, for one device of TPUs that are not there: a row an architecture.

  Raises:
    UserError: if not even two layers fit; and what `diffjax.compiled.plan.call_with_devices` raises.
  """
  from diffjax.compiled.plan import call_with_devices

  return call_with_devices(_plan, config, topology=topology)


def _plan(
  devices: Sequence[Any], chips: int, memory: int, config: Config
) -> list[dict[str, str]]:
  from diffjax.parallel.mesh import make_mesh

  mesh, memory = (
    make_mesh(MeshConfig(), devices[:1]),
    memory * chips // len(devices),
  )
  layers, rows = _layers(config, mesh, memory), []
  for name, twin in _twins(config).items():
    start = time.perf_counter()
    programs = compile_programs(_with_layers(twin, layers), mesh)
    sizes = {
      f"{words}, GiB": f"{_planned(getattr(programs, kind)) / 2**30:.2f}"
      for kind, words in _PASSES.items()
    }
    seconds = f"{time.perf_counter() - start:.0f} s"
    rows.append(
      {
        "architecture": name,
        "layers": f"{layers} of {config.model.num_layers}",
        **sizes,
        "of": f"{memory / 2**30:.2f}",
        "compiled in": seconds,
      }
    )
  return rows


def summarise(results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Tokens/s of every shape, forward and forward + backward, and how much less than the Transformer's they are."""
  rows = []
  for run in results["runs"]:
    found, variant = run["results"], run["variant"]
    whole = {**results["config"], **run["config"]}["model.num_layers"]
    for kind, words in _PASSES.items():
      speeds = {
        f"{label} (tokens/s)": found["tokens_per_second"][name][kind]
        for name, label in _ARCHITECTURES.items()
      }
      paper = _PAPER.get((variant, kind))
      rows.append(
        {
          "shape": variant,
          "layers": f"{found['layers']} of {whole}",
          "": words,
          **speeds,
          "DIFF − Transformer": _percent(found[f"diff_{kind}"]),
          "paper's": paper and _percent(paper),
          "V2 − Transformer": _percent(found[f"diff_v2_{kind}"]),
        }
      )
  return rows


def plot(results: Mapping[str, Any]) -> Figure:
  """Draws DIFF's and DIFF V2's tokens/s of every shape and pass as shares of the Transformer's: medians, single turns, and the authors'."""
  found = {
    (run["variant"], kind): run["results"]
    for run in results["runs"]
    for kind in _PASSES
  }
  figure = Figure((7, 1.4 + 0.35 * len(found)), layout="constrained")
  axes = figure.subplots()
  rows = range(len(found))
  for name in (name for name in _ARCHITECTURES if name != "transformer"):
    style = plots.style(name)
    for row, ((_, kind), each) in zip(rows, found.items(), strict=True):
      taken, of = (
        each["seconds"][timed][kind] for timed in (name, "transformer")
      )
      axes.plot(
        [theirs / ours for ours, theirs in zip(taken, of, strict=True)],
        [row] * len(of),
        ".",
        color=style.color,
        alpha=0.3,
      )
    medians = [each[f"{name}_{kind}"] for (_, kind), each in found.items()]
    axes.plot(medians, rows, style.marker, color=style.color, label=style.name)
  if found.keys() & _PAPER.keys():
    axes.plot(
      [_PAPER.get(key, float("nan")) for key in found],
      rows,
      "kx",
      label="DIFF in the paper",
    )
  axes.axvline(1, color="black", linewidth=0.8)
  axes.set_yticks(
    rows,
    [
      f"{variant.replace(',', ', ').replace('=', ' ')}, {_PASSES[kind]}"
      for variant, kind in found
    ],
  )
  axes.invert_yaxis()
  axes.set_xlabel("tokens/s over the Transformer's; dots: single turns")
  axes.legend(fontsize=8)
  return figure


def _percent(ratio: float) -> str:
  return f"{ratio - 1:+.0%}".replace("-", "−")


_LARGE = Grid(
  ("3b,length=2048", "3b,length=4096", "13b,length=2048"), "3b,length=2048"
)

EXPERIMENT = Experiment(
  question="How many tokens a second does DIFF take beside the Transformer?",
  grids={
    "cpu": Grid(
      ("tiny,length=256", "tiny,length=2048", "125m,length=1024"),
      "tiny,length=256",
    ),
    "gpu": _LARGE,
    "tpu": _LARGE,
  },
  metrics={
    f"{label} / Transformer, {words}": f"{name}_{kind}"
    for name, label in _ARCHITECTURES.items()
    if name != "transformer"
    for kind, words in _PASSES.items()
  },
  trains=False,
  measure=measure,
  plan=plan,
  summarise=summarise,
  plot=plot,
)
