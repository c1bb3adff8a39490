"""The registry of implementations, and `diff_attention`'s instance of it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Generic, TypeVar

from diffjax.ops.diff_attention.vjp import Implementation

AnyImplementation = TypeVar("AnyImplementation")


class Registry(Generic[AnyImplementation]):
  """The implementations of one operation, by name.

  Built-in implementations are given as references of the form "module:object".
  Their modules are imported when they are first loaded, because the ones with
  kernels import Pallas, which is slow. Users register further implementations.

  Example:
    registry = Registry({"pallas_tpu": "my_project.tpu_attention:attention"})
    registry.register("my_attention", my_attention)
    registry.names()  # ("auto", "pallas_tpu", "my_attention")
    registry.load("pallas_tpu")  # imports my_project.tpu_attention

  Attributes:
    built_in: the references of the built-in implementations, by name.
  """

  def __init__(self, built_in: Mapping[str, str]):
    self.built_in = dict(built_in)
    self._registered: dict[str, AnyImplementation] = {}

  def names(self) -> tuple[str, ...]:
    """Returns the names that users can pass: "auto" and all implementations."""
    return ("auto", *self.built_in, *self._registered)

  def register(self, name: str, implementation: AnyImplementation) -> None:
    """Adds an implementation.

    Raises:
      ValueError: if the name is in use.
    """
    if name in self.names():
      raise ValueError(
        f"name must be a new one, got {name!r}, which is in use; names in use:"
        f" {', '.join(self.names())}"
      )
    self._registered[name] = implementation

  def check(self, name: str) -> None:
    """Raises ValueError if the name is neither "auto" nor an implementation."""
    if name not in self.names():
      raise ValueError(
        f"implementation must be one of {', '.join(self.names())}; got {name!r}"
      )

  def load(self, name: str) -> AnyImplementation:
    """Returns the implementation of a name other than "auto".

    Raises:
      KeyError: if there is no implementation of that name.
    """
    if name in self._registered:
      return self._registered[name]
    module_name, object_name = self.built_in[name].split(":")
    module = importlib.import_module(module_name)
    return getattr(module, object_name)


_PACKAGE = "diffjax.ops.diff_attention"
REGISTRY = Registry[Implementation](
  {
    "reference": f"{_PACKAGE}.reference:IMPLEMENTATION",
    "chunked": f"{_PACKAGE}.chunked:IMPLEMENTATION",
    "two_call": f"{_PACKAGE}.two_call:IMPLEMENTATION",
    "pallas_tpu": f"{_PACKAGE}.tpu.attention:IMPLEMENTATION",
    "pallas_gpu": f"{_PACKAGE}.gpu.attention:IMPLEMENTATION",
  }
)


def names() -> tuple[str, ...]:
  """Returns the values that `diff_attention` takes as `implementation`."""
  return REGISTRY.names()


def register(name: str, implementation: Implementation) -> None:
  """Makes an implementation available to `diff_attention` under a name.

  Args:
    name: the value of `implementation` that selects it.
    implementation: its functions.

  Raises:
    ValueError: if the name is in use.
  """
  REGISTRY.register(name, implementation)


def implementation_of(name: str) -> Implementation:
  """Returns the implementation of `diff_attention` with a name, not "auto"."""
  return REGISTRY.load(name)
