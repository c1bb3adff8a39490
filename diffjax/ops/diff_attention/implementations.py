"""The implementations by name. Each lives in a module of its own, which is imported when it is first asked for."""

from __future__ import annotations

import importlib

from diffjax.ops.diff_attention.vjp import Implementation

# A module's Implementation is its IMPLEMENTATION.
_MODULES = {
  "reference": "reference",
  "chunked": "chunked",
  "two_call": "two_call",
  "pallas_tpu": "tpu.attention",
  "pallas_gpu": "gpu.attention",
}
_registered: dict[str, Implementation] = {}


def names() -> tuple[str, ...]:
  """The values that `diff_attention` takes as its `implementation`."""
  return ("auto", *_MODULES, *_registered)


def register(name: str, implementation: Implementation) -> None:
  """Makes an implementation of your own known to `diff_attention`.

  Raises:
    ValueError: the name is taken.
  """
  if name in names():
    raise ValueError(
      f"name must be a new one, got {name!r}; there are {', '.join(names())}"
    )
  _registered[name] = implementation


def implementation_of(name: str) -> Implementation:
  """The implementation of a name, other than "auto"."""
  if name in _registered:
    return _registered[name]
  return importlib.import_module(
    f"diffjax.ops.diff_attention.{_MODULES[name]}"
  ).IMPLEMENTATION
