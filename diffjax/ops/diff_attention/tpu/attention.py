"""Differential attention on TPU as fused Pallas kernels: one pass forward, one pass backward.

Forward, a block of queries stays while blocks of keys pass, and V is loaded once for both maps. Backward, a block
of keys stays while the query heads that share it pass: dP is computed once for both maps, dV meets their weighted sum, and dQ of a whole
head is accumulated where it stays in VMEM. Per query, key and head, in multiply-adds of d (paper §1): 6 and 10 for V1, 4 and 8 for V2.

Tiles that the mask hides are neither loaded nor computed. A tile is walked in sub-tiles that fit the registers; in tiles that the mask
cuts, hidden sub-tiles are skipped, and only sub-tiles that it cuts pay for it. Exponentials are base 2: logits are multiplied by
scale·log₂e, so that no query is rounded twice.

The forward pass has two kernels. The quick one takes exponentials of the logits as they are, which keeps the matrix unit busy all the time.
Its log-sum-exps show whether float32 held them (`in_range`). If not, the online kernel runs, which subtracts each row's running maximum.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from diffjax.ops.diff_attention.arguments import variant_name
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import (
  EMPTY_ROW_LSE,
  LOG2E,
  MASKED_LOGIT,
  Scalar,
  pad_axis,
  round_up,
)
from diffjax.ops.diff_attention.tpu import block_sizes, chip
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks
from diffjax.ops.diff_attention.tpu.chip import (
  LANES,
  as_column,
  as_row,
  dot,
  repeat,
)
from diffjax.ops.diff_attention.tpu.schedule import (
  Part,
  Schedule,
  make_schedule,
  scalars_of,
)
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  Options,
  PartialImplementation,
  PartialResult,
  Saved,
)

_Operand = tuple[
  jax.Array, tuple[int, ...], Callable
]  # array, block without squeezed axes, index map


@dataclasses.dataclass(frozen=True)
class _Chosen:
  forward: Blocks
  backward: Blocks
  generation: str
  cores: int
  interpret: Any


def _prepare(arrays: Arrays, mask: Mask) -> _Chosen:
  """Block sizes for the chip; refuses programs for other devices, and dtypes and widths that are not taken."""
  q, _, v, *_ = arrays
  generation = chip.generation(otherwise="chunked")
  chip.check(q, v, otherwise="chunked")
  forward, backward = (
    block_sizes.choose(
      generation,
      direction,
      mask.q_length,
      mask.kv_length,
      q.shape[-1],
      v.shape[-1],
      q.shape[3],
      q.dtype,
    )
    for direction in ("forward", "backward")
  )
  return _Chosen(
    forward, backward, generation, chip.cores(), chip.interpret_mode.get()
  )


def _forward(
  arrays: Arrays, mask: Mask, options: Options, is_partial: bool = False
) -> Any:
  """The output [B, H, T, V] and, to be saved for a gradient, O₂ [B, Q, T, V] and the log-sum-exps (base 2) [B, Q, G, T]; else None."""
  (q, k, v, lam, q_ids, kv_ids, offset), save = arrays, options.save
  schedule = make_schedule(mask, options.chosen.forward, q, k, keys_pass=True)
  scalars = scalars_of(schedule, q_ids, kv_ids, offset, q.shape[0])
  (B, T, Q, G, D), (K, M), V = q.shape, k.shape[2:4], v.shape[-1]
  R, rows, keys, signals = (
    Q // K,
    schedule.blocks.q,
    schedule.blocks.kv,
    max(G - 1, 1),
  )
  length, loaded = schedule.q_blocks * rows, schedule.span * keys
  stays = lambda b, h, i, step, *scalars: (b, h, 0, i, 0)
  stays_row = lambda b, h, i, step, *scalars: (b, h, 0, i)
  passes = lambda b, h, i, step, *scalars: (
    b,
    lax.div(h, R),
    schedule.loaded(scalars, b, i, step),
    0,
  )
  inputs: list[_Operand] = [
    (_queries(q, length), (G, rows, D), stays),
    (
      _keys(k, schedule),
      (M, loaded, D),
      lambda b, h, i, step, *scalars: (
        b,
        lax.div(h, R),
        0,
        schedule.loaded(scalars, b, i, step),
        0,
      ),
    ),
    (_values(v, schedule), (loaded, V), passes),
  ]
  if lam is not None:
    inputs.append(
      (pad_axis(_by_group(lam, signals), 3, length), (signals, rows), stays_row)
    )
  if q_ids is not None and kv_ids is not None:
    inputs += [
      (
        pad_axis(q_ids, 1, length)[:, None, None],
        (1, rows),
        lambda b, h, i, step, *scalars: (b, 0, 0, i),
      ),
      (
        pad_axis(kv_ids, 1, schedule.kv_blocks * keys)[:, None, None],
        (1, loaded),
        lambda b, h, i, step, *scalars: (
          b,
          0,
          0,
          schedule.loaded(scalars, b, i, step),
        ),
      ),
    ]
  dtype = jnp.float32 if is_partial else q.dtype
  outputs: list[Any] = [
    ((B, Q, maps, length, V), dtype, (maps, rows, V), stays)
    for maps in (signals, *[1] * (G > 1 and save))
  ]
  outputs.append(((B, Q, G, length), jnp.float32, (G, rows), stays_row))

  def run(*, online: bool):
    return _call(
      options.chosen,
      functools.partial(_forward_kernel, schedule, options, online),
      "forward",
      "_online" * online,
      schedule,
      grid=(B, Q, schedule.q_blocks, schedule.steps),
      parallel=3,
      scalars=scalars,
      inputs=inputs,
      outputs=outputs,
      scratch=[_vmem(G, rows, LANES)] * (1 + online)
      + [_vmem(G, rows, V), *_column(schedule, rows)],
      like=q,
      calls=B * Q,
    )

  if (
    is_partial and mask.segments
  ):  # rows that see none of these keys are many, and look to the quick kernel like underflow
    results = run(online=True)
  else:
    results = run(online=False)
    results = lax.cond(
      in_range(results[-1][..., :T], v),
      lambda: results,
      functools.partial(run, online=True),
    )
  out, *out2, lse = results
  return Saved(
    out[:, :, :, :T].reshape(B, Q * signals, T, V),
    out2[0][:, :, 0, :T] if out2 else None,
    lse[..., :T] if save else None,
  )


def _backward(
  arrays: Arrays,
  mask: Mask,
  options: Options,
  saved: Any,
  d_out,
  is_partial: bool = False,
):
  """Gradients of q, k, v and λ (None without λ); paper §1."""
  (q, k, v, lam, q_ids, kv_ids, offset), (out, out2, lse), chosen = (
    arrays,
    saved,
    options.chosen,
  )
  (B, T, Q, G, D), K = q.shape, k.shape[2]
  signals = max(G - 1, 1)
  group = lambda x: x.reshape(B, Q, signals, *x.shape[2:])
  d_out = group(jnp.swapaxes(d_out, 1, 2))
  row_sums = lambda x: jnp.sum(
    d_out.astype(jnp.float32) * x.astype(jnp.float32), axis=-1
  )
  delta, d_lam = row_sums(group(out)), None
  of_query = [lse, delta]  # log-sum-exps, deltas and λ
  if lam is not None:
    lam = _by_group(lam, signals)
    delta2 = row_sums(out2[:, :, None])
    d_lam = -jnp.swapaxes(delta2.reshape(B, -1, T), 1, 2)
    of_query = [lse, delta + lam * delta2, delta2, lam]
    if (
      G > 2
    ):  # the noise map has what its signal maps' outputs pass it, and is then like them
      d_noise = -jnp.sum(lam[..., None] * d_out, axis=2, keepdims=True)
      d_out = jnp.concatenate([d_out, d_noise.astype(d_out.dtype)], axis=2)
      of_query = [
        lse,
        delta + lam * delta2,
        -jnp.sum(lam * delta2, axis=2, keepdims=True),
      ]
  vectors = jnp.concatenate(of_query, axis=2)
  # dQ of all the rows of a call stays in VMEM: a call takes as many heads of a group as fit, or a span of one head's rows.
  block = chosen.backward.q
  heads = max(
    r
    for r in range(1, Q // K + 1)
    if (Q // K) % r == 0
    and (r == 1 or r * round_up(T, block) <= chosen.backward.resident)
  )
  span = min(
    round_up(T, block),
    max(block, chosen.backward.resident // heads // block * block),
  )
  shared = lambda x: x.reshape(B, K, Q // K, *x.shape[2:])
  parts, d_k, d_v = [], 0.0, 0.0
  for head in range(0, Q // K, heads):
    spans = []
    for start in range(0, T, span):
      stop = min(start + span, T)
      own = lambda x, axis, head=head, start=start, stop=stop: lax.slice_in_dim(
        shared(x)[:, :, head : head + heads], start, stop, axis=axis
      )
      pieces = _backward_span(
        mask.of_rows(start, stop),
        options,
        own(jnp.swapaxes(q, 1, 2), 3),
        k,
        v,
        own(d_out, 4),
        own(vectors, 4),
        None if q_ids is None else q_ids[:, start:stop],
        kv_ids,
        None if offset is None else offset + start,
        whole=heads == Q // K and span >= T,
        is_partial=is_partial,
      )
      spans.append(pieces[0])
      d_k, d_v = d_k + pieces[1], d_v + pieces[2]
    parts.append(jnp.concatenate(spans, axis=4) if len(spans) > 1 else spans[0])
  d_q = (
    jnp.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
  )  # [B, K, R, G, T, D]
  return (
    jnp.transpose(d_q.reshape(B, Q, G, T, D), (0, 3, 1, 2, 4)),
    jnp.transpose(d_k, (0, 3, 1, 2, 4)).astype(
      jnp.float32 if is_partial else k.dtype
    ),
    jnp.swapaxes(d_v, 1, 2).astype(jnp.float32 if is_partial else v.dtype),
    d_lam,
  )


def _backward_span(
  mask: Mask,
  options: Options,
  q,
  k,
  v,
  d_out,
  vectors,
  q_ids,
  kv_ids,
  offset,
  *,
  whole: bool,
  is_partial: bool,
):
  """dQ [B, K, R, G, T, D], dK [B, K, M, S, D] and dV [B, K, S, V] of queries [B, K, R, T, G, D]; dK and dV float32 unless `whole`."""
  (B, K, R, T, G, D), (S, M), V = q.shape, (k.shape[1], k.shape[3]), v.shape[-1]
  schedule = make_schedule(
    mask, options.chosen.backward, q[:, 0, 0], k, keys_pass=False
  )
  # Several cores share out one axis of the grid. If neither B nor K divides by them, each takes its share of a head's key blocks.
  cores = options.chosen.cores
  parts = cores if B % cores and K % cores and schedule.kv_blocks > 1 else 1
  schedule = dataclasses.replace(
    schedule, kv_blocks=round_up(schedule.kv_blocks, parts)
  )
  scalars = scalars_of(schedule, q_ids, kv_ids, offset, B)
  rows, keys = schedule.blocks.q, schedule.blocks.kv
  length, kv_length, loaded = (
    schedule.q_blocks * rows,
    schedule.kv_blocks * keys,
    schedule.span * rows,
  )
  stays = lambda b, kv, j, r, step, *scalars: (b, kv, j, 0)
  stays_keys = lambda b, kv, j, r, step, *scalars: (b, kv, 0, j, 0)
  passes = lambda b, kv, j, r, step, *scalars: (
    b,
    kv,
    r,
    0,
    schedule.loaded(scalars, b, j, step),
    0,
  )
  passes_row = lambda b, kv, j, r, step, *scalars: (
    b,
    kv,
    r,
    0,
    schedule.loaded(scalars, b, j, step),
  )
  inputs: list[_Operand] = [
    (
      _queries(q.reshape(B, K * R, T, G, D).swapaxes(1, 2), length).reshape(
        B, K, R, G, length, D
      ),
      (G, loaded, D),
      passes,
    ),
    (_keys(k, schedule), (M, keys, D), stays_keys),
    (_values(v, schedule), (keys, V), stays),
    (pad_axis(d_out, 4, length), (d_out.shape[3], loaded, V), passes),
    (pad_axis(vectors, 4, length), (vectors.shape[3], loaded), passes_row),
  ]
  if q_ids is not None and kv_ids is not None:
    inputs += [
      (
        pad_axis(q_ids, 1, length)[:, None, None],
        (1, loaded),
        lambda b, kv, j, r, step, *scalars: (
          b,
          0,
          0,
          schedule.loaded(scalars, b, j, step),
        ),
      ),
      (
        pad_axis(kv_ids, 1, kv_length)[:, None, None],
        (1, keys),
        lambda b, kv, j, r, step, *scalars: (b, 0, 0, j),
      ),
    ]
  dtype = k.dtype if whole and not is_partial else jnp.float32
  d_q_dtype = jnp.float32 if is_partial or parts > 1 else q.dtype
  outputs: list[Any] = [
    ((B, K, M, kv_length, D), dtype, (M, keys, D), stays_keys),
    ((B, K, kv_length, V), dtype, (keys, V), stays),
  ]
  # The second axis of the grid is a part of a key head's blocks, the third a place among them.
  inputs = [(x, block, _of_part(parts, index)) for x, block, index in inputs]
  outputs = [
    (shape, dtype, block, _of_part(parts, index))
    for shape, dtype, block, index in outputs
  ]
  all_rows = lambda b, part, n, r, step, *scalars: (b, part, 0, 0, 0, 0)
  d_q, d_k, d_v = _call(
    options.chosen,
    functools.partial(_backward_kernel, schedule, options.scale, parts),
    "backward",
    "",
    schedule,
    grid=(B, K * parts, schedule.kv_blocks // parts, R, schedule.steps),
    parallel=2,
    scalars=scalars,
    inputs=inputs,
    outputs=[
      ((B, K * parts, R, G, length, D), d_q_dtype, (R, G, length, D), all_rows),
      *outputs,
    ],
    scratch=[
      *[_vmem(R, G, length, D)] * (d_q_dtype != jnp.float32),
      _vmem(M, keys, D),
      _vmem(keys, V),
      *_column(schedule, keys),
    ],
    like=k,
    calls=B * K * R,
    parts=parts,
  )
  d_q = d_q[:, :, :, :, :T]
  if parts > 1:
    d_q = jnp.sum(d_q.reshape(B, K, parts, *d_q.shape[2:]), axis=2)
  return (
    d_q if is_partial else d_q.astype(q.dtype),
    d_k[:, :, :, :S],
    d_v[:, :, :S],
  )


def _of_part(parts: int, index: Callable) -> Callable:
  """An index map over key heads and their blocks, as one over parts of key heads and places among a part's blocks."""
  return lambda b, part, n, *rest: index(
    b, *_head_and_block(parts, part, n), *rest
  )


