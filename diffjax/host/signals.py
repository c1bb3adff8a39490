"""Ctrl-C, SIGTERM and SIGHUP: what ends a process, at once or when it is ready.

Python turns Ctrl-C into a KeyboardInterrupt, and raises it wherever the main thread is. Where C++ calls Python, it is swallowed (JAX has
such a callback in the garbage collector) or ends the process with a segmentation fault. In a long call, such as a compilation, nothing is
raised until the call is over. So commands have no KeyboardInterrupt: a thread hears the signals, and ends the process without the
interpreter's shutdown. Whatever a command writes survives a kill at any moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

# Seconds to write what has been printed, and the last line, at most.
_WRITING = 0.5


class Watch:
  """Calls a function for each signal of some kinds, in a thread, for as long as the context.

  Python runs a signal's handler only between two of its own instructions, and takes two signals during a compilation for one. The thread
  reads them from a pipe that the C level writes each of them to at once. Outside the main thread Python allows no handlers: there the
  context changes nothing. A SIGHUP that is ignored, as under nohup, stays ignored.

  Attributes:
    outer: what the watch around this one calls; None if there is none.
  """

  _innermost: Watch | None = None

  def __init__(
    self,
    numbers: Sequence[int],
    react: Callable[[int], None],
    handler: Callable[..., None] = lambda *_: None,
  ):
    """Changes nothing yet.

    Args:
      numbers: the signals.
      react: called with a signal's number, in the thread.
      handler: called besides, in the main thread once that runs Python, as Python calls handlers.
    """
    self._numbers, self._react, self._handler = numbers, react, handler
    self.outer: Callable[[int], None] | None = None

  def __enter__(self) -> Watch:
    self._is_watching = threading.current_thread() is threading.main_thread()
    if not self._is_watching:
      return self
    self._around, Watch._innermost = Watch._innermost, self
    self.outer = self._around._react if self._around else None
    self._reading, self._writing = os.pipe()
    os.set_blocking(self._writing, False)
    numbers = [
      number
      for number in self._numbers
      if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    self._previous_pipe = signal.set_wakeup_fd(
      self._writing, warn_on_full_buffer=False
    )
    self._previous = {
      number: signal.signal(number, self._handler) for number in numbers
    }
    self._thread = threading.Thread(
      target=self._watch, name="signals", daemon=True
    )
    self._thread.start()  # it finds what has come before
    return self

  def __exit__(self, *_: Any) -> None:
    if not self._is_watching:
      return
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._previous_pipe)
    Watch._innermost = self._around
    os.write(self._writing, b"\0")
    self._thread.join()
    os.close(self._reading)
    os.close(self._writing)

  def _watch(self) -> None:
    while number := os.read(self._reading, 1)[0]:
      if (
        number in self._numbers
      ):  # otherwise it is another signal, which also has a Python handler
        self._react(number)


def end_at_ctrl_c() -> None:
  """From now on Ctrl-C ends this process at once, unless a `Watch` has another use for it."""
  Watch([signal.SIGINT], end_at_once).__enter__()


def end_at_once(number: int) -> NoReturn:
  """Ends this process because of a signal, with a line that says so."""
  end(reason(number), 128 + number)


def reason(number: int) -> str:
  """Why a process ends, in words."""
  return (
    "interrupted"
    if number == signal.SIGINT
    else f"ended by {signal.Signals(number).name}"
  )


def end(message: str, code: int) -> NoReturn:
  """Ends this process with one line and an exit code, from any thread, without the interpreter's shutdown."""
  _soon(_flush)
  _soon(lambda: _write(f"error: {message}\n"))
  os._exit(code)


def _soon(function: Callable[[], None]) -> None:
  """Calls a function that writes, and waits for it for a moment only: its reader may have stopped reading."""
  writing = threading.Thread(target=function, daemon=True)
  writing.start()
  writing.join(_WRITING)


def _flush() -> None:
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(
      OSError, ValueError, AttributeError
    ):  # a closed one is None
      stream.flush()


def _write(line: str) -> None:
  with contextlib.suppress(OSError):  # the terminal may be gone
    if os.isatty(1):
      os.write(1, b"\x1b[?25h\n")  # the cursor, which a live line hides
  with contextlib.suppress(OSError):
    os.write(2, line.encode())
