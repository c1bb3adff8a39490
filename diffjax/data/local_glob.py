"""Globs of local files that neither skip files nor repeat them.

`glob.glob` silently skips directories that it cannot read and links to nothing.
With "**" it follows a link to a directory above it up to forty times, and a
pattern with two "**" gives a path twice. Here unreadable directories and
dangling links are errors, and "**" searches each directory once.

A link to a file counts like the file: a file that matches under two names is
read twice. So a user can still repeat a file on purpose.
"""

from __future__ import annotations

import collections
import fnmatch
import glob
import operator
import os
import stat

from diffjax.config import UserError
from diffjax.data.document import reason

# A directory that some file systems have, and only root can read.
_LOST_AND_FOUND = "lost+found"


def match(pattern: str) -> list[str]:
  """Returns the regular files that match a glob, sorted, each path once.

  Args:
    pattern: A path with wildcards as in `glob.glob`. "**" crosses directories.
      Wildcards skip lost+found. They also skip names that begin with ".",
      unless the pattern of the name does.

  Raises:
    UserError: if a link on the way leads nowhere, or if a directory or a
      matching file cannot be read.
  """
  parent, name = os.path.split(pattern)
  if name == "**":
    # "**" at the end stands for "**/*", all files in all directories.
    parent, name = pattern, "*"
  paths = set()
  for directory in _match_directories(parent):
    for path in _match_names(directory, name):
      status = _status(path)
      is_file = status is not None and stat.S_ISREG(status.st_mode)
      if not is_file:
        continue
      if not os.access(path, os.R_OK):
        raise UserError(
          f"{path}: cannot be read (permission denied); make it readable, or"
          " use a pattern that does not match it"
        )
      paths.add(path)
  return sorted(paths)


def _match_directories(pattern: str) -> list[str]:
  """Returns the directories that match a glob; "" is the current one.

  Matches one part of the path after the other, from left to right.
  """
  if not glob.has_magic(pattern):
    if _is_directory(pattern or os.curdir):
      return [pattern]
    return []
  parent, name = os.path.split(pattern)
  parents = _match_directories(parent)
  if name == "**":
    return _match_double_star(parents)
  directories = []
  for directory in parents:
    for path in _match_names(directory, name):
      if _is_directory(path):
        directories.append(path)
  return directories


def _match_names(directory: str, pattern: str) -> list[str]:
  """Returns the paths of a directory's entries whose names match a pattern.

  A pattern without wildcards is returned whether or not it exists.
  """
  if not glob.has_magic(pattern):
    return [os.path.join(directory, pattern)]
  names = [entry.name for entry in _scan(directory)]
  if not pattern.startswith("."):
    names = [name for name in names if not _is_hidden(name)]
  matching = fnmatch.filter(names, pattern)
  return [os.path.join(directory, name) for name in matching]


def _match_double_star(roots: list[str]) -> list[str]:
  """Returns the directories that "**" matches, each once.

  These are the roots and all directories below them. Links are followed last,
  so a directory that can be reached directly is returned by its direct path,
  not by the path of a link to it.
  """
  directories = []
  visited = set()
  # Links to directories are appended, so they are followed after all roots.
  pending_roots = collections.deque(sorted(roots, key=os.path.islink))
  while pending_roots:
    # A depth-first search of one tree.
    pending = [pending_roots.popleft()]
    while pending:
      directory = pending.pop()
      real_path = os.path.realpath(directory)
      if real_path in visited:
        continue
      visited.add(real_path)
      directories.append(directory)
      for entry in _scan(directory):
        if _is_hidden(entry.name):
          continue
        path = os.path.join(directory, entry.name)
        if not entry.is_symlink():
          if entry.is_dir():
            pending.append(path)
        elif _is_directory(path):
          pending_roots.append(path)
  return directories


def _is_hidden(name: str) -> bool:
  """Returns whether wildcards skip a name."""
  return name.startswith(".") or name == _LOST_AND_FOUND


def _scan(directory: str) -> list[os.DirEntry[str]]:
  """Returns the entries of a directory, sorted by name. "" is the current one.

  Without the order, machines could choose different links to the same
  directory.

  Raises:
    UserError: if the directory cannot be read.
  """
  directory = directory or os.curdir
  try:
    with os.scandir(directory) as entries:
      return sorted(entries, key=operator.attrgetter("name"))
  except OSError as error:
    raise UserError(
      f"{directory}: the directory cannot be read ({reason(error)}), so its"
      " files would be missing; make it readable, or use a pattern that does"
      " not search it"
    ) from error


def _is_directory(path: str) -> bool:
  """Returns whether a path, or the target of a link, is a directory."""
  status = _status(path)
  return status is not None and stat.S_ISDIR(status.st_mode)


def _status(path: str) -> os.stat_result | None:
  """Returns the status of a path, or of a link's target. None if it is missing.

  Raises:
    UserError: if the path is a link to nothing, or cannot be read.
  """
  try:
    return os.stat(path)
  except (FileNotFoundError, NotADirectoryError) as error:
    if os.path.islink(path):
      raise UserError(
        f"{path}: a link to {os.readlink(path)!r}, which does not exist, so"
        " files would be missing; restore its target, or remove the link"
      ) from error
    return None
  except ValueError:
    # The path has a null character.
    return None
  except OSError as error:
    raise UserError(
      f"{path}: cannot be read ({reason(error)}); correct it, or use a"
      " pattern that does not match it"
    ) from error
