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


class Document(NamedTuple):
  """A document.

  Attributes:
    text: Its text. With a prompt, the answer.
    replaced: Whether bytes that are not UTF-8 were replaced.
    prompt: The text before the answer, which is not learnt. None for plain text.
  """

  text: str
  replaced: bool
  prompt: str | None = None


class Source(abc.ABC):
  """The documents of one split of a source, in parts.

  Attributes:
    num_files: Number of files that are read.
    size: Bytes of these files.
  """

  num_files: int
  size: int

  def __init__(self, spec: str, split: str, config: DataConfig):
    self.spec = spec
    # Paths of the text and, with prompts, of the prompt in a record, by their fields of the config
    self._fields = {"text_field": config.text_field}
    if config.prompt_field:
      self._fields["prompt_field"] = config.prompt_field
    self._template = config.prompt_template
    self._split = split
    # Share of the documents that are for validation; None if the source is not divided
    self._validation_fraction = (
      None if config.validation_source else config.validation_fraction
    )

  @functools.cached_property
  def parts(self) -> list[tuple]:
    """Tuples for ``read``. Any process may read any part."""
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
    """The expected share of the source's documents that are in the split."""
    if self._validation_fraction is None:
      return 1.0
    if self._split == "validation":
      return self._validation_fraction
    return 1 - self._validation_fraction

  def read(
    self, part: tuple, reached: Callable[[float], None] = lambda share: None
  ) -> Iterator[Document]:
    """Yields the part's documents of the split, in order, without empty ones.

    Args:
      part: One of `parts`.
      reached: Called with the share of the part that has been read, 0 to 1, after each document.

    Raises:
      UserError: if a document cannot be read. Names its file and place.
    """
    for share, document in self._read(part):
      reached(share)
      # The prompt decides the split where there is one, so that all answers to a question are in the same split
      if document.text and self._is_in_split(
        document.text if document.prompt is None else document.prompt
      ):
        yield document

  def _document(
    self, text: bytes | str | None, prompt: bytes | str | None = None
  ) -> Document:
    """The document of a record, from its fields in the order of self._fields."""
    answer, replaced = decode(text)
    if len(self._fields) == 1:
      return Document(answer, replaced)
    asked, prompt_replaced = decode(prompt)
    return Document(
      answer,
      replaced or prompt_replaced,
      self._template.replace("{prompt}", asked),
    )

  def _is_in_split(self, text: str) -> bool:
    if self._validation_fraction is None:
      return True
    return is_validation(
      hashlib.sha256(text.encode("utf-8")).digest(), self._validation_fraction
    ) == (self._split == "validation")

  @abc.abstractmethod
  def iter_parts(self) -> Iterator[tuple]:
    """Yields the parts in order. Opens a file only when its parts are due."""

  @abc.abstractmethod
  def part_size(self, part: tuple) -> float:
    """Returns the bytes of the files that hold a part."""

  @abc.abstractmethod
  def fingerprint(self) -> dict[str, str]:
    """What tells the documents' files from changed ones, wherever they lie (fingerprint.py). Reads samples of them."""

  @abc.abstractmethod
  def data_identity(self) -> dict[str, int | str]:
    """Returns values that all processes must share, by name for messages.

    Reads samples of the documents' files.
    """

  @abc.abstractmethod
  def _read(self, part: tuple) -> Iterator[tuple[float, Document]]:
    """Yields all documents of the part, of both splits and empty ones too, each with the share of the part that is read with it."""


def is_validation(digest: bytes, fraction: float) -> bool:
  """True if a document with this sha256 is for validation. Equal documents are in the same split.

  Args:
    digest: 32 bytes.
    fraction: Share of all documents that are for validation, 0 to 1.
  """
  return int.from_bytes(digest[:8], "big") < fraction * 2**64


def decode(raw: bytes | str | None) -> tuple[str, bool]:
  """Text that can be written as UTF-8, and whether some of it had to be replaced. None is an empty text."""
  if raw is None:
    return "", False
  try:
    if isinstance(raw, str):
      raw.encode("utf-8")  # JSON may hold half a surrogate pair
      return raw, False
    return raw.decode("utf-8"), False
  except UnicodeError:
    raw = (
      raw.encode("utf-8", errors="surrogatepass")
      if isinstance(raw, str)
      else raw
    )
    return raw.decode("utf-8", errors="replace"), True


def reason(error: BaseException) -> str:
  """The message of a library's exception, in one line."""
  return " ".join(str(error).split()) or type(error).__name__


def lookup(record: Any, path: str) -> Any:
  """The value in a record at a path of names and list indices, such as "a.0.b"; Ellipsis if there is none.

  A name of the record that equals the whole path comes first.
  """
  if isinstance(record, dict) and path in record:
    return record[path]
  for name in path.split("."):
    if isinstance(record, dict):
      record = record.get(name, ...)
    elif (
      isinstance(record, list)
      and re.fullmatch(r"-?[0-9]{1,9}", name)
      and -len(record) <= int(name) < len(record)
    ):
      record = record[int(name)]
    else:
      return ...
  return record


def is_text(field: str, value: Any) -> bool:
  """True if a field has a value that can be read. A record may lack its text, which skips it, but not its prompt."""
  return isinstance(value, bytes | str) or (
    value is None and field == "text_field"
  )
