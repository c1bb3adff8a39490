"""Differential attention in XLA with memory linear in length.

This implementation runs on every backend and is the default on CPUs.

The queries are cut into chunks, called blocks here. A block attends to all its
visible keys at once, with an ordinary softmax. Blocks run one after the other,
so memory holds the logits of only one block. Keys that the mask hides from a
whole block are never read. If the logits of one block do not fit the cache, the
heads are cut into head tiles, which run one after the other too.

With S = scale · q kᵀ for the logits of a map, A₁ and A₂ for the softmax of the
signal map and of the noise map, and P = A₁ − λA₂, the passes are:

  O = P v
  dP = dO vᵀ,  dv = Pᵀ dO
  δ₂ = rowsum(A₂ ∘ dP),  dλ = −δ₂
  δ₁ = rowsum(A₁ ∘ dP) = rowsum(dO ∘ O) + λδ₂
  dS₁ = A₁ ∘ (dP − δ₁),  dS₂ = −λA₂ ∘ (dP − δ₂)
  dq = scale · dS k,  dk = scale · dSᵀ q, for each map

Plain attention has one map, and P = A₁.

Per query, key and head with two maps, the forward pass takes 2·D + V
multiply-adds and the backward pass 6·D + 2·V: 4·D and 10·D in version 1, where
V = 2·D. Plain attention with 2·H heads and V = D costs the same. Kernels that
iterate over keys take 2·D + 2·V in the forward pass: they know the denominators
of A₁ and A₂ only after the last key, so they sum A₁v and A₂v separately. A
noise map that several signal maps share is computed once.

How the functions call each other:
  _forward, _forward_partial: _map_blocks
    → _map_head_tiles → _loop_over_bands → _loop_over_blocks
    → _forward_block, _forward_partial_block
  _backward, _backward_partial: _backward_blocks
    → _map_head_tiles → _backward_head_tile → _loop_over_bands
    → _loop_over_blocks → _backward_one_map, _backward_two_maps

Axes of arguments and results are as in `diffjax/parameters.py`. Axes inside
this module:
  BK: batch and key heads, merged. Einsum equations write b.
  R: heads per key head, H/K: the signal maps that multiply the same keys.
  noise_maps: noise maps per key head, Q/K.
  maps: R or noise_maps. Einsum equations write r, also for R.
  t, s: the queries and keys of one block.
  X: any width, such as D or V.
  Z: 1 if all sequences of the batch have the same mask, otherwise BK.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from diffjax.ops.diff_attention.mask import (
  PER_ROW,
  Mask,
  apply_mask,
  positions,
)
from diffjax.ops.diff_attention.tiles import EMPTY_ROW_LSE, LOG2E, Scalar
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  Options,
  PartialImplementation,
  PartialResult,
  Saved,
)
from diffjax.ops.varying import vary_like

# The sizes below are the fastest on two CPU cores, for lengths 256 to 16,384.

# Queries of a block. In the backward pass, each block reads and writes the sums
# dk and dv of all its keys. To do so less often, blocks are larger if there are
# more than _MANY_KEYS keys.
BLOCK_QUERIES = 128
_BLOCK_QUERIES_FOR_MANY_KEYS = 256
_MANY_KEYS = 2048

# Logits of a block, counting all maps: 4 MB in float32.
MAX_BLOCK_LOGITS = 1 << 20

# Blocks of equal length form at most this many bands, of consecutive blocks. A
# band of one block reads only its visible keys. Longer sequences have bands of
# several blocks, and each band is a scan. That bounds the compile time. All
# blocks of a band read equally many keys, as many as one of them sees at most.
# That adds at most 1/16 to the work of a causal mask.
MAX_BANDS = 16

# Computes one block: (block, arrays, carry) → (carry, output of the block).
_BlockStep = Callable[["_Block", Any, Any], tuple[Any, Any]]


class _NoiseInputs(NamedTuple):
  """The arguments that only the noise maps have."""

  queries: Float[Array, "BK noise_maps T D"]
  keys: Float[Array, "BK S D"] | None  # None: the signal maps' keys
  lam: Float[Array, "BK R T 1"]  # one per signal map


class _Inputs(NamedTuple):
  """The operation's arguments, with batch and key heads in one axis."""

  queries: Float[Array, "BK R T D"]  # of the signal maps
  keys: Float[Array, "BK S D"]  # of the signal maps, or of all maps
  values: Float[Array, "BK S V"]
  noise: _NoiseInputs | None  # None with one map
  q_ids: Int[Array, "BK T"] | None
  kv_ids: Int[Array, "BK S"] | None
  offset: Int[Array, "BK"] | None


class _LogSumExps(NamedTuple):
  """Log-sum-exps (base e) of each query's logits, for each map.

  A query without visible keys has EMPTY_ROW_LSE = 1e30. The backward pass
  computes weights exp(logit − log-sum-exp), and exp(−1e30) is 0.
  """

  signal: Float[Array, "BK R T 1"]
  noise: Float[Array, "BK noise_maps T 1"] | None  # None with one map


class _Softmax(NamedTuple):
  """Softmax maps of a block before the division, A = weights / sums."""

  weights: Float[Array, "BK maps t s"]
  sums: Float[Array, "BK maps t 1"]  # 1 for queries without visible keys
  log_sum_exp: Float[Array, "BK maps t 1"]


class _BackwardInputs(NamedTuple):
  """The arrays of each query that the backward pass reads besides `_Inputs`."""

  log_sum_exps: _LogSumExps
  row_products: Float[Array, "BK R T 1"]  # rowsum(dO ∘ O) = δ₁ − λδ₂
  delta_2: Float[Array, "BK R T 1"] | None  # None: computed from A₂ and dP
  d_out: Float[Array, "BK R T V"]


class _BackwardArrays(NamedTuple):
  """All arrays that the backward pass of a block reads.

  Queries and dO are also stored with the tokens last, to compute the transposed
  dkᵀ = qᵀ dS, [D, t]·[t, s], and dvᵀ = dOᵀ P. These products read dS and P, the
  large matrices, along their rows. dSᵀ q would read dS along its columns, and
  took two to ten times as long on a CPU.
  """

  inputs: _Inputs
  backward_inputs: _BackwardInputs
  transposed_queries: Float[Array, "BK D R T"]
  transposed_noise_queries: Float[Array, "BK D noise_maps T"] | None
  transposed_d_out: Float[Array, "BK V R T"]


