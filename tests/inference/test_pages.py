"""A pool of pages: rows have as many as they need, what is written is where it belongs, and int8 is as near as its scales allow."""

import functools

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

SIZE, K, W = 4, 2, 3
write = jax.jit(write_tokens)
TABLES = np.array(
  [[7, 1, 3], [0, 9, 9], [5, 8, 9]], np.int32
)  # of 9 pages: the second row has one, the third two


def pieces(rng, width=W):
  """Writes of unequal numbers of tokens a row: [(new, counts)]."""
  for T, counts in (
    (5, (5, 2, 3)),
    (1, (1, 1, 1)),
    (1, (1, 0, 1)),
    (4, (3, 4, 4)),
    (6, (2, 1, 6)),
  ):
    yield (
      rng.normal(size=(3, T, K, width)).astype(np.float32)
      * rng.uniform(0.2, 3),
      np.array(counts, np.int32),
    )


def grown(pool, tables, spoil=np.nan):
  """The pool after all writes, and what each row should hold, as far as its pages go."""
  starts, rows = np.zeros(3, np.int32), [[], [], []]
  for new, counts in pieces(np.random.default_rng(0), pool.tokens.shape[3]):
    for row, count in enumerate(counts):
      rows[row] += list(new[row, :count])
      new[row, count:] = spoil  # tokens that do not count leave no trace
    pool, starts = write(pool, tables, new, starts, counts), starts + counts
  return pool, [np.array(row) for row in rows]


@pytest.mark.parametrize(
  "tables, width",
  [(TABLES, W), (TABLES, 128), (None, W)],
  ids=["pages", "pages on lanes", "a page a row"],
)
def test_tokens_are_where_they_belong_and_nothing_else_is_touched(
  tables, width
):
  pool = Pool(
    jnp.full(
      (9, K, SIZE, width) if tables is not None else (3, K, 3 * SIZE, width),
      77.0,
    )
  )
  pool, rows = grown(pool, tables)
  found = read_rows(pool, tables, jnp.float32)
  for row, (wanted, pages) in enumerate(
    zip(rows, (3, 1, 2) if tables is not None else (3, 3, 3), strict=True)
  ):
    kept = wanted[: pages * SIZE]
    np.testing.assert_array_equal(found[row, : len(kept)], kept)
    assert (found[row, len(kept) : pages * SIZE] == 77).all()
  if tables is not None:
    assert (np.asarray(pool.tokens)[[2, 4, 6]] == 77).all()


def test_int8_is_off_by_half_a_step_of_each_scale_that_it_had():
  """And by half a step alone where the largest of a page came first."""
  pool, rows = grown(empty_pool(9, K, SIZE, W, jnp.int8), TABLES)
  assert pool.tokens.dtype == jnp.int8 and pool.scale.dtype == jnp.float32
  found = read_rows(pool, TABLES, jnp.float32)
  for row, (wanted, pages) in enumerate(zip(rows, (3, 1, 2), strict=True)):
    for page in range(pages):
      kept = wanted[page * SIZE : (page + 1) * SIZE]
      scale = np.asarray(pool.scale)[TABLES[row, page]]
      np.testing.assert_allclose(
        scale, np.abs(kept).max(axis=(0, 2)) / 127, rtol=1e-6
      )
      error = np.abs(
        np.asarray(found[row, page * SIZE : page * SIZE + len(kept)]) - kept
      ).max(axis=2)
      peaks = (
        np.maximum.accumulate(np.abs(kept).max(axis=2)) / 127
      )  # the scale can have risen with each token
      steps = [
        np.unique(np.append(peaks[at:, head], scale[head]).astype(np.float32))
        for at in range(len(kept))
        for head in range(K)
      ]
      bound = np.array([step.sum() / 2 for step in steps]).reshape(len(kept), K)
      assert (error <= bound * 1.001).all()
      assert error.max() > 0


def test_int8_does_not_change_while_the_scale_stands():
  rng, tables = np.random.default_rng(1), np.array([[0]], np.int32)
  pool = empty_pool(1, K, SIZE, W, jnp.int8)
  new = rng.uniform(-1, 1, (1, SIZE, K, W)).astype(np.float32)
  new[0, 0, :, 0] = 1  # the largest comes first
  stored = []
  for at in range(SIZE):
    pool = write(
      pool,
      tables,
      new[:, at : at + 1],
      np.array([at], np.int32),
      np.array([1], np.int32),
    )
    stored.append(np.asarray(pool.tokens)[0, :, : at + 1])
  for before, after in zip(stored, stored[1:], strict=False):
    np.testing.assert_array_equal(before, after[:, : before.shape[1]])
  np.testing.assert_array_equal(
    stored[-1], np.round(new[0].swapaxes(0, 1) * 127).astype(np.int8)
  )


def test_a_page_that_is_used_again_has_no_scale_from_before():
  pool = Pool(jnp.full((1, K, SIZE, W), 127, jnp.int8), jnp.full((1, K), 1e6))
  new = np.full((1, 1, K, W), 0.5, np.float32)
  pool = write(
    pool,
    np.array([[0]], np.int32),
    new,
    np.array([0], np.int32),
    np.array([1], np.int32),
  )
  np.testing.assert_allclose(
    read_rows(pool, np.array([[0]]), jnp.float32)[0, 0], new[0, 0], rtol=1e-6
  )


def test_rows_get_the_pages_that_they_need_and_no_more():
  tables = allocate([9, 0, 4, 1], num_pages=5, pages_per_row=4, size=SIZE)
  assert tables.dtype == np.int32 and tables.shape == (4, 4)
  assert [np.count_nonzero(row < 5) for row in tables] == [3, 0, 1, 1]
  assert all((row[: np.count_nonzero(row < 5)] < 5).all() for row in tables)
  assert sorted(tables[tables < 5]) == [0, 1, 2, 3, 4]
  with pytest.raises(
    UserError,
    match="rows of 9, 9 tokens need 6 pages of 4 tokens, and the cache has 5: give it more",
  ):
    allocate([9, 9], num_pages=5, pages_per_row=4, size=SIZE)


def test_nothing_is_written_by_a_row_without_pages():
  pool = Pool(jnp.full((2, K, SIZE, W), 77.0))
  tables = np.full((1, 2), 2, np.int32)
  for dtype in (jnp.float32, jnp.int8):
    before = (
      pool
      if dtype == jnp.float32
      else Pool(pool.tokens.astype(jnp.int8), jnp.ones((2, K)))
    )
    after = write(
      before,
      tables,
      np.ones((1, 5, K, W), np.float32),
      np.array([2], np.int32),
      np.array([5], np.int32),
    )
    jax.tree.map(
      functools.partial(np.testing.assert_array_equal), after, before
    )
