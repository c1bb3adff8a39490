"""Inputs of attention and of decoding by a case's sizes, new random ones at every call."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffjax.ops.diff_attention import decode_attention

MAPS = {"v1": (2, 2, 2), "v2": (2, 1, 1), "plain": (1, 1, 1)}  # G, M and V/D

Case = dict[str, Any]


def attention(case: Case) -> tuple[jax.Array, ...]:
  """q, k, v and, but for plain attention, λ."""
  (G, M, wide), D, B, T, H = (
    MAPS[case["kind"]],
    case["D"],
    case["B"],
    case["T"],
    case["H"],
  )
  S, K, dtype = (
    case.get("S", T),
    H // case.get("groups", 1),
    case.get("dtype", "bfloat16"),
  )
  rng = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
  normal = lambda key, *shape: jax.random.normal(key, shape, dtype)
  arrays = (
    normal(rng[0], B, T, H, G, D),
    normal(rng[1], B, S, K, M, D),
    normal(rng[2], B, S, K, case.get("V", wide * D)),
  )
  return (
    arrays
    if G == 1
    else (
      *arrays,
      jax.random.uniform(rng[3], (B, T, H), jnp.float32, -0.5, 1.0),
    )
  )


def gradient(arrays: tuple[jax.Array, ...]) -> jax.Array:
  """A gradient of the output, for `with_gradients`."""
  q, _, v = arrays[:3]
  return jax.random.normal(
    jax.random.key(time.time_ns() % 2**31), (*q.shape[:3], v.shape[-1])
  ).astype(q.dtype)


def segments(case: Case) -> jax.Array:
  """Ids of rows that are packed with up to five documents."""
  return jnp.asarray(
    np.sort(
      np.random.default_rng().integers(0, 5, (case["B"], case["T"])), axis=1
    ),
    jnp.int32,
  )


def with_gradients(function):
  """Output and gradients of all arguments, for a gradient of the output that is given first."""

  def both(d_out, *arguments):
    out, pull = jax.vjp(function, *arguments)
    return out, *pull(d_out)

  return both


def decoding(case: Case) -> tuple[jax.Array, ...]:
  """q, k, v, but for plain attention λ, and lengths of one new token a row, whose caches are at least three quarters full."""
  B, S = case["B"], case["S"]
  q, k, v, *lam = attention({**case, "T": 1})
  lengths = jnp.asarray(
    np.random.default_rng().integers(S * 3 // 4, S + 1, B), jnp.int32
  )
  cached = lambda x: jnp.moveaxis(x, 1, 2).reshape(B, x.shape[2], S, -1)
  return q[:, 0], cached(k), cached(v), *(x[:, 0] for x in lam), lengths


def decoder(implementation: str):
  """`decode_attention` of arrays alone."""

  def attend(q, k, v, *rest):
    lam, lengths = rest if len(rest) == 2 else (None, *rest)
    return decode_attention(
      q, k, v, lam, lengths, implementation=implementation
    )

  return attend