class _KeyGradients(NamedTuple):
  """Gradients of keys and values, transposed. Every block adds to them."""

  keys: Float[Array, "BK D S"]  # of the signal maps, or of all maps
  noise_keys: Float[Array, "BK D S"] | None  # None without keys of their own
  values: Float[Array, "BK V S"]


class _QueryGradients(NamedTuple):
  """Gradients that belong to the queries of one block, or of all blocks."""

  queries: Float[Array, "BK R t D"]
  noise_queries: Float[Array, "BK noise_maps t D"] | None  # None with one map
  lam: Float[Array, "BK R t 1"] | None  # None with one map


class _Band(NamedTuple):
  """Consecutive blocks of equally many queries that read equally many keys."""

  num_queries: int
  num_keys: int
  first_queries: list[int]  # of each block
  first_keys: list[int]  # of each block


class _Block(NamedTuple):
  """The queries of a block, and the keys that it reads."""

  first_query: Scalar  # traced inside a scan
  num_queries: int
  first_key: Scalar  # traced inside a scan
  num_keys: int

  def slice_queries(self, x: Array, axis: int = 2) -> Array:
    """Returns this block's queries, for example of [BK, R, T, D]."""
    return lax.dynamic_slice_in_dim(x, self.first_query, self.num_queries, axis)

  def slice_keys(self, x: Array, axis: int = 1) -> Array:
    """Returns this block's keys, for example of [BK, S, D]."""
    return lax.dynamic_slice_in_dim(x, self.first_key, self.num_keys, axis)

  def add_to_keys(
    self, total: Float[Array, "BK X S"], part: Float[Array, "BK X s"]
  ) -> Float[Array, "BK X S"]:
    """Returns the total with a part added at this block's keys."""
    updated = self.slice_keys(total, axis=2) + part
    return lax.dynamic_update_slice_in_dim(
      total, updated, self.first_key, axis=2
    )


def _forward(arrays: Arrays, mask: Mask, options: Options) -> Saved:
  """Returns the output [B, T, H, V], and what the backward pass needs besides.

  The output is computed for one block of queries at a time. `Saved.lse` are the
  `_LogSumExps` of the logits, from which `_backward` recomputes the maps.
  """
  inputs = _to_inputs(arrays)
  forward_block = functools.partial(_forward_block, mask, options.scale)
  out, log_sum_exps = _map_blocks(forward_block, inputs, mask)
  out = _split_heads(out, batch=arrays.q.shape[0])
  return Saved(out.astype(arrays.q.dtype), lse=log_sum_exps)


def _forward_block(
  mask: Mask, scale: float, block: _Block, inputs: _Inputs
) -> tuple[Float[Array, "BK R t V"], _LogSumExps]:
  """Returns the output of a block of queries, and its log-sum-exps.

  The output is (A₁ − λA₂)v, or A₁v without noise maps.
  """
  signal, noise = _softmax_maps(mask, scale, block, inputs)
  values = block.slice_keys(inputs.values)  # [BK, s, V]
  if noise is None:
    out = _times_values(signal.weights, signal.sums, values)
    return out, _LogSumExps(signal.log_sum_exp, noise=None)

  assert inputs.noise is not None
  lam = block.slice_queries(inputs.noise.lam)  # [BK, R, t, 1]
  # The maps are subtracted first, so that one product with v is enough.
  weights = _subtract_noise(signal, noise, lam)
  out = _times_values(weights, signal.sums, values)
  return out, _LogSumExps(signal.log_sum_exp, noise.log_sum_exp)


def _softmax_maps(
  mask: Mask, scale: float, block: _Block, inputs: _Inputs
) -> tuple[_Softmax, _Softmax | None]:
  """Returns the softmax maps from a block's queries to the keys that it reads.

  These are the signal maps A₁, and the noise maps A₂, or None in plain
  attention, which has no noise maps.
  """
  visible = _visible(mask, block, inputs)
  queries = block.slice_queries(inputs.queries)  # [BK, R, t, D]
  keys = block.slice_keys(inputs.keys)  # [BK, s, D]
  signal = _softmax(_masked_logits(queries, keys, scale, visible))
  if inputs.noise is None:
    return signal, None

  noise_queries = block.slice_queries(inputs.noise.queries)
  noise_keys = keys  # by default, all maps share their keys
  if inputs.noise.keys is not None:
    noise_keys = block.slice_keys(inputs.noise.keys)
  noise = _softmax(_masked_logits(noise_queries, noise_keys, scale, visible))
  return signal, noise


def _subtract_noise(
  signal: _Softmax, noise: _Softmax, lam: Float[Array, "BK R t 1"]
) -> Float[Array, "BK R t s"]:
  """Returns the weights of A₁ − λA₂, which are to be divided by signal.sums.

  A map is weights / sums, where the division happens later. To subtract the
  weights, they must have the same denominator:
    A₁ − λA₂ = (weights₁ − λ·sums₁/sums₂ · weights₂) / sums₁

  A noise map is repeated for each of the heads that share it.
  """
  num_signal_maps = signal.weights.shape[1]  # R
  noise_weights = _repeat_noise(noise.weights, num_signal_maps)
  noise_sums = _repeat_noise(noise.sums, num_signal_maps)
  factor = lam * signal.sums / noise_sums
  return signal.weights - factor * noise_weights


def _times_values(
  weights: Float[Array, "BK maps t s"],
  sums: Float[Array, "BK maps t 1"],
  values: Float[Array, "BK s V"],
) -> Float[Array, "BK maps t V"]:
  """Returns (weights / sums) v. Dividing after the product is less work."""
  return _dot("brts,bsv->brtv", weights, values) / sums


