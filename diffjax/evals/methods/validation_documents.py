"""The validation documents that suites measure models on, each as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from diffjax.data import sources
from diffjax.data.document import Document, Source
from diffjax.inference.trained import Trained


def validation_documents(
  trained: Trained, source: str = ""
) -> Iterator[Document]:
  """Returns the validation documents of a model's data, or of another source.

  The sources of a mixture are read one after the other, and their weights are
  ignored. All are opened at once, so that mistakes are reported before the
  first document is read. Rows of a fixed length come from `validation_rows`.

      for document in validation_documents(trained):
        ids = trained.tokenizer.encode(document.text)

  Args:
    trained: The model.
    source: Text, as in config.data.source. "" for the validation text of the
      model's data.

  Raises:
    UserError: if a source does not exist, is empty or cannot be read.
  """
  data = trained.config.data
  if source:
    data = dataclasses.replace(data, validation_source=source)
  # Without text for validation, it is a part of the training text.
  mixture = data.source
  field = "data.source"
  if data.validation_source:
    mixture = data.validation_source
    field = "data.validation_source"
  opened_sources = []
  for component in sources.parse_mixture(mixture, field):
    opened_sources.append(sources.documents(component.spec, "validation", data))
  return _read_all(opened_sources)


def _read_all(opened_sources: Sequence[Source]) -> Iterator[Document]:
  """Yields the documents of some sources, one source after the other."""
  for source in opened_sources:
    for part in source.parts:
      yield from source.read(part)
