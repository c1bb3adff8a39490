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

import contextlib
import contextvars
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import residuals
from diffjax.ops.diff_attention.schedule import pad
from diffjax.ops.diff_attention.tiles import Geometry
from diffjax.ops.diff_attention.tpu import HIDDEN, LOG2E, round_up
from diffjax.ops.varying import vary_like

plgpu: Any = mosaic_gpu  # untyped: older JAX, on which this module only refuses, has another API

_BLOCK = 64  # queries of a consumer warpgroup, which is the height of a wgmma, and keys of a block
_CONSUMERS = 2
_SMEM_BYTES = 232_448 - 1024  # what a thread block may use, less what barriers take
_MOST_STAGES = 4

_interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=None)


@contextlib.contextmanager
def interpreted(params: Any = None) -> Iterator[None]:
  """Within it the kernels run in Pallas's interpreter of Mosaic GPU, on any backend: for tests. `params`: a `plgpu.InterpretGPUParams`."""
  token = _interpret.set(plgpu.InterpretGPUParams() if params is None else params)
  try:
    yield
  finally:
    _interpret.reset(token)


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
  if problem := refusal():
    raise ValueError(f"implementation = 'pallas_gpu' {problem}; use implementation='chunked' or 'auto'")
  if not takes(q, v):
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}) and v (V = {v.shape[-1]}) are not taken by implementation 'pallas_gpu', which takes bfloat16 and "
      "float16, D up to 128 and V up to 256: cast them, or use implementation='chunked'"
    )
  static, offset = (q_offset, None) if isinstance(q_offset, int) else (None, q_offset)
  options = _Options(Geometry(causal, window, static, q.shape[1], k.shape[1]), scale, _interpret.get())
  arrays = (q, k, v, lam, q_segment_ids, kv_segment_ids, offset)
  # Inside shard_map an array that all devices share must be made each device's own before the custom VJP, or its gradient is not summed.
  return _attend(options, *(None if x is None else vary_like(x, *arrays) for x in arrays))


def takes(q: jax.Array, v: jax.Array) -> bool:
  """Whether the kernel takes arrays of such dtypes and widths."""
  return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] <= 128 and v.shape[-1] <= 256


