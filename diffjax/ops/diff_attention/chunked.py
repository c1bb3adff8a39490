"""Differential attention in XLA with memory linear in length, for any backend; the CPU's default.

A block of queries attends to all its visible keys at once, with an ordinary softmax. Blocks run one after the other, so that only one
block's logits are in memory. Keys that the mask hides from a whole block are never read. Heads are processed in groups if one block of all
of them would not fit the cache. Per query, key and head, the forward pass takes 4 multiply-adds of d and the backward pass 10 (paper §1),
as plain attention with the same projections does. A kernel that iterates over keys takes 6 in the forward pass. Here the maps are
subtracted before the product with V, and δ₂ is a row sum of A₂ ∘ dP, so that O₂ is not needed. A noise map that several signal maps share
is computed once, and the signal maps of a group are heads of one product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from diffjax.ops.diff_attention.mask import PER_ROW, Mask, apply, positions
from diffjax.ops.diff_attention.tiles import EMPTY_ROW_LSE, LOG2E
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  Options,
  PartialImplementation,
  PartialResult,
  Saved,
)
from diffjax.ops.varying import vary_like

# Measured on two CPU cores, lengths 256 to 16,384: 128 rows a block, 256 where rows are long (each block adds to all of dK and dV), and
# as many heads at once as keep a block's logits, all maps together, within 4 MB.
_SHORT_BLOCK, _LONG_BLOCK, _LONG = 128, 256, 2048
_BLOCK_LOGITS = 1 << 20
# Up to this many query blocks are unrolled, each with its visible keys. Longer sequences are cut into this many bands, and each band is a
# scan. That bounds the compile time, and adds at most 1/16 to the causal work.
_MAX_BANDS = 16


class _Inputs(NamedTuple):
  """The arguments with heads leading: N = B·K, and R = H/K heads share a key head."""

  q: list[
    jax.Array
  ]  # of the signal maps [N, R, T, D], and of the noise maps, each of R / (G − 1) heads, if there are such
  k: list[jax.Array]  # M of [N, S, D]
  v: jax.Array  # [N, S, V]
  lam: jax.Array | None  # [N, R, T, 1]
  q_ids: jax.Array | None  # [N, T]
  kv_ids: jax.Array | None  # [N, S]
  offset: jax.Array | None  # [N]


class _Band(NamedTuple):
  """Consecutive query blocks that read equally many keys."""

  block: int  # rows of a block
  span: int  # keys that a block reads
  rows: list[int]  # each block's first row
  keys: list[int]  # each block's first key


def _forward(
  arrays: Arrays, mask: Mask, options: Options, is_partial: bool = False
) -> Any:
  """The output [B, T, H, V] and the log-sum-exps [N, R, T, 1] of signal maps, and of noise maps likewise."""
  inputs = _lead_with_heads(arrays)
  num_groups, block = _tile(inputs)
  group = functools.partial(
    _forward_group, mask, options, is_partial, _bands(mask, block)
  )
  out, lse = _map_groups(group, num_groups, inputs)
  if is_partial:
    heads = lambda x: x.reshape(
      arrays.q.shape[0], arrays.q.shape[2], *x.shape[2:]
    )  # of groups of two maps at most
    out, out2 = (*map(heads, out), None)[:2]
    return Saved(
      out, out2, jnp.stack([heads(x)[..., 0] for x in lse], axis=2) * LOG2E
    )
  return Saved(
    _tokens_first(out, arrays.q.shape[0]).astype(arrays.q.dtype), lse=lse
  )


def _forward_group(
  mask: Mask,
  options: Options,
  is_partial: bool,
  bands: list[_Band],
  inputs: _Inputs,
):
  def step(band: _Band, arrays, carry, row, key):
    (inputs,) = arrays
    visible = _visible(mask, band, inputs, row, key)
    weights, sums, lses = [], [], []
    for q, k in zip(inputs.q, _per_map(inputs), strict=True):
      logits = apply(
        visible,
        _logits(
          _rows(q, row, band.block), _keys(k, key, band.span), options.scale
        ),
      )
      peak = jnp.max(logits, axis=-1, keepdims=True)
      peak = jnp.where(
        peak == -jnp.inf, 0, peak
      )  # an empty row: exp(−∞ − 0) is 0 where exp(−∞ + ∞) is NaN
      weight = jnp.exp(logits - peak)
      total = jnp.sum(weight, axis=-1, keepdims=True)
      empty = total == 0
      total = jnp.where(empty, 1, total)
      lses.append(jnp.where(empty, EMPTY_ROW_LSE, peak + jnp.log(total)))
      weights.append(weight)
      sums.append(total)
    values = _keys(inputs.v, key, band.span)
    if is_partial:
      return carry, (
        [
          _dot("nrts,nsv->nrtv", weight, values) / total
          for weight, total in zip(weights, sums, strict=True)
        ],
        lses,
      )
    combined = weights[0]
    if (
      inputs.lam is not None
    ):  # O = (A₁ − λA₂)V with the first map's division left for after the product
      noise, total = (
        _for_heads(x, combined.shape[1]) for x in (weights[1], sums[1])
      )
      combined = (
        combined
        - (_rows(inputs.lam, row, band.block) * sums[0] / total) * noise
      )
    return carry, (_dot("nrts,nsv->nrtv", combined, values) / sums[0], lses)

  return _walk(bands, step, (inputs,), ())[1]


def _backward(
  arrays: Arrays,
  mask: Mask,
  options: Options,
  saved: Any,
  d_out,
  is_partial: bool = False,
):
  """Gradients of q, k, v and λ (None without λ); paper §1."""
  q, k, v, lam = arrays[:4]
  batch, num_kv_heads, scale = q.shape[0], k.shape[2], options.scale
  dtype = jnp.promote_types(jnp.float32, q.dtype)
  inputs, lse, delta_2 = _lead_with_heads(arrays), saved.lse, None
  if is_partial:  # δ₂ is a sum over all keys, which are not here
    tokens_first = lambda x: jnp.swapaxes(x, 1, 2)
    lse = [
      _heads_first(tokens_first(saved.lse[:, :, g])[..., None], num_kv_heads)
      / LOG2E
      for g in range(q.shape[3])
    ]
    saved = saved._replace(out=tokens_first(saved.out))
    if lam is not None:
      row_sums = jnp.sum(
        d_out.astype(dtype) * tokens_first(saved.out2).astype(dtype),
        axis=-1,
        keepdims=True,
      )
      delta_2 = _heads_first(row_sums, num_kv_heads)
  # rowsum(dO ∘ O) = δ₁ − λδ₂
  delta = _heads_first(
    jnp.sum(
      d_out.astype(dtype) * saved.out.astype(dtype), axis=-1, keepdims=True
    ),
    num_kv_heads,
  )
  num_groups, block = _tile(inputs)
  group = functools.partial(_backward_group, mask, scale, _bands(mask, block))
  (d_k, d_v), (d_q, d_lam) = _map_groups(
    group,
    num_groups,
    inputs,
    lse,
    delta,
    delta_2,
    _heads_first(d_out, num_kv_heads),
  )
  result = dtype if is_partial else q.dtype
  by_group = lambda x: _tokens_first(x * scale, batch).reshape(
    *q.shape[:3], -1, q.shape[4]
  )
  d_q = jnp.concatenate([by_group(x) for x in d_q], axis=3).astype(result)
  d_k = jnp.stack([_keys_first(x * scale, batch) for x in d_k], axis=3).astype(
    result
  )
  d_v = _keys_first(d_v, batch).astype(result)
  return (
    d_q,
    d_k,
    d_v,
    None
    if lam is None
    else _tokens_first(d_lam, batch)[..., 0].astype(lam.dtype),
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
  takes_groups=True,
  partial=PartialImplementation(_forward_partial, _backward_partial),
)


def _backward_group(
  mask: Mask,
  scale: float,
  bands: list[_Band],
  inputs: _Inputs,
  lse,
  delta,
  delta_2,
  d_out,
):
  dtype = delta.dtype
  # dK and dV grow as [N, D, S] from queries and dO laid out [N, D, R, T]: a product of two row-major matrices, where the natural
  # [S, T]·[T, D] reads the large matrix across its rows and measured two to ten times slower on CPU.
  turned = [jnp.transpose(x, (0, 3, 1, 2)) for x in (*inputs.q, d_out)]
  zeros = lambda x: vary_like(
    jnp.zeros((x.shape[0], x.shape[2], x.shape[1]), dtype), inputs.q[0]
  )

  def step(band: _Band, arrays, carry, row, key):
    inputs, turned, lse, delta, known, d_out = arrays
    d_k, d_v = list(carry[0]), carry[1]
    visible = _visible(mask, band, inputs, row, key)
    keys = [_keys(k, key, band.span) for k in _per_map(inputs)]
    maps = [
      jnp.exp(
        apply(visible, _logits(_rows(q, row, band.block), k, scale))
        - _rows(total, row, band.block)
      )
      for q, k, total in zip(inputs.q, keys, lse, strict=True)
    ]
    d_weights = _logits(
      _rows(d_out, row, band.block), _keys(inputs.v, key, band.span), 1.0
    )  # dP = dO·Vᵀ, for both maps
    delta_1, combined, d_lam, d_logits = (
      _rows(delta, row, band.block),
      maps[0],
      None,
      [],
    )
    if inputs.lam is not None:
      lam = _rows(inputs.lam, row, band.block)
      noise = _for_heads(maps[1], combined.shape[1])
      delta_2 = (
        _row_sums(noise * d_weights)
        if known is None
        else _rows(known, row, band.block)
      )
      delta_1, combined, d_lam = (
        delta_1 + lam * delta_2,
        maps[0] - lam * noise,
        -delta_2,
      )
      d_logits = [
        _of_heads(-lam * noise * (d_weights - delta_2), maps[1].shape[1])
      ]
    d_logits = [maps[0] * (d_weights - delta_1), *d_logits]
    d_q = [
      _dot("nrts,nsd->nrtd", d_logit, k)
      for d_logit, k in zip(d_logits, keys, strict=True)
    ]
    for g, d_logit in enumerate(d_logits):
      m = g % len(d_k)
      d_k[m] = _add_keys(
        d_k[m],
        _dot("ndrt,nrts->nds", _columns(turned[g], row, band.block), d_logit),
        key,
      )
    d_v = _add_keys(
      d_v,
      _dot("nvrt,nrts->nvs", _columns(turned[-1], row, band.block), combined),
      key,
    )
    return (d_k, d_v), (d_q, d_lam)

  carry = ([zeros(k) for k in inputs.k], zeros(inputs.v))
  return _walk(bands, step, (inputs, turned, lse, delta, delta_2, d_out), carry)


def _walk(
  bands: list[_Band], step: Callable, arrays: Any, carry: Any
) -> tuple[Any, Any]:
  """Runs `step` over every query block in order. Returns the last carry and the outputs, [N, R, t, X] of a block, put together."""
  outs: list[Any] = []
  for band in bands:
    if outs:  # or XLA may interleave the unrolled blocks, with all their logits alive at once
      arrays, carry, outs[-1] = lax.optimization_barrier(
        (arrays, carry, outs[-1])
      )
    if len(band.rows) == 1:
      carry, out = step(band, arrays, carry, band.rows[0], band.keys[0])
    else:
      starts = (
        jnp.array(band.rows, jnp.int32),
        jnp.array(band.keys, jnp.int32),
      )

      def at(carry, start, band=band, arrays=arrays):
        return step(band, arrays, carry, *start)

      carry, out = lax.scan(at, carry, starts)
      out = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[4]),
        out,
      )
    outs.append(out)
  return carry, jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *outs)


def _bands(mask: Mask, block: int) -> list[_Band]:
  """All query blocks, each with the keys that its rows may see."""
  blocks = []  # (first row, rows, first key, last key + 1)
  for row in range(0, mask.q_length, block):
    rows = min(block, mask.q_length - row)
    low, last = 0, mask.kv_length - 1
    if mask.offset != PER_ROW:
      low, last = mask.keys_of(mask.offset + row, mask.offset + row + rows - 1)
    high = max(last + 1, 1)  # a block that sees nothing looks at one masked key
    blocks.append((row, rows, min(low, high - 1), high))
  alike = (
    len({seen[2:] for seen in blocks}) == 1
  )  # nothing is won by telling them apart
  per_band = len(blocks) if alike else -(-len(blocks) // _MAX_BANDS)
  bands = []
  while blocks:
    rows = blocks[0][1]
    members = [
      b for b in blocks[:per_band] if b[1] == rows
    ]  # the last block may be shorter and is then a band of its own
    blocks = blocks[len(members) :]
    span = max(high - low for _, _, low, high in members)
    bands.append(
      _Band(
        rows,
        span,
        [b[0] for b in members],
        [min(b[2], mask.kv_length - span) for b in members],
      )
    )
  return bands


def _tile(inputs: _Inputs) -> tuple[int, int]:
  """The number of groups in which heads are walked, and the rows of a query block."""
  num_heads, _, length, _ = inputs.q[0].shape
  kv_length = inputs.v.shape[1]
  block = min(length, _LONG_BLOCK if kv_length > _LONG else _SHORT_BLOCK)
  per_head = sum(q.shape[1] for q in inputs.q) * block * kv_length
  heads = max(
    n
    for n in range(1, num_heads + 1)
    if num_heads % n == 0 and (n == 1 or n * per_head <= _BLOCK_LOGITS)
  )
  return num_heads // heads, block


def _map_groups(function: Callable, num_groups: int, *arrays: Any) -> Any:
  """function(*arrays), one group of the leading axis at a time."""
  if num_groups == 1:
    return function(*arrays)
  split = jax.tree.map(
    lambda x: x.reshape(num_groups, -1, *x.shape[1:]), arrays
  )
  return jax.tree.map(
    lambda x: x.reshape(-1, *x.shape[2:]),
    lax.map(lambda group: function(*group), split),
  )


def _lead_with_heads(arrays: Arrays) -> _Inputs:
  q, k, v, lam, q_ids, kv_ids, offset = arrays
  num_kv_heads = k.shape[2]
  per_head = lambda x: (
    None if x is None else jnp.repeat(x, num_kv_heads, axis=0)
  )
  signal, noise = (
    (q, []) if q.shape[3] == 1 else (q[:, :, :, :-1], [q[:, :, :, -1]])
  )
  return _Inputs(
    q=[
      _heads_first(x, num_kv_heads)
      for x in (signal.reshape(*q.shape[:2], -1, q.shape[4]), *noise)
    ],
    k=[
      _heads_first(k[:, :, :, m], num_kv_heads)[:, 0] for m in range(k.shape[3])
    ],
    v=_heads_first(v, num_kv_heads)[:, 0],
    lam=None if lam is None else _heads_first(lam[..., None], num_kv_heads),
    q_ids=per_head(q_ids),
    kv_ids=per_head(kv_ids),
    offset=per_head(offset),
  )


def _heads_first(
  x: Float[Array, "B T H X"], num_kv_heads: int
) -> Float[Array, "N R T X"]:
  batch, length, heads, width = x.shape
  return jnp.swapaxes(x, 1, 2).reshape(
    batch * num_kv_heads, heads // num_kv_heads, length, width
  )


def _tokens_first(
  x: Float[Array, "N R T X"], batch: int
) -> Float[Array, "B T H X"]:
  return jnp.swapaxes(x.reshape(batch, -1, *x.shape[2:]), 1, 2)


def _keys_first(
  x: Float[Array, "N X S"], batch: int
) -> Float[Array, "B S K X"]:
  return jnp.transpose(x.reshape(batch, -1, *x.shape[1:]), (0, 3, 1, 2))


def _for_heads(
  x: Float[Array, "N r t X"], heads: int
) -> Float[Array, "N R t X"]:
  """What noise maps have, repeated for each of their heads."""
  return (
    x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)
  )


def _of_heads(x: Float[Array, "N R t s"], maps: int) -> Float[Array, "N r t s"]:
  """The sum over the heads of each noise map, one by one: a reduction over this axis took all of `chunked` 1.5 times as long on a CPU."""
  if x.shape[1] == maps:
    return x
  heads = x.reshape(x.shape[0], maps, -1, *x.shape[2:])
  return functools.reduce(
    jnp.add, [heads[:, :, head] for head in range(heads.shape[2])]
  )


def _per_map(inputs: _Inputs) -> list[jax.Array]:
  return [inputs.k[g % len(inputs.k)] for g in range(len(inputs.q))]


def _visible(
  mask: Mask, band: _Band, inputs: _Inputs, row, key
) -> Bool[Array, "Z 1 t s"] | None:
  """The mask of one block of queries and the keys that it looks at."""
  q_ids = (
    None
    if inputs.q_ids is None
    else lax.dynamic_slice_in_dim(inputs.q_ids, row, band.block, axis=1)
  )
  kv_ids = (
    None
    if inputs.kv_ids is None
    else lax.dynamic_slice_in_dim(inputs.kv_ids, key, band.span, axis=1)
  )
  q_positions = positions(band.block, mask.first_position(inputs.offset), row)
  visible = mask.between(
    q_positions, positions(band.span, 0, key), q_ids, kv_ids
  )
  return None if visible is None else visible[:, None]


def _dot(equation: str, weights: jax.Array, other: jax.Array) -> jax.Array:
  """A product with float32 weights or gradients, whose inputs are rounded to the other operand's dtype and whose sum is not."""
  dtype = jnp.promote_types(jnp.float32, other.dtype)
  narrow = (
    weights.dtype
    if jnp.finfo(weights.dtype).bits < jnp.finfo(other.dtype).bits
    else other.dtype
  )
  return jnp.einsum(
    equation,
    weights.astype(narrow),
    other.astype(narrow),
    preferred_element_type=dtype,
  )


