"""AR-Hit: targets that a model can recall from their context.

A target is a hit if it ends an n-gram that has occurred in the context before.
Arora et al. 2023 ("Zoology", arXiv:2312.04927) introduced the measure. They use
bigrams and leave out frequent ones. Here all n-grams count. The paper splits
its loss by such n-grams (paper.md, §5) and does not specify n.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

# Number of different codes of n-grams that int64 can hold.
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
  ngram_tokens = _ngram_tokens(tokens, targets, n)
  codes = _ngram_codes(ngram_tokens, is_start)

  # All inputs of an n-gram must be in one segment, so the first n − 2 targets
  # of a segment end no n-gram.
  has_ngram = _positions(is_start) >= n - 2
  hits = np.zeros((num_rows, length), bool)
  hits[has_ngram] = _is_repeated(codes[has_ngram])
  return hits


def _ngram_tokens(
  tokens: Int[np.ndarray, "B T"], targets: Int[np.ndarray, "B T"], n: int
) -> list[Int[np.ndarray, "B T"]]:
  """Returns n arrays: the first, second, …, last token of each target's n-gram.

  The n-grams of the first targets of a row would begin before the row. Their
  missing tokens are 0.

  Args:
    tokens: The inputs.
    targets: The token after each input.
    n: Length of the n-grams.
  """
  length = tokens.shape[1]
  ngram_tokens = []
  # The input at the target's own column is the token before the target. Earlier
  # tokens of the n-gram are up to n − 2 columns to the left.
  for distance in range(n - 2, -1, -1):
    shifted = np.zeros_like(tokens)
    shifted[:, distance:] = tokens[:, : length - distance]
    ngram_tokens.append(shifted)
  ngram_tokens.append(targets)
  return ngram_tokens


def _ngram_codes(
  ngram_tokens: list[Int[np.ndarray, "B T"]],
  is_start: Bool[np.ndarray, "B T"],
) -> Int[np.ndarray, "B T"]:
  """Returns a number for each target that identifies segment and n-gram.

  A code is segment · N^n + token_1 · N^(n−1) + … + token_n with N tokens in the
  vocabulary. Segments are numbered over the whole batch, so that all rows can
  be sorted together.

  Args:
    ngram_tokens: The tokens of each target's n-gram, from first to last.
    is_start: Whether an input is the first of its segment.
  """
  largest_token = max(tokens.max(initial=0) for tokens in ngram_tokens)
  vocab_size = int(largest_token) + 1
  codes = np.cumsum(is_start).reshape(is_start.shape)
  # All codes are smaller than this.
  num_codes = codes.size + 1
  for tokens in ngram_tokens:
    if num_codes * vocab_size >= _MAX_CODES:
      # The next codes would not fit int64. Equal codes get equal numbers from 0
      # to the number of different codes.
      _, codes = np.unique(codes, return_inverse=True)
      codes = codes.reshape(is_start.shape)
      num_codes = codes.size
    codes = codes * vocab_size + tokens
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
