"""Where a process may take little address space (ulimit -v), what reads ArrayRecord files waits for ever: it is found out, and said.

The library starts 64 threads when it opens its first file, each with a stack and a heap of its own, some GiB of addresses in all. If one
cannot start, the others wait for it.
"""

from __future__ import annotations

import resource
import threading

from diffjax.config import UserError

_PATIENCE = 20.0  # seconds for the threads to start, which takes milliseconds


def limit() -> str:
  """The limit in words, for the end of a message; "" if there is none."""
  size = resource.getrlimit(resource.RLIMIT_AS)[0]
  if size == resource.RLIM_INFINITY:
    return ""
  return f"the address space is limited to {size / 2**30:.1f} GiB (ulimit -v): raise the limit, or lift it with ulimit -v unlimited"


def is_lacking(error: BaseException) -> bool:
  """True for an error that says that memory, or the address space of a thread, is lacking."""
  return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "start new thread" in str(error))


def check_array_record(path: str) -> None:
  """Opens an ArrayRecord file, if there is a limit, so that it is known that the library's threads start.

  Raises:
    UserError: if they do not.
  """
  if not limit():
    return
  opened = threading.Event()
  try:
    threading.Thread(target=_open, args=(path, opened), daemon=True).start()
    started = opened.wait(_PATIENCE)
  except RuntimeError as error:
    if not is_lacking(error):
      raise
    started = False
  if not started:
    raise UserError(f"{path}: the threads that read this file do not start; {limit()}")


def _open(path: str, opened: threading.Event) -> None:
  from array_record.python import array_record_module

  try:
    array_record_module.ArrayRecordReader(path, "readahead_buffer_size:0").close()
  except Exception:  # of many kinds: a missing or damaged file, of which its reader tells
    pass
  opened.set()
