"""Packing: documents become examples of tokens, and examples share rows.

A row holds T + 1 tokens: the model reads the first T and predicts the last T. A document becomes an example,
``start + prompt + text + end``, where start and end are the tokenizer's document tokens: one separator each for models that are trained
here. Targets in its prompt, the start included, have weight 0. Plain text is an example whose prompt has length 0.

* "documents": whole examples share a row. Each is a segment with positions that restart. An example longer than a row is cut into pieces,
  each a segment of its own.
* "concat" (plain text only): all tokens in one sequence, cut every T + 1. A row is one segment. Only the last row of a shard may be padded.

Nothing of plain text is dropped or repeated. With prompts, an example is left out if its prompt fills a row, since no target would see the
whole prompt; and the last piece of an example is left out if it is a single token, since it has no target. The later pieces of an answer
that is longer than a row do not see its prompt.

Prompt and answer are tokenised apart, because the model is later given a prompt alone. config.data.prompt_template stands around the
prompt. Its default, "Question: …", a line break, "Answer:" and a line break, is a common form for mathematics and ends where tokenizers
split anyway, so that the tokens of the answer are those of its text.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int

from diffjax.config import DataConfig, UserError
from diffjax.data.document import Document
from diffjax.data.row import Row
from diffjax.data.tokenizer import load_once
from diffjax.host.progress import say


class Example(NamedTuple):
  """The tokens of a document.

  Attributes:
    tokens: Ids, document tokens included.
    prompt_length: Number of tokens at the start that are not learnt; 0 for plain text.
  """

  tokens: Int[np.ndarray, "n"]
  prompt_length: int


class Tokenize:
  """Turns a document into an Example."""

  def __init__(self, tokenizer: str):
    self._spec = tokenizer

  def __call__(self, document: Document) -> Example:
    tokenizer = load_once(self._spec)
    start, end, *_ = tokenizer.document_tokens
    parts: list[Any] = [start]
    prompt_length = 0
    if document.prompt is not None:
      prompt = tokenizer.encode(document.prompt)
      parts.append(prompt)
      prompt_length = len(start) + len(prompt)
    parts += [tokenizer.encode(document.text), end]
    tokens = np.concatenate([np.asarray(part, np.int32) for part in parts])
    return Example(tokens, prompt_length)


class ExampleCounts:
  """Counts of examples with prompts that do not fit a row.

  Attributes:
    skipped: Examples left out, because their prompts fill a row.
    cut: Examples in several pieces, of which the later ones do not see the prompt.
  """

  # Skipped examples in a row before an error: a source of nothing else, repeated for ever, would be read for ever.
  _PATIENCE = 10_000

  def __init__(self, length: int, report_first: bool = False):
    """report_first: report the first skipped example (a stream has no final count)."""
    self.skipped = self.cut = self._in_a_row = 0
    self._length, self._report_first = length, report_first

  def skip(self, prompt_length: int) -> None:
    """Counts an example that is left out.

    Raises:
      UserError: if thousands were left out one after the other.
    """
    self.skipped += 1
    self._in_a_row += 1
    message = f"a prompt of {prompt_length:,} tokens fills a row (config.data.length = {self._length}), which leaves nothing to learn"
    if self._in_a_row > self._PATIENCE:
      raise UserError(
        f"config.data.source: {message}, and so do the {self._PATIENCE:,} before it; raise config.data.length"
      )
    if self._report_first and self.skipped == 1:
      say(f"{message}: such examples are left out")

  def take(self, is_cut: bool) -> None:
    """Counts an example that is packed."""
    self.cut += is_cut
    self._in_a_row = 0


def pack(
  examples: grain.IterDataset[Example],
  length: int,
  packing: str,
  counts: ExampleCounts,
) -> grain.IterDataset[Row]:
  """Packs examples into rows.

  Args:
    examples: Dataset of Example.
    length: T.
    packing: "documents" or, for plain text, "concat".
    counts: Examples that do not fit are counted there.

  Returns:
    Dataset of Row. An iterator's state says exactly which rows it has given.

  Raises:
    UserError: while iterating, if thousands of examples after one another do not fit a row.
  """
  if packing == "concat":
    elements = examples.map(_tokens)
    packed = grain.experimental.ConcatThenSplitIterDataset(
      elements, length_struct={"tokens": length + 1}
    )
    return packed.map(_concatenated_row)
  pieces = grain.experimental.FlatMapIterDataset(
    examples, _Pieces(length + 1, counts)
  )
  # The packer gives out its rows together, once a piece fits none of them. More rows leave less padding, and cost memory.
  num_rows = min(128, max(8, (1 << 18) // (length + 1)))
  packed = grain.experimental.BestFitPackIterDataset(
    pieces,
    length_struct={"tokens": length + 1},
    num_packing_bins=num_rows,
    shuffle_bins=False,
    meta_features=(
      "tokens",
      "segment_length",
      "prompt_length",
    ),  # given out as they are, the last two in a list for each row
  )
  return packed.map(_packed_row)


class _Pieces(grain.experimental.FlatMapTransform):
  """Cuts an example into pieces that fit a row."""

  max_fan_out = 1 << 30

  def __init__(self, size: int, counts: ExampleCounts):
    self._size, self._counts = size, counts

  def flat_map(self, example: Example) -> list[dict[str, Any]]:
    tokens, prompt_length = example
    if prompt_length >= self._size:
      self._counts.skip(prompt_length)
      return []
    starts = range(
      0, len(tokens) - (prompt_length > 0), self._size
    )  # with a prompt, without a last piece of one token
    self._counts.take(len(starts) > 1)
    pieces = [tokens[start : start + self._size] for start in starts]
    prompt_lengths = [prompt_length] + [0] * (len(pieces) - 1)
    return [
      {"tokens": piece, "segment_length": len(piece), "prompt_length": number}
      for piece, number in zip(pieces, prompt_lengths, strict=True)
    ]


def _packed_row(element: dict[str, Any]) -> Row:
  lengths = np.array(element["segment_length"], np.int32)
  return Row(
    element["tokens"][: lengths.sum()],
    lengths,
    np.array(element["prompt_length"], np.int32),
  )


def _tokens(example: Example) -> dict[str, Int[np.ndarray, "n"]]:
  return {"tokens": example.tokens}


def _concatenated_row(element: dict[str, Any]) -> Row:
  count = np.count_nonzero(element["tokens_segment_ids"])
  return Row(
    element["tokens"][:count],
    np.array([count], np.int32),
    np.zeros(1, np.int32),
  )


def make_rows(
  documents: grain.IterDataset[Document],
  config: DataConfig,
  counts: ExampleCounts,
) -> grain.IterDataset[Row]:
  """Tokenises and packs documents as the config says.

  Args:
    documents: Dataset of Document, all with a prompt if config.prompt_field is set, else all without.
    config: The data fields.
    counts: Examples that do not fit a row are counted there.

  Returns:
    Dataset of Row.
  """
  return pack(
    documents.map(Tokenize(config.tokenizer)),
    config.length,
    config.packing,
    counts,
  )


class Documents(grain.IterDataset):
  """Dataset of the documents of a source.

  An iterator's state is that of its parts and the number of documents taken from the current part.

  Args:
    parts: Dataset of parts, once or for ever.
    read: Gives the documents of a part.
    patience: Parts in a row that may hold no documents. More are an error: an empty source, repeated for ever, would be read for ever.
    spec: The source, for messages.
  """

  def __init__(
    self,
    parts: grain.IterDataset,
    read: Callable[[Any], Iterator[Document]],
    patience: int,
    spec: str,
  ):
    super().__init__(parts)
    self._read, self._patience, self._spec = read, patience, spec

  def __iter__(self) -> grain.DatasetIterator:
    return _DocumentIterator(
      self._parent.__iter__(), self._read, self._patience, self._spec
    )


class _DocumentIterator(grain.DatasetIterator):
  def __init__(
    self,
    parent: grain.DatasetIterator,
    read: Callable[[Any], Iterator[Document]],
    patience: int,
    spec: str,
  ):
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
      self._before_part, self._taken, self._documents = (
        before,
        0,
        self._read(part),
      )

  def get_state(self) -> dict[str, Any]:
    return {"part": self._before_part, "taken": self._taken}

  def set_state(self, state: dict[str, Any]) -> None:
    self._parent.set_state(state["part"])
    self._before_part, self._taken, self._documents = state["part"], 0, iter(())
    for _ in range(state["taken"]):
      next(self)
