"""The key/value cache: a decoder that reads new tokens against what it has read before.

Keys and values lie as `decode_attention` takes them, and are read where they lie, by one new token a row and by many.

Layers are unrolled, and each has its own weights and cache. A scan would slice both out of stacked arrays and copy them for every token,
which then takes 3.3 times as long (6 layers, E 256, a CPU). The model's modules run unchanged; only `attention_fn` is replaced.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from diffjax.config import UserError
from diffjax.int8 import is_quantised
from diffjax.model.decoder import (
  Block,
  Decoder,
  apply_norm,
  embed,
  lambda_inits,
  layer_windows,
)
from diffjax.model.pages import PAGE, Pool, empty_pool, read, write
from diffjax.model.shapes import axis_sizes
from diffjax.model.stacks import stacks
from diffjax.ops.diff_attention import decode_attention, diff_attention

# Options of `diff_attention` that do not change what it computes.
_EXECUTION_OPTIONS = {"implementation", "sharding", "token_order"}


@flax.struct.dataclass
class Cache:
  """The keys and values of all tokens read so far. The keys of several maps lie side by side, as `decode_attention` takes them.

  Attributes:
    keys: of each layer, after RoPE.
    values: of each layer.
    tables: the pages of each row, an id that the pool does not have where it has no page; None if row b's are all in page b.
    lengths: number of valid tokens in each row. Entries beyond them are never seen.
  """

  keys: tuple[Pool, ...]
  values: tuple[Pool, ...]
  tables: Int[Array, "B N"] | None
  lengths: Int[Array, "B"]


def empty_cache(
  model: Decoder,
  batch_size: int,
  capacity: int,
  *,
  num_pages: int | None = None,
  page: int = PAGE,
  dtype: Any = None,
) -> Cache:
  """A cache of no tokens.

  Args:
    model: the decoder.
    batch_size: B.
    capacity: tokens that a row can hold.
    num_pages: P, pages that the rows share; no row has one before `tables` are set (see `allocate`). None for room for `capacity` tokens in
      every row; where keys or values of a head are narrower than 128, the compiler for v7x then copies them when a token is written.
    page: tokens of a page. A TPU's kernel wants a multiple of 128.
    dtype: of keys and values; None for the model's compute dtype. int8 needs pages.

  Raises:
    UserError: if the model is not causal: its tokens depend on those to come; or the dtype is not one that a cache can have.
  """
  config = model.config
  if not config.causal:
    raise UserError(
      "config.model.causal = False: what a token gives depends on those after it, so that no cache can hold it"
    )
  dtype = jnp.dtype(model.dtype if dtype is None else dtype)
  if dtype not in (model.dtype, jnp.int8) or (
    dtype == jnp.int8 and num_pages is None
  ):
    raise UserError(
      f"dtype = {dtype}: a cache is in the model's {jnp.dtype(model.dtype)} (None), or, in pages (num_pages), in int8"
    )
  count, size = (
    (batch_size, capacity) if num_pages is None else (num_pages, page)
  )
  keys: list[Pool] = []
  values: list[Pool] = []
  for stack in stacks(config).values():
    sizes = axis_sizes(stack)
    for pools, width in ((keys, sizes["M"] * sizes["D"]), (values, sizes["V"])):
      pools += [
        empty_pool(count, stack.num_kv_heads, size, width, dtype)
        for _ in range(stack.num_layers)
      ]
  tables = (
    None
    if num_pages is None
    else jnp.full((batch_size, -(-capacity // page)), num_pages, jnp.int32)
  )
  return Cache(
    tuple(keys), tuple(values), tables, jnp.zeros(batch_size, jnp.int32)
  )


def unstack(model: Decoder, params: dict[str, Any]) -> dict[str, Any]:
  """Parameters as `extend` takes them: `layers` a tuple, one tree a layer, and matrices in the compute dtype, so that no token casts, or in
  int8."""

  def cast(leaf: jax.Array) -> jax.Array:
    return (
      leaf.astype(model.dtype)
      if leaf.ndim > 1 and not is_quantised(leaf)
      else leaf
    )

  def layer(name: str, index: int) -> Any:
    sliced = jax.tree.map(lambda leaf: leaf[index], params[name])
    return jax.tree.map(cast, sliced, is_leaf=is_quantised)

  every = stacks(model.config)
  outer = {
    name: cast(leaf) for name, leaf in params.items() if name not in every
  }
  return outer | {
    "layers": tuple(
      layer(name, index)
      for name, stack in every.items()
      for index in range(stack.num_layers)
    )
  }


def extend(
  model: Decoder,
  params: dict[str, Any],
  tokens: Int[Array, "B T"],
  cache: Cache,
  counts: Int[Array, "B"] | None = None,
  sharding: NamedSharding | None = None,
) -> tuple[Float[Array, "B T E"], Cache]:
  """Reads T more tokens in every row.

  Args:
    model: the decoder. An `attention_fn` of its own must take a q_offset, and gets a copy of the cache. So does `diff_attention` with an
      option that changes its result, such as a scale.
    params: from `unstack`.
    tokens: row b continues at position cache.lengths[b]. What its cache has no room for is dropped.
    cache: of the tokens before. Donate it, since it is written in place.
    counts: number of valid tokens of each row, its first ones; all T by default. Later tokens never see the others.
    sharding: of the cache's pages and heads, on a mesh (`parallel.rules.heads_sharding`); None on one device.

  Returns:
    Hidden states after the final norm (meaningless for tokens that are not valid), and the cache.
  """
  config, length = model.config, tokens.shape[1]
  positions = cache.lengths[:, None] + jnp.arange(length)
  counts = jnp.full_like(cache.lengths, length) if counts is None else counts
  put = write if sharding is None else _on_shards(sharding)
  keys: list[Pool] = []
  values: list[Pool] = []

  # Names every argument that a layer may pass. A variant that passes another one
  # cannot be decoded, and raises TypeError.
  def attend_to_cache(
    q,
    k,
    v,
    lam,
    *,
    q_segment_ids=None,
    kv_segment_ids=None,
    causal=True,
    window=None,
  ):
    if not causal:
      raise ValueError("causal = False: a cache holds no later tokens")
    if q_segment_ids is not None or kv_segment_ids is not None:
      raise ValueError("segment_ids: a row of the cache is one document")
    layer = len(keys)
    for pools, old, new in (
      (keys, cache.keys, k.reshape(*k.shape[:3], -1)),
      (values, cache.values, v),
    ):
      pools.append(put(old[layer], cache.tables, new, cache.lengths, counts))
    stored_k, stored_v = keys[layer], values[layer]
    if _is_diff_attention(model.attention_fn):
      return decode_attention(
        q,
        stored_k.tokens,
        stored_v.tokens,
        lam,
        cache.lengths + length,
        block_tables=cache.tables,
        k_scale=stored_k.scale,
        v_scale=stored_v.scale,
        window=window,
        sharding=sharding,
      )
    seen_k, seen_v = (
      read(pool, cache.tables, q.dtype) for pool in (stored_k, stored_v)
    )
    return model.attention_fn(
      q,
      seen_k.reshape(*seen_k.shape[:3], *k.shape[3:]),
      seen_v,
      lam,
      q_offset=cache.lengths,
      window=window,
    )

  x = embed(params["embedding"], tokens, config)
  layers = iter(params["layers"])
  for stack in stacks(config).values():
    windows = layer_windows(stack)
    for lambda_init, window in zip(lambda_inits(stack), windows, strict=True):
      of_layer = dataclasses.replace(stack, window=window, window_pattern="")
      x, _ = Block(of_layer, model.dtype, attend_to_cache).apply(
        {"params": next(layers)}, x, lambda_init, 0, None, positions
      )
  after = Cache(
    tuple(keys), tuple(values), cache.tables, cache.lengths + counts
  )
  return apply_norm(params, "final_norm", x, config), after


def _is_diff_attention(attention_fn: Callable[..., jax.Array]) -> bool:
  """Returns True for `diff_attention`, with options only of how it runs."""
  if not isinstance(attention_fn, functools.partial):
    return attention_fn is diff_attention
  is_plain = (
    not attention_fn.args and attention_fn.keywords.keys() <= _EXECUTION_OPTIONS
  )
  return attention_fn.func is diff_attention and is_plain


def _on_shards(sharding: NamedSharding) -> Callable[..., Pool]:
  """`write` on each device to its own heads: left to the partitioner, every device would be sent the new tokens of all."""
  heads, new, whole = sharding.spec, P(None, *sharding.spec), P()
  return jax.shard_map(
    write,
    mesh=sharding.mesh,
    in_specs=(heads, whole, new, whole, whole),
    out_specs=heads,
  )
