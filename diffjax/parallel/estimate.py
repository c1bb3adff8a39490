"""What a compiled TPU program takes by its compiler's own estimate: cycles of every instruction times how often it runs, by part.

It is an estimate that ranks programs, not a time: libtpu writes `estimated_cycles` beside fusions and copies. It writes none beside
kernels and collectives. A kernel's come from elsewhere (`kernel_cycles`). A collective takes what it must at the links' full speed, and
counts where no computation runs between its start and its end. What crosses between slices is not counted.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from diffjax.parallel.collectives import Collective, of_line
from diffjax.parallel.program import Program

KERNELS, PRODUCTS, COPIES, EXPOSED, OTHER = "attention kernels", "other products", "copies", "exposed collectives", "other"
_FFN, _NORMS = "feed-forward", "norms, RoPE, residuals"

# Where an instruction belongs, by the first of these that its name in the source (JAX's scopes) fits; and one with a matrix product in it.
SCOPES: tuple[tuple[str, str, str], ...] = (
  (r"\bloss\b", "loss", "loss"),
  (r"\boptimizer\b", "optimizer", "optimizer"),
  (r"/(rope|rms_norm)/", _NORMS, _NORMS),
  (r"/ffn/", _FFN, _FFN),
  (r"/attention/", "attention, other", "projections"),
  (r"/layers/", _NORMS, _NORMS),
)


class Chip(NamedTuple):
  """What an estimate needs to know of a device.

  Sources: peak FLOP/s as in training/flops.py over the FLOPs of a cycle (v4 and v5p: two cores of four 128 × 128 MXUs; v5e: one; v6e: two
  256 × 256); links one way, from "How to scale your model" (jax-ml.github.io/scaling-book/tpus).
  """

  # Cycles a second
  clock: float
  # Bytes a second that a link brings, one way
  link: float
  # Cores that share a program's work
  cores: int
  # A dimension of the torus closes into a ring if it is a multiple of this
  ring: int


CHIPS = {
  "v4": Chip(275e12 / 262_144, 45e9, 2, 4),
  "v5e": Chip(197e12 / 131_072, 45e9, 1, 16),
  "v5p": Chip(459e12 / 262_144, 90e9, 2, 4),
  "v6e": Chip(918e12 / 524_288, 90e9, 1, 16),
}


class Estimate(NamedTuple):
  """Seconds of one run of a program, by part."""

  parts: dict[str, float]
  # Seconds of collectives, all and those of them that no computation covers, by kind; the latter are in the parts too
  collectives: dict[str, tuple[float, float]]
  # Seconds and names of the instructions that take most
  longest: list[tuple[float, str]]

  @property
  def seconds(self) -> float:
    """Of all parts."""
    return sum(self.parts.values())

  @property
  def has_kernels(self) -> bool:
    """Whether attention kernels are counted."""
    return KERNELS in self.parts


class Torus(NamedTuple):
  """The links between the chips of a slice."""

  sizes: tuple[int, ...]
  ring: int
  link: float

  @classmethod
  def of(cls, topology: str) -> Torus:
    """That of a slice, by generation and chips: "v5e:4x4"."""
    generation, _, shape = topology.partition(":")
    sizes = tuple(size for size in map(int, shape.split("x")) if size > 1)
    closed = all(size % CHIPS[generation].ring == 0 for size in sizes) or CHIPS[generation].ring > 4  # cubes close together or not at all
    return cls(sizes, CHIPS[generation].ring if closed else 0, CHIPS[generation].link)

  def _ways(self, size: int) -> int:
    """Links along a dimension of the chip that has the fewest: two in a ring, one at the end of a line."""
    return 2 if self.ring and size % self.ring == 0 else 1

  def seconds(self, collective: Collective, devices: int) -> float:
    """What a collective between so many devices takes at least: what a chip receives over its links, and of an all-to-all also what
    crosses the middle of the longest dimension. The chips of a group are taken to lie together."""
    if devices == 1 or not self.sizes:
      return 0.0
    received = collective.bytes / (sum(map(self._ways, self.sizes)) * self.link)
    if collective.kind != "all-to-all":
      return received
    size = max(self.sizes)
    longest = min(size, devices)
    share = collective.bytes / (devices - 1)
    return max(received, devices * longest * share / (4 * self._ways(size if longest == size else 1) * self.link))


def estimate(
  text: str,
  mesh: Mapping[str, int],
  chip: Chip,
  torus: Torus,
  kernel_cycles: Mapping[str, float],
  scopes: tuple[tuple[str, str, str], ...] = SCOPES,
) -> Estimate | None:
  """Reads the compiler's estimates; None if the program has none, as of a generation for which the compiler makes none.

  Args:
    text: the program, from `jax.stages.Compiled.as_text`.
    mesh: devices along each axis of the mesh that it is compiled for, in order.
    chip: the device.
    torus: the slice, whose links all collectives share.
    kernel_cycles: cycles of one call, by what a kernel's name contains; others count as nothing.
    scopes: pattern of an instruction's name, part, part of a matrix product.

  Raises:
    ValueError: if the text cannot be read: devices of a collective, or iterations of a loop.
  """
  program = Program(text)
  parts: dict[str, float] = defaultdict(float)
  moved: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
  taken: list[tuple[float, str]] = []
  products = _with_products(program)

  def walk(name: str, times: int) -> float:
    """Adds what `times` runs of a computation take, and returns the seconds of one. Its lines are in the order of the schedule."""
    seconds = 0.0
    under_way: dict[str, float] = {}  # seconds left of what has started: a chip's links serve one after another
    kinds: dict[str, str] = {}

    def cover(cost: float) -> None:
      nonlocal seconds
      seconds += cost
      for key, left in under_way.items():
        hidden = min(left, cost)
        under_way[key], cost = left - hidden, cost - hidden

    def wait(key: str) -> None:
      """For a collective and those that started before it."""
      nonlocal seconds
      for other in list(under_way):
        exposed = under_way.pop(other)
        seconds += exposed
        parts[EXPOSED] += exposed * times
        moved[kinds[other]][1] += exposed * times
        taken.append((exposed * times, f"{other}, exposed"))
        if other == key:
          return

    for line in program.computations[name]:
      label = _label(line)
      if " while(" in line:
        body = next(callee for kind, callee in program.called(line) if kind == "body")
        iterations = program.iterations(line)
        cover(walk(body, times * iterations) * iterations)
        continue
      if re.search(r" (call|conditional)\(", line):  # of the branches of a condition, all: the most that it can take
        for _, callee in program.called(line):
          cover(walk(callee, times))
        continue
      if sent := of_line(program, line, name, mesh):
        chain, collective = sent[0]
        key, phase = chain or _operand(line) or label, _phase(program, line)
        if phase in ("start", "whole"):
          kinds[key] = collective.kind
          under_way[key] = sum(torus.seconds(each, math.prod(mesh[axis] for axis in each.axes)) for _, each in sent)
          moved[collective.kind][0] += under_way[key] * times
        if phase in ("end", "whole") and key in under_way:
          wait(key)
      elif (ended := _operand(line)) in under_way:
        wait(ended)
      part = _part(program, line, scopes, products)
      cycles = float(match[1]) if (match := re.search(r'"estimated_cycles":"(\d+)"', line)) else 0.0
      if part == KERNELS:
        cycles = next((cost for kernel, cost in kernel_cycles.items() if kernel in label), 0.0)
      if cycles:
        seconds_taken = cycles / chip.clock
        parts[part] += seconds_taken * times
        taken.append((seconds_taken * times, f"{label}: {_source(line)}"))
        cover(seconds_taken)
    for key in list(under_way):
      if key in under_way:
        wait(key)
    return seconds

  if "estimated_cycles" not in text:
    return None
  walk(program.entry, 1)
  return Estimate(dict(parts), {kind: (whole, shown) for kind, (whole, shown) in moved.items()}, sorted(taken, reverse=True)[:20])


def _label(line: str) -> str:
  """An instruction's own name."""
  return match[1] if (match := re.match(r"\s*(?:ROOT )?%(\S+) = ", line)) else ""