def refusal() -> str | None:
  """Why the kernel cannot run in this program, if so: what it needs, and what there is."""
  if jax.__version_info__ < (0, 11, 2):
    return f"needs JAX 0.11.2 or newer, and this is {jax.__version__}"
  if _interpret.get() is not None:
    return None
  needed = "needs a Hopper GPU (compute capability 9.0)"
  abstract = jax.sharding.get_abstract_mesh().abstract_device  # set when compiling ahead of time, and knows the name only
  device = jax.devices()[0]
  if abstract is not None and abstract.device_kind != device.device_kind:
    return None if re.search(r"\bG?H(20|100|200|800)\b", abstract.device_kind) else f"{needed}, and this is {abstract.device_kind}"
  if device.platform != "gpu":
    return f"{needed}, and the backend is {jax.default_backend()!r}"
  return None if device.compute_capability == "9.0" else f"{needed}, and this is {device.device_kind}, {device.compute_capability}"


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
  passes = ((1,), (0,)) if G == 2 and (D > _BLOCK or V > 2 * _BLOCK) else (tuple(range(G)),)
  loaded = max(len(_keys_of(maps, M)) for maps in passes)
  fixed, slot = _CONSUMERS * _BLOCK * (G * D + V), _BLOCK * (loaded * D + V)
  stages = _stages(2 * fixed, 2 * slot)
  bounds = _bounds(options.geometry, offset, q_ids, kv_ids, shared=_CONSUMERS)
  out_like = ((B, rows, H, V), q.dtype)
  out, out2, lse = _call(
    functools.partial(_forward_kernel, options.geometry, passes, stages), options, f"diff_attention_forward_{_variant(G, M)}",
    grid=(H, rows // (_CONSUMERS * _BLOCK), B), like=q,
    outputs=(out_like, out_like if G == 2 and save else None, ((B, H, G, rows), jnp.float32) if save else None),
    scratch=dict(
      q_smem=_tiled((_CONSUMERS, G, _BLOCK, D), q.dtype),
      k_smem=_tiled((stages, loaded, _BLOCK, D), q.dtype),
      v_smem=_tiled((stages, _BLOCK, V), q.dtype),
      out_smem=_tiled((_CONSUMERS, _BLOCK, V), q.dtype),
      q_ready=plgpu.Barrier(num_arrivals=G, num_barriers=_CONSUMERS),
      k_ready=plgpu.Barrier(num_arrivals=loaded, num_barriers=stages),
      k_free=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
      v_ready=plgpu.Barrier(num_barriers=stages),
      v_free=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
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

  split = G == 2 and D > _BLOCK
  owners = 1 if split else _CONSUMERS
  fixed, k_slot, v_slot = 2 * owners * _BLOCK * (G * D + V), 2 * _BLOCK * M * D, 2 * _BLOCK * V
  v_stages = max(1, _stages(fixed, k_slot + v_slot))
  k_stages = _stages(fixed + v_stages * v_slot, k_slot)
  (d_q,) = _call(
    functools.partial(_d_q_kernel, options.geometry, options.scale, split, k_stages, v_stages),
    options, f"diff_attention_d_q_{_variant(G, M)}",
    grid=(H, rows // (owners * _BLOCK), B), like=q, outputs=((q.shape, q.dtype),),
    scratch=dict(
      q_smem=_tiled((owners, G, _BLOCK, D), q.dtype),
      d_out_smem=_tiled((owners, _BLOCK, V), q.dtype),
      k_smem=_tiled((k_stages * M, _BLOCK, D), q.dtype),
      v_smem=_tiled((v_stages, _BLOCK, V), q.dtype),
      q_ready=plgpu.Barrier(num_arrivals=G + 1, num_barriers=owners),
      k_ready=plgpu.Barrier(num_arrivals=M, num_barriers=k_stages),
      k_free=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=k_stages),
      v_ready=plgpu.Barrier(num_barriers=v_stages),
      v_free=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=v_stages),
    ),
  )(*arrays, _bounds(options.geometry, offset, *ids, shared=owners))  # fmt: skip

  split = G == 2
  owners = 1 if split else _CONSUMERS
  fixed, slot = 2 * owners * _BLOCK * (M * D + V), 2 * _BLOCK * (G * D + V) + 4 * vectors.shape[2] * _BLOCK
  stages = _stages(fixed, slot)
  d_k, d_v = _call(
    functools.partial(_d_kv_kernel, options.geometry, split, stages), options, f"diff_attention_d_kv_{_variant(G, M)}",
    grid=(K, keys // (owners * _BLOCK), B), like=q, outputs=((k.shape, k.dtype), (v.shape, v.dtype)),
    scratch=dict(
      q_smem=_tiled((stages * G, _BLOCK, D), q.dtype),
      d_out_smem=_tiled((stages, _BLOCK, V), q.dtype),
      vectors_smem=plgpu.SMEM((stages, vectors.shape[2], _BLOCK), jnp.float32),
      k_smem=_tiled((owners, M, _BLOCK, D), q.dtype),
      v_smem=_tiled((owners, _BLOCK, V), q.dtype),
      kv_ready=plgpu.Barrier(num_arrivals=M + 1, num_barriers=owners),
      finished=plgpu.Barrier(num_arrivals=_CONSUMERS),
      q_ready=plgpu.Barrier(num_arrivals=G + 1, num_barriers=stages),
      q_free=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
      d_out_ready=plgpu.Barrier(num_barriers=stages),
      d_out_free=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
    ),
  )(*arrays, _bounds(options.geometry, offset, *ids, shared=owners, keys_stay=True))  # fmt: skip
  return (d_q[:, :T, :, :D_in].reshape(B, T, H, G, D_in), d_k[:, :S, :, :D_in].reshape(B, S, K, M, D_in), d_v[:, :S, :, :V_in], d_lam)


def _operands(options: _Options, q, k, v, lam, q_ids, kv_ids):
  """Padded to whole tiles: q [B, rows, H·G, D] times scale·log₂e, k [B, keys, K·M, D], v [B, keys, K, V], λ [B, H, rows], ids."""
  rows, keys = round_up(q.shape[1], _CONSUMERS * _BLOCK), round_up(k.shape[1], _CONSUMERS * _BLOCK)
  folded = lambda x, length: pad(pad(x.reshape(*x.shape[:2], -1, x.shape[-1]), 1, length), 3, round_up(x.shape[-1], _BLOCK))
  q = (q.astype(jnp.float32) * (options.scale * LOG2E)).astype(q.dtype)
  lam = None if lam is None else pad(jnp.swapaxes(lam, 1, 2), 2, rows)
  ids = (None, None) if q_ids is None else (pad(q_ids.astype(jnp.int32), 1, rows), pad(kv_ids.astype(jnp.int32), 1, keys))
  return folded(q, rows), folded(k, keys), folded(v, keys), lam, *ids


def _bounds(geometry: Geometry, offset, q_ids, kv_ids, *, shared: int, keys_stay: bool = False):
  """Which blocks pass by each block that stays, int32[B or 1, blocks, 6].

  The first one and the last one + 1 that are loaded for the `shared` blocks of a tile; those that the block's own mask shows; and those
  of a run that it shows whole.
  """
  count = lambda length: round_up(length, _CONSUMERS * _BLOCK) // _BLOCK
  xp: Any = np if geometry.q_offset is not None and q_ids is None else jnp
  start = xp.zeros((1,), xp.int32) + (geometry.q_offset or 0) if offset is None else offset
  rows, k0 = _BLOCK * xp.arange(count(geometry.q_length))[:, None], _BLOCK * xp.arange(count(geometry.kv_length))
  p0 = start[:, None, None] + rows
  tile = p0, p0 + _BLOCK - 1, k0, k0 + _BLOCK - 1
  some = xp.broadcast_to(geometry.some(*tile), (start.shape[0], rows.size, k0.size)) & (rows < geometry.q_length)
  whole = xp.broadcast_to(geometry.every(*tile), some.shape)
  if q_ids is not None:
    q_low, q_high, kv_low, kv_high = (
      reduce(pad(ids, 1, n * _BLOCK).reshape(ids.shape[0], n, _BLOCK), axis=2)
      for ids, n in ((q_ids, rows.size), (kv_ids, k0.size))
      for reduce in (jnp.min, jnp.max)
    )
    q_low, q_high, kv_low, kv_high = q_low[:, :, None], q_high[:, :, None], kv_low[:, None], kv_high[:, None]
    some = some & (q_low <= kv_high) & (kv_low <= q_high)
    whole = whole & (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
  if keys_stay:
    some, whole = xp.swapaxes(some, 1, 2), xp.swapaxes(whole, 1, 2)
  whole = whole & some
  first, stop = xp.argmax(some, axis=2), some.shape[2] - xp.argmax(xp.flip(some, 2), axis=2)
  any_, any_whole = xp.any(some, axis=2), xp.any(whole, axis=2)
  tiles = lambda x, reduce: xp.repeat(reduce(x.reshape(x.shape[0], -1, shared), axis=2), shared, axis=1)
  shared_stop = tiles(xp.where(any_, stop, 0), xp.max)
  shared_first = xp.minimum(tiles(xp.where(any_, first, some.shape[2]), xp.min), shared_stop)
  whole_first = xp.argmax(whole, axis=2)
  after = ~whole & (xp.arange(some.shape[2]) > whole_first[:, :, None])
  whole_stop = xp.where(xp.any(after, axis=2), xp.argmax(after, axis=2), some.shape[2])
  columns = (
    shared_first, shared_stop, xp.where(any_, first, shared_first), xp.where(any_, stop, shared_first),
    whole_first, xp.where(any_whole, whole_stop, whole_first),
  )  # fmt: skip
  return jnp.asarray(xp.stack(columns, axis=2), jnp.int32)


def _call(function, options: _Options, name: str, *, grid, outputs, scratch, like):
  """`plgpu.kernel` over a grid of heads, tiles and batch, with outputs as (shape, dtype) or None."""
  varying = jax.typeof(like).manual_axis_type

  def body(*refs, **scratch):
    token = _interpret.set(options.interpret)  # a backward pass may be traced outside of `interpreted`
    try:
      function(*refs, **scratch)
    finally:
      _interpret.reset(token)

  return plgpu.kernel(
    body,
    out_type=tuple(None if x is None else jax.ShapeDtypeStruct(*x, manual_axis_type=varying) for x in outputs),
    scratch_types=scratch,
    grid=grid,
    grid_names=("heads", "tiles", "batch"),
    num_threads=_CONSUMERS + 1,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    interpret=options.interpret,
    kernel_name=name,
  )


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
  tile = lax.axis_index("tiles") * _CONSUMERS

  def consumer() -> None:
    plgpu.set_max_registers(240, action="increase")
    block = tile + warpgroup
    start, stop, own_start, own_stop, whole_start, whole_stop = _scalars(bounds, batch, block)
    rows = pl.ds(block * _BLOCK, _BLOCK)
    for g in range(G):
      plgpu.copy_gmem_to_smem(q.at[batch, rows, head * G + g], q_smem.at[warpgroup, g], q_ready.at[warpgroup])
    limits = _key_limits(geometry, offset, batch, block)
    plgpu.barrier_wait(q_ready.at[warpgroup])

    for n, maps in enumerate(passes):
      keys = _keys_of(maps, M)
      before = n * (stop - start)

      def attend(j, states, maps=maps, keys=keys, before=before):
        slot = lax.rem(before + j, jnp.int32(stages))
        plgpu.barrier_wait(k_ready.at[slot])

        def mask(logits):
          # Rows' ids are read again where they are needed: kept, they would take the registers that are left.
          ids = None
          if q_ids is not None:
            ids = _load(q_ids.at[batch, rows], _row()), _load(kv_ids.at[batch, pl.ds(j * _BLOCK, _BLOCK)], _column())
          return _hide(logits, j * _BLOCK, *limits, ids)

        here = _in_loop(warpgroup, j)

        def weigh(*refs):
          for g, ref in zip(maps, refs, strict=True):
            plgpu.wgmma(ref, q_smem.at[here, g], k_smem.at[slot, keys.index(g % M)].T)
          results = []
          for i, (ref, (acc, peak, total)) in enumerate(zip(refs, states, strict=True)):
            logits = plgpu.wgmma_accumulator_load(ref, wait_n=len(maps) - 1 - i)
            if i == len(maps) - 1:
              plgpu.barrier_arrive(k_free.at[slot])
            if _cuts(geometry, q_ids):
              logits = lax.cond((j >= whole_start) & (j < whole_stop), lambda x: x, mask, logits)
            after = jnp.maximum(peak, jnp.max(logits, axis=1))
            weights = jnp.exp2(logits - _rows(after, logits.shape))
            shrink = jnp.exp2(peak - after)
            results.append((acc * _rows(shrink, acc.shape), after, total * shrink + jnp.sum(weights, axis=1), weights.astype(q.dtype)))
          return results

        results = pl.run_scoped(weigh, *[plgpu.ACC((_BLOCK, _BLOCK), jnp.float32) for _ in maps])
        plgpu.barrier_wait(v_ready.at[slot])
        accs, peaks, totals, weights = zip(*results, strict=True)
        accs = _accumulate([(acc, weight, v_smem.at[slot]) for acc, weight in zip(accs, weights, strict=True)])
        plgpu.barrier_arrive(v_free.at[slot])
        return list(zip(accs, peaks, totals, strict=True))

      def skip(j, _, before=before):
        slot = lax.rem(before + j, jnp.int32(stages))
        for ready, free in ((k_ready, k_free), (v_ready, v_free)):
          plgpu.barrier_wait(ready.at[slot])
          plgpu.barrier_arrive(free.at[slot])

      initial = [(_full((_BLOCK, v.shape[3]), 0, _matrix()), _full((_BLOCK,), HIDDEN, _row()), _full((_BLOCK,), 0, _row())) for _ in maps]
      lax.fori_loop(start, own_start, skip, None)
      states = lax.fori_loop(own_start, own_stop, attend, initial)
      lax.fori_loop(own_stop, stop, skip, None)

      for g, (acc, peak, total) in reversed(list(zip(maps, states, strict=True))):
        empty = peak <= HIDDEN / 2  # the row saw no key; whatever was added up counts for nothing
        result = acc * _rows(jnp.where(empty, 0.0, 1 / total), acc.shape)
        if lse is not None:
          # An empty row's log-sum-exp makes its weights zero in the backward pass.
          lse[batch, head, g, rows] = jnp.where(empty, -HIDDEN, peak + jnp.log(total) * LOG2E)
        target = out
        if g == 1:
          target = out2
        elif G == 2:  # O₂ was rounded first, so that the backward pass, which reads it, agrees
          result = result - _rows(_load(lam.at[batch, head, rows], _row()), acc.shape) * out_smem[warpgroup].astype(jnp.float32)
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem[warpgroup] = result.astype(out.dtype)
        if target is not None:
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], target.at[batch, rows, head])
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = _scalars(bounds, batch, tile)[:2]
    for n, maps in enumerate(passes):

      @pl.loop(start, stop)
      def _(j, n=n, maps=maps):
        step, keys = n * (stop - start) + j, pl.ds(j * _BLOCK, _BLOCK)
        load_keys = lambda slot: [
          plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head * M + m], k_smem.at[slot, i], k_ready.at[slot])
          for i, m in enumerate(_keys_of(maps, M))
        ]
        load_values = lambda slot: plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[slot], v_ready.at[slot])
        _fill(step, start, stages, k_free, load_keys)
        _fill(step, start, stages, v_free, load_values)

    for free in (k_free, v_free):
      _drain(start, start + len(passes) * (stop - start), stages, free)

  pl.when(warpgroup < _CONSUMERS)(consumer)
  pl.when(warpgroup == _CONSUMERS)(producer)


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

  def consumer(maps: Sequence[int]) -> None:
    plgpu.set_max_registers(240, action="increase")
    own = jnp.int32(0) if split else warpgroup
    block = tile + own
    start, stop, own_start, own_stop, whole_start, whole_stop = _scalars(bounds, batch, block)
    rows = pl.ds(block * _BLOCK, _BLOCK)
    limits = _key_limits(geometry, offset, batch, block)
    plgpu.barrier_wait(q_ready.at[own])

    def step(j, accs):
      here = _in_loop(own, j)
      vector = lambda n: _rows(_load(vectors.at[batch, head, n, rows], _row()), (_BLOCK, _BLOCK))
      k_slot, v_slot = lax.rem(j, jnp.int32(k_stages)), lax.rem(j, jnp.int32(v_stages))
      plgpu.barrier_wait(v_ready.at[v_slot])
      d_weights = _product(d_out_smem.at[here], v_smem.at[v_slot].T)  # dP, shared by the maps
      plgpu.barrier_arrive(v_free.at[v_slot])
      plgpu.barrier_wait(k_ready.at[k_slot])

      def mask(logits):
        ids = None
        if q_ids is not None:
          ids = _load(q_ids.at[batch, rows], _row()), _load(kv_ids.at[batch, pl.ds(j * _BLOCK, _BLOCK)], _column())
        return _hide(logits, j * _BLOCK, *limits, ids)

      for n, g in enumerate(maps):
        keys = k_smem.at[k_slot * M + g % M]
        logits = _product(q_smem.at[here, g], keys.T)
        if _cuts(geometry, q_ids):
          logits = lax.cond((j >= whole_start) & (j < whole_stop), lambda x: x, mask, logits)
        weights = jnp.exp2(logits - vector(g))
        if g == 1:
          weights *= -vector(2 * G)
        d_logits = weights * (d_weights - vector(G + g))
        [accs[n]] = _accumulate([(accs[n], d_logits.astype(q.dtype), keys)])
      plgpu.barrier_arrive(k_free.at[k_slot])
      return accs

    def skip(j, _):
      for ready, free, stages in ((v_ready, v_free, v_stages), (k_ready, k_free, k_stages)):
        plgpu.barrier_wait(ready.at[lax.rem(j, jnp.int32(stages))])
        plgpu.barrier_arrive(free.at[lax.rem(j, jnp.int32(stages))])

    lax.fori_loop(start, own_start, skip, None)
    accs = lax.fori_loop(own_start, own_stop, step, [_full((_BLOCK, D), 0, _matrix()) for _ in maps])
    lax.fori_loop(own_stop, stop, skip, None)
    for g, acc in zip(maps, accs, strict=True):
      q_smem[own, g] = (acc * scale).astype(q.dtype)
    plgpu.commit_smem()
    for g in maps:
      plgpu.copy_smem_to_gmem(q_smem.at[own, g], d_q.at[batch, rows, head * G + g])
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = _scalars(bounds, batch, tile)[:2]
    for own in range(owners):
      rows = pl.ds((tile + own) * _BLOCK, _BLOCK)
      for g in range(G):
        plgpu.copy_gmem_to_smem(q.at[batch, rows, head * G + g], q_smem.at[own, g], q_ready.at[own])
      plgpu.copy_gmem_to_smem(d_out.at[batch, rows, head], d_out_smem.at[own], q_ready.at[own])

    @pl.loop(start, stop)
    def _(j):
      keys = pl.ds(j * _BLOCK, _BLOCK)
      load_values = lambda slot: plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[slot], v_ready.at[slot])
      load_keys = lambda slot: [
        plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head * M + m], k_smem.at[slot * M + m], k_ready.at[slot]) for m in range(M)
      ]
      _fill(j, start, v_stages, v_free, load_values)
      _fill(j, start, k_stages, k_free, load_keys)

    _drain(start, stop, v_stages, v_free)
    _drain(start, stop, k_stages, k_free)

  if split:
    for g in range(G):
      pl.when(warpgroup == g)(functools.partial(consumer, (g,)))
  else:
    pl.when(warpgroup < _CONSUMERS)(lambda: consumer(range(G)))
  pl.when(warpgroup == _CONSUMERS)(producer)


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

  def consumer(wants_k: bool, wants_v: bool) -> None:
    plgpu.set_max_registers(240, action="increase")
    own = jnp.int32(0) if split else warpgroup
    block = tile + own
    start, stop, own_start, own_stop, whole_start, whole_stop = _scalars(bounds, batch, block)
    limits = _query_limits(geometry, block)
    plgpu.barrier_wait(kv_ready.at[own])

    def step(r, i, accs):
      d_k_accs, d_v_acc = accs
      here = _in_loop(own, i)
      slot = lax.rem(r * (stop - start) + i, jnp.int32(stages))
      plgpu.barrier_wait(q_ready.at[slot])
      plgpu.barrier_wait(d_out_ready.at[slot])
      vector = lambda n: _columns(plgpu.load(vectors_smem.at[slot, n], layout=_column()), (_BLOCK, _BLOCK))

      def mask(logits):
        first = i * _BLOCK + (geometry.q_offset if offset is None else offset[batch])
        ids = None
        if q_ids is not None:
          keys, queries = pl.ds(block * _BLOCK, _BLOCK), pl.ds(i * _BLOCK, _BLOCK)
          ids = _load(kv_ids.at[batch, keys], _row()), _load(q_ids.at[batch, queries], _column())
        return _hide(logits, first, *limits, ids)

      d_weights = _product(v_smem.at[here], d_out_smem.at[slot].T) if wants_k else None  # dP, shared by the maps
      combined: Any = None  # A₁ − λA₂
      for g in range(G):
        queries = q_smem.at[slot * G + g]
        logits = _product(k_smem.at[here, g % M], queries.T)
        if limits != (None, None) or q_ids is not None:
          logits = lax.cond((i >= whole_start) & (i < whole_stop), lambda x: x, mask, logits)
        weights = jnp.exp2(logits - vector(g))
        if g == 1:
          weights *= -vector(2 * G)
        if wants_v:
          combined = weights if combined is None else combined + weights
        if wants_k:
          d_logits = (weights * (d_weights - vector(G + g))).astype(q.dtype)
          [d_k_accs[g % M]] = _accumulate([(d_k_accs[g % M], d_logits, queries)])
      plgpu.commit_smem()  # the vectors were read without wgmma: before TMA writes there again
      plgpu.barrier_arrive(q_free.at[slot])
      if wants_v:
        [d_v_acc] = _accumulate([(d_v_acc, combined.astype(q.dtype), d_out_smem.at[slot])])
      plgpu.barrier_arrive(d_out_free.at[slot])
      return d_k_accs, d_v_acc

    def skip(r, i):
      slot = lax.rem(r * (stop - start) + i, jnp.int32(stages))
      for ready, free in ((q_ready, q_free), (d_out_ready, d_out_free)):
        plgpu.barrier_wait(ready.at[slot])
        plgpu.barrier_arrive(free.at[slot])

    def one_head(r, accs):
      lax.fori_loop(start, own_start, lambda i, _: skip(r, i), None)
      accs = lax.fori_loop(own_start, own_stop, lambda i, accs: step(r, i, accs), accs)
      lax.fori_loop(own_stop, stop, lambda i, _: skip(r, i), None)
      return accs

    zeros = lambda width: _full((_BLOCK, width), 0, _matrix())
    d_k_accs, d_v_acc = lax.fori_loop(0, R, one_head, ([zeros(D) for _ in range(M * wants_k)], zeros(V) if wants_v else None))
    if split:  # the other one may still read what the gradients overwrite
      plgpu.barrier_arrive(finished)
      plgpu.barrier_wait(finished)
    for m, acc in enumerate(d_k_accs):
      k_smem[own, m] = (acc * (1 / LOG2E)).astype(q.dtype)  # the queries carry scale·log₂e
    if wants_v:
      v_smem[own] = d_v_acc.astype(q.dtype)
    plgpu.commit_smem()
    keys = pl.ds(block * _BLOCK, _BLOCK)
    for m in range(len(d_k_accs)):
      plgpu.copy_smem_to_gmem(k_smem.at[own, m], d_k.at[batch, keys, kv_head * M + m])
    if wants_v:
      plgpu.copy_smem_to_gmem(v_smem.at[own], d_v.at[batch, keys, kv_head])
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = _scalars(bounds, batch, tile)[:2]
    for own in range(owners):
      keys = pl.ds((tile + own) * _BLOCK, _BLOCK)
      for m in range(M):
        plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head * M + m], k_smem.at[own, m], kv_ready.at[own])
      plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[own], kv_ready.at[own])

    @pl.loop(0, R)
    def _(r):
      head = kv_head * R + r

      @pl.loop(start, stop)
      def _(i):
        step, rows = r * (stop - start) + i, pl.ds(i * _BLOCK, _BLOCK)

        def load_queries(slot):
          for g in range(G):
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head * G + g], q_smem.at[slot * G + g], q_ready.at[slot])
          plgpu.copy_gmem_to_smem(vectors.at[batch, head, :, rows], vectors_smem.at[slot], q_ready.at[slot])

        load_d_out = lambda slot: plgpu.copy_gmem_to_smem(d_out.at[batch, rows, head], d_out_smem.at[slot], d_out_ready.at[slot])
        _fill(step, start, stages, q_free, load_queries)
        _fill(step, start, stages, d_out_free, load_d_out)

    for free in (q_free, d_out_free):
      _drain(start, start + R * (stop - start), stages, free)

  if split:
    pl.when(warpgroup == 0)(lambda: consumer(True, False))
    pl.when(warpgroup == 1)(lambda: consumer(False, True))
  else:
    pl.when(warpgroup < _CONSUMERS)(lambda: consumer(True, True))
  pl.when(warpgroup == _CONSUMERS)(producer)


