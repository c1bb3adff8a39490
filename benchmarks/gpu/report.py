"""What was found, in Markdown and in words."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu import static

Row = dict[str, Any]
_UNSAID = (
  "do",
  "vocab_size",
  "num_layers",
  "embed_dim",
  "head_dim",
  "ffn_dim",
)  # of a case, in print


def line(case: dict[str, Any], result: dict[str, Any]) -> str:
  """A row as it is printed when it ends."""
  return f"  {outcome(case, result):40} {about(case)}"


def about(case: dict[str, Any]) -> str:
  """A case in words."""
  said = {
    name: value
    for name, value in case.items()
    if value is not False and name not in _UNSAID
  }
  return " ".join(
    str(x)
    if name in ("kind", "name", "attention")
    else name
    if x is True
    else f"{name} {x}"
    for name, x in said.items()
  )


def outcome(case: dict[str, Any], result: dict[str, Any]) -> str:
  if "lost" in result:
    return f"LOST ({result['lost']} after {result['seconds']} s): {_end(result['stderr'])}"
  if "error" in result:
    return f"ERROR {result['error'][:300]}"
  if "absent" in result:
    return result["absent"]
  if case["do"] == "check":
    how = (
      "right"
      if result["right"]
      else "MOVES"
      if result.get("moves")
      else "WRONG"
    )
    return f"{how} {json.dumps(result['errors'])}"
  if case["do"] == "decode":
    return f"{result['ms'] * 1e3:.0f} µs, {result['gigabytes_per_second']} GB/s"
  if case["do"] == "step":
    return f"{result['tokens_per_second']:,} tokens/s" + (
      f", MFU {result['mfu']:.1%}" if "mfu" in result else ""
    )
  rates = [
    f"{result[name]:.0f}"
    for name in ("forward_tflops", "backward_tflops")
    if name in result
  ]
  return f"{result['forward_ms']:.3g}, {result['both_ms']:.3g} ms" + (
    f" ({', '.join(rates)} TF/s)" if rates else ""
  )


def _end(text: str) -> str:
  lines = [line for line in text.splitlines() if line.strip()]
  return lines[-1][:200] if lines else "nothing was said"


def report(rows: Iterable[Row]) -> str:
  """All rows: checks that were not right, a table of attention, decoding, steps."""
  rows = list(rows)
  of = lambda what: [row for row in rows if row["case"]["do"] == what]
  checks = of("check")
  bad = [row for row in checks if not row.get("right")]
  lines = [
    f"{len(checks) - len(bad)} of {len(checks)} checks right",
    *(line(row["case"], row) for row in bad),
  ]
  for packed in (False, True):
    if found := [
      row for row in of("attention") if row["case"]["packed"] == packed
    ]:
      lines += [
        "",
        *_attention(found, "packed rows" if packed else "rows of one document"),
      ]
  if found := [
    row
    for row in of("attention")
    if row.get("kernels_ms") and not row["case"]["packed"]
  ]:
    lines += ["", *_kernels(found)]
  for what in ("decode", "step"):
    if found := of(what):
      lines += [
        "",
        "decoding" if what == "decode" else "training steps",
        *(line(row["case"], row) for row in found),
      ]
  if any(row.get("clock") == "clock" for row in rows):
    lines.append(
      "some times are the host's clock's, with what it takes to start a program"
    )
  return "\n".join(lines)


def missing(cases: Iterable[Row]) -> list[str]:
  """Cases that are not there, by what they time."""
  counts = collections.Counter(
    f"{case['do']} {about({name: x for name, x in case.items() if name in ('kind', 'D', 'attention', 'packed')})}"
    for case in cases
  )
  return [f"missing: {count} of {what}" for what, count in counts.items()]


def _kernels(rows: Sequence[Row]) -> list[str]:
  """Rates of our kernels in the products that their tasks need, as static.py counts and estimates them."""
  lines = [
    "| TF/s of a kernel | T | forward | dQ | dK and dV |",
    "|---" * 5 + "|",
  ]
  for case, ms in ((row["case"], row["kernels_ms"]) for row in rows):
    pairs = case["B"] * case["H"] * case["T"] * (case["T"] + 1) / 2
    taken = [
      ms.get(f"diff_attention_{kernel}_{case['kind']}")
      for kernel in static.KERNELS
    ]
    rates = [
      2 * units * case["D"] * pairs / x / 1e9 if x else None
      for units, x in zip(static.NEEDED[case["kind"]], taken, strict=True)
    ]
    cells = [
      f"{case['kind']} D {case['D']}",
      case["T"],
      *("–" if rate is None else f"{rate:.0f}" for rate in rates),
    ]
    lines.append("| " + " | ".join(map(str, cells)) + " |")
  return lines


def _attention(rows: Sequence[Row], title: str) -> list[str]:
  """A row a shape: forward, and forward + backward, in ms."""
  at = {
    (
      row["case"]["kind"],
      row["case"]["D"],
      row["case"]["T"],
      row["case"]["name"],
    ): row
    for row in rows
  }
  names = list(dict.fromkeys(key[3] for key in at))
  lines = [
    f"| {title} | T | "
    + " | ".join(f"{name} (ms)" for name in names)
    + " | fused TF/s | best other / fused | plain / fused |"
  ]
  lines.append("|---" * (len(names) + 5) + "|")
  total = lambda row: row["both_ms"] if row and "both_ms" in row else None
  for kind, D, T in dict.fromkeys(key[:3] for key in at):
    found = {name: at.get((kind, D, T, name)) for name in names}
    cell = lambda row: (
      f"{row['forward_ms']:.3g}, {row['both_ms']:.3g}"
      if total(row)
      else "–"
      if not row
      else outcome(row["case"], row)[:40]
    )
    fused = total(found.get("fused"))
    others = [
      x for name, row in found.items() if name != "fused" and (x := total(row))
    ]
    plains = (
      [
        x
        for key, row in at.items()
        if key[:3] == ("plain", D, T) and (x := total(row))
      ]
      if kind != "plain"
      else []
    )
    ratio = lambda times, fused=fused: (
      f"{min(times) / fused:.2f}" if times and fused else "–"
    )
    row = found.get("fused") or {}
    rates = (
      f"{row['forward_tflops']:.0f}, {row['backward_tflops']:.0f}"
      if "backward_tflops" in row
      else "–"
    )
    cells = [
      f"{kind} D {D}",
      T,
      *(cell(found[name]) for name in names),
      rates,
      ratio(others),
      ratio(plains),
    ]
    lines.append("| " + " | ".join(map(str, cells)) + " |")
  return lines
