"""The inputs of an implementation, and their layout for matrix products."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffjax.ops.varying import vary_like


class DecodeInputs(NamedTuple):
  """The arrays of `decode_attention`, after its checks."""

  q: Float[Array, "B T H G D"]  # G is 1, or 2: the signal map and its noise map
  k: Float[Array, "P K S M*D"] | Int[Array, "P K S M*D"]
  v: Float[Array, "P K S V"] | Int[Array, "P K S V"]
  lam: Float[Array, "B T H"] | None  # None if G is 1
  # The position of each sequence's first new token, from −T. Negative positions
  # belong to tokens that are not in the cache, which see no key.
  first_positions: Int[Array, "B"]
  block_tables: Int[Array, "B N"] | None  # valid page ids
  k_scale: Float[Array, "P K"] | None  # None unless k and v are int8
  v_scale: Float[Array, "P K"] | None


class DecodeImplementation(Protocol):
  """One way to compute `decode_attention`."""

  def __call__(
    self, inputs: DecodeInputs, *, window: int | None, scale: float
  ) -> Float[Array, "B T H V"]:
    """Returns the outputs of the heads, in q's dtype."""


def stack_queries(
  q: Float[Array, "B T H G D"],
  k: Float[Array, "P K S M*D"],
  rows_per_map: int,
) -> Float[Array, "B K G*rows_per_map M*D"]:
  """Returns the queries of each key head as rows of one matrix.

  The rows are ordered by map, then by token, then by head. Each map has R rows,
  and then rows of zeros up to `rows_per_map`.

  If each map has its own keys (M = 2), the last axis of k has the keys of both
  maps, [k₁, k₂]. The queries become [q₁, 0] and [0, q₂]. One product with k
  then gives the logits of both maps, and k is neither sliced nor copied.

  Args:
    q: queries of the new tokens. On axis G, 0 is the signal map and 1 is the
      noise map.
    k: the cached keys. Only their shape is used.
    rows_per_map: at least R, the number of tokens times query heads per key
      head. Kernels round R up to whole tiles.
  """
  batch, tokens, num_heads, num_maps, width = q.shape
  num_kv_heads = k.shape[1]
  num_key_maps = k.shape[3] // width
  heads_per_kv_head = num_heads // num_kv_heads
  num_rows = tokens * heads_per_kv_head  # R

  # Bring the queries of a key head together: [B, K, R, G, D].
  q = q.reshape(batch, tokens, num_kv_heads, heads_per_kv_head, num_maps, width)
  q = q.swapaxes(1, 2)  # [B, K, T, H/K, G, D]
  q = q.reshape(batch, num_kv_heads, num_rows, num_maps, width)

  padding_rows = (0, rows_per_map - num_rows)
  stacked = []
  for map_index in range(num_maps):
    key_map = map_index % num_key_maps  # 0 for both maps if they share keys
    zeros_before = key_map * width
    zeros_after = (num_key_maps - 1 - key_map) * width
    padding_columns = (zeros_before, zeros_after)
    queries = q[:, :, :, map_index]  # [B, K, R, D]
    queries = jnp.pad(
      queries, ((0, 0), (0, 0), padding_rows, padding_columns)
    )  # [B, K, rows_per_map, M·D]
    stacked.append(queries)
  return jnp.concatenate(stacked, axis=2)


def stack_lambda(
  lam: Float[Array, "B T H"], num_kv_heads: int
) -> Float[Array, "B K R 1"]:
  """Returns λ of each key head's queries, as a column.

  The R rows are ordered by token and then by head, as in `stack_queries`. R is
  the number of tokens times query heads per key head.
  """
  batch, tokens, num_heads = lam.shape
  heads_per_kv_head = num_heads // num_kv_heads
  lam = lam.reshape(batch, tokens, num_kv_heads, heads_per_kv_head)
  lam = jnp.swapaxes(lam, 1, 2)  # [B, K, T, H/K]
  return lam.reshape(batch, num_kv_heads, tokens * heads_per_kv_head, 1)


def unstack_outputs(
  out: Float[Array, "B K rows_per_map V"], tokens: int, heads_per_kv_head: int
) -> Float[Array, "B T H V"]:
  """Returns the outputs by token and head, from the rows of each key head.

  This undoes the order of `stack_queries`: by token, then by head, then rows of
  padding.
  """
  batch, num_kv_heads, _, width = out.shape
  num_rows = tokens * heads_per_kv_head
  out = out[:, :, :num_rows]  # without the padding
  out = out.reshape(batch, num_kv_heads, tokens, heads_per_kv_head, width)
  out = out.swapaxes(1, 2)  # [B, T, K, H/K, V]
  return out.reshape(batch, tokens, num_kv_heads * heads_per_kv_head, width)


def vary_alike(arrays: Any) -> Any:
  """Returns a tree of arrays that all vary over the same mesh axes.

  Inside `shard_map`, the inputs of a Pallas kernel must have this property.
  """
  leaves = jax.tree.leaves(arrays)

  def vary(x: Array) -> Array:
    return vary_like(x, *leaves)

  return jax.tree.map(vary, arrays)
