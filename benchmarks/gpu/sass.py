"""The inner loops of a GPU kernel, read from its SASS (the machine code of NVIDIA's GPUs, as nvdisasm writes it).

An inner loop is an innermost one with products of the tensor cores. A step of it is the shortest way around that passes all its products:
the step that finds its barriers open.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence

_LINE = re.compile(
  r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\d+)\s+)?([A-Z][\w.]*)\s*([^;]*)"
)
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\((\.L_x_\d+)\)")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of SASS."""

  name: str  # with its modifiers
  operands: str
  conditional: bool

  @property
  def target(self) -> str | None:
    """The label that it may jump to."""
    found = (
      _TARGET.search(self.operands)
      if self.name.startswith(("BRA", "WARPSYNC.COLLECTIVE", "CALL"))
      else None
    )
    return found[1] if found else None

  @property
  def ends(self) -> bool:
    """True if what follows is not executed after it."""
    return not self.conditional and self.name.split(".")[0] in (
      "BRA",
      "EXIT",
      "RET",
    )

  @property
  def tensor_cycles(self) -> int:
    found = _PRODUCT.match(self.name)
    return 64 * int(found[1]) * int(found[2]) // 2048 if found else 0


@dataclasses.dataclass
class Block:
  """Instructions without a jump among them but the last."""

  instructions: list[Instruction]
  next: list[int]


def blocks(sass: str) -> list[Block]:
  """The basic blocks of a kernel's SASS, in their order."""
  starts: dict[str, int] = {}
  found: list[Block] = [Block([], [])]
  for line in sass.splitlines():
    if label := _LABEL.match(line):
      if found[-1].instructions:
        found.append(Block([], []))
      starts[label[1]] = len(found) - 1
    elif match := _LINE.search(line):
      _, predicate, name, operands = match.groups()
      instruction = Instruction(name, operands, predicate is not None)
      found[-1].instructions.append(instruction)
      if instruction.target or instruction.ends:
        found.append(Block([], []))
  for n, block in enumerate(found):
    last = block.instructions[-1] if block.instructions else None
    if last is None or not last.ends:
      block.next += [n + 1] if n + 1 < len(found) else []
    if last is not None and last.target in starts:
      block.next.append(starts[last.target])
  return found


def _dominators(graph: Sequence[Block]) -> list[set[int]]:
  """For each block, those that every way to it passes."""
  before: list[list[int]] = [[] for _ in graph]
  for n, block in enumerate(graph):
    for after in block.next:
      before[after].append(n)
  everything = set(range(len(graph)))
  dominators = [{0}] + [everything] * (len(graph) - 1)
  changed = True
  while changed:
    changed = False
    for n in range(1, len(graph)):
      new = {n} | (
        set.intersection(*(dominators[b] for b in before[n]))
        if before[n]
        else set()
      )
      changed |= new != dominators[n]
      dominators[n] = new
  return dominators


def loops(graph: Sequence[Block]) -> Iterator[tuple[int, set[int]]]:
  """Header and body of each loop."""
  dominators = _dominators(graph)
  before: list[list[int]] = [[] for _ in graph]
  for n, block in enumerate(graph):
    for after in block.next:
      before[after].append(n)
  found: dict[int, set[int]] = {}
  for n, block in enumerate(graph):
    for header in block.next:
      if header in dominators[n]:
        body, rest = {header}, [n]
        while rest:
          if (one := rest.pop()) not in body:
            body.add(one)
            rest += before[one]
        found.setdefault(header, set()).update(body)
  yield from found.items()


def _step(
  graph: Sequence[Block], header: int, body: set[int]
) -> list[Instruction]:
  """The instructions of the shortest way around a loop that passes all its products."""
  must = frozenset(
    n for n in body if any(i.tensor_cycles for i in graph[n].instructions)
  )

  @functools.cache
  def shortest(
    n: int, path: frozenset[int]
  ) -> tuple[int, tuple[int, ...]] | None:
    best = None
    for after in graph[n].next:
      if after == header:
        way: tuple[int, tuple[int, ...]] | None = (
          (0, ()) if must <= path else None
        )
      elif after in body and after not in path:
        way = shortest(after, path | {after})
      else:
        way = None
      if way is not None and (best is None or way[0] < best[0]):
        best = way
    return (
      None
      if best is None
      else (best[0] + len(graph[n].instructions), (n, *best[1]))
    )

  found = shortest(header, frozenset({header}))
  assert found is not None, "a loop has no way around"
  return [i for n in found[1] for i in graph[n].instructions]


@dataclasses.dataclass(frozen=True)
class Loop:
  """What a step of an inner loop executes.

  Attributes:
    instructions: of each of a warpgroup's four warps; a scheduler issues one a cycle.
    tensor_cycles: what its products take of the tensor cores, 64·N·K/2048 for a product of 64 × N × K.
    exponentials, global_loads: instructions of that kind, in all instructions.
    beside: exponentials that are made while products of the same warpgroup go on.
    spills: loads and stores of registers for which there was no room.
    serialized: True if each product waits for the one before.
    schedule: products, exponentials and waits in their order; "wait n" lets the last n groups of products go on.
  """

  instructions: int
  tensor_cycles: int
  exponentials: int
  beside: int
  global_loads: int
  spills: int
  serialized: bool
  schedule: str


def inner_loops(sass: str) -> list[Loop]:
  """The innermost loops with products, in their order in the program."""
  graph = blocks(sass)
  with_products = [
    (h, body)
    for h, body in loops(graph)
    if any(i.tensor_cycles for n in body for i in graph[n].instructions)
  ]
  innermost = [
    (h, body)
    for h, body in with_products
    if not any(other < body for _, other in with_products)
  ]
  return [
    _measure(_step(graph, header, body)) for header, body in sorted(innermost)
  ]


def _measure(step: Iterable[Instruction]) -> Loop:
  step = list(step)
  count = lambda *names: sum(i.name.startswith(names) for i in step)
  parts: list[list] = []
  beside, going_on = 0, False
  for i in step:
    what = None
    if product := _PRODUCT.match(i.name):
      what, going_on = f"N{product[1]}", True
    elif i.name.startswith("MUFU.EX2"):
      what = "exp"
      beside += going_on
    elif i.name.startswith("WARPGROUP.DEPBAR"):
      groups = int(i.operands.split(",")[-1], 16)
      what, going_on = f"wait {groups}", going_on and groups > 0
    if what is not None:
      if parts and parts[-1][1] == what:
        parts[-1][0] += 1
      else:
        parts.append([1, what])
  schedule = ", ".join(what if n == 1 else f"{n} {what}" for n, what in parts)
  return Loop(
    instructions=len(step),
    tensor_cycles=sum(i.tensor_cycles for i in step),
    exponentials=count("MUFU.EX2"),
    beside=beside,
    global_loads=count("LD.", "LDG"),
    spills=count("STL", "LDL"),
    serialized=re.search(
      r"\bN\d+, wait 0, N\d+, wait 0, N\d+, wait 0", schedule
    )
    is not None,
    schedule=schedule,
  )
