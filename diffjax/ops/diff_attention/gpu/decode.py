"""Decoding on Hopper GPUs: the new token of each row against its cache, keys and values read once (Pallas, Mosaic GPU).

The queries of all heads that share a key head, map after map, are the rows of one product with a block of keys, and their weights those of
one product with its values. What a row sees of its cache is shared out evenly over `splits` thread blocks, so that few rows with long
caches still occupy the whole chip; their sums are put together outside.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.decode import stack
from diffjax.ops.diff_attention.gpu import chip
from diffjax.ops.diff_attention.gpu.chip import BLOCK, plgpu
from diffjax.ops.diff_attention.tiles import pad_axis, round_up
from diffjax.ops.varying import vary_like

_THREAD_BLOCKS = (
  264  # wanted at least: two for each of the chip's 132 multiprocessors
)
_LEAST_KEYS = 256  # of a split: with fewer, writing its sums would cost as much as reading its keys


def attend(
  q,
  k,
  v,
  lam,
  starts,
  tables,
  k_scale,
  v_scale,
  *,
  window: int | None,
  scale: float,
):
  """`decode_attention` on a Hopper GPU; the arguments are checked there.

  Raises:
    ValueError: JAX is too old, the program is not for a Hopper GPU, or a dtype or size is not taken.
  """
  if problem := chip.refusal():
    raise ValueError(
      f"implementation = 'pallas_gpu' {problem}; use implementation='xla' or 'auto'"
    )
  (B, T, H, G, _), K, V = q.shape, k.shape[1], v.shape[-1]
  for name, value, given in (
    ("q", f"{T} new tokens a row", T > 1),
    ("block_tables", "pages", tables is not None),
    ("k", "int8", k_scale is not None),
  ):
    if given:
      raise ValueError(
        f"{name} ({value}) is not taken by implementation 'pallas_gpu', which takes one new token a row and a cache in q's dtype without "
        f"pages; use implementation='xla' or 'auto'"
      )
  rows = H // K
  if not chip.takes(q, v) or G * rows > BLOCK:
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}, {G * rows} queries a key head) and v (V = {V}) are not taken by implementation 'pallas_gpu', "
      f"which takes bfloat16 and float16, D up to 128, {BLOCK} queries a key head and V up to 256: cast them, or use implementation='xla'"
    )
  factor, q = chip.logit_factor(scale, q)
  maps = _attend(
    stack(q, k, rows), k, v, starts + 1, window=window, factor=factor
  ).reshape(B, K, G, rows, V)
  out = (
    maps[:, :, 0]
    if lam is None
    else maps[:, :, 0] - lam.reshape(B, K, rows, 1) * maps[:, :, 1]
  )
  return out.reshape(B, 1, H, V).astype(q.dtype)


def _attend(
  q: Float[Array, "B K N X"],
  k: Float[Array, "B K S X"],
  v: Float[Array, "B K S V"],
  lengths: Int[Array, "B"],
  *,
  window: int | None,
  factor: float,
) -> Float[Array, "B K N V"]:
  """softmax(factor·qkᵀ)v of base 2 over the keys that each row of the batch sees, for N ≤ 64 queries a key head.

  Zero for a row that sees no key. S, X and V should be multiples of 64: else the cache is copied for every token.
  """
  (B, K, N, _), V = q.shape, v.shape[-1]
  k, v = (
    pad_axis(
      pad_axis(x, 2, round_up(x.shape[2], BLOCK)),
      3,
      round_up(x.shape[3], BLOCK),
    )
    for x in (k, v)
  )
  q = pad_axis(pad_axis(q, 2, BLOCK), 3, k.shape[3])
  seen = round_up(
    k.shape[2] if window is None else min(k.shape[2], window + BLOCK), BLOCK
  )
  splits = max(1, min(-(-_THREAD_BLOCKS // (B * K)), seen // _LEAST_KEYS))
  lengths, q, k, v = (
    vary_like(x, lengths, q, k, v) for x in (lengths, q, k, v)
  )
  stages = chip.stages(
    2 * BLOCK * q.shape[3], 2 * BLOCK * (k.shape[3] + v.shape[3])
  )
  parts = (B, K, splits, BLOCK)
  sums, peaks, totals = chip.call(
    functools.partial(_kernel, window, factor, stages),
    "diff_attention_decode",
    interpret=chip.interpret_mode.get(),
    grid=(splits, K, B),
    grid_names=("splits", "heads", "batch"),
    warpgroups=2,
    outputs=(
      ((*parts, v.shape[3]), jnp.float32),
      (parts, jnp.float32),
      (parts, jnp.float32),
    ),
    scratch=dict(
      q_smem=chip.tiled((BLOCK, q.shape[3]), q.dtype),
      k_smem=chip.tiled((stages, BLOCK, k.shape[3]), k.dtype),
      v_smem=chip.tiled((stages, BLOCK, v.shape[3]), v.dtype),
      q_ready=plgpu.Barrier(),
      ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      free=plgpu.Barrier(num_barriers=stages),
    ),
  )(q, k, v, lengths)
  peak = jnp.max(peaks, axis=2, keepdims=True)
  shares = jnp.exp2(peaks - peak)
  total = jnp.sum(totals * shares, axis=2)[..., None]
  out = jnp.sum(sums * shares[..., None], axis=2) / jnp.where(
    total == 0, 1.0, total
  )
  return out[:, :, :N, :V]


def _kernel(
  window,
  factor: float,
  stages: int,
  q,
  k,
  v,
  lengths,
  sums,
  peaks,
  totals,
  *,
  q_smem,
  k_smem,
  v_smem,
  q_ready,
  ready,
  free,
):
  """One share of a row's blocks of keys: unnormalised sums of values, and what joins them to those of the other shares."""
  split, head, batch = (
    lax.axis_index("splits"),
    lax.axis_index("heads"),
    lax.axis_index("batch"),
  )
  ring, length = chip.Ring(stages, ready, free), lengths[batch]
  first = (
    jnp.int32(0) if window is None else lax.max(length - window, jnp.int32(0))
  )
  first_block, stop_block = (
    lax.div(first, jnp.int32(BLOCK)),
    lax.div(length + (BLOCK - 1), jnp.int32(BLOCK)),
  )
  share = lax.div(
    stop_block - first_block + (sums.shape[2] - 1), jnp.int32(sums.shape[2])
  )
  start = lax.min(first_block + split * share, stop_block)
  stop = lax.min(start + share, stop_block)

  def consumer() -> None:
    plgpu.copy_gmem_to_smem(q.at[batch, head], q_smem, q_ready)
    plgpu.barrier_wait(q_ready)

    def step(j, state):
      acc, peak, total = state
      slot, start = ring.wait(j), j * BLOCK
      cut = (start < first) | (start + BLOCK > length)
      logits = chip.product(q_smem, k_smem.at[slot].T)
      logits = lax.cond(
        cut,
        lambda x: chip.hide(x, start, first, length - 1),
        lambda x: x,
        logits,
      )

      @pl.when(cut)
      def _():
        # Hidden values may be anything, and 0·NaN is NaN.
        position = chip.rows_of(chip.iota(chip.row()), (BLOCK, BLOCK)) + start
        for column in range(
          0, v.shape[3], BLOCK
        ):  # all at once would take the registers that the sums are in
          piece = v_smem.at[slot, :, pl.ds(column, BLOCK)]
          piece[...] = jnp.where(
            (position >= first) & (position < length),
            plgpu.load(piece, layout=chip.matrix()),
            0,
          )
        plgpu.commit_smem()

      after = jnp.maximum(peak, jnp.max(logits, axis=1) * factor)
      weights, shrink = (
        jnp.exp2(logits * factor - chip.rows_of(after, logits.shape)),
        jnp.exp2(peak - after),
      )
      total = total * shrink + jnp.sum(weights, axis=1)
      [acc] = chip.accumulate(
        [
          (
            acc * chip.rows_of(shrink, acc.shape),
            weights.astype(v.dtype),
            v_smem.at[slot],
          )
        ]
      )
      ring.release(j)
      return acc, after, total

    vector = lambda value: chip.full((BLOCK,), value, chip.row())
    state = (
      chip.full((BLOCK, v.shape[3]), 0, chip.matrix()),
      vector(chip.hidden(factor)),
      vector(0),
    )
    for target, value in zip(
      (sums, peaks, totals),
      lax.fori_loop(start, stop, step, state),
      strict=True,
    ):
      target[batch, head, split] = value

  def producer() -> None:
    def load(slot, ready, j):
      keys = pl.ds(j * BLOCK, BLOCK)
      plgpu.copy_gmem_to_smem(k.at[batch, head, keys], k_smem.at[slot], ready)
      plgpu.copy_gmem_to_smem(v.at[batch, head, keys], v_smem.at[slot], ready)

    @pl.loop(start, stop)
    def _(j):
      ring.fill(j, start, functools.partial(load, j=j))

    ring.drain(start, stop)

  warpgroup = lax.axis_index("warpgroup")
  pl.when(warpgroup == 0)(consumer)
  pl.when(warpgroup == 1)(producer)
