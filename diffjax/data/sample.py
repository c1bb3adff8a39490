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

# Limits of a sample: about two row groups of FineWeb-Edu, and a few seconds of
# work.
_MAX_CHARACTERS = 8 << 20
_MAX_DOCUMENTS = 20_000


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
  # Not part of the measured time.
  load_once(config.tokenizer)
  start = time.monotonic()
  documents, stored_bytes = _first_documents(source)
  if not documents:
    return Sample(stored_bytes, 0, 0, time.monotonic() - start)

  dataset = read_sequentially(grain.MapDataset.source(documents))
  counts = packing.ExampleCounts(config.length)
  rows = packing.make_rows(dataset, config, counts)
  with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, "sample.array_record")
    tokens = _write_rows(rows, path, config)
    row_bytes = os.path.getsize(path)
  return Sample(stored_bytes, tokens, row_bytes, time.monotonic() - start)


def _write_rows(rows: Iterable[Row], path: str, config: DataConfig) -> int:
  """Writes rows as they are prepared, and returns the number of tokens."""
  vocab_size = load_once(config.tokenizer).vocab_size
  with_prompts = bool(config.prompt_field)
  tokens = 0
  writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
  try:
    for row in rows:
      tokens += len(row.tokens)
      writer.write(encode_row(row, vocab_size, with_prompts))
  finally:
    writer.close()
  return tokens


def _first_documents(source: Source) -> tuple[list[Document], float]:
  """Returns the first documents and the bytes of the files that held them."""
  documents: list[Document] = []
  characters = 0
  stored_bytes = 0.0
  for part in source.iter_parts():
    size = source.part_size(part)
    # The source appends the share of the part that it has read.
    shares_read: list[float] = []
    for document in source.read(part, shares_read.append):
      documents.append(document)
      characters += len(document.text)
      if len(documents) >= _MAX_DOCUMENTS or characters >= _MAX_CHARACTERS:
        return documents, stored_bytes + size * shares_read[-1]
    stored_bytes += size
  return documents, stored_bytes
