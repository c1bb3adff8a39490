"""Documents, sources of documents, and the fields of records."""

from __future__ import annotations

import abc
import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from diffjax.config import DataConfig

# Data that a run without network can read, for messages.
WITHOUT_NETWORK = (
  "local files (--config.data.source='parquet:/data/*.parquet', or jsonl: or "
  "text:), a TFDS dataset (--config.data.source=tfds:NAME "
  "--config.data.data_dir=DIR), or --config=configs/tiny.py, which needs no "
  "network"
)

# The result of `lookup` if a record has no such field. None would be the value
# null.
MISSING: Any = object()

# An index of a list in the path of a field.
_LIST_INDEX = re.compile(r"-?[0-9]{1,9}")

# The number of values that the first 8 bytes of a hash can have.
_NUM_HASHES = 2**64


# A part of a source, such as a range of bytes of a file. A tuple, with other
# fields for each kind of source.
Part = Any


class Document(NamedTuple):
  """A document.

  Attributes:
    text: Its text. With a prompt, the answer.
    replaced: Whether bytes that are not UTF-8 were replaced.
    prompt: The text before the answer, which is not learned. None for plain
      text.
  """

  text: str
  replaced: bool
  prompt: str | None = None


class Source(abc.ABC):
  """The documents of one split of a source, in parts.

  A part is a small piece of work. Any process can read any part.

  Attributes:
    spec: The source, such as "jsonl:/data/*.jsonl".
    num_files: Number of files that are read.
    size: Bytes of these files.
  """

  num_files: int
  size: int

  def __init__(self, spec: str, split: str, config: DataConfig):
    """Initializes the base class.

    Args:
      spec: The source.
      split: "train" or "validation".
      config: The data fields.
    """
    self.spec = spec
    # The paths of the text and the prompt in a record (see `lookup`), by the
    # name of the config field that sets them.
    self._field_paths = {"text_field": config.text_field}
    if config.prompt_field:
      self._field_paths["prompt_field"] = config.prompt_field
    self._prompt_template = config.prompt_template
    self._split = split
    # The fraction of the documents that belong to the validation split. None if
    # all documents belong to this split.
    self._validation_fraction: float | None = config.validation_fraction
    if config.validation_source:
      self._validation_fraction = None
    # Whether this is config.data.validation_source, not config.data.source.
    self._is_validation_source = (
      split == "validation" and config.validation_source != ""
    )

  @functools.cached_property
  def parts(self) -> list[Part]:
    """The parts, arguments of `read`."""
    return list(self.iter_parts())

  @property
  @abc.abstractmethod
  def identity(self) -> dict[str, Any]:
    """Names, sizes, times and sampled text of the documents' files (JSON)."""

  @property
  @abc.abstractmethod
  def earlier_identity(self) -> dict[str, Any]:
    """The identity that earlier versions stored for the same files."""

  @property
  def split_share(self) -> float:
    """The expected fraction of the source's documents that are in the split."""
    if self._validation_fraction is None:
      return 1.0
    if self._split == "validation":
      return self._validation_fraction
    return 1 - self._validation_fraction

  def read(
    self, part: Part, report: Callable[[float], None] | None = None
  ) -> Iterator[Document]:
    """Yields the documents of a part that are in the split, in order.

    Documents without text are skipped.

    Args:
      part: One of `parts`.
      report: Called with the fraction of the part that has been read, for each
        document of the part. These include documents of the other split.

    Raises:
      UserError: if a document cannot be read. The message has its file and its
        position.
    """
    for fraction, document in self._read_all(part):
      if report is not None:
        report(fraction)
      if not document.text:
        continue
      # All answers to the same prompt belong to the same split.
      split_key = document.text if document.prompt is None else document.prompt
      if self._is_in_split(split_key):
        yield document

  @abc.abstractmethod
  def iter_parts(self) -> Iterator[Part]:
    """Yields the parts in order. Opens a file only when its parts are due."""

  @abc.abstractmethod
  def part_size(self, part: Part) -> float:
    """Returns the bytes of the files that hold a part."""

  @abc.abstractmethod
  def fingerprint(self) -> dict[str, str]:
    """Returns digests of the documents' files (see `fingerprint.fingerprint`).

    Reads samples of the files. The digests do not depend on their directory.
    """

  @abc.abstractmethod
  def data_identity(self) -> dict[str, int | str]:
    """Returns values that must be equal in all processes of a run.

    They detect processes that read different files. Their names are for
    messages. Reads samples of the documents' files.
    """

  @abc.abstractmethod
  def _read_all(self, part: Part) -> Iterator[tuple[float, Document]]:
    """Yields all documents of a part, of both splits, including empty ones.

    Yields:
      (fraction, document): the fraction of the part that has been read, and the
      document.
    """

  def _make_document(self, values: list[Any]) -> Document:
    """Returns the document of a record.

    Args:
      values: The text of the record and, if config.data.prompt_field is set,
        the prompt. They are the values of `self._field_paths`.
    """
    text = decode(values[0])
    if len(values) == 1:
      return Document(text.text, text.replaced)
    prompt = decode(values[1])
    return Document(
      text=text.text,
      replaced=text.replaced or prompt.replaced,
      prompt=self._prompt_template.replace("{prompt}", prompt.text),
    )

  def _is_in_split(self, split_key: str) -> bool:
    """Returns whether a document belongs to this source's split.

    Args:
      split_key: The prompt of the document or, if it has none, its text.
    """
    if self._validation_fraction is None:
      return True
    digest = hashlib.sha256(split_key.encode("utf-8")).digest()
    is_held_out = is_validation(digest, self._validation_fraction)
    return is_held_out == (self._split == "validation")


