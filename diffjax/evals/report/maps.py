"""The attention maps that the report shows.

An attention variant defines its maps (`Attention.maps`), such as A₁ and λA₂.
The report shows them, and then the attention weights that result from them,
such as A₁ − λA₂. `map_pictures.py` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from diffjax.data.tokenizer import Tokenizer
from diffjax.evals.methods import inside
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

# The titles of the two maps that `most_cancelled` compares.
SIGNAL_MAP = "A₁"
NOISE_MAP = "λA₂"

# The label of a first token without text, such as a separator.
_START_LABEL = "(start)"


@flax.struct.dataclass
class LayerMaps:
  """The maps of layers, with their titles.

  Attributes:
    titles: The titles of the variant's maps. The last one is of its weights.
    weights: The maps by query and key. Their mean over heads is first, followed
      by each head. A single layer has no axis L.
  """

  titles: tuple[str, ...] = flax.struct.field(pytree_node=False)
  weights: Float[Array, "*L mean_and_heads maps T T"]


class Maps(NamedTuple):
  """The maps of a model.

  Attributes:
    trained: The model.
    tokens: The text of each token.
    titles: The titles of the maps. The last one is of the weights.
    weights: The maps by query and key. Their mean over heads is first, followed
      by each head.
  """

  trained: Trained
  tokens: list[str]
  titles: tuple[str, ...]
  weights: Float[np.ndarray, "L mean_and_heads maps T T"]

  @property
  def num_layers(self) -> int:
    return self.weights.shape[0]

  @property
  def num_heads(self) -> int:
    """The number of heads of a layer, without the mean over heads."""
    return self.weights.shape[1] - 1

  @property
  def has_noise_map(self) -> bool:
    """Whether λA₂ is subtracted from A₁, as `most_cancelled` requires."""
    return SIGNAL_MAP in self.titles and NOISE_MAP in self.titles


class Cancellation(NamedTuple):
  """How much of a head's signal map A₁ its noise map λA₂ removes.

  Attributes:
    layer: The index of the head's layer.
    head: The index of the head.
    share: Σ min(A₁, λA₂) / Σ A₁. The sums are over queries and keys.
  """

  layer: int
  head: int
  share: float


def compute(models: Sequence[Trained], ids: Sequence[int]) -> list[Maps]:
  """Returns each model's attention maps of a text.

  Args:
    models: The models, with one tokenizer.
    ids: The token ids of the text.
  """
  tokens = _token_texts(models[0].tokenizer, ids)
  compute_maps = jax.jit(maps_of, static_argnums=0)
  batch = np.asarray([ids], np.int32)
  maps = []
  for model in models:
    layers = compute_maps(model.model, model.params, batch)
    weights = np.asarray(layers.weights)
    maps.append(Maps(model, tokens, layers.titles, weights))
  return maps


def _token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
  """Returns the text of each token, as labels of the maps."""
  texts = []
  for index, token in enumerate(ids):
    if index == 0 and not tokenizer.has_text([token]):
      texts.append(_START_LABEL)
    else:
      texts.append(tokenizer.decode_after(ids[:index], [token]))
  return texts


def maps_of(
  model: Decoder, params: Any, tokens: Int[Array, "B T"]
) -> LayerMaps:
  """Returns the attention maps of the first row of a batch, by layer.

  Layers with softmax attention in a model of another variant (plain layers) are
  left out, because they have other maps.

  Args:
    model: The decoder.
    params: Its parameters.
    tokens: The rows. Each is one document.
  """
  results = inside.measure(
    model,
    params,
    {"tokens": tokens},
    attention=_maps_of_layer,
    include_plain_layers=False,
  )
  return results["attention"]


def _maps_of_layer(inputs: inside.AttentionInputs) -> LayerMaps:
  """Returns the attention maps of the first row, from a layer's inputs."""
  length = inputs.q.shape[1]
  queries = inputs.queries(0, length)
  # The variant's maps by title, such as A₁ and λA₂. Each is [B, H, T, T].
  maps_by_title = queries.maps()
  titles = (*maps_by_title, inputs.layer.weights_formula)
  maps = jnp.stack([*maps_by_title.values(), queries.weights()], axis=2)
  first_row = maps[0]  # [H, maps, T, T]
  mean = jnp.mean(first_row, axis=0, keepdims=True)
  return LayerMaps(titles, jnp.concatenate([mean, first_row]))


def most_cancelled(maps: Maps) -> Cancellation:
  """Returns the head in which λA₂ removes the largest share of A₁.

  The share is Σ min(A₁, λA₂) / Σ A₁, and the sums are over queries and keys.
  The first query is left out, because it sees only one key.

  Args:
    maps: The maps of a model with `has_noise_map`.
  """
  # Index 0 of the second axis is the mean over heads. Index 0 of the fourth
  # axis is the first query.
  heads = maps.weights[:, 1:, :, 1:]  # [L, H, maps, T − 1, T]
  signal = heads[:, :, maps.titles.index(SIGNAL_MAP)]
  noise = heads[:, :, maps.titles.index(NOISE_MAP)]
  removed = np.minimum(signal, noise).sum(axis=(-2, -1))
  shares = removed / signal.sum(axis=(-2, -1))
  layer, head = np.unravel_index(np.argmax(shares), shares.shape)
  return Cancellation(int(layer), int(head), float(shares[layer, head]))
