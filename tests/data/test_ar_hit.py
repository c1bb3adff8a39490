"""AR-Hit marks the targets that end an n-gram seen before in their segment."""

import time

import chex
import numpy as np
import pytest

from diffjax.data.ar_hit import ar_hit_mask


def mask_by_definition(tokens, targets, segment_ids, n) -> np.ndarray:
  """Returns whether each target ends an n-gram seen before in its segment."""
  hits = np.zeros(tokens.shape, bool)
  num_rows, length = tokens.shape
  for row in range(num_rows):
    earlier_ngrams = set()
    segment_start = 0
    for index in range(length):
      if segment_ids[row, index] != segment_ids[row, segment_start]:
        earlier_ngrams = set()
        segment_start = index
      first_input = index - (n - 2)
      if first_input < segment_start:
        continue
      inputs = tokens[row, first_input : index + 1].tolist()
      ngram = (*inputs, int(targets[row, index]))
      hits[row, index] = ngram in earlier_ngrams
      earlier_ngrams.add(ngram)
  return hits


def random_batch(seed, num_rows, length, vocab_size):
  """Returns tokens, targets and segment ids of random rows."""
  rng = np.random.default_rng(seed)
  rows = rng.integers(vocab_size, size=(num_rows, length + 1)).astype(np.int32)
  is_segment_start = rng.random((num_rows, length)) < 0.05
  segment_ids = np.cumsum(is_segment_start, axis=1).astype(np.int32)
  return rows[:, :-1], rows[:, 1:], segment_ids


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("vocab_size", [2, 5, 30])
def test_the_mask_equals_a_loop_over_the_targets(n, vocab_size):
  """A target is a hit if it ends an n-gram seen earlier in its segment.

  A model can recall such a target from its context (associative recall, AR).
  """
  tokens, targets, segment_ids = random_batch(
    seed=0, num_rows=6, length=200, vocab_size=vocab_size
  )

  mask = ar_hit_mask(tokens, targets, segment_ids, n)

  expected = mask_by_definition(tokens, targets, segment_ids, n)
  chex.assert_trees_all_equal(mask, expected)


@pytest.mark.parametrize("n", [4, 5, 6, 99])
def test_n_grams_can_be_as_long_as_a_row_or_longer(n):
  """A row has 4 inputs and a last target, so no 6-gram fits.

  With a single token id, all n-grams of the same length are equal.
  """
  tokens, targets, segment_ids = random_batch(
    seed=n, num_rows=8, length=4, vocab_size=1
  )

  mask = ar_hit_mask(tokens, targets, segment_ids, n)

  expected = mask_by_definition(tokens, targets, segment_ids, n)
  chex.assert_trees_all_equal(mask, expected)


def test_token_ids_can_be_large():
  """The number of possible 4-grams need not fit in an int64."""
  tokens, targets, segment_ids = random_batch(
    seed=0, num_rows=4, length=100, vocab_size=3
  )
  # The ids 0, 1 and 2 become 0, 400 million and 800 million.
  large_tokens = 400_000_000 * tokens
  large_targets = 400_000_000 * targets
  largest_id = 800_000_000
  assert largest_id**4 > 2**63

  mask = ar_hit_mask(large_tokens, large_targets, segment_ids, n=4)

  # Other ids do not change which n-grams are equal.
  expected = mask_by_definition(tokens, targets, segment_ids, n=4)
  assert expected.any()
  chex.assert_trees_all_equal(mask, expected)


def test_the_repeated_bigrams_of_a_sentence_are_hits():
  """A target is a hit if the pair of its input and itself was seen before.

  The tokens are letters. "th", "he" and "e " are repeated, so the hits are "h",
  "e" and " " of the second "the ".
  """
  text = np.frombuffer(b"the cat, the dog", np.uint8).astype(np.int32)[None]
  tokens = text[:, :-1]
  targets = text[:, 1:]
  one_segment = np.ones_like(tokens)

  mask = ar_hit_mask(tokens, targets, one_segment, n=2)

  hits = targets[mask]
  assert bytes(hits.tolist()) == b"he "


def test_n_grams_of_another_segment_do_not_count():
  """ "the " is in both segments, but repeats within none."""
  text = np.frombuffer(b"the cat, the dog", np.uint8).astype(np.int32)[None]
  tokens = text[:, :-1]
  targets = text[:, 1:]
  # The second segment is "the dog".
  segment_ids = np.ones_like(tokens)
  segment_ids[:, len("the cat, ") :] = 2

  mask = ar_hit_mask(tokens, targets, segment_ids, n=2)

  assert not mask.any()


def test_n_must_be_two_or_more():
  tokens, targets, segment_ids = random_batch(
    seed=0, num_rows=1, length=4, vocab_size=3
  )

  with pytest.raises(ValueError, match="at least 2"):
    ar_hit_mask(tokens, targets, segment_ids, n=1)


def test_the_mask_is_fast_enough_to_be_computed_during_training():
  tokens, targets, segment_ids = random_batch(
    seed=0, num_rows=32, length=2048, vocab_size=256
  )

  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    ar_hit_mask(tokens, targets, segment_ids, n=2)
    seconds.append(time.perf_counter() - start)

  # 25 million were measured. The limit is lower, because machines can be busy.
  tokens_per_second = tokens.size / min(seconds)
  assert tokens_per_second > 5_000_000
