"""Prepared rows: tokenized, packed and written to disk once.

The sources of a mixture are prepared separately and mixed when they are read,
so weights can change without preparing again. A directory holds the rows of one
source: ArrayRecord files ("shards"), the totals of each shard in a JSON file,
and a meta.json with these fields:

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
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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

# The config fields that the fields of a description come from, for messages.
_CONFIG_FIELDS = {
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
  """The rows of one source.

  Attributes:
    spec: The source, as in config.data.source.
    weight: Its share of a mixture.
    splits: The splits that are prepared.
    directory: The directory of the rows.
    description: What the rows depend on, except the contents of the files. It
      is stored in meta.json.
  """

  spec: str
  weight: float
  splits: tuple[str, ...]
  directory: str
  description: dict[str, Any]


class _Request(NamedTuple):
  """A source of a config, and the splits that are read from it."""

  component: sources.Component
  splits: tuple[str, ...]


def targets(config: DataConfig) -> list[Target]:
  """Returns the rows that a config needs, one target for each source.

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
  result = []
  for component, splits in requests:
    spec = component.spec
    description = _describe(spec, splits, config, tokenizer_fingerprint)
    if not config.prepared_dir:
      directory = _cache_directory(spec, splits, config, description)
    else:
      directory = os.path.expanduser(config.prepared_dir)
      if len(requests) > 1:
        name = f"{_short_name(spec)}-{_digest([spec, splits])[:8]}"
        directory = os.path.join(directory, name)
    result.append(
      Target(spec, component.weight, splits, directory, description)
    )
  return result


def _requests(config: DataConfig) -> list[_Request]:
  """Returns the sources of a config and their splits."""
  requests = []
  splits = ("train",) if config.validation_source else ("train", "validation")
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
  """Returns the description of a source's rows.

  The names of directories and the fingerprints of rows depend on it. A field
  that an earlier version did not have is left out if it has no effect, so that
  the rows of that version keep their names.
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

  The directory's name has a digest of the description and the files' identity.
  Rows that an earlier version prepared stay in the directory of that version.
  """
  opened = _open(spec, splits, config)
  directories = []
  for identity in (_identity(opened), _earlier_identity(opened)):
    digest = _digest({**description, "identity": identity})
    name = f"{_short_name(spec)}-{digest[:16]}"
    directory = os.fspath(cache_directory("prepared", name))
    if os.path.exists(_meta_path(directory)):
      return directory
    directories.append(directory)
  return directories[0]


def _short_name(spec: str) -> str:
  """Returns a name for a source that can be a part of a file name."""
  name = re.sub(r"[^A-Za-z0-9]+", "-", spec)
  return name.strip("-")[:_MAX_NAME_LENGTH]


