"""Block sizes of the TPU kernels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Blocks:
  q: int
  kv: int
  q_inner: int
  kv_inner: int
  resident: int = 8192


VMEM_BYTES = {"v4": 16 << 20, "v5e": 100 << 20, "v5p": 60 << 20, "v6e": 100 << 20, "7x": 60 << 20}
OVERRIDE = {}


def choose(generation, direction, q_length, kv_length, D, V, G, dtype):
  if direction in OVERRIDE:
    return OVERRIDE[direction]
  up = lambda x: -(-x // 128) * 128
  b = min(1024, up(q_length))
  c = min(1024, up(kv_length))
  inner = lambda n: next(x for x in (512, 256, 128) if n % x == 0)
  return Blocks(b, c, inner(b), inner(c))
