"""Output that can become unwritable without ending the process.

This happens if the reader of a pipe ends, a terminal is closed, or a disk is
full.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

_STDOUT = 1
_STDERR = 2
_NAMES = {_STDOUT: "standard output", _STDERR: "standard error"}
_OTHER_STREAM = {_STDOUT: _STDERR, _STDERR: _STDOUT}


def drop_unwritable_output() -> None:
  """Makes this process drop output that cannot be written, without an error.

  So a run continues. Its figures are also in metrics.jsonl. If stdout or stderr
  fails, one line about this is written to the other one.
  """
  sys.stdout = _lasting_stream(sys.stdout, _STDOUT)
  sys.stderr = _lasting_stream(sys.stderr, _STDERR)


def _lasting_stream(stream: Any, descriptor: int) -> Any:
  """Returns a text stream that drops what cannot be written.

  Args:
    stream: stdout or stderr, whose settings are copied.
    descriptor: The number of its file.
  """
  # Python sets a stream that was closed from the start to None, and then drops
  # what is printed.
  if stream is None:
    return None
  with contextlib.suppress(OSError):
    stream.flush()
  file = io.BufferedWriter(_LastingFile(descriptor))
  return io.TextIOWrapper(
    file,
    stream.encoding,
    stream.errors,
    line_buffering=stream.line_buffering,
    write_through=stream.write_through,
  )


class _LastingFile(io.FileIO):
  """stdout or stderr, which drops what cannot be written."""

  def __init__(self, descriptor: int):
    super().__init__(descriptor, "w", closefd=False)
    self._has_failed = False

  def write(self, data: Any, /) -> int | None:  # type: ignore[override]
    try:
      return super().write(data)
    except OSError as error:
      # Only the first error is reported.
      if not self._has_failed:
        self._has_failed = True
        self._report(error)
      # The caller takes the data for written.
      return len(data)

  def _report(self, error: OSError) -> None:
    """Writes a line about an error to stderr if stdout failed, or vice versa.

    Args:
      error: The error.
    """
    descriptor = self.fileno()
    line = (
      f"diffjax: cannot write to {_NAMES[descriptor]} ({error.strerror});"
      " training goes on, and metrics.jsonl has its figures\n"
    )
    with contextlib.suppress(OSError):
      os.write(_OTHER_STREAM[descriptor], line.encode())
