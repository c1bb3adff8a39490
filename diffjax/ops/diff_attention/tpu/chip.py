"""The chip that the TPU kernels are for, what they take, their interpreter, and idioms of vectors."""

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

from diffjax.ops.platform import tpu_generation, tpu_info

LANES = 128

interpret_mode: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "interpret", default=False
)


@contextlib.contextmanager
def interpreted(
  params: pltpu.InterpretParams | bool | None = None,
) -> Iterator[None]:
  """Within it the kernels run in Pallas's TPU interpreter, or with True in its general one, on any backend: for tests."""
  token = interpret_mode.set(
    pltpu.InterpretParams() if params is None else params
  )
  try:
    yield
  finally:
    interpret_mode.reset(token)


def generation(otherwise: str) -> str:
  """The TPU that the program is compiled for; "v5e" in the interpreter.

  Args:
    otherwise: the implementation that errors name.

  Raises:
    ValueError: the program is not for a TPU.
  """
  if interpret_mode.get():
    return "v5e"
  try:
    return tpu_generation()
  except ValueError as error:
    raise ValueError(
      f"implementation = 'pallas_tpu' needs a TPU, and the backend is {jax.default_backend()!r}; use implementation={otherwise!r} or 'auto'"
    ) from error


def cores() -> int:
  """TensorCores of a device, which share out a grid's parallel axes: 2 on v4 and v5p as they usually are; 1 in the interpreter."""
  return 1 if interpret_mode.get() else int(tpu_info().num_cores)


def takes(q: jax.Array, v: jax.Array) -> bool:
  """True if the kernels take arrays of such dtypes and widths."""
  return (
    q.dtype in (jnp.bfloat16, jnp.float32)
    and q.shape[-1] <= 256
    and v.shape[-1] <= 512
  )


def check(q: jax.Array, v: jax.Array, otherwise: str) -> None:
  """Refuses arrays that the kernels do not take.

  Raises:
    ValueError: naming what they take, and the implementation `otherwise`.
  """
  if not takes(q, v):
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}) and v (V = {v.shape[-1]}) are not taken by implementation 'pallas_tpu', which takes bfloat16 and "
      f"float32, D up to 256 and V up to 512: cast them, or use implementation={otherwise!r}"
    )


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
  """A matrix product over the given axes, accumulated in float32; float32 operands are not rounded to bfloat16."""
  precision = (
    lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.DEFAULT
  )
  return lax.dot_general(
    a.astype(b.dtype),
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def as_column(row: jax.Array, lanes: int = LANES) -> jax.Array:
  """[1, n] as [n, lanes] of equal lanes."""
  return jnp.broadcast_to(row, (lanes, row.shape[1])).T


def as_row(x: jax.Array) -> jax.Array:
  """[n, 128] of equal lanes as [1, n]: the diagonals of its squares, since turning all of it would take much longer."""
  square = (LANES, LANES)
  diagonal = lax.broadcasted_iota(jnp.int32, square, 0) == lax.broadcasted_iota(
    jnp.int32, square, 1
  )
  pieces = [x[start : start + LANES] for start in range(0, x.shape[0], LANES)]
  return jnp.concatenate(
    [
      jnp.sum(jnp.where(diagonal, piece, 0), axis=0, keepdims=True)
      for piece in pieces
    ],
    axis=1,
  )


def repeat(x: jax.Array, width: int) -> jax.Array:
  """[rows, 128] of equal lanes at another width."""
  return jnp.tile(x, (1, pl.cdiv(width, LANES)))[:, :width]
