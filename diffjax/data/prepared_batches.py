"""Training batches of prepared rows.

The rows of each source are shuffled and repeated, with a new order in each
epoch, and mixed by weight. Global batch n consists of the B mixed rows from
index n·B on. Each process reads its share, a block of consecutive rows of every
batch. So a batch depends only on the rows, the seed and n, not on the numbers
of workers and shares. To resume, n suffices.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain

from diffjax.config import Config, DataConfig, UserError
from diffjax.data import changed_rows, prepared
from diffjax.data.batches import BatchShare, TrainingBatches, check_state
from diffjax.data.fingerprint import digest
from diffjax.data.reader import read_sequentially
from diffjax.data.row import HostBatch, Row, make_batch
from diffjax.host.progress import say


class RowMixture(NamedTuple):
  """The prepared rows of a split.

  Attributes:
    split: "train" or "validation".
    components: The rows of each source.
    weights: The weight of each source. They sum to 1.
  """

  split: str
  components: list[prepared.PreparedRows]
  weights: list[float]

  def data_identity(self) -> dict[str, int | str]:
    """Returns the numbers and the fingerprints of the rows.

    The values must agree in all processes of a run. The keys describe them in
    messages.
    """
    split_name = "training" if self.split == "train" else "validation"
    data_identity: dict[str, int | str] = {}
    for rows in self.components:
      name = f"{split_name} rows of {rows.spec!r}"
      data_identity[f"the number of {name}"] = len(rows)
      data_identity[f"the fingerprint of the {name}"] = rows.fingerprint
    return data_identity


def _check_prepared(targets: Sequence[prepared.Target]) -> None:
  """Raises UserError if the rows of a target are not prepared.

  Runs of several processes prepare no rows, because all processes would write
  the same files.
  """
  for target in targets:
    if not prepared.is_prepared(target):
      raise UserError(
        "config.data.mode = 'prepared': rows are not prepared"
        f" ({target.directory}), and a run of several processes does not"
        " prepare them; run python -m diffjax.prepare with the same --config"
        " flags first, or set config.data.mode to 'streamed'"
      )


def open_or_prepare_rows(
  config: DataConfig, split: str, num_processes: int
) -> RowMixture:
  """Opens the rows of a split. A single process first prepares missing rows.

  Preparing writes the rows of all splits to disk.

  Args:
    config: The data fields.
    split: "train" or "validation".
    num_processes: Number of processes of the run.

  Raises:
    UserError: if a source cannot be read, if the split has no rows, or if rows
      are missing and there are several processes.
  """
  targets = prepared.targets(config)
  if num_processes > 1:
    _check_prepared(targets)
  elif not all(prepared.is_prepared(target) for target in targets):
    say(
      "rows are not prepared yet; preparing them once"
      " (python -m diffjax.prepare does this ahead of time)"
    )
    targets = prepared.prepare(config)
  return open_rows(targets, split, config)


def open_rows(
  targets: Sequence[prepared.Target], split: str, config: DataConfig
) -> RowMixture:
  """Opens prepared rows of a split. Writes nothing.

  Args:
    targets: The targets of the config, one for each source. A target describes
      the rows of a source and has their directory.
    split: "train" or "validation".
    config: The data fields.

  Raises:
    UserError: if a source has no rows of the split.
  """
  components = []
  weights = []
  for target in targets:
    if split not in target.splits:
      continue
    rows = prepared.PreparedRows(target, split)
    # The name of a cache directory contains a digest of the files. A directory
    # that the user chose may hold rows of files that have changed since.
    if config.prepared_dir:
      changed_rows.warn_of_changed_files(target, config)
    if len(rows) == 0:
      raise UserError(
        f"config.data.source: {target.spec!r} has no {split} rows"
        f" ({target.directory}): set config.data.validation_source, or raise"
        f" config.data.validation_fraction = {config.validation_fraction}"
        " (it holds out too few documents)"
      )
    components.append(rows)
    weights.append(target.weight)
  return RowMixture(split, components, weights)


def mix(
  components: Sequence[Sequence[Row] | prepared.PreparedRows],
  weights: Sequence[float],
  seed: int,
  repeat: bool,
) -> grain.MapDataset[Row]:
  """Returns the shuffled rows of all components, mixed by weight.

  Args:
    components: The rows of each source.
    weights: The weight of each source.
    seed: Seed of the first component. The others have the next seeds, so that
      equal sources are shuffled differently.
    repeat: Whether to repeat each component endlessly, shuffled anew in each
      epoch. Otherwise, the mixture ends with its shortest component.
  """
  shuffled = []
  for index, rows in enumerate(components):
    dataset = grain.MapDataset.source(rows).seed(seed + index).shuffle()
    # Grain shuffles each epoch in a new order.
    if repeat:
      dataset = dataset.repeat(None)
    shuffled.append(dataset)
  if len(shuffled) == 1:
    return shuffled[0]
  return grain.MapDataset.mix(shuffled, weights)


class GlobalBatches:
  """A random-access source for Grain: this process's part of each batch.

  Element n holds this process's rows of global batch n.
  """

  def __init__(
    self,
    rows: grain.MapDataset[Row],
    length: int,
    batch_size: int,
    share: BatchShare,
  ):
    """Initializes the source. Reads nothing yet.

    Args:
      rows: An endless dataset of rows.
      length: T.
      batch_size: Number of rows of a global batch.
      share: The share of this process.
    """
    self._rows = rows
    self._length = length
    self._batch_size = batch_size
    self._share = share

  def __len__(self) -> int:
    # The rows are endless, but Grain needs a length. This is the largest number
    # for which all row indices fit a machine integer.
    return sys.maxsize // self._batch_size

  def __getitem__(self, index: int) -> HostBatch:
    row_indices = self._share.batch_rows(index, self._batch_size)
    rows = [self._rows[row_index] for row_index in row_indices]
    return make_batch(rows, self._length)

  def starting_at(self, index: int) -> grain.IterDataset[HostBatch]:
    """Returns a dataset of the batches from an index on."""
    return read_sequentially(grain.MapDataset.source(self)[index:])


class PreparedBatches(TrainingBatches):
  """Training batches of prepared rows."""

  # The fields of a saved state that must agree, and their names for messages.
  _FIELD_NAMES = {
    "kind": "config.data.mode",
    "seed": "config.data.seed",
    "batch_size": "config.train.batch_size",
  }

  def __init__(self, mixture: RowMixture, config: Config, share: BatchShare):
    """Initializes the batches. Reads none yet.

    Args:
      mixture: The training rows.
      config: The run's config.
      share: The share of this process.
    """
    seed = config.data.seed
    batch_size = config.train.batch_size
    rows = mix(mixture.components, mixture.weights, seed, repeat=True)
    batches = GlobalBatches(rows, config.data.length, batch_size, share)
    directories = [component.directory for component in mixture.components]
    source = " and ".join(directories)
    super().__init__(config.data, source, batches.starting_at(0))

    self._mixture = mixture
    self._batches = batches
    # The index of the batch that `__next__` returns next.
    self._next_index = 0
    # Descriptions of the rows of each source, to explain differences.
    self._origins = [component.origin for component in mixture.components]
    # The part of the state that does not change during the run.
    self._fixed_state = {
      "kind": "prepared",
      "dataset": _rows_digest(mixture),
      "seed": seed,
      "batch_size": batch_size,
    }

  def __next__(self) -> HostBatch:
    # The index is advanced only after the batch has arrived. If the wait is
    # interrupted, the next call waits for the same batch.
    batch = self._wait_for_batch()
    self._next_index += 1
    return batch

  def data_identity(self) -> dict[str, int | str]:
    return self._mixture.data_identity()

  def get_state(self) -> dict[str, Any]:
    return {
      "batch": self._next_index,
      **self._fixed_state,
      "rows": self._origins,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    check_state(state, self._fixed_state, self._FIELD_NAMES)
    # Other rows are not in `_FIELD_NAMES`, because they have many causes.
    if state["dataset"] != self._fixed_state["dataset"]:
      raise UserError(
        "cannot continue in the data from this checkpoint:"
        f" {self._explain_other_rows(state)}"
      )
    self.close()
    self._next_index = state["batch"]
    batches = self._batches.starting_at(self._next_index)
    self._reader = self._open_reader(batches)

  def _explain_other_rows(self, state: dict[str, Any]) -> str:
    """Returns why the rows of a saved state differ, and what to do.

    A training run has compared the config before. Then only the tokenizer's
    files, the text or config.data.prepared_dir can have changed.
    """
    # States of earlier versions do not describe their rows.
    if "rows" not in state:
      return (
        "config.data.source, tokenizer, length or packing, or the text itself,"
        " has changed; set it back, or use another --workdir"
      )
    return changed_rows.explain_changed_rows(
      state["rows"], self._origins, self._config
    )


def _rows_digest(mixture: RowMixture) -> str:
  """Returns a sha256 (hex) of the rows and their weights."""
  fingerprints = [rows.fingerprint for rows in mixture.components]
  return digest([fingerprints, mixture.weights])
