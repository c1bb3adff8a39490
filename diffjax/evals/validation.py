"""Validation loss: nats per token, perplexity, bits per byte, and AR-Hit / Others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from diffjax.evals.ar_hit import ar_hit_mask


def evaluate(
  eval_step: Callable[[Any, dict[str, Any]], dict[str, Any]],
  params: Any,
  batches: Iterable[dict[str, Any]],
  *,
  token_bytes: Int[ndarray, N],
  ngram: int,
) -> Iterator[tuple[str, float]]:
  """Losses over the targets that carry weight.

  Args:
    eval_step: adds up one batch; see `training.step.make_eval_step`.
    params: the model's parameters.
    batches: host batches of tokens, targets, segment_ids, positions, weights [B, T].
    token_bytes: UTF-8 bytes that each token stands for.
    ngram: length of the n-grams of AR-Hit.

  Yields:
    loss (nats per token), perplexity, bits_per_byte, and, where there are such targets, ar_hit and others: the loss on targets that
    end an n-gram seen earlier in their document, and on the rest (paper.md, §5).
  """
  totals: dict[str, float] = {}
  pending = []
  for batch in batches:
    hits = ar_hit_mask(batch["tokens"], batch["targets"], batch["segment_ids"], ngram)
    measured = batch | {"hits": hits.astype(np.float32), "bytes": token_bytes[batch["targets"]].astype(np.float32)}
    pending.append(eval_step(params, measured))
    if len(pending) > 1:  # fetch one batch behind, so that the device never waits for the host
      _add(totals, pending.pop(0))
  for sums in pending:
    _add(totals, sums)
  if not totals.get("weight"):
    return
  loss = totals["nll"] / totals["weight"]
  yield "loss", loss
  yield "perplexity", math.exp(min(loss, 700.0))
  if totals["bytes"]:
    yield "bits_per_byte", totals["nll"] / math.log(2) / totals["bytes"]
  if totals["hit_weight"]:
    yield "ar_hit", totals["hit_nll"] / totals["hit_weight"]
  if totals["weight"] > totals["hit_weight"]:
    yield "others", (totals["nll"] - totals["hit_nll"]) / (totals["weight"] - totals["hit_weight"])


def _add(totals: dict[str, float], sums: dict[str, Any]) -> None:
  for name, value in sums.items():
    totals[name] = totals.get(name, 0.0) + float(value)
