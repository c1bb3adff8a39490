"""The table of `python -m benchmarks.tpu`: fused kernels, and two calls.

All costs are for one head of differential attention with D 128 and V 256.
It can be computed by one call of a fused kernel, or by calls of a kernel with
one map: two calls with V whole, or four with each half of V, whichever costs
less. The last columns are the two heads of a Transformer, D 128 and V 128.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.tpu import splash
from benchmarks.tpu.case import DIRECTIONS, Case, square_blocks
from benchmarks.tpu.cost import (
  Costs,
  cost,
  cost_of_library,
  format_cost,
  on_tpu,
  unit,
)
from benchmarks.tpu.splash import LIBRARIES, Splash


class Widths(NamedTuple):
  """The widths and maps of a call, in the letters of parameters.py."""

  D: int
  V: int
  G: int
  M: int


FUSED = Widths(D=128, V=256, G=2, M=2)
# One map, with V whole, and with half of V.
WIDE = Widths(D=128, V=256, G=1, M=1)
PLAIN = Widths(D=128, V=128, G=1, M=1)

OURS = "ours"
CAUSAL = "causal"
FULL = "full"
# Causal, and computed from estimates of whole and of cut tiles.
COMPOSED = "composed"

MeasureCase = Callable[[Case], Costs]
MeasureLibrary = Callable[[Splash], Costs | None]


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags of the table.

  Attributes:
    generations: The chips.
    lengths: T of each row.
    masks: "causal" or "full".
    max_estimated_length: Longer rows are computed from shorter ones.
    timeout: Seconds of an estimate.
  """

  generations: list[str]
  lengths: list[int]
  masks: list[str]
  max_estimated_length: int
  timeout: float


class Cost(NamedTuple):
  """The cost of one call. The smaller of two costs has the smaller value.

  Attributes:
    value: Seconds or cycles.
    is_computed: Whether it follows from costs of other cases. It is then marked
      by "~".
  """

  value: float
  is_computed: bool = False

  def times(self, factor: float) -> Cost:
    """Returns the cost of several calls."""
    return Cost(factor * self.value, self.is_computed)


CostByDirection = dict[str, Cost]


def direct_cost(
  case: Case, measure: MeasureCase, max_estimated_length: int
) -> CostByDirection:
  """Returns the cost of a case, by direction.

  The compiler takes too long for long rows. Their cost is extrapolated from two
  shorter lengths: half of `max_estimated_length`, and the whole. The cost of n
  times the shorter length is assumed to be linear · n + square · n².

  Args:
    case: The case.
    measure: Returns the cost of a case that is not too long.
    max_estimated_length: The longest row that is estimated.
  """
  if on_tpu() or case.length <= max_estimated_length:
    costs = measure(case)
    return {direction: Cost(value) for direction, value in costs.items()}

  result = {}
  # Half of the longest row that is estimated.
  shorter = max_estimated_length // 2
  for direction in DIRECTIONS:
    part = functools.partial(
      _cost_of_part, case, direction, causal=case.causal, measure=measure
    )
    once = part(length=shorter)
    twice = part(length=2 * shorter)
    if once is None or twice is None:
      continue
    # once = linear + square and twice = 2·linear + 4·square.
    square = (twice - 2 * once) / 2
    linear = once - square
    n = case.length / shorter
    result[direction] = Cost(linear * n + square * n * n, is_computed=True)
  return result


def composed_cost(
  case: Case, measure: MeasureCase, *, separate_start: bool = True
) -> CostByDirection:
  """Returns the cost of a causal row, computed from the costs of its tiles.

  If the steps of a kernel's grid differ, the compiler's estimate is too large:
  by a fifth for the fused backward kernel, and by three fifths for the one with
  one map. A kernel of a single tile has a correct estimate, and so has a grid
  of whole tiles. So the cost of a causal row of n × n tiles is the cost of n
  tiles that the mask cuts, and of n (n − 1) / 2 whole ones.

  Args:
    case: A case with square tiles. Directions with other tiles are missing.
    measure: Returns the cost of a case.
    separate_start: Whether to subtract the cost of starting a kernel from all
      tiles but one. It follows from a kernel of four whole tiles. Otherwise,
      every tile includes it.

  Returns:
    Costs by direction. A direction without an estimate is missing.
  """
  result = {}
  for direction in DIRECTIONS:
    blocks = case.blocks_of(direction)
    tile = blocks.q
    if blocks.q != blocks.kv or case.length % tile != 0:
      continue
    if direction == "backward" and blocks.resident < case.length:
      continue

    part = functools.partial(_cost_of_part, case, direction, measure=measure)
    four_tiles = None
    if separate_start:
      # A full mask of twice the length has four whole tiles.
      four_tiles = part(length=2 * tile, causal=False)
      if not four_tiles:
        continue
    whole_tile = part(length=tile, causal=False)
    cut_tile = part(length=tile, causal=True)
    if not whole_tile or not cut_tile:
      continue

    start = 0.0
    if four_tiles is not None:
      # whole_tile = start + x and four_tiles = start + 4·x.
      start = max(0.0, (4 * whole_tile - four_tiles) / 3)
      whole_tile = (four_tiles - start) / 4
    num_cut = case.length // tile
    num_whole = num_cut * (num_cut - 1) / 2
    value = start + num_whole * whole_tile + num_cut * (cut_tile - start)
    result[direction] = Cost(value, is_computed=True)
  return result


