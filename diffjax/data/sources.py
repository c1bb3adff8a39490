"""Sources of documents: TFDS datasets, text, JSONL and Parquet files, and the embedded standard library.

A source is a list of parts, small pieces of work that any process can read on its own. Preparing spreads parts over workers, streaming
shuffles them. Where a source has no validation split of its own, the hash of a document decides its split, so that equal documents are
always in the same one.
"""

from __future__ import annotations

import bisect
import collections
import functools
import glob
import gzip
import io
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from etils import epath

from diffjax.config import DataConfig, UserError
from diffjax.data import files, parquet, stdlib_corpus
from diffjax.data.document import (
  Document,
  Source,
  decode,
  is_text,
  lookup,
  reason,
)
from diffjax.data.fingerprint import (
  digest,
  fingerprint,
  sampled,
  text_digest,
)
from diffjax.host import address_space

_Item = TypeVar("_Item")

KINDS = (
  "stdlib, tfds:NAME, text:GLOB, jsonl:GLOB (also .gz, .zst), parquet:GLOB;"
  " a GLOB may be local, gs:// or hf://datasets/ORG/NAME@REVISION/*.parquet"
)
# Bytes of an hf:// source from which its validation documents are taken.
_VALIDATION_BYTES = 1 << 30
_TFDS_PART = 256  # documents
_TEXT_PART = 1 << 20  # bytes
_JSONL_PART = 64 << 20  # bytes
_LONGEST_LINE = (
  256 << 20
)  # bytes; a document takes about ten times its size in memory
_BYTE_ORDER_MARK = (
  b"\xef\xbb\xbf"  # some editors begin a file with it; it is not text
)


class Component(NamedTuple):
  """One source of a mixture and its share of the rows. The shares of a mixture sum to 1."""

  spec: str
  weight: float


def parse_mixture(spec: str, field: str = "data.source") -> list[Component]:
  """Reads "A" or "A=0.7,B=0.3".

  Args:
    spec: The value of the field.
    field: Its name, for messages.

  Returns:
    The components, weights normalised to sum to 1.

  Raises:
    UserError: for an unknown kind, a missing, bad or zero weight, or a source named twice.
  """
  items = spec.split(",")
  components = []
  for item in items:
    name, separator, weight = item.strip().rpartition("=")
    try:
      value = float(weight) if separator else None
    except ValueError:
      value = None
    if value is None:
      name, value = item.strip(), 1.0
      if len(items) > 1:
        raise UserError(
          f"config.{field} = {spec!r}: every source of a mixture needs a weight, as in 'A=0.7,B=0.3'; {item.strip()!r} has none"
        )
    if not 0 < value < float("inf"):
      raise UserError(
        f"config.{field} = {spec!r}: the weight of {name!r} must be a positive number; got {weight}"
      )
    kind, _, argument = name.partition(":")
    if kind not in _KINDS or bool(argument) != (kind != "stdlib"):
      raise UserError(
        f"config.{field} = {spec!r}: {name!r} is not a source; the kinds are {KINDS}"
      )
    components.append(Component(name, value))
  twice = [
    name
    for name, count in collections.Counter(
      component.spec for component in components
    ).items()
    if count > 1
  ]
  if twice:
    raise UserError(
      f"config.{field} = {spec!r}: {twice[0]!r} is listed twice; add up its weights"
    )
  total = sum(component.weight for component in components)
  return [Component(name, weight / total) for name, weight in components]


def has_files(spec: str) -> bool:
  """Returns True if a source is a list of files, which data.files limits."""
  kind, _, _ = spec.partition(":")
  return issubclass(_KINDS[kind], FileSource)


def is_remote(spec: str) -> bool:
  """Returns True if the files of a source are downloaded when it is read."""
  _, _, argument = spec.partition(":")
  return files.is_on_hub(argument)


def documents(spec: str, split: str, config: DataConfig) -> Source:
  """Opens one source.

  Args:
    spec: A single source, e.g. "jsonl:/data/*.jsonl.zst".
    split: "train" or "validation". With config.validation_source, a split takes all documents of its file sources. Without,
      validation is the source's own validation split or, if it has none, the share config.validation_fraction of its documents.
      Validation reads only parts of an hf:// source, of one GiB in all.
    config: The data fields.

  Returns:
    The source.

  Raises:
    UserError: if the source does not exist, is empty, has no text field, or is plain text and config.prompt_field is set.
  """
  kind, _, argument = spec.partition(":")
  if config.prompt_field and kind in ("stdlib", "text"):
    raise UserError(
      f"config.data.prompt_field = {config.prompt_field!r}: {spec!r} is plain text without fields; set it to '', or read prompts and "
      "answers from a jsonl:, parquet: or tfds: source"
    )
  return _KINDS[kind](spec, argument, split, config)


