"""How figures look: styles of models, colours and the look of axes.

This file does not import matplotlib. `diffjax/model/variant_styles.py` has the
styles of attention variants.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, NamedTuple


class Style(NamedTuple):
  """A name in words, and a colour and a marker of matplotlib."""

  name: str
  color: str
  marker: str


# The colours of Okabe and Ito (2008), which colour-blind people can
# distinguish, a grey and a brown.
BLACK = "#000000"
GREY = "#8c8c8c"
PURPLE = "#cc79a7"
RED = "#d55e00"
ORANGE = "#e69f00"
SKY = "#56b4e9"
BLUE = "#0072b2"
GREEN = "#009e73"
BROWN = "#7f4f24"


def tidy(figure: Any) -> None:
  """Gives the axes of a figure light lines behind the data, and no frame.

  Axes with images and colour bars are not changed.

  Args:
    figure: a figure of matplotlib.
  """
  for axes in figure.axes:
    if not axes.axison or axes.images or axes.get_label() == "<colorbar>":
      continue
    axes.grid(True, color="#d9dce1", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def __getattr__(name: str) -> Any:
  """Returns what version 0.1 offered here, and what is with the variants now."""
  if name not in ("ARCHITECTURES", "style", "together"):
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  warnings.warn(
    f"diffjax.styles.{name} is deprecated: use diffjax.model.variant_styles",
    DeprecationWarning,
    stacklevel=2,
  )
  variant_styles = importlib.import_module("diffjax.model.variant_styles")
  if name != "ARCHITECTURES":
    return getattr(variant_styles, name)
  return {each: variant_styles.style(each) for each in variant_styles.ATTENTION}