def _fill(step, first, stages: int, free, load) -> None:
  """Loads into the slot of a step, once it is free; steps are counted from `first`."""
  slot = lax.rem(step, jnp.int32(stages))
  pl.when(step - first >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
  load(slot)


def _drain(first, stop, stages: int, free) -> None:
  """Waits until the last slots were freed, so that every phase of the barriers is observed."""

  @pl.loop(lax.max(stop - stages, first), stop)
  def _(step):
    plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(stages))])


def _in_loop(index, step):
  """The index, as the compiler cannot know in a loop of fewer than 2³⁰ steps.

  What does not change in a loop is computed before it, and kept: for wgmma the address of each 16 columns of an operand that stays, in two
  registers each, which are better used for sums.
  """
  return index + lax.shift_right_logical(step, jnp.int32(30))


def _product(a, b) -> jax.Array:
  """a·b, both in shared memory."""

  def multiply(ref):
    plgpu.wgmma(ref, a, b)
    return ref[...]

  return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _accumulate(products: Sequence[tuple[jax.Array, jax.Array, Any]]) -> Sequence[jax.Array]:
  """acc + a·b for each (acc, a, b), a in registers and b in shared memory; all are in flight at once.

  Where b is one of several in a buffer, its index must be traced: `pl.run_state` takes no numbers in.
  """
  if _interpret.get() is not None:  # the interpreter takes neither accumulators with a value nor `a` in registers
    sums = [acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32) for acc, a, b in products]
    plgpu.commit_smem()  # b was read without wgmma: before TMA writes there again
    return sums

  def multiply(refs):
    for ref, (_, a, b) in zip(refs, products, strict=True):
      plgpu.wgmma(ref, a, b)

  return pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc, _, _ in products))