class _TfdsSource(Source):
  """A TFDS dataset on disk, read without its code and without TensorFlow."""

  def __init__(self, spec: str, name: str, split: str, config: DataConfig):
    super().__init__(spec, split, config)
    import tensorflow_datasets as tfds

    if spec == "stdlib":
      self._directory, self._fields = (
        os.fspath(stdlib_corpus.corpus_directory()),
        {"text_field": "text"},
      )
    else:
      self._directory = _find_tfds(spec, name, config.data_dir)
    try:
      info = tfds.builder_from_directory(self._directory).info
      splits = {key: value.num_examples for key, value in info.splits.items()}
    except Exception as error:  # TFDS raises exceptions of many kinds
      raise UserError(
        f"config.data.source {spec!r}: {self._directory} is not a complete TFDS dataset ({error})"
      ) from error
    features = (
      dict(info.features.items()) if hasattr(info.features, "items") else {}
    )
    for field, path in self._fields.items():
      feature = features.get(path)
      if (
        feature is None
        or feature.shape
        or np.dtype(feature.np_dtype).kind != "O"
      ):
        raise UserError(
          f"config.data.source {spec!r}: config.data.{field} = {path!r} is not text in this dataset; "
          f"its features are {', '.join(f'{key} ({type(value).__name__})' for key, value in features.items())}"
        )
    native = splits.get("validation", 0) > 0
    if native:
      self._validation_fraction = None
      stored = split
    elif (
      split == "validation" and config.validation_source
    ):  # a dataset that is for validation alone
      stored = "test" if splits.get("test") else "train"
    else:
      stored = "train"
    if not splits.get(stored):
      raise UserError(
        f"config.data.source {spec!r}: no documents in split {stored!r} of {self._directory}; "
        f"its splits are {', '.join(f'{key} ({count})' for key, count in splits.items()) or 'none'}"
      )
    self._stored_split = stored
    self._shards = list(
      zip(
        info.splits[stored].filenames,
        map(int, info.splits[stored].shard_lengths),
        strict=True,
      )
    )
    self.num_files = len(self._shards)
    self.size = int(info.splits[stored].num_bytes)
    self._num_records = splits[stored]
    self._name = info.full_name
    self._all_shards = {
      key: list(map(int, value.shard_lengths))
      for key, value in info.splits.items()
    }
    # A dataset that was built again has the same directory.
    first = epath.Path(self._directory) / self._shards[0][0]
    self._version = (0, 0)
    if first.exists():
      self._version = files.version(os.fspath(first))

  @functools.cached_property
  def identity(self) -> dict[str, Any]:
    return {
      **self.earlier_identity,
      "bytes": self.size,
      "text": self._sampled_text,
    }

  @functools.cached_property
  def earlier_identity(self) -> dict[str, Any]:
    return {
      "dataset": self._name,
      "directory": self._directory,
      "shards": self._all_shards,
    }

  def iter_parts(self) -> Iterator[tuple]:
    for start in range(0, self._num_records, _TFDS_PART):
      yield start, min(start + _TFDS_PART, self._num_records)

  def part_size(self, part: tuple) -> float:
    start, stop = part
    return self.size * (stop - start) / self._num_records

  def _read(self, part: tuple) -> Iterator[tuple[float, Document]]:
    data = _tfds_data(
      self._directory, self._stored_split, self._shards[0][0], self._version
    )
    for done, index in enumerate(range(*part), 1):
      try:
        record = data[index]
        values = [record[path] for path in self._fields.values()]
      except Exception as error:  # ArrayRecord and TFDS raise bare exceptions of many kinds for damage
        raise UserError(
          f"{self._place(index)} cannot be read ({reason(error)}); if the file is missing or damaged, build the dataset again"
        ) from error
      yield done / len(range(*part)), self._document(*values)

  def fingerprint(self) -> dict[str, str]:
    return {
      "names and sizes": digest([self._name, self._shards]),
      "text": self._sampled_text,
      "times": "",
      "nanoseconds": "",
    }

  def data_identity(self) -> dict[str, int | str]:
    return {
      f"the version of {self.spec!r}": self._name,
      f"the number of documents in {self.spec!r}": self._num_records,
      f"the text of {self.spec!r}": self._sampled_text,
    }

  @functools.cached_property
  def _sampled_text(self) -> str:
    """Returns a digest of some documents.

    A dataset that was built again has the same documents in files of other
    bytes and times.
    """
    documents = []
    for index in sampled(self._num_records):
      for _, document in self._read((index, index + 1)):
        documents.append(document)
    return digest(documents)

  def _place(self, index: int) -> str:
    ends = list(itertools.accumulate(count for _, count in self._shards))
    shard = bisect.bisect_right(ends, index)
    name, count = self._shards[shard]
    return f"{os.path.join(self._directory, name)}: record {index - ends[shard] + count}"


