"""Differential Transformer language models in JAX.

A model, trained or loaded, and text from it:

    import diffjax
    from diffjax.configs import tiny

    trained = diffjax.train(tiny.get_config(), "runs/tiny")
    trained = diffjax.load("runs/tiny")
    print(*diffjax.generate(trained, ["def "], 100))

`train` and `generate` do what the commands of these names do, and `load` reads what was trained. `Sampler` keeps a model ready for many
calls. `DiffAttention` is the layer for a flax module of your own, and `diff_attention` the operation on arrays below it. `Attention`,
`register` and `Parameter` are for attention variants of your own (docs/variants.md).

Importing the package imports nothing else, and each name imports what it needs: `diff_attention` needs jax, numpy and jaxtyping alone.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if (
  sys.argv[0] == "-m"
):  # so it is while Python looks for the command of `python -m diffjax.train`, and at no other import
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

if TYPE_CHECKING:
  from diffjax.inference.notebook import generate as generate
  from diffjax.inference.notebook import train as train
  from diffjax.inference.sampler import Sampler as Sampler
  from diffjax.inference.trained import load as load
  from diffjax.model.attention import Attention as Attention
  from diffjax.model.attention import DiffAttention as DiffAttention
  from diffjax.model.attention import register as register
  from diffjax.ops.diff_attention import diff_attention as diff_attention
  from diffjax.parameters import Parameter as Parameter

__version__ = "0.1.0"  # pyproject.toml reads it here

# Where each name is defined.
_HOMES = {
  "Attention": "diffjax.model.attention",
  "DiffAttention": "diffjax.model.attention",
  "Parameter": "diffjax.parameters",
  "Sampler": "diffjax.inference.sampler",
  "diff_attention": "diffjax.ops.diff_attention",
  "generate": "diffjax.inference.notebook",
  "load": "diffjax.inference.trained",
  "register": "diffjax.model.attention",
  "train": "diffjax.inference.notebook",
}
__all__ = [
  "Attention",
  "DiffAttention",
  "Parameter",
  "Sampler",
  "__version__",
  "diff_attention",
  "generate",
  "load",
  "register",
  "train",
]


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  import importlib

  return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
  return __all__


class _Package(types.ModuleType):
  """Keeps `diffjax.train` and `diffjax.generate` functions: importing the commands' modules would put these in their places."""

  def __setattr__(self, name: str, value: Any) -> None:
    if not (name in _HOMES and isinstance(value, types.ModuleType)):
      super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