def _head_and_block(
  parts: int, part: Scalar, n: Scalar
) -> tuple[Scalar, Scalar]:
  """Key head and block at place n of a part. Blocks are dealt to and fro: with a causal mask each has less to do than the one before."""
  if parts == 1:
    return part, n
  own = lax.rem(part, parts)
  return lax.div(part, parts), n * parts + jnp.where(
    lax.rem(n, 2) == 0, own, parts - 1 - own
  )


def in_range(
  lse: Float[Array, "B H G T"], v: Float[Array, "B S K V"]
) -> Bool[Array, ""]:
  """Whether the quick forward kernel lost nothing, by the log-sum-exps (base 2) that it found: then they and its output are right.

  A log-sum-exp of at most 80 bounds sums of weighted values by 2^120. If it is at least −60, weights that underflowed, below 2^−126, are
  less than 2^−46 of the sum of up to 2^20. A row that saw no key, or lost all weights, is out of range; so is what is not finite.
  """
  largest = jnp.max(jnp.abs(v)).astype(jnp.float32)
  held = jnp.all((lse >= -60) & (lse <= 80))  # comparisons with NaN are false
  return (
    held
    & (largest <= 2.0**40)
    & ((largest >= 2.0**-20) | (largest == 0))
    & (v.shape[1] <= 1 << 20)
  )


