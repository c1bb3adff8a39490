"""Block sizes of the TPU kernels, by generation, kernel and widths.

block_sizes.json has the best sizes of a search over the compiler's estimate
(`python -m benchmarks.tpu --search`). Another shape takes the nearest entry,
fitted to the lengths and to the vector memory (VMEM).

A kernel keeps a stationary block, and loads blocks of the other side, the
moving blocks, one after the other. Forward, a block of queries is stationary.
Backward, a block of keys is.
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
from typing import Any, Literal

import jax.numpy as jnp

from diffjax.ops.diff_attention.tiles import round_up

TABLE = pathlib.Path(__file__).with_name("block_sizes.json")

# Bytes of VMEM that a kernel may use, the oldest generation first. The compiler
# needs the rest.
_VMEM_BYTES = {
  "v4": 16 << 20,
  "v5e": 100 << 20,
  "v5p": 60 << 20,
  "v6e": 100 << 20,
  "7x": 60 << 20,
}
GENERATIONS = tuple(_VMEM_BYTES)

# Lanes of a vector register. Blocks are multiples of it.
_LANES = 128
# Rows of a vector register. An array with fewer rows fills all of them in VMEM.
_SUBLANES = 8
_FLOAT32_BYTES = 4

# The most moving rows that are loaded together. A larger span has fewer steps
# of the grid, but waits longer for its first rows.
SPAN = 4096
# The largest block. In float32, a product is six passes of the matrix unit, all
# of them in the kernel's unrolled code, so blocks are smaller.
_MAX_BLOCK = 2048
_MAX_FLOAT32_BLOCK = 512
_MAX_FLOAT32_SUBTILE = 256

Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The sizes of the tiles in which a kernel computes the attention maps.

  A tile is a block of queries and a block of keys. It is computed in sub-tiles,
  whose logits exist at once.

  Attributes:
    q: queries of a tile.
    kv: keys of a tile.
    q_inner: queries of a sub-tile, a divisor of q.
    kv_inner: keys of a sub-tile, a divisor of kv.
    resident: backward only, the number of query rows of a key head, over all
      its query heads, whose dQ stays in VMEM. More rows need several calls.
    span: the number of moving blocks that are loaded together.
    full_subtile: the queries and keys of a sub-tile in full tiles, which have
      no masked logit. None for (q_inner, kv_inner).

  Raises:
    ValueError: if a size is not a multiple of 128, or if a sub-tile does not
      divide its tile.
  """

  q: int
  kv: int
  q_inner: int
  kv_inner: int
  resident: int = 8192
  span: int = 1
  full_subtile: tuple[int, int] | None = None

  def __post_init__(self):
    """Checks that sub-tiles divide the tile, of `q` queries and `kv` keys."""
    _check_subtile("q", self.q, "q_inner", self.q_inner)
    _check_subtile("kv", self.kv, "kv_inner", self.kv_inner)
    if self.full_subtile is not None:
      q_full, kv_full = self.full_subtile
      _check_subtile("q", self.q, "full_subtile[0]", q_full)
      _check_subtile("kv", self.kv, "full_subtile[1]", kv_full)

  def subtile(self, *, is_full: bool) -> tuple[int, int]:
    """Returns the queries and keys of a sub-tile.

    Args:
      is_full: whether the tile has no masked logit.
    """
    if is_full and self.full_subtile is not None:
      return self.full_subtile
    return self.q_inner, self.kv_inner


def _check_subtile(
  tile_name: str, tile: int, subtile_name: str, subtile: int
) -> None:
  """Checks the length of a tile and of its sub-tiles, along one axis.

  A tile is computed in sub-tiles, which must be whole vector registers.

  Args:
    tile_name: the field that has the tile's length, for the error message.
    tile: the length of the tile.
    subtile_name: the field that has the sub-tile's length.
    subtile: the length of a sub-tile.

  Raises:
    ValueError: if the sub-tile is not a multiple of 128, or if it does not
      divide the tile.
  """
  if subtile < _LANES or subtile % _LANES != 0:
    raise ValueError(
      f"{subtile_name} must be a multiple of {_LANES}; got {subtile}"
    )
  if tile < subtile or tile % subtile != 0:
    raise ValueError(
      f"{tile_name} must be a multiple of {subtile_name} = {subtile};"
      f" got {tile}"
    )


# Blocks that `use` sets, by direction.
_forced: contextvars.ContextVar[Mapping[str, Blocks] | None] = (
  contextvars.ContextVar("forced", default=None)
)


