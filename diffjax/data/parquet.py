"""Parquet files, local or remote, whose footers each process reads once.

A footer describes all row groups and columns. For a file of FineWeb-Edu, which
has 700 row groups, it is over 1 MB, and 7 MB once it is parsed. A shuffled
stream returns to each of a hundred files many times. Therefore the last footers
are kept compressed, and are parsed again when they are needed.
"""

from __future__ import annotations

import concurrent.futures
import functools
import io
import zlib
from collections.abc import Sequence
from typing import Any

from diffjax.config import UserError
from diffjax.data import files
from diffjax.data.document import reason

_KEPT_FOOTERS = 1024  # compressed, about 0.3 MB each
_KEPT_PARSED = 2  # enough if files are read one after the other
_THREADS = 16


def open_parquet(path: str) -> Any:
  """Opens a Parquet file for reading row groups.

  Args:
    path: The path of a `File`.

  Returns:
    A `pyarrow.parquet.ParquetFile`. Reads only the columns that are asked for.

  Raises:
    UserError: if the file cannot be read or is not a Parquet file.
  """
  import pyarrow
  import pyarrow.parquet

  metadata = read_metadata(path)
  try:
    return pyarrow.parquet.ParquetFile(
      files.open_file(path, read_ahead=False),
      metadata=metadata,
      page_checksum_verification=True,  # if the file has checksums
    )
  except (pyarrow.ArrowException, OSError) as error:
    raise _unreadable(path, error) from error


def read_metadata(path: str) -> Any:
  """Returns the metadata of a file, a `pyarrow.parquet.FileMetaData`.

  Args:
    path: The path of a `File`.

  Raises:
    UserError: if the file cannot be read or is not a Parquet file.
  """
  import pyarrow

  try:
    return _parsed(path, files.version(path))
  except (pyarrow.ArrowException, OSError) as error:
    raise _unreadable(path, error) from error


def row_groups(path: str) -> tuple[int, ...]:
  """Returns the indices of the row groups of a file that have rows.

  Args:
    path: The path of a `File`.

  Raises:
    UserError: if the file cannot be read or is not a Parquet file.
  """
  import pyarrow

  try:
    return _row_groups(path, files.version(path))
  except (pyarrow.ArrowException, OSError) as error:
    raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> UserError:
  return UserError(
    f"{path}: cannot be read as a Parquet file ({reason(error)})"
  )


def read_footers(paths: Sequence[str]) -> None:
  """Reads the footers of remote files ahead, several at a time.

  Args:
    paths: The paths of files. Local ones are not read.

  Raises:
    UserError: if a file cannot be read or is not a Parquet file.
  """
  remote = [path for path in paths if "://" in path]
  if len(remote) < 2:
    return
  pool = concurrent.futures.ThreadPoolExecutor(min(_THREADS, len(remote)))
  try:
    for _ in pool.map(row_groups, remote):
      pass
  finally:
    pool.shutdown(cancel_futures=True)


@functools.lru_cache(maxsize=_KEPT_FOOTERS)
def _row_groups(path: str, version: tuple[int, int]) -> tuple[int, ...]:
  metadata = _parsed(path, version)
  indices = []
  for index in range(metadata.num_row_groups):
    if metadata.row_group(index).num_rows:
      indices.append(index)
  return tuple(indices)


@functools.lru_cache(maxsize=_KEPT_PARSED)
def _parsed(path: str, version: tuple[int, int]) -> Any:
  """Returns the metadata of a version of a file."""
  import pyarrow.parquet

  footer = zlib.decompress(_footer(path, version))
  return pyarrow.parquet.read_metadata(io.BytesIO(footer))


@functools.lru_cache(maxsize=_KEPT_FOOTERS)
def _footer(path: str, version: tuple[int, int]) -> bytes:
  """Returns the footer of a version of a file, as a compressed file of its own.

  Args:
    path: The path of a file.
    version: Only a key of the cache.
  """
  import pyarrow.parquet

  del version
  with files.open_file(path, read_ahead=False) as file:
    metadata = pyarrow.parquet.read_metadata(file)
  footer = io.BytesIO()
  metadata.write_metadata_file(footer)
  return zlib.compress(footer.getvalue(), level=1)


def row_group_sizes(path: str) -> list[int]:
  """Returns the compressed bytes of each row group of a file.

  Args:
    path: The path of a `File`.

  Raises:
    UserError: if the file cannot be read or is not a Parquet file.
  """
  metadata = read_metadata(path)
  sizes = []
  for index in range(metadata.num_row_groups):
    row_group = metadata.row_group(index)
    size = 0
    for column in range(row_group.num_columns):
      size += row_group.column(column).total_compressed_size
    sizes.append(size)
  return sizes
