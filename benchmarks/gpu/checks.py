"""A kernel against `reference` in float32, on fresh random inputs: output and all gradients; or decoding.

An error is the norm of the difference over the norm of what is right. Where the right gradient cancels to nothing, as dQ and dK do for a
query that sees one key, rounding of what cancels remains: the divisor is at least the size of what cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import inputs
from diffjax.ops.diff_attention import diff_attention

TOLERANCE = {
  "bfloat16": 1e-2,
  "float16": 2e-3,
}  # bfloat16 weights and outputs are 2⁻⁹ apart
NAMES = ("out", "d_q", "d_k", "d_v", "d_lam")
OPTIONS = ("causal", "window", "scale", "q_offset")


def prepare(case: dict[str, Any]) -> Callable[[], dict[str, Any]]:
  """Compiles the kernel and the reference."""
  (ours, given), (theirs, exact) = programs(case)
  # On the CPU, because a GPU's compiler tries dozens of kernels for every product in float32: a minute a check, with 15 of them at once.
  cpu = jax.devices("cpu")[0]
  with jax.default_device(cpu):
    exact = jax.device_put(exact, cpu)
    theirs = jax.jit(theirs).lower(*exact).compile()
  ours = jax.jit(ours).lower(*given).compile()

  def run() -> dict[str, Any]:
    made = lambda program, x: jax.device_get(
      jax.tree.leaves(program(*x))
    )  # waits, so that an error is the kernel's own
    actual, again, expected = (
      made(ours, given),
      made(ours, given),
      made(theirs, exact),
    )
    errors = relative_errors(
      actual, expected, [0.0] if case.get("decode") else floors(*given[:4])
    )
    # The kernels add in a fixed order: an output that moves is a race
    moves = not all(
      a.tobytes() == b.tobytes() for a, b in zip(actual, again, strict=True)
    )
    return {
      "right": not moves
      and all(
        error <= TOLERANCE[case.get("dtype", "bfloat16")] for error in errors
      ),  # False where NaN
      "errors": dict(
        zip(NAMES, (float(f"{error:.2e}") for error in errors), strict=False)
      ),
      **({"moves": True} if moves else {}),
    }

  return run


def programs(case: dict[str, Any]):
  """The kernel's function and its arguments, and the reference's."""
  if case.get("decode"):
    given = inputs.decoding(case)
    ours, theirs = inputs.decoder("pallas_gpu"), inputs.decoder("xla")
    exact = (*(x.astype(jnp.float32) for x in given[:-1]), given[-1])
  else:
    arrays = inputs.attention(case)
    options = {name: case[name] for name in OPTIONS if name in case}
    if isinstance(options.get("q_offset"), list):
      options["q_offset"] = jnp.asarray(options["q_offset"], jnp.int32)
    if case.get("segments"):
      options["q_segment_ids"] = inputs.segments(case)
    of = lambda name: inputs.with_gradients(
      lambda *a: diff_attention(*a, **options, implementation=name)
    )
    given = inputs.gradient(arrays), *arrays
    ours, theirs = of("pallas_gpu"), of("reference")
    exact = tuple(x.astype(jnp.float32) for x in given)
  return (ours, given), (exactly(theirs), exact)


def exactly(function):
  """The function with products in float32, none in TF32. The setting belongs to a thread, so it is made where the function is traced."""

  def traced(*arguments):
    with jax.default_matmul_precision("highest"):
      return function(*arguments)

  return traced


def floors(
  d_out: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> list[float]:
  """The least divisor of each error, of the output and the gradients.

  dQ is a sum over keys of weight·(dO·v − dO·out)·k·scale. With weights of 1/S its two halves have norms of about ‖dO‖·rms(v)·rms(k)/√S
  each, and their difference is of that size too, unless it cancels. So for dK, with rms(q).
  """
  size = lambda x: norm(x) / math.sqrt(x.size)
  halves = norm(d_out) * size(v) / math.sqrt(k.shape[1])
  return [1e-3, halves * size(k), halves * size(q), 1e-3, 1e-3]


def relative_errors(actual, expected, floors) -> list[float]:
  """The norm of each difference over the norm of what is expected, or over the floor if that is more."""
  difference = lambda a, e: norm(
    np.asarray(a, np.float64) - np.asarray(e, np.float64)
  )
  return [
    difference(a, e) / max(norm(e), floor, 1e-30)
    for a, e, floor in zip(actual, expected, floors, strict=False)
  ]


def norm(x: jax.Array | np.ndarray) -> float:
  return float(np.linalg.norm(np.ravel(np.asarray(x, np.float64))))
