"""The definition of which keys a query sees, shared by all implementations.

A `Mask` holds what is static while a program is compiled. Segment ids, and
offsets that differ between rows of the batch, are data. The methods that need
them take them as arguments. `visible` and `between` answer for single queries
and keys. `any_visible`, `all_visible`, `keys_of` and `rows_of` answer for
tiles, and ignore segments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from diffjax.ops.diff_attention.tiles import (
  Condition,
  Scalar,
  logical_and,
  maximum,
  minimum,
)

# The offset of a mask whose rows of the batch have offsets of their own.
PER_ROW: Literal["per row"] = "per row"


@dataclasses.dataclass(frozen=True)
class Mask:
  """The keys that each query sees, as far as they are static.

  Key s has position s. Query t has position offset + t.

  Attributes:
    q_length: number of queries.
    kv_length: number of keys. Blocks may be padded beyond it, and no query sees
      the padding.
    causal: whether a query sees only keys up to its own position.
    window: number of keys that a query sees (see `diff_attention`). None for
      all keys. `visible` and `between` also support a traced int.
    offset: position of the first query: an int, or PER_ROW if it is an array
      int32[B], which is data.
    segments: whether a query sees only keys with an id equal to its own. The
      ids are data.
  """

  q_length: int
  kv_length: int
  causal: bool = True
  window: Any = None
  offset: int | Literal["per row"] = 0
  segments: bool = False

  @property
  def known_offset(self) -> int:
    """The offset of a mask whose offset is an int."""
    assert self.offset != PER_ROW
    return self.offset

  def first_position(
    self, offsets: Int[Array, "B"] | None
  ) -> int | Int[Array, "B"]:
    """Returns the position of the first query.

    Args:
      offsets: the offsets of a mask with PER_ROW. Otherwise None.
    """
    if offsets is None:
      return self.known_offset
    return offsets

  def of_rows(self, start: int, stop: int) -> Mask:
    """Returns the mask of the queries from `start` to `stop` − 1.

    If offsets are data, the caller must add `start` to them.
    """
    offset = self.offset
    if offset != PER_ROW:
      offset += start
    return dataclasses.replace(self, q_length=stop - start, offset=offset)

  def between(
    self,
    q_positions: Int[Array, "X T"],
    k_positions: Int[Array, "Y S"],
    q_ids: Int[Array, "B T"] | None = None,
    kv_ids: Int[Array, "B S"] | None = None,
  ) -> Bool[Array, "Z T S"] | None:
    """Returns where query t sees key s, or None if all keys are visible.

    The sizes X, Y and Z are 1 if all rows of the batch are equal, otherwise B.

    Example:
      Mask(3, 3, causal=True), with positions [[0, 1, 2]] of queries and keys →
      [[[1, 0, 0],
        [1, 1, 0],
        [1, 1, 1]]]

    Args:
      q_positions: positions of the queries, from `positions`.
      k_positions: positions of the keys.
      q_ids: segment ids of the queries. None without segments.
      kv_ids: segment ids of the keys. None without segments.
    """
    has_equal_ids = None
    if q_ids is not None and kv_ids is not None:
      has_equal_ids = q_ids[:, :, None] == kv_ids[:, None, :]
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    return self.visible(distance, same=has_equal_ids)

  def visible(
    self,
    distance: Int[Array, "..."] | None,
    *,
    keys: Int[Array, "..."] | None = None,
    same: Bool[Array, "..."] | None = None,
  ) -> Bool[Array, "..."] | None:
    """Returns elementwise where a query sees a key, or None if everywhere.

    Example:
      with causal=True and window=2, distance [-1, 0, 1, 2] →
      [False, True, True, False]

    Args:
      distance: the position of the query minus the position of the key. None if
        positions hide no key.
      keys: positions of the keys. None if none of them can be padding.
      same: where query and key have equal segment ids. None without segments.
    """
    conditions = []
    if keys is not None and not self.hides_padding():
      conditions.append(keys < self.kv_length)
    if distance is not None and self.causal:
      conditions.append(distance >= 0)
    if distance is not None and self.window is not None:
      conditions.append(distance < self.window)
      if not self.causal:
        conditions.append(distance > -self.window)
    if same is not None:
      conditions.append(same)
    if not conditions:
      return None
    return functools.reduce(operator.and_, conditions)

  def hides_padding(self) -> bool:
    """Returns True if causality hides the padding from every query.

    Padding are keys beyond `kv_length`, up to a whole number of blocks.
    """
    return (
      self.causal
      and self.offset != PER_ROW
      and self.offset + self.q_length <= self.kv_length
    )

  def any_visible(
    self,
    first_query: Scalar,
    last_query: Scalar,
    first_key: Scalar,
    last_key: Scalar,
  ) -> Condition:
    """Returns whether some query of a tile sees some key of it.

    A tile is a block of consecutive queries and a block of consecutive keys.
    Kernels skip a tile if this is False. If it is True, segments may still hide
    all keys.

    Example:
      with a causal mask, queries 0–127 and keys 128–255 → False

    Args:
      first_query: position of the tile's first query.
      last_query: position of its last query.
      first_key: position of its first key.
      last_key: position of its last key.
    """
    # Positions from kv_length on are padding.
    conditions: list[Condition] = [first_key < self.kv_length]
    if self.causal:
      conditions.append(first_key <= last_query)
    if self.window is not None:
      conditions.append(last_key > first_query - self.window)
      if not self.causal:
        conditions.append(first_key < last_query + self.window)
    return logical_and(*conditions)

  def all_visible(
    self,
    first_query: Scalar,
    last_query: Scalar,
    first_key: Scalar,
    last_key: Scalar,
  ) -> Condition:
    """Returns whether every query of a tile sees every key of it.

    A tile is a block of consecutive queries and a block of consecutive keys.
    Kernels compute a tile without a mask if this is True. Segments may still
    hide some keys, and are checked elsewhere.

    Example:
      with a causal mask, queries 128–255 and keys 0–127 → True

    Args:
      first_query: position of the tile's first query.
      last_query: position of its last query.
      first_key: position of its first key.
      last_key: position of its last key.
    """
    conditions: list[Condition] = []
    if not self.hides_padding():
      conditions.append(last_key < self.kv_length)
    if self.causal:
      conditions.append(last_key <= first_query)
    if self.window is not None:
      conditions.append(first_key > last_query - self.window)
      if not self.causal:
        conditions.append(last_key < first_query + self.window)
    return logical_and(*conditions)

  def keys_of(
    self, first_query: Scalar, last_query: Scalar
  ) -> tuple[Scalar, Scalar]:
    """Returns the first and the last key that some queries may see.

    If they see no key, the last one is before the first one.

    Example:
      with causal=True and window=100, queries 200–299 → keys (101, 299)

    Args:
      first_query: position of the first query.
      last_query: position of the last query.
    """
    first: Scalar = 0
    last: Scalar = self.kv_length - 1
    if self.causal:
      last = minimum(last, last_query)
    elif self.window is not None:
      last = minimum(last, last_query + self.window - 1)
    if self.window is not None:
      first = maximum(first, first_query - self.window + 1)
    return first, last

  def rows_of(
    self, first_key: Scalar, last_key: Scalar
  ) -> tuple[Scalar, Scalar]:
    """Returns the first and the last query that may see some keys.

    These are indices of queries, not positions: query t has position
    offset + t. The offset must be an int.

    Example:
      with causal=True and window=100, keys 200–299 → queries (200, 398)

    Args:
      first_key: position of the first key.
      last_key: position of the last key.
    """
    first: Scalar = 0
    last: Scalar = self.q_length - 1
    if self.causal:
      first = maximum(first, first_key - self.known_offset)
    elif self.window is not None:
      first_position = first_key - self.window + 1
      first = maximum(first, first_position - self.known_offset)
    if self.window is not None:
      last_position = last_key + self.window - 1
      last = minimum(last, last_position - self.known_offset)
    return first, last

  def partial_differences(
    self, q_block: int, kv_block: int, most: int
  ) -> list[int] | None:
    """Returns the differences p0 − k0 of the partly visible tiles.

    A tile is a block of queries from position p0 on and a block of keys from
    position k0 on. It is partly visible if some of its pairs of a query and a
    key are visible, and some are not. Without padding and with a static offset,
    that depends only on p0 − k0. So a kernel can prepare a mask for each
    difference.

    Example:
      with a causal mask, q_block=128 and kv_block=128 → [0]: only tiles on the
      diagonal are partly visible.

    Args:
      q_block: number of queries of a tile.
      kv_block: number of keys of a tile.
      most: the largest number of differences that the caller can use.

    Returns:
      None if there are more differences, or if the mask does not depend on them
      alone.
    """
    has_padding = self.kv_length % kv_block != 0 and not self.hides_padding()
    if self.offset == PER_ROW or has_padding:
      return None
    # Tiles have p0 = offset + i·q_block and k0 = j·kv_block. So all differences
    # equal the offset modulo the greatest common divisor of the block sizes.
    step = math.gcd(q_block, kv_block)
    # Tiles further from the diagonal are either hidden or fully visible.
    reach = max(q_block, kv_block) + (self.window or 0)
    # The first candidate is at most −reach, and is the offset modulo `step`.
    start = -(reach // step + 1) * step + self.offset % step
    differences = []
    for difference in range(start, reach + step, step):
      # The tile whose first key has position 0.
      first_query = difference
      last_query = difference + q_block - 1
      tile = (first_query, last_query, 0, kv_block - 1)
      if self.any_visible(*tile) and not self.all_visible(*tile):
        differences.append(difference)
      if len(differences) > most:
        return None
    return differences


def positions(
  length: int,
  offset: int | Int[Array, ""] | Int[Array, "B"],
  start: int | Int[Array, ""] = 0,
) -> Int[Array, "X length"]:
  """Returns the positions of consecutive queries or keys of a row.

  X is 1 for one offset, and B for an offset for each row of the batch.

  Args:
    length: number of queries or keys.
    offset: position of the row's first query or key.
    start: index of the first query or key whose position is returned.
  """
  indices = jnp.arange(length, dtype=jnp.int32) + start
  return jnp.reshape(jnp.asarray(offset, jnp.int32), (-1, 1)) + indices


def apply_mask(
  visible: Bool[Array, "..."] | None, logits: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Returns the logits, with −∞ for hidden keys.

  Args:
    visible: where a query sees a key. None if everywhere.
    logits: the scaled products of queries and keys.
  """
  if visible is None:
    return logits
  return jnp.where(visible, logits, -jnp.inf)
