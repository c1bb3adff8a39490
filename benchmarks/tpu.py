"""The TPU kernels' cost: fused differential attention, and two calls of a kernel with one map: our own, JAX's splash, tokamax's.

    python -m benchmarks.tpu                            # table, and diffjax/ops/diff_attention/tpu/cycles.json
    python -m benchmarks.tpu --generations v6e --lengths 4096 --masks causal
    python -m benchmarks.tpu --shapes 64,128,2,2 128,128,2,1 --lengths 1024 2048 --masks causal     # D,V,G,M of single calls
    python -m benchmarks.tpu --search --minutes 30      # fills diffjax/ops/diff_attention/tpu/block_sizes.json

On a TPU these are times: medians of calls after warm-up, on inputs that rotate. Anywhere else they are a compiler's estimate that ranks
variants, not a time: libtpu compiles the kernels for a chip that is not there and walks through their instructions and loops. At T 4096
that takes minutes and up to 14 GB of memory a case, and more with every tile: a case that takes longer than --timeout is missing, and
lengths beyond --simulate are computed from two shorter ones (a·n + b·n² for n rows of tiles) and marked ~. libtpu has no estimate for v4,
none that is whole for v5p and v7x (forward at T 2048 it says 1.4 times what it says at 1024, or nothing), and none that is right where the
mask is data (segment ids, offsets known at run time). What diffjax/ops/diff_attention/tpu/cycles.json holds for the same kernels
and blocks, or for the same version of a library, is not estimated again: tokamax's figures are there where it is not installed.

All is for one head of differential attention, D 128, V 256, bfloat16, and for what stands in its place: two calls with one map each, either
with V whole or with each half of V apart (four calls), whichever is less; and the Transformer's two heads of D 128, V 128. A library's
figure is its best over the tiles tried (benchmarks/tpu_baselines.py), each direction for itself. Rows "composed" are causal, too: whole and
cut tiles are estimated apart, where nothing is conditional, and added up, for a library as for our kernels. Of a causal grid as it is the
compiler's estimate has no meaning for a library, and little for a comparison of ours (see composed_cost): compare full masks and these.

The search tries tiles and sub-tiles for each direction, those next to the table's first, and all shapes' first candidates before any
second: under a full mask for tiles that are whole, under a causal one for those that are cut. It writes what it finds at once, and stops
after --minutes. On a TPU it fills the table of the chip that it finds. Elsewhere, for v5p and v7x, it tries sub-tiles alone, in one step:
of that alone their estimate is whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable

from jax.experimental.pallas import tpu as pltpu

from benchmarks import tpu_baselines
from benchmarks.tpu_baselines import LIBRARIES, Splash
from benchmarks.tpu_cost import (
  DIRECTIONS,
  TOPOLOGIES,
  Case,
  blocks_of,
  compile_case,
  cost,
  cost_of_library,
  on_tpu,
  sizes,
)
from diffjax.ops.diff_attention.tpu import block_sizes
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

_Cost = (
  tuple[float, str] | None
)  # of one call, with "~" where it is computed and not measured or estimated; None where nothing is known

# D, V, G, M
FUSED, WIDE, PLAIN = (128, 256, 2, 2), (128, 256, 1, 1), (128, 128, 1, 1)
SEARCHED = (
  FUSED,
  PLAIN,
  WIDE,
  (64, 128, 2, 2),
  (96, 192, 2, 2),
  (128, 128, 2, 1),
  (256, 256, 1, 1),
)
# Tile, and a sub-tile's queries and keys. One compilation tries them in both directions, and each takes what is best for it.
CANDIDATES = tuple(
  itertools.product((1024, 2048, 512), (256, 512, 1024, 128), (256, 512, 1024))
)
# Chips of which the estimate is whole for one step alone: how long that is.
ONE_STEP = {"v5p": 1024, "7x": 1024}


def cost_or_computed(case: Case, flags) -> dict[str, tuple[float, str]]:
  """Cost and its mark by direction: "~" where it is computed from two shorter lengths."""
  if on_tpu() or case.length <= flags.simulate:
    return {
      direction: (value, "")
      for direction, value in cost(case, flags.timeout).items()
    }
  result = {}
  for direction in DIRECTIONS:
    values = [
      _alike(case, direction, length, case.causal, flags)
      for length in (flags.simulate // 2, flags.simulate)
    ]
    if None not in values:
      # a·n + b·n² through two points, where n counts the shorter length.
      square = (values[1] - 2 * values[0]) / 2
      n = case.length / (flags.simulate // 2)
      result[direction] = ((values[0] - square) * n + square * n * n, "~")
  return result


def composed_cost(
  case: Case, flags, *, start_apart: bool = True
) -> dict[str, tuple[float, str]]:
  """A causal mask's cost and its mark by direction, from builds that have no condition: tiles that are whole, and one that is cut.

  What comes once in either grid is told apart by a build of four whole tiles; without `start_apart` each tile counts it. Where steps of one
  grid differ, the estimate adds to each what its instructions do not show: a fifth to the fused backward kernel, three fifths to the same
  with one map. A tile that is there alone has no such steps, and neither has a grid whose tiles are all whole.
  """
  result = {}
  for direction in DIRECTIONS:
    blocks = blocks_of(case, direction)
    tile, count = blocks.q, case.length // blocks.q
    if (
      blocks.q != blocks.kv
      or case.length % tile
      or (direction == "backward" and blocks.resident < case.length)
    ):
      continue
    wanted = ((2 * tile, False), (tile, False), (tile, True))[not start_apart :]
    *four, one, cut = (
      _alike(case, direction, length, causal, flags)
      for length, causal in wanted
    )
    if all(four) and one and cut:
      start = max(0.0, (4 * one - four[0]) / 3) if four else 0.0
      whole = (four[0] - start) / 4 if four else one
      result[direction] = (
        start + count * (count - 1) / 2 * whole + count * (cut - start),
        "~",
      )
  return result


def _alike(
  case: Case, direction: str, length: int, causal: bool, flags
) -> float | None:
  """The cost of the case with another length and mask, but with its blocks."""
  blocks, other = (
    blocks_of(case, direction),
    dataclasses.replace(case, length=length, causal=causal),
  )
  if sizes(blocks_of(other, direction)) != sizes(blocks):
    other = dataclasses.replace(other, blocks=sizes(blocks))
  return cost(other, flags.timeout).get(direction)


def library_cost(
  library: str, generation: str, V: int, length: int, mask: str, flags
) -> dict[str, tuple[float, str]]:
  """A library's least cost over the tiles tried, and its mark, by direction; see tpu_baselines for how a causal mask is estimated."""
  best: dict[str, tuple[float, str]] = {}
  shown = length if on_tpu() else min(length, tpu_baselines.ESTIMATED)
  scale = (length / shown) ** 2
  for tile, two in itertools.product(
    tpu_baselines.TILES, (False, True) if library == "jax" else (False,)
  ):
    if shown % tile[0] or shown % tile[1]:
      continue
    of = lambda how, tile=tile, two=two: (
      cost_of_library(
        Splash(library, generation, 128, V, shown, how, tile, two),
        flags.timeout,
      )
      or {}
    )
    if on_tpu() or mask == "full":
      costs = of(mask)
    else:
      full, cut = of("full"), of("cut")
      costs = {
        way: tpu_baselines.composed(library, tile, length, full[way], cut[way])
        for way in DIRECTIONS
        if way in full and way in cut
      }
    for way, value in costs.items():
      best[way] = min(
        best.get(way, (math.inf, "")),
        (
          value * scale,
          "" if scale == 1 and (mask == "full" or on_tpu()) else "~",
        ),
      )
  return best


