"""Batches for training and validation.

Prepared: global batch n is rows n·B … n·B + B − 1 of a seeded shuffle that is repeated for ever and reshuffled every epoch. Process p of P
takes the p-th contiguous slice. So batches depend on the seed and n alone, not on workers, processes or restarts, and n is the whole state.

Streamed: Grain reads, tokenises and packs documents during training. This is deterministic, and resumable with the same numbers of workers
and processes. With others Grain would silently give other data, so that such a resume is refused; and so is one in changed files, as far as
that can be seen without reading them (fingerprint.py).
"""

import abc
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
from absl import flags

from diffjax.config import Config, DataConfig, UserError
from diffjax.data import packing, prepared, sources
from diffjax.data.document import Source
from diffjax.data.fingerprint import check_unchanged
from diffjax.data.reader import Reader, start_worker
from diffjax.data.row import EMPTY_ROW, Batch, Row, make_batch
from diffjax.data.tokenizer import Tokenizer, load_once
from diffjax.host.progress import say

_PREFETCH = 4  # batches read ahead; more would only cost memory


class TrainingBatches(abc.ABC):
  """This process's rows of the global batches, without end.

  Attributes:
    interrupted: Called while waiting for a batch; whether to end the wait.
  """

  def __init__(self, config: DataConfig):
    self._config = config
    self.interrupted: Callable[[], bool] = lambda: False
    self._reader: Reader | None = None

  def __iter__(self) -> Iterator[Batch]:
    return self

  @abc.abstractmethod
  def __next__(self) -> Batch:
    """The next batch, arrays of [B / processes, T].

    Raises:
      UserError: for damaged data, a worker that died, or no batch within config.data.timeout seconds.
      Interrupted: if `interrupted` ended the wait.
    """

  def _read(self, iterator: grain.DatasetIterator, source: str) -> None:
    self._reader = Reader(
      iterator,
      source,
      self._config.num_workers,
      self._config.timeout,
      lambda: self.interrupted(),
    )

  @abc.abstractmethod
  def data_identity(self) -> dict[str, int | str]:
    """Returns values that all processes must share, by name for messages."""

  @abc.abstractmethod
  def get_state(self) -> dict[str, Any]:
    """The state after the last batch that was handed out, whatever has been read ahead (JSON-able)."""

  @abc.abstractmethod
  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a saved state.

    Raises:
      UserError: if the state is of other data. Names the fields that differ.
    """

  def close(self) -> None:
    """Stops worker processes."""
    if self._reader is not None:
      self._reader.close()
      self._reader = None


def training_batches(
  config: Config, *, process_index: int = 0, process_count: int = 1
) -> TrainingBatches:
  """Opens the training data.

  Args:
    config: The run's config. Rows that are not prepared yet are prepared now, if this is the only process.
    process_index: The index of this process in the run.
    process_count: Number of processes; must divide config.train.batch_size.

  Returns:
    The iterator.

  Raises:
    UserError: for bad sources, rows that are not prepared, or a batch size that the number of processes does not divide.
  """
  if config.train.batch_size % process_count:
    raise UserError(
      f"config.train.batch_size = {config.train.batch_size}: must be divisible by the number of processes, {process_count}"
    )
  if config.data.num_workers and not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # Grain's workers read flags, which only absl.app.run parses
  make = _PreparedBatches if _is_prepared(config.data) else _StreamedBatches
  return make(config, process_index, process_count)


def _is_prepared(config: DataConfig) -> bool:
  """Returns True if rows are prepared, False if they are streamed."""
  assert config.mode != "auto", "plan.resolve comes first"
  return config.mode == "prepared"


def check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
  """Checks that a model's vocabulary is the tokenizer's, padded by less than 256 for sharding.

  Raises:
    UserError: if it is not. Names both fields, both numbers and a size that works.
  """
  vocab_size = config.model.vocab_size
  if not tokenizer.vocab_size <= vocab_size < tokenizer.vocab_size + 256:
    padded = -(-tokenizer.vocab_size // 128) * 128
    choice = f"{tokenizer.vocab_size}" + (
      f", or {padded}, which shards evenly"
      if padded != tokenizer.vocab_size
      else ""
    )
    raise UserError(
      f"config.model.vocab_size = {vocab_size}: config.data.tokenizer = {tokenizer.spec!r} has {tokenizer.vocab_size} "
      f"tokens, so it must be at least that and less than {tokenizer.vocab_size + 256}; set it to {choice}"
    )


def _plain(batch: Batch) -> Batch:
  """A batch of ordinary arrays. Workers hand over shared memory, which has to be released soon."""
  return {
    key: np.array(value) if type(value) is not np.ndarray else value
    for key, value in batch.items()
  }


def _ahead(
  batches: grain.IterDataset[Batch], num_workers: int
) -> grain.IterDataset[Batch]:
  """Reads ahead in workers or in a daemon thread. If that hangs, the process can still end, unlike with Grain's thread pools."""
  if num_workers:
    return batches.mp_prefetch(
      grain.MultiprocessingOptions(
        num_workers=num_workers, per_worker_buffer_size=2
      ),
      start_worker,
    )
  return grain.experimental.ThreadPrefetchIterDataset(
    batches, prefetch_buffer_size=_PREFETCH
  )