@contextlib.contextmanager
def use(**blocks: Blocks) -> Iterator[None]:
  """Makes `choose` return these blocks. For tests and for the search.

  They are read while a program is traced. A function that was compiled before
  keeps its own. Of nested contexts, the inner one wins.

  Example:
    with use(forward=Blocks(q=512, kv=512, q_inner=256, kv_inner=256)):
      ...

  Args:
    **blocks: the block sizes, by the direction of the pass.

  Raises:
    ValueError: if a name is neither "forward" nor "backward".
  """
  unknown = set(blocks) - {"forward", "backward"}
  if unknown:
    raise ValueError(
      f"blocks are for forward or backward; got {', '.join(sorted(unknown))}"
    )
  outer_blocks = _forced.get() or {}
  token = _forced.set({**outer_blocks, **blocks})
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
  """Returns the block sizes of a kernel for a shape.

  Takes the entry of the table with the most similar shape, and makes its blocks
  smaller until the kernel fits in vector memory (VMEM).

  Args:
    generation: the TPU, as `pltpu.get_tpu_info().chip_version` names it. The
      nearest older one replaces an unknown one.
    direction: "forward" or "backward".
    q_length: number of queries.
    kv_length: number of keys.
    D: width of queries and keys.
    V: width of values.
    G: number of maps.
    dtype: of queries, keys and values.
  """
  forced = _forced.get() or {}  # the blocks of the context `use`
  if direction in forced:
    return forced[direction]

  entry = _nearest_entry(generation, direction, kv_length, D, V, G)
  itemsize = jnp.dtype(dtype).itemsize
  max_block = _MAX_BLOCK
  if itemsize == _FLOAT32_BYTES:
    # The table has sizes for bfloat16. A product in float32 is six passes of
    # the matrix unit, all of them in unrolled code, so blocks are smaller.
    max_block = _MAX_FLOAT32_BLOCK
    entry = dataclasses.replace(
      entry,
      q_inner=min(entry.q_inner, _MAX_FLOAT32_SUBTILE),
      kv_inner=min(entry.kv_inner, _MAX_FLOAT32_SUBTILE),
      full_subtile=None,
    )

  while True:
    blocks = _fit_to_lengths(entry, q_length, kv_length, max_block)
    max_span = _max_span(direction, blocks, q_length, kv_length)
    blocks, fits = _with_largest_span(
      blocks,
      max_span,
      generation,
      direction,
      q_length=q_length,
      D=D,
      V=V,
      G=G,
      itemsize=itemsize,
    )
    # Blocks of 128 are the smallest. They are tried even if they do not fit.
    if fits or max_block == _LANES:
      return blocks
    max_block //= 2


