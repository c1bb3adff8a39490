"""Arithmetic of tiles that masks and kernels share: positions and conditions that are known or traced, padding, two constants.

A tile is a block of queries at positions p0 … p1 against a block of keys at positions k0 … k1. Positions are ints where they are known
while the program is compiled, and traced int32 scalars where they are not; conditions are bools or traced bools in the same way.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The value of a masked logit. It is finite, so that it can be subtracted from
# itself in a row that sees no key.
MASKED_LOGIT = -1e30
# The log-sum-exp that is stored for a row that sees no key. The backward pass
# subtracts it from logits, so the weights of the row become 0.
EMPTY_ROW_LSE = 1e30
LOG2E = float(np.log2(np.e))

Scalar = Any  # int, or a traced int32 scalar
Condition = Any  # bool, or a traced bool scalar


def logical_and(*conditions: Condition) -> Condition:
  """The conjunction of conditions; a bool as long as it is known."""
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


def logical_not(condition: Condition) -> Condition:
  """The opposite of a condition; a bool as long as it is known."""
  return not condition if isinstance(condition, bool) else ~condition


def minimum(a: Scalar, b: Scalar) -> Scalar:
  """The lesser; an int if both are."""
  return (
    min(a, b)
    if isinstance(a, int) and isinstance(b, int)
    else jnp.minimum(a, b)
  )


def maximum(a: Scalar, b: Scalar) -> Scalar:
  """The greater; an int if both are."""
  return (
    max(a, b)
    if isinstance(a, int) and isinstance(b, int)
    else jnp.maximum(a, b)
  )


def block_index(position: Scalar, size: int) -> Scalar:
  """The block that holds a position; −1 before the first one."""
  if isinstance(position, int):
    return max(position, -1) // size
  position = jnp.maximum(position, -1) + size
  return (
    position >> size.bit_length() - 1
    if size & size - 1 == 0
    else lax.div(position, size)
  ) - 1


def round_up(x: int, multiple: int) -> int:
  """The next multiple that is not less than x."""
  return -(-x // multiple) * multiple


def pad_axis(
  x: jax.Array, axis: int, length: int, value: float | None = None
) -> jax.Array:
  """x up to a length: with a value, else zeros, or the last id where x holds ids."""
  widths = [
    (0, length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)
  ]
  if length == x.shape[axis]:
    return x
  return (
    jnp.pad(x, widths, mode="edge")
    if jnp.issubdtype(x.dtype, jnp.integer)
    else jnp.pad(x, widths, constant_values=value or 0)
  )
