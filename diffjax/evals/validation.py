"""Validation loss: nats per token, perplexity, bits per byte, and AR-Hit / Others (paper.md, §4: ablations; §5).

The training loop measures it as it goes (`losses`); the suite measures a checkpoint, on more rows and with intervals (`evaluate`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from diffjax.config import UserError
from diffjax.data.ar_hit import ar_hit_mask
from diffjax.data.pipeline import ValidationBatches, validation_batches
from diffjax.evals.report.figures import Figure
from diffjax.progress import Progress
from diffjax.training.step import row_losses
from diffjax.training.trained import Trained

_SUMS = ("nll", "weight", "bytes", "hit_nll", "hit_weight")
# What the loop logs, and what the suite's figures are called.
_FIGURES = {
  "loss": "loss (nats/token)",
  "perplexity": "perplexity",
  "bits_per_byte": "bits per byte",
  "ar_hit": "AR-Hit (nats/token)",
  "others": "Others (nats/token)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """Of the suite."""

  # Rows measured (fewer if the validation set has fewer); -1 for all
  rows: int = 1024
  # Tokens a row; 0 for the config.data.length that the model was trained with
  length: int = 0
  # Rows at once: memory, not the result
  batch_size: int = 8
  # AR-Hit: length of the n-grams, tokens; 0 for the run's own config.eval.ngram
  ngram: int = 0
  # Text, as config.data.source has it ("jsonl:books/*.jsonl"); "" for the run's validation text
  source: str = ""


def evaluate(trained: Trained, settings: Settings) -> Iterator[Figure]:
  """Losses on validation rows. The units are rows: documents packed or cut, as in training."""
  if settings.ngram and settings.ngram < 2:
    raise UserError(f"set.validation.ngram = {settings.ngram}: must be at least 2, or 0 for the run's own")
  batches = validation_rows(
    "validation", trained, settings.rows, length=settings.length, batch_size=settings.batch_size, source=settings.source
  )
  token_bytes, ngram = trained.tokenizer.token_bytes(), settings.ngram or trained.config.eval.ngram
  step = jax.jit(functools.partial(row_losses, trained.model))
  units = []
  with Progress(f"validation of {trained.name}", len(batches)) as progress:
    for index, batch in enumerate(batches):
      sums = jax.device_get(step(trained.params, _measured(batch, token_bytes, ngram)))
      units.append(np.stack([sums[name] for name in _SUMS], axis=1).astype(np.float64))
      progress.update(index + 1, (index + 1) * batch["tokens"].size)
  whole = np.concatenate(units)[: batches.rows]  # the last batch is padded
  for name, _ in _numbers(*whole.sum(axis=0)):
    yield Figure(_FIGURES[name], whole, statistic=functools.partial(_statistic, name))


def validation_rows(
  suite: str,
  trained: Trained,
  count: int,
  *,
  length: int = 0,
  batch_size: int = 1,
  source: str = "",
  packing: str = "",
  beyond_limit: bool = False,
) -> ValidationBatches:
  """The validation rows that a measurement of a model runs over, the same for every model with the same data and tokenizer.

  Args:
    suite: whose settings they are, for messages.
    trained: the model.
    count: how many rows (fewer if there are fewer); −1 for all.
    length: tokens a row; 0 for the length of its training rows.
    batch_size: rows at once.
    source: text in the place of the run's validation text.
    packing: "documents" or "concat"; "" for that of training.
    beyond_limit: whether rows may be longer than config.model.max_length.

  Raises:
    UserError: if rows are longer than the model takes, or there are none.
  """
  config = trained.config
  length = length or config.data.length
  for name, value in (("rows", count), ("length", length), ("batch_size", batch_size)):
    if value < 1 and (name, value) != ("rows", -1):
      raise UserError(f"set.{suite}.{name} = {value}: must be at least 1{', or -1 for all' * (name == 'rows')}")
  if length > config.model.max_length and not beyond_limit:
    raise UserError(
      f"set.{suite}.length = {length}: {trained.name} takes at most {config.model.max_length} tokens (config.model.max_length)"
    )
  own = not source and not packing and length == config.data.length
  data = dataclasses.replace(
    config.data,
    tokenizer=trained.tokenizer.spec,
    length=length,
    packing=packing or config.data.packing,
    validation_source=source or config.data.validation_source,
    mode=config.data.mode if own else "streamed",  # other rows are few: nothing is prepared for them, least of all the training split
  )
  return validation_batches(dataclasses.replace(config, data=data, eval=dataclasses.replace(config.eval, rows=count)), batch_size)


def losses(
  eval_step: Callable[[Any, dict[str, Any]], dict[str, Any]],
  params: Any,
  batches: Iterable[dict[str, Any]],
  *,
  token_bytes: Int[ndarray, N],
  ngram: int,
) -> Iterator[tuple[str, float]]:
  """Losses over the targets that carry weight, for the training loop.

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
    pending.append(eval_step(params, _measured(batch, token_bytes, ngram)))
    if len(pending) > 1:  # fetch one batch behind, so that the device never waits for the host
      _add(totals, pending.pop(0))
  for sums in pending:
    _add(totals, sums)
  if totals:
    yield from _numbers(*(totals[name] for name in _SUMS))


def _measured(batch: dict[str, Any], token_bytes: Int[ndarray, N], ngram: int) -> dict[str, Any]:
  """A batch as `row_losses` takes it."""
  hits = ar_hit_mask(batch["tokens"], batch["targets"], batch["segment_ids"], ngram)
  return batch | {"hits": hits.astype(np.float32), "bytes": token_bytes[batch["targets"]].astype(np.float32)}


def _numbers(nll: float, weight: float, num_bytes: float, hit_nll: float, hit_weight: float) -> Iterator[tuple[str, float]]:
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


def _statistic(name: str, units: Float[ndarray, "U 5"]) -> float:
  return dict(_numbers(*units.sum(axis=0))).get(name, math.nan)


def _add(totals: dict[str, float], sums: dict[str, Any]) -> None:
  for name, value in sums.items():
    totals[name] = totals.get(name, 0.0) + float(value)
