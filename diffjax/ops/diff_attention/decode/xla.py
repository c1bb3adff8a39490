"""Decoding in XLA, on every backend.

One new token per sequence reads the whole cache at once, if it has no pages. In
all other cases the cache is read in pieces, up to the longest sequence.

Letters in addition to those in `__init__.py`:
  s: keys of a piece.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from diffjax.ops.diff_attention.decode.inputs import (
  DecodeInputs,
  stack_lambda,
  stack_queries,
  unstack_outputs,
)
from diffjax.ops.diff_attention.tiles import MASKED_LOGIT
from diffjax.ops.varying import vary_like

# Logits of a piece of the cache, over all sequences, heads and maps: 4 MiB in
# float32, which should stay in the cache of a CPU.
_PIECE_LOGITS = 1 << 20


def decode_attention_xla(
  inputs: DecodeInputs, *, window: int | None, scale: float
) -> Float[Array, "B T H V"]:
  """Returns the result of `decode_attention`, computed with XLA.

  Args:
    inputs: the checked arguments.
    window: how many keys a token sees. None for all.
    scale: factor on q·k.
  """
  tokens, num_heads = inputs.q.shape[1:3]
  num_kv_heads = inputs.k.shape[1]
  heads_per_kv_head = num_heads // num_kv_heads
  num_rows = tokens * heads_per_kv_head  # R: queries of a map and a key head

  positions = inputs.first_positions[:, None] + jnp.arange(tokens)  # [B, T]
  queries = _Queries(
    stacked=stack_queries(inputs.q, inputs.k, num_rows),
    positions=positions,
    heads_per_kv_head=heads_per_kv_head,
    window=window,
    scale=scale,
  )
  lam = inputs.lam
  if lam is not None:
    lam = stack_lambda(lam, num_kv_heads)  # [B, K, R, 1]

  has_pages = inputs.block_tables is not None
  if tokens == 1 and not has_pages:
    cache = _CacheReader.of_all_keys(inputs)
    out = _attend_at_once(queries, cache, lam)  # [B, K, R, V]
  else:
    # The logits of many tokens, or a copy of all pages, may not fit in memory.
    cache = _CacheReader.of_pieces(inputs)
    map_outputs = _attend_in_pieces(queries, cache)  # [B, K, G, R, V]
    out = _subtract_noise(map_outputs, lam)  # [B, K, R, V]
  out = unstack_outputs(out, tokens, heads_per_kv_head)
  return out.astype(inputs.q.dtype)


@dataclasses.dataclass(frozen=True)
class _Queries:
  """The queries of the new tokens, and what decides which keys they see."""

  stacked: Float[Array, "B K G*R M*D"]  # from `stack_queries`
  positions: Int[Array, "B T"]
  heads_per_kv_head: int
  window: int | None
  scale: float

  @property
  def rows_per_map(self) -> int:
    return self.positions.shape[1] * self.heads_per_kv_head

  @property
  def sum_dtype(self) -> Any:
    """The dtype of sums: float32, or float64 if the queries are."""
    return jnp.promote_types(jnp.float32, self.stacked.dtype)

  def split_maps(
    self, x: Float[Array, "B K G*R X"]
  ) -> Float[Array, "B K G R X"]:
    batch, num_kv_heads, all_rows, _ = self.stacked.shape
    num_maps = all_rows // self.rows_per_map
    return x.reshape(batch, num_kv_heads, num_maps, self.rows_per_map, -1)

  def repeat_for_heads(
    self, visible: Bool[Array, "B T s"]
  ) -> Bool[Array, "B 1 1 R s"]:
    visible = jnp.repeat(visible, self.heads_per_kv_head, axis=1)
    return visible[:, None, None]


class _Piece(NamedTuple):
  """Consecutive keys and values of all sequences, in the queries' dtype."""

  positions: Int[Array, "s"]
  k: Float[Array, "B K s M*D"]
  v: Float[Array, "B K s V"]
  k_scale: Float[Array, "B K 1 s"] | None
  v_scale: Float[Array, "B K 1 s"] | None


