"""The implementation that was measured to be the fastest, by GPU and shape: measured.json, where there is one.

`python -m benchmarks.gpu` writes such a table, from times of forward + backward; what is committed here, `auto` takes. The table holds
causal self-attention, by the kind of device, then by kind, D, packed rows and T. A shape that it does not hold has no measured choice.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax

from diffjax.ops.diff_attention.mask import Mask

TABLE = pathlib.Path(__file__).with_name("measured.json")
KINDS = {
  (2, 2, 2): "v1",
  (2, 1, 1): "v2",
  (1, 1, 1): "plain",
}  # by G, M and V/D
BUCKETS = (
  64,
  128,
)  # widths of queries that were measured; the kernels pad others to the next one


def fastest(
  device_kind: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask
) -> str | None:
  """The measured choice: of the longest measured length up to this one, since a kernel gains with length. None if there is none."""
  G, D = q.shape[3:]
  kind = (
    KINDS.get((G, k.shape[3], v.shape[-1] // D))
    if v.shape[-1] % D == 0
    else None
  )
  plain = (
    mask.causal
    and mask.window is None
    and mask.offset == 0
    and mask.q_length == mask.kv_length
  )
  if kind is None or not plain or (width := bucket(D)) is None:
    return None
  wanted = (kind, width, mask.segments)
  entries = [
    x
    for x in table().get(device_kind, ())
    if (x["kind"], x["D"], x["packed"]) == wanted and x["T"] <= mask.q_length
  ]
  return (
    max(entries, key=lambda x: x["T"])["implementation"] if entries else None
  )


def bucket(D: int) -> int | None:
  """The measured width that stands for D; None beyond the last one."""
  return next((width for width in BUCKETS if D <= width), None)


@functools.cache
def table() -> dict[str, list[dict[str, Any]]]:
  """Entries of kind, D, packed, T and implementation, by the kind of device. Empty before anything was measured."""
  return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
