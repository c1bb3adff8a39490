"""The Hopper kernel of attention that computes dK and dV.

A thread block has three warpgroups. The producer copies blocks of queries into
ring buffers in shared memory. The other two, the consumers, share a block of
keys: one computes dV and the other dK. `_DKVThreadBlock` has the roles of the
warpgroups, and `_DVLoop` and `_DKLoop` are the consumers' loops.

Letters: T and S are the padded numbers of queries and keys, and R = H / K is
the number of heads that share a key head. In loops, `g` is the index of a map,
and `block` is the index of a block of queries.

The order of statements matters to ptxas. `python -m benchmarks.gpu.static`
shows what it makes of the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from diffjax.ops.diff_attention.gpu import blocks, chip, layouts, wgmma
from diffjax.ops.diff_attention.gpu.blocks import BlockRanges
from diffjax.ops.diff_attention.gpu.chip import BLOCK, Ref, plgpu
from diffjax.ops.diff_attention.gpu.kernel_d_q import delta_index, lambda_index
from diffjax.ops.diff_attention.gpu.logits import load_segment_ids, mask_logits
from diffjax.ops.diff_attention.gpu.shared_memory import RingBuffer
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import LOG2E


class DKVArrays(NamedTuple):
  """The inputs and outputs of the dK and dV kernel, in global memory."""

  q: Ref  # [B, T, H·G, D]
  k: Ref  # [B, S, K·M, D]
  v: Ref  # [B, S, K, V]
  d_out: Ref  # [B, T, H, V]
  vectors: Ref  # float32[B, H, vectors, T], as in DQArrays
  q_ids: Ref | None  # int32[B, T]
  kv_ids: Ref | None  # int32[B, S]
  offset: Ref | None  # int32[B], if it is not known to the mask
  ranges: Ref  # int32[B or 1, S / BLOCK, 6], see `blocks.block_ranges`
  d_k: Ref  # [B, S, K·M, D]
  d_v: Ref  # [B, S, K, V]


class DKVScratch(NamedTuple):
  """The shared memory and barriers of the dK and dV kernel."""

  q_smem: Ref  # [slots · G, BLOCK, D]
  d_out_smem: Ref  # [slots, BLOCK, V]
  vectors_smem: Ref  # float32[slots, vectors, BLOCK]
  k_smem: Ref  # [M, BLOCK, D]
  v_smem: Ref  # [BLOCK, V]
  weights_smem: Ref  # float16[G, BLOCK, BLOCK], from one consumer to the other
  kv_ready: Ref  # barrier: keys and values are loaded
  finished: Ref  # barrier: both consumers have finished their loops
  weights_ready: Ref  # barriers [G]
  weights_free: Ref  # barriers [G]
  q_ready: Ref  # barriers [slots], as the following ones
  q_free: Ref
  d_out_ready: Ref
  d_out_free: Ref


# The roles of the warpgroups of the dK and dV kernel.
_DV_WARPGROUP = 0
_DK_WARPGROUP = 1
_PRODUCER_WARPGROUP = 2


def d_kv(
  mask: Mask,
  factor: float,
  num_slots: int,
  *array_refs: Ref,
  **scratch_refs: Ref,
) -> None:
  """The dK and dV kernel: computes the gradients of a block of keys.

  A block of keys and values stays in shared memory while blocks of queries are
  streamed past it, from all heads that share the key head. Maps are transposed,
  keys × queries. Three warpgroups run this function at the same time:

  - one consumer computes the weights and dV = (A₁ − λA₂)ᵀ dO, and passes the
    weights to the other one through shared memory,
  - the other consumer computes dP = V dOᵀ and dK = scale · dSᵀ Q,
  - the producer loads.

  Args:
    mask: the mask.
    factor: the factor on logits, see `logits.logit_factor`.
    num_slots: slots of the ring buffers, through which the producer passes
      queries and dO. A slot holds one block.
    *array_refs: the fields of `DKVArrays`.
    **scratch_refs: the fields of `DKVScratch`.
  """
  arrays = DKVArrays(*array_refs)
  scratch = DKVScratch(**scratch_refs)
  kv_head = lax.axis_index("heads")
  batch = lax.axis_index("batch")
  warpgroup = lax.axis_index("warpgroup")
  key_block = lax.axis_index("tiles")
  thread_block = _DKVThreadBlock(
    mask=mask,
    factor=factor,
    arrays=arrays,
    scratch=scratch,
    query_ring=RingBuffer(num_slots, scratch.q_ready, scratch.q_free),
    d_out_ring=RingBuffer(num_slots, scratch.d_out_ready, scratch.d_out_free),
    kv_head=kv_head,
    batch=batch,
    key_block=key_block,
    keys=pl.ds(key_block * BLOCK, BLOCK),
  )
  pl.when(warpgroup == _DV_WARPGROUP)(thread_block.compute_d_v)
  pl.when(warpgroup == _DK_WARPGROUP)(thread_block.compute_d_k)
  pl.when(warpgroup == _PRODUCER_WARPGROUP)(thread_block.load_all)


@dataclasses.dataclass(frozen=True)
class _DKVThreadBlock:
  """The roles of the dK and dV kernel's warpgroups.

  Attributes:
    query_ring: the ring buffer of queries and of their vectors.
    d_out_ring: the ring buffer of dO.
    keys: the slice of the block's keys.
  """

  mask: Mask
  factor: float
  arrays: DKVArrays
  scratch: DKVScratch
  query_ring: RingBuffer
  d_out_ring: RingBuffer
  kv_head: jax.Array
  batch: jax.Array
  key_block: jax.Array
  keys: Any

  @property
  def num_maps(self) -> int:
    """Returns G, the number of maps."""
    return self.arrays.q.shape[2] // self.arrays.d_out.shape[2]

  @property
  def num_key_maps(self) -> int:
    """Returns M, the number of key maps."""
    return self.scratch.k_smem.shape[0]

  @property
  def heads_per_kv_head(self) -> int:
    """Returns R, the number of heads that share a key head."""
    return self.arrays.d_out.shape[2] // self.arrays.v.shape[2]

  def compute_d_v(self) -> None:
    """The role of the first consumer: computes the weights and dV.

    It loops over the query heads that share the key head. All of them add to
    one accumulator of dV.
    """
    plgpu.set_max_registers(chip.CONSUMER_REGISTERS, action="increase")
    ranges = BlockRanges.read(self.arrays.ranges, self.batch, self.key_block)
    num_blocks = ranges.loaded_stop - ranges.loaded_start
    query_limits = blocks.query_limits(self.mask, self.key_block)
    plgpu.barrier_wait(self.scratch.kv_ready)

    def add_head(
      head_in_group: jax.Array, acc: Float[Array, "keys V"]
    ) -> Float[Array, "keys V"]:
      loop = _DVLoop(
        thread_block=self,
        ranges=ranges,
        num_blocks=num_blocks,
        head_in_group=head_in_group,
        query_limits=query_limits,
      )
      return loop.add_head(acc)

    V = self.scratch.v_smem.shape[1]
    acc = layouts.full((BLOCK, V), 0, layouts.matrix())
    acc = lax.fori_loop(0, self.heads_per_kv_head, add_head, acc)

    # The other consumer has signalled that it has read the last weights. Every
    # phase of a barrier must be waited for.
    for g in range(self.num_maps):
      plgpu.barrier_wait(self.scratch.weights_free.at[g])
    self._wait_for_other_consumer()
    # The values are not needed any more, so their memory stages the gradient.
    self.scratch.v_smem[...] = acc.astype(self.arrays.q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
      self.scratch.v_smem,
      self.arrays.d_v.at[self.batch, self.keys, self.kv_head],
    )
    plgpu.wait_smem_to_gmem(0)

  def compute_d_k(self) -> None:
    """The role of the second consumer: computes dP and dK.

    It gets the weights from the first consumer. All query heads that share the
    key head add to the same accumulators, one for each key map.
    """
    plgpu.set_max_registers(chip.CONSUMER_REGISTERS, action="increase")
    ranges = BlockRanges.read(self.arrays.ranges, self.batch, self.key_block)
    num_blocks = ranges.loaded_stop - ranges.loaded_start
    # The buffers of the weights are free at first.
    for g in range(self.num_maps):
      plgpu.barrier_arrive(self.scratch.weights_free.at[g])
    plgpu.barrier_wait(self.scratch.kv_ready)

    def add_head(
      head_in_group: jax.Array, accs: list[Float[Array, "keys D"]]
    ) -> list[Float[Array, "keys D"]]:
      loop = _DKLoop(
        thread_block=self,
        ranges=ranges,
        num_blocks=num_blocks,
        head_in_group=head_in_group,
      )
      return loop.add_head(accs)

    D = self.scratch.k_smem.shape[2]
    zeros = layouts.full((BLOCK, D), 0, layouts.matrix())
    accs = [zeros] * self.num_key_maps
    accs = lax.fori_loop(0, self.heads_per_kv_head, add_head, accs)

    # The keys are not needed any more, so their memory stages the gradients.
    self._wait_for_other_consumer()
    # factor = scale · log₂e. If it was multiplied into the queries, so that
    # self.factor is 1, this removes log₂e from them.
    scale = self.factor / LOG2E
    for m, acc in enumerate(accs):
      gradient = acc * scale
      self.scratch.k_smem[m] = gradient.astype(self.arrays.q.dtype)
    plgpu.commit_smem()
    for m in range(self.num_key_maps):
      plgpu.copy_smem_to_gmem(
        self.scratch.k_smem.at[m], self._keys_of_map(self.arrays.d_k, m)
      )
    plgpu.wait_smem_to_gmem(0)

  def _wait_for_other_consumer(self) -> None:
    """Waits until neither consumer reads the keys and values any more.

    Then their memory can stage the gradients.
    """
    plgpu.barrier_arrive(self.scratch.finished)
    plgpu.barrier_wait(self.scratch.finished)

  def _keys_of_map(self, array: Ref, m: int) -> Ref:
    """Returns the block of key map m in `k` or `d_k`."""
    key_head = self.kv_head * self.num_key_maps + m
    return array.at[self.batch, self.keys, key_head]

  def load_all(self) -> None:
    """The producer's role: loads the keys and values, and streams queries.

    It puts the queries and dO of all heads that share the key head into ring
    buffers, head after head.
    """
    plgpu.set_max_registers(chip.PRODUCER_REGISTERS, action="decrease")
    ranges = BlockRanges.read(self.arrays.ranges, self.batch, self.key_block)
    kv_ready = self.scratch.kv_ready
    for m in range(self.num_key_maps):
      plgpu.copy_gmem_to_smem(
        self._keys_of_map(self.arrays.k, m), self.scratch.k_smem.at[m], kv_ready
      )
    values = self.arrays.v.at[self.batch, self.keys, self.kv_head]
    plgpu.copy_gmem_to_smem(values, self.scratch.v_smem, kv_ready)

    @pl.loop(0, self.heads_per_kv_head)
    def load_head(head_in_group: jax.Array) -> None:
      head = self.kv_head * self.heads_per_kv_head + head_in_group

      @pl.loop(ranges.loaded_start, ranges.loaded_stop)
      def load_block(block: jax.Array) -> None:
        num_blocks = ranges.loaded_stop - ranges.loaded_start
        # Ring buffers count their steps through all heads.
        step = head_in_group * num_blocks + block
        self._load_block(step, ranges.loaded_start, head, block)

    # Wait until the consumers have released the last blocks.
    for ring in (self.query_ring, self.d_out_ring):
      num_blocks = ranges.loaded_stop - ranges.loaded_start
      num_steps = self.heads_per_kv_head * num_blocks
      ring.drain(ranges.loaded_start, ranges.loaded_start + num_steps)

  def _load_block(
    self,
    step: jax.Array,
    first_step: jax.Array,
    head: jax.Array,
    block: jax.Array,
  ) -> None:
    """Loads a head's block of queries, their vectors, and their dO.

    Args:
      step: the step of the ring buffers, counted through all heads.
      first_step: the first step of the kernel, before which no slot was used.
      head: the index of the query head.
      block: the index of the block of queries.
    """
    rows = pl.ds(block * BLOCK, BLOCK)

    def load_queries(slot: jax.Array, barrier: Ref) -> None:
      for g in range(self.num_maps):
        plgpu.copy_gmem_to_smem(
          self.arrays.q.at[self.batch, rows, head * self.num_maps + g],
          self.scratch.q_smem.at[slot * self.num_maps + g],
          barrier,
        )
      plgpu.copy_gmem_to_smem(
        self.arrays.vectors.at[self.batch, head, :, rows],
        self.scratch.vectors_smem.at[slot],
        barrier,
      )

    def load_d_out(slot: jax.Array, barrier: Ref) -> None:
      plgpu.copy_gmem_to_smem(
        self.arrays.d_out.at[self.batch, rows, head],
        self.scratch.d_out_smem.at[slot],
        barrier,
      )

    self.query_ring.fill(step, first_step, load_queries)
    self.d_out_ring.fill(step, first_step, load_d_out)


@dataclasses.dataclass(frozen=True)
class _DKVLoop:
  """What the consumers' loops over a head's blocks of queries share.

  Attributes:
    thread_block: the thread block.
    ranges: the ranges of blocks of queries.
    num_blocks: how many of them are loaded for each head.
    head_in_group: the index of the head among the R heads of the key head.
  """

  thread_block: _DKVThreadBlock
  ranges: BlockRanges
  num_blocks: jax.Array
  head_in_group: jax.Array

  def ring_step(self, block: jax.Array) -> jax.Array:
    """Returns the step of the ring buffers for a block."""
    return self.head_in_group * self.num_blocks + block

  def skip_block(self, block: jax.Array) -> None:
    """Frees a block that is loaded, but hidden by the mask."""
    self.thread_block.query_ring.skip(self.ring_step(block))
    self.thread_block.d_out_ring.skip(self.ring_step(block))

  def queries(self, g: int, step: jax.Array) -> Ref:
    """Returns the queries [BLOCK, D] of map g in shared memory."""
    slot = self.thread_block.query_ring.slot(step)
    index = slot * self.thread_block.num_maps + g
    return self.thread_block.scratch.q_smem.at[index]

  def d_out(self, step: jax.Array) -> Ref:
    """Returns dO [BLOCK, V] in shared memory."""
    slot = self.thread_block.d_out_ring.slot(step)
    return self.thread_block.scratch.d_out_smem.at[slot]

  def load_vector(
    self, index: int, step: jax.Array
  ) -> Float[Array, "keys queries"]:
    """Returns a number of each query, broadcast over the keys.

    Args:
      index: which number: the log-sum-exp of a map, its δ, or λ, in the order
        of the array `vectors`.
      step: the step of the ring buffer of queries.
    """
    # The slot is read by plain loads, and written again by TMA. The barriers of
    # the ring order both. A fence would cost a barrier in each step.
    slot = self.thread_block.query_ring.slot(step)
    vector = plgpu.load(
      self.thread_block.scratch.vectors_smem.at[slot, index],
      layout=layouts.column(),
    )
    return layouts.broadcast_over_rows(vector, (BLOCK, BLOCK))

  def no_weights(self) -> Float[Array, "keys queries"]:
    """Returns zeros in the dtype of q, for the initial state."""
    zeros = layouts.full((BLOCK, BLOCK), 0, layouts.matrix())
    return zeros.astype(self.thread_block.arrays.q.dtype)


class _DVState(NamedTuple):
  """The state of `_DVLoop`."""

  acc: Float[Array, "keys V"]  # dV
  # A₁ − λA₂ of the previous block, which is not yet multiplied by dO. None
  # before the first block.
  weights: Float[Array, "keys queries"] | None


@dataclasses.dataclass(frozen=True)
class _DVLoop(_DKVLoop):
  """Adds a head to dV, and passes its weights to the other consumer.

  Attributes:
    query_limits: the first and the last query that see each key, or None.
  """

  query_limits: tuple[Any, Any]

  def add_head(self, acc: Float[Array, "keys V"]) -> Float[Array, "keys V"]:
    """Returns acc plus one query head's part of dV.

    `fold` loops over the head's blocks of queries that see the keys. The
    weights of one block are multiplied by its dO while the next block is
    processed. So there is a first block without such weights, and a last
    product at the end.
    """
    partial_blocks = blocks.PartialBlocks.of(
      self.thread_block.mask, keys_are_stationary=True
    )
    state = self.ranges.fold(
      partial_blocks=partial_blocks,
      process_first_block=self.process_first_block,
      process_block=self.process_block,
      finish=self.finish_last_block,
      skip_block=self.skip_block,
      initial_state=_DVState(acc, self.no_weights()),
    )
    return state.acc

  def process_first_block(self, block: jax.Array, state: _DVState) -> _DVState:
    """Processes the first block, before which no weights are pending."""
    self.thread_block.query_ring.wait(self.ring_step(block))
    initial_state = state._replace(weights=None)
    return self.process_block(is_full=False, block=block, state=initial_state)

  def process_block(
    self, is_full: bool, block: jax.Array, state: _DVState
  ) -> _DVState:
    """Computes the weights of a block of queries, and passes them on.

    The weights A₁ of the signal map and −λA₂ of the noise map go to the other
    consumer one by one. Their sum is returned, for dV = (A₁ − λA₂)ᵀ dO. It is
    multiplied by dO while the next block is processed.

    Args:
      is_full: whether every query sees every key, so that no mask is needed.
      block: the index of the block of queries, which are loaded.
      state: dV of earlier blocks, and the weights of the previous block.

    Returns:
      dV with the previous block, and the weights of this block.
    """
    thread_block = self.thread_block
    num_maps = thread_block.num_maps
    step = self.ring_step(block)
    acc, signal_weights = self._compute_signal_weights(is_full, block, state)
    if num_maps == 1:  # The queries are not read any more.
      thread_block.query_ring.release(step)
    rounded_weights = signal_weights.astype(jnp.float16)
    self._pass_weights(0, rounded_weights)
    weights = signal_weights
    if num_maps == 2:
      noise_weights = self._compute_noise_weights(is_full, block)
      thread_block.query_ring.release(step)
      self._pass_weights(1, noise_weights.astype(jnp.float16))
      # The signal map's weights waited rounded, in half as many registers.
      weights = rounded_weights.astype(jnp.float32) + noise_weights

    @pl.when(block + 1 < self.ranges.visible_stop)
    def wait_for_next_queries() -> None:
      thread_block.query_ring.wait(step + 1)

    return _DVState(acc, weights.astype(thread_block.arrays.q.dtype))

  def finish_last_block(self, state: _DVState) -> _DVState:
    """Adds the product of the last block's weights and dO, still pending.

    Each block's weights are multiplied by its dO while the next block is
    processed. After the last block, its product is left.
    """
    assert state.weights is not None  # The first block computed weights.
    # `visible_stop` is the block after the last one.
    last_step = self.ring_step(self.ranges.visible_stop) - 1
    acc = wgmma.multiply_add(state.acc, state.weights, self.d_out(last_step))
    self.thread_block.d_out_ring.release(last_step)
    return state._replace(acc=acc)

  def _compute_signal_weights(
    self, is_full: bool, block: jax.Array, state: _DVState
  ) -> tuple[Float[Array, "keys V"], Float[Array, "keys queries"]]:
    """Computes A₁ of a block, and meanwhile the previous block's part of dV.

    A₁ are the weights of the signal map, the first of up to two maps. The
    tensor cores start two products: KQᵀ of this block, and the product of the
    previous block's weights with its dO. The softmax of this block is computed
    while the second product continues.

    Args:
      is_full: whether the block needs no mask.
      block: the index of the block of queries.
      state: dV, and the weights of the previous block.

    Returns:
      The new accumulator of dV, and A₁.
    """
    d_out_ring = self.thread_block.d_out_ring
    step = self.ring_step(block)
    # The vector is read before the products start. Reading shared memory would
    # wait for the pending product.
    lse = self.load_vector(0, step)
    operands = self._logits_operands(0, block)
    epilogue = functools.partial(self._signal_weights, is_full, block, lse)
    if state.weights is None:  # There is no previous block.
      _, [weights] = wgmma.matmul_with_epilogue([operands], epilogue)
      d_out_ring.wait(step)
      return state.acc, weights

    pending = wgmma.PendingProduct(
      acc=state.acc, a=state.weights, b=self.d_out(step - 1)
    )
    zeros = layouts.full((BLOCK, BLOCK), 0, layouts.matrix())
    acc, [weights] = wgmma.matmul_with_epilogue(
      [operands],
      epilogue,
      pending=pending,
      outputs_like=(zeros,),
      wait_for_next=functools.partial(d_out_ring.wait, step),
    )
    d_out_ring.release(step - 1)
    return acc, weights

  def _compute_noise_weights(
    self, is_full: bool, block: jax.Array
  ) -> Float[Array, "keys queries"]:
    """Computes −λA₂."""
    _, [weights] = wgmma.matmul_with_epilogue(
      [self._logits_operands(1, block)],
      functools.partial(self._noise_weights, is_full, block),
    )
    return weights

  def _logits_operands(self, g: int, block: jax.Array) -> tuple[Ref, Ref]:
    """Returns K [BLOCK, D] and Qᵀ [D, BLOCK] of map g, in shared memory.

    Their product is a block of logits, keys × queries.
    """
    # With one key map, both maps attend to the same keys.
    key_map = g % self.thread_block.num_key_maps
    # An index that seems to change in the loop is not kept in a register.
    key_map_index = wgmma.prevent_hoisting(jnp.int32(key_map), block)
    keys = self.thread_block.scratch.k_smem.at[key_map_index]
    return keys, self.queries(g, self.ring_step(block)).T

  def _signal_weights(
    self,
    is_full: bool,
    block: jax.Array,
    lse: Float[Array, "keys queries"],
    logits: Float[Array, "keys queries"],
  ) -> tuple[Float[Array, "keys queries"]]:
    """Returns A₁, the weights of the signal map, from its logits.

    It is the epilogue of a matrix product, so it returns a tuple.
    """
    logits = self._mask_logits(is_full, block, logits)
    return (jnp.exp2(logits * self.thread_block.factor - lse),)

  def _noise_weights(
    self,
    is_full: bool,
    block: jax.Array,
    logits: Float[Array, "keys queries"],
  ) -> tuple[Float[Array, "keys queries"]]:
    """Returns −λA₂, the weights of the noise map, from its logits.

    It is the epilogue of a matrix product, so it returns a tuple.

    Args:
      is_full: whether every query sees every key, so that no mask is needed.
      block: the index of the block of queries.
      logits: k·q of the noise map, without the factor `scale · log₂e`.
    """
    step = self.ring_step(block)
    logits = self._mask_logits(is_full, block, logits)
    scaled_logits = logits * self.thread_block.factor
    lse = self.load_vector(1, step)
    noise_weights = jnp.exp2(scaled_logits - lse)
    lam = self.load_vector(lambda_index(self.thread_block.num_maps), step)
    return (noise_weights * -lam,)

  def _mask_logits(
    self,
    is_full: bool,
    block: jax.Array,
    logits: Float[Array, "keys queries"],
  ) -> Float[Array, "keys queries"]:
    """Returns the logits, masked where a query does not see a key.

    Args:
      is_full: whether every query sees every key, so that no mask is needed.
      block: the index of the block of queries.
      logits: a block of logits. Rows are keys, and columns are queries.
    """
    thread_block = self.thread_block
    arrays = thread_block.arrays
    partial_blocks = blocks.PartialBlocks.of(
      thread_block.mask, keys_are_stationary=True
    )
    if is_full or not partial_blocks.may_exist:
      return logits
    # The limits of each key are positions of queries. Column 0 is the first
    # query of the block.
    first_query_index = block * BLOCK
    first_position = first_query_index + blocks.first_position(
      thread_block.mask, arrays.offset, thread_block.batch
    )
    segment_ids = load_segment_ids(
      arrays.kv_ids,
      arrays.q_ids,
      thread_block.batch,
      rows=thread_block.keys,
      column_block=block,
    )
    first_query, last_query = self.query_limits
    return mask_logits(
      logits, first_position, first_query, last_query, segment_ids
    )

  def _pass_weights(
    self, g: int, weights: Float[Array, "keys queries"]
  ) -> None:
    """Passes the weights of map g to the other consumer."""
    scratch = self.thread_block.scratch
    plgpu.barrier_wait(scratch.weights_free.at[g])
    scratch.weights_smem[g] = weights
    plgpu.barrier_arrive(scratch.weights_ready.at[g])


class _DKState(NamedTuple):
  """The state of `_DKLoop`."""

  accs: list[Float[Array, "keys D"]]  # dSᵀ Q of each key map
  # dS of the last map at the previous block, which is not yet multiplied by
  # queries. None before the first block.
  d_logits: Float[Array, "keys queries"] | None


class _DKLoop(_DKVLoop):
  """Adds a head to dK, with the weights of the other consumer."""

  def add_head(
    self, accs: list[Float[Array, "keys D"]]
  ) -> list[Float[Array, "keys D"]]:
    """Returns accs plus one query head's part of dSᵀ Q, for each key map.

    dS is the gradient of the logits. `fold` loops over the head's blocks of
    queries. The last map's dS of one block is multiplied by its queries while
    the next block is processed. So there is a first block without such a
    product, and a last one at the end.
    """
    # The weights that arrive are already masked.
    no_partial_blocks = blocks.PartialBlocks(
      before_full=False, after_full=False
    )
    state = self.ranges.fold(
      partial_blocks=no_partial_blocks,
      process_first_block=self.process_first_block,
      process_block=self.process_block,
      finish=self.finish_last_block,
      skip_block=self.skip_block,
      initial_state=_DKState(accs, self.no_weights()),
    )
    return state.accs

  def process_first_block(self, block: jax.Array, state: _DKState) -> _DKState:
    """Processes the first block, before which nothing is pending."""
    initial_state = state._replace(d_logits=None)
    return self.process_block(is_full=False, block=block, state=initial_state)

  def process_block(
    self, is_full: bool, block: jax.Array, state: _DKState
  ) -> _DKState:
    """Adds dSᵀ Q of a block of queries to the accumulators of the key maps.

    dS = A ∘ (dP − δ) of each map. The other consumer sends A. It is A₁ for map
    0 and −λA₂ for map 1, so dS needs no other factor.

    Args:
      is_full: whether every query sees every key. It does not matter, because
        the weights that arrive are already masked.
      block: the index of the block of queries.
      state: the accumulators, and the last map's dS of the previous block.
    """
    del is_full
    thread_block = self.thread_block
    query_ring = thread_block.query_ring
    d_out_ring = thread_block.d_out_ring
    num_maps = thread_block.num_maps
    accs = list(state.accs)
    step = self.ring_step(block)

    # dPᵀ = V dOᵀ. Meanwhile the last dS of the previous block is added.
    d_out_ring.wait(step)
    # The slice is all of the values. An index that seems to change in the loop
    # is not kept in a register.
    first_row = wgmma.prevent_hoisting(jnp.int32(0), block)
    values = thread_block.scratch.v_smem.at[pl.ds(first_row * BLOCK, BLOCK)]
    operands = (values, self.d_out(step).T)
    pending = None
    if state.d_logits is not None:
      previous_queries = self.queries(num_maps - 1, step - 1)
      pending = wgmma.PendingProduct(accs[-1], state.d_logits, previous_queries)
    zeros = layouts.full((BLOCK, BLOCK), 0, layouts.matrix())
    previous_acc, [d_weights] = wgmma.matmul_with_epilogue(
      [operands], _as_tuple, pending=pending, outputs_like=(zeros,)
    )
    if pending is not None:
      accs[-1] = previous_acc
      query_ring.release(step - 1)
    d_out_ring.release(step)

    # The product of the last map's dS is left to the next step.
    query_ring.wait(step)
    for g in range(num_maps):
      d_logits = self._receive_d_logits(g, step, d_weights)
      if g < num_maps - 1:
        m = g % thread_block.num_key_maps
        accs[m] = wgmma.multiply_add(accs[m], d_logits, self.queries(g, step))
    return _DKState(accs, d_logits)

  def finish_last_block(self, state: _DKState) -> _DKState:
    """Adds the product of the last dS and its queries, which is still pending.

    The last map's dS of each block is multiplied by its queries while the next
    block is processed. After the last block, its product is left.
    """
    assert state.d_logits is not None  # The first block computed dS.
    # `visible_stop` is the block after the last one.
    last_step = self.ring_step(self.ranges.visible_stop) - 1
    queries = self.queries(self.thread_block.num_maps - 1, last_step)
    accs = list(state.accs)
    accs[-1] = wgmma.multiply_add(accs[-1], state.d_logits, queries)
    self.thread_block.query_ring.release(last_step)
    return state._replace(accs=accs)

  def _receive_d_logits(
    self, g: int, step: jax.Array, d_weights: Float[Array, "keys queries"]
  ) -> Float[Array, "keys queries"]:
    """Returns dS = A ∘ (dP − δ) of map g.

    A comes from the other consumer, through shared memory. It contains the
    factor −λ of the noise map.

    Args:
      g: the index of the map.
      step: the step of the ring buffers.
      d_weights: dP = V dOᵀ, which is the same for all maps.
    """
    scratch = self.thread_block.scratch
    plgpu.barrier_wait(scratch.weights_ready.at[g])
    weights = plgpu.load(scratch.weights_smem.at[g], layout=layouts.matrix())
    weights = weights.astype(jnp.float32)  # sent as float16
    plgpu.barrier_arrive(scratch.weights_free.at[g])
    delta = self.load_vector(delta_index(g, self.thread_block.num_maps), step)
    d_logits = weights * (d_weights - delta)
    return d_logits.astype(self.thread_block.arrays.q.dtype)


def _as_tuple(x: jax.Array) -> tuple[jax.Array]:
  """The epilogue of a product that needs none."""
  return (x,)
