"""The vectorised mask equals the definition, written as a loop."""

import time

import numpy as np
import pytest

from diffjax.data.ar_hit import ar_hit_mask


def naive(tokens, targets, segment_ids, n):
  hits = np.zeros(tokens.shape, bool)
  for row in range(tokens.shape[0]):
    seen, start = set(), 0
    for t in range(tokens.shape[1]):
      if t and segment_ids[row, t] != segment_ids[row, t - 1]:
        seen, start = set(), t
      if t - (n - 2) >= start:
        ngram = (*tokens[row, t - n + 2 : t + 1].tolist(), int(targets[row, t]))
        hits[row, t] = ngram in seen
        seen.add(ngram)
  return hits


def random_batch(seed, rows, length, vocabulary):
  rng = np.random.default_rng(seed)
  row = rng.integers(vocabulary, size=(rows, length + 1)).astype(np.int32)
  segment_ids = np.cumsum(rng.random((rows, length)) < 0.05, axis=1).astype(
    np.int32
  )
  return row[:, :-1], row[:, 1:], segment_ids


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("vocabulary", [2, 5, 30])
def test_equals_the_loop(n, vocabulary):
  batch = random_batch(n, 6, 200, vocabulary)
  want = naive(*batch, n)
  np.testing.assert_array_equal(ar_hit_mask(*batch, n), want)
  assert want.any() or vocabulary**n > 200


@pytest.mark.parametrize("n", [4, 5, 6, 99])
def test_n_grams_as_long_as_a_row_and_longer(n):
  batch = random_batch(n, 8, 4, 1)
  np.testing.assert_array_equal(ar_hit_mask(*batch, n), naive(*batch, n))


def test_codes_too_large_for_an_integer_are_compressed():
  tokens, targets, segment_ids = random_batch(0, 4, 100, 3)
  scale = (
    400_000_000  # seven tokens below 2³¹, and segments: far beyond 63 bits
  )
  want = naive(tokens, targets, segment_ids, 4)
  assert want.any()
  np.testing.assert_array_equal(
    ar_hit_mask(tokens * scale, targets * scale, segment_ids, 4), want
  )


def test_a_sentence():
  row = np.frombuffer(b"the cat, the dog", np.uint8).astype(np.int32)[None]
  hits = ar_hit_mask(
    row[:, :-1], row[:, 1:], np.ones((1, row.size - 1), np.int32), 2
  )[0]
  assert (
    bytes(row[0, 1:][hits].tolist()) == b"he "
  )  # "th", "he" and "e " came before; "t,", ", ", " t", " d" did not
  segments = np.ones((1, row.size - 1), np.int32)
  segments[:, 9:] = 2
  assert not ar_hit_mask(row[:, :-1], row[:, 1:], segments, 2).any()


def test_n_must_be_two_or_more():
  with pytest.raises(ValueError, match="at least 2"):
    ar_hit_mask(*random_batch(0, 1, 4, 3), n=1)


def test_is_fast_enough_to_run_beside_training():
  batch = random_batch(0, 32, 2048, 256)
  best = min(_seconds(lambda: ar_hit_mask(*batch, 2)) for _ in range(5))
  assert batch[0].size / best > 5e6  # tokens per second; 25e6 measured


def _seconds(function):
  start = time.perf_counter()
  function()
  return time.perf_counter() - start
