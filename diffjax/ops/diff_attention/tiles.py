"""Arithmetic of tiles, which masks and kernels share.

A tile is a block of queries at positions p0 … p1 and a block of keys at
positions k0 … k1. A position is an int if it is known during compilation, and
otherwise a traced int32 scalar. A condition is a bool or a traced bool in the
same way. The functions return ints and bools if their arguments are.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

# The value of a masked logit. exp(MASKED_LOGIT) is 0. It is finite, so that it
# can be subtracted from itself in a row that sees no key.
MASKED_LOGIT = -1e30
# The log-sum-exp of a row (a query) that sees no key. It is positive, because
# the backward pass computes weights exp(logit − lse), and exp(−1e30) is 0.
# `ring` merges results with weights exp2(lse), so it first replaces it by
# MASKED_LOGIT. Real values are far below 1e30 / 2, in base e and in base 2, so
# a comparison with that recognizes it.
EMPTY_ROW_LSE = 1e30
LOG2E = float(np.log2(np.e))  # exp(x) = exp2(x · LOG2E)

Scalar = Any  # int, or a traced int32 scalar
Condition = Any  # bool, or a traced bool scalar


def logical_and(*conditions: Condition) -> Condition:
  """Returns whether all conditions are true.

  A condition is a bool, or a traced bool that is known only at run time. If one
  is False, the result is False, and nothing is left to compute at run time.

  Example:
    logical_and(True, False, x < y) → False
    logical_and(True, x < y) → x < y
  """
  traced_conditions = []
  for condition in conditions:
    if not isinstance(condition, bool):
      traced_conditions.append(condition)
    elif not condition:
      return False
  if not traced_conditions:
    return True
  result = traced_conditions[0]
  for condition in traced_conditions[1:]:
    result = result & condition
  return result


def logical_not(condition: Condition) -> Condition:
  """Returns whether a condition is false."""
  if isinstance(condition, bool):
    return not condition
  return ~condition


def minimum(a: Scalar, b: Scalar) -> Scalar:
  """Returns the smaller of two numbers."""
  if isinstance(a, int) and isinstance(b, int):
    return min(a, b)
  return jnp.minimum(a, b)


def maximum(a: Scalar, b: Scalar) -> Scalar:
  """Returns the larger of two numbers."""
  if isinstance(a, int) and isinstance(b, int):
    return max(a, b)
  return jnp.maximum(a, b)


def block_index(position: Scalar, size: int) -> Scalar:
  """Returns the index of the block that holds a position.

  The index is −1 for all positions before the first block.

  Example:
    block_index(300, size=128) → 2
    block_index(-500, size=128) → -1

  Args:
    position: an int, or a traced int32 scalar.
    size: number of positions of a block.
  """
  if isinstance(position, int):
    return max(position, -1) // size
  # Division of traced integers rounds towards zero. Adding one block makes the
  # dividend non-negative, and the result is one block too high.
  position = jnp.maximum(position, -1) + size
  is_power_of_2 = size & (size - 1) == 0
  if is_power_of_2:
    log2_size = size.bit_length() - 1
    return (position >> log2_size) - 1  # a shift is faster than a division
  return lax.div(position, size) - 1


def round_up(x: int, multiple: int) -> int:
  """Returns the smallest multiple that is at least x."""
  return -(-x // multiple) * multiple


def pad_axis(
  x: Shaped[Array, "..."], axis: int, length: int, value: float | None = None
) -> Shaped[Array, "..."]:
  """Returns an array, padded at the end of an axis.

  Example:
    pad_axis(ids, axis=1, length=4) of ids [[3, 3]] → [[3, 3, 3, 3]]

  Args:
    x: floats, or integer ids. Ids are padded with the last id.
    axis: the index of the axis, not negative.
    length: the length of the axis after padding.
    value: the padding of floats. None for zeros.
  """
  padding = length - x.shape[axis]
  if padding == 0:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, padding)
  if jnp.issubdtype(x.dtype, jnp.integer):
    return jnp.pad(x, widths, mode="edge")
  if value is None:
    value = 0
  return jnp.pad(x, widths, constant_values=value)