def _masked_logits(
  queries: Float[Array, "BK maps t D"],
  keys: Float[Array, "BK s D"],
  scale: float,
  visible: Bool[Array, "Z 1 t s"] | None,
) -> Float[Array, "BK maps t s"]:
  """Returns scale · q·k, and −∞ for hidden keys."""
  logits = _inner_products(queries, keys) * scale
  return apply_mask(visible, logits)


def _softmax(logits: Float[Array, "BK maps t s"]) -> _Softmax:
  """Returns the softmax over the keys of logits, before the division.

  The logits of hidden keys are −∞. A query may have no visible key.
  """
  maximum = jnp.max(logits, axis=-1, keepdims=True)
  # For a query without visible keys, the maximum is −∞, and −∞ − (−∞) is NaN.
  maximum = jnp.where(maximum == -jnp.inf, 0, maximum)
  weights = jnp.exp(logits - maximum)
  sums = jnp.sum(weights, axis=-1, keepdims=True)

  # A query without visible keys has only weights of 0. Dividing them by 1 gives
  # an output of 0. EMPTY_ROW_LSE = 1e30 gives weights exp(logits − 1e30) = 0 in
  # the backward pass.
  is_empty = sums == 0
  sums = jnp.where(is_empty, 1, sums)
  log_sum_exp = jnp.where(is_empty, EMPTY_ROW_LSE, maximum + jnp.log(sums))
  return _Softmax(weights, sums, log_sum_exp)


def _backward(
  arrays: Arrays,
  mask: Mask,
  options: Options,
  saved: Saved,
  d_out: Float[Array, "B T H V"],
) -> tuple[Array, Array, Array, Array | None]:
  """Returns the gradients of q, k, v and λ (None without λ).

  The maps are not saved. They are computed again from the log-sum-exps, for one
  block of queries at a time.
  """
  num_kv_heads = arrays.k.shape[2]
  # The softmax gradient needs rowsum(dO ∘ O), one number per query and head.
  row_products = _row_products(d_out, saved.out)  # [B, T, H, 1]
  backward_inputs = _BackwardInputs(
    log_sum_exps=saved.lse,
    row_products=_merge_heads(row_products, num_kv_heads),
    delta_2=None,  # computed in each block, which sees all keys of its queries
    d_out=_merge_heads(d_out, num_kv_heads),
  )
  d_q, d_k, d_v, d_lam = _backward_blocks(
    arrays, backward_inputs, mask, options.scale
  )
  dtype = arrays.q.dtype
  return d_q.astype(dtype), d_k.astype(dtype), d_v.astype(dtype), d_lam


def _backward_blocks(
  arrays: Arrays, backward_inputs: _BackwardInputs, mask: Mask, scale: float
) -> tuple[
  Float[Array, "B T Q G D"],
  Float[Array, "B S K M D"],
  Float[Array, "B S K V"],
  Float[Array, "B T H"] | None,
]:
  """Returns the gradients of q, k, v and λ, in at least float32.

  They are computed for one block of queries at a time. Then the signal maps and
  noise maps, which the blocks keep apart, are joined along axis G or M.
  """
  inputs = _to_inputs(arrays)
  num_head_tiles, block_queries = _tile_sizes(inputs)
  bands = make_bands(mask, block_queries)
  backward_head_tile = functools.partial(
    _backward_head_tile, mask, scale, bands
  )
  d_keys, d_queries = _map_head_tiles(
    backward_head_tile, num_head_tiles, inputs, backward_inputs
  )

  # dq and dk have the factor scale. The blocks use it only for the logits that
  # they recompute. The sums over all blocks are multiplied by it here, once.
  batch, _, num_query_groups = arrays.q.shape[:3]
  signal_d_q = d_queries.queries * scale
  d_q = _split_query_groups(signal_d_q, batch, num_query_groups)
  if d_queries.noise_queries is not None:
    noise_d_q = d_queries.noise_queries * scale
    noise_d_q = _split_query_groups(noise_d_q, batch, num_query_groups)
    d_q = jnp.concatenate([d_q, noise_d_q], axis=3)

  d_k_maps = [_split_key_heads(d_keys.keys * scale, batch)]
  if d_keys.noise_keys is not None:
    d_k_maps.append(_split_key_heads(d_keys.noise_keys * scale, batch))
  d_k = jnp.stack(d_k_maps, axis=3)
  d_v = _split_key_heads(d_keys.values, batch)
  d_lam = None
  if arrays.lam is not None:
    assert d_queries.lam is not None
    d_lam = _split_heads(d_queries.lam, batch)[..., 0]
    d_lam = d_lam.astype(arrays.lam.dtype)
  return d_q, d_k, d_v, d_lam


def _backward_head_tile(
  mask: Mask,
  scale: float,
  bands: list[_Band],
  inputs: _Inputs,
  backward_inputs: _BackwardInputs,
) -> tuple[_KeyGradients, _QueryGradients]:
  """Returns the gradients of some of the heads, without the factor `scale`.

  Each block of queries adds to the gradients of keys and values, and has the
  gradients of its own queries.

  Args:
    mask: the keys that each query sees.
    scale: factor on q·k.
    bands: the blocks. A band is a series of blocks that run as one scan.
    inputs: the queries, keys and values of these heads.
    backward_inputs: what the forward pass saved, and the output's gradient.
  """
  if inputs.noise is None:
    backward_block = functools.partial(_backward_one_map, mask, scale)
    transposed_noise_queries = None
  else:
    backward_block = functools.partial(_backward_two_maps, mask, scale)
    transposed_noise_queries = _transpose_tokens(inputs.noise.queries)
  arrays = _BackwardArrays(
    inputs,
    backward_inputs,
    transposed_queries=_transpose_tokens(inputs.queries),
    transposed_noise_queries=transposed_noise_queries,
    transposed_d_out=_transpose_tokens(backward_inputs.d_out),
  )
  sum_dtype = backward_inputs.row_products.dtype
  initial_d_keys = _zero_key_gradients(inputs, sum_dtype)
  return _loop_over_bands(bands, backward_block, arrays, initial_d_keys)


