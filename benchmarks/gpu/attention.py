"""Times attention forward, and forward + backward: the fused kernel, and what it stands against.

`two_call` and `chunked` are ours, as `auto` would take them. `cudnn` and `cudnn halved` are two cuDNN calls with V whole or in halves, each
map's arrays apart, so that nothing is sliced; `tokamax` is that with tokamax's Hopper kernel, which takes V in its own width. For plain
attention each is one call.

Rates are of nominal multiply-adds, 6D + 10D a query, visible key and head of V1, 4D + 8D of V2, 4D + 10D for the two heads of D that the
Transformer has in its place, whatever the kernels execute; the backward pass is what forward + backward take less the forward pass. Packed
rows are given no rate, since what is visible is data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import import_tokamax
from benchmarks.gpu import clock, inputs
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.two_call import stock_attention

MULTIPLY_ADDS = {
  "v1": (6, 10),
  "v2": (4, 8),
  "plain": (2, 5),
}  # in D, of one head, forward and backward
SETS = 3  # of inputs
OURS = {"fused": "pallas_gpu", "two_call": "two_call", "chunked": "chunked"}


def names(kind: str, packed: bool, every: bool) -> tuple[str, ...]:
  """The implementations that are timed for a kind of attention: every one, or those that are compared at every length."""
  compared = ("fused", "two_call", *(() if packed else ("tokamax",)))
  if not every:
    return compared
  cudnn = (
    ()
    if packed
    else {"v1": ("cudnn", "cudnn halved"), "v2": ("cudnn",), "plain": ()}[kind]
  )
  return (
    *compared,
    *(() if kind == "plain" else ("chunked",)),
    *cudnn,
    *(("tokamax",) if packed else ()),
  )


def prepare(case: dict[str, Any]) -> Callable[[], dict[str, Any]]:
  """Compiles forward, and forward + backward."""
  if case["name"] == "tokamax" and (why := import_tokamax()):
    return lambda: {"absent": why}
  given = lambda: (
    inputs.segments(case) if case["packed"] else None,
    *_given(case),
  )

  def forward(ids, _, *arrays):
    return program(case, ids)(*arrays)

  def both(ids, d_out, *arrays):
    return inputs.with_gradients(program(case, ids))(d_out, *arrays)

  shapes = jax.eval_shape(given)
  compiled = {
    function.__name__: jax.jit(function).lower(*shapes).compile()
    for function in (forward, both)
  }

  def run() -> dict[str, Any]:
    sets = [given() for _ in range(SETS)]
    row: dict[str, Any] = {}
    for direction, compiled_program in compiled.items():
      taken, row["clock"], kernels = clock.milliseconds(compiled_program, sets)
      row[f"{direction}_ms"] = float(f"{taken:.5g}")
      if direction == "both" and case["name"] == "fused":
        row["kernels_ms"] = kernels
    if not case["packed"]:
      pairs = case["B"] * case["H"] * case["T"] * (case["T"] + 1) / 2
      forward, backward = (
        2 * n * case["D"] * pairs for n in MULTIPLY_ADDS[case["kind"]]
      )
      row["forward_tflops"] = round(forward / row["forward_ms"] / 1e9, 1)
      if (less := row["both_ms"] - row["forward_ms"]) > 0:
        row["backward_tflops"] = round(backward / less / 1e9, 1)
    return row

  return run


def program(case: dict[str, Any], ids: jax.Array | None):
  """The function that is timed, of what `_given` gives but the first."""
  kind, name, scale = case["kind"], case["name"], case["D"] ** -0.5
  if name in OURS:
    return functools.partial(
      diff_attention, q_segment_ids=ids, implementation=OURS[name]
    )
  if name == "tokamax":
    one = functools.partial(_tokamax, ids=ids, scale=scale)
  else:
    one = functools.partial(
      stock_attention,
      causal=True,
      scale=scale,
      parts=2 if name == "cudnn halved" else 1,
    )
  if kind == "plain":
    return lambda q, k, v: one(q, k, v)

  def two(q1, q2, k1, k2, v, lam):
    return (one(q1, k1, v) - lam[..., None] * one(q2, k2, v)).astype(v.dtype)

  return two


def _given(case: dict[str, Any]) -> tuple[jax.Array, ...]:
  """A gradient of the output, and the arguments of `program`."""
  arrays = inputs.attention(case)
  q, k, v, *lam = arrays
  d_out = inputs.gradient(arrays)
  if case["name"] in OURS:
    return d_out, *arrays
  if case["kind"] == "plain":
    return d_out, q[:, :, :, 0], k[:, :, :, 0], v
  return (
    d_out,
    q[:, :, :, 0],
    q[:, :, :, 1],
    k[:, :, :, 0],
    k[:, :, :, -1],
    v,
    *lam,
  )


def _tokamax(q, k, v, *, ids: jax.Array | None, scale: float):
  """One map of tokamax's attention."""
  import tokamax

  mask = (
    None if ids is None else (ids[:, None, :, None] == ids[:, None, None, :])
  )
  return tokamax.dot_product_attention(
    q, k, v, mask=mask, scale=scale, is_causal=True, implementation="mosaic_gpu"
  )
