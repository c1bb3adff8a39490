"""How figures show attention variants: the same everywhere.

A variant has its style in its class (`Attention.style`). One without a style
goes by its name, and gets the next free combination of a colour and a marker.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from diffjax.model.attention import ATTENTION
from diffjax.plots.styles import (
  BLUE,
  BROWN,
  GREEN,
  GREY,
  ORANGE,
  PURPLE,
  RED,
  SKY,
  Style,
)

# For variants without a style. The first colours and all markers are not those
# of the package's own variants.
_COLORS = (BROWN, ORANGE, SKY, GREEN, PURPLE, RED, BLUE)
_MARKERS = ("<", ">", "p", "h", "d", "v")

# The styles of names whose class has none, or that have no class.
_assigned_styles: dict[str, Style] = {}


def style(attention: str) -> Style:
  """Returns the style of an attention variant.

  The result for a name stays the same in a process, unless a class with a style
  is registered under it later. Registered variants get
  their styles in the order of their registration. Then come names that are not
  registered, such as those of stored results, in the order of their use.

  Args:
    attention: the variant's name, as in config.model.attention.
  """
  for name in (*ATTENTION, attention):
    if _class_style(name) is None and name not in _assigned_styles:
      color, marker = _next_free_look()
      _assigned_styles[name] = Style(name, color, marker)
  class_style = _class_style(attention)
  if class_style is not None:
    return class_style
  return _assigned_styles[attention]


def distinct_styles(
  attentions: Sequence[str], names: Sequence[str]
) -> list[Style]:
  """Returns styles that distinguish the models of a figure, one or two.

  A model has the style of its attention variant. If two models have the same
  style, their labels are the models' names. If they have the same colour, the
  second one is grey.

  Args:
    attentions: the attention variant of each model.
    names: the name of each model.
  """
  styles = [style(attention) for attention in attentions]
  has_equal_styles = len(set(styles)) < len(styles)
  if has_equal_styles:
    for index, name in enumerate(names):
      styles[index] = styles[index]._replace(name=name)

  colors = {model_style.color for model_style in styles}
  has_equal_colors = len(colors) < len(styles)
  if has_equal_colors:
    for index in range(1, len(styles)):
      styles[index] = styles[index]._replace(color=GREY, marker="o")
  return styles


def _class_style(attention: str) -> Style | None:
  """Returns the style that a variant's class has, or None."""
  layer_class = ATTENTION.get(attention)
  return None if layer_class is None else layer_class.style


def _next_free_look() -> tuple[str, str]:
  """Returns a colour and a marker that no variant has yet, if any are left."""
  used = set()
  for name in ATTENTION:
    class_style = _class_style(name)
    if class_style is not None:
      used.add((class_style.color, class_style.marker))
  for assigned_style in _assigned_styles.values():
    used.add((assigned_style.color, assigned_style.marker))

  for marker, color in itertools.product(_MARKERS, _COLORS):
    if (color, marker) not in used:
      return color, marker
  # More variants than combinations: the colours and markers repeat.
  num_assigned = len(_assigned_styles)
  return (
    _COLORS[num_assigned % len(_COLORS)],
    _MARKERS[num_assigned % len(_MARKERS)],
  )
