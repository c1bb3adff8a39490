"""Attention maps of the report: both maps of a head and their difference, as a picture of one head and as panels to choose heads in."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from diffjax.model.decoder import Decoder
from diffjax.ops.diff_attention.arguments import repeat_noise_maps
from diffjax.ops.diff_attention.reference import attention_maps
from diffjax.training.trained import Trained

TITLES = ("A₁", "λA₂", "A₁ − λA₂")
# The share of the largest weights that have the same colour, and the quantile where it begins.
CLIPPED, _CLIP = "1%", 0.99
_COLORS, _FUTURE = (
  matplotlib.colormaps["RdBu_r"],
  "#e9ebee",
)  # of the keys that a query does not see
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


class Maps(NamedTuple):
  """The maps of a model.

  Attributes:
    trained: the model.
    tokens: the text of each token.
    weights: the mean over heads, then every head: A₁, λA₂ and A₁ − λA₂, or the Transformer's one map, by query and key.
  """

  trained: Trained
  tokens: list[str]
  weights: Float[np.ndarray, "L mean_and_heads maps T T"]


def compute(
  models: Sequence[Trained], settings: Settings
) -> tuple[str, list[Maps]]:
  """The prompt as text, and each model's maps of it.

  Raises:
    UserError: if a setting is out of range, or the prompt longer than a model takes.
  """
  ids, tokenizer = _prompt(models, settings), models[0].tokenizer
  tokens = []
  for index, token in enumerate(ids):
    if index == 0 and not tokenizer.has_text([token]):
      tokens.append("(start)")
    else:
      tokens.append(tokenizer.decode_after(ids[:index], [token]))
  of_model = jax.jit(maps_of, static_argnums=0)
  return tokenizer.decode(ids), [
    Maps(
      model,
      tokens,
      np.asarray(
        of_model(model.model, model.params, np.asarray([ids], np.int32))
      ),
    )
    for model in models
  ]


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


def maps_of(
  model: Decoder, params: Any, tokens: Any
) -> Float[Array, "L mean_and_heads maps T T"]:
  """A₁, λA₂ and A₁ − λA₂ (the Transformer's one map) of the first row: the mean over heads, then each head. Plain layers are left out.

  Args:
    model: The decoder.
    params: Its parameters.
    tokens: Int[B, T].
  """

  def of_layer(
    attended: inside.Attended,
  ) -> Float[Array, "mean_and_heads maps T T"]:
    maps = attention_maps(
      repeat_noise_maps(attended.q), attended.k, window=attended.window
    )[0]
    if attended.lam is not None:
      first, second = maps[:, 0], attended.lam[0].T[..., None] * maps[:, 1]
      maps = jnp.stack([first, second, first - second], axis=1)
    return jnp.concatenate([jnp.mean(maps, axis=0, keepdims=True), maps])

  return inside.measure(
    model, params, {"tokens": tokens}, attention=of_layer, plain=False
  )["attention"]


def most_cancelled(
  weights: Float[np.ndarray, "L mean_and_heads maps T T"],
) -> tuple[int, int, float]:
  """The layer and the head where λA₂ takes the largest share of A₁ away, Σ min(A₁, λA₂) / Σ A₁, and that share.

  The first query does not count, since it sees one key.
  """
  first, second = weights[:, 1:, 0, 1:], weights[:, 1:, 1, 1:]
  shares = np.minimum(first, second).sum(axis=(-2, -1)) / first.sum(
    axis=(-2, -1)
  )
  layer, head = np.unravel_index(np.argmax(shares), shares.shape)
  return int(layer), int(head), float(shares[layer, head])


def picture(maps: Maps) -> tuple[matplotlib.figure.Figure, str]:
  """A₁, λA₂ and their difference of the head of `most_cancelled`, side by side on one scale of colours; and a caption."""
  layer, head, share = most_cancelled(maps.weights)
  weights, count = maps.weights[layer, 1 + head], len(maps.tokens)
  largest = _largest(weights)
  figure = matplotlib.figure.Figure(
    (12, 4.5), layout="constrained", facecolor="white"
  )
  fields = figure.subplots(1, 3)
  norm = matplotlib.colors.FuncNorm(
    (_root, lambda x: np.sign(x) * np.square(x)), -largest, largest
  )
  words = readable(words_of(maps.tokens), count / 32)
  for axes, title, one in zip(fields, TITLES, weights, strict=True):
    axes.set_facecolor(_FUTURE)
    image = axes.imshow(
      np.ma.masked_array(one, ~np.tri(count, dtype=bool)),
      cmap=_COLORS,
      norm=norm,
      interpolation="nearest",
    )
    axes.set_title(title, fontsize=16)
    axes.set_xticks(
      [(word.start + word.end - 1) / 2 for word in words],
      [word.text for word in words],
      rotation=90,
      fontsize=9,
    )
    axes.set_yticks([])
    axes.set_xlabel("key: the token looked at", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
  fields[0].set_yticks(
    [(word.start + word.end - 1) / 2 for word in words],
    [word.text for word in words],
    fontsize=9,
  )
  fields[0].set_ylabel("query: the token that looks", fontsize=10)
  bar = figure.colorbar(image, ax=list(fields), shrink=0.75, pad=0.01)
  marks = [-largest, -largest / 4, 0, largest / 4, largest]
  bar.set_ticks(
    marks, labels=[f"{mark:.2g}".replace("-", "−") for mark in marks]
  )
  bar.set_label("weight (colours by its square root)", fontsize=10)
  bar.outline.set_visible(False)
  caption = (
    f"Layer {layer} of {maps.weights.shape[0]}, head {head} of {maps.weights.shape[1] - 1}, both counted from 0: the head of this model in "
    f"which λA₂ takes away most of A₁, {share:.0%} (Σ min(A₁, λA₂) / Σ A₁ over this text)."
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
  titles = TITLES if maps.weights.shape[2] > 1 else ("A",)
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
    element("div", *map(figure, titles, pictures[0][0]["png"]), class_="maps"),
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
  return np.sign(x) * np.sqrt(np.abs(x))