def _backward_one_map(
  mask: Mask,
  scale: float,
  block: _Block,
  arrays: _BackwardArrays,
  d_keys: _KeyGradients,
) -> tuple[_KeyGradients, _QueryGradients]:
  """Returns the gradients of plain attention from one block of queries.

  Args:
    mask: the keys that each query sees.
    scale: factor on q·k, for the logits. The returned dk and dq are without it.
    block: the queries, and the keys that they read.
    arrays: all arrays of the backward pass.
    d_keys: dk and dv, summed over the blocks before.

  Returns:
    `d_keys` plus the block's dk and dv, and dq of the block's queries.
  """
  inputs = arrays.inputs
  backward_inputs = arrays.backward_inputs
  queries = block.slice_queries(inputs.queries)  # [BK, R, t, D]
  keys = block.slice_keys(inputs.keys)  # [BK, s, D]
  values = block.slice_keys(inputs.values)  # [BK, s, V]
  d_out = block.slice_queries(backward_inputs.d_out)  # [BK, R, t, V]
  # With one map, δ₁ = rowsum(dO ∘ O).
  delta = block.slice_queries(backward_inputs.row_products)  # [BK, R, t, 1]
  lse = block.slice_queries(backward_inputs.log_sum_exps.signal)

  visible = _visible(mask, block, inputs)
  logits = _masked_logits(queries, keys, scale, visible)
  weights = jnp.exp(logits - lse)  # A: [BK, R, t, s]
  d_weights = _inner_products(d_out, values)  # dP = dO vᵀ
  d_logits = weights * (d_weights - delta)  # dS = A ∘ (dP − δ)

  d_queries = _dot("brts,bsd->brtd", d_logits, keys)  # dq = dS k
  d_k = _sum_over_queries(block, arrays.transposed_queries, d_logits)
  d_v = _sum_over_queries(block, arrays.transposed_d_out, weights)
  d_keys = _KeyGradients(
    keys=block.add_to_keys(d_keys.keys, d_k),
    noise_keys=None,
    values=block.add_to_keys(d_keys.values, d_v),
  )
  return d_keys, _QueryGradients(d_queries, noise_queries=None, lam=None)


def _backward_two_maps(
  mask: Mask,
  scale: float,
  block: _Block,
  arrays: _BackwardArrays,
  d_keys: _KeyGradients,
) -> tuple[_KeyGradients, _QueryGradients]:
  """Returns the gradients of differential attention from one block of queries.

  Args:
    mask: the keys that each query sees.
    scale: factor on q·k, for the logits. The returned dk and dq are without it.
    block: the queries, and the keys that they read.
    arrays: all arrays of the backward pass.
    d_keys: dk and dv, summed over the blocks before.

  Returns:
    `d_keys` plus the block's dk and dv, and dq and dλ of the block's queries.
  """
  inputs = arrays.inputs
  backward_inputs = arrays.backward_inputs
  log_sum_exps = backward_inputs.log_sum_exps
  assert inputs.noise is not None
  assert arrays.transposed_noise_queries is not None
  assert log_sum_exps.noise is not None
  queries = block.slice_queries(inputs.queries)  # [BK, R, t, D]
  noise_queries = block.slice_queries(inputs.noise.queries)
  keys = block.slice_keys(inputs.keys)  # [BK, s, D]
  noise_keys = keys
  if inputs.noise.keys is not None:
    noise_keys = block.slice_keys(inputs.noise.keys)
  values = block.slice_keys(inputs.values)  # [BK, s, V]
  lam = block.slice_queries(inputs.noise.lam)  # [BK, R, t, 1]
  d_out = block.slice_queries(backward_inputs.d_out)  # [BK, R, t, V]
  lse = block.slice_queries(log_sum_exps.signal)  # [BK, R, t, 1]
  noise_lse = block.slice_queries(log_sum_exps.noise)  # [BK, noise_maps, t, 1]

  # The maps A₁ and A₂ of each head: [BK, R, t, s].
  visible = _visible(mask, block, inputs)
  signal_logits = _masked_logits(queries, keys, scale, visible)
  signal_weights = jnp.exp(signal_logits - lse)
  num_signal_maps = signal_weights.shape[1]  # R
  noise_logits = _masked_logits(noise_queries, noise_keys, scale, visible)
  noise_weights = jnp.exp(noise_logits - noise_lse)  # [BK, noise_maps, t, s]
  num_noise_maps = noise_weights.shape[1]
  noise_weights = _repeat_noise(noise_weights, num_signal_maps)

  # The row sums δ₁ and δ₂: [BK, R, t, 1].
  d_weights = _inner_products(d_out, values)  # dP = dO vᵀ: [BK, R, t, s]
  if backward_inputs.delta_2 is None:
    delta_2 = _row_sums(noise_weights * d_weights)
  else:
    delta_2 = block.slice_queries(backward_inputs.delta_2)
  delta_1 = block.slice_queries(backward_inputs.row_products) + lam * delta_2

  # The gradients of the logits, dS₁ and dS₂. The gradient of a noise map is the
  # sum over the signal maps that share it.
  d_signal_logits = signal_weights * (d_weights - delta_1)
  d_noise_logits = -lam * noise_weights * (d_weights - delta_2)
  d_noise_logits = _sum_over_signal_maps(d_noise_logits, num_noise_maps)

  d_queries = _QueryGradients(
    queries=_dot("brts,bsd->brtd", d_signal_logits, keys),
    noise_queries=_dot("brts,bsd->brtd", d_noise_logits, noise_keys),
    lam=-delta_2,
  )

  d_k = _sum_over_queries(block, arrays.transposed_queries, d_signal_logits)
  noise_d_k = _sum_over_queries(
    block, arrays.transposed_noise_queries, d_noise_logits
  )
  total_d_k = block.add_to_keys(d_keys.keys, d_k)
  total_noise_d_k = d_keys.noise_keys
  if total_noise_d_k is None:
    # The maps share their keys, and so the gradient.
    total_d_k = block.add_to_keys(total_d_k, noise_d_k)
  else:
    total_noise_d_k = block.add_to_keys(total_noise_d_k, noise_d_k)
  weights = signal_weights - lam * noise_weights  # P = A₁ − λA₂
  d_v = _sum_over_queries(block, arrays.transposed_d_out, weights)
  total_d_v = block.add_to_keys(d_keys.values, d_v)
  return _KeyGradients(total_d_k, total_noise_d_k, total_d_v), d_queries


