"""What `auto` should take, by the times: a table for diffjax/ops/diff_attention/gpu/measured.json, and the same in words.

Another implementation than today's (two_call, or chunked where two_call cannot run) must be at least 3% faster, forward + backward, or by
whole training steps where the attention of their shape was not timed. A kernel of which any check was wrong, hung, crashed or is missing is
not in the running, at any length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.gpu.attention import OURS
from diffjax.ops.diff_attention.gpu import measured

MARGIN = 1.03
TODAY = ("two_call", "chunked")

Row = dict[str, Any]
Entry = dict[str, Any]


def checked(rows: Iterable[Row]) -> dict[tuple[str, int], bool]:
  """The kernels (kind, width) that were checked, and whether every check was right."""
  right: dict[tuple[str, int], bool] = {}
  for row in rows:
    case = row["case"]
    if (
      case["do"] == "check"
      and not case.get("decode")
      and (width := measured.bucket(case["D"]))
    ):
      right[case["kind"], width] = right.get(
        (case["kind"], width), True
      ) and row.get("right", False)
  return right


def table(rows: Iterable[Row]) -> list[Entry]:
  """The choice for each kind, width, packed or not, and length that was timed, with the milliseconds that decided."""
  rows = list(rows)
  right, times, steps = checked(rows), {}, {}

  def put(
    into: dict, case: Row, kind: str, D: int, name: str, ms: float
  ) -> None:
    if name != "pallas_gpu" or right.get((kind, D)):
      into.setdefault((kind, D, case["packed"], case["T"]), {})[name] = ms

  for row in rows:
    case = row["case"]
    if case["do"] == "attention" and case["name"] in OURS and "both_ms" in row:
      put(
        times, case, case["kind"], case["D"], OURS[case["name"]], row["both_ms"]
      )
    elif case["do"] == "step" and "seconds_a_step" in row:
      kind = "v1" if case["attention"] == "diff" else "plain"
      put(
        steps,
        case,
        kind,
        case["head_dim"],
        case["name"],
        float(f"{row['seconds_a_step'] * 1e3:.5g}"),
      )
  entries = []
  for (kind, D, packed, T), found in sorted((steps | times).items()):
    today = next((name for name in TODAY if name in found), None)
    best = min(found, key=found.__getitem__)
    if today is None:  # what it would replace was not timed
      continue
    chosen = best if found[today] >= MARGIN * found[best] else today
    of = {} if (kind, D, packed, T) in times else {"of": "whole training steps"}
    entries.append(
      {
        "kind": kind,
        "D": D,
        "packed": packed,
        "T": T,
        "implementation": chosen,
        **of,
        "ms": found,
      }
    )
  return entries


def words(rows: Iterable[Row]) -> list[str]:
  """The verdict, a line each."""
  rows = list(rows)
  lines = [
    f"the kernel of {kind}, D {D}, is out: not all of its checks were made and right"
    for (kind, D), good in checked(rows).items()
    if not good
  ]
  for entry in table(rows):
    others = ", ".join(
      f"{name} {ms:.3g} ms"
      for name, ms in sorted(entry["ms"].items(), key=lambda x: x[1])
    )
    what = (", packed rows" if entry["packed"] else "") + (
      f", by {entry['of']}" if "of" in entry else ""
    )
    lines.append(
      f"{entry['kind']}, D {entry['D']}, T {entry['T']}{what}: auto takes {entry['implementation']} ({others})"
    )
  return [*lines, *_decoding(rows)] or [
    "nothing was timed yet, so auto stays as it is"
  ]


def _decoding(rows: list[Row]) -> list[str]:
  """Of decoding, whose `auto` has no table: decode/choice.py decides."""
  times: dict[str, dict[str, float]] = {}
  for row in rows:
    if row["case"]["do"] == "decode" and "ms" in row:
      times.setdefault(row["case"]["kind"], {})[row["case"]["name"]] = row["ms"]
  wrong = {
    row["case"]["kind"]
    for row in rows
    if row["case"].get("decode") and not row.get("right")
  }
  faster = {
    kind: f"{ms['xla'] / ms['pallas_gpu']:.2f}"
    for kind, ms in times.items()
    if len(ms) == 2
  }
  said = lambda kind: (
    "the check of its kernel was not right"
    if kind in wrong
    else f"the kernel is {faster[kind]}× as fast as xla"
  )
  return [f"decoding {kind}: {said(kind)}" for kind in faster]


def write(path, device: str, rows: Iterable[Row]) -> None:
  """The table of one kind of device, a line an entry, in the form of measured.json."""
  from benchmarks.gpu import results

  lines = ",\n".join(f"  {json.dumps(entry)}" for entry in table(rows))
  results.write(path, f"{{{json.dumps(device)}: [\n{lines}\n]}}\n")
