"""Where a process may take little address space (ulimit -v), what reads ArrayRecord files waits for ever: it is found out, and said.

The library starts 64 threads when it opens its first file, each with a stack and a heap of its own, some GiB of addresses in all. If one
cannot start, the others wait for it.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

from diffjax.config import UserError

_PATIENCE = 20.0  # seconds for the threads to start, which takes milliseconds


def limit() -> str:
  """The limit in words, for the end of a message; "" if there is none."""
  size = resource.getrlimit(resource.RLIMIT_AS)[0]
  if size == resource.RLIM_INFINITY:
    return ""
  return f"the address space is limited to {size / 2**30:.1f} GiB (ulimit -v): raise the limit, or lift it with ulimit -v unlimited"


@contextlib.contextmanager
def explained(doing: str, remedy: str) -> Iterator[None]:
  """Turns a lack of memory, or of addresses for a thread, into a UserError.

  Args:
    doing: What the context does.
    remedy: What the user can do where the address space is not limited.
  """
  try:
    yield
  except (MemoryError, RuntimeError) as error:
    if isinstance(error, RuntimeError) and "start new thread" not in str(error):
      raise
    raise UserError(
      f"out of memory while {doing}: {limit() or remedy}"
    ) from error


def check_array_record(path: str) -> None:
  """Opens an ArrayRecord file, if there is a limit, so that it is known that the library's threads start.

  Raises:
    UserError: if they do not.
  """
  if not limit():
    return
  opened = threading.Event()
  threading.Thread(target=_open, args=(path, opened), daemon=True).start()
  if not opened.wait(_PATIENCE):
    raise UserError(
      f"{path}: the threads that read this file do not start; {limit()}"
    )


def _open(path: str, opened: threading.Event) -> None:
  from array_record.python import array_record_module

  try:
    array_record_module.ArrayRecordReader(
      path, "readahead_buffer_size:0"
    ).close()
  except (
    Exception
  ):  # of many kinds: a missing or damaged file, of which its reader tells
    pass
  opened.set()
