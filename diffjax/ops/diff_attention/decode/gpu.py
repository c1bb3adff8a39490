"""Decoding on Hopper GPUs, with a kernel that reads keys and values once.

The kernel uses Pallas's Mosaic GPU backend. The queries of all heads that share
a key head are the rows of one product with a block of keys, map after map. The
weights are the rows of one product with its values.

The blocks that a sequence sees are divided evenly among several thread blocks,
so that a few long sequences still occupy the whole chip. Each thread block
computes unnormalized sums over its own keys, its split, and XLA adds them up.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.decode.inputs import (
  DecodeInputs,
  stack_queries,
  vary_alike,
)
from diffjax.ops.diff_attention.gpu import (
  chip,
  layouts,
  shared_memory,
  wgmma,
)
from diffjax.ops.diff_attention.gpu.chip import BLOCK, plgpu
from diffjax.ops.diff_attention.gpu.logits import (
  logit_factor,
  mask_logits,
  masked_row_max,
)
from diffjax.ops.diff_attention.tiles import pad_axis, round_up

# The smallest number of thread blocks that a call should have: two for each of
# the chip's 132 multiprocessors.
_MIN_THREAD_BLOCKS = 264
# The smallest number of keys of a split. With fewer keys, writing the sums
# would take as long as reading the keys.
MIN_SPLIT_KEYS = 256
_BYTES_PER_NUMBER = 2  # bfloat16 and float16


def decode_attention_gpu(
  inputs: DecodeInputs, *, window: int | None, scale: float
) -> Float[Array, "B T H V"]:
  """Returns the result of `decode_attention`, computed by the GPU kernel.

  Raises:
    ValueError: if JAX is too old, if the program is not for a Hopper GPU, or if
      the kernel does not support the inputs.
  """
  _check_support(inputs)
  batch, _, num_heads, num_maps, _ = inputs.q.shape
  num_kv_heads = inputs.k.shape[1]
  value_width = inputs.v.shape[-1]
  # R: a sequence has one new token, so each query head has one row.
  num_rows = num_heads // num_kv_heads

  factor, q = logit_factor(scale, inputs.q)
  stacked_queries = stack_queries(q, inputs.k, num_rows)
  lengths = inputs.first_positions + 1  # The new token is the last one.
  map_outputs = _attend_in_splits(
    stacked_queries,
    inputs.k,
    inputs.v,
    lengths=lengths,
    window=window,
    factor=factor,
  )  # [B, K, G·R, V]
  map_outputs = map_outputs.reshape(
    batch, num_kv_heads, num_maps, num_rows, value_width
  )
  # On the axis of maps, 0 is the signal map and 1 is the noise map.
  out = map_outputs[:, :, 0]  # [B, K, R, V]
  if inputs.lam is not None:
    lam = inputs.lam.reshape(batch, num_kv_heads, num_rows, 1)
    out -= lam * map_outputs[:, :, 1]
  out = out.reshape(batch, 1, num_heads, value_width)
  return out.astype(inputs.q.dtype)


def _check_support(inputs: DecodeInputs) -> None:
  """Raises ValueError if the kernel cannot run here, or not on the inputs."""
  problem = chip.refusal()
  if problem is not None:
    raise ValueError(
      f"implementation = 'pallas_gpu' {problem};"
      " use implementation='xla' or 'auto'"
    )
  supported = (
    "is not supported by implementation 'pallas_gpu', which takes one new token"
    " per sequence and a cache in q's dtype without pages;"
    " use implementation='xla' or 'auto'"
  )
  _, tokens, num_heads, num_maps, width = inputs.q.shape
  if tokens > 1:
    raise ValueError(f"q ({tokens} new tokens per sequence) {supported}")
  if inputs.block_tables is not None:
    raise ValueError(f"block_tables (pages) {supported}")
  if inputs.k_scale is not None:
    raise ValueError(f"k (int8) {supported}")

  num_kv_heads = inputs.k.shape[1]
  num_queries = num_maps * num_heads // num_kv_heads
  if not chip.takes(inputs.q, inputs.v) or num_queries > BLOCK:
    raise ValueError(
      f"q ({inputs.q.dtype}, D = {width}, {num_queries} queries per key head)"
      f" and v (V = {inputs.v.shape[-1]}) are not supported by implementation"
      " 'pallas_gpu', which takes bfloat16 and float16, D up to 128,"
      f" {BLOCK} queries per key head and V up to 256: cast them, or use"
      " implementation='xla'"
    )


def _attend_in_splits(
  q: Float[Array, "B K n X"],
  k: Float[Array, "B K S X"],
  v: Float[Array, "B K S V"],
  lengths: Int[Array, "B"],
  *,
  window: int | None,
  factor: float,
) -> Float[Array, "B K n V"]:
  """Returns softmax(factor·qkᵀ)v of base 2, for the visible keys.

  A sequence that sees no key gets zeros. If S, X and V are not multiples of 64,
  the cache is padded, which copies it for every token.

  The keys of a sequence are divided into splits. A thread block of the kernel
  reads one split.

  Args:
    q: up to 64 queries per key head.
    k: keys.
    v: values.
    lengths: the number of tokens of each sequence.
    window: how many of them the new token sees. None for all.
    factor: the factor on q·k.
  """
  batch, num_kv_heads, num_queries, _ = q.shape
  value_width = v.shape[-1]
  k = _pad_to_blocks(k)
  v = _pad_to_blocks(v)
  q = pad_axis(q, 2, BLOCK)
  q = pad_axis(q, 3, k.shape[3])
  padded_length, padded_key_width = k.shape[2:]
  padded_value_width = v.shape[3]

  # The largest number of keys that a sequence may see, in whole blocks.
  num_visible = padded_length
  if window is not None:
    num_visible = min(padded_length, window + BLOCK)
  num_visible = round_up(num_visible, BLOCK)
  wanted_splits = -(-_MIN_THREAD_BLOCKS // (batch * num_kv_heads))
  num_splits = max(1, min(wanted_splits, num_visible // MIN_SPLIT_KEYS))

  lengths, q, k, v = vary_alike((lengths, q, k, v))
  # Shared memory has the queries, and `num_slots` blocks of keys and values.
  num_slots = shared_memory.max_slots(
    _BYTES_PER_NUMBER * BLOCK * padded_key_width,
    _BYTES_PER_NUMBER * BLOCK * (padded_key_width + padded_value_width),
  )
  split_shape = (batch, num_kv_heads, num_splits, BLOCK)
  value_sums, maxima, weight_sums = chip.make_kernel(
    functools.partial(_kernel, window, factor, num_slots),
    "diff_attention_decode",
    interpret=chip.interpret_mode.get(),
    grid=(num_splits, num_kv_heads, batch),
    grid_names=("splits", "heads", "batch"),
    warpgroups=2,
    outputs=(
      ((*split_shape, padded_value_width), jnp.float32),
      (split_shape, jnp.float32),
      (split_shape, jnp.float32),
    ),
    scratch={
      "q_smem": shared_memory.tiled_smem((BLOCK, padded_key_width), q.dtype),
      "k_smem": shared_memory.tiled_smem(
        (num_slots, BLOCK, padded_key_width), k.dtype
      ),
      "v_smem": shared_memory.tiled_smem(
        (num_slots, BLOCK, padded_value_width), v.dtype
      ),
      "q_ready": plgpu.Barrier(),
      "ready": plgpu.Barrier(num_arrivals=2, num_barriers=num_slots),
      "free": plgpu.Barrier(num_barriers=num_slots),
    },
  )(q, k, v, lengths)
  out = _add_splits(value_sums, maxima, weight_sums)
  return out[:, :, :num_queries, :value_width]


def _pad_to_blocks(x: Float[Array, "B K S X"]) -> Float[Array, "B K S X"]:
  """Pads the keys and their width to multiples of 64."""
  x = pad_axis(x, 2, round_up(x.shape[2], BLOCK))
  return pad_axis(x, 3, round_up(x.shape[3], BLOCK))


def _add_splits(
  value_sums: Float[Array, "B K splits n V"],
  maxima: Float[Array, "B K splits n"],
  weight_sums: Float[Array, "B K splits n"],
) -> Float[Array, "B K n V"]:
  """Returns the softmax outputs over the keys of all splits.

  A split is a part of a sequence's keys. Its sums are relative to its own
  maximum, Σ 2^(logit − maximum). The factor 2^(maximum − largest maximum) makes
  them relative to the largest maximum of all splits.

  Args:
    value_sums: Σ 2^(logit − maximum) · v for each split.
    maxima: the largest logit of each split.
    weight_sums: Σ 2^(logit − maximum) for each split.
  """
  largest_maximum = jnp.max(maxima, axis=2, keepdims=True)
  correction = jnp.exp2(maxima - largest_maximum)
  weight_sum = jnp.sum(weight_sums * correction, axis=2)[..., None]
  value_sum = jnp.sum(value_sums * correction[..., None], axis=2)
  # A query that sees no key has sums of 0, and gets an output of 0.
  return value_sum / jnp.where(weight_sum == 0, 1.0, weight_sum)


class _Split(NamedTuple):
  """The part of a sequence's cache that a thread block reads."""

  # The sequence, its key head, and the number of the split.
  batch: Int[Array, ""]
  head: Int[Array, ""]
  number: Int[Array, ""]
  # The keys that the sequence sees.
  first_key: Int[Array, ""]
  stop_key: Int[Array, ""]
  # The blocks that the thread block reads. It may have none.
  start_block: Int[Array, ""]
  stop_block: Int[Array, ""]