def _source(line: str) -> str:
  """What it comes from, by JAX's scopes."""
  return match[1] if (match := re.search(r'op_name="([^"]*)"', line)) else ""


def _operand(line: str) -> str:
  """The start that an instruction ends, such as `all-gather-done(%all-gather-start.1)`; of others nothing."""
  return match[1] if (match := re.search(r" [a-z-]+-done\([^%]*%([^\s,)]+)", line)) else ""


def _phase(program: Program, line: str) -> str:
  """Of an instruction that holds a collective: whether it is the whole of it, its start, its end, or a part between the two."""
  if re.search(r" [a-z-]+-start\(", line):
    return "start"
  inside = [inner for kind, callee in program.called(line) if kind == "calls" for inner in program.computations[callee]]
  if any('"AsyncCollectiveStart"' in inner for inner in inside):
    return "start"
  if any('"AsyncCollectiveDone"' in inner for inner in inside):
    return "end"
  return "part" if any("chain_id=" in inner for inner in inside) else "whole"


def _part(program: Program, line: str, scopes: tuple[tuple[str, str, str], ...], products: set[str]) -> str:
  """The part that an instruction counts to."""
  source = _source(line)
  if "tpu_custom_call" in line:
    return KERNELS
  is_product = any(kind == "calls" and callee in products for kind, callee in program.called(line))
  # A product that writes into the stack of what is kept for the backward pass is named after that, and is a product all the same.
  if not is_product and re.match(r"\s*(?:ROOT )?%\S*(copy|dynamic-update-slice|dynamic-slice)\S* = ", line):
    return COPIES
  for pattern, part, of_products in scopes:
    if re.search(pattern, source):
      return of_products if is_product else part
  return PRODUCTS if is_product else OTHER


def _with_products(program: Program) -> set[str]:
  """Computations that hold a matrix product, directly or in what they call."""
  found: set[str] = set()

  def holds(name: str) -> bool:
    if name not in found and any(
      re.search(r" (convolution|dot)\(", line) or any(kind == "calls" and holds(callee) for kind, callee in program.called(line))
      for line in program.computations[name]
    ):
      found.add(name)
    return name in found

  for name in list(program.computations):
    holds(name)
  return found
