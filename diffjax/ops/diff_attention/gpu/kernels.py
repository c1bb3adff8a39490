"""The three Hopper kernels of attention: forward, dQ, and dK with dV. `gpu/attention.py` says how they share the work.

Each is one function, though long: its two roles (a consumer computes, the producer loads) keep one protocol of rings and barriers over the
same references, all of which either would have to be given if they stood apart.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from diffjax.ops.diff_attention.gpu import blocks, chip
from diffjax.ops.diff_attention.gpu.blocks import CONSUMERS, Passing
from diffjax.ops.diff_attention.gpu.chip import BLOCK, plgpu
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import HIDDEN, LOG2E


def keys_of(maps: Sequence[int], M: int) -> list[int]:
  """The key maps that these maps meet."""
  return sorted({g % M for g in maps})


def forward(
  mask: Mask, passes, stages: int, q, k, v, lam, q_ids, kv_ids, offset, bounds, out, out2, lse,
  *, q_smem, k_smem, v_smem, out_smem, q_ready, k_ready, k_free, v_ready, v_free,
):  # fmt: skip
  """A tile of queries stays while blocks of keys pass, once for each of `passes`, which name the maps that are computed together."""
  head, batch, warpgroup = lax.axis_index("heads"), lax.axis_index("batch"), lax.axis_index("warpgroup")
  _, G, _, _ = q_smem.shape
  H = out.shape[2]
  M = k.shape[2] // v.shape[2]
  kv_head = lax.div(head, jnp.int32(H // v.shape[2]))
  tile = lax.axis_index("tiles") * CONSUMERS
  key_ring, value_ring = chip.Ring(stages, k_ready, k_free), chip.Ring(stages, v_ready, v_free)

  def consumer() -> None:
    plgpu.set_max_registers(240, action="increase")
    block = tile + warpgroup
    passing = Passing.read(bounds, batch, block)
    rows = pl.ds(block * BLOCK, BLOCK)
    for g in range(G):
      plgpu.copy_gmem_to_smem(q.at[batch, rows, head * G + g], q_smem.at[warpgroup, g], q_ready.at[warpgroup])
    limits = blocks.key_limits(mask, offset, batch, block)
    plgpu.barrier_wait(q_ready.at[warpgroup])

    for n, maps in enumerate(passes):
      keys = keys_of(maps, M)
      before = n * (passing.stop - passing.start)

      def attend(j, states, maps=maps, keys=keys, before=before):
        slot = key_ring.wait(before + j)

        def cut(logits):
          # Rows' ids are read again where they are needed: kept, they would take the registers that are left.
          ids = None
          if q_ids is not None:
            ids = chip.load(q_ids.at[batch, rows], chip.row()), chip.load(kv_ids.at[batch, pl.ds(j * BLOCK, BLOCK)], chip.column())
          return chip.hide(logits, j * BLOCK, *limits, ids)

        here = chip.in_loop(warpgroup, j)

        def weigh(*refs):
          for g, ref in zip(maps, refs, strict=True):
            plgpu.wgmma(ref, q_smem.at[here, g], k_smem.at[slot, keys.index(g % M)].T)
          results = []
          for i, (ref, (acc, peak, total)) in enumerate(zip(refs, states, strict=True)):
            logits = plgpu.wgmma_accumulator_load(ref, wait_n=len(maps) - 1 - i)
            if i == len(maps) - 1:
              key_ring.release(before + j)
            if blocks.cuts(mask):
              logits = passing.unless_whole(j, cut, logits)
            after = jnp.maximum(peak, jnp.max(logits, axis=1))
            weights = jnp.exp2(logits - chip.rows_of(after, logits.shape))
            shrink = jnp.exp2(peak - after)
            results.append(
              (acc * chip.rows_of(shrink, acc.shape), after, total * shrink + jnp.sum(weights, axis=1), weights.astype(q.dtype))
            )
          return results

        results = pl.run_scoped(weigh, *[plgpu.ACC((BLOCK, BLOCK), jnp.float32) for _ in maps])
        value_ring.wait(before + j)
        accs, peaks, totals, weights = zip(*results, strict=True)
        accs = chip.accumulate([(acc, weight, v_smem.at[slot]) for acc, weight in zip(accs, weights, strict=True)])
        value_ring.release(before + j)
        return list(zip(accs, peaks, totals, strict=True))

      def skip(j, before=before):
        key_ring.skip(before + j)
        value_ring.skip(before + j)

      initial = [
        (chip.full((BLOCK, v.shape[3]), 0, chip.matrix()), chip.full((BLOCK,), HIDDEN, chip.row()), chip.full((BLOCK,), 0, chip.row()))
        for _ in maps
      ]
      states = passing.walk(attend, skip, initial)

      for g, (acc, peak, total) in reversed(list(zip(maps, states, strict=True))):
        empty = peak <= HIDDEN / 2  # the row saw no key; whatever was added up counts for nothing
        result = acc * chip.rows_of(jnp.where(empty, 0.0, 1 / total), acc.shape)
        if lse is not None:
          # An empty row's log-sum-exp makes its weights zero in the backward pass.
          lse[batch, head, g, rows] = jnp.where(empty, -HIDDEN, peak + jnp.log(total) * LOG2E)
        target = out
        if g == 1:
          target = out2
        elif G == 2:  # O₂ was rounded first, so that the backward pass, which reads it, agrees
          lam_rows = chip.rows_of(chip.load(lam.at[batch, head, rows], chip.row()), acc.shape)
          result = result - lam_rows * out_smem[warpgroup].astype(jnp.float32)
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem[warpgroup] = result.astype(out.dtype)
        if target is not None:
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], target.at[batch, rows, head])
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = Passing.read(bounds, batch, tile)[:2]
    for n, maps in enumerate(passes):

      @pl.loop(start, stop)
      def _(j, n=n, maps=maps):
        step, keys = n * (stop - start) + j, pl.ds(j * BLOCK, BLOCK)
        load_keys = lambda slot, ready: [
          plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head * M + m], k_smem.at[slot, i], ready) for i, m in enumerate(keys_of(maps, M))
        ]
        key_ring.fill(step, start, load_keys)
        value_ring.fill(step, start, lambda slot, ready: plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[slot], ready))

    for ring in (key_ring, value_ring):
      ring.drain(start, start + len(passes) * (stop - start))

  pl.when(warpgroup < CONSUMERS)(consumer)
  pl.when(warpgroup == CONSUMERS)(producer)


def d_q(
  mask: Mask, scale: float, split: bool, k_stages: int, v_stages: int, q, k, v, d_out, vectors, q_ids, kv_ids, offset, bounds, d_q,
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
  key_ring, value_ring = chip.Ring(k_stages, k_ready, k_free), chip.Ring(v_stages, v_ready, v_free)

  def consumer(maps: Sequence[int]) -> None:
    plgpu.set_max_registers(240, action="increase")
    own = jnp.int32(0) if split else warpgroup
    block = tile + own
    passing = Passing.read(bounds, batch, block)
    rows = pl.ds(block * BLOCK, BLOCK)
    limits = blocks.key_limits(mask, offset, batch, block)
    plgpu.barrier_wait(q_ready.at[own])

    def step(j, accs):
      here = chip.in_loop(own, j)
      vector = lambda n: chip.rows_of(chip.load(vectors.at[batch, head, n, rows], chip.row()), (BLOCK, BLOCK))
      d_weights = chip.product(d_out_smem.at[here], v_smem.at[value_ring.wait(j)].T)  # dP, shared by the maps
      value_ring.release(j)
      slot = key_ring.wait(j)

      def cut(logits):
        ids = None
        if q_ids is not None:
          ids = chip.load(q_ids.at[batch, rows], chip.row()), chip.load(kv_ids.at[batch, pl.ds(j * BLOCK, BLOCK)], chip.column())
        return chip.hide(logits, j * BLOCK, *limits, ids)

      for n, g in enumerate(maps):
        keys = k_smem.at[slot * M + g % M]
        logits = chip.product(q_smem.at[here, g], keys.T)
        if blocks.cuts(mask):
          logits = passing.unless_whole(j, cut, logits)
        weights = jnp.exp2(logits - vector(g))
        if g == 1:
          weights *= -vector(2 * G)
        d_logits = weights * (d_weights - vector(G + g))
        [accs[n]] = chip.accumulate([(accs[n], d_logits.astype(q.dtype), keys)])
      key_ring.release(j)
      return accs

    def skip(j):
      value_ring.skip(j)
      key_ring.skip(j)

    accs = passing.walk(step, skip, [chip.full((BLOCK, D), 0, chip.matrix()) for _ in maps])
    for g, acc in zip(maps, accs, strict=True):
      q_smem[own, g] = (acc * scale).astype(q.dtype)
    plgpu.commit_smem()
    for g in maps:
      plgpu.copy_smem_to_gmem(q_smem.at[own, g], d_q.at[batch, rows, head * G + g])
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = Passing.read(bounds, batch, tile)[:2]
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


def d_kv(
  mask: Mask, split: bool, stages: int, q, k, v, d_out, vectors, q_ids, kv_ids, offset, bounds, d_k, d_v,
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
  query_ring, d_out_ring = chip.Ring(stages, q_ready, q_free), chip.Ring(stages, d_out_ready, d_out_free)

  def consumer(wants_k: bool, wants_v: bool) -> None:
    plgpu.set_max_registers(240, action="increase")
    own = jnp.int32(0) if split else warpgroup
    block = tile + own
    passing = Passing.read(bounds, batch, block)
    limits = blocks.query_limits(mask, block)
    plgpu.barrier_wait(kv_ready.at[own])

    def step(r, i, accs):
      d_k_accs, d_v_acc = accs
      here = chip.in_loop(own, i)
      turn = r * (passing.stop - passing.start) + i
      slot = query_ring.wait(turn)
      d_out_ring.wait(turn)
      vector = lambda n: chip.columns_of(plgpu.load(vectors_smem.at[slot, n], layout=chip.column()), (BLOCK, BLOCK))

      def cut(logits):
        first = i * BLOCK + blocks.first_position(mask, offset, batch)
        ids = None
        if q_ids is not None:
          keys, queries = pl.ds(block * BLOCK, BLOCK), pl.ds(i * BLOCK, BLOCK)
          ids = chip.load(kv_ids.at[batch, keys], chip.row()), chip.load(q_ids.at[batch, queries], chip.column())
        return chip.hide(logits, first, *limits, ids)

      d_weights = chip.product(v_smem.at[here], d_out_smem.at[slot].T) if wants_k else None  # dP, shared by the maps
      combined: Any = None  # A₁ − λA₂
      for g in range(G):
        queries = q_smem.at[slot * G + g]
        logits = chip.product(k_smem.at[here, g % M], queries.T)
        if limits != (None, None) or mask.segments:
          logits = passing.unless_whole(i, cut, logits)
        weights = jnp.exp2(logits - vector(g))
        if g == 1:
          weights *= -vector(2 * G)
        if wants_v:
          combined = weights if combined is None else combined + weights
        if wants_k:
          d_logits = (weights * (d_weights - vector(G + g))).astype(q.dtype)
          [d_k_accs[g % M]] = chip.accumulate([(d_k_accs[g % M], d_logits, queries)])
      plgpu.commit_smem()  # the vectors were read without wgmma: before TMA writes there again
      query_ring.release(turn)
      if wants_v:
        [d_v_acc] = chip.accumulate([(d_v_acc, combined.astype(q.dtype), d_out_smem.at[slot])])
      d_out_ring.release(turn)
      return d_k_accs, d_v_acc

    def skip(r, i):
      for ring in (query_ring, d_out_ring):
        ring.skip(r * (passing.stop - passing.start) + i)

    def one_head(r, accs):
      return passing.walk(functools.partial(step, r), functools.partial(skip, r), accs)

    zeros = lambda width: chip.full((BLOCK, width), 0, chip.matrix())
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
    start, stop = Passing.read(bounds, batch, tile)[:2]
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
