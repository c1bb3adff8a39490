"""Validation losses (paper.md, §4: ablations; §5).

They are the loss in nats per token, perplexity, bits per byte, and the losses
of AR-Hit and Others. An AR hit (associative recall) is a token that ends an
n-gram seen earlier in its document. Others are all other tokens.

The training loop measures them during training. The suite of
diffjax/evals/validation.py measures a checkpoint, with intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from diffjax.data.ar_hit import ar_hit_mask
from diffjax.data.tokenizer import Tokenizer
from diffjax.model.decoder import Decoder, output_embedding
from diffjax.ops.cross_entropy import per_token_cross_entropy
from diffjax.parallel.mesh import put_batch
from diffjax.training.manifest import SCORE_PREFIX

# The sums from which `from_sums` computes the losses, in the order of its
# arguments.
SUMS = ("nll", "weight", "bytes", "hit_nll", "hit_weight")

# The meanings of the losses, for the terminal.
MEANINGS = {
  "loss": "nats per token",
  "perplexity": "e to the power of the loss",
  "bits_per_byte": "the loss in bits per byte of text",
  "ar_hit": "loss on tokens that end an n-gram seen before",
  "others": "loss on all other tokens",
}

# exp of a larger loss overflows float64.
_MAX_LOSS_OF_PERPLEXITY = 700.0


def measure_losses(
  eval_step: Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]],
  params: Any,
  batches: Iterable[dict[str, np.ndarray]],
  *,
  mesh: Mesh,
  tokenizer: Tokenizer,
  ngram: int,
) -> dict[str, float]:
  """Returns a model's validation losses, by the names of `from_sums`.

  Args:
    eval_step: `training.program.Program.eval_step`, which sums `row_losses`
      over a batch.
    params: the model's parameters.
    batches: this process's rows of each batch, on the host: tokens, targets,
      segment_ids, positions and weights [B, T].
    mesh: the devices of the program.
    tokenizer: the run's tokenizer, which counts the bytes of the targets.
    ngram: the length of the n-grams of AR-Hit.
  """
  totals = dict.fromkeys(SUMS, 0.0)
  # The sums of the last batch, which the device may still be computing. They
  # are fetched after the next batch has been dispatched, so that the device
  # never waits for the host.
  pending: dict[str, jax.Array] | None = None
  for host_batch in batches:
    host_batch = with_hits(host_batch, tokenizer, ngram)
    sums = eval_step(params, put_batch(host_batch, mesh))
    if pending is not None:
      _add_sums(totals, pending)
    pending = sums
  if pending is not None:
    _add_sums(totals, pending)
  losses = from_sums(
    nll=totals["nll"],
    weight=totals["weight"],
    num_bytes=totals["bytes"],
    hit_nll=totals["hit_nll"],
    hit_weight=totals["hit_weight"],
  )
  return dict(losses)


def _add_sums(totals: dict[str, float], sums: dict[str, jax.Array]) -> None:
  """Adds the sums of a batch to the totals. Waits for the device."""
  for name, value in sums.items():
    totals[name] += float(value)


def with_hits(
  batch: dict[str, np.ndarray], tokenizer: Tokenizer, ngram: int
) -> dict[str, np.ndarray]:
  """Returns a batch on the host with two more arrays, float32 [B, T].

  "hits" is 1 for AR hits, which are targets that end an n-gram seen earlier in
  their document, and 0 for others. "bytes" is the number of bytes of each
  target. `row_losses` needs both.

  Args:
    batch: tokens, targets and segment_ids [B, T], and any other arrays.
    tokenizer: the tokenizer of the tokens.
    ngram: the length of the n-grams of AR-Hit.
  """
  hits = ar_hit_mask(
    batch["tokens"], batch["targets"], batch["segment_ids"], ngram
  )
  num_bytes = tokenizer.target_bytes(batch["tokens"], batch["targets"])
  return {
    **batch,
    "hits": hits.astype(np.float32),
    "bytes": num_bytes.astype(np.float32),
  }


def row_losses(
  model: Decoder, params: Any, batch: dict[str, jax.Array]
) -> dict[str, Float[Array, "B"]]:
  """Returns sums over each row, from which `from_sums` computes the losses.

  A target counts by its weight. Padding has weight 0.

  Args:
    model: the decoder.
    params: its parameters.
    batch: a batch of `with_hits`.

  Returns:
    "nll" (nats), "weight" and "bytes" of the targets with weight, and
    "hit_nll" and "hit_weight" of the AR hits among them.
  """
  weight = batch["weights"]
  has_weight = weight > 0
  # A loss without weight may be infinite or NaN, and 0 times it would be NaN.
  nll = jnp.where(has_weight, token_losses(model, params, batch) * weight, 0.0)
  terms = {
    "nll": nll,
    "weight": weight,
    "bytes": batch["bytes"] * has_weight,
    "hit_nll": nll * batch["hits"],
    "hit_weight": weight * batch["hits"],
  }
  return jax.tree.map(_sum_of_row, terms)


def _sum_of_row(term: Float[Array, "B T"]) -> Float[Array, "B"]:
  return jnp.sum(term, axis=1)


def token_losses(
  model: Decoder, params: Any, batch: dict[str, jax.Array]
) -> Float[Array, "B T"]:
  """Returns the cross-entropy of each target, in nats.

  It has no meaning for targets without weight, such as padding.
  """
  hidden: Any = model.apply(
    {"params": params},
    batch["tokens"],
    batch["segment_ids"],
    batch["positions"],
  )
  embedding = output_embedding(params).astype(hidden.dtype)
  return per_token_cross_entropy(hidden, embedding, batch["targets"])


def from_sums(
  nll: float, weight: float, num_bytes: float, hit_nll: float, hit_weight: float
) -> Iterator[tuple[str, float]]:
  """Computes the validation losses, and yields the name and value of each.

  The losses are "loss" (nats per token), "perplexity", "bits_per_byte",
  "ar_hit" and "others". "ar_hit" is the loss on targets that end an n-gram seen
  earlier in their document, and "others" on all other targets (paper.md, §5).
  A loss is left out if it has no targets. So there are none if no target has
  weight.

  Args:
    nll: the sum of the targets' losses in nats, times their weights.
    weight: the sum of the targets' weights.
    num_bytes: the bytes of the targets with weight.
    hit_nll: as `nll`, for AR hits.
    hit_weight: as `weight`, for AR hits.
  """
  if weight == 0:
    return
  loss = nll / weight
  yield "loss", loss
  yield "perplexity", math.exp(min(loss, _MAX_LOSS_OF_PERPLEXITY))
  if num_bytes > 0:
    bits = nll / math.log(2)
    yield "bits_per_byte", bits / num_bytes
  if hit_weight > 0:
    yield "ar_hit", hit_nll / hit_weight
  if weight > hit_weight:
    yield "others", (nll - hit_nll) / (weight - hit_weight)


def format_line(scores: Mapping[str, float], num_rows: int) -> str:
  """Returns the main validation losses as one line of text.

  Example: "validation on 1,000 rows: loss 2.5312, 1.0210 bits per byte"

  Args:
    scores: losses by the names under which they are logged.
    num_rows: the number of validation rows that were measured.
  """
  loss = scores[SCORE_PREFIX + "loss"]
  values = [f"loss {loss:.4f}"]
  bits_per_byte = scores.get(SCORE_PREFIX + "bits_per_byte")
  if bits_per_byte is not None:
    values.append(f"{bits_per_byte:.4f} bits per byte")
  return f"validation on {num_rows:,} rows: {', '.join(values)}"


def format_table(scores: Mapping[str, float], num_rows: int) -> str:
  """Returns all validation losses as lines of text, each with its meaning.

  Args:
    scores: losses by the names under which they are logged.
    num_rows: the number of validation rows that were measured.
  """
  lines = [f"validation on {num_rows:,} rows:"]
  width = max(len(logged_name) for logged_name in scores) - len(SCORE_PREFIX)
  for logged_name, value in scores.items():
    name = logged_name.removeprefix(SCORE_PREFIX)
    lines.append(f"  {name:{width}}  {value:8.4f}  {MEANINGS[name]}")
  return "\n".join(lines)
