"""The hardware model of the estimates: TPU chips, slices and their links."""

from __future__ import annotations

import math
from typing import NamedTuple

from diffjax.compiled.collectives import Collective
from diffjax.model.flops import peak_flops

# Slices by generation, from small to large, as chips along each dimension
# (cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}). v5e and v6e have two
# dimensions, the others three.
_SLICES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SLICES_3D = (
  "2x2x1",
  "2x2x2",
  "2x2x4",
  "2x4x4",
  "4x4x4",
  "4x4x8",
  "4x8x8",
  "8x8x8",
  "8x8x16",
  "8x16x16",
)
TOPOLOGIES = {
  "v4": _SLICES_3D,
  "v5e": _SLICES_2D,
  "v5p": (*_SLICES_3D, "16x16x16", "16x16x24"),
  "v6e": _SLICES_2D,
  "tpu7x": _SLICES_3D,
}

# Memory of a chip that the compiler gives to a program, in GiB. For v7x, it is
# the chip's whole memory.
MEMORY_GIB = {
  "v4": 30.75,
  "v5e": 15.75,
  "v5p": 95.74,
  "v6e": 31.25,
  "tpu7x": 192,
}

# FLOPs per cycle of a matrix unit: a multiply-add for each of its cells.
_MXU_128_FLOPS = 2 * 128 * 128
_MXU_256_FLOPS = 2 * 256 * 256


class Chip(NamedTuple):
  """The speed of a chip.

  Attributes:
    cycles_per_second: The clock rate.
    link_bytes_per_second: Speed of one link to a neighbour, in one direction.
    num_cores: Cores that share the work of a program.
    ring_multiple: The chips along a dimension of a slice form a ring if their
      number is a multiple of this. Otherwise, they form a line.
    needs_all_rings: Whether the chips form rings only if they can along all
      dimensions of a slice. Otherwise, each dimension is a ring or a line.
  """

  cycles_per_second: float
  link_bytes_per_second: float
  num_cores: int
  ring_multiple: int
  needs_all_rings: bool = False


def _clock_rate(device_kind: str, flops_per_cycle: int) -> float:
  """Returns the cycles per second at which a chip reaches its peak FLOP/s.

  Raises:
    ValueError: if the peak of the device is unknown.
  """
  peak = peak_flops(device_kind)
  if peak is None:
    raise ValueError(f"the peak FLOP/s of {device_kind!r} are unknown")
  return peak / flops_per_cycle


# The speed of a link and the rings are from "How to scale your model"
# (jax-ml.github.io/scaling-book/tpus). v4 and v5p slices consist of cubes of
# 4×4×4 chips, and slices smaller than a cube have no rings. v7x is missing,
# because the compiler has no estimates for it.
CHIPS = {
  # Two cores with four matrix units each
  "v4": Chip(
    cycles_per_second=_clock_rate("TPU v4", 2 * 4 * _MXU_128_FLOPS),
    link_bytes_per_second=45e9,
    num_cores=2,
    ring_multiple=4,
    needs_all_rings=True,
  ),
  "v5e": Chip(
    cycles_per_second=_clock_rate("TPU v5e", 4 * _MXU_128_FLOPS),
    link_bytes_per_second=45e9,
    num_cores=1,
    ring_multiple=16,
  ),
  "v5p": Chip(
    cycles_per_second=_clock_rate("TPU v5", 2 * 4 * _MXU_128_FLOPS),
    link_bytes_per_second=90e9,
    num_cores=2,
    ring_multiple=4,
    needs_all_rings=True,
  ),
  # The compiler's estimates of large matrix products imply the FLOPs per cycle
  # of four matrix units. tests/compiled/test_estimate.py checks it.
  "v6e": Chip(
    cycles_per_second=_clock_rate("TPU v6", 4 * _MXU_256_FLOPS),
    link_bytes_per_second=90e9,
    num_cores=1,
    ring_multiple=16,
  ),
}


