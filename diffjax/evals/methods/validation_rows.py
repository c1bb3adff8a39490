"""The validation rows that suites measure models on.

They are the same for every model with the same data and tokenizer.
"""

from __future__ import annotations

import dataclasses

from diffjax.config import UserError
from diffjax.data.pipeline import ValidationBatches, validation_batches
from diffjax.inference.trained import Trained

# As `count`: all rows.
_ALL_ROWS = -1


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
  """Returns batches of validation rows, for a suite to measure a model on.

  A row is a sequence of `length` tokens, as the data pipeline packs documents.
  A document that is longer than a row is cut into segments. Whole documents
  come from `validation_documents`.

  Args:
    suite: The name of the suite, for messages about its settings.
    trained: The model.
    count: The maximum number of rows. -1 for all.
    length: The number of tokens in a row. 0 for the length of training rows.
    batch_size: The number of rows in a batch.
    source: Text, in place of the validation text of the run.
    packing: "documents" or "concat". "" for the packing of training rows.
    beyond_limit: Whether rows may be longer than config.model.max_length.

  Raises:
    UserError: if a setting is invalid, if rows are longer than the model
      accepts, or if there are no rows.
  """
  config = trained.config
  if length == 0:
    length = config.data.length
  _check_settings(suite, count, length, batch_size)
  max_length = config.model.max_length
  if length > max_length and not beyond_limit:
    raise UserError(
      f"set.{suite}.length = {length}: {trained.name} takes at most"
      f" {max_length} tokens (config.model.max_length)"
    )

  # Modes other than "streamed" first prepare the whole training split. For rows
  # that differ from training's, all that work would be for some validation
  # rows.
  is_training_length = length == config.data.length
  has_training_format = is_training_length and not source and not packing
  mode = config.data.mode if has_training_format else "streamed"
  data = dataclasses.replace(
    config.data,
    tokenizer=trained.tokenizer.spec,
    length=length,
    packing=packing or config.data.packing,
    validation_source=source or config.data.validation_source,
    mode=mode,
  )
  evaluation = dataclasses.replace(config.eval, rows=count)
  rows_config = dataclasses.replace(config, data=data, eval=evaluation)
  return validation_batches(rows_config, batch_size)


def _check_settings(
  suite: str, count: int, length: int, batch_size: int
) -> None:
  """Raises UserError if a setting is out of range.

  All must be at least 1. `count` may also be -1, which selects all rows.
  """
  if count < 1 and count != _ALL_ROWS:
    raise UserError(
      f"set.{suite}.rows = {count}: must be at least 1, or {_ALL_ROWS} for all"
    )
  if length < 1:
    raise UserError(f"set.{suite}.length = {length}: must be at least 1")
  if batch_size < 1:
    raise UserError(
      f"set.{suite}.batch_size = {batch_size}: must be at least 1"
    )
