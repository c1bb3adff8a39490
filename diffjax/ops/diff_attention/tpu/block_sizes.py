"""Block sizes of the TPU kernels: one table by chip, kernel and widths (block_sizes.json), fitted to lengths and to the chip's memory.

The table holds what a search over the compiler's estimate found best (`python -m benchmarks.tpu --search`); a shape that it does not hold
takes the nearest entry.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import logging
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

TABLE = pathlib.Path(__file__).with_name("block_sizes.json")
_LANES = 128  # of a vector register: blocks are multiples of it
# What a kernel may use of each chip's vector memory, oldest chip first; the compiler needs the rest.
_VMEM_BYTES = {
  "v4": 16 << 20,
  "v5e": 100 << 20,
  "v5p": 60 << 20,
  "v6e": 100 << 20,
  "7x": 60 << 20,
}
SPAN = 4096  # of what passes, at most so much is loaded together: steps of the grid cost, and so does waiting for the first ones
GENERATIONS = tuple(_VMEM_BYTES)


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Sizes of the tiles in which a kernel walks the attention maps.

  Attributes:
    q: queries of a tile, which are loaded together.
    kv: keys of a tile.
    q_inner: queries of a sub-tile, whose logits are held at once; divides q.
    kv_inner: keys of a sub-tile; divides kv.
    span: tiles of those that pass by one that stays which are loaded together.
    resident: backward, rows (over the query heads of a key head) whose dQ stays in vector memory; more go in several calls.
    whole: queries and keys of a sub-tile in tiles of which all is seen; None for the same.
  """

  q: int
  kv: int
  q_inner: int
  kv_inner: int
  resident: int = 8192
  span: int = 1
  whole: tuple[int, int] | None = None

  def __post_init__(self):
    q, kv = self.subtile(whole=True)
    for outer, inner, part in (
      ("q", "q_inner", self.q_inner),
      ("kv", "kv_inner", self.kv_inner),
      ("q", "whole[0]", q),
      ("kv", "whole[1]", kv),
    ):
      size = getattr(self, outer)
      if part < _LANES or part % _LANES:
        raise ValueError(f"{inner} must be a multiple of {_LANES}, got {part}")
      if size < part or size % part:
        raise ValueError(
          f"{outer} must be a multiple of {inner} = {part}, got {size}"
        )

  def subtile(self, *, whole: bool) -> tuple[int, int]:
    """Queries and keys of a sub-tile, in a tile of which all is seen or in any other."""
    return self.whole if whole and self.whole else (self.q_inner, self.kv_inner)


_forced: contextvars.ContextVar[Mapping[str, Blocks] | None] = (
  contextvars.ContextVar("forced", default=None)
)


@contextlib.contextmanager
def use(**blocks: Blocks) -> Iterator[None]:
  """Within it `choose` returns these as they are: `use(forward=Blocks(…), backward=Blocks(…))`. For tests and for the search.

  They are read while a program is traced: a function that was jitted before keeps its own.
  """
  if unknown := set(blocks) - {"forward", "backward"}:
    raise ValueError(
      f"blocks are for forward or backward, got {', '.join(sorted(unknown))}"
    )
  token = _forced.set({**(_forced.get() or {}), **blocks})
  try:
    yield
  finally:
    _forced.reset(token)


