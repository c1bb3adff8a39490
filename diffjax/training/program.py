"""The program of a run on a mesh: its model, first state, training step and evaluation, each made once.

The loop, ahead-of-time compilation, experiments and benchmarks take the same `Program`, so that what is planned or timed is what trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.config import Config, ModelConfig, UserError
from diffjax.model.attention import CONTEXT_PARALLELISM
from diffjax.model.decoder import Decoder
from diffjax.model.shapes import parameter_shapes
from diffjax.model.stacks import check_support
from diffjax.parallel import rules
from diffjax.parallel.mesh import (
  put_batch,
  sharded_attention,
  sharded_cross_entropy,
)
from diffjax.parallel.product import uses_exchange, uses_sparse_cores
from diffjax.training.optimizer import make_optimizer, make_schedule
from diffjax.training.step import (
  Batch,
  Metrics,
  TrainState,
  make_init,
  make_loss,
  make_step,
)
from diffjax.training.validation import row_losses


@dataclasses.dataclass(frozen=True)
class Program:
  """The computations of a run on a mesh. `build` makes it; each part is compiled when it is first called.

  Attributes:
    config: the run's config.
    mesh: of the state and the batches; its devices need not be there, as long as nothing is called.
    model: the decoder in the compute dtype of the mesh's platform, its attention wrapped for the mesh.
    abstract_state: shapes and shardings of the state.
    jitted_init: () → state, inside the mesh's context.
    jitted_train_step: (state, batch) → (state, metrics), likewise.
    jitted_eval_step: (params, batch on the devices) → sums, likewise.
  """

  config: Config
  mesh: Mesh
  model: Decoder
  abstract_state: TrainState
  jitted_init: Any
  jitted_train_step: Any
  jitted_eval_step: Any

  def init(self) -> TrainState:
    """Makes the first state on the mesh; no device ever holds it whole."""
    with _context(self.mesh):
      return self.jitted_init()

  def train_step(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, Metrics]:
    """Takes a step. It donates the state that it is given.

    The loss is Σ loss / Σ tokens over the whole batch, whatever the number of micro-batches and devices.

    Args:
      state: the state before the step.
      batch: tokens, targets, segment_ids, positions and weights [B, T], on the mesh (`parallel.mesh.put_batch`).

    Returns:
      The state after it, and its metrics: float32 scalars (nats per token where a loss), and `lambda` [L].
    """
    with _context(self.mesh):
      return self.jitted_train_step(state, batch)

  def eval_step(self, params: Any, batch: dict[str, Any]) -> Metrics:
    """Adds up `validation.row_losses` over a batch.

    Args:
      params: the model's parameters.
      batch: this process's rows, on the host, with the bytes of their targets and their AR hits.
    """
    with _context(self.mesh):
      return self.jitted_eval_step(params, put_batch(batch, self.mesh))

  def lower_train_step(self) -> jax.stages.Lowered:
    """The training step, lowered for the mesh's devices, which need not be there."""
    with _context(self.mesh):
      return self.trace_train_step().lower()

  def trace_train_step(self) -> jax.stages.Traced:
    """Traces the training step.

    Raises:
      ValueError: if the implementation of attention cannot run on the mesh.
    """
    shape, sharding = (
      (self.config.train.batch_size, self.config.data.length),
      NamedSharding(self.mesh, P(rules.BATCH, rules.LENGTH)),
    )
    batch = {
      name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
      for name in ("tokens", "targets", "segment_ids", "positions")
    }
    batch["weights"] = jax.ShapeDtypeStruct(
      shape, jnp.float32, sharding=sharding
    )
    with _context(self.mesh):
      return self.jitted_train_step.trace(self.abstract_state, batch)


def build(config: Config, mesh: Mesh) -> Program:
  """Makes a run's program. Nothing is compiled, and no array is made.

  Args:
    config: the run's config.
    mesh: of `parallel.mesh.make_mesh`; its devices need not be there.

  Raises:
    UserError: if the model, the batch or the rows cannot be split over the mesh, or the model is not causal; if the attention variant does
      not support the mesh, or has parameters that it does not declare.
  """
  if not config.model.causal:
    raise UserError(
      "config.model.causal = False: every token would see the next one, which training predicts"
    )
  if mesh.shape["context"] > 1:
    check_support(
      config.model,
      CONTEXT_PARALLELISM,
      f"config.mesh.context = {mesh.shape['context']}",
    )
  attention = sharded_attention(mesh, config.model.attention_implementation)
  model = Decoder(
    config.model,
    dtype=compute_dtype(config.model.dtype, mesh.devices.flat[0].platform),
    attention_fn=attention,
  )
  schedule = make_schedule(config.optimizer, config.train.steps)
  optimizer = make_optimizer(config.optimizer, schedule)
  init = make_init(
    config, model, optimizer, (_batch_parts(mesh), mesh.shape["context"])
  )
  shapes = jax.eval_shape(init)
  _check_parameters(config.model, shapes.params)
  shardings = rules.shardings(shapes, mesh)
  abstract = jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    shapes,
    shardings,
  )
  _check_parts(config, mesh)
  step = make_step(
    config,
    make_loss(config, model, sharded_cross_entropy(mesh)),
    optimizer,
    schedule,
  )
  with _context(mesh):
    jitted_init = jax.jit(init, out_shardings=shardings)
  # The state comes out as it went in: left to the compiler, another layout would compile the second step anew.
  outs = shardings, NamedSharding(mesh, P())
  jitted_step = jax.jit(
    step,
    donate_argnums=0,
    out_shardings=outs,
    compiler_options=compiler_options(mesh),
  )

  def evaluate(params, batch):
    return jax.tree.map(jnp.sum, row_losses(model, params, batch))

  return Program(
    config, mesh, model, abstract, jitted_init, jitted_step, jax.jit(evaluate)
  )


