"""Packed rows: their arrays in a batch, and their bytes on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

# The arrays of a batch by name, in the memory of the host. `put_batch` of
# `diffjax.parallel.mesh` turns them into the arrays on the devices that a
# training step takes (`diffjax.training.step.Batch`).
HostBatch = dict[str, Shaped[np.ndarray, "b T"]]

# Numbers on disk are little-endian.
_INT32: np.dtype = np.dtype("<i4")
_UINT16: np.dtype = np.dtype("<u2")
_UINT32: np.dtype = np.dtype("<u4")
# Token ids of smaller vocabularies fit two bytes.
_MAX_UINT16_VOCABULARY = 1 << 16


class Row(NamedTuple):
  """A packed row without its padding.

  Attributes:
    tokens: Token ids, at most T + 1.
    segment_lengths: Number of tokens of each segment. Their sum is len(tokens).
    prompt_lengths: Number of first tokens of each segment that are not learned.
      0 for plain text.
  """

  tokens: Int[np.ndarray, "n"]
  segment_lengths: Int[np.ndarray, "m"]
  prompt_lengths: Int[np.ndarray, "m"]


# A row that is all padding.
EMPTY_ROW = Row(
  tokens=np.zeros(0, np.int32),
  segment_lengths=np.zeros(0, np.int32),
  prompt_lengths=np.zeros(0, np.int32),
)


def make_batch(rows: Sequence[Row], length: int) -> HostBatch:
  """Returns the arrays of a batch.

  Example: a row of the tokens 7, 8, 9, 5, 6 in segments of 3 and 2 tokens, with
  length = 5:

    tokens       7 8 9 5 6
    targets      8 9 5 6 0
    segment_ids  1 1 1 2 2
    positions    0 1 2 0 1
    weights      1 1 0 1 0

  Args:
    rows: b rows.
    length: T.

  Returns:
    A dict of int32[b, T] arrays, and of "weights" in float32:
      "tokens": The inputs. 0 is padding.
      "targets": The token after each input.
      "segment_ids": The segment of each input, from 1. 0 is padding.
      "positions": The position of each input in its segment, from 0.
      "weights": 1 if the target belongs to the input's segment and is learned,
        otherwise 0.
  """
  # The inputs are the first T columns. The targets are the last T columns.
  shape = (len(rows), length + 1)
  tokens = np.zeros(shape, np.int32)
  segment_ids = np.zeros(shape, np.int32)
  positions = np.zeros(shape, np.int32)
  is_learned = np.ones(shape, bool)
  for index, row in enumerate(rows):
    num_tokens = len(row.tokens)
    tokens[index, :num_tokens] = row.tokens
    segment_ids[index, :num_tokens] = _segment_ids(row)
    positions[index, :num_tokens] = _positions(row)
    # Without prompts, all tokens are learned.
    if row.prompt_lengths.any():
      is_learned[index, :num_tokens] = _is_answer(row)

  input_segment_ids = segment_ids[:, :-1]
  target_segment_ids = segment_ids[:, 1:]
  is_same_segment = target_segment_ids == input_segment_ids
  is_padding = input_segment_ids == 0
  weights = is_same_segment & ~is_padding & is_learned[:, 1:]
  return {
    "tokens": np.ascontiguousarray(tokens[:, :-1]),
    "targets": np.ascontiguousarray(tokens[:, 1:]),
    "segment_ids": np.ascontiguousarray(input_segment_ids),
    "positions": np.ascontiguousarray(positions[:, :-1]),
    "weights": weights.astype(np.float32),
  }


def _segment_ids(row: Row) -> Int[np.ndarray, "n"]:
  """Returns the segment of each token of a row, from 1."""
  num_segments = len(row.segment_lengths)
  # `np.repeat` is slow, and rows of one segment are frequent.
  if num_segments == 1:
    return np.ones(len(row.tokens), np.int32)
  segment_ids = np.arange(1, num_segments + 1, dtype=np.int32)
  return np.repeat(segment_ids, row.segment_lengths)


def _positions(row: Row) -> Int[np.ndarray, "n"]:
  """Returns the position of each token in its segment, from 0."""
  columns = np.arange(len(row.tokens), dtype=np.int32)
  lengths = row.segment_lengths
  if len(lengths) == 1:
    return columns
  segment_starts = np.cumsum(lengths, dtype=np.int32) - lengths
  return columns - np.repeat(segment_starts, lengths)


def _is_answer(row: Row) -> Bool[np.ndarray, "n"]:
  """Returns which tokens come after the prompt of their segment."""
  return _positions(row) >= np.repeat(row.prompt_lengths, row.segment_lengths)


def encode_row(row: Row, vocab_size: int, with_prompts: bool) -> bytes:
  """Returns the record in which a row is stored on disk.

  The record consists of these little-endian numbers:

  1. The number of segments (int32). With prompts, the number is negated.
  2. The length of each segment (int32).
  3. With prompts, the length of the prompt of each segment (int32).
  4. The tokens (uint16, or uint32 if vocab_size is larger than 2^16).

  Args:
    row: The row.
    vocab_size: Number of tokens of the tokenizer.
    with_prompts: Whether to store the lengths of the prompts.
  """
  num_segments = len(row.segment_lengths)
  if with_prompts:
    header = [-num_segments, *row.segment_lengths, *row.prompt_lengths]
  else:
    header = [num_segments, *row.segment_lengths]
  if vocab_size <= _MAX_UINT16_VOCABULARY:
    token_type = _UINT16
  else:
    token_type = _UINT32
  header_bytes = np.array(header, _INT32).tobytes()
  return header_bytes + row.tokens.astype(token_type).tobytes()


def decode_row(record: bytes) -> Row:
  """Returns the row of a record that `encode_row` made.

  The record does not say whether its tokens are uint16 or uint32. This follows
  from its size and the lengths of its segments.

  Raises:
    ValueError: if the size of the record does not match its segments.
  """
  first_number = int.from_bytes(record[:4], "little", signed=True)
  has_prompts = first_number < 0
  num_segments = abs(first_number)

  # The offset in bytes of the next numbers in the record.
  offset = _INT32.itemsize
  lengths_bytes = num_segments * _INT32.itemsize
  segment_lengths = np.frombuffer(record, _INT32, num_segments, offset)
  offset += lengths_bytes
  if has_prompts:
    prompt_lengths = np.frombuffer(record, _INT32, num_segments, offset)
    offset += lengths_bytes
  else:
    prompt_lengths = np.zeros(num_segments, np.int32)

  num_tokens = int(segment_lengths.sum())
  tokens_bytes = len(record) - offset
  for token_type in (_UINT16, _UINT32):
    if tokens_bytes == num_tokens * token_type.itemsize:
      tokens = np.frombuffer(record, token_type, num_tokens, offset)
      return Row(tokens, segment_lengths, prompt_lengths)
  raise ValueError(
    f"{len(record)} bytes do not hold the {num_tokens} tokens that the record"
    " announces"
  )