def _digest(value: Any) -> str:
  """Returns the sha256 (hex) of a JSON value."""
  text = json.dumps(value, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _open(
  spec: str, splits: Sequence[str], config: DataConfig
) -> dict[str, Source]:
  """Returns a source, opened for each split."""
  return {split: sources.documents(spec, split, config) for split in splits}


def _identity(opened: Mapping[str, Source]) -> dict[str, Any]:
  """Returns the identity of the files of an opened source, by split."""
  return {split: source.identity for split, source in opened.items()}


def _earlier_identity(opened: Mapping[str, Source]) -> dict[str, Any]:
  """Returns the identity that earlier versions stored for the same files."""
  return {split: source.earlier_identity for split, source in opened.items()}


def _fingerprints(
  opened: Mapping[str, Source],
) -> dict[str, dict[str, str]]:
  """Returns the fingerprint of the files of an opened source, by split."""
  return {split: source.fingerprint() for split, source in opened.items()}


def report_other_files(target: Target, config: DataConfig) -> None:
  """Prints a warning if a target's files have changed since it was prepared.

  This is not an error: a run that was started with the old text continues with
  its rows. Compares names, sizes and samples of the text. Does not compare
  times, since rows may be used with copies of the files, or without them. Does
  nothing for sources on the Hub, where the revision selects the files, and for
  rows of earlier versions, which have no fingerprints of files.

  Args:
    target: A target whose rows are prepared.
    config: The data fields.
  """
  meta = _read_meta(target)
  if meta is None or "files" not in meta or "hf://" in target.spec:
    return
  try:
    current = _fingerprints(_open(target.spec, target.splits, config))
  except UserError:
    # The files are not on this machine.
    return
  for split in target.splits:
    for aspect in ("names and sizes", "text"):
      if meta["files"][split][aspect] != current[split][aspect]:
        say(
          f"warning: the rows in {target.directory} are used, which were"
          f" prepared before the {aspect} of the files of {target.spec!r}"
          " changed; for the new text delete that directory, or set"
          " config.data.prepared_dir to another one"
        )
        return


def _meta_path(directory: str) -> str:
  return os.path.join(directory, "meta.json")


def _read_meta(target: Target) -> dict[str, Any] | None:
  """Returns the meta.json of a target. None if the file does not exist.

  Raises:
    UserError: if it cannot be read, or the directory holds other rows.
  """
  path = _meta_path(target.directory)
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

  differences = []
  for key, field in _CONFIG_FIELDS.items():
    stored = meta["description"].get(key)
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
  return meta


def _check_meta(meta: Any, splits: Sequence[str]) -> None:
  """Checks that a meta.json has its fields.

  Raises:
    ValueError, KeyError, TypeError: if it does not.
  """
  if not isinstance(meta["description"], dict):
    raise ValueError("its description is not a JSON object")
  if "identity" not in meta:
    raise KeyError("identity")
  if not meta["complete"]:
    return
  for split in splits:
    totals = meta["splits"][split]
    num_rows = sum(totals["shard_rows"])
    if num_rows != totals["rows"] or not totals["fingerprint"]:
      raise ValueError(f"its counts of {split} rows do not agree")


def is_prepared(target: Target) -> bool:
  """Returns whether all rows of a target are written.

  Raises:
    UserError: if its directory holds other rows.
  """
  meta = _read_meta(target)
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
      directory holds other rows.
  """
  all_targets = targets(config)
  incomplete: list[tuple[Target, Work]] = []
  for target in all_targets:
    with _explain_errors(target):
      work = _open_work(target, config)
    if work is not None:
      incomplete.append((target, work))
  announce([work for _, work in incomplete], config, workers)
  for target, work in incomplete:
    with _explain_errors(target):
      _write(target, work, config, workers)
  return all_targets


@contextlib.contextmanager
def _explain_errors(target: Target) -> Iterator[None]:
  """Converts errors of the machine to a UserError that names the target."""
  try:
    with address_space.explained(
      f"preparing {target.spec}",
      "run the same command again with fewer --workers to continue",
    ):
      yield
  except OSError as error:
    raise UserError(
      f"{target.directory}: cannot write prepared rows ({error});"
      " config.data.prepared_dir chooses another place"
    ) from error


def _open_work(target: Target, config: DataConfig) -> Work | None:
  """Returns the shards of a target. None if all of them are written."""
  meta = _read_meta(target)
  opened = _open(target.spec, target.splits, config)
  if meta is not None:
    identities = [_identity(opened), _earlier_identity(opened)]
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
  for split, source in opened.items():
    shards += _divide(target, split, len(source.parts))
  return Work(target.spec, target.directory, opened, shards)


def _divide(target: Target, split: str, num_parts: int) -> list[Shard]:
  """Divides the parts of a split into shards of consecutive parts."""
  num_shards = min(num_parts, _MAX_SHARDS[split])
  shards = []
  for index in range(num_shards):
    shard = Shard(
      target.directory,
      target.spec,
      split,
      index,
      num_shards,
      start=num_parts * index // num_shards,
      stop=num_parts * (index + 1) // num_shards,
    )
    shards.append(shard)
  return shards


def _write(
  target: Target, work: Work, config: DataConfig, workers: int
) -> None:
  """Writes the missing rows of a target, and completes its meta.json."""
  os.makedirs(target.directory, exist_ok=True)
  meta_path = _meta_path(target.directory)
  meta = _read_meta(target)
  if meta is None:
    meta = {
      "complete": False,
      "description": target.description,
      "identity": _identity(work.opened),
      "files": _fingerprints(work.opened),
      "tokenizer_spec": config.tokenizer,
    }
    write_json(meta_path, meta)

  start = time.monotonic()
  write_missing(work, config, workers)
  meta["splits"] = _split_totals(target, work.shards)
  train = meta["splits"].get("train")
  if train is not None and train["rows"] == 0:
    raise _no_documents(target, config)
  meta["complete"] = True
  write_json(meta_path, meta)
  remove_leftovers(target.directory)

  num_tokens = 0
  for split, totals in meta["splits"].items():
    _report(f"{target.spec}, {split}", totals, config.length)
    num_tokens += totals["tokens"]
  seconds = time.monotonic() - start
  speed = num_tokens / seconds / 1e6
  say(f"{target.spec}: prepared in {seconds:.1f} s ({speed:.2f} M tokens/s)")


def _split_totals(
  target: Target, shards: Sequence[Shard]
) -> dict[str, dict[str, Any]]:
  """Returns the totals of the written shards, and a fingerprint, by split."""
  totals_by_split = {}
  for split in target.splits:
    totals = add_totals([shard for shard in shards if shard.split == split])
    shard_digests = totals.pop("digests")
    totals["fingerprint"] = _digest([target.description, split, shard_digests])
    totals_by_split[split] = totals
  return totals_by_split


def _no_documents(target: Target, config: DataConfig) -> UserError:
  """Returns the error for a source without training documents."""
  reasons = ["documents without text do not count"]
  if config.prompt_field:
    reasons.append(
      "nor do those whose prompts fill a row of config.data.length ="
      f" {config.length}"
    )
  reasons.append(
    f"and config.data.validation_fraction = {config.validation_fraction} are"
    " held out"
  )
  return UserError(
    f"config.data.source {target.spec!r}: empty: no document to train on"
    f" ({', '.join(reasons)})"
  )


def _report(name: str, totals: dict[str, Any], length: int) -> None:
  """Prints what a split holds, and what was left out."""
  num_rows = totals["rows"]
  fill = totals["tokens"] / max(1, num_rows * (length + 1))
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


class PreparedRows:
  """The rows of one split of a target: a random-access source for Grain.

  Attributes:
    spec: The source.
    directory: The directory of the rows.
    fingerprint: sha256 (hex) of the rows.
    origin: Where the rows come from, which a checkpoint stores as JSON: the
      directory, the fingerprint and the target's description.
  """

  def __init__(self, target: Target, split: str):
    """Opens the rows.

    Raises:
      UserError: if they are not all prepared.
    """
    meta = _read_meta(target)
    if meta is None or not meta["complete"]:
      raise UserError(
        f"{target.directory}: rows of {target.spec!r} are not prepared (or not"
        f" all of them); run {COMMAND}"
      )
    totals = meta["splits"][split]
    self.spec = target.spec
    self.directory = target.directory
    self.fingerprint = totals["fingerprint"]
    self.origin = {
      "directory": self.directory,
      "fingerprint": self.fingerprint,
      "description": target.description,
    }

    # The files that have rows, and the index after the last row of each.
    self._paths: list[str] = []
    self._ends: list[int] = []
    # A path with the range of its rows, so that Grain need not open the file to
    # count them.
    paths_with_ranges = []
    self._num_rows = 0
    num_shards = len(totals["shard_rows"])
    for index, num_rows in enumerate(totals["shard_rows"]):
      if num_rows == 0:
        continue
      path = shard_path(target.directory, split, index, num_shards)
      self._num_rows += num_rows
      self._paths.append(path)
      self._ends.append(self._num_rows)
      paths_with_ranges.append(f"{path}[0:{num_rows}]")

    self._records: Any = None
    if self._paths:
      with address_space.explained(
        f"opening {self.directory}", "fewer other programs leave more"
      ):
        address_space.check_array_record(self._paths[0])
        self._records = grain.sources.ArrayRecordDataSource(paths_with_ranges)

  def __len__(self) -> int:
    return self._num_rows

  def __getitem__(self, index: int) -> Row:
    try:
      return decode_row(self._records[index])
    except Exception as error:
      # ArrayRecord raises many kinds of exceptions.
      raise self._unreadable(index, error) from error

  def __getitems__(self, indices: Sequence[int]) -> list[Row]:
    """Returns several rows. Neighboring rows are read four times as fast."""
    try:
      records = self._records.__getitems__(indices)
      return [decode_row(record) for record in records]
    except Exception:
      # Reads one by one, so that the error names the row.
      return [self[index] for index in indices]

  def _unreadable(self, index: int, error: Exception) -> UserError:
    """Returns the error for a row that cannot be read."""
    shard = bisect.bisect_right(self._ends, index)
    first = self._ends[shard - 1] if shard > 0 else 0
    return UserError(
      f"{self._paths[shard]}: row {index - first} cannot be read"
      f" ({reason(error)}); delete this file and its directory's meta.json, and"
      f" run {COMMAND}"
    )


def explain_other_rows(
  saved: Sequence[dict[str, Any]],
  current: Sequence[dict[str, Any]],
  config: DataConfig,
) -> str:
  """Returns why a checkpoint has other training rows, and what to do.

  Args:
    saved: `PreparedRows.origin` of each source of the checkpoint.
    current: The same for the run. The number of sources may differ.
    config: The run's data fields.
  """
  changed_fields = _changed_fields(saved, current)
  if changed_fields:
    return (
      f"{'; '.join(changed_fields)}; set the fields back, or use another"
      " --workdir"
    )
  if len(saved) != len(current):
    return (
      "config.data.source has changed; set the fields back, or use another"
      " --workdir"
    )
  changed = []
  new_directories = []
  for saved_origin, origin in zip(saved, current, strict=True):
    if saved_origin["fingerprint"] != origin["fingerprint"]:
      changed.append(saved_origin)
      new_directories.append(origin["directory"])
  if not changed:
    return (
      "the weights in config.data.source have changed; set them back, or use"
      " another --workdir"
    )
  specs = [repr(origin["description"]["source"]) for origin in changed]
  return (
    f"no field has changed, but the text of {' and '.join(specs)} has, and its"
    f" rows were prepared anew in {new_directories[0]};"
    f" {_remedy_for_other_text(saved, changed, config)}"
  )


def _changed_fields(
  saved: Sequence[dict[str, Any]], current: Sequence[dict[str, Any]]
) -> list[str]:
  """Returns the config fields in which descriptions differ, for messages."""
  changes = set()
  for saved_origin, origin in zip(saved, current, strict=False):
    for key, field in _CONFIG_FIELDS.items():
      before = saved_origin["description"].get(key)
      now = origin["description"].get(key)
      if before != now:
        changes.add(f"config.{field} was {before!r} and is {now!r}")
  return sorted(changes)


def _remedy_for_other_text(
  saved: Sequence[dict[str, Any]],
  changed: Sequence[dict[str, Any]],
  config: DataConfig,
) -> str:
  """Returns what to do if the text of sources has changed since a checkpoint.

  Args:
    saved: The origins of all rows of the checkpoint.
    changed: Those whose text has changed.
    config: The run's data fields.
  """
  start_over = (
    "start over with another --workdir to train on the new text"
    " (--config.train.init_from keeps the parameters)"
  )
  missing = []
  for origin in changed:
    if not _has_rows(origin):
      missing.append(origin["directory"])
  if missing:
    return (
      f"the old rows are no longer in {' and '.join(missing)}: put the old text"
      f" back and prepare it again, or {start_over}"
    )
  if len(targets(config)) == 1:
    directory = saved[0]["directory"]
    return (
      f"the old rows lie in {directory}: go on with them by"
      f" --config.data.prepared_dir={directory}, or {start_over}"
    )
  return (
    "go on with the old rows by --config.data.prepared_dir=DIR, a new directory"
    f" in which {_link_commands(saved, config)}; or {start_over}"
  )


def _link_commands(saved: Sequence[dict[str, Any]], config: DataConfig) -> str:
  """Returns the commands that link a checkpoint's rows into a directory DIR.

  With config.data.prepared_dir=DIR, a run of a mixture then uses these rows.
  """
  saved_directories = {}
  for origin in saved:
    spec = origin["description"]["source"]
    saved_directories[spec] = origin["directory"]
  linked_config = dataclasses.replace(config, prepared_dir="DIR")
  commands = []
  for target, link in zip(targets(config), targets(linked_config), strict=True):
    directory = target.directory
    if "train" in target.splits:
      directory = saved_directories.get(target.spec, directory)
    commands.append(f"ln -s {directory} {link.directory}")
  return " && ".join(commands)


def _has_rows(origin: dict[str, Any]) -> bool:
  """Returns whether the rows of a checkpoint are still in their directory."""
  path = _meta_path(origin["directory"])
  try:
    with open(path, encoding="utf-8") as file:
      meta = json.load(file)
    if not meta["complete"]:
      return False
    for totals in meta["splits"].values():
      if totals["fingerprint"] == origin["fingerprint"]:
        return True
  except (OSError, ValueError, KeyError, TypeError):
    # There are no valid rows.
    pass
  return False
