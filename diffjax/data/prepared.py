"""Prepared rows: tokenized, packed and written to disk once.

A row has up to data.length + 1 tokens. The sources of a mixture are prepared
separately and mixed when they are read, so weights can change without preparing
again. A directory holds the rows of one source: ArrayRecord files ("shards"),
the totals of each shard in a JSON file, and a meta.json with these fields:

  complete: whether all rows are written.
  description: what the rows depend on, except the contents of the files.
  identity: names, sizes, times and samples of the source's files, by split.
  files: digests of these files that do not depend on their directory, by split.
  tokenizer_spec: config.data.tokenizer, for people.
  splits: by split, the sums of the totals, and the fingerprint of the rows.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import grain

from diffjax.config import DataConfig, UserError
from diffjax.data import sources
from diffjax.data.document import Source, reason
from diffjax.data.estimate import announce
from diffjax.data.row import Row, decode_row
from diffjax.data.shards import (
  COMMAND,
  Shard,
  Work,
  add_totals,
  remove_leftovers,
  shard_path,
  write_json,
  write_missing,
)
from diffjax.data.tokenizer import load_tokenizer
from diffjax.host import address_space
from diffjax.host.files import is_remote
from diffjax.host.progress import say
from diffjax.host.user_cache import cache_directory

_FORMAT = 1

# The largest number of shards. The last rows of a shard are not full, so the
# validation split, which is small, has few.
_MAX_SHARDS = {"train": 1024, "validation": 16}

# The config field from which each field of a description comes, for messages.
CONFIG_FIELDS = {
  "source": "data.source",
  "text_field": "data.text_field",
  "prompt_field": "data.prompt_field",
  "prompt_template": "data.prompt_template",
  "validation_fraction": "data.validation_fraction",
  "tokenizer": "data.tokenizer",
  "length": "data.length",
  "packing": "data.packing",
  "format": "(diffjax's own format)",
  "splits": "data.validation_source",
  "files": "data.files",
}

# The length of a source's name in the name of its directory.
_MAX_NAME_LENGTH = 40


@dataclasses.dataclass(frozen=True)
class Target:
  """What is prepared from one source, and the directory for it.

  Attributes:
    spec: The source, as in config.data.source.
    weight: Its share of a mixture.
    splits: The splits that are prepared: "train", "validation" or both.
    directory: The directory of the rows, which may not exist yet.
    description: What the rows depend on, except the contents of the files. It
      is stored in meta.json.
  """

  spec: str
  weight: float
  splits: tuple[str, ...]
  directory: str
  description: dict[str, Any]


class RowsOrigin(TypedDict):
  """Where training rows come from. Checkpoints store it as JSON.

  Attributes:
    directory: The directory of the rows.
    fingerprint: sha256 (hex) of the rows.
    description: The target's description.
  """

  directory: str
  fingerprint: str
  description: dict[str, Any]


class _Request(NamedTuple):
  """A source of a config, and the splits that are read from it."""

  component: sources.Component
  splits: tuple[str, ...]


def targets(config: DataConfig) -> list[Target]:
  """Returns the rows that a config needs, as one target for each source.

  Raises:
    UserError: if a source is invalid, or prepared_dir is not local.
  """
  if is_remote(config.prepared_dir):
    raise UserError(
      f"config.data.prepared_dir = {config.prepared_dir!r}: must be a local"
      " path, because ArrayRecord files are read in random order; copy the rows"
      " to a disk, or mount the bucket"
    )
  requests = _requests(config)
  tokenizer_fingerprint = load_tokenizer(config.tokenizer).fingerprint
  prepared_dir = os.path.expanduser(config.prepared_dir)
  result = []
  for component, splits in requests:
    spec = component.spec
    description = _describe(spec, splits, config, tokenizer_fingerprint)
    if not prepared_dir:
      directory = _cache_directory(spec, splits, config, description)
    elif len(requests) == 1:
      directory = prepared_dir
    else:
      # Each source has its own directory in prepared_dir. The name contains a
      # digest, because short names may be equal.
      name = f"{_short_name(spec)}-{_digest([spec, splits])[:8]}"
      directory = os.path.join(prepared_dir, name)
    target = Target(spec, component.weight, splits, directory, description)
    result.append(target)
  return result


def _requests(config: DataConfig) -> list[_Request]:
  """Returns the sources of a config, and which splits are read from each."""
  splits: tuple[str, ...] = ("train", "validation")
  if config.validation_source:
    splits = ("train",)
  requests = []
  for component in sources.parse_mixture(config.source):
    requests.append(_Request(component, splits))
  if config.validation_source:
    for component in sources.parse_mixture(
      config.validation_source, "data.validation_source"
    ):
      requests.append(_Request(component, ("validation",)))
  return requests


def _describe(
  spec: str,
  splits: tuple[str, ...],
  config: DataConfig,
  tokenizer_fingerprint: str,
) -> dict[str, Any]:
  """Returns what a source's rows depend on, except the contents of its files.

  The names of directories and the fingerprints of rows contain a digest of this
  description. A field that an earlier version did not have is left out if it
  has no effect, so that the digests of that version stay valid.
  """
  description = {
    "format": _FORMAT,
    "source": spec,
    "text_field": config.text_field,
    "splits": list(splits),
    "validation_fraction": config.validation_fraction,
    "tokenizer": tokenizer_fingerprint,
    "length": config.length,
    "packing": config.packing,
  }
  if config.validation_source:
    description["validation_fraction"] = None
  if config.prompt_field:
    description["prompt_field"] = config.prompt_field
    description["prompt_template"] = config.prompt_template
  if config.files and "train" in splits and sources.has_files(spec):
    description["files"] = config.files
  return description


def _cache_directory(
  spec: str,
  splits: tuple[str, ...],
  config: DataConfig,
  description: dict[str, Any],
) -> str:
  """Returns the directory of a source's rows in the user's cache.

  Its name has a digest of the description and of the files' identity. If an
  earlier version has prepared the rows, this is the directory of that version.
  """
  source_by_split = open_source(spec, splits, config)
  current = _cache_path(spec, description, _identity(source_by_split))
  if os.path.exists(meta_path(current)):
    return current
  earlier_identity = _earlier_identity(source_by_split)
  earlier = _cache_path(spec, description, earlier_identity)
  if os.path.exists(meta_path(earlier)):
    return earlier
  return current


def _cache_path(
  spec: str, description: dict[str, Any], identity: dict[str, Any]
) -> str:
  """Returns the path in the user's cache for rows of these files."""
  digest = _digest({**description, "identity": identity})
  name = f"{_short_name(spec)}-{digest[:16]}"
  return os.fspath(cache_directory("prepared", name))


