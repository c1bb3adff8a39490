"""The key/value cache: a decoder that reads new tokens against what it has read before.

Layers are unrolled, and each has its own weights and cache. A scan would slice both out of stacked arrays and copy them for every token,
which then takes 3.3 times as long (6 layers, E 256, a CPU). The model's modules run unchanged; only `attention_fn` is replaced.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffjax.config import UserError
from diffjax.model.attention import axis_sizes
from diffjax.model.decoder import Block, Decoder, embed, lambda_inits
from diffjax.ops.diff_attention import decode_attention, diff_attention
from diffjax.ops.rms_norm import rms_norm


@flax.struct.dataclass
class Cache:
  """The keys and values of all tokens read so far. The keys of several maps lie side by side, as `decode_attention` takes them.

  Attributes:
    keys: of each layer, after RoPE.
    values: of each layer.
    lengths: number of valid tokens in each row. Entries beyond them are never seen.
  """

  keys: tuple[Float[Array, "B K S M*D"], ...]
  values: tuple[Float[Array, "B K S V"], ...]
  lengths: Int[Array, "B"]


def empty_cache(model: Decoder, batch_size: int, capacity: int) -> Cache:
  """A cache of no tokens, in the model's compute dtype.

  Args:
    model: the decoder.
    batch_size: B.
    capacity: S, tokens that a row can hold.

  Raises:
    UserError: if the model is not causal: its tokens depend on those to come.
  """
  config, sizes = model.config, axis_sizes(model.config)
  if not config.causal:
    raise UserError("config.model.causal = False: what a token gives depends on those after it, so that no cache can hold it")
  keys, values = (
    tuple(jnp.zeros((batch_size, config.num_kv_heads, capacity, width), model.dtype) for _ in range(config.num_layers))
    for width in (sizes["M"] * sizes["D"], sizes["V"])
  )
  return Cache(keys, values, jnp.zeros(batch_size, jnp.int32))


def unstack(model: Decoder, params: dict[str, Any]) -> dict[str, Any]:
  """Parameters as `extend` takes them: `layers` a tuple, one tree a layer, and matrices in the compute dtype, so that no token casts."""

  def cast(leaf: jax.Array) -> jax.Array:
    return leaf.astype(model.dtype) if leaf.ndim > 1 else leaf

  def layer(index: int) -> Any:
    return jax.tree.map(lambda leaf: cast(leaf[index]), params["layers"])

  outer = {name: cast(leaf) for name, leaf in params.items() if name != "layers"}
  return outer | {"layers": tuple(layer(index) for index in range(model.config.num_layers))}


def extend(
  model: Decoder, params: dict[str, Any], tokens: Int[Array, "B T"], cache: Cache, counts: Int[Array, "B"] | None = None
) -> tuple[Float[Array, "B T E"], Cache]:
  """Reads T more tokens in every row.

  Args:
    model: the decoder; an `attention_fn` of its own, other than `diff_attention`, must take a q_offset.
    params: from `unstack`.
    tokens: row b continues at position cache.lengths[b]. Its cache must have room for all T.
    cache: of the tokens before. Donate it, since it is written in place.
    counts: number of valid tokens of each row, its first ones; all T by default. Later tokens never see the others.

  Returns:
    Hidden states after the final norm (meaningless for tokens that are not valid), and the cache.
  """
  config, length = model.config, tokens.shape[1]
  positions = cache.lengths[:, None] + jnp.arange(length)
  keys: list[jax.Array] = []
  values: list[jax.Array] = []

  def attend(q, k, v, lam, *, window, **_):
    layer = len(keys)
    keys.append(_write(cache.keys[layer], k.reshape(*k.shape[:3], -1), cache.lengths))
    values.append(_write(cache.values[layer], v, cache.lengths))
    if length == 1 and model.attention_fn is diff_attention:
      lam = lam[:, 0] if lam is not None and lam.ndim == 3 else lam
      return decode_attention(q[:, 0], keys[layer], values[layer], lam, cache.lengths + 1, window=window)[:, None]
    seen = jnp.swapaxes(keys[layer], 1, 2)
    return model.attention_fn(
      q, seen.reshape(*seen.shape[:3], *k.shape[3:]), jnp.swapaxes(values[layer], 1, 2), lam, q_offset=cache.lengths, window=window
    )

  x = embed(params["embedding"], tokens, config)
  for weights, lambda_init in zip(params["layers"], lambda_inits(config), strict=True):
    x, _ = Block(config, model.dtype, attend).apply({"params": weights}, x, lambda_init, None, positions)
  counts = jnp.full_like(cache.lengths, length) if counts is None else counts
  return rms_norm(x, params["final_norm"], config.norm_eps), Cache(tuple(keys), tuple(values), cache.lengths + counts)


def _write(stored: Float[Array, "B K S W"], new: Float[Array, "B T K W"], at: Int[Array, "B"]) -> Float[Array, "B K S W"]:
  """New keys or values in their places."""
  return jax.vmap(lambda row, tokens, start: jax.lax.dynamic_update_slice(row, tokens, (0, start, 0)))(stored, jnp.swapaxes(new, 1, 2), at)