class _SharedMemory(NamedTuple):
  """The queries of a thread block, and a ring of blocks of its keys."""

  q: Any  # [64, X]
  k: Any  # [slots, 64, X]
  v: Any  # [slots, 64, V]
  q_ready: Any  # a barrier
  ring: shared_memory.RingBuffer


class _OnlineSoftmax(NamedTuple):
  """The softmax over the keys that were read so far."""

  value_sum: Float[Array, "64 V"]  # Σ 2^(factor·q·k − maximum)·v
  maximum: Float[Array, "64"]  # of factor·q·k
  weight_sum: Float[Array, "64"]  # Σ 2^(factor·q·k − maximum)


def _kernel(
  window: int | None,
  factor: float,
  num_slots: int,
  q_ref,
  k_ref,
  v_ref,
  lengths_ref,
  value_sums_ref,
  maxima_ref,
  weight_sums_ref,
  *,
  q_smem,
  k_smem,
  v_smem,
  q_ready,
  ready,
  free,
) -> None:
  """Writes the sums of one split, for one sequence and key head.

  A split is the part of a sequence's keys that one thread block reads. It has
  two warpgroups: one copies blocks of keys and values to shared memory, and the
  other one attends to them.
  """
  num_splits = value_sums_ref.shape[2]
  split = _split_of_thread_block(lengths_ref, window, num_splits)
  ring = shared_memory.RingBuffer(num_slots, ready, free)
  shared = _SharedMemory(q_smem, k_smem, v_smem, q_ready, ring)
  warpgroup = lax.axis_index("warpgroup")

  @pl.when(warpgroup == 0)
  def _attend():
    queries = q_ref.at[split.batch, split.head]
    plgpu.copy_gmem_to_smem(queries, shared.q, shared.q_ready)
    plgpu.barrier_wait(shared.q_ready)
    result = _attend_to_blocks(split, shared, factor)
    index = (split.batch, split.head, split.number)
    value_sums_ref[index] = result.value_sum
    maxima_ref[index] = result.maximum
    weight_sums_ref[index] = result.weight_sum

  @pl.when(warpgroup == 1)
  def _load():
    _load_blocks(split, shared, k_ref, v_ref)


