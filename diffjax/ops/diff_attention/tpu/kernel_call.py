"""Helpers to call a TPU kernel, for the forward and the backward pass.

Layouts of the arrays, descriptions of operands and outputs, scratch memory, the
cost estimate, and the call itself. `schedule.py` explains tiles and spans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from diffjax.ops.diff_attention.tiles import Scalar, pad_axis
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks
from diffjax.ops.diff_attention.tpu.chip import LANES
from diffjax.ops.diff_attention.tpu.schedule import Scalars, Schedule


@dataclasses.dataclass(frozen=True)
class KernelConfig:
  """What `_prepare` in attention.py chooses for both passes.

  Attributes:
    forward_blocks: block sizes of the forward pass.
    backward_blocks: block sizes of the backward pass.
    generation: the chip, such as "v5e".
    cores: the number of TensorCores of a device.
    interpret: the `interpret` argument of `pallas_call`.
  """

  forward_blocks: Blocks
  backward_blocks: Blocks
  generation: str
  cores: int
  interpret: Any


@dataclasses.dataclass(frozen=True)
class Operand:
  """An input of a kernel.

  Attributes:
    array: the input.
    block: the last axes of the block that a step of the grid loads. All axes
      before them have size 1 in the block. The kernel does not see them.
    index_map: maps the grid's indices, and the fields of `Scalars` that are not
      None, to the index of the block.
    is_reloaded: whether the cost estimate counts the blocks of this array again
      for each stationary block. Segment ids are too small to matter.
  """

  array: jax.Array
  block: tuple[int, ...]
  index_map: Callable[..., tuple[Scalar, ...]]
  is_reloaded: bool = False

  @property
  def spec(self) -> pl.BlockSpec:
    return _block_spec(self.array.ndim, self.block, self.index_map)

  @property
  def num_bytes(self) -> int:
    return _num_bytes(self.array.shape, self.array.dtype)

  @property
  def block_bytes(self) -> int:
    return _num_bytes(self.block, self.array.dtype)


@dataclasses.dataclass(frozen=True)
class Output:
  """An output of a kernel.

  Attributes:
    shape: its shape.
    dtype: its dtype.
    block: the last axes of the block that a kernel writes, as in `Operand`.
    index_map: maps the grid's indices, and the fields of `Scalars` that are not
      None, to the index of the block.
  """

  shape: tuple[int, ...]
  dtype: Any
  block: tuple[int, ...]
  index_map: Callable[..., tuple[Scalar, ...]]

  @property
  def spec(self) -> pl.BlockSpec:
    return _block_spec(len(self.shape), self.block, self.index_map)

  @property
  def num_bytes(self) -> int:
    return _num_bytes(self.shape, self.dtype)


def call_kernel(
  kernel: Callable[..., None],
  name: str,
  *,
  grid: tuple[int, ...],
  num_parallel_axes: int,
  scalars: Scalars,
  operands: Sequence[Operand | None],
  outputs: Sequence[Output | None],
  scratch_shapes: Sequence[Any],
  vmem_bytes: int,
  cost: pl.CostEstimate,
  interpret: Any,
) -> tuple[Any, ...]:
  """Runs a kernel over a grid and returns its outputs.

  Args:
    kernel: receives the scalars, and then one ref for each operand, output and
      scratch shape. Where one of these is None, it receives None.
    name: the kernel's name in profiles.
    grid: the sizes of the grid's axes.
    num_parallel_axes: how many of the first axes several cores may share.
    scalars: what kernel and index maps read from scalar memory. Its None fields
      must be the last ones.
    operands: the inputs. The first one must be an array.
    outputs: the outputs. Where one is None, None is returned.
    scratch_shapes: the kernel's scratch memory.
    vmem_bytes: the vector memory to request.
    cost: the cost estimate for XLA's scheduler.
    interpret: the `interpret` argument of `pallas_call`.
  """
  scalar_arrays = [array for array in scalars if array is not None]
  num_scalars = len(scalar_arrays)

  def kernel_with_scalars(*refs: Any) -> None:
    kernel(Scalars(*refs[:num_scalars]), *refs[num_scalars:])

  arrays: list[jax.Array | None] = []
  in_specs: list[pl.BlockSpec | None] = []
  for operand in operands:
    arrays.append(None if operand is None else operand.array)
    in_specs.append(None if operand is None else operand.spec)

  # Inside shard_map, the outputs vary over the same mesh axes as the inputs.
  manual_axis_type = jax.typeof(arrays[0]).manual_axis_type
  out_shapes: list[jax.ShapeDtypeStruct | None] = []
  out_specs: list[pl.BlockSpec | None] = []
  for output in outputs:
    if output is None:
      out_shapes.append(None)
      out_specs.append(None)
      continue
    out_shapes.append(
      jax.ShapeDtypeStruct(
        output.shape, output.dtype, manual_axis_type=manual_axis_type
      )
    )
    out_specs.append(output.spec)

  num_sequential_axes = len(grid) - num_parallel_axes
  return pl.pallas_call(
    kernel_with_scalars,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=num_scalars,
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=scratch_shapes,
    ),
    out_shape=out_shapes,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=[pltpu.PARALLEL] * num_parallel_axes
      + [pltpu.ARBITRARY] * num_sequential_axes,
      vmem_limit_bytes=vmem_bytes,
    ),
    cost_estimate=cost,
    interpret=interpret,
    name=name,
  )(*scalar_arrays, *arrays)


def estimate_cost(
  schedule: Schedule,
  operands: Sequence[Operand | None],
  outputs: Sequence[Output | None],
  *,
  num_query_groups: int,
  flops_per_pair: int,
  num_parts: int = 1,
  reloads_spans: bool,
) -> pl.CostEstimate:
  """Returns the operations and bytes of a kernel, for XLA's scheduler.

  A kernel keeps a stationary block in memory (of queries in the forward pass,
  of keys in the backward pass), and loads spans of the other side, which are
  groups of consecutive blocks.

  Args:
    schedule: which tiles are computed and which spans are loaded. A tile is a
      block of queries against a block of keys.
    operands: the inputs. None for an absent one.
    outputs: the outputs. None for an absent one.
    num_query_groups: B·Q, the number of times that the schedule is run.
    flops_per_pair: floating-point operations per query and key of a group.
    num_parts: the number of parts that share the keys of one head. Each part
      loads all queries.
    reloads_spans: whether the spans are loaded again for each stationary block.
      They are not if there is only one span.
  """
  counts = schedule.count_tiles()
  num_tiles = num_query_groups * counts.tiles
  num_spans = num_query_groups * counts.spans
  num_pairs = num_tiles * schedule.blocks.q * schedule.blocks.kv

  # Outputs are written once. Inputs are read once, or once per span.
  bytes_accessed = 0
  for output in outputs:
    if output is not None:
      bytes_accessed += output.num_bytes
  for operand in operands:
    if operand is None:
      continue
    if not operand.is_reloaded:
      bytes_accessed += operand.num_bytes
    elif reloads_spans:
      bytes_accessed += num_spans * operand.block_bytes
    else:
      bytes_accessed += num_parts * operand.num_bytes
  return pl.CostEstimate(
    flops=flops_per_pair * num_pairs,
    # One exponential per map.
    transcendentals=schedule.num_maps * num_pairs,
    bytes_accessed=bytes_accessed,
  )


def _block_spec(
  ndim: int,
  block: tuple[int, ...],
  index_map: Callable[..., tuple[Scalar, ...]],
) -> pl.BlockSpec:
  num_squeezed_axes = ndim - len(block)
  return pl.BlockSpec((None,) * num_squeezed_axes + block, index_map)


def _num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
  return math.prod(shape) * jnp.dtype(dtype).itemsize


def float32_scratch(*shape: int) -> Any:
  """Returns vector memory for float32 numbers."""
  return pltpu.VMEM(shape, jnp.float32)


def id_column_scratch(schedule: Schedule, length: int) -> Any:
  """Returns vector memory for a column of ids, or None without segments.

  The ids of a stationary block are turned from a row to a column once. The ids
  of moving blocks stay in a row.
  """
  if not schedule.mask.segments:
    return None
  return pltpu.VMEM((length, LANES), jnp.int32)


def aligned_slice(start: Scalar, size: int) -> Any:
  """Returns a slice of a block, for a start that is a multiple of the size."""
  if not isinstance(start, int):
    start = pl.multiple_of(start, size)
  return pl.ds(start, size)


def queries_by_map(
  q: Float[Array, "B T Q G D"], length: int
) -> Float[Array, "B Q G length D"]:
  """Returns queries in the layout of the kernels, padded to a length."""
  return pad_axis(jnp.transpose(q, (0, 2, 3, 1, 4)), 3, length)


def keys_by_map(
  k: Float[Array, "B S K M D"], length: int
) -> Float[Array, "B K M length D"]:
  """Returns keys in the layout of the kernels, padded to a length."""
  return pad_axis(jnp.transpose(k, (0, 2, 3, 1, 4)), 3, length)


def values_by_head(
  v: Float[Array, "B S K V"], length: int
) -> Float[Array, "B K length V"]:
  """Returns values in the layout of the kernels, padded to a length."""
  return pad_axis(jnp.swapaxes(v, 1, 2), 2, length)


def ids_as_rows(ids: Any, length: int) -> Any:
  """Returns segment ids [B, T] as [B, 1, 1, length]."""
  return pad_axis(ids, 1, length)[:, None, None]


def lambda_by_group(
  lam: Float[Array, "B T H"], num_signal_maps: int
) -> Float[Array, "B Q signals T"]:
  """Returns λ of each query group's signal maps."""
  batch, length, _ = lam.shape
  lam = jnp.swapaxes(lam, 1, 2)
  return lam.reshape(batch, -1, num_signal_maps, length)
