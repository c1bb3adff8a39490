"""Errors of a process whose address space is limited (ulimit -v).

ArrayRecord hangs if the limit is too low. When it opens its first file, it
starts 64 threads. Each has its own stack and heap. Together they take some GiB
of addresses. If one thread cannot start, the others wait for it endlessly.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

from diffjax.config import UserError

# The threads of ArrayRecord start within milliseconds.
START_TIMEOUT_SECONDS = 20.0


def limit() -> str:
  """Returns a sentence about the limit of the address space, for a message.

  Returns "" if the address space is not limited.
  """
  size, _ = resource.getrlimit(resource.RLIMIT_AS)
  if size == resource.RLIM_INFINITY:
    return ""
  return (
    f"the address space is limited to {size / 2**30:.1f} GiB (ulimit -v): raise"
    " the limit, or lift it with ulimit -v unlimited"
  )


@contextlib.contextmanager
def explained(doing: str, remedy: str) -> Iterator[None]:
  """Turns an out-of-memory error inside the context into a UserError.

  An error because no thread could start counts too: a thread needs addresses
  for its stack.

  Args:
    doing: What the context does, for the message. Example: "reading a file".
    remedy: What the user can do if the address space is not limited.

  Raises:
    UserError: if there is not enough memory.
  """
  try:
    yield
  except MemoryError as error:
    raise _out_of_memory(doing, remedy) from error
  except RuntimeError as error:
    if "start new thread" not in str(error):
      raise
    raise _out_of_memory(doing, remedy) from error


def _out_of_memory(doing: str, remedy: str) -> UserError:
  """Returns the error that says what ran out of memory, and what helps.

  Args:
    doing: What ran out of memory.
    remedy: What helps if the address space is not limited.
  """
  advice = limit()
  if not advice:
    advice = remedy
  return UserError(f"out of memory while {doing}: {advice}")


def check_array_record(path: str) -> None:
  """Checks that ArrayRecord can start its threads, by opening a file.

  Does nothing if the address space is not limited.

  Args:
    path: An ArrayRecord file. A missing or damaged file is not an error here.

  Raises:
    UserError: if the threads do not start.
  """
  if not limit():
    return
  opened = threading.Event()
  # This thread waits endlessly if ArrayRecord does.
  threading.Thread(target=_open, args=(path, opened), daemon=True).start()
  if not opened.wait(START_TIMEOUT_SECONDS):
    raise UserError(
      f"{path}: the threads that read this file do not start; {limit()}"
    )


def _open(path: str, opened: threading.Event) -> None:
  """Opens and closes an ArrayRecord file, and then sets an event."""
  from array_record.python import array_record_module

  # A missing or damaged file raises many kinds of errors. They are reported
  # when the file is read.
  with contextlib.suppress(Exception):
    reader = array_record_module.ArrayRecordReader(
      path, "readahead_buffer_size:0"
    )
    reader.close()
  opened.set()