def _split_of_thread_block(
  lengths_ref, window: int | None, num_splits: int
) -> _Split:
  """Returns the part of the cache that this thread block reads.

  The visible keys of a sequence are in blocks of 64. Its splits get equally
  many of these blocks, except that the last ones may get fewer, or none.

  Args:
    lengths_ref: the number of tokens of each sequence.
    window: how many of them the new token sees. None for all.
    num_splits: the number of splits of a sequence.
  """
  number = lax.axis_index("splits")
  head = lax.axis_index("heads")
  batch = lax.axis_index("batch")
  length = lengths_ref[batch]
  first_key = jnp.int32(0)
  if window is not None:
    first_key = lax.max(length - window, jnp.int32(0))

  # The blocks `first_block` to `stop_block − 1` hold all visible keys. Adding
  # the divisor − 1 makes a division round up.
  first_block = lax.div(first_key, jnp.int32(BLOCK))
  stop_block = lax.div(length + (BLOCK - 1), jnp.int32(BLOCK))
  num_blocks = stop_block - first_block
  blocks_per_split = lax.div(
    num_blocks + (num_splits - 1), jnp.int32(num_splits)
  )
  start = lax.min(first_block + number * blocks_per_split, stop_block)
  stop = lax.min(start + blocks_per_split, stop_block)
  return _Split(
    batch=batch,
    head=head,
    number=number,
    first_key=first_key,
    stop_key=length,
    start_block=start,
    stop_block=stop,
  )