@functools.lru_cache(maxsize=8)
def _tfds_data(
  directory: str, split: str, shard: str, version: tuple[int, int]
) -> Any:
  """Returns the data of a split, opened once per process for all parts.

  Args:
    directory: The directory of the dataset.
    split: The name of the split.
    shard: The name of one of its files, to try whether it can be read.
    version: Size and time of that file. Only a key of the cache.
  """
  import tensorflow_datasets as tfds

  del version
  address_space.check_array_record(os.path.join(directory, shard))
  try:
    return tfds.builder_from_directory(directory).as_data_source(split)
  except NotImplementedError as error:
    raise UserError(
      f"{directory} is not stored as ArrayRecord, which random access needs; where TensorFlow is installed, "
      f"tfds convert_format --dataset_version_dir={directory} --out_file_format=array_record converts it"
    ) from error


def _find_tfds(spec: str, name: str, data_dir: str) -> str:
  """The directory of a dataset's newest version, or of the version in NAME:1.2.0."""
  root = epath.Path(
    data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  ).expanduser()
  name, _, version = name.partition(":")
  pattern = re.compile(r"\d+\.\d+\.\d+")
  dataset = glob.escape(os.fspath(root / name))
  versions = []
  for info in files.match_paths(f"{dataset}/*/dataset_info.json"):
    path = epath.Path(info).parent
    if pattern.fullmatch(path.name):
      versions.append(path)
  matching = [path for path in versions if version in ("", path.name)]
  if not matching:
    found = sorted(
      {
        os.path.relpath(os.path.dirname(os.path.dirname(path)), os.fspath(root))
        for path in itertools.chain(
          glob.iglob(f"{root}/*/*/dataset_info.json"),
          glob.iglob(f"{root}/*/*/*/dataset_info.json"),
        )
      }
    )
    holds = f"it holds {', '.join(found)}" if found else "it holds no datasets"
    if versions:
      holds = f"{name} has the versions {', '.join(sorted(path.name for path in versions))}"
    raise UserError(
      f"config.data.source {spec!r}: no such dataset in {root} (config.data.data_dir); {holds}"
    )
  return os.fspath(
    max(matching, key=lambda path: tuple(map(int, path.name.split("."))))
  )


class FileSource(Source):
  """Files that match a glob, sorted by name.

  Attributes:
    matched_sizes: Bytes of all files that match, whether they are read or not.
  """

  def __init__(self, spec: str, pattern: str, split: str, config: DataConfig):
    super().__init__(spec, split, config)
    self._listed = files.match(pattern)
    if not self._listed:
      raise UserError(
        f"config.data.source {spec!r}: no file matches {pattern!r} (current directory {os.getcwd()}; "
        "'**' crosses directories, as in 'text:/data/**/*.txt')"
      )
    self.matched_sizes = [file.size for file in self._listed]
    is_own_source = split == "validation" and bool(config.validation_source)
    if config.files and not is_own_source:
      self._listed = spread(self._listed, config.files)
    self.num_files = len(self._listed)
    self.size = sum(file.size for file in self._listed)
    self._share_read = 1.0
    if split == "validation" and is_remote(spec) and not is_own_source:
      # All files would be downloaded twice, for one document in a hundred.
      size = min(self.size, _VALIDATION_BYTES)
      self._share_read = size / max(self.size, 1)
      self.size = size
    self._files = [(file.path, file.size) for file in self._listed if file.size]
    if not self._files:
      raise UserError(
        f"config.data.source {spec!r}: empty: the {len(self._listed)} files that match hold no bytes"
      )

  @functools.cached_property
  def identity(self) -> dict[str, Any]:
    # The Hub gives a hash of each file, which needs no samples.
    if all(file.content_id for file in self._listed):
      return self.earlier_identity
    versions = []
    for file in self._listed:
      version = file.content_id or file.time_ns
      versions.append((file.name, file.size, version))
    return {
      "files": digest(versions),
      "text": text_digest(self._listed),
      "count": len(self._listed),
    }

  @functools.cached_property
  def earlier_identity(self) -> dict[str, Any]:
    versions = []
    for file in self._listed:
      version = file.content_id or file.time
      versions.append((file.name, file.size, version))
    return {"files": digest(versions), "count": len(self._listed)}

  def fingerprint(self) -> dict[str, str]:
    return fingerprint(self._listed)

  def data_identity(self) -> dict[str, int | str]:
    data_identity: dict[str, int | str] = {
      f"the number of files of {self.spec!r}": len(self._listed)
    }
    for file in self._listed:
      data_identity[f"the size of {file.name}"] = file.size
    data_identity[f"the text of {self.spec!r}"] = text_digest(self._listed)
    return data_identity

  @functools.cached_property
  def parts(self) -> list[tuple]:
    parts = list(self.iter_parts())
    return spread(parts, math.ceil(len(parts) * self._share_read))

  @functools.cached_property
  def _size_of(self) -> dict[str, int]:
    return dict(self._files)


