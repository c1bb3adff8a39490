"""Estimates the time of a compiled TPU program from its text.

The estimate sums the compiler's cycles of each instruction, times the
iterations of loops, and adds the time of collectives that no computation
overlaps. Use it to compare programs, not to predict their run time.
docs/estimates.md says what is included.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from diffjax.compiled.collectives import Collective, CollectiveReader
from diffjax.compiled.hardware import Chip, Torus
from diffjax.compiled.text import ProgramText, instruction_name

# The parts of a step that do not depend on JAX's scopes.
KERNELS = "attention kernels"
PRODUCTS = "other products"
COPIES = "copies"
EXPOSED = "exposed collectives"
OTHER = "other"

_FEED_FORWARD = "feed-forward"
_NORMS = "norms, RoPE, residuals"

# backend_config={"window_config":{"estimated_cycles":"4120"}}
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# metadata={op_name="jit(step)/jvp(Decoder)/layers/ffn/mul"}
_SOURCE = re.compile(r'op_name="([^"]*)"')
# %start = (…) all-gather-start(%x), or collective-permute-start, call-start
_START = re.compile(r" [a-z-]+-start\(")
# %done = bf16[8,16] all-gather-done(%start)
_DONE = re.compile(r" [a-z-]+-done\([^%]*%([^\s,)]+)")
# %product = bf16[8,16] convolution(%x, %y), dim_labels=bf_io->bf
_PRODUCT = re.compile(r" (convolution|dot)\(")
# The names of copies: %copy.7, %bitcast_dynamic-update-slice_fusion.9
_COPY_NAME = re.compile(r"copy|dynamic-update-slice|dynamic-slice")

# Number of instructions in `Estimate.longest`.
_NUM_LONGEST = 20


class Scope(NamedTuple):
  """The part of a step to which the instructions of a JAX scope belong.

  Attributes:
    pattern: Matches the name of an instruction's source, as in `_SOURCE`.
    part: The part of its instructions without a matrix product.
    product_part: The part of its instructions with a matrix product.
  """

  pattern: str
  part: str
  product_part: str


# The first matching scope determines the part of an instruction.
SCOPES = (
  Scope(r"\bloss\b", "loss", "loss"),
  Scope(r"\boptimizer\b", "optimizer", "optimizer"),
  Scope(r"/(rope|rms_norm)/", _NORMS, _NORMS),
  Scope(r"/ffn/", _FEED_FORWARD, _FEED_FORWARD),
  Scope(r"/attention/", "attention, other", "projections"),
  Scope(r"/layers/", _NORMS, _NORMS),
)


class CollectiveSeconds(NamedTuple):
  """Seconds of the collectives of one kind.

  Attributes:
    total: Seconds of all of them.
    exposed: Seconds in which no computation overlaps with them.
  """

  total: float
  exposed: float


class LongInstruction(NamedTuple):
  """Seconds and name of an instruction. Sorting is by seconds."""

  seconds: float
  name: str


class Estimate(NamedTuple):
  """Estimated time of one run of a program.

  Attributes:
    parts: Seconds of each part of a step. `EXPOSED` has the seconds of
      collectives that no computation overlaps.
    collectives: Seconds of collectives by kind.
    longest: The instructions that take the most seconds.
  """

  parts: dict[str, float]
  collectives: dict[str, CollectiveSeconds]
  longest: list[LongInstruction]

  @property
  def seconds(self) -> float:
    """Estimated seconds of the whole run."""
    return sum(self.parts.values())

  @property
  def has_kernels(self) -> bool:
    """Whether the time includes attention kernels."""
    return KERNELS in self.parts


def estimate(
  text: str,
  mesh: Mapping[str, int],
  chip: Chip,
  torus: Torus,
  kernel_cycles: Mapping[str, float],
  scopes: Sequence[Scope] = SCOPES,
) -> Estimate | None:
  """Returns the estimated time of a program.

  Args:
    text: The program, from `jax.stages.Compiled.as_text`.
    mesh: The number of devices along each axis of its mesh, in order.
    chip: The chip.
    torus: The slice. All collectives share its links.
    kernel_cycles: Cycles of one call of a kernel, by a part of the kernel's
      name. The first matching name applies. Other kernels take no time.
    scopes: Assign instructions to parts of the step. The first matching scope
      applies.

  Returns:
    The estimate. None if the compiler wrote no cycles into the program: it has
    no estimates for v7x.

  Raises:
    ValueError: if the text cannot be read: the devices of a collective, or the
      iterations of a loop.
  """
  if "estimated_cycles" not in text:
    return None
  program = ProgramText(text)
  estimator = _Estimator(
    program=program,
    collective_reader=CollectiveReader(program, mesh),
    mesh=mesh,
    chip=chip,
    torus=torus,
    kernel_cycles=kernel_cycles,
    scopes=scopes,
  )
  cost = estimator.computation_cost(program.entry)
  return _sum_up(cost)


class _Item(NamedTuple):
  """An instruction's contribution to the time of a computation.

  Attributes:
    part: Part of the step, such as `PRODUCTS`.
    name: Name of the instruction, with its source.
    seconds: Seconds each time.
    times: How often it runs in one run of the computation.
    collective_kind: Kind of the collective, if the part is `EXPOSED`.
  """

  part: str
  name: str
  seconds: float
  times: int = 1
  collective_kind: str = ""


class _CollectiveTime(NamedTuple):
  """The time of a collective, including the time that computation overlaps."""

  kind: str
  seconds: float
  times: int = 1


@dataclasses.dataclass
class _Cost:
  """The time of one run of a computation.

  Attributes:
    seconds: Seconds from its start to its end.
    items: The instructions that these seconds consist of.
    collectives: The collectives that start in the run.
  """

  seconds: float = 0.0
  items: list[_Item] = dataclasses.field(default_factory=list)
  collectives: list[_CollectiveTime] = dataclasses.field(default_factory=list)

  def repeated(self, times: int) -> _Cost:
    """Returns the cost of running the computation several times."""
    repeated = _Cost(self.seconds * times)
    for item in self.items:
      repeated.items.append(item._replace(times=item.times * times))
    for collective in self.collectives:
      total_times = collective.times * times
      repeated.collectives.append(collective._replace(times=total_times))
    return repeated


def _sum_up(cost: _Cost) -> Estimate:
  """Returns the sums of a program's cost: by part, and by collective kind."""
  parts: dict[str, float] = collections.defaultdict(float)
  exposed_seconds: dict[str, float] = collections.defaultdict(float)
  instructions = []
  for item in cost.items:
    seconds = item.seconds * item.times
    instructions.append(LongInstruction(seconds, item.name))
    parts[item.part] += seconds
    if item.part == EXPOSED:
      exposed_seconds[item.collective_kind] += seconds

  total_seconds: dict[str, float] = collections.defaultdict(float)
  for collective in cost.collectives:
    seconds = collective.seconds * collective.times
    total_seconds[collective.kind] += seconds

  seconds_by_kind = {}
  for kind, total in total_seconds.items():
    exposed = exposed_seconds[kind]
    seconds_by_kind[kind] = CollectiveSeconds(total, exposed)
  longest = sorted(instructions, reverse=True)[:_NUM_LONGEST]
  return Estimate(dict(parts), seconds_by_kind, longest)


