"""How a mesh splits the arrays of an operation, and attention by gathering.

The axes B and H need no communication. If a mesh splits the tokens of a
sequence, each device attends from its own queries to the keys of the whole
sequence. `ring` sends keys and values from device to device.
`gathered_attention`, in this file, collects all of them on every device.

In this file, a row is one sequence of the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.mask import PER_ROW, Mask
from diffjax.ops.diff_attention.tiles import Scalar
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  run_implementation,
)

TOKEN_ORDERS = ("given", "balanced")


def balanced_order(length: int, shards: int) -> Int[np.ndarray, "T"]:
  """Returns an order of tokens that gives all shards the same work.

  With a causal mask, later tokens attend to more keys. So a row is cut into 2C
  pieces for C shards, and shard c holds the pieces c and 2C − 1 − c.

  Example:
    balanced_order(8, shards=2)  # [0, 1, 6, 7, 2, 3, 4, 5]

  Args:
    length: number of tokens of the row, a multiple of 2C.
    shards: number of shards, C.

  Returns:
    The indices of the tokens of the first shard, then of the second, and so on.
  """
  num_pieces = 2 * shards
  pieces = np.arange(length).reshape(num_pieces, -1)
  order = []
  for shard in range(shards):
    order.append(pieces[shard])
    order.append(pieces[num_pieces - 1 - shard])
  return np.concatenate(order)


@dataclasses.dataclass(frozen=True)
class AxisSharding:
  """How a mesh splits the axes of an operation, for example "B T H".

  Attributes:
    mesh: a Mesh or an AbstractMesh.
    axes: for each axis of the operation, by letter, the names of the mesh axes
      that split it. () for an axis that is not split.
  """

  mesh: Any
  axes: dict[str, tuple[str, ...]]

  @classmethod
  def of(
    cls, sharding: NamedSharding | P, axis_names: str
  ) -> AxisSharding | None:
    """Returns how a sharding splits the axes of an operation.

    Example:
      PartitionSpec("data", None) and "B T H" →
      axes {"B": ("data",), "T": (), "H": ()}

    Args:
      sharding: a NamedSharding, or a PartitionSpec for the mesh of
        `jax.set_mesh`.
      axis_names: the axes of the operation, for example "B T H".

    Returns:
      None if the mesh has one device, since nothing is split.

    Raises:
      ValueError: if the sharding does not match the axes or has no mesh.
    """
    letters = axis_names.split()
    axes_text = f"[{', '.join(letters)}]"
    mesh: Any
    if isinstance(sharding, NamedSharding):
      mesh = sharding.mesh
      spec = sharding.spec
    elif isinstance(sharding, P):
      mesh = jax.sharding.get_abstract_mesh()
      spec = sharding
    else:
      raise ValueError(
        f"sharding must be a PartitionSpec or NamedSharding over {axes_text};"
        f" got {sharding!r}"
      )
    if mesh.empty:
      raise ValueError(
        f"sharding = {sharding} needs a mesh: pass NamedSharding(mesh, spec),"
        " or call within jax.set_mesh(mesh)"
      )
    if len(spec) > len(letters):
      raise ValueError(
        f"sharding must be over {axes_text}, {len(letters)} axes at most;"
        f" got {spec}"
      )

    # An entry of a spec is None, a mesh axis, or a tuple of mesh axes.
    mesh_axes = [_mesh_axes(entry) for entry in spec]
    used_axes: set[str] = set()
    for names in mesh_axes:
      used_axes.update(names)
    unknown_axes = used_axes - set(mesh.axis_names)
    if unknown_axes:
      raise ValueError(
        f"sharding = {spec} must use axes of the mesh,"
        f" {', '.join(mesh.axis_names)}; got {', '.join(sorted(unknown_axes))}"
      )

    if mesh.size == 1:
      return None
    # A spec may be shorter than an array. It does not split the last axes then.
    while len(mesh_axes) < len(letters):
      mesh_axes.append(())
    return cls(mesh, axes=dict(zip(letters, mesh_axes, strict=True)))

  def shards(self, axis: str) -> int:
    """Returns the number of shards of an axis, for example "T"."""
    return math.prod(self.mesh.shape[name] for name in self.axes[axis])

  def spec(self, axes: str) -> P:
    """Returns the PartitionSpec of an array with leading axes such as "B T"."""
    return P(*(self.axes[axis] or None for axis in axes.split()))

  def check(self, axis: str, sizes: dict[str, int], multiple: int = 1) -> None:
    """Checks that all shards of an axis have the same size.

    Args:
      axis: the letter of the axis.
      sizes: the sizes of arrays along this axis, by letter. For example, q and
        k have Q and K at the place of the axis "H".
      multiple: a number that must divide the size of a shard.

    Raises:
      ValueError: if a size cannot be divided.
    """
    num_shards = self.shards(axis)
    for letter, size in sizes.items():
      if size % (multiple * num_shards) == 0:
        continue

      # The size cannot be divided. Say what the user can do about it.
      divisor = str(num_shards)
      if multiple > 1:
        divisor = f"{multiple} × {num_shards}"
      remedy = f"pad {letter}"
      if letter == "K":
        remedy = "repeat k and v"
      raise ValueError(
        f"sharding over {self.axes[axis]} needs {letter} to be a multiple of"
        f" {divisor}; got {letter} = {size}; {remedy}, or use fewer shards"
      )

  def map_shards(
    self,
    function: Callable[..., jax.Array],
    operands: list[tuple[jax.Array | None, P]],
    out: P,
  ) -> jax.Array:
    """Returns function(*arrays), where each device computes its own shard.

    Args:
      function: takes this device's shards of the arrays.
      operands: the arrays and their specs. An array may be None.
      out: the spec of the result.
    """
    arrays = []
    specs = []
    for array, spec in operands:
      # On a mesh with explicit axes, the type of an array holds its sharding.
      # shard_map requires that it equals the spec.
      if array is not None and AxisType.Explicit in self.mesh.axis_types:
        array = jax.reshard(array, NamedSharding(self.mesh, spec))
      arrays.append(array)
      specs.append(spec)
    mapped = jax.shard_map(
      function, mesh=self.mesh, in_specs=tuple(specs), out_specs=out
    )
    return mapped(*arrays)


def _mesh_axes(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes in one entry of a PartitionSpec."""
  if entry is None:
    return ()
  if isinstance(entry, str):
    return (entry,)
  return tuple(entry)