def _short_name(spec: str) -> str:
  """Returns a name for a source that can be a part of a file name."""
  name = re.sub(r"[^A-Za-z0-9]+", "-", spec)
  return name.strip("-")[:_MAX_NAME_LENGTH]


def _digest(value: Any) -> str:
  """Returns the sha256 (hex) of a JSON value."""
  text = json.dumps(value, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def open_source(
  spec: str, splits: Sequence[str], config: DataConfig
) -> dict[str, Source]:
  """Returns a source, opened for each split.

  Raises:
    UserError: if the source does not exist, or is invalid.
  """
  return {split: sources.documents(spec, split, config) for split in splits}


def _identity(source_by_split: Mapping[str, Source]) -> dict[str, Any]:
  """Returns what identifies the files of a source (JSON), by split."""
  return {split: source.identity for split, source in source_by_split.items()}


def _earlier_identity(source_by_split: Mapping[str, Source]) -> dict[str, Any]:
  """Returns what identified the same files in earlier versions, by split."""
  identities = {}
  for split, source in source_by_split.items():
    identities[split] = source.earlier_identity
  return identities


def file_fingerprints(
  source_by_split: Mapping[str, Source],
) -> dict[str, dict[str, str]]:
  """Returns digests of the files of a source, by split."""
  return {
    split: source.fingerprint() for split, source in source_by_split.items()
  }


def meta_path(directory: str) -> str:
  """Returns the path of the meta.json in a directory of rows."""
  return os.path.join(directory, "meta.json")


def read_meta(target: Target) -> dict[str, Any] | None:
  """Returns the content of a target's meta.json. None if it does not exist.

  Raises:
    UserError: if the file cannot be read, or the directory holds rows with
      another description.
  """
  path = meta_path(target.directory)
  try:
    with open(path, encoding="utf-8") as file:
      meta = json.load(file)
    _check_meta(meta, target.splits)
  except (FileNotFoundError, NotADirectoryError):
    return None
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"{path}: cannot be read ({error}); delete {target.directory} and prepare"
      " again"
    ) from error
  _check_description(target, meta["description"])
  return meta


