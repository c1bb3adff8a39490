"""Differential attention on Hopper GPUs as fused Pallas kernels (Mosaic GPU).

A thread block holds three warpgroups: one loads blocks of 64 keys and values through a ring of slots in shared memory, two compute with 64
query rows each. Forward, both maps of a row stay in one warpgroup and meet the same values: side by side where two accumulators fit its
registers (D 64, V up to 128), else one map after the other in one kernel, with O₂ waiting in shared memory. Only blocks of keys between the
first and the last one that a row's mask lets it see are loaded, and only those that the mask cuts pay for it. Exponentials are base 2:
queries are multiplied by scale·log₂e once, outside.

Backward, one kernel makes dQ and another dK and dV. Where the sums would leave a warpgroup no registers, the two that compute share a
block: each makes the dQ of one map, or one makes dK and the other dV, at the price of computing dP or the maps twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import gpu, gpu_blocks, residuals
from diffjax.ops.diff_attention.gpu import BLOCK, plgpu
from diffjax.ops.diff_attention.gpu_blocks import CONSUMERS
from diffjax.ops.diff_attention.schedule import pad
from diffjax.ops.diff_attention.tiles import Geometry
from diffjax.ops.diff_attention.tpu import HIDDEN, LOG2E, round_up
from diffjax.ops.varying import vary_like


def pallas_gpu(
  q: Float[Array, "B T H G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Float[Array, "B T H"] | None,
  *,
  q_segment_ids: Int[Array, "B T"] | None = None,
  kv_segment_ids: Int[Array, "B S"] | None = None,
  q_offset: int | Int[Array, "B"] = 0,
  causal: bool = True,
  window: int | None = None,
  scale: float,
) -> Float[Array, "B T H V"]:
  """`diff_attention` on a Hopper GPU; the arguments are those of `api.diff_attention`, checked there.

  Raises:
    ValueError: JAX is too old, the program is not for a Hopper GPU, or a dtype or width is not taken.
  """
  if problem := gpu.refusal():
    raise ValueError(f"implementation = 'pallas_gpu' {problem}; use implementation='chunked' or 'auto'")
  if not gpu.takes(q, v):
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}) and v (V = {v.shape[-1]}) are not taken by implementation 'pallas_gpu', which takes bfloat16 and "
      "float16, D up to 128 and V up to 256: cast them, or use implementation='chunked'"
    )
  static, offset = (q_offset, None) if isinstance(q_offset, int) else (None, q_offset)
  options = _Options(Geometry(causal, window, static, q.shape[1], k.shape[1]), scale, gpu.interpret_mode.get())
  arrays = (q, k, v, lam, q_segment_ids, kv_segment_ids, offset)
  # Inside shard_map an array that all devices share must be made each device's own before the custom VJP, or its gradient is not summed.
  return _attend(options, *(None if x is None else vary_like(x, *arrays) for x in arrays))


@dataclasses.dataclass(frozen=True)
class _Options:
  geometry: Geometry
  scale: float
  interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, q, k, v, lam, q_ids, kv_ids, offset):
  return _forward(options, q, k, v, lam, q_ids, kv_ids, offset, save=False)[0]


def _attend_fwd(options: _Options, q, k, v, lam, q_ids, kv_ids, offset):
  out, out2, lse = _forward(options, q, k, v, lam, q_ids, kv_ids, offset, save=True)
  out, lse = checkpoint_name(out, residuals.OUT), checkpoint_name(lse, residuals.LSE)
  out2 = None if out2 is None else checkpoint_name(out2, residuals.OUT2)
  return out, (q, k, v, lam, q_ids, kv_ids, offset, out, out2, lse)


def _attend_bwd(options: _Options, saved, d_out):
  return *_backward(options, d_out, *saved), None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(options: _Options, q, k, v, lam, q_ids, kv_ids, offset, *, save: bool):
  """Returns the output [B, T, H, V] and, to be saved for a gradient, O₂ likewise and the log-sum-exps (base 2) [B, H, G, T]; else None."""
  (B, T, H, G, D), M, width = q.shape, k.shape[3], v.shape[-1]
  operands = _operands(options, q, k, v, lam, q_ids, kv_ids)
  rows, D, V = operands[0].shape[1], operands[0].shape[3], operands[2].shape[3]
  passes = ((1,), (0,)) if G == 2 and (D > BLOCK or V > 2 * BLOCK) else (tuple(range(G)),)
  loaded = max(len(_keys_of(maps, M)) for maps in passes)
  fixed, slot = CONSUMERS * BLOCK * (G * D + V), BLOCK * (loaded * D + V)
  stages = gpu.stages(2 * fixed, 2 * slot)
  bounds = gpu_blocks.bounds(options.geometry, offset, q_ids, kv_ids, shared=CONSUMERS)
  out_like = ((B, rows, H, V), q.dtype)
  out, out2, lse = _kernel(
    functools.partial(_forward_kernel, options.geometry, passes, stages), options, f"diff_attention_forward_{_variant(G, M)}",
    grid=(H, rows // (CONSUMERS * BLOCK), B),
    outputs=(out_like, out_like if G == 2 and save else None, ((B, H, G, rows), jnp.float32) if save else None),
    scratch=dict(
      q_smem=gpu.tiled((CONSUMERS, G, BLOCK, D), q.dtype),
      k_smem=gpu.tiled((stages, loaded, BLOCK, D), q.dtype),
      v_smem=gpu.tiled((stages, BLOCK, V), q.dtype),
      out_smem=gpu.tiled((CONSUMERS, BLOCK, V), q.dtype),
      q_ready=plgpu.Barrier(num_arrivals=G, num_barriers=CONSUMERS),
      **_barriers(loaded, stages, "k"),
      **_barriers(1, stages, "v"),
    ),
  )(*operands, offset, bounds)  # fmt: skip
  trim = lambda x: None if x is None else x[:, :T, :, :width]
  return trim(out), trim(out2), None if lse is None else lse[..., :T]


def _backward(options: _Options, d_out, q, k, v, lam, q_ids, kv_ids, offset, out, out2, lse):
  """Gradients of q, k, v and λ (None without λ); paper §1."""
  (B, T, H, G, D_in), (S, K, M), V_in = q.shape, k.shape[1:4], v.shape[-1]
  row_sums = lambda x: jnp.swapaxes(jnp.sum(d_out.astype(jnp.float32) * x.astype(jnp.float32), axis=-1), 1, 2)[:, :, None]
  columns, d_lam = [lse, row_sums(out)], None
  if lam is not None:
    turned, delta2 = jnp.swapaxes(lam, 1, 2)[:, :, None], row_sums(out2)
    columns = [lse, columns[1] + turned * delta2, delta2, turned]
    d_lam = -jnp.swapaxes(delta2[:, :, 0], 1, 2)
  q, k, v, _, q_ids, kv_ids = _operands(options, q, k, v, None, q_ids, kv_ids)
  (_, rows, _, D), keys, V = q.shape, k.shape[1], v.shape[3]
  # Log-sum-exps, deltas and λ of each query; the weights of queries that are padding are zero.
  vectors = jnp.concatenate([pad(x, 3, rows, -HIDDEN if x is lse else 0) for x in columns], axis=2)
  d_out = pad(pad(d_out, 1, rows), 3, V)
  arrays = q, k, v, d_out, vectors, q_ids, kv_ids, offset
  ids = q_ids, kv_ids

  split = G == 2 and D > BLOCK
  owners = 1 if split else CONSUMERS
  fixed, k_slot, v_slot = 2 * owners * BLOCK * (G * D + V), 2 * BLOCK * M * D, 2 * BLOCK * V
  v_stages = max(1, gpu.stages(fixed, k_slot + v_slot))
  k_stages = gpu.stages(fixed + v_stages * v_slot, k_slot)
  (d_q,) = _kernel(
    functools.partial(_d_q_kernel, options.geometry, options.scale, split, k_stages, v_stages),
    options, f"diff_attention_d_q_{_variant(G, M)}",
    grid=(H, rows // (owners * BLOCK), B), outputs=((q.shape, q.dtype),),
    scratch=dict(
      q_smem=gpu.tiled((owners, G, BLOCK, D), q.dtype),
      d_out_smem=gpu.tiled((owners, BLOCK, V), q.dtype),
      k_smem=gpu.tiled((k_stages * M, BLOCK, D), q.dtype),
      v_smem=gpu.tiled((v_stages, BLOCK, V), q.dtype),
      q_ready=plgpu.Barrier(num_arrivals=G + 1, num_barriers=owners),
      **_barriers(M, k_stages, "k"),
      **_barriers(1, v_stages, "v"),
    ),
  )(*arrays, gpu_blocks.bounds(options.geometry, offset, *ids, shared=owners))  # fmt: skip

  split = G == 2
  owners = 1 if split else CONSUMERS
  fixed, slot = 2 * owners * BLOCK * (M * D + V), 2 * BLOCK * (G * D + V) + 4 * vectors.shape[2] * BLOCK
  stages = gpu.stages(fixed, slot)
  d_k, d_v = _kernel(
    functools.partial(_d_kv_kernel, options.geometry, split, stages), options, f"diff_attention_d_kv_{_variant(G, M)}",
    grid=(K, keys // (owners * BLOCK), B), outputs=((k.shape, k.dtype), (v.shape, v.dtype)),
    scratch=dict(
      q_smem=gpu.tiled((stages * G, BLOCK, D), q.dtype),
      d_out_smem=gpu.tiled((stages, BLOCK, V), q.dtype),
      vectors_smem=plgpu.SMEM((stages, vectors.shape[2], BLOCK), jnp.float32),
      k_smem=gpu.tiled((owners, M, BLOCK, D), q.dtype),
      v_smem=gpu.tiled((owners, BLOCK, V), q.dtype),
      kv_ready=plgpu.Barrier(num_arrivals=M + 1, num_barriers=owners),
      finished=plgpu.Barrier(num_arrivals=CONSUMERS),
      **_barriers(G + 1, stages, "q"),
      **_barriers(1, stages, "d_out"),
    ),
  )(*arrays, gpu_blocks.bounds(options.geometry, offset, *ids, shared=owners, keys_stay=True))  # fmt: skip
  return (d_q[:, :T, :, :D_in].reshape(B, T, H, G, D_in), d_k[:, :S, :, :D_in].reshape(B, S, K, M, D_in), d_v[:, :S, :, :V_in], d_lam)


def _operands(options: _Options, q, k, v, lam, q_ids, kv_ids):
  """Padded to whole tiles: q [B, rows, H·G, D] times scale·log₂e, k [B, keys, K·M, D], v [B, keys, K, V], λ [B, H, rows], ids."""
  rows, keys = round_up(q.shape[1], CONSUMERS * BLOCK), round_up(k.shape[1], CONSUMERS * BLOCK)
  folded = lambda x, length: pad(pad(x.reshape(*x.shape[:2], -1, x.shape[-1]), 1, length), 3, round_up(x.shape[-1], BLOCK))
  q = (q.astype(jnp.float32) * (options.scale * LOG2E)).astype(q.dtype)
  lam = None if lam is None else pad(jnp.swapaxes(lam, 1, 2), 2, rows)
  ids = (None, None) if q_ids is None else (pad(q_ids.astype(jnp.int32), 1, rows), pad(kv_ids.astype(jnp.int32), 1, keys))
  return folded(q, rows), folded(k, keys), folded(v, keys), lam, *ids


def _kernel(function, options: _Options, name: str, **arguments):
  """A kernel of two warpgroups that compute and one that loads, over a grid of heads, tiles and batch."""
  names = ("heads", "tiles", "batch")
  return gpu.call(function, name, interpret=options.interpret, grid_names=names, warpgroups=CONSUMERS + 1, **arguments)


def _barriers(arrivals: int, stages: int, prefix: str) -> dict[str, Any]:
  """The two barriers of a ring: so many loads fill a slot, and all that compute free it."""
  return {
    f"{prefix}_ready": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
    f"{prefix}_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
  }


def _forward_kernel(
  geometry: Geometry, passes, stages: int, q, k, v, lam, q_ids, kv_ids, offset, bounds, out, out2, lse,
  *, q_smem, k_smem, v_smem, out_smem, q_ready, k_ready, k_free, v_ready, v_free,
):  # fmt: skip
  """A tile of queries stays while blocks of keys pass, once for each of `passes`, which name the maps that are computed together."""
  head, batch, warpgroup = lax.axis_index("heads"), lax.axis_index("batch"), lax.axis_index("warpgroup")
  _, G, _, _ = q_smem.shape
  H = out.shape[2]
  M = k.shape[2] // v.shape[2]
  kv_head = lax.div(head, jnp.int32(H // v.shape[2]))
  tile = lax.axis_index("tiles") * CONSUMERS
  key_ring, value_ring = gpu.Ring(stages, k_ready, k_free), gpu.Ring(stages, v_ready, v_free)

  def consumer() -> None:
    plgpu.set_max_registers(240, action="increase")
    block = tile + warpgroup
    start, stop, own_start, own_stop, whole_start, whole_stop = gpu_blocks.scalars(bounds, batch, block)
    rows = pl.ds(block * BLOCK, BLOCK)
    for g in range(G):
      plgpu.copy_gmem_to_smem(q.at[batch, rows, head * G + g], q_smem.at[warpgroup, g], q_ready.at[warpgroup])
    limits = gpu_blocks.key_limits(geometry, offset, batch, block)
    plgpu.barrier_wait(q_ready.at[warpgroup])

    for n, maps in enumerate(passes):
      keys = _keys_of(maps, M)
      before = n * (stop - start)

      def attend(j, states, maps=maps, keys=keys, before=before):
        slot = key_ring.wait(before + j)

        def mask(logits):
          # Rows' ids are read again where they are needed: kept, they would take the registers that are left.
          ids = None
          if q_ids is not None:
            ids = gpu.load(q_ids.at[batch, rows], gpu.row()), gpu.load(kv_ids.at[batch, pl.ds(j * BLOCK, BLOCK)], gpu.column())
          return gpu.hide(logits, j * BLOCK, *limits, ids)

        here = gpu.in_loop(warpgroup, j)

        def weigh(*refs):
          for g, ref in zip(maps, refs, strict=True):
            plgpu.wgmma(ref, q_smem.at[here, g], k_smem.at[slot, keys.index(g % M)].T)
          results = []
          for i, (ref, (acc, peak, total)) in enumerate(zip(refs, states, strict=True)):
            logits = plgpu.wgmma_accumulator_load(ref, wait_n=len(maps) - 1 - i)
            if i == len(maps) - 1:
              key_ring.release(before + j)
            if gpu_blocks.cuts(geometry, q_ids):
              logits = lax.cond((j >= whole_start) & (j < whole_stop), lambda x: x, mask, logits)
            after = jnp.maximum(peak, jnp.max(logits, axis=1))
            weights = jnp.exp2(logits - gpu.rows_of(after, logits.shape))
            shrink = jnp.exp2(peak - after)
            results.append(
              (acc * gpu.rows_of(shrink, acc.shape), after, total * shrink + jnp.sum(weights, axis=1), weights.astype(q.dtype))
            )
          return results

        results = pl.run_scoped(weigh, *[plgpu.ACC((BLOCK, BLOCK), jnp.float32) for _ in maps])
        value_ring.wait(before + j)
        accs, peaks, totals, weights = zip(*results, strict=True)
        accs = gpu.accumulate([(acc, weight, v_smem.at[slot]) for acc, weight in zip(accs, weights, strict=True)])
        value_ring.release(before + j)
        return list(zip(accs, peaks, totals, strict=True))

      def skip(j, _, before=before):
        key_ring.skip(before + j)
        value_ring.skip(before + j)

      initial = [
        (gpu.full((BLOCK, v.shape[3]), 0, gpu.matrix()), gpu.full((BLOCK,), HIDDEN, gpu.row()), gpu.full((BLOCK,), 0, gpu.row()))
        for _ in maps
      ]
      lax.fori_loop(start, own_start, skip, None)
      states = lax.fori_loop(own_start, own_stop, attend, initial)
      lax.fori_loop(own_stop, stop, skip, None)

      for g, (acc, peak, total) in reversed(list(zip(maps, states, strict=True))):
        empty = peak <= HIDDEN / 2  # the row saw no key; whatever was added up counts for nothing
        result = acc * gpu.rows_of(jnp.where(empty, 0.0, 1 / total), acc.shape)
        if lse is not None:
          # An empty row's log-sum-exp makes its weights zero in the backward pass.
          lse[batch, head, g, rows] = jnp.where(empty, -HIDDEN, peak + jnp.log(total) * LOG2E)
        target = out
        if g == 1:
          target = out2
        elif G == 2:  # O₂ was rounded first, so that the backward pass, which reads it, agrees
          result = result - gpu.rows_of(gpu.load(lam.at[batch, head, rows], gpu.row()), acc.shape) * out_smem[warpgroup].astype(jnp.float32)
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem[warpgroup] = result.astype(out.dtype)
        if target is not None:
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], target.at[batch, rows, head])
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = gpu_blocks.scalars(bounds, batch, tile)[:2]
    for n, maps in enumerate(passes):

      @pl.loop(start, stop)
      def _(j, n=n, maps=maps):
        step, keys = n * (stop - start) + j, pl.ds(j * BLOCK, BLOCK)
        load_keys = lambda slot, ready: [
          plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head * M + m], k_smem.at[slot, i], ready) for i, m in enumerate(_keys_of(maps, M))
        ]
        key_ring.fill(step, start, load_keys)
        value_ring.fill(step, start, lambda slot, ready: plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[slot], ready))

    for ring in (key_ring, value_ring):
      ring.drain(start, start + len(passes) * (stop - start))

  pl.when(warpgroup < CONSUMERS)(consumer)
  pl.when(warpgroup == CONSUMERS)(producer)


def _d_q_kernel(
  geometry: Geometry, scale: float, split: bool, k_stages: int, v_stages: int, q, k, v, d_out, vectors, q_ids, kv_ids, offset, bounds, d_q,
  *, q_smem, d_out_smem, k_smem, v_smem, q_ready, k_ready, k_free, v_ready, v_free,
):  # fmt: skip
  """A tile of queries stays while blocks of keys pass.

  With `split` both consumers work on the same queries, one map each: beside the sums of both, a step's own numbers would not fit one's
  registers.
  """
  head, batch, warpgroup = lax.axis_index("heads"), lax.axis_index("batch"), lax.axis_index("warpgroup")
  (owners, G, _, D), M = q_smem.shape, k.shape[2] // v.shape[2]
  kv_head = lax.div(head, jnp.int32(d_out.shape[2] // v.shape[2]))
  tile = lax.axis_index("tiles") * owners
  key_ring, value_ring = gpu.Ring(k_stages, k_ready, k_free), gpu.Ring(v_stages, v_ready, v_free)

  def consumer(maps: Sequence[int]) -> None:
    plgpu.set_max_registers(240, action="increase")
    own = jnp.int32(0) if split else warpgroup
    block = tile + own
    start, stop, own_start, own_stop, whole_start, whole_stop = gpu_blocks.scalars(bounds, batch, block)
    rows = pl.ds(block * BLOCK, BLOCK)
    limits = gpu_blocks.key_limits(geometry, offset, batch, block)
    plgpu.barrier_wait(q_ready.at[own])

    def step(j, accs):
      here = gpu.in_loop(own, j)
      vector = lambda n: gpu.rows_of(gpu.load(vectors.at[batch, head, n, rows], gpu.row()), (BLOCK, BLOCK))
      d_weights = gpu.product(d_out_smem.at[here], v_smem.at[value_ring.wait(j)].T)  # dP, shared by the maps
      value_ring.release(j)
      slot = key_ring.wait(j)

      def mask(logits):
        ids = None
        if q_ids is not None:
          ids = gpu.load(q_ids.at[batch, rows], gpu.row()), gpu.load(kv_ids.at[batch, pl.ds(j * BLOCK, BLOCK)], gpu.column())
        return gpu.hide(logits, j * BLOCK, *limits, ids)

      for n, g in enumerate(maps):
        keys = k_smem.at[slot * M + g % M]
        logits = gpu.product(q_smem.at[here, g], keys.T)
        if gpu_blocks.cuts(geometry, q_ids):
          logits = lax.cond((j >= whole_start) & (j < whole_stop), lambda x: x, mask, logits)
        weights = jnp.exp2(logits - vector(g))
        if g == 1:
          weights *= -vector(2 * G)
        d_logits = weights * (d_weights - vector(G + g))
        [accs[n]] = gpu.accumulate([(accs[n], d_logits.astype(q.dtype), keys)])
      key_ring.release(j)
      return accs

    def skip(j, _):
      value_ring.skip(j)
      key_ring.skip(j)

    lax.fori_loop(start, own_start, skip, None)
    accs = lax.fori_loop(own_start, own_stop, step, [gpu.full((BLOCK, D), 0, gpu.matrix()) for _ in maps])
    lax.fori_loop(own_stop, stop, skip, None)
    for g, acc in zip(maps, accs, strict=True):
      q_smem[own, g] = (acc * scale).astype(q.dtype)
    plgpu.commit_smem()
    for g in maps:
      plgpu.copy_smem_to_gmem(q_smem.at[own, g], d_q.at[batch, rows, head * G + g])
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = gpu_blocks.scalars(bounds, batch, tile)[:2]
    for own in range(owners):
      rows = pl.ds((tile + own) * BLOCK, BLOCK)
      for g in range(G):
        plgpu.copy_gmem_to_smem(q.at[batch, rows, head * G + g], q_smem.at[own, g], q_ready.at[own])
      plgpu.copy_gmem_to_smem(d_out.at[batch, rows, head], d_out_smem.at[own], q_ready.at[own])

    @pl.loop(start, stop)
    def _(j):
      keys = pl.ds(j * BLOCK, BLOCK)
      load_keys = lambda slot, ready: [
        plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head * M + m], k_smem.at[slot * M + m], ready) for m in range(M)
      ]
      value_ring.fill(j, start, lambda slot, ready: plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[slot], ready))
      key_ring.fill(j, start, load_keys)

    value_ring.drain(start, stop)
    key_ring.drain(start, stop)

  if split:
    for g in range(G):
      pl.when(warpgroup == g)(functools.partial(consumer, (g,)))
  else:
    pl.when(warpgroup < CONSUMERS)(lambda: consumer(range(G)))
  pl.when(warpgroup == CONSUMERS)(producer)


def _d_kv_kernel(
  geometry: Geometry, split: bool, stages: int, q, k, v, d_out, vectors, q_ids, kv_ids, offset, bounds, d_k, d_v,
  *, q_smem, d_out_smem, vectors_smem, k_smem, v_smem, kv_ready, finished, q_ready, q_free, d_out_ready, d_out_free,
):  # fmt: skip
  """A tile of keys stays while the queries of all heads that share it pass; maps are transposed, keys × queries.

  With `split` both consumers work on the same keys, one on dK and the other on dV: beside the sums of all, a step's own numbers would not
  fit one's registers.
  """
  kv_head, batch, warpgroup = lax.axis_index("heads"), lax.axis_index("batch"), lax.axis_index("warpgroup")
  (owners, M, _, D), V = k_smem.shape, v_smem.shape[2]
  R, G = d_out.shape[2] // v.shape[2], q.shape[2] // d_out.shape[2]
  tile = lax.axis_index("tiles") * owners
  query_ring, d_out_ring = gpu.Ring(stages, q_ready, q_free), gpu.Ring(stages, d_out_ready, d_out_free)

  def consumer(wants_k: bool, wants_v: bool) -> None:
    plgpu.set_max_registers(240, action="increase")
    own = jnp.int32(0) if split else warpgroup
    block = tile + own
    start, stop, own_start, own_stop, whole_start, whole_stop = gpu_blocks.scalars(bounds, batch, block)
    limits = gpu_blocks.query_limits(geometry, block)
    plgpu.barrier_wait(kv_ready.at[own])

    def step(r, i, accs):
      d_k_accs, d_v_acc = accs
      here = gpu.in_loop(own, i)
      turn = r * (stop - start) + i
      slot = query_ring.wait(turn)
      d_out_ring.wait(turn)
      vector = lambda n: gpu.columns_of(plgpu.load(vectors_smem.at[slot, n], layout=gpu.column()), (BLOCK, BLOCK))

      def mask(logits):
        first = i * BLOCK + (geometry.q_offset if offset is None else offset[batch])
        ids = None
        if q_ids is not None:
          keys, queries = pl.ds(block * BLOCK, BLOCK), pl.ds(i * BLOCK, BLOCK)
          ids = gpu.load(kv_ids.at[batch, keys], gpu.row()), gpu.load(q_ids.at[batch, queries], gpu.column())
        return gpu.hide(logits, first, *limits, ids)

      d_weights = gpu.product(v_smem.at[here], d_out_smem.at[slot].T) if wants_k else None  # dP, shared by the maps
      combined: Any = None  # A₁ − λA₂
      for g in range(G):
        queries = q_smem.at[slot * G + g]
        logits = gpu.product(k_smem.at[here, g % M], queries.T)
        if limits != (None, None) or q_ids is not None:
          logits = lax.cond((i >= whole_start) & (i < whole_stop), lambda x: x, mask, logits)
        weights = jnp.exp2(logits - vector(g))
        if g == 1:
          weights *= -vector(2 * G)
        if wants_v:
          combined = weights if combined is None else combined + weights
        if wants_k:
          d_logits = (weights * (d_weights - vector(G + g))).astype(q.dtype)
          [d_k_accs[g % M]] = gpu.accumulate([(d_k_accs[g % M], d_logits, queries)])
      plgpu.commit_smem()  # the vectors were read without wgmma: before TMA writes there again
      query_ring.release(turn)
      if wants_v:
        [d_v_acc] = gpu.accumulate([(d_v_acc, combined.astype(q.dtype), d_out_smem.at[slot])])
      d_out_ring.release(turn)
      return d_k_accs, d_v_acc

    def skip(r, i):
      for ring in (query_ring, d_out_ring):
        ring.skip(r * (stop - start) + i)

    def one_head(r, accs):
      lax.fori_loop(start, own_start, lambda i, _: skip(r, i), None)
      accs = lax.fori_loop(own_start, own_stop, lambda i, accs: step(r, i, accs), accs)
      lax.fori_loop(own_stop, stop, lambda i, _: skip(r, i), None)
      return accs

    zeros = lambda width: gpu.full((BLOCK, width), 0, gpu.matrix())
    d_k_accs, d_v_acc = lax.fori_loop(0, R, one_head, ([zeros(D) for _ in range(M * wants_k)], zeros(V) if wants_v else None))
    if split:  # the other one may still read what the gradients overwrite
      plgpu.barrier_arrive(finished)
      plgpu.barrier_wait(finished)
    for m, acc in enumerate(d_k_accs):
      k_smem[own, m] = (acc * (1 / LOG2E)).astype(q.dtype)  # the queries carry scale·log₂e
    if wants_v:
      v_smem[own] = d_v_acc.astype(q.dtype)
    plgpu.commit_smem()
    keys = pl.ds(block * BLOCK, BLOCK)
    for m in range(len(d_k_accs)):
      plgpu.copy_smem_to_gmem(k_smem.at[own, m], d_k.at[batch, keys, kv_head * M + m])
    if wants_v:
      plgpu.copy_smem_to_gmem(v_smem.at[own], d_v.at[batch, keys, kv_head])
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = gpu_blocks.scalars(bounds, batch, tile)[:2]
    for own in range(owners):
      keys = pl.ds((tile + own) * BLOCK, BLOCK)
      for m in range(M):
        plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head * M + m], k_smem.at[own, m], kv_ready.at[own])
      plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[own], kv_ready.at[own])

    @pl.loop(0, R)
    def _(r):
      head = kv_head * R + r

      @pl.loop(start, stop)
      def _(i):
        turn, rows = r * (stop - start) + i, pl.ds(i * BLOCK, BLOCK)

        def load_queries(slot, ready):
          for g in range(G):
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head * G + g], q_smem.at[slot * G + g], ready)
          plgpu.copy_gmem_to_smem(vectors.at[batch, head, :, rows], vectors_smem.at[slot], ready)

        query_ring.fill(turn, start, load_queries)
        d_out_ring.fill(turn, start, lambda slot, ready: plgpu.copy_gmem_to_smem(d_out.at[batch, rows, head], d_out_smem.at[slot], ready))

    for ring in (query_ring, d_out_ring):
      ring.drain(start, start + R * (stop - start))

  if split:
    pl.when(warpgroup == 0)(lambda: consumer(True, False))
    pl.when(warpgroup == 1)(lambda: consumer(False, True))
  else:
    pl.when(warpgroup < CONSUMERS)(lambda: consumer(True, True))
  pl.when(warpgroup == CONSUMERS)(producer)


def _keys_of(maps: Sequence[int], M: int) -> list[int]:
  """The key maps that these maps meet."""
  return sorted({g % M for g in maps})


def _variant(G: int, M: int) -> str:
  return "plain" if G == 1 else "v2" if M == 1 else "v1"