def _refuse_other(
  state: dict[str, Any], own: dict[str, Any], fields: dict[str, str]
) -> None:
  """Raises UserError if fields of a saved state differ from this run's."""
  differ = [
    f"{name} was {state.get(key)!r} and is {own[key]!r}"
    for key, name in fields.items()
    if state.get(key) != own[key]
  ]
  if differ:
    raise UserError(
      f"cannot continue in the data from this checkpoint: {'; '.join(differ)}; set the fields back, or start a new workdir"
    )


# --- Prepared ---


def check_prepared(config: DataConfig) -> None:
  """Checks that all rows are prepared, since several processes would prepare them at the same time.

  Raises:
    UserError: if some are not. Names the directory and the command that prepares it.
  """
  missing = [
    target.directory
    for target in prepared.targets(config)
    if not prepared.is_prepared(target)
  ]
  if missing:
    raise UserError(
      f"config.data.mode = 'prepared': rows are not prepared ({missing[0]}), and several processes do not prepare; "
      "run python -m diffjax.prepare with the same --config flags first, or set config.data.mode to 'streamed'"
    )


def _open_rows(
  config: DataConfig, split: str, process_count: int
) -> tuple[list[prepared.PreparedRows], list[float]]:
  """The rows of each component of a split, and their weights. A single process prepares what is missing."""
  if process_count > 1:
    check_prepared(config)
  found = prepared.targets(config)
  if not all(prepared.is_prepared(target) for target in found):
    say(
      "rows are not prepared yet; preparing them once (python -m diffjax.prepare does this ahead of time)"
    )
    found = prepared.prepare(config)
  mine = [target for target in found if split in target.splits]
  rows = [prepared.PreparedRows(target, split) for target in mine]
  for target, component in zip(mine, rows, strict=True):
    if config.prepared_dir:
      prepared.report_other_files(target, config)
    if not len(component):
      raise UserError(
        f"config.data.source: {target.spec!r} has no {split} rows ({target.directory}): set config.data.validation_source, "
        f"or raise config.data.validation_fraction = {config.validation_fraction} (it holds out too few documents)"
      )
  return rows, [target.weight for target in mine]


def _row_identity(
  rows: list[prepared.PreparedRows], split: str
) -> dict[str, int | str]:
  """Returns what identifies prepared rows, by name for messages."""
  data_identity: dict[str, int | str] = {}
  for component in rows:
    name = f"{split} rows of {component.spec!r}"
    data_identity[f"the number of {name}"] = len(component)
    data_identity[f"the fingerprint of the {name}"] = component.fingerprint
  return data_identity


class _GlobalBatches:
  """This process's slice of every global batch, by index: a random-access source for Grain."""

  def __init__(
    self,
    rows: grain.MapDataset,
    length: int,
    batch_size: int,
    start: int,
    stop: int,
  ):
    self._rows, self._length, self._batch_size, self._start, self._stop = (
      rows,
      length,
      batch_size,
      start,
      stop,
    )

  def __len__(self) -> int:
    return sys.maxsize // self._batch_size

  def __getitem__(self, index: int) -> Batch:
    first = index * self._batch_size
    return make_batch(
      [self._rows[first + offset] for offset in range(self._start, self._stop)],
      self._length,
    )


