"""A lock that lets one process at a time write in a workdir."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from typing import NamedTuple, TextIO

from etils import epath

from diffjax.config import UserError
from diffjax.host.files import is_remote


class _FileId(NamedTuple):
  """Identifies a file, independently of its path."""

  device: int
  inode: int


class _LockedFile(NamedTuple):
  """An open file that this process has locked."""

  file: TextIO
  file_id: _FileId


# The lock files that this process has locked. They are refused to its other
# threads here, because the kernel refuses a lock to other processes only.
_locked_files: set[_FileId] = set()
_locked_files_guard = threading.Lock()


class LostWorkdir(UserError):
  """The path of a workdir no longer leads to the locked file."""


class WorkdirLock:
  """A lock that is held on a workdir. `lock` returns one."""

  def __init__(self, path: epath.Path | None, file_id: _FileId | None):
    """Stores which file is locked.

    Args:
      path: The lock file. None in an object store, which has no lock.
      file_id: Identifies the lock file. None in an object store.
    """
    self._path = path
    self._file_id = file_id

  def check(self) -> None:
    """Checks that the path still leads to the locked file.

    Raises:
      LostWorkdir: if the workdir or its lock file was moved or replaced.
    """
    if self._path is None:
      return
    try:
      file_id = _find_file_id(self._path)
    except OSError:
      # An I/O error does not show that the workdir was moved.
      return
    if file_id == self._file_id:
      return
    raise LostWorkdir(
      f"{self._path.parent} is no longer the directory that this run has"
      " locked: the directory or its file 'lock' was moved, deleted or replaced"
      " while the run used it. The run ends without writing there; to continue"
      " from its last checkpoint, pass the directory's new place as --workdir"
    )


@contextlib.contextmanager
def lock(workdir: epath.PathLike) -> Iterator[WorkdirLock]:
  """Prevents other runs from writing in a workdir inside the context.

  The kernel releases the lock if the process dies. Object stores have no locks,
  so nothing is done for gs:// paths.

  Args:
    workdir: The run's directory. It is created if it does not exist.

  Yields:
    The lock. Its `check` raises if the workdir has been moved or replaced.

  Raises:
    UserError: if another run holds the lock, or the workdir cannot be written.
  """
  if is_remote(workdir):
    yield WorkdirLock(None, None)
    return
  path = epath.Path(workdir).expanduser() / "lock"
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    locked = _acquire(path)
  except OSError as error:
    raise UserError(
      f"cannot write in the workdir {path.parent}: {error.strerror}"
    ) from error
  try:
    _write_holder(locked.file)
    workdir_lock = WorkdirLock(path, locked.file_id)
    # The directory may have been replaced before the file was locked.
    workdir_lock.check()
    yield workdir_lock
  finally:
    _release(locked)


def _acquire(path: epath.Path) -> _LockedFile:
  """Opens and locks a lock file.

  Args:
    path: The lock file. It is created if it does not exist.

  Raises:
    OSError: if it cannot be opened.
    UserError: if it is locked, by this process or another one.
  """
  with _locked_files_guard:
    # This must be checked before the file is opened. Closing any descriptor of
    # a file releases all locks that this process has on the file.
    if _find_file_id(path) in _locked_files:
      raise _in_use(path, f"another run of this process ({os.getpid()})")
    file = open(path, "a+", encoding="utf-8")
    try:
      # This lock belongs to the process alone. With flock, a forked child would
      # share it, and keep it after this process was killed.
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      with file:
        holder = _read_holder(file)
      raise _in_use(path, holder) from error
    file_id = _to_file_id(os.fstat(file.fileno()))
    _locked_files.add(file_id)
    return _LockedFile(file, file_id)


def _read_holder(file: TextIO) -> str:
  """Returns the process that `_write_holder` has written to a lock file."""
  file.seek(0)
  return file.read().strip() or "another process"


def _write_holder(file: TextIO) -> None:
  """Writes this process into the lock file, for the messages of others."""
  # A full disk may refuse this. The lock holds all the same.
  with contextlib.suppress(OSError):
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _release(locked: _LockedFile) -> None:
  """Closes a lock file, which releases the lock."""
  with _locked_files_guard:
    _locked_files.remove(locked.file_id)
    locked.file.close()


def _in_use(path: epath.Path, holder: str) -> UserError:
  """Returns the error for a lock that another run holds.

  Args:
    path: The lock file.
    holder: The process of the other run.
  """
  return UserError(
    f"{path.parent} is in use by {holder}: wait until it ends, stop it, or use"
    " another --workdir"
  )


def _find_file_id(path: epath.Path) -> _FileId | None:
  """Returns the id of the file at a path, or None if there is no file."""
  try:
    return _to_file_id(os.stat(path))
  except (FileNotFoundError, NotADirectoryError):
    return None


def _to_file_id(status: os.stat_result) -> _FileId:
  """Returns the id of a file with the given status."""
  return _FileId(status.st_dev, status.st_ino)
