"""Shards of prepared rows, written by this process or by workers.

A shard is a run of a source's parts. Its rows depend on those parts and the config alone, whichever process writes them. A file gets its
name when it is complete, so that preparing continues where it was stopped.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain

from diffjax.config import DataConfig, UserError
from diffjax.data import packing
from diffjax.data.document import Source, reason
from diffjax.data.row import encode_row
from diffjax.data.tokenizer import load_once
from diffjax.host import address_space
from diffjax.host.progress import Progress, say
from diffjax.host.workers import end_with_parent, starting_workers

# How to prepare rows, for messages.
COMMAND = "python -m diffjax.prepare with the same --config flags"


@dataclasses.dataclass(frozen=True)
class Shard:
  """A run of a source's parts, and the file of its rows.

  Attributes:
    directory: Of the target.
    spec: The source.
    split: "train" or "validation".
    index: Number of the shard, from 0.
    number: Number of shards of the split.
    start: The first part.
    stop: The part after the last one.
  """

  directory: str
  spec: str
  split: str
  index: int
  number: int
  start: int
  stop: int

  @property
  def path(self) -> str:
    """The ArrayRecord file. Its totals stand in a .json file beside it."""
    return os.path.join(
      self.directory,
      f"{self.split}-{self.index:05d}-of-{self.number:05d}.array_record",
    )

  def is_complete(self) -> bool:
    """True if the shard and its totals are written."""
    return os.path.exists(self.path) and os.path.exists(f"{self.path}.json")

  def totals(self) -> dict[str, Any]:
    """Numbers of documents, bytes, tokens and rows, and the sha256 of the rows.

    Raises:
      UserError: if they cannot be read.
    """
    try:
      with open(f"{self.path}.json", encoding="utf-8") as file:
        return json.load(file)
    except (OSError, ValueError) as error:
      raise UserError(
        f"{self.path}.json: cannot be read ({reason(error)}); delete it, and run {COMMAND}"
      ) from error


def add_totals(shards: Sequence[Shard]) -> dict[str, Any]:
  """The sums of the shards' totals, with the rows and the digest of each shard."""
  each = [shard.totals() for shard in shards]
  out = {
    key: sum(totals[key] for totals in each)
    for key in each[0]
    if key != "sha256"
  }
  return {
    **out,
    "shard_rows": [totals["rows"] for totals in each],
    "digests": [totals["sha256"] for totals in each],
  }


