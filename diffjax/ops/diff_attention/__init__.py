"""Differential attention: one operation, several implementations that agree; and its twin for one new token against a cache.

The import needs jax, numpy and jaxtyping alone and starts no backend. An implementation's module, with Pallas where it needs that, is
imported when it is first asked for.
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
