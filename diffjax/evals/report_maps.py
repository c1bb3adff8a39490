"""Attention maps on the report's page: both maps and their difference as heat maps, by model, layer and head."""

from __future__ import annotations

import base64
import io
import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.image
import numpy as np
from jaxtyping import Array, Float

from diffjax.config import UserError
from diffjax.evals import inside
from diffjax.evals.validation import validation_rows
from diffjax.model.decoder import Decoder
from diffjax.ops.diff_attention.reference import attention_maps
from diffjax.training.trained import Trained

if TYPE_CHECKING:
  from diffjax.evals.report import Settings

# The share of cells whose weights the colours tell apart; larger ones look alike.
_CLIP = 0.99
_TITLES = ("A₁", "A₂", "A₁ − λA₂")
# The pictures of a model change with its two lists; pointing at a cell names its two tokens.
_SCRIPT = """
for (const panel of document.querySelectorAll(".panel")) {
  const maps = JSON.parse(panel.querySelector("script").textContent);
  const [layer, head] = panel.querySelectorAll("select"), images = panel.querySelectorAll("img"), said = panel.querySelector("output");
  const show = () => maps.pictures[layer.value][head.value].forEach((picture, index) => {
    images[index].src = "data:image/png;base64," + picture.png;
    panel.querySelectorAll(".scale")[index].textContent = picture.scale;
  });
  layer.onchange = head.onchange = show;
  for (const image of images) {
    image.onmousemove = event => {
      const box = image.getBoundingClientRect(), count = maps.tokens.length;
      const at = (offset, size) => Math.min(count - 1, Math.max(0, Math.floor(offset / size * count)));
      const query = at(event.clientY - box.top, box.height), key = at(event.clientX - box.left, box.width);
      said.textContent = `query ${query} ${maps.tokens[query]} looks at key ${key} ${maps.tokens[key]}`;
    };
  }
  show();
}
"""


def add(section: ET.Element, models: Sequence[Trained], settings: Settings) -> None:
  """Adds the prompt, and a panel for each model.

  Raises:
    UserError: if a setting is out of range, or the prompt longer than a model takes.
  """
  ids = _prompt(models, settings)
  tokenizer = models[0].tokenizer
  tokens = [json.dumps(tokenizer.decode([token]), ensure_ascii=False) if token != tokenizer.separator else "(separator)" for token in ids]
  ET.SubElement(section, "p").text = (
    "Rows are queries, columns keys, of the prompt below. Colours follow the square root of a weight; in the difference red is positive "
    f"and blue negative. Each picture has a scale of its own, written below it, that ends where the largest {1 - _CLIP:.0%} begin."
  )
  ET.SubElement(section, "pre").text = tokenizer.decode(ids)
  for model in models:
    _panel(section, model, ids, tokens, settings)
  ET.SubElement(section, "script").text = _SCRIPT


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


def _panel(section: ET.Element, trained: Trained, ids: list[int], tokens: list[str], settings: Settings) -> None:
  last = trained.config.model.num_layers - 1
  layers = sorted({round(index * last / max(settings.layers - 1, 1)) for index in range(settings.layers)})
  heads = min(settings.heads, trained.config.model.num_heads)
  found = np.asarray(jax.jit(maps_of, static_argnums=(0, 3))(trained.model, trained.params, np.asarray([ids], np.int32), heads))
  pictures = [[[_picture(one) for one in by_head] for by_head in found[layer]] for layer in layers]
  panel = ET.SubElement(section, "div", {"class": "panel"})
  ET.SubElement(panel, "h3").text = trained.name
  choices: list[tuple[str, list[str]]] = [
    ("layer", [str(layer) for layer in layers]), ("head", ["mean of all", *map(str, range(heads))])
  ]  # fmt: skip
  for name, values in choices:
    label = ET.SubElement(panel, "label")
    label.text = f"{name} "
    select = ET.SubElement(label, "select")
    for index, value in enumerate(values):
      ET.SubElement(select, "option", value=str(index)).text = value
  ET.SubElement(panel, "output")
  row = ET.SubElement(panel, "div", {"class": "maps"})
  for title, picture in zip(_TITLES, pictures[0][0], strict=False):
    figure = ET.SubElement(row, "figure")
    ET.SubElement(figure, "img", src=f"data:image/png;base64,{picture['png']}", alt=f"{title} of {trained.name}")
    caption = ET.SubElement(figure, "figcaption")
    caption.text = f"{title}, "
    ET.SubElement(caption, "span", {"class": "scale"}).text = picture["scale"]
  # "<" is written so that no token can end the script.
  data = json.dumps({"tokens": tokens, "pictures": pictures}, ensure_ascii=True).replace("<", "\\u003c")
  ET.SubElement(panel, "script", type="application/json").text = data


def maps_of(model: Decoder, params: Any, tokens: Any, heads: int) -> Float[Array, "L heads_and_mean maps T T"]:
  """A₁, A₂ and A₁ − λA₂ (the one map of the Transformer) of the first row: the mean over all heads, then the first heads'."""

  def of_layer(attended: inside.Attended) -> Float[Array, "heads_and_mean maps T T"]:
    maps = attention_maps(attended.q, attended.k)[0]
    if attended.lam is not None:
      difference = maps[:, 0] - attended.lam[0].T[..., None] * maps[:, 1]
      maps = jnp.concatenate([maps, difference[:, None]], axis=1)
    return jnp.concatenate([jnp.mean(maps, axis=0, keepdims=True), maps[:heads]])

  return inside.measure(model, params, {"tokens": tokens}, attention=of_layer)["attention"]


def _picture(weights: Float[np.ndarray, "T T"]) -> dict[str, str]:
  """A map as a PNG of one pixel a cell, and what its colours mean."""
  seen = np.abs(weights[np.tri(len(weights), dtype=bool)])
  largest = float(np.quantile(seen, _CLIP) or seen.max() or 1.0)  # the first query's only key would outshine all others
  scaled = np.sign(weights) * np.sqrt(np.minimum(np.abs(weights) / largest, 1))
  signed = bool((weights < 0).any())
  colors = matplotlib.colormaps["RdBu_r"]((scaled + 1) / 2) if signed else matplotlib.colormaps["magma"](scaled)
  file = io.BytesIO()
  matplotlib.image.imsave(file, colors, format="png")
  return {"png": base64.b64encode(file.getvalue()).decode(), "scale": f"{'±' if signed else '0 to '}{largest:.3g}"}
