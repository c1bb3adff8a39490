"""Generation without a key/value cache: whole rows are computed again.

Some attention variants cannot be decoded from the keys and values of earlier
tokens, for example if the weights of a query depend on other queries. For them
the sampler stores the tokens, and runs the model over all of them for every new
token. That is slow, and correct for every causal model.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffjax.config import UserError
from diffjax.model.decoder import Decoder


@flax.struct.dataclass
class TokenHistory:
  """The tokens that the model has read, in rows of a batch.

  Attributes:
    tokens: the tokens of each row, then zeros.
    lengths: the number of tokens that each row has read. If it is above S, the
      last ones were dropped.
  """

  tokens: Int[Array, "B S"]
  lengths: Int[Array, "B"]


def empty_history(
  model: Decoder, batch_size: int, capacity: int
) -> TokenHistory:
  """Returns a history without tokens.

  Args:
    model: the decoder.
    batch_size: B, the number of rows.
    capacity: S, the most tokens of a row.

  Raises:
    UserError: if the model is not causal.
  """
  if not model.config.causal:
    raise UserError(
      "config.model.causal = False: only a model whose tokens do not depend on"
      " later ones can generate"
    )
  return TokenHistory(
    tokens=jnp.zeros((batch_size, capacity), jnp.int32),
    lengths=jnp.zeros(batch_size, jnp.int32),
  )


def extend_history(
  model: Decoder,
  params: dict[str, Any],
  tokens: Int[Array, "B T"],
  history: TokenHistory,
  counts: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T E"], TokenHistory]:
  """Appends T tokens to every row, and runs the decoder over the whole rows.

  The hidden states are the same as from `cache.extend`, without a cache of keys
  and values.

  Args:
    model: the decoder.
    params: its parameters.
    tokens: the new tokens. Those for which a row has no room are dropped.
    history: the tokens before.
    counts: how many of the new tokens are valid in each row. None for T.

  Returns:
    The hidden states of the new tokens after the final norm, which are
    meaningless for invalid and dropped tokens, and the history with the new
    tokens.
  """
  batch_size, capacity = history.tokens.shape
  num_tokens = tokens.shape[1]
  if counts is None:
    counts = jnp.full_like(history.lengths, num_tokens)
  positions = history.lengths[:, None] + jnp.arange(num_tokens)  # [B, T]
  is_valid = jnp.arange(num_tokens) < counts[:, None]

  # Invalid tokens get a position that is out of range. The mode "drop" skips
  # them.
  rows = jnp.arange(batch_size)[:, None]
  columns = jnp.where(is_valid, positions, capacity)
  all_tokens = history.tokens.at[rows, columns].set(tokens, mode="drop")
  lengths = history.lengths + counts

  # The unused part of a row is another document, with the id 0. So tokens do
  # not attend to it, and variants that count a document's tokens exclude it.
  is_used = jnp.arange(capacity) < lengths[:, None]
  segment_ids = is_used.astype(jnp.int32)
  hidden: Any = model.apply({"params": params}, all_tokens, segment_ids)
  # Dropped tokens get the hidden state of the last position.
  readable_positions = jnp.minimum(positions, capacity - 1)
  new_hidden = jnp.take_along_axis(
    hidden, readable_positions[..., None], axis=1
  )
  return new_hidden, TokenHistory(all_tokens, lengths)
