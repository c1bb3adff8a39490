"""The Hopper kernel of attention that computes dQ.

A thread block has three warpgroups. The producer copies blocks of keys and
values into ring buffers in shared memory. The other two, the consumers, have a
block of queries each. `_DQThreadBlock` has the roles of the warpgroups. A
consumer's loop over the blocks is `_OverlappedDQLoop` for D up to 64, and
`_SequentialDQLoop` for wider heads.

Letters: T and S are the padded numbers of queries and keys. In loops, `g` is
the index of a map, and `block` is the index of a block of keys.

The order of statements matters to ptxas. `python -m benchmarks.gpu.static`
shows what it makes of the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from diffjax.ops.diff_attention.gpu import blocks, chip, layouts, wgmma
from diffjax.ops.diff_attention.gpu.blocks import NUM_CONSUMERS, BlockRanges
from diffjax.ops.diff_attention.gpu.chip import BLOCK, Ref, plgpu
from diffjax.ops.diff_attention.gpu.kernel_forward import first_block_of_tile
from diffjax.ops.diff_attention.gpu.logits import load_segment_ids, mask_logits
from diffjax.ops.diff_attention.gpu.shared_memory import RingBuffer
from diffjax.ops.diff_attention.mask import Mask


def delta_index(g: int, num_maps: int) -> int:
  """Returns the index of δ of map g in the backward kernels' `vectors`."""
  return num_maps + g


def lambda_index(num_maps: int) -> int:
  """Returns the index of λ in the backward kernels' `vectors`."""
  return 2 * num_maps


class DQArrays(NamedTuple):
  """The inputs and outputs of the dQ kernel, in global memory."""

  q: Ref  # [B, T, H·G, D]
  k: Ref  # [B, S, K·M, D]
  v: Ref  # [B, S, K, V]
  d_out: Ref  # [B, T, H, V]
  # float32[B, H, vectors, T]: the log-sum-exps of the G maps, their δ, and, if
  # G = 2, λ.
  vectors: Ref
  q_ids: Ref | None  # int32[B, T]
  kv_ids: Ref | None  # int32[B, S]
  offset: Ref | None  # int32[B], if it is not known to the mask
  ranges: Ref  # int32[B or 1, T / BLOCK, 6], see `blocks.block_ranges`
  d_q: Ref  # [B, T, H·G, D]


class DQScratch(NamedTuple):
  """The shared memory and barriers of the dQ kernel."""

  q_smem: Ref  # [NUM_CONSUMERS, G, BLOCK, D]
  d_out_smem: Ref  # [NUM_CONSUMERS, BLOCK, V]
  k_smem: Ref  # [key slots · M, BLOCK, D]
  v_smem: Ref  # [value slots, BLOCK, V]
  q_ready: Ref  # barriers [NUM_CONSUMERS]
  k_ready: Ref  # barriers [key slots]
  k_free: Ref
  v_ready: Ref  # barriers [value slots]
  v_free: Ref


def d_q(
  mask: Mask,
  factor: float,
  scale: float,
  num_key_slots: int,
  num_value_slots: int,
  *array_refs: Ref,
  **scratch_refs: Ref,
) -> None:
  """The dQ kernel: computes the gradients of a tile of queries.

  A tile of queries, a block for each consumer, stays in shared memory while
  blocks of keys and values are streamed past it. Three warpgroups run this
  function at the same time: two consumers compute, and the producer loads.

  With logits S, A = exp₂(S − lse), dP = dO Vᵀ and dS = A ∘ (dP − δ), the
  gradient is dQ = scale · dS K. Both maps share dP. dQ₂ of the noise map gets
  the factor −λ.

  Args:
    mask: the mask.
    factor: the factor on logits, see `logits.logit_factor`.
    scale: the factor on logits of base e.
    num_key_slots: slots of the ring buffer through which the producer passes
      keys. A slot holds one block.
    num_value_slots: slots of the ring buffer of values.
    *array_refs: the fields of `DQArrays`.
    **scratch_refs: the fields of `DQScratch`.
  """
  arrays = DQArrays(*array_refs)
  scratch = DQScratch(**scratch_refs)
  head = lax.axis_index("heads")
  batch = lax.axis_index("batch")
  warpgroup = lax.axis_index("warpgroup")
  heads_per_kv_head = arrays.d_out.shape[2] // arrays.v.shape[2]
  thread_block = _DQThreadBlock(
    mask=mask,
    factor=factor,
    scale=scale,
    arrays=arrays,
    scratch=scratch,
    key_ring=RingBuffer(num_key_slots, scratch.k_ready, scratch.k_free),
    value_ring=RingBuffer(num_value_slots, scratch.v_ready, scratch.v_free),
    head=head,
    batch=batch,
    warpgroup=warpgroup,
    kv_head=lax.div(head, jnp.int32(heads_per_kv_head)),
    first_block=first_block_of_tile(arrays.q.shape[1]),
  )
  pl.when(warpgroup < NUM_CONSUMERS)(thread_block.compute_gradients)
  pl.when(warpgroup == NUM_CONSUMERS)(thread_block.load_all)


