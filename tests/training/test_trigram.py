"""The trigram model is a distribution, equals a count by hand, sees no other document, and is a baseline worth beating."""

import math
import pathlib

import numpy as np
import pytest

from diffjax.training import trigram


def batch_of(row, segment_ids=None, weights=None):
  row = np.asarray(row, np.int32)[None]
  segments = (
    np.ones(row.shape, np.int32)
    if segment_ids is None
    else np.asarray(segment_ids, np.int32)[None]
  )
  if weights is None:
    weights = (segments[:, 1:] == segments[:, :-1]).astype(np.float32)
  return {
    "tokens": row[:, :-1],
    "targets": row[:, 1:],
    "segment_ids": segments[:, :-1],
    "weights": weights,
  }


def test_counts_by_hand():
  model = trigram.fit([batch_of([0, 1, 0, 1, 2])], vocab_size=4)
  # Targets 1 0 1 2: pairs 01 10 01 12, triples 010 101 012; a target at position 0 counts in no triple.
  one = lambda count: (count + 3 / 4) / (4 + 3)  # noqa: E731  # three kinds among four targets
  assert model.after_one[0] == pytest.approx(
    [(0 + one(1)) / 3, (2 + one(2)) / 3, one(1) / 3, one(0) / 3]
  )
  assert model.after_one[1] == pytest.approx(
    [
      (1 + 2 * one(1)) / 4,
      (0 + 2 * one(2)) / 4,
      (1 + 2 * one(1)) / 4,
      2 * one(0) / 4,
    ]
  )
  assert model.after_two[1, 0] == pytest.approx(
    (np.array([0, 1, 0, 0]) + model.after_one[0]) / 2
  )
  assert model.after_two[0, 1] == pytest.approx(
    (np.array([1, 0, 1, 0]) + 2 * model.after_one[1]) / 4
  )
  bits = -math.log2(model.after_one[1, 0]) - math.log2(model.after_two[1, 0, 1])
  assert model.bits_per_byte([batch_of([1, 0, 1])]) == pytest.approx(bits / 2)
  assert model.bits_per_byte(
    [batch_of([1, 0, 1])], token_bytes=np.array([3, 2, 1, 1])
  ) == pytest.approx(bits / 5)


def test_contexts_do_not_cross_segments():
  row, segments = [0, 1, 2, 3, 0, 1], [1, 1, 1, 2, 2, 2]
  model = trigram.fit([batch_of(row, segments)], vocab_size=4)
  apart = trigram.fit([batch_of(row[:3]), batch_of(row[3:])], vocab_size=4)
  np.testing.assert_array_equal(model.after_two, apart.after_two)
  np.testing.assert_array_equal(model.after_one, apart.after_one)
  assert model.bits_per_byte([batch_of(row, segments)]) == pytest.approx(
    apart.bits_per_byte([batch_of(row[:3]), batch_of(row[3:])])
  )
  assert model.bits_per_byte([batch_of(row, segments)]) != pytest.approx(
    model.bits_per_byte([batch_of(row)])
  )


def test_targets_without_weight_count_nowhere():
  weights = np.array([[1, 1, 0, 0]], np.float32)
  batch, short = batch_of([0, 1, 2, 3, 3], weights=weights), batch_of([0, 1, 2])
  model, want = (
    trigram.fit([batch], vocab_size=4),
    trigram.fit([short], vocab_size=4),
  )
  np.testing.assert_array_equal(model.after_two, want.after_two)
  assert model.bits_per_byte([batch]) == want.bits_per_byte([short])
  with pytest.raises(ValueError, match="weight"):
    model.bits_per_byte(
      [batch_of([0, 1], weights=np.zeros((1, 1), np.float32))]
    )


def test_a_context_counts_even_if_its_own_tokens_have_no_weight():
  """As in a prompt: only the answer after it is learnt."""
  weights = np.array([[0, 1]], np.float32)
  model = trigram.fit([batch_of([0, 1, 2], weights=weights)], vocab_size=4)
  # One target of one kind after 0 1.
  expected = (np.array([0, 0, 1, 0]) + model.after_one[1]) / 2
  assert model.after_two[0, 1] == pytest.approx(expected)


def test_probabilities_are_positive_and_sum_to_one():
  rng = np.random.default_rng(0)
  model = trigram.fit(
    [batch_of(rng.integers(9, size=300)) for _ in range(3)], vocab_size=12
  )
  for table in (model.after_one, model.after_two):
    assert (table > 0).all()
    np.testing.assert_allclose(table.sum(axis=-1), 1.0, atol=1e-6)


def test_token_beyond_the_vocabulary_is_an_error():
  with pytest.raises(ValueError, match="made for 4 tokens; got token 7"):
    trigram.fit([batch_of([0, 7, 1])], vocab_size=4)


def test_beats_a_unigram_and_a_bigram_on_text():
  package = pathlib.Path(np.__file__).parent
  text = b"\n".join(
    path.read_bytes()
    for path in sorted(package.glob("*.py")) + sorted(package.glob("lib/*.py"))
  )
  rows = (
    np.frombuffer(text[: len(text) // 257 * 257], np.uint8)
    .reshape(-1, 257)
    .astype(np.int32)
  )
  fitted, held_out = (
    {
      "tokens": half[:, :-1],
      "targets": half[:, 1:],
      "segment_ids": half[:, 1:] * 0,
      "weights": half[:, 1:] * 0 + 1.0,
    }
    for half in (rows[::2], rows[1::2])
  )
  model = trigram.fit([fitted])
  counts = np.bincount(fitted["targets"].reshape(-1), minlength=256) + 1
  unigram = -np.log2(counts / counts.sum())[held_out["targets"]].mean()
  only_one = trigram.TrigramModel(
    model.after_one, np.tile(model.after_one, (256, 1, 1))
  )
  bits = model.bits_per_byte([held_out])
  assert (
    bits < only_one.bits_per_byte([held_out]) - 0.5
    and only_one.bits_per_byte([held_out]) < unigram - 0.5
  )
  assert bits < 3.3
