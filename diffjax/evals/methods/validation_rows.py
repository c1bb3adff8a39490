"""The validation rows that measurements run over, the same for every model with the same data and tokenizer."""

from __future__ import annotations

import dataclasses

from diffjax.config import UserError
from diffjax.data.pipeline import ValidationBatches, validation_batches
from diffjax.inference.trained import Trained


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
  for name, value in (
    ("rows", count),
    ("length", length),
    ("batch_size", batch_size),
  ):
    if value < 1 and (name, value) != ("rows", -1):
      raise UserError(
        f"set.{suite}.{name} = {value}: must be at least 1{', or -1 for all' * (name == 'rows')}"
      )
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
    mode=config.data.mode
    if own
    else "streamed",  # other rows are few: nothing is prepared for them, least of all the training split
  )
  return validation_batches(
    dataclasses.replace(
      config, data=data, eval=dataclasses.replace(config.eval, rows=count)
    ),
    batch_size,
  )
