"""The attention maps of the report: a picture of one head, and panels with several heads.

A variant determines which maps it has (`Attention.maps`). The report shows
them, and then the weights that they result in.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.colors
import matplotlib.figure
import matplotlib.image
import numpy as np
from jaxtyping import Array, Float

from diffjax.config import UserError
from diffjax.evals.methods import inside
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.elements import Html, element
from diffjax.evals.report.words import readable, words_of
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

# The titles of the two maps that `most_cancelled` compares.
SIGNAL_MAP = "A₁"
NOISE_MAP = "λA₂"
# The share of the largest weights that have the same colour, and the quantile where it begins.
CLIPPED, _CLIP = "1%", 0.99
_COLORS, _FUTURE = (
  matplotlib.colormaps["RdBu_r"],
  "#e9ebee",
)  # of the keys that a query does not see
# The widths of a map, and of the labels and colours beside all maps, in inches. A
# picture of three maps is 12 inches wide.
_MAP_WIDTH, _SIDES_WIDTH = 10 / 3, 2
# The height without the labels of the keys, which are written upwards, and the
# width of one of their letters, in inches.
_MAP_HEIGHT, _LETTER_WIDTH = 3.9, 0.09
_LABEL = (
  0.028  # the least distance of two labels in a panel, as a share of the map
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the maps."""

  # Text whose attention maps are drawn; "" for the beginning of the validation text
  prompt: str = ""
  # Tokens of the maps, at most
  tokens: int = 96
  # Layers to choose from, at most, evenly spaced from the first to the last
  layers: int = 6
  # Heads to choose from, at most, from the first; the mean over all heads is there too
  heads: int = 4


@flax.struct.dataclass
class LayerMaps:
  """The maps of layers, with their titles.

  Attributes:
    titles: the titles of the variant's maps, and then of its weights.
    weights: the maps in this order. First their mean over all heads, then the
      maps of each head. Of several layers, with a leading axis L.
  """

  titles: tuple[str, ...] = flax.struct.field(pytree_node=False)
  weights: Float[Array, "*L mean_and_heads maps T T"]


class Maps(NamedTuple):
  """The maps of a model.

  Attributes:
    trained: the model.
    tokens: the text of each token.
    titles: the titles of the maps. The last one is of the weights.
    weights: the mean over heads, then every head, by query and key.
  """

  trained: Trained
  tokens: list[str]
  titles: tuple[str, ...]
  weights: Float[np.ndarray, "L mean_and_heads maps T T"]

  @property
  def has_noise_map(self) -> bool:
    """Whether λA₂ is subtracted from A₁, as `most_cancelled` requires."""
    return SIGNAL_MAP in self.titles and NOISE_MAP in self.titles


def compute(
  models: Sequence[Trained], settings: Settings
) -> tuple[str, list[Maps]]:
  """Returns the prompt as text, and each model's maps of it.

  Args:
    models: the models, with one tokenizer.
    settings: settings of the maps.

  Raises:
    UserError: if a setting is out of range, or if the prompt is longer than a
      model allows.
  """
  ids = _prompt(models, settings)
  tokenizer = models[0].tokenizer
  tokens = []
  for index, token in enumerate(ids):
    if index == 0 and not tokenizer.has_text([token]):
      tokens.append("(start)")
    else:
      tokens.append(tokenizer.decode_after(ids[:index], [token]))

  compute_maps = jax.jit(maps_of, static_argnums=0)
  batch = np.asarray([ids], np.int32)
  maps = []
  for model in models:
    layers = compute_maps(model.model, model.params, batch)
    weights = np.asarray(layers.weights)
    maps.append(Maps(model, tokens, layers.titles, weights))
  return tokenizer.decode(ids), maps


def check(models: Sequence[Trained], settings: Settings) -> None:
  """Raises a UserError where `draw` would, before hours are spent on what the page shows."""
  _prompt(models, settings)