def _check_meta(meta: Any, splits: Sequence[str]) -> None:
  """Checks that the content of a meta.json has the fields that are read.

  Raises:
    ValueError, KeyError, TypeError: if it does not.
  """
  if not isinstance(meta["description"], dict):
    raise ValueError("its description is not a JSON object")
  if "identity" not in meta:
    raise KeyError("identity")
  if not meta["complete"]:
    # The field "splits" is added when all rows are written.
    return
  for split in splits:
    totals = meta["splits"][split]
    num_rows = sum(totals["shard_rows"])
    if num_rows != totals["rows"] or not totals["fingerprint"]:
      raise ValueError(f"its counts of {split} rows do not agree")


def _check_description(
  target: Target, stored_description: dict[str, Any]
) -> None:
  """Raises UserError if a directory holds rows of a different config.

  Args:
    target: The target that has this directory.
    stored_description: The description in the directory's meta.json.
  """
  differences = []
  for key, field in CONFIG_FIELDS.items():
    stored = stored_description.get(key)
    requested = target.description.get(key)
    if stored != requested:
      differences.append(
        f"config.{field} (there {stored!r}, asked for {requested!r})"
      )
  if differences:
    raise UserError(
      f"config.data.prepared_dir: {target.directory} holds other rows:"
      f" {'; '.join(differences)}; set config.data.prepared_dir to another"
      " directory, or the fields to what is there"
    )


def is_prepared(target: Target) -> bool:
  """Returns whether all rows of a target are written.

  Raises:
    UserError: if its directory holds rows with another description.
  """
  meta = read_meta(target)
  return meta is not None and meta["complete"]


def prepare(config: DataConfig, workers: int = 0) -> list[Target]:
  """Writes the rows that a config needs and that do not exist yet.

  Args:
    config: The data fields.
    workers: Number of processes that tokenize and write. 0 for one for each
      CPU. The rows do not depend on it.

  Returns:
    The targets, all prepared.

  Raises:
    UserError: if a source, a document or the tokenizer is invalid, or if a
      directory holds rows with another description or of other files.
  """
  # All sources are checked, and their needs are estimated, before the rows of
  # the first one are written.
  all_targets = targets(config)
  incomplete: list[tuple[Target, Work]] = []
  for target in all_targets:
    with _explain_errors(target):
      work = open_work(target, config)
    if work is not None:
      incomplete.append((target, work))
  announce([work for _, work in incomplete], config, workers)
  for target, work in incomplete:
    with _explain_errors(target):
      _write(target, work, config, workers)
  return all_targets


@contextlib.contextmanager
def _explain_errors(target: Target) -> Iterator[None]:
  """Converts errors of the disk or of memory in the body to a UserError."""
  try:
    with address_space.explained(
      f"preparing {target.spec}",
      remedy="run the same command again with fewer --workers to continue",
    ):
      yield
  except OSError as error:
    raise UserError(
      f"{target.directory}: cannot write prepared rows ({error});"
      " config.data.prepared_dir chooses another place"
    ) from error


def open_work(target: Target, config: DataConfig) -> Work | None:
  """Opens the source of a target, and divides it into shards.

  Returns:
    The source and all shards, including those that are already written. None if
    the target is prepared.

  Raises:
    UserError: if the directory holds rows of other files.
  """
  meta = read_meta(target)
  source_by_split = open_source(target.spec, target.splits, config)
  if meta is not None:
    # The rows may have been prepared by an earlier version.
    identities = [
      _identity(source_by_split),
      _earlier_identity(source_by_split),
    ]
    if meta["identity"] not in identities:
      raise UserError(
        f"{target.directory}: was prepared when {target.spec!r} held other"
        " files (names, sizes, times or text have changed); delete it, or set"
        " config.data.prepared_dir to another directory"
      )
    if meta["complete"]:
      say(f"{target.spec}: already prepared: {target.directory}")
      return None
  shards = []
  for split, source in source_by_split.items():
    shards += _divide(target, split, len(source.parts))
  return Work(target.spec, target.directory, source_by_split, shards)


