"""Validation batches: the same rows in the same order, each time."""

import itertools
import math
from collections.abc import Iterator, Sequence

import grain

from diffjax.config import Config, DataConfig, UserError
from diffjax.data.batches import FULL_SHARE, BatchShare
from diffjax.data.prepared_batches import RowMixture, mix
from diffjax.data.row import EMPTY_ROW, HostBatch, Row, make_batch
from diffjax.data.streamed_batches import SourceMixture, stream_rows


def shuffle_rows(mixture: RowMixture) -> grain.MapDataset[Row]:
  """Returns the prepared validation rows in a random, but fixed order.

  They are shuffled so that the first ones are a fair sample of all documents.
  All runs use the same seed. The rows of several sources come in proportion to
  their weights, until the rows of one source have been used up.
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
  stream = stream_rows(mixture, config, FULL_SHARE, repeat=False)
  limit = None if max_rows < 0 else max_rows
  rows = list(itertools.islice(stream, limit))
  if not rows:
    raise UserError(
      "config.data.source: holds no validation documents:"
      " set config.data.validation_source, or raise"
      f" config.data.validation_fraction = {config.validation_fraction}"
    )
  return rows


class ValidationBatches:
  """Batches of the first config.eval.rows validation rows, or of all.

  All processes have equally many batches. The last batch is filled up with
  empty rows, whose targets have weight 0.
  """

  def __init__(
    self,
    mixture: RowMixture | SourceMixture,
    rows: Sequence[Row] | grain.MapDataset[Row],
    config: Config,
    batch_size: int,
    share: BatchShare,
  ):
    """Initializes the batches. Reads nothing yet.

    Args:
      mixture: The data that the rows belong to, for `data_identity`.
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
    """Number of rows of all processes together, without empty ones."""
    return self._num_rows

  def data_identity(self) -> dict[str, int | str]:
    """Returns what identifies the data.

    The values must agree in all processes of a run. The keys describe them in
    messages.
    """
    return self._mixture.data_identity()

  def __len__(self) -> int:
    return math.ceil(self._num_rows / self._batch_size)

  def __iter__(self) -> Iterator[HostBatch]:
    for batch_index in range(len(self)):
      rows = []
      for index in self._share.batch_rows(batch_index, self._batch_size):
        if index < self._num_rows:
          rows.append(self._rows[index])
        else:
          rows.append(EMPTY_ROW)
      yield make_batch(rows, self._length)
