"""The attention maps that the report shows.

A variant determines which maps it has (`Attention.maps`). The report shows
these maps, and then the weights that they result in. `map_pictures.py` draws
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from diffjax.config import UserError, at_least
from diffjax.evals.methods import inside
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

# The titles of the two maps that `most_cancelled` compares.
SIGNAL_MAP = "A₁"
NOISE_MAP = "λA₂"

# The label of a first token without text, such as a separator.
_START_LABEL = "(start)"


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the maps."""

  # The text whose attention maps are shown. "" for the beginning of the
  # validation text
  prompt: str = ""
  # Maximum number of tokens in a map
  tokens: int = 96
  # Maximum number of layers to choose from. They are evenly spaced from the
  # first to the last
  layers: int = 6
  # Maximum number of heads to choose from: the first ones. The mean over all
  # heads can be chosen too
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


class Cancellation(NamedTuple):
  """How much of a head's signal map its noise map removes.

  Attributes:
    layer: the layer of the head, from 0.
    head: the head, from 0.
    share: Σ min(A₁, λA₂) / Σ A₁.
  """

  layer: int
  head: int
  share: float


def check(models: Sequence[Trained], settings: Settings) -> None:
  """Raises the errors of `compute`, without computing maps.

  Raises:
    UserError: if a setting is out of range, or if the prompt is longer than a
      model allows.
  """
  _prompt_ids(models, settings)


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
  ids = _prompt_ids(models, settings)
  tokenizer = models[0].tokenizer
  tokens = []
  for index, token in enumerate(ids):
    if index == 0 and not tokenizer.has_text([token]):
      tokens.append(_START_LABEL)
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


def _prompt_ids(models: Sequence[Trained], settings: Settings) -> list[int]:
  """Checks the settings, and returns the tokens of the prompt."""
  bound = at_least(1)
  for name in ("tokens", "layers", "heads"):
    value = getattr(settings, name)
    if not bound.holds(value):
      raise UserError(f"set.report.{name} = {value}: {bound}")

  max_length = min(model.config.model.max_length for model in models)
  limit = min(settings.tokens, max_length)
  if not settings.prompt:
    return _validation_ids(models[0], limit)
  ids = models[0].tokenizer.encode_prompt(settings.prompt)
  if len(ids) > limit:
    raise UserError(
      f"set.report.prompt has {len(ids)} tokens, its start included:"
      f" set.report.tokens = {settings.tokens} are drawn, and the model takes"
      f" at most {max_length} (config.model.max_length)"
    )
  return ids


def _validation_ids(trained: Trained, limit: int) -> list[int]:
  """Returns the first tokens of the first validation document."""
  batch = next(iter(validation_rows("report", trained, 1)))
  segment_ids = batch["segment_ids"][0]
  document_length = int((segment_ids == segment_ids[0]).sum())
  num_tokens = min(document_length, limit)
  return batch["tokens"][0, :num_tokens].tolist()


def maps_of(
  model: Decoder, params: Any, tokens: Int[Array, "B T"]
) -> LayerMaps:
  """Returns the maps of the first row, without plain layers.

  Args:
    model: the decoder.
    params: its parameters.
    tokens: the rows. Each is one document.
  """

  def layer_maps(attended: inside.AttentionInputs) -> LayerMaps:
    length = attended.q.shape[1]
    queries = attended.queries(0, length)
    terms = queries.maps()
    titles = (*terms, attended.layer.weights_formula)
    maps = jnp.stack([*terms.values(), queries.weights()], axis=2)
    first_row = maps[0]  # [H, maps, T, T]
    mean = jnp.mean(first_row, axis=0, keepdims=True)
    return LayerMaps(titles, jnp.concatenate([mean, first_row]))

  results = inside.measure(
    model,
    params,
    {"tokens": tokens},
    attention=layer_maps,
    include_plain_layers=False,
  )
  return results["attention"]


def most_cancelled(maps: Maps) -> Cancellation:
  """Returns the head in which λA₂ removes the largest share of A₁.

  The share is Σ min(A₁, λA₂) / Σ A₁. The first query does not count, because it
  sees one key.

  Args:
    maps: the maps of a model with `has_noise_map`.
  """
  heads = maps.weights[:, 1:, :, 1:]  # [L, H, maps, T − 1, T]
  signal = heads[:, :, maps.titles.index(SIGNAL_MAP)]
  noise = heads[:, :, maps.titles.index(NOISE_MAP)]
  removed = np.minimum(signal, noise).sum(axis=(-2, -1))
  shares = removed / signal.sum(axis=(-2, -1))
  layer, head = np.unravel_index(np.argmax(shares), shares.shape)
  return Cancellation(int(layer), int(head), float(shares[layer, head]))