@dataclasses.dataclass(frozen=True)
class _CacheReader:
  """Reads the cache in pieces, such as 8 pages of every sequence.

  Pieces are cut between units. A unit is a page or, in a cache without pages, a
  key. All pieces have equally many units.
  """

  inputs: DecodeInputs
  keys_per_unit: int
  units_per_sequence: int
  units_per_piece: int

  @classmethod
  def of_all_keys(cls, inputs: DecodeInputs) -> _CacheReader:
    """Returns a reader whose only piece is the whole cache, without pages."""
    num_keys = inputs.k.shape[2]
    return cls(
      inputs,
      keys_per_unit=1,
      units_per_sequence=num_keys,
      units_per_piece=num_keys,
    )

  @classmethod
  def of_pieces(cls, inputs: DecodeInputs) -> _CacheReader:
    """Returns a reader of pieces with at most _PIECE_LOGITS logits.

    A piece consists of units. With pages, a unit is a page, because the pages
    of a sequence may be anywhere in the pool. Without pages, a unit is a key.

    Example:
      16 sequences, 32 heads, 2 maps, 1 new token → 1024 logits per key
      pages of 128 keys → 131,072 logits per page → 2^20 / 131,072 = 8 pages
    """
    if inputs.block_tables is None:
      # k is [B, K, S, M·D]: its axis 2 has all keys of a sequence.
      keys_per_unit = 1
      units_per_sequence = inputs.k.shape[2]
    else:
      # k is [P, K, S, M·D]: its axis 2 has the keys of one page.
      keys_per_unit = inputs.k.shape[2]
      units_per_sequence = inputs.block_tables.shape[1]

    batch, tokens, num_heads, num_maps, _ = inputs.q.shape
    logits_per_key = batch * num_heads * num_maps * tokens
    logits_per_unit = logits_per_key * keys_per_unit
    units_per_piece = _PIECE_LOGITS // logits_per_unit
    # A piece has at least one unit, even if that exceeds the limit.
    units_per_piece = max(units_per_piece, 1)
    units_per_piece = min(units_per_piece, units_per_sequence)
    return cls(
      inputs,
      keys_per_unit=keys_per_unit,
      units_per_sequence=units_per_sequence,
      units_per_piece=units_per_piece,
    )

  @property
  def keys_per_sequence(self) -> int:
    return self.units_per_sequence * self.keys_per_unit

  @property
  def keys_per_piece(self) -> int:
    return self.units_per_piece * self.keys_per_unit

  def read(self, first_unit: Int[Array, ""] | int) -> _Piece:
    """Returns the piece of every sequence that starts at a unit.

    Args:
      first_unit: the index of a page in its sequence or, in a cache without
        pages, of a key.
    """
    first_key = first_unit * self.keys_per_unit
    dtype = self.inputs.q.dtype
    return _Piece(
      positions=first_key + jnp.arange(self.keys_per_piece),
      k=self._read_array(self.inputs.k, first_unit).astype(dtype),
      v=self._read_array(self.inputs.v, first_unit).astype(dtype),
      k_scale=self._read_scales(self.inputs.k_scale, first_unit),
      v_scale=self._read_scales(self.inputs.v_scale, first_unit),
    )

  def _read_array(
    self, x: Float[Array, "P K S *X"], first_unit: Int[Array, ""] | int
  ) -> Float[Array, "B K s *X"]:
    """Returns one piece of an array of the cache, for every sequence.

    Args:
      x: keys, values, or a scale for each key.
      first_unit: the first page or, in a cache without pages, the first key.
    """
    if self.inputs.block_tables is None:
      return self._read_keys(x, first_unit)
    return self._read_pages(x, self.inputs.block_tables, first_unit)

  def _read_keys(
    self, x: Float[Array, "B K S *X"], first_key: Int[Array, ""] | int
  ) -> Float[Array, "B K s *X"]:
    """Returns a piece of a cache without pages."""
    num_keys = self.keys_per_piece
    if num_keys == self.keys_per_sequence:
      return x
    return lax.dynamic_slice_in_dim(x, first_key, num_keys, axis=2)

  def _read_pages(
    self,
    x: Float[Array, "P K S *X"],
    block_tables: Int[Array, "B N"],
    first_page: Int[Array, ""] | int,
  ) -> Float[Array, "B K s *X"]:
    """Returns the pages of a piece, joined along the axis of keys."""
    page_ids = lax.dynamic_slice_in_dim(
      block_tables, first_page, self.units_per_piece, axis=1
    )  # [B, pages]
    batch = block_tables.shape[0]
    num_kv_heads = x.shape[1]
    heads = jnp.arange(num_kv_heads)
    # The indices [B, 1, pages] and [K, 1] select [B, K, pages, S, X].
    pages = x[page_ids[:, None], heads[:, None]]
    return pages.reshape(batch, num_kv_heads, self.keys_per_piece, *x.shape[3:])

  def _read_scales(
    self, scales: Float[Array, "P K"] | None, first_unit: Int[Array, ""] | int
  ) -> Float[Array, "B K 1 s"] | None:
    """Returns the scale of each key of a piece, or None without scales.

    A page has one scale for each head, which all of its keys share.
    """
    if scales is None:
      return None
    page_size = self.inputs.k.shape[2]
    key_scales = jnp.broadcast_to(
      scales[..., None], (*scales.shape, page_size)
    )  # [P, K, S]
    piece_scales = self._read_array(key_scales, first_unit)  # [B, K, s]
    return piece_scales[:, :, None]


