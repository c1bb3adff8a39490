"""Checks of arguments that `diff_attention` and `decode_attention` share.

Each error message begins with the name of the argument.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

ARRAYS = (jax.Array, np.ndarray, np.generic)


def describe(x: Any) -> str:
  """Returns a short description of an argument, for an error message."""
  if isinstance(x, ARRAYS):
    return f"{x.dtype} of shape {x.shape}"
  return repr(x)


def is_integer(x: Any) -> bool:
  """Returns True for an int or a NumPy integer, but not for a bool."""
  return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_real(x: Any) -> bool:
  """Returns True for an int, a float or a NumPy number, not for a bool."""
  return isinstance(x, numbers.Real) and not isinstance(x, bool)


def check_arrays(
  q: Any,
  k: Any,
  v: Any,
  layouts: tuple[str, str, str],
  stored: DTypeLike | None = None,
) -> None:
  """Checks that q, k and v are arrays with the axes and dtypes they must have.

  Args:
    q: queries.
    k: keys.
    v: values.
    layouts: the axes of q, k and v, for example "B T Q G D".
    stored: the dtype of k and v if they are quantized, such as int8. None if
      it must be q's.

  Raises:
    ValueError: if one of them has other axes, an axis of size 0, or another
      dtype. Without `stored`, all must have the same floating dtype.
  """
  for name, array, layout in zip("qkv", (q, k, v), layouts, strict=True):
    axes = layout.split()
    if not isinstance(array, ARRAYS) or array.ndim != len(axes):
      raise ValueError(
        f"{name} must be an array [{', '.join(axes)}]; got {describe(array)}"
      )
    if 0 in array.shape:
      raise ValueError(
        f"{name} must have no axis of size 0; got shape {array.shape}"
      )

    is_quantized = name != "q" and stored is not None
    if is_quantized:
      if array.dtype != stored:
        raise ValueError(
          f"{name} must be {jnp.dtype(stored)}, as k is; got {array.dtype}"
        )
    elif not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(
        f"{name} must have a floating dtype; got {array.dtype}; cast it"
      )
    elif array.dtype != q.dtype:
      raise ValueError(
        f"{name} must have q's dtype {q.dtype}; got {array.dtype}; cast it"
      )


def check_heads(groups: int, kv_heads: int) -> None:
  """Raises ValueError if query groups cannot share the key heads evenly."""
  if groups % kv_heads != 0:
    raise ValueError(
      f"k must have a number of heads K that divides q's Q = {groups};"
      f" got K = {kv_heads}"
    )


def count_heads(q: Float[Array, "*tokens Q G D"]) -> int:
  """Returns H, the number of heads: one for each map that is no noise map."""
  num_groups, num_maps = q.shape[-3:-1]
  if num_maps == 1:
    return num_groups
  return num_groups * (num_maps - 1)


def variant_name(maps: int, key_maps: int) -> str:
  """Returns the variant's name, which is part of the names of kernels.

  Args:
    maps: G.
    key_maps: M.
  """
  if maps == 1:
    return "plain"
  if key_maps == 1:
    return "v2"
  return "v1"


def repeat_noise_maps(
  q: Float[Array, "*tokens Q G D"],
) -> Float[Array, "*tokens H maps D"]:
  """Returns queries in which each signal map has its own noise map.

  A query group has signal maps, and then a noise map that they share. Groups of
  more than two maps become pairs of a signal map and a copy of the noise map.
  Groups of one or two maps are returned unchanged.

  Example:
    maps [a, b, noise] of a group → [[a, noise], [b, noise]]
  """
  *tokens, num_groups, num_maps, width = q.shape
  if num_maps <= 2:
    return q
  noise_map = q[..., -1:, :]  # [*tokens, Q, 1, D]
  noise_maps = jnp.broadcast_to(
    noise_map, (*tokens, num_groups, num_maps - 1, width)
  )
  signal_maps = q[..., :-1, :]  # [*tokens, Q, G - 1, D]
  pairs = jnp.stack([signal_maps, noise_maps], axis=-2)
  return pairs.reshape(*tokens, count_heads(q), 2, width)


def check_window(window: Any) -> int | None:
  """Returns the window as an int, or None for all keys.

  Raises:
    ValueError: if it is neither None nor an integer of at least 1.
  """
  if window is None:
    return None
  if not is_integer(window) or window < 1:
    raise ValueError(
      "window must be None or an int ≥ 1, the number of keys that a query sees,"
      f" including its own; got {window!r}"
    )
  return int(window)


def check_scale(scale: Any, width: int) -> float:
  """Returns the factor on q·k, which is 1/√D by default.

  Args:
    scale: the factor, or None.
    width: D.

  Raises:
    ValueError: if it is neither None nor a finite number.
  """
  if scale is None:
    return width**-0.5
  if not is_real(scale) or not math.isfinite(scale):
    raise ValueError(
      f"scale must be None (1/√D) or a finite number; got {scale!r}"
    )
  return float(scale)


def broadcast_lambda(
  lam: Any, q: Float[Array, "*tokens Q G D"]
) -> Float[Array, "*tokens H"] | None:
  """Returns λ for each token and head, or None if q has one map.

  Its dtype is float32, or float64 if q is float64. λ is broadcast outside of
  the custom VJP and of `shard_map`, so autodiff sums its gradient to the shape
  that the caller passed.

  Args:
    lam: a number, or an array of shape [], [H] or [*tokens, H].
    q: queries.

  Raises:
    ValueError: if λ has another shape or is not a number, or if it is missing
      or not needed.
  """
  num_maps = q.shape[-2]
  maps_axis = q.ndim - 2  # named in the error messages
  if num_maps == 1:
    if lam is None:
      return None
    raise ValueError(
      f"lam must be None with one map (q's axis {maps_axis} is 1);"
      f" got {describe(lam)}"
    )

  num_heads = count_heads(q)
  shape = (*q.shape[:-3], num_heads)  # [*tokens, H]
  is_valid_array = False
  if isinstance(lam, ARRAYS):
    is_floating = jnp.issubdtype(lam.dtype, jnp.floating)
    has_valid_shape = lam.shape in ((), (num_heads,), shape)
    is_valid_array = is_floating and has_valid_shape
  if not is_real(lam) and not is_valid_array:
    raise ValueError(
      f"lam must be a float, or floats of shape [{num_heads}] or"
      f" {list(shape)}, with several maps (q's axis {maps_axis} is {num_maps});"
      f" got {describe(lam)}"
    )
  dtype = jnp.promote_types(jnp.float32, q.dtype)
  lam = jnp.asarray(lam).astype(dtype)
  return jnp.broadcast_to(lam, shape)