def _cost_of_part(
  case: Case,
  direction: str,
  *,
  length: int,
  causal: bool,
  measure: MeasureCase,
) -> float | None:
  """Returns the cost of a shorter row with the blocks of the case.

  Args:
    case: The case.
    direction: "forward" or "backward".
    length: The length of the shorter row.
    causal: Whether its mask is causal. Otherwise it is full.
    measure: Returns the cost of a case.
  """
  blocks = square_blocks(case.blocks_of(direction))
  part = dataclasses.replace(case, length=length, causal=causal)
  if square_blocks(part.blocks_of(direction)) != blocks:
    part = dataclasses.replace(part, blocks=blocks)
  return measure(part).get(direction)


def library_cost(
  library: str,
  generation: str,
  V: int,
  length: int,
  mask: str,
  measure: MeasureLibrary,
) -> CostByDirection:
  """Returns the least cost of a library over the tiles tried, by direction.

  Args:
    library: A name in `splash.LIBRARIES`.
    generation: The chip.
    V: Width of values.
    length: T.
    mask: A mask of the table.
    measure: Returns the cost of a call. None if it is unknown.
  """
  best: CostByDirection = {}
  measured_length = length
  if not on_tpu():
    measured_length = min(length, splash.MAX_ESTIMATED_LENGTH)
  # The cost is proportional to the number of pairs of a query and a key.
  scale = (length / measured_length) ** 2
  is_composed = mask != FULL and not on_tpu()
  # Only JAX's library can compute dQ with a kernel of its own.
  two_kernels_options = (False, True) if library == "jax" else (False,)
  for tile, two_kernels in itertools.product(splash.TILES, two_kernels_options):
    q, kv, _ = tile
    if measured_length % q != 0 or measured_length % kv != 0:
      continue
    case = Splash(
      library,
      generation,
      D=128,
      V=V,
      length=measured_length,
      mask=mask,
      tile=tile,
      two_kernels=two_kernels,
    )
    if is_composed:
      costs = _composed_library_cost(case, length, measure)
    else:
      costs = measure(case) or {}
    for direction, value in costs.items():
      is_computed = is_composed or scale != 1
      candidate = Cost(value * scale, is_computed)
      if direction not in best or candidate < best[direction]:
        best[direction] = candidate
  return best


def _composed_library_cost(
  case: Splash, length: int, measure: MeasureLibrary
) -> Costs:
  """Returns the cost of a causal mask, from whole and from cut tiles.

  Args:
    case: The case, whose mask is replaced.
    length: The length that determines the numbers of tiles.
    measure: Returns the cost of a call. None if it is unknown.
  """
  full_costs = measure(dataclasses.replace(case, mask="full")) or {}
  cut_costs = measure(dataclasses.replace(case, mask="cut")) or {}
  result = {}
  for direction, full in full_costs.items():
    if direction in cut_costs:
      cut = cut_costs[direction]
      result[direction] = splash.composed(
        case.library, case.tile, length, full=full, cut=cut
      )
  return result


class SeveralCalls(NamedTuple):
  """Calls with one map that compute a head of differential attention.

  The smaller of two is the cheaper one.

  Attributes:
    cost: The cost of all calls.
    way: "V whole" for two calls, or "V halved" for four.
  """

  cost: Cost
  way: str


def cheapest_calls(
  wide: Cost | None, plain: Cost | None
) -> SeveralCalls | None:
  """Returns the cheapest calls with one map. None if no cost is known.

  Args:
    wide: The cost of a call with V whole.
    plain: The cost of a call with half of V.
  """
  ways = []
  if wide is not None:
    ways.append(SeveralCalls(wide.times(2), "V whole"))
  if plain is not None:
    ways.append(SeveralCalls(plain.times(4), "V halved"))
  return min(ways, default=None)


class CallCosts(NamedTuple):
  """The costs of a library's calls with one map.

  Attributes:
    wide: With V whole. None if unknown.
    plain: With half of V, as in a Transformer. None if unknown.
  """

  wide: Cost | None
  plain: Cost | None


