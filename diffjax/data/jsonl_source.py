"""JSONL files, plain or compressed. Each line is a document."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from diffjax.config import UserError
from diffjax.data import files
from diffjax.data.document import Document, decode, is_text, lookup, reason
from diffjax.data.file_source import BYTE_ORDER_MARK, FileSource

_COMPRESSED = (".gz", ".zst")

# The size of a part of an uncompressed file.
_PART_BYTES = 64 << 20

# A document takes about ten times its size in memory.
_MAX_LINE_BYTES = 256 << 20

# Bytes that are read at once.
_BLOCK_BYTES = 1 << 20


class ByteRange(NamedTuple):
  """A part of a JSONL file: the lines that begin in [start, stop).

  The part of a compressed file is the whole file, and start and stop count its
  compressed bytes.

  Attributes:
    path: The file.
    start: The first byte.
    stop: The byte after the last one.
  """

  path: str
  start: int
  stop: int


class JsonlSource(FileSource):
  """JSONL files. Each line is a document. A part is a ByteRange."""

  def iter_parts(self) -> Iterator[ByteRange]:
    for path, size in self._size_by_path.items():
      if path.endswith(_COMPRESSED):
        yield ByteRange(path, 0, size)
        continue
      for start in range(0, size, _PART_BYTES):
        stop = min(start + _PART_BYTES, size)
        yield ByteRange(path, start, stop)

  def part_size(self, part: ByteRange) -> float:
    return part.stop - part.start

  def _read(self, part: ByteRange) -> Iterator[tuple[float, Document]]:
    for line in _read_lines(part):
      # Files that were joined have marks in the middle too.
      content = line.content.removeprefix(BYTE_ORDER_MARK)
      if content.strip():
        yield line.fraction_read, self._parse(content, part, line.number)

  def _parse(self, content: bytes, part: ByteRange, number: int) -> Document:
    """Returns the document of the line with this number in its part."""
    line_text = decode(content)
    try:
      record = json.loads(line_text.text)
    except (ValueError, RecursionError) as error:
      location = _line_location(part, number)
      raise UserError(f"{location}: not JSON ({error})") from error
    values = []
    for field, path in self._field_paths.items():
      value = lookup(record, path)
      if not is_text(field, value):
        location = _line_location(part, number)
        raise UserError(
          f"{location}: config.data.{field} = {path!r} is not text here;"
          f" {_describe_fields(record)}"
        )
      values.append(value)
    document = self._make_document(values)
    return document._replace(replaced=line_text.replaced or document.replaced)


def _describe_fields(record: Any) -> str:
  """Returns the fields of a record and their types, for messages."""
  if not isinstance(record, dict):
    return "a line must be a JSON object"
  if not record:
    return "the object has no fields"
  fields = []
  for name, value in record.items():
    fields.append(f"{name} ({type(value).__name__})")
  return f"the fields are {', '.join(fields)}"


class _Line(NamedTuple):
  """A line of a part.

  Attributes:
    content: Its bytes.
    number: Its number in the part, from 0.
    fraction_read: The fraction of the part that has been read with it.
  """

  content: bytes
  number: int
  fraction_read: float


def _read_lines(byte_range: ByteRange) -> Iterator[_Line]:
  """Yields the lines of a part.

  Raises:
    UserError: if the file cannot be read, or a line is too long.
  """
  import pyarrow

  path, start, stop = byte_range
  num_lines = 0
  try:
    with files.open_file(path) as file:
      for content in _open_lines(file, byte_range):
        if len(content) > _MAX_LINE_BYTES:
          location = _line_location(byte_range, num_lines)
          raise UserError(
            f"{location}: the line is longer than {_MAX_LINE_BYTES / 2**20:.3g}"
            " MiB, and a document of that size would fill the memory: split it,"
            " or write it to a file of its own and read that with text:GLOB"
          )
        # In a compressed file, this is the position in the compressed bytes.
        fraction = (file.tell() - start) / (stop - start)
        yield _Line(content, num_lines, min(1.0, fraction))
        num_lines += 1
  except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
    position = f"line {num_lines}"
    if start > 0:
      position += f" after byte {start}"
    raise UserError(
      f"{path}: cannot be read beyond {position} ({reason(error)}); the file may"
      " be damaged or cut short"
    ) from error


def _open_lines(file: BinaryIO, byte_range: ByteRange) -> Iterator[bytes]:
  """Returns an iterator over the lines of a part of an open file.

  Longer lines than the maximum are cut one byte after it.
  """
  import pyarrow

  if byte_range.path.endswith(".gz"):
    return _all_lines(gzip.open(file))
  if byte_range.path.endswith(".zst"):
    # Raises an error if the file is cut short.
    decompressed = pyarrow.CompressedInputStream(file, "zstd")
    return _all_lines(io.BufferedReader(decompressed, _BLOCK_BYTES))
  return _lines_in_range(file, byte_range.start, byte_range.stop)


def _all_lines(file: Any) -> Iterator[bytes]:
  """Yields all lines of a file."""
  while True:
    line = file.readline(_MAX_LINE_BYTES + 1)
    if not line:
      return
    yield line


def _lines_in_range(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
  """Yields the lines that begin in [start, stop) of a file."""
  position = start
  if start > 0:
    # A line that crosses the start belongs to the part before. Begins one byte
    # earlier: if that byte ends a line, the next line begins at `start`.
    file.seek(start - 1)
    end_of_crossing_line = file.readline()
    position = start - 1 + len(end_of_crossing_line)
  while position < stop:
    line = file.readline(_MAX_LINE_BYTES + 1)
    if not line:
      # The file has become shorter since it was listed.
      return
    position += len(line)
    yield line


def _line_location(byte_range: ByteRange, number: int) -> str:
  """Returns "FILE:LINE", the location of a line, for messages.

  Args:
    byte_range: The part that the line is in.
    number: The number of the line in the part, from 0.
  """
  line_number = number + 1
  if byte_range.start > 0:
    line_number += _count_lines(byte_range.path, byte_range.start)
  return f"{byte_range.path}:{line_number}"


def _count_lines(path: str, stop: int) -> int:
  """Returns how many lines of a file begin before the byte `stop`."""
  num_newlines = 0
  last_byte = b""
  remaining = stop
  with files.open_file(path) as file:
    while remaining > 0:
      block = file.read(min(_BLOCK_BYTES, remaining))
      if not block:
        break
      num_newlines += block.count(b"\n")
      last_byte = block[-1:]
      remaining -= len(block)
  if last_byte == b"\n":
    return num_newlines
  # The last one of these lines crosses `stop`.
  return num_newlines + 1
