"""How figures show an architecture: its written name, its colour and its marker, the same everywhere. No matplotlib here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Style(NamedTuple):
  """A name in words, a colour and a marker of matplotlib's."""

  name: str
  color: str
  marker: str


# The colours of Okabe and Ito (2008), which colour-blind people tell apart, a grey and a brown.
BLACK, GREY, PURPLE, RED, ORANGE, SKY, BLUE, GREEN, BROWN = (
  "#000000",
  "#8c8c8c",
  "#cc79a7",
  "#d55e00",
  "#e69f00",
  "#56b4e9",
  "#0072b2",
  "#009e73",
  "#7f4f24",
)

# By config.model.attention. A variant of DIFF or DIFF V2 has its colour.
ARCHITECTURES = {
  "softmax": Style("Transformer", BLACK, "o"),
  "diff": Style("DIFF", RED, "s"),
  "diff_v2": Style("DIFF V2", BLUE, "^"),
  "diff_v2_linear": Style("DIFF V2 with linear λ", BLUE, "^"),
  "diff_v2_gated": Style("DIFF V2 with gates", BLUE, "X"),
  "diff_per_token": Style("DIFF with λ per token", RED, "P"),
  "gated": Style("Gated attention", GREEN, "D"),
  "dex": Style("DEX", PURPLE, "*"),
}


def style(attention: str) -> Style:
  """The style of an architecture. One that has none, such as a new variant, is brown and goes by its own name."""
  return ARCHITECTURES.get(attention, Style(attention, BROWN, "v"))


def together(attentions: Sequence[str], names: Sequence[str]) -> list[Style]:
  """The styles of one model, or of two that stand in one figure. Two of one architecture go by the models' names; one of them is grey."""
  styles = [style(attention) for attention in attentions]
  if len(set(styles)) < len(styles):
    styles = [
      each._replace(name=name) for each, name in zip(styles, names, strict=True)
    ]
  if len({each.color for each in styles}) < len(styles):
    styles[1:] = [each._replace(color=GREY, marker="o") for each in styles[1:]]
  return styles


def tidy(figure: Any) -> None:
  """Gives the axes of a matplotlib figure their common look: light lines behind the data, and no frame. Pictures keep theirs."""
  for axes in figure.axes:
    if axes.axison and not axes.images and axes.get_label() != "<colorbar>":
      axes.grid(True, color="#d9dce1", linewidth=0.6)
      axes.set_axisbelow(True)
      axes.spines[["top", "right"]].set_visible(False)
