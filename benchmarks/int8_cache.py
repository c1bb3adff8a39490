"""What a cache in int8 costs a trained model.

    python -m benchmarks.int8_cache --workdir=runs/tiny

Validation rows are read through the cache, once with the cache in the compute
dtype and once in int8. Every token is the true one (teacher forcing). The cache
has pages of 128 tokens, with one scale per page and head.

"by token" appends one token at a time, as generation does, so that scales rise
and pages are rounded again. "by chunk" writes 128 tokens at once, as prompts
are read. Rows are cut from the text, and each is one context. Standard errors
are of the mean over rows.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.inference import trained
from diffjax.inference.cache import empty_cache, extend, unstack
from diffjax.inference.pages import PAGE, allocate
from diffjax.model.decoder import Decoder, logits

Logits = Float[Array, "B T vocabulary"]
ReadTokens = Callable[[Any, Int[Array, "B T"]], Logits]

# Figures of each row, the last axis of `compare_rows`.
FIGURES = (
  "loss",
  "loss_int8",
  "bytes",
  "divergence",
  "changed_choices",
  "squared_error",
  "squared_logits",
)


def make_reader(
  model: Decoder, batch_size: int, length: int, num_at_once: int, dtype: Any
) -> ReadTokens:
  """Returns a jitted function that computes a model's logits with a KV cache.

  It appends the rows to an empty cache, some tokens at a time.

  Args:
    model: The model.
    batch_size: Number of rows.
    length: Tokens of a row.
    num_at_once: Number of tokens that are appended at a time, a divisor of
      `length`.
    dtype: The cache's dtype. None for the model's compute dtype.

  Returns:
    A function from the model's weights and tokens [B, T] to the logits of each
    next token.
  """
  # Rounded up.
  pages_per_row = -(-length // PAGE)
  num_pages = batch_size * pages_per_row
  tables = allocate([length] * batch_size, num_pages, pages_per_row)

  @jax.jit
  def read(weights: Any, tokens: Int[Array, "B T"]) -> Logits:
    def append_chunk(cache, chunk):
      hidden, cache = extend(model, weights, chunk, cache)
      return cache, logits(weights, hidden)

    cache = empty_cache(
      model, batch_size, length, num_pages=num_pages, dtype=dtype
    )
    # The tables say which pages belong to which row.
    cache = cache.replace(tables=jnp.asarray(tables))
    # [chunks, B, num_at_once]
    chunks = tokens.reshape(batch_size, length // num_at_once, num_at_once)
    chunks = jnp.swapaxes(chunks, 0, 1)
    _, chunk_logits = jax.lax.scan(append_chunk, cache, chunks)
    # [chunks, B, num_at_once, vocabulary] → [B, length, vocabulary]
    return jnp.swapaxes(chunk_logits, 0, 1).reshape(batch_size, length, -1)

  return read


@jax.jit
def compare_rows(
  exact_logits: Logits,
  int8_logits: Logits,
  tokens: Int[Array, "B T"],
  token_bytes: Float[Array, "vocabulary"],
) -> Float[Array, "B figures"]:
  """Compares the logits of two caches.

  Returns the sums of FIGURES over the targets of each row.

  Args:
    exact_logits: Logits with the cache in the compute dtype.
    int8_logits: Logits with the cache in int8.
    tokens: The tokens of the rows.
    token_bytes: Number of bytes of each token.
  """
  # The last logits have no target.
  exact_logits = exact_logits[:, :-1]
  int8_logits = int8_logits[:, :-1]
  targets = tokens[:, 1:]
  exact = jax.nn.log_softmax(exact_logits)
  rounded = jax.nn.log_softmax(int8_logits)
  exact_choice = jnp.argmax(exact, axis=-1)
  rounded_choice = jnp.argmax(rounded, axis=-1)
  exact_centred = _centred(exact_logits)
  error = exact_centred - _centred(int8_logits)
  # In the order of FIGURES.
  by_token = (
    _loss(exact, targets),
    _loss(rounded, targets),
    token_bytes[targets],
    # The Kullback–Leibler divergence.
    jnp.sum(jnp.exp(exact) * (exact - rounded), axis=-1),
    exact_choice != rounded_choice,
    jnp.mean(error**2, axis=-1),
    jnp.mean(exact_centred**2, axis=-1),
  )
  return jnp.stack([jnp.sum(values, axis=1) for values in by_token], axis=1)


def _loss(
  log_probabilities: Logits, targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns the negative log-likelihood of each target."""
  indices = targets[..., None]
  return -jnp.take_along_axis(log_probabilities, indices, axis=-1)[..., 0]


