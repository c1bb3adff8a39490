"""The cost of rows of packed documents relative to a causal row.

    python -m benchmarks.tpu.packed
    python -m benchmarks.tpu.packed 1100,900,1300,796 random:8

The causal row has the same length and no segment ids. By default, the rows are
one document, two rows of four documents, and four documents with random ends.

On a TPU, these are times. Elsewhere the cost of a row is computed from the
compiler's estimates of the kernel's runs of sub-tiles (runs.py). Each run is
built twice: in one kernel that takes it twice, and in one that takes it four
times. The difference is the cost of two. What each row of tiles begins and ends
with follows from the same kernels. The costs are for one head of differential
attention, D 128, V 256, bfloat16.

The model differs from a real kernel in this. A kernel evaluates a condition
before each run; here, each run has a turn of a loop, which the compiler rates
higher. The ids by which documents are compared are data in both. Two costs are
left out: prefetching the ranges of the ids, which happens once for all heads of
a call, and steps of the grid that load nothing, which exist in rows that are
longer than what is loaded together (4096).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from benchmarks.tpu import runs
from benchmarks.tpu.case import DIRECTIONS, Case, square_blocks
from benchmarks.tpu.compare import FUSED, MeasureCase
from benchmarks.tpu.cost import Costs, cost, format_cost, on_tpu, unit
from benchmarks.tpu.flags import make_parser, selected_generations
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

DEFAULT_ROWS = ("4096", "1100,900,1300,796", "1024,1024,1024,1024", "random:4")
# Number of rows that are drawn.
NUM_DRAWS = 200
ROW_FORMAT = "{:5}{:28}{:>10}{:>10}{:>10}{:>10}"

# The lengths of a row's documents. None for a row without segment ids.
Documents = tuple[int, ...] | None


class RandomDocuments(NamedTuple):
  """A flag for rows of a number of documents with random ends."""

  num_documents: int


def row_costs(case: Case, measure: MeasureCase) -> Costs:
  """Returns the cost of a causal row, by direction.

  Args:
    case: The row, with or without documents.
    measure: Returns the cost of a kernel with a single run or, on a TPU, of the
      row itself.

  Returns:
    Costs by direction. A direction is missing if a run has no estimate.
  """
  if on_tpu():
    return measure(case)
  result = {}
  for direction in DIRECTIONS:
    value = _composed_row_cost(case, direction, measure)
    if value is not None:
      result[direction] = value
  return result


class _RunCost(NamedTuple):
  """The costs of two kernels that consist of one run of sub-tiles.

  Attributes:
    two_times: The cost of the kernel that takes the run twice.
    four_times: The cost of the kernel that takes it four times.
  """

  two_times: float
  four_times: float

  @property
  def once(self) -> float:
    """The cost of the run itself."""
    return (self.four_times - self.two_times) / 2

  @property
  def around(self) -> float:
    """The cost of everything else: what a row of tiles begins and ends with.

    two_times = around + 2 · once, and four_times = around + 4 · once.
    """
    return 2 * self.two_times - self.four_times


def _composed_row_cost(
  case: Case, direction: str, measure: MeasureCase
) -> float | None:
  """Returns the cost of a row as the sum of the costs of its runs.

  A run is a sequence of sub-tiles that the kernel computes under one condition.

  Args:
    case: The row, with or without documents.
    direction: "forward" or "backward".
    measure: Returns the cost of a kernel with a single run.

  Returns:
    The cost. None if a run has no estimate, or if the kernel's blocks are not
    supported.
  """
  blocks = case.blocks_of(direction)
  is_forward = direction == "forward"
  if blocks.q != blocks.kv:
    return None
  if not is_forward and blocks.resident < case.length:
    return None
  ids = None
  if case.documents is not None:
    ids = runs.segment_ids(case.documents)
  schedule = runs.causal_schedule(
    blocks,
    case.length,
    case.G,
    case.M,
    keys_move=is_forward,
    segments=ids is not None,
  )
  counts = runs.count_runs(schedule, ids)

  # The run of a whole tile is measured in any case, for its `around`.
  costs = {}
  whole_tile = _whole_tile_run(blocks)
  for run in (whole_tile, *counts):
    run_cost = _measure_run(case, blocks, direction, run, measure)
    if run_cost is None:
      return None
    costs[run] = run_cost
  num_rows_of_tiles = schedule.num_kv_blocks
  if is_forward:
    num_rows_of_tiles = schedule.num_q_blocks
  total = num_rows_of_tiles * costs[whole_tile].around
  for run, count in counts.items():
    total += count * costs[run].once
  return total


def _whole_tile_run(blocks: Blocks) -> str:
  """Returns the name of the run of a whole tile: a "-" for each sub-tile."""
  num_subtiles = blocks.q**2 // math.prod(blocks.subtile(is_full=True))
  return "-" * num_subtiles


def _measure_run(
  case: Case, blocks: Blocks, direction: str, run: str, measure: MeasureCase
) -> _RunCost | None:
  """Measures kernels of one tile that take a run twice and four times.

  Returns:
    The costs. None if one of them is unknown.
  """
  tile = blocks.q
  one_tile = dataclasses.replace(
    case,
    length=tile,
    blocks=square_blocks(blocks),
    documents=(tile,) if case.documents else None,
  )
  twice = dataclasses.replace(one_tile, run=(run, 2))
  two_times = measure(twice).get(direction)
  if not two_times:
    return None
  four_runs = dataclasses.replace(one_tile, run=(run, 4))
  four_times = measure(four_runs).get(direction)
  if not four_times:
    return None
  return _RunCost(two_times, four_times)


def draw_rows(num_documents: int, length: int) -> list[tuple[int, ...]]:
  """Returns rows of documents with random ends, which are always the same.

  Args:
    num_documents: Documents of a row.
    length: T.
  """
  rng = np.random.default_rng(0)
  rows = []
  for _ in range(NUM_DRAWS):
    # The lengths are the distances between the sorted ends.
    inner_ends = rng.choice(
      np.arange(1, length), num_documents - 1, replace=False
    )
    ends = [0, *sorted(inner_ends.tolist()), length]
    rows.append(tuple(np.diff(ends).tolist()))
  return rows


class PackedTable:
  """Prints the rows of the table for one chip.

  The first row of each length is the causal row without segment ids, to which
  the other rows are compared.
  """

  def __init__(self, generation: str, measure: MeasureCase):
    """Initializes the table.

    Args:
      generation: The chip.
      measure: Returns the costs of a case.
    """
    self._generation = generation
    self._measure = measure
    # Costs of rows without segment ids, by length.
    self._causal_costs: dict[int, Costs] = {}

  def print_row(self, documents: tuple[int, ...]) -> None:
    """Prints the cost of a row of documents of these lengths."""
    length = sum(documents)
    causal = self._print_causal_once(length)
    costs = self._costs(documents, length)
    self._print_line(" ".join(map(str, documents)), costs, causal)

  def print_random_rows(self, num_documents: int, length: int) -> None:
    """Prints the mean and the largest cost of rows with random ends."""
    causal = self._print_causal_once(length)
    name = f"{num_documents} at random"
    drawn = []
    for documents in draw_rows(num_documents, length):
      costs = self._costs(documents, length)
      if costs.keys() != set(DIRECTIONS):
        self._print_line(name, {}, causal)
        return
      drawn.append(costs)

    mean = {}
    for direction in DIRECTIONS:
      values = [costs[direction] for costs in drawn]
      mean[direction] = sum(values) / len(values)
    worst = max(drawn, key=lambda costs: sum(costs.values()))
    self._print_line(f"{name}, mean", mean, causal)
    self._print_line(f"{name}, worst", worst, causal)

  def _costs(self, documents: Documents, length: int) -> Costs:
    """Returns the costs of a row of the table's chip, by direction."""
    case = Case(
      self._generation,
      **FUSED._asdict(),
      length=length,
      causal=True,
      documents=documents,
    )
    return row_costs(case, self._measure)

  def _print_causal_once(self, length: int) -> Costs:
    """Returns the cost of a causal row, and prints it if it is new."""
    if length not in self._causal_costs:
      costs = self._costs(documents=None, length=length)
      self._causal_costs[length] = costs
      self._print_line(f"T {length} without ids", costs, costs)
    return self._causal_costs[length]

  def _print_line(self, name: str, costs: Costs, causal: Costs) -> None:
    """Prints a line of the table.

    Args:
      name: The second cell.
      costs: The costs of the row by direction.
      causal: The costs of the causal row of the same length.
    """
    directions = set(DIRECTIONS)
    if costs.keys() != directions or causal.keys() != directions:
      cells = ["", "", "no estimate", ""]
    else:
      total = sum(costs.values())
      cells = [format_cost(costs[direction]) for direction in DIRECTIONS]
      cells.append(format_cost(total))
      cells.append(f"{total / sum(causal.values()):.2f}")
    print(ROW_FORMAT.format(self._generation, name, *cells), flush=True)


