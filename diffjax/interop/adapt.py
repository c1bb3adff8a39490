"""Converts a Transformer to differential attention without changing its logits.

The result is a starting point for further training.

DIFF V2: the heads are in groups, and the heads of a group share a noise map.
The noise query of a group is a copy of the query of the group's last head, b.
W_λ is 0, so λ = sigmoid(0) = ½, and head h gives

  O_h = A_h V − ½ A_b V

All heads of a group read the same V. Without the noise, the group's output is
Σ_h A_h V W_h, where W_h is the part of W_O that head h has. Two changes restore
it, both in W_b: the last head gives only O_b = ½ A_b V, so W_b is doubled. The
noise subtracts ½ A_b V Σ_{h≠b} W_h, so Σ_{h≠b} W_h is added to W_b:

  W_b ← 2 W_b + Σ_{h≠b} W_h = W_b + Σ_h W_h

If no heads share a noise map, each head is a group, and its W_h is doubled.
Training makes the noise query differ from the signal queries, because its
gradient is −½ times theirs.

DEX: the matrix W_D and the learned part of λ are 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import einops
import numpy as np
from jaxtyping import Float

from diffjax.config import ModelConfig, UserError
from diffjax.interop.layout import Model, allocate
from diffjax.model.shapes import parameter_shapes

# What a Transformer can become: values of config.model.attention.
ATTENTIONS = ("softmax", "diff_v2", "dex")

# Parameters of the adapted variants that a Transformer lacks. They start at 0.
_NEW_PARAMETERS = ("lambda_hat", "dex_matrix", "dex_lambda")


def adapted(
  model: Model, attention: str, num_noise_heads: int | None = None
) -> Model:
  """Returns the model with another attention, and the same logits.

  Args:
    model: A Transformer, `attention` "softmax".
    attention: One of `ATTENTIONS`.
    num_noise_heads: The number of noise maps, for "diff_v2". The heads of a
      group share one. None for one noise map per head.

  Raises:
    UserError: if the model is not a Transformer, or cannot be converted to this
      attention.
  """
  _check_attention(model.config, attention, num_noise_heads)
  if attention == "softmax":
    return model
  if attention == "diff_v2":
    _check_noise_heads(model.config, num_noise_heads)

  num_heads = model.config.num_heads
  # A config has None if each head has its own noise map.
  shared_noise_heads = num_noise_heads
  if num_noise_heads == num_heads:
    shared_noise_heads = None
  config = dataclasses.replace(
    model.config, attention=attention, num_noise_heads=shared_noise_heads
  )

  attention_params = dict(model.params["layers"]["attention"])
  if attention == "diff_v2":
    num_groups = num_noise_heads or num_heads
    attention_params = _add_noise_maps(attention_params, num_groups)
  # These new parameters have no effect if they are 0.
  shapes = parameter_shapes(config)
  for name in _NEW_PARAMETERS:
    if name in shapes:
      attention_params[name] = np.zeros(shapes[name], np.float32)

  layers = {**model.params["layers"], "attention": attention_params}
  params = {**model.params, "layers": layers}
  return dataclasses.replace(model, config=config, params=params)


def _check_attention(
  config: ModelConfig, attention: str, num_noise_heads: int | None
) -> None:
  """Raises UserError if the model cannot get this attention."""
  if attention not in ATTENTIONS:
    raise UserError(
      f"--attention={attention}: a Transformer becomes one of"
      f" {', '.join(ATTENTIONS)}"
    )
  if config.attention != "softmax":
    raise UserError(
      f"--attention={attention}: only a Transformer, attention 'softmax', can"
      f" be adapted; this model has {config.attention!r}"
    )
  if num_noise_heads is not None and attention != "diff_v2":
    raise UserError(
      f"--num_noise_heads={num_noise_heads}: only --attention=diff_v2 has noise"
      f" maps; leave it out for {attention}"
    )
  if attention == "diff_v2" and config.head_norm:
    raise UserError(
      "--attention=diff_v2: this model has a head norm, with which no DIFF V2"
      " model has the same logits"
    )


def _check_noise_heads(
  config: ModelConfig, num_noise_heads: int | None
) -> None:
  """Raises UserError if the heads cannot share this number of noise maps."""
  if num_noise_heads is None:
    return
  possible = []
  for count in range(1, config.num_heads + 1):
    if config.num_heads % count == 0 and count % config.num_kv_heads == 0:
      possible.append(count)
  if num_noise_heads not in possible:
    raise UserError(
      f"--num_noise_heads={num_noise_heads}: must divide the model's"
      f" {config.num_heads} heads and be a multiple of its"
      f" {config.num_kv_heads} key/value heads; it can be"
      f" {', '.join(str(count) for count in possible)}"
    )


def _add_noise_maps(
  attention_params: dict[str, Any], num_groups: int
) -> dict[str, Any]:
  """Adds noise queries, and changes W_O so that the outputs stay the same.

  Args:
    attention_params: The parameters of a Transformer's attention layers.
    num_groups: The number of noise maps. The heads of a group share one.
  """
  params = dict(attention_params)
  for name in ("query", "query_bias"):
    if name in params:
      params[name] = _convert_layers(
        _append_noise_query, params[name], num_groups
      )
  params["out"] = _convert_layers(_compensate_noise, params["out"], num_groups)
  return params


def _convert_layers(
  convert: Callable[[np.ndarray, int], np.ndarray],
  stacked: np.ndarray,
  num_groups: int,
) -> np.ndarray:
  """Converts the arrays of all layers, one layer at a time to save memory.

  Args:
    convert: Converts the array of a layer, given the number of groups.
    stacked: The arrays of all layers. Axis 0 is the layer.
    num_groups: The number of groups of heads.
  """
  layer_shape = convert(stacked[0], num_groups).shape
  converted = allocate((len(stacked), *layer_shape))
  for layer, array in enumerate(stacked):
    converted[layer] = convert(array, num_groups)
  return converted


def _append_noise_query(
  query: Float[np.ndarray, "*E H 1 D"], num_groups: int
) -> Float[np.ndarray, "*E Q G D"]:
  """Appends to each group of heads a copy of its last query, for the noise.

  There are Q groups. A group has S heads and, with the copy, G = S + 1 queries.
  """
  signals = einops.rearrange(query, "... (Q S) 1 D -> ... Q S D", Q=num_groups)
  return np.concatenate([signals, signals[..., -1:, :]], axis=-2)


def _compensate_noise(
  out: Float[np.ndarray, "H V E"], num_groups: int
) -> Float[np.ndarray, "H V E"]:
  """Returns W_O with the effect of the noise maps undone, if λ is ½.

  W_b, the part of W_O of a group's last head, becomes W_b + Σ_h W_h. The
  docstring of the file has the derivation.
  """
  heads = einops.rearrange(out, "(Q S) V E -> Q S V E", Q=num_groups).copy()
  heads[:, -1] += heads.sum(axis=1)
  return einops.rearrange(heads, "Q S V E -> (Q S) V E")
