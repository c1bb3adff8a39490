"""Pictures of attention maps: one head for a figure, and a panel of heads.

All pictures of a head share one scale of colours. Red is a positive weight and
blue is a negative one. The colour depends on the square root of the weight, so
that small weights are visible.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import matplotlib.colors
import matplotlib.figure
import matplotlib.image
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar

from diffjax.evals.report import pictures
from diffjax.evals.report.maps import (
  NOISE_MAP,
  SIGNAL_MAP,
  Maps,
  most_cancelled,
)
from diffjax.evals.report.pictures import Picture
from diffjax.evals.report.words import Word, readable, words_of

# The quantile of the weights where the scale of colours ends. The first query
# has a weight of 1, because it sees one key: a scale up to the maximum would
# leave the other weights pale.
_SCALE_QUANTILE = 0.99
# The share of the weights beyond the scale, for the page's text.
CLIPPED_SHARE = "1%"

_COLORMAP = matplotlib.colormaps["RdBu_r"]
# The colour of the keys that a query does not see.
_HIDDEN_COLOR = "#e9ebee"

# The widths of a map, and of the labels and colours beside all maps, in inches.
# A picture of three maps is 12 inches wide.
_MAP_WIDTH = 10 / 3
_SIDES_WIDTH = 2
# The height without the labels of the keys, which are written upwards, and the
# width of one of their letters, in inches.
_MAP_HEIGHT = 3.9
_LETTER_WIDTH = 0.09

# The minimum distance between two labels, as a fraction of the map's width: in
# the picture of a head, and in a panel.
_PICTURE_LABEL_GAP = 1 / 32
_PANEL_LABEL_GAP = 0.028


def head_picture(maps: Maps) -> tuple[matplotlib.figure.Figure, str]:
  """Returns a picture of one attention head's maps, and its caption.

  It is the head in which λA₂ cancels the largest share of A₁. The maps A₁ and
  λA₂ and the resulting weights are side by side.

  Args:
    maps: The maps of a model with `has_noise_map`.
  """
  layer, head, share = most_cancelled(maps)
  # Index 0 is the mean over the heads, so the heads begin at index 1.
  figure = _draw_head(maps, maps.weights[layer, 1 + head])

  formula = f"Σ min({SIGNAL_MAP}, {NOISE_MAP}) / Σ {SIGNAL_MAP}"
  caption = (
    f"Layer {layer} of {maps.num_layers}, head {head} of {maps.num_heads}, both"
    f" counted from 0: the head of this model in which {NOISE_MAP} takes away"
    f" most of {SIGNAL_MAP}, {share:.0%} ({formula} over this text)."
  )
  return figure, caption


def _draw_head(
  maps: Maps, weights: Float[np.ndarray, "maps T T"]
) -> matplotlib.figure.Figure:
  """Draws the maps of one head side by side, with a colour bar.

  Args:
    maps: The tokens and the titles of the maps.
    weights: The maps of the head.
  """
  num_tokens = len(maps.tokens)
  words = readable(words_of(maps.tokens), num_tokens * _PICTURE_LABEL_GAP)
  ticks = _ticks(words)
  num_maps = len(maps.titles)
  figure = matplotlib.figure.Figure(
    _picture_size(num_maps, ticks), layout="constrained", facecolor="white"
  )
  axes_of_maps = list(figure.subplots(1, num_maps))

  # All maps have the same scale of colours.
  largest = _largest_weight(weights)
  norm = matplotlib.colors.FuncNorm(
    (_signed_root, _signed_square), -largest, largest
  )
  images = []
  for axes, title, values in zip(
    axes_of_maps, maps.titles, weights, strict=True
  ):
    images.append(_draw_map(axes, values, norm))
    axes.set_title(title, fontsize=16)
    _label_keys(axes, ticks)
  _label_queries(axes_of_maps[0], ticks)

  bar = figure.colorbar(images[-1], ax=axes_of_maps, shrink=0.75, pad=0.01)
  _label_color_bar(bar, largest)
  return figure


def _picture_size(num_maps: int, ticks: _Ticks) -> tuple[float, float]:
  """Returns the width and height of the picture of a head, in inches."""
  longest_label = max(ticks.labels, key=len, default="")
  width = _SIDES_WIDTH + num_maps * _MAP_WIDTH
  height = _MAP_HEIGHT + len(longest_label) * _LETTER_WIDTH
  return width, height


def _draw_map(
  axes: Axes,
  values: Float[np.ndarray, "T T"],
  norm: matplotlib.colors.Normalize,
) -> matplotlib.image.AxesImage:
  """Draws a map. Keys that a query does not see have a colour of their own."""
  axes.set_facecolor(_HIDDEN_COLOR)
  return axes.imshow(
    np.ma.masked_array(values, ~_visible_keys(len(values))),
    cmap=_COLORMAP,
    norm=norm,
    interpolation="nearest",
  )


class _Ticks(NamedTuple):
  """Labels on an axis of an image. Token i is at position i."""

  positions: list[float]
  labels: list[str]


def _ticks(words: Sequence[Word]) -> _Ticks:
  """Returns a label for each word, in the middle of its tokens."""
  ticks = _Ticks([], [])
  for word in words:
    ticks.positions.append(word.middle - 0.5)
    ticks.labels.append(word.text)
  return ticks


def _label_keys(axes: Axes, ticks: _Ticks) -> None:
  """Writes words below the columns of a map, and nothing beside its rows."""
  axes.set_xticks(ticks.positions, ticks.labels, rotation=90, fontsize=9)
  axes.set_yticks([])
  axes.set_xlabel("key: the token looked at", fontsize=10)
  axes.tick_params(length=0)
  axes.spines[:].set_visible(False)


def _label_queries(axes: Axes, ticks: _Ticks) -> None:
  """Writes words beside the rows of a map."""
  axes.set_yticks(ticks.positions, ticks.labels, fontsize=9)
  axes.set_ylabel("query: the token that looks", fontsize=10)


def _label_color_bar(bar: Colorbar, largest: float) -> None:
  """Writes weights beside the scale of colours."""
  ticks = [-largest, -largest / 4, 0, largest / 4, largest]
  labels = [f"{tick:.2g}".replace("-", "−") for tick in ticks]
  bar.set_ticks(ticks, labels=labels)
  bar.set_label("weight (colours by its square root)", fontsize=10)
  bar.outline.set_visible(False)


@dataclasses.dataclass(frozen=True)
class Label:
  """A word beside a map of a panel.

  Attributes:
    text: The word.
    percent: Its position, in percent of the map's size.
  """

  text: str
  percent: str


@dataclasses.dataclass(frozen=True)
class Panel:
  """The part of the page with a model's maps, by the chosen layer and head.

  Attributes:
    name: The model's name.
    layers: The layers to choose from.
    num_heads: How many heads there are to choose from. The first choice is the
      mean over all heads.
    scale: The weight with the last colour, for the first choice.
    maps: The maps of the first choice. Their captions are their titles.
    labels: The labels of queries and keys.
    data: JSON for the page's script: the tokens, and the pictures of all
      choices by layer and head.
  """

  name: str
  layers: list[int]
  num_heads: int
  scale: str
  maps: list[Picture]
  labels: list[Label]
  data: str


def panel(maps: Maps, name: str, max_layers: int, max_heads: int) -> Panel:
  """Returns the interactive part of the page that shows a model's maps.

  The reader chooses a layer, and one of its heads or their mean.

  Args:
    maps: The model's maps.
    name: The model's name.
    max_layers: The maximum number of layers to choose from.
    max_heads: The maximum number of heads to choose from.
  """
  num_heads = min(max_heads, maps.num_heads)
  layers = _evenly_spaced(maps.num_layers, max_layers)
  choices = []
  for layer in layers:
    # Index 0 is the mean over all heads, and then come the heads.
    mean_and_heads = maps.weights[layer, : 1 + num_heads]
    choices.append([_color_head(weights) for weights in mean_and_heads])

  # The page shows the first choice until the reader makes another one.
  first_choice = choices[0][0]
  first_maps = []
  for title, png in zip(maps.titles, first_choice.pngs, strict=True):
    address = pictures.png_address(png)
    first_maps.append(Picture(address, f"{title} of {name}", title))
  return Panel(
    name=name,
    layers=layers,
    num_heads=num_heads,
    scale=first_choice.scale,
    maps=first_maps,
    labels=_panel_labels(maps.tokens),
    data=_panel_data(maps.tokens, choices),
  )


def _evenly_spaced(num_layers: int, count: int) -> list[int]:
  """Returns at most `count` layers, evenly from the first to the last."""
  last_layer = num_layers - 1
  num_steps = max(count - 1, 1)
  layers = {round(step * last_layer / num_steps) for step in range(count)}
  return sorted(layers)


def _panel_labels(tokens: Sequence[str]) -> list[Label]:
  """Returns the labels of a map's rows: the words that have room there."""
  num_tokens = len(tokens)
  minimum_gap = num_tokens * _PANEL_LABEL_GAP
  labels = []
  for word in readable(words_of(tokens), minimum_gap):
    percent = 100 * word.middle / num_tokens
    labels.append(Label(word.text, f"{percent:.2f}"))
  return labels