def _cuts(geometry: Geometry, q_ids) -> bool:
  """Whether the mask can cut a block at all."""
  return q_ids is not None or geometry.causal or geometry.window is not None or geometry.kv_length % _BLOCK > 0


def _key_limits(geometry: Geometry, offset, batch, block):
  """First and last key that the queries of a block see, by position: numbers, or one a row."""
  positions: Any = 0
  if geometry.causal or geometry.window is not None:  # what is not used has no layout
    positions = _iota(_row()) + (block * _BLOCK + (geometry.q_offset if offset is None else offset[batch]))
  return geometry.keys_of(positions, positions)


def _query_limits(geometry: Geometry, block):
  """First and last query that see the keys of a block, by position: one a row, or None. Who sees padding does not matter."""
  if not geometry.causal and geometry.window is None:
    return None, None
  keys, reach = _iota(_row()) + block * _BLOCK, (geometry.window or 1) - 1
  return keys if geometry.causal else keys - reach, None if geometry.window is None else keys + reach


def _hide(logits: jax.Array, start, first, last, ids) -> jax.Array:
  """Logits but for columns `first` to `last`, where the first column is `start`; `ids` of rows and columns must agree."""
  # Compared with limits a row, columns take a register each; the mask of distances would take one an element, in every turn of the loop.
  columns = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=_matrix())
  limit = lambda x: x - start if isinstance(x, int) else _rows(x - start, logits.shape)
  conditions = []
  if last is not None:
    conditions.append(columns <= limit(last))
  if first is not None and not (isinstance(first, int) and first == 0):
    conditions.append(columns >= limit(first))
  if ids is not None:
    conditions.append(_rows(ids[0], logits.shape) == _columns(ids[1], logits.shape))
  return jnp.where(functools.reduce(jnp.logical_and, conditions), logits, HIDDEN)


