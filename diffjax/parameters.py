"""The letters of all axes, and the table of the decoder's parameters.

Every axis has one letter, in shapes, in jaxtyping annotations and in the table:

  B  batch
  T  query length
  S  key length, or the tokens of a page
  E  model width
  H  heads
  Q  query groups. The heads of a group share a noise map.
  G  maps of a query group: its heads' signal maps, then the noise map
  K  key and value heads
  M  key maps: 2 if noise maps have their own keys, else 1
  D  width of queries and keys
  V  width of values
  U  width of values, for the second axis of DEX's square matrix [V, U]
  F  width of the feed-forward layer
  W  the three weights of PolyNorm
  L  layers
  N  vocabulary
  P  pages of a key/value cache; in interop/, the two numbers of a RoPE pair
  J  RoPE pairs of a head, D / 2
  C  V / D

So H = Q·(G − 1) with noise maps. Without, G = 1 and H = Q. X, Y and Z
are axes of any size. A file that needs more letters defines them at its top.

The table gives the axes of each parameter. Sharding, weight decay, Muon's
matrices, FLOPs, parameter counts and conversions follow from it. An attention
variant adds the parameters that only it has (`Attention.extra_parameters`).
The layers state the shapes of their parameters, and training compares them with
the table.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import warnings
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One array of a decoder's parameters.

  Attributes:
    axes: a letter for each axis. A layer's array has a leading L.
    inputs: the axes that a matrix product sums over. Empty for embeddings,
      gains, biases and λ vectors. Matrices have weight decay, Muon
      orthogonalizes them, and each element costs one multiply-add per token.
    shared: axes of the activations for which a matrix is used repeatedly, such
      as "H" if all heads share it.
  """

  axes: str
  inputs: str = ""
  shared: str = ""

  @property
  def outputs(self) -> str:
    """Returns the axes of a matrix that its product keeps.

    Example: axes = "LEQGD", inputs = "E" → "QGD"
    """
    return "".join(axis for axis in self.axes if axis not in "L" + self.inputs)


# The parameters that every variant may have. Registered variants add their own.
PARAMETERS = {
  "embedding": Parameter("NE"),
  "unembedding": Parameter("NE"),
  "final_norm": Parameter("E"),
  "final_norm_shift": Parameter("E"),
  "attention_norm": Parameter("LE"),
  "attention_norm_shift": Parameter("LE"),
  "query": Parameter("LEQGD", inputs="E"),
  "key": Parameter("LEKMD", inputs="E"),
  "value": Parameter("LEKV", inputs="E"),
  "out": Parameter("LHVE", inputs="HV"),
  "query_bias": Parameter("LQGD"),
  "key_bias": Parameter("LKMD"),
  "value_bias": Parameter("LKV"),
  "out_bias": Parameter("LE"),
  "head_gain": Parameter("LV"),
  "ffn_norm": Parameter("LE"),
  "ffn_norm_shift": Parameter("LE"),
  "gate": Parameter("LEF", inputs="E"),
  "up": Parameter("LEF", inputs="E"),
  "down": Parameter("LFE", inputs="F"),
  "poly_weights": Parameter("LW"),
  "poly_constant": Parameter("L"),
}

# Parameters that exist only with the options projection_biases and
# norm = "layer".
BIASES = ("query_bias", "key_bias", "value_bias", "out_bias")
SHIFTS = ("final_norm_shift", "attention_norm_shift", "ffn_norm_shift")

# The fields of config.model that give the sizes of axes. The attention class
# determines G, M, V and U, and also Q if num_noise_heads is None.
FIELDS = {
  "N": "vocab_size",
  "L": "num_layers",
  "E": "embed_dim",
  "H": "num_heads",
  "Q": "num_noise_heads",
  "K": "num_kv_heads",
  "D": "head_dim",
  "F": "ffn_dim",
}

# The size of W: PolyNorm weights the cube, the square and the number itself.
NUM_POLY_NORM_WEIGHTS = 3


# The letters that are in use. The parameters of attention variants may have the
# letters of _VARIANT_AXES.
_LEGEND = frozenset("BTSEHQGKMDVUFWLNPJC")
_VARIANT_AXES = frozenset("LEHQGKMDVU")


def is_matrix(name: str) -> bool:
  """Returns whether a parameter is a matrix, which a product sums over.

  Matrices have weight decay. Names that are not in the table are no matrices.
  """
  return name in PARAMETERS and bool(PARAMETERS[name].inputs)


def add_parameters(
  parameters: Mapping[str, Parameter], extra_axes: Mapping[str, int]
) -> None:
  """Adds the parameters of an attention variant to the table.

  Args:
    parameters: the parameters by name.
    extra_axes: the sizes of axes that only this variant has, by letter.

  Raises:
    ValueError: if a parameter has an axis of unknown size, if it does not begin
      with L, or if another variant has a different parameter of this name.
  """
  for letter in extra_axes:
    if not re.fullmatch("[A-Z]", letter) or letter in _LEGEND:
      raise ValueError(
        f"extra_axes has {letter!r}: must be a capital letter that is not in"
        " use for another axis (see diffjax/parameters.py)"
      )
  known_axes = _VARIANT_AXES | extra_axes.keys()
  for name, parameter in parameters.items():
    if not parameter.axes.startswith("L"):
      raise ValueError(
        f"parameter {name!r} has the axes {parameter.axes!r}: the first one"
        " must be L, the layers"
      )
    unknown_axes = set(parameter.axes) - known_axes
    if unknown_axes:
      raise ValueError(
        f"parameter {name!r} has the axis {min(unknown_axes)!r}: it may have"
        f" the axes {''.join(sorted(known_axes))} (see diffjax/parameters.py);"
        " give the size of a new axis in extra_axes"
      )
    if len(set(parameter.axes)) < len(parameter.axes):
      raise ValueError(
        f"parameter {name!r} has the axes {parameter.axes!r}: each letter may"
        " occur once"
      )
    if not set(parameter.inputs) <= set(parameter.axes) - {"L"}:
      raise ValueError(
        f"parameter {name!r}: inputs = {parameter.inputs!r} must be axes of"
        f" {parameter.axes!r} other than L"
      )
    if PARAMETERS.get(name, parameter) != parameter:
      raise ValueError(
        f"parameter {name!r} is {PARAMETERS[name]} already: rename it, or give"
        " it the same axes"
      )
  PARAMETERS.update(parameters)


def __getattr__(name: str) -> Any:
  """Returns what version 0.1 offered under another name."""
  if name != "MATRICES":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  warnings.warn(
    "MATRICES is deprecated, because variants add parameters: use is_matrix",
    DeprecationWarning,
    stacklevel=2,
  )
  # It adds the parameters of the package's variants.
  importlib.import_module("diffjax.model.attention")
  return frozenset(name for name in PARAMETERS if is_matrix(name))