def choose(
  generation: str,
  direction: str,
  q_length: int,
  kv_length: int,
  D: int,
  V: int,
  G: int,
  dtype: Any,
) -> Blocks:
  """The blocks for a shape: the nearest entry of the table, fitted to the lengths and to the chip's vector memory.

  Args:
    generation: the chip, as `pltpu.get_tpu_info().chip_version` names it; one that is not known is taken for the nearest older one.
    direction: "forward" or "backward".
    q_length: number of queries.
    kv_length: number of keys.
    D: width of queries and keys.
    V: width of values.
    G: number of maps.
    dtype: of queries, keys and values.
  """
  if forced := (_forced.get() or {}).get(direction):
    return forced
  wanted = _nearest(generation, direction, kv_length, D, V, G)
  itemsize = jnp.dtype(dtype).itemsize
  limit = vmem_bytes(generation)
  most = 2048
  if (
    itemsize == 4
  ):  # a product is six passes of the matrix unit, all of them in the unrolled body
    most, wanted = (
      512,
      dataclasses.replace(
        wanted,
        q_inner=min(wanted.q_inner, 256),
        kv_inner=min(wanted.kv_inner, 256),
        whole=None,
      ),
    )
  while True:
    q, q_inner = _fit(q_length, min(wanted.q, most), min(wanted.q_inner, most))
    kv, kv_inner = _fit(
      kv_length, min(wanted.kv, most), min(wanted.kv_inner, most)
    )
    whole = (
      None
      if wanted.whole is None
      else (_part(q, wanted.whole[0]), _part(kv, wanted.whole[1]))
    )
    passes, length = (
      (kv, kv_length) if direction == "forward" else (q, q_length)
    )
    for span in range(max(1, min(SPAN, length + passes - 1) // passes), 0, -1):
      blocks = Blocks(
        q, kv, q_inner, kv_inner, resident=0, span=span, whole=whole
      )
      free = limit - footprint(direction, blocks, D, V, G, itemsize)
      enough = free >= 0
      if direction == "backward":
        row = (
          (4 + 2 * itemsize) * G * _lanes(D)
        )  # summed in float32, and stored twice over
        blocks = dataclasses.replace(blocks, resident=free // row // q * q)
        # Each call reads all keys and values and writes their gradients: few rows a call would make that the kernel's work.
        # Nor are rows that are loaded together worth a further call.
        enough = blocks.resident >= min(
          -(-q_length // q) * q, 4 * q if span == 1 else q_length
        )
      if enough or (most == _LANES and span == 1):
        return blocks
    most //= 2


def requested_bytes(
  generation: str,
  direction: str,
  blocks: Blocks,
  D: int,
  V: int,
  G: int,
  dtype: Any,
) -> int:
  """Vector memory that a kernel asks for: what it needs and a quarter more, which the compiler fills with what it moves out of registers.

  The rest of the memory is left to XLA, which keeps there what other operations read next.
  """
  needed = footprint(direction, blocks, D, V, G, jnp.dtype(dtype).itemsize)
  return min(vmem_bytes(generation), needed + needed // 4 + (4 << 20))


def vmem_bytes(generation: str) -> int:
  """Bytes of a chip's vector memory that a kernel may use."""
  return _VMEM_BYTES[known(generation)]


def known(generation: str) -> str:
  """The generation, or for one that is not listed the nearest older one, or the oldest."""
  if generation in _VMEM_BYTES:
    return generation
  number = lambda name: (
    int(match[1]) if (match := re.match(r"v?(\d+)", name)) else 0
  )  # "v5e" and "7x" are 5 and 7
  older = [name for name in GENERATIONS if number(name) <= number(generation)]
  return older[-1] if older else GENERATIONS[0]


def footprint(
  direction: str, blocks: Blocks, D: int, V: int, G: int, itemsize: int
) -> int:
  """Vector memory of a kernel, bytes: what is loaded and stored is there twice, since the next block comes while one is worked on.

  With segment ids, a column of which is kept, and the backward kernel's dK and dV in float32, as where it takes several calls.
  """
  D, V = _lanes(D), _lanes(V)
  rows, keys = blocks.q, blocks.kv
  if direction == "forward":
    keys *= blocks.span
  else:
    rows *= blocks.span
  vectors = (
    8 * 4 * (4 * rows + keys)
  )  # λ, log-sum-exps, deltas and ids fill a register's eight rows
  subtile = 4 * max(
    math.prod(blocks.subtile(whole=whole)) for whole in (False, True)
  )
  column = (
    4 * _LANES * (rows if direction == "forward" else keys)
  )  # of the block that stays
  queries, values = G * rows * D, rows * V
  gradients = (
    rows * V * (G if G > 2 else 1)
  )  # of the output: the noise map of several signal maps has one, too
  loaded = itemsize * (queries + keys * (G * D + V))
  if direction == "forward":
    return (
      2 * (loaded + vectors + itemsize * G * values)
      + 4 * G * (2 * rows * _LANES + values)
      + column
      + 4 * subtile
    )
  stored = 4 * keys * (G * D + V) + itemsize * G * blocks.resident * D
  summed = 4 * (keys * (G * D + V) + G * blocks.resident * D)
  return (
    2 * (loaded + vectors + itemsize * gradients + stored)
    + summed
    + column
    + 6 * subtile
  )


def _lanes(width: int) -> int:
  return -(-width // _LANES) * _LANES


def _fit(length: int, block: int, inner: int) -> tuple[int, int]:
  """Block and inner block for a length: little padding, without becoming much smaller than what was wanted."""
  candidates = []
  for size in range(_LANES, max(block, _LANES) + 1, _LANES):
    part = _part(size, inner)
    # A sub-tile of half the size costs about a fifth more time, a block of half the size about a twentieth.
    cost = (
      (-(-length // size) * size)
      * (1 + 0.2 * (inner / part - 1))
      * (1 + 0.05 * (block / size - 1))
    )
    candidates.append((cost, -size, part))
  _, size, part = min(candidates)
  return -size, part


def _part(size: int, inner: int) -> int:
  """The greatest size of a sub-tile, at most `inner`, that divides a tile."""
  return max(
    part
    for part in range(_LANES, max(inner, _LANES) + 1, _LANES)
    if size % part == 0
  )


def _nearest(
  generation: str, direction: str, length: int, D: int, V: int, G: int
) -> Blocks:
  """The entry of the table for the chip, or for the nearest older one that has any (else the oldest), whose shape is most like this one."""
  entries = [entry for entry in table() if entry["direction"] == direction]
  listed = [
    name
    for name in GENERATIONS
    if any(entry["generation"] == name for entry in entries)
  ]
  older = [
    name
    for name in listed
    if GENERATIONS.index(name) <= GENERATIONS.index(known(generation))
  ]
  chip = older[-1] if older else listed[0]
  if chip != generation:
    _tell(generation, chip)

  def distance(entry) -> float:
    apart = lambda name, value: abs(math.log2(value / entry[name]))
    return (
      4 * apart("G", G)
      + apart("D", D)
      + apart("V", V)
      + apart("length", length) / 4
    )

  entry = min(
    (entry for entry in entries if entry["generation"] == chip), key=distance
  )
  q, kv, q_inner, kv_inner = entry["blocks"]
  return Blocks(q, kv, q_inner, kv_inner, whole=tuple(entry["whole"]))


@functools.cache
def _tell(generation: str, chip: str) -> None:
  """Says, once, that a chip has no block sizes of its own."""
  text = "block sizes for %s are those found for %s; on such a chip, python -m benchmarks.tpu --search finds its own in minutes"
  logging.getLogger(__name__).info(text, generation, chip)


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
  """The entries of block_sizes.json: generation, direction, D, V, G, length, blocks as [q, kv, q_inner, kv_inner], and whole."""
  return tuple(json.loads(TABLE.read_text(encoding="utf-8")))
