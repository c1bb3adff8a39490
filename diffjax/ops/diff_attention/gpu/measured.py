"""The implementation that was measured to be the fastest, by GPU and shape.

`auto` reads the table measured.json, which `python -m benchmarks.gpu` writes
from times of forward plus backward passes. For each kind of device, the table
has entries by kind of attention, D, packed rows and T. All entries are causal
self-attention. Other shapes have no measured choice.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax

from diffjax.ops.diff_attention.mask import Mask

# The table. It does not exist before anything is measured.
TABLE = pathlib.Path(__file__).with_name("measured.json")
# The kinds of attention by (G, M, V/D).
KINDS = {(2, 2, 2): "v1", (2, 1, 1): "v2", (1, 1, 1): "plain"}
# The measured D. The kernels pad other widths to the next one.
BUCKETS = (64, 128)


def fastest(
  device_kind: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask
) -> str | None:
  """Returns the fastest implementation by measurement, or None without one.

  The table has measurements of some lengths T. The result is the choice for the
  longest one that is not longer than this length, because a kernel that is
  faster at one length is also faster at longer ones.

  Args:
    device_kind: the kind of GPU, as JAX names it.
    q: queries [B, T, Q, G, D].
    k: keys [B, S, K, M, D].
    v: values [B, S, K, V].
    mask: the mask.
  """
  num_maps, head_dim = q.shape[3:]
  num_key_maps = k.shape[3]
  value_dim = v.shape[-1]
  width = bucket(head_dim)
  if width is None or value_dim % head_dim != 0:
    return None
  kind = KINDS.get((num_maps, num_key_maps, value_dim // head_dim))
  if kind is None or not _is_causal_self_attention(mask):
    return None

  # The entry with the longest T, of those for the same kind of attention.
  longest: dict[str, Any] | None = None
  for entry in table().get(device_kind, ()):
    is_same_kind = entry["kind"] == kind and entry["D"] == width
    if not is_same_kind or entry["packed"] != mask.segments:
      continue
    if entry["T"] > mask.q_length:
      continue
    if longest is None or entry["T"] > longest["T"]:
      longest = entry
  if longest is None:
    return None
  return longest["implementation"]


def _is_causal_self_attention(mask: Mask) -> bool:
  return (
    mask.causal
    and mask.window is None
    and mask.offset == 0
    and mask.q_length == mask.kv_length
  )


def bucket(head_dim: int) -> int | None:
  """Returns the measured D that stands for a D, or None if D is too large."""
  for width in BUCKETS:
    if head_dim <= width:
      return width
  return None


@functools.cache
def table() -> dict[str, list[dict[str, Any]]]:
  """Returns the table's entries by kind of device. Empty without a table.

  An entry has kind, D, packed, T and implementation.
  """
  if not TABLE.exists():
    return {}
  return json.loads(TABLE.read_text(encoding="utf-8"))