def _attend_at_once(
  queries: _Queries, cache: _CacheReader, lam: Float[Array, "B K R 1"] | None
) -> Float[Array, "B K R V"]:
  """Returns attention to the whole cache, (A₁ − λA₂)V, or AV with one map.

  A₁ and A₂ are the softmax maps of the signal and the noise queries. They are
  subtracted before the product, so V is multiplied only once.

  Args:
    queries: the queries of the new tokens.
    cache: a reader whose only piece has all keys and values.
    lam: λ of each query. None with one map.
  """
  piece = cache.read(first_unit=0)
  visible = _visible_keys(queries, piece)  # [B, T, s]
  logits = _masked_logits(queries, piece, visible)  # [B, K, G, R, s]
  attention_maps = jax.nn.softmax(logits, axis=-1)
  weights = _subtract_noise(attention_maps, lam)  # [B, K, R, s]

  # A query that sees no key has equal logits, so softmax gives it weights > 0.
  visible_rows = queries.repeat_for_heads(visible)[:, 0]  # [B, 1, R, s]
  weights = jnp.where(visible_rows, weights, 0)
  return _sum_values(weights, piece, visible)


class _OnlineSoftmax(NamedTuple):
  """The softmax maps over the keys that were read so far."""

  maximum: Float[Array, "B K G R 1"]  # of the logits
  weight_sum: Float[Array, "B K G R 1"]  # Σ exp(logit − maximum)
  value_sum: Float[Array, "B K G R V"]  # Σ exp(logit − maximum)·v


