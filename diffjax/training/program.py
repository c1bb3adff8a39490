"""The compiled functions of a run: initial state, training step, evaluation.

The loop, ahead-of-time compilation, experiments and benchmarks use the same
`Program`. So a plan or a benchmark is about the step that trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

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
  num_row_blocks,
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

# Operations that the sparse cores of a TPU can do.
_SPARSE_CORE_COLLECTIVES = (
  "all_gather",
  "2d_all_gather",
  "3d_all_gather",
  "reduce_scatter",
  "nd_reduce_scatter",
  "all_reduce",
)

# VMEM of a TPU v6e that a product may use for its tiles, in KiB. The chip has
# 128 MiB, and the compiler's default is less than this.
_V6E_SCOPED_VMEM_KIB = 96 * 1024

# A threshold for sizes of arrays, in MiB, which no array reaches.
_NEVER_MIB = 1_000_000


class JittedFunctions(NamedTuple):
  """The jitted functions of a program, to be called in its mesh's context.

  Attributes:
    init: () → state.
    train_step: (state, batch) → (state, metrics).
    eval_step: (params, batch) → sums.
  """

  init: jax.stages.Wrapped
  train_step: jax.stages.Wrapped
  eval_step: jax.stages.Wrapped


@dataclasses.dataclass(frozen=True)
class Program:
  """The computations of a run on a mesh. `build` returns one.

  Each function is compiled when it is first called.

  Attributes:
    config: the run's config.
    mesh: the devices of the state and the batches. They need not exist if the
      program is only traced or lowered.
    model: the decoder in the compute dtype of the mesh's platform. Its
      attention is wrapped for the mesh.
    abstract_state: shapes and shardings of the state.
  """

  config: Config
  mesh: Mesh
  model: Decoder
  abstract_state: TrainState
  _jitted: JittedFunctions

  def init(self) -> TrainState:
    """Returns the initial state, sharded over the mesh.

    No device ever holds the whole state.
    """
    with _context(self.mesh):
      return self._jitted.init()

  def train_step(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, Metrics]:
    """Takes a training step. The state is donated, so it cannot be used again.

    The loss is Σ loss / Σ tokens over the whole batch. It does not depend on
    the number of micro-batches and devices.

    Args:
      state: the state before the step.
      batch: tokens, targets, segment_ids, positions and weights [B, T] on the
        mesh, from `parallel.mesh.put_batch`.

    Returns:
      The state after the step, and the step's metrics. These are float32
      scalars, and one value per layer [L] for metrics such as "lambda". Losses
      are in nats per token.
    """
    with _context(self.mesh):
      return self._jitted.train_step(state, batch)

  def eval_step(self, params: Any, batch: Batch) -> Metrics:
    """Returns the sums of `validation.row_losses` over a batch.

    Args:
      params: the model's parameters.
      batch: a batch of `validation.with_hits` on the mesh, from
        `parallel.mesh.put_batch`.
    """
    with _context(self.mesh):
      return self._jitted.eval_step(params, batch)

  def lower_train_step(self) -> jax.stages.Lowered:
    """Returns the training step, lowered for the mesh's devices.

    The devices need not exist, so that a step can be compiled ahead of time.
    """
    with _context(self.mesh):
      return self.trace_train_step().lower()

  def trace_train_step(self) -> jax.stages.Traced:
    """Returns the training step as a jaxpr, traced without arrays.

    Raises:
      ValueError: if the implementation of attention cannot run on the mesh.
    """
    shape = (self.config.train.batch_size, self.config.data.length)
    sharding = NamedSharding(self.mesh, P(rules.BATCH, rules.LENGTH))
    integers = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    batch = {
      "tokens": integers,
      "targets": integers,
      "segment_ids": integers,
      "positions": integers,
      "weights": weights,
    }
    with _context(self.mesh):
      return self._jitted.train_step.trace(self.abstract_state, batch)


def build(config: Config, mesh: Mesh) -> Program:
  """Checks that a config fits a mesh, and returns the run's program.

  Compiles nothing and makes no arrays.

  Args:
    config: the run's config.
    mesh: a mesh from `parallel.mesh.make_mesh`. Its devices need not exist.

  Raises:
    UserError: if the model, the batch or the rows cannot be split over the
      mesh, if the model is not causal, or if the attention variant does not
      support the mesh or has parameters that it does not declare.
  """
  _check_model(config, mesh)
  model = Decoder(
    config.model,
    dtype=compute_dtype(config.model.dtype, mesh.devices.flat[0].platform),
    attention_fn=sharded_attention(mesh, config.model.attention_implementation),
  )
  schedule = make_schedule(config.optimizer, config.train.steps)
  optimizer = make_optimizer(config.optimizer, schedule)

  # The initial state. Parameters do not depend on the batch, so it is made with
  # the smallest batch that the mesh can split.
  init_shape = (num_row_blocks(mesh), mesh.shape["context"])
  init = make_init(config, model, optimizer, init_shape)
  state_shapes = jax.eval_shape(init)
  _check_parameters(config.model, state_shapes.params)
  state_shardings = rules.shardings(state_shapes, mesh)
  abstract_state = jax.tree.map(_with_sharding, state_shapes, state_shardings)
  with _context(mesh):
    jitted_init = jax.jit(init, out_shardings=state_shardings)

  # The training step.
  _check_split(config, mesh)
  loss = make_loss(config, model, sharded_cross_entropy(mesh))
  step = make_step(config, loss, optimizer, schedule)
  replicated = NamedSharding(mesh, P())
  jitted_step = jax.jit(
    step,
    donate_argnums=0,
    # The new state must have the layout of the old one. With another layout,
    # the second step would be compiled again.
    out_shardings=(state_shardings, replicated),
    compiler_options=compiler_options(mesh),
  )

  # The evaluation.
  def evaluate(params: Any, batch: Batch) -> Metrics:
    return jax.tree.map(jnp.sum, row_losses(model, params, batch))

  jitted = JittedFunctions(jitted_init, jitted_step, jax.jit(evaluate))
  return Program(config, mesh, model, abstract_state, jitted)


def _with_sharding(
  leaf: jax.ShapeDtypeStruct, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
  """Returns a shape with a sharding."""
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_model(config: Config, mesh: Mesh) -> None:
  """Raises UserError if the model cannot be trained on the mesh."""
  if not config.model.causal:
    raise UserError(
      "config.model.causal = False: every token would see the next one, which"
      " training predicts; set it to True"
    )
  context = mesh.shape["context"]
  if context > 1:
    check_support(
      config.model, CONTEXT_PARALLELISM, f"config.mesh.context = {context}"
    )


def _check_parameters(config: ModelConfig, params: Any) -> None:
  """Checks that a decoder has the parameters of the table in parameters.py.

  Sharding, weight decay, FLOPs and conversions rely on the table. The layers
  make the parameters, so the code of an attention variant could contradict it.

  Args:
    config: the decoder's config.
    params: the shapes of its parameters.

  Raises:
    UserError: if a parameter is missing, undeclared or of another shape.
  """
  declared = parameter_shapes(config)
  actual = _shapes_by_name(params)
  for name in sorted(declared.keys() | actual.keys()):
    if name not in declared:
      raise UserError(
        f"parameter {name!r} is made but not declared: add it to the"
        " extra_parameters of the attention variant. They must also have the"
        " parameters of its parent class"
      )
    if name not in actual:
      raise UserError(
        f"parameter {name!r} is in extra_parameters, but the layer does not"
        " make it"
      )
    if declared[name] != actual[name]:
      raise UserError(
        f"parameter {name!r} has the shape {actual[name]}, but its axes in"
        f" extra_parameters give {declared[name]}. The first axis is L, the"
        " layers"
      )


def _shapes_by_name(params: Any) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a decoder's parameters, named as in the table.

  A parameter has the last key of its path as its name. In a stack other than
  "layers", the name of the stack comes first.

  Example: params["plain_layers"]["attention"]["query"] → "plain_layers/query"

  Raises:
    UserError: if two parameters have the same name.
  """
  shapes = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = path[-1].key
    stack = path[0].key
    is_in_stack = len(path) > 1
    if is_in_stack and stack != "layers":
      name = f"{stack}/{name}"
    if name in shapes:
      raise UserError(
        f"two parameters are named {name!r}; give them different names"
      )
    shapes[name] = leaf.shape
  return shapes