def table(generations: list[str], flags) -> None:
  unit = (
    "µs"
    if on_tpu()
    else "kilocycles, a compiler's estimate that ranks variants, not a time;"
  )
  print(
    f"{unit} one head of D 128, V 256; two calls of a kernel with one map, and plain attention's two heads, by the library that is best"
  )
  line = "{:5}{:>7} {:9}{:9}" + "{:>12}" * 6 + "  {:26}{:>10}  {}"
  print(
    line.format(
      "chip",
      "T",
      "mask",
      "",
      "fused",
      "two calls",
      *(f"{x}" for x in LIBRARIES),
      "best/fused",
      "best two calls",
      "plain",
      "plain/fused",
    )
  )
  masks = [
    how
    for mask in flags.masks
    for how in ((mask,) if mask == "full" or on_tpu() else (mask, "composed"))
  ]
  for generation, length, mask in itertools.product(
    generations, flags.lengths, masks
  ):
    measure = composed_cost if mask == "composed" else cost_or_computed
    fused, wide, plain = (
      measure(Case(generation, *shape, length, mask != "full"), flags)
      for shape in (FUSED, WIDE, PLAIN)
    )
    costs = {"ours": (wide, plain)}
    for library in LIBRARIES:
      known = mask != "causal" or on_tpu()
      costs[library] = tuple(
        library_cost(library, generation, V, length, mask, flags)
        if known
        else {}
        for V in (256, 128)
      )
    for direction in (*DIRECTIONS, "both"):
      found = {
        library: tuple(_of(of, direction) for of in pair)
        for library, pair in costs.items()
      }
      print(
        line.format(
          generation,
          length,
          mask,
          direction,
          *_columns(_of(fused, direction), found, 1e6 if on_tpu() else 1e-3),
        ),
        flush=True,
      )
  if tpu_baselines.version("tokamax") is None:
    print(tpu_baselines.INSTALL)


