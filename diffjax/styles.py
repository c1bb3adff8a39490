"""Deprecated: this module is `diffjax.plots.styles`.

The styles of the variants are in `diffjax.model.variant_styles`.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

# Names of version 0.1 that are with the variants now.
_OF_VARIANTS = ("ARCHITECTURES", "style", "together")
# Names that have changed since.
_RENAMED = {"together": "distinct_styles"}


def __getattr__(name: str) -> Any:
  """Returns a name of the module that this was in version 0.1, and warns."""
  home = "diffjax.plots.styles"
  if name in _OF_VARIANTS:
    home = "diffjax.model.variant_styles"
  module = importlib.import_module(home)
  new_name = _RENAMED.get(name, name)
  if name != "ARCHITECTURES" and not hasattr(module, new_name):
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  warnings.warn(
    f"diffjax.styles.{name} is deprecated: use {home}",
    DeprecationWarning,
    stacklevel=2,
  )
  if name == "ARCHITECTURES":
    return {each: module.style(each) for each in module.ATTENTION}
  return getattr(module, new_name)
