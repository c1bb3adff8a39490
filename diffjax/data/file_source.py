"""Sources that are files, and plain text files."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from diffjax.config import DataConfig, UserError
from diffjax.data import files
from diffjax.data.document import Document, Part, Source, decode, reason
from diffjax.data.fingerprint import digest, fingerprint, text_digest

# Some editors write these bytes at the beginning of a file. They are not text.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# The validation split of an hf:// source is taken from this many bytes.
MAX_HUB_VALIDATION_BYTES = 1 << 30

# The size of a part of text files. A part has at least one file.
_TEXT_PART_BYTES = 1 << 20

_Item = TypeVar("_Item")


class FileSource(Source):
  """The documents of files that match a glob, sorted by name.

  Subclasses read one format of files.

  Attributes:
    matched_sizes: Bytes of all files that match, including the files that are
      not read.
  """

  def __init__(self, spec: str, pattern: str, split: str, config: DataConfig):
    """Lists the files, and selects which files are read.

    Args:
      spec: The source.
      pattern: The glob.
      split: "train" or "validation".
      config: The data fields.

    Raises:
      UserError: if no file matches, or all files are empty.
    """
    super().__init__(spec, split, config)
    listed = files.match(pattern)
    if not listed:
      raise UserError(
        f"config.data.source {spec!r}: no file matches {pattern!r} (current"
        f" directory {os.getcwd()}; '**' crosses directories, as in"
        " 'text:/data/**/*.txt')"
      )
    self.matched_sizes = [file.size for file in listed]

    if config.files and not self._is_validation_source:
      listed = spread(listed, config.files)
    self._listed = listed
    self._size_by_path = {file.path: file.size for file in listed if file.size}
    if not self._size_by_path:
      raise UserError(
        f"config.data.source {spec!r}: empty: the {len(listed)} files that"
        " match hold no bytes"
      )
    self.num_files = len(listed)
    self.size = sum(self._size_by_path.values())

    # The fraction of the parts that this split reads.
    self._fraction_read = 1.0
    is_held_out = split == "validation" and not self._is_validation_source
    if is_held_out and files.is_on_hub(pattern):
      # The training split of an hf:// source reads all its files. If validation
      # did too, they would be downloaded twice.
      bytes_to_read = min(self.size, MAX_HUB_VALIDATION_BYTES)
      self._fraction_read = bytes_to_read / self.size
      self.size = bytes_to_read

  @functools.cached_property
  def parts(self) -> list[Part]:
    """The parts that are read, evenly spaced if they are not all parts."""
    all_parts = list(self.iter_parts())
    num_parts = math.ceil(len(all_parts) * self._fraction_read)
    return spread(all_parts, num_parts)

  @functools.cached_property
  def identity(self) -> dict[str, Any]:
    """Digests of the files' names, sizes and times, and of samples of text."""
    if all(file.content_id for file in self._listed):
      # The Hub has a hash of each file, so no samples are needed. The earlier
      # identity then consists of these hashes, not of times.
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
    """The identity of earlier versions: times in seconds, and no samples."""
    versions = []
    for file in self._listed:
      version = file.content_id or file.time
      versions.append((file.name, file.size, version))
    return {"files": digest(versions), "count": len(self._listed)}

  def fingerprint(self) -> dict[str, str]:
    return fingerprint(self._listed)

  def data_identity(self) -> dict[str, int | str]:
    """Returns values that all processes must share, by name for messages.

    They are the number and the sizes of the files, and a digest of samples.
    """
    data_identity: dict[str, int | str] = {
      f"the number of files of {self.spec!r}": len(self._listed)
    }
    for file in self._listed:
      data_identity[f"the size of {file.name}"] = file.size
    data_identity[f"the text of {self.spec!r}"] = text_digest(self._listed)
    return data_identity


def spread(items: Sequence[_Item], count: int) -> list[_Item]:
  """Returns `count` items of a sequence, evenly spaced, or all if it has fewer.

  The files of a web corpus are often in the order of their crawls. The first
  ones alone would be text of a few months.
  """
  count = min(count, len(items))
  return [items[index * len(items) // count] for index in range(count)]


class TextSource(FileSource):
  """Text files. Each file is a document.

  A part is a tuple of the paths of consecutive files.
  """

  def iter_parts(self) -> Iterator[tuple[str, ...]]:
    """Yields groups of consecutive files, each at most 1 MiB or one file."""
    paths: list[str] = []
    part_bytes = 0
    for path, size in self._size_by_path.items():
      is_full = part_bytes + size > _TEXT_PART_BYTES
      if paths and is_full:
        yield tuple(paths)
        paths = []
        part_bytes = 0
      paths.append(path)
      part_bytes += size
    yield tuple(paths)

  def part_size(self, part: tuple[str, ...]) -> float:
    return sum(self._size_by_path[path] for path in part)

  def _read_all(
    self, part: tuple[str, ...]
  ) -> Iterator[tuple[float, Document]]:
    """Yields the fraction of the files that is read, and a file's document.

    Raises:
      UserError: if a file cannot be read.
    """
    for index, path in enumerate(part):
      try:
        content = files.read_bytes(path)
      except OSError as error:
        raise UserError(f"{path}: cannot be read ({reason(error)})") from error
      text = decode(content.removeprefix(BYTE_ORDER_MARK))
      fraction = (index + 1) / len(part)
      yield fraction, Document(text.text, text.replaced)