def _divide(target: Target, split: str, num_parts: int) -> list[Shard]:
  """Divides the parts of a split evenly into shards of consecutive parts."""
  num_shards = min(num_parts, _MAX_SHARDS[split])
  shards = []
  for index in range(num_shards):
    shard = Shard(
      directory=target.directory,
      spec=target.spec,
      split=split,
      index=index,
      num_shards=num_shards,
      start=num_parts * index // num_shards,
      stop=num_parts * (index + 1) // num_shards,
    )
    shards.append(shard)
  return shards


def _write(
  target: Target, work: Work, config: DataConfig, workers: int
) -> None:
  """Writes the missing rows of a target, and then marks them as complete.

  Args:
    target: The target.
    work: Its source and shards.
    config: The data fields.
    workers: Number of processes. 0 for one for each CPU.

  Raises:
    UserError: if a document cannot be read, or no document is for training.
  """
  os.makedirs(target.directory, exist_ok=True)
  meta = _read_or_create_meta(target, work, config)

  start = time.monotonic()
  write_missing(work, config, workers)
  splits = _split_records(target, work.shards)
  if "train" in splits and splits["train"]["rows"] == 0:
    raise _no_documents(target, config)
  meta["splits"] = splits
  meta["complete"] = True
  write_json(meta_path(target.directory), meta)
  remove_leftovers(target.directory)

  for split, totals in splits.items():
    _print_totals(f"{target.spec}, {split}", totals, config.length)
  seconds = time.monotonic() - start
  num_tokens = sum(totals["tokens"] for totals in splits.values())
  speed = num_tokens / seconds / 1e6
  say(f"{target.spec}: prepared in {seconds:.1f} s ({speed:.2f} M tokens/s)")


def _read_or_create_meta(
  target: Target, work: Work, config: DataConfig
) -> dict[str, Any]:
  """Returns the content of a target's meta.json. Writes it if it is missing.

  It exists before the rows, so that an interrupted preparation is continued
  only with the same config and files.
  """
  meta = read_meta(target)
  if meta is not None:
    return meta
  meta = {
    "complete": False,
    "description": target.description,
    "identity": _identity(work.source_by_split),
    "files": file_fingerprints(work.source_by_split),
    "tokenizer_spec": config.tokenizer,
  }
  write_json(meta_path(target.directory), meta)
  return meta


def _split_records(
  target: Target, shards: Sequence[Shard]
) -> dict[str, dict[str, Any]]:
  """Returns the field "splits" of meta.json, after all shards are written.

  For each split, it has the sums of the shards' totals, the number of rows of
  each shard, and a fingerprint of all rows.
  """
  records = {}
  for split in target.splits:
    totals = add_totals([shard for shard in shards if shard.split == split])
    fingerprint = _digest([target.description, split, totals.shard_digests])
    records[split] = {
      **totals.sums,
      "shard_rows": totals.shard_rows,
      "fingerprint": fingerprint,
    }
  return records


def _no_documents(target: Target, config: DataConfig) -> UserError:
  """Returns the error for a source without training documents."""
  reasons = ["documents without text do not count"]
  if config.prompt_field:
    reasons.append(
      "nor do those whose prompts fill a row of config.data.length ="
      f" {config.length}"
    )
  held_out = config.validation_fraction
  reasons.append(
    f"and config.data.validation_fraction = {held_out} are held out"
  )
  return UserError(
    f"config.data.source {target.spec!r}: empty: no document to train on"
    f" ({', '.join(reasons)})"
  )


