"""One training step: loss → gradients → update. Built apart from the loop, so that it can be compiled without running."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from diffjax.config import Config, UserError
from diffjax.model.decoder import Decoder, output_embedding
from diffjax.ops.cross_entropy import per_token_cross_entropy
from diffjax.ops.diff_attention import diff_attention
from diffjax.parallel import rules
from diffjax.parallel.mesh import put_batch, sharded_attention, sharded_cross_entropy
from diffjax.parallel.product import exchanges, uses_sparse_cores
from diffjax.training.optimizer import make_optimizer, make_schedule, skip_metrics

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
  """All that a step changes. `rng` is carried for steps that draw random numbers; today's model draws none."""

  step: jax.Array
  params: Any
  opt_state: Any
  rng: jax.Array


def make_model(config: Config, mesh: Mesh) -> Decoder:
  """The decoder in the compute dtype of the mesh's platform, its attention wrapped for the mesh."""
  attention = sharded_attention(mesh, config.model.attention_implementation)
  return Decoder(config.model, dtype=compute_dtype(config.model.dtype, mesh.devices.flat[0].platform), attention_fn=attention)


def compute_dtype(name: str, platform: str) -> Any:
  """What config.model.dtype means on a platform."""
  return {"auto": jnp.float32 if platform == "cpu" else jnp.bfloat16, "float32": jnp.float32, "bfloat16": jnp.bfloat16}[name]


def make_init(config: Config, mesh: Mesh) -> tuple[Callable[[], TrainState], TrainState]:
  """How to make the first state, and its shapes with shardings.

  Returns:
    A function without arguments that makes the state on the mesh (no device ever holds it whole), and the abstract state.
  """
  optimizer = make_optimizer(config.optimizer, config.train.steps)
  # Parameters depend on no activation: what attends does not matter, and a batch that the mesh can split is enough.
  model = make_model(config, mesh).clone(attention_fn=functools.partial(diff_attention, implementation="reference"))
  tokens = jnp.zeros((_batch_parts(mesh), mesh.shape["context"]), jnp.int32)

  def init() -> TrainState:
    init_rng, rng = jax.random.split(jax.random.key(config.train.seed))
    params = model.init(init_rng, tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), rng)

  shapes = jax.eval_shape(init)
  shardings = rules.shardings(shapes, mesh)
  with _context(mesh):
    jitted = jax.jit(init, out_shardings=shardings)

  def make() -> TrainState:
    with _context(mesh):
      return jitted()

  abstract = jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings)
  return make, abstract


