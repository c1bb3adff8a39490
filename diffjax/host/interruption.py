"""Signals that end a run: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal."""

from __future__ import annotations

import signal
from typing import Any

from diffjax.host.progress import say
from diffjax.host.signals import Watch, end_at_once

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
  """A context in which a signal asks the run to stop after its step.

  A second signal ends the process at once. In a command, the first one does too
  as long as there is nothing to save: a compilation would continue for minutes.
  A notebook keeps its process.

  Example:
    with Interruption() as interrupted:
      while not interrupted():
        ...

  Attributes:
    started: Whether there is something to save. Set by the user of the context.
  """

  def __init__(self) -> None:
    self.started = False
    self._is_received = False
    self._is_announced = False
    self._watch = Watch(_SIGNALS, self._react, self._receive)

  def __enter__(self) -> Interruption:
    self._watch.__enter__()
    return self

  def __exit__(self, *exception: Any) -> None:
    self._watch.__exit__(*exception)

  def __call__(self) -> bool:
    """Returns True if a signal has asked the run to stop."""
    return self._is_received

  def _receive(self, *arguments: Any) -> None:
    """Notes a signal. Python calls this in the main thread.

    So the run sees the signal at its next check, even if the thread that calls
    `_react` has not run yet.
    """
    if self._should_save():
      self._is_received = True

  def _react(self, number: int) -> None:
    """Reacts to a signal. Called in the thread of the watch."""
    if self._is_announced:
      end_at_once(number)
    if not self._should_save() and self._watch.outer is not None:
      self._watch.outer(number)
      return
    self._is_received = True
    self._is_announced = True
    name = signal.Signals(number).name
    say(f"{name}: saving after this step (once more to stop at once)")

  def _should_save(self) -> bool:
    """Returns whether a first signal stops the run after its step.

    Without a watch around this one, this is not a command but a notebook.
    """
    return self.started or self._watch.outer is None
