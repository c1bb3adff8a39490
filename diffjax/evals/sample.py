"""A sample of text, to see at the end of a run what the model has learnt."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from diffjax.model.decoder import Decoder, logits


def sample(
  model: Decoder, params: Any, prompt: list[int], *, num_tokens: int, length: int, seed: int = 0, temperature: float = 0.8
) -> list[int]:
  """Continues a prompt token by token, each from a full forward pass over the last `length` tokens (no cache).

  Args:
    model: the decoder.
    params: its parameters.
    prompt: token ids, at least one.
    num_tokens: tokens to add.
    length: window that the model sees, at most its max_length.
    seed: of the draw.
    temperature: divides the logits.

  Returns:
    The new token ids.
  """

  @functools.partial(jax.jit, donate_argnums=1)
  def extend(params, window, filled, rng):
    hidden = model.apply({"params": params}, window[None])
    draw = jax.random.categorical(rng, logits(params, hidden[:, filled - 1, None])[0, 0] / temperature)
    shifted = jnp.where(filled < length, window, jnp.roll(window, -1))
    filled = jnp.minimum(filled + 1, length)
    return shifted.at[filled - 1].set(draw), filled, draw

  prompt = prompt[-length:]
  window, filled = jnp.zeros(length, jnp.int32).at[: len(prompt)].set(jnp.asarray(prompt)), jnp.asarray(len(prompt))
  out = []
  for rng in jax.random.split(jax.random.key(seed), num_tokens):
    window, filled, token = extend(params, window, filled, rng)
    out.append(token)
  return [int(token) for token in out]
