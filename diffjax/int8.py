"""Matrices in 8 bits, for models that are used and no longer trained: all that diffjax asks of Google's qwix.

Each column of a matrix, the weights of one output, has a scale: the largest |weight| over 127. Norms, embeddings, λ's
parameters and DEX's matrix stay as they are. The model's own modules take such a matrix as it is; it is made whole where it is multiplied,
which a TPU does on its way from memory.

qwix's `quantize_model`, which changes a model from outside, is of no use here: it does not see the products, since they have derivatives of
their own, and rounds DIFF's λ vectors instead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from diffjax.config import UserError
from diffjax.parameters import PARAMETERS, is_matrix

# Matrices that stay as they are, because they are small and determine λ.
_NOT_ROUNDED = ("lambda_hat", "dex_matrix")


def quantise(params: dict[str, Any]) -> dict[str, Any]:
  """A decoder's parameters with the layers' matrices in int8. The arrays of these are given up, one after the other.

  Raises:
    UserError: if qwix is not installed.
  """
  try:
    import qwix
  except ImportError as error:
    raise UserError(
      "weights in int8 need qwix: pip install 'diffjax[int8]'"
    ) from error

  def change(path: Any, leaf: jax.Array) -> Any:
    name = path[-1].key
    if not is_matrix(name) or name in _NOT_ROUNDED:
      return leaf
    columns = [
      axis
      for axis, letter in enumerate(PARAMETERS[name].axes)
      if letter not in PARAMETERS[name].inputs
    ]
    return jax.jit(
      functools.partial(
        qwix.quantize, qtype=jnp.int8, channelwise_axes=columns
      ),
      donate_argnums=0,
    )(leaf)

  return jax.tree_util.tree_map_with_path(change, params)


def is_quantised(leaf: Any) -> bool:
  """True for a matrix in int8: a pytree of the numbers and their scales, in float32."""
  return hasattr(leaf, "qvalue")


def dequantised(matrix: Any) -> jax.Array:
  """A matrix in int8 in its scales' dtype; any other as it is."""
  if not is_quantised(matrix):
    return matrix
  import qwix

  return qwix.dequantize(matrix)
