"""Differential attention on Hopper GPUs as fused Pallas kernels (Mosaic GPU).

A thread block holds three warpgroups: one loads blocks through a ring of slots in shared memory, two compute. Only blocks between the first
and the last one that a row's mask lets it see are loaded, and only those that the mask cuts pay for it. Exponentials are base 2, and the
scale is multiplied into the logits in float32.

Forward, a warpgroup has 64 query rows, and blocks of 64 keys and values pass. Both maps of a row stay in it and meet the same values: side
by side where two accumulators fit its registers (V up to 128), else one after the other in one kernel, with O₂ waiting in shared memory.
While one map's logits become weights, the tensor cores add up the values of the turn before.

Backward, one kernel makes dQ and another dK and dV. For dQ the roles are as in the forward pass. For dK and dV both warpgroups share 64
keys: one makes the weights and dV, and hands the weights over in shared memory, in float16, to the one that makes dP and dK.

Results are the same at every call, bit by bit: each is added up by one warpgroup in one order. A single backward kernel would need 10 units
of products where these two take 14, but would have to add dQ to global memory from every block of keys, and for blocks of 64 that is as
many bytes as it loads: 50 a cycle and multiprocessor, where L2 has about 30. `python -m benchmarks.gpu --static` shows what the compiler
makes of the kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from diffjax.ops.diff_attention.arguments import variant_name
from diffjax.ops.diff_attention.gpu import (
  blocks,
  chip,
  d_kv_kernel,
  d_q_kernel,
  forward_kernel,
  logits,
  shared_memory,
)
from diffjax.ops.diff_attention.gpu.blocks import CONSUMERS
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


def _prepare(arrays: Arrays, mask: Mask) -> Any:
  """The interpreter to run in, if any; refuses other devices and older JAX, and dtypes and widths that are not taken."""
  q, _, v, *_ = arrays
  if problem := chip.refusal():
    raise ValueError(
      f"implementation = 'pallas_gpu' {problem}; use implementation='chunked' or 'auto'"
    )
  if not chip.takes(q, v):
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}) and v (V = {v.shape[-1]}) are not taken by implementation 'pallas_gpu', which takes bfloat16 and "
      "float16, D up to 128 and V up to 256: cast them, or use implementation='chunked'"
    )
  return chip.interpret_mode.get()


def _forward(arrays: Arrays, mask: Mask, options: Options) -> Saved:
  """The output [B, T, H, V] and, to be saved for a gradient, O₂ likewise and the log-sum-exps (base 2) [B, H, G, T]; else None."""
  (q, k, v, lam, q_ids, kv_ids, offset), save = arrays, options.save
  (B, T, H, G, D), M, width = q.shape, k.shape[3], v.shape[-1]
  factor, operands = _operands(options.scale, q, k, v, lam, q_ids, kv_ids)
  rows, D, V = operands[0].shape[1], operands[0].shape[3], operands[2].shape[3]
  passes = ((1,), (0,)) if G == 2 and V > 2 * BLOCK else (tuple(range(G)),)
  loaded = max(len(forward_kernel.key_maps_of(maps, M)) for maps in passes)
  fixed, slot = CONSUMERS * BLOCK * (G * D + V), BLOCK * (loaded * D + V)
  stages = shared_memory.max_slots(2 * fixed, 2 * slot)
  bounds = blocks.bounds(mask, offset, q_ids, kv_ids, shared=CONSUMERS)
  out_like = ((B, rows, H, V), q.dtype)
  out, out2, lse = _kernel(
    functools.partial(forward_kernel.forward, mask, factor, passes, stages),
    options.chosen,
    f"diff_attention_forward_{variant_name(G, M)}",
    grid=(H, rows // (CONSUMERS * BLOCK), B),
    outputs=(
      out_like,
      out_like if G == 2 and save else None,
      ((B, H, G, rows), jnp.float32) if save else None,
    ),
    scratch=dict(
      q_smem=shared_memory.tiled_smem((CONSUMERS, G, BLOCK, D), q.dtype),
      k_smem=shared_memory.tiled_smem((stages, loaded, BLOCK, D), q.dtype),
      v_smem=shared_memory.tiled_smem((stages, BLOCK, V), q.dtype),
      out_smem=shared_memory.tiled_smem((CONSUMERS, BLOCK, V), q.dtype),
      q_ready=plgpu.Barrier(num_arrivals=G, num_barriers=CONSUMERS),
      **_barriers(loaded, stages, "k"),
      **_barriers(1, stages, "v"),
    ),
  )(*operands, offset, bounds)
  trim = lambda x: None if x is None else x[:, :T, :, :width]
  return Saved(trim(out), trim(out2), None if lse is None else lse[..., :T])


def _backward(
  arrays: Arrays, mask: Mask, options: Options, saved: Saved, d_out
):
  """Gradients of q, k, v and λ (None without λ); paper §1."""
  (q, k, v, lam, q_ids, kv_ids, offset), (out, out2, lse) = arrays, saved
  (B, T, H, G, D_in), (S, K, M), V_in = q.shape, k.shape[1:4], v.shape[-1]
  row_sums = lambda x: jnp.sum(
    d_out.astype(jnp.float32) * x.astype(jnp.float32), axis=-1
  )
  # Without the barrier XLA sums inside the concatenation below, a thread a row: seven times as long as reading the arrays takes.
  sums = jax.lax.optimization_barrier(
    [row_sums(x) for x in (out, out2) if x is not None]
  )
  delta, *of_noise = (jnp.swapaxes(x, 1, 2)[:, :, None] for x in sums)
  columns, d_lam = [lse, delta], None
  if lam is not None:
    turned, (delta2,) = jnp.swapaxes(lam, 1, 2)[:, :, None], of_noise
    columns = [lse, delta + turned * delta2, delta2, turned]
    d_lam = -sums[1]
  factor, (q, k, v, _, q_ids, kv_ids) = _operands(
    options.scale, q, k, v, None, q_ids, kv_ids
  )
  (_, rows, _, D), keys, V = q.shape, k.shape[1], v.shape[3]
  # Log-sum-exps, deltas and λ of each query; the weights of queries that are padding are zero.
  vectors = jnp.concatenate(
    [pad_axis(x, 3, rows, EMPTY_ROW_LSE if x is lse else 0) for x in columns],
    axis=2,
  )
  d_out = pad_axis(pad_axis(d_out, 1, rows), 3, V)
  operands = q, k, v, d_out, vectors, q_ids, kv_ids, offset
  ids = q_ids, kv_ids

  fixed, k_slot, v_slot = (
    2 * CONSUMERS * BLOCK * (G * D + V),
    2 * BLOCK * M * D,
    2 * BLOCK * V,
  )
  v_stages = shared_memory.max_slots(fixed, k_slot + v_slot, minimum=1)
  k_stages = shared_memory.max_slots(fixed + v_stages * v_slot, k_slot)
  (d_q,) = _kernel(
    functools.partial(
      d_q_kernel.d_q, mask, factor, options.scale, k_stages, v_stages
    ),
    options.chosen,
    f"diff_attention_d_q_{variant_name(G, M)}",
    grid=(H, rows // (CONSUMERS * BLOCK), B),
    outputs=((q.shape, q.dtype),),
    scratch=dict(
      q_smem=shared_memory.tiled_smem((CONSUMERS, G, BLOCK, D), q.dtype),
      d_out_smem=shared_memory.tiled_smem((CONSUMERS, BLOCK, V), q.dtype),
      k_smem=shared_memory.tiled_smem((k_stages * M, BLOCK, D), q.dtype),
      v_smem=shared_memory.tiled_smem((v_stages, BLOCK, V), q.dtype),
      q_ready=plgpu.Barrier(num_arrivals=G + 1, num_barriers=CONSUMERS),
      **_barriers(M, k_stages, "k"),
      **_barriers(1, v_stages, "v"),
    ),
  )(*operands, blocks.bounds(mask, offset, *ids, shared=CONSUMERS))

  fixed, slot = (
    2 * BLOCK * (M * D + V) + 2 * G * BLOCK * BLOCK,
    2 * BLOCK * (G * D + V) + 4 * vectors.shape[2] * BLOCK,
  )
  stages = shared_memory.max_slots(fixed, slot)
  d_k, d_v = _kernel(
    functools.partial(d_kv_kernel.d_kv, mask, factor, stages),
    options.chosen,
    f"diff_attention_d_kv_{variant_name(G, M)}",
    grid=(K, keys // BLOCK, B),
    outputs=((k.shape, k.dtype), (v.shape, v.dtype)),
    scratch=dict(
      q_smem=shared_memory.tiled_smem((stages * G, BLOCK, D), q.dtype),
      d_out_smem=shared_memory.tiled_smem((stages, BLOCK, V), q.dtype),
      vectors_smem=plgpu.SMEM((stages, vectors.shape[2], BLOCK), jnp.float32),
      k_smem=shared_memory.tiled_smem((M, BLOCK, D), q.dtype),
      v_smem=shared_memory.tiled_smem((BLOCK, V), q.dtype),
      weights_smem=shared_memory.tiled_smem((G, BLOCK, BLOCK), jnp.float16),
      kv_ready=plgpu.Barrier(num_arrivals=M + 1),
      finished=plgpu.Barrier(num_arrivals=CONSUMERS),
      weights_ready=plgpu.Barrier(num_barriers=G),
      weights_free=plgpu.Barrier(num_barriers=G),
      **_barriers(G + 1, stages, "q"),
      **_barriers(1, stages, "d_out"),
    ),
  )(*operands, blocks.bounds(mask, offset, *ids, shared=1, keys_stay=True))
  return (
    d_q[:, :T, :, :D_in].reshape(B, T, H, G, D_in),
    d_k[:, :S, :, :D_in].reshape(B, S, K, M, D_in),
    d_v[:, :S, :, :V_in],
    d_lam,
  )


def _operands(scale: float, q, k, v, lam, q_ids, kv_ids):
  """The factor on logits, and arrays padded to whole tiles.

  Returns:
    `logits.logit_factor`'s, and q [B, rows, H·G, D], k [B, keys, K·M, D], v [B, keys, K, V], λ [B, H, rows], ids.
  """
  rows, keys = (
    round_up(q.shape[1], CONSUMERS * BLOCK),
    round_up(k.shape[1], CONSUMERS * BLOCK),
  )
  folded = lambda x, length: pad_axis(
    pad_axis(x.reshape(*x.shape[:2], -1, x.shape[-1]), 1, length),
    3,
    round_up(x.shape[-1], BLOCK),
  )
  factor, q = logits.logit_factor(scale, q)
  lam = None if lam is None else pad_axis(jnp.swapaxes(lam, 1, 2), 2, rows)
  ids = (
    (None, None)
    if q_ids is None
    else (
      pad_axis(q_ids.astype(jnp.int32), 1, rows),
      pad_axis(kv_ids.astype(jnp.int32), 1, keys),
    )
  )
  return factor, (folded(q, rows), folded(k, keys), folded(v, keys), lam, *ids)


def _kernel(function, interpret: Any, name: str, **arguments):
  """A kernel of two warpgroups that compute and one that loads, over a grid of heads, tiles and batch."""
  names = ("heads", "tiles", "batch")
  return chip.make_kernel(
    function,
    name,
    interpret=interpret,
    grid_names=names,
    warpgroups=CONSUMERS + 1,
    **arguments,
  )


def _barriers(arrivals: int, stages: int, prefix: str) -> dict[str, Any]:
  """The two barriers of a ring: so many loads fill a slot, and all that compute free it."""
  return {
    f"{prefix}_ready": plgpu.Barrier(
      num_arrivals=arrivals, num_barriers=stages
    ),
    f"{prefix}_free": plgpu.Barrier(
      num_arrivals=CONSUMERS, num_barriers=stages
    ),
  }


IMPLEMENTATION = Implementation(_forward, _backward, _prepare)
