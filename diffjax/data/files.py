"""Files of a source: local, in a bucket (gs://) or on the Hub (hf://)."""

from __future__ import annotations

import glob
import os
from typing import BinaryIO, NamedTuple, cast

from etils import epath

from diffjax.data import local_glob
from diffjax.host.files import is_remote

_HUB = "hf://"
_NS_PER_SECOND = 1_000_000_000


class File(NamedTuple):
  """A file of a source.

  Attributes:
    path: The path that is opened. On the Hub it contains the commit.
    size: Bytes.
    time: Time of the last change in whole seconds. 0 on the Hub. Only for
      comparisons with values that earlier versions stored.
    time_ns: The same in nanoseconds. In a bucket it is a multiple of a second.
    name: The path as the user knows it. On the Hub it contains the revision
      of the source, if the source has one.
    content_id: A hash of the content on the Hub. "" elsewhere.
  """

  path: str
  size: int
  time: float
  time_ns: int
  name: str
  content_id: str = ""


def is_on_hub(path: str) -> bool:
  """Returns whether a path is on the Hugging Face Hub."""
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
    return _match_on_hub(pattern)
  files = []
  for path in match_paths(os.path.expanduser(pattern)):
    size, time_ns = version(path)
    file = File(
      path=path,
      size=size,
      time=time_ns // _NS_PER_SECOND,
      time_ns=time_ns,
      name=path,
    )
    files.append(file)
  return files


def _match_on_hub(pattern: str) -> list[File]:
  """Returns the files on the Hub that match a glob, sorted by name."""
  from diffjax.data import hub

  files = []
  for hub_file in hub.list_files(pattern):
    file = File(
      path=hub_file.path,
      size=hub_file.size,
      # A float, because the digests in checkpoints of version 0.1.0 are of a
      # text with "0.0". "0" would give another digest.
      time=0.0,
      time_ns=0,
      name=hub_file.name,
      content_id=hub_file.content_id,
    )
    files.append(file)
  return files


def match_paths(pattern: str) -> list[str]:
  """Returns the paths of files that match a glob, local or gs://, sorted.

  Raises:
    UserError: if a local directory or file cannot be read, or a link leads
      nowhere.
  """
  if is_remote(pattern):
    return _match_in_bucket(pattern)
  # "./a" becomes "a", as in the names that checkpoints and rows have.
  return [os.fspath(epath.Path(path)) for path in local_glob.match(pattern)]


def _match_in_bucket(pattern: str) -> list[str]:
  """Returns the paths of files in a bucket that match a glob, sorted.

  Only the directory before the first wildcard is searched.
  """
  parts = pattern.split("/")
  num_directories = len(parts) - 1
  for index, part in enumerate(parts):
    if glob.has_magic(part):
      num_directories = index
      break
  root = epath.Path("/".join(parts[:num_directories]))
  matching = root.glob("/".join(parts[num_directories:]))
  return sorted(os.fspath(path) for path in matching if path.is_file())


def open_file(path: str, read_ahead: bool = True) -> BinaryIO:
  """Opens a file for reading.

  Args:
    path: The path of a `File`.
    read_ahead: Whether to fetch large blocks from the Hub, for readers that go
      through a file in small steps.

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
  """Returns the size and the time of a file, a key for caches of its content.

  Returns:
    Its bytes, and the time of its last change in nanoseconds. Times in buckets
    are whole seconds.

  Raises:
    OSError: if there is no such file.
  """
  if is_on_hub(path):
    # The path contains the commit, so its content never changes.
    return 0, 0
  if is_remote(path):
    remote_status = epath.Path(path).stat()
    return remote_status.length, int(remote_status.mtime) * _NS_PER_SECOND
  status = os.stat(path)
  return status.st_size, status.st_mtime_ns
