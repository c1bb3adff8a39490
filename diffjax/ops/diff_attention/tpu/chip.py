"""The TPU that the kernels run on, the arrays they take, and vector helpers."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from diffjax.ops.platform import tpu_generation, tpu_info

LANES = 128  # elements of a row of a vector register

_DTYPES = (jnp.bfloat16, jnp.float32)
_MAX_D = 256
_MAX_V = 512

# The `interpret` argument of pallas_call.
interpret_mode: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "interpret", default=False
)


@contextlib.contextmanager
def interpreted(
  params: pltpu.InterpretParams | bool | None = None,
) -> Iterator[None]:
  """Runs the kernels in an interpreter, on any backend. For tests.

  Args:
    params: the parameters of Pallas's TPU interpreter. None for its defaults,
      or True for Pallas's general interpreter.
  """
  if params is None:
    params = pltpu.InterpretParams()
  token = interpret_mode.set(params)
  try:
    yield
  finally:
    interpret_mode.reset(token)


def generation(otherwise: str) -> str:
  """Returns the generation of the TPU, such as "v5e".

  In the interpreter it is "v5e".

  Args:
    otherwise: the implementation that the error message suggests.

  Raises:
    ValueError: if the program is not for a TPU.
  """
  if interpret_mode.get():
    return "v5e"
  try:
    return tpu_generation()
  except ValueError as error:
    raise ValueError(
      "implementation = 'pallas_tpu' needs a TPU, and the backend is"
      f" {jax.default_backend()!r}; use implementation={otherwise!r} or 'auto'"
    ) from error


def cores() -> int:
  """Returns the number of TensorCores of a device.

  They share a grid's parallel axes. There are usually two on v4 and v5p. In the
  interpreter there is one.
  """
  if interpret_mode.get():
    return 1
  return int(tpu_info().num_cores)


def takes(q: jax.Array, v: jax.Array) -> bool:
  """Returns True if the kernels take q and v, by their dtype and widths."""
  D = q.shape[-1]
  V = v.shape[-1]
  return q.dtype in _DTYPES and D <= _MAX_D and V <= _MAX_V


def check(q: jax.Array, v: jax.Array, otherwise: str) -> None:
  """Checks that the kernels take q and v.

  Args:
    q: queries.
    v: values.
    otherwise: the implementation that the error message suggests.

  Raises:
    ValueError: if they do not.
  """
  if not takes(q, v):
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}) and v (V = {v.shape[-1]}) are not"
      " taken by implementation 'pallas_tpu', which takes bfloat16 and float32,"
      f" D up to {_MAX_D} and V up to {_MAX_V}: cast them, or use"
      f" implementation={otherwise!r}"
    )


def dot(
  a: jax.Array, b: jax.Array, contracting_axes: tuple[int, int]
) -> jax.Array:
  """Returns the product of two matrices, in float32.

  Example:
    dot(a, b, (1, 0)) is a @ b, and dot(a, b, (1, 1)) is a @ b.T.

  Args:
    a: a matrix. It is cast to b's dtype.
    b: a matrix.
    contracting_axes: the axis of a and the axis of b to sum over.
  """
  precision = lax.Precision.DEFAULT
  if b.dtype == jnp.float32:
    # The default would round float32 inputs to bfloat16.
    precision = lax.Precision.HIGHEST
  a_axis, b_axis = contracting_axes
  no_batch_axes = ((), ())
  return lax.dot_general(
    a.astype(b.dtype),
    b,
    (((a_axis,), (b_axis,)), no_batch_axes),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def as_column(
  row: Float[Array, "1 n"], lanes: int = LANES
) -> Float[Array, "n lanes"]:
  """Returns a row as a column, repeated in all lanes."""
  return jnp.broadcast_to(row, (lanes, row.shape[1])).T


def as_row(column: Float[Array, "n 128"]) -> Float[Array, "1 n"]:
  """Returns a column as a row. All lanes of the column hold the same number.

  The column is cut into squares of 128 rows and 128 lanes. The diagonal of a
  square has the numbers of its rows, each in another lane, so a sum over the
  rows returns them as a row. Transposing the squares would take much longer.
  """
  square = (LANES, LANES)
  row_index = lax.broadcasted_iota(jnp.int32, square, 0)
  lane_index = lax.broadcasted_iota(jnp.int32, square, 1)
  is_diagonal = row_index == lane_index
  diagonals = []
  for start in range(0, column.shape[0], LANES):
    column_square = column[start : start + LANES]
    diagonal_only = jnp.where(is_diagonal, column_square, 0)
    diagonals.append(jnp.sum(diagonal_only, axis=0, keepdims=True))
  return jnp.concatenate(diagonals, axis=1)


def repeat(x: Float[Array, "n 128"], width: int) -> Float[Array, "n width"]:
  """Returns a column, repeated in 128 lanes, repeated in `width` lanes."""
  return jnp.tile(x, (1, pl.cdiv(width, LANES)))[:, :width]
