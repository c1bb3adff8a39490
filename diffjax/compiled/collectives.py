"""Reads the collectives of a compiled program: kind, mesh axes and bytes.

XLA's own cost analysis is not sufficient: it counts the body of a loop once and
does not know the mesh axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from diffjax.compiled.text import ProgramText, quote

_KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)

# %a = bf16[8,16]{1,0} all-gather(%x), replica_groups={{0,1},{2,3}}
# %s = (bf16[4,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%x), …
_COLLECTIVE = re.compile(rf" = (.+?) ({'|'.join(_KINDS)})(-start)?\(")
# Traffic between slices, which goes through the host:
# %r = (bf16[8,128], u32[]) recv(%t), …_transfer_type="ALL_REDUCE"
_RECEIVE = re.compile(
  r' = (.+?) recv\(.*_xla_megascale_transfer_type="([A-Z_]+)"'
)
# The data type and dimensions of `bf16[8,16]{1,0}`
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]")
# The number of bits in `bf16`
_BITS = re.compile(r"\d+")
# frontend_attributes={chain_id="7"}
_CHAIN = re.compile(r'chain_id="(\d+)"')
# HloModule jit_step, num_partitions=4
_NUM_PARTITIONS = re.compile(r"num_partitions=(\d+)")

# replica_groups={{0,4},{1,5}}, or source_target_pairs={{0,1},{1,0}}
_LISTED_GROUPS = re.compile(
  r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}"
)
# The members of each group in `{0,4},{1,5}`
_GROUP = re.compile(r"\{([\d, ]+)\}")
# replica_groups=[4,2]<=[2,4]T(1,0)
_IOTA_GROUPS = re.compile(
  r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
# The shapes and the transposition in `[4,2]<=[2,4]T(1,0)`
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
# replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}
_MESH_GROUPS = re.compile(
  r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\(([^{]+)\))? \{([^}]*)\}"
)
# The names and sizes in `'x'=4,'y'=2`
_AXIS_SIZE = re.compile(r"'([^']+)'=(\d+)")
# The names in `'x','y'`. A part of an axis, `'x':(1)2`, does not match.
_WHOLE_AXIS = re.compile(r"'([^']+)'(?!:)")


class Collective(NamedTuple):
  """A collective of a program.

  Attributes:
    kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or
      "collective-permute".
    axes: Names of the mesh axes along which it communicates.
    bytes: Bytes that a device receives each time, in a ring. On n devices, this
      is (n − 1)/n of the whole array, and twice that for an all-reduce.
    times: How often it runs in one run of the program.
  """

  kind: str
  axes: tuple[str, ...]
  bytes: float
  times: int


class CollectiveInstruction(NamedTuple):
  """An instruction that is a collective, or a part of one.

  TPU compilers overlap a collective with computation by cutting it into a chain
  of parts. The text of each part describes the whole collective.

  Attributes:
    chain: The chain that the part belongs to; None for a whole collective.
    collective: The whole collective.
  """

  chain: str | None
  collective: Collective

  def repeated(self, iterations: int) -> CollectiveInstruction:
    """Returns the instruction in a loop."""
    times = self.collective.times * iterations
    return self._replace(collective=self.collective._replace(times=times))


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
  """Returns the collectives of a compiled program.

  A collective in a loop counts with the iterations of the loop.

  Args:
    text: The program, from `jax.stages.Compiled.as_text`.
    mesh: The number of devices along each axis of its mesh, in order.

  Raises:
    ValueError: if the text cannot be read: the devices of a collective, or the
      iterations of a loop that contains one.
  """
  program = ProgramText(text)
  reader = CollectiveReader(program, mesh)

  whole_collectives = []
  chains: dict[str, Collective] = {}
  for chain, collective in reader.in_computation(program.entry):
    if chain is None:
      whole_collectives.append(collective)
      continue
    # Some parts may be in a loop that overlaps with the collective. The part
    # that runs least often has the number of times.
    if chain not in chains or collective.times < chains[chain].times:
      chains[chain] = collective
  return whole_collectives + list(chains.values())


class CollectiveReader:
  """Reads the collectives in the instructions of a program."""

  def __init__(self, program: ProgramText, mesh: Mapping[str, int]):
    """Initializes the reader.

    Args:
      program: The program.
      mesh: The number of devices along each axis of its mesh, in order.
    """
    self._program = program
    self._mesh = mesh
    self._devices = _devices_by_slice(program, mesh)

  def in_computation(self, computation: str) -> list[CollectiveInstruction]:
    """Returns the collectives of one run of a computation, with its calls.

    Raises:
      ValueError: if the text cannot be read, as for `collectives`.
    """
    instructions = []
    for line in self._program.instructions(computation):
      instruction = self._read(line, computation)
      if instruction is not None:
        instructions.append(instruction)
      for call in self._program.calls(line):
        called = self.in_computation(call.computation)
        iterations = 1
        # The iterations of a loop without collectives do not matter. The text
        # may not show them.
        if called and call.kind == "body":
          iterations = self._program.iterations(line)
        for instruction in called:
          instructions.append(instruction.repeated(iterations))
    return instructions

  def in_instruction(
    self, line: str, computation: str
  ) -> list[CollectiveInstruction]:
    """Returns the collectives that an instruction starts, continues or ends.

    These are the instruction itself and those inside a fusion or inside the
    program of a sparse core. Each counts once.

    Args:
      line: The instruction.
      computation: The computation that contains it.

    Raises:
      ValueError: if the devices of a collective cannot be read.
    """
    instructions = []
    instruction = self._read(line, computation)
    if instruction is not None:
      instructions.append(instruction)
    for call in self._program.calls(line):
      # A call-start runs a program on a sparse core.
      if call.kind == "calls" or " call-start(" in line:
        for called_line in self._program.instructions(call.computation):
          instructions += self.in_instruction(called_line, call.computation)
    return instructions

  def _read(self, line: str, computation: str) -> CollectiveInstruction | None:
    """Returns the collective of an instruction, or None if it is not one."""
    match = _COLLECTIVE.search(line)
    if match:
      chain = _CHAIN.search(line)
      return CollectiveInstruction(
        chain=chain[1] if chain else None,
        collective=self._within_slice(match, line, computation),
      )
    match = _RECEIVE.search(line)
    if match:
      return CollectiveInstruction(None, self._between_slices(match))
    return None

  def _within_slice(
    self, match: re.Match[str], line: str, computation: str
  ) -> Collective:
    """Returns the collective of a line that `_COLLECTIVE` matches."""
    shape, kind, start = match.groups()
    if start and kind != "all-reduce":
      result_bytes = _started_result_bytes(shape)
    else:
      result_bytes = sum(_bytes_of_arrays(shape))
    groups = _groups(line, self._devices[0])
    group_size = groups.shape[1]
    # TPU compilers write a reduce-scatter as an all-reduce and a slice, in a
    # computation with this name.
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
      kind = "reduce-scatter"
      result_bytes //= group_size
    received_bytes = _received_bytes(kind, result_bytes, group_size)
    return Collective(kind, self._axes(groups), received_bytes, times=1)

  def _between_slices(self, match: re.Match[str]) -> Collective:
    """Returns the collective of a line that `_RECEIVE` matches."""
    shape, transfer_type = match.groups()
    kind = transfer_type.lower().replace("_", "-")
    # The other entries of the shape are semaphores.
    result_bytes = _bytes_of_arrays(shape)[0]
    received_bytes = _received_bytes(kind, result_bytes, len(self._devices))
    # A device communicates with the same device of the other slices.
    axes = self._axes(self._devices.T)
    return Collective(kind, axes, received_bytes, times=1)

  def _axes(self, groups: Int[np.ndarray, "groups members"]) -> tuple[str, ...]:
    """Returns the axes along which the members of a group differ."""
    axes = []
    coordinates = np.unravel_index(groups, tuple(self._mesh.values()))
    for axis, positions in zip(self._mesh, coordinates, strict=True):
      if np.any(positions != positions[:, :1]):
        axes.append(axis)
    return tuple(axes)


def _devices_by_slice(
  program: ProgramText, mesh: Mapping[str, int]
) -> Int[np.ndarray, "slices devices"]:
  """Returns the positions in the mesh of each slice's devices.

  A program for several slices is the program of one slice. It numbers the
  devices of this slice, which come first in the mesh.
  """
  num_devices = math.prod(mesh.values())
  devices_per_slice = num_devices
  num_partitions = _NUM_PARTITIONS.search(program.text)
  if num_partitions:
    devices_per_slice = int(num_partitions[1])
  return np.arange(num_devices).reshape(-1, devices_per_slice)


def _received_bytes(kind: str, result_bytes: int, num_devices: int) -> float:
  """Returns the bytes that each device of a group receives, in a ring.

  Raises:
    ValueError: if the kind is unknown.
  """
  if kind not in _KINDS:
    raise ValueError(f"a collective that is not known: {kind}")
  if kind == "collective-permute":
    return float(result_bytes)
  array_bytes = result_bytes
  if kind == "reduce-scatter":
    # The result is only the device's own part of the array.
    array_bytes = result_bytes * num_devices
  # A device has one part of the array and receives the others.
  received_bytes = array_bytes * (num_devices - 1) / num_devices
  if kind == "all-reduce":
    # A reduce-scatter and an all-gather
    received_bytes = 2 * received_bytes
  return received_bytes


def _started_result_bytes(shape: str) -> int:
  """Returns the bytes of the results in the shape of a `-start` instruction.

  The shape lists the operands, as many results, and perhaps semaphores:
  `(bf16[4,16]{1,0}, bf16[8,16]{1,0}, u32[], u32[])`.
  """
  array_bytes = []
  for dtype, dimensions in _ARRAY.findall(shape):
    is_semaphore = dtype == "u32" and not dimensions
    if not is_semaphore:
      array_bytes.append(_array_bytes(dtype, dimensions))
  num_operands = len(array_bytes) // 2
  return sum(array_bytes[num_operands:])


def _bytes_of_arrays(shape: str) -> list[int]:
  """Returns the bytes of each array in a shape, as in `(f32[16], f32[])`."""
  return [
    _array_bytes(dtype, dimensions)
    for dtype, dimensions in _ARRAY.findall(shape)
  ]


def _array_bytes(dtype: str, dimensions: str) -> int:
  """Returns the bytes of an array, such as "bf16" and "8,16"."""
  bits = 8
  if dtype != "pred":
    bits = int(_BITS.findall(dtype)[0])
  if not dimensions:
    return bits // 8
  return math.prod(_integers(dimensions)) * bits // 8


def _groups(
  line: str, devices: Int[np.ndarray, "devices"]
) -> Int[np.ndarray, "groups members"]:
  """Returns the groups of devices that communicate with each other.

  The pairs of source and target of a permutation count as groups.

  Args:
    line: A collective.
    devices: Positions in the mesh of the devices of the program.

  Returns:
    The positions in the mesh of each group's members.

  Raises:
    ValueError: if the groups cannot be read.
  """
  listed_groups = _LISTED_GROUPS.search(line)
  if listed_groups:
    return np.array(
      [_integers(members) for members in _GROUP.findall(listed_groups[1])]
    )
  iota_groups = _IOTA_GROUPS.search(line)
  if iota_groups:
    return _iota(iota_groups[1])
  mesh_groups = _MESH_GROUPS.search(line)
  if mesh_groups:
    groups = _groups_along_axes(mesh_groups, devices)
    if groups is not None:
      return groups
  if "replica_groups={}" in line:
    # All devices are one group.
    return devices[None]
  raise ValueError(f"a collective whose devices cannot be read: {quote(line)}")


def _groups_along_axes(
  match: re.Match[str], devices: Int[np.ndarray, "devices"]
) -> Int[np.ndarray, "groups members"] | None:
  """Returns the groups along axes of the compiler's own mesh.

  Args:
    match: A match of `_MESH_GROUPS`: the sizes of the axes, perhaps the devices
      in the order of that mesh, and the axes along which the members of a group
      differ.
    devices: The devices, if the match has none.

  Returns:
    The groups, or None if they are along a part of an axis: `'x':(1)2`.
  """
  axis_sizes, device_ids, group_axes = match.groups()
  sizes = {name: int(size) for name, size in _AXIS_SIZE.findall(axis_sizes)}
  member_axes = _WHOLE_AXIS.findall(group_axes)
  num_quoted_names = group_axes.count("'") // 2
  if len(member_axes) != num_quoted_names or not set(member_axes) <= set(sizes):
    return None

  if device_ids is not None:
    devices = _iota(device_ids)
  other_axes = [name for name in sizes if name not in member_axes]
  names = list(sizes)
  order = [names.index(name) for name in other_axes + member_axes]
  group_size = math.prod(sizes[name] for name in member_axes)
  grid = devices.reshape(tuple(sizes.values()))
  return grid.transpose(order).reshape(-1, group_size)


def _iota(text: str) -> Int[np.ndarray, "..."]:
  """Returns an array of device numbers from HLO's compressed notation.

  `[4,2]<=[2,4]T(1,0)` counts from 0 in the shape [2, 4], transposes the axes,
  and reshapes to [4, 2]. The first and the last part are optional.

  Raises:
    ValueError: if the text has another form.
  """
  match = _IOTA.fullmatch(text)
  if match is None:
    raise ValueError(f"devices that cannot be read: {text}")
  final_shape, shape, order = match.groups()
  sizes = _integers(shape)
  devices = np.arange(math.prod(sizes)).reshape(sizes)
  if order:
    devices = devices.transpose(_integers(order))
  if final_shape:
    devices = devices.reshape(_integers(final_shape))
  return devices


def _integers(text: str) -> Sequence[int]:
  """Returns the integers in a text such as "8,16"."""
  return [int(number) for number in text.split(",")]
