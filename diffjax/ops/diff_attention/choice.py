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

# What users read. An implementation that is not here is called by its name.
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
    implementation: its name.
    reason: why it was chosen; continues a sentence.
    is_fallback: True if another one was measured to be faster here, and the
      user can make it run.
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
# Choices that were logged or passed to a listener.
_reported: set[Choice] = set()


def choose(
  backend: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask
) -> Choice:
  """Returns the implementation that "auto" means for these arrays.

  It also reports the choice. CONTRIBUTING.md explains the letters of the axes.

  Args:
    backend: the platform that the program is compiled for.
    q: queries [B, T, H, G, D], in pairs.
    k: keys [B, S, K, M, D].
    v: values [B, S, K, V].
    mask: the keys that each query sees.
  """
  if backend == "tpu":
    choice = _on_tpu(q, v)
  elif backend == "gpu":
    choice = _on_gpu(q, k, v, mask)
  else:
    choice = Choice("chunked", f"because this is a {backend.upper()}")
  _report(choice)
  return choice


@contextlib.contextmanager
def reported_to(listener: Callable[[Choice], None]) -> Iterator[None]:
  """Calls the listener with each choice that is made inside the context.

  Choices are made while a program is traced. They are passed to the listener
  instead of being logged, and are not logged later either.
  """
  token = _listener.set(listener)
  try:
    yield
  finally:
    _listener.reset(token)


def _on_tpu(q: jax.Array, v: jax.Array) -> Choice:
  """Returns the fused kernels if they take the arrays, else XLA."""
  from diffjax.ops.diff_attention.tpu import chip

  if chip.takes(q, v):
    return Choice("pallas_tpu", "the fastest on TPUs")
  arrays = _dtype_and_widths(q, v)
  return Choice("chunked", f"because pallas_tpu does not take {arrays}")


def _on_gpu(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> Choice:
  """Returns what was measured to be the fastest on this GPU, if it can run.

  Without a measurement: cuDNN if it takes the arrays, else XLA.
  """
  from diffjax.ops.diff_attention.gpu import measured

  gpu = device_kind()
  fastest = measured.fastest(gpu, q, k, v, mask)
  if fastest == "chunked":
    return Choice("chunked", f"measured fastest on {gpu}")
  if fastest == "pallas_gpu":
    return _fused_on_gpu(q, v, mask)
  implementation = _without_own_kernels(q, v, mask)
  if implementation != "two_call":
    return Choice(implementation, _why_not_cudnn(q, v, mask))
  if fastest == "two_call":
    return Choice(implementation, f"measured fastest on {gpu}")
  return Choice(
    implementation,
    f"because no measurement on {gpu} says that pallas_gpu is faster at this"
    " shape",
  )


def _why_not_cudnn(q: jax.Array, v: jax.Array, mask: Mask) -> str:
  """Returns why cuDNN's attention cannot compute an operation."""
  from diffjax.ops.diff_attention.two_call import cudnn_takes

  if mask.window is not None:
    return "because cuDNN's attention takes no window here"
  if mask.offset != 0:
    return "because cuDNN's attention takes no q_offset here"
  if mask.segments and cudnn_takes(q, v, masked=False):
    return "because cuDNN's attention takes no segments of these lengths"
  arrays = _dtype_and_widths(q, v)
  return f"because cuDNN does not take {arrays} on {device_kind()}"


def _fused_on_gpu(q: jax.Array, v: jax.Array, mask: Mask) -> Choice:
  """Returns the fused kernels, which are the fastest, if they can run here."""
  from diffjax.ops.diff_attention.gpu import assembler, chip

  if not chip.takes(q, v):
    arrays = _dtype_and_widths(q, v)
    return Choice(
      _without_own_kernels(q, v, mask),
      f"because pallas_gpu does not take {arrays}",
    )
  # Each returns the end of the sentence "pallas_gpu …", or None.
  problem = chip.refusal() or assembler.refusal()
  if problem is not None:
    return Choice(
      _without_own_kernels(q, v, mask),
      f"because pallas_gpu {problem}",
      is_fallback=True,
    )
  return Choice("pallas_gpu", f"measured fastest on {device_kind()}")


def _without_own_kernels(q: jax.Array, v: jax.Array, mask: Mask) -> str:
  """Returns "two_call" if it can run through cuDNN, else "chunked"."""
  from diffjax.ops.diff_attention.two_call import cudnn_takes

  is_plain = mask.offset == 0 and mask.window is None
  if is_plain and cudnn_takes(q, v, mask.segments):
    return "two_call"
  return "chunked"


def _dtype_and_widths(q: jax.Array, v: jax.Array) -> str:
  """Returns the dtype and widths of the arrays, for a message."""
  return f"{q.dtype} with D = {q.shape[-1]} and V = {v.shape[-1]}"


def _report(choice: Choice) -> None:
  """Tells the listener, or else logs the choice when it is first made."""
  is_new = choice not in _reported
  _reported.add(choice)
  listener = _listener.get()
  if listener is not None:
    listener(choice)
  elif is_new:
    level = logging.WARNING if choice.is_fallback else logging.INFO
    logging.getLogger(__name__).log(level, "%s", choice)
