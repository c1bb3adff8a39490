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
# (parameters, batch, sum of the whole batch's weights) → objective, metrics.
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
  """Returns the initial parameters.

  They do not depend on activations. Therefore the tokens are zeros, and the
  implementation of attention is the reference.

  Args:
    model: the decoder.
    key: the key of the random numbers.
    shape: rows and tokens of a batch that the mesh can split.
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
  """Returns the function () → initial state.

  Args:
    config: the run's config.
    model: the decoder.
    optimizer: an optimizer from `make_optimizer`.
    shape: as in `init_params`.
  """

  def init() -> TrainState:
    init_rng, rng = jax.random.split(jax.random.key(config.train.seed))
    params = init_params(model, init_rng, shape)
    trained = trained_part(config.optimizer, params)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=optimizer.init(trained),
      rng=rng,
    )

  return init


def make_loss(
  config: Config,
  model: Decoder,
  cross_entropy: Callable[..., tuple[jax.Array, jax.Array]],
) -> Loss:
  """Returns the loss function of a batch or a micro-batch.

  The loss is divided by the number of tokens of the whole batch. So the losses
  of the micro-batches sum to the loss of the batch.

  Args:
    config: the run's config.
    model: the decoder.
    cross_entropy: a function from `parallel.mesh.sharded_cross_entropy`. It
      returns the objective, which includes the z-loss, and the z-loss.
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
      objective, z_term = cross_entropy(
        hidden,
        output_embedding(params),
        batch["targets"],
        batch["weights"],
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
  """Returns the function (state, batch) → (state, metrics).

  Args:
    config: the run's config.
    loss: a loss from `make_loss`.
    optimizer: an optimizer from `make_optimizer`.
    schedule: the learning rate by step.
  """

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    # At least 1, because a batch of padding has no weight.
    total_weight = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    trained = trained_part(config.optimizer, state.params)

    def loss_of_trained(
      trained: Any, batch: Batch, total_weight: jax.Array
    ) -> tuple[jax.Array, Metrics]:
      return loss(with_frozen(trained, state.params), batch, total_weight)

    grads, loss_metrics = _gradient(
      loss_of_trained, trained, batch, total_weight, config.train.accumulation
    )
    with jax.named_scope("optimizer"):
      updates, opt_state = optimizer.update(
        grads, state.opt_state, trained, value=loss_metrics["loss"]
      )
      trained = optax.apply_updates(trained, updates)
      params = with_frozen(trained, state.params)

    step_metrics = {
      "grad_norm": optax.tree.norm(grads),
      "learning_rate": schedule(state.step),
      "tokens": jnp.sum(batch["weights"]),
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
  """Returns the gradient of the loss of a batch, and the loss's metrics.

  The loss is Σ loss / Σ tokens over the whole batch. It does not depend on the
  number of micro-batches.

  Args:
    loss: the loss of a micro-batch, divided by `total_weight`.
    params: the parameters by which it is differentiated.
    batch: the whole batch.
    total_weight: the sum of its weights.
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

  def add_micro_batch(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
    terms = gradient(params, micro_batch, total_weight)
    return jax.tree.map(jnp.add, sums, terms), None

  shapes = jax.eval_shape(gradient, params, first_micro_batch, total_weight)
  zeros = jax.tree.map(_zeros_of_shape, shapes)
  (grads, metrics), _ = jax.lax.scan(add_micro_batch, zeros, micro_batches)
  for name, value in metrics.items():
    # The loss is divided by the tokens of the whole batch. The layers' metrics
    # are means over a micro-batch.
    if value.ndim > 0:
      metrics[name] = value / accumulation
  return grads, metrics


def _zeros_of_shape(shape: jax.ShapeDtypeStruct) -> jax.Array:
  return jnp.zeros(shape.shape, shape.dtype)


def _split_rows(
  array: Shaped[Array, "B ..."], num_parts: int
) -> Shaped[Array, "P R ..."]:
  """Returns the rows in P parts of R rows. B = R·P.

  Part p has rows p, p + P, p + 2P and so on. So each device keeps its rows.
  """
  num_rows = array.shape[0] // num_parts
  grouped = array.reshape(num_rows, num_parts, *array.shape[1:])
  return jnp.moveaxis(grouped, 1, 0)


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