def worker_count(requested: int, num_shards: int) -> int:
  """Returns the number of processes that write shards; 1 is this process.

  Args:
    requested: The number that the user wants; 0 for one a CPU.
    num_shards: Shards to write.
  """
  if requested:
    limit = min(requested, num_shards)
  else:
    # A process takes seconds to start, too long for a single shard.
    limit = min(os.cpu_count() or 1, num_shards // 2)
  return max(1, limit)


@dataclasses.dataclass(frozen=True)
class Work:
  """The shards of the rows of one source.

  Attributes:
    spec: The source.
    directory: The directory of the rows.
    opened: The opened source, by split.
    shards: All shards of all splits.
  """

  spec: str
  directory: str
  opened: Mapping[str, Source]
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
    workers: Number of processes that tokenise and write; 0 for one a CPU.

  Raises:
    UserError: for documents that cannot be read, or a worker that died.
  """
  missing, opened = work.missing, work.opened
  parts = sum(shard.stop - shard.start for shard in missing)
  workers = worker_count(workers, len(missing))
  plural = "s" if workers > 1 else ""
  say(
    f"preparing {work.spec}, {len(missing)} of {len(work.shards)} shards to"
    f" write, with {workers} worker{plural}: {work.directory}"
  )
  with Progress(f"preparing {work.spec}", parts) as progress:
    if workers > 1:
      _write_in_processes(missing, opened, config, workers, progress)
    else:
      counter = _Counter([0.0, 0.0], threading.Lock(), progress)
      for shard in missing:
        _write_shard(shard, opened[shard.split], config, counter)


class _Counter:
  """Counts of parts and tokens over all workers, and their progress bar if this process shows one."""

  def __init__(self, values: Any, lock: Any, progress: Progress | None = None):
    self.values, self._lock, self._progress = values, lock, progress

  def add(self, parts: float, tokens: int) -> None:
    with self._lock:
      self.values[0] += parts
      self.values[1] += tokens
    if self._progress:
      self._progress.update(*self.values)


def _write_shard(
  shard: Shard, source: Source, config: DataConfig, counter: _Counter
) -> None:
  """Writes the rows of a shard. Its files get their names once they are complete."""
  from array_record.python import array_record_module

  vocab_size = load_once(config.tokenizer).vocab_size
  totals = {"documents": 0, "bytes": 0, "replaced": 0, "tokens": 0, "rows": 0}
  digest = hashlib.sha256()

  def read(part):
    counted = 0.0

    def reached(share: float) -> None:
      nonlocal counted
      if share == 1 or share > counted + 0.01:
        counter.add(share - counted, 0)
        counted = share

    for document in source.read(part, reached):
      totals["documents"] += 1
      text = (
        document.text
        if document.prompt is None
        else document.prompt + document.text
      )
      totals["bytes"] += (
        len(text) if text.isascii() else len(text.encode("utf-8"))
      )
      totals["replaced"] += document.replaced
      yield document
    reached(1.0)

  parts = grain.MapDataset.source(
    source.parts[shard.start : shard.stop]
  ).to_iter_dataset(grain.ReadOptions(num_threads=0))
  documents = packing.Documents(parts, read, len(source.parts), shard.spec)
  counts = packing.ExampleCounts(config.length)
  temporary = temporary_name(shard.path)
  writer = array_record_module.ArrayRecordWriter(temporary, "group_size:1")
  try:
    uncounted = 0
    for row in packing.make_rows(documents, config, counts):
      record = encode_row(
        row, vocab_size, with_prompts=bool(config.prompt_field)
      )
      writer.write(record)
      digest.update(record)
      totals["rows"] += 1
      totals["tokens"] += len(row.tokens)
      uncounted += len(row.tokens)
      if uncounted > 100_000:
        counter.add(0, uncounted)
        uncounted = 0
    counter.add(0, uncounted)
  finally:
    writer.close()
  if config.prompt_field:
    totals |= {"skipped": counts.skipped, "cut": counts.cut}
  write_json(f"{shard.path}.json", {**totals, "sha256": digest.hexdigest()})
  os.replace(temporary, shard.path)


# Set in worker processes only.
_worker_counter: _Counter | None = None
_worker_sources: Mapping[str, Source] = {}


def _write_in_processes(
  shards: Sequence[Shard],
  opened: Mapping[str, Source],
  config: DataConfig,
  workers: int,
  progress: Progress,
) -> None:
  context = multiprocessing.get_context(
    "spawn"
  )  # a process with JAX's threads may hang when it is forked
  with (
    _no_main_module(),
    starting_workers(),
  ):  # the first submissions start all processes
    values, lock = context.Array("d", 2, lock=False), context.Lock()
    # The sources are sent to the workers, because opening them again would list
    # the files and read the footers of all Parquet files once a worker.
    pool = concurrent.futures.ProcessPoolExecutor(
      workers, context, _start_worker, (values, lock, opened)
    )
    waiting = {
      pool.submit(_write_shard_in_worker, shard, config) for shard in shards
    }
  try:
    while waiting:
      done, waiting = concurrent.futures.wait(
        waiting, timeout=0.5, return_when=concurrent.futures.FIRST_EXCEPTION
      )
      for future in done:
        future.result()
      progress.update(*values)
  except concurrent.futures.process.BrokenProcessPool as error:
    limited = f"; {limit}" if (limit := address_space.limit()) else ""
    raise UserError(
      f"a worker died while preparing (out of memory?{limited}); to continue, run the same command again with fewer --workers"
    ) from error
  finally:
    pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
  """Hides the main module: a spawned process would run a user's script again. Workers need nothing of it."""
  main = sys.modules["__main__"]
  sys.modules["__main__"] = types.ModuleType("__main__")
  try:
    yield
  finally:
    sys.modules["__main__"] = main


def _start_worker(values: Any, lock: Any, opened: Mapping[str, Source]) -> None:
  global _worker_counter, _worker_sources
  _worker_counter = _Counter(values, lock)
  _worker_sources = opened
  end_with_parent()


def _write_shard_in_worker(shard: Shard, config: DataConfig) -> None:
  assert _worker_counter is not None
  _write_shard(shard, _worker_sources[shard.split], config, _worker_counter)


def temporary_name(path: str) -> str:
  """The name of a file until it is complete. Processes and hosts that prepare the same rows have different ones."""
  return f"{path}.{os.getpid()}.{_host()}.tmp"


def _host() -> str:
  return socket.gethostname().replace(".", "-")


def remove_leftovers(directory: str) -> None:
  """Removes incomplete files of killed processes of this host."""
  for path in glob.glob(
    os.path.join(glob.escape(directory), f"*.{glob.escape(_host())}.tmp")
  ):
    try:
      os.kill(int(path.split(".")[-3]), 0)
    except ProcessLookupError:
      os.remove(path)
    except (
      ValueError,
      OSError,
    ):  # a process of another user, or another program's file
      pass


def write_json(path: str, value: Any) -> None:
  """Writes a JSON file, completely or not at all."""
  temporary = temporary_name(path)
  with open(temporary, "w", encoding="utf-8") as file:
    json.dump(value, file, indent=2)
  os.replace(temporary, path)
