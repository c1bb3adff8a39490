"""Log-likelihoods of continuations after their contexts.

A pair of a context and a continuation becomes a row of tokens. Rows of similar
lengths share a batch (`_make_batches`), and one compiled program scores all
batches of a length (`_score_rows`).

The logits of a batch may not fit into memory. So they are computed for chunks
of positions, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from diffjax.config import UserError
from diffjax.inference.token_ids import validated_token_ids
from diffjax.model.decoder import Decoder, output_embedding

# The number of tokens in a batch, including padding.
BATCH_TOKENS = 16_384

# The length of the shortest rows.
_MIN_ROW_LENGTH = 32

# The number of logits that are in memory at once: 64 MiB of float32.
CHUNK_LOGITS = 1 << 24


class Score(NamedTuple):
  """The score of a continuation.

  Attributes:
    log_probability: Σ log P(token | all tokens before it), in nats.
    is_greedy: Whether each token is the most likely one at its position, so
      that greedy decoding would write the continuation.
  """

  log_probability: float
  is_greedy: bool


class _Pair(NamedTuple):
  """The ids of a context and a continuation."""

  context: Int[np.ndarray, "n"]
  continuation: Int[np.ndarray, "m"]

  @property
  def row_length(self) -> int:
    """The number of tokens that the model reads: all except the last one."""
    return len(self.context) + len(self.continuation) - 1


class _Rows(NamedTuple):
  """A batch of pairs as arrays.

  Rows are padded on the right, where causal attention does not see the padding.

  Attributes:
    tokens: The inputs of the model.
    targets: The tokens that follow the inputs.
    is_scored: Whether a target belongs to a continuation.
  """

  tokens: Int[np.ndarray, "B T"]
  targets: Int[np.ndarray, "B T"]
  is_scored: Bool[np.ndarray, "B T"]


class _Batch(NamedTuple):
  """A batch of pairs, with their places in the caller's list of pairs.

  Attributes:
    indices: The index of the pair in each row. Rows without a pair follow.
    rows: The arrays of the batch.
  """

  indices: Sequence[int]
  rows: _Rows


class _Chunk(NamedTuple):
  """Consecutive positions of all rows of a batch.

  Attributes:
    hidden: The model's output, before the output embedding.
    targets: The tokens that follow.
    is_scored: Whether a target belongs to a continuation.
  """

  hidden: Float[Array, "B t E"]
  targets: Int[Array, "B t"]
  is_scored: Bool[Array, "B t"]


class _Results(NamedTuple):
  """The scores of the rows of a batch or chunk, as `Score` has them."""

  log_probability: Float[Array, "B"]
  is_greedy: Bool[Array, "B"]


def score(
  model: Decoder,
  params: PyTree,
  pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
  *,
  batch_tokens: int = BATCH_TOKENS,
  chunk_logits: int = CHUNK_LOGITS,
) -> list[Score]:
  """Returns the log-likelihoods of continuations after contexts.

  Rows are padded to a power of two or the model's maximum length. All batches
  of a length have the same number of rows. So one program is compiled for each
  length that occurs.

  Args:
    model: The decoder.
    params: Its parameters.
    pairs: Ids of (context, continuation), neither empty. If a continuation
      begins a document, its context is the token that separates documents.
    batch_tokens: The number of tokens in a batch, including padding. A longer
      row is the only one of its batch.
    chunk_logits: The number of logits that are in memory at once. This does
      not affect the result.

  Returns:
    A score for each pair, in the order of the pairs.

  Raises:
    UserError: if an id is outside the vocabulary, or if a pair without its last
      token is longer than the model's maximum length. The model does not read
      the last token.
    ValueError: if a context or a continuation is empty.
  """
  checked_pairs = _check_ids(pairs, model.config.vocab_size)
  max_length = model.config.max_length
  _check_lengths(checked_pairs, max_length)

  scores: dict[int, Score] = {}
  # The results of a batch are fetched after the next batch is dispatched, so
  # that the device does not wait for the host.
  dispatched: tuple[_Batch, _Results] | None = None
  for batch in _make_batches(checked_pairs, max_length, batch_tokens):
    results = _score_rows(model, params, batch.rows, chunk_logits)
    if dispatched is not None:
      scores |= _fetch(*dispatched)
    dispatched = batch, results
  if dispatched is not None:
    scores |= _fetch(*dispatched)
  return [scores[index] for index in range(len(pairs))]


def _check_ids(
  pairs: Sequence[tuple[Sequence[int], Sequence[int]]], vocab_size: int
) -> list[_Pair]:
  """Returns the pairs as arrays. Raises UserError if an id is invalid."""
  checked = []
  for index, (context, continuation) in enumerate(pairs):
    name = f"pair {index}: the"
    context_ids = validated_token_ids(context, vocab_size, f"{name} context")
    continuation_ids = validated_token_ids(
      continuation, vocab_size, f"{name} continuation"
    )
    checked.append(_Pair(context_ids, continuation_ids))
  return checked


def _check_lengths(pairs: Sequence[_Pair], max_length: int) -> None:
  """Raises an error if a part of a pair is empty, or a pair too long."""
  for index, pair in enumerate(pairs):
    context_length = len(pair.context)
    continuation_length = len(pair.continuation)
    if context_length == 0 or continuation_length == 0:
      raise ValueError(
        f"pair {index} has {context_length} tokens of context and"
        f" {continuation_length} of continuation; neither may be empty"
      )
    if pair.row_length > max_length:
      raise UserError(
        f"a continuation of {continuation_length} tokens after"
        f" {context_length} does not fit the model, whose"
        f" config.model.max_length is {max_length}; shorten the context"
      )


def _make_batches(
  pairs: Sequence[_Pair], max_length: int, batch_tokens: int
) -> Iterator[_Batch]:
  """Yields batches of pairs whose rows have the same padded length.

  Long rows come first, so that a lack of memory shows in the first batch.

  Args:
    pairs: All pairs.
    max_length: The maximum length of a row.
    batch_tokens: The number of tokens in a batch, including padding.
  """
  indices_by_length: dict[int, list[int]] = {}
  for index, pair in enumerate(pairs):
    length = _padded_length(pair.row_length, max_length)
    indices_by_length.setdefault(length, []).append(index)

  for length, indices in sorted(indices_by_length.items(), reverse=True):
    num_rows = max(1, batch_tokens // length)
    for start in range(0, len(indices), num_rows):
      batch_indices = indices[start : start + num_rows]
      batch_pairs = [pairs[index] for index in batch_indices]
      yield _Batch(batch_indices, _make_rows(batch_pairs, num_rows, length))


def _padded_length(length: int, max_length: int) -> int:
  """Returns the length of the row for a pair with `length` tokens.

  It is the next power of two from 32 on, or `max_length` if that is less.
  """
  # For example, 33 → 64: 33 − 1 has 6 binary digits, and 2^6 = 64.
  power_of_two = 1 << (length - 1).bit_length()
  return min(max(_MIN_ROW_LENGTH, power_of_two), max_length)


def _make_rows(pairs: Sequence[_Pair], num_rows: int, length: int) -> _Rows:
  """Returns the pairs as padded arrays.

  Example: the context [1, 2] and the continuation [3, 4] become
  tokens [1, 2, 3], targets [2, 3, 4] and is_scored [False, True, True].

  Args:
    pairs: The pairs. There may be fewer than rows.
    num_rows: The number of rows.
    length: The length of the rows, including padding.
  """
  shape = (num_rows, length)
  tokens = np.zeros(shape, np.int32)
  targets = np.zeros(shape, np.int32)
  is_scored = np.zeros(shape, bool)
  for row, pair in enumerate(pairs):
    ids = np.concatenate([pair.context, pair.continuation])
    end = pair.row_length
    tokens[row, :end] = ids[:-1]
    targets[row, :end] = ids[1:]
    # The last token of the context predicts the continuation's first token.
    first_scored = len(pair.context) - 1
    is_scored[row, first_scored:end] = True
  return _Rows(tokens, targets, is_scored)


def _fetch(batch: _Batch, results: _Results) -> dict[int, Score]:
  """Waits for the scores of a batch, and returns them by the pair's index."""
  log_probabilities = np.asarray(results.log_probability)
  is_greedy = np.asarray(results.is_greedy)
  scores = {}
  for row, index in enumerate(batch.indices):
    scores[index] = Score(float(log_probabilities[row]), bool(is_greedy[row]))
  return scores


