"""What keys and values in int8 cost a trained model: python -m benchmarks.int8_cache --workdir=runs/tiny

Validation rows are read through the cache with the true tokens as they come (teacher forcing), once with the cache in the compute dtype and
once in int8, in pages of 128 tokens with a scale a page and head. "by token" appends one token after the other, as generation does, so that
scales rise and pages are rounded again; "by chunk" writes 128 at once, as prompts are read. Rows are cut from the text, each one context.
Standard errors are those of the mean over rows.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.inference import trained
from diffjax.inference.cache import empty_cache, extend, unstack
from diffjax.inference.pages import PAGE, allocate
from diffjax.model.decoder import logits


def reader(model, batch_size: int, length: int, at_once: int, dtype):
  """A function from the model's weights and tokens [B, T] to the logits of each next token."""
  pages = -(-length // PAGE)
  tables = allocate([length] * batch_size, batch_size * pages, pages)

  @jax.jit
  def read(weights, tokens):
    def one(cache, piece):
      hidden, cache = extend(model, weights, piece, cache)
      return cache, logits(weights, hidden)

    cache = empty_cache(
      model, batch_size, length, num_pages=batch_size * pages, dtype=dtype
    ).replace(tables=jnp.asarray(tables))
    pieces = jnp.swapaxes(
      tokens.reshape(batch_size, length // at_once, at_once), 0, 1
    )
    return jnp.swapaxes(jax.lax.scan(one, cache, pieces)[1], 0, 1).reshape(
      batch_size, length, -1
    )

  return read


@jax.jit
def compare(exact, rounded, tokens, token_bytes):
  """Of each row: its losses' sums, bytes, divergence, changed choices, and squares of the logits' error and of the logits."""
  exact, rounded, targets = exact[:, :-1], rounded[:, :-1], tokens[:, 1:]
  p, q = jax.nn.log_softmax(exact), jax.nn.log_softmax(rounded)
  loss = lambda x: -jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0]
  centred = lambda x: x - jnp.mean(x, axis=-1, keepdims=True)
  figures = (
    loss(p),
    loss(q),
    token_bytes[targets],
    jnp.sum(jnp.exp(p) * (p - q), axis=-1),
    jnp.argmax(p, -1) != jnp.argmax(q, -1),
    jnp.mean((centred(exact) - centred(rounded)) ** 2, axis=-1),
    jnp.mean(centred(exact) ** 2, axis=-1),
  )
  return jnp.stack([jnp.sum(x, axis=1) for x in figures], axis=1)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--rows", type=int, default=256)
  parser.add_argument(
    "--length",
    type=int,
    default=0,
    help="tokens a row, a multiple of 128; that of training by default",
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
    f"{model.name}: {batches.rows} rows of {length} tokens, a cache in {jnp.dtype(model.model.dtype)} and in int8"
  )
  for name, at_once in (("by token", 1), ("by chunk", PAGE)):
    exact, rounded = (
      reader(model.model, flags.batch_size, length, at_once, dtype)
      for dtype in (None, "int8")
    )
    rows = []
    for batch in batches:
      tokens = jnp.asarray(batch["tokens"])
      rows.append(
        np.asarray(
          compare(
            exact(weights, tokens),
            rounded(weights, tokens),
            tokens,
            token_bytes,
          ),
          np.float64,
        )
      )
    sums = np.concatenate(rows)[: batches.rows]
    before, after, size, divergence, changed, error, power = sums.sum(axis=0)
    bits = (sums[:, 1] - sums[:, 0]) / np.log(2) / (size / len(sums))
    print(
      f"{name}: {before / size / np.log(2):.4f} bits per byte, in int8 {bits.mean():+.6f} ± {bits.std(ddof=1) / len(bits) ** 0.5:.6f}; "
      f"logits off by {100 * (error / power) ** 0.5:.2f}% (RMS), divergence {divergence / len(sums) / (length - 1):.1e} nats a token, "
      f"likeliest token another for {100 * changed / len(sums) / (length - 1):.2f}%"
    )


if __name__ == "__main__":
  main()
