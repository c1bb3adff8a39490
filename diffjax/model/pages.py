"""Keys or values of one layer in pages: a pool that rows of any lengths share, each with a table of its own pages.

A pool is [P, K, S, W]: all heads of S tokens lie together, so that a kernel reads a page in one piece, and the last two axes fill a TPU's
tiles where S is a multiple of 128. A cache without a table is a pool of one page a row.

An int8 pool has one scale a page and head: the largest |x| that the page has held since its first token, over 127. A token beyond it raises
the scale, and what the page holds already is rounded again. So an entry is off by at most half a step of each scale that it was stored
with, of which the last is the largest; until the scale rises again it does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from diffjax.config import UserError

PAGE = 128  # tokens
_LANES = 128  # of a TPU's tile


@flax.struct.dataclass
class Pool:
  """Keys or values of one layer.

  Attributes:
    tokens: floating point, or int8.
    scale: what int8 is multiplied by; None for others.
  """

  tokens: Float[Array, "P K S W"] | Int[Array, "P K S W"]
  scale: Float[Array, "P K"] | None = None


def empty_pool(
  pages: int, heads: int, size: int, width: int, dtype: Any
) -> Pool:
  """A pool of so many pages of `size` tokens."""
  return Pool(
    jnp.zeros((pages, heads, size, width), dtype),
    jnp.zeros((pages, heads)) if dtype == jnp.int8 else None,
  )


def allocate(
  needed: Sequence[int], pages: int, per_row: int, size: int = PAGE
) -> Int[np.ndarray, "B N"]:
  """Tables that give each row the pages for as many tokens as it needs, and no more; other entries are `pages`, a page that there is not.

  Args:
    needed: tokens of each row.
    pages: P, of the pool.
    per_row: N, the most that a row can have.
    size: S, tokens of a page.

  Raises:
    UserError: if the pool has too few.
  """
  counts = -(-np.asarray(needed) // size)
  if counts.sum() > pages:
    rows = ", ".join(str(tokens) for tokens in needed if tokens)
    raise UserError(
      f"rows of {rows} tokens need {counts.sum()} pages of {size} tokens, and the cache has {pages}: give it more (cache_tokens), or read "
      "fewer rows at once"
    )
  tables = np.full((len(counts), per_row), pages, np.int32)
  for row, (count, end) in enumerate(
    zip(counts, np.cumsum(counts), strict=True)
  ):
    tables[row, :count] = np.arange(end - count, end)
  return tables


def write(
  pool: Pool,
  tables: Int[Array, "B N"] | None,
  new: Float[Array, "B T K W"],
  starts: Int[Array, "B"],
  counts: Int[Array, "B"],
) -> Pool:
  """Puts new tokens in their places: the first counts[b] ones of row b, from its token starts[b] on. Those beyond its pages are dropped."""
  (P, K, size, W), (B, T) = pool.tokens.shape, new.shape[:2]
  # Where a token does not fill a TPU's lanes, a page has its tokens on them, and to write single ones some TPUs would copy the pool.
  by_page = pool.scale is not None or (tables is not None and W % _LANES > 0)
  if tables is None:
    tables = jnp.arange(B)[:, None]

  def page_of(position, valid):
    """The page of each position [B, …], P where it is not valid or there is none."""
    index = position // size
    page = jnp.take_along_axis(
      tables, jnp.minimum(index, tables.shape[1] - 1), axis=1
    )
    return jnp.where(valid & (index < tables.shape[1]), page, P)

  if not by_page:
    at, valid = starts[:, None] + jnp.arange(T), jnp.arange(T) < counts[:, None]
    # Each token of each head by itself: a TPU would turn the whole pool around to write all heads of a token at once.
    place = page_of(at, valid)[..., None], jnp.arange(K), (at % size)[..., None]
    return Pool(
      pool.tokens.at[place].set(new.astype(pool.tokens.dtype), mode="drop")
    )

  # The pages that the new tokens touch are read, changed and written as a whole.
  touched = (starts // size * size)[:, None] + size * jnp.arange(
    -(-(T - 1) // size) + 1
  )  # their first positions
  pages = page_of(touched, touched < (starts + counts)[:, None])
  position = touched[..., None] + jnp.arange(size)
  index = position - starts[:, None, None]  # among the new tokens
  kept, arriving = (
    x[:, :, None, :, None]
    for x in (index < 0, (index >= 0) & (index < counts[:, None, None]))
  )
  source = jnp.clip(index, 0, T - 1).reshape(B, -1, 1, 1)
  arrived = jnp.moveaxis(
    jnp.take_along_axis(new, source, axis=1).reshape(*index.shape, K, W), 3, 2
  )  # [B, pages, K, S, W]
  stored = pool.tokens[jnp.minimum(pages, P - 1)]
  if pool.scale is None:
    return Pool(
      pool.tokens.at[pages].set(
        jnp.where(arriving, arrived.astype(stored.dtype), stored), mode="drop"
      )
    )
  arrived = jnp.where(arriving, arrived, 0).astype(jnp.float32)
  old = jnp.where(
    (touched < starts[:, None])[..., None],
    pool.scale[jnp.minimum(pages, P - 1)],
    0,
  )
  scale = jnp.maximum(old, jnp.max(jnp.abs(arrived), axis=(3, 4)) / 127)
  step = jnp.where(scale > 0, scale, 1)[..., None, None]
  tokens = jnp.round(
    jnp.where(kept, stored * (old[..., None, None] / step), arrived / step)
  ).astype(jnp.int8)
  return Pool(
    pool.tokens.at[pages].set(tokens, mode="drop"),
    pool.scale.at[pages].set(scale, mode="drop"),
  )


def read(
  pool: Pool, tables: Int[Array, "B N"] | None, dtype: Any
) -> Float[Array, "B S K W"]:
  """The tokens of each row, in their order: a copy."""
  tokens = pool.tokens.astype(dtype)
  if pool.scale is not None:
    tokens *= pool.scale[..., None, None].astype(dtype)
  if tables is None:
    return jnp.swapaxes(tokens, 1, 2)
  rows = jnp.moveaxis(tokens[tables], 2, 3)  # [B, N, S, K, W]
  return rows.reshape(len(rows), -1, *rows.shape[3:])