def spread(items: Sequence[_Item], count: int) -> list[_Item]:
  """Returns some items of a sequence, evenly spaced, or all.

  The files of a web corpus are often in the order of their crawls. The first
  ones alone would be text of a few months.

  Args:
    items: The sequence.
    count: Number of items to return.
  """
  count = min(count, len(items))
  return [items[index * len(items) // count] for index in range(count)]


class _TextSource(FileSource):
  """A document a file. A part is a run of files."""

  def iter_parts(self) -> Iterator[tuple]:
    part: list[str] = []
    room = 0
    for name, size in self._files:
      if part and size > room:
        yield tuple(part)
        part = []
      if not part:
        room = _TEXT_PART
      part.append(name)
      room -= size
    yield tuple(part)

  def part_size(self, part: tuple) -> float:
    return sum(self._size_of[name] for name in part)

  def _read(self, part: tuple) -> Iterator[tuple[float, Document]]:
    for done, name in enumerate(part, 1):
      try:
        content = files.read_bytes(name)
      except OSError as error:
        raise UserError(f"{name}: cannot be read ({reason(error)})") from error
      yield (
        done / len(part),
        Document(*decode(content.removeprefix(_BYTE_ORDER_MARK))),
      )


class _JsonlSource(FileSource):
  """A document a line. A part is a range of bytes, (name, start, stop): all of a compressed file."""

  def iter_parts(self) -> Iterator[tuple]:
    for name, size in self._files:
      if name.endswith((".gz", ".zst")):
        yield name, 0, size
        continue
      for start in range(0, size, _JSONL_PART):
        yield name, start, min(start + _JSONL_PART, size)

  def part_size(self, part: tuple) -> float:
    _, start, stop = part
    return stop - start

  def _read(self, part: tuple) -> Iterator[tuple[float, Document]]:
    name, start, _ = part
    for number, (share, line) in enumerate(_lines(*part)):
      line = line.removeprefix(
        _BYTE_ORDER_MARK
      )  # files with one may have been joined
      if not line.strip():
        continue
      line_text, replaced = decode(line)
      try:
        record = json.loads(line_text)
      except (ValueError, RecursionError) as error:
        raise UserError(
          f"{_place(name, start, number)}: not JSON ({error})"
        ) from error
      values = [lookup(record, path) for path in self._fields.values()]
      for (field, path), value in zip(
        self._fields.items(), values, strict=True
      ):
        if not is_text(field, value):
          fields = (
            [f"{key} ({type(item).__name__})" for key, item in record.items()]
            if isinstance(record, dict)
            else []
          )
          raise UserError(
            f"{_place(name, start, number)}: config.data.{field} = {path!r} is not text here; "
            + (
              f"the fields are {', '.join(fields)}"
              if fields
              else "a line must be a JSON object"
            )
          )
      document = self._document(*values)
      yield share, document._replace(replaced=replaced or document.replaced)


def _lines(name: str, start: int, stop: int) -> Iterator[tuple[float, bytes]]:
  """The lines that begin in [start, stop) of a file, or all lines of a compressed one, each with the share that is read with it."""
  import pyarrow

  number = 0
  try:
    with files.open_file(name) as file:
      if name.endswith(".gz"):
        lines = _all_lines(gzip.open(file))
      elif name.endswith(".zst"):
        # The zstandard package would not notice a file that is cut short
        lines = _all_lines(
          io.BufferedReader(
            pyarrow.CompressedInputStream(file, "zstd"), 1 << 20
          )
        )
      else:
        lines = _range_of_lines(file, start, stop)
      for line in lines:
        if len(line) > _LONGEST_LINE:
          raise UserError(
            f"{_place(name, start, number)}: the line is longer than {_LONGEST_LINE / 2**20:.3g} MiB, and a document of that size would "
            "fill the memory: split it, or write it to a file of its own and read that with text:GLOB"
          )
        yield (
          min(1.0, (file.tell() - start) / (stop - start)),
          line,
        )  # of a compressed file, too, the share of its own bytes
        number += 1
  except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
    place = f"line {number}" + f" after byte {start}" * bool(start)
    raise UserError(
      f"{name}: cannot be read beyond {place} ({reason(error)}); the file may be damaged or cut short"
    ) from error


def _all_lines(file: Any) -> Iterator[bytes]:
  return iter(lambda: file.readline(_LONGEST_LINE + 1), b"")


def _range_of_lines(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
  if start:  # a line that crosses the start belongs to the part before
    file.seek(start - 1)
    start += len(file.readline()) - 1
  while start < stop and (
    line := file.readline(_LONGEST_LINE + 1)
  ):  # no line if the file has become shorter
    start += len(line)
    yield line


def _place(name: str, start: int, number: int) -> str:
  """FILE:LINE of a line, counted from 0 from the first one that begins at or after byte start."""
  before = 0
  if start:
    with files.open_file(name) as file:
      before = sum(
        file.read(min(1 << 20, start - offset)).count(b"\n")
        for offset in range(0, start, 1 << 20)
      )
      file.seek(start - 1)
      before += file.read(1) != b"\n"
  return f"{name}:{before + number + 1}"


class _ParquetSource(FileSource):
  """A document a row. A part is a row group, (name, index)."""

  @functools.cached_property
  def parts(self) -> list[tuple]:
    parquet.read_footers([name for name, _ in self._files])
    return super().parts

  def iter_parts(self) -> Iterator[tuple]:
    is_empty = True
    for name, _ in self._files:
      for index in parquet.row_groups(name):
        is_empty = False
        yield name, index
    if is_empty:
      raise UserError(
        f"config.data.source {self.spec!r}: empty: its files hold no rows"
      )

  def part_size(self, part: tuple) -> float:
    # A footer is shared by the row groups in proportion to their sizes.
    name, index = part
    sizes = parquet.row_group_sizes(name)
    return self._size_of[name] * sizes[index] / sum(sizes)

  def _read(self, part: tuple) -> Iterator[tuple[float, Document]]:
    import pyarrow

    name, index = part
    file = parquet.open_parquet(name)
    names = file.schema_arrow.names
    columns = {}
    for field, path in self._fields.items():
      columns[field] = path if path in names else path.partition(".")[0]
      if columns[field] not in names:
        raise UserError(
          f"{name}: has no column config.data.{field} = {path!r}; its columns are {', '.join(names)}"
        )
    done = 0
    try:
      for batch in file.iter_batches(
        batch_size=256,
        row_groups=[index],
        columns=list(dict.fromkeys(columns.values())),
      ):
        parts = [
          [
            lookup({columns[field]: value}, path)
            for value in _values(batch.column(columns[field]))
          ]
          for field, path in self._fields.items()
        ]
        for values in zip(*parts, strict=True):
          for (field, path), value in zip(
            self._fields.items(), values, strict=True
          ):
            if not is_text(field, value):
              kinds = ", ".join(
                f"{column.name} ({column.type})" for column in file.schema_arrow
              )
              raise UserError(
                f"{name}: config.data.{field} = {path!r} is not text in row {done} of row group {index}; its columns are {kinds}"
              )
          done += 1
          yield (
            done / file.metadata.row_group(index).num_rows,
            self._document(*values),
          )
    except (pyarrow.ArrowException, OSError) as error:
      raise UserError(
        f"{name}: row group {index} cannot be read beyond its row {done} ({reason(error)}); the file may be damaged"
      ) from error


def _values(column: Any) -> list[Any]:
  try:
    return column.to_pylist()
  except UnicodeDecodeError:  # a string column that does not hold UTF-8
    return column.cast(
      "large_binary"
    ).to_pylist()  # Arrow raises for lists and records


_KINDS: dict[str, type[_TfdsSource] | type[FileSource]] = {
  "stdlib": _TfdsSource,
  "tfds": _TfdsSource,
  "text": _TextSource,
  "jsonl": _JsonlSource,
  "parquet": _ParquetSource,
}