def _row_sums(x: Float[Array, "N R T S"]) -> Float[Array, "N R T 1"]:
  """The sum as a product with ones: as a reduction XLA's CPU backend fuses the factors into it, and is then ten times slower (0.10)."""
  return jnp.matmul(
    x, jnp.ones((x.shape[-1], 1), x.dtype), precision=lax.Precision.HIGHEST
  )


def _logits(
  rows: Float[Array, "N R T D"], keys: Float[Array, "N S D"], scale: float
) -> Float[Array, "N R T S"]:
  dtype = jnp.promote_types(jnp.float32, rows.dtype)
  logits = jnp.einsum(
    "nrtd,nsd->nrts", rows, keys, preferred_element_type=dtype
  )
  return logits if scale == 1 else logits * scale


def _rows(
  x: Float[Array, "N R T X"], start, size: int
) -> Float[Array, "N R t X"]:
  return lax.dynamic_slice_in_dim(x, start, size, axis=2)


def _columns(
  x: Float[Array, "N X R T"], start, size: int
) -> Float[Array, "N X R t"]:
  return lax.dynamic_slice_in_dim(x, start, size, axis=3)


def _keys(x: Float[Array, "N S X"], start, size: int) -> Float[Array, "N s X"]:
  return lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _add_keys(
  total: Float[Array, "N X S"], part: Float[Array, "N X s"], start
) -> Float[Array, "N X S"]:
  return lax.dynamic_update_slice_in_dim(
    total,
    lax.dynamic_slice_in_dim(total, start, part.shape[2], axis=2) + part,
    start,
    axis=2,
  )
