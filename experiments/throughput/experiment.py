"""What DIFF costs in time beside the Transformer: the authors' Table 7 on the accelerator at hand (README.md)."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.figure

from configs import base
from diffjax.command import from_config_dict, to_config_dict
from diffjax.config import Config, UserError
from experiments.grid import Experiment, Grid

_ARCHITECTURES = {"transformer": "Transformer", "diff": "DIFF", "diff_v2": "DIFF V2"}
_PASSES = {"forward": "forward", "both": "forward + backward"}
# DIFF's tokens/s over the Transformer's in the authors' Table 7 (an H100 of 80 GB), whose percentages are of DIFF's instead
_PAPER = {
  ("3b@2k", "both"): 6635 / 7247, ("3b@2k", "forward"): 46811 / 51228, ("3b@4k", "both"): 6718 / 7491, ("3b@4k", "forward"): 44521 / 48762,
  ("13b@2k", "both"): 942 / 998, ("13b@2k", "forward"): 13653 / 14346,
}  # fmt: skip
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

  from diffjax.training.runtime import keep_freed_pages

  if os.environ.get("NPROC"):
    raise UserError("--side_by_side: runs that share a CPU's cores cannot be timed; measure one at a time")
  keep_freed_pages()
  twins = {name: from_config_dict(base.twin(to_config_dict(config), name)) for name in _ARCHITECTURES}
  limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
  layers = config.model.num_layers
  if limit:
    layers = min(layers_that_fit(layers, _USABLE * limit, functools.partial(_bytes, twin)) for twin in twins.values())
  programs = {name: compile_programs(_with_layers(twin, layers)) for name, twin in twins.items()}
  tokens, targets = batch(config)
  seconds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in _PASSES} for name in programs}
  for repetition in range(config.train.steps + 1):
    for name, program in programs.items():
      params = jax.block_until_ready(program.make())
      for kind in _PASSES:
        start = time.perf_counter()
        jax.block_until_ready(getattr(program, kind)(params, tokens, targets))
        if repetition:  # the first calls load what the others find loaded
          seconds[name][kind].append(time.perf_counter() - start)
      del params
  speed = {name: {kind: tokens.size / statistics.median(taken) for kind, taken in kinds.items()} for name, kinds in seconds.items()}
  ratios = {f"{name}_{kind}": speed[name][kind] / speed["transformer"][kind] for name in ("diff", "diff_v2") for kind in _PASSES}
  return {"layers": layers, "seconds": seconds, "tokens_per_second": speed, **ratios}


def batch(config: Config) -> tuple[Any, Any]:
  """Tokens and targets [B, T], drawn at random: one document a row."""
  import jax

  shape = (2, config.train.batch_size, config.data.length)
  return tuple(jax.random.randint(jax.random.key(config.data.seed), shape, 0, config.model.vocab_size))


def compile_programs(config: Config) -> Programs:
  """As training computes, but for the update: parameters float32, the config's compute dtype, rematerialisation and attention."""
  import jax

  make, loss, arguments = _parts(config)
  both = jax.jit(jax.value_and_grad(loss))
  return Programs(jax.jit(make), jax.jit(loss).lower(*arguments).compile(), both.lower(*arguments).compile())


def _parts(config: Config) -> tuple[Callable[[], Any], Callable[..., Any], tuple[Any, ...]]:
  """What makes parameters, the loss of (parameters, tokens, targets), and the shapes of these."""
  import jax
  import jax.numpy as jnp

  from diffjax.model.decoder import Decoder, output_embedding
  from diffjax.ops.cross_entropy import fused_cross_entropy
  from diffjax.ops.diff_attention import diff_attention
  from diffjax.training.step import compute_dtype

  attend = functools.partial(diff_attention, implementation=config.model.attention_implementation)
  model = Decoder(config.model, dtype=compute_dtype(config.model.dtype, jax.default_backend()), attention_fn=attend)
  # parameters depend on no activation
  reference = model.clone(attention_fn=functools.partial(diff_attention, implementation="reference"))

  def make():
    return reference.init(jax.random.key(config.train.seed), jnp.zeros((1, 1), jnp.int32))["params"]

  def loss(params, tokens, targets):
    hidden = model.apply({"params": params}, tokens)
    embedding = output_embedding(params).astype(hidden.dtype)
    return fused_cross_entropy(hidden, embedding, targets, jnp.ones(targets.shape, jnp.float32))[0] / targets.size

  return make, loss, (jax.eval_shape(make), *jax.eval_shape(lambda: batch(config)))