def _call(
  chosen,
  function,
  direction: str,
  suffix: str,
  schedule: Schedule,
  *,
  grid,
  parallel,
  scalars,
  inputs,
  outputs,
  scratch,
  like,
  calls,
  parts=1,
):
  """`pallas_call` on (array, block, index map) and (shape, dtype, block, index map); a block's leading axes are squeezed away.

  calls counts the query heads of the batch, for each of which the schedule is walked once, all its `parts` together.
  """
  spec = lambda ndim, block, index: pl.BlockSpec(
    (None,) * (ndim - len(block)) + block, index
  )
  varying = jax.typeof(like).manual_axis_type
  size = lambda shape, dtype: math.prod(shape) * jnp.dtype(dtype).itemsize
  tiles, spans = (calls * count for count in schedule.tiles())
  G, (D, V) = schedule.num_maps, (inputs[0][1][-1], inputs[2][1][-1])
  vmem_bytes = block_sizes.requested_bytes(
    chosen.generation, direction, schedule.blocks, D, V, G, like.dtype
  )
  pairs = tiles * schedule.blocks.q * schedule.blocks.kv
  flops = (
    2 * G * (D + V)
    if direction == "forward"
    else 2 * (3 * G * D + 2 * (G if G > 2 else 1) * V)
  )
  # What stays is read once; what passes, once a part where it is one span of one head, and else once for each block that stays.
  passing = (1, 2) if direction == "forward" else (0, 3, 4)
  again = schedule.steps > 1 or (direction == "backward" and grid[3] > 1)
  traffic = sum(size(shape, dtype) for shape, dtype, _, _ in outputs)
  traffic += sum(
    size(x.shape, x.dtype)
    if n not in passing
    else spans * size(block, x.dtype)
    if again
    else parts * size(x.shape, x.dtype)
    for n, (x, block, _) in enumerate(inputs)
  )
  return pl.pallas_call(
    function,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=grid,
      in_specs=[spec(x.ndim, block, index) for x, block, index in inputs],
      out_specs=[
        spec(len(shape), block, index) for shape, _, block, index in outputs
      ],
      scratch_shapes=scratch,
    ),
    out_shape=[
      jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
      for shape, dtype, _, _ in outputs
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=[pltpu.PARALLEL] * parallel
      + [pltpu.ARBITRARY] * (len(grid) - parallel),
      vmem_limit_bytes=vmem_bytes,
    ),
    cost_estimate=pl.CostEstimate(
      flops=flops * pairs, transcendentals=G * pairs, bytes_accessed=traffic
    ),
    interpret=chosen.interpret,
    name=f"diff_attention_{direction}_{variant_name(G, schedule.num_key_maps)}{suffix}",
  )(*scalars, *(x for x, _, _ in inputs))


