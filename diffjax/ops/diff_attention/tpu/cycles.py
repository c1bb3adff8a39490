"""Cycles of the TPU kernels by their compiler's estimate, looked up: benchmarks/tpu.py writes the table, cycles.json."""

from __future__ import annotations

import functools
import json
import pathlib
import re

TABLE = pathlib.Path(__file__).with_suffix(".json")

# Generations without estimates of their own whose core has the same matrix units as another one's; a kernel is shared out over its cores.
_SAME_CORE = {"v4": "v5e", "v5p": "v5e"}
_KEY = re.compile(r"(\S+) D (\d+) V (\d+) G (\d+) M (\d+) T (\d+) causal;")


def cycles(
  generation: str, direction: str, length: int, D: int, V: int, G: int, M: int
) -> float | None:
  """Cycles of one query head's row on one core, causal, without segments: a mask that is data costs more, and has no estimate.

  Widths that are no multiple of 128 and were not estimated take what the next one takes. Lengths that were not estimated are computed from
  two that were, one twice the other: a·n + b·n².

  Args:
    generation: "v5e".
    direction: "forward" or "backward".
    length: T.
    D: width of queries and keys.
    V: width of values.
    G: maps of a query head.
    M: maps of a key head.

  Returns:
    The cycles, or None if nothing was estimated for this shape.
  """
  core = _SAME_CORE.get(generation, generation)
  shapes = [
    (core, D, V, G, M),
    (core, -(-D // 128) * 128, -(-V // 128) * 128, G, M),
  ]
  found = (
    {
      T: cost
      for (*of, T, way), cost in _table().items()
      if (tuple(of), way) == (shape, direction)
    }
    for shape in shapes
  )
  known = next(filter(None, found), {})
  if length in known:
    return float(known[length])
  for longer in sorted(known, reverse=True):
    if (shorter := longer // 2) in known:
      square = (known[longer] - 2 * known[shorter]) / 2
      n = length / shorter
      return max(0.0, (known[shorter] - square) * n + square * n * n)
  return None


@functools.cache
def _table() -> dict[tuple, int]:
  """Cycles by generation, D, V, G, M, T and direction; of several choices of blocks the best. Other libraries' do not count."""
  found: dict[tuple, int] = {}
  for kind, entries in json.loads(TABLE.read_text(encoding="utf-8")).items():
    for key, costs in entries.items():
      if re.match(r"estimated cycles.*, kernels \w+$", kind) and (
        match := _KEY.match(key)
      ):
        for direction, cost in costs.items():
          place = (match[1], *map(int, match.groups()[1:]), direction)
          found[place] = min(cost, found.get(place, cost))
  return found
