"""TFDS datasets on disk, read without their code and without TensorFlow."""

from __future__ import annotations

import functools
import glob
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from diffjax.config import DataConfig, UserError
from diffjax.data import files, stdlib_corpus
from diffjax.data.document import Document, Source, reason
from diffjax.data.fingerprint import digest, sampled
from diffjax.host import address_space

_PART_RECORDS = 256
_VERSION = re.compile(r"\d+\.\d+\.\d+")


class RecordRange(NamedTuple):
  """The records [start, stop) of a split."""

  start: int
  stop: int


class ShardFile(NamedTuple):
  """A file of a split."""

  name: str
  num_records: int


class TfdsSource(Source):
  """A TFDS dataset. Each record is a document. A part is a RecordRange."""

  def __init__(self, spec: str, name: str, split: str, config: DataConfig):
    """Opens a dataset, and selects which of its splits is read.

    Args:
      spec: The source. "stdlib" is the embedded corpus.
      name: NAME or NAME:VERSION of the dataset.
      split: "train" or "validation".
      config: The data fields.

    Raises:
      UserError: if there is no such dataset, or it has no such texts, or no
        documents in the split.
    """
    super().__init__(spec, split, config)
    if spec == "stdlib":
      self._directory = os.fspath(stdlib_corpus.corpus_directory())
      self._field_paths = {"text_field": "text"}
    else:
      self._directory = _find_dataset(spec, name, config.data_dir)

    info, num_records = self._read_info()
    self._check_features(info.features)
    if num_records.get("validation", 0) > 0:
      # The dataset is divided into splits already.
      self._validation_fraction = None
    self._stored_split = self._choose_stored_split(num_records)
    self._num_records = num_records.get(self._stored_split, 0)
    if self._num_records == 0:
      raise self._empty_split_error(num_records)

    split_info = info.splits[self._stored_split]
    self._shards = _shard_files(split_info)
    self.num_files = len(self._shards)
    self.size = int(split_info.num_bytes)

    # Parts of the dataset's identity.
    self._name = info.full_name
    self._shard_lengths = {}
    for key, value in info.splits.items():
      self._shard_lengths[key] = [int(length) for length in value.shard_lengths]
    # A dataset that was built again has the same directory, but its files have
    # another size or time.
    self._version = _file_version(self._directory, self._shards[0].name)

  def _read_info(self) -> tuple[Any, dict[str, int]]:
    """Returns the dataset's DatasetInfo, and the number of records by split.

    Raises:
      UserError: if the directory is not a complete dataset.
    """
    import tensorflow_datasets as tfds

    try:
      info = tfds.builder_from_directory(self._directory).info
      num_records = {}
      for split, split_info in info.splits.items():
        num_records[split] = split_info.num_examples
    except Exception as error:
      # TFDS raises many kinds of exceptions.
      raise UserError(
        f"config.data.source {self.spec!r}: {self._directory} is not a complete"
        f" TFDS dataset ({error})"
      ) from error
    return info, num_records

  def _choose_stored_split(self, num_records: dict[str, int]) -> str:
    """Returns the name of the dataset's split that is read.

    If the dataset has no validation split, both splits are taken from "train",
    except that config.data.validation_source reads "test" if there is one.

    Args:
      num_records: The number of records of each split of the dataset.
    """
    if num_records.get("validation", 0) > 0:
      return self._split
    if self._is_validation_source and num_records.get("test", 0) > 0:
      return "test"
    return "train"

  def _empty_split_error(self, num_records: dict[str, int]) -> UserError:
    """Returns the error for a dataset whose split has no records."""
    counts = [f"{split} ({count})" for split, count in num_records.items()]
    return UserError(
      f"config.data.source {self.spec!r}: no documents in split"
      f" {self._stored_split!r} of {self._directory}; its splits are"
      f" {', '.join(counts) or 'none'}"
    )

  def _check_features(self, features: Any) -> None:
    """Checks that config.data.text_field and prompt_field are text features.

    Args:
      features: The features of the dataset, usually a `FeaturesDict`.

    Raises:
      UserError: if one of them is missing or of another type.
    """
    features_by_name = {}
    # A dataset whose records are not dicts has a single, nameless feature.
    if hasattr(features, "items"):
      features_by_name = dict(features.items())
    for field, name in self._field_paths.items():
      if _is_text_feature(features_by_name.get(name)):
        continue
      kinds = []
      # Their order differs from process to process.
      for key in sorted(features_by_name):
        kinds.append(f"{key} ({type(features_by_name[key]).__name__})")
      raise UserError(
        f"config.data.source {self.spec!r}: config.data.{field} = {name!r} is"
        f" not text in this dataset; its features are {', '.join(kinds)}"
      )

  @functools.cached_property
  def identity(self) -> dict[str, Any]:
    """The dataset's name, place and sizes, and a digest of some documents."""
    return {
      **self.earlier_identity,
      "bytes": self.size,
      "text": self._sampled_text,
    }

  @functools.cached_property
  def earlier_identity(self) -> dict[str, Any]:
    """The identity of earlier versions, which had no digest of documents."""
    return {
      "dataset": self._name,
      "directory": self._directory,
      "shards": self._shard_lengths,
    }

  def iter_parts(self) -> Iterator[RecordRange]:
    for start in range(0, self._num_records, _PART_RECORDS):
      stop = min(start + _PART_RECORDS, self._num_records)
      yield RecordRange(start, stop)

  def part_size(self, part: RecordRange) -> float:
    return self.size * (part.stop - part.start) / self._num_records

  def _read_all(self, part: RecordRange) -> Iterator[tuple[float, Document]]:
    """Yields the fraction of the records that is read, and a record's document.

    Raises:
      UserError: if a record cannot be read.
    """
    records = _open_records(
      self._directory, self._stored_split, self._shards[0].name, self._version
    )
    num_records = part.stop - part.start
    for index in range(part.start, part.stop):
      try:
        record = records[index]
        values = [record[name] for name in self._field_paths.values()]
      except Exception as error:
        # For damaged files, ArrayRecord and TFDS raise many kinds of
        # exceptions.
        raise UserError(
          f"{self._locate_record(index)} cannot be read ({reason(error)}); if"
          " the file is missing or damaged, build the dataset again"
        ) from error
      fraction = (index - part.start + 1) / num_records
      yield fraction, self._make_document(values)

  def fingerprint(self) -> dict[str, str]:
    """Returns the digests that `fingerprint.fingerprint` has for files.

    Times are not compared, so they are empty.
    """
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
    """A digest of some documents.

    The bytes of the files are not sampled. If a dataset is built again, they
    may differ although the documents are the same.
    """
    documents = []
    for index in sampled(self._num_records):
      for _, document in self._read_all(RecordRange(index, index + 1)):
        documents.append(document)
    return digest(documents)

  def _locate_record(self, index: int) -> str:
    """Returns "FILE: record NUMBER" for a record of the split, for messages."""
    index_in_shard = index
    for shard in self._shards:
      if index_in_shard < shard.num_records:
        break
      index_in_shard -= shard.num_records
    path = os.path.join(self._directory, shard.name)
    return f"{path}: record {index_in_shard}"