def _print_totals(name: str, totals: dict[str, Any], length: int) -> None:
  """Prints what a split holds, and what was replaced or left out.

  Args:
    name: The source and the split.
    totals: The record of the split in meta.json.
    length: config.data.length.
  """
  num_rows = totals["rows"]
  max_tokens = num_rows * (length + 1)
  fill = totals["tokens"] / max(1, max_tokens)
  say(
    f"{name}: {totals['documents']:,} documents ({totals['bytes']:,} bytes),"
    f" {totals['tokens']:,} tokens, {num_rows:,} rows of {length}"
    f" ({fill:.1%} full)"
  )
  if totals["replaced"]:
    say(
      f"{name}: {totals['replaced']:,} documents were not UTF-8; what could not"
      " be read became U+FFFD"
    )
  # The next two counts exist only for sources with prompts.
  if totals.get("skipped"):
    say(
      f"{name}: {totals['skipped']:,} documents are left out: their prompts"
      " fill a row, which leaves nothing to learn; config.data.length ="
      f" {length}"
    )
  if totals.get("cut"):
    say(
      f"{name}: {totals['cut']:,} documents are longer than a row; the rest of"
      " their answers does not see the prompt"
    )


class _RowFile(NamedTuple):
  """A file that has rows, and their number."""

  path: str
  num_rows: int


class PreparedRows:
  """The rows of one split of a target: a random-access source for Grain.

  Attributes:
    spec: The source.
    directory: The directory of the rows.
    fingerprint: sha256 (hex) of the rows.
    origin: Where the rows come from, for checkpoints.
  """

  def __init__(self, target: Target, split: str):
    """Opens the rows.

    Raises:
      UserError: if they are not all prepared.
    """
    meta = read_meta(target)
    if meta is None or not meta["complete"]:
      raise UserError(
        f"{target.directory}: rows of {target.spec!r} are not prepared (or not"
        f" all of them); run {COMMAND}"
      )
    totals = meta["splits"][split]
    self.spec = target.spec
    self.directory = target.directory
    self.fingerprint = totals["fingerprint"]
    self.origin = RowsOrigin(
      directory=self.directory,
      fingerprint=self.fingerprint,
      description=target.description,
    )
    self._files = _row_files(target.directory, split, totals["shard_rows"])
    # The index after the last row of each file.
    file_rows = [file.num_rows for file in self._files]
    self._ends = list(itertools.accumulate(file_rows))
    self._records: Any = None
    if self._files:
      with address_space.explained(
        f"opening {self.directory}",
        remedy="fewer other programs leave more",
      ):
        self._records = _open_records(self._files)

  def __len__(self) -> int:
    if not self._ends:
      return 0
    return self._ends[-1]

  def __getitem__(self, index: int) -> Row:
    try:
      return decode_row(self._records[index])
    except Exception as error:
      # ArrayRecord raises many kinds of exceptions.
      raise self._read_error(index, error) from error

  def __getitems__(self, indices: Sequence[int]) -> list[Row]:
    """Returns several rows.

    Reads neighboring rows four times as fast as `__getitem__` does.
    """
    try:
      records = self._records.__getitems__(indices)
      return [decode_row(record) for record in records]
    except Exception:
      # The error does not say which row is damaged. Reading one by one does.
      return [self[index] for index in indices]

  def _read_error(self, index: int, cause: Exception) -> UserError:
    """Returns the error for a row that cannot be read."""
    file_index = bisect.bisect_right(self._ends, index)
    file = self._files[file_index]
    first_row = self._ends[file_index] - file.num_rows
    return UserError(
      f"{file.path}: row {index - first_row} cannot be read"
      f" ({reason(cause)}); delete this file and its directory's meta.json, and"
      f" run {COMMAND}"
    )


def _row_files(
  directory: str, split: str, shard_rows: Sequence[int]
) -> list[_RowFile]:
  """Returns the shards of a split that have rows.

  Args:
    directory: The directory of the rows.
    split: "train" or "validation".
    shard_rows: The number of rows of each shard of the split.
  """
  files = []
  for index, num_rows in enumerate(shard_rows):
    if num_rows > 0:
      path = shard_path(directory, split, index, len(shard_rows))
      files.append(_RowFile(path, num_rows))
  return files


def _open_records(
  files: Sequence[_RowFile],
) -> grain.sources.ArrayRecordDataSource:
  """Returns the records of all files as one sequence."""
  address_space.check_array_record(files[0].path)
  # Grain opens each file to count its records, if the path has no range.
  paths = [f"{file.path}[0:{file.num_rows}]" for file in files]
  return grain.sources.ArrayRecordDataSource(paths)
