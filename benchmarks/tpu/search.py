"""The search of `python -m benchmarks.tpu --search` for sizes of blocks.

It tries tiles and sub-tiles for each shape and direction: under a full mask for
whole tiles, and under a causal one for tiles that the mask cuts. The sizes that
are most similar to the table's come first, and the first candidates of all
shapes come before any second one. Each improvement is written to
diffjax/ops/diff_attention/tpu/block_sizes.json at once.

On a TPU, this fills the table of its chip. For v5p and v7x, only estimates of a
single step are complete. So it tries only sub-tiles there, in one step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.tpu.case import DIRECTIONS, Case
from benchmarks.tpu.compare import FUSED, PLAIN, WIDE, MeasureCase, Widths
from benchmarks.tpu.cost import on_tpu
from diffjax.ops.diff_attention.tpu import block_sizes
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

SHAPES = (
  FUSED,
  PLAIN,
  WIDE,
  Widths(D=64, V=128, G=2, M=2),
  Widths(D=96, V=192, G=2, M=2),
  Widths(D=128, V=128, G=2, M=1),
  Widths(D=256, V=256, G=1, M=1),
)
_BFLOAT16_BYTES = 2


class Candidate(NamedTuple):
  """Sizes to try: a square tile, and the queries and keys of a sub-tile.

  One compilation tries them in both directions.
  """

  tile: int
  q: int
  kv: int

  @property
  def subtile(self) -> tuple[int, int]:
    """The queries and keys of a sub-tile."""
    return self.q, self.kv


_TILES = (1024, 2048, 512)
_SUBTILE_QUERIES = (256, 512, 1024, 128)
_SUBTILE_KEYS = (256, 512, 1024)
CANDIDATES = tuple(
  itertools.starmap(
    Candidate, itertools.product(_TILES, _SUBTILE_QUERIES, _SUBTILE_KEYS)
  )
)
# Chips for which only the estimate of a single step is complete, and its
# length.
SINGLE_STEP_LENGTH = {"v5p": 1024, "7x": 1024}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags of the search.

  Attributes:
    generations: The chips.
    minutes: When the search ends. The last candidate is finished.
    length: T.
  """

  generations: list[str]
  minutes: float
  length: int


class Trial(NamedTuple):
  """A candidate for a chip and a shape."""

  generation: str
  widths: Widths
  candidate: Candidate


class SearchKey(NamedTuple):
  """What the best sizes of blocks depend on.

  Attributes:
    generation: The chip.
    widths: The shape.
    direction: "forward" or "backward".
    causal: Whether the mask is causal. Otherwise it is full.
  """

  generation: str
  widths: Widths
  direction: str
  causal: bool


class Best(NamedTuple):
  """The best sub-tile of a tile, with its cost, which is compared first."""

  cost: float
  subtile: tuple[int, int]


def candidates(generation: str, widths: Widths, length: int) -> list[Candidate]:
  """Returns the sizes to try, the most similar ones to the table's first.

  Args:
    generation: The chip. Sizes that do not fit its memory are left out.
    widths: The shape.
    length: T. Tiles that do not divide it are left out.
  """
  listed_blocks = []
  for direction in DIRECTIONS:
    listed_blocks.append(
      block_sizes.choose(
        generation,
        direction,
        q_length=length,
        kv_length=length,
        D=widths.D,
        V=widths.V,
        G=widths.G,
        dtype="bfloat16",
      )
    )

  def distance(candidate: Candidate) -> float:
    """Returns the distance to the most similar sizes of the table."""
    distances = []
    for blocks in listed_blocks:
      for is_full in (True, False):
        sizes = (blocks.q, *blocks.subtile(is_full=is_full))
        distances.append(_log_distance(candidate, sizes))
    return min(distances)

  possible = []
  for candidate in CANDIDATES:
    if _is_possible(candidate, generation, widths, length):
      possible.append(candidate)
  return sorted(possible, key=distance)


def _log_distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
  """Returns how often sizes must be doubled or halved to be equal."""
  return sum(abs(math.log2(x / y)) for x, y in zip(a, b, strict=True))


def _is_possible(
  candidate: Candidate, generation: str, widths: Widths, length: int
) -> bool:
  """Returns whether sizes divide each other and fit the chip's memory."""
  tile, q, kv = candidate
  if length % tile != 0 or tile % q != 0 or tile % kv != 0:
    return False
  blocks = Blocks(tile, tile, q, kv, resident=length)
  for direction in DIRECTIONS:
    num_bytes = block_sizes.footprint(
      direction,
      blocks,
      D=widths.D,
      V=widths.V,
      G=widths.G,
      itemsize=_BFLOAT16_BYTES,
    )
    if num_bytes > block_sizes.vmem_bytes(generation):
      return False
  return True