@dataclasses.dataclass(frozen=True)
class TokenSharding:
  """How devices share the tokens of a row, inside `shard_map`.

  A shard holds one or two pieces of the row. The pieces of a row are equally
  long, and are numbered from its first token.

  Attributes:
    axes: the mesh axes that split the tokens.
    shards: the number of shards of a row.
    order: "given" if shard c holds piece c, or "balanced" if it holds two
      pieces, as `balanced_order` describes.
  """

  axes: tuple[str, ...]
  shards: int
  order: str

  @property
  def shard(self) -> Int[Array, ""]:
    """The index of this device's shard."""
    return lax.axis_index(self.axes)

  def pieces(self, shard: Scalar) -> tuple[Scalar, ...]:
    """Returns the indices of the pieces that a shard holds."""
    if self.order == "balanced":
      return (shard, 2 * self.shards - 1 - shard)
    return (shard,)

  def shift(self, arrays: Any, distance: int) -> Any:
    """Sends arrays to the shard `distance` later, and returns those received.

    The shards form a ring: the first one comes after the last one.

    Example:
      with 3 shards that hold [a, b, c], a distance of 1 → [c, a, b]

    Args:
      arrays: a tree of this device's arrays.
      distance: a number of shards, of any sign.
    """
    if distance % self.shards == 0:
      return arrays
    routes = []  # pairs of a source and a destination
    for shard in range(self.shards):
      routes.append((shard, (shard + distance) % self.shards))

    def send(x: jax.Array) -> jax.Array:
      return lax.ppermute(x, self.axes, routes)

    return jax.tree.map(send, arrays)

  def gather_row(
    self, x: Float[Array, "B t *axes"]
  ) -> Float[Array, "B T *axes"]:
    """Returns the tokens of all shards, in the order of the row.

    Args:
      x: this device's tokens, and their other axes.
    """
    if self.order == "given":
      return lax.all_gather(x, self.axes, axis=1, tiled=True)
    return self._gather_balanced_row(x)

  def _gather_balanced_row(
    self, x: Float[Array, "B t *axes"]
  ) -> Float[Array, "B T *axes"]:
    """Returns the tokens of all shards, if each holds two pieces of the row.

    The row is cut into 2C pieces for C shards. Shard c holds the pieces c and
    2C − 1 − c, so that all shards have equal work under a causal mask.

    Example, with C = 2 shards:
      shard 0 holds the pieces 0 and 3, and shard 1 the pieces 1 and 2
      first pieces of all shards:  [0, 1]
      second pieces of all shards: [3, 2], in reverse order
      row:                         [0, 1, 2, 3]
    """
    first_pieces, second_pieces = jnp.split(x, 2, axis=1)
    first_half = lax.all_gather(first_pieces, self.axes, axis=1)
    second_half = lax.all_gather(second_pieces, self.axes, axis=1)
    second_half = jnp.flip(second_half, axis=1)
    row = jnp.concatenate([first_half, second_half], axis=1)  # [B, 2C, T/2C, …]
    return row.reshape(x.shape[0], -1, *x.shape[2:])