@dataclasses.dataclass(frozen=True)
class _DQThreadBlock:
  """The roles of the dQ kernel's warpgroups.

  Attributes:
    first_block: the first block of queries of the tile. Consumer n computes
      block first_block + n.
  """

  mask: Mask
  factor: float
  scale: float
  arrays: DQArrays
  scratch: DQScratch
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

  def compute_gradients(self) -> None:
    """A consumer's role: computes dQ of a block of queries."""
    plgpu.set_max_registers(chip.CONSUMER_REGISTERS, action="increase")
    query_block = self.first_block + self.warpgroup
    ranges = BlockRanges.read(self.arrays.ranges, self.batch, query_block)
    rows = pl.ds(query_block * BLOCK, BLOCK)
    lse = []
    for g in range(self.num_maps):
      lse.append(self._load_vector(g, rows))
    delta = []
    for g in range(self.num_maps):
      delta.append(self._load_vector(delta_index(g, self.num_maps), rows))
    plgpu.barrier_wait(self.scratch.q_ready.at[self.warpgroup])

    # Wider accumulators leave no registers for a pending product.
    D = self.arrays.q.shape[3]
    loop_type = _OverlappedDQLoop if D <= BLOCK else _SequentialDQLoop
    loop = loop_type(
      thread_block=self,
      query_block=query_block,
      rows=rows,
      ranges=ranges,
      lse=lse,
      delta=delta,
    )
    accs = loop.process_all_blocks()

    # The queries are not needed any more, so their memory stages the gradients.
    q_smem = self.scratch.q_smem
    for g, acc in enumerate(accs):
      is_noise_map = g == 1
      if is_noise_map:
        lam = self._load_vector(lambda_index(self.num_maps), rows)
        acc = acc * layouts.broadcast_over_columns(-lam, acc.shape)
      gradient = acc * self.scale
      q_smem[self.warpgroup, g] = gradient.astype(self.arrays.q.dtype)
    plgpu.commit_smem()
    for g in range(self.num_maps):
      plgpu.copy_smem_to_gmem(
        q_smem.at[self.warpgroup, g],
        self.arrays.d_q.at[self.batch, rows, self.head * self.num_maps + g],
      )
    plgpu.wait_smem_to_gmem(0)

  def _load_vector(self, index: int, rows: Any) -> Float[Array, "rows"]:
    """Returns one of `vectors` for the block's queries."""
    vector = self.arrays.vectors.at[self.batch, self.head, index, rows]
    return layouts.load_global(vector, layouts.row())

  def load_all(self) -> None:
    """The producer's role: loads the queries, and streams keys and values.

    It puts blocks of keys and values into ring buffers, from which both
    consumers read.
    """
    plgpu.set_max_registers(chip.PRODUCER_REGISTERS, action="decrease")
    ranges = BlockRanges.read(self.arrays.ranges, self.batch, self.first_block)
    for consumer in range(NUM_CONSUMERS):
      self._load_queries(consumer)

    @pl.loop(ranges.loaded_start, ranges.loaded_stop)
    def load_block(block: jax.Array) -> None:
      keys = pl.ds(block * BLOCK, BLOCK)

      def load_keys(slot: jax.Array, barrier: Ref) -> None:
        for m in range(self.num_key_maps):
          plgpu.copy_gmem_to_smem(
            self.arrays.k.at[
              self.batch, keys, self.kv_head * self.num_key_maps + m
            ],
            self.scratch.k_smem.at[slot * self.num_key_maps + m],
            barrier,
          )

      def load_values(slot: jax.Array, barrier: Ref) -> None:
        plgpu.copy_gmem_to_smem(
          self.arrays.v.at[self.batch, keys, self.kv_head],
          self.scratch.v_smem.at[slot],
          barrier,
        )

      # Consumers need the values first.
      self.value_ring.fill(block, ranges.loaded_start, load_values)
      self.key_ring.fill(block, ranges.loaded_start, load_keys)

    self.value_ring.drain(ranges.loaded_start, ranges.loaded_stop)
    self.key_ring.drain(ranges.loaded_start, ranges.loaded_stop)

  def _load_queries(self, consumer: int) -> None:
    """Loads a consumer's block of queries, and dO of these queries.

    The loads are asynchronous. They arrive at the barrier `q_ready` of the
    consumer.
    """
    rows = pl.ds((self.first_block + consumer) * BLOCK, BLOCK)
    barrier = self.scratch.q_ready.at[consumer]
    for g in range(self.num_maps):
      plgpu.copy_gmem_to_smem(
        self.arrays.q.at[self.batch, rows, self.head * self.num_maps + g],
        self.scratch.q_smem.at[consumer, g],
        barrier,
      )
    plgpu.copy_gmem_to_smem(
      self.arrays.d_out.at[self.batch, rows, self.head],
      self.scratch.d_out_smem.at[consumer],
      barrier,
    )


