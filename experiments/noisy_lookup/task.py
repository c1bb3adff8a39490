"""Looking up a value by a noisy key: pairs of a key and a value in one position each, then questions for the values of some keys.

A key is a random direction, fresh in every context, so there is no table to learn. The position of a pair holds its key, with noise, plus
its value's embedding. The position of a question holds a pair's key without noise, plus the embedding of "?". One layer has to turn
likeness of keys into attention: the width of a map and the noise bound how far the answer's logit can stand above the others', and the more
pairs there are, the more of them come near it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from diffjax.config import Config, ModelConfig
from diffjax.model.attention import attention_class
from diffjax.model.decoder import (
  Decoder,
  FeedForward,
  embed,
  lambda_inits,
  logits,
)
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.reference import attention_weights
from diffjax.ops.rms_norm import rms_norm
from diffjax.training.optimizer import (
  make_optimizer,
  make_schedule,
  trained_part,
  with_frozen,
)

VALUES = 16
QUESTION = VALUES  # the row of the embedding that marks a question
ASKED = 32  # pairs of a context that are asked for


@dataclasses.dataclass(frozen=True)
class Task:
  """Sizes of the contexts.

  Attributes:
    pairs: N, pairs of a context in training.
    noises: σ, the RMS of the noise on a pair's key, whose own RMS is 1. A context has one of these, each as often as the others.
    multiples: of N, for the contexts at the end.
    contexts: for each σ and length, at the end.
    followed: contexts of N pairs for each σ, asked during training.
    interval: steps between such questions.
  """

  pairs: int = 192
  noises: tuple[float, ...] = (0.0, 0.5, 1.0)
  multiples: tuple[int, ...] = (1, 2, 4, 8)
  contexts: int = 64
  followed: int = 16
  interval: int = 50


class Batch(NamedTuple):
  """Contexts: what stands beside the embeddings, the tokens' embeddings, the values asked for and their pairs' positions."""

  keys: Float[Array, "B T E"]
  tokens: Int[Array, "B T"]
  values: Int[Array, "B asked"]
  places: Int[Array, "B asked"]


def make_batch(
  key: jax.Array, noise: Float[Array, "B"], pairs: int, width: int
) -> Batch:
  """Random contexts.

  Args:
    key: of random numbers.
    noise: σ of each context.
    pairs: in each context.
    width: E.
  """
  of_keys, of_noise, of_values, of_questions = jax.random.split(key, 4)
  count = len(noise)
  keys = jax.random.normal(of_keys, (count, pairs, width))
  noisy = keys + noise[:, None, None] * jax.random.normal(of_noise, keys.shape)
  values = jax.random.randint(of_values, (count, pairs), 0, VALUES)
  places = jax.lax.top_k(
    jax.random.uniform(of_questions, (count, pairs)), ASKED
  )[1]  # different pairs, in random order
  asked = jnp.take_along_axis(keys, places[..., None], axis=1)
  return Batch(
    jnp.concatenate([noisy, asked], axis=1),
    jnp.concatenate([values, jnp.full((count, ASKED), QUESTION)], axis=1),
    jnp.take_along_axis(values, places, axis=1),
    places,
  )


def init(config: Config) -> dict[str, Any]:
  """The parameters of a decoder of the config. λ vectors that are frozen with λ_init = 0 start at 0, so that λ is 0 and stays so."""
  params = jax.jit(Decoder(config.model).init)(
    jax.random.key(config.train.seed), jnp.zeros((1, 1), jnp.int32)
  )["params"]
  if config.model.lambda_init == 0 and config.optimizer.frozen:
    for name in config.optimizer.frozen.split(","):
      params["layers"]["attention"][name] = jnp.zeros_like(
        params["layers"]["attention"][name]
      )
  return params


def forward(
  model: ModelConfig, params: dict[str, Any], batch: Batch
) -> tuple[Float[Array, "B asked N"], Float[Array, "B H asked T"]]:
  """The logits of the questions' values, and the weights with which the questions attend, in one layer of the decoder.

  It is the decoder's layer, but only the questions attend and go through the feed-forward layer: nothing reads what becomes of the pairs.
  """
  seen: list[jax.Array] = []

  # Only the questions attend, so this replaces the layer's `attention_fn`. Such a
  # function does not get the layer, so it cannot ask for its `weights`. All
  # variants of the experiment have the weights of the reference: others would
  # reject this function.
  def attend(q, k, v, lam, *, q_segment_ids, kv_segment_ids, causal, window):
    is_plain = q_segment_ids is None and kv_segment_ids is None
    assert is_plain and causal and window is None
    lam = lam[:, -ASKED:] if lam is not None and lam.ndim == 3 else lam
    q, before = q[:, -ASKED:], q.shape[1] - ASKED
    every = None if lam is None else jnp.broadcast_to(lam, q.shape[:3])
    seen.append(attention_weights(q, k, every, q_offset=before))
    return jnp.pad(
      diff_attention(q, k, v, lam, q_offset=before),
      ((0, 0), (before, 0), (0, 0), (0, 0)),
    )

  x = batch.keys + embed(params["embedding"], batch.tokens, model)
  layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
  attention = attention_class(model)(
    model.num_heads,
    model.head_dim,
    head_norm=model.head_norm,
    rope=False,
    norm_eps=model.norm_eps,
    attention_fn=attend,
  )
  normed = rms_norm(x, layer["attention_norm"], model.norm_eps)
  attended: Any = attention.apply(
    {"params": layer["attention"]}, normed, lambda_inits(model)[0]
  )
  x = (x + attended)[:, -ASKED:]
  widened: Any = FeedForward(model.ffn_dim).apply(
    {"params": layer["ffn"]}, rms_norm(x, layer["ffn_norm"], model.norm_eps)
  )
  x = x + widened
  return logits(
    params, rms_norm(x, params["final_norm"], model.norm_eps)
  ), seen[0]


def train(config: Config, task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
  """Trains a model and asks it.

  Returns:
    The parameters, and what was found: "curve", step, accuracy and loss (nats) over the σ during training, on N pairs; and "grid", for each
    σ and number of pairs the accuracy, the loss, and the share of attention on the answer, of the signed weights and of their absolute
    values, over all heads.
  """
  optimizer = make_optimizer(
    config.optimizer, make_schedule(config.optimizer, config.train.steps)
  )
  width, root = config.model.embed_dim, jax.random.key(config.data.seed)

  def loss(params, batch):
    found, _ = forward(config.model, params, batch)
    return optax.softmax_cross_entropy_with_integer_labels(
      found, batch.values
    ).mean()

  @jax.jit
  def step(params, state, number):
    of_batch, of_noise = jax.random.split(jax.random.fold_in(root, number))
    noise = jax.random.choice(
      of_noise, jnp.asarray(task.noises), (config.train.batch_size,)
    )
    batch, trained = (
      make_batch(of_batch, noise, task.pairs, width),
      trained_part(config.optimizer, params),
    )
    value, gradients = jax.value_and_grad(
      lambda part: loss(with_frozen(part, params), batch)
    )(trained)
    updates, state = optimizer.update(gradients, state, trained, value=value)
    return with_frozen(optax.apply_updates(trained, updates), params), state

  params = init(config)
  state, curve = optimizer.init(trained_part(config.optimizer, params)), []
  for number in range(config.train.steps):
    params, state = step(params, state, number)
    if (number + 1) % task.interval == 0 or number + 1 == config.train.steps:
      found = [
        ask(config, params, noise, task.pairs, task.followed)
        for noise in task.noises
      ]
      curve.append(
        {
          "step": number + 1,
          **{
            name: float(np.mean([each[name] for each in found]))
            for name in ("accuracy", "loss")
          },
        }
      )
  cells = [
    (noise, multiple * task.pairs)
    for noise in task.noises
    for multiple in task.multiples
  ]
  grid = [
    {
      "noise": noise,
      "pairs": pairs,
      **ask(config, params, noise, pairs, task.contexts),
    }
    for noise, pairs in cells
  ]
  return params, {"curve": curve, "grid": grid}


_ASKED_SEED = (
  1_000_000  # contexts that no training sees, the same for all models
)


def ask(
  config: Config,
  params: dict[str, Any],
  noise: float,
  pairs: int,
  contexts: int,
) -> dict[str, float]:
  """Accuracy, loss and shares of attention on contexts of one σ and number of pairs."""
  at_once = max(1, 16 * 224 // (pairs + ASKED))
  sums = [
    _ask_sums(
      config.model,
      params,
      jax.random.fold_in(jax.random.key(_ASKED_SEED), first),
      noise,
      pairs,
      min(at_once, contexts - first),
    )
    for first in range(0, contexts, at_once)
  ]
  total = {
    name: float(np.sum([each[name] for each in sums])) for name in sums[0]
  }
  questions = contexts * ASKED
  return {
    "accuracy": total["right"] / questions,
    "loss": total["loss"] / questions,
    "signed": total["signed_answer"]
    / total[
      "signed"
    ],  # sums first: the signed weights of one question can add up to nearly 0
    "absolute": total["absolute_answer"] / total["absolute"],
  }


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _ask_sums(
  model: ModelConfig,
  params: dict[str, Any],
  key: jax.Array,
  noise: float,
  pairs: int,
  contexts: int,
) -> dict[str, Array]:
  batch = make_batch(key, jnp.full(contexts, noise), pairs, model.embed_dim)
  found, weights = forward(model, params, batch)
  answers = jnp.take_along_axis(
    weights, batch.places[:, None, :, None], axis=-1
  )
  return {
    "right": jnp.sum(jnp.argmax(found, axis=-1) == batch.values),
    "loss": jnp.sum(
      optax.softmax_cross_entropy_with_integer_labels(found, batch.values)
    ),
    "signed_answer": jnp.sum(answers),
    "signed": jnp.sum(weights),
    "absolute_answer": jnp.sum(jnp.abs(answers)),
    "absolute": jnp.sum(jnp.abs(weights)),
  }
