"""Prepared rows: tokenised, packed and written once, as ArrayRecord shards and a meta.json beside them.

The rows depend on the source, the tokenizer, the length and the packing alone. The sources of a mixture are prepared apart and mixed when
they are read, so that weights can change without preparing again.
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
from typing import Any

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
  write_json,
  write_missing,
)
from diffjax.data.tokenizer import load_tokenizer
from diffjax.host import address_space
from diffjax.host.progress import say
from diffjax.host.user_cache import cache_directory

_FORMAT = 1
# The largest number of shards. Validation has few, because the last rows of a shard are not full
_MAX_SHARDS = {"train": 1024, "validation": 16}
# The config fields of the fields of meta.json
_FIELDS = {
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


@dataclasses.dataclass(frozen=True)
class Target:
  """The rows of one source.

  Attributes:
    spec: The source, as in config.data.source.
    weight: Its share of a mixture.
    splits: The splits that are prepared.
    directory: The directory of the rows.
    description: All that the rows depend on but the files' contents, as stored in meta.json.
  """

  spec: str
  weight: float
  splits: tuple[str, ...]
  directory: str
  description: dict[str, Any]


def targets(config: DataConfig) -> list[Target]:
  """The rows that a config needs, one target a source.

  Raises:
    UserError: for a bad source, or a prepared_dir that is not local.
  """
  if "://" in config.prepared_dir:
    raise UserError(
      f"config.data.prepared_dir = {config.prepared_dir!r}: must be a local path, because ArrayRecord files are read in "
      "random order; copy the rows to a disk, or mount the bucket"
    )
  wanted: list[tuple[sources.Component, tuple[str, ...]]]
  if config.validation_source:
    wanted = [
      (component, ("train",))
      for component in sources.parse_mixture(config.source)
    ]
    wanted += [
      (component, ("validation",))
      for component in sources.parse_mixture(
        config.validation_source, "data.validation_source"
      )
    ]
  else:
    wanted = [
      (component, ("train", "validation"))
      for component in sources.parse_mixture(config.source)
    ]
  fingerprint = load_tokenizer(config.tokenizer).fingerprint
  out = []
  for component, splits in wanted:
    description = {
      "format": _FORMAT,
      "source": component.spec,
      "text_field": config.text_field,
      "splits": list(splits),
      "validation_fraction": None
      if config.validation_source
      else config.validation_fraction,
      "tokenizer": fingerprint,
      "length": config.length,
      "packing": config.packing,
    }
    if config.prompt_field:  # else the description is that of versions without prompts, and so are the names of the rows
      description |= {
        "prompt_field": config.prompt_field,
        "prompt_template": config.prompt_template,
      }
    # Without a limit, rows keep the names that they had before this field.
    is_limited = "train" in splits and sources.has_files(component.spec)
    if config.files and is_limited:
      description["files"] = config.files
    name = re.sub(r"[^A-Za-z0-9]+", "-", component.spec).strip("-")[:40]
    if not config.prepared_dir:
      opened = _open(component.spec, splits, config)
      directory = _cache_directory(name, description, opened)
    elif len(wanted) == 1:
      directory = os.path.expanduser(config.prepared_dir)
    else:
      directory = os.path.join(
        os.path.expanduser(config.prepared_dir),
        f"{name}-{_digest([component.spec, splits])[:8]}",
      )
    out.append(
      Target(component.spec, component.weight, splits, directory, description)
    )
  return out


def _open(
  spec: str, splits: Sequence[str], config: DataConfig
) -> dict[str, Source]:
  """Returns a source by split."""
  return {split: sources.documents(spec, split, config) for split in splits}


def _cache_directory(
  name: str, description: dict[str, Any], opened: Mapping[str, Source]
) -> str:
  """Returns the directory of a source's rows in the user's cache.

  The directory's name has a digest of the description and the files' identity.
  Rows that an earlier version prepared stay in the directory of that version.
  """
  directories = []
  for identity in (_identity(opened), _earlier_identity(opened)):
    digest = _digest({**description, "identity": identity})
    path = os.fspath(cache_directory("prepared", f"{name}-{digest[:16]}"))
    if os.path.exists(os.path.join(path, "meta.json")):
      return path
    directories.append(path)
  return directories[0]


def _identity(opened: Mapping[str, Source]) -> dict[str, Any]:
  return {split: source.identity for split, source in opened.items()}


def _fingerprints(
  opened: Mapping[str, Source],
) -> dict[str, dict[str, str]]:
  return {split: source.fingerprint() for split, source in opened.items()}


def report_other_files(target: Target, config: DataConfig) -> None:
  """Prints a line if a target's files have changed since it was prepared.

  It is no error: a run that was started with the old text goes on with its
  rows. Names, sizes and samples of the text are compared. Times are not, since
  rows may be used with copies of the files, or without them. Nothing is compared
  on the Hub, where the source's revision says which files are meant, and for
  rows of earlier versions, which do not tell.

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
    return  # The files are not here.
  for split in target.splits:
    for what in ("names and sizes", "text"):
      if meta["files"][split][what] != current[split][what]:
        say(
          f"warning: the rows in {target.directory} are used, which were"
          f" prepared before the {what} of the files of {target.spec!r} changed;"
          " for the new text delete that directory, or set"
          " config.data.prepared_dir to another one"
        )
        return


