"""Files of a source: local, in a bucket (gs://) or on the Hub (hf://)."""

from __future__ import annotations

import os
from typing import BinaryIO, NamedTuple, cast

from etils import epath

from diffjax.data import local_glob

_HUB = "hf://"
_WILDCARDS = "*?["
_NS_PER_SECOND = 1_000_000_000


class File(NamedTuple):
  """A file of a source.

  Attributes:
    path: The path that is opened. On the Hub it contains the commit.
    size: Bytes.
    time: Time of the last change in whole seconds; 0 on the Hub.
    time_ns: The same in nanoseconds. In a bucket it is a multiple of a second.
    name: The path as the user knows it. On the Hub it contains the revision
      of the source, if the source has one.
    content_id: A hash of the content on the Hub; "" elsewhere.
  """

  path: str
  size: int
  time: float
  time_ns: int
  name: str
  content_id: str = ""


def is_on_hub(path: str) -> bool:
  """Returns whether a path is one of the Hugging Face Hub."""
  return path.startswith(_HUB)


def match(pattern: str) -> list[File]:
  """Returns the files that match a glob, sorted by name.

  Args:
    pattern: A path with wildcards. "**" crosses directories.

  Raises:
    UserError: if the Hub cannot be read, or nothing there matches; if a local
      directory or file cannot be read, or a link leads nowhere.
  """
  if is_on_hub(pattern):
    from diffjax.data import hub

    return [
      # A float, since checkpoints of 0.1.0 have a digest of 0.0.
      File(file.path, file.size, 0.0, 0, file.name, file.content_id)
      for file in hub.list_files(pattern)
    ]
  files = []
  for path in match_paths(os.path.expanduser(pattern)):
    size, time_ns = version(path)
    files.append(File(path, size, time_ns // _NS_PER_SECOND, time_ns, path))
  return files


def match_paths(pattern: str) -> list[str]:
  """Returns the paths of files that match a glob, local or gs://, sorted.

  Raises:
    UserError: if a local directory or file cannot be read, or a link leads
      nowhere.
  """
  if "://" not in pattern:
    # "./a" becomes "a", as in the names that checkpoints and rows have.
    return [os.fspath(epath.Path(path)) for path in local_glob.match(pattern)]
  parts = pattern.split("/")
  num_fixed = len(parts) - 1
  for index, part in enumerate(parts):
    if any(wildcard in part for wildcard in _WILDCARDS):
      num_fixed = index
      break
  root = epath.Path("/".join(parts[:num_fixed]))
  matching = root.glob("/".join(parts[num_fixed:]))
  return sorted(os.fspath(path) for path in matching if path.is_file())


def open_file(path: str, read_ahead: bool = True) -> BinaryIO:
  """Opens a file for reading.

  Args:
    path: The path of a `File`.
    read_ahead: Whether to fetch more than is asked for from the Hub, for
      readers that go through a file in small steps.

  Raises:
    OSError: if the file cannot be opened.
    UserError: if the Hub cannot be read. Reading raises it too.
  """
  if is_on_hub(path):
    from diffjax.data import hub

    return hub.open_file(path, read_ahead)
  return cast(BinaryIO, epath.Path(path).open("rb"))


def read_bytes(path: str) -> bytes:
  """Returns the content of a file.

  Args:
    path: The path of a `File`.

  Raises:
    OSError: if the file cannot be read.
    UserError: if the Hub cannot be read.
  """
  with open_file(path, read_ahead=False) as file:
    return file.read()


def version(path: str) -> tuple[int, int]:
  """Returns (size, time of the last change in nanoseconds) of a file.

  A key for caches of its content. Buckets have times in whole seconds.

  Raises:
    OSError: if there is no such file.
  """
  if is_on_hub(path):
    return 0, 0  # the path contains the commit
  if "://" in path:
    remote = epath.Path(path).stat()
    return remote.length, int(remote.mtime) * _NS_PER_SECOND
  local = os.stat(path)
  return local.st_size, local.st_mtime_ns
