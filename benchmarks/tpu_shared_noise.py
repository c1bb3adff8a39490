"""What signal maps that share a noise map cost the TPU kernels, beside the same with the noise map repeated for each signal map.

    python -m benchmarks.tpu_shared_noise                            # Motif-2-12.7B's shape, 4:1, and Motif 3's
    python -m benchmarks.tpu_shared_noise 128,256,2,8 --generations v6e --lengths 2048      # D,V,M and signal maps of a noise map

On a TPU these are times. Anywhere else a causal row of n tiles is put together from a compiler's estimates of one that the mask cuts, n
times, and one that it does not cut, n (n − 1) / 2 times; they are kept in diffjax/ops/diff_attention/tpu/cycles.json. The whole row is more
than the compiler's estimate can walk: five maps at T 2048 take it more than 17 GB and seven minutes.

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


def table(
  generations: list[str], shapes: list[tuple[int, int, int, int]], flags
) -> None:
  unit = (
    "µs"
    if on_tpu()
    else "kilocycles, put together from a compiler's estimates, not a time;"
  )
  print(
    f"{unit} one key head, bfloat16, causal; the ratio is shared / repeated"
  )
  line = "{:5}{:>18}{:>7}  {:9}" + "{:>12}" * 3
  print(
    line.format(
      "chip", "D, V, M, signals", "T", "", "repeated", "shared", "ratio"
    )
  )
  for generation, shape, length in itertools.product(
    generations, shapes, flags.lengths
  ):
    D, V, M, signals = shape
    repeated, shared = (
      Case(generation, D, V, 2, M, length, True, group=signals),
      Case(generation, D, V, signals + 1, M, length, True),
    )
    rows = [
      cost_or_computed(case, flags)
      if on_tpu()
      else composed_cost(case, flags, start_apart=False)
      for case in (repeated, shared)
    ]
    for name, directions in (
      *((way, (way,)) for way in DIRECTIONS),
      ("both", DIRECTIONS),
    ):
      costs = [
        sum(found[way][0] for way in directions)
        if set(directions) <= set(found)
        else None
        for found in rows
      ]
      shown = [
        "no estimate"
        if value is None
        else f"{value * (1e6 if on_tpu() else 1e-3):.1f}"
        for value in costs
      ]
      ratio = f"{costs[1] / costs[0]:.3f}" if costs[0] and costs[1] else ""
      print(
        line.format(
          generation, ", ".join(map(str, shape)), length, name, *shown, ratio
        ),
        flush=True,
      )


def shape_of(text: str) -> tuple[int, int, int, int]:
  """D, V, M and the signal maps of a noise map."""
  numbers = text.split(",")
  if (
    len(numbers) != 4
    or not all(x.isdecimal() and int(x) for x in numbers)
    or numbers[2] not in ("1", "2")
    or int(numbers[3]) < 2
  ):
    raise argparse.ArgumentTypeError(
      f"must be D,V,M,signals, with M 1 or 2 and two signal maps or more (128,256,2,4), got {text!r}"
    )
  D, V, M, signals = map(int, numbers)
  return D, V, M, signals


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "shapes",
    nargs="*",
    type=shape_of,
    default=[shape_of(x) for x in DEFAULT],
    help="D,V,M,signals: 128,256,2,4",
  )
  parser.add_argument(
    "--generations",
    nargs="+",
    choices=TOPOLOGIES,
    default=["v6e"],
    help="not on a TPU",
  )
  parser.add_argument("--lengths", nargs="+", type=int, default=[4096])
  parser.add_argument(
    "--timeout", type=float, default=1800, help="seconds a case"
  )
  flags = parser.parse_args()
  table(
    [str(pltpu.get_tpu_info().chip_version)] if on_tpu() else flags.generations,
    flags.shapes,
    flags,
  )


if __name__ == "__main__":
  main()
