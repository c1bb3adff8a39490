"""The chip that the GPU kernels are for (Hopper), what they take, their interpreter, rings of slots in shared memory, products, masks."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from diffjax.ops.diff_attention.gpu import assembler
from diffjax.ops.diff_attention.tiles import LOG2E
from diffjax.ops.varying import vary_like

plgpu: Any = mosaic_gpu  # untyped: older JAX, on which the kernels only refuse, has another API

BLOCK = 64  # queries of a warpgroup, which is the height of a wgmma, and keys of a block
# The value of a masked logit. It is a power of two, so that it times the scale is
# exact: the maximum of a row that sees no key is exactly that product.
POWER_OF_2_MASKED_LOGIT = -(2.0**100)
# The log-sum-exp that is stored for a row that sees no key. The backward pass
# subtracts it from logits, so the weights of the row become 0.
POWER_OF_2_EMPTY_ROW_LSE = 2.0**100
_SMEM_BYTES = (
  232_448 - 1024
)  # what a thread block may use, less what barriers take
_MOST_STAGES = 4

interpret_mode: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "interpret", default=None
)


@contextlib.contextmanager
def interpreted(params: Any = None) -> Iterator[None]:
  """Within it the kernels run in Pallas's interpreter of Mosaic GPU, on any backend: for tests. `params`: a `plgpu.InterpretGPUParams`."""
  token = interpret_mode.set(
    plgpu.InterpretGPUParams() if params is None else params
  )
  try:
    yield
  finally:
    interpret_mode.reset(token)


def refusal() -> str | None:
  """The reason why the kernels cannot run in this program, if so: what they need, and what there is."""
  if jax.__version_info__ < (0, 11, 2):
    found = f"this is JAX {jax.__version__} on Python {_python()}"
    if sys.version_info < (3, 12):
      return f"needs JAX 0.11.2 and Python 3.12 or newer, and {found}"
    return f"needs JAX 0.11.2 or newer, and {found}"
  if interpret_mode.get() is not None:
    return None
  needed = "needs a Hopper GPU (compute capability 9.0)"
  abstract = (
    jax.sharding.get_abstract_mesh().abstract_device
  )  # set when compiling ahead of time, and knows the name only
  device = jax.devices()[0]
  if abstract is not None and abstract.device_kind != device.device_kind:
    return (
      None
      if re.search(r"\bG?H(20|100|200|800)\b", abstract.device_kind)
      else f"{needed}, and this is {abstract.device_kind}"
    )
  if device.platform != "gpu":
    return f"{needed}, and the backend is {jax.default_backend()!r}"
  return (
    None
    if device.compute_capability == "9.0"
    else f"{needed}, and this is {device.device_kind}, {device.compute_capability}"
  )


def _python() -> str:
  """Returns the version of Python, as "3.12"."""
  return ".".join(map(str, sys.version_info[:2]))


def takes(q: jax.Array, v: jax.Array) -> bool:
  """True if the kernels take arrays of such dtypes and widths."""
  return (
    q.dtype in (jnp.bfloat16, jnp.float16)
    and q.shape[-1] <= 128
    and v.shape[-1] <= 256
  )


def call(
  function,
  name: str,
  *,
  interpret,
  grid,
  grid_names,
  warpgroups: int,
  outputs,
  scratch,
):
  """`plgpu.kernel` over a grid, with outputs as (shape, dtype) or None. Inside shard_map they vary over the mesh as the inputs do."""
  if interpret is None:
    problem = assembler.refusal()
    if problem is not None:
      warnings.warn(f"pallas_gpu {problem}", stacklevel=2)

  def body(*refs, **scratch):
    token = interpret_mode.set(
      interpret
    )  # a backward pass may be traced outside of `interpreted`
    try:
      function(*refs, **scratch)
    finally:
      interpret_mode.reset(token)

  kernel = plgpu.kernel(
    body,
    out_type=tuple(
      None if x is None else jax.ShapeDtypeStruct(*x) for x in outputs
    ),
    scratch_types=scratch,
    grid=grid,
    grid_names=grid_names,
    num_threads=warpgroups,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      approx_math=True, reduction_scratch_bytes=0
    ),
    interpret=interpret,
    kernel_name=name,
  )
  return lambda *inputs: jax.tree.map(
    lambda x: vary_like(x, *jax.tree.leaves(inputs)), kernel(*inputs)
  )