class BlockSearch:
  """A search for the best block sizes, which writes them to their table.

  Example:

  ```
  BlockSearch(settings, measure).run()
  ```
  """

  def __init__(
    self,
    settings: Settings,
    measure: MeasureCase,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Initializes the search.

    Args:
      settings: The flags.
      measure: Returns the costs of a case.
      clock: Returns the time in seconds.
    """
    self._settings = settings
    self._measure = measure
    self._clock = clock
    # The best sub-tile of each tile, by the size of the tile.
    self._best: dict[SearchKey, dict[int, Best]] = {}

  def run(self) -> None:
    """Tries candidates until all are tried or the time is over."""
    start = self._clock()
    trials = self._trials()
    for index, trial in enumerate(trials):
      minutes_left = self._settings.minutes - (self._clock() - start) / 60
      if minutes_left <= 0:
        print(
          f"{self._settings.minutes:g} minutes are over: {index} of"
          f" {len(trials)} candidates were tried",
          flush=True,
        )
        return
      print(
        f"{index} of {len(trials)} candidates tried, {minutes_left:.1f} minutes"
        " left",
        file=sys.stderr,
        flush=True,
      )
      self._try(trial)

  def _trials(self) -> list[Trial]:
    """Returns all trials, with the first candidates of all shapes first."""
    candidates_by_shape = {}
    for generation in self._settings.generations:
      for widths in SHAPES:
        candidates_by_shape[generation, widths] = self._candidates(
          generation, widths
        )
    trials = []
    for index in range(len(CANDIDATES)):
      for (generation, widths), listed in candidates_by_shape.items():
        if index < len(listed):
          trials.append(Trial(generation, widths, listed[index]))
    return trials

  def _candidates(self, generation: str, widths: Widths) -> list[Candidate]:
    """Returns the sizes to try for a chip and a shape, in order."""
    length = self._length(generation)
    listed = candidates(generation, widths, length)
    if not _has_single_step_estimates(generation):
      return listed
    return [candidate for candidate in listed if candidate.tile == length]

  def _length(self, generation: str) -> int:
    """Returns the length of the rows for which a chip's kernels are tried."""
    if _has_single_step_estimates(generation):
      return SINGLE_STEP_LENGTH[generation]
    return self._settings.length

  def _try(self, trial: Trial) -> None:
    """Measures a candidate under both masks, and writes improvements."""
    generation, widths, candidate = trial
    tile, q, kv = candidate
    length = self._length(generation)
    for causal in (False, True):
      if causal and max(q, kv) == tile:
        # A sub-tile as wide as the tile skips nothing.
        continue
      # The same sub-tile for cut and for whole tiles.
      blocks = (tile, q, kv, q, kv)
      case = Case(
        generation,
        **widths._asdict(),
        length=length,
        causal=causal,
        blocks=blocks,
      )
      for direction, value in self._measure(case).items():
        key = SearchKey(generation, widths, direction, causal)
        best_by_tile = self._best.setdefault(key, {})
        new = Best(value, candidate.subtile)
        if tile not in best_by_tile or new < best_by_tile[tile]:
          best_by_tile[tile] = new
          self._write_best(generation, widths, direction)

  def _write_best(
    self, generation: str, widths: Widths, direction: str
  ) -> None:
    """Writes the best tile under a full mask, and its best sub-tiles.

    Only tiles with known sub-tiles for both masks count.
    """
    full_key = SearchKey(generation, widths, direction, causal=False)
    causal_key = SearchKey(generation, widths, direction, causal=True)
    best_full = self._best.get(full_key, {})
    # A causal mask determines the sub-tiles of tiles that it cuts.
    best_cut = self._best.get(causal_key, {})
    costs = []
    for tile, best in best_full.items():
      if tile in best_cut:
        costs.append((best.cost, tile))
    if not costs:
      return
    _, tile = min(costs)
    write_entry(
      {
        "generation": generation,
        "direction": direction,
        "D": widths.D,
        "V": widths.V,
        "G": widths.G,
        "length": self._length(generation),
        "blocks": [tile, tile, *best_cut[tile].subtile],
        "whole": list(best_full[tile].subtile),
      }
    )


def _has_single_step_estimates(generation: str) -> bool:
  """Returns whether only estimates of a single step are complete."""
  return generation in SINGLE_STEP_LENGTH and not on_tpu()


def write_entry(entry: dict[str, Any]) -> None:
  """Writes an entry to block_sizes.json.

  It replaces the entry of the same chip, direction and shape.
  """
  if entry in block_sizes.table():
    return
  print(
    " ".join(f"{name} {value}" for name, value in entry.items()), flush=True
  )
  entries = [entry]
  for other in block_sizes.table():
    if _sort_key(other) != _sort_key(entry):
      entries.append(other)
  entries.sort(key=_sort_key)
  lines = [json.dumps(listed) for listed in entries]
  text = "[\n" + ",\n".join(lines) + "\n]\n"
  block_sizes.TABLE.write_text(text, encoding="utf-8")
  block_sizes.table.cache_clear()


def _sort_key(entry: dict[str, Any]) -> tuple:
  """Returns the chip, direction and shape of an entry, in order."""
  return (
    block_sizes.GENERATIONS.index(entry["generation"]),
    entry["direction"],
    -entry["G"],
    entry["D"],
    entry["V"],
    entry["length"],
  )
