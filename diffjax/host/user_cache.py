"""The user's cache directory, for files that diffjax can create again.

These are the embedded corpus, prepared rows and compiled programs.
"""

from __future__ import annotations

import os

from etils import epath


def cache_directory(*parts: str) -> epath.Path:
  """Returns a path in the cache directory. Does not create it.

  Args:
    *parts: Names of directories: ("rows", "0") for
      ``$XDG_CACHE_HOME/diffjax/rows/0``, or ``~/.cache/diffjax/rows/0`` if
      the variable is not set or empty.
  """
  root = os.environ.get("XDG_CACHE_HOME")
  if not root:
    root = os.path.join(os.path.expanduser("~"), ".cache")
  return epath.Path(os.path.join(root, "diffjax", *parts))
