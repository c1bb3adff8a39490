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


def outlive() -> None:
  """Makes this process drop output that cannot be written.

  A run is worth more than its output, and metrics.jsonl has the same figures.
  If one of stdout and stderr fails, the other one says so once.
  """
  sys.stdout = _lasting_stream(sys.stdout, _STDOUT)
  sys.stderr = _lasting_stream(sys.stderr, _STDERR)


def _lasting_stream(stream: Any, descriptor: int) -> Any:
  """Returns a text stream like the given one that drops output on errors."""
  # Python sets a stream that was closed from the start to None, and then drops
  # what is printed.
  if stream is None:
    return None
  with contextlib.suppress(OSError):
    stream.flush()
  return io.TextIOWrapper(
    io.BufferedWriter(_LastingFile(descriptor)),
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
      if not self._has_failed:
        self._has_failed = True
        self._report(error)
      return len(data)

  def _report(self, error: OSError) -> None:
    """Writes a line about an error to the other stream."""
    descriptor = self.fileno()
    line = (
      f"diffjax: cannot write to {_NAMES[descriptor]} ({error.strerror});"
      " training goes on, and metrics.jsonl has its figures\n"
    )
    with contextlib.suppress(OSError):
      os.write(_OTHER_STREAM[descriptor], line.encode())
