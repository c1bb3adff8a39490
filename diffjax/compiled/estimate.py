"""The time of a compiled TPU program by its compiler's own estimate: cycles of every instruction times how often it runs, by part.

It is an estimate that ranks programs, not a time. libtpu writes `estimated_cycles` beside fusions and copies, and none beside kernels and
collectives. A kernel's cycles come from elsewhere (`kernel_cycles`). A collective takes the time of its bytes at the links' full speed, as
far as no computation runs between its start and its end. Traffic between slices is not counted.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from diffjax.compiled.collectives import Collective, of_line
from diffjax.compiled.text import ProgramText

KERNELS, PRODUCTS, COPIES, EXPOSED, OTHER = (
  "attention kernels",
  "other products",
  "copies",
  "exposed collectives",
  "other",
)
_FFN, _NORMS = "feed-forward", "norms, RoPE, residuals"

# The part of an instruction: that of the first pattern that its name in the source (JAX's scopes) fits. The last column is for one that
# holds a matrix product.
SCOPES: tuple[tuple[str, str, str], ...] = (
  (r"\bloss\b", "loss", "loss"),
  (r"\boptimizer\b", "optimizer", "optimizer"),
  (r"/(rope|rms_norm)/", _NORMS, _NORMS),
  (r"/ffn/", _FFN, _FFN),
  (r"/attention/", "attention, other", "projections"),
  (r"/layers/", _NORMS, _NORMS),
)


class Chip(NamedTuple):
  """A device's speed, as far as an estimate needs it.

  Sources: peak FLOP/s as in model/flops.py over the FLOPs of a cycle (v4 and v5p: two cores of four 128 × 128 MXUs; v5e: one; v6e: two
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
    """Seconds of all parts."""
    return sum(self.parts.values())

  @property
  def has_kernels(self) -> bool:
    """True if attention kernels are counted."""
    return KERNELS in self.parts


class Torus(NamedTuple):
  """The links between the chips of a slice."""

  sizes: tuple[int, ...]
  ring: int
  link: float

  @classmethod
  def of(cls, topology: str) -> Torus:
    """The torus of a slice, by generation and chips: "v5e:4x4"."""
    generation, _, shape = topology.partition(":")
    sizes = tuple(size for size in map(int, shape.split("x")) if size > 1)
    closed = (
      all(size % CHIPS[generation].ring == 0 for size in sizes)
      or CHIPS[generation].ring > 4
    )  # cubes close together or not at all
    return cls(
      sizes, CHIPS[generation].ring if closed else 0, CHIPS[generation].link
    )

  def _ways(self, size: int) -> int:
    """Links along a dimension of the chip that has the fewest: two in a ring, one at the end of a line."""
    return 2 if self.ring and size % self.ring == 0 else 1

  def seconds(self, collective: Collective, devices: int) -> float:
    """Lower bound on a collective between so many devices: the time of the bytes that a chip receives over its links; for a permute, which
    comes from one neighbour, over one of them; for an all-to-all also of those that cross the middle of the longest dimension. It assumes
    that the chips of a group lie together."""
    if devices == 1 or not self.sizes:
      return 0.0
    if collective.kind == "collective-permute":
      return collective.bytes / self.link
    received = collective.bytes / (sum(map(self._ways, self.sizes)) * self.link)
    if collective.kind != "all-to-all":
      return received
    size = max(self.sizes)
    longest = min(size, devices)
    share = collective.bytes / (devices - 1)
    return max(
      received,
      devices
      * longest
      * share
      / (4 * self._ways(size if longest == size else 1) * self.link),
    )


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
  if "estimated_cycles" not in text:
    return None
  reader = _Reader(ProgramText(text), mesh, chip, torus, kernel_cycles, scopes)
  reader.run(reader.program.entry, 1)
  collectives = {
    kind: (whole, shown) for kind, (whole, shown) in reader.moved.items()
  }
  return Estimate(
    dict(reader.parts), collectives, sorted(reader.taken, reverse=True)[:20]
  )


class _Reader:
  """Adds up what a program takes, computation by computation.

  Attributes:
    program: the program.
    parts: seconds by part.
    moved: seconds of collectives by kind, all and exposed.
    taken: seconds and name of each instruction.
  """

  def __init__(
    self,
    program: ProgramText,
    mesh: Mapping[str, int],
    chip: Chip,
    torus: Torus,
    kernel_cycles: Mapping[str, float],
    scopes: tuple[tuple[str, str, str], ...],
  ):
    self.program = program
    self.parts: dict[str, float] = defaultdict(float)
    self.moved: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    self.taken: list[tuple[float, str]] = []
    self._mesh, self._chip, self._torus, self._kernel_cycles, self._scopes = (
      mesh,
      chip,
      torus,
      kernel_cycles,
      scopes,
    )
    self._products = _with_products(program)

  def run(self, name: str, times: int) -> float:
    """Adds what `times` runs of a computation take, and returns the seconds of one. Its lines are in the order of the schedule."""
    clock = _Clock(self, times)
    for line in self.program.computations[name]:
      if " while(" in line:
        body = next(
          callee for kind, callee in self.program.called(line) if kind == "body"
        )
        iterations = self.program.iterations(line)
        clock.cover(self.run(body, times * iterations) * iterations)
      elif " call(" in line:
        for _, callee in self.program.called(line):
          clock.cover(self.run(callee, times))
      elif " conditional(" in line:
        clock.cover(
          self._longest(
            [callee for _, callee in self.program.called(line)], times
          )
        )
      else:
        self._communicate(line, name, clock)
        clock.cover(self._compute(line, times))
    clock.wait_for_all()
    return clock.seconds

  def _longest(self, branches: list[str], times: int) -> float:
    """Adds what `times` runs of the branch take that takes most, and returns the seconds of one."""
    readers = [copy.copy(self) for _ in branches]
    for reader in readers:
      reader.parts, reader.moved, reader.taken = (
        defaultdict(float),
        defaultdict(lambda: [0.0, 0.0]),
        [],
      )
    seconds = [
      reader.run(branch, times)
      for reader, branch in zip(readers, branches, strict=True)
    ]
    longest = readers[seconds.index(max(seconds))]
    for part, cost in longest.parts.items():
      self.parts[part] += cost
    for kind, (whole, shown) in longest.moved.items():
      self.moved[kind] = [
        self.moved[kind][0] + whole,
        self.moved[kind][1] + shown,
      ]
    self.taken += longest.taken
    return max(seconds)

  def _communicate(self, line: str, computation: str, clock: _Clock) -> None:
    """Starts the collectives that an instruction starts, and waits for those that it ends."""
    if sent := of_line(self.program, line, computation, self._mesh):
      chain, collective = sent[0]
      key, phase = (
        chain or _operand(line) or _label(line),
        _phase(self.program, line),
      )
      if phase in ("start", "whole"):
        seconds = sum(
          self._torus.seconds(
            each, math.prod(self._mesh[axis] for axis in each.axes)
          )
          for _, each in sent
        )
        clock.start(key, collective.kind, seconds)
      if phase in ("end", "whole"):
        clock.wait_for(key)
    else:
      clock.wait_for(_operand(line))

  def _compute(self, line: str, times: int) -> float:
    """Adds what an instruction takes by its own cycles, and returns the seconds of one run."""
    label, part = (
      _label(line),
      _part(self.program, line, self._scopes, self._products),
    )
    cycles = (
      float(match[1])
      if (match := re.search(r'"estimated_cycles":"(\d+)"', line))
      else 0.0
    )
    if part == KERNELS:
      cycles = next(
        (
          cost
          for kernel, cost in self._kernel_cycles.items()
          if kernel in label
        ),
        0.0,
      )
    seconds = cycles / self._chip.clock
    if cycles:
      self.parts[part] += seconds * times
      self.taken.append((seconds * times, f"{label}: {_source(line)}"))
    return seconds


class _Clock:
  """The time of one run of a computation, and the collectives that are under way. A chip's links serve one after another."""

  def __init__(self, reader: _Reader, times: int):
    self.seconds = 0.0
    self._reader, self._times = reader, times
    self._under_way: dict[
      str, float
    ] = {}  # seconds left of each, in the order in which they started
    self._kinds: dict[str, str] = {}

  def start(self, key: str, kind: str, seconds: float) -> None:
    """Starts a collective."""
    self._under_way[key], self._kinds[key] = seconds, kind
    self._reader.moved[kind][0] += seconds * self._times

  def cover(self, cost: float) -> None:
    """Lets a computation run, which hides as much of what is under way."""
    self.seconds += cost
    for key, left in self._under_way.items():
      hidden = min(left, cost)
      self._under_way[key], cost = left - hidden, cost - hidden

  def wait_for(self, key: str) -> None:
    """Waits for a collective and for those that started before it; not at all if it is not under way."""
    while key in self._under_way:
      first = next(iter(self._under_way))
      exposed = self._under_way.pop(first)
      self.seconds += exposed
      self._reader.parts[EXPOSED] += exposed * self._times
      self._reader.moved[self._kinds[first]][1] += exposed * self._times
      self._reader.taken.append((exposed * self._times, f"{first}, exposed"))

  def wait_for_all(self) -> None:
    """Waits for every collective."""
    if self._under_way:
      self.wait_for(next(reversed(self._under_way)))


def _label(line: str) -> str:
  """An instruction's own name."""
  return (
    match[1] if (match := re.match(r"\s*(?:ROOT )?%(\S+) = ", line)) else ""
  )


def _source(line: str) -> str:
  """An instruction's origin, by JAX's scopes."""
  return match[1] if (match := re.search(r'op_name="([^"]*)"', line)) else ""


def _operand(line: str) -> str:
  """The name of the start that an instruction ends, such as `all-gather-done(%all-gather-start.1)`; "" for other instructions."""
  return (
    match[1]
    if (match := re.search(r" [a-z-]+-done\([^%]*%([^\s,)]+)", line))
    else ""
  )


def _phase(program: ProgramText, line: str) -> str:
  """The phase of an instruction that holds a collective: "whole", "start", "end", or "part", which lies between the two."""
  if re.search(r" [a-z-]+-start\(", line):
    return "start"
  inside = [
    inner
    for kind, callee in program.called(line)
    if kind == "calls"
    for inner in program.computations[callee]
  ]
  if any('"AsyncCollectiveStart"' in inner for inner in inside):
    return "start"
  if any('"AsyncCollectiveDone"' in inner for inner in inside):
    return "end"
  return "part" if any("chain_id=" in inner for inner in inside) else "whole"


def _part(
  program: ProgramText,
  line: str,
  scopes: tuple[tuple[str, str, str], ...],
  products: set[str],
) -> str:
  """The part that an instruction counts to."""
  source = _source(line)
  if "tpu_custom_call" in line:
    return KERNELS
  is_product = any(
    kind == "calls" and callee in products
    for kind, callee in program.called(line)
  )
  # A product that writes into the stack of saved activations is named after the writing; it still counts as a product.
  if not is_product and re.match(
    r"\s*(?:ROOT )?%\S*(copy|dynamic-update-slice|dynamic-slice)\S* = ", line
  ):
    return COPIES
  for pattern, part, of_products in scopes:
    if re.search(pattern, source):
      return of_products if is_product else part
  return PRODUCTS if is_product else OTHER


def _with_products(program: ProgramText) -> set[str]:
  """Computations that hold a matrix product, directly or in what they call."""
  found: set[str] = set()

  def holds(name: str) -> bool:
    if name not in found and any(
      re.search(r" (convolution|dot)\(", line)
      or any(
        kind == "calls" and holds(callee)
        for kind, callee in program.called(line)
      )
      for line in program.computations[name]
    ):
      found.add(name)
    return name in found

  for name in list(program.computations):
    holds(name)
  return found
