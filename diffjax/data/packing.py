"""Documents to rows of tokens, and rows to batches.

A document becomes ``[separator] + tokens + [separator]``. A row holds T + 1 tokens: the model reads the first T and predicts the last T.

* "documents": whole documents share a row, each a segment with positions that restart. A document longer than a row is cut into pieces,
  each a segment of its own; nothing is dropped or repeated.
* "concat": all tokens in one line, cut every T + 1; a row is one segment. Only the last row of a shard may be padded.

With prompts, a document is an example, ``[separator] + prompt + answer + [separator]``, of which the answer and the last separator are
learnt: targets before them have weight 0. Prompt and answer become tokens apart, since a prompt alone is what the model is given later.
Around the prompt stands config.data.prompt_template; its default, "Question: …", a line break, "Answer:" and a line break, is the form
in which models are commonly asked for mathematics, and ends where tokenizers cut anyway, so that the answer stands as it was written.
Examples are packed as "documents" are, with two differences: one whose prompt fills a row is left out, since no target would see it whole,
and so is a piece without a target. The later pieces of an answer that is longer than a row do not see its prompt.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int, Shaped

from diffjax.config import DataConfig, UserError
from diffjax.data.document import Document
from diffjax.data.tokenizer import Tokenizer, load_tokenizer
from diffjax.progress import say


class Row(NamedTuple):
  """A packed row without its padding.

  Attributes:
    tokens: Ids, at most T + 1.
    segment_lengths: Tokens of each segment; sums to len(tokens).
    prompt_lengths: How many of each segment's tokens, the first ones, are not learnt; None for plain text.
  """

  tokens: Int[np.ndarray, "n"]
  segment_lengths: Int[np.ndarray, "m"]
  prompt_lengths: Int[np.ndarray, "m"] | None = None


class Example(NamedTuple):
  """The tokens of a prompt and its answer, separators included, and how many of them, the first ones, are not learnt."""

  tokens: Int[np.ndarray, "n"]
  prompt_length: int


class ExampleCounts:
  """How examples fit the rows.

  Attributes:
    skipped: Examples left out, because their prompts fill a row.
    cut: Examples whose answers go on in pieces that do not see their prompts.
  """

  # Examples in a row to leave out before giving in: a source of nothing else, repeated for ever, would be read for ever.
  _PATIENCE = 10_000

  def __init__(self, length: int, aloud: bool = False):
    """Where examples are read for ever, and counts come to no end, `aloud` says so of the first one that is left out."""
    self.skipped = self.cut = self._in_a_row = 0
    self._length, self._aloud = length, aloud

  def skip(self, prompt_length: int) -> None:
    self.skipped += 1
    self._in_a_row += 1
    message = f"a prompt of {prompt_length:,} tokens fills a row (config.data.length = {self._length}), which leaves nothing to learn"
    if self._in_a_row > self._PATIENCE:
      raise UserError(f"config.data.source: {message}, and so do the {self._PATIENCE:,} before it; raise config.data.length")
    if self._aloud and self.skipped == 1:
      say(f"{message}: such examples are left out")

  def take(self, is_cut: bool) -> None:
    self.cut += is_cut
    self._in_a_row = 0


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
  return _best_fit(grain.experimental.FlatMapIterDataset(documents, _Pieces(length + 1)), ("tokens",), length).map(_packed_row)


def pack_examples(examples: grain.IterDataset[Example], length: int, counts: ExampleCounts) -> grain.IterDataset[Row]:
  """Packs prompts and answers into rows, each with a target that belongs to an answer.

  Args:
    examples: Dataset of Example.
    length: T.
    counts: What does not fit is counted there.

  Returns:
    Dataset of Row with prompt_lengths.

  Raises:
    UserError: while iterating, if thousands of examples after one another do not fit a row.
  """
  pieces = grain.experimental.FlatMapIterDataset(examples, _ExamplePieces(length + 1, counts))
  return _best_fit(pieces, ("tokens", "is_prompt"), length).map(_packed_examples)


def _best_fit(pieces: grain.IterDataset, features: Sequence[str], length: int) -> grain.IterDataset:
  # Rows are given out together once a piece fits none of them: more rows leave less padding, and cost memory
  bins = min(128, max(8, (1 << 18) // (length + 1)))
  return grain.experimental.BestFitPackIterDataset(
    pieces, length_struct=dict.fromkeys(features, length + 1), num_packing_bins=bins, shuffle_bins=False
  )


def _as_element(tokens: Int[np.ndarray, "n"]) -> dict[str, Int[np.ndarray, "n"]]:
  return {"tokens": tokens}


class _Pieces(grain.experimental.FlatMapTransform):
  """Cuts a document into pieces that fit a row."""

  max_fan_out = 1 << 30

  def __init__(self, size: int):
    self._size = size

  def flat_map(self, tokens: Int[np.ndarray, "n"]) -> list[dict[str, Int[np.ndarray, "p"]]]:
    return [{"tokens": tokens[start : start + self._size]} for start in range(0, len(tokens), self._size)]


class _ExamplePieces(grain.experimental.FlatMapTransform):
  """Cuts an example into pieces that fit a row and hold something to learn."""

  max_fan_out = 1 << 30

  def __init__(self, size: int, counts: ExampleCounts):
    self._size, self._counts = size, counts

  def flat_map(self, example: Example) -> list[dict[str, Shaped[np.ndarray, "p"]]]:
    if example.prompt_length >= self._size:
      self._counts.skip(example.prompt_length)
      return []
    is_prompt = np.arange(len(example.tokens)) < example.prompt_length
    starts = range(0, len(example.tokens) - 1, self._size)  # a piece of one token has no target
    self._counts.take(len(starts) > 1)
    return [{"tokens": example.tokens[start : start + self._size], "is_prompt": is_prompt[start : start + self._size]} for start in starts]


def _packed_row(element: dict[str, Any]) -> Row:
  lengths = np.bincount(element["tokens_segment_ids"], minlength=1)[1:].astype(np.int32)
  return Row(element["tokens"][: lengths.sum()], lengths)


def _packed_examples(element: dict[str, Any]) -> Row:
  row = _packed_row(element)
  prompts = np.bincount(element["tokens_segment_ids"], element["is_prompt"], minlength=1)[1:]
  return row._replace(prompt_lengths=prompts.astype(np.int32))


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
    float32[b, T]: 1 where the target belongs to the input's segment and is learnt.
  """
  shape = len(rows), length + 1
  tokens, segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  column = np.arange(length + 1, dtype=np.int32)
  learnt = np.ones(shape, bool)
  for index, (row, lengths, prompts) in enumerate(rows):
    count = len(row)
    tokens[index, :count] = row
    if len(lengths) == 1:
      segments[index, :count] = 1
      positions[index, :count] = column[:count]
    elif count:
      segments[index, :count] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
      positions[index, :count] = column[:count] - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if prompts is not None:
      learnt[index, :count] = positions[index, :count] >= np.repeat(prompts, lengths)
  weights = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0) & learnt[:, 1:]
  return {
    "tokens": np.ascontiguousarray(tokens[:, :-1]),
    "targets": np.ascontiguousarray(tokens[:, 1:]),
    "segment_ids": np.ascontiguousarray(segments[:, :-1]),
    "positions": np.ascontiguousarray(positions[:, :-1]),
    "weights": weights.astype(np.float32),
  }