def two_calls(wide: _Cost, plain: _Cost) -> tuple[float, str, str] | None:
  """What two calls with one map take, with V whole or in halves: the lesser, its mark, and which it is."""
  ways = [
    (times * found[0], found[1], how)
    for times, found, how in ((2, wide, "V whole"), (4, plain, "V halved"))
    if found
  ]
  return min(ways, default=None)


def _columns(
  fused: _Cost, costs: dict[str, tuple[_Cost, _Cost]], scale: float
) -> list[str]:
  """From costs of one call: fused; two calls by each library; the least of those as a ratio to fused, and whose it is; plain attention by
  whichever is best, and as a ratio."""
  shown = lambda found: (
    f"{found[1]}{found[0] * scale:.1f}" if found else "no estimate"
  )
  ratio = lambda found: (
    f"{max(found[1], fused[1])}{found[0] / fused[0]:.2f}"
    if found and fused
    else ""
  )
  calls = {library: two_calls(*pair) for library, pair in costs.items()}
  best = min(
    ((*found, library) for library, found in calls.items() if found),
    default=None,
  )
  plain = min(
    (
      (2 * pair[1][0], *pair[1][1:], library)
      for library, pair in costs.items()
      if pair[1]
    ),
    default=None,
  )
  whose = f"{best[3]}, {best[2]}" if best else ""
  twin = f"{ratio(plain)} {plain[2]}" if plain else ""
  return [
    shown(fused),
    *(shown(calls[library]) for library in costs),
    ratio(best),
    whose,
    shown(plain),
    twin,
  ]


def _of(
  found: dict[str, tuple[float, str]], direction: str
) -> tuple[float, str] | None:
  if direction != "both":
    return found.get(direction)
  return (
    (sum(value for value, _ in found.values()), found["forward"][1])
    if set(found) == set(DIRECTIONS)
    else None
  )


def candidates(
  generation: str, D: int, V: int, G: int, length: int
) -> list[tuple[int, int, int]]:
  """The blocks to try for a shape, those first that are most like the table's; without those that do not fit the chip's memory."""
  known = [
    block_sizes.choose(generation, way, length, length, D, V, G, "bfloat16")
    for way in DIRECTIONS
  ]

  def far(blocks: tuple[int, int, int]) -> float:
    return min(
      sum(
        abs(math.log2(a / b))
        for a, b in zip(blocks, (x.q, *x.subtile(is_full=whole)), strict=True)
      )
      for x in known
      for whole in (True, False)
    )

  def fits(blocks: tuple[int, int, int]) -> bool:
    tile, q, kv = blocks
    if length % tile or tile % q or tile % kv:
      return False
    needed = [
      block_sizes.footprint(
        way, Blocks(tile, tile, q, kv, resident=length), D, V, G, 2
      )
      for way in DIRECTIONS
    ]
    return max(needed) <= block_sizes.vmem_bytes(generation)

  return sorted(filter(fits, CANDIDATES), key=far)