class _PreparedBatches(TrainingBatches):
  """Batches of prepared rows. Batch n is a function of the rows, the seed and n."""

  _FIELDS = {
    "kind": "config.data.mode",
    "seed": "config.data.seed",
    "batch_size": "config.train.batch_size",
  }

  def __init__(self, config: Config, process_index: int, process_count: int):
    super().__init__(config.data)
    rows, weights = _open_rows(config.data, "train", process_count)
    # Each component has its own seed, so that equal sources are shuffled differently
    shuffled = [
      grain.MapDataset.source(component)
      .seed(config.data.seed + index)
      .shuffle()
      .repeat(None)
      for index, component in enumerate(rows)
    ]
    mixed = (
      shuffled[0]
      if len(shuffled) == 1
      else grain.MapDataset.mix(shuffled, weights)
    )
    share = config.train.batch_size // process_count
    self._batches = _GlobalBatches(
      mixed,
      config.data.length,
      config.train.batch_size,
      process_index * share,
      (process_index + 1) * share,
    )
    self._source = " and ".join(component.directory for component in rows)
    self._components = rows
    self._rows = [component.origin for component in rows]
    fingerprint = hashlib.sha256(
      json.dumps(
        [[component.fingerprint for component in rows], weights]
      ).encode()
    ).hexdigest()
    self._identity = {
      "kind": "prepared",
      "dataset": fingerprint,
      "seed": config.data.seed,
      "batch_size": config.train.batch_size,
    }
    self._batch = 0

  def __next__(self) -> Batch:
    if self._reader is None:
      dataset = grain.MapDataset.source(self._batches)[
        self._batch :
      ].to_iter_dataset(grain.ReadOptions(num_threads=0))
      self._read(iter(_ahead(dataset, self._config.num_workers)), self._source)
    assert self._reader is not None
    batch = _plain(next(self._reader))
    self._batch += 1
    return batch

  def data_identity(self) -> dict[str, int | str]:
    return _row_identity(self._components, "training")

  def get_state(self) -> dict[str, Any]:
    return {"batch": self._batch, **self._identity, "rows": self._rows}

  def set_state(self, state: dict[str, Any]) -> None:
    _refuse_other(state, self._identity, self._FIELDS)
    if state["dataset"] != self._identity["dataset"]:
      # Older checkpoints do not say what their rows were
      fields = "config.data.source, tokenizer, length or packing, or the text itself, has changed; set it back, or use another --workdir"
      why = (
        prepared.explain_other_rows(state["rows"], self._rows, self._config)
        if "rows" in state
        else fields
      )
      raise UserError(
        f"cannot continue in the data from this checkpoint: {why}"
      )
    self.close()
    self._batch = state["batch"]


def training_rows(config: Config, batch_size: int = 1024) -> Iterator[Batch]:
  """Every prepared training row once, in stored order, for measurements of the training split.

  Args:
    config: The run's config, in prepared mode.
    batch_size: Rows of a batch. The last batch may have fewer.

  Yields:
    Batches of [batch_size, T].
  """
  for rows in _open_rows(config.data, "train", 1)[0]:
    for first in range(0, len(rows), batch_size):
      yield make_batch(
        rows.__getitems__(range(len(rows))[first : first + batch_size]),
        config.data.length,
      )


# --- Streamed ---


def _open_sources(config: DataConfig, split: str) -> list[tuple[Source, float]]:
  """The sources of a split, and their weights."""
  spec, field = (
    (config.validation_source, "data.validation_source")
    if split == "validation" and config.validation_source
    else (config.source, "data.source")
  )
  return [
    (sources.documents(component.spec, split, config), component.weight)
    for component in sources.parse_mixture(spec, field)
  ]


def _source_identity(
  opened: list[tuple[Source, float]], config: DataConfig
) -> dict[str, int | str]:
  """Returns what identifies streamed sources, by name for messages."""
  tokenizer = load_once(config.tokenizer)
  data_identity: dict[str, int | str] = {
    f"the fingerprint of the tokenizer {config.tokenizer!r}": (
      tokenizer.fingerprint
    )
  }
  for source, _ in opened:
    data_identity |= source.data_identity()
  return data_identity


