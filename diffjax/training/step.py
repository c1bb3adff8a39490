"""One training step: loss → gradients → update. These are functions to be traced; program.py compiles them for a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from diffjax.config import Config
from diffjax.model.decoder import Decoder, output_embedding
from diffjax.ops.diff_attention import diff_attention
from diffjax.training.optimizer import skip_metrics, trained_part, with_frozen

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
# (parameters, batch, sum of the whole batch's weights) → objective, metrics.
Loss = Callable[[Any, Batch, jax.Array], tuple[jax.Array, Metrics]]


@flax.struct.dataclass
class TrainState:
  """All that a step changes. `rng` draws nothing in today's model; it stays since every checkpoint holds it."""

  step: jax.Array
  params: Any
  opt_state: Any
  rng: jax.Array


def init_params(
  model: Decoder, key: jax.Array, shape: tuple[int, int] = (1, 1)
) -> Any:
  """The first parameters. They depend on no activation, so that neither the tokens nor the implementation of attention matter.

  Args:
    model: the decoder.
    key: of the draws.
    shape: rows and tokens of a batch that the mesh can split.
  """
  model = model.clone(
    attention_fn=functools.partial(diff_attention, implementation="reference")
  )
  return model.init(key, jnp.zeros(shape, jnp.int32))["params"]


def make_init(
  config: Config,
  model: Decoder,
  optimizer: optax.GradientTransformationExtraArgs,
  shape: tuple[int, int],
) -> Callable[[], TrainState]:
  """The function that makes the first state; `shape` is as in `init_params`."""

  def init() -> TrainState:
    init_rng, rng = jax.random.split(jax.random.key(config.train.seed))
    params = init_params(model, init_rng, shape)
    return TrainState(
      jnp.zeros((), jnp.int32),
      params,
      optimizer.init(trained_part(config.optimizer, params)),
      rng,
    )

  return init


def make_loss(
  config: Config,
  model: Decoder,
  cross_entropy: Callable[..., tuple[jax.Array, jax.Array]],
) -> Loss:
  """The loss of a batch or of a micro-batch, divided by the tokens of the whole batch.

  Args:
    config: the run's config.
    model: the decoder.
    cross_entropy: `parallel.mesh.sharded_cross_entropy` of the mesh.
  """
  z_loss, chunk = config.train.z_loss, config.train.loss_chunk or None

  def loss(params, batch, total_weight):
    hidden, variables = model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
      mutable=["metrics"],
    )
    with jax.named_scope("loss"):
      targets, weights = batch["targets"], batch["weights"]
      objective, z_term = cross_entropy(
        hidden,
        output_embedding(params),
        targets,
        weights,
        z_loss=z_loss,
        chunk=chunk,
      )
    metrics = {"loss": (objective - z_term) / total_weight}
    if z_loss:
      metrics["z_loss"] = z_term / total_weight
    metrics = _merge_metrics(metrics, layer_metrics(variables))
    return objective / total_weight, metrics

  return loss


def make_step(
  config: Config,
  loss: Loss,
  optimizer: optax.GradientTransformationExtraArgs,
  schedule: optax.Schedule,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The function (state, batch) → (state, metrics).

  Args:
    config: the run's config.
    loss: of `make_loss`.
    optimizer: of `training.optimizer`.
    schedule: the optimizer's learning rate by step.
  """

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    total_weight = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    trained = trained_part(config.optimizer, state.params)
    of_trained = lambda part, *rest: loss(
      with_frozen(part, state.params), *rest
    )
    grads, metrics = _gradient(
      of_trained, trained, batch, total_weight, config.train.accumulation
    )
    with jax.named_scope("optimizer"):
      updates, opt_state = optimizer.update(
        grads, state.opt_state, trained, value=metrics["loss"]
      )
      params = with_frozen(optax.apply_updates(trained, updates), state.params)
    step_metrics = {
      "grad_norm": optax.tree.norm(grads),
      "learning_rate": schedule(state.step),
      "tokens": jnp.sum(batch["weights"]),
      **skip_metrics(state.opt_state, opt_state, config.optimizer.spike_sigmas),
    }
    return dataclasses.replace(
      state, step=state.step + 1, params=params, opt_state=opt_state
    ), _merge_metrics(metrics, step_metrics)

  return step


def _gradient(
  loss: Loss,
  params: Any,
  batch: Batch,
  total_weight: jax.Array,
  accumulation: int,
) -> tuple[Any, Metrics]:
  """The gradient of Σ loss / Σ tokens over the whole batch, whatever the number of micro-batches, and the loss's metrics."""
  gradient = jax.grad(loss, has_aux=True)
  if accumulation == 1:
    return gradient(params, batch, total_weight)

  def micro_step(carry, micro_batch):
    return jax.tree.map(
      jnp.add, carry, gradient(params, micro_batch, total_weight)
    ), None

  micro_batches = jax.tree.map(lambda x: _split(x, accumulation), batch)
  zeros = jax.tree.map(
    lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
    jax.eval_shape(
      gradient,
      params,
      jax.tree.map(lambda x: x[0], micro_batches),
      total_weight,
    ),
  )
  (grads, metrics), _ = jax.lax.scan(micro_step, zeros, micro_batches)
  for name, value in metrics.items():
    # The loss is divided by the tokens of the whole batch. The layers' metrics
    # are means over a micro-batch.
    if value.ndim > 0:
      metrics[name] = value / accumulation
  return grads, metrics


def _merge_metrics(metrics: Metrics, more: Metrics) -> Metrics:
  """Returns the metrics of both dicts.

  Raises:
    ValueError: if a name is in both. Authors of attention variants choose the
      names of their metrics.
  """
  for name in more:
    if name in metrics:
      raise ValueError(
        f"a layer sowed {name!r} under metrics, but the training step has a"
        " metric of this name; choose another name"
      )
  return {**metrics, **more}


def _split(x: jax.Array, parts: int) -> jax.Array:
  """[B, …] → [parts, B/parts, …]; strided, so that every device keeps its own rows."""
  return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)


def layer_metrics(variables: dict[str, Any]) -> Metrics:
  """Returns the values that the layers sowed under "metrics", by name.

  Each metric has one value per layer [L]. A value of several numbers is
  averaged. The values of `plain_layers` are left out.

  Example: `Attention` records λ as "lambda". In DIFF V2 it is averaged over
  tokens and heads.

  Args:
    variables: the second result of `Decoder.apply(…, mutable=["metrics"])`.

  Raises:
    ValueError: if two values have one name.
  """
  sown = variables.get("metrics", {}).get("layers", {})
  metrics: Metrics = {}
  for path, value in jax.tree_util.tree_leaves_with_path(sown):
    # ("attention", "lambda", 0): `sow` makes a tuple of the values of a name.
    name = path[-2].key
    if name in metrics:
      raise ValueError(
        f"a layer sowed two metrics named {name!r}; choose another name"
        " (`Attention` records 'lambda')"
      )
    if value.ndim > 1:
      axes_after_layers = tuple(range(1, value.ndim))
      value = jnp.mean(value, axis=axes_after_layers)
    metrics[name] = value
  return metrics