@dataclasses.dataclass(frozen=True)
class _DQLoop:
  """What the loops over blocks of keys have in common.

  Attributes:
    thread_block: the thread block.
    query_block: the consumer's block of queries.
    rows: the slice of its queries.
    ranges: the ranges of blocks of keys.
    lse: the log-sum-exps [rows] of each map.
    delta: δ [rows] of each map.
  """

  thread_block: _DQThreadBlock
  query_block: jax.Array
  rows: Any
  ranges: BlockRanges
  lse: list[Float[Array, "rows"]]
  delta: list[Float[Array, "rows"]]

  @property
  def partial_blocks(self) -> blocks.PartialBlocks:
    """Returns where the mask may leave partial blocks."""
    return blocks.PartialBlocks.of(self.thread_block.mask)

  @property
  def num_maps(self) -> int:
    """Returns G, the number of maps."""
    return self.thread_block.num_maps

  def skip_block(self, block: jax.Array) -> None:
    """Frees a block that is loaded, but hidden by the mask."""
    self.thread_block.value_ring.skip(block)
    self.thread_block.key_ring.skip(block)

  def zero_gradients(self) -> list[Float[Array, "rows D"]]:
    """Returns the initial accumulators of all maps."""
    D = self.thread_block.arrays.q.shape[3]
    zeros = layouts.full((BLOCK, D), 0, layouts.matrix())
    return [zeros] * self.num_maps

  def queries(self, g: int, block: jax.Array) -> Ref:
    """Returns the queries [BLOCK, D] of map g in shared memory."""
    warpgroup = wgmma.prevent_hoisting(self.thread_block.warpgroup, block)
    g_index = wgmma.prevent_hoisting(jnp.int32(g), block)
    return self.thread_block.scratch.q_smem.at[warpgroup, g_index]

  def keys(self, g: int, block: jax.Array) -> Ref:
    """Returns the keys [BLOCK, D] of map g in shared memory."""
    num_key_maps = self.thread_block.num_key_maps
    slot = self.thread_block.key_ring.slot(block)
    key_map = g % num_key_maps
    return self.thread_block.scratch.k_smem.at[slot * num_key_maps + key_map]

  def d_weights_operands(self, block: jax.Array) -> tuple[Ref, Ref]:
    """Returns dO [BLOCK, V] and Vᵀ [V, BLOCK], whose product is dP.

    Both are in shared memory. The values must be loaded.

    Args:
      block: the index of the block of keys and values.
    """
    # An index that seems to change in the loop is not kept in a register.
    warpgroup = wgmma.prevent_hoisting(self.thread_block.warpgroup, block)
    d_out = self.thread_block.scratch.d_out_smem.at[warpgroup]
    slot = self.thread_block.value_ring.slot(block)
    return d_out, self.thread_block.scratch.v_smem.at[slot].T

  def d_logits(
    self,
    g: int,
    is_full: bool,
    block: jax.Array,
    logits: Float[Array, "rows keys"],
    d_weights: Float[Array, "rows keys"],
  ) -> Float[Array, "rows keys"]:
    """Returns dS = A ∘ (dP − δ), the gradient of map g's logits.

    Args:
      g: the index of the map.
      is_full: whether every query sees every key of the block, so that no mask
        is needed.
      block: the index of the block of keys.
      logits: q·k, without the factor `scale · log₂e`.
      d_weights: dP = dO Vᵀ, the gradient of the weights. It is the same for all
        maps, because −λ is multiplied into the noise map's dQ at the end.

    Returns:
      dS in the dtype of q, in which it is multiplied by the keys.
    """
    thread_block = self.thread_block
    arrays = thread_block.arrays
    if self.partial_blocks.may_exist and not is_full:
      segment_ids = load_segment_ids(
        arrays.q_ids,
        arrays.kv_ids,
        thread_block.batch,
        rows=self.rows,
        column_block=block,
      )
      # The limits are computed again for each block, to save registers.
      query_block = wgmma.prevent_hoisting(self.query_block, block)
      first_key, last_key = blocks.key_limits(
        thread_block.mask, arrays.offset, thread_block.batch, query_block
      )
      logits = mask_logits(
        logits, block * BLOCK, first_key, last_key, segment_ids
      )
    scaled_logits = logits * thread_block.factor
    lse = layouts.broadcast_over_columns(self.lse[g], logits.shape)
    weights = jnp.exp2(scaled_logits - lse)
    delta = layouts.broadcast_over_columns(self.delta[g], logits.shape)
    d_logits = weights * (d_weights - delta)
    return d_logits.astype(arrays.q.dtype)


