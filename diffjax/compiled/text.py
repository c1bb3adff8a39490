"""Reads the text of a compiled program: computations, calls and loops.

The text is HLO, from `jax.stages.Compiled.as_text`. A program consists of
computations, and a computation of instructions, one per line in the order in
which they run:

    %body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
      %next = s32[] add(%counter, %step)
      ROOT %tuple = (s32[], f32[8]) tuple(%next, %sum)
    }

    ENTRY %main (x: f32[8]) -> f32[8] {
      %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
    }
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

# ENTRY %main (x: f32[8]) -> f32[8] {
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
# ROOT %tuple = (s32[], f32[8]) tuple(%next, %sum)
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(\S+) = ")
# calls=%fused, or branch_computations={%first, %second}
_CALLS = re.compile(
  r"\b(body|calls|to_apply|branch_computations|true_computation"
  r"|false_computation)=\{?(%[^\s,}]+(?:, %[^\s,}]+)*)"
)
# The names in `%first, %second`
_NAME = re.compile(r"%([^\s,]+)")
# backend_config={"known_trip_count":{"n":"24"}}
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# %loop = (s32[]) while(%start), condition=%condition, body=%body
_CONDITION = re.compile(r"\bcondition=%([^\s,]+)")
_BODY = re.compile(r"\bbody=%([^\s,]+)")
# %counter = s32[] get-tuple-element(%state), index=0
_INDEX = re.compile(r"index=(\d+)")
# %step = s32[] constant(2)
_CONSTANT = re.compile(r" constant\((\d+)\)")
# %loop = (…) while(…), body=%wide.windowed_dot_general_body_ag.1, metadata={}
_WINDOWED_EINSUM = re.compile(r"body=%(\S*windowed_dot_general\S*?)[,\s]")

# Characters of an instruction that an error message quotes.
_QUOTED_LENGTH = 300


class Call(NamedTuple):
  """A computation that an instruction calls.

  Attributes:
    kind: The attribute in the text: "body" (of a loop), "calls" (of a fusion),
      "to_apply", or a branch of a conditional.
    computation: Name of the computation.
  """

  kind: str
  computation: str

  @property
  def is_fusion(self) -> bool:
    """Whether the computation is the inside of a fusion."""
    return self.kind == "calls"


class ProgramText:
  """The text of a compiled program, by computations and instructions.

  Attributes:
    text: The whole text.
    computations: The instructions of each computation, by its name.
    entry: Name of the computation that runs first.
  """

  def __init__(self, text: str):
    """Reads a text from `jax.stages.Compiled.as_text`."""
    self.text = text
    self.entry = ""
    self.computations: dict[str, list[str]] = {}
    # The line of each instruction, by its name.
    self._definitions: dict[str, str] = {}

    # The computation that the current line belongs to; "" before the first one.
    computation = ""
    for line in text.splitlines():
      header = _COMPUTATION.match(line)
      if header:
        entry_keyword, computation = header.groups()
        if entry_keyword:
          self.entry = computation
        continue
      if computation:
        self.computations.setdefault(computation, []).append(line)
        name = instruction_name(line)
        if name:
          self._definitions[name] = line

  def instructions(self, computation: str) -> Sequence[str]:
    """Returns the lines of a computation; none if the text lacks it."""
    return self.computations.get(computation, ())

  def calls(self, line: str) -> list[Call]:
    """Returns the computations that an instruction calls."""
    calls = []
    for kind, names in _CALLS.findall(line):
      for name in _NAME.findall(names):
        calls.append(Call(kind, name))
    return calls

  def fused_instructions(self, line: str) -> list[str]:
    """Returns the instructions inside a fusion; none for other instructions."""
    instructions: list[str] = []
    for call in self.calls(line):
      if call.is_fusion:
        instructions += self.instructions(call.computation)
    return instructions

  def embedded_computations(self, line: str) -> list[str]:
    """Returns the names of the computations that run inside an instruction.

    These are the computation of a fusion, and the program that a `call-start`
    starts on a sparse core, a coprocessor of the chip.
    """
    starts_sparse_core = " call-start(" in line
    computations = []
    for call in self.calls(line):
      if call.is_fusion or starts_sparse_core:
        computations.append(call.computation)
    return computations

  def iterations(self, loop: str) -> int:
    """Returns the number of times that the body of a loop runs.

    If the compiler did not write the number into the line, it is computed from
    the start, step and bound of the loop's counter.

    Args:
      loop: The line of the loop.

    Raises:
      ValueError: if the number cannot be read.
    """
    trip_count = _TRIP_COUNT.search(loop)
    if trip_count:
      return int(trip_count[1])
    try:
      return self._count_iterations(loop)
    except (KeyError, IndexError, ValueError) as error:
      raise ValueError(
        f"a loop whose iterations cannot be read: {quote(loop)}"
      ) from error

  def _count_iterations(self, loop: str) -> int:
    """Returns the iterations of a loop that counts in constant steps.

    It is a loop like `for (i = start; i < bound; i += step)`. The counter is an
    element of the tuple that each iteration passes on to the next one:

      while(%state), with %state = tuple(%start, …)
      condition: compare(%counter, %bound), direction=LT
      body: ROOT tuple(%next, …), with %next = add(%counter, %step)

    Raises:
      KeyError, IndexError or ValueError: if the loop has another form.
    """
    condition = _first_group(_CONDITION, loop)
    comparison = self._comparison(condition)
    counter, bound = _operands(comparison, "compare")
    # %counter = s32[] get-tuple-element(%state), index=0
    position = int(_first_group(_INDEX, self._resolve(counter)))

    initial_state = self._resolve(_operands(loop, "while")[0])
    start = _operands(initial_state, "tuple")[position]

    body = _first_group(_BODY, loop)
    next_state = self._root(body)
    next_counter = self._resolve(_operands(next_state, "tuple")[position])
    _, step = _operands(next_counter, "add")

    distance = self._constant(bound) - self._constant(start)
    # The last step may go past the bound.
    return math.ceil(distance / self._constant(step))

  def _comparison(self, condition: str) -> str:
    """Returns the instruction that compares a loop's counter with its bound.

    Example:
      %less = pred[] compare(%counter, %bound), direction=LT

    Raises:
      ValueError: if the condition does not have exactly one comparison.
    """
    comparisons = []
    for line in self.instructions(condition):
      if " compare(" in line and "direction=LT" in line:
        comparisons.append(line)
    if len(comparisons) != 1:
      raise ValueError(f"{condition} has {len(comparisons)} comparisons")
    return comparisons[0]

  def _root(self, computation: str) -> str:
    """Returns the instruction that computes a computation's result."""
    for line in self.instructions(computation):
      if line.lstrip().startswith("ROOT "):
        return line
    raise ValueError(f"{computation} has no result")

  def _resolve(self, name: str) -> str:
    """Returns the instruction that computes a value, skipping copies."""
    line = self._definitions[name]
    while " copy(" in line:
      line = self._definitions[_operands(line, "copy")[0]]
    return line

  def _constant(self, name: str) -> int:
    """Returns the value of an integer constant."""
    return int(_first_group(_CONSTANT, self._resolve(name)))


def instruction_name(line: str) -> str:
  """Returns the name of an instruction; "" for other lines."""
  instruction = _INSTRUCTION.match(line)
  if instruction is None:
    return ""
  return instruction[1]


def quote(line: str) -> str:
  """Returns the beginning of an instruction, for an error message."""
  return line.strip()[:_QUOTED_LENGTH]


def windowed_einsums(text: str) -> int:
  """Returns the number of windowed einsums in a program.

  A windowed einsum is a matrix product that the compiler has replaced by a loop
  over the shards of an operand.
  """
  return len(set(_WINDOWED_EINSUM.findall(text)))


def _operands(line: str, operation: str) -> list[str]:
  """Returns the operands' names, as in `add(%counter, %step)`."""
  operands = re.compile(rf" {operation}\(([^)]*)\)")
  return _NAME.findall(_first_group(operands, line))


def _first_group(pattern: re.Pattern[str], line: str) -> str:
  """Returns the first group of a pattern.

  Raises:
    ValueError: if the line does not have it.
  """
  match = pattern.search(line)
  if match is None:
    raise ValueError(f"no {pattern.pattern!r} in {line!r}")
  return match[1]
