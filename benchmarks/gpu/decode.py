"""Times decoding: one token of a batch of rows with long caches, and the bytes that the rows see over that time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import clock, inputs

SETS = 3


def prepare(case: dict[str, Any]) -> Callable[[], dict[str, Any]]:
  given = lambda: inputs.decoding(case)
  compiled = (
    jax.jit(inputs.decoder(case["name"]))
    .lower(*jax.eval_shape(given))
    .compile()
  )

  def run() -> dict[str, Any]:
    sets = [given() for _ in range(SETS)]
    _, k, v, *_ = sets[0]
    seen = (
      statistics.median(int(jnp.sum(x[-1])) for x in sets)
      * k.shape[1]
      * (k.shape[3] + v.shape[3])
      * k.dtype.itemsize
    )
    taken, how, _ = clock.milliseconds(compiled, sets)
    return {
      "ms": float(f"{taken:.5g}"),
      "clock": how,
      "gigabytes_per_second": round(seen / taken / 1e6),
    }

  return run