def _check_parameters(config: ModelConfig, params: Any) -> None:
  """Checks that a decoder has the parameters that the table says.

  Sharding, weight decay, FLOPs and conversions follow from the table. The
  layers make the parameters, so an attention variant could contradict it.

  Args:
    config: the decoder's config.
    params: the shapes of its parameters.

  Raises:
    UserError: if a parameter is missing, undeclared or of another shape.
  """
  declared = parameter_shapes(config)
  made = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = path[-1].key
    stack = path[0].key
    if len(path) > 1 and stack != "layers":
      name = f"{stack}/{name}"
    if name in made:
      raise UserError(
        f"two parameters are named {name!r}; give them different names"
      )
    made[name] = leaf.shape
  for name in sorted(declared.keys() | made.keys()):
    if name not in declared:
      raise UserError(
        f"parameter {name!r} is made but not declared: add it to the"
        " extra_parameters of the attention variant. They must also have the"
        " parameters of its parent class"
      )
    if name not in made:
      raise UserError(
        f"parameter {name!r} is in extra_parameters, but the layer does not make"
        " it"
      )
    if declared[name] != made[name]:
      raise UserError(
        f"parameter {name!r} has the shape {made[name]}, but its axes in"
        f" extra_parameters give {declared[name]}. The first axis is L, the"
        " layers"
      )


def compute_dtype(name: str, platform: str) -> Any:
  """The dtype that config.model.dtype means on a platform."""
  return {
    "auto": jnp.float32 if platform == "cpu" else jnp.bfloat16,
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
  }[name]


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
  """The training step's own compiler options; None where the compiler's defaults serve, as on CPU and GPU.

  On TPU no product may become a loop over a parameter's or a gradient's shards (a windowed einsum, for operands of at least so many MiB),
  and gradients travel while the chip computes (parallel/product.py). On v5p and v6e the sparse cores gather parameters and sum gradients
  meanwhile, along one, two or three dimensions of the torus; v5e has none, and overlaps gathers by itself. On v6e a product may take 96 of
  the 128 MiB of VMEM for its tiles, more than by default.

  xla_tpu_enable_async_collective_fusion stays off: newer compilers accept it on v5e alone, and say that elsewhere results may be wrong.
  """
  device = mesh.devices.flat[0]
  if device.platform != "tpu":
    return None
  options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
  if uses_exchange(mesh):
    options["xla_tpu_enable_async_all_to_all"] = "true"
  if uses_sparse_cores(mesh):
    offloaded = (
      "all_gather",
      "2d_all_gather",
      "3d_all_gather",
      "reduce_scatter",
      "nd_reduce_scatter",
      "all_reduce",
    )
    options |= {
      f"xla_tpu_enable_sparse_core_collective_offload_{collective}": "true"
      for collective in offloaded
    }
  if device.device_kind == "TPU v6 lite":
    options["xla_tpu_scoped_vmem_limit_kib"] = str(96 * 1024)
  return options


def _check_parts(config: Config, mesh: Mesh) -> None:
  """Raises UserError if the mesh cannot share a micro-batch or cut a row."""
  parts, accumulation = _batch_parts(mesh), config.train.accumulation
  if (rows := config.train.batch_size // accumulation) % parts:
    raise UserError(
      f"config.train.batch_size = {config.train.batch_size} over config.train.accumulation = {accumulation} gives {rows} rows, which "
      f"the {parts} parts of the batch (data × fsdp) cannot share evenly; choose a multiple of {accumulation * parts}"
    )
  pieces = (
    math.lcm(2 if mesh.shape["context"] > 1 else 1, mesh.shape["tensor"])
    * mesh.shape["context"]
  )
  if config.data.length % pieces:
    raise UserError(
      f"config.data.length = {config.data.length} must be a multiple of {pieces} with config.mesh.context = {mesh.shape['context']} and "
      f"config.mesh.tensor = {mesh.shape['tensor']}: a row is cut into two pieces a context shard, and its loss over tensor shards too"
    )


def _batch_parts(mesh: Mesh) -> int:
  """The number of parts that the mesh splits a batch into."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


@contextlib.contextmanager
def _context(mesh: Mesh):
  """The mesh and the model's activation names, for tracing."""
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules.ACTIVATIONS):
    yield