@dataclasses.dataclass(frozen=True)
class Ring:
  """Slots in shared memory that one warpgroup fills and others read and free, with a barrier each way for every slot."""

  stages: int
  ready: Any
  free: Any

  def slot(self, step):
    return lax.rem(step, jnp.int32(self.stages))

  def await_(self, step) -> None:
    """Returns when the slot of a step is filled. Once a step."""
    plgpu.barrier_wait(self.ready.at[self.slot(step)])

  def wait(self, step):
    """The slot of a step, once it is filled."""
    self.await_(step)
    return self.slot(step)

  def release(self, step) -> None:
    plgpu.barrier_arrive(self.free.at[self.slot(step)])

  def skip(self, step) -> None:
    self.wait(step)
    self.release(step)

  def fill(self, step, first, load: Callable[[Any, Any], Any]) -> None:
    """Calls load(slot, its barrier) for the slot of a step, once it is free; steps are counted from `first`."""
    slot = self.slot(step)
    pl.when(step - first >= self.stages)(
      lambda: plgpu.barrier_wait(self.free.at[slot])
    )
    load(slot, self.ready.at[slot])

  def drain(self, first, stop) -> None:
    """Waits until the last slots were freed, so that every phase of the barriers is observed."""

    @pl.loop(lax.max(stop - self.stages, first), stop)
    def _(step):
      plgpu.barrier_wait(self.free.at[self.slot(step)])


def stages(fixed_bytes: int, slot_bytes: int, least: int = 2) -> int:
  """Slots that fit into shared memory beside what stays there: at least two where a warpgroup waits for one while it holds another."""
  found = min(_MOST_STAGES, (_SMEM_BYTES - fixed_bytes) // slot_bytes)
  assert found >= least, (
    f"{found} slots of {slot_bytes} bytes fit beside {fixed_bytes}, and {least} are needed"
  )
  return found


def tiled(shape: tuple[int, ...], dtype: Any):
  """Shared memory as TMA and wgmma want it: tiles of 8 rows of 128 bytes, swizzled."""
  return plgpu.SMEM(
    shape,
    dtype,
    transforms=(plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128)),
  )


def in_loop(index, step):
  """The index, as the compiler cannot know in a loop of fewer than 2³⁰ steps.

  What does not change in a loop is computed before it, and kept: for wgmma the address of each 16 columns of an operand that stays, in two
  registers each, which are better used for sums.
  """
  return index + lax.shift_right_logical(step, jnp.int32(30))


def product(a, b) -> jax.Array:
  """a·b, both in shared memory."""

  def multiply(ref):
    plgpu.wgmma(ref, a, b)
    return ref[...]

  return after_zero(
    pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
  )


class Pending(NamedTuple):
  """acc + a·b, to be made: acc and a in registers, b in shared memory."""

  acc: jax.Array
  a: jax.Array
  b: Any


def accumulate(
  products: Sequence[tuple[jax.Array, jax.Array, Any] | Pending],
) -> Sequence[jax.Array]:
  """acc + a·b for each (acc, a, b), a in registers and b in shared memory; all are in flight at once.

  Where b is one of several in a buffer, its index must be traced: `pl.run_state` takes no numbers in.
  """
  if (
    interpret_mode.get() is not None
  ):  # the interpreter takes neither accumulators with a value nor `a` in registers
    sums = [
      acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
      for acc, a, b in products
    ]
    plgpu.commit_smem()  # b was read without wgmma: before TMA writes there again
    return sums

  def multiply(refs):
    for ref, (_, a, b) in zip(refs, products, strict=True):
      plgpu.wgmma(ref, a, b)

  return pl.run_state(multiply)(
    tuple(plgpu.ACC.init(acc) for acc, _, _ in products)
  )


