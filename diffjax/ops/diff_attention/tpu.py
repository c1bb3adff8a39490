"""What the TPU kernels share: the chip that they are for, the interpreter, and idioms of vectors."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HIDDEN = -1e30  # a hidden logit; finite, so that the maximum of a row that sees nothing can be subtracted from it
LOG2E = float(np.log2(np.e))
LANES = 128

interpret_mode: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=False)


@contextlib.contextmanager
def interpreted(params: pltpu.InterpretParams | bool | None = None) -> Iterator[None]:
  """Within it the kernels run in Pallas's TPU interpreter, or with True in its general one, on any backend: for tests."""
  token = interpret_mode.set(pltpu.InterpretParams() if params is None else params)
  try:
    yield
  finally:
    interpret_mode.reset(token)


def generation() -> str:
  """The TPU that the program is compiled for: the device's, or the abstract mesh's when compiling ahead of time."""
  if interpret_mode.get():
    return "v5e"
  try:
    return str(pltpu.get_tpu_info().chip_version)
  except ValueError as error:
    raise ValueError(
      f"implementation = 'pallas_tpu' needs a TPU, and the backend is {jax.default_backend()!r}; use implementation='chunked' or 'auto'"
    ) from error


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
  """A matrix product over the given axes, accumulated in float32; float32 operands are not rounded to bfloat16."""
  precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.DEFAULT
  return lax.dot_general(
    a.astype(b.dtype), b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


def as_column(row: jax.Array, lanes: int = LANES) -> jax.Array:
  """[1, n] as [n, lanes] of equal lanes."""
  return jnp.broadcast_to(row, (lanes, row.shape[1])).T


def as_row(x: jax.Array) -> jax.Array:
  """[n, 128] of equal lanes as [1, n]: the diagonals of its squares, since turning all of it would take much longer."""
  square = (LANES, LANES)
  diagonal = lax.broadcasted_iota(jnp.int32, square, 0) == lax.broadcasted_iota(jnp.int32, square, 1)
  pieces = [x[start : start + LANES] for start in range(0, x.shape[0], LANES)]
  return jnp.concatenate([jnp.sum(jnp.where(diagonal, piece, 0), axis=0, keepdims=True) for piece in pieces], axis=1)


def repeat(x: jax.Array, width: int) -> jax.Array:
  """[rows, 128] of equal lanes at another width."""
  return jnp.tile(x, (1, pl.cdiv(width, LANES)))[:, :width]


def round_up(x: int, multiple: int) -> int:
  """The next multiple that is not less than x."""
  return -(-x // multiple) * multiple