def encode_row(row: Row, vocab_size: int) -> bytes:
  """A row as it is stored.

  The number of segments and their lengths (int32), then the tokens (uint16, or uint32 for large vocabularies). With prompts, the number is
  negative, and the prompts' lengths follow those of the segments.
  """
  count = len(row.segment_lengths)
  numbers = [count, *row.segment_lengths] if row.prompt_lengths is None else [-count, *row.segment_lengths, *row.prompt_lengths]
  header = np.array(numbers, "<i4")
  return header.tobytes() + row.tokens.astype("<u2" if vocab_size <= 1 << 16 else "<u4").tobytes()


def decode_row(record: bytes) -> Row:
  """The inverse of encode_row. The lengths tell how wide a token is."""
  number = int.from_bytes(record[:4], "little", signed=True)
  segments = abs(number)
  lengths = np.frombuffer(record, "<i4", segments, 4)
  prompts = np.frombuffer(record, "<i4", segments, 4 * (segments + 1)) if number < 0 else None
  start = 4 * (segments + 1) if prompts is None else 4 * (2 * segments + 1)
  count = int(lengths.sum())
  if len(record) - start not in (2 * count, 4 * count):
    raise ValueError(f"{len(record)} bytes do not hold the {count} tokens that the record announces")
  return Row(np.frombuffer(record, "<u2" if len(record) - start == 2 * count else "<u4", count, start), lengths, prompts)


