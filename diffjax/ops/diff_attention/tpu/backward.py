"""The backward pass of differential attention on TPU.

A block of keys and values is stationary, and the queries of all heads that
share it move (`schedule.py` explains the terms). One kernel computes all
gradients:

  dP = dO Vᵀ                                       once for both maps
  dV = (A₁ − λA₂)ᵀ dO                              once for both maps
  dS₁ = A₁ ∘ (dP − δ₁),  dS₂ = −λA₂ ∘ (dP − δ₂)
  dK = scale · dSᵀ Q,  dQ = scale · dS K           for each map

with δ₂ = rowsum(dO ∘ A₂V), dλ = −δ₂ and δ₁ = rowsum(dO ∘ A₁V), which is
rowsum(dO ∘ O) + λδ₂ because A₁V = O + λA₂V. dS are the gradients of the logits.
dK and dV are summed in vector memory while the queries move. dQ of all rows of
a call stays in vector memory, because every block of keys adds to it.

In the kernel, attention maps are transposed: [keys, rows].
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.arguments import variant_name
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import (
  LOG2E,
  MASKED_LOGIT,
  Scalar,
  pad_axis,
  round_up,
)
from diffjax.ops.diff_attention.tpu import block_sizes
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks
from diffjax.ops.diff_attention.tpu.chip import as_column, dot, repeat
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


class Gradients(NamedTuple):
  """The gradients of the operation's arrays."""

  q: Float[Array, "B T Q G D"]
  k: Float[Array, "B S K M D"]
  v: Float[Array, "B S K V"]
  lam: Float[Array, "B T H"] | None  # None without λ


def backward(
  arrays: Arrays,
  mask: Mask,
  options: Options,
  saved: Saved,
  d_out: Float[Array, "B T H V"],
) -> Gradients:
  """Returns the gradients of q, k, v and λ.

  Args:
    arrays: the operation's arrays.
    mask: its mask.
    options: its options.
    saved: the result of `forward`.
    d_out: the gradient of the output.
  """
  return _gradients(
    arrays, mask, options, saved, d_out, out_dtype=arrays.q.dtype
  )


