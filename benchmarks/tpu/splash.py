"""Calls of splash attention, JAX's own and tokamax's, for comparison.

The compiler has no estimate of a program whose grid or conditions are data.
Both libraries pass the blocks that a mask leaves to the kernel as data. The
estimate of a causal mask is then a third of the truth or less, and with JAX's
kernel the one of a full mask too. So the kernels are compiled here with a known
grid: once with all tiles whole, and once with a causal comparison of positions
in each tile. Our estimate adds as many of each as the mask has. It leaves out
the ends of a row of tiles, the sum of the parts of dQ and the arrays that are
filled with zeros, which favours the library.

JAX's splash compares positions in every tile that a causal mask leaves, and
tokamax's only in tiles that the mask cuts. tokamax's `max_logit_const` is a
bound on the logits that the caller knows, which replaces the running maximum.
Its queries are multiplied by log₂e before the call, as ours are. That needs the
option `q_prescaled_log2e`, without which this compiler fails on v6e.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import import_tokamax

CONSTANT_MAXIMUM = "tokamax constant"
LIBRARIES = ("jax", "tokamax", CONSTANT_MAXIMUM)
INSTALL = (
  "tokamax is missing: pip install --no-deps tokamax einshape immutabledict"
  " pydantic qwix tqdm (Python 3.12 or later)"
)
# Parts of the names of the kernels of each direction.
KERNELS = {"forward": ("splash_mha_fwd",), "backward": ("splash_mha_dkv",)}
TWO_KERNELS = {
  "forward": ("splash_mha_fwd",),
  "backward": ("splash_mha_dkv", "splash_mha_dq"),
}
# FLOPs per cycle at the chip's peak.
PEAK_FLOPS = {"v5e": 131_072, "v6e": 524_288}
# Queries and keys of a tile, and keys that are computed at once: the best of 14
# that were tried in tiles of 512, 1024 and 2048, and similar ones.
TILES = ((1024, 1024, 1024), (1024, 2048, 512), (2048, 2048, 1024))
# The longest T that is estimated. The cost of a longer one is proportional to
# its number of tiles. This favours a library whose dQ has more parts.
MAX_ESTIMATED_LENGTH = 2048
# The libraries leave the compiler's limit on vector memory at its default,
# which is a sixth of what they may use.
COMPILER_OPTIONS = {"xla_tpu_scoped_vmem_limit_kib": str(100 << 10)}
# The value does not change the cost.
MAX_LOGIT = 30.0

# Names in the file of costs, followed by a version.
_NAMES = {
  "jax": "splash of jax",
  "tokamax": "splash of tokamax",
  CONSTANT_MAXIMUM: "constant-maximum splash of tokamax",
}
# Fields of a kernel's mask that are data, and are None if all tiles run.
_JAX_MASK_DATA = ("data_next", "block_mask", "mask_next")
_TOKAMAX_MASK_DATA = (
  "active_rows",
  "active_cols",
  "mask_next",
  "block_mask",
  "num_active_blocks",
)


@dataclasses.dataclass(frozen=True)
class Splash:
  """One call of a library's kernel for one head.

  Attributes:
    library: A name in LIBRARIES.
    generation: The chip.
    D: Width of queries and keys.
    V: Width of values.
    length: T.
    mask: "full", "causal" as the library computes it, or "cut": all T×T pairs
      with a causal comparison in every tile.
    tile: Queries, keys, and keys that are computed at once.
    two_kernels: Whether a kernel of its own computes dQ. Only JAX's.
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
    """Name of the case in the file of costs."""
    q, kv, num_at_once = self.tile
    kernels = ""
    if self.two_kernels:
      kernels = ", dQ by a kernel of its own"
    return (
      f"{self.generation} D {self.D} V {self.V} T {self.length} {self.mask};"
      f" {q}×{kv}, {num_at_once} keys at once{kernels}"
    )

  @property
  def kernel_names(self) -> dict[str, tuple[str, ...]]:
    """Parts of the names of the kernels of each direction."""
    return TWO_KERNELS if self.two_kernels else KERNELS

  @property
  def compiler_options(self) -> dict[str, str]:
    """Options of the compiler."""
    return COMPILER_OPTIONS

  def operation(
    self, heads: int
  ) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Returns the library's kernel, and its arguments as shapes.

    The kernel does not scale the logits. Its arguments are q [heads, T, D],
    k [heads, T, D] and v [heads, T, V].
    """
    shapes = []
    for width in (self.D, self.D, self.V):
      shape = (heads, self.length, width)
      shapes.append(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    if self.library == "jax":
      return _jax_kernel(self), shapes
    return _tokamax_kernel(self), shapes

  def building(self) -> contextlib.AbstractContextManager[object]:
    """A context without effect."""
    return contextlib.nullcontext()

  def plausible(self, cycles: dict[str, int]) -> dict[str, int]:
    """Returns the estimates that are at least the time at the chip's peak.

    The products of all T×T pairs take at least this time. Smaller numbers are
    not estimates.
    """
    if self.generation not in PEAK_FLOPS:
      return cycles
    # Widths of the products: Q·K and P·V; then two each for dQ, dK and the
    # logits of width D, and two for dV and dP.
    widths = {
      "forward": self.D + self.V,
      "backward": 3 * self.D + 2 * self.V,
    }
    result = {}
    for direction, count in cycles.items():
      flops = 2 * self.length**2 * widths[direction]
      if count >= flops / PEAK_FLOPS[self.generation]:
        result[direction] = count
    return result


def version(library: str) -> str | None:
  """Returns the name of an installed library in the file of costs.

  Returns:
    The name with the version. None if the library is not installed.
  """
  package = library.split()[0]
  try:
    return f"{_NAMES[library]} {importlib.metadata.version(package)}"
  except importlib.metadata.PackageNotFoundError:
    return None


def library_of(kind: str) -> str | None:
  """Returns the library to which a heading of the file of costs belongs.

  Returns:
    The library. None for our kernels.
  """
  for library, name in _NAMES.items():
    if f", {name} " in kind:
      return library
  return None


def _block_options(case: Splash) -> dict[str, int]:
  """Returns the sizes that both libraries have."""
  q, kv, num_at_once = case.tile
  return {
    "block_q": q,
    "block_kv": kv,
    "block_kv_compute": num_at_once,
    "block_q_dkv": q,
    "block_kv_dkv": kv,
    "block_kv_dkv_compute": num_at_once,
  }


def _jax_kernel(case: Splash) -> Callable:
  """Builds the kernel of JAX's splash attention for a case."""
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
  )

  options: dict[str, Any] = dict(_block_options(case))
  # dQ is computed by a kernel of its own, or by the kernel of dK and dV.
  if case.two_kernels:
    q, kv, _ = case.tile
    options["block_q_dq"] = q
    options["block_kv_dq"] = kv
  else:
    options["use_fused_bwd_kernel"] = True
  mask = _make_mask(splash_attention_mask, case)
  kernel = splash_attention_kernel.make_splash_mha_single_device(
    splash_attention_mask.MultiHeadMask([mask]),
    block_sizes=splash_attention_kernel.BlockSizes(**options),
  )
  if case.mask != "causal":
    _remove_mask_data(kernel, _JAX_MASK_DATA)
  return kernel


