"""Training batches of documents that are read, tokenized and packed on the fly.

The order of the batches is deterministic. It depends on the numbers of workers
and shares, because each worker of each share reads and packs other parts. The
saved state is the state of the Grain iterator: a place in the files. So a run
resumes only with the same numbers, the same version of Grain and unchanged
files, as far as that can be seen without reading the files (see
`fingerprint.py`).
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain

from diffjax.config import Config, DataConfig, UserError
from diffjax.data import document_dataset, packing, sources
from diffjax.data.batches import BatchShare, TrainingBatches, check_state
from diffjax.data.document import Part, Source
from diffjax.data.fingerprint import check_unchanged, digest
from diffjax.data.reader import read_sequentially
from diffjax.data.row import HostBatch, Row, make_batch
from diffjax.data.tokenizer import load_once


class SourceMixture(NamedTuple):
  """The opened sources of a split.

  Attributes:
    sources: The sources.
    weights: The weight of each source. They sum to 1.
    tokenizer: The tokenizer, as in config.data.tokenizer.
  """

  sources: list[Source]
  weights: list[float]
  tokenizer: str

  def data_identity(self) -> dict[str, int | str]:
    """Returns what identifies the documents and the tokenizer.

    The values must agree in all processes of a run. The keys describe them in
    messages.
    """
    description = f"the fingerprint of the tokenizer {self.tokenizer!r}"
    data_identity: dict[str, int | str] = {}
    data_identity[description] = load_once(self.tokenizer).fingerprint
    for source in self.sources:
      data_identity.update(source.data_identity())
    return data_identity


def open_sources(config: DataConfig, split: str) -> SourceMixture:
  """Opens the sources of a split.

  Args:
    config: The data fields.
    split: "train" or "validation".

  Raises:
    UserError: if a source does not exist, is empty, or has no text field.
  """
  if split == "validation" and config.validation_source:
    components = sources.parse_mixture(
      config.validation_source, "data.validation_source"
    )
  else:
    components = sources.parse_mixture(config.source, "data.source")
  opened = []
  weights = []
  for component in components:
    opened.append(sources.documents(component.spec, split, config))
    weights.append(component.weight)
  return SourceMixture(opened, weights, config.tokenizer)


def stream_rows(
  mixture: SourceMixture,
  config: DataConfig,
  share: BatchShare,
  repeat: bool,
) -> grain.IterDataset[Row]:
  """Returns this process's rows, tokenized and packed while they are read.

  A source is divided into parts, such as ranges of files. Each share consists
  of other parts.

  Args:
    mixture: The sources.
    config: The data fields.
    share: The share of this process.
    repeat: Whether to repeat the parts endlessly, shuffled anew in each epoch.
      Otherwise, the parts are read once and in order.

  Raises:
    UserError: if the parts are repeated, and too few for the shares and
      workers.
  """
  if repeat:
    _check_num_parts(mixture.sources, share.count, config.num_workers)
  streams = []
  for index, source in enumerate(mixture.sources):
    # Equal sources are shuffled differently, as in `mix`.
    seed = config.seed + index
    parts = _select_parts(source, seed, share, repeat)
    documents = document_dataset.Documents(
      read_sequentially(parts),
      source.read,
      max_empty_parts=len(source.parts),
      spec=source.spec,
    )
    counts = packing.ExampleCounts(config.length, report_first=True)
    streams.append(packing.make_rows(documents, config, counts))
  if len(streams) == 1:
    return streams[0]
  return grain.IterDataset.mix(streams, mixture.weights)


def _select_parts(
  source: Source, seed: int, share: BatchShare, repeat: bool
) -> grain.MapDataset[Part]:
  """Returns this process's parts of a source: every `share.count`-th one.

  With `repeat`, they come endlessly, shuffled anew in each epoch.
  """
  parts = grain.MapDataset.source(source.parts)
  if not repeat:
    return parts[share.index :: share.count]
  # All processes shuffle in the same order, so the shares do not overlap. Grain
  # passes the epoch of an index through slices to `shuffle`, which has a new
  # order for each epoch. So the shares also fit together in later epochs.
  shuffled = parts.seed(seed).shuffle()
  return shuffled[share.index :: share.count].repeat(None)


def _check_num_parts(
  opened: Sequence[Source], num_shares: int, num_workers: int
) -> None:
  """Raises UserError if a source has fewer parts than there are readers.

  Every worker of every share reads parts of every source. If a worker has no
  part in an epoch, Grain gives it a part of the next epoch. So it would read
  the same documents as another worker at the same time.

  Args:
    opened: The sources. The one with the fewest parts decides.
    num_shares: Number of shares.
    num_workers: Number of workers of each process. With 0, the process reads
      its share itself.
  """
  smallest = opened[0]
  for source in opened[1:]:
    if len(source.parts) < len(smallest.parts):
      smallest = source
  num_parts = len(smallest.parts)
  problem = (
    f"config.data.source: {smallest.spec!r} has {num_parts} parts to stream"
    " (files, row groups or runs of records)"
  )
  if num_parts < num_shares:
    raise UserError(
      f"{problem}, fewer than the {num_shares} shares that the processes read;"
      " split its files, or set config.data.mode to 'prepared'"
    )
  # Each share has at least this many parts.
  max_workers = num_parts // num_shares
  if num_workers > max_workers:
    raise UserError(
      f"{problem}, too few for the {num_shares} shares that the processes"
      f" read with {num_workers} workers each; set config.data.num_workers to"
      f" at most {max_workers}, split its files, or set config.data.mode to"
      " 'prepared'"
    )


def stream_batches(
  mixture: SourceMixture, config: Config, share: BatchShare, repeat: bool
) -> grain.IterDataset[HostBatch]:
  """Returns this process's rows in batches. Drops rows that fill no batch.

  Workers read, pack and batch their own parts, and send whole batches to this
  process.

  Args:
    mixture: The sources.
    config: The run's config.
    share: The share of this process.
    repeat: Whether to repeat the parts endlessly, as in `stream_rows`.
  """
  rows = stream_rows(mixture, config.data, share, repeat)
  return rows.batch(
    config.train.batch_size // share.count,
    drop_remainder=True,
    # A partial function can be sent to workers, unlike a nested function.
    batch_fn=functools.partial(make_batch, length=config.data.length),
  )


class StreamedBatches(TrainingBatches):
  """Training batches of documents that are read during training."""

  # The fields of a saved state that must agree, and their names for messages.
  _FIELD_NAMES = {
    "kind": "config.data.mode",
    "num_workers": "config.data.num_workers",
    "processes": "the number of shares that the processes read",
    "grain": "the version of Grain",
  }

  def __init__(self, mixture: SourceMixture, config: Config, share: BatchShare):
    """Initializes the batches. Reads none yet, but samples of the files.

    Args:
      mixture: The sources of the training data.
      config: The run's config.
      share: The share of this process.
    """
    batches = stream_batches(mixture, config, share, repeat=True)
    super().__init__(config.data, config.data.source, batches)

    self._mixture = mixture
    self._batches = batches
    # The fingerprint of the files of each source.
    self._files = {}
    for source in mixture.sources:
      self._files[source.spec] = source.fingerprint()
    # The part of the state that does not change during the run.
    self._fixed_state = {
      "kind": "streamed",
      "num_workers": config.data.num_workers,
      "processes": share.count,
      "grain": grain.__version__,
      "dataset": _config_digest(config),
    }

  def __next__(self) -> HostBatch:
    return self._wait_for_batch()

  def data_identity(self) -> dict[str, int | str]:
    return self._mixture.data_identity()

  def get_state(self) -> dict[str, Any]:
    # Grain copies the state with each batch that it reads ahead, so this is the
    # state after the last batch that was returned. It is converted to what a
    # resumed run reads from the checkpoint: JSON turns tuples into lists.
    grain_state = json.loads(json.dumps(self._reader.get_state()))
    return {
      **self._fixed_state,
      "files": self._files,
      "grain_state": grain_state,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    check_state(state, self._fixed_state, self._FIELD_NAMES)
    # A training run has compared the config before. Then this can only be other
    # files of the tokenizer.
    if state.get("dataset") != self._fixed_state["dataset"]:
      raise UserError(
        "cannot continue in the data from this checkpoint: the tokenizer"
        f" {self._config.tokenizer!r} itself, config.train.batch_size or"
        " another field of config.data has changed; set it back, or start a new"
        " workdir"
      )
    check_unchanged(state.get("files"), self._files)
    self.close()
    grain_state = _restore_tuples(state["grain_state"])
    self._reader = self._open_reader(self._batches, grain_state)


def _config_digest(config: Config) -> str:
  """Returns a sha256 (hex) of the config fields that determine the batches."""
  data = config.data
  fields = [
    data.source,
    data.validation_source,
    data.validation_fraction,
    data.text_field,
    data.length,
    data.packing,
    data.seed,
    load_once(data.tokenizer).fingerprint,
    config.train.batch_size,
  ]
  # Newer fields are added only if they are set, so that checkpoints of earlier
  # versions keep their fingerprints.
  if data.prompt_field:
    fields += [data.prompt_field, data.prompt_template]
  if data.files:
    fields += ["files", data.files]
  return digest(fields)


def _restore_tuples(state: Any) -> Any:
  """Returns a Grain state with the tuples that JSON turned into lists.

  Grain's ConcatThenSplit compares the bounds in its state with tuples, and a
  list never equals a tuple. Its state is nested somewhere in `state`:

    {"remainder_slices": {"tokens": (start, stop)}, …}
  """
  if isinstance(state, list):
    return [_restore_tuples(item) for item in state]
  if not isinstance(state, dict):
    return state
  restored = {}
  for key, value in state.items():
    if key == "remainder_slices":
      restored[key] = {name: tuple(bounds) for name, bounds in value.items()}
    else:
      restored[key] = _restore_tuples(value)
  return restored
