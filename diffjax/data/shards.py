"""Shards of prepared rows, written by this process or by workers.

A source is a list of parts, such as ranges of bytes of its files. A shard is a
file with the rows of consecutive parts. The rows depend only on those parts and
the config, so any process can write a shard. A file gets its name when it is
complete, so an interrupted preparation can be continued.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import glob
import hashlib
import json
import multiprocessing
import os
import socket
import sys
import threading
import types
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import grain

from diffjax.config import DataConfig, UserError
from diffjax.data import document_dataset, packing
from diffjax.data.document import Document, Part, Source, reason
from diffjax.data.reader import read_sequentially
from diffjax.data.row import encode_row
from diffjax.data.tokenizer import load_once
from diffjax.host import address_space
from diffjax.host.files import replaced_at_the_end, write_atomically
from diffjax.host.progress import Progress, say
from diffjax.host.workers import end_with_parent, starting_workers

# How to prepare rows, for messages.
COMMAND = "python -m diffjax.prepare with the same --config flags"

# Progress is reported after this fraction of a part, and after this number of
# tokens.
_REPORTED_FRACTION = 0.01
_REPORTED_TOKENS = 100_000

# Seconds between updates of the progress of workers.
_UPDATE_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Shard:
  """A file of prepared rows, and the range of the source's parts in it.

  Attributes:
    directory: The directory of the source's rows.
    spec: The source, as in config.data.source.
    split: "train" or "validation".
    index: The index of the shard in its split, from 0.
    num_shards: Number of shards of the split.
    start: The index of the first part.
    stop: The index after the last part.
  """

  directory: str
  spec: str
  split: str
  index: int
  num_shards: int
  start: int
  stop: int

  @property
  def path(self) -> str:
    """The ArrayRecord file."""
    return shard_path(self.directory, self.split, self.index, self.num_shards)

  @property
  def totals_path(self) -> str:
    """The JSON file of the shard's totals."""
    return f"{self.path}.json"

  def is_complete(self) -> bool:
    """Returns whether the shard and its totals are written."""
    return os.path.exists(self.path) and os.path.exists(self.totals_path)

  def totals(self) -> dict[str, Any]:
    """Returns the totals of a complete shard, from their file.

    Returns:
      The numbers of documents, bytes, tokens and rows, by name, and the sha256
      of the rows.

    Raises:
      UserError: if they cannot be read.
    """
    try:
      with open(self.totals_path, encoding="utf-8") as file:
        return json.load(file)
    except (OSError, ValueError) as error:
      raise UserError(
        f"{self.totals_path}: cannot be read ({reason(error)}); delete it, and"
        f" run {COMMAND}"
      ) from error


def shard_path(directory: str, split: str, index: int, num_shards: int) -> str:
  """Returns the path of a shard's file."""
  name = f"{split}-{index:05d}-of-{num_shards:05d}.array_record"
  return os.path.join(directory, name)


class SplitTotals(NamedTuple):
  """The totals of all shards of a split.

  Attributes:
    sums: The sums of the shards' counts, by name: "documents", "bytes", "rows"
      and so on.
    shard_rows: The number of rows of each shard.
    shard_digests: The sha256 (hex) of the rows of each shard.
  """

  sums: dict[str, int]
  shard_rows: list[int]
  shard_digests: list[str]


def add_totals(shards: Sequence[Shard]) -> SplitTotals:
  """Returns the totals of the complete shards of a split."""
  sums: dict[str, int] = {}
  shard_rows = []
  shard_digests = []
  for shard in shards:
    totals = shard.totals()
    shard_rows.append(totals["rows"])
    shard_digests.append(totals["sha256"])
    for name, value in totals.items():
      if name != "sha256":
        sums[name] = sums.get(name, 0) + value
  return SplitTotals(sums, shard_rows, shard_digests)