class _SequentialDQLoop(_DQLoop):
  """Computes one product after the other.

  The products of the other consumer fill the pauses of the tensor cores.
  """

  def process_all_blocks(self) -> list[Float[Array, "rows D"]]:
    """Returns dS K of each map, where dS is the gradient of the logits."""
    return self.ranges.fold(
      partial_blocks=self.partial_blocks,
      process_first_block=self.process_first_block,
      process_block=self.process_block,
      finish=self.finish_last_block,
      skip_block=self.skip_block,
      initial_state=self.zero_gradients(),
    )

  def process_first_block(
    self, block: jax.Array, accs: list[Float[Array, "rows D"]]
  ) -> list[Float[Array, "rows D"]]:
    """Processes the first block."""
    return self.process_block(is_full=False, block=block, accs=accs)

  def process_block(
    self, is_full: bool, block: jax.Array, accs: list[Float[Array, "rows D"]]
  ) -> list[Float[Array, "rows D"]]:
    """Adds dS K of a block of keys to the accumulator of each map.

    dP = dO Vᵀ is the same for all maps. Each map's dS = A ∘ (dP − δ) needs its
    own logits.

    Args:
      is_full: whether every query sees every key, so that no mask is needed.
      block: the index of the block of keys.
      accs: the accumulators.
    """
    thread_block = self.thread_block
    thread_block.value_ring.wait(block)
    d_weights = wgmma.matmul(*self.d_weights_operands(block))
    thread_block.value_ring.release(block)
    thread_block.key_ring.wait(block)
    accs = list(accs)
    for g in range(self.num_maps):
      logits = wgmma.matmul(self.queries(g, block), self.keys(g, block).T)
      d_logits = self.d_logits(g, is_full, block, logits, d_weights)
      accs[g] = wgmma.multiply_add(accs[g], d_logits, self.keys(g, block))
    thread_block.key_ring.release(block)
    return accs

  def finish_last_block(
    self, accs: list[Float[Array, "rows D"]]
  ) -> list[Float[Array, "rows D"]]:
    """Returns the accumulators. Nothing is pending."""
    return accs


class _DQState(NamedTuple):
  """The state of `_OverlappedDQLoop`."""

  accs: list[Float[Array, "rows D"]]  # dS K of each map
  # dS of the previous turn, which is not yet multiplied by keys. None before
  # the first turn.
  d_logits: Float[Array, "rows keys"] | None


