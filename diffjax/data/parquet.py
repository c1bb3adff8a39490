"""Parquet files, local or remote. Each process reads their footers once.

A footer describes all row groups and columns. For a file of FineWeb-Edu, which
has 700 row groups, it is over 1 MB, and 7 MB in memory after parsing. A
shuffled stream returns to each of a hundred files many times. Therefore the
last footers are stored compressed, and are parsed again when they are needed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from diffjax.config import UserError
from diffjax.data import files
from diffjax.data.document import reason
from diffjax.host.files import is_remote

# Footers that are stored compressed, about 0.3 MB each.
_MAX_FOOTERS = 1024

# Footers that are stored after parsing. Two are enough if files are read one
# after the other.
_MAX_PARSED_FOOTERS = 2

# Threads that read the footers of remote files.
_NUM_THREADS = 16


def open_parquet(path: str) -> Any:
  """Opens a Parquet file for reading row groups.

  Args:
    path: The path of a `File`.

  Returns:
    A `pyarrow.parquet.ParquetFile`. Reads only the columns that are asked for.

  Raises:
    UserError: if the file cannot be read or is not a Parquet file.
  """
  import pyarrow.parquet

  metadata = read_metadata(path)
  with _explain_errors(path):
    return pyarrow.parquet.ParquetFile(
      files.open_file(path, read_ahead=False),
      metadata=metadata,
      # Only some files have checksums.
      page_checksum_verification=True,
    )


def read_metadata(path: str) -> Any:
  """Returns the metadata of a file, a `pyarrow.parquet.FileMetaData`.

  Args:
    path: The path of a `File`.

  Raises:
    UserError: if the file cannot be read or is not a Parquet file.
  """
  with _explain_errors(path):
    return _cached_metadata(path, files.version(path))


def nonempty_row_groups(path: str) -> tuple[int, ...]:
  """Returns the indices of the row groups of a file that have rows.

  Args:
    path: The path of a `File`.

  Raises:
    UserError: if the file cannot be read or is not a Parquet file.
  """
  with _explain_errors(path):
    return _cached_row_groups(path, files.version(path))


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


def cache_remote_footers(paths: Sequence[str]) -> None:
  """Fills this process's caches with the footers of remote files, in parallel.

  Each footer takes a request or two. The other functions of this module would
  request them one after the other.

  Args:
    paths: The paths of files. Local ones are not read.

  Raises:
    UserError: if a file cannot be read or is not a Parquet file.
  """
  remote_paths = [path for path in paths if is_remote(path)]
  if len(remote_paths) < 2:
    # A single footer is read when it is needed, without threads.
    return
  num_threads = min(_NUM_THREADS, len(remote_paths))
  pool = concurrent.futures.ThreadPoolExecutor(num_threads)
  try:
    # Its result is not needed here, but stays in the caches.
    calls = [pool.submit(nonempty_row_groups, path) for path in remote_paths]
    for call in calls:
      # Raises the error of the call, if there was one.
      call.result()
  finally:
    # After an error, the calls that have not started yet are dropped.
    pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _explain_errors(path: str) -> Iterator[None]:
  """Converts errors of pyarrow in the body to a UserError with the path."""
  import pyarrow

  try:
    yield
  except (pyarrow.ArrowException, OSError) as error:
    raise UserError(
      f"{path}: cannot be read as a Parquet file ({reason(error)})"
    ) from error


# The keys of the caches contain the version of a file, which is its size and
# time. So a file that is written again is read again.


def clear_caches() -> None:
  """Removes all footers from memory, so that they are read again."""
  _cached_row_groups.cache_clear()
  _cached_metadata.cache_clear()
  _cached_footer.cache_clear()


@functools.lru_cache(maxsize=_MAX_FOOTERS)
def _cached_row_groups(path: str, version: tuple[int, int]) -> tuple[int, ...]:
  """Returns the indices of the row groups that have rows."""
  metadata = _cached_metadata(path, version)
  indices = []
  for index in range(metadata.num_row_groups):
    if metadata.row_group(index).num_rows > 0:
      indices.append(index)
  return tuple(indices)


@functools.lru_cache(maxsize=_MAX_PARSED_FOOTERS)
def _cached_metadata(path: str, version: tuple[int, int]) -> Any:
  """Returns the metadata of a file, parsed from its cached footer."""
  import pyarrow.parquet

  footer = zlib.decompress(_cached_footer(path, version))
  return pyarrow.parquet.read_metadata(io.BytesIO(footer))


@functools.lru_cache(maxsize=_MAX_FOOTERS)
def _cached_footer(path: str, version: tuple[int, int]) -> bytes:
  """Returns a file's footer, as a Parquet file without data, compressed."""
  import pyarrow.parquet

  # Only a part of the cache's key.
  del version
  with files.open_file(path, read_ahead=False) as file:
    metadata = pyarrow.parquet.read_metadata(file)
  footer = io.BytesIO()
  metadata.write_metadata_file(footer)
  return zlib.compress(footer.getvalue(), level=1)