def _prompt(models: Sequence[Trained], settings: Settings) -> list[int]:
  for name in ("tokens", "layers", "heads"):
    if (value := getattr(settings, name)) < 1:
      raise UserError(f"set.report.{name} = {value}: must be at least 1")
  first = models[0]
  limit = min(model.config.model.max_length for model in models)
  if settings.prompt:
    ids = first.tokenizer.encode_prompt(settings.prompt)
    if len(ids) > min(limit, settings.tokens):
      raise UserError(
        f"set.report.prompt has {len(ids)} tokens, its start included: set.report.tokens = {settings.tokens} are drawn, and "
        f"the model takes at most {limit} (config.model.max_length)"
      )
    return ids
  batch = next(iter(validation_rows("report", first, 1)))
  count = int(
    (batch["segment_ids"][0] == batch["segment_ids"][0, 0]).sum()
  )  # the first document
  return batch["tokens"][0, : min(count, settings.tokens, limit)].tolist()


def maps_of(model: Decoder, params: Any, tokens: Any) -> LayerMaps:
  """Returns the maps of the first row, without plain layers.

  Args:
    model: the decoder.
    params: its parameters.
    tokens: int32[B, T].
  """

  def layer_maps(attended: inside.Attended) -> LayerMaps:
    length = attended.q.shape[1]
    queries = attended.queries(0, length)
    terms = queries.maps()
    titles = (*terms, attended.layer.weights_formula)
    maps = jnp.stack([*terms.values(), queries.weights()], axis=2)
    first_row = maps[0]  # [H, maps, T, T]
    mean = jnp.mean(first_row, axis=0, keepdims=True)
    return LayerMaps(titles, jnp.concatenate([mean, first_row]))

  results = inside.measure(
    model, params, {"tokens": tokens}, attention=layer_maps, plain=False
  )
  return results["attention"]


def most_cancelled(maps: Maps) -> tuple[int, int, float]:
  """Returns where λA₂ takes the largest share of A₁ away.

  The share is Σ min(A₁, λA₂) / Σ A₁. The first query does not count, because it
  sees one key.

  Args:
    maps: the maps of a model with `has_noise_map`.

  Returns:
    The layer, the head and the share.
  """
  heads = maps.weights[:, 1:, :, 1:]  # [L, H, maps, T − 1, T]
  first = heads[:, :, maps.titles.index(SIGNAL_MAP)]
  second = heads[:, :, maps.titles.index(NOISE_MAP)]
  removed = np.minimum(first, second).sum(axis=(-2, -1))
  shares = removed / first.sum(axis=(-2, -1))
  layer, head = np.unravel_index(np.argmax(shares), shares.shape)
  return int(layer), int(head), float(shares[layer, head])


