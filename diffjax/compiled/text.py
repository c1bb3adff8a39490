"""The text of a compiled program: its computations, what they call, and how often its loops run."""

from __future__ import annotations

import re
from collections import defaultdict

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_DEFINITION = re.compile(r"\s*(?:ROOT )?%(\S+) = ")
_CALLED = re.compile(
  r"\b(body|calls|to_apply|branch_computations|true_computation|false_computation)=\{?(%[^\s,}]+(?:, %[^\s,}]+)*)"
)


class ProgramText:
  """A compiled program, read from its text.

  Attributes:
    text: all of it.
    computations: the lines of each computation, by its name, in the order in which they run.
    entry: name of the computation that runs first.
  """

  def __init__(self, text: str):
    """Reads a text from `jax.stages.Compiled.as_text`."""
    computations: dict[str, list[str]] = defaultdict(list)
    self.text, self.entry, name = text, "", ""
    for line in text.splitlines():
      if match := _COMPUTATION.match(line):
        name = match[2]
        self.entry = name if match[1] else self.entry
      elif name:
        computations[name].append(line)
    self.computations = computations
    self._definitions = {
      match[1]: line
      for lines in computations.values()
      for line in lines
      if (match := _DEFINITION.match(line))
    }

  def called(self, line: str) -> list[tuple[str, str]]:
    """The computations that an instruction calls: how it calls each (body, calls, to_apply or a condition's branches), and its name."""
    return [
      (kind, name)
      for kind, names in _CALLED.findall(line)
      for name in re.findall(r"%([^\s,]+)", names)
    ]

  def iterations(self, loop: str) -> int:
    """The number of times that a loop's body runs: as the compiler wrote it down, or from the start, the step and the bound of its counter.

    Args:
      loop: the line of the loop.

    Raises:
      ValueError: if it cannot be read.
    """
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop):
      return int(match[1])

    def resolve(name: str) -> str:
      line = self._definitions[name]
      return resolve(_operands(line, "copy")[0]) if " copy(" in line else line

    def constant(name: str) -> int:
      return int(re.search(r" constant\((\d+)\)", resolve(name))[1])  # type: ignore[index]

    try:
      condition, body = (
        re.search(rf"\b{name}=%([^\s,]+)", loop)[1]  # type: ignore[index]
        for name in ("condition", "body")
      )
      (compare,) = [
        line
        for line in self.computations[condition]
        if " compare(" in line and "direction=LT" in line
      ]
      counter, bound = _operands(compare, "compare")
      place = int(re.search(r"index=(\d+)", resolve(counter))[1])  # type: ignore[index]
      start = constant(
        _operands(resolve(_operands(loop, "while")[0]), "tuple")[place]
      )
      (root,) = [
        line
        for line in self.computations[body]
        if line.lstrip().startswith("ROOT ")
      ]
      step = constant(
        _operands(resolve(_operands(root, "tuple")[place]), "add")[1]
      )
      return -(-(constant(bound) - start) // step)
    except (KeyError, TypeError, ValueError, IndexError) as error:
      raise ValueError(
        f"a loop whose iterations cannot be read: {loop.strip()[:300]}"
      ) from error


def windowed_einsums(text: str) -> int:
  """The number of a program's products that have become loops over the shards of an operand."""
  return len(set(re.findall(r"body=%(\S*windowed_dot_general\S*?)[,\s]", text)))


def _operands(line: str, operation: str) -> list[str]:
  """Names of the operands of an instruction."""
  return re.findall(
    r"%([^\s,]+)",
    re.search(rf" {operation}\(([^)]*)\)", line)[1],  # type: ignore[index]
  )
