"""Validation losses of a checkpoint, with intervals.

By default, the rows are the ones that training evaluates, so the losses are the
same as those in the training log.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import ClassVar

import jax
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from diffjax.config import UserError, at_least, field
from diffjax.data.pipeline import ValidationBatches
from diffjax.evals.measurement import Measurement
from diffjax.evals.methods.row_results import compute_for_rows
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.inference.trained import Trained
from diffjax.training.validation import (
  MEANINGS,
  SUMS,
  from_sums,
  row_losses,
  with_hits,
)

# The names of the measurements, by the names of `from_sums`.
_MEASUREMENT_NAMES = {
  "loss": "loss (nats/token)",
  "perplexity": "perplexity",
  "bits_per_byte": "bits per byte",
  "ar_hit": "AR-Hit (nats/token)",
  "others": "Others (nats/token)",
}

# The shortest n-gram whose last token can be recalled from the ones before it.
_MIN_NGRAM = 2


@dataclasses.dataclass(frozen=True)
class Validation(Suite[ValidationBatches]):
  """Losses on validation text: all tokens, ends of repeated n-grams, others.

  The measurements are "loss (nats/token)", "perplexity", "bits per byte",
  "AR-Hit (nats/token)" and "Others (nats/token)". The units are rows: documents
  that are packed or cut as in training.
  """

  name: ClassVar[str] = "validation"
  table: ClassVar[TableSpec] = TableSpec(
    unit="rows",
    notes=(
      f"AR-Hit: {MEANINGS['ar_hit']}",
      f"Others: {MEANINGS['others']}",
    ),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure("loss", "loss", "lower"),
    MainFigure("loss on repeated n-grams (AR-Hit)", "AR-Hit", "lower"),
  )

  rows: int = field(
    0,
    "Rows to measure. Fewer if the validation set has fewer. -1 for all, 0 for"
    " the run's own config.eval.rows.",
  )
  length: int = field(
    0,
    "Tokens of a row. 0 for the config.data.length of the model's training.",
    bound=at_least(0),
  )
  batch_size: int = field(
    8,
    "Rows in a batch. This affects memory, but not the result.",
    bound=at_least(1),
  )
  ngram: int = field(
    0,
    "Tokens of the n-grams of AR-Hit. 0 for the run's own config.eval.ngram.",
  )
  source: str = field(
    "",
    'Text, as in config.data.source, such as "jsonl:books/*.jsonl". "" for the'
    " run's validation text.",
  )

  def load(self, trained: Trained) -> ValidationBatches:
    """Returns the validation rows.

    Raises:
      UserError: if a setting does not suit the model, or there are no rows.
    """
    if self.ngram != 0 and self.ngram < _MIN_NGRAM:
      raise UserError(
        f"set.validation.ngram = {self.ngram}: must be at least {_MIN_NGRAM},"
        " or 0 for the run's own"
      )
    num_rows = self.rows or trained.config.eval.rows
    if num_rows == 0:
      raise UserError(
        "set.validation.rows: the run's own config.eval.rows is 0; pass"
        " --set.validation.rows=NUMBER, or -1 for all"
      )
    return validation_rows(
      "validation",
      trained,
      num_rows,
      length=self.length,
      batch_size=self.batch_size,
      source=self.source,
    )

  def measure(
    self, trained: Trained, batches: ValidationBatches
  ) -> Iterator[Measurement]:
    """Yields each loss. A loss without targets is left out."""
    ngram = self.ngram or trained.config.eval.ngram
    row_sums = _row_sums(trained, batches, ngram)
    totals = row_sums.sum(axis=0)
    # `from_sums` leaves out losses without targets.
    for name, _ in from_sums(*totals):
      # The intervals compute the same loss from resampled rows.
      statistic = functools.partial(_loss, name)
      yield Measurement(_MEASUREMENT_NAMES[name], row_sums, statistic=statistic)


def _row_sums(
  trained: Trained, batches: ValidationBatches, ngram: int
) -> Float[ndarray, "rows sums"]:
  """Returns the sums over each row from which `from_sums` computes losses.

  The columns are in the order of `SUMS`, which are the arguments of
  `from_sums`.

  Args:
    trained: The model.
    batches: The validation rows.
    ngram: The length of the n-grams of AR-Hit. The tokens that end a repeated
      n-gram have a loss of their own.
  """
  compute_sums = jax.jit(functools.partial(row_losses, trained.model))

  def sums_of_batch(batch: dict[str, ndarray]) -> dict[str, jax.Array]:
    batch_with_hits = with_hits(batch, trained.tokenizer, ngram)
    return compute_sums(trained.params, batch_with_hits)

  sums = compute_for_rows(
    sums_of_batch, batches, f"validation of {trained.short_name}"
  )
  columns = [sums[name] for name in SUMS]
  return np.stack(columns, axis=1).astype(np.float64)


def _loss(name: str, row_sums: Float[ndarray, "rows sums"]) -> float:
  """Returns one of the losses over rows. NaN if it has no target in them.

  Args:
    name: The name of the loss in `from_sums`, such as "ar_hit".
    row_sums: The result of `_row_sums`, or a resampling of its rows.
  """
  totals = row_sums.sum(axis=0)
  losses = dict(from_sums(*totals))
  return losses.get(name, math.nan)