def _scalars(table, batch, block) -> list[jax.Array]:
  return [table[0 if table.shape[0] == 1 else batch, block, n] for n in range(table.shape[2])]


def _keys_of(maps: Sequence[int], M: int) -> list[int]:
  """The key maps that these maps meet."""
  return sorted({g % M for g in maps})


def _tiled(shape: tuple[int, ...], dtype: Any):
  """Shared memory as TMA and wgmma want it: tiles of 8 rows of 128 bytes, swizzled."""
  return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, _BLOCK)), plgpu.SwizzleTransform(128)))


def _stages(fixed_bytes: int, slot_bytes: int) -> int:
  return min(_MOST_STAGES, (_SMEM_BYTES - fixed_bytes) // slot_bytes)


def _matrix():
  return plgpu.Layout.WGMMA


def _row():
  """One value a row of a matrix."""
  return plgpu.Layout.WGMMA.reduce(1)


def _column():
  """One value a column of a matrix."""
  return plgpu.Layout.WGMMA.reduce(0)


def _rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return lax.broadcast_in_dim(x, shape, [0])


def _columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return lax.broadcast_in_dim(x, shape, [1])


def _full(shape: tuple[int, ...], value: float, layout) -> jax.Array:
  return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _iota(layout) -> jax.Array:
  return plgpu.broadcasted_iota(jnp.int32, (_BLOCK,), 0, layout=layout)


def _load(ref, layout) -> jax.Array:
  return plgpu.load(ref, layout=layout, optimized=False)


def _variant(G: int, M: int) -> str:
  return "plain" if G == 1 else "v2" if M == 1 else "v1"
