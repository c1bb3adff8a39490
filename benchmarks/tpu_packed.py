"""What a row of packed documents costs the TPU kernels, beside the causal row without segment ids.

    python -m benchmarks.tpu_packed                                  # one document, two rows of four, and four with ends at random
    python -m benchmarks.tpu_packed 1100,900,1300,796 random:8 --generations v6e

On a TPU these are times. Anywhere else a row is put together, by its visits, from a compiler's estimates of the kernels' runs of
instructions (benchmarks/tpu_runs.py); those are in diffjax/ops/diff_attention/tpu/cycles.json with the others, and estimated again where
the kernels have changed: two builds for each run, with two turns and with four, whose difference counts. What all rows of tiles begin and
end with comes from the same builds. One head of differential attention, D 128, V 256, bfloat16.

What runs differs in this. Conditions are evaluated before each run; here each pays for a turn of a loop, which the compiler rates higher.
Documents are compared with ids that are data, in both. Prefetching the ids' ranges, once for all heads of a call, does not count, nor does
a step of the grid that loads nothing, which a row has that is longer than what is loaded together (4096).
"""

from __future__ import annotations

import argparse
import dataclasses
import math

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from benchmarks import tpu_runs
from benchmarks.tpu_cost import (
  DIRECTIONS,
  TOPOLOGIES,
  Case,
  blocks_of,
  cost,
  on_tpu,
  sizes,
)

DEFAULT = ("4096", "1100,900,1300,796", "1024,1024,1024,1024", "random:4")
DRAWS = 200
_Row = tuple[int, ...] | None  # lengths of its documents; None: without ids


def row_cost(case: Case, timeout: float) -> dict[str, float]:
  """A causal row's cost by direction, which is not there where a run has no estimate; on a TPU its time."""
  if on_tpu():
    return cost(case, timeout)
  result = {}
  for direction in DIRECTIONS:
    blocks = blocks_of(case, direction)
    forward, tile = direction == "forward", blocks.q
    if blocks.q != blocks.kv or (not forward and blocks.resident < case.length):
      continue
    ids = None if case.documents is None else tpu_runs.ids_of(case.documents)
    schedule = tpu_runs.schedule_of(
      blocks,
      case.length,
      case.G,
      case.M,
      keys_pass=forward,
      segments=ids is not None,
    )
    one = dataclasses.replace(
      case,
      length=tile,
      blocks=sizes(blocks),
      documents=(tile,) if case.documents else None,
    )

    def turns(
      run: str, one=one, direction=direction
    ) -> tuple[float, float] | None:
      two, four = (
        cost(dataclasses.replace(one, run=(run, times)), timeout).get(direction)
        for times in (2, 4)
      )
      return (two, four) if two and four else None

    visits = tpu_runs.runs_of(schedule, ids)
    whole = "-" * (tile**2 // math.prod(blocks.subtile(is_full=True)))
    found = {run: turns(run) for run in (whole, *visits)}
    known = {run: pair for run, pair in found.items() if pair}
    if len(known) == len(found):
      two, four = known[whole]
      ends = (2 * two - four) * (
        schedule.num_q_blocks if forward else schedule.num_kv_blocks
      )
      result[direction] = ends + sum(
        count * (known[run][1] - known[run][0]) / 2
        for run, count in visits.items()
      )
  return result


def drawn(count: int, length: int) -> list[tuple[int, ...]]:
  """Rows of so many documents with ends at random, the same ones always."""
  draws = np.random.default_rng(0)
  ends = (
    np.sort(draws.choice(np.arange(1, length), count - 1, replace=False))
    for _ in range(DRAWS)
  )
  return [tuple(int(n) for n in np.diff([0, *row, length])) for row in ends]


def table(
  generations: list[str], rows: list[_Row | int], length: int, timeout: float
) -> None:
  print(
    f"{'µs' if on_tpu() else 'kilocycles, put together from a compiler’s estimates;'} one head of D 128, V 256, and both as a ratio to the"
  )
  print("causal row of the same length without segment ids")
  line = "{:5}{:28}" + "{:>10}" * 4
  print(
    line.format("chip", "documents", "forward", "backward", "both", "ratio")
  )
  for generation in generations:
    of = lambda documents, T, generation=generation: row_cost(
      Case(generation, 128, 256, 2, 2, T, True, documents=documents), timeout
    )

    def show(
      name: str,
      found: dict[str, float],
      causal: dict[str, float],
      generation=generation,
    ) -> None:
      if set(found) != set(DIRECTIONS) or set(causal) != set(DIRECTIONS):
        print(
          line.format(generation, name, "", "", "no estimate", ""), flush=True
        )
        return
      costs = [*(found[way] for way in DIRECTIONS), sum(found.values())]
      scaled = (f"{x * (1e6 if on_tpu() else 1e-3):.1f}" for x in costs)
      print(
        line.format(
          generation, name, *scaled, f"{costs[-1] / sum(causal.values()):.2f}"
        ),
        flush=True,
      )

    shown = set()
    for row in rows:
      T = length if isinstance(row, int) else sum(row or (length,))
      causal = of(None, T)
      if T not in shown:
        show(f"T {T} without ids", causal, causal)
        shown.add(T)
      if isinstance(row, int):
        draws = [of(documents, T) for documents in drawn(row, T)]
        if all(set(x) == set(DIRECTIONS) for x in draws):
          show(
            f"{row} at random, mean",
            {
              way: sum(x[way] for x in draws) / len(draws) for way in DIRECTIONS
            },
            causal,
          )
          show(
            f"{row} at random, worst",
            max(draws, key=lambda x: sum(x.values())),
            causal,
          )
        else:
          show(f"{row} at random", {}, causal)
      else:
        show(" ".join(map(str, row or ())), of(row, T), causal)


def packing(text: str) -> tuple[int, ...] | int:
  """Lengths of a row's documents, or how many are drawn at random."""
  kind, _, number = text.rpartition(":")
  lengths = number.split(",")
  if (
    kind in ("", "random")
    and all(x.isdecimal() and int(x) > 0 for x in lengths)
    and (not kind or len(lengths) == 1)
  ):
    return int(number) if kind else tuple(map(int, lengths))
  raise argparse.ArgumentTypeError(
    f"must be lengths of documents (1100,900,1300,796), or how many are drawn (random:4), got {text!r}"
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "rows",
    nargs="*",
    type=packing,
    default=[packing(x) for x in DEFAULT],
    help="1100,900,1300,796 or random:4",
  )
  parser.add_argument(
    "--generations",
    nargs="+",
    choices=TOPOLOGIES,
    default=["v5e", "v6e"],
    help="not on a TPU",
  )
  parser.add_argument(
    "--length", type=int, default=4096, help="of rows drawn at random"
  )
  parser.add_argument(
    "--timeout", type=float, default=600, help="seconds a build"
  )
  flags = parser.parse_args()
  if on_tpu() and any(isinstance(row, int) for row in flags.rows):
    parser.error(
      "rows must be lengths of documents on a TPU, where each row is compiled and timed, got random rows (as the default has)"
    )
  for row in flags.rows:
    if isinstance(row, int) and row > flags.length:
      parser.error(
        f"random:{row} must be no more documents than the row has tokens (--length {flags.length})"
      )
  table(
    [str(pltpu.get_tpu_info().chip_version)] if on_tpu() else flags.generations,
    flags.rows,
    flags.length,
    flags.timeout,
  )


if __name__ == "__main__":
  main()
