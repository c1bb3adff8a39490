"""The forward pass of differential attention on TPU.

The grid is [B, Q, query blocks, steps]. A block of queries stays in VMEM (it is
stationary) while the steps load the keys and values that it sees:

  step: loads a span, which is some consecutive key blocks, such as 4.
  tile: a query block against one key block, such as 1024 × 1024 logits.
  sub-tile: a part of a tile whose logits exist at once, such as 256 × 256.

`schedule.py` skips hidden spans, tiles and sub-tiles. The logits of a query
group's G maps are stacked to one [G·n, m] matrix. So the matrix unit loads V
once for all maps.

There are two kernels. The quick kernel takes exponentials of the logits without
subtracting a maximum. So products need not wait for the maximum of a row, and
the matrix unit is always busy. If its log-sum-exps show that float32 could not
hold the exponentials (`in_range`), the online kernel computes everything again.
It subtracts the running maximum of each row.

Exponentials have base 2. Logits are multiplied by scale·log₂e in float32.
Multiplying bfloat16 queries instead would round them a second time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from diffjax.ops.diff_attention.arguments import variant_name
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import (
  EMPTY_ROW_LSE,
  LOG2E,
  MASKED_LOGIT,
  Scalar,
  pad_axis,
)
from diffjax.ops.diff_attention.tpu import block_sizes
from diffjax.ops.diff_attention.tpu.chip import (
  LANES,
  as_column,
  as_row,
  dot,
  repeat,
)
from diffjax.ops.diff_attention.tpu.kernel_call import (
  KernelConfig,
  Operand,
  Output,
  aligned_slice,
  call_kernel,
  estimate_cost,
  float32_scratch,
  id_column_scratch,
  ids_as_rows,
  keys_by_map,
  lambda_by_group,
  queries_by_map,
  values_by_head,
)
from diffjax.ops.diff_attention.tpu.schedule import (
  Interval,
  Scalars,
  Schedule,
  SubtileMask,
  make_scalars,
  make_schedule,
)
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Options,
  PartialResult,
  Saved,
)

# Bounds on log-sum-exps (base 2), on the largest |v| and on the number of keys.
# Within them the quick kernel is accurate. `in_range` derives them.
_MIN_LSE = -60
_MAX_LSE = 80
_MIN_LARGEST_VALUE = 2.0**-20
_MAX_LARGEST_VALUE = 2.0**40
_MAX_KEYS = 1 << 20


def forward(arrays: Arrays, mask: Mask, options: Options) -> Saved:
  """Returns A₁V − λA₂V, or A₁V with one map, computed by a TPU kernel.

  A₁ is the signal map of a head, and A₂ the noise map that is subtracted.

  Args:
    arrays: q, k, v, λ, segment ids and offsets.
    mask: which queries see which keys.
    options: the options of the operation. `options.save` is True if a backward
      pass follows.

  Returns:
    `Saved` in the layout that `backward` reads. `_heads_last` in attention.py
    transposes `out` for the caller of the operation.
      out: the output [B, H, T, V], in q's dtype.
      out2: the noise maps' outputs A₂V [B, Q, T, V], in q's dtype.
      lse: the log-sum-exps of base 2 [B, Q, G, T], in float32.
    out2 and lse are None without `save`. out2 is also None with one map.
  """
  kernel_arguments = _make_arguments(
    arrays, mask, options, out_dtype=arrays.q.dtype, writes_out2=options.save
  )
  results = _run_quick_or_online(kernel_arguments, arrays)
  out, out2 = _crop_outputs(results, arrays)
  lse = None
  if options.save:
    lse = results.lse[..., : mask.q_length]  # without padded queries
  return Saved(out, out2, lse)


def forward_partial(
  arrays: Arrays, mask: Mask, options: Options
) -> PartialResult:
  """Computes attention to some of the keys, in float32.

  `ring` merges it with the results for other keys by their log-sum-exps. So the
  outputs are not rounded, and A₂V and the log-sum-exps are always returned.

  Args:
    arrays: the arrays of `forward`, with some of the keys and values. G is at
      most 2, so there is one query group per head: Q = H.
    mask: which queries see which of these keys.
    options: the options of the operation.

  Returns:
    The fields of `PartialResult`, in the layout that all implementations share:
      out: the output [B, H, T, V].
      out2: A₂V [B, H, T, V], or None with one map.
      lse: the log-sum-exps of base 2 [B, H, G, T].
    A query that sees none of the keys has the output 0 and the log-sum-exp
    EMPTY_ROW_LSE.
  """
  kernel_arguments = _make_arguments(
    arrays, mask, options, out_dtype=jnp.float32, writes_out2=True
  )
  if mask.segments:
    # One query that sees none of these keys fails the check of the quick
    # kernel's result (`in_range`). With segments there nearly always is one, so
    # the quick kernel would run in vain. Without segments, only a window can
    # hide all keys of a query, because `ring` plans no call for hidden keys.
    results = _run_kernel(kernel_arguments, is_online=True)
  else:
    results = _run_quick_or_online(kernel_arguments, arrays)
  out, out2 = _crop_outputs(results, arrays)
  return PartialResult(out, out2, results.lse[..., : mask.q_length])


def in_range(
  lse: Float[Array, "B Q G T"], v: Float[Array, "B S K V"]
) -> Bool[Array, ""]:
  """Returns whether the quick kernel's outputs and log-sum-exps are accurate.

  The quick kernel takes exponentials without subtracting the maximum of a row.
  They may leave the range of float32, from 2^−126 to 2^128. Smaller numbers
  become 0. Within the bounds that are checked here,

    sums of weights · |v| are at most 2^80 · 2^40 = 2^120, so none overflows;
    lost weights are at most 2^20 keys · 2^−126 = 2^−106 in total, which is
      2^−106 / 2^−60 = 2^−46 of the smallest sum of weights;
    lost products weight · v are as small, 2^−46 after the division by that sum,
      which is 2^−46 / 2^−20 = 2^−26 of the largest |v|.

  Float32 itself rounds by 2^−24. A row that sees no key, or whose weights are
  all lost, has the log-sum-exp EMPTY_ROW_LSE = 1e30. One such row puts all
  results out of range, and so does a number that is not finite.

  Args:
    lse: the log-sum-exps (base 2) that the quick kernel returned.
    v: the values.
  """
  largest_value = jnp.max(jnp.abs(v)).astype(jnp.float32)
  # Comparisons with NaN are false, so NaN is out of range.
  is_lse_in_range = jnp.all((lse >= _MIN_LSE) & (lse <= _MAX_LSE))
  cannot_overflow = largest_value <= _MAX_LARGEST_VALUE
  # If all values are 0, all products are exactly 0.
  is_large_enough = largest_value >= _MIN_LARGEST_VALUE
  cannot_underflow = is_large_enough | (largest_value == 0)
  has_few_keys = v.shape[1] <= _MAX_KEYS
  return is_lse_in_range & cannot_overflow & cannot_underflow & has_few_keys


class _Results(NamedTuple):
  """The outputs of the kernels, with the queries padded to `length`."""

  out: Float[Array, "B Q signals length V"]
  out2: Float[Array, "B Q 1 length V"] | None  # A₂V
  lse: Float[Array, "B Q G length"]


class _Operands(NamedTuple):
  """The inputs of the kernels."""

  q: Operand
  k: Operand
  v: Operand
  lam: Operand | None  # None with one map
  q_ids: Operand | None  # None without segments
  kv_ids: Operand | None  # None without segments


class _KernelArguments(NamedTuple):
  """What `_run_kernel` passes to the quick and to the online kernel."""

  schedule: Schedule
  options: Options
  scalars: Scalars
  operands: _Operands
  outputs: list[Output | None]


@dataclasses.dataclass(frozen=True)
class _IndexMaps:
  """The index maps of the grid [B, Q, query blocks, steps].

  Each method returns the index of the block that a step of the grid works on.
  Its arguments are the indices of the grid: b (sequence of the batch), group
  (query group), i (query block) and step. Pallas adds the scalar arrays: the
  fields of `Scalars` that are not None, which are always its first fields.

  Attributes:
    schedule: the schedule of the kernel.
    groups_per_key_head: Q/K, the query groups that share a key head.
  """

  schedule: Schedule
  groups_per_key_head: int

  def queries(
    self, b: Scalar, group: Scalar, i: Scalar, step: Scalar, *scalars: Any
  ) -> tuple[Scalar, ...]:
    """Returns the queries' block of an array [B, Q, maps, T, width]."""
    del step, scalars
    return b, group, 0, i, 0

  def query_rows(
    self, b: Scalar, group: Scalar, i: Scalar, step: Scalar, *scalars: Any
  ) -> tuple[Scalar, ...]:
    """Returns the queries' block of an array [B, Q, maps, T]."""
    del step, scalars
    return b, group, 0, i

  def query_ids(
    self, b: Scalar, group: Scalar, i: Scalar, step: Scalar, *scalars: Any
  ) -> tuple[Scalar, ...]:
    """Returns the queries' block of an array [B, 1, 1, T]."""
    del group, step, scalars
    return b, 0, 0, i

  def keys(
    self, b: Scalar, group: Scalar, i: Scalar, step: Scalar, *scalars: Any
  ) -> tuple[Scalar, ...]:
    """Returns the span of an array [B, K, M, S, D]."""
    # `//` would add code for negative numbers, because it rounds down.
    key_head = lax.div(group, self.groups_per_key_head)
    span = self.schedule.span_to_load(Scalars(*scalars), b, i, step)
    return b, key_head, 0, span, 0

  def values(
    self, b: Scalar, group: Scalar, i: Scalar, step: Scalar, *scalars: Any
  ) -> tuple[Scalar, ...]:
    """Returns the span of an array [B, K, S, V]."""
    key_head = lax.div(group, self.groups_per_key_head)
    span = self.schedule.span_to_load(Scalars(*scalars), b, i, step)
    return b, key_head, span, 0

  def key_ids(
    self, b: Scalar, group: Scalar, i: Scalar, step: Scalar, *scalars: Any
  ) -> tuple[Scalar, ...]:
    """Returns the span of an array [B, 1, 1, S]."""
    del group
    return b, 0, 0, self.schedule.span_to_load(Scalars(*scalars), b, i, step)