def _slice(start: Scalar, size: int):
  """Rows or lanes of a block, from a multiple of `size`."""
  return pl.ds(
    start if isinstance(start, int) else pl.multiple_of(start, size), size
  )


def _vmem(*shape: int, dtype=jnp.float32):
  return pltpu.VMEM(shape, dtype)


def _column(schedule: Schedule, size: int) -> list[Any]:
  """Room for the segment ids of the block that stays, turned into a column once: the other block's lie in a row."""
  return [_vmem(size, LANES, dtype=jnp.int32)] if schedule.mask.segments else []


def _by_group(
  x: Float[Array, "B T H"], signals: int
) -> Float[Array, "B Q signals T"]:
  """A number for each token and head, by the signal maps of a group."""
  return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], -1, signals, x.shape[1])


def _queries(q, length: int) -> jax.Array:
  """[B, T, H, G, D] as [B, H, G, length, D]."""
  return pad_axis(jnp.transpose(q, (0, 2, 3, 1, 4)), 3, length)


def _keys(k, schedule: Schedule) -> jax.Array:
  """[B, S, K, M, D] as [B, K, M, length, D]."""
  return pad_axis(
    jnp.transpose(k, (0, 2, 3, 1, 4)),
    3,
    schedule.kv_blocks * schedule.blocks.kv,
  )


