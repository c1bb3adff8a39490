"""A dataset of documents, whose iterator can be saved and restored.

This is the part of streaming that knows its place in the files. All later steps
of the pipeline are Grain's datasets, whose states contain the state of the
iterator here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grain

from diffjax.config import UserError
from diffjax.data.document import Document, Part


class Documents(grain.IterDataset[Document]):
  """Dataset of the documents of a source, read part by part.

  The state of an iterator consists of the state of the parts' iterator and the
  number of documents that were taken from the current part.

  Args:
    parts: Dataset of the source's parts. It may repeat endlessly.
    read: Returns an iterator over the documents of a part.
    max_empty_parts: Maximum number of consecutive parts without documents.
      Without this limit, an empty source that repeats would be read endlessly.
    spec: The source, for messages.
  """

  def __init__(
    self,
    parts: grain.IterDataset[Part],
    read: Callable[[Part], Iterator[Document]],
    max_empty_parts: int,
    spec: str,
  ):
    super().__init__(parts)
    self._read = read
    self._max_empty_parts = max_empty_parts
    self._spec = spec

  def __iter__(self) -> grain.DatasetIterator[Document]:
    parts = self._parent.__iter__()
    return _DocumentIterator(
      parts, self._read, self._max_empty_parts, self._spec
    )


class _DocumentIterator(grain.DatasetIterator[Document]):
  """Iterator of `Documents`."""

  def __init__(
    self,
    parts: grain.DatasetIterator[Part],
    read: Callable[[Part], Iterator[Document]],
    max_empty_parts: int,
    spec: str,
  ):
    super().__init__(parts)
    self._read = read
    self._max_empty_parts = max_empty_parts
    self._spec = spec
    # The documents that remain in the current part. No part is open yet.
    self._documents: Iterator[Document] = iter(())
    # The state of the parts' iterator before the current part.
    self._part_state = parts.get_state()
    # The number of documents taken from the current part.
    self._num_taken = 0

  def __next__(self) -> Document:
    """Returns the next document, from the current or a later part.

    Raises:
      StopIteration: after the last document.
      UserError: if there are too many parts without documents.
    """
    num_opened_parts = 0
    while True:
      document = next(self._documents, None)
      if document is not None:
        self._num_taken += 1
        return document
      if num_opened_parts > self._max_empty_parts:
        raise UserError(
          f"config.data.source {self._spec!r}: empty: no document to train on"
          " (documents without text, and documents held out by"
          " config.data.validation_fraction, are not counted)"
        )
      self._open_next_part()
      num_opened_parts += 1

  def _open_next_part(self) -> None:
    """Starts to read the next part. Raises StopIteration after the last one."""
    part_state = self._parent.get_state()
    part = next(self._parent)
    self._part_state = part_state
    self._documents = self._read(part)
    self._num_taken = 0

  def get_state(self) -> dict[str, Any]:
    return {"part": self._part_state, "taken": self._num_taken}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues after the last document that was taken before `get_state`.

    Reads the current part again, because a part can only be read from its
    beginning.
    """
    self._parent.set_state(state["part"])
    self._part_state = state["part"]
    self._documents = iter(())
    self._num_taken = 0
    for _ in range(state["taken"]):
      next(self)
