"""Keys or values of one layer, stored in pages that all rows share.

A pool [P, K, S, W] has P pages of S tokens. A table lists the pages of each
row. A page holds all heads of its tokens, so that a kernel reads it in one
piece. The last two axes fill a TPU's tiles if S is a multiple of 128. A cache
without a table is a pool with one page per row.

An int8 pool has a scale for each page and head: the largest |x| that the page
has held since its first token, divided by 127. A larger token raises the scale,
and the page's other tokens are rounded again. So an entry is off by at most
half a step of each scale that it was stored with. The last scale is the
largest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from diffjax.config import UserError

# The number of tokens of a page.
PAGE = 128
# The size of the last axis of a TPU's tile.
_LANES = 128
_MAX_INT8 = 127


@flax.struct.dataclass
class Pool:
  """The keys or the values of one layer, for the tokens of all rows.

  Attributes:
    tokens: P pages of S tokens, with a vector of width W for each of K heads.
      Floating point or int8.
    scale: in int8, the factor by which the tokens of a page and head are
      multiplied. None in floating point.
  """

  tokens: Float[Array, "P K S W"] | Int[Array, "P K S W"]
  scale: Float[Array, "P K"] | None = None


def empty_pool(
  num_pages: int, num_heads: int, page_size: int, width: int, dtype: Any
) -> Pool:
  """Returns a pool of zeros, in which no token is stored.

  Args:
    num_pages: P.
    num_heads: K, the number of key and value heads.
    page_size: S, the number of tokens of a page.
    width: W, the size of a token's key or value in one head.
    dtype: the dtype of the tokens. An int8 pool also has scales.
  """
  tokens = jnp.zeros((num_pages, num_heads, page_size, width), dtype)
  scale = None
  if dtype == jnp.int8:
    scale = jnp.zeros((num_pages, num_heads))
  return Pool(tokens, scale)


def allocate(
  needed: Sequence[int], num_pages: int, pages_per_row: int, size: int = PAGE
) -> Int[np.ndarray, "B N"]:
  """Returns tables that give each row the pages that it needs.

  Example:
    allocate([5, 2], num_pages=3, pages_per_row=2, size=4) → [[0, 1], [2, 3]]
    Row 0 has pages 0 and 1, and row 1 has page 2. The 3 is no page.

  Args:
    needed: the number of tokens of each row.
    num_pages: P, the number of pages that all rows share.
    pages_per_row: N, the most pages of a row.
    size: S, the number of tokens of a page.

  Returns:
    The pages of each row. Unused entries are P, which is no page.

  Raises:
    UserError: if the rows need more pages than there are.
  """
  pages_needed = -(-np.asarray(needed) // size)  # [B], rounded up
  total = pages_needed.sum()
  if total > num_pages:
    rows = ", ".join(str(tokens) for tokens in needed if tokens > 0)
    raise UserError(
      f"rows of {rows} tokens need {total} pages of {size} tokens, and"
      f" the cache has {num_pages}: give it more (cache_tokens), or read fewer"
      " rows at once"
    )
  tables = np.full((len(needed), pages_per_row), num_pages, np.int32)
  first_page = 0
  for row, count in enumerate(pages_needed):
    tables[row, :count] = np.arange(first_page, first_page + count)
    first_page += count
  return tables


def write_tokens(
  pool: Pool,
  tables: Int[Array, "B N"] | None,
  new: Float[Array, "B T K W"],
  starts: Int[Array, "B"],
  counts: Int[Array, "B"],
) -> Pool:
  """Returns the pool with the keys or values of new tokens in it.

  Tokens for which a row has no page are dropped.

  Args:
    pool: the keys or values of the tokens before.
    tables: the pages of each row. None if page b is row b.
    new: the keys or values of T new tokens per row. The first counts[b] tokens
      of row b are valid.
    starts: the position of the first new token of each row.
    counts: the number of valid tokens of each row.
  """
  batch = new.shape[0]
  width = new.shape[-1]
  # Writing single tokens is slow if their width is not a multiple of 128, the
  # lanes of a TPU register. Some TPUs then store pages transposed, and would
  # copy the pool.
  has_narrow_pages = tables is not None and width % _LANES != 0
  if tables is None:
    tables = jnp.arange(batch)[:, None]
  if pool.scale is not None or has_narrow_pages:
    return _rewrite_pages(pool, tables, new, starts, counts)
  return _write_slots(pool, tables, new, starts, counts)


def _write_slots(
  pool: Pool,
  tables: Int[Array, "B N"],
  new: Float[Array, "B T K W"],
  starts: Int[Array, "B"],
  counts: Int[Array, "B"],
) -> Pool:
  """Returns a floating-point pool with new tokens, written one by one.

  A slot is a token's index in its page. `write_tokens` has the same arguments.
  """
  num_pages, num_heads, page_size, _ = pool.tokens.shape
  num_tokens = new.shape[1]
  positions = starts[:, None] + jnp.arange(num_tokens)  # [B, T]
  is_valid = jnp.arange(num_tokens) < counts[:, None]  # [B, T]
  pages = _page_of(tables, positions, is_valid, page_size, num_pages)  # [B, T]
  slots = positions % page_size  # [B, T]
  # The heads of a token are written separately. To write them together, a TPU
  # would transpose the whole pool.
  heads = jnp.arange(num_heads)
  index = (pages[..., None], heads, slots[..., None])  # broadcast to [B, T, K]
  new = new.astype(pool.tokens.dtype)
  # Tokens without a page have the page index P, which is out of range. The mode
  # "drop" skips them.
  return Pool(pool.tokens.at[index].set(new, mode="drop"))


def _rewrite_pages(
  pool: Pool,
  tables: Int[Array, "B N"],
  new: Float[Array, "B T K W"],
  starts: Int[Array, "B"],
  counts: Int[Array, "B"],
) -> Pool:
  """Returns a pool with new tokens, in which whole pages are replaced.

  Reads the pages to which new tokens belong, changes them and writes them back.
  `write_tokens` has the same arguments. C is the number of pages that the new
  tokens of one row can belong to.
  """
  slots = _changed_slots(pool, tables, new.shape[1], starts, counts)
  arriving = _arrange(new, slots)  # [B, C, K, S, W]
  # P, which is no page, is replaced by the last page. It is not written below.
  num_pages = len(pool.tokens)
  readable_pages = jnp.minimum(slots.pages, num_pages - 1)
  stored = pool.tokens[readable_pages]  # [B, C, K, S, W]
  # [B, C, 1, S, 1]
  is_new = slots.is_new(counts)[:, :, None, :, None]
  is_old = slots.is_old()[:, :, None, :, None]
  if pool.scale is None:
    tokens = jnp.where(is_new, arriving.astype(stored.dtype), stored)
    return Pool(pool.tokens.at[slots.pages].set(tokens, mode="drop"))

  # A page's scale never decreases while it has old tokens. Without old tokens
  # it starts from 0, because the page may have belonged to another row.
  arriving = jnp.where(is_new, arriving, 0).astype(jnp.float32)
  has_old_tokens = slots.page_starts < starts[:, None]
  old_scale = pool.scale[readable_pages]
  old_scale = jnp.where(has_old_tokens[..., None], old_scale, 0)  # [B, C, K]
  new_scale = jnp.max(jnp.abs(arriving), axis=(3, 4)) / _MAX_INT8
  scale = jnp.maximum(old_scale, new_scale)
  # Never 0.
  divisor = jnp.where(scale > 0, scale, 1)[..., None, None]
  rescaled = stored * (old_scale[..., None, None] / divisor)
  tokens = jnp.where(is_old, rescaled, arriving / divisor)
  tokens = jnp.round(tokens).astype(jnp.int8)
  return Pool(
    pool.tokens.at[slots.pages].set(tokens, mode="drop"),
    pool.scale.at[slots.pages].set(scale, mode="drop"),
  )


class _ChangedSlots(NamedTuple):
  """The slots of the pages to which new tokens belong.

  Attributes:
    pages: the C changed pages of each row, or P, which is no page.
    page_starts: the position of the first slot of each changed page.
    new_index: the index of each slot's token among the new tokens of its row.
      It is negative for the tokens before.
  """

  pages: Int[Array, "B C"]
  page_starts: Int[Array, "B C"]
  new_index: Int[Array, "B C S"]

  def is_old(self) -> Bool[Array, "B C S"]:
    """Returns whether each slot has a token from before."""
    return self.new_index < 0

  def is_new(self, counts: Int[Array, "B"]) -> Bool[Array, "B C S"]:
    """Returns whether each slot gets a new token."""
    return (self.new_index >= 0) & (self.new_index < counts[:, None, None])


def _changed_slots(
  pool: Pool,
  tables: Int[Array, "B N"],
  num_tokens: int,
  starts: Int[Array, "B"],
  counts: Int[Array, "B"],
) -> _ChangedSlots:
  """Returns the slots of all pages to which T new tokens per row belong."""
  num_pages, _, page_size, _ = pool.tokens.shape
  # The first new token may have the last slot of its page. The other T − 1
  # tokens then need ⌈(T − 1) / S⌉ more pages.
  max_changed_pages = -(-(num_tokens - 1) // page_size) + 1
  page_offsets = page_size * jnp.arange(max_changed_pages)  # [C]
  first_page_start = starts // page_size * page_size  # [B]
  page_starts = first_page_start[:, None] + page_offsets  # [B, C]

  ends = starts + counts
  has_new_tokens = page_starts < ends[:, None]  # [B, C]
  pages = _page_of(tables, page_starts, has_new_tokens, page_size, num_pages)

  positions = page_starts[..., None] + jnp.arange(page_size)  # [B, C, S]
  new_index = positions - starts[:, None, None]
  return _ChangedSlots(pages, page_starts, new_index)


def _arrange(
  new: Float[Array, "B T K W"], slots: _ChangedSlots
) -> Float[Array, "B C K S W"]:
  """Arranges new tokens like the slots of pages.

  Slots without a new token get any token.
  """
  batch, num_tokens, num_heads, width = new.shape
  source = jnp.clip(slots.new_index, 0, num_tokens - 1)
  source = source.reshape(batch, -1, 1, 1)  # [B, C·S, 1, 1]
  arranged = jnp.take_along_axis(new, source, axis=1)  # [B, C·S, K, W]
  arranged = arranged.reshape(*slots.new_index.shape, num_heads, width)
  return jnp.moveaxis(arranged, 3, 2)


def _page_of(
  tables: Int[Array, "B N"],
  positions: Int[Array, "B X"],
  is_valid: Bool[Array, "B X"],
  page_size: int,
  num_pages: int,
) -> Int[Array, "B X"]:
  """Returns the page of each position, or P, which is no page.

  It is P if the position is invalid, or if the row has no page for it.

  Args:
    tables: the pages of each row. Unused entries are P.
    positions: positions of tokens in their rows.
    is_valid: whether each position has a token.
    page_size: S, the number of tokens of a page.
    num_pages: P, the number of pages of the pool.
  """
  pages_per_row = tables.shape[1]
  index = positions // page_size  # into the row's pages
  pages = jnp.take_along_axis(
    tables, jnp.minimum(index, pages_per_row - 1), axis=1
  )
  return jnp.where(is_valid & (index < pages_per_row), pages, num_pages)


def read_rows(
  pool: Pool, tables: Int[Array, "B N"] | None, dtype: Any
) -> Float[Array, "B S K W"]:
  """Returns a copy of the keys or values of all rows, without pages.

  The pages of a row are joined, in the order of its tokens.

  Example: with pages of 128 tokens, tables [[3, 0], [1, 2]] → rows of 256
  tokens. Row 0 has the tokens of pages 3 and 0.

  Args:
    pool: keys or values in pages. int8 tokens are multiplied by their scales.
    tables: the pages of each row. None if page b is row b.
    dtype: the dtype of the result.
  """
  tokens = pool.tokens.astype(dtype)  # [pages, K, page_size, W]
  if pool.scale is not None:
    tokens *= pool.scale[..., None, None].astype(dtype)
  if tables is None:
    return jnp.swapaxes(tokens, 1, 2)
  rows = tokens[tables]  # [B, N, K, page_size, W]
  rows = jnp.moveaxis(rows, 2, 3)  # [B, N, page_size, K, W]
  return rows.reshape(len(rows), -1, *rows.shape[3:])