def _load_blocks(split: _Split, shared: _SharedMemory, k_ref, v_ref) -> None:
  """Copies the keys and values of the split to shared memory, block by block.

  Shared memory has a ring of slots for a few blocks. A slot is filled again
  when the other warpgroup has read its block.
  """

  @pl.loop(split.start_block, split.stop_block)
  def _load_block(block):
    def copy_to_slot(slot, slot_ready) -> None:
      positions = pl.ds(block * BLOCK, BLOCK)
      keys = k_ref.at[split.batch, split.head, positions]
      plgpu.copy_gmem_to_smem(keys, shared.k.at[slot], slot_ready)
      values = v_ref.at[split.batch, split.head, positions]
      plgpu.copy_gmem_to_smem(values, shared.v.at[slot], slot_ready)

    shared.ring.fill(block, split.start_block, copy_to_slot)

  shared.ring.drain(split.start_block, split.stop_block)


def _attend_to_blocks(
  split: _Split, shared: _SharedMemory, factor: float
) -> _OnlineSoftmax:
  """Returns the sums of the softmax over the visible keys of the split.

  Args:
    split: the blocks to read.
    shared: the queries, and the slots where the other warpgroup puts the keys
      and values of one block after the other.
    factor: the factor on q·k.
  """
  value_width = shared.v.shape[-1]
  state = _OnlineSoftmax(
    value_sum=layouts.full((BLOCK, value_width), 0, layouts.matrix()),
    maximum=layouts.full((BLOCK,), masked_row_max(factor), layouts.row()),
    weight_sum=layouts.full((BLOCK,), 0, layouts.row()),
  )
  add_block = functools.partial(_add_block, split, shared, factor)
  return lax.fori_loop(split.start_block, split.stop_block, add_block, state)


def _add_block(
  split: _Split,
  shared: _SharedMemory,
  factor: float,
  block: Int[Array, ""],
  state: _OnlineSoftmax,
) -> _OnlineSoftmax:
  """Returns the state after one more block of keys."""
  slot = shared.ring.wait(block)
  first_key = block * BLOCK
  is_partial = (first_key < split.first_key) | (
    first_key + BLOCK > split.stop_key
  )
  logits = wgmma.matmul(shared.q, shared.k.at[slot].T)  # [64, 64]

  def hide_logits(logits: Float[Array, "64 64"]) -> Float[Array, "64 64"]:
    last_key = split.stop_key - 1
    return mask_logits(logits, first_key, split.first_key, last_key)

  def keep_logits(logits: Float[Array, "64 64"]) -> Float[Array, "64 64"]:
    return logits

  logits = lax.cond(is_partial, hide_logits, keep_logits, logits)

  @pl.when(is_partial)
  def _hide_values():
    _clear_hidden_values(split, shared.v, slot, first_key)

  maximum = jnp.maximum(state.maximum, jnp.max(logits, axis=1) * factor)
  weights = jnp.exp2(
    logits * factor - layouts.broadcast_over_columns(maximum, logits.shape)
  )
  correction = jnp.exp2(state.maximum - maximum)
  weight_sum = state.weight_sum * correction + jnp.sum(weights, axis=1)
  corrected_sum = state.value_sum * layouts.broadcast_over_columns(
    correction, state.value_sum.shape
  )
  values = shared.v.at[slot]
  value_sum = wgmma.multiply_add(
    corrected_sum, weights.astype(shared.v.dtype), values
  )
  shared.ring.release(block)
  return _OnlineSoftmax(value_sum, maximum, weight_sum)


def _clear_hidden_values(
  split: _Split, v_smem, slot: Int[Array, ""], first_key: Int[Array, ""]
) -> None:
  """Overwrites the hidden values of a block with 0, in shared memory.

  Their weights are 0. But hidden values may be NaN, and 0·NaN is NaN.

  Args:
    split: the keys that the sequence sees.
    v_smem: the values in shared memory, [slots, 64, V].
    slot: the slot of the block.
    first_key: the position of the block's first key.
  """
  rows = layouts.block_iota(layouts.row())
  positions = layouts.broadcast_over_columns(rows, (BLOCK, BLOCK)) + first_key
  is_visible = (positions >= split.first_key) & (positions < split.stop_key)
  # The columns are processed 64 at a time. All at once would need the registers
  # that hold the sums.
  for column in range(0, v_smem.shape[-1], BLOCK):
    columns_ref = v_smem.at[slot, :, pl.ds(column, BLOCK)]
    values = plgpu.load(columns_ref, layout=layouts.matrix())
    columns_ref[...] = jnp.where(is_visible, values, 0)
  # The tensor cores read shared memory asynchronously. This makes the writes
  # visible to them.
  plgpu.commit_smem()