def _attend_in_pieces(
  queries: _Queries, cache: _CacheReader
) -> Float[Array, "B K G R V"]:
  """Returns the output AV of each map, summed piece by piece.

  The loop starts at the first piece with a key that some token sees, and stops
  after the last one.
  """
  oldest_position = jnp.min(queries.positions)
  newest_position = jnp.max(queries.positions)
  first_piece: Int[Array, ""] | int = 0
  if queries.window is not None:
    first_key = jnp.maximum(oldest_position - queries.window + 1, 0)
    first_piece = first_key // cache.keys_per_piece
  # The newest token sees its own key, too.
  stop_key = jnp.minimum(newest_position + 1, cache.keys_per_sequence)
  stop_piece = -(-stop_key // cache.keys_per_piece)  # rounded up

  value_width = cache.inputs.v.shape[-1]
  state = _OnlineSoftmax(
    maximum=_initial_rows(queries, cache, width=1, value=MASKED_LOGIT),
    weight_sum=_initial_rows(queries, cache, width=1, value=0),
    value_sum=_initial_rows(queries, cache, width=value_width, value=0),
  )
  add_piece = functools.partial(_add_piece, queries, cache)
  state = lax.fori_loop(first_piece, stop_piece, add_piece, state)

  # A query that sees no key has sums of 0, and gets an output of 0.
  weight_sum = jnp.where(state.weight_sum == 0, 1, state.weight_sum)
  return state.value_sum / weight_sum


def _initial_rows(
  queries: _Queries, cache: _CacheReader, width: int, value: float
) -> Float[Array, "B K G R width"]:
  """Returns a row of one value for each query, to start a loop with.

  The loop sums over pieces of the cache, and updates these rows.
  """
  shape = (*queries.stacked.shape[:3], width)
  rows = queries.split_maps(jnp.full(shape, value, queries.sum_dtype))
  # Inside shard_map, the types of arrays include the mesh axes over which they
  # vary. JAX requires that a loop keeps the types of its state.
  return vary_like(
    rows, queries.stacked, cache.inputs.k, cache.inputs.v, queries.positions
  )


def _add_piece(
  queries: _Queries,
  cache: _CacheReader,
  index: Int[Array, ""],
  state: _OnlineSoftmax,
) -> _OnlineSoftmax:
  """Returns the softmax state after one more piece of the cache.

  The sums are relative to the largest logit up to now. If the maximum grows,
  the old sums are multiplied by exp(old maximum − new maximum).
  """
  # If the last piece would reach beyond the cache, it begins earlier. It then
  # repeats keys of the previous piece, which must not count twice. A unit is a
  # page, or a key if the cache has no pages.
  last_start = cache.units_per_sequence - cache.units_per_piece
  first_unit = jnp.minimum(index * cache.units_per_piece, last_start)
  piece = cache.read(first_unit)
  is_new = piece.positions >= index * cache.keys_per_piece
  visible = _visible_keys(queries, piece) & is_new  # [B, T, s]
  logits = _masked_logits(queries, piece, visible)  # [B, K, G, R, s]

  maximum = jnp.maximum(state.maximum, jnp.max(logits, axis=-1, keepdims=True))
  # If a query has seen no key yet, logits − maximum is 0 and weights are 1.
  weights = jnp.exp(logits - maximum)
  weights = jnp.where(queries.repeat_for_heads(visible), weights, 0)
  correction = jnp.exp(state.maximum - maximum)
  piece_weight_sum = jnp.sum(weights, axis=-1, keepdims=True)
  stacked_weights = weights.reshape(
    *queries.stacked.shape[:3], cache.keys_per_piece
  )  # [B, K, G·R, s]
  piece_value_sum = _sum_values(stacked_weights, piece, visible)
  return _OnlineSoftmax(
    maximum=maximum,
    weight_sum=state.weight_sum * correction + piece_weight_sum,
    value_sum=state.value_sum * correction
    + queries.split_maps(piece_value_sum),
  )


def _visible_keys(queries: _Queries, piece: _Piece) -> Bool[Array, "B T s"]:
  """Returns which keys of a piece each token sees."""
  distance = queries.positions[..., None] - piece.positions  # [B, T, s]
  visible = distance >= 0
  if queries.window is not None:
    visible &= distance < queries.window
  return visible


def _masked_logits(
  queries: _Queries, piece: _Piece, visible: Bool[Array, "B T s"]
) -> Float[Array, "B K G R s"]:
  """Returns scale · q·k for the keys of a piece, and −1e30 for hidden keys."""
  logits = _product("bknd,bksd->bkns", queries.stacked, piece.k)
  logits *= queries.scale
  if piece.k_scale is not None:
    logits *= piece.k_scale  # int8 keys: k = k_scale · stored k
  logits = queries.split_maps(logits)
  return jnp.where(queries.repeat_for_heads(visible), logits, MASKED_LOGIT)


def _subtract_noise(
  maps: Float[Array, "B K G R X"], lam: Float[Array, "B K R 1"] | None
) -> Float[Array, "B K R X"]:
  """Returns signal − λ·noise, or the only map."""
  if lam is None:
    return maps[:, :, 0]
  return maps[:, :, 0] - lam * maps[:, :, 1]


def _sum_values(
  weights: Float[Array, "B K n s"], piece: _Piece, visible: Bool[Array, "B T s"]
) -> Float[Array, "B K n V"]:
  """Returns weights · v for n rows of weights, which are 0 for hidden keys.

  Values and scales that no token of a sequence sees may be NaN or infinite.
  They are replaced by 0, because 0·NaN is NaN.
  """
  is_visible = jnp.any(visible, axis=1)[:, None, :, None]  # [B, 1, s, 1]
  if piece.v_scale is not None:
    # int8 values: v = v_scale · stored v. The weights take the factor.
    is_visible_column = is_visible[:, :, None, :, 0]  # [B, 1, 1, s]
    weights *= jnp.where(is_visible_column, piece.v_scale, 0)
  weights = weights.astype(piece.v.dtype)
  # A TPU masks the values while it multiplies. A CPU copies them first, and
  # decoding takes three times as long, so there the values are masked only if
  # the plain product is not finite. On a GPU, the host would have to wait for
  # that condition.
  return lax.platform_dependent(
    weights,
    piece.v,
    is_visible,
    cpu=_product_masked_if_not_finite,
    default=_product_with_masked_values,
  )


def _product_with_masked_values(
  weights: Float[Array, "B K n s"],
  v: Float[Array, "B K s V"],
  is_visible: Bool[Array, "B 1 s 1"],
) -> Float[Array, "B K n V"]:
  """Returns weights · v, with hidden values replaced by 0."""
  visible_values = jnp.where(is_visible, v, 0)
  return _product("bkns,bksv->bknv", weights, visible_values)


def _product_masked_if_not_finite(
  weights: Float[Array, "B K n s"],
  v: Float[Array, "B K s V"],
  is_visible: Bool[Array, "B 1 s 1"],
) -> Float[Array, "B K n V"]:
  """Returns weights · v, in which hidden values have no effect.

  Hidden values have a weight of 0. If they are finite, the plain product is
  right, and faster, because masking copies the values. If one is NaN or
  infinite, 0·v is NaN, and the product shows it. Only then is it computed
  again, with hidden values replaced by 0.
  """
  product = _product("bkns,bksv->bknv", weights, v)

  def keep_product() -> Float[Array, "B K n V"]:
    return product

  def multiply_masked_values() -> Float[Array, "B K n V"]:
    return _product_with_masked_values(weights, v, is_visible)

  is_finite = jnp.all(jnp.isfinite(product))
  return lax.cond(is_finite, keep_product, multiply_masked_values)


def _product(equation: str, a: Array, b: Array) -> Array:
  """Returns an einsum, summed in at least float32."""
  precision = lax.Precision.DEFAULT
  if a.dtype == jnp.float32:
    precision = lax.Precision.HIGHEST
  return jnp.einsum(
    equation,
    a,
    b,
    preferred_element_type=jnp.promote_types(jnp.float32, a.dtype),
    precision=precision,
  )
