"""Checks of the integers that users pass."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from diffjax.config import UserError


def validated_token_ids(
  ids: Sequence[int] | np.ndarray | jax.Array, vocab_size: int, name: str
) -> Int[np.ndarray, "T"]:
  """Returns token ids as an int32 array, after checking each of them.

  Compiled programs do not check them. For an invalid id, JAX reads another row
  of the embedding, or NaN.

  Args:
    ids: a sequence, or an array with one axis and any integer dtype.
    vocab_size: N, the size of the model's vocabulary.
    name: a name of the ids for error messages, such as "prompt 0".

  Raises:
    UserError: if `ids` is not a sequence, or if an id is not an integer from 0
      to N − 1. The message has the first such id and its position.
  """
  if isinstance(ids, np.ndarray | jax.Array):
    ids = np.asarray(ids)
    if ids.ndim != 1:
      raise UserError(
        f"{name} is an array of shape {ids.shape}: pass a sequence of token ids"
      )
    if jnp.issubdtype(ids.dtype, jnp.integer):
      return _validated_array(ids, vocab_size, name)
  elif not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray):
    raise UserError(f"{name} is {ids!r}: pass a sequence of token ids")
  # An array of another dtype, such as float, is checked like a sequence. So the
  # error names its first element that is no integer.
  for position, token in enumerate(ids):
    if not is_integer(token) or not 0 <= token < vocab_size:
      raise _invalid_id(token, position, vocab_size, name)
  return np.fromiter(map(operator.index, ids), np.int32, len(ids))


def is_integer(value: Any) -> bool:
  """Returns True for integers of Python, NumPy and JAX, but not for bools.

  An array without axes counts as a number of its dtype.
  """
  if type(value) is int:  # Fast path for most values.
    return True
  if isinstance(value, bool | np.bool_):
    return False
  if isinstance(value, jax.Array) and value.dtype == bool:
    return False
  try:
    operator.index(value)  # Raises for floats and for other types.
  except TypeError:
    return False
  return True


def _validated_array(
  ids: Int[np.ndarray, "T"], vocab_size: int, name: str
) -> Int[np.ndarray, "T"]:
  """Returns an array of integers as int32, after checking each of them."""
  if len(ids) == 0:
    return ids.astype(np.int32)
  # Compares Python integers, because the vocabulary size may be too large for
  # the dtype of the array, such as uint8.
  smallest = int(ids.min())
  largest = int(ids.max())
  if smallest < 0 or largest >= vocab_size:
    # Finds the first invalid id, which the error names.
    for position, token in enumerate(ids.tolist()):
      if not 0 <= token < vocab_size:
        raise _invalid_id(token, position, vocab_size, name)
  return ids.astype(np.int32)


def _invalid_id(
  token: Any, position: int, vocab_size: int, name: str
) -> UserError:
  """Returns the error for an id that the model does not have."""
  # The error shows a Python number, and not a NumPy scalar or an array.
  if isinstance(token, np.generic | jax.Array):
    token = token.tolist()
  return UserError(
    f"{name} has {token!r} at position {position}: token ids are integers from"
    f" 0 to {vocab_size - 1}, since config.model.vocab_size = {vocab_size}"
  )
