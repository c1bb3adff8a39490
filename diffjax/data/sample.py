"""A sample of a source, from which the work on all of it is estimated."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from typing import NamedTuple

import grain
from array_record.python import array_record_module

from diffjax.config import DataConfig
from diffjax.data import packing
from diffjax.data.document import Document, Source
from diffjax.data.reader import read_sequentially
from diffjax.data.row import Row, encode_row
from diffjax.data.tokenizer import load_once

# A sample ends at the first of these limits. They hold about two row groups of
# FineWeb-Edu, which take a few seconds.
_MAX_CHARACTERS = 8 * 1024**2
MAX_DOCUMENTS = 20_000


class Sample(NamedTuple):
  """Measurements of the first documents of a source.

  Attributes:
    stored_bytes: Bytes of the source's files that were read.
    tokens: Number of tokens, document tokens included.
    row_bytes: Bytes of the prepared rows on disk.
    seconds: Time to read, tokenize, pack and write them on one core.
  """

  stored_bytes: float
  tokens: int
  row_bytes: int
  seconds: float


class _FirstDocuments(NamedTuple):
  """The first documents of a source.

  Attributes:
    documents: The documents.
    stored_bytes: Bytes of the source's files that hold them.
  """

  documents: list[Document]
  stored_bytes: float


class _PartProgress:
  """Keeps the progress that `Source.read` reports while it reads a part.

  Attributes:
    fraction: The fraction of the part that has been read.
  """

  def __init__(self) -> None:
    self.fraction = 0.0

  def update(self, fraction: float) -> None:
    self.fraction = fraction


def take_sample(source: Source, config: DataConfig) -> Sample:
  """Prepares the first documents of a source in a temporary directory.

  All fields except `seconds` depend only on the source and the config, so every
  process of a run gets the same values.

  Args:
    source: One split of a source.
    config: The data fields.

  Returns:
    The sample. Its `tokens` are 0 if the source has no documents.

  Raises:
    UserError: if a document cannot be read.
  """
  # Loads the tokenizer into its cache, so that this time is not measured.
  load_once(config.tokenizer)
  start = time.monotonic()
  documents, stored_bytes = _read_first_documents(source)
  if not documents:
    seconds = time.monotonic() - start
    return Sample(stored_bytes, tokens=0, row_bytes=0, seconds=seconds)

  dataset = read_sequentially(grain.MapDataset.source(documents))
  counts = packing.ExampleCounts(config.length)
  rows = packing.make_rows(dataset, config, counts)
  with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, "sample.array_record")
    num_tokens = _write_rows(rows, path, config)
    row_bytes = os.path.getsize(path)
  seconds = time.monotonic() - start
  return Sample(stored_bytes, num_tokens, row_bytes, seconds)


def _read_first_documents(source: Source) -> _FirstDocuments:
  """Reads documents from the beginning of a source, up to the sample limits."""
  documents: list[Document] = []
  num_characters = 0
  # Bytes of the parts that have been read completely.
  stored_bytes = 0.0
  for part in source.iter_parts():
    part_bytes = source.part_size(part)
    progress = _PartProgress()
    for document in source.read(part, progress.update):
      documents.append(document)
      num_characters += len(document.text)
      if len(documents) >= MAX_DOCUMENTS or num_characters >= _MAX_CHARACTERS:
        stored_bytes += progress.fraction * part_bytes
        return _FirstDocuments(documents, stored_bytes)
    stored_bytes += part_bytes
  return _FirstDocuments(documents, stored_bytes)


def _write_rows(rows: Iterable[Row], path: str, config: DataConfig) -> int:
  """Writes rows to an ArrayRecord file, in the format of prepared rows.

  Returns:
    The number of tokens in the rows.
  """
  vocab_size = load_once(config.tokenizer).vocab_size
  with_prompts = config.prompt_field != ""
  num_tokens = 0
  writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
  try:
    for row in rows:
      num_tokens += len(row.tokens)
      writer.write(encode_row(row, vocab_size, with_prompts))
  finally:
    writer.close()
  return num_tokens
