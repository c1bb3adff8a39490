"""A paged memory for the keys or the values of one layer.

The memory is a pool [P, K, S, W] of P pages. A page holds S tokens of one row,
with all K heads, so that a kernel reads it in one piece. A table lists the
pages of each row. Without a table, row b has only page b. The last two axes
fill a TPU's tiles if S is a multiple of 128.

An int8 pool has a scale for each page and head: the largest |x| that the page
has held since its first token, divided by 127. If a token is larger, the scale
grows, and the page's other tokens are rounded again. Each rounding has an error
of at most half the scale at that time.
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
    scale: for int8, the factor that turns the tokens of a page and head into
      floating point. None for floating point.
  """

  tokens: Float[Array, "P K S W"] | Int[Array, "P K S W"]
  scale: Float[Array, "P K"] | None = None


def empty_pool(
  num_pages: int, num_heads: int, page_size: int, width: int, dtype: Any
) -> Pool:
  """Returns a pool without tokens, which is zero everywhere.

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
  """Returns tables that assign to each row the pages that its tokens need.

  Example:
    allocate([5, 2], num_pages=3, pages_per_row=2, size=4) → [[0, 1], [2, 3]]
    Row 0 has pages 0 and 1, and row 1 has page 2. The 3 means "no page".

  Args:
    needed: the number of tokens of each row.
    num_pages: P, the number of pages that all rows share.
    pages_per_row: N, the most pages of a row.
    size: S, the number of tokens of a page.

  Returns:
    The pages of each row. The number P in unused entries means "no page".

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
    tables: the pages of each row. None if row b has only page b.
    new: the keys or values of T new tokens per row. The first counts[b] tokens
      of row b are valid. The other ones are not stored.
    starts: the position of the first new token of each row.
    counts: the number of valid tokens of each row.
  """
  batch = new.shape[0]
  width = new.shape[-1]
  # If the width is not a multiple of 128, the lanes of a TPU register, some
  # TPUs store pages transposed. Writing single tokens would copy the pool.
  has_narrow_pages = tables is not None and width % _LANES != 0
  if tables is None:
    tables = jnp.arange(batch)[:, None]
  # In int8, a new token can change the scale of all tokens of its page.
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
  """Returns a floating-point pool in which single tokens are replaced.

  A slot is the place of one token in a page. `write_tokens` explains the
  arguments.
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
  # Invalid tokens and tokens without a page have the page index P, which is out
  # of range. The mode "drop" skips them.
  return Pool(pool.tokens.at[index].set(new, mode="drop"))


def _rewrite_pages(
  pool: Pool,
  tables: Int[Array, "B N"],
  new: Float[Array, "B T K W"],
  starts: Int[Array, "B"],
  counts: Int[Array, "B"],
) -> Pool:
  """Returns a pool in which all pages with new tokens are replaced.

  Reads the old pages, adds the new tokens and writes the pages back. C is the
  largest number of pages that the new tokens of one row can lie in.
  `write_tokens` explains the arguments.
  """
  slots = _changed_slots(pool, tables, new.shape[1], starts, counts)
  new_pages = _arrange(new, slots)  # [B, C, K, S, W]
  # The index P, which means "no page", reads the last page. The mode "drop"
  # below does not write it back.
  last_page = len(pool.tokens) - 1
  readable_pages = jnp.minimum(slots.pages, last_page)
  old_pages = pool.tokens[readable_pages]  # [B, C, K, S, W]
  is_new = slots.is_new(counts)[:, :, None, :, None]  # [B, C, 1, S, 1]
  if pool.scale is None:
    pages = jnp.where(is_new, new_pages.astype(old_pages.dtype), old_pages)
    return Pool(pool.tokens.at[slots.pages].set(pages, mode="drop"))

  # A page without old tokens may have belonged to another row before, so its
  # old scale does not count.
  has_old_tokens = slots.page_starts < starts[:, None]  # [B, C]
  old_scale = pool.scale[readable_pages]
  old_scale = jnp.where(has_old_tokens[..., None], old_scale, 0)  # [B, C, K]
  is_old = slots.is_old()[:, :, None, :, None]  # [B, C, 1, S, 1]
  new_pages = jnp.where(is_new, new_pages, 0).astype(jnp.float32)
  pages, scale = _quantise_pages(old_pages, old_scale, is_old, new_pages)
  return Pool(
    pool.tokens.at[slots.pages].set(pages, mode="drop"),
    pool.scale.at[slots.pages].set(scale, mode="drop"),
  )


