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
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from diffjax.config import UserError

PAGE = 128  # tokens of a page
_LANES = 128  # the last axis of a TPU's tile
_MAX_INT8 = 127


@flax.struct.dataclass
class Pool:
  """Keys or values of one layer.

  Attributes:
    tokens: floating point or int8.
    scale: the factor of int8 tokens. None for floating point.
  """

  tokens: Float[Array, "P K S W"] | Int[Array, "P K S W"]
  scale: Float[Array, "P K"] | None = None


def empty_pool(
  num_pages: int, num_heads: int, page_size: int, width: int, dtype: Any
) -> Pool:
  """Returns a pool of zeros.

  Args:
    num_pages: P.
    num_heads: K.
    page_size: S, the tokens of a page.
    width: W.
    dtype: the dtype of the tokens.
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

  Args:
    needed: the number of tokens of each row.
    num_pages: P, the pages of the pool.
    pages_per_row: N, the most pages of a row.
    size: S, the tokens of a page.

  Returns:
    The pages of each row. Unused entries are P, which is no page.

  Raises:
    UserError: if the pool has too few pages.
  """
  counts = -(-np.asarray(needed) // size)  # rounded up
  if counts.sum() > num_pages:
    rows = ", ".join(str(tokens) for tokens in needed if tokens > 0)
    raise UserError(
      f"rows of {rows} tokens need {counts.sum()} pages of {size} tokens, and"
      f" the cache has {num_pages}: give it more (cache_tokens), or read fewer"
      " rows at once"
    )
  tables = np.full((len(counts), pages_per_row), num_pages, np.int32)
  next_page = 0
  for row, count in enumerate(counts):
    tables[row, :count] = np.arange(next_page, next_page + count)
    next_page += count
  return tables


def write(
  pool: Pool,
  tables: Int[Array, "B N"] | None,
  new: Float[Array, "B T K W"],
  starts: Int[Array, "B"],
  counts: Int[Array, "B"],
) -> Pool:
  """Returns the pool with new tokens in it.

  Tokens for which a row has no page are dropped.

  Args:
    pool: the pool before.
    tables: the pages of each row. None if row b is page b.
    new: new tokens. The first counts[b] tokens of row b are valid.
    starts: the position of the first new token of each row.
    counts: the number of valid tokens of each row.
  """
  batch = new.shape[0]
  width = new.shape[-1]
  # If a token does not fill a TPU's lanes, tokens are on the lanes of a page.
  # Writing single tokens would make some TPUs copy the pool.
  has_narrow_pages = tables is not None and width % _LANES != 0
  if tables is None:
    tables = jnp.arange(batch)[:, None]
  if pool.scale is not None or has_narrow_pages:
    return _write_pages(pool, tables, new, starts, counts)
  return _write_tokens(pool, tables, new, starts, counts)


def _write_tokens(
  pool: Pool,
  tables: Int[Array, "B N"],
  new: Float[Array, "B T K W"],
  starts: Int[Array, "B"],
  counts: Int[Array, "B"],
) -> Pool:
  """Writes single tokens of a floating-point pool."""
  num_pages, num_heads, page_size, _ = pool.tokens.shape
  num_tokens = new.shape[1]
  positions = starts[:, None] + jnp.arange(num_tokens)  # [B, T]
  is_valid = jnp.arange(num_tokens) < counts[:, None]
  pages = _page_of(tables, positions, is_valid, page_size, num_pages)
  # The heads of a token are written separately. To write them together, a TPU
  # would transpose the whole pool.
  heads = jnp.arange(num_heads)
  slots = positions % page_size
  index = (pages[..., None], heads, slots[..., None])  # [B, T, K] each
  new = new.astype(pool.tokens.dtype)
  return Pool(pool.tokens.at[index].set(new, mode="drop"))


def _write_pages(
  pool: Pool,
  tables: Int[Array, "B N"],
  new: Float[Array, "B T K W"],
  starts: Int[Array, "B"],
  counts: Int[Array, "B"],
) -> Pool:
  """Reads the pages that new tokens belong to, changes them, and writes them.

  C is the number of pages that a row's new tokens can belong to.
  """
  num_pages, num_heads, page_size, width = pool.tokens.shape
  batch, num_tokens = new.shape[:2]
  max_changed_pages = -(-(num_tokens - 1) // page_size) + 1

  # The position of the first slot of each changed page.
  first_page_start = starts // page_size * page_size
  page_starts = first_page_start[:, None] + page_size * jnp.arange(
    max_changed_pages
  )  # [B, C]
  ends = (starts + counts)[:, None]
  pages = _page_of(
    tables, page_starts, page_starts < ends, page_size, num_pages
  )  # [B, C]

  # The index of each slot's token among the new ones. Negative for old tokens.
  positions = page_starts[..., None] + jnp.arange(page_size)
  new_index = positions - starts[:, None, None]  # [B, C, S]
  is_old = new_index < 0
  is_new = (new_index >= 0) & (new_index < counts[:, None, None])
  is_old = is_old[:, :, None, :, None]  # [B, C, 1, S, 1]
  is_new = is_new[:, :, None, :, None]

  source = jnp.clip(new_index, 0, num_tokens - 1).reshape(batch, -1, 1, 1)
  arriving = jnp.take_along_axis(new, source, axis=1)
  arriving = arriving.reshape(*new_index.shape, num_heads, width)
  arriving = jnp.moveaxis(arriving, 3, 2)  # [B, C, K, S, W]
  stored = pool.tokens[jnp.minimum(pages, num_pages - 1)]
  if pool.scale is None:
    tokens = jnp.where(is_new, arriving.astype(stored.dtype), stored)
    return Pool(pool.tokens.at[pages].set(tokens, mode="drop"))

  # The scale of a page without old tokens starts from 0.
  arriving = jnp.where(is_new, arriving, 0).astype(jnp.float32)
  has_old_tokens = page_starts < starts[:, None]
  old_scale = pool.scale[jnp.minimum(pages, num_pages - 1)]
  old_scale = jnp.where(has_old_tokens[..., None], old_scale, 0)  # [B, C, K]
  new_scale = jnp.max(jnp.abs(arriving), axis=(3, 4)) / _MAX_INT8
  scale = jnp.maximum(old_scale, new_scale)
  divisor = jnp.where(scale > 0, scale, 1)[..., None, None]
  rescaled = stored * (old_scale[..., None, None] / divisor)
  tokens = jnp.where(is_old, rescaled, arriving / divisor)
  tokens = jnp.round(tokens).astype(jnp.int8)
  return Pool(
    pool.tokens.at[pages].set(tokens, mode="drop"),
    pool.scale.at[pages].set(scale, mode="drop"),
  )


def _page_of(
  tables: Int[Array, "B N"],
  positions: Int[Array, "B X"],
  is_valid: Bool[Array, "B X"],
  page_size: int,
  num_pages: int,
) -> Int[Array, "B X"]:
  """Returns the page of each position.

  It is P, which is no page, if the position is invalid or beyond the row's
  pages.
  """
  pages_per_row = tables.shape[1]
  index = positions // page_size
  pages = jnp.take_along_axis(
    tables, jnp.minimum(index, pages_per_row - 1), axis=1
  )
  return jnp.where(is_valid & (index < pages_per_row), pages, num_pages)


def read(
  pool: Pool, tables: Int[Array, "B N"] | None, dtype: Any
) -> Float[Array, "B S K W"]:
  """Returns a copy of the tokens of each row, in their order.

  Args:
    pool: the pool.
    tables: the pages of each row. None if row b is page b.
    dtype: the dtype of the result.
  """
  tokens = pool.tokens.astype(dtype)
  if pool.scale is not None:
    tokens *= pool.scale[..., None, None].astype(dtype)
  if tables is None:
    return jnp.swapaxes(tokens, 1, 2)
  rows = tokens[tables]  # [B, N, K, S, W]
  rows = jnp.moveaxis(rows, 2, 3)  # [B, N, S, K, W]
  return rows.reshape(len(rows), -1, *rows.shape[3:])