def _sum_over_queries(
  block: _Block,
  transposed: Float[Array, "BK X maps T"],
  coefficients: Float[Array, "BK maps t s"],
) -> Float[Array, "BK X s"]:
  """Returns Σ x[t] · coefficients[t, s] over the maps and queries of a block.

  This is dk for queries x and coefficients dS, and dv for x = dO and P.

  Args:
    block: the queries t, and their keys s.
    transposed: x for all queries, with the tokens last.
    coefficients: dS or P of the block.
  """
  block_x = block.slice_queries(transposed, axis=3)  # [BK, X, maps, t]
  return _dot("bxrt,brts->bxs", block_x, coefficients)


def _zero_key_gradients(inputs: _Inputs, dtype: Any) -> _KeyGradients:
  """Returns gradients of 0 for all keys and values.

  Each block of queries adds its part to them. They are transposed, [BK, X, S],
  because the products that are added are (see `_BackwardArrays`).

  Args:
    inputs: the keys and values.
    dtype: the dtype of the sums.
  """
  noise_keys = None
  if inputs.noise is not None and inputs.noise.keys is not None:
    noise_keys = _zero_transposed(inputs.noise.keys, dtype)
  return _KeyGradients(
    keys=_zero_transposed(inputs.keys, dtype),
    noise_keys=noise_keys,
    values=_zero_transposed(inputs.values, dtype),
  )


def _zero_transposed(
  x: Float[Array, "BK S X"], dtype: Any
) -> Float[Array, "BK X S"]:
  """Returns zeros in the shape of x with its last two axes exchanged."""
  BK, S, X = x.shape
  zeros = jnp.zeros((BK, X, S), dtype)
  # Inside shard_map, the types of arrays include the mesh axes over which they
  # vary. JAX requires that a scan keeps the types of its carry.
  return vary_like(zeros, x)


def _forward_partial(
  arrays: Arrays, mask: Mask, options: Options
) -> PartialResult:
  """Returns A₁v, A₂v and the log-sum-exps for some of a query's keys.

  If several devices share the keys, `ring` calls this function for the keys of
  each device and merges the results. Each map has its own sums over keys, so
  A₁v and A₂v stay separate.

  Args:
    arrays: q has at most G = 2 maps, because `ring` gives each head its own
      noise map.
    mask: which of these keys each query sees.
    options: the scale.
  """
  B, _, _, G, _ = arrays.q.shape
  assert G <= 2
  inputs = _to_inputs(arrays)
  forward_block = functools.partial(_forward_partial_block, mask, options.scale)
  signal_out, noise_out, log_sum_exps = _map_blocks(forward_block, inputs, mask)

  signal_lse = _split_batch(log_sum_exps.signal, B)
  lse_maps = [signal_lse[..., 0]]  # of each map, [B, H, T]
  if noise_out is not None:
    noise_out = _split_batch(noise_out, B)
    noise_lse = _split_batch(log_sum_exps.noise, B)
    lse_maps.append(noise_lse[..., 0])
  # Partial results have base 2, because the Pallas kernels compute with exp2.
  # EMPTY_ROW_LSE becomes 1.44e30, which `ring` recognizes too.
  lse = jnp.stack(lse_maps, axis=2) * LOG2E  # [B, H, G, T]
  signal_out = _split_batch(signal_out, B)  # [B, H, T, V]
  return PartialResult(signal_out, noise_out, lse)


def _forward_partial_block(
  mask: Mask, scale: float, block: _Block, inputs: _Inputs
) -> tuple[Array, Array | None, _LogSumExps]:
  """Returns A₁v, A₂v and the log-sum-exps of a block of queries.

  A₁ are the signal maps and A₂ the noise maps, over the present keys. With one
  map, A₂v is None.
  """
  signal, noise = _softmax_maps(mask, scale, block, inputs)
  values = block.slice_keys(inputs.values)  # [BK, s, V]
  signal_out = _times_values(signal.weights, signal.sums, values)
  if noise is None:
    return signal_out, None, _LogSumExps(signal.log_sum_exp, noise=None)
  noise_out = _times_values(noise.weights, noise.sums, values)
  log_sum_exps = _LogSumExps(signal.log_sum_exp, noise.log_sum_exp)
  return signal_out, noise_out, log_sum_exps


def _backward_partial(
  arrays: Arrays,
  mask: Mask,
  options: Options,
  result: PartialResult,
  d_out: Float[Array, "B T H V"],
) -> tuple[Array, Array, Array]:
  """Returns what some of the keys add to the gradients of q, k and v.

  If several devices share the keys, `ring` calls this function for the keys of
  each device. It adds up the gradients in float32, so they are not rounded to
  the dtype of q. It also computes dλ, from A₂v of all keys.

  Args:
    arrays: the queries, and some of their keys and values.
    mask: which of these keys each query sees.
    options: the scale.
    result: the forward result for all keys. Its `out` is A₁v − λA₂v.
    d_out: the gradient of the output.
  """
  num_kv_heads = arrays.k.shape[2]
  out = jnp.swapaxes(result.out, 1, 2)  # [B, T, H, V]
  row_products = _row_products(d_out, out)  # [B, T, H, 1]
  noise_lse = None
  delta_2 = None
  if result.out2 is not None:
    noise_lse = _natural_lse(result.lse[:, :, 1], num_kv_heads)
    # δ₂ = rowsum(A₂ ∘ dP) needs all keys, but only some are on this device. It
    # equals rowsum(dO ∘ A₂v), and A₂v of the result is a sum over all keys.
    # `_backward` computes δ₂ from all keys, because A₂v is not saved there.
    noise_out = jnp.swapaxes(result.out2, 1, 2)  # [B, T, H, V]
    delta_2 = _merge_heads(_row_products(d_out, noise_out), num_kv_heads)
  signal_lse = _natural_lse(result.lse[:, :, 0], num_kv_heads)
  backward_inputs = _BackwardInputs(
    log_sum_exps=_LogSumExps(signal_lse, noise_lse),
    row_products=_merge_heads(row_products, num_kv_heads),
    delta_2=delta_2,
    d_out=_merge_heads(d_out, num_kv_heads),
  )
  d_q, d_k, d_v, _ = _backward_blocks(
    arrays, backward_inputs, mask, options.scale
  )
  return d_q, d_k, d_v