def _earlier_identity(opened: Mapping[str, Source]) -> dict[str, Any]:
  """Returns the identity that earlier versions stored for the same files."""
  return {split: source.earlier_identity for split, source in opened.items()}


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read_meta(target: Target) -> dict[str, Any] | None:
  """The directory's meta.json, checked against the target; None if there is none."""
  path = os.path.join(target.directory, "meta.json")
  try:
    with open(path, encoding="utf-8") as file:
      meta = json.load(file)
    stored, _ = dict(meta["description"]), meta["identity"]
    if meta["complete"]:
      for split in target.splits:
        totals = meta["splits"][split]
        if (
          sum(totals["shard_rows"]) != totals["rows"]
          or not totals["fingerprint"]
        ):
          raise ValueError(f"its counts of {split} rows do not agree")
  except (FileNotFoundError, NotADirectoryError):
    return None
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"{path}: cannot be read ({error}); delete {target.directory} and prepare again"
    ) from error
  differ = [
    f"config.{name} (there {stored.get(key)!r}, asked for {target.description.get(key)!r})"
    for key, name in _FIELDS.items()
    if stored.get(key) != target.description.get(key)
  ]
  if differ:
    raise UserError(
      f"config.data.prepared_dir: {target.directory} holds other rows: {'; '.join(differ)}; "
      "set config.data.prepared_dir to another directory, or the fields to what is there"
    )
  return meta


def is_prepared(target: Target) -> bool:
  """True if all rows of a target are written.

  Raises:
    UserError: if its directory holds other rows.
  """
  meta = _read_meta(target)
  return meta is not None and meta["complete"]


def prepare(config: DataConfig, workers: int = 0) -> list[Target]:
  """Writes the rows that a config needs and that are missing.

  Args:
    config: The data fields.
    workers: Number of processes that tokenise and write; 0 for one a CPU. The rows are the same for any number.

  Returns:
    The targets, all prepared.

  Raises:
    UserError: for bad sources, documents or tokenizers, or a directory that holds other rows.
  """
  found = targets(config)
  incomplete: list[tuple[Target, Work]] = []
  for target in found:
    with _explained(target):
      work = _open_work(target, config)
    if work is not None:
      incomplete.append((target, work))
  announce([work for _, work in incomplete], config, workers)
  for target, work in incomplete:
    with _explained(target):
      _write(target, work, config, workers)
  return found


@contextlib.contextmanager
def _explained(target: Target) -> Iterator[None]:
  """Turns errors of the machine into a UserError that names the target."""
  try:
    with address_space.explained(
      f"preparing {target.spec}",
      "run the same command again with fewer --workers to continue",
    ):
      yield
  except OSError as error:
    raise UserError(
      f"{target.directory}: cannot write prepared rows ({error}); config.data.prepared_dir chooses another place"
    ) from error


