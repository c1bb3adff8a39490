"""Chooses the attention implementation for "auto", and reports the choice."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
from collections.abc import Callable, Iterator

import jax

from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.platform import device_kind

# Descriptions for users. Other implementations are described by their names.
_LABELS = {
  "chunked": "chunked (XLA)",
  "two_call": "two_call (stock attention)",
  "pallas_tpu": (
    "fused TPU kernels (pallas_tpu) for the forward and backward pass"
  ),
  "pallas_gpu": (
    "fused GPU kernels (pallas_gpu) for the forward and backward pass"
  ),
}


@dataclasses.dataclass(frozen=True)
class Choice:
  """An implementation and why it was chosen.

  Attributes:
    implementation: the name of the implementation.
    reason: why it was chosen. The text continues a sentence.
    is_fallback: whether another one was measured to be faster on this device
      and would run if the user followed the reason's advice.
  """

  implementation: str
  reason: str
  is_fallback: bool = False

  def __str__(self) -> str:
    label = _LABELS.get(self.implementation, self.implementation)
    return f"attention: {label}, {self.reason}"


_listener: contextvars.ContextVar[Callable[[Choice], None] | None] = (
  contextvars.ContextVar("listener", default=None)
)
# The choices that were logged or passed to a listener.
_reported: set[Choice] = set()


def choose(
  backend: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask
) -> Choice:
  """Returns the implementation that "auto" selects for a call.

  It depends on the device, on shapes and dtypes, and on the mask. The choice is
  also logged, or passed to a listener inside of `reported_to(listener)`.

  Args:
    backend: the platform that the program is compiled for.
    q: queries [B, T, H, G, D], with one map, or with a signal map and a noise
      map.
    k: keys [B, S, K, M, D].
    v: values [B, S, K, V].
    mask: the keys that each query sees.
  """
  if backend == "tpu":
    choice = choose_tpu(q, v)
  elif backend == "gpu":
    choice = choose_gpu(q, k, v, mask)
  else:
    choice = Choice("chunked", f"because this is a {backend.upper()}")
  _report(choice)
  return choice


@contextlib.contextmanager
def reported_to(listener: Callable[[Choice], None]) -> Iterator[None]:
  """Calls the listener with each choice that is made inside the context.

  Choices are made while a program is traced. A choice that a listener received
  is never logged, also not after the context.
  """
  token = _listener.set(listener)
  try:
    yield
  finally:
    _listener.reset(token)


def forget_reported() -> None:
  """Reports choices again that were reported before. For tests."""
  _reported.clear()


def choose_tpu(q: jax.Array, v: jax.Array) -> Choice:
  """Returns the fused kernels if they support the arrays, otherwise XLA."""
  from diffjax.ops.diff_attention.tpu import chip

  if chip.takes(q, v):
    return Choice("pallas_tpu", "the fastest on TPUs")
  arrays = _describe_arrays(q, v)
  return Choice("chunked", f"because pallas_tpu does not take {arrays}")


def choose_gpu(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> Choice:
  """Returns the implementation that was measured to be fastest on this GPU.

  "pallas_gpu" are fused kernels. If they cannot run here, or without a
  measurement, it is "two_call", which uses cuDNN's attention. If cuDNN does not
  support the call either, it is "chunked", which needs only XLA.
  """
  # These modules are imported only where a GPU needs them.
  from diffjax.ops.diff_attention.gpu import chip, measured

  gpu = device_kind()
  fastest = measured.fastest(gpu, q, k, v, mask)
  if fastest == "chunked":
    return Choice("chunked", f"measured fastest on {gpu}")
  cudnn_problem = _find_cudnn_problem(q, v, mask)

  if fastest == "pallas_gpu":
    if cudnn_problem is None:
      without_kernels = "two_call"
    else:
      without_kernels = "chunked"
    if not chip.takes(q, v):
      arrays = _describe_arrays(q, v)
      return Choice(
        without_kernels, f"because pallas_gpu does not take {arrays}"
      )
    kernel_problem = _find_kernel_problem()
    if kernel_problem is not None:
      # The user can fix this, for example by installing another version.
      return Choice(
        without_kernels,
        f"because pallas_gpu {kernel_problem}",
        is_fallback=True,
      )
    return Choice("pallas_gpu", f"measured fastest on {gpu}")

  if cudnn_problem is not None:
    return Choice("chunked", f"because {cudnn_problem}")
  if fastest == "two_call":
    return Choice("two_call", f"measured fastest on {gpu}")
  return Choice(
    "two_call",
    f"because no measurement on {gpu} says that pallas_gpu is faster at this"
    " shape",
  )


def _find_kernel_problem() -> str | None:
  """Returns why pallas_gpu cannot run in this process, or None if it can.

  The text continues a sentence that begins with "pallas_gpu".
  """
  from diffjax.ops.diff_attention.gpu import chip

  problem = chip.refusal()
  if problem is not None:
    return problem

  # The first import checks the assembler, so it comes last.
  from diffjax.ops.diff_attention.gpu import toolchain

  return toolchain.ASSEMBLER_PROBLEM


def _find_cudnn_problem(q: jax.Array, v: jax.Array, mask: Mask) -> str | None:
  """Returns why cuDNN's attention cannot compute a call, or None if it can.

  The text continues a sentence after "because".
  """
  from diffjax.ops.diff_attention.two_call import cudnn_takes

  if mask.window is not None:
    return "cuDNN's attention takes no window here"
  if mask.offset != 0:
    return "cuDNN's attention takes no q_offset here"
  if cudnn_takes(q, v, masked=mask.segments):
    return None
  if mask.segments and cudnn_takes(q, v, masked=False):
    # The segments are the only problem: they need a mask.
    return "cuDNN's attention takes no segments of these lengths"
  return f"cuDNN does not take {_describe_arrays(q, v)} on {device_kind()}"


def _describe_arrays(q: jax.Array, v: jax.Array) -> str:
  """Returns the dtype and the widths of q and v, for a message."""
  return f"{q.dtype} with D = {q.shape[-1]} and V = {v.shape[-1]}"


def _report(choice: Choice) -> None:
  """Passes the choice to the listener, or logs it if it is new.

  A fallback is a warning, because the user can get something faster.
  """
  is_new = choice not in _reported
  _reported.add(choice)
  listener = _listener.get()
  if listener is not None:
    listener(choice)
  elif is_new:
    level = logging.INFO
    if choice.is_fallback:
      level = logging.WARNING
    logging.getLogger(__name__).log(level, "%s", choice)
