"""Turns a Transformer into a model of differential attention that computes the same function, for further training.

DIFF V2: every group of heads that shares a noise map gets its last head's query as the noise's. W_λ is 0, so λ = sigmoid(0) = ½ and a head
gives A_h V − ½ A_b V, b being that last head. The heads of a group read the same V; what they lack, ½ A_b V times the sum of their W_O, the
last head gives, whose own output is ½ A_b V: its W_O becomes 2 W_O + the sum of the others'. Without shared noise each head is a group, and
its W_O is doubled. Training makes signal and noise differ, since the noise query's gradient is −½ of what the signals' are.

DEX: W_D and what is learnt of λ are 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from diffjax.config import UserError
from diffjax.interop.layout import Model, allocate
from diffjax.model.shapes import parameter_shapes

ATTENTIONS = ("softmax", "diff_v2", "dex")


def adapted(
  model: Model, attention: str, num_noise_heads: int | None = None
) -> Model:
  """The model with another attention, and the same logits.

  Args:
    model: A Transformer, `attention` "softmax".
    attention: One of `ATTENTIONS`.
    num_noise_heads: Of DIFF V2, how many noise maps its heads share; None for one a head.

  Raises:
    UserError: if there is no way to that attention, the model is no Transformer, or its heads cannot share so many noise maps.
  """
  config = model.config
  if attention not in ATTENTIONS:
    raise UserError(
      f"--attention={attention}: a Transformer becomes one of {', '.join(ATTENTIONS)}"
    )
  if config.attention != "softmax":
    raise UserError(
      f"--attention={attention}: only a Transformer, attention 'softmax', is adapted; this model has {config.attention!r}"
    )
  if num_noise_heads is not None and attention != "diff_v2":
    raise UserError(
      f"--num_noise_heads={num_noise_heads}: only --attention=diff_v2 has noise maps; leave it out for {attention}"
    )
  if attention == "softmax":
    return model
  if attention == "diff_v2" and config.head_norm:
    raise UserError(
      "--attention=diff_v2: this model norms its heads, so that no DIFF V2 computes the same"
    )
  possible = [
    count
    for count in range(1, config.num_heads + 1)
    if config.num_heads % count == count % config.num_kv_heads == 0
  ]
  if num_noise_heads is not None and num_noise_heads not in possible:
    raise UserError(
      f"--num_noise_heads={num_noise_heads}: must divide the model's {config.num_heads} heads and be a multiple of its "
      f"{config.num_kv_heads} key/value heads; it can be {', '.join(map(str, possible))}"
    )
  shared = None if num_noise_heads == config.num_heads else num_noise_heads
  after = dataclasses.replace(
    config, attention=attention, num_noise_heads=shared
  )
  layers = dict(model.params["layers"]["attention"])
  if attention == "diff_v2":
    groups = num_noise_heads or config.num_heads
    for name in ("query", "query_bias"):
      if name in layers:
        layers[name] = _by_layer(
          lambda array: _with_noise(array, groups), layers[name]
        )
    layers["out"] = _by_layer(
      lambda array: _with_remainder(array, groups), layers["out"]
    )
  shapes = parameter_shapes(after)
  layers |= {
    name: np.zeros(shapes[name], np.float32)
    for name in ("lambda_hat", "dex_matrix", "dex_lambda")
    if name in shapes
  }
  return dataclasses.replace(
    model,
    config=after,
    params=model.params
    | {"layers": model.params["layers"] | {"attention": layers}},
  )


def _by_layer(
  change: Callable[[np.ndarray], np.ndarray], stacked: Any
) -> np.ndarray:
  """A change of each layer's array: one layer in memory at a time."""
  changed = allocate((len(stacked), *change(stacked[0]).shape))
  for layer, array in enumerate(stacked):
    changed[layer] = change(array)
  return changed


def _with_noise(query: np.ndarray, groups: int) -> np.ndarray:
  """[…, H, 1, D] to [… Q, H/Q + 1, D]."""
  signals = query.reshape(*query.shape[:-3], groups, -1, query.shape[-1])
  return np.concatenate([signals, signals[..., -1:, :]], axis=-2)


def _with_remainder(out: np.ndarray, groups: int) -> np.ndarray:
  """[H, V, E], where each group's last head makes up for the noise that the group's heads subtract."""
  heads = out.reshape(groups, -1, *out.shape[1:]).copy()
  heads[:, -1] += heads.sum(axis=1)
  return heads.reshape(out.shape)
