"""Times attention, decoding and training steps.

The implementations of attention are:

- fused: the Pallas kernels of this project.
- two_call, chunked: the other implementations of this project.
- cudnn: one cuDNN call for each map.
- cudnn halved: the same, with the values split into two halves. Then the
  values of V1 are as wide as its keys, and nothing is padded.
- tokamax: one call of tokamax's Hopper kernel for each map, if installed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import import_tokamax
from benchmarks.gpu import inputs
from diffjax.ops.diff_attention import decode_attention, diff_attention
from diffjax.ops.diff_attention.two_call import stock_attention

# The implementations of this project: names in tables -> names in diffjax.
OURS = {"fused": "pallas_gpu", "two_call": "two_call", "chunked": "chunked"}
STOCK = ("cudnn", "cudnn halved", "tokamax")
IMPLEMENTATIONS = (*OURS, *STOCK)

# The least time of a sample, which is a number of calls in a row. The time to
# start a program does not matter then, because calls are queued on the GPU.
SAMPLE_SECONDS = 0.05
MAX_CALLS = 100

# Nominal multiply-adds of a head for each pair of a query and a key that it
# sees, as multiples of D: forward and backward. The forward pass has QKᵀ and a
# product with V for each map. The backward pass computes QKᵀ again, then dQ and
# dK of each map, and dO·Vᵀ and dV, which the maps share. V is 2D wide in V1.
MULTIPLY_ADDS = {"v1": (6, 10), "v2": (4, 8), "plain": (2, 5)}

Row = dict[str, Any]


def median_milliseconds(
  programs: Mapping[str, Callable[[], Any]], repetitions: int
) -> dict[str, float]:
  """Returns the median time of a call of each program.

  The programs take turns, so that changes of the clock rates affect all of them
  alike.

  Args:
    programs: functions without arguments that return arrays.
    repetitions: the number of samples of each program.
  """
  num_calls = {}
  for name, program in programs.items():
    # The first call may include compilation.
    _seconds_per_call(program, 1)
    seconds = _seconds_per_call(program, 1)
    num_calls[name] = min(int(SAMPLE_SECONDS / seconds) + 1, MAX_CALLS)

  samples: dict[str, list[float]] = {name: [] for name in programs}
  for _ in range(repetitions):
    for name, program in programs.items():
      seconds = _seconds_per_call(program, num_calls[name])
      samples[name].append(1e3 * seconds)

  medians = {}
  for name, times in samples.items():
    # Five digits are written to files.
    medians[name] = float(f"{statistics.median(times):.5g}")
  return medians


def _seconds_per_call(program: Callable[[], Any], num_calls: int) -> float:
  """Returns the mean time of several calls in a row."""
  start = time.perf_counter()
  for _ in range(num_calls):
    outputs = program()
  # The device runs the calls in order, so the last one ends last.
  jax.block_until_ready(outputs)
  return (time.perf_counter() - start) / num_calls


def time_attention(case: inputs.Case, repetitions: int) -> list[Row]:
  """Times the forward pass, and the forward and backward pass together.

  Args:
    case: the shape.
    repetitions: the number of samples of each implementation.

  Returns:
    A row for each implementation. It has `forward_ms` and `both_ms`, or `error`
    if the implementation cannot run here.
  """
  gradient = inputs.output_gradient(inputs.arguments(case))
  errors: dict[str, str] = {}
  forward: dict[str, Callable[[], Any]] = {}
  forward_backward: dict[str, Callable[[], Any]] = {}
  for name in implementations(case):
    try:
      attend, arrays = attention_program(case, name)
      backward = inputs.with_gradients(attend)
      forward_program = jax.jit(attend).lower(*arrays).compile()
      backward_program = jax.jit(backward).lower(gradient, *arrays).compile()
      # Some errors, such as a lack of memory, only appear in a run.
      jax.block_until_ready(backward_program(gradient, *arrays))
    except Exception as error:  # Other implementations may still run.
      errors[name] = first_line(error)
      continue
    forward[name] = functools.partial(forward_program, *arrays)
    forward_backward[name] = functools.partial(
      backward_program, gradient, *arrays
    )

  # All implementations take turns.
  forward_ms = median_milliseconds(forward, repetitions)
  both_ms = median_milliseconds(forward_backward, repetitions)
  rows = []
  for name in implementations(case):
    row: Row = {
      "case": {"do": "attention", **inputs.to_json(case), "name": name}
    }
    if name in errors:
      row["error"] = errors[name]
    else:
      row["forward_ms"] = forward_ms[name]
      row["both_ms"] = both_ms[name]
      row |= nominal_tflops(case, forward_ms[name], both_ms[name])
    rows.append(row)
  return rows


def implementations(case: inputs.Case) -> list[str]:
  """Returns the names of the implementations that differ for a case.

  With plain attention, two_call is one cuDNN call. With packed rows, cuDNN
  needs the mask that two_call makes.
  """
  names = [*OURS]
  if case.kind != "plain" and not case.packed:
    names.append("cudnn")
  if case.kind == "v1" and not case.packed:
    names.append("cudnn halved")
  names.append("tokamax")
  return names


def attention_program(
  case: inputs.Case, name: str
) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
  """Returns an implementation of attention, and random arguments for it.

  An implementation for a single map gets the two maps as separate arrays.

  Args:
    case: the shape.
    name: the name of the implementation.

  Raises:
    ValueError: if the implementation cannot run here.
  """
  arrays = inputs.arguments(case)
  ids = inputs.segment_ids(case) if case.packed else None
  if name in OURS:
    attend = functools.partial(
      diff_attention, q_segment_ids=ids, implementation=OURS[name]
    )
    return attend, arrays

  scale = case.D**-0.5
  if name == "tokamax":
    problem = import_tokamax()
    if problem is not None:
      raise ValueError(problem)
    one_map = functools.partial(_tokamax, ids=ids, scale=scale)
  else:
    parts = 2 if name == "cudnn halved" else 1
    one_map = functools.partial(
      stock_attention, causal=True, scale=scale, parts=parts
    )
  # The maps are separate arrays, so that no time is spent on slices. V2 has one
  # key for both maps.
  q, k, v, *lam = arrays
  if case.kind == "plain":
    return one_map, (q[:, :, :, 0], k[:, :, :, 0], v)

  def two_maps(
    q1: jax.Array,
    q2: jax.Array,
    k1: jax.Array,
    k2: jax.Array,
    v: jax.Array,
    lam: jax.Array,
  ) -> jax.Array:
    noise = lam[..., None] * one_map(q2, k2, v)
    return (one_map(q1, k1, v) - noise).astype(v.dtype)

  q1 = q[:, :, :, 0]
  q2 = q[:, :, :, 1]
  k1 = k[:, :, :, 0]
  k2 = k[:, :, :, -1]
  return two_maps, (q1, q2, k1, k2, v, *lam)


def _tokamax(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  ids: jax.Array | None,
  scale: float,
) -> jax.Array:
  """Returns causal attention with one map, computed by tokamax."""
  import tokamax

  mask = None
  if ids is not None:
    mask = ids[:, None, :, None] == ids[:, None, None, :]
  return tokamax.dot_product_attention(
    q, k, v, mask=mask, scale=scale, is_causal=True, implementation="mosaic_gpu"
  )


def nominal_tflops(
  case: inputs.Case, forward_ms: float, both_ms: float
) -> dict[str, float]:
  """Returns the nominal TFLOP/s of both passes.

  Nothing is returned for packed rows, where the number of visible keys depends
  on the data.
  """
  if case.packed or both_ms <= forward_ms:
    return {}
  pairs = case.B * case.H * case.T * (case.T + 1) / 2
  forward_products, backward_products = MULTIPLY_ADDS[case.kind]
  # A multiply-add is two FLOPs.
  teraflops_per_product = 2 * case.D * pairs / 1e12
  forward = forward_products * teraflops_per_product / (forward_ms / 1e3)
  backward_seconds = (both_ms - forward_ms) / 1e3
  backward = backward_products * teraflops_per_product / backward_seconds
  return {
    "forward_tflops": round(forward, 1),
    "backward_tflops": round(backward, 1),
  }


def time_decoding(case: inputs.DecodeCase, repetitions: int) -> list[Row]:
  """Times `decode_attention` with the kernel and with XLA.

  Args:
    case: the shape.
    repetitions: the number of samples of each implementation.

  Returns:
    A row for each implementation. It has `ms` and the bytes of the visible keys
    and values over this time, or `error`.
  """
  arguments = inputs.decode_arguments(case)
  _, k_cache, v_cache, _, lengths = arguments
  row_width = k_cache.shape[-1] + v_cache.shape[-1]
  bytes_per_key = case.H * row_width * k_cache.dtype.itemsize
  num_bytes = int(jnp.sum(lengths)) * bytes_per_key

  errors: dict[str, str] = {}
  programs: dict[str, Callable[[], Any]] = {}
  names = ("pallas_gpu", "xla")
  for name in names:
    decode = functools.partial(decode_attention, implementation=name)
    try:
      compiled = jax.jit(decode).lower(*arguments).compile()
      jax.block_until_ready(compiled(*arguments))
    except Exception as error:  # The other implementation may still run.
      errors[name] = first_line(error)
      continue
    programs[name] = functools.partial(compiled, *arguments)

  times = median_milliseconds(programs, repetitions)
  rows = []
  for name in names:
    row: Row = {"case": {"do": "decode", **inputs.to_json(case), "name": name}}
    if name in errors:
      row["error"] = errors[name]
    else:
      row["ms"] = times[name]
      row["gigabytes_per_second"] = round(num_bytes / times[name] / 1e6)
    rows.append(row)
  return rows


def first_line(error: Exception) -> str:
  """Returns the first line of an error's message."""
  lines = str(error).splitlines() or [repr(error)]
  return lines[0][:200]