def parse_row(text: str) -> tuple[int, ...] | RandomDocuments:
  """Returns the row of a flag, such as "1100,900" or "random:4"."""
  kind, _, list_of_numbers = text.rpartition(":")
  numbers = []
  for part in list_of_numbers.split(","):
    # 0 marks a part that is no number. It is not allowed either.
    numbers.append(int(part) if part.isdecimal() else 0)
  if min(numbers) > 0:
    if kind == "":
      return tuple(numbers)
    if kind == "random" and len(numbers) == 1:
      return RandomDocuments(numbers[0])
  raise argparse.ArgumentTypeError(
    f"{text!r} is not a row; pass lengths of documents (1100,900,1300,796) or"
    " a number of random ones (random:4)"
  )


def main() -> None:
  """Prints the costs of the rows in the flags."""
  parser = make_parser(__doc__, generations=["v5e", "v6e"], timeout=600.0)
  parser.add_argument(
    "rows",
    nargs="*",
    type=parse_row,
    default=[parse_row(text) for text in DEFAULT_ROWS],
    help="1100,900,1300,796 or random:4",
  )
  parser.add_argument(
    "--length", type=int, default=4096, help="of rows with random ends"
  )
  flags = parser.parse_args()
  # Checked before the first measurement, which takes minutes.
  for row in flags.rows:
    if not isinstance(row, RandomDocuments):
      continue
    if on_tpu():
      parser.error(
        "on a TPU, each row is compiled and timed; pass lengths of documents,"
        " and no random rows, which the default has"
      )
    if row.num_documents > flags.length:
      parser.error(
        f"random:{row.num_documents} has more documents than the row has"
        f" tokens; pass a --length of more than {flags.length}"
      )

  print(
    f"{unit()}: one head of D 128, V 256; the ratio of both directions to the"
    " causal row without segment ids"
  )
  print(ROW_FORMAT.format("chip", "documents", *DIRECTIONS, "both", "ratio"))
  measure = functools.partial(cost, timeout=flags.timeout)
  for generation in selected_generations(flags):
    table = PackedTable(generation, measure)
    for row in flags.rows:
      if isinstance(row, RandomDocuments):
        table.print_random_rows(row.num_documents, flags.length)
      else:
        table.print_row(row)


if __name__ == "__main__":
  main()
