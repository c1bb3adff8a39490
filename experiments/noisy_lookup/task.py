"""The noisy lookup task: find the value of a key among noisy keys.

A context is a sequence of pairs of a key and a value, followed by questions.
Each pair and each question is one position:

- A key is a random direction [E], new in every context. Nothing about keys can
  be learned by heart.
- A pair is its key, with noise, plus the embedding of its value.
- A question is the key of a pair, without noise, plus the embedding of "?". The
  answer is the value of that pair.

A single layer has to turn the similarity of keys into attention. The width of
an attention map and the noise limit how far the logit of the right pair stands
above the others. With more pairs, more of them come close to it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
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

# The number of different values.
VALUES = 16

# The row of the embedding that marks a question.
QUESTION = VALUES

# The number of questions in a context.
ASKED = 32

# Seeds the contexts of the evaluation. They are the same for all models, and
# different from the contexts of the training.
_EVALUATION_SEED = 1_000_000

# The number of positions that the evaluation computes at once.
_POSITIONS_AT_ONCE = 16 * 224


@dataclasses.dataclass(frozen=True)
class Task:
  """Sizes of the contexts.

  Attributes:
    pairs: N, the number of pairs in a context of the training.
    noises: σ, the RMS of the noise on the keys of the pairs. The RMS of a key
      is 1. Each context has one σ, drawn uniformly.
    multiples: The numbers of pairs in the final evaluation, as multiples of N.
    contexts: The number of contexts for each σ and number of pairs in the final
      evaluation.
    followed: The number of contexts for each σ in an evaluation during
      training. They have N pairs.
    interval: The number of steps between evaluations during training.
  """

  pairs: int = 192
  noises: tuple[float, ...] = (0.0, 0.5, 1.0)
  multiples: tuple[int, ...] = (1, 2, 4, 8)
  contexts: int = 64
  followed: int = 16
  interval: int = 50


class Batch(NamedTuple):
  """A batch of contexts. The pairs come first, then the questions.

  Attributes:
    keys: What is added to the embeddings of the tokens.
    tokens: The values of the pairs, and QUESTION.
    values: The answers to the questions.
    places: The positions of the pairs that the questions are about.
  """

  keys: Float[Array, "B T E"]
  tokens: Int[Array, "B T"]
  values: Int[Array, "B asked"]
  places: Int[Array, "B asked"]


def make_batch(
  key: jax.Array, noise: Float[Array, "B"], pairs: int, width: int
) -> Batch:
  """Returns random contexts: pairs of a key and a value, and then questions.

  A question is the key of one of the pairs. Its answer is the pair's value.

  Args:
    key: The random key.
    noise: σ of each context, the RMS of the noise on the keys of its pairs.
    pairs: The number of pairs in each context.
    width: E, the width of a key.
  """
  key_keys, key_noise, key_values, key_places = jax.random.split(key, 4)
  num_contexts = len(noise)
  keys = jax.random.normal(key_keys, (num_contexts, pairs, width))
  unit_noise = jax.random.normal(key_noise, keys.shape)
  noisy_keys = keys + noise[:, None, None] * unit_noise
  values = jax.random.randint(key_values, (num_contexts, pairs), 0, VALUES)

  # The largest of uniform scores are different pairs in random order.
  scores = jax.random.uniform(key_places, (num_contexts, pairs))
  _, places = jax.lax.top_k(scores, ASKED)
  question_keys = jnp.take_along_axis(keys, places[..., None], axis=1)
  questions = jnp.full((num_contexts, ASKED), QUESTION)
  return Batch(
    keys=jnp.concatenate([noisy_keys, question_keys], axis=1),
    tokens=jnp.concatenate([values, questions], axis=1),
    values=jnp.take_along_axis(values, places, axis=1),
    places=places,
  )


def init(config: Config) -> dict[str, Any]:
  """Returns the initial parameters of a decoder.

  If the λ vectors are frozen and λ_init is 0, the vectors are set to 0, so that
  λ stays 0.

  Args:
    config: The config of the run.
  """
  initialise = jax.jit(Decoder(config.model).init)
  variables = initialise(
    jax.random.key(config.train.seed), jnp.zeros((1, 1), jnp.int32)
  )
  params = variables["params"]
  if config.model.lambda_init == 0 and config.optimizer.frozen:
    attention = params["layers"]["attention"]
    for name in config.optimizer.frozen.split(","):
      attention[name] = jnp.zeros_like(attention[name])
  return params


class _QuestionAttention:
  """Attention of the questions alone, which keeps its weights.

  It replaces `attention_fn` of a layer. Such a function gets no layer, so it
  cannot call the layer's `weights`. All rows of the experiment have the weights
  of the reference implementation; other variants would reject this function.

  Attributes:
    weights: The attention weights of the questions [B, H, asked, T]. None
      before the call.
  """

  def __init__(self) -> None:
    self.weights: jax.Array | None = None

  def __call__(
    self, q, k, v, lam, *, q_segment_ids, kv_segment_ids, causal, window
  ):
    """Returns the outputs at the questions. The outputs at the pairs are 0."""
    assert q_segment_ids is None and kv_segment_ids is None
    assert causal and window is None
    num_pairs = q.shape[1] - ASKED
    q = q[:, num_pairs:]
    # λ has an axis of positions if it depends on the query.
    if lam is not None and lam.ndim == 3:
      lam = lam[:, num_pairs:]
    lam_per_query = None
    if lam is not None:
      lam_per_query = jnp.broadcast_to(lam, q.shape[:3])
    self.weights = attention_weights(q, k, lam_per_query, q_offset=num_pairs)
    output = diff_attention(q, k, v, lam, q_offset=num_pairs)
    return jnp.pad(output, ((0, 0), (num_pairs, 0), (0, 0), (0, 0)))


def forward(
  model: ModelConfig, params: dict[str, Any], batch: Batch
) -> tuple[Float[Array, "B asked N"], Float[Array, "B H asked T"]]:
  """Computes the answers to the questions in one layer of the decoder.

  This is `Decoder` with one layer. To save time, it computes attention and the
  feed-forward layer only at the questions, because the outputs at the pairs are
  not used.

  Args:
    model: The model's config. It has one layer.
    params: The parameters from `init`.
    batch: The contexts.

  Returns:
    The logits of the values at the questions, and the attention weights of the
    questions.
  """
  question_attention = _QuestionAttention()
  # The parameters of all layers are stacked.
  layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
  attention = attention_class(model)(
    model.num_heads,
    model.head_dim,
    head_norm=model.head_norm,
    rope=False,
    norm_eps=model.norm_eps,
    attention_fn=question_attention,
  )
  x = batch.keys + embed(params["embedding"], batch.tokens, model)
  normed = rms_norm(x, layer["attention_norm"], model.norm_eps)
  attended: Any = attention.apply(
    {"params": layer["attention"]}, normed, lambda_inits(model)[0]
  )
  x = (x + attended)[:, -ASKED:]

  feed_forward = FeedForward(model.ffn_dim)
  normed = rms_norm(x, layer["ffn_norm"], model.norm_eps)
  update: Any = feed_forward.apply({"params": layer["ffn"]}, normed)
  x = x + update

  final = rms_norm(x, params["final_norm"], model.norm_eps)
  assert question_attention.weights is not None
  return logits(params, final), question_attention.weights


def train(config: Config, task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
  """Trains a model and evaluates it.

  Args:
    config: The config of the run.
    task: The sizes of the contexts.

  Returns:
    The parameters, and the evaluations:

    - "curve": During training, with N pairs. Each record has the step, and the
      means over σ of the accuracy and of the loss in nats.
    - "grid": At the end. Each record has σ, the number of pairs, and the
      numbers of `ask`.
  """
  schedule = make_schedule(config.optimizer, config.train.steps)
  optimizer = make_optimizer(config.optimizer, schedule)
  train_step = _make_train_step(config, task, optimizer)
  params = init(config)
  state = optimizer.init(trained_part(config.optimizer, params))

  curve = []
  for step in range(config.train.steps):
    params, state = train_step(params, state, step)
    steps_done = step + 1
    is_last = steps_done == config.train.steps
    if is_last or steps_done % task.interval == 0:
      curve.append({"step": steps_done, **_follow(config, params, task)})

  grid = []
  for noise in task.noises:
    for multiple in task.multiples:
      pairs = multiple * task.pairs
      answers = ask(config, params, noise, pairs, task.contexts)
      grid.append({"noise": noise, "pairs": pairs, **answers})
  return params, {"curve": curve, "grid": grid}


def _make_train_step(
  config: Config, task: Task, optimizer: optax.GradientTransformationExtraArgs
) -> Callable[..., tuple[Any, Any]]:
  """Returns a jitted function that draws a batch and updates the parameters."""
  data_key = jax.random.key(config.data.seed)

  def loss(trained, params, batch):
    all_params = with_frozen(trained, params)
    answers, _ = forward(config.model, all_params, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(
      answers, batch.values
    )
    return losses.mean()

  @jax.jit
  def train_step(params, state, step):
    batch_key, noise_key = jax.random.split(jax.random.fold_in(data_key, step))
    noise = jax.random.choice(
      noise_key, jnp.asarray(task.noises), (config.train.batch_size,)
    )
    batch = make_batch(batch_key, noise, task.pairs, config.model.embed_dim)
    trained = trained_part(config.optimizer, params)
    value, gradients = jax.value_and_grad(loss)(trained, params, batch)
    updates, state = optimizer.update(gradients, state, trained, value=value)
    trained = optax.apply_updates(trained, updates)
    return with_frozen(trained, params), state

  return train_step


def _follow(
  config: Config, params: dict[str, Any], task: Task
) -> dict[str, float]:
  """Returns the accuracy and the loss with N pairs, means over σ."""
  answers = []
  for noise in task.noises:
    answers.append(ask(config, params, noise, task.pairs, task.followed))
  means = {}
  for name in ("accuracy", "loss"):
    means[name] = float(np.mean([answer[name] for answer in answers]))
  return means


def ask(
  config: Config,
  params: dict[str, Any],
  noise: float,
  pairs: int,
  contexts: int,
) -> dict[str, float]:
  """Evaluates a model on random contexts of equal noise and size.

  Args:
    config: The config of the run.
    params: The parameters.
    noise: σ, the RMS of the noise on the keys of the pairs.
    pairs: The number of pairs in a context.
    contexts: The number of contexts.

  Returns:
    "accuracy", "loss" in nats, and the share of the attention on the right
    pair over all heads: of the signed weights ("signed"), and of their absolute
    values ("absolute").
  """
  # Batches of longer contexts are smaller, so that all take about the same
  # memory.
  contexts_at_once = max(1, _POSITIONS_AT_ONCE // (pairs + ASKED))
  evaluation_key = jax.random.key(_EVALUATION_SEED)
  batch_sums = []
  for first in range(0, contexts, contexts_at_once):
    batch_key = jax.random.fold_in(evaluation_key, first)
    batch_size = min(contexts_at_once, contexts - first)
    sums = _evaluation_sums(
      config.model, params, batch_key, noise, pairs, batch_size
    )
    batch_sums.append(sums)
  # The sums over all batches.
  total = {}
  for name in batch_sums[0]:
    total[name] = float(np.sum([sums[name] for sums in batch_sums]))

  questions = contexts * ASKED
  return {
    "accuracy": total["right"] / questions,
    "loss": total["loss"] / questions,
    # A ratio of sums, because the signed weights of a single question can add
    # up to nearly 0.
    "signed": total["signed_answer"] / total["signed"],
    "absolute": total["absolute_answer"] / total["absolute"],
  }


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _evaluation_sums(
  model: ModelConfig,
  params: dict[str, Any],
  key: jax.Array,
  noise: float,
  pairs: int,
  contexts: int,
) -> dict[str, Array]:
  """Returns sums over the questions of random contexts.

  "right" and "loss" are of the answers. The others are of attention weights:
  "signed_answer" of the weights on the right pairs, "signed" of all weights,
  and "absolute_answer" and "absolute" of their absolute values.

  Args:
    model: The model's config.
    params: The parameters.
    key: The random key.
    noise: σ of all contexts.
    pairs: The number of pairs in a context.
    contexts: The number of contexts.
  """
  batch = make_batch(key, jnp.full(contexts, noise), pairs, model.embed_dim)
  answers, weights = forward(model, params, batch)
  is_right = jnp.argmax(answers, axis=-1) == batch.values
  losses = optax.softmax_cross_entropy_with_integer_labels(
    answers, batch.values
  )
  answer_weights = jnp.take_along_axis(
    weights, batch.places[:, None, :, None], axis=-1
  )
  return {
    "right": jnp.sum(is_right),
    "loss": jnp.sum(losses),
    "signed_answer": jnp.sum(answer_weights),
    "signed": jnp.sum(weights),
    "absolute_answer": jnp.sum(jnp.abs(answer_weights)),
    "absolute": jnp.sum(jnp.abs(weights)),
  }
