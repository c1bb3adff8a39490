"""Differential attention: one operation with several implementations.

`diff_attention` is for whole sequences. `decode_attention` is for the newest
tokens and a cache. The import needs only jax, numpy and jaxtyping, and starts
no backend. The module of an implementation, and Pallas if it needs that, are
imported when the implementation is first used. The modules of
`decode_attention` are imported when it is first used: training does not need
them.
"""

from typing import TYPE_CHECKING, Any

from diffjax.ops.diff_attention.api import diff_attention
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

if TYPE_CHECKING:
  from diffjax.ops.diff_attention.decode import decode_attention

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


def __getattr__(name: str) -> Any:
  """Returns `decode_attention`, imported now."""
  if name != "decode_attention":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from diffjax.ops.diff_attention.decode import decode_attention

  return decode_attention