def _tokamax_kernel(case: Splash) -> Callable:
  """Builds the kernel of tokamax's splash attention for a case."""
  reason = import_tokamax()
  if reason is not None:
    raise ValueError(f"tokamax {reason}")
  from tokamax._src.ops.experimental.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
  )

  max_logit = MAX_LOGIT if case.library == CONSTANT_MAXIMUM else None
  config = splash_attention_kernel.SplashConfig(
    **_block_options(case),
    q_prescaled_log2e=True,
    max_logit_const=max_logit,
  )
  kernel = splash_attention_kernel.make_splash_mha_single_device(
    _make_mask(splash_attention_mask, case), config=config
  )
  if case.mask != "causal":
    _remove_mask_data(kernel, _TOKAMAX_MASK_DATA)
  return kernel


def _make_mask(mask_module: Any, case: Splash) -> Any:
  """Returns the mask of a case, from the masks of its library."""
  shape = (case.length, case.length)
  if case.mask == "full":
    return mask_module.FullMask(shape)
  return mask_module.CausalMask(shape)


def _remove_mask_data(kernel: Any, fields: tuple[str, ...]) -> None:
  """Makes the kernel compute all tiles, so that no part of the mask is data.

  Args:
    kernel: The kernel. It is changed.
    fields: The fields of its masks that are set to None.
  """
  empty_fields = dict.fromkeys(fields)
  for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
    info = getattr(kernel, name, None)
    if info:
      setattr(kernel, name, info._replace(**empty_fields))


@functools.cache
def _num_tiles(
  length: int, q: int, kv: int, *, compares_all: bool
) -> tuple[int, int]:
  """Returns the numbers of whole and of cut tiles under a causal mask.

  Args:
    length: T.
    q: Queries of a tile.
    kv: Keys of a tile.
    compares_all: Whether all visible tiles count as cut.
  """
  num_whole = 0
  num_cut = 0
  for row in range(length // q):
    for column in range(length // kv):
      first_query = row * q
      first_key = column * kv
      last_query = first_query + q - 1
      last_key = first_key + kv - 1
      # No query of the tile sees a key.
      if first_key > last_query:
        continue
      # Every query of a whole tile sees every key.
      if last_key <= first_query and not compares_all:
        num_whole += 1
      else:
        num_cut += 1
  return num_whole, num_cut


def composed(
  library: str, tile: tuple[int, int, int], length: int, full: float, cut: float
) -> float:
  """Returns the cost of a causal mask, composed of the costs of its tiles.

  Args:
    library: A name in LIBRARIES.
    tile: Queries, keys, and keys that are computed at once.
    length: T.
    full: The cost of a kernel whose tiles are all whole.
    cut: The cost of a kernel whose tiles all compare positions.
  """
  q, kv, _ = tile
  num_tiles = (length // q) * (length // kv)
  # JAX's compares positions in every visible tile.
  num_whole, num_cut = _num_tiles(length, q, kv, compares_all=library == "jax")
  return (num_whole * full + num_cut * cut) / num_tiles
