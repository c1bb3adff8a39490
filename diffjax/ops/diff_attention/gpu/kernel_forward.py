"""The forward Hopper kernel of attention.

A thread block has three warpgroups. The producer copies blocks of keys and
values into ring buffers in shared memory. The other two, the consumers, have a
block of queries each. `_ForwardThreadBlock` has the roles of the warpgroups.
`_ForwardPass` is a consumer's loop over the blocks.

Letters: T and S are the padded numbers of queries and keys. In loops, `g` is
the index of a map, and `block` is the index of a block of keys.

The order of statements matters to ptxas. `python -m benchmarks.gpu.static`
shows what it makes of the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from diffjax.ops.diff_attention.gpu import blocks, chip, layouts, wgmma
from diffjax.ops.diff_attention.gpu.blocks import NUM_CONSUMERS, BlockRanges
from diffjax.ops.diff_attention.gpu.chip import BLOCK, Ref, plgpu
from diffjax.ops.diff_attention.gpu.logits import (
  EMPTY_ROW_LSE,
  load_segment_ids,
  mask_logits,
  masked_row_max,
)
from diffjax.ops.diff_attention.gpu.shared_memory import RingBuffer
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import LOG2E


def key_maps_of(maps: Sequence[int], M: int) -> list[int]:
  """Returns the key maps that these maps use, in ascending order."""
  return sorted({g % M for g in maps})


def first_block_of_tile(length: int) -> jax.Array:
  """Returns the first block of queries of this thread block's tile.

  The last tile runs first. Under a causal mask its queries see the most keys,
  and the longest work should start first.
  """
  num_tiles = length // (NUM_CONSUMERS * BLOCK)
  tile = num_tiles - 1 - lax.axis_index("tiles")
  return tile * NUM_CONSUMERS


class ForwardArrays(NamedTuple):
  """The inputs and outputs of the forward kernel, in global memory."""

  q: Ref  # [B, T, H·G, D]
  k: Ref  # [B, S, K·M, D]
  v: Ref  # [B, S, K, V]
  lam: Ref  # float32[B, H, T]; None if G = 1
  q_ids: Ref | None  # int32[B, T]
  kv_ids: Ref | None  # int32[B, S]
  offset: Ref | None  # int32[B], if it is not known to the mask
  ranges: Ref  # int32[B or 1, T / BLOCK, 6], see `blocks.block_ranges`
  out: Ref  # [B, T, H, V]
  noise_out: Ref | None  # A₂V [B, T, H, V], for the backward pass
  lse: Ref | None  # float32[B, H, G, T], for the backward pass


class ForwardScratch(NamedTuple):
  """The shared memory and barriers of the forward kernel."""

  q_smem: Ref  # [NUM_CONSUMERS, G, BLOCK, D]
  k_smem: Ref  # [slots, key maps of a pass, BLOCK, D]
  v_smem: Ref  # [slots, BLOCK, V]
  out_smem: Ref  # [NUM_CONSUMERS, BLOCK, V]
  q_ready: Ref  # barriers [NUM_CONSUMERS]
  k_ready: Ref  # barriers [slots], as the following ones
  k_free: Ref
  v_ready: Ref
  v_free: Ref


def forward(
  mask: Mask,
  factor: float,
  passes: Sequence[Sequence[int]],
  num_slots: int,
  *array_refs: Ref,
  **scratch_refs: Ref,
) -> None:
  """The forward kernel: computes the outputs and log-sum-exps of a tile.

  A tile, which is a block of queries for each consumer, stays in shared memory
  while blocks of keys and values are streamed past it. Three warpgroups run
  this function at the same time: two consumers compute, and the last one, the
  producer, loads.

  Args:
    mask: the mask.
    factor: the factor on logits, see `logits.logit_factor`.
    passes: the maps that are computed together in each pass over the keys. Map
      1 must not be in a later pass than map 0.
    num_slots: slots of the ring buffers, through which the producer passes keys
      and values. A slot holds one block.
    *array_refs: the fields of `ForwardArrays`.
    **scratch_refs: the fields of `ForwardScratch`.
  """
  arrays = ForwardArrays(*array_refs)
  scratch = ForwardScratch(**scratch_refs)
  head = lax.axis_index("heads")
  batch = lax.axis_index("batch")
  warpgroup = lax.axis_index("warpgroup")
  heads_per_kv_head = arrays.out.shape[2] // arrays.v.shape[2]
  thread_block = _ForwardThreadBlock(
    mask=mask,
    factor=factor,
    passes=passes,
    arrays=arrays,
    scratch=scratch,
    key_ring=RingBuffer(num_slots, scratch.k_ready, scratch.k_free),
    value_ring=RingBuffer(num_slots, scratch.v_ready, scratch.v_free),
    head=head,
    batch=batch,
    warpgroup=warpgroup,
    kv_head=lax.div(head, jnp.int32(heads_per_kv_head)),
    first_block=first_block_of_tile(arrays.q.shape[1]),
  )
  pl.when(warpgroup < NUM_CONSUMERS)(thread_block.compute_outputs)
  pl.when(warpgroup == NUM_CONSUMERS)(thread_block.load_keys_and_values)


@dataclasses.dataclass(frozen=True)
class _ForwardThreadBlock:
  """The roles of the forward kernel's warpgroups.

  Attributes:
    first_block: the first block of queries of the tile. Consumer n computes
      block first_block + n.
  """

  mask: Mask
  factor: float
  passes: Sequence[Sequence[int]]
  arrays: ForwardArrays
  scratch: ForwardScratch
  key_ring: RingBuffer
  value_ring: RingBuffer
  head: jax.Array
  batch: jax.Array
  warpgroup: jax.Array
  kv_head: jax.Array
  first_block: jax.Array

  @property
  def num_maps(self) -> int:
    """Returns G, the number of maps."""
    return self.scratch.q_smem.shape[1]

  @property
  def num_key_maps(self) -> int:
    """Returns M, the number of key maps."""
    return self.arrays.k.shape[2] // self.arrays.v.shape[2]

  def compute_outputs(self) -> None:
    """A consumer's role: computes the outputs of a block of queries.

    A consumer is a warpgroup that computes. It loads its queries, loops over
    the blocks of keys and values that the producer loads, and writes the
    results. If the accumulators of both maps do not fit in the registers, each
    map has its own pass over the keys.
    """
    plgpu.set_max_registers(chip.CONSUMER_REGISTERS, action="increase")
    query_block = self.first_block + self.warpgroup
    # The blocks of keys that are loaded, visible and full.
    ranges = BlockRanges.read(self.arrays.ranges, self.batch, query_block)
    rows = pl.ds(query_block * BLOCK, BLOCK)
    for g in range(self.num_maps):
      plgpu.copy_gmem_to_smem(
        self.arrays.q.at[self.batch, rows, self.head * self.num_maps + g],
        self.scratch.q_smem.at[self.warpgroup, g],
        self.scratch.q_ready.at[self.warpgroup],
      )
    key_limits = blocks.key_limits(
      self.mask, self.arrays.offset, self.batch, query_block
    )
    plgpu.barrier_wait(self.scratch.q_ready.at[self.warpgroup])

    for index, maps in enumerate(self.passes):
      # Ring buffers count their steps through all passes.
      first_step = index * (ranges.loaded_stop - ranges.loaded_start)
      forward_pass = _ForwardPass(
        thread_block=self,
        maps=maps,
        key_maps=key_maps_of(maps, self.num_key_maps),
        rows=rows,
        key_limits=key_limits,
        ranges=ranges,
        first_step=first_step,
      )
      state = forward_pass.process_all_blocks()
      # The noise map, the last one, is written first, because the signal map
      # subtracts it.
      for position in reversed(range(len(maps))):
        self._write_output(
          g=maps[position],
          rows=rows,
          acc=state.accs[position],
          row_max=state.row_maxes[position],
          row_sum=state.row_sums[position],
        )
    plgpu.wait_smem_to_gmem(0)

  def _write_output(
    self,
    g: int,
    rows: Any,
    acc: Float[Array, "rows V"],
    row_max: Float[Array, "rows"],
    row_sum: Float[Array, "rows"],
  ) -> None:
    """Writes the log-sum-exps of map g, and its output.

    The noise map (g = 1) must be written first. Its output A₂V stays in shared
    memory until the signal map subtracts it: O = A₁V − λA₂V.

    Args:
      g: the index of the map.
      rows: the slice of the queries.
      acc: the sums of weights times values.
      row_max: the maximum of each row's logits of base 2.
      row_sum: the sums of the weights 2^(logit − row_max).
    """
    # The maximum of a row is a masked logit if the row saw no key. Then its
    # sums are meaningless, and its output is 0. Half a masked logit is still
    # below all others, and does not depend on rounding.
    is_empty = row_max <= masked_row_max(self.factor) / 2
    inverse_sum = jnp.where(is_empty, 0.0, 1 / row_sum)
    result = acc * layouts.broadcast_over_columns(inverse_sum, acc.shape)
    if self.arrays.lse is not None:
      self.arrays.lse[self.batch, self.head, g, rows] = jnp.where(
        is_empty, EMPTY_ROW_LSE, row_max + jnp.log(row_sum) * LOG2E
      )

    out_smem = self.scratch.out_smem
    is_noise_map = g == 1
    if is_noise_map:
      target = self.arrays.noise_out
    else:
      target = self.arrays.out
    if self.num_maps == 2 and not is_noise_map:
      # O = A₁V − λA₂V. A₂V is read from shared memory, where it is rounded. The
      # backward pass reads the rounded A₂V too, so that both agree.
      lam = layouts.load_global(
        self.arrays.lam.at[self.batch, self.head, rows], layouts.row()
      )
      lam = layouts.broadcast_over_columns(lam, acc.shape)
      noise_result = out_smem[self.warpgroup].astype(jnp.float32)
      result = result - lam * noise_result
      # The copy of A₂V to global memory must have read it.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    out_smem[self.warpgroup] = result.astype(self.arrays.out.dtype)
    if target is not None:
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(
        out_smem.at[self.warpgroup], target.at[self.batch, rows, self.head]
      )

  def load_keys_and_values(self) -> None:
    """The producer's role: loads the keys and values of every pass.

    A pass is a loop over the blocks of keys for some of the maps. The producer
    puts the blocks into ring buffers, from which both consumers read.
    """
    plgpu.set_max_registers(chip.PRODUCER_REGISTERS, action="decrease")
    ranges = BlockRanges.read(self.arrays.ranges, self.batch, self.first_block)
    for index, maps in enumerate(self.passes):
      self._load_pass(index, maps, ranges)
    # Wait until the consumers have released the last blocks.
    for ring in (self.key_ring, self.value_ring):
      num_steps = len(self.passes) * (ranges.loaded_stop - ranges.loaded_start)
      ring.drain(ranges.loaded_start, ranges.loaded_start + num_steps)

  def _load_pass(
    self, pass_index: int, maps: Sequence[int], ranges: BlockRanges
  ) -> None:
    """Loads all blocks of keys and values, for the maps of one pass.

    Args:
      pass_index: the index of the pass. Ring buffers count their steps through
        all passes.
      maps: the maps that this pass computes. Only their keys are loaded.
      ranges: `loaded_start` and `loaded_stop` are the range of the blocks.
    """
    key_maps = key_maps_of(maps, self.num_key_maps)

    @pl.loop(ranges.loaded_start, ranges.loaded_stop)
    def load_block(block: jax.Array) -> None:
      step = pass_index * (ranges.loaded_stop - ranges.loaded_start) + block
      keys = pl.ds(block * BLOCK, BLOCK)

      def load_keys(slot: jax.Array, barrier: Ref) -> None:
        for position, key_map in enumerate(key_maps):
          key_head = self.kv_head * self.num_key_maps + key_map
          plgpu.copy_gmem_to_smem(
            self.arrays.k.at[self.batch, keys, key_head],
            self.scratch.k_smem.at[slot, position],
            barrier,
          )

      def load_values(slot: jax.Array, barrier: Ref) -> None:
        plgpu.copy_gmem_to_smem(
          self.arrays.v.at[self.batch, keys, self.kv_head],
          self.scratch.v_smem.at[slot],
          barrier,
        )

      self.key_ring.fill(step, ranges.loaded_start, load_keys)
      self.value_ring.fill(step, ranges.loaded_start, load_values)


class _ForwardState(NamedTuple):
  """The online softmax of a block of queries. Lists have one item per map."""

  accs: list[Float[Array, "rows V"]]  # Σ weights · values
  row_maxes: list[Float[Array, "rows"]]  # maximum of the logits of base 2
  row_sums: list[Float[Array, "rows"]]  # Σ weights
  # The weights of the previous turn, which are not yet multiplied by values.
  # None before the first turn.
  weights: Float[Array, "rows keys"] | None


class _SoftmaxUpdate(NamedTuple):
  """What a block of logits changes in the online softmax of a map."""

  weights: Float[Array, "rows keys"]  # 2^(logit − row_max), in the dtype of q
  row_max: Float[Array, "rows"]
  row_sum: Float[Array, "rows"]
  rescale: Float[Array, "rows"]  # 2^(old row_max − new row_max)


@dataclasses.dataclass(frozen=True)
class _ForwardPass:
  """A consumer's pass over the blocks of keys, for some of the maps.

  The maps take turns. A map's turn computes its logits, and then its weights.
  While it computes the weights, the tensor cores multiply the weights of the
  previous turn by their values.

  Attributes:
    thread_block: the thread block.
    maps: the maps of this pass.
    key_maps: the key maps that they use, as they are stored in a slot.
    rows: the slice of the queries.
    key_limits: the first and the last key that each query may see.
    ranges: the ranges of blocks of keys.
    first_step: the step of the ring buffers for block 0.
  """

  thread_block: _ForwardThreadBlock
  maps: Sequence[int]
  key_maps: Sequence[int]
  rows: Any
  key_limits: tuple[Any, Any]
  ranges: BlockRanges
  first_step: jax.Array

  def process_all_blocks(self) -> _ForwardState:
    """Returns the sums of the online softmax over all blocks of keys.

    `fold` loops over the visible blocks. The weights of one block are
    multiplied by its values while the next block is processed. So there is a
    first block without such weights, and a last product at the end.
    """
    arrays = self.thread_block.arrays
    num_maps = len(self.maps)
    row_max = masked_row_max(self.thread_block.factor)
    initial_acc = layouts.full((BLOCK, arrays.v.shape[3]), 0, layouts.matrix())
    initial_max = layouts.full((BLOCK,), row_max, layouts.row())
    initial_sum = layouts.full((BLOCK,), 0, layouts.row())
    no_weights = layouts.full((BLOCK, BLOCK), 0, layouts.matrix())
    initial_state = _ForwardState(
      accs=[initial_acc] * num_maps,
      row_maxes=[initial_max] * num_maps,
      row_sums=[initial_sum] * num_maps,
      weights=no_weights.astype(arrays.q.dtype),
    )
    return self.ranges.fold(
      partial_blocks=blocks.PartialBlocks.of(self.thread_block.mask),
      process_first_block=self.process_first_block,
      process_block=self.process_block,
      finish=self.finish_last_block,
      skip_block=self.skip_block,
      initial_state=initial_state,
    )

  def process_first_block(
    self, block: jax.Array, state: _ForwardState
  ) -> _ForwardState:
    """Processes the first block, before which no weights are pending."""
    self.thread_block.key_ring.wait(self.first_step + block)
    initial_state = state._replace(weights=None)
    return self.process_block(is_full=False, block=block, state=initial_state)

  def process_block(
    self, is_full: bool, block: jax.Array, state: _ForwardState
  ) -> _ForwardState:
    """Processes a block whose keys are loaded. Full blocks need no mask."""
    for turn in range(len(self.maps)):
      state = self._take_turn(turn, is_full, block, state)
    return state

  def finish_last_block(self, state: _ForwardState) -> _ForwardState:
    """Adds the last product of weights and values, which is still pending.

    Each map's weights of a block are multiplied by its values in the next turn.
    After the last turn, the product of the last map (accs[-1]) is left.
    """
    assert state.weights is not None  # The first block computed weights.
    value_ring = self.thread_block.value_ring
    last_step = self.first_step + self.ranges.visible_stop - 1
    values = self.thread_block.scratch.v_smem.at[value_ring.slot(last_step)]
    accs = list(state.accs)
    accs[-1] = wgmma.multiply_add(accs[-1], state.weights, values)
    value_ring.release(last_step)
    return state._replace(accs=accs)

  def skip_block(self, block: jax.Array) -> None:
    """Frees a block that is loaded, but hidden by the mask."""
    self.thread_block.key_ring.skip(self.first_step + block)
    self.thread_block.value_ring.skip(self.first_step + block)

  def _take_turn(
    self, turn: int, is_full: bool, block: jax.Array, state: _ForwardState
  ) -> _ForwardState:
    """Updates the softmax of one map, and the accumulator of the previous one.

    Args:
      turn: the index of the map in `maps`.
      is_full: whether every query sees every key of the block.
      block: the block of keys.
      state: the state after the previous turn.
    """
    thread_block = self.thread_block
    scratch = thread_block.scratch
    key_ring = thread_block.key_ring
    value_ring = thread_block.value_ring
    step = self.first_step + block
    is_first_turn = turn == 0
    if is_first_turn:
      # The turn before this one was the last map's, at the previous block.
      previous_turn = len(self.maps) - 1
      previous_step = step - 1
    else:
      previous_turn = turn - 1
      previous_step = step
    accs = list(state.accs)
    row_maxes = list(state.row_maxes)
    row_sums = list(state.row_sums)

    # The weights of the previous turn are not yet multiplied by their values.
    pending = None
    outputs_like = None
    if state.weights is not None:
      value_slot = value_ring.slot(previous_step)
      values = scratch.v_smem.at[value_slot]  # [BLOCK, V]
      pending = wgmma.PendingProduct(accs[previous_turn], state.weights, values)
      outputs_like = _SoftmaxUpdate(
        weights=state.weights,
        row_max=row_maxes[turn],
        row_sum=row_sums[turn],
        rescale=row_maxes[turn],
      )

    # Compute the map's logits and weights, and meanwhile the pending product.
    g = self.maps[turn]
    key_map = self.key_maps.index(g % thread_block.num_key_maps)
    warpgroup = wgmma.prevent_hoisting(thread_block.warpgroup, block)
    key_slot = key_ring.slot(step)
    g_index = wgmma.prevent_hoisting(jnp.int32(g), block)
    key_map_index = wgmma.prevent_hoisting(jnp.int32(key_map), block)
    queries = scratch.q_smem.at[warpgroup, g_index]  # [BLOCK, D]
    keys = scratch.k_smem.at[key_slot, key_map_index]  # [BLOCK, D]
    update_softmax = functools.partial(
      self._update_softmax,
      turn,
      is_full,
      block,
      row_maxes[turn],
      row_sums[turn],
    )
    previous_acc, outputs = wgmma.matmul_with_epilogue(
      [(queries, keys.T)],
      update_softmax,
      pending=pending,
      outputs_like=outputs_like,
      wait_for_next=functools.partial(self._wait_for_next, turn, block),
    )
    update = _SoftmaxUpdate(*outputs)

    row_maxes[turn] = update.row_max
    row_sums[turn] = update.row_sum
    if pending is not None:
      accs[previous_turn] = previous_acc
      if is_first_turn:
        # All maps have used the values of the previous block.
        value_ring.release(step - 1)
    rescale = layouts.broadcast_over_columns(update.rescale, accs[turn].shape)
    accs[turn] = accs[turn] * rescale
    return _ForwardState(accs, row_maxes, row_sums, update.weights)

  def _update_softmax(
    self,
    turn: int,
    is_full: bool,
    block: jax.Array,
    old_max: Float[Array, "rows"],
    old_sum: Float[Array, "rows"],
    logits: Float[Array, "rows keys"],
  ) -> _SoftmaxUpdate:
    """Computes the weights of a block from its logits, by the online softmax.

    The maximum of each row grows from block to block. So the sums of earlier
    blocks, which were taken with the old maximum, must be multiplied by
    `rescale`.

    Args:
      turn: the index of the map in `maps`. The maps take turns.
      is_full: whether every query sees every key of the block, so that no mask
        is needed.
      block: the index of the block of keys.
      old_max: the maximum of each row's logits in earlier blocks.
      old_sum: the sum of each row's weights in earlier blocks.
      logits: q·k, without the factor `scale · log₂e`.
    """
    thread_block = self.thread_block
    factor = thread_block.factor
    is_last_turn = turn == len(self.maps) - 1
    if is_last_turn:
      # All logits of the block are computed, so its keys are not needed.
      thread_block.key_ring.release(self.first_step + block)
    if blocks.PartialBlocks.of(thread_block.mask).may_exist and not is_full:
      # The queries' ids are read again for each block, because no registers are
      # left to keep them.
      segment_ids = load_segment_ids(
        thread_block.arrays.q_ids,
        thread_block.arrays.kv_ids,
        thread_block.batch,
        rows=self.rows,
        column_block=block,
      )
      first_key, last_key = self.key_limits
      logits = mask_logits(
        logits, block * BLOCK, first_key, last_key, segment_ids
      )
    # Everything has base 2: 2^(factor · q·k) = e^(scale · q·k).
    row_max = jnp.maximum(old_max, jnp.max(logits, axis=1) * factor)
    scaled_logits = logits * factor
    max_of_row = layouts.broadcast_over_columns(row_max, logits.shape)
    weights = jnp.exp2(scaled_logits - max_of_row)
    rescale = jnp.exp2(old_max - row_max)
    # The values have the dtype of q, and so must the weights for the product.
    rounded_weights = weights.astype(thread_block.arrays.q.dtype)
    row_sum = old_sum * rescale + jnp.sum(weights, axis=1)
    return _SoftmaxUpdate(rounded_weights, row_max, row_sum, rescale)

  def _wait_for_next(self, turn: int, block: jax.Array) -> None:
    """Waits until the producer has loaded what the next turns need.

    The maps of a block take turns. A turn multiplies queries by keys, and the
    weights of the turn before by values. So the values of the block are needed
    after its first turn, and the keys of the next block after its last turn.

    Args:
      turn: the index of the turn.
      block: the index of the block of keys.
    """
    is_first_turn = turn == 0
    is_last_turn = turn == len(self.maps) - 1
    step = self.first_step + block
    if is_first_turn:
      self.thread_block.value_ring.wait(step)
    if is_last_turn:

      @pl.when(block + 1 < self.ranges.visible_stop)
      def wait_for_next_keys() -> None:
        self.thread_block.key_ring.wait(step + 1)
