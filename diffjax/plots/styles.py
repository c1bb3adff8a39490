"""How figures look: styles of models, colours and the look of axes.

This file does not import matplotlib. `diffjax/model/variant_styles.py` has the
styles of attention variants.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Style(NamedTuple):
  """How figures show a model.

  Attributes:
    name: its name in legends.
    color: a colour of matplotlib, such as "#0072b2".
    marker: a marker of matplotlib, such as "o".
  """

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
  """Draws a light grid behind the data, and removes the top and right frame.

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
