"""Packing keeps every token once and in order, and segments do not see each other."""

import grain
import numpy as np
import pytest

from diffjax.data import packing
from diffjax.data.row import EMPTY_ROW, Row, decode_row, encode_row, make_batch

LENGTH = 16


def make_documents(seed=0, count=200):
  """Documents whose tokens all differ, so that each can be recognised."""
  rng = np.random.default_rng(seed)
  ends = np.cumsum(rng.integers(1, 50, count))
  return np.split(np.arange(1, ends[-1] + 1, dtype=np.int32), ends[:-1])


def pack(documents, kind):
  examples = [packing.Example(document, 0) for document in documents]
  dataset = grain.MapDataset.source(examples).to_iter_dataset(
    grain.ReadOptions(num_threads=0)
  )
  return list(
    packing.pack(dataset, LENGTH, kind, packing.ExampleCounts(LENGTH))
  )


def make_row(tokens, *segment_lengths):
  return Row(
    np.asarray(tokens),
    np.array(segment_lengths, np.int32),
    np.zeros(len(segment_lengths), np.int32),
  )


def segments(rows):
  return [
    piece
    for row in rows
    for piece in np.split(row.tokens, np.cumsum(row.segment_lengths)[:-1])
  ]


@pytest.mark.parametrize("kind", ["documents", "concat"])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_there_once(kind, seed):
  documents = make_documents(seed)
  rows = pack(documents, kind)
  assert sorted(np.concatenate([row.tokens for row in rows])) == sorted(
    np.concatenate(documents)
  )
  assert all(
    len(row.tokens) <= LENGTH + 1
    and row.segment_lengths.sum() == len(row.tokens)
    for row in rows
  )


def test_concat_keeps_the_order_and_pads_the_last_row_only():
  documents = make_documents()
  rows = pack(documents, "concat")
  np.testing.assert_array_equal(
    np.concatenate([row.tokens for row in rows]), np.concatenate(documents)
  )
  assert all(len(row.tokens) == LENGTH + 1 for row in rows[:-1])
  assert all(len(row.segment_lengths) == 1 for row in rows)


def test_segments_are_whole_documents_or_pieces_of_long_ones():
  documents = make_documents()
  pieces = {piece[0]: piece for piece in segments(pack(documents, "documents"))}
  for document in documents:
    if len(document) <= LENGTH + 1:
      np.testing.assert_array_equal(pieces.pop(document[0]), document)
    else:  # cut at the row length, in order
      for start in range(0, len(document), LENGTH + 1):
        np.testing.assert_array_equal(
          pieces.pop(document[start]), document[start : start + LENGTH + 1]
        )
  assert not pieces


def test_short_documents_share_rows():
  rows = pack(make_documents(), "documents")
  fill = sum(len(row.tokens) for row in rows) / len(rows) / (LENGTH + 1)
  assert fill > 0.9 and max(len(row.segment_lengths) for row in rows) > 1


def test_batch_arrays_of_a_known_row():
  batch = make_batch([make_row([7, 8, 9, 5, 6], 3, 2), EMPTY_ROW], 7)
  expected = {
    "tokens": [7, 8, 9, 5, 6, 0, 0],
    "targets": [8, 9, 5, 6, 0, 0, 0],
    "segment_ids": [1, 1, 1, 2, 2, 0, 0],
    "positions": [0, 1, 2, 0, 1, 0, 0],
    "weights": [1, 1, 0, 1, 0, 0, 0],
  }
  assert batch.keys() == expected.keys()
  for key, value in expected.items():
    np.testing.assert_array_equal(batch[key], [value, [0] * 7], err_msg=key)
    assert (
      batch[key].dtype == (np.float32 if key == "weights" else np.int32)
      and batch[key].flags.c_contiguous
    )


def test_batch_properties():
  documents = make_documents()
  owner = {
    token: index
    for index, document in enumerate(documents)
    for token in document
  }
  batch = make_batch(pack(documents, "documents"), LENGTH)
  ids, targets, weights = (
    batch["segment_ids"],
    batch["targets"],
    batch["weights"],
  )
  for b, t in np.ndindex(ids.shape):
    token = batch["tokens"][b, t]
    if not ids[b, t]:
      assert weights[b, t] == 0
      continue
    if weights[b, t]:  # a target is the next token of the same document
      assert targets[b, t] == token + 1 and owner[token] == owner[targets[b, t]]
    first = t == 0 or ids[b, t] != ids[b, t - 1]
    assert batch["positions"][b, t] == (
      0 if first else batch["positions"][b, t - 1] + 1
    )
  assert weights.sum() == sum(
    len(piece) - 1 for piece in segments(pack(documents, "documents"))
  )


@pytest.mark.parametrize("vocab_size", [256, 1 << 16, (1 << 16) + 1])
def test_records_give_back_their_row(vocab_size):
  for row in pack(make_documents(), "documents"):
    row = row._replace(
      tokens=row.tokens + vocab_size - 12_000
      if vocab_size > 12_000
      else row.tokens % vocab_size
    )
    again = decode_row(encode_row(row, vocab_size, False))
    for left, right in zip(row, again, strict=True):
      np.testing.assert_array_equal(left, right)


def test_a_cut_record_is_noticed():
  record = encode_row(make_row(np.arange(10), 4, 6), 256, False)
  with pytest.raises(ValueError, match="10 tokens"):
    decode_row(record[:-1])
