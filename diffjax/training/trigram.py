"""A byte trigram model, the baseline that a trained model has to beat: counts over training rows, interpolated by Witten and Bell."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Float, Int

from diffjax.config import Config
from diffjax.data.pipeline import training_rows
from diffjax.data.row import Batch

# Tokens that the baseline of a byte-level run is fitted on, at most: all of the embedded corpus, seconds of counting.
_MOST_TOKENS = 200_000_000


@dataclasses.dataclass(frozen=True)
class TrigramModel:
  """Probabilities of the next token after one token and after two."""

  # after_one[b, c] = P(c | b)
  after_one: Float[np.ndarray, "N N"]
  # after_two[a, b, c] = P(c | a b)
  after_two: Float[np.ndarray, "N N N"]

  def bits_per_byte(
    self,
    batches: Iterable[Batch],
    token_bytes: Int[np.ndarray, N] | None = None,
  ) -> float:
    """Bits that the model needs for a byte of the targets with weight, the ones a transformer is judged on.

    Args:
      batches: Dicts of tokens, targets, segment_ids and weights [B, T].
      token_bytes: Bytes that each token stands for; one each by default.

    Returns:
      Sum of −log₂ P(target | at most two tokens before it, in its segment) over the sum of their bytes.

    Raises:
      ValueError: if no target has weight.
    """
    bits, size = 0.0, 0
    for batch in batches:
      pair, triple, has_two = _codes(batch, self.after_one.shape[0])
      probability = np.where(
        has_two,
        self.after_two.reshape(-1)[triple],
        self.after_one.reshape(-1)[pair],
      )
      bits -= float(np.log2(probability).sum(dtype=np.float64))
      size += (
        int(token_bytes[batch["targets"][batch["weights"] > 0]].sum())
        if token_bytes is not None
        else pair.size
      )
    if not size:
      raise ValueError("no target with weight stands for any byte")
    return bits / size


def baseline(
  config: Config, validation: Iterable[Batch], token_bytes: Int[np.ndarray, N]
) -> float:
  """Bits per byte of a model that is fitted on the training split of a run on bytes.

  Args:
    config: The run's; its rows are prepared.
    validation: Its validation batches.
    token_bytes: Bytes that each token stands for.
  """
  rows = 1024
  batches = itertools.islice(
    training_rows(config, rows),
    max(1, _MOST_TOKENS // (rows * config.data.length)),
  )
  return fit(batches).bits_per_byte(validation, token_bytes)


def fit(batches: Iterable[Batch], vocab_size: int = 256) -> TrigramModel:
  """Counts the targets with weight, each after the tokens of its own segment.

  P(c | context) = (count(context c) + kinds(context) · P(c | context without its first token)) / (count(context) + kinds(context)),
  where kinds is how many different tokens followed the context (Witten and Bell 1991, method C); the unigram falls back to 1/N.

  Args:
    batches: Dicts of tokens, targets, segment_ids and weights [B, T].
    vocab_size: N. Memory is 8·N³ bytes: 128 MiB for bytes.

  Returns:
    The model; every probability is positive.
  """
  pairs, triples = (
    np.zeros(vocab_size**2, np.uint32),
    np.zeros(vocab_size**3, np.uint32),
  )
  for batch in batches:
    pair, triple, has_two = _codes(batch, vocab_size)
    np.add.at(pairs, pair, np.uint32(1))
    np.add.at(triples, triple[has_two], np.uint32(1))
  after_one_counts, after_two_counts = (
    pairs.reshape(vocab_size, vocab_size),
    triples.reshape((vocab_size,) * 3),
  )
  after_none = _interpolate(
    after_one_counts.sum(axis=0, dtype=np.int64),
    np.full(vocab_size, 1 / vocab_size),
  )
  after_one = _interpolate(after_one_counts, after_none)
  after_two = np.empty((vocab_size,) * 3, np.float32)
  # One first token at a time, because the intermediate values are float64.
  for first in range(vocab_size):
    counts = after_two_counts[first]
    # Contexts that do not occur have the shorter context's probabilities.
    after_two[first] = after_one
    occurs = counts.any(axis=-1)
    after_two[first, occurs] = _interpolate(counts[occurs], after_one[occurs])
  return TrigramModel(after_one.astype(np.float32), after_two)


def _interpolate(
  counts: Int[np.ndarray, "... N"], shorter: Float[np.ndarray, "... N"]
) -> Float[np.ndarray, "... N"]:
  """Distributions from counts, each mixed with the one after the shorter context; that one alone where nothing was counted."""
  kinds = np.maximum(np.count_nonzero(counts, axis=-1, keepdims=True), 1)
  return (counts + kinds * shorter) / (
    counts.sum(axis=-1, keepdims=True, dtype=np.int64) + kinds
  )


def _codes(
  batch: Batch, vocab_size: int
) -> tuple[Int[np.ndarray, P], Int[np.ndarray, P], Bool[np.ndarray, P]]:
  """For each target with weight: the number of (token, target), that of (token before, token, target), and whether the latter exists."""
  tokens, targets, segment_ids = (
    batch["tokens"],
    batch["targets"],
    batch["segment_ids"],
  )
  if max(tokens.max(initial=0), targets.max(initial=0)) >= vocab_size:
    raise ValueError(
      f"the trigram model was made for {vocab_size} tokens; got token {max(tokens.max(), targets.max())}"
    )
  judged = batch["weights"] > 0
  pair = tokens.astype(np.int32) * np.int32(vocab_size) + targets
  triple = pair.copy()
  triple[:, 1:] += tokens[:, :-1].astype(np.int32) * np.int32(vocab_size**2)
  has_two = np.zeros(tokens.shape, bool)
  has_two[:, 1:] = segment_ids[:, 1:] == segment_ids[:, :-1]
  return pair[judged], triple[judged], has_two[judged]
