"""What the TPU kernels are measured against besides themselves: splash attention, JAX's own and tokamax's.

The compiler has no estimate of a program whose grid or conditions are data, and both libraries give their kernels the blocks that a mask
leaves as data: of a causal mask, and with JAX's of a full one too, it says a third of the truth or less. So the kernels are compiled here
with all that known: once for a grid in which every tile is whole, and once for one in which every tile pays for a causal comparison of
positions. Its estimate adds up as many of each as the mask has. What it leaves out favours the library: the ends of a row of tiles, the
sum of dQ's parts, the arrays that are filled with zeros.

JAX's splash compares positions in every tile that a causal mask leaves; tokamax's in those alone that the mask cuts. tokamax's
`max_logit_const` stands for a bound on the logits that the caller knows: it has no running maximum. Its queries come multiplied by log₂e,
as ours do, for which it has an option (`q_prescaled_log2e`; without it this compiler fails on v6e).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import import_tokamax

LIBRARIES = (
  "jax",
  "tokamax",
  "tokamax constant",
)  # the last with max_logit_const
INSTALL = "tokamax is missing: pip install --no-deps tokamax einshape immutabledict pydantic qwix tqdm (Python 3.12 or later)"
# Names of the kernels whose estimates belong to a direction, all of which must be there.
KERNELS = {"forward": ("splash_mha_fwd",), "backward": ("splash_mha_dkv",)}
TWO_KERNELS = {
  "forward": ("splash_mha_fwd",),
  "backward": ("splash_mha_dkv", "splash_mha_dq"),
}
PEAK = {"v5e": 131_072, "v6e": 524_288}  # FLOPs a cycle
# Queries and keys of a tile, and keys that are computed at once. What was best of 14 tried in tiles of 512, 1024 and 2048, and next to it.
TILES = ((1024, 1024, 1024), (1024, 2048, 512), (2048, 2048, 1024))
# The longest T that is estimated; a longer one has as many times the tiles, which favours a library whose dQ has more parts.
ESTIMATED = 2048
# The libraries leave the compiler's limit on vector memory, which is a sixth of what they may have.
COMPILER_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": str(100 << 10)}


@dataclasses.dataclass(frozen=True)
class Splash:
  """One call for one head.

  Attributes:
    library: of LIBRARIES.
    generation: the chip.
    D: width of queries and keys.
    V: width of values.
    length: T.
    mask: "full"; "causal", as the library does it; or "cut", where every tile of all T×T pairs pays for a causal mask.
    tile: queries, keys, and keys computed at once.
    two_kernels: JAX's, backward: dQ by a kernel of its own.
  """

  library: str
  generation: str
  D: int
  V: int
  length: int
  mask: str
  tile: tuple[int, int, int]
  two_kernels: bool = False

  @property
  def key(self) -> str:
    q, kv, at_once = self.tile
    kernels = ", dQ by a kernel of its own" if self.two_kernels else ""
    return f"{self.generation} D {self.D} V {self.V} T {self.length} {self.mask}; {q}×{kv}, {at_once} keys at once{kernels}"

  @property
  def kernels(self) -> dict[str, tuple[str, ...]]:
    return TWO_KERNELS if self.two_kernels else KERNELS


_NAMES = {
  "jax": "splash of jax",
  "tokamax": "splash of tokamax",
  "tokamax constant": "constant-maximum splash of tokamax",
}


def version(library: str) -> str | None:
  """The installed library as its figures are filed; None where it is not installed."""
  try:
    return f"{_NAMES[library]} {importlib.metadata.version(library.split()[0])}"
  except importlib.metadata.PackageNotFoundError:
    return None


def library_of(kind: str) -> str | None:
  """The library whose figures are filed under a heading, or None if they are of our kernels."""
  return next(
    (library for library, name in _NAMES.items() if f", {name} " in kind), None
  )


def operation(case: Splash):
  """[heads, T, D], [heads, T, D], [heads, T, V] → [heads, T, V], without a scale."""
  q, kv, at_once = case.tile
  sizes: dict[str, Any] = dict(
    block_q=q,
    block_kv=kv,
    block_kv_compute=at_once,
    block_q_dkv=q,
    block_kv_dkv=kv,
    block_kv_dkv_compute=at_once,
  )
  if case.library == "jax":
    from jax.experimental.pallas.ops.tpu.splash_attention import (
      splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
      splash_attention_mask as masks,
    )

    sizes |= (
      dict(block_q_dq=q, block_kv_dq=kv)
      if case.two_kernels
      else dict(use_fused_bwd_kernel=True)
    )
    known = dict.fromkeys(("data_next", "block_mask", "mask_next"))
    make = lambda mask: splash.make_splash_mha_single_device(
      masks.MultiHeadMask([mask]), block_sizes=splash.BlockSizes(**sizes)
    )
  else:
    if why := import_tokamax():
      raise ValueError(f"tokamax {why}")
    from tokamax._src.ops.experimental.tpu.splash_attention import (
      splash_attention_kernel as splash,
    )
    from tokamax._src.ops.experimental.tpu.splash_attention import (
      splash_attention_mask as masks,
    )

    constant = (
      30.0 if case.library == "tokamax constant" else None
    )  # which number it is costs nothing
    known = dict.fromkeys(
      (
        "active_rows",
        "active_cols",
        "mask_next",
        "block_mask",
        "num_active_blocks",
      )
    )
    config = splash.SplashConfig(
      **sizes, q_prescaled_log2e=True, max_logit_const=constant
    )
    make = functools.partial(
      splash.make_splash_mha_single_device, config=config
    )
  kernel = make(
    (masks.FullMask if case.mask == "full" else masks.CausalMask)(
      (case.length, case.length)
    )
  )
  if (
    case.mask != "causal"
  ):  # the grid is all tiles, and nothing of the mask is data
    for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
      if info := getattr(kernel, name, None):
        setattr(kernel, name, info._replace(**known))
  return kernel


def shapes(case: Splash, heads: int) -> list[jax.ShapeDtypeStruct]:
  return [
    jax.ShapeDtypeStruct((heads, case.length, width), jnp.bfloat16)
    for width in (case.D, case.D, case.V)
  ]


def plausible(costs: dict[str, int], case: Splash) -> dict[str, int]:
  """What is no less than the products of all T×T pairs take at the chip's peak: less is no estimate."""
  widths = {"forward": case.D + case.V, "backward": 3 * case.D + 2 * case.V}
  least = {
    way: 2 * case.length**2 * width / PEAK.get(case.generation, float("inf"))
    for way, width in widths.items()
  }
  return {way: cost for way, cost in costs.items() if cost >= least[way]}


def composed(
  library: str, tile: tuple[int, int, int], length: int, full: float, cut: float
) -> float:
  """A causal mask's cost from those of all tiles whole and of all tiles cut."""
  q, kv, _ = tile
  rows, columns = length // q, length // kv
  seen = sum(j * kv < (i + 1) * q for i in range(rows) for j in range(columns))
  whole = sum(
    (j + 1) * kv - 1 <= i * q for i in range(rows) for j in range(columns)
  )
  if library == "jax":  # positions are compared in every tile that is seen
    whole = 0
  return (whole * full + (seen - whole) * cut) / (rows * columns)
