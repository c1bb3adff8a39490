"""Differential Transformer language models in JAX.

A model, trained or loaded, and text from it:

    import diffjax
    from diffjax.configs import tiny

    trained = diffjax.fit(tiny.get_config(), "runs/tiny")
    trained = diffjax.load("runs/tiny")
    print(*diffjax.complete(trained, ["def "], 100))

`fit` and `complete` do what the commands `train` and `generate` do. `load`
reads a trained model. `Sampler` keeps a model ready for many calls.
`DiffAttention` is the layer for your own flax module, and `diff_attention` is
the operation on arrays below it. `Attention`, `register` and `Parameter` are
for your own attention variants (docs/variants.md).

Importing the package imports nothing else. Each name imports what it needs:
`diff_attention` needs only jax, numpy and jaxtyping.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from diffjax.inference.notebook import complete as complete
  from diffjax.inference.notebook import fit as fit
  from diffjax.inference.sampler import Sampler as Sampler
  from diffjax.inference.trained import load as load
  from diffjax.model.attention import Attention as Attention
  from diffjax.model.attention import DiffAttention as DiffAttention
  from diffjax.model.attention import register as register
  from diffjax.ops.diff_attention import diff_attention as diff_attention
  from diffjax.parameters import Parameter as Parameter

__version__ = "0.1.0"  # pyproject.toml reads it here

# The module that defines each name.
_MODULES = {
  "Attention": "diffjax.model.attention",
  "DiffAttention": "diffjax.model.attention",
  "Parameter": "diffjax.parameters",
  "Sampler": "diffjax.inference.sampler",
  "complete": "diffjax.inference.notebook",
  "diff_attention": "diffjax.ops.diff_attention",
  "fit": "diffjax.inference.notebook",
  "load": "diffjax.inference.trained",
  "register": "diffjax.model.attention",
}
__all__ = [
  "Attention",
  "DiffAttention",
  "Parameter",
  "Sampler",
  "__version__",
  "complete",
  "diff_attention",
  "fit",
  "load",
  "register",
]

# Functions that were renamed, because the modules of two commands have their
# old names. The old names work for one version.
_RENAMED = {"train": "fit", "generate": "complete"}


def __getattr__(name: str) -> Any:
  """Imports a public name at its first use."""
  if name in _RENAMED:
    # Python calls this only if the command's module is not imported. Importing
    # it here would define the command's flags, so an empty module replaces it.
    return _CallableModule(f"{__name__}.{name}", _CallableModule.__doc__)
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  import importlib

  module = importlib.import_module(_MODULES[name])
  return getattr(module, name)


def __dir__() -> list[str]:
  return __all__


class _CallableModule(types.ModuleType):
  """A command's module that can also be called, like a function of that name.

  The module diffjax.train is imported as `diffjax.train`, which was the name of
  a function before. Calling the module calls the function by its new name.

  Deprecated: call `diffjax.fit` in place of `diffjax.train`, and
  `diffjax.complete` in place of `diffjax.generate`.
  """

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    import warnings

    _, _, name = self.__name__.rpartition(".")
    function_name = _RENAMED[name]
    warnings.warn(
      f"diffjax.{name}() is deprecated: call diffjax.{function_name}()",
      DeprecationWarning,
      stacklevel=2,
    )
    return __getattr__(function_name)(*args, **kwargs)


def allow_deprecated_call(module_name: str) -> None:
  """Makes the module diffjax.train or diffjax.generate callable.

  Does nothing if the module runs as a command, with the name "__main__".

  Args:
    module_name: the module's `__name__`.
  """
  if module_name != "__main__":
    sys.modules[module_name].__class__ = _CallableModule