def _natural_lse(
  lse: Float[Array, "B H T"], num_kv_heads: int
) -> Float[Array, "BK R T 1"]:
  """Returns log-sum-exps of base 2 in base e."""
  lse = jnp.swapaxes(lse, 1, 2)  # [B, T, H]
  return _merge_heads(lse[..., None], num_kv_heads) / LOG2E


def _map_blocks(
  forward_block: Callable[[_Block, _Inputs], Any], inputs: _Inputs, mask: Mask
) -> Any:
  """Returns the outputs of `forward_block` for all queries, joined along T.

  A block has t consecutive queries and the keys that they see. Blocks are
  computed one after the other, and heads in tiles, so that the logits of only
  one block and one tile of heads exist at a time.

  Args:
    forward_block: (block, inputs of a tile of heads) → outputs [BK, R, t, X].
    inputs: the queries, keys and values of all heads.
    mask: the keys that each query sees.
  """
  num_head_tiles, block_queries = _tile_sizes(inputs)
  bands = make_bands(mask, block_queries)

  def forward_step(
    block: _Block, tile_inputs: _Inputs, carry: tuple[()]
  ) -> tuple[tuple[()], Any]:
    # Blocks of the forward pass pass nothing on, so the carry is empty.
    return carry, forward_block(block, tile_inputs)

  def forward_head_tile(tile_inputs: _Inputs) -> Any:
    _, outputs = _loop_over_bands(bands, forward_step, tile_inputs, carry=())
    return outputs

  return _map_head_tiles(forward_head_tile, num_head_tiles, inputs)


def _map_head_tiles(
  function: Callable[..., Any], num_head_tiles: int, *arrays: Any
) -> Any:
  """Returns function(*arrays), computed for some heads at a time.

  The logits of one head tile fit the cache of a CPU.

  Args:
    function: takes and returns trees of arrays with heads on axis 0.
    num_head_tiles: the number of parts of axis 0. It divides axis 0.
    *arrays: trees of arrays [BK, …].
  """
  if num_head_tiles == 1:
    return function(*arrays)

  def split_heads(
    x: Float[Array, "BK *axes"],
  ) -> Float[Array, "tiles heads *axes"]:
    return x.reshape(num_head_tiles, -1, *x.shape[1:])

  def join_heads(
    x: Float[Array, "tiles heads *axes"],
  ) -> Float[Array, "BK *axes"]:
    return x.reshape(-1, *x.shape[2:])

  def compute_head_tile(tile_arrays: Any) -> Any:
    return function(*tile_arrays)

  tiled_arrays = jax.tree.map(split_heads, arrays)
  outputs = lax.map(compute_head_tile, tiled_arrays)
  return jax.tree.map(join_heads, outputs)


def _loop_over_bands(
  bands: list[_Band], step: _BlockStep, arrays: Any, carry: Any
) -> tuple[Any, Any]:
  """Calls carry, output = step(block, arrays, carry) for all blocks in order.

  Args:
    bands: all blocks. A band is a series of blocks that run as one scan.
    step: computes one block of queries. The carry has the sums over blocks.
    arrays: the arrays of all queries and keys.
    carry: the carry of the first block.

  Returns:
    The last carry, and the outputs [BK, R, t, X] of all blocks, joined along t.
  """
  outputs: list[Any] = []
  for band in bands:
    if outputs:
      # XLA may interleave unrolled blocks, and then the logits of all of them
      # are in memory at the same time. With this barrier, the next band reads
      # arrays that depend on the output of the last one, so it runs later.
      arrays, carry, outputs[-1] = lax.optimization_barrier(
        (arrays, carry, outputs[-1])
      )
    carry, output = _loop_over_blocks(band, step, arrays, carry)
    outputs.append(output)

  def join_queries(
    *band_outputs: Float[Array, "BK R t X"],
  ) -> Float[Array, "BK R T X"]:
    return jnp.concatenate(band_outputs, axis=2)

  return carry, jax.tree.map(join_queries, *outputs)


def _loop_over_blocks(
  band: _Band, step: _BlockStep, arrays: Any, carry: Any
) -> tuple[Any, Any]:
  """Calls carry, output = step(block, arrays, carry) for the blocks of a band.

  The blocks of a band have equally many queries and keys, and only start at
  different ones. So they run as one scan over these starts.

  Returns:
    The last carry, and the outputs [BK, R, t, X] of the blocks, joined along t.
  """

  def scan_step(
    block_carry: Any, starts: tuple[Scalar, Scalar]
  ) -> tuple[Any, Any]:
    first_query, first_key = starts
    block = _Block(first_query, band.num_queries, first_key, band.num_keys)
    return step(block, arrays, block_carry)

  if len(band.first_queries) == 1:
    # Without a scan, the starts are ints, and slices of arrays are static.
    return scan_step(carry, (band.first_queries[0], band.first_keys[0]))

  def join_blocks(
    x: Float[Array, "blocks BK R t X"],
  ) -> Float[Array, "BK R T X"]:
    _, BK, R, _, X = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(BK, R, -1, X)

  first_queries = jnp.array(band.first_queries, jnp.int32)
  first_keys = jnp.array(band.first_keys, jnp.int32)
  carry, outputs = lax.scan(scan_step, carry, (first_queries, first_keys))
  return carry, jax.tree.map(join_blocks, outputs)


