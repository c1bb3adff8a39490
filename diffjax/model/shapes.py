"""The sizes of a decoder's axes and the shapes of its parameters.

They follow from the config and the table in `diffjax/parameters.py`. Tracing
`Decoder.init` gives the same shapes. It takes 30 to 70 ms, where this module
takes 0.2 ms, and it needs a backend. A test compares the two.
"""

from __future__ import annotations

from diffjax.config import ModelConfig
from diffjax.model.attention import attention_class
from diffjax.model.stacks import stacks
from diffjax.parameters import (
  BIASES,
  FIELDS,
  NUM_POLY_NORM_WEIGHTS,
  PARAMETERS,
  SHIFTS,
)


def axis_sizes(config: ModelConfig) -> dict[str, int]:
  """Returns the size of every axis of a decoder's parameters, by letter.

  Example: {"N": 32000, "L": 12, "E": 768, "H": 6, …}. diffjax/parameters.py
  lists the letters. E is the model width, and H the number of heads.

  Raises:
    UserError: if the layer class does not support the config.
    ValueError: if the heads cannot share the noise maps evenly.
  """
  sizes = {}
  for axis, field in FIELDS.items():
    sizes[axis] = getattr(config, field)
  # The layer fills in what the config leaves to it: G, M, V, U, and maybe Q.
  layer = attention_class(config).from_config(config, parent=None)
  sizes["W"] = NUM_POLY_NORM_WEIGHTS
  sizes.update(layer.axis_sizes(config.embed_dim))
  return sizes


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every parameter of a decoder, by name.

  The shapes of layer parameters begin with L, the number of layers. If a
  decoder has softmax layers below its own ones (`plain_layers`), the names of
  their parameters begin with "plain_layers/".

  Example: {"embedding": (32000, 768), "query": (12, 768, 6, 2, 64), …}

  Raises:
    UserError: if the layer class does not support the config.
    ValueError: if the heads cannot share the noise maps evenly.
  """
  shapes = {}
  for stack_name, stack in stacks(config).items():  # stacks of equal layers
    sizes = axis_sizes(stack)
    for parameter in _parameter_names(stack):
      axes = PARAMETERS[parameter].axes
      name = parameter
      is_layer_parameter = axes.startswith("L")
      if is_layer_parameter and stack_name != "layers":
        name = f"{stack_name}/{parameter}"
      shapes[name] = tuple(sizes[axis] for axis in axes)
  return shapes


def _parameter_names(config: ModelConfig) -> list[str]:
  """Returns the names of a decoder's parameters, for one stack of layers.

  They are keys of `PARAMETERS`, and depend on which options are set.
  """
  names = ["embedding"]
  if not config.tie_embeddings:
    names.append("unembedding")
  names.append("final_norm")

  names += ["attention_norm", "query", "key", "value", "out"]
  names += attention_class(config).extra_parameters
  if config.head_norm:
    names.append("head_gain")
  names += ["ffn_norm", "gate", "up", "down"]
  if config.ffn_activation == "poly_norm":
    names += ["poly_weights", "poly_constant"]

  if config.projection_biases:
    names += BIASES
  if config.norm == "layer":
    names += SHIFTS
  return names
