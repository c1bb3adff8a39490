"""The loop that times candidates against each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def median_seconds(
  candidates: Mapping[str, Callable[[], object]],
  repetitions: int,
  warmups: int = 1,
) -> dict[str, float]:
  """Returns the median seconds of a call of each candidate.

  The candidates take turns, so that other programs on the machine slow all of
  them alike.

  Args:
    candidates: Functions by name. Each waits for its result.
    repetitions: Number of calls that are measured.
    warmups: Number of calls before these, which may compile.

  Returns:
    Seconds by the candidates' names, in their order.
  """
  for _ in range(warmups):
    for run in candidates.values():
      run()

  seconds: dict[str, list[float]] = {name: [] for name in candidates}
  for _ in range(repetitions):
    for name, run in candidates.items():
      start = time.perf_counter()
      run()
      seconds[name].append(time.perf_counter() - start)
  return {name: statistics.median(times) for name, times in seconds.items()}