def gathered_attention(
  implementation: Implementation,
  arrays: Arrays,
  mask: Mask,
  scale: float,
  tokens: TokenSharding,
) -> Float[Array, "B T H V"]:
  """Returns attention of one shard's queries to the gathered keys of its row.

  The queries are one or two pieces of the row, and a call of the implementation
  computes each piece.

  Every device holds the keys and values of the whole row. `ring` needs less
  memory, but it supports neither implementations without partial results, nor
  offsets that are arrays, nor T ≠ S. Autodiff sends the gradients of gathered
  keys and values back to the devices that hold them, and sums them there.

  Args:
    implementation: computes attention. It must support offsets that are arrays.
    arrays: the arrays of this shard.
    mask: the lengths of this shard, and the position of the row's first query.
    scale: factor on q·k.
    tokens: how the devices share a row.
  """
  k = tokens.gather_row(arrays.k)  # [B, S, K, M, D]
  v = tokens.gather_row(arrays.v)  # [B, S, K, V]
  kv_ids = arrays.kv_ids
  if kv_ids is not None:
    kv_ids = tokens.gather_row(kv_ids)  # [B, S]

  # The queries of a piece have consecutive positions. Which piece of the row a
  # device holds is known only at run time, and so is their first position.
  batch = arrays.q.shape[0]
  pieces = tokens.pieces(tokens.shard)
  piece_length = mask.q_length // len(pieces)
  piece_mask = dataclasses.replace(
    mask, q_length=piece_length, kv_length=k.shape[1], offset=PER_ROW
  )
  outputs = []
  for index, piece in enumerate(pieces):
    tokens_of_piece = slice(index * piece_length, (index + 1) * piece_length)
    offset = jnp.full(batch, piece * piece_length, jnp.int32)
    if mask.offset != 0:  # the row itself does not start at position 0
      offset += mask.first_position(arrays.offset)
    piece_arrays = Arrays(
      q=arrays.q[:, tokens_of_piece],
      k=k,
      v=v,
      lam=_slice_tokens(arrays.lam, tokens_of_piece),
      q_ids=_slice_tokens(arrays.q_ids, tokens_of_piece),
      kv_ids=kv_ids,
      offset=offset,
    )
    piece_output = run_implementation(
      implementation, piece_arrays, piece_mask, scale
    )
    outputs.append(piece_output)
  return jnp.concatenate(outputs, axis=1)


def _slice_tokens(
  x: Float[Array, "B T *axes"] | None, tokens: slice
) -> Float[Array, "B t *axes"] | None:
  if x is None:
    return None
  return x[:, tokens]
