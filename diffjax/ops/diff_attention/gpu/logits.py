"""Logits in the Hopper kernels: their scale and their mask.

The kernels compute exponentials of base 2, because the hardware does. They
multiply q·k by `factor` = scale · log₂e, in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.gpu import layouts
from diffjax.ops.diff_attention.gpu.chip import BLOCK, Ref, plgpu
from diffjax.ops.diff_attention.tiles import LOG2E, Scalar

# The value of a masked logit, before it is multiplied by the factor. It is a
# power of two, so that the product is exact: the maximum of a row that sees no
# key is exactly `masked_row_max(factor)`.
MASKED_LOGIT = -(2.0**100)
# The log-sum-exp that is stored for a row that sees no key. The backward pass
# subtracts it from logits, so the weights of the row become 0.
EMPTY_ROW_LSE = 2.0**100
# Smaller factors are multiplied into the queries. With this one, a masked logit
# is −2⁸⁰, which is still below all others.
_MIN_FACTOR = 2.0**-20


class SegmentIds(NamedTuple):
  """The segment ids of a block of logits."""

  rows: Int[Array, "rows"]  # in layouts.row
  columns: Int[Array, "columns"]  # in layouts.column


def logit_factor(
  scale: float, q: Float[Array, "*axes D"]
) -> tuple[float, Float[Array, "*axes D"]]:
  """Returns the factor for logits of base 2, and the queries.

  The factor must be positive and not too small, because masked logits are
  multiplied by it too. If it is not, it is multiplied into the queries, which
  rounds them, and the returned factor is 1.
  """
  factor = scale * LOG2E
  if factor > _MIN_FACTOR:
    return factor, q
  scaled_q = q.astype(jnp.float32) * factor
  return 1.0, scaled_q.astype(q.dtype)


def masked_row_max(factor: float) -> float:
  """Returns the maximum of a row whose logits are all masked.

  The kernels multiply by the factor in float32, so it is rounded here too.
  """
  return float(np.float32(factor)) * MASKED_LOGIT


def mask_logits(
  logits: Float[Array, "rows columns"],
  column_start: Scalar,
  first_visible: Scalar | None,
  last_visible: Scalar | None,
  segment_ids: SegmentIds | None = None,
) -> Float[Array, "rows columns"]:
  """Returns the logits, with MASKED_LOGIT where they are not visible.

  A row is a query and a column is a key. In the kernel of dK and dV it is the
  other way round. At least one of the conditions must be given.

  Example:
    With column_start = 64 and last_visible = 66 for a row, columns 0, 1 and 2
    of the row are visible.

  Args:
    logits: a block of logits.
    column_start: the position of column 0.
    first_visible: the position of the first column that is visible. It is a
      number, or a vector with one position per row. None or 0 for no limit.
    last_visible: the position of the last column that is visible, or None.
    segment_ids: a row and a column must have equal ids. None for no segments.
  """
  # Columns are compared with the limits of rows. This keeps one register per
  # column. A matrix of distances would keep one per element, in each step.
  columns = plgpu.broadcasted_iota(
    jnp.int32, logits.shape, 1, layout=layouts.matrix()
  )
  conditions = []  # matrices, or what broadcasts to them
  if last_visible is not None:
    last_column = _relative_position(last_visible, column_start, logits.shape)
    conditions.append(columns <= last_column)
  # All columns are at or after 0, so this limit needs no comparison.
  is_statically_zero = isinstance(first_visible, int) and first_visible == 0
  if first_visible is not None and not is_statically_zero:
    first_column = _relative_position(first_visible, column_start, logits.shape)
    conditions.append(columns >= first_column)
  if segment_ids is not None:
    row_ids = layouts.broadcast_over_columns(segment_ids.rows, logits.shape)
    column_ids = layouts.broadcast_over_rows(segment_ids.columns, logits.shape)
    conditions.append(row_ids == column_ids)
  is_visible = functools.reduce(jnp.logical_and, conditions)
  return jnp.where(is_visible, logits, MASKED_LOGIT)


def load_segment_ids(
  row_ids: Ref | None,
  column_ids: Ref | None,
  batch: Scalar,
  rows: Any,
  column_block: Scalar,
) -> SegmentIds | None:
  """Reads the segment ids of a block of logits from global memory.

  Args:
    row_ids: segment ids [B, length] of the rows' tokens. None for no segments.
    column_ids: segment ids [B, length] of the columns' tokens, or None.
    batch: the row of the batch.
    rows: the slice of tokens that are the rows of the block.
    column_block: the block of tokens that are its columns.
  """
  if row_ids is None or column_ids is None:
    return None
  row_values = layouts.load_global(row_ids.at[batch, rows], layouts.row())
  columns = pl.ds(column_block * BLOCK, BLOCK)
  column_values = layouts.load_global(
    column_ids.at[batch, columns], layouts.column()
  )
  return SegmentIds(row_values, column_values)


def _relative_position(
  position: Scalar, column_start: Scalar, shape: tuple[int, ...]
) -> jax.Array:
  """Returns position − column_start, as a matrix if there is one per row."""
  relative = position - column_start
  if jnp.ndim(relative) == 0:
    return relative
  return layouts.broadcast_over_columns(relative, shape)
