"""Log-likelihoods of continuations after their contexts, and whether greedy decoding would give them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from diffjax.config import UserError
from diffjax.inference.token_ids import validated_token_ids
from diffjax.model.decoder import Decoder, output_embedding

_SHORTEST = 32  # tokens of the smallest bucket
_CHUNK_LOGITS = 1 << 24  # logits in memory at once: 64 MiB of float32
BATCH_TOKENS = 16_384  # tokens of a batch, padding included


class Score(NamedTuple):
  """The score of a continuation.

  Attributes:
    log_probability: Σ log P(token | all tokens before it), nats.
    is_greedy: Whether each of its tokens is the likeliest one at its position.
  """

  log_probability: float
  is_greedy: bool


def score(
  model: Decoder,
  params: Any,
  pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
  *,
  batch_tokens: int = BATCH_TOKENS,
) -> list[Score]:
  """Scores continuations after contexts.

  Rows are padded to lengths that are powers of two (or the model's longest), and a batch of a length has as many rows as batch_tokens
  holds. So one program is compiled for each length that occurs, whatever the number of pairs.

  Args:
    model: The decoder.
    params: Its parameters.
    pairs: (context, continuation) as ids, neither empty. The context of a document's first token is the separator.
    batch_tokens: Number of tokens of a batch, padding included. A longer row is a batch of its own.

  Returns:
    A score for each pair, in the pairs' order.

  Raises:
    UserError: for a pair that is longer than the model's limit, its last token not counted, since the model does not read it; or that has
      an id outside the vocabulary.
    ValueError: for an empty context or continuation.
  """
  limit, vocab_size = model.config.max_length, model.config.vocab_size
  checked = []
  for index, pair in enumerate(pairs):
    name = f"pair {index}: the"
    context_ids = validated_token_ids(pair[0], vocab_size, f"{name} context")
    continuation_ids = validated_token_ids(
      pair[1], vocab_size, f"{name} continuation"
    )
    checked.append((context_ids, continuation_ids))
  buckets: dict[int, list[int]] = {}
  for index, (context, continuation) in enumerate(checked):
    if not len(context) or not len(continuation):
      raise ValueError(
        f"pair {index} has {len(context)} tokens of context and {len(continuation)} of continuation; neither may be empty"
      )
    if (length := len(context) + len(continuation) - 1) > limit:
      raise UserError(
        f"a continuation of {len(continuation)} tokens after {len(context)} does not fit the model, whose config.model.max_length is "
        f"{limit}; shorten the context"
      )
    buckets.setdefault(_bucket(length, limit), []).append(index)
  scores: list[Score | None] = [None] * len(pairs)
  for length, indices in sorted(
    buckets.items(), reverse=True
  ):  # the longest first, so that a lack of memory shows at once
    rows = max(1, batch_tokens // length)
    pending = []
    for chosen in (
      indices[start : start + rows] for start in range(0, len(indices), rows)
    ):
      pending.append(
        (
          chosen,
          _score_rows(
            model,
            params,
            *_rows([checked[index] for index in chosen], rows, length),
          ),
        )
      )
      if (
        len(pending) > 1
      ):  # fetch a batch after the next one is dispatched, so that the device never waits for the host
        _fetch(scores, *pending.pop(0))
    for chosen, results in pending:
      _fetch(scores, chosen, results)
  return scores  # type: ignore[return-value]


def _bucket(length: int, limit: int) -> int:
  return min(max(_SHORTEST, 1 << (length - 1).bit_length()), limit)


def _rows(
  pairs: Sequence[tuple[np.ndarray, np.ndarray]], rows: int, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Inputs, targets, and which targets are scored. Padding is on the right, where causal attention hides it."""
  tokens, targets, counts = (
    np.zeros((rows, length), np.int32),
    np.zeros((rows, length), np.int32),
    np.zeros((rows, length), bool),
  )
  for row, (context, continuation) in enumerate(pairs):
    ids = np.concatenate([context, continuation])
    tokens[row, : len(ids) - 1], targets[row, : len(ids) - 1] = (
      ids[:-1],
      ids[1:],
    )
    counts[row, len(context) - 1 : len(ids) - 1] = True
  return tokens, targets, counts


def _fetch(
  scores: list[Score | None],
  chosen: Sequence[int],
  results: tuple[jax.Array, jax.Array],
) -> None:
  for index, log_probability, is_greedy in zip(
    chosen, *map(np.asarray, results), strict=False
  ):  # rows beyond the chosen are padding
    scores[index] = Score(float(log_probability), bool(is_greedy))


@functools.partial(jax.jit, static_argnums=0)
def _score_rows(
  model: Decoder,
  params: Any,
  tokens: Int[Array, "B T"],
  targets: Int[Array, "B T"],
  counts: Bool[Array, "B T"],
) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
  hidden: Any = model.apply({"params": params}, tokens)
  matrix = output_embedding(params).astype(hidden.dtype)
  rows, length = tokens.shape
  size = min(length, max(1, _CHUNK_LOGITS // (rows * matrix.shape[0])))
  padding = -length % size
  # Chunks along T, [T/t, B, t, …]. Most hold no continuation, and their logits are not computed
  chunks = [
    jnp.moveaxis(
      jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)).reshape(
        rows, -1, size, *x.shape[2:]
      ),
      1,
      0,
    )
    for x in (hidden, targets, counts)
  ]

  def measure(hidden, targets, counts):
    logits = jnp.einsum(
      "BTE,NE->BTN", hidden, matrix, preferred_element_type=jnp.float32
    )
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    log_probabilities = chosen - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(counts, log_probabilities, 0).sum(1), (
      (jnp.argmax(logits, axis=-1) == targets) | ~counts
    ).all(1)

  nothing = lambda *_: (jnp.zeros(rows, jnp.float32), jnp.ones(rows, bool))
  sums, greedy = lax.map(
    lambda chunk: lax.cond(jnp.any(chunk[2]), measure, nothing, *chunk), chunks
  )
  return sums.sum(0), greedy.all(0)