class Topology(NamedTuple):
  """The chips of a TPU slice.

  Attributes:
    generation: Generation of the chips, such as "v5e".
    sizes: Number of chips along each dimension.
  """

  generation: str
  sizes: tuple[int, ...]

  @classmethod
  def parse(cls, text: str) -> Topology:
    """Returns the topology that a text such as "v5e:4x4" describes."""
    generation, _, shape = text.partition(":")
    return cls(generation, tuple(int(size) for size in shape.split("x")))

  @property
  def num_chips(self) -> int:
    """The product of the sizes."""
    return math.prod(self.sizes)


class Torus(NamedTuple):
  """The links between the chips of a slice, a grid of two or three dimensions.

  Attributes:
    sizes: Number of chips along each dimension that has more than one.
    num_links: Number of links of a chip along each of these dimensions. It is 2
      if the chips form a ring. If they form a line, it is 1: the chips at its
      ends limit the others.
    link_bytes_per_second: Speed of one link, in one direction.
  """

  sizes: tuple[int, ...]
  num_links: tuple[int, ...]
  link_bytes_per_second: float

  @classmethod
  def from_topology(cls, topology: str) -> Torus:
    """Returns the links of a slice such as "v5e:4x4".

    A dimension is a ring if its size is a multiple of the chip's
    `ring_multiple`. On v4 and v5p, it is one only if all dimensions are.
    """
    slice_topology = Topology.parse(topology)
    chip = CHIPS[slice_topology.generation]
    sizes = tuple(size for size in slice_topology.sizes if size > 1)
    are_rings = [size % chip.ring_multiple == 0 for size in sizes]
    if chip.needs_all_rings and not all(are_rings):
      are_rings = [False] * len(sizes)
    # In a ring, a chip has a link to the next chip and one to the previous one.
    num_links = tuple(2 if is_ring else 1 for is_ring in are_rings)
    return cls(sizes, num_links, chip.link_bytes_per_second)

  def collective_seconds(
    self, collective: Collective, num_devices: int
  ) -> float:
    """Returns a lower bound on the seconds in which a collective runs once.

    It is the time in which a chip receives its bytes over all of its links, if
    the chips that communicate are neighbours.

    Args:
      collective: The collective.
      num_devices: Number of devices that communicate with each other.
    """
    has_one_chip = not self.sizes
    if num_devices == 1 or has_one_chip:
      return 0.0
    if collective.kind == "collective-permute":
      # The bytes come from one neighbour, over one link.
      return collective.bytes / self.link_bytes_per_second
    chip_bytes_per_second = sum(self.num_links) * self.link_bytes_per_second
    seconds = collective.bytes / chip_bytes_per_second
    if collective.kind == "all-to-all":
      bisection_seconds = self._bisection_seconds(collective.bytes, num_devices)
      seconds = max(seconds, bisection_seconds)
    return seconds

  def _bisection_seconds(
    self, received_bytes: float, num_devices: int
  ) -> float:
    """Returns the seconds in which an all-to-all crosses a slice's middle.

    The middle divides the longest dimension, of length L. Each of the n/2
    devices in one half sends a share of bytes to each of the n/2 devices in the
    other half. So n²/4 shares cross the middle, over the links of n/L rows. A
    row that is a line crosses it with one link, and a ring with two:

    seconds = (n²/4 · share) / (n/L · links · speed)
            = n · L · share / (4 · links · speed)

    Args:
      received_bytes: Bytes that each device receives from all others together.
      num_devices: n.
    """
    longest = self.sizes.index(max(self.sizes))
    length = self.sizes[longest]
    num_links = self.num_links[longest]
    if num_devices < length:
      # The devices are a part of one row, which has no link to close a ring.
      length = num_devices
      num_links = 1
    share = received_bytes / (num_devices - 1)
    bytes_per_second = num_links * self.link_bytes_per_second
    return num_devices * length * share / (4 * bytes_per_second)
