"""Checks and times the Hopper kernels on a GPU: python -m benchmarks.gpu

Every kernel is checked against `reference` in float32 on the CPU, on fresh random inputs, each check in a process that a hang or a crash
costs alone. Then attention forward and forward + backward, decoding, and whole training steps are timed beside what they stand against: two
cuDNN calls, tokamax's Hopper attention where it is installed, `chunked`, and plain attention of the Transformer's shape.

Everything is in OUT/gpu.json as soon as it is measured. A second call goes on with what is missing there; it measures again what was found
with other code of the operation, another ptxas, JAX or device. OUT/report.md holds the tables and the verdict, OUT/measured.json the table
of the verdict, which `auto` reads once it is committed as diffjax/ops/diff_attention/gpu/measured.json.

It needs JAX, flax, optax, jaxtyping and etils. The newest ptxas is put first on PATH, and one before CUDA 13.3 is refused, since it can
corrupt products with registers in silence (pip install 'nvidia-cuda-nvcc>=13.3').

python -m benchmarks.gpu --static needs no GPU: it prints what the compiler makes of the kernels.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import cases, pool, ptxas, report, results, verdict
from benchmarks.gpu.clock import Gauge

LIMITS = 120.0, 60.0  # seconds for compiling a case, and for running it
TIMED_AT_ONCE = {
  "steps": 3
}  # models that are on the GPU together; arrays of attention are made when their turn comes


def main(arguments: Sequence[str] | None = None) -> None:
  arguments = sys.argv[1:] if arguments is None else arguments
  if "--static" in arguments:
    import importlib

    importlib.import_module("benchmarks.gpu.static").main(
      [x for x in arguments if x != "--static"]
    )
    return
  flags = _flags(arguments)
  started = time.monotonic()
  parts = cases.rehearsal() if flags.rehearse else cases.parts()
  wanted = flags.parts or list(parts)
  if unknown := [name for name in wanted if name not in parts]:
    sys.exit(
      f"error: --parts: there is no {', '.join(unknown)}; there are {', '.join(parts)}"
    )
  found = _environment(flags)
  store = results.Results(flags.out / "gpu.json", found)
  run = functools.partial(_run, store=store, flags=flags, started=started)
  with Gauge() as gauge:
    # Timings in a row are one list, so that as many as can be compile at once
    for kind, group in itertools.groupby(
      wanted, lambda name: name if name in ("checks", "steps") else "timings"
    ):
      names = list(group)
      every = [case for name in names for case in parts[name]]
      left = [case for case in every if not _is_there(store, case, flags.again)]
      there = (
        f", {len(every) - len(left)} are there"
        if len(left) < len(every)
        else ""
      )
      print(
        f"{', '.join(names)}, after {time.monotonic() - started:.0f} s: {len(left)} to do{there}",
        flush=True,
      )
      run(kind, left, gauge)
  rows = list(store.here())
  missing = [
    case
    for name in dict.fromkeys(["checks", *wanted])
    for case in parts[name]
    if not store.find(case)
  ]
  judged = [
    *rows,
    *({"case": case, "absent": "not done"} for case in missing),
  ]  # a kernel that was not checked is not in the running
  verdict.write(flags.out / "measured.json", found["device"], judged)
  text = "\n".join(
    [
      report.report(rows),
      *report.missing(missing),
      "",
      "VERDICT",
      *verdict.words(judged),
    ]
  )
  results.write(flags.out / "report.md", text + "\n")
  print(text)
  checks = [row for row in rows if row["case"]["do"] == "check"]
  sys.exit(0 if checks and all(row.get("right") for row in checks) else 1)


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    "python -m benchmarks.gpu",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--parts",
    nargs="+",
    metavar="PART",
    help=f"in this order; all by default: {', '.join(cases.parts())}",
  )
  parser.add_argument(
    "--out",
    type=pathlib.Path,
    default=pathlib.Path(__file__).with_name("results"),
    metavar="DIR",
  )
  parser.add_argument(
    "--seconds",
    type=float,
    default=510,
    help="it ends within these; what is missing then is for another call",
  )
  parser.add_argument(
    "--again",
    choices=("failed", "all"),
    help="measure again what DIR has: what was not right there, or everything",
  )
  parser.add_argument(
    "--processes",
    type=int,
    default=min(15, max(2, len(os.sched_getaffinity(0)) - 1)),
    help="that compile at once",
  )
  parser.add_argument(
    "--ptxas",
    type=pathlib.Path,
    metavar="DIR",
    help="whose ptxas comes first on PATH, instead of the newest installed",
  )
  parser.add_argument(
    "--any_ptxas",
    action="store_true",
    help="go on with a ptxas before 13.3, or one that is not known",
  )
  parser.add_argument(
    "--rehearse",
    action="store_true",
    help="tiny sizes on the CPU, the kernels in their interpreter",
  )
  return parser.parse_args(arguments)


def _environment(flags: argparse.Namespace) -> dict[str, Any]:
  """The environment, printed, with the newest ptxas first on PATH. Ends the program where there is no GPU or no safe ptxas."""
  if flags.rehearse:
    os.environ["JAX_PLATFORMS"] = "cpu"
  if flags.ptxas and not (flags.ptxas / "ptxas").exists():
    sys.exit(f"error: --ptxas: there is no {flags.ptxas / 'ptxas'}")
  if path := ptxas.newest(flags.ptxas):
    ptxas.put_first(path)
  found = ptxas.probe()
  if found["backend"] != "gpu" and not flags.rehearse:
    sys.exit(
      f"error: this times a GPU, and the backend is {found['backend']!r}"
    )
  told = lambda x: (
    f"ptxas {x['version']} ({x['path']})"
    if "version" in x
    else f"not known ({x['unknown']})"
  )
  print(
    f"{found['device']}, driver {found['driver']}, {found['processors']} processors, {found['versions']}"
  )
  print(
    f"Mosaic's kernels are assembled by {told(found['mosaic'])}\nXLA's fusions by {told(found['fusions'])}",
    flush=True,
  )
  if (
    (why := ptxas.refusal(found)) and not flags.any_ptxas and not flags.rehearse
  ):
    sys.exit(
      f"error: {why}; install nvidia-cuda-nvcc>=13.3, name a folder by --ptxas, or pass --any_ptxas"
    )
  return found


def _is_there(
  store: results.Results, case: dict[str, Any], again: str | None
) -> bool:
  row = store.find(case)
  if row is None or again == "all":
    return False
  failed = "lost" in row or "error" in row or not row.get("right", True)
  return not (failed and again == "failed")


def _run(
  kind: str,
  left: list[dict[str, Any]],
  gauge: Gauge,
  *,
  store: results.Results,
  flags: argparse.Namespace,
  started: float,
) -> None:
  """Runs the cases that are left: checks beside each other, steps and other timings in turn."""
  deadline = started + flags.seconds

  def record(case: dict[str, Any], result: dict[str, Any]) -> None:
    if case["do"] != "check" and (read := gauge.take()):
      result = {**result, "gpu": read}
    store.add(case, result)
    print(
      f"{time.monotonic() - started:4.0f} s{report.line(case, result)}",
      flush=True,
    )

  count = min(flags.processes, TIMED_AT_ONCE.get(kind, flags.processes))
  if kind == "checks":
    start = lambda: pool.start(0.9 / count, flags.rehearse)
    pool.run_beside(left, start, count, LIMITS, deadline, record)
  else:
    start = lambda: pool.start(0.9, flags.rehearse)
    pool.run_in_turn(left, start, count, LIMITS, deadline, gauge.take, record)


if __name__ == "__main__":
  main()
