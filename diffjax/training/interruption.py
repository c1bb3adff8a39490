"""The signals that end a run: SIGTERM and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from diffjax.progress import say


class Interruption:
  """The wish to stop: SIGTERM or Ctrl-C inside the context. Calling it says whether one has come; the second one ends the process at once.

  Python runs a signal's handler only between two of its own instructions, and takes two signals during a compilation for one. So a thread
  reads them too, from a pipe that the C level writes each of them to at once. Outside the main thread Python allows no handlers: there the
  context changes nothing, and signals do what they do otherwise.
  """

  def __enter__(self) -> Interruption:
    self._received, self._is_watching = False, threading.current_thread() is threading.main_thread()
    if not self._is_watching:
      return self
    self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
    self._reading, self._writing = os.pipe()
    os.set_blocking(self._writing, False)
    self._previous_pipe = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
    self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *_: Any) -> None:
    if not self._is_watching:
      return
    signal.set_wakeup_fd(self._previous_pipe)
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    os.write(self._writing, b"\0")
    self._thread.join()
    os.close(self._reading)
    os.close(self._writing)

  def __call__(self) -> bool:
    return self._received

  def _receive(self, *_: Any) -> None:
    self._received = True

  def _watch(self) -> None:
    said = False
    while number := os.read(self._reading, 1)[0]:
      if number in self._previous:  # otherwise it is another signal, which also has a Python handler
        if said:
          if os.isatty(1):
            os.write(1, b"\x1b[?25h\n")  # the cursor, which the live line hides
          os._exit(128 + number)
        self._received = said = True
        say(f"{signal.Signals(number).name}: saving after this step (once more to stop at once)")
