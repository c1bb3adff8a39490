"""Ctrl-C, SIGTERM and SIGHUP: signals that end a process.

By default, Python raises KeyboardInterrupt in the main thread at Ctrl-C. This
does not end a command reliably:

* In a Python function that C++ calls, such as JAX's callback in the garbage
  collector, the exception is swallowed or causes a segmentation fault.
* During a long call of C++, such as a compilation, nothing is raised.

So a command never raises KeyboardInterrupt. Instead, a thread reads the signals
and ends the process, without shutting the interpreter down. The files that a
command writes survive a kill at any moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

# How long a process that ends waits until its output is written.
_OUTPUT_TIMEOUT_SECONDS = 0.5

# Ends the thread that reads signals from the pipe. No signal has this number.
_STOP = 0

# A process that a signal ends has this exit code plus the signal's number, as
# in a shell.
_SIGNAL_EXIT_CODE = 128

# Makes the terminal's cursor visible. A live progress bar hides it.
_SHOW_CURSOR = b"\x1b[?25h\n"

_STDOUT = 1
_STDERR = 2


class _Installed(NamedTuple):
  """What a `Watch` has installed, and what it must restore at its exit.

  Attributes:
    outer: The watch around this one, if there is one.
    previous_handlers: The handler of each signal before.
    previous_wakeup_fd: The file to which Python wrote signals before.
    read_end: The end of the pipe that the thread reads signals from.
    write_end: The end of the pipe that Python writes signals to.
    thread: Reads the signals.
  """

  outer: Watch | None
  previous_handlers: dict[int, Any]
  previous_wakeup_fd: int
  read_end: int
  write_end: int
  thread: threading.Thread


def _ignore(*arguments: Any) -> None:
  """A signal handler that does nothing."""


class Watch:
  """A context that calls a function for each signal of some kinds, in a thread.

  Python runs a signal handler only between two Python instructions, and merges
  equal signals that arrive during a long call. With `signal.set_wakeup_fd`, its
  C code also writes every signal to a file at once. This file is a pipe, which
  the thread reads.

  Contexts can be nested. The innermost one reacts. Outside the main thread,
  Python allows no handlers, and the context does nothing. SIGHUP stays ignored
  if it was ignored before, as under nohup.

  Example:
    with Watch([signal.SIGTERM], end_at_once):
      ...
  """

  _innermost: ClassVar[Watch | None] = None

  def __init__(
    self,
    numbers: Sequence[int],
    react: Callable[[int], None],
    handler: Callable[..., None] = _ignore,
  ):
    """Initializes the watch. Nothing is changed before the context is entered.

    Args:
      numbers: The signals.
      react: Called in the thread, with a signal's number.
      handler: A Python signal handler. It is also called, in the main thread,
        as soon as that thread runs Python code.
    """
    self._numbers = tuple(numbers)
    self._react = react
    self._handler = handler
    # None outside the context, and outside the main thread.
    self._installed: _Installed | None = None

  @property
  def outer(self) -> Callable[[int], None] | None:
    """The `react` of the watch around this one. None without such a watch."""
    if self._installed is None or self._installed.outer is None:
      return None
    return self._installed.outer._react

  def __enter__(self) -> Watch:
    if threading.current_thread() is threading.main_thread():
      self._install()
    return self

  def __exit__(self, *exception: Any) -> None:
    installed = self._installed
    if installed is None:
      return
    # No more signals are written to the pipe.
    for number, handler in installed.previous_handlers.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(installed.previous_wakeup_fd)
    Watch._innermost = installed.outer
    # The thread handles the signals that are in the pipe, and ends.
    os.write(installed.write_end, bytes([_STOP]))
    installed.thread.join()
    os.close(installed.read_end)
    os.close(installed.write_end)
    self._installed = None

  def _install(self) -> None:
    """Makes Python write signals to a pipe, and starts a thread that reads it.

    Stores the previous state, for `__exit__`.
    """
    read_end, write_end = os.pipe()
    # Python's signal handler must not wait if the pipe is full.
    os.set_blocking(write_end, False)
    thread = threading.Thread(
      target=self._read_signals, args=(read_end,), name="signals", daemon=True
    )
    previous_wakeup_fd = signal.set_wakeup_fd(
      write_end, warn_on_full_buffer=False
    )
    previous_handlers = {}
    for number in self._numbers:
      handler = signal.getsignal(number)
      if number == signal.SIGHUP and handler == signal.SIG_IGN:
        # The command was started with nohup.
        continue
      previous_handlers[number] = handler
    self._installed = _Installed(
      outer=Watch._innermost,
      previous_handlers=previous_handlers,
      previous_wakeup_fd=previous_wakeup_fd,
      read_end=read_end,
      write_end=write_end,
      thread=thread,
    )
    Watch._innermost = self
    # `_react` may use `_installed`, so this comes last. The pipe holds signals
    # until the thread starts.
    for number in previous_handlers:
      signal.signal(number, self._handler)
    thread.start()

  def _read_signals(self, read_end: int) -> None:
    """Calls `react` for each signal in the pipe, until _STOP is read.

    Args:
      read_end: The end of the pipe to read from.
    """
    while True:
      # Each signal is one byte, its number.
      number = os.read(read_end, 1)[0]
      if number == _STOP:
        return
      # Python writes every signal that has a Python handler, not only those
      # of this watch.
      if number in self._numbers:
        self._react(number)


def end_at_ctrl_c() -> None:
  """Makes Ctrl-C end this process at once, except inside another `Watch`."""
  Watch([signal.SIGINT], end_at_once).__enter__()


def end_at_once(number: int) -> NoReturn:
  """Ends this process because of a signal, with a line that says so."""
  end(reason(number), _SIGNAL_EXIT_CODE + number)


def reason(number: int) -> str:
  """Returns the reason for the end of a process, such as "interrupted"."""
  if number == signal.SIGINT:
    return "interrupted"
  return f"ended by {signal.Signals(number).name}"


def end(message: str, code: int) -> NoReturn:
  """Ends this process, without shutting the interpreter down.

  May be called in any thread. Output that cannot be written within a second in
  total is lost.

  Args:
    message: Printed to stderr, as an error.
    code: The exit code.
  """
  _run_briefly(_flush)
  _run_briefly(_write_error, message)
  os._exit(code)


def _run_briefly(function: Callable[..., None], *arguments: Any) -> None:
  """Calls a function that writes, and waits for at most half a second.

  A write to a full pipe that nobody reads would never return.
  """
  thread = threading.Thread(target=function, args=arguments, daemon=True)
  thread.start()
  thread.join(_OUTPUT_TIMEOUT_SECONDS)


def _flush() -> None:
  """Flushes stdout and stderr. Errors are ignored."""
  for stream in (sys.stdout, sys.stderr):
    # A stream that was closed before Python started is None.
    if stream is None:
      continue
    with contextlib.suppress(OSError, ValueError):
      stream.flush()


def _write_error(message: str) -> None:
  """Shows the terminal's cursor again, and writes an error to stderr.

  A stream that does not exist anymore is ignored.
  """
  with contextlib.suppress(OSError):
    if os.isatty(_STDOUT):
      os.write(_STDOUT, _SHOW_CURSOR)
  with contextlib.suppress(OSError):
    os.write(_STDERR, f"error: {message}\n".encode())
