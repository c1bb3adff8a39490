"""A call of our TPU kernels, whose cost is measured or estimated."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

from benchmarks.tpu import runs
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.tpu import block_sizes
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

DIRECTIONS = ("forward", "backward")

# Parts of the names of the kernels of each direction.
KERNELS = {
  "forward": ("diff_attention_forward",),
  "backward": ("diff_attention_backward",),
}

# The slice for which the compiler makes the estimates of a generation.
SLICES = {
  "v4": "v4:2x2x1",
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "7x": "tpu7x:2x2x1",
}

# The size of a square tile; the queries and keys of a sub-tile in a tile that
# the mask cuts; the queries and keys of a sub-tile in a whole tile. An example
# is (1024, 256, 512, 512, 512).
SquareBlocks = tuple[int, int, int, int, int]


class KernelCase(Protocol):
  """The interface of a call of a kernel: of `Case` and of `splash.Splash`.

  Attributes:
    generation: The chip, a key of `SLICES`.
    key: Name of the case in the file of costs.
    kernel_names: Parts of the names of the kernels of each direction. The
      estimate of a direction is the sum over all of them.
    compiler_options: Options of the compiler.
  """

  @property
  def generation(self) -> str: ...

  @property
  def key(self) -> str: ...

  @property
  def kernel_names(self) -> Mapping[str, tuple[str, ...]]: ...

  @property
  def compiler_options(self) -> dict[str, str]: ...

  def operation(
    self, heads: int
  ) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Returns the function, and its arguments as shapes."""

  def building(self) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which the kernels must be built."""

  def plausible(self, cycles: dict[str, int]) -> dict[str, int]:
    """Returns the estimates that can be right."""


@dataclasses.dataclass(frozen=True)
class Case:
  """A call of our attention kernels for one key head, in bfloat16.

  Attributes:
    generation: The chip, a key of `SLICES`.
    D: Width of queries and keys.
    V: Width of values.
    G: Maps of a query head.
    M: Maps of a key head.
    length: T, the number of queries and of keys.
    causal: Whether the mask is causal. Otherwise it is full.
    blocks: The sizes of tiles and sub-tiles. None for the table's.
    documents: Lengths of the row's documents, which add up to T. None for a row
      without segment ids.
    run: A run is a sequence of sub-tiles that the kernel computes under one
      condition (runs.py). If the name of a run and a number are given, the
      kernel is built with nothing but this run, repeated this number of times.
    group: Query heads of a key head.
  """

  generation: str
  D: int
  V: int
  G: int
  M: int
  length: int
  causal: bool
  blocks: SquareBlocks | None = None
  documents: tuple[int, ...] | None = None
  run: tuple[str, int] | None = None
  group: int = 1

  @property
  def key(self) -> str:
    """Name of the case in the file of costs."""
    shape = f"D {self.D} V {self.V} G {self.G} M {self.M}"
    if self.group > 1:
      shape += f" R {self.group}"
    mask = "causal" if self.causal else "full"
    if self.documents:
      mask += f", documents of {' '.join(map(str, self.documents))}"
    if self.run:
      name, times = self.run
      mask += f", {times} × {name}"
    blocks = []
    for direction in DIRECTIONS:
      blocks.append(f"{direction} {_blocks_name(self.blocks_of(direction))}")
    return (
      f"{self.generation} {shape} T {self.length} {mask}; {'; '.join(blocks)}"
    )

  @property
  def kernel_names(self) -> dict[str, tuple[str, ...]]:
    """Parts of the names of the kernels of each direction."""
    return KERNELS

  @property
  def compiler_options(self) -> dict[str, str]:
    """Options of the compiler."""
    return {}

  def blocks_of(self, direction: str) -> Blocks:
    """Returns the sizes of tiles and sub-tiles of a direction.

    They are the case's own, or the ones of the table of block sizes.
    """
    if self.blocks is None:
      blocks = block_sizes.choose(
        self.generation,
        direction,
        q_length=self.length,
        kv_length=self.length,
        D=self.D,
        V=self.V,
        G=self.G,
        dtype="bfloat16",
      )
      resident = min(blocks.resident, self.length)
      return dataclasses.replace(blocks, resident=resident)

    tile, cut_q, cut_kv, full_q, full_kv = self.blocks
    span = min(block_sizes.SPAN, self.length) // tile
    return Blocks(
      tile,
      tile,
      cut_q,
      cut_kv,
      resident=self.length,
      span=max(1, span),
      full_subtile=(full_q, full_kv),
    )

  def operation(
    self, heads: int
  ) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Returns attention for some key heads, and its arguments as shapes."""
    num_query_heads = heads * self.group
    q = self._shape(num_query_heads, self.G, self.D)
    k = self._shape(heads, self.M, self.D)
    v = self._shape(heads, self.V)
    shapes = [q, k, v]
    if self.G > 1:
      # One λ for each map but the first.
      num_lams = num_query_heads * (self.G - 1)
      shapes.append(self._shape(num_lams, dtype=jnp.float32))
    segment_ids = None
    if self.documents:
      segment_ids = runs.segment_ids(self.documents)

    def attend(*arguments: jax.Array) -> jax.Array:
      return diff_attention(
        *arguments,
        causal=self.causal,
        q_segment_ids=segment_ids,
        implementation="pallas_tpu",
      )

    return attend, shapes

  def _shape(self, *sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Returns the shape [1, T, *sizes]."""
    return jax.ShapeDtypeStruct((1, self.length, *sizes), dtype)

  @contextlib.contextmanager
  def building(self):
    """A context in which the kernels have the case's blocks and its run."""
    with contextlib.ExitStack() as stack:
      if self.blocks:
        forward = self.blocks_of("forward")
        backward = self.blocks_of("backward")
        stack.enter_context(block_sizes.use(forward=forward, backward=backward))
      if self.run:
        name, times = self.run
        stack.enter_context(runs.single_run(name, times))
      yield

  def plausible(self, cycles: dict[str, int]) -> dict[str, int]:
    """Returns all estimates."""
    return cycles


def square_blocks(blocks: Blocks) -> SquareBlocks:
  """Returns the sizes of blocks with square tiles, for `Case.blocks`."""
  return (
    blocks.q,
    *blocks.subtile(is_full=False),
    *blocks.subtile(is_full=True),
  )


def _blocks_name(blocks: Blocks) -> str:
  """Returns the sizes of cut sub-tiles, of whole ones and of the tile."""
  q_cut, kv_cut = blocks.subtile(is_full=False)
  q_full, kv_full = blocks.subtile(is_full=True)
  return f"{q_cut}×{kv_cut} and {q_full}×{kv_full} of {blocks.q}×{blocks.kv}"
