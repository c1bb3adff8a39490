"""Validation batches: the same rows in the same order, each time."""

import itertools
import math
from collections.abc import Iterator, Sequence

import grain

from diffjax.config import Config, DataConfig, UserError
from diffjax.data.batches import ProcessShare
from diffjax.data.prepared_batches import RowMixture, mix
from diffjax.data.row import EMPTY_ROW, Batch, Row, make_batch
from diffjax.data.streamed_batches import SourceMixture, stream_rows


def shuffle_rows(mixture: RowMixture) -> grain.MapDataset[Row]:
  """Returns prepared validation rows in their order.

  The rows are shuffled once, so that the first ones are a fair sample of all
  documents. The seed is the same for all runs. The rows of several sources
  come in proportion to their weights, until the shortest one ends.
  """
  return mix(mixture.components, mixture.weights, seed=0, repeat=False)


def read_rows(
  mixture: SourceMixture, config: DataConfig, max_rows: int
) -> list[Row]:
  """Reads validation rows in the order of their documents.

  Args:
    mixture: The validation sources.
    config: The data fields.
    max_rows: Maximum number of rows; −1 for all.

  Raises:
    UserError: if there are no validation documents.
  """
  stream = stream_rows(mixture, config, ProcessShare(), repeat=False)
  rows: list[Row]
  if max_rows < 0:
    rows = list(stream)
  else:
    rows = list(itertools.islice(stream, max_rows))
  if not rows:
    raise UserError(
      "config.data.source: holds no validation documents:"
      " set config.data.validation_source, or raise"
      f" config.data.validation_fraction = {config.validation_fraction}"
    )
  return rows


class ValidationBatches:
  """Batches of the first config.eval.rows validation rows, or of all.

  All processes have equally many batches. Empty rows fill up the last batch.
  Their targets have weight 0.
  """

  def __init__(
    self,
    mixture: RowMixture | SourceMixture,
    rows: Sequence[Row] | grain.MapDataset[Row],
    config: Config,
    batch_size: int,
    share: ProcessShare,
  ):
    """Initializes the batches. Reads nothing yet.

    Args:
      mixture: The data that the rows belong to.
      rows: The rows in their order.
      config: The run's config.
      batch_size: Number of rows of a global batch.
      share: The share of this process.
    """
    self._mixture = mixture
    self._rows = rows
    self._num_rows = len(rows)
    if config.eval.rows >= 0:
      self._num_rows = min(self._num_rows, config.eval.rows)
    self._length = config.data.length
    self._batch_size = batch_size
    self._share = share

  @property
  def rows(self) -> int:
    """Number of rows over all processes, without empty ones."""
    return self._num_rows

  def data_identity(self) -> dict[str, int | str]:
    """Returns values that all processes must share, by name for messages."""
    return self._mixture.data_identity()

  def __len__(self) -> int:
    return math.ceil(self._num_rows / self._batch_size)

  def __iter__(self) -> Iterator[Batch]:
    for batch_index in range(len(self)):
      rows = []
      for index in self._share.batch_rows(batch_index, self._batch_size):
        if index < self._num_rows:
          rows.append(self._rows[index])
        else:
          rows.append(EMPTY_ROW)
      yield make_batch(rows, self._length)