@functools.partial(jax.jit, static_argnames=("model", "chunk_logits"))
def _score_rows(
  model: Decoder, params: PyTree, rows: _Rows, chunk_logits: int
) -> _Results:
  """Returns the scores of a batch of rows.

  The logits of one chunk of positions are in memory at once. Most chunks have
  no token of a continuation, and their logits are not computed.
  """
  # flax declares another type, because `apply` may also return variables.
  hidden: Any = model.apply({"params": params}, rows.tokens)
  embedding = output_embedding(params).astype(hidden.dtype)

  num_rows, length = rows.tokens.shape
  vocab_size = embedding.shape[0]
  chunk_length = max(1, chunk_logits // (num_rows * vocab_size))
  chunk_length = min(length, chunk_length)
  chunks = _Chunk(
    hidden=_split_positions(hidden, chunk_length),
    targets=_split_positions(rows.targets, chunk_length),
    is_scored=_split_positions(rows.is_scored, chunk_length),
  )

  def score_chunk(chunk: _Chunk) -> _Results:
    has_continuation = jnp.any(chunk.is_scored)
    return lax.cond(
      has_continuation, _score_chunk, _skip_chunk, embedding, chunk
    )

  chunk_results = lax.map(score_chunk, chunks)  # [chunks, B]
  # A continuation may lie in several chunks.
  return _Results(
    log_probability=chunk_results.log_probability.sum(0),
    is_greedy=chunk_results.is_greedy.all(0),
  )


def _split_positions(
  x: Float[Array | np.ndarray, "B T ..."], chunk_length: int
) -> Float[Array, "chunks B t ..."]:
  """Splits the positions T into chunks of t. Zeros fill up the last one."""
  num_rows, length, *rest_shape = x.shape
  num_padding = -length % chunk_length
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, num_padding)
  padded = jnp.pad(x, widths)
  chunks = padded.reshape(num_rows, -1, chunk_length, *rest_shape)
  return jnp.moveaxis(chunks, 1, 0)


def _score_chunk(embedding: Float[Array, "N E"], chunk: _Chunk) -> _Results:
  """Returns the scores of the positions in a chunk."""
  logits = jnp.einsum(
    "BTE,NE->BTN", chunk.hidden, embedding, preferred_element_type=jnp.float32
  )
  target_logits = jnp.take_along_axis(logits, chunk.targets[..., None], axis=-1)
  target_logits = target_logits[..., 0]
  log_probabilities = target_logits - jax.nn.logsumexp(logits, axis=-1)
  log_probabilities = jnp.where(chunk.is_scored, log_probabilities, 0)

  is_most_likely = jnp.argmax(logits, axis=-1) == chunk.targets
  # Positions that are not scored do not count.
  is_greedy = is_most_likely | ~chunk.is_scored
  return _Results(log_probabilities.sum(1), is_greedy.all(1))


def _skip_chunk(embedding: Float[Array, "N E"], chunk: _Chunk) -> _Results:
  """Returns the scores of a chunk that has no token of a continuation."""
  del embedding
  num_rows = chunk.targets.shape[0]
  return _Results(
    log_probability=jnp.zeros(num_rows, jnp.float32),
    is_greedy=jnp.ones(num_rows, bool),
  )
