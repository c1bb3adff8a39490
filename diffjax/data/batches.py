"""What prepared and streamed training batches have in common."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from diffjax.config import DataConfig, UserError
from diffjax.data.reader import Reader, prefetch
from diffjax.data.row import HostBatch


@dataclasses.dataclass(frozen=True)
class BatchShare:
  """The share of the data that a process reads.

  Prepared rows and validation rows are shared by batch: a share is a block of
  rows of each batch. Streamed documents are shared by part of a source.

  There may be fewer shares than processes: processes whose devices differ only
  along the context or tensor axis of the mesh read the same share (see
  `diffjax.parallel.mesh.batch_share`).

  Attributes:
    index: Index of the share, from 0.
    count: Number of shares. It divides the batch size.
  """

  index: int = 0
  count: int = 1

  def batch_rows(self, batch_index: int, batch_size: int) -> range:
    """Returns the indices of the share's rows of a global batch.

    Example: with batches of 8 rows and 2 shares, batch 3 consists of the rows
    24 to 31, and the share with index 1 of the rows 28 to 31.

    Args:
      batch_index: Index of the batch, from 0.
      batch_size: Number of rows of a global batch.
    """
    num_rows = batch_size // self.count
    first = batch_index * batch_size + self.index * num_rows
    return range(first, first + num_rows)


# The share of processes that all read the same rows.
FULL_SHARE = BatchShare()


class TrainingBatches(abc.ABC):
  """An endless iterator over this process's rows of the global batches.

  Attributes:
    interrupted: A function that is called during the wait for a batch. If it
      returns True, the wait ends. By default, it never does. A run sets it once
      it handles signals, which is after the batches have been opened.
  """

  def __init__(
    self,
    config: DataConfig,
    source: str,
    batches: grain.IterDataset[HostBatch],
  ):
    """Opens the batches. Reads none before the first one is taken.

    Args:
      config: The data fields.
      source: Name of the source, for messages.
      batches: The batches.
    """
    self.interrupted = _never
    self._config = config
    self._source = source
    self._reader = self._open_reader(batches)

  def __iter__(self) -> Iterator[HostBatch]:
    return self

  @abc.abstractmethod
  def __next__(self) -> HostBatch:
    """Returns the next batch, arrays of [B / share.count, T].

    Raises:
      UserError: if the data is damaged, a worker died, or no batch arrived
        within config.data.timeout seconds.
      Interrupted: if `interrupted` ended the wait.
    """

  @abc.abstractmethod
  def data_identity(self) -> dict[str, int | str]:
    """Returns values that all processes must share, by name for messages."""

  @abc.abstractmethod
  def get_state(self) -> dict[str, Any]:
    """Returns the state after the last batch that `__next__` returned.

    Batches that were only read ahead do not count. The state can be written as
    JSON.
    """

  @abc.abstractmethod
  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a saved state.

    Raises:
      UserError: if the state belongs to other data. The message names the
        fields that differ.
    """

  def close(self) -> None:
    """Stops reading, and ends the worker processes."""
    self._reader.close()

  def _wait_for_batch(self) -> HostBatch:
    """Returns the next batch of the reader, as ordinary arrays."""
    batch = next(self._reader)
    arrays = {}
    for name, array in batch.items():
      if type(array) is np.ndarray:
        arrays[name] = array
      else:
        # Grain's workers return arrays in shared memory. They are copied,
        # because the shared memory has to be released soon.
        arrays[name] = np.array(array)
    return arrays

  def _open_reader(
    self, batches: grain.IterDataset[HostBatch], grain_state: Any = None
  ) -> Reader:
    """Returns a reader of the batches, from the start or from a Grain state."""
    iterator = iter(prefetch(batches, self._config.num_workers))
    if grain_state is not None:
      iterator.set_state(grain_state)
    return Reader(
      iterator,
      self._source,
      self._config.num_workers,
      self._config.timeout,
      self._is_interrupted,
    )

  def _is_interrupted(self) -> bool:
    # `interrupted` may be replaced after the reader was opened.
    return self.interrupted()


def _never() -> bool:
  return False


def check_state(
  state: dict[str, Any],
  current: dict[str, Any],
  field_names: dict[str, str],
) -> None:
  """Raises UserError if a saved state belongs to other data.

  A training run has compared the fields of its config with the checkpoint's
  before (`diffjax.training.resume`). Then only the number of shares and the
  version of Grain may still differ here. The other fields are checked for
  callers that save and restore states themselves.

  Args:
    state: The saved state.
    current: The values that this run would save.
    field_names: The fields to compare, and their names for the message.
  """
  differences = []
  for field, name in field_names.items():
    saved = state.get(field)
    if saved != current[field]:
      differences.append(f"{name} was {saved!r} and is {current[field]!r}")
  if differences:
    raise UserError(
      "cannot continue in the data from this checkpoint:"
      f" {'; '.join(differences)}; set the fields back, or start a new workdir"
    )