@functools.lru_cache(maxsize=4)
def load_once(spec: str) -> Tokenizer:
  """Loaded once a process, by name, so that worker processes need not be sent whole vocabularies."""
  return load_tokenizer(spec)


class Tokenize:
  """Document to its tokens, separators included."""

  def __init__(self, tokenizer: str):
    self._spec = tokenizer

  def __call__(self, document: Document) -> Int[np.ndarray, "n"]:
    tokenizer = load_once(self._spec)
    ids = tokenizer.encode(document.text)
    tokens = np.empty(len(ids) + 2, np.int32)
    tokens[0] = tokens[-1] = tokenizer.separator
    tokens[1:-1] = ids
    return tokens


class TokenizeExample:
  """Document with a prompt to its tokens."""

  def __init__(self, tokenizer: str):
    self._spec = tokenizer

  def __call__(self, document: Document) -> Example:
    tokenizer = load_once(self._spec)
    assert document.prompt is not None
    prompt, answer = tokenizer.encode(document.prompt), tokenizer.encode(document.text)
    tokens = np.concatenate([[tokenizer.separator], prompt, answer, [tokenizer.separator]])
    return Example(tokens.astype(np.int32), 1 + len(prompt))


def make_rows(documents: grain.IterDataset[Document], config: DataConfig, counts: ExampleCounts) -> grain.IterDataset[Row]:
  """Documents to rows, as the config says: tokenised and packed.

  Args:
    documents: Dataset of Document, all with a prompt if config.prompt_field is set, else all without.
    config: The data fields.
    counts: What does not fit a row is counted there.

  Returns:
    Dataset of Row.
  """
  if config.prompt_field:
    return pack_examples(documents.map(TokenizeExample(config.tokenizer)), config.length, counts)
  return pack(documents.map(Tokenize(config.tokenizer)), config.length, config.packing)


class Documents(grain.IterDataset):
  """Reads the parts of a source. The iterator's state is the parts' state and the number of documents taken from the present part.

  Args:
    parts: What `read` understands, once or for ever.
    read: Gives the documents of a part.
    patience: Parts in a row that may hold no documents: a source without any, repeated for ever, would otherwise be read for ever.
    spec: The source, for messages.
  """

  def __init__(self, parts: grain.IterDataset, read: Callable[[Any], Iterator[Document]], patience: int, spec: str):
    super().__init__(parts)
    self._read, self._patience, self._spec = read, patience, spec

  def __iter__(self) -> grain.DatasetIterator:
    return _DocumentIterator(self._parent.__iter__(), self._read, self._patience, self._spec)


class _DocumentIterator(grain.DatasetIterator):
  def __init__(self, parent: grain.DatasetIterator, read: Callable[[Any], Iterator[Document]], patience: int, spec: str):
    super().__init__(parent)
    self._read, self._patience, self._spec = read, patience, spec
    self._documents: Iterator[Document] = iter(())
    self._before_part = parent.get_state()
    self._taken = 0

  def __next__(self) -> Document:
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
