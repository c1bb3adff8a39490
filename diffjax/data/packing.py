"""Documents to rows of tokens, and rows to batches.

A document becomes ``[separator] + tokens + [separator]``. A row holds T + 1 tokens: the model reads the first T and predicts the last T.

* "documents": whole documents share a row, each a segment with positions that restart. A document longer than a row is cut into pieces,
  each a segment of its own; nothing is dropped or repeated.
* "concat": all tokens in one line, cut every T + 1; a row is one segment. Only the last row of a shard may be padded.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int, Shaped

from diffjax.config import UserError
from diffjax.data.tokenizer import Tokenizer, load_tokenizer


class Row(NamedTuple):
  """A packed row without its padding.

  Attributes:
    tokens: Ids, at most T + 1.
    segment_lengths: Tokens of each segment; sums to len(tokens).
  """

  tokens: Int[np.ndarray, "n"]
  segment_lengths: Int[np.ndarray, "m"]


Batch = dict[str, Shaped[np.ndarray, "b T"]]


def pack(documents: grain.IterDataset, length: int, packing: str) -> grain.IterDataset:
  """Packs documents into rows.

  Args:
    documents: Dataset of int32 arrays: the tokens of one document, separators included.
    length: T.
    packing: "documents" or "concat".

  Returns:
    Dataset of Row. An iterator's state says exactly which rows it has given.
  """
  if packing == "concat":
    elements = documents.map(_as_element)
    packed = grain.experimental.ConcatThenSplitIterDataset(elements, length_struct={"tokens": length + 1})
    return packed.map(_concatenated_row)
  pieces = grain.experimental.FlatMapIterDataset(documents, _Pieces(length + 1))
  # Rows are given out together once a piece fits none of them: more rows leave less padding, and cost memory
  bins = min(128, max(8, (1 << 18) // (length + 1)))
  packed = grain.experimental.BestFitPackIterDataset(
    pieces, length_struct={"tokens": length + 1}, num_packing_bins=bins, shuffle_bins=False
  )
  return packed.map(_packed_row)


def _as_element(tokens: Int[np.ndarray, "n"]) -> dict[str, Int[np.ndarray, "n"]]:
  return {"tokens": tokens}


class _Pieces(grain.experimental.FlatMapTransform):
  """Cuts a document into pieces that fit a row."""

  max_fan_out = 1 << 30

  def __init__(self, size: int):
    self._size = size

  def flat_map(self, tokens: Int[np.ndarray, "n"]) -> list[dict[str, Int[np.ndarray, "p"]]]:
    return [{"tokens": tokens[start : start + self._size]} for start in range(0, len(tokens), self._size)]


def _packed_row(element: dict[str, Any]) -> Row:
  lengths = np.bincount(element["tokens_segment_ids"], minlength=1)[1:].astype(np.int32)
  return Row(element["tokens"][: lengths.sum()], lengths)


def _concatenated_row(element: dict[str, Any]) -> Row:
  count = np.count_nonzero(element["tokens_segment_ids"])
  return Row(element["tokens"][:count], np.array([count], np.int32))


def make_batch(rows: Sequence[Row], length: int) -> Batch:
  """Arrays of a batch.

  Args:
    rows: b rows; one without tokens is all padding.
    length: T.

  Returns:
    "tokens", "targets", "segment_ids" (from 1 in each row; 0 is padding) and "positions" (from 0 in each segment), int32[b, T]; "weights",
    float32[b, T]: 1 where the target belongs to the input's segment.
  """
  shape = len(rows), length + 1
  tokens, segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  column = np.arange(length + 1, dtype=np.int32)
  for index, (row, lengths) in enumerate(rows):
    count = len(row)
    tokens[index, :count] = row
    if len(lengths) == 1:
      segments[index, :count] = 1
      positions[index, :count] = column[:count]
    elif count:
      segments[index, :count] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
      positions[index, :count] = column[:count] - np.repeat(np.cumsum(lengths) - lengths, lengths)
  weights = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0)
  return {
    "tokens": np.ascontiguousarray(tokens[:, :-1]),
    "targets": np.ascontiguousarray(tokens[:, 1:]),
    "segment_ids": np.ascontiguousarray(segments[:, :-1]),
    "positions": np.ascontiguousarray(positions[:, :-1]),
    "weights": weights.astype(np.float32),
  }


def encode_row(row: Row, vocab_size: int) -> bytes:
  """A row as it is stored: the number of segments and their lengths (int32), then the tokens (uint16, or uint32 for large vocabularies)."""
  header = np.concatenate([[len(row.segment_lengths)], row.segment_lengths]).astype("<i4")
  return header.tobytes() + row.tokens.astype("<u2" if vocab_size <= 1 << 16 else "<u4").tobytes()


def decode_row(record: bytes) -> Row:
  """The inverse of encode_row. The lengths tell how wide a token is."""
  segments = int.from_bytes(record[:4], "little")
  lengths = np.frombuffer(record, "<i4", segments, 4)
  start = 4 * (segments + 1)
  count = int(lengths.sum())
  if len(record) - start not in (2 * count, 4 * count):
    raise ValueError(f"{len(record)} bytes do not hold the {count} tokens that the record announces")
  return Row(np.frombuffer(record, "<u2" if len(record) - start == 2 * count else "<u4", count, start), lengths)


@functools.lru_cache(maxsize=4)
def load_once(spec: str) -> Tokenizer:
  """Loaded once a process, by name, so that worker processes need not be sent whole vocabularies."""
  return load_tokenizer(spec)


class Tokenize:
  """Document to its tokens, separators included."""

  def __init__(self, tokenizer: str):
    self._spec = tokenizer

  def __call__(self, document: tuple[str, bool]) -> Int[np.ndarray, "n"]:
    tokenizer = load_once(self._spec)
    ids = tokenizer.encode(document[0])
    tokens = np.empty(len(ids) + 2, np.int32)
    tokens[0] = tokens[-1] = tokenizer.separator
    tokens[1:-1] = ids
    return tokens


class Documents(grain.IterDataset):
  """Reads the parts of a source. The iterator's state is the parts' state and the number of documents taken from the present part.

  Args:
    parts: What `read` understands, once or for ever.
    read: Gives the documents of a part.
    patience: Parts in a row that may hold no documents: a source without any, repeated for ever, would otherwise be read for ever.
    spec: The source, for messages.
  """

  def __init__(self, parts: grain.IterDataset, read: Callable[[Any], Iterator[tuple[str, bool]]], patience: int, spec: str):
    super().__init__(parts)
    self._read, self._patience, self._spec = read, patience, spec

  def __iter__(self) -> grain.DatasetIterator:
    return _DocumentIterator(self._parent.__iter__(), self._read, self._patience, self._spec)


class _DocumentIterator(grain.DatasetIterator):
  def __init__(self, parent: grain.DatasetIterator, read: Callable[[Any], Iterator[tuple[str, bool]]], patience: int, spec: str):
    super().__init__(parent)
    self._read, self._patience, self._spec = read, patience, spec
    self._documents: Iterator[tuple[str, bool]] = iter(())
    self._before_part = parent.get_state()
    self._taken = 0

  def __next__(self) -> tuple[str, bool]:
    parts = 0
    while True:
      for document in self._documents:
        self._taken += 1
        return document
      parts += 1
      if parts > self._patience + 1:
        raise UserError(
          f"config.data.source {self._spec!r}: empty: no document to train on (documents without text do not count, nor those "
          "held out by config.data.validation_fraction)"
        )
      before = self._parent.get_state()
      part = next(self._parent)
      self._before_part, self._taken, self._documents = before, 0, self._read(part)

  def get_state(self) -> dict[str, Any]:
    return {"part": self._before_part, "taken": self._taken}

  def set_state(self, state: dict[str, Any]) -> None:
    self._parent.set_state(state["part"])
    self._before_part, self._taken, self._documents = state["part"], 0, iter(())
    for _ in range(state["taken"]):
      next(self)