def worker_count(requested: int, num_shards: int) -> int:
  """Returns the number of processes that write shards. 1 is this process.

  Args:
    requested: The number that the user wants. 0 for one for each CPU.
    num_shards: Number of shards to write.
  """
  if requested > 0:
    limit = min(requested, num_shards)
  else:
    # A process takes seconds to start, too long for a single shard.
    limit = min(os.cpu_count() or 1, num_shards // 2)
  return max(1, limit)


@dataclasses.dataclass(frozen=True)
class Work:
  """The preparation of one source: what is read, and which shards are written.

  Attributes:
    spec: The source, as in config.data.source.
    directory: The directory of the rows.
    source_by_split: The source, opened for each split.
    shards: All shards of all splits, complete or not.
  """

  spec: str
  directory: str
  source_by_split: Mapping[str, Source]
  shards: Sequence[Shard]

  @property
  def missing(self) -> list[Shard]:
    """The shards that are not complete."""
    return [shard for shard in self.shards if not shard.is_complete()]


def write_missing(work: Work, config: DataConfig, workers: int) -> None:
  """Writes the shards that are not complete.

  Args:
    work: The shards and their source.
    config: The data fields.
    workers: Number of processes that tokenize and write. 0 for one for each
      CPU.

  Raises:
    UserError: if a document cannot be read, or a worker died.
  """
  missing = work.missing
  num_parts = sum(shard.stop - shard.start for shard in missing)
  num_workers = worker_count(workers, len(missing))
  plural = "s" if num_workers > 1 else ""
  say(
    f"preparing {work.spec}, {len(missing)} of {len(work.shards)} shards to"
    f" write, with {num_workers} worker{plural}: {work.directory}"
  )
  with Progress(f"preparing {work.spec}", num_parts) as progress:
    if num_workers > 1:
      _write_in_processes(missing, work, config, num_workers, progress)
    else:
      counter = _Counter([0.0, 0.0], threading.Lock(), progress)
      for shard in missing:
        source = work.source_by_split[shard.split]
        _write_shard(shard, source, config, counter)


@dataclasses.dataclass(frozen=True)
class _Counter:
  """Counts the parts and tokens that are done, over all worker processes.

  Attributes:
    counts: The number of parts and the number of tokens. A list, or an array in
      shared memory.
    lock: Protects `counts`.
    progress: Displays the counts after each change. None in worker processes,
      because only their parent displays them.
  """

  counts: MutableSequence[float]
  lock: contextlib.AbstractContextManager[Any]
  progress: Progress | None = None

  def add_parts(self, num_parts: float) -> None:
    self._add(num_parts, 0)

  def add_tokens(self, num_tokens: int) -> None:
    self._add(0.0, num_tokens)

  def _add(self, num_parts: float, num_tokens: int) -> None:
    with self.lock:
      self.counts[0] += num_parts
      self.counts[1] += num_tokens
    if self.progress is not None:
      self.progress.update(self.counts[0], self.counts[1])


class _ShardReader:
  """Reads the documents of a shard, counts them and reports the progress.

  Attributes:
    num_documents: Number of documents that were read.
    num_bytes: Bytes of their texts and prompts as UTF-8.
    num_replaced: Number of documents in which bytes that are not UTF-8 were
      replaced.
  """

  def __init__(self, source: Source, counter: _Counter):
    self.num_documents = 0
    self.num_bytes = 0
    self.num_replaced = 0
    self._source = source
    self._counter = counter
    # The fraction of the current part that the counter has got.
    self._fraction_reported = 0.0

  def read(self, part: Part) -> Iterator[Document]:
    """Yields the documents of a part, and counts them."""
    self._fraction_reported = 0.0
    for document in self._source.read(part, self._report):
      self.num_documents += 1
      self.num_bytes += _utf8_size(document.text)
      if document.prompt is not None:
        self.num_bytes += _utf8_size(document.prompt)
      if document.replaced:
        self.num_replaced += 1
      yield document
    self._report(1.0)

  def _report(self, fraction: float) -> None:
    """Reports to the counter that a fraction of the part has been read.

    The counter has a lock, so small steps are left for the next report.
    """
    step = fraction - self._fraction_reported
    if fraction == 1 or step > _REPORTED_FRACTION:
      self._counter.add_parts(step)
      self._fraction_reported = fraction


def _utf8_size(text: str) -> int:
  """Returns the number of bytes of a text as UTF-8."""
  if text.isascii():
    return len(text)
  return len(text.encode("utf-8"))


class _WrittenRows(NamedTuple):
  """The counts and the digest of the rows of a file.

  Attributes:
    num_tokens: Number of tokens.
    num_rows: Number of rows.
    sha256: The sha256 (hex) of the rows.
  """

  num_tokens: int
  num_rows: int
  sha256: str


def _write_shard(
  shard: Shard, source: Source, config: DataConfig, counter: _Counter
) -> None:
  """Writes the rows and the totals of a shard."""
  # Documents are read and packed while the rows are written below. `reader` and
  # `example_counts` count them meanwhile.
  parts = source.parts[shard.start : shard.stop]
  part_dataset = read_sequentially(grain.MapDataset.source(parts))
  reader = _ShardReader(source, counter)
  documents = document_dataset.Documents(
    part_dataset,
    read=reader.read,
    max_empty_parts=len(source.parts),
    spec=shard.spec,
  )
  example_counts = packing.ExampleCounts(config.length)
  rows = packing.make_rows(documents, config, example_counts)

  # A shard is complete if both files exist. The file of the rows gets its name
  # at the end of the context, after the totals are written.
  with replaced_at_the_end(shard.path, temporary_suffix()) as temporary:
    written = _write_rows(os.fspath(temporary), rows, config, counter)
    totals: dict[str, Any] = {
      "documents": reader.num_documents,
      "bytes": reader.num_bytes,
      "replaced": reader.num_replaced,
      "tokens": written.num_tokens,
      "rows": written.num_rows,
    }
    if config.prompt_field:
      totals["skipped"] = example_counts.skipped
      totals["cut"] = example_counts.cut
    totals["sha256"] = written.sha256
    write_json(shard.totals_path, totals)


def _write_rows(
  path: str,
  rows: grain.IterDataset,
  config: DataConfig,
  counter: _Counter,
) -> _WrittenRows:
  """Writes rows to an ArrayRecord file, and adds their tokens to a counter.

  Args:
    path: The file.
    rows: The rows.
    config: The data fields.
    counter: The counter, for the display of the progress.
  """
  from array_record.python import array_record_module

  vocab_size = load_once(config.tokenizer).vocab_size
  has_prompts = config.prompt_field != ""
  num_tokens = 0
  num_rows = 0
  num_reported = 0
  digest = hashlib.sha256()
  writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
  try:
    for row in rows:
      record = encode_row(row, vocab_size, with_prompts=has_prompts)
      writer.write(record)
      digest.update(record)
      num_rows += 1
      num_tokens += len(row.tokens)
      # The counter has a lock, so it is not called for each row.
      if num_tokens - num_reported > _REPORTED_TOKENS:
        counter.add_tokens(num_tokens - num_reported)
        num_reported = num_tokens
    counter.add_tokens(num_tokens - num_reported)
  finally:
    writer.close()
  return _WrittenRows(num_tokens, num_rows, digest.hexdigest())


class _WorkerState(NamedTuple):
  """What a worker process needs for all shards.

  The sources are sent to the workers. If each worker opened them, it would list
  the files and read the footers of all Parquet files.
  """

  counter: _Counter
  source_by_split: Mapping[str, Source]


# The state of this process, if it is a worker. It is sent once, when the worker
# starts, because it is much larger than a task.
_worker_state: _WorkerState | None = None


def _write_in_processes(
  shards: Sequence[Shard],
  work: Work,
  config: DataConfig,
  num_workers: int,
  progress: Progress,
) -> None:
  """Writes some shards of a preparation in worker processes.

  Raises:
    UserError: if a document cannot be read, or a worker died.
  """
  # A process with JAX's threads may hang if it is forked.
  context = multiprocessing.get_context("spawn")
  # The first calls of `submit` start all processes.
  with _no_main_module(), starting_workers():
    # The numbers of parts and of tokens, in shared memory.
    counts = context.Array("d", 2, lock=False)
    counter = _Counter(counts, context.Lock())
    pool = concurrent.futures.ProcessPoolExecutor(
      num_workers,
      context,
      initializer=_start_worker,
      initargs=(_WorkerState(counter, work.source_by_split),),
    )
    pending = set()
    for shard in shards:
      pending.add(pool.submit(_write_shard_in_worker, shard, config))
  try:
    # Displays the workers' counts until all shards are written.
    while pending:
      done, pending = concurrent.futures.wait(
        pending,
        timeout=_UPDATE_SECONDS,
        return_when=concurrent.futures.FIRST_EXCEPTION,
      )
      for future in done:
        # Raises the worker's error, if there was one.
        future.result()
      progress.update(counts[0], counts[1])
  except concurrent.futures.process.BrokenProcessPool as error:
    raise _worker_died() from error
  finally:
    pool.shutdown(wait=True, cancel_futures=True)


def _worker_died() -> UserError:
  """Returns the error for a worker process that ended unexpectedly."""
  cause = "out of memory?"
  limit = address_space.limit()
  if limit:
    cause += f"; {limit}"
  return UserError(
    f"a worker died while preparing ({cause}); to continue, run the same"
    " command again with fewer --workers"
  )


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
  """A context whose spawned processes do not import the main module.

  multiprocessing imports it in each process, which would run a user's script
  again. Workers do not need it.
  """
  main = sys.modules["__main__"]
  sys.modules["__main__"] = types.ModuleType("__main__")
  try:
    yield
  finally:
    sys.modules["__main__"] = main


def _start_worker(state: _WorkerState) -> None:
  """Initializes a worker process with the state for all its shards."""
  global _worker_state
  _worker_state = state
  end_with_parent()


def _write_shard_in_worker(shard: Shard, config: DataConfig) -> None:
  """Writes a shard in a worker process."""
  assert _worker_state is not None, "_start_worker comes first"
  source = _worker_state.source_by_split[shard.split]
  _write_shard(shard, source, config, _worker_state.counter)


def temporary_suffix() -> str:
  """Returns the suffix of a file's name until the file is complete.

  It is ".PID.HOST.tmp", because several processes and hosts may prepare the
  same rows at the same time.
  """
  return f".{os.getpid()}.{_host()}.tmp"


def _host() -> str:
  """Returns the name of this host, without dots."""
  return socket.gethostname().replace(".", "-")


def remove_leftovers(directory: str) -> None:
  """Removes incomplete files of killed processes of this host."""
  pattern = f"*.{glob.escape(_host())}.tmp"
  for path in glob.glob(os.path.join(glob.escape(directory), pattern)):
    try:
      # The path ends with ".PID.HOST.tmp", and the host has no dots.
      pid = int(path.split(".")[-3])
      # Signal 0 only checks whether the process exists.
      os.kill(pid, 0)
    except ProcessLookupError:
      os.remove(path)
    except (ValueError, OSError):
      # The file of another program, or the process of another user.
      pass


def write_json(path: str, value: Any) -> None:
  """Writes a JSON file. Several processes may write it at the same time."""
  text = json.dumps(value, indent=2)
  write_atomically(path, text, temporary_suffix=temporary_suffix())
