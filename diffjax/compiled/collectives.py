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
# A part of an axis, as in {'x':(1)2}, does not match.
_MESH_GROUPS = re.compile(
  r"replica_groups=mesh\[(?P<axis_sizes>[^\]]+)\]"
  r"(?:, device_ids=\((?P<device_ids>[^{]+)\))?"
  r" \{(?P<group_axes>[^}:]*)\}"
)
# The names and sizes in `'x'=4,'y'=2`
_AXIS_SIZE = re.compile(r"'([^']+)'=(\d+)")
# The names in `'x','y'`
_AXIS = re.compile(r"'([^']+)'")


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
    """Returns the instruction with its `times` multiplied by iterations."""
    times = self.collective.times * iterations
    return self._replace(collective=self.collective._replace(times=times))


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
  """Returns the collectives of a compiled program.

  The `times` of a collective in a loop include the loop's iterations.

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
  chained_collectives: dict[str, Collective] = {}
  for chain, collective in reader.read_computation(program.entry):
    if chain is None:
      whole_collectives.append(collective)
      continue
    # The instructions of a chain are the parts of one collective. The parts
    # that start and end it run once per run of the collective. Other parts may
    # be in a loop and run more often. So the lowest count is the collective's.
    least_often = chained_collectives.get(chain)
    if least_often is None or collective.times < least_often.times:
      chained_collectives[chain] = collective
  return whole_collectives + list(chained_collectives.values())


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

  def read_computation(self, computation: str) -> list[CollectiveInstruction]:
    """Returns the collectives of one run of a computation.

    Collectives in the computations that it calls are included. In a loop,
    `times` includes the iterations.

    Raises:
      ValueError: if the text cannot be read, as for `collectives`.
    """
    instructions = []
    for line in self._program.instructions(computation):
      instruction = self._read_line(line, computation)
      if instruction is not None:
        instructions.append(instruction)
      for call in self._program.calls(line):
        called = self.read_computation(call.computation)
        # Loops without collectives are skipped, since the text may not show
        # their iterations.
        if called and call.kind == "body":
          iterations = self._program.iterations(line)
          called = [instruction.repeated(iterations) for instruction in called]
        instructions += called
    return instructions

  def read_instruction(
    self, line: str, computation: str
  ) -> list[CollectiveInstruction]:
    """Returns the collectives that one instruction starts, continues or ends.

    The instruction may be a collective or contain some, for example in a
    fusion. Collectives in loops and in other calls are not included.

    Args:
      line: The instruction.
      computation: Name of the computation that contains the instruction.

    Raises:
      ValueError: if the devices of a collective cannot be read.
    """
    instructions = []
    instruction = self._read_line(line, computation)
    if instruction is not None:
      instructions.append(instruction)
    for embedded in self._program.embedded_computations(line):
      for embedded_line in self._program.instructions(embedded):
        instructions += self.read_instruction(embedded_line, embedded)
    return instructions

  def _read_line(
    self, line: str, computation: str
  ) -> CollectiveInstruction | None:
    """Returns the collective that an instruction is itself, if it is one.

    Collectives in computations that it calls are not included.
    """
    match = _COLLECTIVE.search(line)
    if match:
      collective = self._read_within_slice(match, line, computation)
      chain = _CHAIN.search(line)
      chain_id = chain[1] if chain else None
      return CollectiveInstruction(chain=chain_id, collective=collective)
    # Slices communicate by sends and receives. The receives are counted.
    match = _RECEIVE.search(line)
    if match:
      collective = self._read_between_slices(match)
      return CollectiveInstruction(chain=None, collective=collective)
    return None

  def _read_within_slice(
    self, match: re.Match[str], line: str, computation: str
  ) -> Collective:
    """Returns a collective that is one HLO operation, such as `all-gather`.

    It communicates between devices of one TPU slice.

    Args:
      match: The match of `_COLLECTIVE` in the line.
      line: The instruction.
      computation: Name of the computation that contains the instruction.
    """
    shape, kind, start = match.groups()
    # The shape of an all-reduce-start lists only the results. The shapes of
    # other starts, such as all-gather-start, also list the operands.
    if start and kind != "all-reduce":
      result_bytes = _started_result_bytes(shape)
    else:
      result_bytes = sum(_bytes_of_arrays(shape))
    groups = _device_groups(line, self._devices[0])

    # TPU compilers write a reduce-scatter as a computation of this name, with
    # an all-reduce of the whole array, of which each device keeps a part.
    in_reduce_scatter = computation.startswith("all-reduce-scatter")
    if kind == "all-reduce" and in_reduce_scatter:
      group_size = groups.shape[1]
      part_bytes = result_bytes // group_size
      return self._make_collective("reduce-scatter", part_bytes, groups)
    return self._make_collective(kind, result_bytes, groups)

  def _read_between_slices(self, match: re.Match[str]) -> Collective:
    """Returns a collective of several TPU slices from a match of `_RECEIVE`."""
    shape, transfer_type = match.groups()
    # "ALL_REDUCE" becomes "all-reduce".
    kind = transfer_type.lower().replace("_", "-")
    # The shape lists the result, then semaphores.
    result_bytes = _bytes_of_arrays(shape)[0]
    # A device communicates with the devices at its position in other slices.
    groups = self._devices.T
    return self._make_collective(kind, result_bytes, groups)

  def _make_collective(
    self,
    kind: str,
    result_bytes: int,
    groups: Int[np.ndarray, "groups members"],
  ) -> Collective:
    """Returns a collective that runs once.

    Args:
      kind: As in `Collective`.
      result_bytes: Bytes of its result on one device.
      groups: Positions in the mesh of the devices that communicate.
    """
    group_size = groups.shape[1]
    received_bytes = _received_bytes(kind, result_bytes, group_size)
    return Collective(kind, self._axes(groups), received_bytes, times=1)

  def _axes(self, groups: Int[np.ndarray, "groups members"]) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of a group differ.

    Args:
      groups: Positions in the mesh of the devices of each group.
    """
    axes = []
    mesh_shape = tuple(self._mesh.values())
    coordinates_by_axis = np.unravel_index(groups, mesh_shape)
    for axis, coordinates in zip(self._mesh, coordinates_by_axis, strict=True):
      first_members = coordinates[:, :1]
      if np.any(coordinates != first_members):
        axes.append(axis)
    return tuple(axes)


