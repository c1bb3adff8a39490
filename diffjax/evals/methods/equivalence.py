"""Whether two mathematical expressions are equal, by math-verify.

math-verify is in the extra `eval`. It compares expressions with sympy, which
may need unlimited time or memory (9^{9^{9}}). So it runs in a process of its
own (`verify_worker.py`) with limits.

The protocol: each request and each reply is a line of text.

    request                  reply
    (an empty line)          ready, or why math-verify cannot be imported
    ["x + 1", "1 + x"]       true
    ["9^{9^{9}}", "1"]       (none: the process reached a limit and ended)

Requests after the first are a JSON list of an answer and its reference. If the
process ends, the pair counts as different. The next pair starts a new process.
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

# The time limit of one comparison, in seconds.
TIME_LIMIT = 5

# The program of the process.
PROGRAM = pathlib.Path(__file__).with_name("verify_worker.py")

# Messages quote at most this many characters of an expression.
_MAX_QUOTED = 40


@functools.lru_cache(10_000)
def is_equal(answer: str, reference: str) -> bool:
  """Returns whether two expressions in LaTeX are equal.

  If math-verify ends while it compares them, the result is False.

  Raises:
    UserError: if math-verify cannot be imported.
  """
  return _worker().compare(answer, reference)


def start() -> None:
  """Starts math-verify, which takes a second, unless it is running.

  Raises:
    UserError: if math-verify cannot be imported.
  """
  _worker().start()


@functools.cache
def _worker() -> Worker:
  """Returns the worker that all comparisons of this process share."""
  return Worker()


class Worker:
  """The process of math-verify. It starts at the first request."""

  def __init__(
    self, time_limit: int = TIME_LIMIT, program: pathlib.Path = PROGRAM
  ) -> None:
    """Initializes a worker without starting its process.

    Args:
      time_limit: The time limit of one comparison, in seconds.
      program: The program of the process.
    """
    self._time_limit = time_limit
    self._program = program
    self._process: subprocess.Popen[str] | None = None
    # A request and its reply belong together.
    self._lock = threading.Lock()
    atexit.register(self.close)

  def start(self) -> None:
    """Starts the process unless it is running.

    Raises:
      UserError: if math-verify cannot be imported.
    """
    with self._lock:
      self._ensure_started()

  def close(self) -> None:
    """Ends the process."""
    if self._process is not None:
      self._process.kill()
      self._process.wait()
      self._process = None

  def compare(self, answer: str, reference: str) -> bool:
    """Returns whether math-verify finds two expressions equal.

    If it reaches its limit of time or memory, the result is False. The next
    comparison starts a new process.
    """
    request = json.dumps([answer, reference])
    with self._lock:
      process = self._ensure_started()
      reply = _ask(process, request)
      if reply:
        return json.loads(reply)
      # Without a reply, the process has ended.
      process.wait()
      self._process = None
    logging.warning(
      "math-verify ended while it compared %r and %r (it takes too long or too"
      " much memory); they count as different",
      answer[:_MAX_QUOTED],
      reference[:_MAX_QUOTED],
    )
    return False

  def _ensure_started(self) -> subprocess.Popen[str]:
    """Returns the process, after starting it if necessary."""
    if self._process is None:
      self._process = _start_process(self._program, self._time_limit)
    return self._process


def _start_process(
  program: pathlib.Path, time_limit: int
) -> subprocess.Popen[str]:
  """Starts a program, and waits until it has imported math-verify.

  Raises:
    UserError: if math-verify cannot be imported.
  """
  # -P: without the folder of the program in sys.path. Its modules would hide
  # modules of other packages that have the same name, such as lm_eval.
  process = subprocess.Popen(
    [sys.executable, "-P", str(program), str(time_limit)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    encoding="utf-8",
  )
  reply = _ask(process, "")
  if reply != "ready\n":
    process.kill()
    process.wait()
    raise UserError(
      "answers are compared by math-verify, which cannot be imported"
      f" ({reply.strip()}); pip install 'diffjax[eval]'"
    )
  return process


def _ask(process: subprocess.Popen[str], request: str) -> str:
  """Sends a line to a process and returns the line that it replies.

  The reply ends with a line break. It is "" if the process has ended.
  """
  assert process.stdin is not None and process.stdout is not None
  try:
    process.stdin.write(f"{request}\n")
    process.stdin.flush()
  except BrokenPipeError:
    return ""
  return process.stdout.readline()
