"""Writes files completely or not at all, local or in a bucket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# etils takes a while to import, and commands import this module before they
# read their flags.
if TYPE_CHECKING:
  from etils import epath

_TEMPORARY_SUFFIX = ".tmp"


def is_remote(path: epath.PathLike) -> bool:
  """Returns True if a path is a URL, such as gs://bucket/file."""
  return "://" in os.fspath(path)


def write_atomically(
  path: epath.PathLike,
  content: bytes | str,
  *,
  temporary_suffix: str = _TEMPORARY_SUFFIX,
) -> None:
  """Replaces the content of a file at once.

  Readers see either all of the old content or all of the new, even if the disk
  is full or the process is killed. A kill may leave the temporary file.

  Args:
    path: The file; local or gs://. Its directory must exist.
    content: Its bytes. Text is encoded as UTF-8.
    temporary_suffix: As for `replaced_at_the_end`.

  Raises:
    OSError: if the file cannot be written. The old content is unchanged.
  """
  from etils import epath

  if isinstance(content, str):
    content = content.encode("utf-8")
  if is_remote(path):
    # An object store writes whole objects only.
    epath.Path(path).write_bytes(content)
    return
  with replaced_at_the_end(path, temporary_suffix) as temporary:
    temporary.write_bytes(content)


@contextlib.contextmanager
def replaced_at_the_end(
  path: epath.PathLike, temporary_suffix: str = _TEMPORARY_SUFFIX
) -> Iterator[epath.Path]:
  """Replaces a local file by one that the body of the context writes.

  The body writes a temporary file, which is renamed at the end. If the body
  raises, the old file is unchanged and the temporary one is deleted. A kill may
  leave the temporary file.

  Args:
    path: The file.
    temporary_suffix: Added to the file's name for the temporary file. Two
      processes that may write the same file at the same time need different
      suffixes.

  Example:
    with replaced_at_the_end("loss.png") as temporary:
      figure.savefig(temporary)

  Yields:
    The path of the temporary file, in the same directory.
  """
  from etils import epath

  target = epath.Path(path)
  temporary = target.parent / f"{target.name}{temporary_suffix}"
  try:
    yield temporary
    temporary.replace(target)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink(missing_ok=True)
    raise
