"""The cache's pages: each row has as many as it needs, and finds its tokens."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.inference.pages import (
  Pool,
  allocate,
  empty_pool,
  read_rows,
  write_tokens,
)
from tests.harness.tolerances import FLOAT32

PAGE_SIZE = 4
NUM_HEADS = 2
HEAD_DIM = 3
NUM_ROWS = 3
NUM_PAGES = 9
UNWRITTEN = 77.0
# The first row has three pages, the second one and the third two. Entries of
# NUM_PAGES are no pages.
TABLES = np.array([[7, 1, 3], [0, 9, 9], [5, 8, 9]], np.int32)
PAGES_PER_ROW = (3, 1, 2)

write = jax.jit(write_tokens)


class Piece(NamedTuple):
  """Tokens that are written at once.

  Attributes:
    tokens: an array of shape [rows, tokens, heads, dim].
    counts: how many of the tokens count, for each row.
  """

  tokens: np.ndarray
  counts: np.ndarray


def make_pieces(head_dim):
  """Returns pieces with different numbers of tokens in each row.

  Tokens that do not count are NaN, so that any use of them is seen.
  """
  rng = np.random.default_rng(0)
  pieces = []
  for counts in ((5, 2, 3), (1, 1, 1), (1, 0, 1), (3, 4, 4), (2, 1, 6)):
    shape = (NUM_ROWS, max(counts), NUM_HEADS, head_dim)
    tokens = rng.normal(size=shape).astype(np.float32) * rng.uniform(0.2, 3)
    for row, count in enumerate(counts):
      tokens[row, count:] = np.nan
    pieces.append(Piece(tokens, np.array(counts, np.int32)))
  return pieces


def write_pieces(pool, tables, pieces):
  """Returns the pool after all pieces were written one after the other."""
  lengths = np.zeros(NUM_ROWS, np.int32)
  for tokens, counts in pieces:
    pool = write(pool, tables, tokens, lengths, counts)
    # A new array, because the program may still read the old one.
    lengths = lengths + counts
  return pool


def tokens_of_row(pieces, row):
  """Returns the tokens of a row that count, in the order of writing."""
  return np.concatenate(
    [tokens[row, : counts[row]] for tokens, counts in pieces]
  )


@pytest.mark.parametrize("head_dim", [3, 128])
def test_rows_find_their_tokens_in_their_pages(head_dim):
  """Each row is written to the pages in its table, and to no other ones.

  Pages have four tokens. The first row has the pages 7, 1 and 3, the second one
  has page 0, and the third one has 5 and 8. A row's other tokens are dropped.
  """
  pieces = make_pieces(head_dim)
  shape = (NUM_PAGES, NUM_HEADS, PAGE_SIZE, head_dim)
  empty = Pool(jnp.full(shape, UNWRITTEN))

  pool = write_pieces(empty, TABLES, pieces)

  rows = read_rows(pool, TABLES, jnp.float32)
  for row, num_pages in enumerate(PAGES_PER_ROW):
    room = num_pages * PAGE_SIZE
    expected = tokens_of_row(pieces, row)[:room]
    num_tokens = len(expected)
    chex.assert_trees_all_equal(np.asarray(rows[row, :num_tokens]), expected)
    # The end of the last page is not written.
    assert (rows[row, num_tokens:room] == UNWRITTEN).all()
  other_pages = np.asarray(pool.tokens)[[2, 4, 6]]
  assert (other_pages == UNWRITTEN).all()


def test_without_tables_each_row_is_a_page():
  """Row 0 writes to page 0, and so on. Tokens beyond a row's 12 are dropped."""
  row_size = 12
  pieces = make_pieces(HEAD_DIM)
  shape = (NUM_ROWS, NUM_HEADS, row_size, HEAD_DIM)
  empty = Pool(jnp.full(shape, UNWRITTEN))

  pool = write_pieces(empty, None, pieces)

  rows = read_rows(pool, None, jnp.float32)
  for row in range(NUM_ROWS):
    expected = tokens_of_row(pieces, row)[:row_size]
    num_tokens = len(expected)
    chex.assert_trees_all_equal(np.asarray(rows[row, :num_tokens]), expected)
    assert (rows[row, num_tokens:] == UNWRITTEN).all()


def test_a_row_without_pages_writes_nothing():
  """Otherwise its tokens would overwrite those of another row."""
  num_pages = 2
  shape = (num_pages, NUM_HEADS, PAGE_SIZE, HEAD_DIM)
  # The pages are 0 and 1, so entries of 2 are no pages.
  tables = np.array([[2, 2]], np.int32)
  tokens = np.ones((1, 5, NUM_HEADS, HEAD_DIM), np.float32)
  starts = np.array([2])
  counts = np.array([5])
  float32_pool = Pool(jnp.full(shape, UNWRITTEN))
  int8_pool = Pool(
    jnp.full(shape, 77, jnp.int8), scale=jnp.ones((num_pages, NUM_HEADS))
  )

  for pool in (float32_pool, int8_pool):
    after = write(pool, tables, tokens, starts, counts)
    chex.assert_trees_all_equal(after, pool)


