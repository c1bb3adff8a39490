"""Packing keeps every token once, and separates the documents of a row."""

import chex
import grain
import numpy as np
import pytest

from diffjax.data import packing
from diffjax.data.row import EMPTY_ROW, Row, decode_row, encode_row, make_batch

LENGTH = 16
# A row has a last target, so it has one token more.
ROW_TOKENS = LENGTH + 1


def make_documents(seed=0) -> list[np.ndarray]:
  """Returns 200 documents whose tokens are all different: 1, 2, 3, …"""
  rng = np.random.default_rng(seed)
  ends = np.cumsum(rng.integers(1, 50, 200))
  tokens = np.arange(1, ends[-1] + 1, dtype=np.int32)
  return np.split(tokens, ends[:-1])


def pack(documents, kind) -> list[Row]:
  """Returns the rows of documents without prompts."""
  examples = [packing.Example(document, 0) for document in documents]
  dataset = grain.MapDataset.source(examples).to_iter_dataset(
    grain.ReadOptions(num_threads=0)
  )
  counts = packing.ExampleCounts(LENGTH)
  return list(packing.pack(dataset, LENGTH, kind, counts))


def make_row(tokens, segment_lengths) -> Row:
  """Returns a row without prompts."""
  return Row(
    np.asarray(tokens),
    np.array(segment_lengths, np.int32),
    np.zeros(len(segment_lengths), np.int32),
  )


def split_segments(rows) -> list[np.ndarray]:
  """Returns the tokens of each segment of the rows."""
  segments = []
  for row in rows:
    segments.extend(np.split(row.tokens, np.cumsum(row.segment_lengths)[:-1]))
  return segments


# Rows.


@pytest.mark.parametrize("kind", ["documents", "concat"])
@pytest.mark.parametrize("seed", range(5))
def test_rows_have_every_token_once(kind, seed):
  documents = make_documents(seed)

  rows = pack(documents, kind)

  # The tokens of the documents count up from 1.
  expected = np.concatenate(documents)
  tokens = np.concatenate([row.tokens for row in rows])
  chex.assert_trees_all_equal(np.sort(tokens), expected)


@pytest.mark.parametrize("kind", ["documents", "concat"])
def test_the_segments_of_a_row_have_all_its_tokens(kind):
  rows = pack(make_documents(), kind)

  for row in rows:
    assert len(row.tokens) <= ROW_TOKENS
    assert row.segment_lengths.sum() == len(row.tokens)


def test_concatenation_keeps_the_order_of_the_tokens():
  documents = make_documents()

  rows = pack(documents, "concat")

  tokens = np.concatenate([row.tokens for row in rows])
  chex.assert_trees_all_equal(tokens, np.concatenate(documents))


def test_concatenation_fills_all_rows_but_the_last():
  """A row is one segment, also if it has parts of several documents."""
  rows = pack(make_documents(), "concat")

  for row in rows:
    assert len(row.segment_lengths) == 1
  for row in rows[:-1]:
    assert len(row.tokens) == ROW_TOKENS


def test_segments_are_documents_or_pieces_of_long_documents():
  """Only documents that are longer than a row are cut, into pieces of a row."""
  documents = make_documents()

  segments = split_segments(pack(documents, "documents"))

  pieces = []
  for document in documents:
    # A document of at most a row is its only piece.
    for start in range(0, len(document), ROW_TOKENS):
      pieces.append(document[start : start + ROW_TOKENS])
  # Tokens increase, so the first tokens give both the same order.
  segments.sort(key=lambda segment: segment[0])
  chex.assert_trees_all_equal(segments, pieces)


def test_short_documents_share_rows():
  rows = pack(make_documents(), "documents")

  most_segments = max(len(row.segment_lengths) for row in rows)
  assert most_segments > 1
  # Less than a tenth of the rows is padding.
  num_tokens = sum(len(row.tokens) for row in rows)
  capacity = len(rows) * ROW_TOKENS
  assert num_tokens > 0.9 * capacity


# Batches.


def test_the_arrays_of_a_known_row():
  """The row has the segments 7, 8, 9 and 5, 6. A second row is all padding."""
  row = make_row([7, 8, 9, 5, 6], segment_lengths=[3, 2])

  batch = make_batch([row, EMPTY_ROW], length=7)

  padding = [0, 0, 0, 0, 0, 0, 0]
  expected = {
    "tokens": np.int32([[7, 8, 9, 5, 6, 0, 0], padding]),
    "targets": np.int32([[8, 9, 5, 6, 0, 0, 0], padding]),
    "segment_ids": np.int32([[1, 1, 1, 2, 2, 0, 0], padding]),
    "positions": np.int32([[0, 1, 2, 0, 1, 0, 0], padding]),
    # The last token of a segment has no target in its segment.
    "weights": np.float32([[1, 1, 0, 1, 0, 0, 0], padding]),
  }
  chex.assert_trees_all_equal(batch, expected, strict=True)
  for array in batch.values():
    assert array.flags.c_contiguous


def test_a_target_with_weight_is_the_next_token_of_its_document():
  """The last token of a document has no target, and so no weight."""
  documents = make_documents()

  batch = make_batch(pack(documents, "documents"), LENGTH)

  has_weight = batch["weights"] > 0
  tokens = batch["tokens"][has_weight]
  targets = batch["targets"][has_weight]
  # The tokens of the documents count up: 1, 2, 3, …
  chex.assert_trees_all_equal(targets, tokens + 1)
  # A target that begins a document would be the next token of another one.
  first_tokens = [document[0] for document in documents]
  assert not np.isin(targets, first_tokens).any()


def test_every_token_of_a_segment_after_the_first_is_a_target():
  """The weights count the targets."""
  rows = pack(make_documents(), "documents")

  batch = make_batch(rows, LENGTH)

  num_targets = 0
  for segment in split_segments(rows):
    num_targets += len(segment) - 1
  assert batch["weights"].sum() == num_targets


def test_padding_has_no_weight():
  batch = make_batch(pack(make_documents(), "documents"), LENGTH)

  is_padding = batch["segment_ids"] == 0
  assert is_padding.any()
  assert not batch["weights"][is_padding].any()


def test_positions_count_from_the_start_of_each_segment():
  """The positions of a segment are 0, 1, 2, …"""
  batch = make_batch(pack(make_documents(), "documents"), LENGTH)

  for segment_ids, positions in zip(
    batch["segment_ids"], batch["positions"], strict=True
  ):
    for segment_id in range(1, segment_ids.max() + 1):
      segment_positions = positions[segment_ids == segment_id]
      chex.assert_trees_all_equal(
        segment_positions, np.arange(len(segment_positions), dtype=np.int32)
      )


# Records.


@pytest.mark.parametrize("vocab_size", [256, 65_536, 65_537])
def test_a_decoded_record_is_the_encoded_row(vocab_size):
  """An id takes two bytes, or four if there are more than 65,536 ids."""
  for row in pack(make_documents(), "documents"):
    # Replace the tokens by the 256 largest ids of the vocabulary.
    row = row._replace(tokens=vocab_size - 1 - row.tokens % 256)

    decoded = decode_row(
      encode_row(row, vocab_size=vocab_size, with_prompts=False)
    )

    chex.assert_trees_all_equal(decoded, row)


def test_a_record_that_was_cut_short_is_an_error():
  row = make_row(np.arange(10), segment_lengths=[4, 6])
  record = encode_row(row, vocab_size=256, with_prompts=False)
  record_without_last_byte = record[:-1]

  with pytest.raises(ValueError, match="10 tokens"):
    decode_row(record_without_last_byte)