def _stream(
  opened: list[tuple[Source, float]],
  config: DataConfig,
  process_index: int = 0,
  process_count: int = 1,
  repeat: bool = True,
) -> grain.IterDataset[Row]:
  """Returns a process's rows of a split, tokenized and packed as they are read.

  Args:
    opened: The sources of the split and their weights.
    config: The data fields.
    process_index: The index of this process.
    process_count: Number of processes. Each reads parts of its own.
    repeat: Whether to repeat the parts endlessly, shuffled anew in each epoch;
      else one pass in order.

  Raises:
    UserError: if repeated parts are too few for the processes or workers.
  """
  if repeat:
    _check_readers(
      [source for source, _ in opened], process_count, config.num_workers
    )
  streams = []
  for index, (source, _) in enumerate(opened):
    parts = grain.MapDataset.source(source.parts)
    if repeat:
      parts = (
        parts.seed(config.seed + index)
        .shuffle()[process_index::process_count]
        .repeat(None)
      )
    else:
      parts = parts[process_index::process_count]
    documents = packing.Documents(
      parts.to_iter_dataset(grain.ReadOptions(num_threads=0)),
      source.read,
      len(source.parts),
      source.spec,
    )
    streams.append(
      packing.make_rows(
        documents,
        config,
        packing.ExampleCounts(config.length, report_first=True),
      )
    )
  if len(streams) == 1:
    return streams[0]
  return grain.IterDataset.mix(streams, [weight for _, weight in opened])


def _check_readers(
  opened: list[Source], process_count: int, num_workers: int
) -> None:
  """Raises UserError if a process or a worker would have no part of its own.

  Grain gives a worker without a part of this epoch one of the next epoch, so it
  would read the same documents as another worker at the same time. A process or
  worker reads parts of every source of a mixture, so the source with the fewest
  parts decides.
  """
  source = opened[0]
  for other in opened[1:]:
    if len(other.parts) < len(source.parts):
      source = other
  num_parts = len(source.parts)
  parts = f"config.data.source: {source.spec!r} has {num_parts} parts to stream (files, row groups or runs of records)"
  if num_parts < process_count:
    raise UserError(
      f"{parts}, fewer than the {process_count} processes; split its files, or set config.data.mode to 'prepared'"
    )
  # The process with the fewest parts has this number.
  most_workers = num_parts // process_count
  if num_workers > most_workers:
    raise UserError(
      f"{parts}, too few for {process_count} processes with"
      f" {num_workers} workers each; set config.data.num_workers to at most"
      f" {most_workers}, split its files, or set config.data.mode to 'prepared'"
    )


class _MakeBatch:
  """Makes a batch of rows, as Grain's batch_fn."""

  def __init__(self, length: int):
    self._length = length

  def __call__(self, rows: Any) -> Batch:
    return make_batch(list(rows), self._length)


