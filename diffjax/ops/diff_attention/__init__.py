"""Differential attention: one operation with several implementations.

`diff_attention` is for whole sequences. `decode_attention` is for the newest
tokens and a cache. The import needs only jax, numpy and jaxtyping, and starts
no backend. The module of an implementation, and Pallas if it needs that, are
imported when the implementation is first used.
"""

from diffjax.ops.diff_attention.api import diff_attention
from diffjax.ops.diff_attention.decode import decode_attention
from diffjax.ops.diff_attention.implementations import register
from diffjax.ops.diff_attention.sharded import balanced_order
from diffjax.ops.diff_attention.vjp import (
  RESIDUAL_NAMES,
  Arrays,
  Implementation,
  Options,
  PartialImplementation,
  PartialResult,
  Saved,
)

__all__ = [
  "RESIDUAL_NAMES",
  "Arrays",
  "Implementation",
  "Options",
  "PartialImplementation",
  "PartialResult",
  "Saved",
  "balanced_order",
  "decode_attention",
  "diff_attention",
  "register",
]
