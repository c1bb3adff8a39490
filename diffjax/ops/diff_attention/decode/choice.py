"""Chooses the implementation of `decode_attention` for "auto", and logs it."""

from __future__ import annotations

import functools
import logging

import jax


def choose(backend: str, q: jax.Array, v: jax.Array) -> str:
  """Returns the name of the fastest implementation for these arrays.

  "pallas_gpu" is never chosen, because it was timed with only one shape
  (docs/performance.md).

  Args:
    backend: the platform that the program is compiled for.
    q: queries [B, T, H, G, D].
    v: cached values [P, K, S, V].
  """
  implementation = "xla"
  if backend == "tpu":
    # Imported here because importing Pallas is slow.
    from diffjax.ops.diff_attention.tpu import chip

    if chip.takes(q, v):
      implementation = "pallas_tpu"
  log_once(implementation, backend)
  return implementation


@functools.cache
def log_once(implementation: str, backend: str) -> None:
  """Logs a choice, unless the same one was logged before."""
  logging.getLogger(__name__).info(
    "decode_attention: implementation %r on backend %r", implementation, backend
  )
