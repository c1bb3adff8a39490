"""Worker processes: Ctrl-C is not theirs, and they end with the process that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

# For the process that removes the locks of one that has ended without a shutdown: it would warn that it does.
_QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
  """What this thread starts inside the context is born deaf to Ctrl-C. A terminal sends it to all, but it is for the process that started
  them; a worker that is still importing would print a traceback. Make their locks inside the context too."""
  sys.warnoptions.append(_QUIET)
  try:
    resource_tracker.ensure_running()  # multiprocessing starts it with the first lock or process, and lets Ctrl-C through afterwards
  finally:
    sys.warnoptions.remove(_QUIET)
  previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def end_with_parent() -> None:
  """Ends this worker when the process that started it ends, however that ends. Otherwise it might wait for ever."""
  threading.Thread(target=_follow, name="parent", daemon=True).start()


def _follow() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None, "not a worker"
  parent.join()
  os._exit(1)