def _max_span(
  direction: str, blocks: Blocks, q_length: int, kv_length: int
) -> int:
  """Returns the most blocks that a kernel may load together.

  They are blocks of keys in the forward pass, and of queries in the backward
  pass. They have at most SPAN tokens, unless a single block has more, and not
  more blocks than there are.
  """
  if direction == "forward":
    block = blocks.kv
    num_blocks = math.ceil(kv_length / block)
  else:
    block = blocks.q
    num_blocks = math.ceil(q_length / block)
  return max(1, min(SPAN // block, num_blocks))


def _with_largest_span(
  blocks: Blocks,
  max_span: int,
  generation: str,
  direction: str,
  *,
  q_length: int,
  D: int,
  V: int,
  G: int,
  itemsize: int,
) -> tuple[Blocks, bool]:
  """Returns the blocks with the largest span that fits in vector memory.

  The span is the number of blocks that are loaded together. In the backward
  pass, the remaining memory is used to keep rows of dQ.

  Returns:
    The blocks, and whether they fit. If no span fits, the span is 1.
  """
  for span in range(max_span, 0, -1):
    candidate = dataclasses.replace(blocks, span=span)
    needed_bytes = footprint(direction, candidate, D, V, G, itemsize)
    free_bytes = vmem_bytes(generation) - needed_bytes
    if direction == "forward":
      fits = free_bytes >= 0
    else:
      candidate = _with_resident_rows(candidate, free_bytes, D, G, itemsize)
      fits = _has_enough_resident_rows(candidate, q_length)
    if fits:
      return candidate, True
  return candidate, False


def _fit_to_lengths(
  entry: Blocks, q_length: int, kv_length: int, max_block: int
) -> Blocks:
  """Returns an entry's blocks, made smaller where that saves padding.

  Arrays are padded to whole blocks. So a length that is not a multiple of the
  block may be faster with a smaller block.

  Args:
    entry: block sizes that are good for a similar shape.
    q_length: the number of queries.
    kv_length: the number of keys.
    max_block: the most queries or keys of a block.
  """
  q, q_inner = _fit_to_length(
    q_length, min(entry.q, max_block), min(entry.q_inner, max_block)
  )
  kv, kv_inner = _fit_to_length(
    kv_length, min(entry.kv, max_block), min(entry.kv_inner, max_block)
  )
  full_subtile = None
  if entry.full_subtile is not None:
    q_full, kv_full = entry.full_subtile
    # Sub-tiles must divide the new blocks.
    full_subtile = (
      _largest_divisor(q, q_full),
      _largest_divisor(kv, kv_full),
    )
  return Blocks(q, kv, q_inner, kv_inner, resident=0, full_subtile=full_subtile)


def _fit_to_length(length: int, block: int, subtile: int) -> tuple[int, int]:
  """Returns the sizes of blocks and sub-tiles that are best for a length.

  A smaller block needs less padding, but the kernel is slower per token. This
  minimizes the product of both.

  Example:
    _fit_to_length(300, block=512, subtile=512) → (384, 384), which pads the
    length to 384 instead of 512.

  Args:
    length: the number of queries or keys.
    block: the largest block.
    subtile: the largest sub-tile.

  Returns:
    The block and the sub-tile, which divides the block.
  """
  best_cost = math.inf
  best = (0, 0)
  for block_size in range(_LANES, max(block, _LANES) + 1, _LANES):
    subtile_size = _largest_divisor(block_size, subtile)
    # A sub-tile of half the size costs about a fifth more time, and a block of
    # half the size about a twentieth.
    subtile_penalty = 1 + 0.2 * (subtile / subtile_size - 1)
    block_penalty = 1 + 0.05 * (block / block_size - 1)
    padded_length = round_up(length, block_size)
    cost = padded_length * subtile_penalty * block_penalty
    if cost <= best_cost:  # of equal costs, the larger block
      best_cost = cost
      best = (block_size, subtile_size)
  return best


def _largest_divisor(tile: int, max_subtile: int) -> int:
  """Returns the largest size of a sub-tile that divides a tile."""
  largest = _LANES
  for size in range(_LANES, max(max_subtile, _LANES) + 1, _LANES):
    if tile % size == 0:
      largest = size
  return largest


def _with_resident_rows(
  blocks: Blocks, free_bytes: int, D: int, G: int, itemsize: int
) -> Blocks:
  """Returns the blocks with as many resident rows of dQ as fit."""
  # A row of dQ is summed in float32, and stored in two buffers.
  row_bytes = (_FLOAT32_BYTES + 2 * itemsize) * G * round_up(D, _LANES)
  num_rows = free_bytes // row_bytes
  return dataclasses.replace(blocks, resident=num_rows // blocks.q * blocks.q)


def _has_enough_resident_rows(blocks: Blocks, q_length: int) -> bool:
  """Returns True if few calls of the backward kernel suffice.

  Each call reads all keys and values and writes their gradients. With few rows
  per call, this would be most of the kernel's work.
  """
  wanted = 4 * blocks.q
  if blocks.span > 1:
    # Loading rows together is not worth a second call.
    wanted = q_length
  return blocks.resident >= min(round_up(q_length, blocks.q), wanted)


def requested_bytes(
  generation: str,
  direction: str,
  blocks: Blocks,
  D: int,
  V: int,
  G: int,
  dtype: Any,
) -> int:
  """Returns the bytes of VMEM that a kernel asks for.

  This is its footprint and a quarter more, which the compiler fills with values
  that do not fit into registers. XLA uses the rest of the memory for the
  operands of other operations.
  """
  footprint_bytes = footprint(
    direction, blocks, D, V, G, jnp.dtype(dtype).itemsize
  )
  spill_bytes = footprint_bytes // 4 + (4 << 20)
  return min(vmem_bytes(generation), footprint_bytes + spill_bytes)


def vmem_bytes(generation: str) -> int:
  """Returns the bytes of VMEM that a kernel may use."""
  return _VMEM_BYTES[nearest_generation(generation)]


def nearest_generation(generation: str) -> str:
  """Returns the generation, or the nearest older one if it is unknown."""
  if generation in _VMEM_BYTES:
    return generation
  nearest = GENERATIONS[0]
  for name in GENERATIONS:
    if _generation_number(name) <= _generation_number(generation):
      nearest = name
  return nearest


def _generation_number(name: str) -> int:
  """Returns 5 for "v5e", 7 for "7x", and 0 for a name without a number."""
  match = re.match(r"v?(\d+)", name)
  if match is None:
    return 0
  return int(match[1])


def footprint(
  direction: str, blocks: Blocks, D: int, V: int, G: int, itemsize: int
) -> int:
  """Returns the bytes of VMEM that a kernel needs.

  Inputs and outputs have two buffers, because the next block is copied while
  one is computed. The sum includes segment ids. In the backward kernel, dK and
  dV are counted in float32, as with several calls.
  """
  D = round_up(D, _LANES)
  V = round_up(V, _LANES)
  rows = blocks.q
  keys = blocks.kv
  if direction == "forward":
    stationary = rows
    keys *= blocks.span
  else:
    stationary = keys
    rows *= blocks.span

  # Inputs of both kernels: queries, keys and values, and float32 vectors (λ,
  # log-sum-exps, deltas and ids). A vector takes all sublanes.
  queries = G * rows * D
  keys_and_values = keys * (G * D + V)
  inputs = itemsize * (queries + keys_and_values)
  vectors = _SUBLANES * _FLOAT32_BYTES * (4 * rows + keys)

  # The ids of the stationary block as a column, in all lanes.
  id_column = _FLOAT32_BYTES * _LANES * stationary
  logits = 0
  for is_full in (False, True):
    logits = max(logits, math.prod(blocks.subtile(is_full=is_full)))
  logits_bytes = _FLOAT32_BYTES * logits

  if direction == "forward":
    outputs = itemsize * G * rows * V
    # Two statistics of the softmax (maximum and sum), in all lanes, and the sum
    # of the weighted values, for each map.
    statistics = 2 * rows * _LANES
    accumulators = _FLOAT32_BYTES * G * (statistics + rows * V)
    buffers = 2 * (inputs + vectors + outputs)
    return buffers + accumulators + id_column + 4 * logits_bytes

  # The gradient of the output. Grouped noise maps have one of their own.
  num_gradients = 1
  if G > 2:
    num_gradients = G
  d_out = itemsize * rows * V * num_gradients
  d_queries = G * blocks.resident * D
  outputs = _FLOAT32_BYTES * keys_and_values + itemsize * d_queries
  accumulators = _FLOAT32_BYTES * (keys_and_values + d_queries)
  buffers = 2 * (inputs + vectors + d_out + outputs)
  return buffers + accumulators + id_column + 6 * logits_bytes


def _nearest_entry(
  generation: str, direction: str, length: int, D: int, V: int, G: int
) -> Blocks:
  """Returns the blocks of the table's entry with the most similar shape.

  Only entries of one generation are compared: the same one if the table has it,
  otherwise the nearest older one, otherwise the oldest one of the table.

  Args:
    generation: the TPU.
    direction: "forward" or "backward".
    length: the number of keys.
    D: width of queries and keys.
    V: width of values.
    G: number of maps.
  """
  entries = [entry for entry in table() if entry["direction"] == direction]
  listed = _nearest_listed_generation(generation, entries)
  if listed != generation:
    log_borrowed_sizes(generation, listed)

  nearest_entry = None
  smallest_distance = math.inf
  for entry in entries:
    if entry["generation"] != listed:
      continue
    # Another number of maps is another kernel, so it weighs most.
    distance = (
      4 * _log2_distance(G, entry["G"])
      + _log2_distance(D, entry["D"])
      + _log2_distance(V, entry["V"])
      + _log2_distance(length, entry["length"]) / 4
    )
    if distance < smallest_distance:
      smallest_distance = distance
      nearest_entry = entry
  assert nearest_entry is not None
  q, kv, q_inner, kv_inner = nearest_entry["blocks"]
  full_subtile = tuple(nearest_entry["whole"])  # for tiles without a mask
  return Blocks(q, kv, q_inner, kv_inner, full_subtile=full_subtile)


def _nearest_listed_generation(
  generation: str, entries: list[dict[str, Any]]
) -> str:
  """Returns the generation whose entries a generation uses.

  It is the newest one with entries that is not newer than the given one. If all
  are newer, it is the oldest one with entries.

  Example:
    If only "v5e" and "v6e" have entries:
    "v6e" → "v6e",  "7x" → "v6e",  "v5p" → "v5e",  "v4" → "v5e"
  """
  with_entries = {entry["generation"] for entry in entries}
  listed = [name for name in GENERATIONS if name in with_entries]
  index = GENERATIONS.index(nearest_generation(generation))
  nearest = listed[0]
  for name in listed:  # the oldest one first
    if GENERATIONS.index(name) <= index:
      nearest = name
  return nearest


def _log2_distance(a: int, b: int) -> float:
  return abs(math.log2(a / b))


@functools.cache
def log_borrowed_sizes(generation: str, listed: str) -> None:
  """Logs once that a generation uses the block sizes of another one."""
  logging.getLogger(__name__).info(
    "block sizes for %s are those found for %s; on such a chip,"
    " python -m benchmarks.tpu --search finds its own in minutes",
    generation,
    listed,
  )


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
  """Returns the entries of block_sizes.json.

  An entry has "generation", "direction", "D", "V", "G", "length", "blocks" as
  [q, kv, q_inner, kv_inner], and "whole", the sub-tile of full tiles.
  """
  return tuple(json.loads(TABLE.read_text(encoding="utf-8")))
