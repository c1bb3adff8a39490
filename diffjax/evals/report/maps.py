"""Attention maps of the report: both maps and their difference as heat maps, by model, layer and head."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.image
import numpy as np
from jaxtyping import Array, Float

from diffjax.config import UserError
from diffjax.evals.methods import inside
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.elements import Html, element
from diffjax.model.decoder import Decoder
from diffjax.ops.diff_attention.reference import attention_maps
from diffjax.training.trained import Trained

# The share of the largest weights that have the same colour, and the quantile where it begins.
CLIPPED, _CLIP = "1%", 0.99
_TITLES = ("A₁", "A₂", "A₁ − λA₂")


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the maps."""

  # Text whose attention maps are drawn; "" for the beginning of the validation text
  prompt: str = ""
  # Tokens of the maps, at most
  tokens: int = 96
  # Layers that are drawn, at most, evenly spaced from the first to the last
  layers: int = 6
  # Heads that are drawn, at most, from the first; their mean over all heads is drawn too
  heads: int = 4


def draw(models: Sequence[Trained], settings: Settings) -> tuple[str, list[Html]]:
  """The prompt as text, and a panel for each model.

  Raises:
    UserError: if a setting is out of range, or the prompt longer than a model takes.
  """
  ids, tokenizer = _prompt(models, settings), models[0].tokenizer
  tokens = [json.dumps(tokenizer.decode([token]), ensure_ascii=False) if token != tokenizer.separator else "(separator)" for token in ids]
  return tokenizer.decode(ids), [_panel(model, ids, tokens, settings) for model in models]


def _prompt(models: Sequence[Trained], settings: Settings) -> list[int]:
  for name in ("tokens", "layers", "heads"):
    if (value := getattr(settings, name)) < 1:
      raise UserError(f"set.report.{name} = {value}: must be at least 1")
  first = models[0]
  limit = min(model.config.model.max_length for model in models)
  if settings.prompt:
    ids = [first.tokenizer.separator, *map(int, first.tokenizer.encode(settings.prompt))]
    if len(ids) > min(limit, settings.tokens):
      raise UserError(
        f"set.report.prompt has {len(ids)} tokens, its separator included: set.report.tokens = {settings.tokens} are drawn, and "
        f"the model takes at most {limit} (config.model.max_length)"
      )
    return ids
  batch = next(iter(validation_rows("report", first, 1)))
  count = int((batch["segment_ids"][0] == batch["segment_ids"][0, 0]).sum())  # the first document
  return batch["tokens"][0, : min(count, settings.tokens, limit)].tolist()


def _panel(trained: Trained, ids: list[int], tokens: list[str], settings: Settings) -> Html:
  """The maps of a model, with lists to choose a layer and a head from. The script of page.html shows the chosen ones."""
  last = trained.config.model.num_layers - 1
  layers = sorted({round(index * last / max(settings.layers - 1, 1)) for index in range(settings.layers)})
  heads = min(settings.heads, trained.config.model.num_heads)
  found = np.asarray(jax.jit(maps_of, static_argnums=(0, 3))(trained.model, trained.params, np.asarray([ids], np.int32), heads))
  pictures = [[[_picture(one) for one in by_head] for by_head in found[layer]] for layer in layers]

  def choice(name: str, values: Sequence[str]) -> Html:
    options = (element("option", value, value=str(index)) for index, value in enumerate(values))
    return element("label", f"{name} ", element("select", *options))

  def figure(title: str, picture: dict[str, str]) -> Html:
    image = element("img", src=f"data:image/png;base64,{picture['png']}", alt=f"{title} of {trained.name}")
    return element("figure", image, element("figcaption", f"{title}, ", element("span", picture["scale"], class_="scale")))

  # "<" is written as an escape sequence, so that no token can end the script.
  data = json.dumps({"tokens": tokens, "pictures": pictures}, ensure_ascii=True).replace("<", "\\u003c")
  return element(
    "div",
    element("h3", trained.name),
    choice("layer", list(map(str, layers))),
    choice("head", ["mean of all", *map(str, range(heads))]),
    element("output"),
    element("div", *map(figure, _TITLES, pictures[0][0]), class_="maps"),
    element("script", Html(data), type="application/json"),
    class_="panel",
  )


def maps_of(model: Decoder, params: Any, tokens: Any, heads: int) -> Float[Array, "L heads_and_mean maps T T"]:
  """A₁, A₂ and A₁ − λA₂ (the Transformer's one map) of the first row: the mean over all heads, then each of the first heads.

  Args:
    model: The decoder.
    params: Its parameters.
    tokens: Int[B, T].
    heads: Number of heads.
  """

  def of_layer(attended: inside.Attended) -> Float[Array, "heads_and_mean maps T T"]:
    maps = attention_maps(attended.q, attended.k, window=attended.window)[0]
    if attended.lam is not None:
      difference = maps[:, 0] - attended.lam[0].T[..., None] * maps[:, 1]
      maps = jnp.concatenate([maps, difference[:, None]], axis=1)
    return jnp.concatenate([jnp.mean(maps, axis=0, keepdims=True), maps[:heads]])

  return inside.measure(model, params, {"tokens": tokens}, attention=of_layer)["attention"]


def _picture(weights: Float[np.ndarray, "T T"]) -> dict[str, str]:
  """A map as a PNG, one pixel a cell, and the scale of its colours."""
  seen = np.abs(weights[np.tri(len(weights), dtype=bool)])
  largest = float(np.quantile(seen, _CLIP) or seen.max() or 1.0)  # clipped, since the first query's only key has weight 1
  scaled = np.sign(weights) * np.sqrt(np.minimum(np.abs(weights) / largest, 1))
  signed = bool((weights < 0).any())
  colors = matplotlib.colormaps["RdBu_r"]((scaled + 1) / 2) if signed else matplotlib.colormaps["magma"](scaled)
  file = io.BytesIO()
  matplotlib.image.imsave(file, colors, format="png")
  return {"png": base64.b64encode(file.getvalue()).decode(), "scale": f"{'±' if signed else '0 to '}{largest:.3g}"}