def _devices_by_slice(
  program: ProgramText, mesh: Mapping[str, int]
) -> Int[np.ndarray, "slices devices"]:
  """Returns the positions in the mesh of each slice's devices.

  Each slice runs the program, whose text states `num_partitions`, the number of
  devices of one slice. If it does not, all devices are one slice. The mesh
  lists one slice after the other.
  """
  num_devices = math.prod(mesh.values())
  devices_per_slice = num_devices
  num_partitions = _NUM_PARTITIONS.search(program.text)
  if num_partitions:
    devices_per_slice = int(num_partitions[1])
  return np.arange(num_devices).reshape(-1, devices_per_slice)


def _received_bytes(kind: str, result_bytes: int, num_devices: int) -> float:
  """Returns the bytes that each device of a group receives, in a ring.

  Args:
    kind: As in `Collective`.
    result_bytes: Bytes of the result on one device.
    num_devices: Number of devices in the group.

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
    # In a ring, it is a reduce-scatter and then an all-gather.
    received_bytes = 2 * received_bytes
  return received_bytes


def _started_result_bytes(shape: str) -> int:
  """Returns the bytes of the results in the shape of a `-start` instruction.

  The shape lists the operands, the same number of results, and perhaps
  semaphores (`u32[]`). In `(bf16[4,16]{1,0}, bf16[8,16]{1,0}, u32[], u32[])`,
  the result is `bf16[8,16]`.
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
  num_elements = 1
  # The dimensions of a scalar are "".
  if dimensions:
    num_elements = math.prod(_integers(dimensions))
  # A boolean, "pred", takes a byte.
  bits = 8
  if dtype != "pred":
    bits = int(_BITS.findall(dtype)[0])
  return num_elements * bits // 8


def _device_groups(
  line: str, devices: Int[np.ndarray, "devices"]
) -> Int[np.ndarray, "groups members"]:
  """Returns the groups of devices that communicate with each other.

  Each pair of source and target of a permutation counts as a group.

  Args:
    line: A collective.
    devices: Positions in the mesh of the devices of the program.

  Returns:
    The positions in the mesh of each group's members.

  Raises:
    ValueError: if the groups cannot be read.
  """
  # HLO lists the groups, compresses the list, or names axes of a mesh.
  listed_groups = _LISTED_GROUPS.search(line)
  if listed_groups:
    groups = []
    for members in _GROUP.findall(listed_groups[1]):
      groups.append(_integers(members))
    return np.array(groups)
  iota_groups = _IOTA_GROUPS.search(line)
  if iota_groups:
    return _iota(iota_groups[1])
  mesh_groups = _MESH_GROUPS.search(line)
  if mesh_groups:
    return _groups_along_axes(mesh_groups, devices)
  if "replica_groups={}" in line:
    # All devices are one group.
    return devices[None]
  raise ValueError(f"a collective whose devices cannot be read: {quote(line)}")


def _groups_along_axes(
  match: re.Match[str], devices: Int[np.ndarray, "devices"]
) -> Int[np.ndarray, "groups members"]:
  """Returns the groups of devices along axes of a mesh that HLO defines.

  In `mesh['x'=2,'y'=3] {'y'}`, the devices are a grid of 2 × 3. The members of
  a group differ along y, so the groups are [[0, 1, 2], [3, 4, 5]].

  Args:
    match: A match of `_MESH_GROUPS`.
    devices: The devices in the order of the mesh. They are not used if the
      match lists `device_ids`.

  Raises:
    ValueError: if a group's axis is not an axis of the mesh.
  """
  sizes_by_axis = {}
  for axis, size in _AXIS_SIZE.findall(match["axis_sizes"]):
    sizes_by_axis[axis] = int(size)
  if match["device_ids"] is not None:
    devices = _iota(match["device_ids"])
  grid = devices.reshape(list(sizes_by_axis.values()))

  # Move the axes of a group to the end, so that each group is a row.
  axes = list(sizes_by_axis)
  group_axes = [axes.index(axis) for axis in _AXIS.findall(match["group_axes"])]
  group_size = math.prod(grid.shape[axis] for axis in group_axes)
  last_axes = range(-len(group_axes), 0)
  return np.moveaxis(grid, group_axes, last_axes).reshape(-1, group_size)


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
