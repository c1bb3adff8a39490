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
  """Returns token ids as int32, after a check of each of them.

  A compiled program cannot check them. It would read other rows of the
  embedding, or NaN.

  Args:
    ids: a sequence, or an array of one axis and any integer dtype.
    vocab_size: N of the model.
    name: what the ids are, for messages, such as "prompt 0".

  Raises:
    UserError: if they are no sequence, or one of them is no integer from 0 to
      N − 1. It names the first one and its position.
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
  for position, token in enumerate(ids):
    if not is_integer(token) or not 0 <= token < vocab_size:
      raise _wrong_id(token, position, vocab_size, name)
  return np.fromiter(map(operator.index, ids), np.int32, len(ids))


def is_integer(value: Any) -> bool:
  """Returns True for integers of Python, NumPy and JAX, but not for bools."""
  if type(value) is int:  # Most values are: they are checked at once.
    return True
  if isinstance(value, bool | np.bool_):
    return False
  if isinstance(value, jax.Array) and value.dtype == bool:
    return False
  try:
    operator.index(value)
  except TypeError:
    return False
  return True


def _validated_array(
  ids: Int[np.ndarray, "T"], vocab_size: int, name: str
) -> Int[np.ndarray, "T"]:
  # Compared as Python integers: a large vocabulary size does not fit into small
  # integer types.
  if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
    for position, token in enumerate(ids.tolist()):
      if not 0 <= token < vocab_size:
        raise _wrong_id(token, position, vocab_size, name)
  return ids.astype(np.int32)


def _wrong_id(
  token: Any, position: int, vocab_size: int, name: str
) -> UserError:
  if isinstance(token, np.generic | jax.Array):
    token = token.tolist()
  return UserError(
    f"{name} has {token!r} at position {position}: token ids are integers from"
    f" 0 to {vocab_size - 1}, since config.model.vocab_size = {vocab_size}"
  )
