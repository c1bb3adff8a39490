"""One writer a workdir."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from typing import TextIO

from etils import epath

from diffjax.config import UserError

# The lock files that this process has locked, by device and inode. The kernel
# refuses a lock to other processes only, not to other threads.
_locked_files: set[tuple[int, int]] = set()
_locked_files_guard = threading.Lock()


class LostWorkdir(UserError):
  """The lock file at a workdir's path is not the one that was locked."""


class WorkdirLock:
  """A lock that is held on a workdir. `lock` returns one."""

  def __init__(self, path: epath.Path | None, identity: tuple[int, int] | None):
    """Takes note of the locked file.

    Args:
      path: The lock file; None in an object store, which has no lock.
      identity: Device and inode of the lock file.
    """
    self._path = path
    self._identity = identity

  def check(self) -> None:
    """Raises LostWorkdir if the path leads to another lock file, or to none."""
    if self._path is None:
      return
    try:
      identity = _identity(self._path)
    except OSError:
      return  # An I/O error does not show that the workdir was moved.
    if identity == self._identity:
      return
    raise LostWorkdir(
      f"{self._path.parent} is no longer the directory that this run has"
      " locked: the directory or its file 'lock' was moved, deleted or replaced"
      " while the run used it. The run ends without writing there; to continue"
      " from its last checkpoint, pass the directory's new place as --workdir"
    )


@contextlib.contextmanager
def lock(workdir: epath.PathLike) -> Iterator[WorkdirLock]:
  """Keeps every other run from writing in a workdir inside the context.

  The kernel releases the lock if the process dies. Object stores have no locks:
  nothing is done for gs:// paths.

  Args:
    workdir: The run's directory; made if it is not there.

  Yields:
    The lock. Its `check` tells whether the workdir has been moved or replaced.

  Raises:
    UserError: if another run holds it, or it cannot be written.
  """
  if "://" in os.fspath(workdir):
    yield WorkdirLock(None, None)
    return
  path = epath.Path(workdir).expanduser() / "lock"
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    file, identity = _acquire(path)
  except OSError as error:
    raise UserError(
      f"cannot write in the workdir {path.parent}: {error.strerror}"
    ) from error
  try:
    # Shown by `_in_use`. A full disk may refuse it.
    with contextlib.suppress(OSError):
      file.truncate(0)
      file.write(f"process {os.getpid()} on {socket.gethostname()}")
      file.flush()
    held = WorkdirLock(path, identity)
    # The directory may have been replaced before the file was locked.
    held.check()
    yield held
  finally:
    _release(file, identity)


def _acquire(path: epath.Path) -> tuple[TextIO, tuple[int, int]]:
  """Opens and locks a lock file.

  Returns:
    The open file, and its device and inode.

  Raises:
    OSError: if it cannot be opened.
    UserError: if it is locked, by this process or another one.
  """
  with _locked_files_guard:
    # Checked before the file is opened: closing any descriptor of a file frees
    # all locks that this process has on it.
    if _identity(path) in _locked_files:
      raise _in_use(path, f"another run of this process ({os.getpid()})")
    file = open(path, "a+", encoding="utf-8")
    try:
      # Not flock: a forked child would share that lock and keep it after a kill.
      # This one belongs to the process alone.
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      with file:
        file.seek(0)
        holder = file.read().strip() or "another process"
      raise _in_use(path, holder) from error
    status = os.fstat(file.fileno())
    identity = status.st_dev, status.st_ino
    _locked_files.add(identity)
    return file, identity


def _release(file: TextIO, identity: tuple[int, int]) -> None:
  with _locked_files_guard:
    _locked_files.remove(identity)
    file.close()


def _in_use(path: epath.Path, holder: str) -> UserError:
  return UserError(
    f"{path.parent} is in use by {holder}: wait until it ends, stop it, or use another --workdir"
  )


def _identity(path: epath.Path) -> tuple[int, int] | None:
  """Returns a file's device and inode, or None if there is no such file."""
  try:
    status = os.stat(path)
  except (FileNotFoundError, NotADirectoryError):
    return None
  return status.st_dev, status.st_ino
