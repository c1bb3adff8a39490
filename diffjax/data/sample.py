"""A sample of a source, from which the work on all of it is estimated."""

from __future__ import annotations

import os
import tempfile
import time
from typing import NamedTuple

import grain

from diffjax.config import DataConfig
from diffjax.data import packing
from diffjax.data.document import Document, Source
from diffjax.data.row import encode_row
from diffjax.data.tokenizer import load_once

# About two row groups of FineWeb-Edu, and a few seconds of work.
_MAX_CHARACTERS = 8 << 20
_MAX_DOCUMENTS = 20_000


class Sample(NamedTuple):
  """What the first documents of a source became.

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
  from array_record.python import array_record_module

  vocab_size = load_once(config.tokenizer).vocab_size
  start = time.monotonic()
  documents, stored_bytes = _first_documents(source)
  if not documents:
    return Sample(stored_bytes, 0, 0, time.monotonic() - start)
  dataset = grain.MapDataset.source(documents).to_iter_dataset(
    grain.ReadOptions(num_threads=0)
  )
  counts = packing.ExampleCounts(config.length)
  tokens = 0
  with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, "sample.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    try:
      for row in packing.make_rows(dataset, config, counts):
        tokens += len(row.tokens)
        writer.write(
          encode_row(row, vocab_size, with_prompts=bool(config.prompt_field))
        )
    finally:
      writer.close()
    row_bytes = os.path.getsize(path)
  return Sample(stored_bytes, tokens, row_bytes, time.monotonic() - start)


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