@dataclasses.dataclass(frozen=True)
class _ColoredHead:
  """The pictures of a head in a panel.

  Attributes:
    pngs: A PNG file for each map. It has one pixel for each query and key.
    scale: The weight with the last colour.
  """

  pngs: list[bytes]
  scale: str


def _color_head(weights: Float[np.ndarray, "maps T T"]) -> _ColoredHead:
  """Returns the maps of a head as PNG files with one pixel per weight."""
  largest = _largest_weight(weights)
  is_hidden = ~_visible_keys(weights.shape[-1])
  pngs = []
  for values in weights:
    relative = np.clip(values / largest, -1, 1)
    # The colormap takes numbers from 0 to 1.
    colors = _COLORMAP((_signed_root(relative) + 1) / 2)
    colors[is_hidden] = matplotlib.colors.to_rgba(_HIDDEN_COLOR)
    file = io.BytesIO()
    matplotlib.image.imsave(file, colors, format="png")
    pngs.append(file.getvalue())
  return _ColoredHead(pngs, f"{largest:.2g}")


def _panel_data(
  tokens: Sequence[str], choices: Sequence[Sequence[_ColoredHead]]
) -> str:
  """Returns the JSON of a panel, which may stand in a script element.

  Args:
    tokens: The text of each token. The script shows it with quotes.
    choices: The pictures by layer and head.
  """
  quoted_tokens = [json.dumps(token, ensure_ascii=False) for token in tokens]
  data = {"tokens": quoted_tokens, "pictures": choices}
  text = json.dumps(data, ensure_ascii=True, default=_head_data)
  # "<" is written as an escape sequence, so that no token can end the script.
  return text.replace("<", "\\u003c")