class _OverlappedDQLoop(_DQLoop):
  """Computes dS of a map while the tensor cores multiply the previous dS.

  The maps take turns, as in `_ForwardPass`.
  """

  def process_all_blocks(self) -> list[Float[Array, "rows D"]]:
    """Returns dS K of each map, where dS is the gradient of the logits.

    `fold` loops over the visible blocks of keys. The dS of one turn is
    multiplied by its keys in the next turn. So there is a first block without
    such a product, and a last product at the end.
    """
    accs = self.zero_gradients()
    no_d_logits = layouts.full((BLOCK, BLOCK), 0, layouts.matrix())
    dtype = self.thread_block.arrays.q.dtype
    initial_state = _DQState(accs, no_d_logits.astype(dtype))
    state = self.ranges.fold(
      partial_blocks=self.partial_blocks,
      process_first_block=self.process_first_block,
      process_block=self.process_block,
      finish=self.finish_last_block,
      skip_block=self.skip_block,
      initial_state=initial_state,
    )
    return state.accs

  def process_first_block(self, block: jax.Array, state: _DQState) -> _DQState:
    """Processes the first block, before which nothing is pending."""
    self.thread_block.key_ring.wait(block)
    initial_state = state._replace(d_logits=None)
    return self.process_block(is_full=False, block=block, state=initial_state)

  def process_block(
    self, is_full: bool, block: jax.Array, state: _DQState
  ) -> _DQState:
    """Processes a block whose keys are loaded. Full blocks need no mask."""
    d_weights: Any = None  # dP, computed in the first turn
    for g in range(self.num_maps):
      state, d_weights = self._take_turn(g, is_full, block, state, d_weights)
    return state

  def finish_last_block(self, state: _DQState) -> _DQState:
    """Adds the last product dS K, which is still pending.

    The dS of each turn is multiplied by its keys in the next turn. After the
    last turn, the product of the last map (accs[-1]) is left.
    """
    assert state.d_logits is not None  # The first block computed dS.
    last_block = self.ranges.visible_stop - 1
    keys = self.keys(self.num_maps - 1, last_block)
    accs = list(state.accs)
    accs[-1] = wgmma.multiply_add(accs[-1], state.d_logits, keys)
    self.thread_block.key_ring.release(last_block)
    return state._replace(accs=accs)

  def _take_turn(
    self,
    g: int,
    is_full: bool,
    block: jax.Array,
    state: _DQState,
    d_weights: Any,
  ) -> tuple[_DQState, Any]:
    """Computes dS of map g, and adds the previous dS to its accumulator.

    Args:
      g: the map.
      is_full: whether every query sees every key of the block.
      block: the block of keys.
      state: the state after the previous turn.
      d_weights: dP. None in the first turn, which computes it.

    Returns:
      The state, and dP.
    """
    thread_block = self.thread_block
    is_first_turn = g == 0
    accs = list(state.accs)

    # The previous turn was the previous map's. Before map 0 it was the last
    # map's, at the previous block.
    pending = None
    if state.d_logits is not None:
      previous_block = block - 1 if is_first_turn else block
      previous_keys = self.keys((g - 1) % self.num_maps, previous_block)
      pending = wgmma.PendingProduct(accs[g - 1], state.d_logits, previous_keys)

    # Compute the map's logits and dS, and meanwhile the pending product.
    operands = [(self.queries(g, block), self.keys(g, block).T)]
    epilogue: Callable[..., Any]
    outputs_like: tuple[Any, ...]
    if is_first_turn:
      # Both maps use dP, which the first turn computes.
      thread_block.value_ring.wait(block)
      operands.append(self.d_weights_operands(block))
      epilogue = functools.partial(self._first_epilogue, is_full, block)
      zeros = layouts.full((BLOCK, BLOCK), 0, layouts.matrix())
      outputs_like = (state.d_logits, zeros)
    else:
      epilogue = functools.partial(self._epilogue, g, is_full, block, d_weights)
      outputs_like = (state.d_logits,)
    wait_for_next = None
    if g == self.num_maps - 1:
      wait_for_next = functools.partial(self._wait_for_next_keys, block)
    previous_acc, outputs = wgmma.matmul_with_epilogue(
      operands,
      epilogue,
      pending=pending,
      outputs_like=outputs_like,
      wait_for_next=wait_for_next,
    )

    if is_first_turn:
      d_logits, d_weights = outputs
    else:
      [d_logits] = outputs
    if pending is not None:
      accs[g - 1] = previous_acc
      if is_first_turn:
        # All maps have used the keys of the previous block.
        thread_block.key_ring.release(block - 1)
    return _DQState(accs, d_logits), d_weights

  def _first_epilogue(
    self,
    is_full: bool,
    block: jax.Array,
    logits: Float[Array, "rows keys"],
    d_weights: Float[Array, "rows keys"],
  ) -> tuple[Float[Array, "rows keys"], Float[Array, "rows keys"]]:
    """Returns dS of map 0, and dP for the other map."""
    self.thread_block.value_ring.release(block)
    return self.d_logits(0, is_full, block, logits, d_weights), d_weights

  def _epilogue(
    self,
    g: int,
    is_full: bool,
    block: jax.Array,
    d_weights: Float[Array, "rows keys"],
    logits: Float[Array, "rows keys"],
  ) -> tuple[Float[Array, "rows keys"]]:
    """Returns dS of map g."""
    return (self.d_logits(g, is_full, block, logits, d_weights),)

  def _wait_for_next_keys(self, block: jax.Array) -> None:
    """Waits for the keys of the next block, if there is one."""

    @pl.when(block + 1 < self.ranges.visible_stop)
    def wait() -> None:
      self.thread_block.key_ring.wait(block + 1)
