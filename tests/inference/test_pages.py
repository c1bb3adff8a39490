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

NUM_ROWS = 3
NUM_HEADS = 2
UNWRITTEN = 77.0

write = jax.jit(write_tokens)


@jax.jit
def read_in_float32(pool, tables):
  return read_rows(pool, tables, jnp.float32)


def read(pool, tables):
  """Returns the tokens of all rows as a NumPy array in float32."""
  return np.asarray(read_in_float32(pool, tables))


class Piece(NamedTuple):
  """Tokens that are written at once.

  Attributes:
    tokens: an array of shape [rows, tokens, heads, dim].
    counts: how many of the tokens count, for each row.
  """

  tokens: np.ndarray
  counts: np.ndarray


def make_pieces(head_dim):
  """Returns five pieces of three rows, which get 12, 8 and 15 tokens in all.

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


def unwritten(*shape):
  """Returns the tokens of a pool to which nothing was written."""
  return np.full(shape, UNWRITTEN, np.float32)


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
  """A table lists the pages of each row. The row's tokens fill them in order.

  The rows have 12, 8 and 15 tokens. Tokens are dropped if a row has no page.
  """
  # The pages are 0 to 8. A 9 means no page.
  tables = np.array([[7, 1, 3], [0, 9, 9], [5, 8, 9]], np.int32)
  tokens_per_page = 4
  pieces = make_pieces(head_dim)
  pool = Pool(unwritten(9, NUM_HEADS, tokens_per_page, head_dim))

  pool = write_pieces(pool, tables, pieces)

  rows = read(pool, tables)
  chex.assert_trees_all_equal(rows[0], tokens_of_row(pieces, 0))
  chex.assert_trees_all_equal(rows[1, :4], tokens_of_row(pieces, 1)[:4])
  chex.assert_trees_all_equal(rows[2, :8], tokens_of_row(pieces, 2)[:8])
  for page_of_no_row in (2, 4, 6):
    assert (np.asarray(pool.tokens)[page_of_no_row] == UNWRITTEN).all()


def test_without_tables_each_row_is_a_page():
  """Row 0 writes to page 0, and so on.

  A page holds 12 tokens. The rows have 12, 8 and 15 tokens.
  """
  no_tables = None
  tokens_per_page = 12
  pieces = make_pieces(head_dim=3)
  pool = Pool(unwritten(3, NUM_HEADS, tokens_per_page, 3))

  pool = write_pieces(pool, no_tables, pieces)

  rows = read(pool, no_tables)
  chex.assert_trees_all_equal(rows[0], tokens_of_row(pieces, 0))
  chex.assert_trees_all_equal(rows[1, :8], tokens_of_row(pieces, 1))
  assert (rows[1, 8:] == UNWRITTEN).all()
  chex.assert_trees_all_equal(rows[2], tokens_of_row(pieces, 2)[:12])


def test_a_row_without_pages_writes_nothing():
  """Otherwise its tokens would overwrite the tokens of another row."""
  num_pages = 2
  # The pages have the numbers 0 and 1.
  no_page = 2
  tables = np.array([[no_page, no_page]], np.int32)
  pages_heads_tokens_dim = (num_pages, 1, 4, 3)
  float32_pool = Pool(np.full(pages_heads_tokens_dim, 7, np.float32))
  int8_pool = Pool(
    np.full(pages_heads_tokens_dim, 7, np.int8),
    scale=np.ones((num_pages, 1), np.float32),
  )
  # The row has two tokens, and gets five more.
  new_tokens = np.ones((1, 5, 1, 3), np.float32)
  starts = np.array([2])
  counts = np.array([5])

  float32_pool_after = write(float32_pool, tables, new_tokens, starts, counts)
  int8_pool_after = write(int8_pool, tables, new_tokens, starts, counts)

  chex.assert_trees_all_equal(float32_pool_after, float32_pool)
  chex.assert_trees_all_equal(int8_pool_after, int8_pool)


# int8. Each page has a scale for each head: its largest value / 127.


@pytest.mark.parametrize(
  ("row", "page", "first_token"),
  [(0, 7, 0), (0, 1, 4), (0, 3, 8), (1, 0, 0), (2, 5, 0), (2, 8, 4)],
)
def test_an_int8_page_has_a_scale_for_each_head(row, page, first_token):
  """The scale is the largest magnitude in the page and head, divided by 127."""
  # The pages are 0 to 8. A 9 means no page.
  tables = np.array([[7, 1, 3], [0, 9, 9], [5, 8, 9]], np.int32)
  tokens_per_page = 4
  pieces = make_pieces(head_dim=3)
  pool = empty_pool(9, NUM_HEADS, tokens_per_page, 3, jnp.int8)

  pool = write_pieces(pool, tables, pieces)

  end = first_token + tokens_per_page
  tokens = tokens_of_row(pieces, row)[first_token:end]
  largest_of_heads = np.abs(tokens).max(axis=(0, 2))
  scale = np.asarray(pool.scale)[page]
  chex.assert_trees_all_close(scale, largest_of_heads / 127, **FLOAT32)
  # A token is rounded by at most half a step in each of up to four writes.
  stored = read(pool, tables)[row, first_token:end]
  error = np.abs(stored - tokens).max(axis=(0, 2))
  assert (error <= 4 * scale / 2).all()


def test_int8_tokens_are_rounded_when_the_scale_grows():
  """A token is rounded once when it is written, and once for each new scale.

  Each rounding changes a number by at most half a step of the scale.
  """
  # Four tokens, one head, and two numbers. The first number is the largest.
  tokens = np.array(
    [[1.0, 0.333], [2.0, -0.777], [1.9, 0.123], [4.0, 1.234]], np.float32
  ).reshape(1, 4, 1, 2)
  # The scale becomes 1/127, 2/127 and 4/127. The third token keeps it.
  sums_of_steps = np.array([1 + 2 + 4, 2 + 4, 2 + 4, 4]) / 127
  tables = np.array([[0]], np.int32)
  pool = empty_pool(1, 1, 4, 2, jnp.int8)

  for index in range(4):
    token = tokens[:, [index]]
    pool = write(pool, tables, token, np.array([index]), np.array([1]))

  stored = read(pool, tables)
  error = np.abs(stored - tokens).max(axis=(0, 2, 3))
  assert (error <= sums_of_steps / 2 + FLOAT32["atol"]).all()
  assert pool.tokens.dtype == jnp.int8


def test_smaller_tokens_do_not_change_the_int8_tokens_before():
  """The first token has the largest number, 1, so the scale stays at 1/127."""
  tokens = np.array(
    [[1.0, 0.2], [-0.3, 0.7], [0.4, -1.0], [0.9, 0.1]], np.float32
  )
  # The tokens times 127, rounded.
  expected = np.array([[127, 25], [-38, 89], [51, -127], [114, 13]], np.int8)
  tables = np.array([[0]], np.int32)
  pool = empty_pool(1, 1, 4, 2, jnp.int8)

  for index in range(4):
    # One row, one token, one head, and two numbers.
    token = tokens[index].reshape(1, 1, 1, 2)
    pool = write(pool, tables, token, np.array([index]), np.array([1]))
    stored = np.asarray(pool.tokens)[0, 0, : index + 1]
    chex.assert_trees_all_equal(stored, expected[: index + 1])


def test_a_reused_page_does_not_keep_its_old_scale():
  """With the scale of a million, a new token of 0.5 would be rounded to 0."""
  largest_int8 = 127
  # One page, one head, four tokens and three numbers.
  used_pool = Pool(
    np.full((1, 1, 4, 3), largest_int8, np.int8),
    scale=np.full((1, 1), 1e6, np.float32),
  )
  tables = np.array([[0]], np.int32)
  # One row with one token, which is the first one of the row.
  new_token = np.full((1, 1, 1, 3), 0.5, np.float32)
  starts = np.array([0])
  counts = np.array([1])

  pool = write(used_pool, tables, new_token, starts, counts)

  row = read(pool, tables)
  stored_token = row[:, :1]
  chex.assert_trees_all_close(stored_token, new_token, **FLOAT32)


# Allocation.


def test_rows_get_only_the_pages_that_they_need():
  """Rows of 9, 0, 4 and 1 tokens need 3, 0, 1 and 1 pages of four tokens."""
  tables = allocate([9, 0, 4, 1], num_pages=5, pages_per_row=4, size=4)

  # The pages have the numbers 0 to 4.
  no_page = 5
  expected = [
    [0, 1, 2, no_page],
    [no_page, no_page, no_page, no_page],
    [3, no_page, no_page, no_page],
    [4, no_page, no_page, no_page],
  ]
  assert tables.tolist() == expected
  assert tables.dtype == np.int32


def test_too_few_pages_are_an_error():
  message = (
    "rows of 9, 9 tokens need 6 pages of 4 tokens, and the cache has 5:"
    " give it more"
  )
  with pytest.raises(UserError, match=message):
    allocate([9, 9], num_pages=5, pages_per_row=4, size=4)
