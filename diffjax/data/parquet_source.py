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
    parquet.read_footers(list(self._size_by_path))
    return super().parts

  def iter_parts(self) -> Iterator[RowGroup]:
    is_empty = True
    for path in self._size_by_path:
      for number in parquet.row_groups(path):
        is_empty = False
        yield RowGroup(path, number)
    if is_empty:
      raise UserError(
        f"config.data.source {self.spec!r}: empty: its files hold no rows"
      )

  def part_size(self, part: RowGroup) -> float:
    # Row groups share the size of the footer, in proportion to their own sizes.
    sizes = parquet.row_group_sizes(part.path)
    return self._size_by_path[part.path] * sizes[part.number] / sum(sizes)

  def _read(self, part: RowGroup) -> Iterator[tuple[float, Document]]:
    import pyarrow

    file = parquet.open_parquet(part.path)
    columns = self._find_columns(part.path, file.schema_arrow.names)
    num_rows = file.metadata.row_group(part.number).num_rows
    row = 0
    try:
      for batch in file.iter_batches(
        batch_size=_BATCH_ROWS,
        row_groups=[part.number],
        columns=_without_repeats(columns),
      ):
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
    """Returns the column of each of `self._field_paths`.

    A column is named by the whole path or by its beginning, as "record" is in
    "record.text".
    """
    columns = []
    for field, field_path in self._field_paths.items():
      column = field_path
      if column not in names:
        column = field_path.partition(".")[0]
      if column not in names:
        raise UserError(
          f"{path}: has no column config.data.{field} = {field_path!r}; its"
          f" columns are {', '.join(names)}"
        )
      columns.append(column)
    return columns

  def _texts_of_rows(
    self, batch: Any, columns: list[str]
  ) -> Iterator[list[Any]]:
    """Yields the values of `self._field_paths` in each row of a batch."""
    values_by_path = []
    for path, column in zip(self._field_paths.values(), columns, strict=True):
      cells = _to_python(batch.column(column))
      values_by_path.append([lookup({column: cell}, path) for cell in cells])
    for values in zip(*values_by_path, strict=True):
      yield list(values)

  def _check_texts(
    self, values: list[Any], part: RowGroup, row: int, schema: Any
  ) -> None:
    """Raises UserError if a value of a row is not text."""
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