def backward_partial(
  arrays: Arrays,
  mask: Mask,
  options: Options,
  result: PartialResult,
  d_out: Float[Array, "B T H V"],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns what some of the keys add to the gradients of q, k and v.

  They are float32. The arguments are those of `backward`, but `result` has the
  output A₁V − λA₂V, A₂V and the log-sum-exps of attention to all keys. `ring`
  computes the gradient of λ from A₂V.
  """
  gradients = _gradients(
    arrays, mask, options, result, d_out, out_dtype=jnp.float32
  )
  return gradients.q, gradients.k, gradients.v


class _Inputs(NamedTuple):
  """The arrays of one call of the kernel.

  R is the number of query groups that share a key head. T counts the rows of
  the call. X is the number of maps that have a gradient of their output: 1 with
  up to two maps, else G.
  """

  q: Float[Array, "B K R T G D"]
  k: Float[Array, "B S K M D"]
  v: Float[Array, "B S K V"]
  d_out: Float[Array, "B K R X T V"]
  row_terms: Float[Array, "B K R terms T"]  # see `_row_arrays`
  q_ids: Int[Array, "B T"] | None
  kv_ids: Int[Array, "B S"] | None
  offset: Int[Array, "B"] | None


class _CallGradients(NamedTuple):
  """The gradients that one call of the kernel returns."""

  d_q: Float[Array, "B K R G T D"]
  d_k: Float[Array, "B K M S D"]
  d_v: Float[Array, "B K S V"]


class _RowArrays(NamedTuple):
  """What the backward pass needs of each query besides q."""

  d_out: Float[Array, "B Q X T V"]
  row_terms: Float[Array, "B Q terms T"]
  d_lam: Float[Array, "B T H"] | None


def _gradients(
  arrays: Arrays,
  mask: Mask,
  options: Options,
  saved: Saved | PartialResult,
  d_out: Float[Array, "B T H V"],
  *,
  out_dtype: Any,
) -> Gradients:
  """Returns the gradients. q, k and v have gradients in out_dtype."""
  q, k, v, _, q_ids, kv_ids, offset = arrays
  B, T, Q, G, D = q.shape
  K = k.shape[2]
  R = Q // K
  row_arrays = _row_arrays(arrays, saved, d_out)
  q_by_head = jnp.swapaxes(q, 1, 2)  # [B, Q, T, G, D]

  config: KernelConfig = options.chosen
  heads_per_call, rows_per_call = _call_sizes(config.backward_blocks, R, T)
  is_single_call = heads_per_call == R and rows_per_call >= T
  # dK and dV of several calls are summed in float32.
  d_kv_dtype = out_dtype if is_single_call else jnp.float32

  d_q_by_head = []
  d_k: Any = 0.0
  d_v: Any = 0.0
  for first_head in range(0, R, heads_per_call):
    d_q_by_row = []
    for start in range(0, T, rows_per_call):
      query_slice = _QuerySlice(
        K, first_head, heads_per_call, start, min(start + rows_per_call, T)
      )
      call_q_ids = q_ids
      if q_ids is not None:
        call_q_ids = q_ids[:, start : query_slice.stop]
      call_offset = offset
      if offset is not None:
        call_offset = offset + start
      inputs = _Inputs(
        q=query_slice.select(q_by_head, row_axis=3),
        k=k,
        v=v,
        d_out=query_slice.select(row_arrays.d_out, row_axis=4),
        row_terms=query_slice.select(row_arrays.row_terms, row_axis=4),
        q_ids=call_q_ids,
        kv_ids=kv_ids,
        offset=call_offset,
      )
      call_mask = mask.of_rows(start, query_slice.stop)
      call_d_q, call_d_k, call_d_v = _run_kernel(
        inputs, call_mask, options, out_dtype, d_kv_dtype
      )
      d_q_by_row.append(call_d_q)
      d_k = d_k + call_d_k
      d_v = d_v + call_d_v
    d_q_by_head.append(_concatenate(d_q_by_row, axis=4))
  d_q = _concatenate(d_q_by_head, axis=2)  # [B, K, R, G, T, D]

  d_q = jnp.transpose(d_q.reshape(B, Q, G, T, D), (0, 3, 1, 2, 4))
  d_k = jnp.transpose(d_k, (0, 3, 1, 2, 4))  # [B, S, K, M, D]
  d_v = jnp.swapaxes(d_v, 1, 2)  # [B, S, K, V]
  return Gradients(
    d_q, d_k.astype(out_dtype), d_v.astype(out_dtype), row_arrays.d_lam
  )


def _row_arrays(
  arrays: Arrays, saved: Saved | PartialResult, d_out: Float[Array, "B T H V"]
) -> _RowArrays:
  """Returns what the kernel reads of each query besides q, and dλ.

  The output of a signal map A₁ with the noise map A₂ is O = A₁V − λA₂V. The
  gradients of the softmax need δ = rowsum(dP ∘ A) of each map, with dP = dO Vᵀ.
  It can be computed without the maps:

    δ₂ = rowsum(dO ∘ A₂V),  δ₁ = rowsum(dO ∘ O) + λδ₂,  dλ = −δ₂

  The last map of a query group of G maps is the noise map. If several signal
  maps share it, its output has the gradient −Σ λ dO. The noise map is then
  treated like a signal map, with its own gradient in `d_out` and no λ.

  Returns:
    d_out: the gradient of each output that the kernel reads.
    row_terms: G log-sum-exps (base 2), G deltas in the order of the maps, and
      λ, if G is 2.
    d_lam: the gradient of λ, or None without λ.
  """
  B, T, _, G, _ = arrays.q.shape
  num_signal_maps = max(G - 1, 1)  # one map alone is a signal map
  d_out = _by_group(jnp.swapaxes(d_out, 1, 2), num_signal_maps)
  # [B, Q, signals, T]
  delta = _row_sums(d_out, _by_group(saved.out, num_signal_maps))
  if arrays.lam is None:
    row_terms = jnp.concatenate([saved.lse, delta], axis=2)
    return _RowArrays(d_out, row_terms, d_lam=None)

  lam = lambda_by_group(arrays.lam, num_signal_maps)  # [B, Q, signals, T]
  assert saved.out2 is not None  # A₂V is saved whenever there is a noise map.
  delta_2 = _row_sums(d_out, saved.out2[:, :, None])  # [B, Q, signals, T]
  delta_1 = delta + lam * delta_2
  d_lam = -jnp.swapaxes(delta_2.reshape(B, -1, T), 1, 2)  # [B, T, H]
  if G == 2:
    # Both maps use the same dO. The kernel multiplies A₂ by −λ.
    terms = [saved.lse, delta_1, delta_2, lam]
  else:
    # Several signal maps share A₂V. Its gradient is one more output gradient.
    d_noise = -jnp.sum(lam[..., None] * d_out, axis=2, keepdims=True)
    d_out = jnp.concatenate([d_out, d_noise.astype(d_out.dtype)], axis=2)
    noise_delta = -jnp.sum(lam * delta_2, axis=2, keepdims=True)
    terms = [saved.lse, delta_1, noise_delta]
  return _RowArrays(d_out, jnp.concatenate(terms, axis=2), d_lam)


def _call_sizes(blocks: Blocks, R: int, T: int) -> tuple[int, int]:
  """Returns how many query heads, and rows of each, one kernel call processes.

  A call keeps dQ of all its rows in vector memory, which holds
  `blocks.resident` rows. So a call has all rows of as many heads as fit. If not
  even one head fits, it has some of the head's rows.

  Example:
    With resident = 8192 and blocks of 512 queries:
    R = 4, T = 2048 → (4, 2048), one call
    R = 4, T = 4096 → (2, 4096), two calls
    R = 4, T = 16384 → (1, 8192), eight calls

  Args:
    blocks: the block sizes of the kernel.
    R: the number of query heads per key head.
    T: the number of rows (queries) of a head.
  """
  padded_rows = round_up(T, blocks.q)
  # The largest number of heads that fits, and divides R so that all calls have
  # equally many.
  heads_per_call = 1
  for heads in range(2, R + 1):
    if R % heads == 0 and heads * padded_rows <= blocks.resident:
      heads_per_call = heads
  # Rows are a multiple of the block, and at least one block.
  max_blocks = blocks.resident // heads_per_call // blocks.q
  rows_per_call = max(blocks.q, min(padded_rows, max_blocks * blocks.q))
  return heads_per_call, rows_per_call


@dataclasses.dataclass(frozen=True)
class _QuerySlice:
  """The queries of one call.

  Attributes:
    K: the number of key heads.
    first_head: the first query head, counted within its key head.
    num_heads: the number of query heads.
    start: the first row.
    stop: the row after the last one.
  """

  K: int
  first_head: int
  num_heads: int
  start: int
  stop: int

  def select(
    self, x: Float[Array, "B Q *axes"], row_axis: int
  ) -> Float[Array, "B K R *axes"]:
    """Returns one kernel call's part of an array: some heads and some rows.

    Axis Q of all query heads becomes [K, R]: the key heads, and the call's
    query heads of each.

    Args:
      x: an array of all query heads and rows.
      row_axis: the axis of the rows in the result, which has one more axis than
        x.
    """
    batch, Q, *other_axes = x.shape
    # Query heads that share a key head are adjacent.
    x = x.reshape(batch, self.K, Q // self.K, *other_axes)
    x = x[:, :, self.first_head : self.first_head + self.num_heads]
    return lax.slice_in_dim(x, self.start, self.stop, axis=row_axis)


@dataclasses.dataclass(frozen=True)
class _IndexMaps:
  """The index maps of the grid [B, K·parts, key blocks of a part, R, steps].

  Each method returns the index of the block that a step of the grid works on.
  Its arguments are the indices of the grid: b (sequence of the batch), part (of
  all parts of all key heads), n (key block of the part), r (query group of the
  key head) and step. Pallas adds the scalar arrays: the fields of `Scalars`
  that are not None, which are always its first fields.

  Attributes:
    schedule: the schedule of the kernel.
    num_parts: the number of parts that share the key blocks of a head.
  """

  schedule: Schedule
  num_parts: int

  def queries(
    self,
    b: Scalar,
    part: Scalar,
    n: Scalar,
    r: Scalar,
    step: Scalar,
    *scalars: Any,
  ) -> tuple[Scalar, ...]:
    """Returns the span of an array [B, K, R, maps, T, width]."""
    key_head, j = key_head_and_block(self.num_parts, part, n)
    span = self.schedule.span_to_load(Scalars(*scalars), b, j, step)
    return b, key_head, r, 0, span, 0

  def query_rows(
    self,
    b: Scalar,
    part: Scalar,
    n: Scalar,
    r: Scalar,
    step: Scalar,
    *scalars: Any,
  ) -> tuple[Scalar, ...]:
    """Returns the span of an array [B, K, R, terms, T]."""
    key_head, j = key_head_and_block(self.num_parts, part, n)
    span = self.schedule.span_to_load(Scalars(*scalars), b, j, step)
    return b, key_head, r, 0, span

  def query_ids(
    self,
    b: Scalar,
    part: Scalar,
    n: Scalar,
    r: Scalar,
    step: Scalar,
    *scalars: Any,
  ) -> tuple[Scalar, ...]:
    """Returns the span of an array [B, 1, 1, T]."""
    del r
    _, j = key_head_and_block(self.num_parts, part, n)
    return b, 0, 0, self.schedule.span_to_load(Scalars(*scalars), b, j, step)

  def keys(
    self, b: Scalar, part: Scalar, n: Scalar, *unused: Any
  ) -> tuple[Scalar, ...]:
    """Returns the keys' block of an array [B, K, M, S, D]."""
    del unused
    key_head, j = key_head_and_block(self.num_parts, part, n)
    return b, key_head, 0, j, 0

  def values(
    self, b: Scalar, part: Scalar, n: Scalar, *unused: Any
  ) -> tuple[Scalar, ...]:
    """Returns the keys' block of an array [B, K, S, V]."""
    del unused
    key_head, j = key_head_and_block(self.num_parts, part, n)
    return b, key_head, j, 0

  def key_ids(
    self, b: Scalar, part: Scalar, n: Scalar, *unused: Any
  ) -> tuple[Scalar, ...]:
    """Returns the keys' block of an array [B, 1, 1, S]."""
    del unused
    _, j = key_head_and_block(self.num_parts, part, n)
    return b, 0, 0, j

  def d_q(self, b: Scalar, part: Scalar, *unused: Any) -> tuple[Scalar, ...]:
    """Returns the only block of a part of an array [B, K·parts, R, G, T, D]."""
    del unused
    return b, part, 0, 0, 0, 0


def key_head_and_block(
  num_parts: int, part: Scalar, n: Scalar
) -> tuple[Scalar, Scalar]:
  """Returns the key head and the key block of the n-th block of a part.

  If there are too few heads for all cores, each core takes a part of the key
  blocks of each head. With a causal mask, each block has less work than the one
  before. So the blocks are dealt to the parts in alternating directions.

  Example:
    With three parts, part 0 gets the blocks 0, 5, 6, 11 …, part 1 gets
    1, 4, 7, 10 …, and part 2 gets 2, 3, 8, 9 ….

  Args:
    num_parts: the number of parts that share the key blocks of a head.
    part: index of the part, counted over all key heads.
    n: index of the block in the part, counted from 0.
  """
  if num_parts == 1:
    return part, n  # The only part of a head is the head.
  # In round n, every part gets one block, in ascending or descending order.
  part_of_head = lax.rem(part, num_parts)
  key_head = lax.div(part, num_parts)
  is_ascending = lax.rem(n, 2) == 0
  position = jnp.where(is_ascending, part_of_head, num_parts - 1 - part_of_head)
  return key_head, n * num_parts + position


def _num_parts(cores: int, B: int, K: int, num_kv_blocks: int) -> int:
  """Returns how many parts share the key blocks of a head.

  Several cores share one axis of the grid, the batch or the key heads. If
  neither divides by the number of cores, each core takes a part of the key
  blocks of each head.
  """
  if B % cores == 0 or K % cores == 0 or num_kv_blocks == 1:
    return 1
  return cores


def _run_kernel(
  inputs: _Inputs,
  mask: Mask,
  options: Options,
  d_q_dtype: Any,
  d_kv_dtype: Any,
) -> _CallGradients:
  """Returns the gradients of one call of the kernel, in the given dtypes."""
  q, k, v, d_out, row_terms, q_ids, kv_ids, offset = inputs
  B, K, R, T, G, D = q.shape
  S = k.shape[1]
  M = k.shape[3]
  V = v.shape[-1]

  config: KernelConfig = options.chosen  # by `_prepare` in attention.py
  schedule = make_schedule(
    mask, config.backward_blocks, q[:, 0, 0], k, keys_move=False
  )
  num_parts = _num_parts(config.cores, B, K, schedule.num_kv_blocks)
  schedule = dataclasses.replace(
    schedule, num_kv_blocks=round_up(schedule.num_kv_blocks, num_parts)
  )
  # Arrays for scalar memory: positions, visible blocks and ranges of segment
  # ids, if they are data.
  scalars = make_scalars(schedule, q_ids, kv_ids, offset, batch=B)
  block_keys = schedule.blocks.kv
  kv_length = schedule.num_kv_blocks * block_keys
  span_rows = schedule.span * schedule.blocks.q
  length = schedule.num_q_blocks * schedule.blocks.q
  index_maps = _IndexMaps(schedule, num_parts)

  # The blocks of operands lack the first axes of the arrays, such as [B, K, R].
  # `Operand` adds them with size 1, and index maps return an index for every
  # axis. `is_reloaded` is for the cost estimate, which ignores the small ids.
  q_by_group = q.reshape(B, K * R, T, G, D).swapaxes(1, 2)
  q_by_map = queries_by_map(q_by_group, length)  # [B, K·R, G, length, D]
  q_operand = Operand(
    q_by_map.reshape(B, K, R, G, length, D),
    (G, span_rows, D),
    index_maps.queries,
    is_reloaded=True,
  )
  k_operand = Operand(
    keys_by_map(k, kv_length), (M, block_keys, D), index_maps.keys
  )
  v_operand = Operand(
    values_by_head(v, kv_length), (block_keys, V), index_maps.values
  )
  num_outputs = d_out.shape[3]
  d_out_operand = Operand(
    pad_axis(d_out, 4, length),
    (num_outputs, span_rows, V),
    index_maps.queries,
    is_reloaded=True,
  )
  num_terms = row_terms.shape[3]
  terms_operand = Operand(
    pad_axis(row_terms, 4, length),
    (num_terms, span_rows),
    index_maps.query_rows,
    is_reloaded=True,
  )
  q_ids_operand = None
  kv_ids_operand = None
  if q_ids is not None and kv_ids is not None:
    q_ids_operand = Operand(
      ids_as_rows(q_ids, length), (1, span_rows), index_maps.query_ids
    )
    kv_ids_operand = Operand(
      ids_as_rows(kv_ids, kv_length), (1, block_keys), index_maps.key_ids
    )
  operands = [
    q_operand,
    k_operand,
    v_operand,
    d_out_operand,
    terms_operand,
    q_ids_operand,
    kv_ids_operand,
  ]

  # dQ of several parts is summed in float32.
  kernel_d_q_dtype = d_q_dtype if num_parts == 1 else jnp.float32
  d_q_output = Output(
    (B, K * num_parts, R, G, length, D),
    kernel_d_q_dtype,
    (R, G, length, D),
    index_maps.d_q,
  )
  d_k_output = Output(
    (B, K, M, kv_length, D), d_kv_dtype, (M, block_keys, D), index_maps.keys
  )
  d_v_output = Output(
    (B, K, kv_length, V), d_kv_dtype, (block_keys, V), index_maps.values
  )
  outputs = [d_q_output, d_k_output, d_v_output]

  # A float32 output is its own accumulator.
  d_q_acc = None
  if kernel_d_q_dtype != jnp.float32:
    d_q_acc = float32_scratch(R, G, length, D)
  d_k_acc = float32_scratch(M, block_keys, D)
  d_v_acc = float32_scratch(block_keys, V)
  kv_id_column = id_column_scratch(schedule, block_keys)

  d_q, d_k, d_v = call_kernel(
    functools.partial(backward_kernel, schedule, options.scale, num_parts),
    f"diff_attention_backward_{variant_name(G, M)}",
    grid=(
      B,
      K * num_parts,
      schedule.num_kv_blocks // num_parts,
      R,
      schedule.steps,
    ),
    num_parallel_axes=2,  # The blocks of a part run in order: they share dQ.
    scalars=scalars,
    operands=operands,
    outputs=outputs,
    scratch_shapes=[d_q_acc, d_k_acc, d_v_acc, kv_id_column],
    vmem_bytes=block_sizes.requested_bytes(
      config.generation, "backward", schedule.blocks, D, V, G, k.dtype
    ),
    cost=estimate_cost(
      schedule,
      operands,
      outputs,
      num_query_groups=B * K * R,
      # Each map has three products of width D: QKᵀ, dSᵀQ and dS K. Each output
      # gradient has two of width V: dO Vᵀ and Aᵀ dO.
      flops_per_pair=2 * (3 * G * D + 2 * num_outputs * V),
      num_parts=num_parts,
      reloads_spans=schedule.steps > 1 or R > 1,
    ),
    interpret=config.interpret,
  )
  d_q = d_q[:, :, :, :, :T]
  if num_parts > 1:
    d_q = d_q.reshape(B, K, num_parts, *d_q.shape[2:])
    d_q = jnp.sum(d_q, axis=2)
  return _CallGradients(d_q.astype(d_q_dtype), d_k[:, :, :, :S], d_v[:, :, :S])


class _Refs(NamedTuple):
  """The refs of the backward kernel, with the shapes of their blocks.

  `rows` is the number of queries of a span, and `keys` the number of keys of a
  block. X is the number of output gradients: 1 with up to two maps, else G.
  `call_kernel` passes None for arrays that are absent.
  """

  q: Any  # [G, rows, D]
  k: Any  # [M, keys, D]
  v: Any  # [keys, V]
  d_out: Any  # [X, rows, V]
  row_terms: Any  # [terms, rows], see `_row_arrays`
  q_ids: Any  # [1, rows], or None without segments
  kv_ids: Any  # [1, keys], or None without segments
  # Outputs.
  d_q: Any  # [R, G, length, D], all rows of the call
  d_k: Any  # [M, keys, D]
  d_v: Any  # [keys, V]
  # Scratch memory, in float32.
  d_q_acc: Any  # [R, G, length, D], or None if d_q itself is float32
  d_k_acc: Any  # [M, keys, D]
  d_v_acc: Any  # [keys, V]
  # [keys, LANES]: a key's segment id, in all lanes. None without segments.
  kv_id_column: Any

  @property
  def d_q_sum(self) -> Any:
    """The ref in which dQ is summed."""
    return self.d_q if self.d_q_acc is None else self.d_q_acc


def backward_kernel(
  schedule: Schedule,
  scale: float,
  num_parts: int,
  scalars: Scalars,
  *flat_refs: Any,
) -> None:
  """Computes a step of the grid [B, K·parts, key blocks of a part, R, steps].

  Args:
    schedule: the schedule of the kernel.
    scale: the factor on q·k.
    num_parts: the number of parts that share the key blocks of a head.
    scalars: refs to scalar memory.
    *flat_refs: the fields of `_Refs`.
  """
  refs = _Refs(*flat_refs)
  b = pl.program_id(0)
  n = pl.program_id(2)
  head = pl.program_id(3)
  step = pl.program_id(4)
  _, j = key_head_and_block(num_parts, pl.program_id(1), n)

  @pl.when((n == 0) & (head == 0) & (step == 0))
  def _initialize_d_q() -> None:
    d_q_sum = refs.d_q_sum
    d_q_sum[...] = jnp.zeros_like(d_q_sum)

  @pl.when((head == 0) & (step == 0))
  def _initialize_key_block() -> None:
    _initialize_scratch(refs)

  def run_tile(i: Scalar, index_in_span: Scalar) -> None:
    # A tile is query block i against key block j. `for_each_subtile` calls
    # add_subtile(rows, keys, subtile_mask).
    add_subtile = functools.partial(
      _add_subtile, schedule, scale, refs, head, i, index_in_span
    )
    schedule.for_each_subtile(scalars, b, i, j, add_subtile)

  schedule.for_each_moving_block(scalars, b, j, step, run_tile)

  is_last_head = head == pl.num_programs(3) - 1
  is_last_of_key_block = is_last_head & (step == schedule.steps - 1)

  @pl.when(is_last_of_key_block & (n == pl.num_programs(2) - 1))
  def _write_d_q() -> None:
    d_q = refs.d_q_sum[...] * scale
    refs.d_q[...] = d_q.astype(refs.d_q.dtype)

  @pl.when(is_last_of_key_block)
  def _write_key_block() -> None:
    d_k = refs.d_k_acc[...] * scale
    refs.d_k[...] = d_k.astype(refs.d_k.dtype)
    d_v = refs.d_v_acc[...]
    refs.d_v[...] = d_v.astype(refs.d_v.dtype)


def _initialize_scratch(refs: _Refs) -> None:
  """Prepares the scratch memory for a new block of keys.

  Sets the sums of dK and dV to 0. With segments, turns the segment ids of the
  keys into a column, because maps are [keys, rows] in the kernel.
  """
  refs.d_k_acc[...] = jnp.zeros_like(refs.d_k_acc)
  refs.d_v_acc[...] = jnp.zeros_like(refs.d_v_acc)
  if refs.kv_id_column is not None:
    refs.kv_id_column[...] = as_column(refs.kv_ids[...])


def _add_subtile(
  schedule: Schedule,
  scale: float,
  refs: _Refs,
  head: Scalar,
  i: Scalar,
  index_in_span: Scalar,
  rows: Interval,
  keys: Interval,
  subtile_mask: SubtileMask | None,
) -> None:
  """Adds the gradients of a sub-tile to dQ, dK and dV.

  Args:
    schedule: the sizes of blocks, and the numbers of maps.
    scale: the factor on q·k.
    refs: the refs of the kernel.
    head: the query group, counted within its key head.
    i: the query block of the sub-tile, counted from the call's first.
    index_in_span: the same block, counted from the loaded span's first.
    rows: the sub-tile's n queries, counted from the first of the query block.
    keys: the sub-tile's m keys, counted from the first of the key block.
    subtile_mask: which of the keys are visible. None if all are.
  """
  G = schedule.num_maps
  M = schedule.num_key_maps
  # The same rows in the span, in which queries and terms are loaded, and among
  # all rows of the call, for which dQ is summed.
  first_row_in_span = index_in_span * schedule.blocks.q + rows.start
  row_slice = aligned_slice(first_row_in_span, rows.size)
  key_slice = aligned_slice(keys.start, keys.size)
  first_row = i * schedule.blocks.q + rows.start
  d_q_slice = aligned_slice(first_row, rows.size)

  visible = None
  if subtile_mask is not None:
    has_same_segment = None
    if subtile_mask.compares_segments:
      q_ids = refs.q_ids[:, row_slice]  # [1, n]
      kv_ids = repeat(refs.kv_id_column[key_slice, :], rows.size)  # [m, n]
      has_same_segment = q_ids == kv_ids
    visible = subtile_mask.visible(
      q_axis=1, has_same_segment=has_same_segment
    )  # [m, n]

  d_logits: list[jax.Array] = []  # dS of each map, [m, n]
  output_weights: list[jax.Array] = []  # A of each output gradient, [m, n]
  d_weights: Any = None
  for g in range(G):
    if g < refs.d_out.shape[0]:
      # Of two maps, the second one uses dP = V dOᵀ of the first.
      v = refs.v[key_slice, :]  # [m, V]
      map_d_out = refs.d_out[g, row_slice, :]  # [n, V]
      d_weights = dot(v, map_d_out, contracting_axes=(1, 1))  # [m, n]
    # The noise map is the last one. It may have its own keys.
    key_map = M - 1 if g == G - 1 else 0
    k = refs.k[key_map, key_slice, :]
    queries = refs.q[g, row_slice, :]  # [n, D]
    logits = dot(k, queries, contracting_axes=(1, 1)) * (scale * LOG2E)
    if visible is not None:
      logits = jnp.where(visible, logits, MASKED_LOGIT)
    log_sum_exp = refs.row_terms[g : g + 1, row_slice]  # [1, n]
    # In a row that sees no key it is +1e30, so the weights are 0.
    weights = jnp.exp2(logits - log_sum_exp)
    if G == 2 and g == 1:
      lam = refs.row_terms[2 * G :, row_slice]  # [1, n]
      weights = weights * -lam
      output_weights[0] = output_weights[0] + weights  # A₁ − λA₂
    else:
      output_weights.append(weights)
    delta = refs.row_terms[G + g : G + g + 1, row_slice]  # [1, n]
    d_map_logits = weights * (d_weights - delta)
    d_logits.append(d_map_logits.astype(refs.d_out.dtype))

  # dV += Aᵀ dO, summed over the output gradients.
  d_v = refs.d_v_acc[key_slice, :]
  d_out = _stack_maps(refs.d_out[:, row_slice, :])  # [X·n, V]
  stacked_weights = jnp.concatenate(output_weights, axis=1)  # [m, X·n]
  d_v = d_v + dot(stacked_weights, d_out, contracting_axes=(1, 0))
  refs.d_v_acc[key_slice, :] = d_v

  # dK += dSᵀ Q and dQ += dS K. Maps that share their keys are stacked. The
  # factor `scale` is applied when the sums are written.
  for key_map in range(M):
    maps = schedule.maps_of_key_map(key_map)
    num_maps = maps.stop - maps.start
    stacked_d_logits = jnp.concatenate(d_logits[maps], axis=1)  # [m, maps·n]
    d_k = refs.d_k_acc[key_map, key_slice, :]
    queries = _stack_maps(refs.q[maps, row_slice, :])  # [maps·n, D]
    d_k = d_k + dot(stacked_d_logits, queries, contracting_axes=(1, 0))
    refs.d_k_acc[key_map, key_slice, :] = d_k

    d_q = refs.d_q_sum[head, maps, d_q_slice, :]  # [maps, n, D]
    k = refs.k[key_map, key_slice, :]
    # [maps·n, D]
    d_stacked_q = dot(stacked_d_logits, k, contracting_axes=(0, 0))
    d_q = d_q + d_stacked_q.reshape(num_maps, rows.size, -1)
    refs.d_q_sum[head, maps, d_q_slice, :] = d_q


def _stack_maps(x: Float[Array, "maps n X"]) -> Float[Array, "maps*n X"]:
  return x.reshape(-1, x.shape[-1])


def _by_group(
  x: Float[Array, "B H T V"], num_signal_maps: int
) -> Float[Array, "B Q signals T V"]:
  batch, num_heads, *axes = x.shape
  num_groups = num_heads // num_signal_maps
  return x.reshape(batch, num_groups, num_signal_maps, *axes)


def _row_sums(
  d_out: Float[Array, "B Q signals T V"], out: Float[Array, "B Q maps T V"]
) -> Float[Array, "B Q signals T"]:
  """Returns rowsum(d_out ∘ out), in float32."""
  products = d_out.astype(jnp.float32) * out.astype(jnp.float32)
  return jnp.sum(products, axis=-1)


def _concatenate(arrays: list[jax.Array], axis: int) -> jax.Array:
  if len(arrays) == 1:
    return arrays[0]
  return jnp.concatenate(arrays, axis=axis)
