"""Checks of the arguments that describe the cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from diffjax.ops.diff_attention.arguments import (
  ARRAYS,
  check_arrays,
  check_heads,
  describe,
)


def check_cache(
  q: Any, k: Any, v: Any, block_tables: Any, k_scale: Any, v_scale: Any
) -> None:
  """Checks the queries and the cache of `decode_attention`. Changes nothing.

  Raises:
    ValueError: if an argument has a wrong type, dtype or shape.
  """
  # With one new token per sequence, q may lack the axis T of tokens. A cache
  # with block tables is a pool of P pages.
  query_axes = "B Q G D"
  if getattr(q, "ndim", None) == 5:
    query_axes = "B T Q G D"
  cache_axes = "B K S"
  if block_tables is not None:
    cache_axes = "P K S"
  is_quantised = getattr(k, "dtype", None) == jnp.int8
  cache_dtype = None  # must equal q's dtype
  if is_quantised:
    cache_dtype = jnp.int8
  layouts = (query_axes, f"{cache_axes} M·D", f"{cache_axes} V")
  check_arrays(q, k, v, layouts, stored=cache_dtype)

  batch = q.shape[0]
  num_groups, num_maps, width = q.shape[-3:]
  if block_tables is None and k.shape[0] != batch:
    raise ValueError(
      f"k must share B = {batch} with q; got shape {k.shape}:"
      " pass block_tables if it is in pages"
    )
  check_heads(num_groups, k.shape[1])
  _check_key_width(k, num_maps, width)
  if v.shape[:3] != k.shape[:3]:
    axes_in_text = cache_axes.replace(" ", ", ")
    raise ValueError(
      f"v must share [{axes_in_text}] = {k.shape[:3]} with k;"
      f" got shape {v.shape}"
    )

  if block_tables is not None:
    _check_block_tables(block_tables, batch)
  for cache_name, scales in (("k", k_scale), ("v", v_scale)):
    if is_quantised:
      _check_scales(cache_name, scales, k.shape[:2])
    elif scales is not None:
      raise ValueError(
        f"{cache_name}_scale must be None, since {cache_name} is {k.dtype}:"
        f" only int8 has scales; got {describe(scales)}"
      )


def check_lengths(lengths: Any, batch: int) -> None:
  """Raises ValueError if `lengths` is not an integer for each sequence."""
  is_valid = (
    isinstance(lengths, ARRAYS)
    and lengths.shape == (batch,)
    and jnp.issubdtype(lengths.dtype, jnp.integer)
  )
  if not is_valid:
    raise ValueError(
      f"lengths must be int32[{batch}], the tokens of each sequence;"
      f" got {describe(lengths)}"
    )


def _check_key_width(k: Any, num_maps: int, width: int) -> None:
  """Raises ValueError unless k has keys for one map or for both.

  Args:
    k: the cached keys [P, K, S, M·D].
    num_maps: G, the maps of a query group. 1 in plain attention.
    width: D, the width of a query.
  """
  if num_maps == 1:
    widths = [width]
    expected = f"D = {width}"
  else:
    widths = [width, 2 * width]
    expected = (
      f"D = {width} (keys shared by the maps) or 2·D (keys of the signal maps,"
      " then keys of the noise map)"
    )
  if k.shape[3] not in widths:
    raise ValueError(
      f"k must have {expected} in its last axis; got shape {k.shape}"
    )


def _check_block_tables(block_tables: Any, batch: int) -> None:
  """Raises ValueError unless the tables are integers [B, N] with N ≥ 1."""
  is_valid = (
    isinstance(block_tables, ARRAYS)
    and jnp.issubdtype(block_tables.dtype, jnp.integer)
    and block_tables.ndim == 2
    and block_tables.shape[0] == batch
    and block_tables.size > 0
  )
  if not is_valid:
    raise ValueError(
      f"block_tables must be int32[{batch}, N], the page ids of each sequence"
      " in order, or None for a cache without pages; got"
      f" {describe(block_tables)}"
    )


def _check_scales(
  cache_name: str, scales: Any, expected_shape: tuple[int, int]
) -> None:
  """Raises ValueError unless there is a factor for each page and head.

  Args:
    cache_name: "k" or "v", for the message.
    scales: the factors of the int8 cache, k_scale or v_scale.
    expected_shape: (P, K), the numbers of pages and of key heads.
  """
  is_valid = (
    isinstance(scales, ARRAYS)
    and scales.dtype == jnp.float32
    and scales.shape == expected_shape
  )
  if not is_valid:
    raise ValueError(
      f"{cache_name}_scale must be float32{list(expected_shape)}, a factor for"
      f" each page and head, since {cache_name} is int8; got {describe(scales)}"
    )