def overlapped(
  products: Sequence[tuple[Any, Any]],
  pending: Pending | None,
  work: Callable[..., Any],
  like: Any = None,
  meanwhile=None,
):
  """The sum of `pending`, and work(*products), which goes on while the sum is being made.

  ptxas lets products go on only within a run of instructions without a branch. So `work` must not branch; `meanwhile` comes after it and
  should: it holds the compiler back from waiting for the sum before the work is done.

  Args:
    products: pairs of operands in shared memory.
    pending: a sum and what is to be added to it; None if there is nothing yet.
    work: from the products to arrays.
    like: arrays of the shapes and layouts that `work` returns; not needed if nothing is pending.
    meanwhile: waits for what comes next.
  """
  if pending is None or interpret_mode.get() is not None:
    acc = None if pending is None else accumulate([pending])[0]
    results = work(*[product(a, b) for a, b in products])
    if meanwhile is not None:
      meanwhile()
    return acc, results

  def multiply(refs):
    acc_ref, *results = refs

    def beside(*refs):
      for ref, (a, b) in zip(refs, products, strict=True):
        plgpu.wgmma(ref, a, b)
      plgpu.wgmma(acc_ref, pending.a, pending.b)
      values = work(
        *[plgpu.wgmma_accumulator_load(ref, wait_n=1) for ref in refs]
      )
      # In this order: else the compiler would do the work when it has waited for the sum.
      for result, value in zip(
        results, lax.optimization_barrier(tuple(values)), strict=True
      ):
        result[...] = value
      if meanwhile is not None:
        meanwhile()

    pl.run_scoped(
      beside,
      *[plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32) for a, b in products],
    )

  acc, *results = pl.run_state(multiply)((plgpu.ACC.init(pending.acc), *like))
  acc, _ = after_zero(
    (acc, pending.a)
  )  # else results may be put where the product still reads `a`
  return acc, results


def after_zero(x: Any) -> Any:
  """The same, after a use of the constant 0.

  The compiler keeps the zeros with which accumulators begin in one register, and lets its last user have it. If that is an accumulator, all
  of the accumulator's registers are taken from where the zero is made, which is long before they are needed.
  """
  return lax.optimization_barrier((x, full((BLOCK,), 0, row())))[0]


def logit_factor(scale: float, q: jax.Array) -> tuple[float, jax.Array]:
  """What products of queries and keys are multiplied by, for exponentials of base 2, and the queries.

  The factor is positive and not so small that `POWER_OF_2_MASKED_LOGIT` times it would not hide: another one is put into the queries, which rounds them.
  """
  factor = scale * LOG2E
  return (
    (factor, q)
    if factor > 2**-20
    else (1.0, (q.astype(jnp.float32) * factor).astype(q.dtype))
  )


def hidden(factor: float) -> float:
  """A hidden logit times the factor, as the kernels compute it: the maximum of a row that sees nothing."""
  return float(np.float32(factor)) * POWER_OF_2_MASKED_LOGIT


def hide(logits: jax.Array, start, first, last, ids=None) -> jax.Array:
  """Logits but for columns `first` to `last`, where the first column is `start`; `ids` of rows and columns must agree."""
  # Compared with limits a row, columns take a register each; the mask of distances would take one an element, in every turn of the loop.
  columns = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=matrix())
  limit = lambda x: (
    rows_of(x - start, logits.shape) if getattr(x, "ndim", 0) else x - start
  )
  conditions = []
  if last is not None:
    conditions.append(columns <= limit(last))
  if first is not None and not (isinstance(first, int) and first == 0):
    conditions.append(columns >= limit(first))
  if ids is not None:
    conditions.append(
      rows_of(ids[0], logits.shape) == columns_of(ids[1], logits.shape)
    )
  return jnp.where(
    functools.reduce(jnp.logical_and, conditions),
    logits,
    POWER_OF_2_MASKED_LOGIT,
  )


def matrix():
  """The layout of a matrix in the registers of a warpgroup, as wgmma has it."""
  return plgpu.Layout.WGMMA


def row():
  """One value a row of a matrix."""
  return plgpu.Layout.WGMMA.reduce(1)


def column():
  """One value a column of a matrix."""
  return plgpu.Layout.WGMMA.reduce(0)


def rows_of(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """One value a row, in all columns."""
  return lax.broadcast_in_dim(x, shape, [0])


def columns_of(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """One value a column, in all rows."""
  return lax.broadcast_in_dim(x, shape, [1])


def full(shape: tuple[int, ...], value: float, layout) -> jax.Array:
  """One float32 value everywhere."""
  return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def iota(layout) -> jax.Array:
  """0 … BLOCK − 1."""
  return plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=layout)


def load(ref, layout) -> jax.Array:
  """Read straight from global memory: few numbers, once a block."""
  return plgpu.load(ref, layout=layout, optimized=False)
