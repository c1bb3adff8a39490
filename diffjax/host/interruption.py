"""Signals that end a run: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from diffjax.host.progress import say
from diffjax.host.signals import Watch, end_at_once

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
  """A context in which a signal asks the run to stop after its step.

  In a command, a signal ends the process at once as long as there is nothing to
  save, because a compilation would continue for minutes. In a notebook, the
  first signal never ends the process. A second signal always does.

  Example:
    with Interruption() as interruption:
      while not interruption.is_stop_requested():
        ...

  Attributes:
    started: Whether there is something to save. Set by the user of the context.
  """

  def __init__(self) -> None:
    self.started = False
    self._is_stop_requested = False
    # Set in the thread that reads signals, after it has handled a first one.
    self._is_stop_announced = False
    self._watch = Watch(_SIGNALS, self._react, self._request_stop)

  def __enter__(self) -> Interruption:
    self._watch.__enter__()
    return self

  def __exit__(self, *exception: Any) -> None:
    self._watch.__exit__(*exception)

  def is_stop_requested(self) -> bool:
    """Returns True if a signal has asked the run to stop."""
    return self._is_stop_requested

  def _request_stop(self, *arguments: Any) -> None:
    """Asks the run to stop. Python calls this in the main thread at a signal.

    `_react` does the same in another thread, which may run later than the next
    check of the main thread.
    """
    if self._find_immediate_end() is None:
      self._is_stop_requested = True

  def _react(self, number: int) -> None:
    """Ends the process, or asks the run to stop and says so.

    Called in the thread that reads signals.

    Args:
      number: The signal.
    """
    if self._is_stop_announced:
      # This is the second signal.
      end_at_once(number)
    end_process = self._find_immediate_end()
    if end_process is not None:
      end_process(number)
      return
    self._is_stop_requested = True
    self._is_stop_announced = True
    name = signal.Signals(number).name
    say(f"{name}: saving after this step (send it again to stop at once)")

  def _find_immediate_end(self) -> Callable[[int], None] | None:
    """Returns the function that ends the process at the first signal.

    Returns None if the run may finish its step: if it has something to save, or
    if it runs in a notebook, which has no watch around this one.
    """
    if self.started:
      return None
    return self._watch.outer
