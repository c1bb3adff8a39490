"""AR-Hit: targets that a model can recall from their context.

A target is a hit if it ends an n-gram that has occurred in the context before.
Arora et al. 2023 ("Zoology", arXiv:2312.04927) introduced the measure. They use
bigrams and leave out frequent ones. Here all n-grams count. The paper splits
its loss by such n-grams (paper.md, §5) and does not specify n.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

# Codes of n-grams must be smaller, to fit int64.
_MAX_CODES = 2**63


def ar_hit_mask(
  tokens: Int[np.ndarray, "B T"],
  targets: Int[np.ndarray, "B T"],
  segment_ids: Int[np.ndarray, "B T"],
  n: int = 2,
) -> Bool[np.ndarray, "B T"]:
  """Returns which targets end an n-gram seen earlier in their segment.

  The n-gram of a target consists of the n − 1 inputs before it and the target
  itself. It was seen if it ended at an earlier target of the same segment. The
  two n-grams may overlap. The value of a target with weight 0, such as the one
  at the end of a segment, has no meaning.

  Example: in the text "the cat, the dog" with one token per letter and n = 2,
  the hits are "h", "e" and " " of the second "the ".

  Args:
    tokens: The inputs.
    targets: The token after each input.
    segment_ids: The segment of each input. Consecutive inputs of a row with
      equal ids are one segment.
    n: Length of the n-grams, at least 2.

  Raises:
    ValueError: if n is below 2.
  """
  if n < 2:
    raise ValueError(f"an n-gram of AR-Hit has at least 2 tokens; got n = {n}")
  num_rows, length = tokens.shape
  # The longest n-gram of a row consists of all inputs and the last target.
  if n > length + 1:
    return np.zeros((num_rows, length), bool)

  is_start = np.ones((num_rows, length), bool)
  is_start[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
  codes = _ngram_codes(tokens, targets, is_start, n)

  # All inputs of an n-gram must be in one segment, so the first n − 2 targets
  # of a segment end no n-gram.
  has_ngram = _positions(is_start) >= n - 2
  hits = np.zeros((num_rows, length), bool)
  hits[has_ngram] = _is_repeated(codes[has_ngram])
  return hits


def _ngram_codes(
  tokens: Int[np.ndarray, "B T"],
  targets: Int[np.ndarray, "B T"],
  is_start: Bool[np.ndarray, "B T"],
  n: int,
) -> Int[np.ndarray, "B T"]:
  """Returns a number for each target that identifies segment and n-gram.

  A code is segment · N^n + token_1 · N^(n−1) + … + token_n with N tokens in the
  vocabulary. Segments are numbered over the whole batch, so that all rows can
  be sorted together. Before the codes exceed int64, they are renumbered.

  Args:
    tokens: The inputs.
    targets: The token after each input.
    is_start: Whether an input is the first of its segment.
    n: Length of the n-grams.
  """
  num_rows, length = tokens.shape
  largest_token = max(tokens.max(initial=0), targets.max(initial=0))
  vocab_size = int(largest_token) + 1

  # The inputs of an n-gram, the first one first, and then its target.
  columns = []
  for distance in range(n - 2, -1, -1):
    shifted = np.zeros_like(tokens)
    shifted[:, distance:] = tokens[:, : length - distance]
    columns.append(shifted)
  columns.append(targets)

  codes = np.cumsum(is_start).reshape(num_rows, length)
  # All codes are smaller than this.
  num_codes = codes.size + 1
  for column in columns:
    if num_codes * vocab_size >= _MAX_CODES:
      _, codes = np.unique(codes, return_inverse=True)
      codes = codes.reshape(num_rows, length)
      num_codes = codes.size
    codes = codes * vocab_size + column
    num_codes *= vocab_size
  return codes


def _positions(is_start: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
  """Returns the position of each input in its segment, from 0."""
  columns = np.arange(is_start.shape[1])
  start_columns = np.where(is_start, columns, 0)
  segment_starts = np.maximum.accumulate(start_columns, axis=1)
  return columns - segment_starts


def _is_repeated(codes: Int[np.ndarray, "m"]) -> Bool[np.ndarray, "m"]:
  """Returns which codes are equal to an earlier one."""
  # A stable sort keeps equal codes in the order of the text. So in sorted
  # order, a code that is equal to the one before it is a repetition.
  order = np.argsort(codes, kind="stable")
  sorted_codes = codes[order]
  is_repeated = np.zeros(codes.size, bool)
  is_repeated[order[1:]] = sorted_codes[1:] == sorted_codes[:-1]
  return is_repeated