def picture(maps: Maps) -> tuple[matplotlib.figure.Figure, str]:
  """Returns a picture of the head of `most_cancelled`, and its caption.

  The maps and the weights are side by side, on one scale of colours.

  Args:
    maps: the maps of a model with `has_noise_map`.
  """
  layer, head, share = most_cancelled(maps)
  weights = maps.weights[layer, 1 + head]  # [maps, T, T]
  count = len(maps.tokens)
  largest = _largest(weights)
  num_maps = len(maps.titles)
  width = _SIDES_WIDTH + num_maps * _MAP_WIDTH
  words = readable(words_of(maps.tokens), count / 32)
  longest_label = max((len(word.text) for word in words), default=0)
  height = _MAP_HEIGHT + longest_label * _LETTER_WIDTH
  figure = matplotlib.figure.Figure(
    (width, height), layout="constrained", facecolor="white"
  )
  fields = figure.subplots(1, num_maps)
  norm = matplotlib.colors.FuncNorm((_root, _square), -largest, largest)
  label_places = [(word.start + word.end - 1) / 2 for word in words]
  labels = [word.text for word in words]
  is_future = ~np.tri(count, dtype=bool)
  for axes, title, values in zip(fields, maps.titles, weights, strict=True):
    axes.set_facecolor(_FUTURE)
    image = axes.imshow(
      np.ma.masked_array(values, is_future),
      cmap=_COLORS,
      norm=norm,
      interpolation="nearest",
    )
    axes.set_title(title, fontsize=16)
    axes.set_xticks(label_places, labels, rotation=90, fontsize=9)
    axes.set_yticks([])
    axes.set_xlabel("key: the token looked at", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
  fields[0].set_yticks(label_places, labels, fontsize=9)
  fields[0].set_ylabel("query: the token that looks", fontsize=10)

  bar = figure.colorbar(image, ax=list(fields), shrink=0.75, pad=0.01)
  marks = [-largest, -largest / 4, 0, largest / 4, largest]
  mark_labels = [f"{mark:.2g}".replace("-", "−") for mark in marks]
  bar.set_ticks(marks, labels=mark_labels)
  bar.set_label("weight (colours by its square root)", fontsize=10)
  bar.outline.set_visible(False)

  num_layers = maps.weights.shape[0]
  num_heads = maps.weights.shape[1] - 1  # The first is the mean.
  caption = (
    f"Layer {layer} of {num_layers}, head {head} of {num_heads}, both counted"
    f" from 0: the head of this model in which {NOISE_MAP} takes away most of"
    f" {SIGNAL_MAP}, {share:.0%} (Σ min({SIGNAL_MAP}, {NOISE_MAP}) /"
    f" Σ {SIGNAL_MAP} over this text)."
  )
  return figure, caption


def panel(maps: Maps, name: str, settings: Settings) -> Html:
  """The maps of a model, with lists to choose a layer and a head from. The script of page.html shows the chosen ones."""
  last = maps.weights.shape[0] - 1
  layers = sorted(
    {
      round(index * last / max(settings.layers - 1, 1))
      for index in range(settings.layers)
    }
  )
  heads = min(settings.heads, maps.weights.shape[1] - 1)
  pictures = [
    [_pictures(by_head) for by_head in maps.weights[layer, : heads + 1]]
    for layer in layers
  ]
  count = len(maps.tokens)
  labels = readable(words_of(maps.tokens), _LABEL * count)

  def choice(what: str, values: Sequence[str]) -> Html:
    options = (
      element("option", value, value=str(index))
      for index, value in enumerate(values)
    )
    return element("label", f"{what} ", element("select", *options))

  def axis(kind: str, side: str) -> Html:
    spans = (
      element(
        "span",
        word.text,
        style=f"{side}:{50 * (word.start + word.end) / count:.2f}%",
      )
      for word in labels
    )
    return element("div", *spans, class_=kind)

  def figure(title: str, source: str) -> Html:
    image = element(
      "img", src=f"data:image/png;base64,{source}", alt=f"{title} of {name}"
    )
    return element(
      "figure",
      element("figcaption", title),
      element(
        "div", axis("queries", "top"), image, axis("keys", "left"), class_="map"
      ),
    )

  tokens = [json.dumps(token, ensure_ascii=False) for token in maps.tokens]
  # "<" is written as an escape sequence, so that no token can end the script.
  data = json.dumps(
    {"tokens": tokens, "pictures": pictures}, ensure_ascii=True
  ).replace("<", "\\u003c")
  return element(
    "div",
    element("h3", name),
    choice("layer", list(map(str, layers))),
    choice("head", ["mean of all", *map(str, range(heads))]),
    element(
      "span",
      "colours to ±",
      element("span", pictures[0][0]["scale"], class_="scale"),
      class_="hint",
    ),
    element(
      "div", *map(figure, maps.titles, pictures[0][0]["png"]), class_="maps"
    ),
    element("output", "Point at a cell to read its two tokens."),
    element("script", Html(data), type="application/json"),
    class_="panel",
  )


def _pictures(weights: Float[np.ndarray, "maps T T"]) -> dict[str, Any]:
  """The maps of a head as PNGs, one pixel a cell, and the weight of the last colour, which they share."""
  largest, future = _largest(weights), ~np.tri(weights.shape[-1], dtype=bool)
  pngs = []
  for one in weights:
    colors = _COLORS((_root(np.clip(one / largest, -1, 1)) + 1) / 2)
    colors[future] = matplotlib.colors.to_rgba(_FUTURE)
    file = io.BytesIO()
    matplotlib.image.imsave(file, colors, format="png")
    pngs.append(base64.b64encode(file.getvalue()).decode())
  return {"png": pngs, "scale": f"{largest:.2g}"}


def _largest(weights: Float[np.ndarray, "maps T T"]) -> float:
  """The weight where the colours end."""
  seen = np.abs(weights[:, np.tri(weights.shape[-1], dtype=bool)])
  return float(
    np.quantile(seen, _CLIP) or seen.max() or 1.0
  )  # clipped, since the first query's only key has weight 1


def _root(x: Any) -> Any:
  """Returns the square root of |x|, with the sign of x."""
  return np.sign(x) * np.sqrt(np.abs(x))


def _square(x: Any) -> Any:
  """Returns x², with the sign of x: the inverse of `_root`."""
  return np.sign(x) * np.square(x)