def search(
  generations: list[str], flags, clock: Callable[[], float] = time.monotonic
) -> None:
  """Puts the best candidate of each shape and direction into the table of block sizes, as soon as it is found."""
  start = clock()
  shapes = list(itertools.product(generations, SEARCHED))
  estimated = {} if on_tpu() else ONE_STEP
  lengths = {
    chip: estimated.get(chip, flags.search_length) for chip in generations
  }
  lists = {
    (chip, shape): [
      x
      for x in candidates(chip, *shape[:3], lengths[chip])
      if chip not in estimated or x[0] == lengths[chip]
    ]
    for chip, shape in shapes
  }
  turns = [
    (chip, shape, lists[chip, shape][n])
    for n in range(len(CANDIDATES))
    for chip, shape in shapes
    if n < len(lists[chip, shape])
  ]
  found: dict[
    tuple, dict[int, tuple[float, tuple[int, int]]]
  ] = {}  # cost and best sub-tile, by tile
  for n, (chip, shape, blocks) in enumerate(turns):
    spent = (clock() - start) / 60
    if spent >= flags.minutes:
      print(
        f"{flags.minutes:g} minutes are over: {n} of {len(turns)} candidates were tried",
        flush=True,
      )
      return
    print(
      f"{n} of {len(turns)} candidates tried, {flags.minutes - spent:.1f} minutes left",
      file=sys.stderr,
      flush=True,
    )
    tile, *subtile = blocks
    for causal in (False, True):
      if causal and max(subtile) == tile:
        continue  # it would skip nothing
      case = Case(
        chip, *shape, lengths[chip], causal, (tile, *subtile, *subtile)
      )
      for way, value in cost(case, flags.timeout).items():
        best = found.setdefault((chip, shape, way, causal), {})
        if (value, tuple(subtile)) < best.get(tile, (math.inf, ())):
          best[tile] = value, tuple(subtile)
          _enter_best(chip, way, shape, lengths[chip], found)


def _enter_best(
  generation: str, direction: str, shape: tuple[int, ...], length: int, found
) -> None:
  """Writes the tile that is best under a full mask, and its best sub-tiles, once both kinds of them are known."""
  whole, cut = (
    found.get((generation, shape, direction, causal), {})
    for causal in (False, True)
  )
  tiles = [(value, tile) for tile, (value, _) in whole.items() if tile in cut]
  if not tiles:
    return
  _, tile = min(tiles)
  blocks = {
    "blocks": [tile, tile, *cut[tile][1]],
    "whole": list(whole[tile][1]),
  }
  entry = {
    "generation": generation,
    "direction": direction,
    **dict(zip("DVG", shape, strict=False)),
    "length": length,
  }
  if (entry | blocks) in block_sizes.table():
    return
  print(
    " ".join(f"{name} {value}" for name, value in (entry | blocks).items()),
    flush=True,
  )
  others = [
    x for x in block_sizes.table() if {name: x[name] for name in entry} != entry
  ]
  entries = sorted([*others, entry | blocks], key=_order)
  block_sizes.TABLE.write_text(
    "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", encoding="utf-8"
  )
  block_sizes.table.cache_clear()


def _order(entry) -> tuple:
  return (
    block_sizes.GENERATIONS.index(entry["generation"]),
    entry["direction"],
    -entry["G"],
    entry["D"],
    entry["V"],
    entry["length"],
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--generations",
    nargs="+",
    choices=TOPOLOGIES,
    default=["v5e", "v6e"],
    help="not on a TPU",
  )
  parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384])
  parser.add_argument(
    "--masks", nargs="+", choices=("causal", "full"), default=["causal", "full"]
  )
  parser.add_argument(
    "--simulate",
    type=int,
    default=4096,
    help="longest length that is estimated and not computed (a multiple of 2048)",
  )
  parser.add_argument(
    "--timeout", type=float, default=1800, help="seconds a case"
  )
  parser.add_argument(
    "--shapes",
    nargs="+",
    help="D,V,G,M of calls that are measured alone, instead of the table",
  )
  parser.add_argument(
    "--search", action="store_true", help="fill the table of block sizes"
  )
  parser.add_argument(
    "--minutes",
    type=float,
    default=60,
    help="how long the search may go on; the candidate that it is at is finished",
  )
  parser.add_argument("--search_length", type=int, default=2048)
  parser.add_argument("--child", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    name, fields, backward_alone = json.loads(flags.child)
    compile_case(
      {"Case": Case, "Splash": Splash}[name](**fields), backward_alone
    )
    return
  generations = flags.generations
  if on_tpu():
    generations = [str(pltpu.get_tpu_info().chip_version)]
  if flags.shapes:
    for generation, shape, length, mask in itertools.product(
      generations, flags.shapes, flags.lengths, flags.masks
    ):
      case = Case(
        generation, *map(int, shape.split(",")), length, mask == "causal"
      )
      print(
        generation, shape, length, mask, cost(case, flags.timeout), flush=True
      )
    return
  (search if flags.search else table)(generations, flags)


if __name__ == "__main__":
  main()
