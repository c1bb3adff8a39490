"""Packing: documents become examples of tokens, and examples share rows.

A row holds T + 1 tokens: the first T are inputs, the last T are targets. A
document becomes one example: ``start + prompt + text + end``. Start and end are
the tokenizer's document tokens, one separator each for models that are trained
here. Targets inside the prompt have weight 0. If there is a prompt, the start
is part of it. Plain text is an example with a prompt of length 0.

There are two kinds of packing:

* "documents": Whole examples share a row. Each example is a segment, with its
  own positions. An example that is longer than a row is cut into pieces, and
  each piece is a segment.
* "concat": All tokens form one sequence, which is cut every T + 1 tokens. Each
  row is one segment. Only the last row of a shard may contain padding. Plain
  text only.

Plain text is never dropped or repeated. Two things are dropped from examples
with a prompt:

* Examples with a prompt that fills a row. No target could attend to all of it.
* A last piece of a single token, because it has no target.

If an answer is longer than a row, only its first piece sees the prompt.

The prompt and the answer are tokenized separately, because at inference the
model is given a prompt alone. `config.data.prompt_template` is the text around
the prompt. The default is "Question: …", a line break, "Answer:" and a line
break. This form is common for mathematics. Tokenizers split after its last line
break, so the answer has the same tokens as it has without a prompt.
"""

from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int

from diffjax.config import DataConfig, UserError
from diffjax.data.abstract_tokenizer import Tokenizer
from diffjax.data.document import Document
from diffjax.data.row import Row
from diffjax.data.tokenizer import load_once
from diffjax.host.progress import say

# The packer fills several rows at the same time and emits them together. More
# rows leave less padding but take more memory. The number of rows follows from
# this total number of tokens and is limited by the bounds below.
_PACKER_TOKENS = 1 << 18
_MIN_PACKER_ROWS = 8
_MAX_PACKER_ROWS = 128

# Token ids below this number fit a byte.
_NUM_BYTES = 256


class Example(NamedTuple):
  """The tokens of a document.

  Attributes:
    tokens: Token ids, including the document tokens.
    prompt_length: Number of first tokens that are not learned. It includes the
      document tokens before the prompt. 0 for plain text.
  """

  tokens: Int[np.ndarray, "n"]
  prompt_length: int


class Tokenize:
  """Converts a Document to an Example. Can be sent to workers."""

  def __init__(self, tokenizer: str):
    """Initializes the conversion.

    Args:
      tokenizer: As in config.data.tokenizer. Each worker loads it.
    """
    self._tokenizer_spec = tokenizer

  def __call__(self, document: Document) -> Example:
    """Returns the tokens ``start + prompt + text + end`` of a document."""
    tokenizer = load_once(self._tokenizer_spec)
    document_tokens = tokenizer.document_tokens
    before_text = np.asarray(document_tokens.start, np.int32)
    prompt_length = 0
    if document.prompt is not None:
      prompt = _token_array(tokenizer.encode(document.prompt), tokenizer)
      before_text = np.concatenate([before_text, prompt])
      prompt_length = len(before_text)
    text = _token_array(tokenizer.encode(document.text), tokenizer)
    end = np.asarray(document_tokens.end, np.int32)
    tokens = np.concatenate([before_text, text, end])
    return Example(tokens, prompt_length)


def _token_array(ids: list[int], tokenizer: Tokenizer) -> Int[np.ndarray, "n"]:
  """Returns token ids as an int32 array."""
  if tokenizer.vocab_size <= _NUM_BYTES:
    # `bytes` converts a list of ints about six times as fast as NumPy.
    return np.frombuffer(bytes(ids), np.uint8).astype(np.int32)
  return np.asarray(ids, np.int32)


class ExampleCounts:
  """Counts the examples with prompts that do not fit a row.

  Attributes:
    skipped: Number of examples that are dropped, because the prompt fills a
      row.
    cut: Number of examples that are cut into several pieces. Only the first
      piece sees the prompt.
  """

  # Without this limit, a repeated source in which every prompt fills a row
  # would be read endlessly.
  MAX_SKIPPED_IN_A_ROW = 10_000

  def __init__(self, length: int, report_first: bool = False):
    """Initializes the counts.

    Args:
      length: T, for messages.
      report_first: Whether to report the first dropped example. Set it for
        streamed data, which has no final count to report.
    """
    self.skipped = 0
    self.cut = 0
    self._skipped_in_a_row = 0
    self._length = length
    self._report_first = report_first

  def add_skipped(self, prompt_length: int) -> None:
    """Counts an example that is dropped.

    Args:
      prompt_length: Its number of prompt tokens, for messages.

    Raises:
      UserError: if thousands of consecutive examples were dropped.
    """
    self.skipped += 1
    self._skipped_in_a_row += 1
    problem = (
      f"a prompt of {prompt_length:,} tokens fills a row"
      f" (config.data.length = {self._length}), which leaves nothing to learn"
    )
    if self._skipped_in_a_row > self.MAX_SKIPPED_IN_A_ROW:
      raise UserError(
        f"config.data.source: {problem}. The {self.MAX_SKIPPED_IN_A_ROW:,}"
        " prompts before it also fill a row; raise config.data.length"
      )
    if self._report_first and self.skipped == 1:
      say(f"{problem}: such examples are left out")

  def add_packed(self, is_cut: bool) -> None:
    """Counts an example that is packed, whole or cut into pieces."""
    self._skipped_in_a_row = 0
    if is_cut:
      self.cut += 1


