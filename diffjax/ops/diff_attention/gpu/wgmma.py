"""Matrix products on Hopper's tensor cores, by the instruction wgmma.

A warpgroup starts a wgmma and may compute something else until it waits for the
result. The first operand is in shared memory or in registers, the second one in
shared memory. The accumulator is in registers, in `layouts.matrix`.

The functions also work in the interpreter. It supports neither accumulators
with an initial value nor operands in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.gpu import layouts
from diffjax.ops.diff_attention.gpu.chip import (
  BLOCK,
  Ref,
  interpret_mode,
  plgpu,
)

# Loops have fewer than 2³⁰ steps, so the step shifted by 30 bits is 0.
_LOG2_MAX_STEPS = 30


class PendingProduct(NamedTuple):
  """The sum acc + a·b, which has not been computed yet."""

  acc: Float[Array, "rows columns"]  # in registers
  a: Float[Array, "rows inner"]  # in registers
  b: Ref  # [inner, columns], in shared memory


def matmul(a: Ref, b: Ref) -> Float[Array, "rows columns"]:
  """Returns a·b of two operands in shared memory, in float32."""

  def multiply(acc_ref: Ref) -> jax.Array:
    plgpu.wgmma(acc_ref, a, b)
    return acc_ref[...]

  product = pl.run_scoped(multiply, _accumulator_type(a, b))
  return _use_zero_after(product)


def multiply_add(
  acc: Float[Array, "rows columns"], a: Float[Array, "rows inner"], b: Ref
) -> Float[Array, "rows columns"]:
  """Returns acc + a·b, with acc and a in registers and b in shared memory.

  Args:
    acc: a matrix that the product is added to.
    a: the first operand.
    b: the second operand. If it is a part of a buffer, the index must be
      traced, because `pl.run_state` does not accept Python integers.
  """
  if interpret_mode.get() is not None:
    # The interpreter does not support a wgmma with an operand in registers.
    result = acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    # b was not read by wgmma. This orders the read before TMA writes b again.
    plgpu.commit_smem()
    return result

  def multiply(acc_ref: Ref) -> None:
    plgpu.wgmma(acc_ref, a, b)

  return pl.run_state(multiply)(plgpu.ACC.init(acc))


def matmul_with_epilogue(
  operands: Sequence[tuple[Ref, Ref]],
  epilogue: Callable[..., Any],
  *,
  pending: PendingProduct | None = None,
  outputs_like: Any = None,
  wait_for_next: Callable[[], Any] | None = None,
) -> tuple[Any, Any]:
  """Computes products and their epilogue while a pending product is added.

  The tensor cores compute the products, and then the pending product. The
  warpgroup waits only for the former, and computes the epilogue meanwhile.

  ptxas lets a wgmma continue only through instructions without a branch. So the
  epilogue must not branch.

  Args:
    operands: pairs (a, b) in shared memory.
    epilogue: a function of the products a·b. It returns a tuple of arrays.
    pending: the pending product. None if nothing is pending.
    outputs_like: arrays with the shapes and layouts of the epilogue's outputs.
      They are needed only with a pending product.
    wait_for_next: called after the epilogue, to wait for the next block. It
      should branch: the branch stops the compiler from moving the wait for the
      pending product before the epilogue.

  Returns:
    The sum of the pending product (None without one), and the epilogue's
    outputs.
  """
  # Without a pending product, or in the interpreter, nothing overlaps.
  if pending is None or interpret_mode.get() is not None:
    acc = None if pending is None else multiply_add(*pending)
    products = [matmul(a, b) for a, b in operands]
    outputs = epilogue(*products)
    if wait_for_next is not None:
      wait_for_next()
    return acc, outputs

  def start_products(refs: Sequence[Ref]) -> None:
    acc_ref, *output_refs = refs

    def multiply_all(*product_refs: Ref) -> None:
      for product_ref, (a, b) in zip(product_refs, operands, strict=True):
        plgpu.wgmma(product_ref, a, b)
      plgpu.wgmma(acc_ref, pending.a, pending.b)

      # `wait_n=1` waits until only the last wgmma, the pending one, is running.
      products = []
      for product_ref in product_refs:
        products.append(plgpu.wgmma_accumulator_load(product_ref, wait_n=1))

      # Without the barrier the compiler computes the epilogue after it has
      # waited for the pending product.
      outputs = tuple(epilogue(*products))
      outputs = lax.optimization_barrier(outputs)
      for output_ref, output in zip(output_refs, outputs, strict=True):
        output_ref[...] = output
      if wait_for_next is not None:
        wait_for_next()

    product_types = [_accumulator_type(a, b) for a, b in operands]
    pl.run_scoped(multiply_all, *product_types)

  initial = (plgpu.ACC.init(pending.acc), *outputs_like)
  acc, *outputs = pl.run_state(start_products)(initial)
  # Keeps `pending.a` alive until the sum is complete. Otherwise outputs may get
  # its registers while the wgmma still reads them.
  acc, _ = _use_zero_after((acc, pending.a))
  return acc, outputs


def prevent_hoisting(index: jax.Array, step: Int[Array, ""]) -> Int[Array, ""]:
  """Returns `index`, in a form that seems to depend on the step of a loop.

  The compiler computes what is constant in a loop before it, and keeps it in
  registers. For an operand of wgmma that stays in shared memory, these are two
  registers for the address of each 16 columns. The accumulators need them more.
  """
  always_zero = lax.shift_right_logical(step, jnp.int32(_LOG2_MAX_STEPS))
  return index + always_zero


def _accumulator_type(a: Ref, b: Ref) -> Any:
  """Returns the type of the accumulator of a·b."""
  return plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32)


def _use_zero_after(x: Any) -> Any:
  """Returns x, and uses the constant 0 after x is computed.

  The compiler keeps the zeros that accumulators start from in one register, and
  gives this register to the last user of 0. If that is an accumulator, all its
  registers are reserved from there on, long before they are needed. This
  function is a later user.
  """
  zeros = layouts.full((BLOCK,), 0, layouts.row())
  x, _ = lax.optimization_barrier((x, zeros))
  return x
