"""What signal maps that share a noise map cost the TPU kernels, beside the same with the noise map repeated for each signal map.

    python -m benchmarks.tpu_shared_noise                            # Motif-2-12.7B's shape, 4:1, and Motif 3's
    python -m benchmarks.tpu_shared_noise 128,256,2,8 --generations v6e --lengths 1024 2048      # D,V,M and signal maps of a noise map

On a TPU these are times. Anywhere else they are a compiler's estimate, as in benchmarks/tpu.py, and are kept where its are: a causal row as
the compiler rates the grid, beyond --simulate computed from two shorter ones (marked ~), and "composed" of builds without a condition.

Products of the matrix unit for n signal maps, each as wide as v6e's unit (256): forward n + 1 for logits and n + 1 for outputs instead of
2n and 2n; backward n + 1 each for logits, dP, dV, dK and dQ instead of 2n, n, n, 2n and 2n. At 4:1 that is 35 instead of 48, or 0.73.
On v5e, whose unit is 128 wide, D 128 and V 256 have 50 instead of 64, or 0.78.
"""

from __future__ import annotations

import argparse
import itertools

from jax.experimental.pallas import tpu as pltpu

from benchmarks.tpu import composed_cost, cost_or_computed
from benchmarks.tpu_cost import DIRECTIONS, TOPOLOGIES, Case, on_tpu

DEFAULT = ("128,256,2,4", "192,128,1,4")


def table(generations: list[str], shapes: list[tuple[int, int, int, int]], flags) -> None:
  unit = "µs" if on_tpu() else "kilocycles, a compiler's estimate, not a time;"
  print(f"{unit} one key head, bfloat16, causal; shared / repeated is the ratio")
  line = "{:5}{:>18}{:>7} {:9}{:9}" + "{:>12}" * 3
  print(line.format("chip", "D, V, M, signals", "T", "", "", "repeated", "shared", "ratio"))
  for generation, shape, length in itertools.product(generations, shapes, flags.lengths):
    D, V, M, signals = shape
    shared = Case(generation, D, V, signals + 1, M, length, True)
    repeated = Case(generation, D, V, 2, M, length, True, group=signals)
    for measure in (cost_or_computed,) if on_tpu() else (cost_or_computed, composed_cost):
      costs = [measure(case, flags) for case in (repeated, shared)]
      for direction in (*DIRECTIONS, "both"):
        found = [_sum(cost, DIRECTIONS if direction == "both" else (direction,)) for cost in costs]
        shown = [f"{mark}{value * (1e6 if on_tpu() else 1e-3):.1f}" if value else "no estimate" for value, mark in found]
        ratio = f"{found[1][0] / found[0][0]:.3f}" if all(value for value, _ in found) else ""
        how = "composed" if measure is composed_cost else ""
        print(line.format(generation, ", ".join(map(str, shape)), length, how, direction, *shown, ratio), flush=True)


def _sum(cost: dict[str, tuple[float, str]], directions: tuple[str, ...]) -> tuple[float | None, str]:
  if not set(directions) <= set(cost):
    return None, ""
  return sum(cost[way][0] for way in directions), cost[directions[0]][1]


def shape_of(text: str) -> tuple[int, int, int, int]:
  """D, V, M and the signal maps of a noise map."""
  numbers = text.split(",")
  if len(numbers) != 4 or not all(x.isdecimal() and int(x) for x in numbers) or numbers[2] not in ("1", "2") or int(numbers[3]) < 2:
    raise argparse.ArgumentTypeError(f"must be D,V,M,signals, with M 1 or 2 and two signal maps or more (128,256,2,4), got {text!r}")
  D, V, M, signals = map(int, numbers)
  return D, V, M, signals


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("shapes", nargs="*", type=shape_of, default=[shape_of(x) for x in DEFAULT], help="D,V,M,signals: 128,256,2,4")
  parser.add_argument("--generations", nargs="+", choices=TOPOLOGIES, default=["v6e"], help="not on a TPU")
  parser.add_argument("--lengths", nargs="+", type=int, default=[4096])
  parser.add_argument("--simulate", type=int, default=4096, help="longest length that is estimated and not computed (a multiple of 2048)")
  parser.add_argument("--timeout", type=float, default=1800, help="seconds a case")
  flags = parser.parse_args()
  table([str(pltpu.get_tpu_info().chip_version)] if on_tpu() else flags.generations, flags.shapes, flags)


if __name__ == "__main__":
  main()