def _check_split(config: Config, mesh: Mesh) -> None:
  """Raises UserError if the mesh cannot split a micro-batch or a row."""
  # The data and fsdp axes split the rows of a micro-batch into row blocks.
  batch_size = config.train.batch_size
  accumulation = config.train.accumulation
  num_blocks = num_row_blocks(mesh)
  micro_batch_size = batch_size // accumulation
  if micro_batch_size % num_blocks != 0:
    raise UserError(
      f"config.train.batch_size = {batch_size} over config.train.accumulation ="
      f" {accumulation} gives {micro_batch_size} rows, which the {num_blocks}"
      " parts of the batch (data × fsdp) cannot share evenly; choose a multiple"
      f" of {accumulation * num_blocks}"
    )

  # Late queries of a causal row see more keys than early ones. So each device
  # along the context axis gets an early and a late piece of the row. The loss
  # also splits these tokens over the tensor axis.
  context = mesh.shape["context"]
  tensor = mesh.shape["tensor"]
  pieces_per_shard = 2 if context > 1 else 1
  divisor = math.lcm(pieces_per_shard, tensor) * context
  if config.data.length % divisor != 0:
    raise UserError(
      f"config.data.length = {config.data.length} must be a multiple of"
      f" {divisor} with config.mesh.context = {context} and"
      f" config.mesh.tensor = {tensor}: a row is cut into two pieces a context"
      " shard, and its loss over tensor shards too"
    )