def make_bands(mask: Mask, block_queries: int) -> list[_Band]:
  """Returns all blocks of `block_queries` queries, in bands.

  A band is a series of blocks that read equally many keys, so that they can run
  as one scan. If the last block is shorter, it is a band of its own.

  Example:
    With a causal mask, 1024 queries in blocks of 128 are 8 bands of a block,
    which read 128, 256, …, 1024 keys.
  """
  blocks = []
  for first_query in range(0, mask.q_length, block_queries):
    num_queries = min(block_queries, mask.q_length - first_query)
    first_key, num_keys = _visible_keys(mask, first_query, num_queries)
    blocks.append(_Block(first_query, num_queries, first_key, num_keys))

  key_ranges = {(block.first_key, block.num_keys) for block in blocks}
  if len(key_ranges) == 1:
    # All blocks read the same keys, so several bands would save no work. That
    # is so with neither causality nor a window, or if the offset is an array.
    blocks_per_band = len(blocks)
  else:
    blocks_per_band = math.ceil(len(blocks) / MAX_BANDS)

  num_full_blocks = mask.q_length // block_queries
  full_blocks = blocks[:num_full_blocks]
  bands = []
  for start in range(0, num_full_blocks, blocks_per_band):
    stop = start + blocks_per_band
    bands.append(_make_band(full_blocks[start:stop], mask))
  if num_full_blocks < len(blocks):
    bands.append(_make_band(blocks[-1:], mask))
  return bands


def _visible_keys(
  mask: Mask, first_query: int, num_queries: int
) -> tuple[int, int]:
  """Returns the first key that a block reads, and the number of its keys.

  These are the keys that at least one query of the block sees.

  Example:
    With a causal mask, queries 128 to 255 → (0, 256)
  """
  if mask.offset == PER_ROW:
    # The positions of the queries are data, so any key may be visible.
    return 0, mask.kv_length
  first_position = mask.offset + first_query
  last_position = first_position + num_queries - 1
  # Both keys are inclusive, and the last one is at most kv_length − 1.
  first_key, last_key = mask.keys_of(first_position, last_position)
  if first_key > last_key:
    # No key is visible. The block reads one key, which the mask hides. The last
    # key is negative if all keys come after the queries.
    last_key = max(last_key, 0)
    first_key = last_key
  return first_key, last_key - first_key + 1


def _make_band(blocks: list[_Block], mask: Mask) -> _Band:
  """Returns blocks of equally many queries as a band.

  A scan needs equal shapes. So all blocks read as many keys as the block with
  the most visible keys. A block that would read past the last key starts
  earlier. The mask hides the additional keys.
  """
  num_keys = max(block.num_keys for block in blocks)
  max_first_key = mask.kv_length - num_keys
  return _Band(
    num_queries=blocks[0].num_queries,
    num_keys=num_keys,
    first_queries=[block.first_query for block in blocks],
    first_keys=[min(block.first_key, max_first_key) for block in blocks],
  )


