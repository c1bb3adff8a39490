"""Differential attention in XLA with memory linear in length, for any backend; the CPU's default.

A block of queries attends to all its visible keys at once, with an ordinary softmax. Blocks run one after the other, so that only one
block's logits are in memory. Keys that the mask hides from a whole block are never read. Heads are processed in groups if one block of all
of them would not fit the cache. Per query, key and head, the forward pass takes 4 multiply-adds of d and the backward pass 10 (paper §1),
as plain attention with the same projections does. A kernel that iterates over keys takes 6 in the forward pass. Here the maps are
subtracted before the product with V, and δ₂ is a row sum of A₂ ∘ dP, so that O₂ is not needed. A noise map that several signal maps share
is computed once.
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
from diffjax.ops.diff_attention.tiles import HIDDEN, LOG2E
from diffjax.ops.diff_attention.vjp import Arrays, Implementation, Options, Saved
from diffjax.ops.varying import vary_like

# Measured on two CPU cores, lengths 256 to 16,384: 128 rows a block, 256 where rows are long (each block adds to all of dK and dV), and
# as many heads at once as keep a block's logits, all maps together, within 4 MB.
_SHORT_BLOCK, _LONG_BLOCK, _LONG = 128, 256, 2048
_BLOCK_LOGITS = 1 << 20
# Up to this many query blocks are unrolled, each with its visible keys. Longer sequences are cut into this many bands, and each band is a
# scan. That bounds the compile time, and adds at most 1/16 to the causal work.
_MAX_BANDS = 16


class _Inputs(NamedTuple):
  """The arguments with heads leading: N = B·K, and R = Q/K query groups share a key head."""

  q: list[jax.Array]  # G of [N, R, T, D]
  k: list[jax.Array]  # M of [N, S, D]
  v: jax.Array  # [N, S, V]
  lam: list[jax.Array]  # G − 1 of [N, R, T, 1], one for each signal map
  q_ids: jax.Array | None  # [N, T]
  kv_ids: jax.Array | None  # [N, S]
  offset: jax.Array | None  # [N]


class _Band(NamedTuple):
  """Consecutive query blocks that read equally many keys."""

  block: int  # rows of a block
  span: int  # keys that a block reads
  rows: list[int]  # each block's first row
  keys: list[int]  # each block's first key


def _forward(arrays: Arrays, mask: Mask, options: Options) -> Saved:
  """The output [B, T, H, V] and the log-sum-exps, G of [N, R, T, 1]."""
  inputs = _lead_with_heads(arrays)
  num_groups, block = _tile(inputs)
  group = functools.partial(_forward_group, mask, options, _bands(mask, block))
  out, lse = _map_groups(group, num_groups, inputs)
  if options.partial:
    heads = lambda x: x.reshape(arrays.q.shape[0], arrays.q.shape[2], *x.shape[2:])  # of groups of two maps at most
    out, out2 = (*map(heads, out), None)[:2]
    return Saved(out, out2, jnp.stack([heads(x)[..., 0] for x in lse], axis=2) * LOG2E)
  return Saved(_of_signals(out, arrays.q.shape[0]).astype(arrays.q.dtype), lse=lse)


def _forward_group(mask: Mask, options: Options, bands: list[_Band], inputs: _Inputs):
  def step(band: _Band, arrays, carry, row, key):
    (inputs,) = arrays
    visible = _visible(mask, band, inputs, row, key)
    weights, sums, lses = [], [], []
    for q, k in zip(inputs.q, _per_map(inputs), strict=True):
      logits = apply(visible, _logits(_rows(q, row, band.block), _keys(k, key, band.span), options.scale))
      peak = jnp.max(logits, axis=-1, keepdims=True)
      peak = jnp.where(peak == -jnp.inf, 0, peak)  # an empty row: exp(−∞ − 0) is 0 where exp(−∞ + ∞) is NaN
      weight = jnp.exp(logits - peak)
      total = jnp.sum(weight, axis=-1, keepdims=True)
      empty = total == 0
      total = jnp.where(empty, 1, total)
      lses.append(jnp.where(empty, -HIDDEN, peak + jnp.log(total)))
      weights.append(weight)
      sums.append(total)
    values = _keys(inputs.v, key, band.span)
    if options.partial:
      return carry, ([_dot("nrts,nsv->nrtv", weight, values) / total for weight, total in zip(weights, sums, strict=True)], lses)
    outs = []
    for signal in range(_signals(inputs)):
      combined = weights[signal]
      if inputs.lam:  # O = (A₁ − λA₂)V with the signal map's division left for after the product
        combined = combined - (_rows(inputs.lam[signal], row, band.block) * sums[signal] / sums[-1]) * weights[-1]
      outs.append(_dot("nrts,nsv->nrtv", combined, values) / sums[signal])
    return carry, (outs, lses)

  return _walk(bands, step, (inputs,), ())[1]


def _backward(arrays: Arrays, mask: Mask, options: Options, saved: Saved, d_out):
  """Gradients of q, k, v and λ (None without λ); paper §1."""
  q, k, v, lam = arrays[:4]
  batch, num_kv_heads, scale = q.shape[0], k.shape[2], options.scale
  dtype = jnp.promote_types(jnp.float32, q.dtype)
  inputs, lse, deltas_2 = _lead_with_heads(arrays), saved.lse, None
  by_signal = functools.partial(_by_signal, num_kv_heads=num_kv_heads, signals=_signals(inputs))
  if options.partial:  # δ₂ is a sum over all keys, which are not here
    tokens_first = lambda x: jnp.swapaxes(x, 1, 2)
    lse = [_heads_first(tokens_first(saved.lse[:, :, g])[..., None], num_kv_heads) / LOG2E for g in range(q.shape[3])]
    saved = saved._replace(out=tokens_first(saved.out))
    if lam is not None:
      row_sums = jnp.sum(d_out.astype(dtype) * tokens_first(saved.out2).astype(dtype), axis=-1, keepdims=True)
      deltas_2 = by_signal(row_sums)
  # rowsum(dO ∘ O) = δ₁ − λδ₂
  deltas = by_signal(jnp.sum(d_out.astype(dtype) * saved.out.astype(dtype), axis=-1, keepdims=True))
  num_groups, block = _tile(inputs)
  group = functools.partial(_backward_group, mask, scale, _bands(mask, block))
  (d_k, d_v), (d_q, d_lam) = _map_groups(group, num_groups, inputs, lse, deltas, deltas_2, by_signal(d_out))
  result = dtype if options.partial else q.dtype
  d_q = jnp.stack([_tokens_first(x * scale, batch) for x in d_q], axis=3).astype(result)
  d_k = jnp.stack([_keys_first(x * scale, batch) for x in d_k], axis=3).astype(result)
  d_v = _keys_first(d_v, batch).astype(result)
  return d_q, d_k, d_v, None if lam is None else _of_signals(d_lam, batch)[..., 0].astype(lam.dtype)


IMPLEMENTATION = Implementation(_forward, _backward, takes_groups=True, takes_parts=True)


def _backward_group(mask: Mask, scale: float, bands: list[_Band], inputs: _Inputs, lse, deltas, deltas_2, d_outs):
  dtype = deltas[0].dtype
  # dK and dV grow as [N, D, S] from queries and dO laid out [N, D, R, T]: a product of two row-major matrices, where the natural
  # [S, T]·[T, D] reads the large matrix across its rows and measured two to ten times slower on CPU.
  turned = [[jnp.transpose(x, (0, 3, 1, 2)) for x in group] for group in (inputs.q, d_outs)]
  zeros = lambda x: vary_like(jnp.zeros((x.shape[0], x.shape[2], x.shape[1]), dtype), inputs.q[0])

  def step(band: _Band, arrays, carry, row, key):
    inputs, turned, lse, deltas, known, d_outs = arrays
    d_k, d_v = list(carry[0]), carry[1]
    visible = _visible(mask, band, inputs, row, key)
    keys = [_keys(k, key, band.span) for k in _per_map(inputs)]
    maps = [
      jnp.exp(apply(visible, _logits(_rows(q, row, band.block), k, scale)) - _rows(total, row, band.block))
      for q, k, total in zip(inputs.q, keys, lse, strict=True)
    ]
    d_lam: list[jax.Array] = []
    d_logits: list[jax.Array] = []
    d_noise: Any = 0.0
    for signal, (d_out, delta) in enumerate(zip(d_outs, deltas, strict=True)):
      values = _keys(inputs.v, key, band.span)
      d_weights = _logits(_rows(d_out, row, band.block), values, 1.0)  # dP = dO·Vᵀ, for signal and noise
      delta_1, combined = _rows(delta, row, band.block), maps[signal]
      if inputs.lam:
        lam = _rows(inputs.lam[signal], row, band.block)
        delta_2 = _row_sums(maps[-1] * d_weights) if known is None else _rows(known[signal], row, band.block)
        delta_1, combined = delta_1 + lam * delta_2, combined - lam * maps[-1]
        d_lam.append(-delta_2)
        d_noise = d_noise - lam * (d_weights - delta_2)
      d_logits.append(maps[signal] * (d_weights - delta_1))
      d_v = _add_keys(d_v, _dot("nvrt,nrts->nvs", _columns(turned[1][signal], row, band.block), combined), key)
    if inputs.lam:
      d_logits.append(maps[-1] * d_noise)
    d_q = [_dot("nrts,nsd->nrtd", d_logit, k) for d_logit, k in zip(d_logits, keys, strict=True)]
    for g, d_logit in enumerate(d_logits):
      m = _key_map(inputs, g)
      d_k[m] = _add_keys(d_k[m], _dot("ndrt,nrts->nds", _columns(turned[0][g], row, band.block), d_logit), key)
    return (d_k, d_v), (d_q, d_lam)

  carry = ([zeros(k) for k in inputs.k], zeros(inputs.v))
  return _walk(bands, step, (inputs, turned, lse, deltas, deltas_2, d_outs), carry)


def _walk(bands: list[_Band], step: Callable, arrays: Any, carry: Any) -> tuple[Any, Any]:
  """Runs `step` over every query block in order. Returns the last carry and the outputs, [N, R, t, X] of a block, put together."""
  outs: list[Any] = []
  for band in bands:
    if outs:  # or XLA may interleave the unrolled blocks, with all their logits alive at once
      arrays, carry, outs[-1] = lax.optimization_barrier((arrays, carry, outs[-1]))
    if len(band.rows) == 1:
      carry, out = step(band, arrays, carry, band.rows[0], band.keys[0])
    else:
      starts = (jnp.array(band.rows, jnp.int32), jnp.array(band.keys, jnp.int32))

      def at(carry, start, band=band, arrays=arrays):
        return step(band, arrays, carry, *start)

      carry, out = lax.scan(at, carry, starts)
      out = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[4]), out)
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
  alike = len({seen[2:] for seen in blocks}) == 1  # nothing is won by telling them apart
  per_band = len(blocks) if alike else -(-len(blocks) // _MAX_BANDS)
  bands = []
  while blocks:
    rows = blocks[0][1]
    members = [b for b in blocks[:per_band] if b[1] == rows]  # the last block may be shorter and is then a band of its own
    blocks = blocks[len(members) :]
    span = max(high - low for _, _, low, high in members)
    bands.append(_Band(rows, span, [b[0] for b in members], [min(b[2], mask.kv_length - span) for b in members]))
  return bands


def _tile(inputs: _Inputs) -> tuple[int, int]:
  """The number of groups in which heads are walked, and the rows of a query block."""
  num_heads, shared, length, _ = inputs.q[0].shape
  kv_length = inputs.v.shape[1]
  block = min(length, _LONG_BLOCK if kv_length > _LONG else _SHORT_BLOCK)
  per_head = len(inputs.q) * shared * block * kv_length
  heads = max(n for n in range(1, num_heads + 1) if num_heads % n == 0 and (n == 1 or n * per_head <= _BLOCK_LOGITS))
  return num_heads // heads, block


def _map_groups(function: Callable, num_groups: int, *arrays: Any) -> Any:
  """function(*arrays), one group of the leading axis at a time."""
  if num_groups == 1:
    return function(*arrays)
  split = jax.tree.map(lambda x: x.reshape(num_groups, -1, *x.shape[1:]), arrays)
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), lax.map(lambda group: function(*group), split))


def _lead_with_heads(arrays: Arrays) -> _Inputs:
  q, k, v, lam, q_ids, kv_ids, offset = arrays
  num_kv_heads = k.shape[2]
  per_head = lambda x: None if x is None else jnp.repeat(x, num_kv_heads, axis=0)
  return _Inputs(
    q=[_heads_first(q[:, :, :, g], num_kv_heads) for g in range(q.shape[3])],
    k=[_heads_first(k[:, :, :, m], num_kv_heads)[:, 0] for m in range(k.shape[3])],
    v=_heads_first(v, num_kv_heads)[:, 0],
    lam=[] if lam is None else _by_signal(lam[..., None], num_kv_heads, q.shape[3] - 1),
    q_ids=per_head(q_ids),
    kv_ids=per_head(kv_ids),
    offset=per_head(offset),
  )


def _heads_first(x: Float[Array, "B T H X"], num_kv_heads: int) -> Float[Array, "N R T X"]:
  batch, length, heads, width = x.shape
  return jnp.swapaxes(x, 1, 2).reshape(batch * num_kv_heads, heads // num_kv_heads, length, width)


def _tokens_first(x: Float[Array, "N R T X"], batch: int) -> Float[Array, "B T H X"]:
  return jnp.swapaxes(x.reshape(batch, -1, *x.shape[2:]), 1, 2)


def _keys_first(x: Float[Array, "N X S"], batch: int) -> Float[Array, "B S K X"]:
  return jnp.transpose(x.reshape(batch, -1, *x.shape[1:]), (0, 3, 1, 2))


def _signals(inputs: _Inputs) -> int:
  """The number of a group's maps that are heads: all but the noise map, or the one map."""
  return max(len(inputs.q) - 1, 1)


