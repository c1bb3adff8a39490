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
from diffjax.ops.diff_attention.gpu.chip import (
  BLOCK,
  POWER_OF_2_EMPTY_ROW_LSE,
  plgpu,
)
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import LOG2E


def keys_of(maps: Sequence[int], M: int) -> list[int]:
  """The key maps that these maps meet."""
  return sorted({g % M for g in maps})


def last_first(length: int):
  """First block of a tile. The last tile comes first: under a causal mask its rows see most keys, and what takes longest begins first."""
  return (
    length // (CONSUMERS * BLOCK) - 1 - lax.axis_index("tiles")
  ) * CONSUMERS


def forward(
  mask: Mask,
  factor: float,
  passes,
  stages: int,
  q,
  k,
  v,
  lam,
  q_ids,
  kv_ids,
  offset,
  bounds,
  out,
  out2,
  lse,
  *,
  q_smem,
  k_smem,
  v_smem,
  out_smem,
  q_ready,
  k_ready,
  k_free,
  v_ready,
  v_free,
):
  """A tile of queries stays while blocks of keys pass, once for each of `passes`, which name the maps that are computed together.

  The maps take turns. In a map's turn its logits are made, and while they become weights, the tensor cores add up the values of the turn
  before.
  """
  head, batch, warpgroup = (
    lax.axis_index("heads"),
    lax.axis_index("batch"),
    lax.axis_index("warpgroup"),
  )
  _, G, _, _ = q_smem.shape
  H = out.shape[2]
  M = k.shape[2] // v.shape[2]
  kv_head = lax.div(head, jnp.int32(H // v.shape[2]))
  tile = last_first(q.shape[1])
  key_ring, value_ring = (
    chip.Ring(stages, k_ready, k_free),
    chip.Ring(stages, v_ready, v_free),
  )
  hidden = chip.hidden(factor)

  def consumer() -> None:
    plgpu.set_max_registers(240, action="increase")
    block = tile + warpgroup
    passing = Passing.read(bounds, batch, block)
    rows = pl.ds(block * BLOCK, BLOCK)
    for g in range(G):
      plgpu.copy_gmem_to_smem(
        q.at[batch, rows, head * G + g],
        q_smem.at[warpgroup, g],
        q_ready.at[warpgroup],
      )
    limits = blocks.key_limits(mask, offset, batch, block)
    plgpu.barrier_wait(q_ready.at[warpgroup])

    for n, maps in enumerate(passes):
      keys, count = keys_of(maps, M), len(maps)
      before = n * (passing.stop - passing.start)

      def turn(
        i,
        j,
        accs,
        peaks,
        totals,
        pending,
        whole,
        maps=maps,
        keys=keys,
        before=before,
      ):
        """Map `maps[i]` meets block j."""
        here, slot = chip.in_loop(warpgroup, j), key_ring.slot(before + j)
        map_, key_map = (
          chip.in_loop(jnp.int32(x), j)
          for x in (maps[i], keys.index(maps[i] % M))
        )
        first, last = i == 0, i == len(maps) - 1

        def weigh(logits):
          if last:
            key_ring.release(before + j)
          if blocks.Cut.of(mask).ever and not whole:
            # Rows' ids are read again where they are needed: kept, they would take the registers that are left.
            ids = None
            if q_ids is not None:
              ids = (
                chip.load(q_ids.at[batch, rows], chip.row()),
                chip.load(
                  kv_ids.at[batch, pl.ds(j * BLOCK, BLOCK)], chip.column()
                ),
              )
            logits = chip.hide(logits, j * BLOCK, *limits, ids)
          peak = jnp.maximum(peaks[i], jnp.max(logits, axis=1) * factor)
          weights = jnp.exp2(logits * factor - chip.rows_of(peak, logits.shape))
          shrink = jnp.exp2(peaks[i] - peak)
          return (
            weights.astype(q.dtype),
            peak,
            totals[i] * shrink + jnp.sum(weights, axis=1),
            shrink,
          )

        def meanwhile():
          if first:
            value_ring.wait(before + j)
          if last:
            pl.when(j + 1 < passing.own_stop)(
              lambda: key_ring.await_(before + j + 1)
            )

        product = q_smem.at[here, map_], k_smem.at[slot, key_map].T
        like = (pending.a, peaks[i], totals[i], peaks[i]) if pending else None
        acc, (weights, peaks[i], totals[i], shrink) = chip.overlapped(
          [product], pending, weigh, like, meanwhile
        )
        if pending:
          accs[i - 1] = (
            acc  # the map before, or the last one at the block before
          )
          if first:
            value_ring.release(before + j - 1)
        accs[i] = accs[i] * chip.rows_of(shrink, accs[i].shape)
        return weights

      def turns(j, state, whole, count=count, turn=turn, before=before):
        (accs, peaks, totals), weights = ([*x] for x in state[:3]), state[3]
        for i in range(count):
          pending = None
          if weights is not None:
            pending = chip.Pending(
              accs[i - 1],
              weights,
              v_smem.at[value_ring.slot(before + j - (i == 0))],
            )
          weights = turn(i, j, accs, peaks, totals, pending, whole)
        return accs, peaks, totals, weights

      initial = (
        [chip.full((BLOCK, v.shape[3]), 0, chip.matrix())] * count,
        [chip.full((BLOCK,), hidden, chip.row())] * count,
        [chip.full((BLOCK,), 0, chip.row())] * count,
      )

      def begin(j, state, turns=turns, before=before):
        key_ring.await_(before + j)
        return turns(j, (*state[:3], None), False)

      def finish(state, before=before):
        accs, peaks, totals, weights = state
        last = before + passing.own_stop - 1
        [acc] = chip.accumulate(
          [(accs[-1], weights, v_smem.at[value_ring.slot(last)])]
        )
        value_ring.release(last)
        return [*accs[:-1], acc], peaks, totals, weights

      def skip(j, before=before):
        key_ring.skip(before + j)
        value_ring.skip(before + j)

      step = lambda whole, j, state, turns=turns: turns(j, state, whole)
      nothing = (
        *initial,
        chip.full((BLOCK, BLOCK), 0, chip.matrix()).astype(q.dtype),
      )
      states = passing.walk(
        blocks.Cut.of(mask), begin, step, finish, skip, nothing
      )

      for g, acc, peak, total in reversed(
        list(zip(maps, *states[:3], strict=True))
      ):
        empty = (
          peak <= hidden / 2
        )  # the row saw no key; whatever was added up counts for nothing
        result = acc * chip.rows_of(jnp.where(empty, 0.0, 1 / total), acc.shape)
        if lse is not None:
          # An empty row's log-sum-exp makes its weights zero in the backward pass.
          lse[batch, head, g, rows] = jnp.where(
            empty, POWER_OF_2_EMPTY_ROW_LSE, peak + jnp.log(total) * LOG2E
          )
        target = out
        if g == 1:
          target = out2
        elif (
          G == 2
        ):  # O₂ was rounded first, so that the backward pass, which reads it, agrees
          lam_rows = chip.rows_of(
            chip.load(lam.at[batch, head, rows], chip.row()), acc.shape
          )
          result = result - lam_rows * out_smem[warpgroup].astype(jnp.float32)
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem[warpgroup] = result.astype(out.dtype)
        if target is not None:
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(
            out_smem.at[warpgroup], target.at[batch, rows, head]
          )
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = Passing.read(bounds, batch, tile)[:2]
    for n, maps in enumerate(passes):

      @pl.loop(start, stop)
      def _(j, n=n, maps=maps):
        step, keys = n * (stop - start) + j, pl.ds(j * BLOCK, BLOCK)
        load_keys = lambda slot, ready: [
          plgpu.copy_gmem_to_smem(
            k.at[batch, keys, kv_head * M + m], k_smem.at[slot, i], ready
          )
          for i, m in enumerate(keys_of(maps, M))
        ]
        key_ring.fill(step, start, load_keys)
        value_ring.fill(
          step,
          start,
          lambda slot, ready: plgpu.copy_gmem_to_smem(
            v.at[batch, keys, kv_head], v_smem.at[slot], ready
          ),
        )

    for ring in (key_ring, value_ring):
      ring.drain(start, start + len(passes) * (stop - start))

  pl.when(warpgroup < CONSUMERS)(consumer)
  pl.when(warpgroup == CONSUMERS)(producer)


def d_q(
  mask: Mask,
  factor: float,
  scale: float,
  k_stages: int,
  v_stages: int,
  q,
  k,
  v,
  d_out,
  vectors,
  q_ids,
  kv_ids,
  offset,
  bounds,
  d_q,
  *,
  q_smem,
  d_out_smem,
  k_smem,
  v_smem,
  q_ready,
  k_ready,
  k_free,
  v_ready,
  v_free,
):
  """A tile of queries stays while blocks of keys pass.

  Up to D 64 the maps take turns as in `forward`. Wider, a warpgroup has no registers for that: it does one thing after the other, and the
  other warpgroup's products fill its pauses.
  """
  head, batch, warpgroup = (
    lax.axis_index("heads"),
    lax.axis_index("batch"),
    lax.axis_index("warpgroup"),
  )
  (_, G, _, D), M = q_smem.shape, k.shape[2] // v.shape[2]
  kv_head = lax.div(head, jnp.int32(d_out.shape[2] // v.shape[2]))
  tile = last_first(q.shape[1])
  key_ring, value_ring = (
    chip.Ring(k_stages, k_ready, k_free),
    chip.Ring(v_stages, v_ready, v_free),
  )
  cuts = blocks.Cut.of(mask)

  def consumer() -> None:
    plgpu.set_max_registers(240, action="increase")
    block = tile + warpgroup
    passing = Passing.read(bounds, batch, block)
    rows = pl.ds(block * BLOCK, BLOCK)
    vector = lambda n: chip.load(vectors.at[batch, head, n, rows], chip.row())
    lse, delta = (
      [vector(g) for g in range(G)],
      [vector(G + g) for g in range(G)],
    )
    plgpu.barrier_wait(q_ready.at[warpgroup])
    queries = lambda g, j: q_smem.at[
      chip.in_loop(warpgroup, j), chip.in_loop(jnp.int32(g), j)
    ]
    keys = lambda g, j: k_smem.at[key_ring.slot(j) * M + g % M]
    d_weights_of = lambda j: (
      d_out_smem.at[chip.in_loop(warpgroup, j)],
      v_smem.at[value_ring.slot(j)].T,
    )  # dP, shared by the maps

    def d_logits_of(g, j, whole, logits, d_weights):
      if cuts.ever and not whole:
        ids = None
        if q_ids is not None:
          ids = (
            chip.load(q_ids.at[batch, rows], chip.row()),
            chip.load(kv_ids.at[batch, pl.ds(j * BLOCK, BLOCK)], chip.column()),
          )
        limits = blocks.key_limits(mask, offset, batch, chip.in_loop(block, j))
        logits = chip.hide(logits, j * BLOCK, *limits, ids)
      weights = jnp.exp2(logits * factor - chip.rows_of(lse[g], logits.shape))
      return (
        weights * (d_weights - chip.rows_of(delta[g], logits.shape))
      ).astype(q.dtype)

    def one_by_one(whole, j, accs):
      accs = [*accs]
      value_ring.await_(j)
      d_weights = chip.product(*d_weights_of(j))
      value_ring.release(j)
      key_ring.await_(j)
      for g in range(G):
        d_logits = d_logits_of(
          g, j, whole, chip.product(queries(g, j), keys(g, j).T), d_weights
        )
        [accs[g]] = chip.accumulate([(accs[g], d_logits, keys(g, j))])
      key_ring.release(j)
      return accs

    def in_turns(whole, j, state):
      accs, d_logits = [*state[0]], state[1]
      d_weights: Any = None
      for g in range(G):
        first = g == 0
        pending = (
          None
          if d_logits is None
          else chip.Pending(accs[g - 1], d_logits, keys((g - 1) % G, j - first))
        )
        products = [(queries(g, j), keys(g, j).T)]
        if first:
          value_ring.await_(j)
          products.append(d_weights_of(j))

        def work(logits, d_weights=d_weights, *, g=g, first=first):
          if first:
            value_ring.release(j)
          result = d_logits_of(g, j, whole, logits, d_weights)
          return (result, d_weights) if first else (result,)

        meanwhile = None
        if g == G - 1:
          meanwhile = lambda: pl.when(j + 1 < passing.own_stop)(
            lambda: key_ring.await_(j + 1)
          )
        like = (d_logits, chip.full((BLOCK, BLOCK), 0, chip.matrix()))[
          : 1 + first
        ]
        work = work if first else functools.partial(work, d_weights=d_weights)
        acc, (d_logits, *rest) = chip.overlapped(
          products, pending, work, like, meanwhile
        )
        if first:
          [d_weights] = rest
        if pending is not None:
          accs[g - 1] = acc
          if first:
            key_ring.release(j - 1)
      return accs, d_logits

    def begin(j, state):
      key_ring.await_(j)
      return in_turns(False, j, (state[0], None))

    def finish(state):
      accs, d_logits = state
      last = passing.own_stop - 1
      [acc] = chip.accumulate([(accs[-1], d_logits, keys(G - 1, last))])
      key_ring.release(last)
      return [*accs[:-1], acc], d_logits

    def skip(j):
      value_ring.skip(j)
      key_ring.skip(j)

    zeros = [chip.full((BLOCK, D), 0, chip.matrix())] * G
    if D <= BLOCK:
      nothing = (
        zeros,
        chip.full((BLOCK, BLOCK), 0, chip.matrix()).astype(q.dtype),
      )
      accs, _ = passing.walk(cuts, begin, in_turns, finish, skip, nothing)
    else:
      accs = passing.walk(
        cuts,
        functools.partial(one_by_one, False),
        one_by_one,
        lambda accs: accs,
        skip,
        zeros,
      )
    for g, acc in enumerate(accs):
      if g == 1:
        acc = acc * chip.rows_of(-vector(2 * G), acc.shape)
      q_smem[warpgroup, g] = (acc * scale).astype(q.dtype)
    plgpu.commit_smem()
    for g in range(G):
      plgpu.copy_smem_to_gmem(
        q_smem.at[warpgroup, g], d_q.at[batch, rows, head * G + g]
      )
    plgpu.wait_smem_to_gmem(0)

  def producer() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = Passing.read(bounds, batch, tile)[:2]
    for own in range(CONSUMERS):
      rows = pl.ds((tile + own) * BLOCK, BLOCK)
      for g in range(G):
        plgpu.copy_gmem_to_smem(
          q.at[batch, rows, head * G + g], q_smem.at[own, g], q_ready.at[own]
        )
      plgpu.copy_gmem_to_smem(
        d_out.at[batch, rows, head], d_out_smem.at[own], q_ready.at[own]
      )

    @pl.loop(start, stop)
    def _(j):
      keys = pl.ds(j * BLOCK, BLOCK)
      load_keys = lambda slot, ready: [
        plgpu.copy_gmem_to_smem(
          k.at[batch, keys, kv_head * M + m], k_smem.at[slot * M + m], ready
        )
        for m in range(M)
      ]
      value_ring.fill(
        j,
        start,
        lambda slot, ready: plgpu.copy_gmem_to_smem(
          v.at[batch, keys, kv_head], v_smem.at[slot], ready
        ),
      )
      key_ring.fill(j, start, load_keys)

    value_ring.drain(start, stop)
    key_ring.drain(start, stop)

  pl.when(warpgroup < CONSUMERS)(consumer)
  pl.when(warpgroup == CONSUMERS)(producer)


def d_kv(
  mask: Mask,
  factor: float,
  stages: int,
  q,
  k,
  v,
  d_out,
  vectors,
  q_ids,
  kv_ids,
  offset,
  bounds,
  d_k,
  d_v,
  *,
  q_smem,
  d_out_smem,
  vectors_smem,
  k_smem,
  v_smem,
  weights_smem,
  kv_ready,
  finished,
  weights_ready,
  weights_free,
  q_ready,
  q_free,
  d_out_ready,
  d_out_free,
):
  """A block of keys stays while the queries of all heads that share it pass; maps are transposed, keys × queries.

  Both consumers work on it. One makes the weights and dV, and hands the weights over in shared memory; the other makes dP and dK.
  """
  kv_head, batch, warpgroup = (
    lax.axis_index("heads"),
    lax.axis_index("batch"),
    lax.axis_index("warpgroup"),
  )
  (M, _, D), V = k_smem.shape, v_smem.shape[1]
  R, G = d_out.shape[2] // v.shape[2], q.shape[2] // d_out.shape[2]
  block = lax.axis_index("tiles")
  query_ring, d_out_ring = (
    chip.Ring(stages, q_ready, q_free),
    chip.Ring(stages, d_out_ready, d_out_free),
  )
  cuts = blocks.Cut.of(mask, keys_stay=True)
  keys = pl.ds(block * BLOCK, BLOCK)
  # In a loop, so that addresses are not kept in registers throughout.
  own = lambda n, i: chip.in_loop(jnp.int32(n), i)
  # These are read without wgmma where TMA writes again. The rings' barriers order that; a fence would cost a barrier in each step.
  column = lambda slot, n: chip.columns_of(
    plgpu.load(vectors_smem.at[slot, n], layout=chip.column()), (BLOCK, BLOCK)
  )
  zeros = lambda width: chip.full((BLOCK, width), 0, chip.matrix())
  no_weights = lambda: chip.full((BLOCK, BLOCK), 0, chip.matrix()).astype(
    q.dtype
  )

  def make_values() -> None:
    plgpu.set_max_registers(240, action="increase")
    passing = Passing.read(bounds, batch, block)
    count = passing.stop - passing.start
    limits = blocks.query_limits(mask, block)
    plgpu.barrier_wait(kv_ready)

    def hand_over(g, weights):
      plgpu.barrier_wait(weights_free.at[g])
      weights_smem[g] = weights
      plgpu.barrier_arrive(weights_ready.at[g])

    def step(r, whole, i, state):
      acc, pending = state
      turn = r * count + i
      slot = query_ring.slot(turn)
      combined: Any = None  # A₁ − λA₂
      for g in range(G):
        # Read before the products that shall go on: to read shared memory ends them.
        lse = column(slot, 0) if g == 0 else None

        def weigh(logits, g=g, lse=lse):
          if cuts.ever and not whole:
            first = i * BLOCK + blocks.first_position(mask, offset, batch)
            ids = None
            if q_ids is not None:
              ids = (
                chip.load(kv_ids.at[batch, keys], chip.row()),
                chip.load(
                  q_ids.at[batch, pl.ds(i * BLOCK, BLOCK)], chip.column()
                ),
              )
            logits = chip.hide(logits, first, *limits, ids)
          if g == 0:
            return (jnp.exp2(logits * factor - lse),)
          return (
            jnp.exp2(logits * factor - column(slot, 1)) * -column(slot, 2 * G),
          )

        product = k_smem.at[own(g % M, i)], q_smem.at[slot * G + g].T
        if g == 0 and pending is not None:
          late = chip.Pending(
            acc, pending, d_out_smem.at[d_out_ring.slot(turn - 1)]
          )
          acc, [weights] = chip.overlapped(
            [product],
            late,
            weigh,
            (zeros(BLOCK),),
            lambda: d_out_ring.await_(turn),
          )
          d_out_ring.release(turn - 1)
        else:
          _, [weights] = chip.overlapped([product], None, weigh)
          if g == 0:
            d_out_ring.await_(turn)
        if g == G - 1:
          query_ring.release(turn)
        rounded = weights.astype(jnp.float16)
        hand_over(g, rounded)
        # The first map waits in half the registers.
        combined = (
          rounded
          if g < G - 1
          else weights
          if combined is None
          else combined.astype(jnp.float32) + weights
        )
      pl.when(i + 1 < passing.own_stop)(lambda: query_ring.await_(turn + 1))
      return acc, combined.astype(q.dtype)

    def begin(r, i, state):
      query_ring.await_(r * count + i)
      return step(r, False, i, (state[0], None))

    def finish(r, state):
      acc, pending = state
      last = r * count + passing.own_stop - 1
      [acc] = chip.accumulate(
        [(acc, pending, d_out_smem.at[d_out_ring.slot(last)])]
      )
      d_out_ring.release(last)
      return acc, pending

    def skip(r, i):
      for ring in (query_ring, d_out_ring):
        ring.skip(r * count + i)

    def one_head(r, acc):
      parts = (functools.partial(x, r) for x in (begin, step, finish, skip))
      return passing.walk(cuts, *parts, (acc, no_weights()))[0]

    acc = lax.fori_loop(0, R, one_head, zeros(V))
    for g in range(G):  # every phase of a barrier is observed
      plgpu.barrier_wait(weights_free.at[g])
    wait_for_the_other()
    v_smem[...] = acc.astype(q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(v_smem, d_v.at[batch, keys, kv_head])
    plgpu.wait_smem_to_gmem(0)

  def make_keys() -> None:
    plgpu.set_max_registers(240, action="increase")
    passing = Passing.read(bounds, batch, block)
    count = passing.stop - passing.start
    for g in range(G):
      plgpu.barrier_arrive(weights_free.at[g])
    plgpu.barrier_wait(kv_ready)

    def receive(g, slot, d_weights):
      plgpu.barrier_wait(weights_ready.at[g])
      weights = plgpu.load(weights_smem.at[g], layout=chip.matrix()).astype(
        jnp.float32
      )
      plgpu.barrier_arrive(weights_free.at[g])
      return (weights * (d_weights - column(slot, G + g))).astype(q.dtype)

    def step(r, i, state):
      accs, pending = [*state[0]], state[1]
      turn = r * count + i
      slot = query_ring.slot(turn)
      d_out_ring.await_(turn)
      product = (
        v_smem.at[pl.ds(own(0, i) * BLOCK, BLOCK)],
        d_out_smem.at[d_out_ring.slot(turn)].T,
      )
      late = None
      if pending is not None:
        late = chip.Pending(
          accs[-1], pending, q_smem.at[query_ring.slot(turn - 1) * G + G - 1]
        )
      acc, [d_weights] = chip.overlapped(
        [product], late, lambda x: (x,), (zeros(BLOCK),)
      )
      if late is not None:
        accs[-1] = acc
        query_ring.release(turn - 1)
      d_out_ring.release(turn)
      query_ring.await_(turn)
      for g in range(G):
        d_logits = receive(g, slot, d_weights)
        if g < G - 1:
          [accs[g % M]] = chip.accumulate(
            [(accs[g % M], d_logits, q_smem.at[slot * G + g])]
          )
      return accs, d_logits

    def begin(r, i, state):
      return step(r, i, (state[0], None))

    def finish(r, state):
      accs, pending = state
      last = r * count + passing.own_stop - 1
      [acc] = chip.accumulate(
        [(accs[-1], pending, q_smem.at[query_ring.slot(last) * G + G - 1])]
      )
      query_ring.release(last)
      return [*accs[:-1], acc], pending

    def skip(r, i):
      for ring in (query_ring, d_out_ring):
        ring.skip(r * count + i)

    def one_head(r, accs):
      parts = (
        functools.partial(x, r)
        for x in (begin, lambda r, _, i, state: step(r, i, state), finish, skip)
      )
      return passing.walk(
        blocks.Cut(False, False), *parts, (accs, no_weights())
      )[0]

    accs = lax.fori_loop(0, R, one_head, [zeros(D)] * M)
    wait_for_the_other()
    for m, acc in enumerate(accs):
      k_smem[m] = (acc * (factor / LOG2E)).astype(q.dtype)
    plgpu.commit_smem()
    for m in range(M):
      plgpu.copy_smem_to_gmem(
        k_smem.at[m], d_k.at[batch, keys, kv_head * M + m]
      )
    plgpu.wait_smem_to_gmem(0)

  def wait_for_the_other() -> None:
    """It may still read what the gradients overwrite."""
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)

  def load() -> None:
    plgpu.set_max_registers(24, action="decrease")
    start, stop = Passing.read(bounds, batch, block)[:2]
    for m in range(M):
      plgpu.copy_gmem_to_smem(
        k.at[batch, keys, kv_head * M + m], k_smem.at[m], kv_ready
      )
    plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem, kv_ready)

    @pl.loop(0, R)
    def _(r):
      head = kv_head * R + r

      @pl.loop(start, stop)
      def _(i):
        turn, rows = r * (stop - start) + i, pl.ds(i * BLOCK, BLOCK)

        def load_queries(slot, ready):
          for g in range(G):
            plgpu.copy_gmem_to_smem(
              q.at[batch, rows, head * G + g], q_smem.at[slot * G + g], ready
            )
          plgpu.copy_gmem_to_smem(
            vectors.at[batch, head, :, rows], vectors_smem.at[slot], ready
          )

        query_ring.fill(turn, start, load_queries)
        d_out_ring.fill(
          turn,
          start,
          lambda slot, ready: plgpu.copy_gmem_to_smem(
            d_out.at[batch, rows, head], d_out_smem.at[slot], ready
          ),
        )

    for ring in (query_ring, d_out_ring):
      ring.drain(start, start + R * (stop - start))

  for n, role in enumerate((make_values, make_keys, load)):
    pl.when(warpgroup == n)(role)
