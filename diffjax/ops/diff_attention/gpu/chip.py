"""The Hopper GPU: what the kernels need of it, and how they are launched.

The kernels use Pallas for Mosaic GPU. In its interpreter they run on any
backend.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from diffjax.ops.diff_attention.gpu import assembler
from diffjax.ops.varying import vary_like

# Older versions of JAX have another API. The kernels refuse them, and the type
# checker must accept them.
plgpu: Any = mosaic_gpu

# A reference to an array in global or shared memory, or to barriers.
Ref = Any

# The queries and the keys of a block. It is the number of rows that a warpgroup
# multiplies by one wgmma.
BLOCK = 64

# The registers per thread of a warpgroup that computes, and of one that loads.
# A thread block of three warpgroups starts with 168 per thread: 65,536 per
# multiprocessor / 384 threads, rounded down to a multiple of 8. The total stays
# the same: 2·240 + 24 = 3·168.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24

# The oldest JAX whose Mosaic GPU the kernels work with, and its oldest Python.
_OLDEST_JAX = (0, 11, 2)
_OLDEST_PYTHON = (3, 12)

_HOPPER_CAPABILITY = "9.0"
_HOPPER_NAME = re.compile(r"\bG?H(20|100|200|800)\b")

_MAX_HEAD_DIM = 128
_MAX_VALUE_DIM = 256

# Parameters of the interpreter, or None to compile the kernels.
interpret_mode: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "interpret", default=None
)


@contextlib.contextmanager
def interpreted(params: Any = None) -> Iterator[None]:
  """Runs kernels in Pallas's interpreter within the context, for tests.

  Args:
    params: a `plgpu.InterpretGPUParams`. None for the default ones.
  """
  if params is None:
    params = plgpu.InterpretGPUParams()
  token = interpret_mode.set(params)
  try:
    yield
  finally:
    interpret_mode.reset(token)


def refusal() -> str | None:
  """Returns why the kernels cannot run in this program, or None if they can.

  The reason continues a sentence that begins with the implementation's name. It
  states what the kernels need and what this program has.
  """
  if jax.__version_info__ < _OLDEST_JAX:
    major, minor = sys.version_info[:2]
    current = f"this is JAX {jax.__version__} on Python {major}.{minor}"
    if sys.version_info < _OLDEST_PYTHON:
      return f"needs JAX 0.11.2 and Python 3.12 or newer, and {current}"
    return f"needs JAX 0.11.2 or newer, and {current}"
  if interpret_mode.get() is not None:
    return None  # The interpreter runs on any device.

  needed = f"needs a Hopper GPU (compute capability {_HOPPER_CAPABILITY})"
  device = jax.devices()[0]
  # If the program is compiled ahead of time for another device, an abstract
  # device is set. It has a name, but no compute capability.
  target = jax.sharding.get_abstract_mesh().abstract_device
  if target is not None and target.device_kind != device.device_kind:
    if _HOPPER_NAME.search(target.device_kind):
      return None
    return f"{needed}, and this is {target.device_kind}"
  if device.platform != "gpu":
    return f"{needed}, and the backend is {jax.default_backend()!r}"
  if device.compute_capability != _HOPPER_CAPABILITY:
    return (
      f"{needed}, and this is {device.device_kind}, {device.compute_capability}"
    )
  return None


def takes(q: jax.Array, v: jax.Array) -> bool:
  """Returns whether the kernels support the dtype and widths of the arrays."""
  return (
    q.dtype in (jnp.bfloat16, jnp.float16)
    and q.shape[-1] <= _MAX_HEAD_DIM
    and v.shape[-1] <= _MAX_VALUE_DIM
  )


def make_kernel(
  function: Callable[..., None],
  name: str,
  *,
  interpret: Any,
  grid: tuple[int, ...],
  grid_names: tuple[str, ...],
  warpgroups: int,
  outputs: Sequence[tuple[tuple[int, ...], Any] | None],
  scratch: dict[str, Any],
) -> Callable[..., Any]:
  """Returns a function that runs a kernel on input arrays.

  Inside shard_map, the outputs vary over the same mesh axes as the inputs.

  Args:
    function: the body of the kernel. Its arguments are references to the inputs
      and outputs, and by name to the scratch memory. Each warpgroup runs it.
      `lax.axis_index("warpgroup")` is the number of the warpgroup.
    name: the kernel's name in profiles and dumps.
    interpret: parameters of the interpreter, or None to compile the kernel.
    grid: the sizes of the grid of thread blocks.
    grid_names: the names of the grid's axes, for `lax.axis_index`.
    warpgroups: the number of warpgroups of a thread block.
    outputs: the shape and dtype of each output. None for an output that is not
      needed; its reference is None.
    scratch: the types of shared memory and barriers.
  """
  if interpret is None:
    # "auto" avoids the kernels with an unsafe assembler. If they are requested
    # by name, they run, with a warning.
    problem = assembler.refusal()
    if problem is not None:
      warnings.warn(f"pallas_gpu {problem}", stacklevel=2)

  def body(*refs: Ref, **scratch_refs: Ref) -> None:
    # JAX may trace a backward pass outside of the context `interpreted`, so the
    # mode is set again.
    token = interpret_mode.set(interpret)
    try:
      function(*refs, **scratch_refs)
    finally:
      interpret_mode.reset(token)

  output_types: list[jax.ShapeDtypeStruct | None] = []
  for output in outputs:
    if output is None:
      output_types.append(None)
    else:
      shape, dtype = output
      output_types.append(jax.ShapeDtypeStruct(shape, dtype))

  kernel = plgpu.kernel(
    body,
    out_type=tuple(output_types),
    scratch_types=scratch,
    grid=grid,
    grid_names=grid_names,
    num_threads=warpgroups,
    thread_name="warpgroup",
    # Rows are reduced within a warp, so reductions need no scratch memory.
    compiler_params=plgpu.CompilerParams(
      approx_math=True, reduction_scratch_bytes=0
    ),
    interpret=interpret,
    kernel_name=name,
  )

  def run_kernel(*inputs: Any) -> Any:
    # An absent input is None, which is no leaf.
    input_leaves = jax.tree.leaves(inputs)

    def vary_like_inputs(output: jax.Array) -> jax.Array:
      return vary_like(output, *input_leaves)

    return jax.tree.map(vary_like_inputs, kernel(*inputs))

  return run_kernel
