"""Packed rows: their arrays in a batch, and their bytes on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

Batch = dict[str, Shaped[np.ndarray, "b T"]]


class Row(NamedTuple):
  """A packed row without its padding.

  Attributes:
    tokens: Ids, at most T + 1.
    segment_lengths: Number of tokens of each segment; sums to len(tokens).
    prompt_lengths: Number of tokens at the start of each segment that are not learnt; 0 for plain text.
  """

  tokens: Int[np.ndarray, "n"]
  segment_lengths: Int[np.ndarray, "m"]
  prompt_lengths: Int[np.ndarray, "m"]


# A row that is all padding.
EMPTY_ROW = Row(
  np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)
)


def make_batch(rows: Sequence[Row], length: int) -> Batch:
  """The arrays of a batch.

  Args:
    rows: b rows.
    length: T.

  Returns:
    "tokens", "targets", "segment_ids" (from 1 in each row; 0 is padding) and "positions" (from 0 in each segment), int32[b, T]; "weights",
    float32[b, T]: 1 where the target belongs to the input's segment and is learnt.
  """
  shape = len(rows), length + 1
  tokens, segment_ids, positions = (
    np.zeros(shape, np.int32),
    np.zeros(shape, np.int32),
    np.zeros(shape, np.int32),
  )
  column = np.arange(length + 1, dtype=np.int32)
  learnt = np.ones(shape, bool)
  for index, (row, lengths, prompts) in enumerate(rows):
    count = len(row)
    tokens[index, :count] = row
    if len(lengths) == 1:
      segment_ids[index, :count] = 1
      positions[index, :count] = column[:count]
    elif count:
      segment_ids[index, :count] = np.repeat(
        np.arange(1, len(lengths) + 1), lengths
      )
      positions[index, :count] = column[:count] - np.repeat(
        np.cumsum(lengths) - lengths, lengths
      )
    if prompts.any():
      learnt[index, :count] = positions[index, :count] >= np.repeat(
        prompts, lengths
      )
  weights = (
    (segment_ids[:, 1:] == segment_ids[:, :-1])
    & (segment_ids[:, :-1] > 0)
    & learnt[:, 1:]
  )
  return {
    "tokens": np.ascontiguousarray(tokens[:, :-1]),
    "targets": np.ascontiguousarray(tokens[:, 1:]),
    "segment_ids": np.ascontiguousarray(segment_ids[:, :-1]),
    "positions": np.ascontiguousarray(positions[:, :-1]),
    "weights": weights.astype(np.float32),
  }


def encode_row(row: Row, vocab_size: int, with_prompts: bool) -> bytes:
  """A row as it is stored.

  A record is the number of segments and their lengths (int32), then the tokens (uint16, or uint32 if vocab_size is above 2^16). With
  prompts, the number is negative, and the lengths of the prompts follow those of the segments.
  """
  count = len(row.segment_lengths)
  numbers = (
    [-count, *row.segment_lengths, *row.prompt_lengths]
    if with_prompts
    else [count, *row.segment_lengths]
  )
  return (
    np.array(numbers, "<i4").tobytes()
    + row.tokens.astype("<u2" if vocab_size <= 1 << 16 else "<u4").tobytes()
  )


def decode_row(record: bytes) -> Row:
  """The inverse of `encode_row`. The width of a token follows from the length of the record.

  Raises:
    ValueError: if the record does not hold as many tokens as its segments have.
  """
  number = int.from_bytes(record[:4], "little", signed=True)
  count = abs(number)
  lengths = np.frombuffer(record, "<i4", count, 4)
  prompts = (
    np.frombuffer(record, "<i4", count, 4 * (count + 1))
    if number < 0
    else np.zeros(count, np.int32)
  )
  start = 4 * (2 * count + 1) if number < 0 else 4 * (count + 1)
  num_tokens = int(lengths.sum())
  if len(record) - start not in (2 * num_tokens, 4 * num_tokens):
    raise ValueError(
      f"{len(record)} bytes do not hold the {num_tokens} tokens that the record announces"
    )
  return Row(
    np.frombuffer(
      record,
      "<u2" if len(record) - start == 2 * num_tokens else "<u4",
      num_tokens,
      start,
    ),
    lengths,
    prompts,
  )
