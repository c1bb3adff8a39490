"""The printed table, and the table measured.json that `auto` reads.

A row is a dictionary with a case and what was measured: see checks.py,
timing.py and steps.py. benchmarks/gpu/gpu.json has the rows of an H100.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.timing import IMPLEMENTATIONS, OURS
from diffjax.ops.diff_attention.gpu import measured

# `auto` changes its choice if another implementation is this much faster.
MIN_SPEEDUP = 1.03
# The choices of `auto` without a measurement. It takes chunked if two_call
# cannot run.
DEFAULTS = ("two_call", "chunked")

Row = dict[str, Any]

_COLUMNS = (
  "attention",
  "T",
  *IMPLEMENTATIONS,
  "fused TFLOP/s",
  "best other / fused",
)


def header() -> str:
  """Returns the first two lines of the table of attention."""
  return f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"


def line(rows: Sequence[Row]) -> str:
  """Returns a line of the printed table: the times of a case.

  A cell has the milliseconds of the forward pass, and of both passes together.
  The last cell is the ratio of the latter, so the fused kernels are faster if
  it is above 1.

  Args:
    rows: the rows of `timing.time_attention`.
  """
  case = rows[0]["case"]
  by_name = {row["case"]["name"]: row for row in rows}
  title = f"{case['kind']} D {case['D']}"
  if case["packed"]:
    title += ", packed rows"
  cells = [title, str(case["T"])]
  for name in IMPLEMENTATIONS:
    row = by_name.get(name, {})
    if "both_ms" in row:
      cells.append(f"{row['forward_ms']:.3g}, {row['both_ms']:.3g}")
    else:
      cells.append("–")

  fused = by_name.get("fused", {})
  if "backward_tflops" in fused:
    forward_tflops = fused["forward_tflops"]
    backward_tflops = fused["backward_tflops"]
    cells.append(f"{forward_tflops:.0f}, {backward_tflops:.0f}")
  else:
    cells.append("–")

  ratio = speedup(by_name)
  cells.append("–" if ratio is None else f"{ratio:.2f}")
  return f"| {' | '.join(cells)} |"


def speedup(by_name: Mapping[str, Row]) -> float | None:
  """Returns the time of the best other implementation over the fused time.

  None if the fused kernels or all others were not timed.

  Args:
    by_name: the rows of a case by implementation.
  """
  other_times = []
  for name, row in by_name.items():
    if name != "fused" and "both_ms" in row:
      other_times.append(row["both_ms"])
  fused_ms = by_name.get("fused", {}).get("both_ms")
  if fused_ms is None or not other_times:
    return None
  return min(other_times) / fused_ms


class _EntryKey(NamedTuple):
  """What the choice of `auto` depends on.

  Attributes:
    kind: the kind of attention, a key of `inputs.KINDS`.
    head_dim: the width of queries and keys.
    packed: whether several documents are packed into a row.
    length: the number of tokens of a row.
  """

  kind: str
  head_dim: int
  packed: bool
  length: int


def measured_entries(rows: Iterable[Row]) -> list[dict[str, Any]]:
  """Returns the entries of measured.json for one kind of device.

  An entry says which implementation of attention `auto` takes for a kind, a
  width, rows that are packed or not, and a length. The fused kernels of a kind
  and width are considered only if they were checked and all checks were right.

  Args:
    rows: the rows of all checks and times on the device.
  """
  rows = list(rows)
  is_right = _checked_kernels(rows)
  # The milliseconds of each implementation.
  times: dict[_EntryKey, dict[str, float]] = {}
  for row in rows:
    case = row["case"]
    if case["do"] != "attention" or "both_ms" not in row:
      continue
    if case["name"] not in OURS:
      continue
    if case["name"] == "fused" and not is_right.get((case["kind"], case["D"])):
      continue
    key = _EntryKey(case["kind"], case["D"], case["packed"], case["T"])
    times.setdefault(key, {})[OURS[case["name"]]] = row["both_ms"]

  entries = []
  for key, milliseconds in sorted(times.items()):
    choice = _choose(milliseconds)
    if choice is None:
      continue
    entry = {
      "kind": key.kind,
      "D": key.head_dim,
      "packed": key.packed,
      "T": key.length,
      "implementation": choice,
      "ms": milliseconds,
    }
    entries.append(entry)
  return entries


def _checked_kernels(rows: Iterable[Row]) -> dict[tuple[str, int], bool]:
  """Returns whether all checks were right, by kind and measured width."""
  is_right: dict[tuple[str, int], bool] = {}
  for row in rows:
    case = row["case"]
    if case["do"] != "check" or case.get("decode"):
      continue
    width = measured.bucket(case["D"])
    if width is None:
      continue
    key = (case["kind"], width)
    is_right[key] = is_right.get(key, True) and row.get("right", False)
  return is_right


def _choose(milliseconds: Mapping[str, float]) -> str | None:
  """Returns the implementation that `auto` takes for a case.

  This is the fastest one if it is faster than the default by MIN_SPEEDUP.

  Args:
    milliseconds: the times by implementation.

  Returns:
    The implementation. None if no default was timed.
  """
  for default in DEFAULTS:
    if default in milliseconds:
      break
  else:
    return None
  fastest = min(milliseconds, key=milliseconds.__getitem__)
  if milliseconds[default] >= MIN_SPEEDUP * milliseconds[fastest]:
    return fastest
  return default


def update_measured(
  path: pathlib.Path, device_kind: str, rows: Iterable[Row]
) -> None:
  """Writes the entries of a kind of device to a measured.json.

  Entries of other kinds of devices are kept.

  Args:
    path: the file. It is created if it does not exist.
    device_kind: the kind of GPU, as JAX names it.
    rows: the rows of all checks and times on the device.
  """
  table = {}
  if path.exists():
    table = json.loads(path.read_text(encoding="utf-8"))
  table[device_kind] = measured_entries(rows)

  devices = []
  for name, entries in table.items():
    lines = [f"  {json.dumps(entry)}" for entry in entries]
    text = ",\n".join(lines)
    devices.append(f"{json.dumps(name)}: [\n{text}\n]")
  content = ",\n".join(devices)
  path.write_text(f"{{{content}}}\n", encoding="utf-8")
