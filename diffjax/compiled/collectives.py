"""The collectives of a compiled program, read from its text: kind, mesh axes and bytes of each.

XLA's own cost analysis does not serve: it counts the body of a loop once, and knows no axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from diffjax.compiled.text import ProgramText

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf" = (.+?) ({_KINDS})(-start)?\(")
_ACROSS_SLICES = re.compile(
  r' = (.+?) recv\(.*_xla_megascale_transfer_type="([A-Z_]+)"'
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]")


class Collective(NamedTuple):
  """One collective of a program."""

  # all-gather, all-reduce, reduce-scatter, all-to-all or collective-permute
  kind: str
  # Names of the mesh axes that it crosses
  axes: tuple[str, ...]
  # Bytes that a device receives each time, in a ring: (n − 1)/n of the whole array on n devices, twice that for an all-reduce
  bytes: float
  # How often it runs when the program runs once
  times: int


def collectives(program: str, mesh: Mapping[str, int]) -> list[Collective]:
  """The collectives of a compiled program; those in loops with the number of their iterations.

  Args:
    program: its text, from `jax.stages.Compiled.as_text`.
    mesh: devices along each axis of the mesh that it is compiled for, in order.

  Raises:
    ValueError: if the text cannot be read: devices of a collective, or iterations of a loop that holds one.
  """
  read = ProgramText(program)
  places = _places(read, mesh)

  def walk(name: str) -> Iterator[tuple[str | None, Collective]]:
    """The collectives of one run of a computation, each with the chain that it is a part of, if any."""
    for line in read.computations[name]:
      if found := _of_line(line, name, mesh, places):
        yield found
      for kind, callee in read.called(line):
        if sent := list(walk(callee)):
          iterations = read.iterations(line) if kind == "body" else 1
          yield from (
            (chain, each._replace(times=each.times * iterations))
            for chain, each in sent
          )

  # TPU compilers overlap a collective with computation by cutting it into parts, a chain. Each part shows the whole collective, and some
  # parts may lie in a loop that runs meanwhile.
  chains: dict[str, Collective] = {}
  sent = []
  for chain_id, collective in walk(read.entry):
    if chain_id is None:
      sent.append(collective)
    elif chain_id not in chains or collective.times < chains[chain_id].times:
      chains[chain_id] = collective
  return sent + list(chains.values())


def of_line(
  program: ProgramText, line: str, computation: str, mesh: Mapping[str, int]
) -> list[tuple[str | None, Collective]]:
  """The collectives of one instruction, and of the fusion or the other core's program that it starts, each with the chain that it is a part
  of, if any. Each counts once, whatever loop it stands in.

  Args:
    program: where it stands.
    line: the instruction.
    computation: the computation that it stands in.
    mesh: as for `collectives`.

  Raises:
    ValueError: if devices of a collective cannot be read.
  """
  found = (
    [here]
    if (here := _of_line(line, computation, mesh, _places(program, mesh)))
    else []
  )
  for kind, callee in program.called(line):
    if kind == "calls" or " call-start(" in line:  # on a sparse core
      found += [
        each
        for inner in program.computations[callee]
        for each in of_line(program, inner, callee, mesh)
      ]
  return found


def _places(
  program: ProgramText, mesh: Mapping[str, int]
) -> Int[np.ndarray, "slices devices"]:
  """The places in the mesh of the devices that the program numbers. The program of one of several slices numbers its own devices alone, the
  first of the mesh, and reaches the others through its host."""
  partitions = re.search(r"num_partitions=(\d+)", program.text)
  return np.arange(math.prod(mesh.values())).reshape(
    -1, int(partitions[1]) if partitions else math.prod(mesh.values())
  )


def _of_line(
  line: str,
  computation: str,
  mesh: Mapping[str, int],
  places: Int[np.ndarray, "slices devices"],
):
  """The chain and the collective of a line that is a collective; None for another line."""
  if match := _COLLECTIVE.search(line):
    chain = re.search(r'chain_id="(\d+)"', line)
    return chain[1] if chain else None, _collective(
      match, line, computation, mesh, places[0]
    )
  if match := _ACROSS_SLICES.search(line):
    kind, size = (
      match[2].lower().replace("_", "-"),
      _bytes(*_ARRAY.findall(match[1])[0]),
    )
    return None, Collective(
      kind, _axes(places.T, mesh), _received(kind, size, len(places)), 1
    )
  return None


def _collective(
  match: re.Match[str],
  line: str,
  computation: str,
  mesh: Mapping[str, int],
  devices: Int[np.ndarray, "devices"],
) -> Collective:
  shape, kind, start = match.groups()
  sizes = [_bytes(*array) for array in _ARRAY.findall(shape)]
  if (
    start and kind != "all-reduce"
  ):  # its shape lists operands, results and, perhaps, semaphores
    sizes = [
      size
      for size, array in zip(sizes, _ARRAY.findall(shape), strict=True)
      if array[0] != "u32" or array[1]
    ]
    sizes = sizes[len(sizes) // 2 :]
  groups = _groups(line, devices)
  size, count = sum(sizes), groups.shape[1]
  # TPU compilers write a reduce-scatter as an all-reduce of which each device keeps a part, in a computation of its own.
  if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
    kind, size = "reduce-scatter", size // count
  return Collective(kind, _axes(groups, mesh), _received(kind, size, count), 1)


def _received(kind: str, size: int, count: int) -> float:
  """Bytes that each of `count` devices receives in a collective whose result has `size` bytes."""
  if kind not in _KINDS.split("|"):
    raise ValueError(f"a collective that is not known: {kind}")
  if kind == "collective-permute":
    return float(size)
  whole = size * count if kind == "reduce-scatter" else size
  return whole * (count - 1) / count * (2 if kind == "all-reduce" else 1)


def _bytes(dtype: str, dimensions: str) -> int:
  bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
  return math.prod(map(int, filter(None, dimensions.split(",")))) * bits // 8


def _axes(
  groups: Int[np.ndarray, "groups members"], mesh: Mapping[str, int]
) -> tuple[str, ...]:
  """The axes along which members of a group lie apart."""
  coordinates = np.unravel_index(groups, tuple(mesh.values()))
  return tuple(
    axis
    for axis, places in zip(mesh, coordinates, strict=True)
    if np.any(places != places[:, :1])
  )


def _groups(
  line: str, devices: Int[np.ndarray, "devices"]
) -> Int[np.ndarray, "groups members"]:
  """The groups of devices that take part together, by their places in the mesh; for a permutation, its pairs of source and target."""
  if match := re.search(
    r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", line
  ):
    return np.array(
      [
        [int(place) for place in group.split(",")]
        for group in re.findall(r"\{([\d, ]+)\}", match[1])
      ]
    )
  if match := re.search(
    r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", line
  ):
    return _iota(match[1])
  if match := re.search(
    r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\(([^{]+)\))? \{([^}]*)\}",
    line,
  ):
    sizes = {
      name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])
    }
    crossed = re.findall(
      r"'([^']+)'(?!:)", match[3]
    )  # a part of an axis, 'x':(1)2, is unknown here
    if set(crossed) <= set(sizes) and len(crossed) == match[3].count("'") // 2:
      devices = _iota(match[2]) if match[2] else devices
      names = list(sizes)
      order = [names.index(name) for name in names if name not in crossed] + [
        names.index(name) for name in crossed
      ]
      members = math.prod(sizes[name] for name in crossed)
      return (
        devices.reshape(tuple(sizes.values()))
        .transpose(order)
        .reshape(-1, members)
      )
  if "replica_groups={}" in line:
    return devices[None]
  raise ValueError(
    f"a collective whose devices cannot be read: {line.strip()[:300]}"
  )


def _iota(text: str) -> Int[np.ndarray, "..."]:
  """[8,2]<=[2,8]T(1,0): the numbers from 0 in the second shape, transposed, in the first shape; [2,8]T(1,0) without the first."""
  match = re.fullmatch(
    r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text
  )
  if not match:
    raise ValueError(f"devices that cannot be read: {text}")
  final, shape, order = (
    [int(x) for x in part.split(",")] if part else None
    for part in match.groups()
  )
  assert shape is not None
  devices = np.arange(math.prod(shape)).reshape(shape).transpose(order)
  return devices.reshape(final) if final else devices