def _shard_files(split_info: Any) -> list[ShardFile]:
  """Returns the files of a split, given by its `tfds.core.SplitInfo`."""
  shards = []
  for name, num_records in zip(
    split_info.filenames, split_info.shard_lengths, strict=True
  ):
    shards.append(ShardFile(name, int(num_records)))
  return shards


def _file_version(directory: str, name: str) -> tuple[int, int]:
  """Returns the size and the time of a file. (0, 0) if it does not exist."""
  path = epath.Path(directory) / name
  if not path.exists():
    return 0, 0
  return files.version(os.fspath(path))


def _is_text_feature(feature: Any) -> bool:
  """Returns whether a feature of a dataset is a single text.

  Args:
    feature: A `tfds.features.FeatureConnector`. None for a missing feature.
  """
  if feature is None or feature.shape:
    return False
  # NumPy holds texts as objects.
  return np.dtype(feature.np_dtype).kind == "O"


@functools.lru_cache(maxsize=8)
def _open_records(
  directory: str, split: str, shard: str, version: tuple[int, int]
) -> Any:
  """Returns the records of a split as a sequence. A process opens them once.

  Args:
    directory: The directory of the dataset.
    split: The name of the split.
    shard: The name of one of its files, which is opened to check that
      ArrayRecord works here.
    version: Size and time of that file. They are only a part of the cache's
      key, so that a dataset that is built again is opened again.
  """
  import tensorflow_datasets as tfds

  del version
  address_space.check_array_record(os.path.join(directory, shard))
  try:
    return tfds.builder_from_directory(directory).as_data_source(split)
  except NotImplementedError as error:
    raise UserError(
      f"{directory} is not stored as ArrayRecord, which random access needs;"
      " where TensorFlow is installed, tfds convert_format"
      f" --dataset_version_dir={directory} --out_file_format=array_record"
      " converts it"
    ) from error


def _find_dataset(spec: str, name: str, data_dir: str) -> str:
  """Returns the directory of a dataset.

  Args:
    spec: The source, for messages.
    name: NAME for the newest version, or NAME:VERSION, such as "c4/en:3.1.0".
    data_dir: config.data.data_dir. "" for TFDS's own default.

  Raises:
    UserError: if there is no such dataset or version.
  """
  default_root = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  root = epath.Path(data_dir or default_root).expanduser()
  name, _, version = name.partition(":")
  available = _find_versions(root / name)
  matching = available
  if version:
    matching = [path for path in available if path.name == version]
  if matching:
    return os.fspath(max(matching, key=_version_number))

  if available:
    versions = ", ".join(sorted(path.name for path in available))
    alternatives = f"{name} has the versions {versions}"
  else:
    datasets = ", ".join(_find_datasets(os.fspath(root)))
    alternatives = f"it holds {datasets or 'no datasets'}"
  raise UserError(
    f"config.data.source {spec!r}: no such dataset in {root}"
    f" (config.data.data_dir); {alternatives}"
  )


def _find_versions(dataset: epath.Path) -> list[epath.Path]:
  """Returns the directories DATASET/VERSION that hold a complete dataset."""
  versions = []
  escaped = glob.escape(os.fspath(dataset))
  for info_path in files.match_paths(f"{escaped}/*/dataset_info.json"):
    version = epath.Path(info_path).parent
    if _VERSION.fullmatch(version.name):
      versions.append(version)
  return versions


def _version_number(directory: epath.Path) -> tuple[int, ...]:
  """Returns (1, 10, 0) for the directory of version 1.10.0."""
  return tuple(int(number) for number in directory.name.split("."))


def _find_datasets(root: str) -> list[str]:
  """Returns the names of the local datasets in a directory, sorted."""
  names = set()
  for pattern in ("*/*/dataset_info.json", "*/*/*/dataset_info.json"):
    for info_path in glob.iglob(f"{root}/{pattern}"):
      # The file is in NAME/VERSION or NAME/CONFIG/VERSION.
      dataset = os.path.dirname(os.path.dirname(info_path))
      names.add(os.path.relpath(dataset, root))
  return sorted(names)