@dataclasses.dataclass(frozen=True)
class _Estimator:
  """Estimates the time of a program's computations.

  Attributes:
    program: The program.
    collective_reader: Reads the collectives of the program.
    mesh, chip, torus, kernel_cycles, scopes: As in `estimate`.
  """

  program: ProgramText
  collective_reader: CollectiveReader
  mesh: Mapping[str, int]
  chip: Chip
  torus: Torus
  kernel_cycles: Mapping[str, float]
  scopes: Sequence[Scope]

  def computation_cost(self, computation: str) -> _Cost:
    """Returns the cost of one run of a computation, with all that it calls."""
    timeline = _Timeline()
    # The lines are in the order in which the instructions run.
    for line in self.program.instructions(computation):
      if " while(" in line:
        timeline.compute(self._loop_cost(line))
      elif " call(" in line:
        for call in self.program.calls(line):
          timeline.compute(self.computation_cost(call.computation))
      elif " conditional(" in line:
        timeline.compute(self._conditional_cost(line))
      else:
        self._run_collectives(line, computation, timeline)
        timeline.compute(self._instruction_cost(line))
    timeline.wait_for_all()
    return timeline.cost

  def _loop_cost(self, line: str) -> _Cost:
    """Returns the cost of a loop with all of its iterations."""
    iterations = self.program.iterations(line)
    for call in self.program.calls(line):
      if call.kind == "body":
        return self.computation_cost(call.computation).repeated(iterations)
    raise ValueError(f"a loop without a body: {line}")

  def _conditional_cost(self, line: str) -> _Cost:
    """Returns the cost of the conditional's slowest branch."""
    branch_costs = []
    for call in self.program.calls(line):
      branch_costs.append(self.computation_cost(call.computation))
    return max(branch_costs, key=operator.attrgetter("seconds"))

  def _run_collectives(
    self, line: str, computation: str, timeline: _Timeline
  ) -> None:
    """Starts or ends collectives on the timeline, if an instruction does so.

    The compiler cuts a collective into several instructions, to overlap it with
    computation: one starts it and a later one waits for its end.

    Args:
      line: The instruction.
      computation: Name of the computation that contains the instruction.
      timeline: The timeline of this computation, which is changed.
    """
    instructions = self.collective_reader.read_instruction(line, computation)
    if not instructions:
      # %done = bf16[8,16] all-gather-done(%start) is not read as a collective.
      # It only names the start.
      start = _awaited_start(line)
      if start:
        timeline.wait_for(start)
      return

    # The key identifies the collective from its start to its end. It is the
    # chain of its instructions. Without a chain, it is the name of the
    # instruction that starts it.
    first = instructions[0]
    key = first.chain or _awaited_start(line) or instruction_name(line)
    phase = _phase(self.program, line)
    if phase in ("start", "whole"):
      seconds = 0.0
      for instruction in instructions:
        seconds += self._collective_seconds(instruction.collective)
      timeline.start(key, first.collective.kind, seconds)
    if phase in ("end", "whole"):
      timeline.wait_for(key)
    # A "part", between the start and the end, changes nothing.

  def _collective_seconds(self, collective: Collective) -> float:
    """Returns the seconds of one run of a collective."""
    num_devices = math.prod(self.mesh[axis] for axis in collective.axes)
    return self.torus.collective_seconds(collective, num_devices)

  def _instruction_cost(self, line: str) -> _Cost:
    """Returns the cost of an instruction without its collectives."""
    name = instruction_name(line)
    part = self._part(line, name)
    if part == KERNELS:
      # The compiler does not estimate the cycles of kernels.
      cycles = self._cycles_of_kernel(name)
    else:
      cycles = _cycles_in_text(line)
    if cycles == 0.0:
      return _Cost()
    seconds = cycles / self.chip.cycles_per_second
    item = _Item(part, f"{name}: {_source(line)}", seconds)
    return _Cost(seconds, items=[item])

  def _cycles_of_kernel(self, name: str) -> float:
    """Returns the cycles of one call of a kernel; 0 if they are unknown."""
    for kernel, cycles in self.kernel_cycles.items():
      if kernel in name:
        return cycles
    return 0.0

  def _part(self, line: str, name: str) -> str:
    """Returns the part of the step to which an instruction belongs."""
    if "tpu_custom_call" in line:
      return KERNELS
    is_product = _is_fused_product(self.program, line)
    # A product that saves its result for the backward pass writes it into a
    # slice of a larger array, and has the name of a copy.
    if not is_product and _COPY_NAME.search(name):
      return COPIES
    source = _source(line)
    for scope in self.scopes:
      if re.search(scope.pattern, source):
        return scope.product_part if is_product else scope.part
    return PRODUCTS if is_product else OTHER


