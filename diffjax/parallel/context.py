"""Context parallelism: a row's tokens shared out over devices, each of which attends from its own to the whole row.

Under a causal mask late tokens have more to attend to. So a row is cut into twice as many pieces as there are shards, and shard c holds
pieces c and 2C − 1 − c: all shards then have the same work.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int


def order(length: int, shards: int) -> Int[np.ndarray, "T"]:
  """The tokens of a row in context order: those of shard 0, of shard 1, and so on. The length is a multiple of 2·shards."""
  pieces = np.arange(length).reshape(2 * shards, -1)
  return np.concatenate([pieces[[shard, -1 - shard]].ravel() for shard in range(shards)])


def attend(
  attention: Callable[..., jax.Array],
  axis: str,
  q: Float[Array, "B T H G D"],
  k: Float[Array, "B T K M D"],
  v: Float[Array, "B T K V"],
  lam: Float[Array, "B T H"] | None,
  q_segment_ids: Int[Array, "B T"] | None,
  kv_segment_ids: Int[Array, "B T"] | None,
) -> Float[Array, "B T H V"]:
  """Causal attention inside `shard_map`, on one shard's tokens in context order.

  Keys and values of the whole row are gathered along the mesh axis `axis`, which autodiff turns into a sum of their gradients that leaves
  each shard its own.
  """
  shards, shard, size = lax.axis_size(axis), lax.axis_index(axis), q.shape[1] // 2
  k, v, kv_segment_ids = (None if x is None else _gather(x, axis) for x in (k, v, kv_segment_ids))
  outs = []
  for half, piece in enumerate((shard, 2 * shards - 1 - shard)):
    mine = lambda x, half=half: None if x is None else x[:, half * size : (half + 1) * size]
    start = jnp.full(q.shape[0], piece * size, jnp.int32)
    outs.append(attention(mine(q), k, v, mine(lam), q_segment_ids=mine(q_segment_ids), kv_segment_ids=kv_segment_ids, q_offset=start))
  return jnp.concatenate(outs, axis=1)


def _gather(x: jax.Array, axis: str) -> jax.Array:
  """The tokens of all shards [B, T, …] in their own order."""
  early, late = (lax.all_gather(half, axis, axis=1) for half in jnp.split(x, 2, axis=1))  # [B, C, T/2C, …], the late ones backwards
  whole = jnp.concatenate([early, jnp.flip(late, axis=1)], axis=1)
  return whole.reshape(x.shape[0], -1, *x.shape[2:])
