"""The mask: the one definition of which keys a query sees, for all implementations.

A `Mask` holds what is known while a program is compiled. Segment ids, and offsets that differ between rows of the batch, are data, and
arguments of the methods that need them. `visible` and `between` answer for single queries and keys; `some`, `every`, `keys_of` and
`rows_of` answer for tiles, and leave segments out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from diffjax.ops.diff_attention.tiles import (
  Condition,
  Scalar,
  logical_and,
  maximum,
  minimum,
)


@dataclasses.dataclass(frozen=True)
class Windows:
  """A window that is chosen by data, for layers that run as one program.

  Attributes:
    sizes: the windows there are, as `diff_attention` takes them.
    which: the number of the chosen one.
  """

  sizes: tuple[int | None, ...]
  which: Int[Array, ""]

  @property
  def size(self) -> Int[Array, ""]:
    """The chosen one; more than any length for None."""
    return jnp.array(
      [1 << 30 if size is None else size for size in self.sizes], jnp.int32
    )[self.which]


PER_ROW: Literal["per row"] = "per row"


@dataclasses.dataclass(frozen=True)
class Mask:
  """The keys that each query sees, but for data.

  Attributes:
    q_length: number of queries.
    kv_length: number of keys; what blocks hold beyond them is padding, which no query sees.
    causal: whether a query sees only keys up to its own position.
    window: number of keys visible to a query; see `diff_attention`.
    offset: position of the first query: an int, or PER_ROW for an int32[B] that is data.
    segments: whether a query sees only keys with an id equal to its own; the ids are data.
  """

  q_length: int
  kv_length: int
  causal: bool = True
  window: Any = None  # int | None; for methods that answer for single queries also a traced int
  offset: int | Literal["per row"] = 0
  segments: bool = False

  @property
  def known_offset(self) -> int:
    """The offset where it is an int."""
    assert self.offset != PER_ROW
    return self.offset

  def first_position(
    self, offsets: Int[Array, "B"] | None
  ) -> int | Int[Array, "B"]:
    """Position of the first query: the array given where it is data, else the mask's own."""
    return self.known_offset if offsets is None else offsets

  def of_rows(self, start: int, stop: int) -> Mask:
    """The mask of queries start … stop − 1 alone. An offset that is data must be moved likewise."""
    return dataclasses.replace(
      self,
      q_length=stop - start,
      offset=self.offset if self.offset == PER_ROW else self.offset + start,
    )

  def between(
    self,
    q_positions: Int[Array, "X T"],
    k_positions: Int[Array, "Y S"],
    q_ids: Int[Array, "B T"] | None = None,
    kv_ids: Int[Array, "B S"] | None = None,
  ) -> Bool[Array, "Z T S"] | None:
    """True where query t sees key s; the leading axis is 1 or B. None if all is visible.

    Args:
      q_positions: [1 or B, T], from `positions`.
      k_positions: [1 or B, S].
      q_ids: documents of the queries, or None.
      kv_ids: documents of the keys, or None.
    """
    same = (
      None
      if q_ids is None or kv_ids is None
      else q_ids[:, :, None] == kv_ids[:, None, :]
    )
    return self.visible(
      q_positions[:, :, None] - k_positions[:, None, :], same=same
    )

  def visible(
    self,
    distance: jax.Array | None,
    *,
    keys: jax.Array | None = None,
    same: jax.Array | None = None,
  ) -> jax.Array | None:
    """True where a query sees a key, elementwise; None if all is visible.

    Args:
      distance: query − key position; None where positions hide nothing.
      keys: positions of the keys where some of them may be padding.
      same: whether query and key are of one document; None without segments.
    """
    terms = []
    if keys is not None and not self.hides_padding():
      terms.append(keys < self.kv_length)
    if distance is not None and self.causal:
      terms.append(distance >= 0)
    if distance is not None and self.window is not None:
      terms.append(distance < self.window)
      if not self.causal:
        terms.append(distance > -self.window)
    if same is not None:
      terms.append(same)
    return functools.reduce(operator.and_, terms) if terms else None

  def hides_padding(self) -> bool:
    """True if causality alone hides the padding from every query."""
    return (
      self.causal
      and self.offset != PER_ROW
      and self.offset + self.q_length <= self.kv_length
    )

  def some(self, p0: Scalar, p1: Scalar, k0: Scalar, k1: Scalar) -> Condition:
    """False if no query of a tile sees any of its keys, by position; segments may hide more."""
    conditions: list[Condition] = [k0 < self.kv_length]
    if self.causal:
      conditions.append(k0 <= p1)
    if self.window is not None:
      conditions.append(k1 > p0 - self.window)
      if not self.causal:
        conditions.append(k0 < p1 + self.window)
    return logical_and(*conditions)

  def every(self, p0: Scalar, p1: Scalar, k0: Scalar, k1: Scalar) -> Condition:
    """True if every query of a tile sees each of its keys, by position; segments may hide some."""
    conditions: list[Condition] = (
      [] if self.hides_padding() else [k1 < self.kv_length]
    )
    if self.causal:
      conditions.append(k1 <= p0)
    if self.window is not None:
      conditions.append(k0 > p1 - self.window)
      if not self.causal:
        conditions.append(k1 < p0 + self.window)
    return logical_and(*conditions)

  def keys_of(self, p0: Scalar, p1: Scalar) -> tuple[Scalar, Scalar]:
    """First and last key position that queries p0 … p1 may see; none if the last lies before the first."""
    last: Scalar = self.kv_length - 1
    if self.causal:
      last = minimum(last, p1)
    elif self.window is not None:
      last = minimum(last, p1 + self.window - 1)
    return (
      0 if self.window is None else maximum(0, p0 - self.window + 1)
    ), last

  def rows_of(self, k0: Scalar, k1: Scalar) -> tuple[Scalar, Scalar]:
    """First and last query row (not position) that may see keys k0 … k1; for an offset that is known."""
    first, last = 0, self.q_length - 1
    if self.causal:
      first = maximum(first, k0 - self.known_offset)
    elif self.window is not None:
      first = maximum(first, k0 - self.window + 1 - self.known_offset)
    if self.window is not None:
      last = minimum(last, k1 + self.window - 1 - self.known_offset)
    return first, last

  def partial_differences(
    self, q_block: int, kv_block: int, most: int
  ) -> list[int] | None:
    """All values of p0 − k0 of tiles that are partly visible, if they are at most so many and the mask depends on nothing else."""
    padding = self.kv_length % kv_block and not self.hides_padding()
    if self.offset == PER_ROW or padding:
      return None
    step = math.gcd(q_block, kv_block)
    reach = max(q_block, kv_block) + (self.window or 0)
    start = -(reach // step + 1) * step + self.offset % step
    found = []
    for difference in range(start, reach + step, step):
      tile = difference, difference + q_block - 1, 0, kv_block - 1
      if self.some(*tile) and not self.every(*tile):
        found.append(difference)
      if len(found) > most:
        return None
    return found


def positions(
  length: int,
  offset: int | Int[Array, ""] | Int[Array, "B"],
  start: int | Int[Array, ""] = 0,
) -> Int[Array, "X length"]:
  """Positions of rows start … start + length − 1: [1, length] for one offset, [B, length] for an offset per row of the batch."""
  rows = jnp.arange(length, dtype=jnp.int32) + start
  return jnp.reshape(jnp.asarray(offset, jnp.int32), (-1, 1)) + rows


def apply(mask: Bool[Array, "..."] | None, logits: jax.Array) -> jax.Array:
  """Logits with −∞ where the mask forbids."""
  return logits if mask is None else jnp.where(mask, logits, -jnp.inf)
