"""Speed of greedy generation with the cache, relative to two alternatives.

    python -m benchmarks.generate

The alternatives are the whole forward pass for every token, and DiffLlama with
its cache, which needs the extra `hf`. The model has the config of
benchmarks/diffllama.py, in float32. All three continue one prompt of 16 tokens
by 512 tokens and take turns in one process. Times are medians. The forward pass
without a cache always has the final length, so that it is compiled once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jaxtyping import Array, Int

from benchmarks import machine
from benchmarks.diffllama import MODEL, make_diffllama
from benchmarks.timing import median_seconds
from diffjax.inference.sampler import Sampler
from diffjax.model.decoder import Decoder, logits

PROMPT_LENGTH = 16
NUM_NEW_TOKENS = 512
LENGTH = PROMPT_LENGTH + NUM_NEW_TOKENS

# Continues the prompt, and returns the new tokens.
Generate = Callable[[], list[int]]


def make_cached(model: Decoder, params: dict, prompt: list[int]) -> Generate:
  """Returns a function that continues a prompt with diffjax's KV cache."""
  sampler = Sampler(model, params, capacity=LENGTH)

  def generate() -> list[int]:
    (new_tokens,) = sampler.generate([prompt], NUM_NEW_TOKENS)
    return new_tokens

  return generate


def make_uncached(model: Decoder, params: dict, prompt: list[int]) -> Generate:
  """Returns a function that continues a prompt without a KV cache.

  It computes all positions again for every token.
  """

  @jax.jit
  def append_token(
    params: dict, tokens: Int[Array, "1 length"], num_tokens: int
  ) -> Int[Array, "1 length"]:
    """Writes the most likely next token after the first `num_tokens`."""
    hidden = model.apply({"params": params}, tokens)
    # [1, 1, embed_dim]
    last_hidden = hidden[:, num_tokens - 1, None]
    next_token = jnp.argmax(logits(params, last_hidden)[0, 0])
    return tokens.at[0, num_tokens].set(next_token.astype(jnp.int32))

  def generate() -> list[int]:
    tokens = jnp.zeros((1, LENGTH), jnp.int32)
    tokens = tokens.at[0, :PROMPT_LENGTH].set(jnp.asarray(prompt))
    for num_tokens in range(PROMPT_LENGTH, LENGTH):
      tokens = append_token(params, tokens, num_tokens)
    return np.asarray(tokens)[0, PROMPT_LENGTH:].tolist()

  return generate


def make_diffllama_cached(prompt: list[int]) -> Generate:
  """Returns a function that continues a prompt with DiffLlama's KV cache.

  DiffLlama is Hugging Face's implementation in PyTorch.
  """
  model = make_diffllama(LENGTH).eval()
  ids = torch.tensor([prompt])

  def generate() -> list[int]:
    with torch.inference_mode():
      tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW_TOKENS,
        # It would stop at an end-of-text token otherwise.
        min_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
      )
    return tokens[0, PROMPT_LENGTH:].tolist()

  return generate


def make_candidates() -> dict[str, Generate]:
  """Returns the functions that are compared, with one random prompt.

  Each has run once, so that it is compiled.
  """
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, MODEL.vocab_size, PROMPT_LENGTH).tolist()
  model = Decoder(MODEL)
  example = jnp.zeros((1, 1), jnp.int32)
  params = jax.jit(model.init)(jax.random.key(0), example)["params"]
  candidates = {
    "with the cache": make_cached(model, params, prompt),
    "without": make_uncached(model, params, prompt),
    "DiffLlama with its cache": make_diffllama_cached(prompt),
  }
  for name, generate in candidates.items():
    num_generated = len(generate())
    assert num_generated == NUM_NEW_TOKENS, f"{name}: {num_generated} tokens"
  return candidates


def main() -> None:
  """Times all candidates, and prints their speeds and ratios."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--repeats", type=int, default=5)
  flags = parser.parse_args()
  print(
    f"JAX {jax.__version__}, PyTorch {torch.__version__},"
    f" transformers {transformers.__version__}; {machine()},"
    f" {torch.get_num_threads()} of them for PyTorch"
  )
  seconds = median_seconds(make_candidates(), flags.repeats, warmups=0)
  for name, median in seconds.items():
    tokens_per_second = NUM_NEW_TOKENS / median
    ratio = median / seconds["with the cache"]
    print(
      f"{name}: {tokens_per_second:,.0f} tokens/s,"
      f" {ratio:.2f}× the time with the cache"
    )


if __name__ == "__main__":
  main()