def _by_signal(x: Float[Array, "B T H X"], num_kv_heads: int, signals: int) -> list[Float[Array, "N R T X"]]:
  """An array over heads as one for each signal map of a group."""
  heads = x.reshape(*x.shape[:2], -1, signals, x.shape[-1])
  return [_heads_first(heads[:, :, :, signal], num_kv_heads) for signal in range(signals)]


def _of_signals(parts: list[Float[Array, "N R T X"]], batch: int) -> Float[Array, "B T H X"]:
  """The inverse of `_by_signal`."""
  heads = jnp.stack([_tokens_first(part, batch) for part in parts], axis=3)
  return heads.reshape(*heads.shape[:2], -1, heads.shape[-1])


def _key_map(inputs: _Inputs, g: int) -> int:
  """Which map of the keys a map of the queries looks at: the noise map at the last, all others at the first."""
  return len(inputs.k) - 1 if g == len(inputs.q) - 1 else 0


def _per_map(inputs: _Inputs) -> list[jax.Array]:
  return [inputs.k[_key_map(inputs, g)] for g in range(len(inputs.q))]


def _visible(mask: Mask, band: _Band, inputs: _Inputs, row, key) -> Bool[Array, "Z 1 t s"] | None:
  """The mask of one block of queries and the keys that it looks at."""
  q_ids = None if inputs.q_ids is None else lax.dynamic_slice_in_dim(inputs.q_ids, row, band.block, axis=1)
  kv_ids = None if inputs.kv_ids is None else lax.dynamic_slice_in_dim(inputs.kv_ids, key, band.span, axis=1)
  q_positions = positions(band.block, mask.first_position(inputs.offset), row)
  visible = mask.between(q_positions, positions(band.span, 0, key), q_ids, kv_ids)
  return None if visible is None else visible[:, None]