@dataclasses.dataclass
class _InFlight:
  """A collective that has started, and whose end is still ahead.

  Attributes:
    kind: Kind of the collective.
    seconds_left: Seconds that no computation has overlapped yet.
  """

  kind: str
  seconds_left: float


class _Timeline:
  """Adds up the cost of a computation while its instructions run in order.

  A collective runs while instructions compute. Its exposed time is what remains
  when an instruction waits for it. Collectives share a chip's links, which
  serve one collective after another in the order in which they started.

  Attributes:
    cost: The time until now.
  """

  def __init__(self) -> None:
    self.cost = _Cost()
    # The collectives in the order in which they started.
    self._in_flight: dict[str, _InFlight] = {}

  def start(self, key: str, kind: str, seconds: float) -> None:
    """Starts a collective that takes this many seconds."""
    self._in_flight[key] = _InFlight(kind, seconds)
    self.cost.collectives.append(_CollectiveTime(kind, seconds))

  def compute(self, cost: _Cost) -> None:
    """Adds the cost of computation, which overlaps collectives in flight."""
    self.cost.seconds += cost.seconds
    self.cost.items += cost.items
    self.cost.collectives += cost.collectives
    # During these seconds, the links serve the collectives one by one.
    available = cost.seconds
    for collective in self._in_flight.values():
      hidden = min(collective.seconds_left, available)
      collective.seconds_left -= hidden
      available -= hidden

  def wait_for(self, key: str) -> None:
    """Waits for a collective and for all that started before it.

    Does nothing if the collective is not in flight.
    """
    while key in self._in_flight:
      self._wait_for_first()

  def wait_for_all(self) -> None:
    """Waits for all collectives."""
    while self._in_flight:
      self._wait_for_first()

  def _wait_for_first(self) -> None:
    """Waits for the collective in flight that started first."""
    key = next(iter(self._in_flight))
    collective = self._in_flight.pop(key)
    self.cost.seconds += collective.seconds_left
    item = _Item(
      EXPOSED,
      f"{key}, exposed",
      collective.seconds_left,
      collective_kind=collective.kind,
    )
    self.cost.items.append(item)