def _centred(values: Logits) -> Logits:
  """Subtracts the mean over the vocabulary, which no probability depends on."""
  return values - jnp.mean(values, axis=-1, keepdims=True)


def measure(
  read_exact: ReadTokens,
  read_int8: ReadTokens,
  weights: Any,
  batches: Iterable[dict[str, np.ndarray]],
  token_bytes: Float[Array, "vocabulary"],
) -> Float[np.ndarray, "rows figures"]:
  """Returns the figures of each row of all batches, in float64.

  Args:
    read_exact: Reads rows with the cache in the compute dtype.
    read_int8: Reads rows with the cache in int8.
    weights: The model's weights.
    batches: Batches of validation rows.
    token_bytes: Number of bytes of each token.
  """
  rows = []
  for batch in batches:
    tokens = jnp.asarray(batch["tokens"])
    exact_logits = read_exact(weights, tokens)
    int8_logits = read_int8(weights, tokens)
    figures = compare_rows(exact_logits, int8_logits, tokens, token_bytes)
    rows.append(np.asarray(figures, np.float64))
  return np.concatenate(rows)


def print_result(
  name: str, figures: Float[np.ndarray, "rows figures"], length: int
) -> None:
  """Prints the loss with an exact cache, and what changes in int8.

  Args:
    name: The name of the line.
    figures: The figures of each row.
    length: Tokens of a row.
  """
  num_rows = len(figures)
  num_targets = num_rows * (length - 1)
  totals = dict(zip(FIGURES, figures.sum(axis=0), strict=True))
  loss = figures[:, FIGURES.index("loss")]
  loss_int8 = figures[:, FIGURES.index("loss_int8")]

  bits_per_byte = totals["loss"] / totals["bytes"] / np.log(2)
  bytes_per_row = totals["bytes"] / num_rows
  # The change of bits per byte, by row.
  change = (loss_int8 - loss) / np.log(2) / bytes_per_row
  standard_error = change.std(ddof=1) / num_rows**0.5
  relative_error = (totals["squared_error"] / totals["squared_logits"]) ** 0.5
  divergence = totals["divergence"] / num_targets
  changed_percent = 100 * totals["changed_choices"] / num_targets
  print(
    f"{name}: {bits_per_byte:.4f} bits per byte,"
    f" in int8 {change.mean():+.6f} ± {standard_error:.6f};"
    f" logits off by {100 * relative_error:.2f}% (RMS),"
    f" divergence {divergence:.1e} nats a token,"
    f" another most likely token for {changed_percent:.2f}%"
  )


def main() -> None:
  """Compares both caches of a trained model, and prints the differences."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--rows", type=int, default=256)
  parser.add_argument(
    "--length",
    type=int,
    default=0,
    help="tokens of a row, a multiple of 128; the run's own by default",
  )
  parser.add_argument("--batch_size", type=int, default=32)
  flags = parser.parse_args()

  model = trained.load(flags.workdir)
  batches = validation_rows(
    "int8_cache",
    model,
    flags.rows,
    length=flags.length,
    batch_size=flags.batch_size,
    packing="concat",
  )
  length = flags.length or model.config.data.length
  weights = jax.jit(functools.partial(unstack, model.model))(model.params)
  token_bytes = jnp.asarray(model.tokenizer.token_bytes(), jnp.float32)
  print(
    f"{model.name}: {batches.rows} rows of {length} tokens, a cache in"
    f" {jnp.dtype(model.model.dtype)} and in int8"
  )
  for name, num_at_once in (("by token", 1), ("by chunk", PAGE)):
    reader = functools.partial(
      make_reader, model.model, flags.batch_size, length, num_at_once
    )
    read_exact = reader(dtype=None)
    read_int8 = reader(dtype="int8")
    figures = measure(read_exact, read_int8, weights, batches, token_bytes)
    # The last batch is filled up with rows that do not count.
    print_result(name, figures[: batches.rows], length)


if __name__ == "__main__":
  main()