def _dot(equation: str, weights: jax.Array, other: jax.Array) -> jax.Array:
  """A product with float32 weights or gradients, whose inputs are rounded to the other operand's dtype and whose sum is not."""
  dtype = jnp.promote_types(jnp.float32, other.dtype)
  narrow = weights.dtype if jnp.finfo(weights.dtype).bits < jnp.finfo(other.dtype).bits else other.dtype
  return jnp.einsum(equation, weights.astype(narrow), other.astype(narrow), preferred_element_type=dtype)


def _row_sums(x: Float[Array, "N R T S"]) -> Float[Array, "N R T 1"]:
  """The sum as a product with ones: as a reduction XLA's CPU backend fuses the factors into it, and is then ten times slower (0.10)."""
  return jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision=lax.Precision.HIGHEST)


def _logits(rows: Float[Array, "N R T D"], keys: Float[Array, "N S D"], scale: float) -> Float[Array, "N R T S"]:
  dtype = jnp.promote_types(jnp.float32, rows.dtype)
  logits = jnp.einsum("nrtd,nsd->nrts", rows, keys, preferred_element_type=dtype)
  return logits if scale == 1 else logits * scale


def _rows(x: Float[Array, "N R T X"], start, size: int) -> Float[Array, "N R t X"]:
  return lax.dynamic_slice_in_dim(x, start, size, axis=2)


def _columns(x: Float[Array, "N X R T"], start, size: int) -> Float[Array, "N X R t"]:
  return lax.dynamic_slice_in_dim(x, start, size, axis=3)


def _keys(x: Float[Array, "N S X"], start, size: int) -> Float[Array, "N s X"]:
  return lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _add_keys(total: Float[Array, "N X S"], part: Float[Array, "N X s"], start) -> Float[Array, "N X S"]:
  return lax.dynamic_update_slice_in_dim(total, lax.dynamic_slice_in_dim(total, start, part.shape[2], axis=2) + part, start, axis=2)
