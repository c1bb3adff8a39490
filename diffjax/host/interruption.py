"""The signals that end a run: SIGTERM, Ctrl-C and SIGHUP, which a terminal sends when it goes."""

from __future__ import annotations

import signal
from typing import Any

from diffjax.host.progress import say
from diffjax.host.signals import Watch, end_at_once


class Interruption:
  """The wish to stop: a signal inside the context. Calling it says whether one has come; the second one ends the process at once.

  So does the first one while there is nothing to save, in a command: a compilation would go on for minutes. A notebook keeps its process.

  Attributes:
    started: set it once there is something to save.
  """

  def __enter__(self) -> Interruption:
    self.started = self._received = self._said = False
    self._watch = Watch(
      (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._react, self._receive
    ).__enter__()
    return self

  def __exit__(self, *exception: Any) -> None:
    self._watch.__exit__(*exception)

  def __call__(self) -> bool:
    return self._received

  def _receive(self, *_: Any) -> None:
    self._received |= self.started or self._watch.outer is None

  def _react(self, number: int) -> None:
    if self._said:
      end_at_once(number)
    if not self.started and self._watch.outer is not None:
      self._watch.outer(number)
      return
    self._received = self._said = True
    say(
      f"{signal.Signals(number).name}: saving after this step (once more to stop at once)"
    )
