"""The key/value cache: a decoder reads new tokens after those read before.

Keys and values are stored in the layout that `decode_attention` takes. They are
read where they are stored, by one new token per row or by several.

Each layer has its own arrays for weights and cache. With arrays stacked over
layers, a scan would copy each layer's part for every token. A token then takes
3.3 times as long (6 layers, E 256, a CPU).

The model's modules are used unchanged. Only `attention_fn` is replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from diffjax.config import ModelConfig, UserError
from diffjax.inference.pages import (
  PAGE,
  Pool,
  empty_pool,
  read_rows,
  write_tokens,
)
from diffjax.int8 import is_quantised
from diffjax.model.attention import CACHED_DECODING, Lambda
from diffjax.model.decoder import (
  Block,
  Decoder,
  apply_norm,
  embed,
  lambda_inits,
  layer_windows,
)
from diffjax.model.definition import (
  WeightsFn,
  attention_from_weights,
  is_diff_attention,
)
from diffjax.model.shapes import axis_sizes
from diffjax.model.stacks import check_support, stacks
from diffjax.ops.diff_attention import decode_attention
from diffjax.ops.diff_attention.implementations import REGISTRY


@flax.struct.dataclass
class Cache:
  """The keys and values of all tokens read so far, in rows of a batch.

  The M key maps of a head are stored as one vector of width M·D.

  Attributes:
    keys: the keys of each layer, after RoPE.
    values: the values of each layer.
    tables: the pages of each row, in the order of their tokens. An entry that
      equals the number of pages is unused. None if row b has only page b.
    lengths: the number of valid tokens in each row. Attention ignores what is
      stored after them.
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
  """Returns a cache that holds no tokens.

  By default, each row has memory for `capacity` tokens. With `num_pages`, the
  rows share pages of memory instead, and a row needs only as many pages as it
  has tokens for.

  Args:
    model: the decoder.
    batch_size: B, the number of rows.
    capacity: the most tokens of a row.
    num_pages: P, the number of pages that all rows share. No row has a page
      until `tables` is replaced (see `pages.allocate`). None if each row has
      its own memory. On TPU v7x this is slow for keys or values of fewer than
      128 numbers per head, because XLA then copies them for every token.
    page: the number of tokens of a page, if there are pages. The TPU kernel
      needs a multiple of 128.
    dtype: the dtype of keys and values. None for the model's compute dtype.
      int8 requires num_pages.

  Raises:
    UserError: if the model is not causal, if its attention does not support
      cached decoding, or if the dtype is not supported.
  """
  config = model.config
  check_support(config, CACHED_DECODING, "a key/value cache")
  if not config.causal:
    raise UserError(
      "config.model.causal = False: only a causal model can have a cache, in"
      " which a token's keys and values do not depend on later tokens"
    )
  if dtype is None:
    dtype = model.dtype
  dtype = jnp.dtype(dtype)
  _check_dtype(dtype, model, has_pages=num_pages is not None)

  if num_pages is None:
    # Row b is stored in page b, which is as long as the row.
    pool_size = batch_size
    page_size = capacity
    tables = None
  else:
    pool_size = num_pages
    page_size = page
    pages_per_row = -(-capacity // page)  # rounded up
    # The pages are 0 … num_pages − 1. The number num_pages means "no page".
    tables = jnp.full((batch_size, pages_per_row), num_pages, jnp.int32)

  keys: list[Pool] = []
  values: list[Pool] = []
  for stack in stacks(config).values():
    sizes = axis_sizes(stack)
    num_heads = sizes["K"]
    key_width = sizes["M"] * sizes["D"]
    value_width = sizes["V"]
    for _ in range(stack.num_layers):
      keys.append(empty_pool(pool_size, num_heads, page_size, key_width, dtype))
      values.append(
        empty_pool(pool_size, num_heads, page_size, value_width, dtype)
      )
  return Cache(
    keys=tuple(keys),
    values=tuple(values),
    tables=tables,
    lengths=jnp.zeros(batch_size, jnp.int32),
  )


def _check_dtype(dtype: jnp.dtype, model: Decoder, *, has_pages: bool) -> None:
  """Raises UserError if a cache of this model cannot have a dtype.

  It can have the model's dtype, or int8 if it has pages.
  """
  if dtype == model.dtype:
    return
  if dtype == jnp.int8 and has_pages:
    return
  raise UserError(
    f"dtype = {dtype}: must be None for the model's {jnp.dtype(model.dtype)},"
    " or int8 together with num_pages"
  )


def unstack(model: Decoder, params: dict[str, Any]) -> dict[str, Any]:
  """Returns a decoder's parameters with a separate tree for each layer.

  `extend` needs them in this form. Matrices are cast to the compute dtype here,
  so that they are not cast again for every token. Quantized matrices stay in
  int8, and gains, biases and λ vectors in float32.

  Args:
    model: the decoder.
    params: the parameters from `Decoder.init`. The arrays of a stack of layers
      have a leading axis L.

  Returns:
    The arrays outside the layers under their names, and under "layers" a tuple
    with the parameters of each layer, the lowest first.
  """
  layer_stacks = stacks(model.config)
  cast_matrix = functools.partial(_cast_matrix, model.dtype)
  unstacked: dict[str, Any] = {}
  for name, leaf in params.items():
    if name not in layer_stacks:
      unstacked[name] = cast_matrix(leaf)

  layers = []
  for name, stack in layer_stacks.items():
    for layer in range(stack.num_layers):
      # Takes entry `layer` of each array [L, …] of the stack.
      layer_params = jax.tree.map(operator.itemgetter(layer), params[name])
      layers.append(
        jax.tree.map(cast_matrix, layer_params, is_leaf=is_quantised)
      )
  unstacked["layers"] = tuple(layers)
  return unstacked


def _cast_matrix(dtype: Any, leaf: Any) -> Any:
  """Returns a matrix in the dtype. Vectors and int8 matrices do not change."""
  if leaf.ndim > 1 and not is_quantised(leaf):
    return leaf.astype(dtype)
  return leaf


def extend(
  model: Decoder,
  params: dict[str, Any],
  tokens: Int[Array, "B T"],
  cache: Cache,
  counts: Int[Array, "B"] | None = None,
  sharding: NamedSharding | None = None,
) -> tuple[Float[Array, "B T E"], Cache]:
  """Runs the decoder over T new tokens per row, and adds them to the cache.

  The new tokens attend to the tokens in the cache and to each other.

  Args:
    model: the decoder. Its `attention_fn` is replaced by `decode_attention`,
      which reads the cache in place. If this would change the result (see
      `_can_be_replaced`), `attention_fn` is called with a copy of the cache,
      and must accept `q_offset`.
    params: the parameters from `unstack`.
    tokens: the new tokens. The first one of row b has position
      cache.lengths[b]. Tokens for which the cache has no room are dropped.
    cache: the cache of the tokens before. Donate it, so that it is updated in
      place.
    counts: the number of valid tokens of each row. The first counts[b] tokens
      of row b are valid. The other ones are padding, which is not stored. None
      for T.
    sharding: the sharding of the cache's pages and heads on a mesh (see
      `parallel.rules.heads_sharding`). None on one device.

  Returns:
    The hidden states after the final norm, which are meaningless for invalid
    tokens, and the cache with the new tokens.

  Raises:
    UserError: if the model's attention does not support cached decoding.
    ValueError: if a layer does not call its `attention_fn` once.
  """
  config = model.config
  check_support(config, CACHED_DECODING, "a key/value cache")
  num_tokens = tokens.shape[1]
  positions = cache.lengths[:, None] + jnp.arange(num_tokens)  # [B, T]
  if counts is None:
    counts = jnp.full_like(cache.lengths, num_tokens)

  x = embed(params["embedding"], tokens, config)  # [B, T, E]
  keys: list[Pool] = []
  values: list[Pool] = []
  for index, layer in enumerate(_layers(config)):
    attention = _CachedAttention(
      attention_fn=model.attention_fn,
      keys=cache.keys[index],
      values=cache.values[index],
      tables=cache.tables,
      old_lengths=cache.lengths,
      counts=counts,
      sharding=sharding,
    )
    layer_params = params["layers"][index]
    x = _apply_layer(model, layer, layer_params, x, positions, attention)
    # The layer has added the new tokens to these.
    keys.append(attention.keys)
    values.append(attention.values)

  extended_cache = Cache(
    keys=tuple(keys),
    values=tuple(values),
    tables=cache.tables,
    lengths=cache.lengths + counts,
  )
  return apply_norm(params, "final_norm", x, config), extended_cache


def _apply_layer(
  model: Decoder,
  layer: _Layer,
  params: Any,
  x: Float[Array, "B T E"],
  positions: Int[Array, "B T"],
  attention: _CachedAttention,
) -> Float[Array, "B T E"]:
  """Returns the residual stream after a layer that attends to its cache.

  Args:
    model: the decoder.
    layer: the layer of the decoder.
    params: the layer's parameters.
    x: the residual stream before the layer.
    positions: the position of each token in its row.
    attention: attends to the cache, and adds the new tokens to it.

  Raises:
    ValueError: if the layer does not call its `attention_fn` once.
  """
  block = Block(
    layer.config,
    model.dtype,
    attention_fn=attention,
    logits_transform=model.logits_transform,
  )
  # The layer's config has one window, with the index 0. Each row of the cache
  # is one document, so there are no segments.
  x, _ = block.apply(
    {"params": params},
    x,
    layer.lambda_init,
    window_index=0,
    segment_ids=None,
    positions=positions,
  )
  # Otherwise the cache would lack the new tokens, or have them twice.
  if attention.num_calls != 1:
    raise ValueError(
      f"a layer of {layer.config.attention!r} called its attention_fn"
      f" {attention.num_calls} times: it must call it once, through"
      " `Attention.attend`, to be decoded from a cache"
    )
  return x


class _Layer(NamedTuple):
  """A layer of a decoder.

  Attributes:
    config: the config of its stack, with the window of this layer.
    lambda_init: λ_init of this layer, or None.
  """

  config: ModelConfig
  lambda_init: Any


def _layers(config: ModelConfig) -> list[_Layer]:
  """Returns the layers of all stacks, the lowest first.

  A stack is a sequence of layers with equal shapes. Its layers may differ in
  window and λ_init.
  """
  layers = []
  for stack in stacks(config).values():
    windows = layer_windows(stack)
    for lambda_init, window in zip(lambda_inits(stack), windows, strict=True):
      # With a window of its own, a layer needs no pattern.
      layer_config = dataclasses.replace(
        stack, window=window, window_pattern=""
      )
      layers.append(_Layer(layer_config, lambda_init))
  return layers


@dataclasses.dataclass(eq=False)
class _CachedAttention:
  """An `attention_fn` that attends to the cached keys and values of a layer.

  A call first adds the new keys and values to the cache, because new tokens
  also see each other. To do so, it replaces the attributes `keys` and `values`.

  Attributes:
    attention_fn: the `attention_fn` that the model has without a cache.
    keys: the stored keys of this layer.
    values: the stored values of this layer.
    tables: the pages of each row. None if row b has only page b.
    old_lengths: the number of tokens in each row before the new ones.
    counts: the number of valid new tokens of each row.
    sharding: the sharding of pages and heads. None on one device.
    num_calls: the number of calls so far, including calls of the function from
      `by_definition`.
  """

  attention_fn: Callable[..., jax.Array]
  keys: Pool
  values: Pool
  tables: Int[Array, "B N"] | None
  old_lengths: Int[Array, "B"]
  counts: Int[Array, "B"]
  sharding: NamedSharding | None
  num_calls: int = 0

  # The signature has every argument that a layer may pass. A variant that
  # passes another one, such as a scale, cannot be decoded: it gets a TypeError.
  def __call__(
    self,
    q: Float[Array, "B T Q G D"],
    k: Float[Array, "B T K M D"],
    v: Float[Array, "B T K V"],
    lam: Lambda,
    *,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B T"] | None = None,
    causal: bool = True,
    window: int | None = None,
  ) -> Float[Array, "B T H V"]:
    """Adds new keys and values to the cache, and attends to all stored ones.

    Args:
      q: queries of the new tokens.
      k: keys of the new tokens.
      v: values of the new tokens.
      lam: λ of the new tokens, or None with one map.
      q_segment_ids: must be None.
      kv_segment_ids: must be None.
      causal: must be True.
      window: how many keys a token sees, including its own. None for all keys.

    Raises:
      ValueError: if an argument asks for what a cache cannot do.
    """
    _check_mask(q_segment_ids, kv_segment_ids, causal)
    self._add(k, v)
    if not _can_be_replaced(self.attention_fn):
      return self._attend_to_copy(
        self.attention_fn, q, lam, num_key_maps=k.shape[3], window=window
      )

    num_tokens = q.shape[1]
    return decode_attention(
      q,
      self.keys.tokens,
      self.values.tokens,
      lam,
      self.old_lengths + num_tokens,
      block_tables=self.tables,
      k_scale=self.keys.scale,
      v_scale=self.values.scale,
      window=window,
      sharding=self.sharding,
    )

  def by_definition(
    self, weights_fn: WeightsFn, supports: Set[str]
  ) -> Callable[..., jax.Array]:
    """Returns an `attention_fn` that computes all attention weights.

    It is for attention variants without a kernel, which define only a function
    that returns their attention weights. A layer of such a variant calls the
    result of this method in place of `__call__`. The result, too, adds keys and
    values to the cache, and attends to all stored ones.

    Args:
      weights_fn: returns the attention weights [B, H, T, S] of queries and keys
        (see `Attention.weights`).
      supports: the features that the variant supports.

    Raises:
      ValueError: if the model has its own `attention_fn`, which this would
        ignore.
    """
    assert CACHED_DECODING in supports  # `extend` checks it.
    if not is_diff_attention(self.attention_fn):
      raise ValueError(
        f"attention_fn = {self.attention_fn!r}: must be diff_attention for a"
        " variant that is computed from its weights"
      )
    return functools.partial(self._attend_with_weights, weights_fn)

  def _attend_with_weights(
    self,
    weights_fn: WeightsFn,
    q: Float[Array, "B T Q G D"],
    k: Float[Array, "B T K M D"],
    v: Float[Array, "B T K V"],
    lam: Lambda,
    *,
    q_segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B T"] | None,
    causal: bool,
    window: int | None,
  ) -> Float[Array, "B T H V"]:
    """Adds new keys and values, and returns attention weights times values.

    Args:
      weights_fn: returns the attention weights [B, H, T, S].
      q: queries of the new tokens. `__call__` explains the other arguments.
    """
    _check_mask(q_segment_ids, kv_segment_ids, causal)
    self._add(k, v)
    return self._attend_to_copy(
      functools.partial(attention_from_weights, weights_fn),
      q,
      lam,
      num_key_maps=k.shape[3],
      window=window,
    )

  def _add(
    self, k: Float[Array, "B T K M D"], v: Float[Array, "B T K V"]
  ) -> None:
    """Adds the keys and values of the new tokens to the layer's cache."""
    self.num_calls += 1
    flat_k = k.reshape(*k.shape[:3], -1)  # [B, T, K, M·D]
    self.keys = self._write(self.keys, flat_k)
    self.values = self._write(self.values, v)

  def _write(self, pool: Pool, new: Float[Array, "B T K W"]) -> Pool:
    """Returns the pool of keys or values, with the new ones in it."""
    write = write_tokens
    if self.sharding is not None:
      write = _sharded_write(self.sharding)
    return write(pool, self.tables, new, self.old_lengths, self.counts)

  def _attend_to_copy(
    self,
    attention_fn: Callable[..., jax.Array],
    q: Float[Array, "B T Q G D"],
    lam: Lambda,
    *,
    num_key_maps: int,
    window: int | None,
  ) -> Float[Array, "B T H V"]:
    """Calls an `attention_fn` with a copy of the cached keys and values.

    This is slow. It is for functions that, unlike `decode_attention`, cannot
    read the pages of the cache.

    Args:
      attention_fn: must accept `q_offset`.
      q: queries of the new tokens.
      lam: λ of the new tokens, or None with one map.
      num_key_maps: M. The cache stores the M keys of a head as one vector.
      window: how many keys a token sees, including its own. None for all keys.
    """
    k = read_rows(self.keys, self.tables, q.dtype)  # [B, S, K, M·D]
    v = read_rows(self.values, self.tables, q.dtype)  # [B, S, K, V]
    k = k.reshape(*k.shape[:3], num_key_maps, -1)  # [B, S, K, M, D]
    return attention_fn(q, k, v, lam, q_offset=self.old_lengths, window=window)


def _can_be_replaced(attention_fn: Callable[..., jax.Array]) -> bool:
  """Returns whether `decode_attention` may replace a model's `attention_fn`.

  It may replace `diff_attention` with any built-in implementation, because they
  compute the same function. It may not replace a function of the user, an
  implementation that the user registered, or an option that changes the result.
  """
  if not is_diff_attention(attention_fn):
    return False
  if not isinstance(attention_fn, functools.partial):
    return True
  name = attention_fn.keywords.get("implementation", "auto")
  return name == "auto" or name in REGISTRY.built_in


def _check_mask(q_segment_ids: Any, kv_segment_ids: Any, causal: bool) -> None:
  """Raises ValueError if a layer asks for a mask that a cache cannot have."""
  if not causal:
    raise ValueError("causal = False: a cache has no later tokens to attend to")
  if q_segment_ids is not None or kv_segment_ids is not None:
    raise ValueError("segment_ids: a row of the cache is one document")


def _sharded_write(sharding: NamedSharding) -> Callable[..., Pool]:
  """Returns `write_tokens` for pools whose heads are sharded over a mesh.

  With `shard_map`, each device writes its own heads. Without it, XLA would send
  the new tokens of all heads to every device.

  Args:
    sharding: the sharding of a pool's axes [P, K, …].
  """
  pool_spec = sharding.spec
  # Heads are axis 1 of a pool, and axis 2 of new tokens [B, T, K, W].
  new_spec = P(None, *sharding.spec)
  replicated = P()
  return jax.shard_map(
    write_tokens,
    mesh=sharding.mesh,
    in_specs=(pool_spec, replicated, new_spec, replicated, replicated),
    out_specs=pool_spec,
  )
