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

_COMPRESSED_EXTENSIONS = (".gz", ".zst")

# The size of a part of an uncompressed file.
PART_BYTES = 64 << 20

# Longer lines are an error, because a document takes about ten times its size
# in memory.
MAX_LINE_BYTES = 256 << 20

# Bytes that are read at once.
_BLOCK_BYTES = 1 << 20


class ByteRange(NamedTuple):
  """A part of a JSONL file: the lines that begin in the bytes [start, stop).

  A compressed file is a single part, and its bytes are the compressed ones.

  Attributes:
    path: The file.
    start: The offset of the first byte.
    stop: The offset after the last byte.
  """

  path: str
  start: int
  stop: int


class JsonlSource(FileSource):
  """JSONL files. Each line is a document. A part is a ByteRange."""

  def iter_parts(self) -> Iterator[ByteRange]:
    """Yields ranges of each file, or a whole file if it is compressed."""
    for path, size in self._size_by_path.items():
      if path.endswith(_COMPRESSED_EXTENSIONS):
        yield ByteRange(path, 0, size)
        continue
      for start in range(0, size, PART_BYTES):
        stop = min(start + PART_BYTES, size)
        yield ByteRange(path, start, stop)

  def part_size(self, part: ByteRange) -> float:
    return part.stop - part.start

  def _read_all(self, part: ByteRange) -> Iterator[tuple[float, Document]]:
    """Yields the fraction of the part that is read, and a line's document."""
    for line in _read_lines(part):
      # Files that were joined have byte order marks in the middle too.
      content = line.content.removeprefix(BYTE_ORDER_MARK)
      if content.strip():
        document = self._parse(content, part, line.number)
        yield line.fraction_read, document

  def _parse(
    self, content: bytes, part: ByteRange, line_number: int
  ) -> Document:
    """Returns the document of a line.

    Args:
      content: The line, a JSON object.
      part: The part that contains it, for messages.
      line_number: Its number in the part, from 0, for messages.

    Raises:
      UserError: if the line is not JSON, or a field is not text.
    """
    line_text = decode(content)
    try:
      record = json.loads(line_text.text)
    except (ValueError, RecursionError) as error:
      location = _line_location(part, line_number)
      raise UserError(f"{location}: not JSON ({error})") from error
    values = []
    for field, path in self._field_paths.items():
      value = lookup(record, path)
      if not is_text(field, value):
        location = _line_location(part, line_number)
        raise UserError(
          f"{location}: config.data.{field} = {path!r} is not text here;"
          f" {_describe_fields(record)}"
        )
      values.append(value)
    document = self._make_document(values)
    return document._replace(replaced=line_text.replaced or document.replaced)


def _describe_fields(record: Any) -> str:
  """Returns the fields of a line's JSON value and their types, for messages."""
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
    fraction_read: The fraction of the part that has been read, up to its end.
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
        if len(content) > MAX_LINE_BYTES:
          raise _line_too_long(byte_range, num_lines)
        # In a compressed file, `tell` counts compressed bytes, as the range
        # does. The last line of a range may end after `stop`.
        fraction = (file.tell() - start) / (stop - start)
        yield _Line(content, num_lines, min(1.0, fraction))
        num_lines += 1
  except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
    position = f"line {num_lines}"
    if start > 0:
      position += f" after byte {start}"
    raise UserError(
      f"{path}: cannot be read beyond {position} ({reason(error)}); the file"
      " may be damaged or cut short"
    ) from error


def _line_too_long(byte_range: ByteRange, line_number: int) -> UserError:
  """Returns the error for a line that would fill the memory."""
  location = _line_location(byte_range, line_number)
  return UserError(
    f"{location}: the line is longer than {MAX_LINE_BYTES / 2**20:.3g} MiB,"
    " and a document of that size would fill the memory: split it, or write it"
    " to a file of its own and read that with text:GLOB"
  )


def _open_lines(file: BinaryIO, byte_range: ByteRange) -> Iterator[bytes]:
  """Returns an iterator over the lines of a part, decompressed if necessary.

  A line that is too long is cut one byte after the maximum, so that the caller
  notices it.

  Args:
    file: The part's file, open for reading.
    byte_range: The part.
  """
  import pyarrow

  if byte_range.path.endswith(".gz"):
    return _all_lines(gzip.open(file))
  if byte_range.path.endswith(".zst"):
    # Raises an error if the file is cut short.
    decompressed = pyarrow.CompressedInputStream(file, "zstd")
    return _all_lines(io.BufferedReader(decompressed, _BLOCK_BYTES))
  return _lines_in_range(file, byte_range.start, byte_range.stop)


def _all_lines(file: gzip.GzipFile | io.BufferedReader) -> Iterator[bytes]:
  """Yields all lines of a file."""
  while True:
    line = file.readline(MAX_LINE_BYTES + 1)
    if not line:
      return
    yield line


def _lines_in_range(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
  """Yields the lines of a file that begin in the bytes [start, stop)."""
  position = start
  if start > 0:
    # A line that begins before `start` belongs to another part, so its end is
    # skipped. The byte before `start` is read too, because a line begins at
    # `start` exactly if that byte is a newline.
    file.seek(start - 1)
    skipped = file.readline()
    position = start - 1 + len(skipped)
  while position < stop:
    line = file.readline(MAX_LINE_BYTES + 1)
    if not line:
      # The file has become shorter since it was listed.
      return
    position += len(line)
    yield line


def _line_location(byte_range: ByteRange, number: int) -> str:
  """Returns "FILE:LINE" for messages, where the first line of a file is 1.

  Args:
    byte_range: The part that the line is in.
    number: The number of the line in the part, from 0.
  """
  line_of_file = number + 1
  if byte_range.start > 0:
    line_of_file += _count_lines(byte_range.path, byte_range.start)
  return f"{byte_range.path}:{line_of_file}"


def _count_lines(path: str, stop: int) -> int:
  """Returns how many lines of a file begin before the offset `stop`."""
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
  # The last one of these lines has its newline after `stop`.
  return num_newlines + 1
