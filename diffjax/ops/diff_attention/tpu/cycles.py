"""The compiler's estimates of the TPU kernels' cycles.

`python -m benchmarks.tpu` writes the table, cycles.json.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from typing import NamedTuple

from diffjax.ops.diff_attention.tiles import round_up

TABLE = pathlib.Path(__file__).with_suffix(".json")

# Generations without estimates of their own. Their cores have the same matrix
# units as the core of another generation.
_SAME_CORE = {"v4": "v5e", "v5p": "v5e"}
# Kernels of other libraries are listed under other kinds.
_KIND = re.compile(r"estimated cycles.*, kernels \w+$")
_CASE = re.compile(r"(\S+) D (\d+) V (\d+) G (\d+) M (\d+) T (\d+) causal;")


class _Kernel(NamedTuple):
  """What a kernel's cycles depend on, apart from the length of a row."""

  generation: str
  D: int
  V: int
  G: int
  M: int
  direction: str


def cycles(
  generation: str, direction: str, length: int, D: int, V: int, G: int, M: int
) -> float | None:
  """Returns the cycles of a kernel for one query head of one row of the batch.

  They are the compiler's estimates for one core. The mask is causal and has no
  segments. A mask that depends on data costs more, and has no estimate.

  A width without an estimate is rounded up to a multiple of 128. For a length
  without an estimate, the cycles are a·n + b·n², fitted to the estimates for a
  length and for twice that length.

  Args:
    generation: the TPU, such as "v5e".
    direction: "forward" or "backward".
    length: the number of queries and of keys.
    D: width of queries and keys.
    V: width of values.
    G: maps of a query head.
    M: maps of a key head.

  Returns:
    The cycles. None if there is no estimate for these widths and maps.
  """
  # Some generations have the same core as another one, and no entries.
  core = _SAME_CORE.get(generation, generation)
  table = _table(TABLE)
  kernel = _Kernel(core, D, V, G, M, direction)
  if kernel not in table:
    kernel = kernel._replace(D=round_up(D, 128), V=round_up(V, 128))
  if kernel not in table:
    return None
  return _interpolate(table[kernel], length)


def _interpolate(cycles_by_length: dict[int, int], T: int) -> float | None:
  """Returns the cycles of a length, estimated from other lengths.

  The cycles of attention have a part that grows with T and one that grows with
  T². Both follow from the cycles of two lengths. The longest known length with
  a known half is used.

  Example:
    _interpolate({2048: 10, 4096: 28}, 8192) → 88.0, as 6·n + 4·n² with
    n = T / 2048 goes through both points.

  Args:
    cycles_by_length: the known cycles.
    T: the length.

  Returns:
    The cycles. None if no length is known together with its half.
  """
  if T in cycles_by_length:
    return float(cycles_by_length[T])
  for longer in sorted(cycles_by_length, reverse=True):
    shorter = longer // 2
    if shorter not in cycles_by_length:
      continue
    # With n = T / shorter, cycles(n) = linear·n + square·n² goes through
    # cycles(1) = linear + square and cycles(2) = 2·linear + 4·square.
    square = (cycles_by_length[longer] - 2 * cycles_by_length[shorter]) / 2
    linear = cycles_by_length[shorter] - square
    n = T / shorter
    # Far below the known lengths, the curve may be negative.
    return max(0.0, linear * n + square * n * n)
  return None


@functools.cache
def _table(path: pathlib.Path) -> dict[_Kernel, dict[int, int]]:
  """Returns the cycles of each kernel by length T, from a file of cycles.

  The file has a dict of cases for each kind of measurement, and each case has
  the cycles by direction. If a case was estimated with several block sizes, the
  smallest number counts.

  Example:
    {_Kernel("v5e", D=128, V=256, G=2, M=2, "forward"): {4096: 1234567}}

  Args:
    path: the file.
  """
  table: dict[_Kernel, dict[int, int]] = {}
  kinds = json.loads(path.read_text(encoding="utf-8"))
  for kind, cases in kinds.items():
    if not _KIND.match(kind):
      continue  # a kernel of another library
    for case, cycles_by_direction in cases.items():
      match = _CASE.match(case)
      if match is None:
        continue
      generation = match[1]
      D, V, G, M, T = (int(number) for number in match.groups()[1:])
      for direction, count in cycles_by_direction.items():
        kernel = _Kernel(generation, D, V, G, M, direction)
        by_length = table.setdefault(kernel, {})
        by_length[T] = min(count, by_length.get(T, count))
  return table
