"""A document, the source that it comes from, and how its fields are found in a record."""

from __future__ import annotations

import abc
import hashlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from diffjax.config import DataConfig
from diffjax.data import stdlib_corpus


class Document(NamedTuple):
  """A document.

  Attributes:
    text: Its text; with a prompt, the answer.
    replaced: Whether some of it was not UTF-8 and has been replaced.
    prompt: All that stands before the answer and is not learnt; None for plain text.
  """

  text: str
  replaced: bool
  prompt: str | None = None


class Source(abc.ABC):
  """Documents, in parts.

  Attributes:
    parts: Tuples that ``read`` understands; any process may read any part.
    identity: What the documents are (JSON-able): names, sizes, times, versions. Changes when they do.
  """

  parts: list[tuple]
  identity: dict[str, Any]

  def __init__(self, spec: str, split: str, config: DataConfig):
    self.spec = spec
    # Where the text and, with prompts, the prompt stand in a record, and what the config calls them
    self._fields = {"text_field": config.text_field}
    if config.prompt_field:
      self._fields["prompt_field"] = config.prompt_field
    self._template = config.prompt_template
    self._split = split
    # None: no part of the documents is held out
    self._held_out = None if config.validation_source else config.validation_fraction

  def read(self, part: tuple) -> Iterator[Document]:
    """Yields the part's documents, in order; empty ones are skipped.

    Raises:
      UserError: naming file and place, for what cannot be read.
    """
    for document in self._read(part):
      # Held out by the prompt where there is one, so that two answers to one question never lie on both sides
      if document.text and self._keeps(document.text if document.prompt is None else document.prompt):
        yield document

  def _document(self, text: bytes | str | None, prompt: bytes | str | None = None) -> Document:
    """A document of a record's fields, in the order of self._fields."""
    answer, replaced = decode(text)
    if len(self._fields) == 1:
      return Document(answer, replaced)
    asked, prompt_replaced = decode(prompt)
    return Document(answer, replaced or prompt_replaced, self._template.replace("{prompt}", asked))

  def _keeps(self, text: str) -> bool:
    if self._held_out is None:
      return True
    return stdlib_corpus.held_out(hashlib.sha256(text.encode("utf-8")).digest(), self._held_out) == (self._split == "validation")

  @abc.abstractmethod
  def _read(self, part: tuple) -> Iterator[Document]:
    """Every document of the part, empty and held-out ones too."""


def decode(raw: bytes | str | None) -> tuple[str, bool]:
  """Text that can be written as UTF-8, whatever was stored, and whether some of it had to be replaced."""
  if raw is None:
    return "", False
  try:
    if isinstance(raw, str):
      raw.encode("utf-8")  # JSON may hold half a surrogate pair
      return raw, False
    return raw.decode("utf-8"), False
  except UnicodeError:
    raw = raw.encode("utf-8", errors="surrogatepass") if isinstance(raw, str) else raw
    return raw.decode("utf-8", errors="replace"), True


def reason(error: Exception) -> str:
  """What a library's exception says, in one line."""
  return " ".join(str(error).split()) or type(error).__name__


def lookup(record: Any, path: str) -> Any:
  """What stands in a record at the names and list indices of a path, "a.0.b", or under that very name; ... where nothing does."""
  if isinstance(record, dict) and path in record:
    return record[path]
  for name in path.split("."):
    if isinstance(record, dict):
      record = record.get(name, ...)
    elif isinstance(record, list) and re.fullmatch(r"-?[0-9]{1,9}", name) and -len(record) <= int(name) < len(record):
      record = record[int(name)]
    else:
      return ...
  return record


def is_text(field: str, value: Any) -> bool:
  """A record without text is skipped; one without a prompt is a mistake."""
  return isinstance(value, bytes | str) or (value is None and field == "text_field")
