"""Whether two mathematical expressions are equal, by math-verify.

math-verify is in the extra `eval`. It compares expressions with sympy, which may
need unlimited time or memory (9^{9^{9}}). So it runs in a process of its own
with limits. A pair at which the process ends counts as different, and the next
pair gets a new process.
"""

from __future__ import annotations

import atexit
import functools
import json
import pathlib
import subprocess
import sys
import threading

from absl import logging

from diffjax.config import UserError

_SECONDS = 5  # of one comparison
_PROGRAM = pathlib.Path(__file__).with_name("verify_worker.py")


@functools.lru_cache(10_000)
def is_equal(answer: str, wanted: str) -> bool:
  """Returns whether two expressions in LaTeX are equal.

  If math-verify ends while it compares them, the result is False.

  Raises:
    UserError: if math-verify cannot be imported.
  """
  return _worker().compare(answer, wanted)


def start() -> None:
  """Starts math-verify, which takes a second, unless it is running.

  Raises:
    UserError: if math-verify cannot be imported.
  """
  _worker().start()


@functools.cache
def _worker() -> _Worker:
  return _Worker()


class _Worker:
  """The process of math-verify."""

  def __init__(self) -> None:
    self._process: subprocess.Popen[str] | None = None
    self._lock = threading.Lock()
    atexit.register(self.close)

  def start(self) -> None:
    """Starts the process unless it is running."""
    with self._lock:
      self._ensure_started()

  def close(self) -> None:
    """Ends the process."""
    if self._process is not None:
      self._process.kill()
      self._process.wait()
      self._process = None

  def compare(self, answer: str, wanted: str) -> bool:
    """Returns the process's verdict, or False if it reached a limit."""
    with self._lock:
      process = self._ensure_started()
      reply = _ask(process, json.dumps([answer, wanted]))
      if reply:
        return json.loads(reply)
      process.wait()
      self._process = None
    logging.warning(
      "math-verify ended while it compared %r and %r (it takes too long or too"
      " much memory); they count as different",
      answer[:40],
      wanted[:40],
    )
    return False

  def _ensure_started(self) -> subprocess.Popen[str]:
    if self._process is None:
      # -P: modules beside the program do not hide those of other packages.
      process = subprocess.Popen(
        [sys.executable, "-P", str(_PROGRAM), str(_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
      )
      greeting = _ask(process, "")
      if greeting != "ready\n":
        process.kill()
        process.wait()
        raise UserError(
          "answers are compared by math-verify, which cannot be imported"
          f" ({greeting.strip()}); pip install 'diffjax[eval]'"
        )
      self._process = process
    return self._process


def _ask(process: subprocess.Popen[str], line: str) -> str:
  """Sends a line and returns the reply, "" if the process has ended."""
  assert process.stdin is not None and process.stdout is not None
  try:
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
  except BrokenPipeError:
    return ""
  return process.stdout.readline()
