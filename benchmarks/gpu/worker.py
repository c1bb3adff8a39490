"""A process that checks or times cases, one after the other, as pool.py asks it to: python -m benchmarks.gpu.worker

A line of JSON on its standard input is a case. It answers "ready" once the case is compiled, waits for another line, and answers with the
result. What else it and its libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Prepare = Callable[[dict[str, Any]], Callable[[], dict[str, Any]]]
MODULES = {
  "check": "checks",
  "attention": "attention",
  "decode": "decode",
  "step": "steps",
}  # by what a case does


def serve(prepare: Prepare) -> None:
  """Answers until standard input ends.

  Args:
    prepare: compiles a case, and returns the function that runs it and returns its result.
  """
  answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
  os.dup2(2, 1)
  threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
  answer = lambda message: print(json.dumps(message), file=answers)
  answer("started")
  for line in sys.stdin:
    try:
      run = prepare(json.loads(line))
      answer("ready")
      sys.stdin.readline()
      result = run()
    except (
      Exception
    ) as error:  # told as the case's result; pool.py then takes a new process
      result = {"error": f"{type(error).__name__}: {error}"[:800]}
    answer(result)


def _end_with(parent: int) -> None:
  """Ends this process when its parent has died: one that hangs on the GPU would disturb all that comes after it."""
  while os.getppid() == parent:
    time.sleep(0.5)
  os.kill(os.getpid(), signal.SIGKILL)


def _main(rehearse: bool) -> None:
  import jax

  def prepare(case: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    with around():
      run = importlib.import_module(
        f"benchmarks.gpu.{MODULES[case['do']]}"
      ).prepare(case)

    def inside():
      with around():
        return run()

    return inside

  around: Callable[[], contextlib.AbstractContextManager] = (
    contextlib.nullcontext
  )
  if rehearse:
    from benchmarks.gpu import rehearsal

    around = rehearsal.interpreted
  jax.block_until_ready(
    jax.numpy.zeros(1)
  )  # the device is there before the first case's time counts
  serve(prepare)


if __name__ == "__main__":
  _main("--rehearse" in sys.argv)