def is_validation(digest: bytes, fraction: float) -> bool:
  """Returns whether a document belongs to the validation split.

  Equal documents belong to the same split.

  Args:
    digest: The sha256 of the document, 32 bytes.
    fraction: The fraction of all documents that are for validation, 0 to 1.
  """
  # The bytes of a hash are a random number from 0 to _NUM_HASHES - 1.
  number = int.from_bytes(digest[:8], "big")
  return number < fraction * _NUM_HASHES


class DecodedText(NamedTuple):
  """Text that can be encoded as UTF-8.

  Attributes:
    text: The text.
    replaced: Whether some of it was replaced by U+FFFD.
  """

  text: str
  replaced: bool


def decode(raw: bytes | str | None) -> DecodedText:
  """Returns text that can be encoded as UTF-8. Replaces the rest by U+FFFD.

  Args:
    raw: Bytes, or the value of a JSON string, which may contain half a
      surrogate pair. None for an empty text.
  """
  if raw is None:
    return DecodedText("", replaced=False)
  if isinstance(raw, str):
    raw = raw.encode("utf-8", errors="surrogatepass")
  try:
    return DecodedText(raw.decode("utf-8"), replaced=False)
  except UnicodeDecodeError:
    text = raw.decode("utf-8", errors="replace")
    return DecodedText(text, replaced=True)


def reason(error: BaseException) -> str:
  """Returns the message of a library's exception, in one line."""
  message = " ".join(str(error).split())
  return message or type(error).__name__


def lookup(record: Any, path: str) -> Any:
  """Returns the value of a field of a record.

  Example:
    lookup(record, "turns.-1.value") is record["turns"][-1]["value"].

  Args:
    record: Nested dicts and lists.
    path: The names of fields and the indices of lists, joined by dots. If the
      record has a field whose name is the whole path, this field is returned.

  Returns:
    The value. MISSING if there is no such field.
  """
  if isinstance(record, dict) and path in record:
    return record[path]
  value = record
  for name in path.split("."):
    if isinstance(value, dict):
      value = value.get(name, MISSING)
    elif isinstance(value, list):
      value = _list_item(value, name)
    else:
      return MISSING
  return value


def _list_item(items: list[Any], index_text: str) -> Any:
  """Returns items[int(index_text)]. MISSING if this is not a valid index."""
  if not _LIST_INDEX.fullmatch(index_text):
    return MISSING
  index = int(index_text)
  if not -len(items) <= index < len(items):
    return MISSING
  return items[index]


def is_text(field: str, value: Any) -> bool:
  """Returns whether a value can be the text or the prompt of a document.

  The text may also be null, and then the document is skipped. The prompt may
  not.

  Args:
    field: "text_field" or "prompt_field".
    value: The value in the record, or MISSING.
  """
  if value is None:
    return field == "text_field"
  return isinstance(value, bytes | str)
