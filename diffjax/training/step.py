"""One training step: loss → gradients → update.

The functions here are traced. program.py compiles them for a mesh.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Shaped

from diffjax.config import Config
from diffjax.model.decoder import Decoder, output_embedding
from diffjax.ops.diff_attention import diff_attention
from diffjax.training.optimizer import skip_metrics, trained_part, with_frozen

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
# (parameters, micro-batch, sum of the whole batch's weights) → (objective,
# metrics). Gradients are of the objective: the loss plus the z-loss.
Loss = Callable[[Any, Batch, jax.Array], tuple[jax.Array, Metrics]]


@flax.struct.dataclass
class TrainState:
  """Everything that a step changes.

  Attributes:
    step: the number of steps done.
    params: the model's parameters.
    opt_state: the state of the optimizer.
    rng: unused. It is kept so that existing checkpoints load.
  """

  step: Int[Array, ""]
  params: Any
  opt_state: Any
  rng: jax.Array


def init_params(
  model: Decoder, key: jax.Array, shape: tuple[int, int] = (1, 1)
) -> Any:
  """Returns random initial parameters.

  Flax makes them while it runs the model on a batch. They depend on neither the
  batch nor the activations. So the tokens are zeros, and attention is computed
  by the reference implementation.

  Args:
    model: the decoder.
    key: the key of the random numbers.
    shape: rows and tokens of the batch. The mesh must be able to split it.
  """
  reference = functools.partial(diff_attention, implementation="reference")
  model = model.clone(attention_fn=reference)
  tokens = jnp.zeros(shape, jnp.int32)
  return model.init(key, tokens)["params"]


def make_init(
  config: Config,
  model: Decoder,
  optimizer: optax.GradientTransformationExtraArgs,
  shape: tuple[int, int],
) -> Callable[[], TrainState]:
  """Returns a function without arguments that makes the state of step 0.

  Args:
    config: the run's config.
    model: the decoder.
    optimizer: an optimizer from `make_optimizer`.
    shape: rows and tokens of a batch that the mesh can split.
  """

  def init() -> TrainState:
    # `rng` is unused, but without the split a seed would give other parameters
    # than in earlier versions.
    init_rng, rng = jax.random.split(jax.random.key(config.train.seed))
    params = init_params(model, init_rng, shape)
    trained_params = trained_part(config.optimizer, params)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=optimizer.init(trained_params),
      rng=rng,
    )

  return init


def make_loss(
  config: Config,
  model: Decoder,
  cross_entropy: Callable[..., tuple[jax.Array, jax.Array]],
) -> Loss:
  """Returns the function that computes the loss of a batch or a micro-batch.

  It divides by the number of tokens of the whole batch. So the losses of the
  micro-batches sum to the loss of the batch.

  Args:
    config: the run's config.
    model: the decoder.
    cross_entropy: a function from `parallel.mesh.sharded_cross_entropy`. It
      returns two sums over tokens: the objective and the z-loss.
  """
  z_loss = config.train.z_loss
  # 0 means that the logits of all tokens are computed together.
  chunk = config.train.loss_chunk or None

  def loss(
    params: Any, batch: Batch, total_weight: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    outputs: Any = model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
      mutable=["metrics"],
    )
    hidden, variables = outputs
    with jax.named_scope("loss"):
      objective_sum, z_loss_sum = cross_entropy(
        hidden,
        output_embedding(params),
        batch["targets"],
        batch["weights"],
        z_loss=z_loss,
        chunk=chunk,
      )
    # The gradient includes the z-loss, but the logged loss does not.
    metrics = {"loss": (objective_sum - z_loss_sum) / total_weight}
    if z_loss:
      metrics["z_loss"] = z_loss_sum / total_weight
    metrics = _merge_metrics(metrics, layer_metrics(variables))
    return objective_sum / total_weight, metrics

  return loss


def make_step(
  config: Config,
  loss: Loss,
  optimizer: optax.GradientTransformationExtraArgs,
  schedule: optax.Schedule,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """Returns the training step, a function (state, batch) → (state, metrics).

  Args:
    config: the run's config.
    loss: a loss from `make_loss`.
    optimizer: an optimizer from `make_optimizer`.
    schedule: the learning rate by step.
  """

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    num_tokens = jnp.sum(batch["weights"])
    # A batch that consists of padding has no tokens.
    total_weight = jnp.maximum(num_tokens, 1.0)
    # A tree without the frozen parameters, which have no gradient and are not
    # in the optimizer's state. `with_frozen` puts them back.
    trained_params = trained_part(config.optimizer, state.params)

    def loss_of_trained(
      trained_params: Any, batch: Batch, total_weight: jax.Array
    ) -> tuple[jax.Array, Metrics]:
      params = with_frozen(trained_params, state.params)
      return loss(params, batch, total_weight)

    grads, loss_metrics = _gradient(
      loss_of_trained,
      trained_params,
      batch,
      total_weight,
      config.train.accumulation,
    )
    with jax.named_scope("optimizer"):
      # The optimizer skips steps whose loss or gradient norm is a spike.
      updates, opt_state = optimizer.update(
        grads, state.opt_state, trained_params, value=loss_metrics["loss"]
      )
      trained_params = optax.apply_updates(trained_params, updates)
      params = with_frozen(trained_params, state.params)

    step_metrics = {
      "grad_norm": optax.tree.norm(grads),
      "learning_rate": schedule(state.step),
      "tokens": num_tokens,
      **skip_metrics(state.opt_state, opt_state, config.optimizer.spike_sigmas),
    }
    new_state = dataclasses.replace(
      state, step=state.step + 1, params=params, opt_state=opt_state
    )
    return new_state, _merge_metrics(loss_metrics, step_metrics)

  return step


def _gradient(
  loss: Loss,
  params: Any,
  batch: Batch,
  total_weight: jax.Array,
  accumulation: int,
) -> tuple[Any, Metrics]:
  """Returns the gradient of a batch's loss, and the loss's metrics.

  To save memory, the batch can be split into micro-batches, which are computed
  one after the other. The result is the same, except for rounding.

  Args:
    loss: the loss of a micro-batch, divided by `total_weight`.
    params: the parameters with respect to which it is differentiated.
    batch: the whole batch.
    total_weight: the sum of the batch's weights.
    accumulation: the number of micro-batches.
  """
  gradient = jax.grad(loss, has_aux=True)
  if accumulation == 1:
    return gradient(params, batch, total_weight)

  micro_batches: Batch = {}
  first_micro_batch: Batch = {}
  for name, array in batch.items():
    micro_batches[name] = _split_rows(array, accumulation)
    first_micro_batch[name] = micro_batches[name][0]

  # Sum gradients and metrics over the micro-batches.
  def add_micro_batch(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
    terms = gradient(params, micro_batch, total_weight)
    return jax.tree.map(jnp.add, sums, terms), None

  shapes = jax.eval_shape(gradient, params, first_micro_batch, total_weight)
  zeros = jax.tree.map(_zeros_of_shape, shapes)
  (grads, metrics), _ = jax.lax.scan(add_micro_batch, zeros, micro_batches)

  # The loss has been divided by the tokens of the whole batch, so its sum is
  # right. The layers' metrics are means over a micro-batch.
  for name, value in metrics.items():
    if _is_layer_metric(value):
      metrics[name] = value / accumulation
  return grads, metrics


def _is_layer_metric(value: jax.Array) -> bool:
  """Returns True if a metric has values per layer. Others are scalars."""
  return value.ndim > 0


def _zeros_of_shape(shape: jax.ShapeDtypeStruct) -> jax.Array:
  return jnp.zeros(shape.shape, shape.dtype)


def _split_rows(
  array: Shaped[Array, "B ..."], num_parts: int
) -> Shaped[Array, "P R ..."]:
  """Returns the rows in P parts of R rows. B = R·P.

  Part p has the rows p, p + P, p + 2P and so on. A device has consecutive rows.
  So it has rows of every part, and no row moves to another device.
  """
  num_rows = array.shape[0] // num_parts
  grouped = array.reshape(num_rows, num_parts, *array.shape[1:])
  return jnp.moveaxis(grouped, 1, 0)


def _merge_metrics(metrics: Metrics, new_metrics: Metrics) -> Metrics:
  """Returns the metrics of both dicts.

  Raises:
    ValueError: if a name is in both. Then an attention variant has given a
      metric the name of a metric of the step.
  """
  for name in new_metrics:
    if name in metrics:
      raise ValueError(
        f"a layer sowed {name!r} under metrics, but the training step has a"
        " metric of this name; choose another name"
      )
  return {**metrics, **new_metrics}


def layer_metrics(variables: dict[str, Any]) -> Metrics:
  """Returns the metrics that the layers record, by name.

  A layer records one with `self.sow("metrics", name, value)`. Each metric has
  one value per layer [L]. If a layer records an array, it is averaged. The
  metrics of `plain_layers` are left out.

  Example: `Attention` records λ as "lambda". In DIFF V2 it is averaged over
  tokens and heads.

  Args:
    variables: the second result of `Decoder.apply(…, mutable=["metrics"])`.

  Raises:
    ValueError: if two metrics have the same name.
  """
  sown = variables.get("metrics", {}).get("layers", {})
  metrics: Metrics = {}
  for path, value in jax.tree_util.tree_leaves_with_path(sown):
    # The path ends with the name and an index, such as ("lambda", 0), because
    # `sow` collects the values of a name in a tuple.
    name = path[-2].key
    if name in metrics:
      raise ValueError(
        f"a layer sowed two metrics named {name!r}; choose another name"
        " (`Attention` records 'lambda')"
      )
    # The decoder's scan puts the axis of layers first.
    axes_after_layers = tuple(range(1, value.ndim))
    if axes_after_layers:
      value = jnp.mean(value, axis=axes_after_layers)
    metrics[name] = value
  return metrics