def row_cells(
  fused: Cost | None, costs_by_library: Mapping[str, CallCosts]
) -> list[str]:
  """Returns the cells of a row of the table that have costs.

  Args:
    fused: The cost of the fused kernel. None if unknown.
    costs_by_library: The costs of calls with one map, ours first.

  Returns:
    The fused kernel; the cheapest calls of each library; the best of them
    relative to the fused kernel, and its name; the two heads of a Transformer
    with the best library, and the same relative to the fused kernel.
  """
  cells = [_cost_cell(fused)]
  # Adds a cell for each library, and finds the cheapest for both comparisons.
  best: SeveralCalls | None = None
  best_name = ""
  best_plain: Cost | None = None
  best_plain_library = ""
  for library, costs in costs_by_library.items():
    calls = cheapest_calls(costs.wide, costs.plain)
    cells.append(_cost_cell(calls.cost if calls else None))
    if calls is not None and (best is None or calls < best):
      best = calls
      best_name = f"{library}, {calls.way}"
    if costs.plain is not None:
      two_heads = costs.plain.times(2)
      if best_plain is None or two_heads < best_plain:
        best_plain = two_heads
        best_plain_library = library

  best_ratio = _ratio_cell(best.cost if best else None, fused)
  plain_ratio = _ratio_cell(best_plain, fused)
  plain_cell = f"{plain_ratio} {best_plain_library}".rstrip()
  return [*cells, best_ratio, best_name, _cost_cell(best_plain), plain_cell]


def _cost_cell(cost: Cost | None) -> str:
  """Returns a cost in the unit of the table."""
  if cost is None:
    return "no estimate"
  return f"{_mark(cost.is_computed)}{format_cost(cost.value)}"


def _ratio_cell(cost: Cost | None, fused: Cost | None) -> str:
  """Returns a cost relative to the fused kernel's. Empty if one is unknown."""
  if cost is None or fused is None:
    return ""
  mark = _mark(cost.is_computed or fused.is_computed)
  return f"{mark}{cost.value / fused.value:.2f}"


def _mark(is_computed: bool) -> str:
  """Returns "~" for a number that follows from costs of other cases."""
  return "~" if is_computed else ""


def select_direction(costs: CostByDirection, direction: str) -> Cost | None:
  """Returns the cost of a direction, or the sum of both for "both".

  None if it is unknown.
  """
  if direction != "both":
    return costs.get(direction)
  if costs.keys() != set(DIRECTIONS):
    return None
  total = sum(cost.value for cost in costs.values())
  return Cost(total, costs["forward"].is_computed)


class ModelCosts(NamedTuple):
  """The costs of a row of the table, by direction.

  Attributes:
    fused: Of the fused kernel.
    wide: Of calls with V whole, by library.
    plain: Of calls with half of V, by library.
  """

  fused: CostByDirection
  wide: dict[str, CostByDirection]
  plain: dict[str, CostByDirection]


def measure_row(
  generation: str, length: int, mask: str, settings: Settings
) -> ModelCosts:
  """Returns the costs of all kernels for a chip, a length and a mask.

  Args:
    generation: The chip.
    length: T.
    mask: CAUSAL, FULL or COMPOSED.
    settings: The flags of the table.
  """
  measure = functools.partial(cost, timeout=settings.timeout)
  measure_library = functools.partial(cost_of_library, timeout=settings.timeout)

  def our_cost(widths: Widths) -> CostByDirection:
    case = Case(
      generation, **widths._asdict(), length=length, causal=mask != FULL
    )
    if mask == COMPOSED:
      return composed_cost(case, measure)
    return direct_cost(case, measure, settings.max_estimated_length)

  def cost_with_library(library: str, widths: Widths) -> CostByDirection:
    return library_cost(
      library, generation, widths.V, length, mask, measure_library
    )

  wide = {OURS: our_cost(WIDE)}
  plain = {OURS: our_cost(PLAIN)}
  # The compiler has no estimate of a library's causal grid.
  has_libraries = mask != CAUSAL or on_tpu()
  for library in LIBRARIES:
    wide[library] = {}
    plain[library] = {}
    if has_libraries:
      wide[library] = cost_with_library(library, WIDE)
      plain[library] = cost_with_library(library, PLAIN)
  return ModelCosts(fused=our_cost(FUSED), wide=wide, plain=plain)


def print_table(settings: Settings) -> None:
  """Measures all kernels, and prints each row as soon as it is known."""
  print(
    f"{unit()}: one head of D 128, V 256; calls with one map; and the two"
    " heads of a Transformer with the best library"
  )
  row_format = "{:5}{:>7} {:9}{:9}" + "{:>12}" * 6 + "  {:26}{:>10}  {}"
  headings = ["chip", "T", "mask", "", "fused", "two calls", *LIBRARIES]
  headings += ["best/fused", "best two calls", "plain", "plain/fused"]
  print(row_format.format(*headings))

  masks = []
  for mask in settings.masks:
    masks.append(mask)
    # Estimates of causal rows are less reliable than composed ones.
    if mask == CAUSAL and not on_tpu():
      masks.append(COMPOSED)
  rows = itertools.product(settings.generations, settings.lengths, masks)
  for generation, length, mask in rows:
    costs = measure_row(generation, length, mask, settings)
    for direction in (*DIRECTIONS, "both"):
      costs_by_library = {}
      for library in costs.wide:
        costs_by_library[library] = CallCosts(
          wide=select_direction(costs.wide[library], direction),
          plain=select_direction(costs.plain[library], direction),
        )
      fused = select_direction(costs.fused, direction)
      cells = row_cells(fused, costs_by_library)
      line = row_format.format(generation, length, mask, direction, *cells)
      print(line, flush=True)
  if splash.version("tokamax") is None:
    print(splash.INSTALL)
