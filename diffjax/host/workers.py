"""Worker processes, which ignore Ctrl-C and end with their parent process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

# Without this filter, multiprocessing's resource tracker (a process that cleans
# up locks) warns if the parent process has ended without shutting down.
_TRACKER_FILTER = "ignore::UserWarning:multiprocessing.resource_tracker"


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
  """Makes all processes that this thread starts in the context ignore Ctrl-C.

  A terminal sends Ctrl-C to all processes, but only the parent process should
  handle it. A worker would print a traceback while it imports modules. The
  locks of the workers must be created inside the context too.
  """
  # The first lock or process starts the resource tracker, after which
  # multiprocessing unblocks Ctrl-C. So the tracker must run before Ctrl-C is
  # blocked.
  sys.warnoptions.append(_TRACKER_FILTER)
  try:
    resource_tracker.ensure_running()
  finally:
    sys.warnoptions.remove(_TRACKER_FILTER)
  # Processes inherit the mask of blocked signals.
  previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def end_with_parent() -> None:
  """Ends this worker when its parent process has ended, for any reason.

  Without this, a worker could wait endlessly for a parent that was killed.
  """
  thread = threading.Thread(target=_wait_for_parent, name="parent", daemon=True)
  thread.start()


def _wait_for_parent() -> None:
  """Waits until the parent process has ended, and ends this process."""
  parent = multiprocessing.parent_process()
  assert parent is not None, "not a worker"
  parent.join()
  os._exit(1)