def _make_arguments(
  arrays: Arrays,
  mask: Mask,
  options: Options,
  *,
  out_dtype: Any,
  writes_out2: bool,
) -> _KernelArguments:
  """Pads the arrays, and describes how the grid reads and writes them.

  Args:
    arrays: the arrays of the operation.
    mask: which queries see which keys.
    options: the options of the operation.
    out_dtype: the dtype of the output and of A₂V.
    writes_out2: whether the kernels write A₂V, if there is a noise map.
  """
  q, k, v, lam, q_ids, kv_ids, offset = arrays
  B, _, Q, G, D = q.shape
  K, M = k.shape[2:4]
  V = v.shape[-1]
  num_signal_maps = max(G - 1, 1)

  config: KernelConfig = options.chosen  # by `_prepare` in attention.py
  schedule = make_schedule(mask, config.forward_blocks, q, k, keys_move=True)
  # Arrays for scalar memory: positions, visible blocks and ranges of segment
  # ids, if they are data.
  scalars = make_scalars(schedule, q_ids, kv_ids, offset, batch=B)
  block_rows = schedule.blocks.q
  length = schedule.num_q_blocks * block_rows
  span_keys = schedule.span * schedule.blocks.kv
  kv_length = schedule.num_kv_blocks * schedule.blocks.kv
  index_maps = _IndexMaps(schedule, groups_per_key_head=Q // K)

  # These blocks lack the first axes of the arrays, such as [B, Q]. `Operand`
  # adds them with size 1, and index maps return an index for every axis.
  # `is_reloaded` is for the cost estimate, which ignores the small ids.
  q_operand = Operand(
    queries_by_map(q, length), (G, block_rows, D), index_maps.queries
  )
  k_operand = Operand(
    keys_by_map(k, kv_length),
    (M, span_keys, D),
    index_maps.keys,
    is_reloaded=True,
  )
  v_operand = Operand(
    values_by_head(v, kv_length),
    (span_keys, V),
    index_maps.values,
    is_reloaded=True,
  )
  lam_operand = None
  if lam is not None:
    # [B, Q, signals, T], where the signals are the signal maps of a group.
    lam_by_group = lambda_by_group(lam, num_signal_maps)
    lam_operand = Operand(
      pad_axis(lam_by_group, axis=3, length=length),
      (num_signal_maps, block_rows),
      index_maps.query_rows,
    )
  q_ids_operand = None
  kv_ids_operand = None
  if q_ids is not None and kv_ids is not None:
    q_ids_operand = Operand(
      ids_as_rows(q_ids, length), (1, block_rows), index_maps.query_ids
    )
    kv_ids_operand = Operand(
      ids_as_rows(kv_ids, kv_length), (1, span_keys), index_maps.key_ids
    )

  out = Output(
    (B, Q, num_signal_maps, length, V),
    out_dtype,
    (num_signal_maps, block_rows, V),
    index_maps.queries,
  )
  out2 = None
  if G > 1 and writes_out2:
    out2 = Output(
      (B, Q, 1, length, V), out_dtype, (1, block_rows, V), index_maps.queries
    )
  # The log-sum-exps are always written: they show whether the quick kernel's
  # result is accurate.
  lse = Output(
    (B, Q, G, length), jnp.float32, (G, block_rows), index_maps.query_rows
  )
  return _KernelArguments(
    schedule,
    options,
    scalars,
    _Operands(
      q_operand,
      k_operand,
      v_operand,
      lam_operand,
      q_ids_operand,
      kv_ids_operand,
    ),
    [out, out2, lse],
  )


def _run_quick_or_online(
  kernel_arguments: _KernelArguments, arrays: Arrays
) -> _Results:
  """Runs the quick kernel, and the online kernel if its result is inaccurate.

  The quick kernel takes exponentials of the logits as they are. If float32
  cannot hold them, the online kernel computes everything again. It subtracts
  the running maximum of each row, which is slower and always accurate.

  Args:
    kernel_arguments: the arguments of both kernels.
    arrays: the operation's arrays, whose queries and values are not padded.
  """
  quick_results = _run_kernel(kernel_arguments, is_online=False)

  def use_quick_results() -> _Results:
    return quick_results

  def run_online() -> _Results:
    return _run_kernel(kernel_arguments, is_online=True)

  # Padded queries must not count.
  lse = quick_results.lse[..., : arrays.q.shape[1]]
  return lax.cond(in_range(lse, arrays.v), use_quick_results, run_online)


def _run_kernel(
  kernel_arguments: _KernelArguments, *, is_online: bool
) -> _Results:
  """Runs one of the two forward kernels.

  Args:
    kernel_arguments: the arguments of both kernels.
    is_online: whether to run the online kernel, which subtracts the running
      maximum of each row, or the quick kernel, which does not. They differ only
      in the scratch memory for that maximum.
  """
  schedule = kernel_arguments.schedule
  config: KernelConfig = kernel_arguments.options.chosen
  q = kernel_arguments.operands.q.array
  B, Q, G, _, D = q.shape
  V = kernel_arguments.operands.v.array.shape[-1]
  rows = schedule.blocks.q

  running_max = None
  name = f"diff_attention_forward_{variant_name(G, schedule.num_key_maps)}"
  if is_online:
    running_max = float32_scratch(G, rows, LANES)
    name += "_online"
  sums = float32_scratch(G, rows, LANES)
  acc = float32_scratch(G, rows, V)
  q_id_column = id_column_scratch(schedule, rows)

  results = call_kernel(
    functools.partial(forward_kernel, schedule, kernel_arguments.options.scale),
    name,
    grid=(B, Q, schedule.num_q_blocks, schedule.steps),
    num_parallel_axes=3,  # The steps of a query block run in order.
    scalars=kernel_arguments.scalars,
    operands=kernel_arguments.operands,
    outputs=kernel_arguments.outputs,
    scratch_shapes=[running_max, sums, acc, q_id_column],
    vmem_bytes=block_sizes.requested_bytes(
      config.generation, "forward", schedule.blocks, D, V, G, q.dtype
    ),
    cost=estimate_cost(
      schedule,
      kernel_arguments.operands,
      kernel_arguments.outputs,
      num_query_groups=B * Q,
      # Each map has two products: QKᵀ of width D, and AV of width V.
      flops_per_pair=2 * G * (D + V),
      # A single span stays in VMEM, so it is loaded once.
      reloads_spans=schedule.steps > 1,
    ),
    interpret=config.interpret,
  )
  return _Results(*results)


def _crop_outputs(
  results: _Results, arrays: Arrays
) -> tuple[Float[Array, "B H T V"], Float[Array, "B Q T V"] | None]:
  """Returns the output and A₂V without padded queries.

  The kernels write the outputs of each query group's signal maps. The result
  has one axis of all heads: H = Q · signals. A₂V is None if it is not saved.
  """
  batch, length = arrays.q.shape[:2]
  width = results.out.shape[-1]
  out = results.out[:, :, :, :length]  # [B, Q, signals, T, V]
  out = out.reshape(batch, -1, length, width)
  if results.out2 is None:
    return out, None
  return out, results.out2[:, :, 0, :length]


class _Refs(NamedTuple):
  """The refs of the forward kernels, with the shapes of their blocks.

  `rows` is the number of queries of a block, and `keys` the number of keys of a
  span. `call_kernel` passes None for arrays that are absent.
  """

  q: Any  # [G, rows, D]
  k: Any  # [M, keys, D]
  v: Any  # [keys, V]
  lam: Any  # [signals, rows], or None with one map
  q_ids: Any  # [1, rows], or None without segments
  kv_ids: Any  # [1, keys], or None without segments
  # Outputs.
  out: Any  # [signals, rows, V]
  out2: Any  # [1, rows, V], or None if A₂V is not saved
  lse: Any  # [G, rows]
  # Scratch memory.
  # [G, rows, LANES]: a row's maximum, in all lanes. None in the quick kernel.
  running_max: Any
  # [G, rows, LANES]: the lanes have partial sums. Their total is the sum of a
  # row's weights.
  sums: Any
  acc: Any  # [G, rows, V], the sums of weighted values
  # [rows, LANES]: a query's segment id, in all lanes. None without segments.
  q_id_column: Any


def forward_kernel(
  schedule: Schedule, scale: float, scalars: Scalars, *flat_refs: Any
) -> None:
  """The kernel: computes a step of the grid [B, Q, query blocks, steps].

  The sums of a block of queries stay in scratch memory through all of its
  steps. Each step adds a span of keys and values, in two nested loops: over the
  key blocks of the span, and over the sub-tiles of each tile. The last step
  divides the sums and writes the outputs.

  Args:
    schedule: which blocks of keys each step visits, and their sub-tiles.
    scale: the factor on q·k.
    scalars: refs to scalar memory, which has what the schedule must know about
      positions and segments that are data.
    *flat_refs: the fields of `_Refs`.
  """
  refs = _Refs(*flat_refs)
  b = pl.program_id(0)
  i = pl.program_id(2)
  step = pl.program_id(3)

  @pl.when(step == 0)
  def _initialize() -> None:
    _initialize_scratch(refs)

  def run_tile(j: Scalar, index_in_span: Scalar) -> None:
    # A tile is query block i against key block j. `for_each_subtile` calls
    # add_subtile(rows, keys, subtile_mask).
    add_subtile = functools.partial(
      _add_subtile, schedule, scale, refs, index_in_span
    )
    schedule.for_each_subtile(scalars, b, i, j, add_subtile)

  schedule.for_each_moving_block(scalars, b, i, step, run_tile)

  @pl.when(step == schedule.steps - 1)
  def _write() -> None:
    # LANES rows at a time fit the registers. Blocks are multiples of LANES.
    for start in range(0, schedule.blocks.q, LANES):
      _write_rows(refs, pl.ds(start, LANES))


def _initialize_scratch(refs: _Refs) -> None:
  """Prepares the scratch memory for a new block of queries.

  Sets the sums of weights and of weighted values to 0, and the running maxima,
  which only the online kernel has, below all logits. With segments, turns the
  segment ids of the queries into a column, because maps are [rows, keys].
  """
  if refs.running_max is not None:
    refs.running_max[...] = jnp.full_like(refs.running_max, MASKED_LOGIT)
  refs.sums[...] = jnp.zeros_like(refs.sums)
  refs.acc[...] = jnp.zeros_like(refs.acc)
  if refs.q_id_column is not None:
    refs.q_id_column[...] = as_column(refs.q_ids[...])


def _add_subtile(
  schedule: Schedule,
  scale: float,
  refs: _Refs,
  index_in_span: Scalar,
  rows: Interval,
  keys: Interval,
  subtile_mask: SubtileMask | None,
) -> None:
  """Adds the weights and weighted values of a sub-tile to the sums.

  Args:
    schedule: the sizes of blocks, and the numbers of maps.
    scale: the factor on q·k.
    refs: the refs of the kernel.
    index_in_span: which key block of the loaded span the sub-tile is in.
    rows: the sub-tile's n queries, counted from the first of the query block.
    keys: the sub-tile's m keys, counted from the first of the key block.
    subtile_mask: which of the keys are visible. None if all are.
  """
  G = schedule.num_maps
  row_slice = aligned_slice(rows.start, rows.size)
  first_key = index_in_span * schedule.blocks.kv + keys.start
  key_slice = aligned_slice(first_key, keys.size)

  # Stack the rows of all maps, so that the matrix unit loads V once for all of
  # them, and K once for the maps that share it. With one key map, that is all
  # maps. With two, the first has the signal maps, and the second the noise map.
  logits_by_key_map = []
  for key_map in range(schedule.num_key_maps):
    maps = schedule.maps_of_key_map(key_map)  # a slice of the G maps
    queries = _stack_maps(refs.q[maps, row_slice, :])  # [maps·n, D]
    k = refs.k[key_map, key_slice, :]  # [m, D]
    map_logits = dot(queries, k, contracting_axes=(1, 1))  # [maps·n, m]
    logits_by_key_map.append(map_logits)
  logits = jnp.concatenate(logits_by_key_map) * (scale * LOG2E)  # [G·n, m]
  if subtile_mask is not None:
    has_same_segment = None
    if subtile_mask.compares_segments:
      q_ids = repeat(refs.q_id_column[row_slice, :], keys.size)  # [n, m]
      has_same_segment = q_ids == refs.kv_ids[:, key_slice]
    visible = subtile_mask.visible(
      q_axis=0, has_same_segment=has_same_segment
    )  # [n, m]
    # MASKED_LOGIT is −1e30, so its weight is 0. In the online kernel it is 1 as
    # long as the row's maximum is −1e30 too. When the row sees its first key,
    # `rescale` is 0 and removes such weights. `_write_rows` ignores the others.
    logits = jnp.where(jnp.concatenate([visible] * G), logits, MASKED_LOGIT)

  sums = _stack_maps(refs.sums[:, row_slice, :])  # [G·n, LANES]
  acc = _stack_maps(refs.acc[:, row_slice, :])  # [G·n, V]
  if refs.running_max is not None:
    # The online kernel rescales the sums when a row's maximum grows.
    old_max = _stack_maps(refs.running_max[:, row_slice, :])  # [G·n, LANES]
    new_max = jnp.maximum(old_max, jnp.max(logits, axis=1, keepdims=True))
    logits = logits - repeat(new_max, keys.size)
    rescale = jnp.exp2(old_max - new_max)
    sums = sums * rescale
    acc = acc * repeat(rescale, refs.acc.shape[2])
    refs.running_max[:, row_slice, :] = new_max.reshape(G, rows.size, LANES)

  weights = jnp.exp2(logits)  # [G·n, m]
  if refs.running_max is None:
    # The product with V rounds the weights to V's dtype. Sum the same rounded
    # weights, so that a row with one large weight has exactly that key's value
    # as its output. In the online kernel the largest weight is exp2(0) = 1,
    # which is not rounded.
    weights = weights.astype(refs.v.dtype).astype(jnp.float32)
  # Add up groups of LANES keys, of which keys.size is a multiple. Sums over the
  # lanes are slower, so `_write_rows` computes them once per row.
  lane_groups = []
  for lane in range(0, keys.size, LANES):
    lane_groups.append(weights[:, lane : lane + LANES])
  new_sums = sums + functools.reduce(jnp.add, lane_groups)
  refs.sums[:, row_slice, :] = new_sums.reshape(G, rows.size, LANES)
  v = refs.v[key_slice, :]  # [m, V]
  # `dot` rounds the weights to V's dtype and sums in float32.
  new_acc = acc + dot(weights, v, contracting_axes=(1, 0))
  refs.acc[:, row_slice, :] = new_acc.reshape(G, rows.size, -1)


def _write_rows(refs: _Refs, row_slice: Any) -> None:
  """Writes the outputs and log-sum-exps of n = LANES rows."""
  n = LANES
  map_outputs = []  # A V of each map, [n, V]
  for g in range(refs.q.shape[0]):
    lane_sums = refs.sums[g, row_slice, :]  # [n, LANES]
    sums = jnp.sum(lane_sums, axis=1, keepdims=True)  # [n, 1]
    # Whether a row sees no key. Then the quick kernel's weights are all 0. The
    # online kernel's maximum is still MASKED_LOGIT, far below all other logits,
    # and its sums are of masked keys and are not used.
    if refs.running_max is None:
      is_empty = jnp.broadcast_to(sums == 0, (n, LANES))
    else:
      is_empty = refs.running_max[g, row_slice, :] <= MASKED_LOGIT / 2
    acc = refs.acc[g, row_slice, :]  # [n, V]
    reciprocals = jnp.where(is_empty, 0.0, 1.0 / sums)  # [n, LANES]
    map_outputs.append(acc * repeat(reciprocals, acc.shape[1]))

    row_max = 0.0
    if refs.running_max is not None:
      row_max = refs.running_max[g, row_slice, :]
    # EMPTY_ROW_LSE is +1e30, so exp2(logit − lse) is 0 in the backward pass.
    # `ring` replaces it by −1e30, so that the row has no weight when merged.
    lse = jnp.where(is_empty, EMPTY_ROW_LSE, jnp.log2(sums) + row_max)
    refs.lse[g : g + 1, row_slice] = as_row(lse)

  if len(map_outputs) == 1:
    refs.out[0, row_slice, :] = map_outputs[0].astype(refs.out.dtype)
    return
  # Subtract A₂V as it is stored. The backward pass computes rowsum(dO ∘ A₁V) as
  # rowsum(dO ∘ O) + λ · rowsum(dO ∘ A₂V), in which its rounding then cancels.
  *signal_outputs, noise_output = map_outputs
  noise = noise_output.astype(refs.out.dtype)
  if refs.out2 is not None:
    refs.out2[0, row_slice, :] = noise
  for index, signal in enumerate(signal_outputs):
    lam_row = refs.lam[index : index + 1, row_slice]  # [1, n]
    # as_column transposes equal rows, and 8 fill a vector register.
    lam = as_column(lam_row, lanes=8)[:, :1]  # [n, 1]
    out = signal - lam * noise.astype(jnp.float32)  # A₁V − λA₂V
    refs.out[index, row_slice, :] = out.astype(refs.out.dtype)


def _stack_maps(x: Float[Array, "maps n X"]) -> Float[Array, "maps*n X"]:
  return x.reshape(-1, x.shape[-1])
