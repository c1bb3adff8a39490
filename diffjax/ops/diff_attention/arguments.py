"""Checks of arguments that `diff_attention` and `decode_attention` share."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

ARRAYS = (jax.Array, np.ndarray, np.generic)


def describe(x: Any) -> str:
  """An argument as error messages show it."""
  return f"{x.dtype} of shape {x.shape}" if isinstance(x, ARRAYS) else repr(x)


def check_arrays(
  q: Any, k: Any, v: Any, layouts: tuple[str, str, str], stored: Any = None
) -> None:
  """Refuses q, k and v unless they are arrays of one floating dtype, with the axes of `layouts` ("B T Q G D") and none of size 0.

  Keys and values may be of another dtype, `stored`, both of them.

  Raises:
    ValueError: an argument is unusable; the message begins with its name, as everywhere in this file.
  """
  for name, array, layout in zip("qkv", (q, k, v), layouts, strict=True):
    if not isinstance(array, ARRAYS) or array.ndim != len(layout.split()):
      raise ValueError(
        f"{name} must be an array [{layout.replace(' ', ', ')}], got {describe(array)}"
      )
    if stored is not None and name != "q":
      if array.dtype != stored:
        raise ValueError(
          f"{name} must be {jnp.dtype(stored)}, as k is, got {array.dtype}"
        )
    elif (
      not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype != q.dtype
    ):
      raise ValueError(
        f"{name} must be floating point and of q's dtype {q.dtype}, got {array.dtype}; cast it"
      )
    if 0 in array.shape:
      raise ValueError(
        f"{name} must have no axis of size 0, got shape {array.shape}"
      )


def check_heads(groups: int, kv_heads: int) -> None:
  """Refuses key heads that groups of queries cannot share evenly."""
  if groups % kv_heads:
    raise ValueError(
      f"k has K = {kv_heads} heads, which must divide q's Q = {groups}"
    )


def count_heads(q: Float[Array, "*tokens Q G D"]) -> int:
  """H, the heads whose outputs q gives: a group's signal maps, all but the last, or its one map."""
  return q.shape[-3] * max(q.shape[-2] - 1, 1)


def variant_name(maps: int, key_maps: int) -> str:
  """What the kernels' names call an operation with G maps of queries and M of keys."""
  return "plain" if maps == 1 else "v2" if key_maps == 1 else "v1"


def repeat_noise_maps(
  q: Float[Array, "*tokens Q G D"],
) -> Float[Array, "*tokens H 2 D"]:
  """Queries of groups with the noise map repeated, so that each signal map has its own; a group of one map or two as it is."""
  *tokens, groups, maps, width = q.shape
  if maps <= 2:
    return q
  noise = jnp.broadcast_to(q[..., -1:, :], (*tokens, groups, maps - 1, width))
  return jnp.stack([q[..., :-1, :], noise], axis=-2).reshape(
    *tokens, groups * (maps - 1), 2, width
  )


def check_window(window: Any) -> int | None:
  """The window as an int, or None."""
  if window is not None and (
    not isinstance(window, numbers.Integral)
    or isinstance(window, bool)
    or window < 1
  ):
    raise ValueError(
      f"window must be None or an int ≥ 1 (keys a query sees, itself included), got {window!r}"
    )
  return None if window is None else int(window)


def check_scale(scale: Any, width: int) -> float:
  """The factor on q·k; 1/√D by default."""
  if scale is not None and (
    not isinstance(scale, numbers.Real)
    or isinstance(scale, bool)
    or not math.isfinite(scale)
  ):
    raise ValueError(
      f"scale must be None (1/√D) or a finite number, got {scale!r}"
    )
  return width**-0.5 if scale is None else float(scale)


def broadcast_lambda(
  lam: Any, q: Float[Array, "*tokens Q G D"]
) -> Float[Array, "*tokens H"] | None:
  """λ with q's leading axes and a number for each head, float32 (or q's float64); None with one map.

  It is broadcast outside of custom VJPs and of `shard_map`, so that autodiff reduces its gradient to whatever shape it had.
  """
  heads, num_maps, axis = count_heads(q), q.shape[-2], q.ndim - 2
  shape = (*q.shape[:-3], heads)
  if num_maps == 1:
    if lam is not None:
      raise ValueError(
        f"lam must be None with one map (q's axis {axis} is 1), got {describe(lam)}"
      )
    return None
  number = isinstance(lam, numbers.Real) and not isinstance(lam, bool)
  fits = (
    isinstance(lam, ARRAYS)
    and lam.shape in ((), (heads,), shape)
    and jnp.issubdtype(lam.dtype, jnp.floating)
  )
  if not number and not fits:
    wanted = f"lam must be a float, or floats of shape [{heads}] or {list(shape)}, with several maps (q's axis {axis} is {num_maps})"
    raise ValueError(f"{wanted}, got {describe(lam)}")
  return jnp.broadcast_to(
    jnp.asarray(lam).astype(jnp.promote_types(jnp.float32, q.dtype)), shape
  )
