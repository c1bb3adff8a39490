"""Which tiles of the attention maps have to be computed: the geometry that the Pallas kernels share.

A tile is a block of queries at positions p0 … p1 against a block of keys at positions k0 … k1. Positions are ints where they are known
while the program is compiled, and traced int32 scalars where they are not; conditions are bools or traced bools in the same way.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Scalar = Any  # int, or a traced int32 scalar
Condition = Any  # bool, or a traced bool scalar


def both(*conditions: Condition) -> Condition:
  """Their conjunction; a bool as long as it is known."""
  unknown = []
  for condition in conditions:
    if isinstance(condition, bool):
      if not condition:
        return False
    else:
      unknown.append(condition)
  result: Condition = True
  for condition in unknown:
    result = condition if result is True else result & condition
  return result


def negate(condition: Condition) -> Condition:
  """Its opposite; a bool as long as it is known."""
  return not condition if isinstance(condition, bool) else ~condition


def block_of(position: Scalar, size: int) -> Scalar:
  """The block that holds a position; −1 before the first one."""
  if isinstance(position, int):
    return max(position, -1) // size
  position = jnp.maximum(position, -1) + size
  return (position >> size.bit_length() - 1 if size & size - 1 == 0 else lax.div(position, size)) - 1


@dataclasses.dataclass(frozen=True)
class Geometry:
  """The mask but for segments, which are data.

  Attributes:
    causal: a query sees keys up to its own position.
    window: see `diff_attention`.
    q_offset: position of the first query; None where it is one per row of the batch, known at run time.
    q_length: number of queries.
    kv_length: number of keys; what blocks hold beyond them is padding, which no query sees.
  """

  causal: bool
  window: int | None
  q_offset: int | None
  q_length: int
  kv_length: int

  def hides_padding(self) -> bool:
    """Whether causality alone hides the padding from every query."""
    return self.causal and self.q_offset is not None and self.q_offset + self.q_length <= self.kv_length

  def some(self, p0: Scalar, p1: Scalar, k0: Scalar, k1: Scalar) -> Condition:
    """Whether some query may see some key of a tile; where it is False, none does."""
    conditions: list[Condition] = [k0 < self.kv_length]
    if self.causal:
      conditions.append(k0 <= p1)
    if self.window is not None:
      conditions.append(k1 > p0 - self.window)
      if not self.causal:
        conditions.append(k0 < p1 + self.window)
    return both(*conditions)

  def every(self, p0: Scalar, p1: Scalar, k0: Scalar, k1: Scalar) -> Condition:
    """Whether every query sees every key of a tile."""
    conditions: list[Condition] = [] if self.hides_padding() else [k1 < self.kv_length]
    if self.causal:
      conditions.append(k1 <= p0)
    if self.window is not None:
      conditions.append(k0 > p1 - self.window)
      if not self.causal:
        conditions.append(k1 < p0 + self.window)
    return both(*conditions)

  def visible(self, distance: jax.Array, keys: jax.Array) -> jax.Array | None:
    """Whether queries see keys, elementwise, from distance = query − key position and the keys' positions; None for all."""
    mask = None if self.hides_padding() else keys < self.kv_length
    terms = [distance >= 0] if self.causal else []
    if self.window is not None:
      terms += [distance < self.window] if self.causal else [distance < self.window, distance > -self.window]
    for term in terms:
      mask = term if mask is None else mask & term
    return mask

  def keys_of(self, p0: Scalar, p1: Scalar) -> tuple[Scalar, Scalar]:
    """First and last key position that queries p0 … p1 may see; none if the last lies before the first."""
    last: Scalar = self.kv_length - 1
    if self.causal:
      last = minimum(last, p1)
    elif self.window is not None:
      last = minimum(last, p1 + self.window - 1)
    return (0 if self.window is None else maximum(0, p0 - self.window + 1)), last

  def rows_of(self, k0: Scalar, k1: Scalar) -> tuple[Scalar, Scalar]:
    """First and last query row (not position) that may see keys k0 … k1; for an int q_offset."""
    first, last = 0, self.q_length - 1
    assert self.q_offset is not None
    if self.causal:
      first = maximum(first, k0 - self.q_offset)
    elif self.window is not None:
      first = maximum(first, k0 - self.window + 1 - self.q_offset)
    if self.window is not None:
      last = minimum(last, k1 + self.window - 1 - self.q_offset)
    return first, last

  def partial_differences(self, q_block: int, kv_block: int, most: int) -> list[int] | None:
    """All values of p0 − k0 of tiles that are partly visible, if they are at most so many and the mask depends on nothing else."""
    padding = self.kv_length % kv_block and not self.hides_padding()
    if self.q_offset is None or padding:
      return None
    step = math.gcd(q_block, kv_block)
    reach = max(q_block, kv_block) + (self.window or 0)
    start = -(reach // step + 1) * step + self.q_offset % step
    found = []
    for difference in range(start, reach + step, step):
      tile = difference, difference + q_block - 1, 0, kv_block - 1
      if self.some(*tile) and not self.every(*tile):
        found.append(difference)
      if len(found) > most:
        return None
    return found


def minimum(a: Scalar, b: Scalar) -> Scalar:
  """The lesser; an int if both are."""
  return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def maximum(a: Scalar, b: Scalar) -> Scalar:
  """The greater; an int if both are."""
  return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
