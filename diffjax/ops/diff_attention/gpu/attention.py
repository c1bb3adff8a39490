"""Differential attention on Hopper GPUs as fused Pallas kernels (Mosaic GPU).

A thread block has three warpgroups. One loads blocks into rings of slots in
shared memory, and two compute. Blocks outside the range that a mask shows are
not loaded, and only partial blocks are masked (gpu/blocks.py). Exponentials
have base 2. The scale is multiplied into the logits in float32.

Forward, a warpgroup computes 64 rows of queries, and blocks of 64 keys and
values are streamed. The warpgroup computes both maps and multiplies them with
the same values. Up to V = 128, its registers hold both accumulators. Wider, one
kernel computes one map after the other, and A₂V waits in shared memory. While
the logits of one map become weights, the tensor cores multiply the previous
weights with their values.

Backward, one kernel computes dQ, and another one dK and dV. For dQ the roles
are as in the forward pass. For dK and dV, both warpgroups share 64 keys. One
computes the weights and dV. It passes the weights in float16 through shared
memory to the other one, which computes dP and dK.

Results are the same in every call, bit by bit, because one warpgroup adds up
each of them in a fixed order.

A single backward kernel would need 10 units of products where these two need
14. But it would have to add every block's part of dQ to global memory. For
blocks of 64 rows that moves as many bytes as the kernel loads: 50 per cycle and
multiprocessor, and L2 provides about 30.

`python -m benchmarks.gpu.static` shows what the compiler makes of the
kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.arguments import variant_name
from diffjax.ops.diff_attention.gpu import (
  blocks,
  chip,
  kernel_d_kv,
  kernel_d_q,
  kernel_forward,
  logits,
  shared_memory,
)
from diffjax.ops.diff_attention.gpu.blocks import NUM_CONSUMERS
from diffjax.ops.diff_attention.gpu.chip import BLOCK, plgpu
from diffjax.ops.diff_attention.gpu.logits import EMPTY_ROW_LSE
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import pad_axis, round_up
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  Options,
  Saved,
)

# The rows of a tile: each consumer has a block of them.
_TILE = NUM_CONSUMERS * BLOCK
# The largest V for which a warpgroup's registers hold the accumulators of two
# maps.
_MAX_VALUE_DIM_FOR_TWO_MAPS = 128

# q, k, v, d_out and the weights have 2 bytes per number, bfloat16 or float16.
_HALF_BYTES = 2
_FLOAT32_BYTES = 4


class _PaddedArrays(NamedTuple):
  """The operation's arrays, padded to whole tiles.

  T and S are multiples of 128, and D and V are multiples of 64.
  """

  q: Float[Array, "B T HG D"]  # the maps of a head are adjacent
  k: Float[Array, "B S KM D"]  # the key maps of a key head are adjacent
  v: Float[Array, "B S K V"]
  lam: Float[Array, "B H T"] | None
  q_ids: Int[Array, "B T"] | None
  kv_ids: Int[Array, "B S"] | None
  offset: Int[Array, "B"] | None


class _BackwardInputs(NamedTuple):
  """The arrays that both backward kernels read, in the order of arguments."""

  q: Float[Array, "B T HG D"]
  k: Float[Array, "B S KM D"]
  v: Float[Array, "B S K V"]
  d_out: Float[Array, "B T H V"]
  vectors: Float[Array, "B H X T"]  # see `_query_vectors`
  q_ids: Int[Array, "B T"] | None
  kv_ids: Int[Array, "B S"] | None
  offset: Int[Array, "B"] | None


class _Sizes(NamedTuple):
  """The sizes of the padded axes, named by their letters."""

  B: int
  T: int
  S: int
  H: int
  G: int
  K: int
  M: int
  D: int
  V: int


def _prepare(arrays: Arrays, mask: Mask) -> Any:
  """Checks that the kernels can run, and returns the interpreter to use.

  It is called once, before the forward pass. The result, None for a GPU, is in
  `options.chosen`.

  Args:
    arrays: the arrays of the operation.
    mask: the mask. The kernels support all of them, so it is not read.

  Raises:
    ValueError: if the kernels do not support the device, the version of JAX, or
      the arrays' dtype or widths.
  """
  problem = chip.refusal()
  if problem is not None:
    raise ValueError(
      f"implementation = 'pallas_gpu' {problem};"
      " use implementation='chunked' or 'auto'"
    )
  q = arrays.q
  v = arrays.v
  if not chip.takes(q, v):
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}) and v (V = {v.shape[-1]}) are not"
      " supported by implementation = 'pallas_gpu', which needs bfloat16 or"
      " float16, D up to 128 and V up to 256; cast them, or use"
      " implementation='chunked'"
    )
  return chip.interpret_mode.get()


def _forward(arrays: Arrays, mask: Mask, options: Options) -> Saved:
  """Computes differential attention, A₁V − λA₂V, on a GPU.

  Args:
    arrays: q, k, v, λ, segment ids and offsets.
    mask: which queries see which keys.
    options: the options of the operation. `options.save` is True if a backward
      pass follows.

  Returns:
    `Saved` with
      out: the output [B, T, H, V],
      out2: A₂V, the output of the noise map, [B, T, H, V], and
      lse: the log-sum-exps of base 2 [B, H, G, T].
    out2 and lse are for the backward pass, and None without `options.save`.
  """
  # A tiny scale is multiplied into the queries. Then the factor is 1.
  factor, q = logits.logit_factor(options.scale, arrays.q)
  padded = _pad(arrays._replace(q=q))
  sizes = _padded_sizes(arrays, padded)
  kernel = _make_forward_kernel(mask, options, factor, sizes, q.dtype)
  # The blocks of keys that each block of queries needs.
  ranges = blocks.block_ranges(
    mask,
    arrays.offset,
    arrays.q_ids,
    arrays.kv_ids,
    blocks_per_tile=NUM_CONSUMERS,
  )
  out, noise_out, lse = kernel(*padded, ranges)

  # Remove the padding.
  length = arrays.q.shape[1]
  value_dim = arrays.v.shape[-1]
  out = out[:, :length, :, :value_dim]
  if noise_out is not None:
    noise_out = noise_out[:, :length, :, :value_dim]
  if lse is not None:
    lse = lse[..., :length]
  return Saved(out, noise_out, lse)


def _make_forward_kernel(
  mask: Mask, options: Options, factor: float, sizes: _Sizes, dtype: Any
) -> Callable[..., Any]:
  """Returns the forward kernel. Queries are stationary, keys are streamed."""
  # The maps that each pass over the keys computes together.
  passes: tuple[tuple[int, ...], ...]
  if sizes.G == 2 and sizes.V > _MAX_VALUE_DIM_FOR_TWO_MAPS:
    passes = ((1,), (0,))  # first A₂V, which is then subtracted
  else:
    passes = (tuple(range(sizes.G)),)
  key_maps_per_slot = max(
    len(kernel_forward.key_maps_of(maps, sizes.M)) for maps in passes
  )

  # Queries of all maps, and a buffer for the output, stay in shared memory.
  stationary_elements = _TILE * (sizes.G * sizes.D + sizes.V)
  # A slot holds a block of values, and of keys for each map of a pass.
  slot_elements = BLOCK * (key_maps_per_slot * sizes.D + sizes.V)
  num_slots = shared_memory.max_slots(
    _HALF_BYTES * stationary_elements, _HALF_BYTES * slot_elements
  )

  out_type = ((sizes.B, sizes.T, sizes.H, sizes.V), dtype)
  noise_out_type = None
  lse_type = None
  if options.save:
    lse_type = ((sizes.B, sizes.H, sizes.G, sizes.T), jnp.float32)
    if sizes.G == 2:
      noise_out_type = out_type
  return _make_kernel(
    functools.partial(kernel_forward.forward, mask, factor, passes, num_slots),
    options,
    f"diff_attention_forward_{variant_name(sizes.G, sizes.M)}",
    grid=(sizes.H, sizes.T // _TILE, sizes.B),
    outputs=(out_type, noise_out_type, lse_type),
    scratch=dict(
      q_smem=shared_memory.tiled_smem(
        (NUM_CONSUMERS, sizes.G, BLOCK, sizes.D), dtype
      ),
      k_smem=shared_memory.tiled_smem(
        (num_slots, key_maps_per_slot, BLOCK, sizes.D), dtype
      ),
      v_smem=shared_memory.tiled_smem((num_slots, BLOCK, sizes.V), dtype),
      out_smem=shared_memory.tiled_smem((NUM_CONSUMERS, BLOCK, sizes.V), dtype),
      q_ready=plgpu.Barrier(num_arrivals=sizes.G, num_barriers=NUM_CONSUMERS),
      **_ring_barriers("k", num_slots, num_loads=key_maps_per_slot),
      **_ring_barriers("v", num_slots, num_loads=1),
    ),
  )


def _backward(
  arrays: Arrays,
  mask: Mask,
  options: Options,
  saved: Saved,
  d_out: Float[Array, "B T H V"],
) -> tuple[Array, Array, Array, Array | None]:
  """Returns the gradients of q, k, v and λ. The last is None without λ."""
  vectors, d_lam = _query_vectors(arrays, saved, d_out)
  factor, q = logits.logit_factor(options.scale, arrays.q)
  # The kernels read λ from `vectors`.
  padded = _pad(arrays._replace(q=q, lam=None))
  sizes = _padded_sizes(arrays, padded)
  d_out = pad_axis(d_out, 1, sizes.T)
  d_out = pad_axis(d_out, 3, sizes.V)
  inputs = _BackwardInputs(
    q=padded.q,
    k=padded.k,
    v=padded.v,
    d_out=d_out,
    vectors=vectors,
    q_ids=padded.q_ids,
    kv_ids=padded.kv_ids,
    offset=padded.offset,
  )
  get_ranges = functools.partial(
    blocks.block_ranges, mask, arrays.offset, arrays.q_ids, arrays.kv_ids
  )
  d_q_kernel = _make_d_q_kernel(mask, options, factor, sizes, inputs)
  (d_q,) = d_q_kernel(*inputs, get_ranges(blocks_per_tile=NUM_CONSUMERS))
  # Both consumers work on the same block of keys.
  d_kv_kernel = _make_d_kv_kernel(mask, options, factor, sizes, inputs)
  d_k, d_v = d_kv_kernel(
    *inputs, get_ranges(blocks_per_tile=1, keys_are_stationary=True)
  )

  q_length, head_dim = arrays.q.shape[1], arrays.q.shape[-1]
  kv_length, value_dim = arrays.k.shape[1], arrays.v.shape[-1]
  d_q = d_q[:, :q_length, :, :head_dim].reshape(arrays.q.shape)
  d_k = d_k[:, :kv_length, :, :head_dim].reshape(arrays.k.shape)
  d_v = d_v[:, :kv_length, :, :value_dim]
  return d_q, d_k, d_v, d_lam


def _query_vectors(
  arrays: Arrays, saved: Saved, d_out: Float[Array, "B T H V"]
) -> tuple[Float[Array, "B H X T"], Float[Array, "B T H"] | None]:
  """Returns the numbers of each query that the backward kernels read, and dλ.

  With the signal map A₁ and the noise map A₂, the output is O = A₁V − λA₂V.
  The gradients of the softmax need δ = rowsum(dP ∘ A) of each map, with dP =
  dO Vᵀ. It can be computed without the maps:

    δ₂ = rowsum(dO ∘ A₂V),  δ₁ = rowsum(dO ∘ O) + λδ₂,  dλ = −δ₂

  Returns:
    vectors: axis X has the log-sum-exps of the G maps, their δ, and, if there
      are two maps, λ. T is padded to whole tiles.
    d_lam: the gradient of λ. None with one map, which has no λ.
  """
  padded_length = round_up(arrays.q.shape[1], _TILE)
  # Padded queries get weights of 0, because this log-sum-exp is huge.
  lse = pad_axis(saved.lse, 3, padded_length, value=EMPTY_ROW_LSE)
  row_sums = [_row_sums(d_out, saved.out)]  # each [B, T, H]
  if saved.out2 is not None:
    row_sums.append(_row_sums(d_out, saved.out2))
  # Without this barrier XLA fuses the sums into the concatenation below, where
  # one thread sums one row. That takes seven times as long as reading the
  # arrays.
  row_sums = jax.lax.optimization_barrier(row_sums)
  delta = _as_vector(row_sums[0])  # [B, H, 1, T]
  if arrays.lam is None:
    columns = [delta]
    d_lam = None
  else:
    lam = _as_vector(arrays.lam)
    delta_2 = _as_vector(row_sums[1])
    columns = [delta + lam * delta_2, delta_2, lam]
    d_lam = -row_sums[1]
  columns = [pad_axis(column, 3, padded_length, value=0) for column in columns]
  return jnp.concatenate([lse, *columns], axis=2), d_lam


def _row_sums(
  d_out: Float[Array, "B T H V"], out: Float[Array, "B T H V"]
) -> Float[Array, "B T H"]:
  """Returns rowsum(d_out ∘ out) in float32."""
  products = d_out.astype(jnp.float32) * out.astype(jnp.float32)
  return jnp.sum(products, axis=-1)


def _as_vector(x: Float[Array, "B T H"]) -> Float[Array, "B H 1 T"]:
  return jnp.swapaxes(x, 1, 2)[:, :, None]


def _make_d_q_kernel(
  mask: Mask,
  options: Options,
  factor: float,
  sizes: _Sizes,
  inputs: _BackwardInputs,
) -> Callable[..., Any]:
  """Returns the kernel that computes dQ.

  A tile of queries stays in shared memory, while blocks of keys and values are
  streamed past it through ring buffers. Their slots take all memory that the
  tile leaves.
  """
  dtype = inputs.q.dtype
  # Queries of all maps, and d_out, stay in shared memory.
  stationary_bytes = _HALF_BYTES * _TILE * (sizes.G * sizes.D + sizes.V)
  k_slot_bytes = _HALF_BYTES * BLOCK * sizes.M * sizes.D
  v_slot_bytes = _HALF_BYTES * BLOCK * sizes.V
  # Values are read once, for dP, and one slot may have to suffice. Keys are
  # read again for dQ += dS K, so their ring gets the remaining memory.
  num_v_slots = shared_memory.max_slots(
    stationary_bytes, k_slot_bytes + v_slot_bytes, minimum=1
  )
  num_k_slots = shared_memory.max_slots(
    stationary_bytes + num_v_slots * v_slot_bytes, k_slot_bytes
  )
  return _make_kernel(
    functools.partial(
      kernel_d_q.d_q, mask, factor, options.scale, num_k_slots, num_v_slots
    ),
    options,
    f"diff_attention_d_q_{variant_name(sizes.G, sizes.M)}",
    grid=(sizes.H, sizes.T // _TILE, sizes.B),
    outputs=((inputs.q.shape, dtype),),
    scratch=dict(
      q_smem=shared_memory.tiled_smem(
        (NUM_CONSUMERS, sizes.G, BLOCK, sizes.D), dtype
      ),
      d_out_smem=shared_memory.tiled_smem(
        (NUM_CONSUMERS, BLOCK, sizes.V), dtype
      ),
      k_smem=shared_memory.tiled_smem(
        (num_k_slots * sizes.M, BLOCK, sizes.D), dtype
      ),
      v_smem=shared_memory.tiled_smem((num_v_slots, BLOCK, sizes.V), dtype),
      q_ready=plgpu.Barrier(
        num_arrivals=sizes.G + 1,  # the loads of q and d_out
        num_barriers=NUM_CONSUMERS,
      ),
      **_ring_barriers("k", num_k_slots, num_loads=sizes.M),
      **_ring_barriers("v", num_v_slots, num_loads=1),
    ),
  )


def _make_d_kv_kernel(
  mask: Mask,
  options: Options,
  factor: float,
  sizes: _Sizes,
  inputs: _BackwardInputs,
) -> Callable[..., Any]:
  """Returns the kernel of dK and dV. Keys are stationary, queries streamed."""
  dtype = inputs.q.dtype
  num_vectors = inputs.vectors.shape[2]
  # Keys of all maps, values, and the weights of all maps between the two
  # consumers, stay in shared memory.
  stationary_elements = BLOCK * (sizes.M * sizes.D + sizes.V)
  weight_elements = sizes.G * BLOCK * BLOCK
  stationary_bytes = _HALF_BYTES * stationary_elements
  stationary_bytes += _HALF_BYTES * weight_elements
  # A slot holds queries of all maps, d_out and the vectors.
  slot_bytes = _HALF_BYTES * BLOCK * (sizes.G * sizes.D + sizes.V)
  slot_bytes += _FLOAT32_BYTES * BLOCK * num_vectors
  num_slots = shared_memory.max_slots(stationary_bytes, slot_bytes)
  return _make_kernel(
    functools.partial(kernel_d_kv.d_kv, mask, factor, num_slots),
    options,
    f"diff_attention_d_kv_{variant_name(sizes.G, sizes.M)}",
    grid=(sizes.K, sizes.S // BLOCK, sizes.B),
    outputs=((inputs.k.shape, dtype), (inputs.v.shape, inputs.v.dtype)),
    scratch=dict(
      q_smem=shared_memory.tiled_smem(
        (num_slots * sizes.G, BLOCK, sizes.D), dtype
      ),
      d_out_smem=shared_memory.tiled_smem((num_slots, BLOCK, sizes.V), dtype),
      vectors_smem=plgpu.SMEM((num_slots, num_vectors, BLOCK), jnp.float32),
      k_smem=shared_memory.tiled_smem((sizes.M, BLOCK, sizes.D), dtype),
      v_smem=shared_memory.tiled_smem((BLOCK, sizes.V), dtype),
      weights_smem=shared_memory.tiled_smem(
        (sizes.G, BLOCK, BLOCK), jnp.float16
      ),
      kv_ready=plgpu.Barrier(num_arrivals=sizes.M + 1),
      finished=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
      weights_ready=plgpu.Barrier(num_barriers=sizes.G),
      weights_free=plgpu.Barrier(num_barriers=sizes.G),
      # The loads of q and the vectors fill the same slot.
      **_ring_barriers("q", num_slots, num_loads=sizes.G + 1),
      **_ring_barriers("d_out", num_slots, num_loads=1),
    ),
  )


def _pad(arrays: Arrays) -> _PaddedArrays:
  """Returns the arrays in the layout of the kernels.

  Heads and maps are merged to one axis. Lengths are padded to whole tiles of
  128, and widths to whole blocks of 64.
  """
  q_length = round_up(arrays.q.shape[1], _TILE)
  kv_length = round_up(arrays.k.shape[1], _TILE)
  lam = arrays.lam
  if lam is not None:
    lam = pad_axis(jnp.swapaxes(lam, 1, 2), 2, q_length)  # [B, H, T]
  q_ids = arrays.q_ids
  kv_ids = arrays.kv_ids
  if q_ids is not None and kv_ids is not None:  # both or none
    q_ids = pad_axis(q_ids.astype(jnp.int32), 1, q_length)
    kv_ids = pad_axis(kv_ids.astype(jnp.int32), 1, kv_length)
  return _PaddedArrays(
    q=_merge_and_pad(arrays.q, q_length),
    k=_merge_and_pad(arrays.k, kv_length),
    v=_merge_and_pad(arrays.v, kv_length),
    lam=lam,
    q_ids=q_ids,
    kv_ids=kv_ids,
    offset=arrays.offset,
  )


def _merge_and_pad(
  x: Float[Array, "B T *heads D"], length: int
) -> Float[Array, "B length heads X"]:
  """Merges the axes of heads and maps, and pads T, and D to whole blocks."""
  batch, unpadded_length, *_, width = x.shape
  x = x.reshape(batch, unpadded_length, -1, width)
  x = pad_axis(x, 1, length)
  return pad_axis(x, 3, round_up(width, BLOCK))


def _padded_sizes(arrays: Arrays, padded: _PaddedArrays) -> _Sizes:
  """Returns the sizes of all axes, after padding.

  The numbers of heads and maps come from the original arrays, because the
  padded ones have both in one axis.

  Args:
    arrays: the arrays of the operation.
    padded: the same arrays, as `_pad` returns them.
  """
  batch, _, num_heads, num_maps, _ = arrays.q.shape
  _, _, num_kv_heads, num_key_maps, _ = arrays.k.shape
  return _Sizes(
    B=batch,
    T=padded.q.shape[1],
    S=padded.k.shape[1],
    H=num_heads,
    G=num_maps,
    K=num_kv_heads,
    M=num_key_maps,
    D=padded.q.shape[3],
    V=padded.v.shape[3],
  )


def _make_kernel(
  function: Callable[..., None],
  options: Options,
  name: str,
  *,
  grid: tuple[int, int, int],
  outputs: tuple[Any, ...],
  scratch: dict[str, Any],
) -> Callable[..., Any]:
  """Returns a kernel with two warpgroups that compute, and one that loads.

  Args:
    function: the body.
    options: options of the operation.
    name: the kernel's name.
    grid: the numbers of heads, tiles and rows of the batch.
    outputs: shape and dtype of each output, or None for an absent one.
    scratch: shared memory and barriers by name.
  """
  return chip.make_kernel(
    function,
    name,
    interpret=options.chosen,
    grid=grid,
    grid_names=("heads", "tiles", "batch"),
    warpgroups=NUM_CONSUMERS + 1,
    outputs=outputs,
    scratch=scratch,
  )


def _ring_barriers(
  prefix: str, num_slots: int, *, num_loads: int
) -> dict[str, Any]:
  """Returns the barriers of a ring, two per slot.

  A slot is ready after `num_loads` loads, and free after all consumers have
  released it.
  """
  ready = plgpu.Barrier(num_arrivals=num_loads, num_barriers=num_slots)
  free = plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=num_slots)
  return {f"{prefix}_ready": ready, f"{prefix}_free": free}


IMPLEMENTATION = Implementation(_forward, _backward, _prepare)