def _open_work(target: Target, config: DataConfig) -> Work | None:
  """Returns the shards of a target, None if they are all written."""
  meta = _read_meta(target)
  opened = _open(target.spec, target.splits, config)
  identities = [_identity(opened), _earlier_identity(opened)]
  if meta and meta["identity"] not in identities:
    raise UserError(
      f"{target.directory}: was prepared when {target.spec!r} held other files (names, sizes, times or text have changed); "
      "delete it, or set config.data.prepared_dir to another directory"
    )
  if meta and meta["complete"]:
    say(f"{target.spec}: already prepared: {target.directory}")
    return None
  return Work(target.spec, target.directory, opened, _shards(target, opened))


def _write(
  target: Target, work: Work, config: DataConfig, workers: int
) -> None:
  """Writes the missing rows of a target, and then its meta.json."""
  os.makedirs(target.directory, exist_ok=True)
  meta = _read_meta(target)
  if not meta:
    meta = {
      "complete": False,
      "description": target.description,
      "identity": _identity(work.opened),
      "files": _fingerprints(work.opened),
      "tokenizer_spec": config.tokenizer,
    }
    write_json(os.path.join(target.directory, "meta.json"), meta)
  start = time.monotonic()
  write_missing(work, config, workers)
  meta["splits"] = {
    split: add_totals([shard for shard in work.shards if shard.split == split])
    for split in target.splits
  }
  train = meta["splits"].get("train")
  if train and not train["rows"]:
    raise UserError(
      f"config.data.source {target.spec!r}: empty: no document to train on (documents without text do not count, "
      + f"nor do those whose prompts fill a row of config.data.length = {config.length}, "
      * bool(config.prompt_field)
      + f"and config.data.validation_fraction = {config.validation_fraction} are held out)"
    )
  for split, totals in meta["splits"].items():
    totals["fingerprint"] = _digest(
      [target.description, split, totals.pop("digests")]
    )
  write_json(
    os.path.join(target.directory, "meta.json"), {**meta, "complete": True}
  )
  remove_leftovers(target.directory)
  for split, totals in meta["splits"].items():
    _report(f"{target.spec}, {split}", totals, config.length)
  seconds = time.monotonic() - start
  tokens = sum(totals["tokens"] for totals in meta["splits"].values())
  say(
    f"{target.spec}: prepared in {seconds:.1f} s ({tokens / seconds / 1e6:.2f} M tokens/s)"
  )


def _shards(target: Target, opened: Mapping[str, Source]) -> list[Shard]:
  """All shards of a target: runs of its source's parts."""
  shards = []
  for split in target.splits:
    count = len(opened[split].parts)
    number = min(count, _MAX_SHARDS[split])
    bounds = [count * index // number for index in range(number + 1)]
    shards += [
      Shard(
        target.directory,
        target.spec,
        split,
        index,
        number,
        *bounds[index : index + 2],
      )
      for index in range(number)
    ]
  return shards


def _report(name: str, totals: dict[str, Any], length: int) -> None:
  """Tells the user what a split holds, and what was left out of it."""
  fill = totals["tokens"] / max(1, totals["rows"] * (length + 1))
  say(
    f"{name}: {totals['documents']:,} documents ({totals['bytes']:,} bytes), {totals['tokens']:,} tokens, "
    f"{totals['rows']:,} rows of {length} ({fill:.1%} full)"
  )
  if totals["replaced"]:
    say(
      f"{name}: {totals['replaced']:,} documents were not UTF-8; what could not be read became U+FFFD"
    )
  if totals.get("skipped"):
    say(
      f"{name}: {totals['skipped']:,} documents are left out: their prompts fill a row, which leaves nothing to learn; "
      f"config.data.length = {length}"
    )
  if totals.get("cut"):
    say(
      f"{name}: {totals['cut']:,} documents are longer than a row; the rest of their answers does not see the prompt"
    )


class PreparedRows:
  """The rows of one split of a target, by index: a random-access source for Grain.

  Attributes:
    spec: The source.
    directory: The directory of the rows.
    fingerprint: sha256 (hex) of the rows.
    origin: For a checkpoint: the directory, the fingerprint and the target's description (JSON-able).
  """

  def __init__(self, target: Target, split: str):
    meta = _read_meta(target)
    if not (meta and meta["complete"]):
      raise UserError(
        f"{target.directory}: rows of {target.spec!r} are not prepared (or not all of them); run {COMMAND}"
      )
    self.spec = target.spec
    self.directory = target.directory
    counts = meta["splits"][split]["shard_rows"]
    self.fingerprint = meta["splits"][split]["fingerprint"]
    self.origin = {
      "directory": self.directory,
      "fingerprint": self.fingerprint,
      "description": target.description,
    }
    self._paths = [
      f"{Shard(target.directory, target.spec, split, index, len(counts), 0, 0).path}[0:{rows}]"
      for index, rows in enumerate(counts)
      if rows
    ]
    self._ends = list(itertools.accumulate(rows for rows in counts if rows))
    self._source: Any = None
    if self._paths:
      with address_space.explained(
        f"opening {self.directory}", "fewer other programs leave more"
      ):
        address_space.check_array_record(self._paths[0].rpartition("[")[0])
        self._source = grain.sources.ArrayRecordDataSource(self._paths)

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, index: int) -> Row:
    try:
      return decode_row(self._source[index])
    except Exception as error:  # ArrayRecord raises exceptions of many kinds
      shard = bisect.bisect_right(self._ends, index)
      path = self._paths[shard].rpartition("[")[0]
      number = index - (self._ends[shard - 1] if shard else 0)
      raise UserError(
        f"{path}: row {number} cannot be read ({reason(error)}); delete this file and its directory's meta.json, and run {COMMAND}"
      ) from error

  def __getitems__(self, indices: Sequence[int]) -> list[Row]:
    """Several rows. Neighbouring rows are read four times as fast as one by one."""
    try:
      return [
        decode_row(record) for record in self._source.__getitems__(indices)
      ]
    except Exception:
      return [
        self[index] for index in indices
      ]  # names the row that cannot be read