def _tile_sizes(inputs: _Inputs) -> tuple[int, int]:
  """Returns the number of head tiles, and the number of queries of a block.

  The logits of a block and a head tile should fit the cache of a CPU. So long
  sequences are processed for a few heads at a time.

  Example:
    8 key heads with 2 maps each, 4096 queries and keys → (8, 256)
  """
  BK, maps_per_key_head, T, _ = inputs.queries.shape
  if inputs.noise is not None:
    maps_per_key_head += inputs.noise.queries.shape[1]
  S = inputs.values.shape[1]
  block_queries = BLOCK_QUERIES
  if S > _MANY_KEYS:
    block_queries = _BLOCK_QUERIES_FOR_MANY_KEYS
  block_queries = min(block_queries, T)

  # Head tiles are as large as the limit allows, with at least one key head, and
  # have equally many key heads.
  logits_per_key_head = maps_per_key_head * block_queries * S
  key_heads_per_tile = min(BK, MAX_BLOCK_LOGITS // logits_per_key_head)
  key_heads_per_tile = max(key_heads_per_tile, 1)
  while BK % key_heads_per_tile != 0:
    key_heads_per_tile -= 1
  return BK // key_heads_per_tile, block_queries


def _to_inputs(arrays: Arrays) -> _Inputs:
  """Returns the arguments with separate signal and noise maps, and an axis BK.

  In q, the last map of a group is its noise map. In k, the first map belongs to
  all signal maps, and the second, if there is one, to the noise maps. Batch and
  key heads become one axis, BK, over which matrix products are batched.
  """
  num_kv_heads, num_key_maps = arrays.k.shape[2:4]
  signal_queries = arrays.q
  noise = None
  if arrays.lam is not None:  # λ is present exactly if there are noise maps
    signal_queries = arrays.q[:, :, :, :-1]  # [B, T, Q, G - 1, D]
    noise_queries = arrays.q[:, :, :, -1]  # [B, T, Q, D]
    noise_keys = None
    if num_key_maps == 2:
      noise_keys = _merge_key_heads(arrays.k[:, :, :, 1])
    noise = _NoiseInputs(
      queries=_merge_heads(noise_queries, num_kv_heads),
      keys=noise_keys,
      lam=_merge_heads(arrays.lam[..., None], num_kv_heads),
    )

  B, T, Q, signal_maps_per_group, D = signal_queries.shape
  num_heads = Q * signal_maps_per_group
  signal_queries = signal_queries.reshape(B, T, num_heads, D)

  return _Inputs(
    queries=_merge_heads(signal_queries, num_kv_heads),
    keys=_merge_key_heads(arrays.k[:, :, :, 0]),
    values=_merge_key_heads(arrays.v),
    noise=noise,
    q_ids=_repeat_for_key_heads(arrays.q_ids, num_kv_heads),
    kv_ids=_repeat_for_key_heads(arrays.kv_ids, num_kv_heads),
    offset=_repeat_for_key_heads(arrays.offset, num_kv_heads),
  )


def _repeat_for_key_heads(
  x: Int[Array, "B *axes"] | None, num_kv_heads: int
) -> Int[Array, "BK *axes"] | None:
  """Returns ids or offsets of sequences, repeated for the key heads of each."""
  if x is None:
    return None
  return jnp.repeat(x, num_kv_heads, axis=0)


def _visible(
  mask: Mask, block: _Block, inputs: _Inputs
) -> Bool[Array, "Z 1 t s"] | None:
  """Returns where a query of a block sees a key, or None if all are visible.

  Z is 1 if all sequences of the batch have the same mask, otherwise BK.
  """
  q_ids = inputs.q_ids
  if q_ids is not None:
    q_ids = block.slice_queries(q_ids, axis=1)
  kv_ids = inputs.kv_ids
  if kv_ids is not None:
    kv_ids = block.slice_keys(kv_ids)
  first_position = mask.first_position(inputs.offset)
  q_positions = positions(
    block.num_queries, offset=first_position, start=block.first_query
  )  # [Z, t]
  k_positions = positions(
    block.num_keys, offset=0, start=block.first_key
  )  # [1, s]
  visible = mask.between(q_positions, k_positions, q_ids, kv_ids)  # [Z, t, s]
  if visible is None:
    return None
  return visible[:, None]  # all maps share it


def _split_query_groups(
  x: Float[Array, "BK maps T D"], batch: int, num_query_groups: int
) -> Float[Array, "B T Q maps_per_group D"]:
  """Returns the maps of each query group, with tokens before groups."""
  x = _split_heads(x, batch)
  B, T, num_maps, D = x.shape
  maps_per_group = num_maps // num_query_groups
  return x.reshape(B, T, num_query_groups, maps_per_group, D)


def _split_batch(
  x: Float[Array, "BK R T X"], batch: int
) -> Float[Array, "B H T X"]:
  """Returns x with B split from BK, and the heads of all key heads joined."""
  _, _, T, X = x.shape
  return x.reshape(batch, -1, T, X)


def _merge_key_heads(x: Float[Array, "B S K X"]) -> Float[Array, "BK S X"]:
  """Returns keys or values with merged batch and key heads, before tokens."""
  B, S, K, X = x.shape
  return jnp.swapaxes(x, 1, 2).reshape(B * K, S, X)


def _merge_heads(
  x: Float[Array, "B T H X"], num_kv_heads: int
) -> Float[Array, "BK R T X"]:
  """Returns x with H split into K and R, and K merged with the batch."""
  B, T, H, X = x.shape
  R = H // num_kv_heads
  return jnp.swapaxes(x, 1, 2).reshape(B * num_kv_heads, R, T, X)


def _split_heads(
  x: Float[Array, "BK R T X"], batch: int
) -> Float[Array, "B T H X"]:
  """Returns the inverse of `_merge_heads`."""
  return jnp.swapaxes(_split_batch(x, batch), 1, 2)


def _transpose_tokens(
  x: Float[Array, "BK maps T X"],
) -> Float[Array, "BK X maps T"]:
  return jnp.transpose(x, (0, 3, 1, 2))


def _split_key_heads(
  x: Float[Array, "BK X S"], batch: int
) -> Float[Array, "B S K X"]:
  """Returns transposed gradients of keys or values in the arguments' layout."""
  _, X, S = x.shape
  x = x.reshape(batch, -1, X, S)
  return jnp.transpose(x, (0, 3, 1, 2))


def _repeat_noise(
  x: Float[Array, "BK noise_maps t X"], num_signal_maps: int
) -> Float[Array, "BK R t X"]:
  """Repeats noise maps, or their sums, for each signal map that shares them."""
  num_noise_maps = x.shape[1]
  if num_noise_maps == num_signal_maps:
    return x
  return jnp.repeat(x, num_signal_maps // num_noise_maps, axis=1)


def _sum_over_signal_maps(
  x: Float[Array, "BK R t s"], num_noise_maps: int
) -> Float[Array, "BK noise_maps t s"]:
  """Returns the sum over the signal maps that share a noise map.

  The terms are added one by one. With a reduction over this axis, the whole
  implementation took 1.5 times as long on a CPU.
  """
  BK, R, t, s = x.shape
  if R == num_noise_maps:
    return x
  maps_per_noise_map = R // num_noise_maps
  x = x.reshape(BK, num_noise_maps, maps_per_noise_map, t, s)
  total = x[:, :, 0]
  for index in range(1, maps_per_noise_map):
    total = total + x[:, :, index]
  return total


def _row_products(
  d_out: Float[Array, "B T H V"], out: Float[Array, "B T H V"]
) -> Float[Array, "B T H 1"]:
  """Returns rowsum(d_out ∘ out), in at least float32."""
  dtype = jnp.promote_types(jnp.float32, d_out.dtype)
  products = d_out.astype(dtype) * out.astype(dtype)
  return jnp.sum(products, axis=-1, keepdims=True)


def _row_sums(x: Float[Array, "BK R t s"]) -> Float[Array, "BK R t 1"]:
  """Returns the sums over the keys, as a product with ones.

  x is a product. XLA's CPU backend (jaxlib 0.10) would compute it inside the
  loop of a reduction, element by element. That took ten times as long.
  """
  ones = jnp.ones((x.shape[-1], 1), x.dtype)
  return jnp.matmul(x, ones, precision=lax.Precision.HIGHEST)


def _inner_products(
  a: Float[Array, "BK maps t X"], b: Float[Array, "BK s X"]
) -> Float[Array, "BK maps t s"]:
  """Returns a bᵀ, in at least float32."""
  dtype = jnp.promote_types(jnp.float32, a.dtype)
  return jnp.einsum("brtx,bsx->brts", a, b, preferred_element_type=dtype)


def _dot(equation: str, a: Array, b: Array) -> Array:
  """Returns an einsum of two arrays that may differ in precision.

  Both are rounded to the dtype with fewer bits, as matrix units require. The
  sum is in float32, or in float64 if one of them is.

  Example:
    weights in float32, values in bfloat16 → bfloat16 factors, a float32 sum
  """
  sum_dtype = jnp.result_type(jnp.float32, a.dtype, b.dtype)
  input_dtype = b.dtype
  if jnp.finfo(a.dtype).bits < jnp.finfo(b.dtype).bits:
    input_dtype = a.dtype
  return jnp.einsum(
    equation,
    a.astype(input_dtype),
    b.astype(input_dtype),
    preferred_element_type=sum_dtype,
  )


# `Implementation` in vjp.py says what the functions take and return.
IMPLEMENTATION = Implementation(
  forward=_forward,
  backward=_backward,
  takes_groups=True,
  partial=PartialImplementation(
    forward=_forward_partial, backward=_backward_partial
  ),
)
