"""Validation losses: nats per token, perplexity, bits per byte, and AR-Hit / Others (paper.md, §4: ablations; §5).

The training loop measures them as it goes. The suite of diffjax/evals/validation.py measures a checkpoint, with intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffjax.data.ar_hit import ar_hit_mask
from diffjax.data.tokenizer import Tokenizer
from diffjax.model.decoder import Decoder, output_embedding
from diffjax.ops.cross_entropy import per_token_cross_entropy

# The sums that all losses follow from, in the order in which `from_sums` takes them.
SUMS = ("nll", "weight", "bytes", "hit_nll", "hit_weight")

# Losses are logged under "validation/loss" and so on.
_PREFIX = "validation/"

# What the losses mean, for the terminal.
MEANINGS = {
  "loss": "nats per token",
  "perplexity": "e to the power of the loss",
  "bits_per_byte": "the loss in bits per byte of text",
  "ar_hit": "loss on tokens that end an n-gram seen before",
  "others": "loss on all other tokens",
  "trigram_bits_per_byte": "bits_per_byte of a trigram model, a baseline",
}


def losses(
  eval_step: Callable[[Any, dict[str, Any]], dict[str, Any]],
  params: Any,
  batches: Iterable[dict[str, Any]],
  *,
  tokenizer: Tokenizer,
  ngram: int,
) -> Iterator[tuple[str, float]]:
  """Losses over the targets that carry weight.

  Args:
    eval_step: adds up `row_losses` over a batch: `training.program.Program.eval_step`.
    params: the model's parameters.
    batches: host batches of tokens, targets, segment_ids, positions, weights [B, T].
    tokenizer: the run's; it counts the bytes of the targets.
    ngram: length of the n-grams of AR-Hit.

  Yields:
    The name and value of each loss, as `from_sums` yields them.
  """
  totals: dict[str, float] = {}
  pending = []
  for batch in batches:
    pending.append(eval_step(params, with_hits(batch, tokenizer, ngram)))
    if (
      len(pending) > 1
    ):  # fetch one batch behind, so that the device never waits for the host
      _add(totals, pending.pop(0))
  for sums in pending:
    _add(totals, sums)
  if totals:
    yield from from_sums(*(totals[name] for name in SUMS))


def with_hits(
  batch: dict[str, Any], tokenizer: Tokenizer, ngram: int
) -> dict[str, Any]:
  """A host batch as `row_losses` takes it: with its AR hits and the bytes of its targets, float32 [B, T]."""
  hits = ar_hit_mask(
    batch["tokens"], batch["targets"], batch["segment_ids"], ngram
  )
  num_bytes = tokenizer.target_bytes(batch["tokens"], batch["targets"])
  return batch | {
    "hits": hits.astype(np.float32),
    "bytes": num_bytes.astype(np.float32),
  }


def row_losses(
  model: Decoder, params: Any, batch: dict[str, jax.Array]
) -> dict[str, Float[Array, "B"]]:
  """The sums over each row that the validation losses follow from: nll (nats), weight, bytes, and nll and weight over the AR hits.

  Args:
    model: the decoder.
    params: its parameters.
    batch: a batch of `with_hits`.
  """
  weight = batch["weights"]
  nll = jnp.where(weight > 0, token_losses(model, params, batch) * weight, 0.0)
  terms = {
    "nll": nll,
    "weight": weight,
    "bytes": batch["bytes"] * (weight > 0),
    "hit_nll": nll * batch["hits"],
    "hit_weight": weight * batch["hits"],
  }
  return jax.tree.map(lambda term: jnp.sum(term, axis=1), terms)


def token_losses(
  model: Decoder, params: Any, batch: dict[str, jax.Array]
) -> Float[Array, "B T"]:
  """Cross-entropy of every target, nats; that of a target of weight 0 has no meaning."""
  hidden: Any = model.apply(
    {"params": params},
    batch["tokens"],
    batch["segment_ids"],
    batch["positions"],
  )
  return per_token_cross_entropy(
    hidden, output_embedding(params).astype(hidden.dtype), batch["targets"]
  )


def from_sums(
  nll: float, weight: float, num_bytes: float, hit_nll: float, hit_weight: float
) -> Iterator[tuple[str, float]]:
  """The validation losses that follow from the sums over all rows.

  Yields:
    loss (nats per token), perplexity, bits_per_byte, and, where there are such targets, ar_hit and others: the loss on targets that
    end an n-gram seen earlier in their document, and on the rest (paper.md, §5). Nothing if no target has weight.
  """
  if not weight:
    return
  loss = nll / weight
  yield "loss", loss
  yield "perplexity", math.exp(min(loss, 700.0))
  if num_bytes:
    yield "bits_per_byte", nll / math.log(2) / num_bytes
  if hit_weight:
    yield "ar_hit", hit_nll / hit_weight
  if weight > hit_weight:
    yield "others", (nll - hit_nll) / (weight - hit_weight)


def one_line(scores: Mapping[str, float], rows: int) -> str:
  """Returns the main validation losses as one line of text.

  Args:
    scores: Losses by the names that they are logged under.
    rows: Number of validation rows that were measured.
  """
  loss = scores[_PREFIX + "loss"]
  values = [f"loss {loss:.4f}"]
  bits_per_byte = scores.get(_PREFIX + "bits_per_byte")
  if bits_per_byte is not None:
    values.append(f"{bits_per_byte:.4f} bits per byte")
  return f"validation on {rows:,} rows: {', '.join(values)}"


def explained(scores: Mapping[str, float], rows: int) -> str:
  """Returns all validation losses as lines of text, each with its meaning.

  Args:
    scores: Losses by the names that they are logged under.
    rows: Number of validation rows that were measured.
  """
  lines = [f"validation on {rows:,} rows:"]
  width = max(map(len, scores)) - len(_PREFIX)
  for logged_name, value in scores.items():
    name = logged_name.removeprefix(_PREFIX)
    lines.append(f"  {name:{width}}  {value:8.4f}  {MEANINGS[name]}")
  return "\n".join(lines)


def _add(totals: dict[str, float], sums: dict[str, Any]) -> None:
  for name, value in sums.items():
    totals[name] = totals.get(name, 0.0) + float(value)