def _values(v, schedule: Schedule) -> jax.Array:
  """[B, S, K, V] as [B, K, length, V]."""
  return pad_axis(
    jnp.swapaxes(v, 1, 2), 2, schedule.kv_blocks * schedule.blocks.kv
  )


def _forward_partial(
  arrays: Arrays, mask: Mask, options: Options
) -> PartialResult:
  return PartialResult(*_forward(arrays, mask, options, is_partial=True))


def _backward_partial(
  arrays: Arrays, mask: Mask, options: Options, result: PartialResult, d_out
):
  return _backward(arrays, mask, options, result, d_out, is_partial=True)[:3]


IMPLEMENTATION = Implementation(
  _forward,
  _backward,
  _prepare,
  output=lambda out: jnp.swapaxes(out, 1, 2),
  takes_groups=True,
  partial=PartialImplementation(_forward_partial, _backward_partial),
)


def _forward_kernel(
  schedule: Schedule, options: Options, online: bool, *refs
) -> None:
  """Grid [B, H, query blocks, key blocks that pass]. Only an online kernel keeps and subtracts the running maximum of the logits."""
  save, factor = options.save, options.scale * LOG2E
  scalars, take = (
    refs[: schedule.num_scalars],
    iter(refs[schedule.num_scalars :]),
  )
  G, M = schedule.num_maps, schedule.num_key_maps
  q, k, v = next(take), next(take), next(take)
  lam: Any = next(take) if G > 1 else None
  ids: Any = (next(take), next(take)) if schedule.mask.segments else None
  out = next(take)
  out2: Any = next(take) if G > 1 and save else None
  lse: Any = next(take)
  peak: Any = next(take) if online else None  # [G, rows, 128]
  total, acc, *column = (
    take  # [G, rows, 128] and [G, rows, V]; a row's total is spread over the lanes until the end
  )
  b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

  @pl.when(step == 0)
  def _():
    if online:
      peak[...] = jnp.full_like(peak, MASKED_LOGIT)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)
    if schedule.mask.segments:
      column[0][...] = as_column(ids[0][...])

  def subtile(place: Scalar, its_rows: Part, its_keys: Part, mask) -> None:
    (row, n), (key, width) = its_rows, its_keys
    rows, keys = _slice(row, n), _slice(place * schedule.blocks.kv + key, width)
    # The maps lie one below the other, so that V, and K where they share it, is put into the matrix unit once.
    stacked = lambda x: x.reshape(-1, x.shape[-1])
    logits = (
      jnp.concatenate(
        [
          dot(stacked(q[schedule.maps_of(m), rows, :]), k[m, keys, :], (1, 1))
          for m in range(M)
        ]
      )
      * factor
    )
    if mask is not None:
      mask = mask(
        0, lambda: (repeat(column[0][rows, :], width), ids[1][:, keys])
      )
      logits = jnp.where(jnp.concatenate([mask] * G), logits, MASKED_LOGIT)
    sums, products = stacked(total[:, rows, :]), stacked(acc[:, rows, :])
    if online:
      before = stacked(peak[:, rows, :])
      after = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
      logits, shrink = (
        logits - repeat(after, logits.shape[1]),
        jnp.exp2(before - after),
      )
      sums, products = sums * shrink, products * repeat(shrink, acc.shape[2])
      peak[:, rows, :] = after.reshape(G, n, LANES)
    weights = jnp.exp2(logits)
    if not online:
      # What is summed up is what V is weighted by. Else a row's largest weight, which is 1 in the online kernel, would be rounded.
      weights = weights.astype(v.dtype).astype(jnp.float32)
    parts = [
      weights[:, lane : lane + LANES]
      for lane in range(0, weights.shape[1], LANES)
    ]
    total[:, rows, :] = (sums + functools.reduce(jnp.add, parts)).reshape(
      G, n, LANES
    )
    acc[:, rows, :] = (products + dot(weights, v[keys, :], (1, 0))).reshape(
      G, n, -1
    )

  schedule.each_tile(
    scalars,
    b,
    i,
    step,
    lambda j, place: schedule.visit(
      scalars, b, i, j, functools.partial(subtile, place)
    ),
  )

  @pl.when(step == schedule.steps - 1)
  def _():
    for start in range(
      0, schedule.blocks.q, LANES
    ):  # few rows at a time, which stay in registers
      rows = pl.ds(start, LANES)
      outs = []
      for g in range(G):
        sums = jnp.sum(total[g, rows, :], axis=1, keepdims=True)
        # The row saw no key. In the online kernel, whatever was added up then counts for nothing.
        empty = (
          peak[g, rows, :] <= MASKED_LOGIT / 2
          if online
          else jnp.broadcast_to(sums == 0, (LANES, LANES))
        )
        outs.append(
          acc[g, rows, :]
          * repeat(jnp.where(empty, 0.0, 1.0 / sums), acc.shape[2])
        )
        # An empty row's log-sum-exp makes its weights zero in the backward pass.
        lse[g : g + 1, rows] = as_row(
          jnp.where(
            empty,
            EMPTY_ROW_LSE,
            jnp.log2(sums) + (peak[g, rows, :] if online else 0.0),
          )
        )
      if G == 1:
        out[0, rows, :] = outs[0].astype(out.dtype)
      else:
        noise = outs[-1].astype(
          out.dtype
        )  # rounded first, so that the backward pass, which reads it, agrees
        if save:
          out2[0, rows, :] = noise
        for signal, own in enumerate(outs[:-1]):
          factors = as_column(lam[signal : signal + 1, rows], 8)[:, :1]
          out[signal, rows, :] = (
            own - factors * noise.astype(jnp.float32)
          ).astype(out.dtype)