def compute_dtype(name: str, platform: str) -> Any:
  """Returns the dtype of activations.

  Args:
    name: `config.model.dtype`: "float32", "bfloat16", or "auto", which is
      float32 on CPU and bfloat16 on accelerators.
    platform: the platform of the devices, such as "tpu".
  """
  if name == "auto":
    return jnp.float32 if platform == "cpu" else jnp.bfloat16
  return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[name]


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
  """Returns XLA's options for the training step on TPU, or None elsewhere.

  With them, a TPU communicates while it computes. parallel/product.py describes
  how parameters are gathered and gradients are summed.
  """
  device = mesh.devices.flat[0]
  if device.platform != "tpu":
    return None

  # XLA turns products with arrays above this size into loops over the shards of
  # a parameter or a gradient (windowed einsums). No product should become one.
  options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": str(_NEVER_MIB)}

  # Gradients that are summed by an all-to-all are sent during computation.
  if uses_exchange(mesh):
    options["xla_tpu_enable_async_all_to_all"] = "true"

  # On v5p and v6e, the sparse cores gather parameters and sum gradients during
  # computation, along one, two or three dimensions of the torus. v5e has no
  # sparse cores, and its compiler overlaps gathers without an option.
  if uses_sparse_cores(mesh):
    for collective in _SPARSE_CORE_COLLECTIVES:
      prefix = "xla_tpu_enable_sparse_core_collective_offload"
      options[f"{prefix}_{collective}"] = "true"

  # On v6e, a product may use more VMEM for its tiles than by default.
  if device.device_kind == "TPU v6 lite":
    options["xla_tpu_scoped_vmem_limit_kib"] = str(_V6E_SCOPED_VMEM_KIB)

  # xla_tpu_enable_async_collective_fusion stays off. Newer compilers accept it
  # only on v5e, and say that results may be wrong elsewhere.
  return options


@contextlib.contextmanager
def _context(mesh: Mesh) -> Iterator[None]:
  """Sets the mesh, and how it splits activations, while the model is traced."""
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules.ACTIVATIONS):
    yield