def _cycles_in_text(line: str) -> float:
  """Returns the cycles that the compiler estimates; 0 if it does not."""
  cycles = _CYCLES.search(line)
  if cycles is None:
    return 0.0
  return float(cycles[1])


def _source(line: str) -> str:
  """Returns the JAX scopes that an instruction comes from; "" without any."""
  source = _SOURCE.search(line)
  if source is None:
    return ""
  return source[1]


def _awaited_start(line: str) -> str:
  """Returns the name of the start in `all-gather-done(%start)`; else ""."""
  done = _DONE.search(line)
  if done is None:
    return ""
  return done[1]


def _phase(program: ProgramText, line: str) -> str:
  """Returns which phase of a collective an instruction performs.

  It is "start", "end", "part" (between start and end), or "whole" for a
  collective that is one instruction.
  """
  if _START.search(line):
    return "start"
  # The compiler may fuse a phase with computation. A marker inside the fusion
  # tells which phase it is.
  fused = program.fused_instructions(line)
  if _contains(fused, '"AsyncCollectiveStart"'):
    return "start"
  if _contains(fused, '"AsyncCollectiveDone"'):
    return "end"
  if _contains(fused, "chain_id="):
    return "part"
  return "whole"


def _contains(lines: Iterable[str], text: str) -> bool:
  """Returns whether a line contains the text."""
  return any(text in line for line in lines)


def _is_fused_product(program: ProgramText, line: str) -> bool:
  """Returns whether an instruction is a fusion with a matrix product inside.

  Fusions may be nested.
  """
  for fused_line in program.fused_instructions(line):
    is_product = _PRODUCT.search(fused_line) is not None
    if is_product or _is_fused_product(program, fused_line):
      return True
  return False