def _head_data(head: _ColoredHead) -> dict[str, Any]:
  """Returns the pictures of a head for JSON, with PNG files as base64."""
  encoded_pngs = [pictures.encode(png) for png in head.pngs]
  return {"png": encoded_pngs, "scale": head.scale}


def _largest_weight(weights: Float[np.ndarray, "maps T T"]) -> float:
  """Returns the absolute weight where the scale of colours ends.

  It is the quantile `_SCALE_QUANTILE` of the visible weights. If that is 0, it
  is their maximum, and if all are 0, it is 1.
  """
  is_visible = _visible_keys(weights.shape[-1])
  magnitudes = np.abs(weights[:, is_visible])
  largest = float(np.quantile(magnitudes, _SCALE_QUANTILE))
  if largest == 0:
    largest = float(magnitudes.max())
  if largest == 0:
    return 1.0
  return largest


def _visible_keys(num_tokens: int) -> Bool[np.ndarray, "T T"]:
  """Returns whether a query sees a key: its own token or an earlier one."""
  return np.tri(num_tokens, dtype=bool)


def _signed_root(x: Any) -> Any:
  """Returns the square root of |x|, with the sign of x."""
  return np.sign(x) * np.sqrt(np.abs(x))


def _signed_square(x: Any) -> Any:
  """Returns x², with the sign of x: the inverse of `_signed_root`."""
  return np.sign(x) * np.square(x)
