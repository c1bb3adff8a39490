"""The user's cache directory, for files that diffjax can create again.

These are the embedded corpus, prepared rows and compiled programs.
"""

from __future__ import annotations

import os

from etils import epath


def cache_directory(*parts: str) -> epath.Path:
  """Returns the path of a directory in the cache. Does not create it.

  The cache is ``$XDG_CACHE_HOME/diffjax``, or ``~/.cache/diffjax`` if the
  variable is unset or empty.

  Example: ``cache_directory("rows", "0")`` → ``~/.cache/diffjax/rows/0``

  Args:
    *parts: Names of nested directories, the outermost first.
  """
  root = os.environ.get("XDG_CACHE_HOME")
  if not root:
    root = os.path.join(os.path.expanduser("~"), ".cache")
  return epath.Path(os.path.join(root, "diffjax", *parts))