def make_train_step(config: Config, mesh: Mesh, abstract_state: TrainState) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The jitted step. It donates the state it is given.

  The loss is Σ loss / Σ tokens over the whole batch, whatever the number of micro-batches and devices: each micro-batch adds the
  gradient of its sum divided by the batch's token count.

  Args:
    config: the run's config.
    mesh: of the state and the batch.
    abstract_state: the state's shapes and shardings, from `make_init`.

  Returns:
    A function (state, batch) → (state, metrics); batch holds tokens, targets, segment_ids, positions [B, T] and weights [B, T].
    Metrics are float32 scalars (nats per token where a loss), and `lambda` [L].
  """
  model, cross_entropy = make_model(config, mesh), sharded_cross_entropy(mesh)
  optimizer, schedule = make_optimizer(config.optimizer, config.train.steps), make_schedule(config.optimizer, config.train.steps)
  accumulation, z_loss, chunk = config.train.accumulation, config.train.z_loss, config.train.loss_chunk or None
  if (rows := config.train.batch_size // accumulation) % _batch_parts(mesh):
    raise UserError(
      f"config.train.batch_size = {config.train.batch_size} over config.train.accumulation = {accumulation} gives {rows} rows, which "
      f"the {_batch_parts(mesh)} parts of the batch (data × fsdp) cannot share evenly; choose a multiple of "
      f"{accumulation * _batch_parts(mesh)}"
    )
  pieces = math.lcm(2 if mesh.shape["context"] > 1 else 1, mesh.shape["tensor"]) * mesh.shape["context"]
  if config.data.length % pieces:
    raise UserError(
      f"config.data.length = {config.data.length} must be a multiple of {pieces} with config.mesh.context = {mesh.shape['context']} and "
      f"config.mesh.tensor = {mesh.shape['tensor']}: a row is cut into two pieces a context shard, and its loss over tensor shards too"
    )

  def loss_fn(params, batch, total_weight):
    hidden, variables = model.apply({"params": params}, batch["tokens"], batch["segment_ids"], batch["positions"], mutable=["metrics"])
    with jax.named_scope("loss"):
      targets, weights = batch["targets"], batch["weights"]
      objective, z_term = cross_entropy(hidden, output_embedding(params), targets, weights, z_loss=z_loss, chunk=chunk)
    metrics = {"loss": (objective - z_term) / total_weight, **_lambdas(variables)}
    if z_loss:
      metrics["z_loss"] = z_term / total_weight
    return objective / total_weight, metrics

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    total_weight = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    gradient = jax.grad(loss_fn, has_aux=True)
    if accumulation == 1:
      grads, metrics = gradient(state.params, batch, total_weight)
    else:

      def micro_step(carry, micro_batch):
        return jax.tree.map(jnp.add, carry, gradient(state.params, micro_batch, total_weight)), None

      micro_batches = jax.tree.map(lambda x: _split(x, accumulation), batch)
      zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(gradient, state.params, jax.tree.map(lambda x: x[0], micro_batches), total_weight),
      )
      (grads, metrics), _ = jax.lax.scan(micro_step, zeros, micro_batches)
      if "lambda" in metrics:
        metrics["lambda"] /= accumulation
    with jax.named_scope("optimizer"):
      updates, opt_state = optimizer.update(grads, state.opt_state, state.params, value=metrics["loss"])
      params = optax.apply_updates(state.params, updates)
    metrics |= {
      "grad_norm": optax.global_norm(grads),
      "learning_rate": schedule(state.step),
      "tokens": jnp.sum(batch["weights"]),
      **skip_metrics(state.opt_state, opt_state, config.optimizer.spike_sigmas),
    }
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics

  # The state comes out as it went in: left to the compiler, another layout would compile the second step anew.
  state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
  outs = state_shardings, NamedSharding(mesh, P())
  jitted = jax.jit(step, donate_argnums=0, out_shardings=outs, compiler_options=compiler_options(mesh))

  def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    with _context(mesh):
      return jitted(state, batch)

  run.lower = jitted.lower  # type: ignore[attr-defined]  # for ahead-of-time compilation
  return run


def lower_train_step(config: Config, mesh: Mesh) -> tuple[jax.stages.Lowered, TrainState]:
  """The step as training runs it, lowered for the devices of a mesh, which need not be there; and the abstract state."""
  _, abstract_state = make_init(config, mesh)
  step = make_train_step(config, mesh, abstract_state)
  shape, sharding = (config.train.batch_size, config.data.length), NamedSharding(mesh, P(rules.BATCH, rules.LENGTH))
  batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in ("tokens", "targets", "segment_ids", "positions")}
  batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
  with _context(mesh):
    return step.lower(abstract_state, batch), abstract_state  # type: ignore[attr-defined]


def row_losses(model: Decoder, params: Any, batch: Batch) -> dict[str, Float[Array, "B"]]:
  """What each row adds to the validation losses: nll (nats), weight, bytes, and nll and weight over the AR hits.

  Args:
    model: the decoder.
    params: its parameters.
    batch: a batch of the pipeline, with the bytes of its targets and its AR hits, float32 [B, T].
  """
  weight = batch["weights"]
  nll = jnp.where(weight > 0, token_losses(model, params, batch) * weight, 0.0)
  terms = {
    "nll": nll,
    "weight": weight,
    "bytes": batch["bytes"] * (weight > 0),
    "hit_nll": nll * batch["hits"],
    "hit_weight": weight * batch["hits"],
  }
  return jax.tree.map(lambda term: jnp.sum(term, axis=1), terms)


def token_losses(model: Decoder, params: Any, batch: Batch) -> Float[Array, "B T"]:
  """Cross-entropy of every target, nats; one of weight 0 means nothing."""
  hidden: Any = model.apply({"params": params}, batch["tokens"], batch["segment_ids"], batch["positions"])
  return per_token_cross_entropy(hidden, output_embedding(params).astype(hidden.dtype), batch["targets"])


def make_eval_step(config: Config, mesh: Mesh) -> Callable[[Any, Batch], Metrics]:
  """The jitted evaluation of one batch of this process's rows, for `evals.validation.losses`.

  Returns:
    A function (params, batch) → the sums of `row_losses` over the batch.
  """
  model = make_model(config, mesh)

  @jax.jit
  def step(params, batch):
    return jax.tree.map(jnp.sum, row_losses(model, params, batch))

  def run(params, batch):
    with _context(mesh):
      return step(params, put_batch(batch, mesh))

  return run


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
  """On TPU: never to cut a product into a loop over a parameter's or a gradient's shards (a windowed einsum, for operands of at least so
  many MiB), and to let gradients travel while it computes (parallel/product.py). On v5p and v6e the sparse cores gather parameters and sum
  gradients meanwhile, along one, two or three dimensions of the torus; v5e has none, and overlaps gathers by itself. On v6e a product may
  take 96 of the 128 MiB of VMEM for its tiles, more than by default.

  Not xla_tpu_enable_async_collective_fusion, which newer compilers refuse but on v5e, for fear of wrong results.
  """
  device = mesh.devices.flat[0]
  if device.platform != "tpu":
    return None
  options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
  if exchanges(mesh):
    options["xla_tpu_enable_async_all_to_all"] = "true"
  if uses_sparse_cores(mesh):
    offloaded = ("all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter", "all_reduce")
    options |= {f"xla_tpu_enable_sparse_core_collective_offload_{collective}": "true" for collective in offloaded}
  if device.device_kind == "TPU v6 lite":
    options["xla_tpu_scoped_vmem_limit_kib"] = str(96 * 1024)
  return options


def _batch_parts(mesh: Mesh) -> int:
  """Into how many parts the mesh splits a batch."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def _context(mesh: Mesh):
  """The mesh and the model's activation names, for tracing."""
  stack = contextlib.ExitStack()
  stack.enter_context(jax.set_mesh(mesh))
  stack.enter_context(nn.logical_axis_rules(rules.ACTIVATIONS))
  return stack


def _split(x: jax.Array, parts: int) -> jax.Array:
  """[B, …] → [parts, B/parts, …]; strided, so that every device keeps its own rows."""
  return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)


def _lambdas(variables: dict[str, Any]) -> Metrics:
  """λ of every layer [L], averaged over tokens and heads where it depends on them; nothing for the baseline."""
  layers = variables.get("metrics", {}).get("layers", {})
  return {"lambda": layers["attention"]["lambda"][0]} if layers else {}