def explain_other_rows(
  saved: Sequence[dict[str, Any]],
  own: Sequence[dict[str, Any]],
  config: DataConfig,
) -> str:
  """Says why a checkpoint's training rows are not a run's, and what to do.

  Args:
    saved: Origins of the checkpoint's rows.
    own: Origins of the run's, as many or not.
    config: The run's data fields.
  """
  fields = {
    f"config.{name} was {before!r} and is {now!r}"
    for was, has in zip(saved, own, strict=False)
    for key, name in _FIELDS.items()
    if (before := was["description"].get(key))
    != (now := has["description"].get(key))
  }
  if fields or len(saved) != len(own):
    return f"{'; '.join(sorted(fields)) or 'config.data.source has changed'}; set the fields back, or use another --workdir"
  changed = [
    (was, has)
    for was, has in zip(saved, own, strict=True)
    if was["fingerprint"] != has["fingerprint"]
  ]
  if not changed:
    return "the weights in config.data.source have changed; set them back, or use another --workdir"
  texts = " and ".join(repr(was["description"]["source"]) for was, _ in changed)
  message = f"no field has changed, but the text of {texts} has, and its rows were prepared anew in {changed[0][1]['directory']}; "
  restart = "start over with another --workdir to train on the new text (--config.train.init_from keeps the parameters)"
  gone = [was["directory"] for was, _ in changed if not _holds(was)]
  if gone:
    return f"{message}the old rows are no longer in {' and '.join(gone)}: put the old text back and prepare it again, or {restart}"
  found = targets(config)
  if len(found) == 1:
    directory = saved[0]["directory"]
    return f"{message}the old rows lie in {directory}: go on with them by --config.data.prepared_dir={directory}, or {restart}"
  old = {was["description"]["source"]: was["directory"] for was in saved}
  places = targets(dataclasses.replace(config, prepared_dir="DIR"))
  links = [
    f"ln -s {old.get(target.spec, target.directory) if 'train' in target.splits else target.directory} {place.directory}"
    for target, place in zip(found, places, strict=True)
  ]
  return f"{message}go on with the old rows by --config.data.prepared_dir=DIR, a new directory in which {' && '.join(links)}; or {restart}"


def _holds(origin: dict[str, Any]) -> bool:
  """True if rows still lie where they did."""
  try:
    with open(
      os.path.join(origin["directory"], "meta.json"), encoding="utf-8"
    ) as file:
      meta = json.load(file)
    return bool(meta["complete"]) and origin["fingerprint"] in [
      totals["fingerprint"] for totals in meta["splits"].values()
    ]
  except (OSError, ValueError, KeyError, TypeError):
    return False