def _quantise_pages(
  old_pages: Int[Array, "B C K S W"],
  old_scale: Float[Array, "B C K"],
  is_old: Bool[Array, "B C 1 S 1"],
  new_pages: Float[Array, "B C K S W"],
) -> tuple[Int[Array, "B C K S W"], Float[Array, "B C K"]]:
  """Returns int8 pages that hold both old and new tokens, and their scales.

  Args:
    old_pages: the old tokens in int8.
    old_scale: their scale, or 0 for pages without old tokens.
    is_old: which slots have old tokens.
    new_pages: the new tokens, and 0 in all other slots.
  """
  new_scale = jnp.max(jnp.abs(new_pages), axis=(3, 4)) / _MAX_INT8
  # A page's scale never decreases while it has old tokens.
  scale = jnp.maximum(old_scale, new_scale)
  # A scale of 0 belongs to a page of zeros.
  divisor = jnp.where(scale > 0, scale, 1)[..., None, None]
  # Old tokens are rounded again, with the new scale.
  rescaled_pages = old_pages * (old_scale[..., None, None] / divisor)
  pages = jnp.where(is_old, rescaled_pages, new_pages / divisor)
  return jnp.round(pages).astype(jnp.int8), scale


class _ChangedSlots(NamedTuple):
  """The slots of the pages in which new tokens lie.

  Attributes:
    pages: the C changed pages of each row. The number P means "no page".
    page_starts: the position of the first token of each changed page.
    new_index: which of the row's new tokens belongs into each slot. It is
      negative for tokens before the new ones, and at least T after them.
  """

  pages: Int[Array, "B C"]
  page_starts: Int[Array, "B C"]
  new_index: Int[Array, "B C S"]

  def is_old(self) -> Bool[Array, "B C S"]:
    """Returns whether each slot has a token that was stored before."""
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
  """Returns the pages in which T new tokens per row lie, and their slots.

  Args:
    pool: the pool with the pages.
    tables: the pages of each row.
    num_tokens: T.
    starts: the position of the first new token of each row.
    counts: the number of valid new tokens of each row.
  """
  num_pages, _, page_size, _ = pool.tokens.shape
  # There are most pages if the first new token has the last slot of its page.
  # The other T − 1 tokens then need ⌈(T − 1) / S⌉ more pages.
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
  """Returns the changed pages of each row, with the new tokens in their slots.

  Slots without a new token have an arbitrary one, which the caller ignores.
  """
  batch, num_tokens, num_heads, width = new.shape
  index = jnp.clip(slots.new_index, 0, num_tokens - 1)  # [B, C, S]
  index = index.reshape(batch, -1, 1, 1)  # [B, C·S, 1, 1]
  tokens = jnp.take_along_axis(new, index, axis=1)  # [B, C·S, K, W]
  pages = tokens.reshape(*slots.new_index.shape, num_heads, width)
  return jnp.moveaxis(pages, 3, 2)  # [B, C, S, K, W] → [B, C, K, S, W]


def _page_of(
  tables: Int[Array, "B N"],
  positions: Int[Array, "B X"],
  is_valid: Bool[Array, "B X"],
  page_size: int,
  num_pages: int,
) -> Int[Array, "B X"]:
  """Returns the page of each position, or the number P for "no page".

  There is no page for invalid positions, and for positions after the row's last
  page.

  Args:
    tables: the pages of each row. Unused entries are P.
    positions: positions of tokens in their rows.
    is_valid: whether each position has a token.
    page_size: S, the number of tokens of a page.
    num_pages: P, the number of pages of the pool.
  """
  pages_per_row = tables.shape[1]
  index = positions // page_size  # into the row's pages
  readable_index = jnp.minimum(index, pages_per_row - 1)
  pages = jnp.take_along_axis(tables, readable_index, axis=1)
  return jnp.where(is_valid & (index < pages_per_row), pages, num_pages)


def read_rows(
  pool: Pool, tables: Int[Array, "B N"] | None, dtype: Any
) -> Float[Array, "B S K W"]:
  """Returns a copy of the keys or values of all rows, as one array.

  The pages of a row are concatenated in the order of its tokens.

  Example: with pages of 128 tokens, tables [[3, 0], [1, 2]] → rows of 256
  tokens. Row 0 has the tokens of pages 3 and 0.

  Args:
    pool: keys or values in pages. int8 tokens are multiplied by their scales.
    tables: the pages of each row. None if row b has only page b.
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
