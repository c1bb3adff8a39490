"""Matrices in 8 bits, for models that are no longer trained.

Each column of a matrix, the weights of one output, has a scale: its largest
|weight| divided by 127. Norms, embeddings, the parameters of λ and DEX's matrix
are not rounded. The model's modules accept such a matrix in place of a float32
one. It is converted where it is multiplied, which a TPU does while it reads the
matrix from memory.

This module wraps the functions of Google's qwix that round arrays. qwix's
`quantize_model`, which changes a model from outside, cannot be used. It does
not see the matrix products, because they define their own derivatives, and it
rounds the λ vectors of DIFF instead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from diffjax.config import UserError
from diffjax.parameters import PARAMETERS, is_matrix

# These matrices are not rounded, because they are small and determine λ.
_NOT_ROUNDED = ("lambda_hat", "dex_matrix")


def quantise(params: dict[str, Any]) -> dict[str, Any]:
  """Returns the parameters of a decoder with the layers' matrices in int8.

  Args:
    params: The parameters in float32. The matrices are donated, one after the
      other, so that the memory never holds both versions of the model.

  Raises:
    UserError: if qwix is not installed.
  """
  try:
    import qwix
  except ImportError as error:
    raise UserError(
      "weights in int8 need qwix: pip install 'diffjax[int8]'"
    ) from error

  def round_matrix(path: Any, leaf: jax.Array) -> Any:
    # The last key of the path is the parameter's name, such as "query".
    name = path[-1].key
    if not is_matrix(name) or name in _NOT_ROUNDED:
      return leaf
    quantise_matrix = functools.partial(
      qwix.quantize, qtype=jnp.int8, channelwise_axes=_output_axes(name)
    )
    # jit is used because it can donate the float32 matrix.
    return jax.jit(quantise_matrix, donate_argnums=0)(leaf)

  return jax.tree_util.tree_map_with_path(round_matrix, params)


def _output_axes(name: str) -> list[int]:
  """Returns the axes of a matrix that index its outputs.

  A product with the matrix sums over all other axes. The layers' axis L counts
  as an output.

  Example: "query" is [L, E, Q, G, D] with the input E → [0, 2, 3, 4]
  """
  parameter = PARAMETERS[name]
  output_axes = []
  for axis, letter in enumerate(parameter.axes):
    if letter not in parameter.inputs:
      output_axes.append(axis)
  return output_axes


def is_quantised(leaf: Any) -> bool:
  """Returns whether a parameter is an int8 matrix.

  Such a matrix is qwix's pytree of int8 numbers and their scales in float32.
  """
  return hasattr(leaf, "qvalue")


def dequantised(matrix: Any) -> jax.Array:
  """Returns an int8 matrix in the dtype of its scales.

  Other matrices are returned unchanged.
  """
  if not is_quantised(matrix):
    return matrix
  import qwix

  return qwix.dequantize(matrix)
