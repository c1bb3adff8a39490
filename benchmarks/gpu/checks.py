"""Compares a kernel with `reference` in float32, and with itself.

An error is the norm of the difference over the norm of the expected array. If a
query sees one key, its gradients dQ and dK are 0: they are differences of two
equal terms, and only the rounding of these terms remains. So the divisor is at
least the norm of one of the terms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import inputs
from diffjax.ops.diff_attention import decode_attention, diff_attention

# Neighbouring numbers differ by 2⁻⁸ of their size in bfloat16, and by 2⁻¹¹ in
# float16.
TOLERANCES = {"bfloat16": 1e-2, "float16": 2e-3}
NAMES = ("out", "d_q", "d_k", "d_v", "d_lam")
# A lower bound on the norm of an output, d_v or d_lam.
MIN_NORM = 1e-3

fused = functools.partial(diff_attention, implementation="pallas_gpu")
fused_decode = functools.partial(decode_attention, implementation="pallas_gpu")


@dataclasses.dataclass(frozen=True)
class Check:
  """The result of a check.

  Attributes:
    errors: the relative error of each array.
    tolerance: the largest error of a correct kernel.
    is_deterministic: whether a second run has given the same bits.
  """

  errors: dict[str, float]
  tolerance: float
  is_deterministic: bool

  @property
  def is_right(self) -> bool:
    """Whether all errors are small and the bits are the same."""
    # This is False if an error is NaN.
    is_close = all(error <= self.tolerance for error in self.errors.values())
    return is_close and self.is_deterministic

  def __str__(self) -> str:
    errors = [f"{name} {error:.1e}" for name, error in self.errors.items()]
    if not self.is_deterministic:
      # The kernels add in a fixed order, so this is a race.
      verdict = "NOT DETERMINISTIC"
    elif not self.is_right:
      verdict = "WRONG"
    else:
      verdict = "right"
    return f"{verdict} ({', '.join(errors)})"


def check_attention(
  case: inputs.Case, attend: Callable[..., jax.Array] = fused
) -> Check:
  """Checks the output and the gradients of a kernel.

  Args:
    case: the shape and the mask.
    attend: the kernel, a function like `diff_attention`.
  """
  arrays = inputs.arguments(case)
  q, k, v, *_ = arrays
  gradient = inputs.output_gradient(arrays)
  mask = inputs.options(case)
  kernel = inputs.with_gradients(functools.partial(attend, **mask))
  reference = inputs.with_gradients(
    functools.partial(diff_attention, implementation="reference", **mask)
  )
  return _compare(
    kernel,
    reference,
    (gradient, *arrays),
    min_norms=min_norms(gradient, q, k, v),
    tolerance=TOLERANCES[case.dtype],
  )


def check_decoding(
  case: inputs.DecodeCase, attend: Callable[..., jax.Array] = fused_decode
) -> Check:
  """Checks the output of a decoding kernel.

  Args:
    case: the shape.
    attend: the kernel, a function like `decode_attention`.
  """
  return _compare(
    attend,
    functools.partial(decode_attention, implementation="xla"),
    inputs.decode_arguments(case),
    min_norms=[MIN_NORM],
    tolerance=TOLERANCES["bfloat16"],
  )


def _compare(
  kernel: Callable[..., Any],
  reference: Callable[..., Any],
  arguments: tuple[Any, ...],
  *,
  min_norms: Sequence[float],
  tolerance: float,
) -> Check:
  """Runs the kernel twice and the reference once, and compares the outputs.

  Args:
    kernel: the function to check.
    reference: the function that returns the correct arrays.
    arguments: the arguments of both.
    min_norms: the smallest divisor of the error of each output.
    tolerance: the largest error of a correct kernel.
  """
  compiled = jax.jit(kernel)
  actual = jax.device_get(jax.tree.leaves(compiled(*arguments)))
  repeated = jax.device_get(jax.tree.leaves(compiled(*arguments)))
  is_deterministic = True
  for first, second in zip(actual, repeated, strict=True):
    if first.tobytes() != second.tobytes():
      is_deterministic = False

  errors = {}
  expected = run_in_float32(reference, arguments)
  for index, expected_array in enumerate(expected):
    error = relative_error(actual[index], expected_array, min_norms[index])
    errors[NAMES[index]] = float(f"{error:.2e}")
  return Check(errors, tolerance, is_deterministic)


def run_in_float32(
  function: Callable[..., Any], arguments: tuple[Any, ...]
) -> list[np.ndarray]:
  """Returns a function's outputs for the arguments, computed in float32.

  Runs on the CPU, because a GPU's compiler spends a minute on the choice of
  float32 kernels.
  """

  def to_float32(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.floating):
      return array.astype(jnp.float32)
    return array

  cpu = jax.devices("cpu")[0]
  with jax.default_device(cpu), jax.default_matmul_precision("highest"):
    on_cpu = jax.device_put(arguments, cpu)
    outputs = jax.jit(function)(*jax.tree.map(to_float32, on_cpu))
  return jax.device_get(jax.tree.leaves(outputs))


def min_norms(
  gradient: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> list[float]:
  """Returns the smallest divisor of the error of each array in NAMES.

  dQ is a sum over keys of weight · (dO·v − dO·out) · k · scale, and dK is a sum
  over queries with q instead of k. If all weights are 1/S, each of the terms of
  dQ has a norm of about ‖dO‖ · rms(v) · rms(k) / √S.
  """
  num_keys = k.shape[1]
  term = norm(gradient) * _rms(v) / math.sqrt(num_keys)
  return [MIN_NORM, term * _rms(k), term * _rms(q), MIN_NORM, MIN_NORM]


def relative_error(actual: Any, expected: Any, min_norm: float) -> float:
  """Returns the norm of the difference over the norm of `expected`.

  Args:
    actual: the array to check.
    expected: the correct array.
    min_norm: the smallest divisor.
  """
  difference = np.subtract(actual, expected, dtype=np.float64)
  return norm(difference) / max(norm(expected), min_norm)


def norm(array: Any) -> float:
  """Returns the Euclidean norm of all elements."""
  return float(np.linalg.norm(np.asarray(array, np.float64).ravel()))


def _rms(array: jax.Array) -> float:
  return norm(array) / math.sqrt(array.size)
