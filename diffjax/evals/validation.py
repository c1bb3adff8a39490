"""Validation losses of a checkpoint, with intervals.

By default they are of the rows that training evaluates, so that the losses are
the same as those in its log.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from diffjax.config import UserError
from diffjax.data.pipeline import ValidationBatches
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.figures import Figure
from diffjax.evals.report.results import TableSpec
from diffjax.host.progress import Progress
from diffjax.inference.trained import Trained
from diffjax.training.validation import (
  MEANINGS,
  SUMS,
  from_sums,
  row_losses,
  with_hits,
)

# The suite's name of each loss, by the name that the loop logs it under.
_FIGURES = {
  "loss": "loss (nats/token)",
  "perplexity": "perplexity",
  "bits_per_byte": "bits per byte",
  "ar_hit": "AR-Hit (nats/token)",
  "others": "Others (nats/token)",
}

TABLE = TableSpec(
  unit="rows",
  notes=(
    f"AR-Hit: {MEANINGS['ar_hit']}",
    f"Others: {MEANINGS['others']}",
  ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Of the suite."""

  # Rows measured (fewer if the validation set has fewer); -1 for all; 0 for the run's own config.eval.rows
  rows: int = 0
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
    raise UserError(
      f"set.validation.ngram = {settings.ngram}: must be at least 2, or 0 for the run's own"
    )
  rows = settings.rows or trained.config.eval.rows
  if rows == 0:
    raise UserError(
      "set.validation.rows: the run's own config.eval.rows is 0; pass"
      " --set.validation.rows=NUMBER, or -1 for all"
    )
  batches = validation_rows(
    "validation",
    trained,
    rows,
    length=settings.length,
    batch_size=settings.batch_size,
    source=settings.source,
  )
  return _measure(trained, batches, settings.ngram or trained.config.eval.ngram)


def _measure(
  trained: Trained, batches: ValidationBatches, ngram: int
) -> Iterator[Figure]:
  step = jax.jit(functools.partial(row_losses, trained.model))
  units = []
  with Progress(
    f"validation of {trained.short_name}", len(batches)
  ) as progress:
    for index, batch in enumerate(batches):
      sums = jax.device_get(
        step(trained.params, with_hits(batch, trained.tokenizer, ngram))
      )
      units.append(
        np.stack([sums[name] for name in SUMS], axis=1).astype(np.float64)
      )
      progress.update(index + 1, (index + 1) * batch["tokens"].size)
  whole = np.concatenate(units)[: batches.rows]  # the last batch is padded
  for name, _ in from_sums(*whole.sum(axis=0)):
    yield Figure(
      _FIGURES[name], whole, statistic=functools.partial(_statistic, name)
    )


def _statistic(name: str, units: Float[ndarray, "U 5"]) -> float:
  return dict(from_sums(*units.sum(axis=0))).get(name, math.nan)