# int8. Each page has a scale for each head: its largest value / 127.


def max_rounding_error(tokens, final_scale):
  """Returns how far an int8 token may be from the original, [tokens, heads].

  A token is rounded when it is written, and again whenever a larger token
  raises the scale of the page. Each rounding adds at most half of a step.

  Args:
    tokens: the tokens of a page, [tokens, heads, dim].
    final_scale: the scale of the page, [heads].
  """
  largest_so_far = np.maximum.accumulate(np.abs(tokens).max(axis=2))
  scales = largest_so_far / 127
  bounds = np.zeros_like(scales)
  for index in range(len(tokens)):
    for head in range(NUM_HEADS):
      later_scales = np.append(scales[index:, head], final_scale[head])
      distinct_scales = np.unique(later_scales.astype(np.float32))
      bounds[index, head] = distinct_scales.sum() / 2
  return bounds


def test_int8_tokens_are_rounded_to_the_scales_of_their_pages():
  """The scale of a page and head is its largest magnitude, divided by 127."""
  pieces = make_pieces(HEAD_DIM)
  pool = empty_pool(NUM_PAGES, NUM_HEADS, PAGE_SIZE, HEAD_DIM, jnp.int8)

  pool = write_pieces(pool, TABLES, pieces)

  assert pool.tokens.dtype == jnp.int8
  assert pool.scale.dtype == jnp.float32
  rows = np.asarray(read_rows(pool, TABLES, jnp.float32))
  for row, num_pages in enumerate(PAGES_PER_ROW):
    for page in range(num_pages):
      start = page * PAGE_SIZE
      tokens = tokens_of_row(pieces, row)[start : start + PAGE_SIZE]
      scale = np.asarray(pool.scale[TABLES[row, page]])
      expected_scale = np.abs(tokens).max(axis=(0, 2)) / 127
      chex.assert_trees_all_close(scale, expected_scale, **FLOAT32)

      stored = rows[row, start : start + len(tokens)]
      error = np.abs(stored - tokens).max(axis=2)
      assert (error <= max_rounding_error(tokens, scale) * 1.001).all()
      assert error.max() > 0


def test_int8_tokens_stay_the_same_while_the_scale_does():
  """Tokens are written one by one. The scale is 1/127 from the first one on."""
  rng = np.random.default_rng(1)
  shape = (1, PAGE_SIZE, NUM_HEADS, HEAD_DIM)
  tokens = rng.uniform(-1, 1, shape).astype(np.float32)
  # The first token is the largest and determines the scale.
  tokens[0, 0, :, 0] = 1
  expected = np.round(tokens[0].swapaxes(0, 1) * 127).astype(np.int8)
  pool = empty_pool(1, NUM_HEADS, PAGE_SIZE, HEAD_DIM, jnp.int8)
  tables = np.array([[0]], np.int32)

  for index in range(PAGE_SIZE):
    token = tokens[:, [index]]
    pool = write(pool, tables, token, np.array([index]), np.array([1]))
    stored = np.asarray(pool.tokens)[0, :, : index + 1]
    chex.assert_trees_all_equal(stored, expected[:, : index + 1])


def test_a_reused_page_does_not_keep_its_old_scale():
  """With a scale of a million, a new token of 0.5 would be rounded to 0."""
  used_pool = Pool(
    jnp.full((1, NUM_HEADS, PAGE_SIZE, HEAD_DIM), 127, jnp.int8),
    scale=jnp.full((1, NUM_HEADS), 1e6),
  )
  tables = np.array([[0]], np.int32)
  token = np.full((1, 1, NUM_HEADS, HEAD_DIM), 0.5, np.float32)
  # The token is the first one of a new row.
  starts = np.array([0])
  counts = np.array([1])

  pool = write(used_pool, tables, token, starts, counts)

  stored = read_rows(pool, tables, jnp.float32)[0, 0]
  chex.assert_trees_all_close(np.asarray(stored), token[0, 0], **FLOAT32)


# Allocation.


def test_rows_get_only_the_pages_that_they_need():
  """Rows of 9, 0, 4 and 1 tokens need 3, 0, 1 and 1 pages of four tokens.

  A table has further entries of 5, which are no pages.
  """
  tables = allocate([9, 0, 4, 1], num_pages=5, pages_per_row=4, size=4)

  chex.assert_shape(tables, (4, 4))
  assert tables.dtype == np.int32
  is_page = tables < 5
  assert is_page.sum(axis=1).tolist() == [3, 0, 1, 1]
  # The pages of a row come first, and no two rows share one.
  assert (np.sort(~is_page, axis=1) == ~is_page).all()
  assert sorted(tables[is_page]) == [0, 1, 2, 3, 4]


def test_too_few_pages_are_an_error():
  message = (
    "rows of 9, 9 tokens need 6 pages of 4 tokens, and the cache has 5:"
    " give it more"
  )
  with pytest.raises(UserError, match=message):
    allocate([9, 9], num_pages=5, pages_per_row=4, size=4)
