"""Parquet files. Each row is a document."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from diffjax.config import UserError
from diffjax.data import parquet
from diffjax.data.document import Document, Part, is_text, lookup, reason
from diffjax.data.file_source import FileSource

_BATCH_ROWS = 256


class RowGroup(NamedTuple):
  """A row group of a Parquet file.

  Attributes:
    path: The file.
    number: The index of the row group in the file.
  """

  path: str
  number: int


class ParquetSource(FileSource):
  """Parquet files. Each row is a document. A part is a RowGroup."""

  @functools.cached_property
  def parts(self) -> list[Part]:
    # All footers are needed. `iter_parts` alone would read one after the other.
    parquet.cache_remote_footers(list(self._size_by_path))
    return super().parts

  def iter_parts(self) -> Iterator[RowGroup]:
    """Yields the row groups that have rows, file by file."""
    num_row_groups = 0
    for path in self._size_by_path:
      for number in parquet.nonempty_row_groups(path):
        num_row_groups += 1
        yield RowGroup(path, number)
    if num_row_groups == 0:
      raise UserError(
        f"config.data.source {self.spec!r}: empty: its files hold no rows"
      )

  def part_size(self, part: RowGroup) -> float:
    """Returns the bytes of a row group, with its share of the footer."""
    # Row groups share the size of the footer, in proportion to their own sizes.
    sizes = parquet.row_group_sizes(part.path)
    return self._size_by_path[part.path] * sizes[part.number] / sum(sizes)

  def _read_all(self, part: RowGroup) -> Iterator[tuple[float, Document]]:
    """Yields the fraction of the rows that is read, and a row's document.

    Reads the rows in batches, so that a large row group takes little memory.
    """
    import pyarrow

    file = parquet.open_parquet(part.path)
    columns = self._find_columns(part.path, file.schema_arrow.names)
    num_rows = file.metadata.row_group(part.number).num_rows
    row = 0
    try:
      batches = file.iter_batches(
        batch_size=_BATCH_ROWS,
        row_groups=[part.number],
        columns=_without_repeats(columns),
      )
      for batch in batches:
        for values in self._texts_of_rows(batch, columns):
          self._check_texts(values, part, row, file.schema_arrow)
          row += 1
          yield row / num_rows, self._make_document(values)
    except (pyarrow.ArrowException, OSError) as error:
      raise UserError(
        f"{part.path}: row group {part.number} cannot be read beyond its row"
        f" {row} ({reason(error)}); the file may be damaged"
      ) from error

  def _find_columns(self, path: str, names: list[str]) -> list[str]:
    """Returns the names of the columns that hold the text and the prompt.

    config.data.text_field is a column or, for a field of a column of records,
    a path that begins with the column, such as "record.text". The same holds
    for prompt_field.

    Args:
      path: The file, for messages.
      names: The names of its columns.
    """
    columns = []
    for field, field_path in self._field_paths.items():
      first_name, _, _ = field_path.partition(".")
      if field_path in names:
        columns.append(field_path)
      elif first_name in names:
        columns.append(first_name)
      else:
        raise UserError(
          f"{path}: has no column config.data.{field} = {field_path!r}; its"
          f" columns are {', '.join(names)}"
        )
    return columns

  def _texts_of_rows(
    self, batch: Any, columns: list[str]
  ) -> Iterator[list[Any]]:
    """Yields the text, and the prompt if there are prompts, of each row.

    Args:
      batch: A `pyarrow.RecordBatch`.
      columns: The result of `_find_columns`.
    """
    values_by_field = []
    for path, column in zip(self._field_paths.values(), columns, strict=True):
      cells = _to_python(batch.column(column))
      # The path begins with the column's name, so it is looked up in a record
      # that has only this column.
      values = [lookup({column: cell}, path) for cell in cells]
      values_by_field.append(values)
    for values_of_row in zip(*values_by_field, strict=True):
      yield list(values_of_row)

  def _check_texts(
    self, values: list[Any], part: RowGroup, row: int, schema: Any
  ) -> None:
    """Raises UserError if the text or the prompt of a row is not text.

    The `pyarrow.Schema` of the file is used for the message.
    """
    for (field, path), value in zip(
      self._field_paths.items(), values, strict=True
    ):
      if is_text(field, value):
        continue
      columns = [f"{column.name} ({column.type})" for column in schema]
      raise UserError(
        f"{part.path}: config.data.{field} = {path!r} is not text in row {row}"
        f" of row group {part.number}; its columns are {', '.join(columns)}"
      )


def _without_repeats(names: list[str]) -> list[str]:
  """Returns the names in order, each once."""
  return list(dict.fromkeys(names))


def _to_python(column: Any) -> list[Any]:
  """Returns the values of a column as Python objects, text as bytes or str."""
  try:
    return column.to_pylist()
  except UnicodeDecodeError:
    # A column of strings that are not UTF-8. Arrow raises an error if the
    # strings are within lists or records.
    return column.cast("large_binary").to_pylist()