def _backward_kernel(
  schedule: Schedule, scale: float, parts: int, *refs
) -> None:
  """Grid [B, parts of key heads, a part's key blocks, query heads of a key head, query blocks that pass]. Maps are transposed: keys ×
  queries."""
  scalars, take = (
    refs[: schedule.num_scalars],
    iter(refs[schedule.num_scalars :]),
  )
  G, M = schedule.num_maps, schedule.num_key_maps
  q, k, v, d_out = next(take), next(take), next(take), next(take)
  vectors = next(take)  # [G log-sum-exps, G deltas and λ, rows]
  ids: Any = (next(take), next(take)) if schedule.mask.segments else None
  d_q, d_k, d_v = next(take), next(take), next(take)
  d_q_acc = (
    d_q if d_q.dtype == jnp.float32 else next(take)
  )  # [heads, G, all rows, D]; where dQ is stored in float32, it is added up there
  d_k_acc, d_v_acc, *column = take  # [M, keys, D] and [keys, V]
  b, n, head, step = (
    pl.program_id(0),
    pl.program_id(2),
    pl.program_id(3),
    pl.program_id(4),
  )
  j = _head_and_block(parts, pl.program_id(1), n)[1]

  @pl.when((n == 0) & (head == 0) & (step == 0))
  def _():
    d_q_acc[...] = jnp.zeros_like(d_q_acc)

  @pl.when((head == 0) & (step == 0))
  def _():
    d_k_acc[...] = jnp.zeros_like(d_k_acc)
    d_v_acc[...] = jnp.zeros_like(d_v_acc)
    if schedule.mask.segments:
      column[0][...] = as_column(ids[1][...])

  def subtile(
    i: Scalar, place: Scalar, its_rows: Part, its_keys: Part, mask
  ) -> None:
    (row, n), (key, width) = its_rows, its_keys
    rows, keys = _slice(place * schedule.blocks.q + row, n), _slice(key, width)
    whole = _slice(
      i * schedule.blocks.q + row, n
    )  # the rows' place among all rows
    if mask is not None:
      mask = mask(1, lambda: (ids[0][:, rows], repeat(column[0][keys, :], n)))
    d_weights: Any = None
    d_logits: list[jax.Array] = []
    weighted: list[jax.Array] = []
    for g in range(G):
      if (
        g < d_out.shape[0]
      ):  # a signal map shares dP with a noise map of its own; the noise map of several has a dP too
        d_weights = dot(v[keys, :], d_out[g, rows, :], (1, 1))
      logits = dot(
        k[M - 1 if g == G - 1 else 0, keys, :], q[g, rows, :], (1, 1)
      ) * (scale * LOG2E)
      if mask is not None:
        logits = jnp.where(mask, logits, MASKED_LOGIT)
      weights = jnp.exp2(logits - vectors[g : g + 1, rows])
      if G == 2 and g == 1:
        weights = weights * -vectors[2 * G :, rows]
        weighted[0] = weighted[0] + weights  # A₁ − λA₂
      else:
        weighted.append(weights)
      d_logits.append(
        (weights * (d_weights - vectors[G + g : G + g + 1, rows])).astype(
          d_out.dtype
        )
      )
    d_v_acc[keys, :] += dot(
      jnp.concatenate(weighted, axis=1),
      d_out[:, rows, :].reshape(-1, d_out.shape[2]),
      (1, 0),
    )
    for m in range(M):
      maps = schedule.maps_of(m)
      both = jnp.concatenate(d_logits[maps], axis=1)
      d_k_acc[m, keys, :] += dot(
        both, q[maps, rows, :].reshape(-1, q.shape[2]), (1, 0)
      )
      d_q_acc[head, maps, whole, :] += dot(both, k[m, keys, :], (0, 0)).reshape(
        maps.stop - maps.start, -1, k.shape[2]
      )

  schedule.each_tile(
    scalars,
    b,
    j,
    step,
    lambda i, place: schedule.visit(
      scalars, b, i, j, functools.partial(subtile, i, place)
    ),
  )

  end = (head == pl.num_programs(3) - 1) & (step == schedule.steps - 1)

  @pl.when(end & (n == pl.num_programs(2) - 1))
  def _():
    d_q[...] = (d_q_acc[...] * scale).astype(d_q.dtype)

  @pl.when(end)
  def _():
    d_k[...] = (d_k_acc[...] * scale).astype(d_k.dtype)
    d_v[...] = d_v_acc[...].astype(d_v.dtype)
