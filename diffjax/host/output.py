"""Standard output and error that may go away: a pipe whose reader ends, a terminal that hangs up, a full disk."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

_NAMES = {1: "standard output", 2: "standard error"}


def outlive() -> None:
  """What this process prints from now on is dropped where it cannot be written: a run is worth more than its lines, which metrics.jsonl has
  too. The other of the two streams says so once."""
  sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)


def _lasting(stream: Any, descriptor: int) -> Any:
  if stream is None:  # closed from the start: Python drops what is printed
    return None
  with contextlib.suppress(OSError):
    stream.flush()
  raw = _Lasting(descriptor, "w", closefd=False)
  how = {
    "line_buffering": stream.line_buffering,
    "write_through": stream.write_through,
  }
  return io.TextIOWrapper(
    io.BufferedWriter(raw), stream.encoding, stream.errors, **how
  )


class _Lasting(io.FileIO):
  _failed = False

  def write(self, data: Any, /) -> int | None:  # type: ignore[override]
    try:
      return super().write(data)
    except OSError as error:
      if not self._failed:
        self._failed, descriptor = True, self.fileno()
        line = f"diffjax: cannot write to {_NAMES[descriptor]} ({error.strerror}); training goes on, and metrics.jsonl has its figures\n"
        with contextlib.suppress(OSError):
          os.write(3 - descriptor, line.encode())
      return len(data)
