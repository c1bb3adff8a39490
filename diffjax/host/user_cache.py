"""The user's cache directory, for files that diffjax can make again: the embedded corpus, prepared rows, compiled programs."""

from __future__ import annotations

import os

from etils import epath


def cache_directory(*parts: str) -> epath.Path:
  """``$XDG_CACHE_HOME/diffjax/…``, or ``~/.cache/diffjax/…``. Not created."""
  root = os.environ.get("XDG_CACHE_HOME") or os.path.join(
    os.path.expanduser("~"), ".cache"
  )
  return epath.Path(os.path.join(root, "diffjax", *parts))
