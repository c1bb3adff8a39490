"""The cost of a noise map that signal maps share, relative to repeating it.

    python -m benchmarks.tpu.shared_noise
    python -m benchmarks.tpu.shared_noise 128,256,2,8 --lengths 2048

A shape is D, V, M and the number of signal maps that share a noise map. The
default is the shape of Motif-2-12.7B, 4:1, and Motif 3's.

On a TPU, these are times. Elsewhere the cost of a causal row of n tiles is
computed from the compiler's estimates of a tile that the mask cuts, n times,
and of one that it does not cut, n (n − 1) / 2 times. A whole row is more than
the compiler can estimate: five maps at T 2048 take more than 17 GB and seven
minutes.

The expected ratio follows from the products of the matrix unit for n signal
maps, if each is as wide as the unit, as on v6e (256). Forward, there are n + 1
for the logits and n + 1 for the outputs, instead of 2n and 2n. Backward, there
are n + 1 each for logits, dP, dV, dK and dQ, instead of 2n, n, n, 2n and 2n. At
4:1 these are 35 instead of 48, or 0.73. On v5e, whose unit is 128 wide, D 128
and V 256 have 50 instead of 64, or 0.78.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from typing import NamedTuple

from benchmarks.tpu.case import DIRECTIONS, Case
from benchmarks.tpu.compare import MeasureCase, composed_cost
from benchmarks.tpu.cost import Costs, cost, format_cost, on_tpu, unit
from benchmarks.tpu.flags import make_parser, selected_generations

DEFAULT_SHAPES = ("128,256,2,4", "192,128,1,4")
ROW_FORMAT = "{:5}{:>18}{:>7}  {:9}{:>12}{:>12}{:>12}"


class Shape(NamedTuple):
  """The shape of a key head.

  Attributes:
    D: Width of queries and keys.
    V: Width of values.
    M: Maps of a key head.
    signals: Number of signal maps that share a noise map.
  """

  D: int
  V: int
  M: int
  signals: int


def causal_costs(case: Case, measure: MeasureCase) -> Costs:
  """Returns the costs of a causal row, by direction.

  Args:
    case: The row.
    measure: Returns the costs of a case.
  """
  if on_tpu():
    return measure(case)
  composed = composed_cost(case, measure, separate_start=False)
  return {direction: value.value for direction, value in composed.items()}


def total_cost(costs: Costs, directions: tuple[str, ...]) -> float | None:
  """Returns the sum over directions. None if one is missing."""
  total = 0.0
  for direction in directions:
    if direction not in costs:
      return None
    total += costs[direction]
  return total


def print_rows(
  generation: str, shape: Shape, length: int, measure: MeasureCase
) -> None:
  """Prints the costs of a shape, for each direction and for both.

  Args:
    generation: The chip.
    shape: The shape of a key head.
    length: T.
    measure: Returns the costs of a case.
  """
  shared_case = Case(
    generation,
    D=shape.D,
    V=shape.V,
    G=shape.signals + 1,
    M=shape.M,
    length=length,
    causal=True,
  )
  # Each signal map has a query head with a noise map of its own.
  repeated_case = dataclasses.replace(shared_case, G=2, group=shape.signals)
  repeated_costs = causal_costs(repeated_case, measure)
  shared_costs = causal_costs(shared_case, measure)

  rows = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": DIRECTIONS,
  }
  for name, directions in rows.items():
    repeated = total_cost(repeated_costs, directions)
    shared = total_cost(shared_costs, directions)
    ratio = ""
    if repeated and shared:
      ratio = f"{shared / repeated:.3f}"
    line = ROW_FORMAT.format(
      generation,
      ", ".join(map(str, shape)),
      length,
      name,
      _cell(repeated),
      _cell(shared),
      ratio,
    )
    print(line, flush=True)


def _cell(value: float | None) -> str:
  return "no estimate" if value is None else format_cost(value)


def parse_shape(text: str) -> Shape:
  """Returns the shape of a flag, such as "128,256,2,4"."""
  numbers = text.split(",")
  if len(numbers) == 4 and all(number.isdecimal() for number in numbers):
    shape = Shape(*map(int, numbers))
    has_widths = shape.D > 0 and shape.V > 0
    if has_widths and shape.M in (1, 2) and shape.signals >= 2:
      return shape
  raise argparse.ArgumentTypeError(
    f"{text!r} is not a shape; pass D,V,M,signals with M 1 or 2 and at least"
    " two signal maps, such as 128,256,2,4"
  )


def main() -> None:
  """Prints the costs of the shapes and lengths in the flags."""
  parser = make_parser(__doc__, generations=["v6e"], timeout=1800.0)
  parser.add_argument(
    "shapes",
    nargs="*",
    type=parse_shape,
    default=[parse_shape(text) for text in DEFAULT_SHAPES],
    help="D,V,M,signals, such as 128,256,2,4",
  )
  parser.add_argument("--lengths", nargs="+", type=int, default=[4096])
  flags = parser.parse_args()

  print(f"{unit()}: one key head, bfloat16, causal")
  headings = ("chip", "D, V, M, signals", "T", "", "repeated", "shared")
  print(ROW_FORMAT.format(*headings, "ratio"))
  measure = functools.partial(cost, timeout=flags.timeout)
  generations = selected_generations(flags)
  rows = itertools.product(generations, flags.shapes, flags.lengths)
  for generation, shape, length in rows:
    print_rows(generation, shape, length, measure)


if __name__ == "__main__":
  main()