class _StreamedBatches(TrainingBatches):
  """Batches from a Grain pipeline, whose own state is saved, with a fingerprint of the files that it is a place in."""

  _FIELDS = {
    "kind": "config.data.mode",
    "num_workers": "config.data.num_workers",
    "processes": "the number of processes",
    "dataset": "the data (config.data or config.train.batch_size)",
    "grain": "the version of Grain",
  }

  def __init__(self, config: Config, process_index: int, process_count: int):
    super().__init__(config.data)
    data = config.data
    opened = _open_sources(data, "train")
    self._opened = opened
    self._files = {source.spec: source.fingerprint() for source, _ in opened}
    self._dataset = _batches(opened, config, process_index, process_count)
    self._read(iter(self._dataset), data.source)
    description = [
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
    if data.prompt_field:
      description += [data.prompt_field, data.prompt_template]
    if data.files:
      description += ["files", data.files]
    self._identity = {
      "kind": "streamed",
      "num_workers": data.num_workers,
      "processes": process_count,
      "grain": grain.__version__,
      "dataset": hashlib.sha256(json.dumps(description).encode()).hexdigest(),
    }

  def __next__(self) -> Batch:
    assert self._reader is not None, "closed"
    return _plain(next(self._reader))

  def data_identity(self) -> dict[str, int | str]:
    return _source_identity(self._opened, self._config)

  def get_state(self) -> dict[str, Any]:
    assert self._reader is not None, "closed"
    return {
      **self._identity,
      "files": self._files,
      "grain_state": json.loads(json.dumps(self._reader.get_state())),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    _refuse_other(state, self._identity, self._FIELDS)
    check_unchanged(state.get("files"), self._files)
    self.close()
    iterator = iter(self._dataset)
    iterator.set_state(_with_tuples(state["grain_state"]))
    self._read(iterator, self._config.source)


def streamed_dataset(
  config: Config,
  process_index: int = 0,
  process_count: int = 1,
  repeat: bool = True,
) -> grain.IterDataset[Batch]:
  """The Grain dataset behind streamed training batches.

  Args:
    config: The run's config.
    process_index: The index of this process in the run.
    process_count: Number of processes.
    repeat: Whether to repeat the rows endlessly, shuffled; else one pass in
      order, over this process's share of the parts. Rows that do not fill a
      batch are left out.

  Returns:
    Dataset of batches.
  """
  return _batches(
    _open_sources(config.data, "train"),
    config,
    process_index,
    process_count,
    repeat,
  )


def _batches(
  opened: list[tuple[Source, float]],
  config: Config,
  process_index: int,
  process_count: int,
  repeat: bool = True,
) -> grain.IterDataset[Batch]:
  rows = _stream(opened, config.data, process_index, process_count, repeat)
  batches = rows.batch(
    config.train.batch_size // process_count,
    drop_remainder=True,
    batch_fn=_MakeBatch(config.data.length),
  )
  # Workers read parts of their own, and pack and batch them, so that only whole batches travel between processes. The order of batches
  # depends on the number of workers, which is therefore part of the saved state.
  return _ahead(batches, config.data.num_workers)


def _with_tuples(state: Any) -> Any:
  """Grain's state from JSON. ConcatThenSplit compares its slices with tuples, which JSON makes lists."""
  if isinstance(state, dict):
    return {
      key: {name: tuple(value) for name, value in item.items()}
      if key == "remainder_slices"
      else _with_tuples(item)
      for key, item in state.items()
    }
  return (
    [_with_tuples(item) for item in state] if isinstance(state, list) else state
  )


# --- Validation ---


class ValidationBatches:
  """Batches of the same rows in the same order, each time they are iterated.

  Attributes:
    data_identity: Returns values that all processes must share, by name for
      messages.
  """

  def __init__(
    self,
    rows: Any,
    count: int,
    length: int,
    batch_size: int,
    process_index: int,
    process_count: int,
    data_identity: Callable[[], dict[str, int | str]],
  ):
    self.data_identity = data_identity
    self._rows, self._count, self._length = rows, count, length
    self._batch_size = batch_size
    share = batch_size // process_count
    self._start, self._stop = process_index * share, (process_index + 1) * share

  @property
  def rows(self) -> int:
    """Number of rows over all processes, without padding."""
    return self._count

  def __len__(self) -> int:
    return -(-self._count // self._batch_size)

  def __iter__(self) -> Iterator[Batch]:
    for first in range(0, self._count, self._batch_size):
      indices = range(first + self._start, first + self._stop)
      yield make_batch(
        [
          self._rows[index] if index < self._count else EMPTY_ROW
          for index in indices
        ],
        self._length,
      )


def validation_batches(
  config: Config,
  batch_size: int,
  *,
  process_index: int = 0,
  process_count: int = 1,
) -> ValidationBatches:
  """Opens the validation data: the first config.eval.rows rows (−1: all) of a fixed order. Rows of weight 0 fill up the last batch.

  Prepared rows are shuffled once, with one seed for all runs, so that a few rows are a fair sample of all documents. A mixture's rows come
  in proportion to its weights until its shortest component ends. Streamed rows come in the order of the documents.

  Args:
    config: The run's config.
    batch_size: Rows of a global batch.
    process_index: The index of this process in the run.
    process_count: Number of processes; must divide batch_size.

  Returns:
    The batches. All processes have equally many.

  Raises:
    UserError: as `training_batches`.
  """
  if batch_size % process_count:
    raise UserError(
      f"validation batch of {batch_size} rows: must be divisible by the number of processes, {process_count}"
    )
  rows: Any
  if _is_prepared(config.data):
    components, weights = _open_rows(config.data, "validation", process_count)
    shuffled = [
      grain.MapDataset.source(component).seed(index).shuffle()
      for index, component in enumerate(components)
    ]
    rows = (
      shuffled[0]
      if len(shuffled) == 1
      else grain.MapDataset.mix(shuffled, weights)
    )
    count = len(rows)
    data_identity = functools.partial(_row_identity, components, "validation")
  else:
    opened = _open_sources(config.data, "validation")
    data_identity = functools.partial(_source_identity, opened, config.data)
    rows = []
    for row in _stream(opened, config.data, repeat=False):
      if len(rows) == config.eval.rows:
        break
      rows.append(row)
    count = len(rows)
    if not rows:
      raise UserError(
        "config.data.source: holds no validation documents: set config.data.validation_source, or raise "
        f"config.data.validation_fraction = {config.data.validation_fraction}"
      )
  if config.eval.rows >= 0:
    count = min(count, config.eval.rows)
  return ValidationBatches(
    rows,
    count,
    config.data.length,
    batch_size,
    process_index,
    process_count,
    data_identity,
  )