def pack(
  examples: grain.IterDataset[Example],
  length: int,
  packing: str,
  counts: ExampleCounts,
) -> grain.IterDataset[Row]:
  """Returns a dataset of rows, packed from examples.

  Args:
    examples: The examples.
    length: T, the number of targets in a row.
    packing: "documents" or, for plain text, "concat".
    counts: Counts the examples that do not fit a row.

  Returns:
    A dataset of rows. The state of its iterator determines exactly which rows
    come next.

  Raises:
    UserError: during iteration, if thousands of consecutive examples do not fit
      a row.
  """
  if packing == "concat":
    return _pack_concat(examples, length)
  return _pack_documents(examples, length, counts)


def _pack_concat(
  examples: grain.IterDataset[Example], length: int
) -> grain.IterDataset[Row]:
  """Concatenates all examples, and cuts the tokens into rows of T + 1."""
  packed = grain.experimental.ConcatThenSplitIterDataset(
    examples.map(_concat_element), length_struct={"tokens": length + 1}
  )
  return packed.map(_concat_row)


def _concat_element(example: Example) -> dict[str, Int[np.ndarray, "n"]]:
  """Converts an example to an element for the packer."""
  return {"tokens": example.tokens}


def _concat_row(element: dict[str, Any]) -> Row:
  """Converts an element from the packer to a row with one segment."""
  # Padding comes last and has the segment id 0.
  num_tokens = np.count_nonzero(element["tokens_segment_ids"])
  return Row(
    tokens=element["tokens"][:num_tokens],
    segment_lengths=np.array([num_tokens], np.int32),
    prompt_lengths=np.zeros(1, np.int32),
  )


def _pack_documents(
  examples: grain.IterDataset[Example], length: int, counts: ExampleCounts
) -> grain.IterDataset[Row]:
  """Packs whole examples, or pieces of long ones, by best fit."""
  row_size = length + 1
  pieces = grain.experimental.FlatMapIterDataset(
    examples, _Cut(row_size, counts)
  )
  num_rows = _PACKER_TOKENS // row_size
  num_rows = max(num_rows, _MIN_PACKER_ROWS)
  num_rows = min(num_rows, _MAX_PACKER_ROWS)
  packed = grain.experimental.BestFitPackIterDataset(
    pieces,
    length_struct={"tokens": row_size},
    num_packing_bins=num_rows,
    shuffle_bins=False,
    # Grain does not add segment ids and positions for these features. The two
    # lengths become lists with one entry for each piece in the row.
    meta_features=("tokens", "segment_length", "prompt_length"),
  )
  return packed.map(_documents_row)


class _Cut(grain.experimental.FlatMapTransform):
  """Cuts an example into pieces that fit a row.

  Drops an example whose prompt fills a row.
  """

  # The number of pieces at which Grain raises an error. No example reaches it.
  max_fan_out = 1 << 30

  def __init__(self, row_size: int, counts: ExampleCounts):
    self._row_size = row_size
    self._counts = counts

  def flat_map(self, example: Example) -> list[dict[str, Any]]:
    """Returns the pieces of an example, as elements for the packer."""
    if example.prompt_length >= self._row_size:
      self._counts.add_skipped(example.prompt_length)
      return []

    has_prompt = example.prompt_length > 0
    prompt_length = example.prompt_length
    pieces = []
    for start in range(0, len(example.tokens), self._row_size):
      tokens = example.tokens[start : start + self._row_size]
      # Plain text is never dropped. Otherwise, a last piece of a single token
      # is dropped, because it has no target.
      if has_prompt and len(tokens) == 1:
        break
      pieces.append(
        {
          "tokens": tokens,
          "segment_length": len(tokens),
          "prompt_length": prompt_length,
        }
      )
      # Only the first piece contains the prompt.
      prompt_length = 0

    self._counts.add_packed(is_cut=len(pieces) > 1)
    return pieces


def _documents_row(element: dict[str, Any]) -> Row:
  """Converts an element from the packer to a row without padding.

  The element has the tokens of the pieces and then padding, and the lists
  "segment_length" and "prompt_length" with one entry for each piece.
  """
  segment_lengths = np.array(element["segment_length"], np.int32)
  prompt_lengths = np.array(element["prompt_length"], np.int32)
  num_tokens = segment_lengths.sum()
  return Row(element["tokens"][:num_tokens], segment_lengths, prompt_lengths)


def make_rows(
  documents: grain.IterDataset[Document],
  config: DataConfig,
  counts: ExampleCounts,
) -> grain.IterDataset[Row]:
  """Returns a dataset of rows: tokenizes and packs documents.

  Args:
    documents: The documents. All have a prompt if `config.prompt_field` is set.
      Otherwise, none has a prompt.
    config: The data fields.
    counts: Counts the examples that do not fit a row.
  """
  examples = documents.map(Tokenize(config.tokenizer))
  return pack(examples, config.length, config.packing, counts)