def _with_layers(config: Config, layers: int) -> Config:
  return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers))


def _bytes(config: Config, layers: int) -> float:
  """What forward + backward takes of the device's memory with so many layers, by the compiler's plan."""
  import jax

  _, loss, arguments = _parts(_with_layers(config, layers))
  plan: Any = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile().memory_analysis()
  return plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes + plan.generated_code_size_in_bytes


def layers_that_fit(layers: int, limit: float, needed: Callable[[int], float]) -> int:
  """As many of a model's layers as fit: what they need grows by the same for each.

  Args:
    layers: the model's.
    limit: bytes.
    needed: bytes by layers.

  Raises:
    UserError: if not even two do.
  """
  few, more = 2, 4  # one layer is compiled without a loop, otherwise than several
  if layers <= few:
    return layers
  least = needed(few)
  a_layer = (needed(more) - least) / (more - few)
  fitting = few + int((limit - least) // a_layer)
  if fitting < few:
    raise UserError(f"{few} layers take {least / 2**30:.1f} GiB of the device's {limit / 2**30:.1f}; make train.batch_size smaller")
  return min(layers, fitting)


def summarise(results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Tokens/s of every shape, forward and forward + backward, and how much less than the Transformer's they are."""
  rows = []
  for run in results["runs"]:
    found, variant = run["results"], run["variant"]
    whole = {**results["config"], **run["config"]}["model.num_layers"]
    for kind, words in _PASSES.items():
      speeds = {f"{label} (tokens/s)": found["tokens_per_second"][name][kind] for name, label in _ARCHITECTURES.items()}
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


def plot(results: Mapping[str, Any], path: pathlib.Path) -> None:
  """DIFF's and DIFF V2's tokens/s of every shape and pass as shares of the Transformer's, and the authors'."""
  found = {(run["variant"], kind): run["results"] for run in results["runs"] for kind in _PASSES}
  figure = matplotlib.figure.Figure((7, 1.2 + 0.35 * len(found)), layout="constrained")
  axes = figure.subplots()
  rows = range(len(found))
  for name, label in _ARCHITECTURES.items():
    if name != "transformer":
      axes.plot([each[f"{name}_{kind}"] for (_, kind), each in found.items()], rows, "o", label=label)
  if found.keys() & _PAPER.keys():
    axes.plot([_PAPER.get(key, float("nan")) for key in found], rows, "kx", label="DIFF in the paper")
  axes.axvline(1, color="black", linewidth=0.8)
  axes.set_yticks(rows, [f"{variant}, {_PASSES[kind]}" for variant, kind in found])
  axes.invert_yaxis()
  axes.set_xlabel("tokens/s over the Transformer's")
  axes.legend(fontsize=8)
  figure.savefig(path, dpi=150)


def _percent(ratio: float) -> str:
  return f"{ratio - 1:+.0%}".replace("-", "−")


_LARGE = Grid(("3b@2k", "3b@4k", "13b@2k"), "3b@2k")

EXPERIMENT = Experiment(
  question="How many tokens a second does DIFF take beside the Transformer?",
  grids={"cpu": Grid(("tiny@256", "tiny@2k", "125m@1k"), "tiny@256"), "gpu": _LARGE, "tpu": _LARGE},
  metrics={
    f"{label} / Transformer, {words}": f"{name}_{kind}"
    for name, label in _ARCHITECTURES.items()
    if name != "transformer"
    for kind, words in _PASSES.items()
  },
  trains=False,
  measure=measure,
  summarise=summarise,
  plot=plot,
)
