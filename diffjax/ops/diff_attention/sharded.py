"""The operations on a mesh: one sharding says which mesh axes, of any names, shard batch, tokens and heads.

Batch and heads need no communication. Where tokens are sharded, each device attends from its own queries to the whole row, whose keys and
values travel (ring.py) or are gathered (here).
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

from diffjax.ops.diff_attention.tiles import Scalar

TOKEN_ORDERS = ("given", "balanced")


def balanced_order(length: int, shards: int) -> Int[np.ndarray, "T"]:
  """The tokens of a row in the order that gives all shards the same work under a causal mask: those of shard 0, of shard 1, and so on.

  Late tokens have more to attend to. So a row is cut into twice as many pieces as there are shards, and shard c holds pieces c and
  2C − 1 − c. The length is a multiple of 2·shards.
  """
  pieces = np.arange(length).reshape(2 * shards, -1)
  return np.concatenate(
    [pieces[[shard, -1 - shard]].ravel() for shard in range(shards)]
  )


@dataclasses.dataclass(frozen=True)
class AxisSharding:
  """The mesh axes that shard an array's leading axes.

  Attributes:
    mesh: the mesh.
    axes: mesh axes of each leading axis; () for one that is not sharded.
  """

  mesh: Any
  axes: tuple[tuple[str, ...], ...]

  @classmethod
  def of(cls, sharding: NamedSharding | P, names: str) -> AxisSharding | None:
    """The layout that a sharding gives the axes `names` ("B T H"); None on a mesh of one device.

    Raises:
      ValueError: it is no such sharding, or there is no mesh.
    """
    if not isinstance(sharding, NamedSharding | P):
      raise ValueError(
        f"sharding must be a PartitionSpec or NamedSharding over [{names.replace(' ', ', ')}], got {sharding!r}"
      )
    mesh: Any = (
      sharding.mesh
      if isinstance(sharding, NamedSharding)
      else jax.sharding.get_abstract_mesh()
    )
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if mesh.empty:
      raise ValueError(
        f"sharding = {sharding} needs a mesh: pass NamedSharding(mesh, spec), or call within jax.set_mesh(mesh)"
      )
    count = len(names.split())
    if len(spec) > count:
      raise ValueError(
        f"sharding must be over [{names.replace(' ', ', ')}], {count} axes at most, got {spec}"
      )
    axes = tuple(
      ()
      if entry is None
      else (entry,)
      if isinstance(entry, str)
      else tuple(entry)
      for entry in spec
    )
    if unknown := {name for group in axes for name in group} - set(
      mesh.axis_names
    ):
      raise ValueError(
        f"sharding = {spec} must use axes of the mesh, {', '.join(mesh.axis_names)}, got {', '.join(sorted(unknown))}"
      )
    return (
      None if mesh.size == 1 else cls(mesh, axes + ((),) * (count - len(axes)))
    )

  def shards(self, axis: int) -> int:
    """The number of parts that an axis is cut into."""
    return math.prod(self.mesh.shape[name] for name in self.axes[axis])

  def spec(self, *axes: int) -> P:
    """The spec of an array whose leading axes are these."""
    return P(*(self.axes[axis] or None for axis in axes))

  def check(self, axis: int, sizes: dict[str, int], multiple: int = 1) -> None:
    """Refuses sizes along an axis, by name, that its shards cannot share evenly; with `multiple`, in so many pieces a shard."""
    for name, size in sizes.items():
      if size % (multiple * self.shards(axis)):
        factors = (
          f"{multiple} × {self.shards(axis)}"
          if multiple > 1
          else self.shards(axis)
        )
        remedy = "repeat k and v" if name == "K" else f"pad {name}"
        raise ValueError(
          f"sharding over {self.axes[axis]} needs {name} to be a multiple of {factors}, got {name} = {size}; {remedy}, or use fewer shards"
        )

  def map(
    self,
    function: Callable[..., jax.Array],
    operands: list[tuple[Any, P]],
    out: P,
  ) -> jax.Array:
    """function(*operands) on each device's own parts. An operand is None, or an array with its spec."""
    arrays, specs = zip(*operands, strict=True)
    if (
      AxisType.Explicit in self.mesh.axis_types
    ):  # their arrays' types say how they lie, and must agree
      arrays = tuple(
        None if x is None else jax.reshard(x, NamedSharding(self.mesh, spec))
        for x, spec in operands
      )
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=specs, out_specs=out
    )(*arrays)


@dataclasses.dataclass(frozen=True)
class TokenSharding:
  """How devices share the tokens of a row, inside `shard_map`.

  Attributes:
    axes: mesh axes that shard them.
    shards: number of devices along these.
    order: "given", each shard's tokens follow those of the shard before; or "balanced", as `balanced_order` says.
  """

  axes: tuple[str, ...]
  shards: int
  order: str

  @property
  def shard(self) -> Int[Array, ""]:
    """The number of this device's shard."""
    return lax.axis_index(self.axes)

  def pieces(self, shard: Scalar) -> tuple[Scalar, ...]:
    """The pieces of a row that a shard holds, by their numbers in the row. All are equally long."""
    return (
      (shard, 2 * self.shards - 1 - shard)
      if self.order == "balanced"
      else (shard,)
    )

  def shift(self, arrays: Any, distance: int) -> Any:
    """All arrays of a tree, each sent to the device so many shards on, round the end of the row."""
    if distance % self.shards == 0:
      return arrays
    pairs = [
      (shard, (shard + distance) % self.shards) for shard in range(self.shards)
    ]
    return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), arrays)

  def gather_row(self, x: jax.Array) -> jax.Array:
    """The tokens of all shards [B, T, …], in the order of the row."""
    if self.order == "given":
      return lax.all_gather(x, self.axes, axis=1, tiled=True)
    early, late = (
      lax.all_gather(half, self.axes, axis=1)
      for half in jnp.split(x, 2, axis=1)
    )  # [B, C, T/2C, …], the late ones backwards
    whole = jnp.concatenate([early, jnp.flip(late, axis=1)], axis=1)
    return whole.reshape(x.shape[0], -1, *x.shape[2:])


def gathered_attention(
  attention: Callable[..., jax.Array],
  tokens: TokenSharding,
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Float[Array, "B T H"] | None,
  q_ids: Int[Array, "B T"] | None,
  kv_ids: Int[Array, "B S"] | None,
  q_offset: int | Int[Array, "B"],
) -> Float[Array, "B T H V"]:
  """`attention` inside `shard_map`, from one shard's queries to the keys of the whole row, which are gathered. Autodiff sums their
  gradients back to the devices that hold them.

  It asks nothing of `attention` but an offset that is data, and of the row nothing at all: for implementations without partial results,
  offsets that only the running program knows, and rows with other numbers of queries than of keys. `ring` serves all else.

  Args:
    attention: takes the arrays below, in this order.
    tokens: how devices share a row.
    q: one shard's queries.
    k: its keys.
    v: its values.
    lam: λ of its queries, or None.
    q_ids: documents of its queries, or None.
    kv_ids: documents of its keys, or None.
    q_offset: position of the row's first query.
  """
  k, v = tokens.gather_row(k), tokens.gather_row(v)
  kv_ids = None if kv_ids is None else tokens.gather_row(kv_ids)
  pieces = tokens.pieces(tokens.shard)
  size, outs = q.shape[1] // len(pieces), []
  for n, piece in enumerate(pieces):
    mine = lambda x, n=n: None if x is None else x[:, n * size : (n + 1) * size]
    start = jnp.full(q.shape[0], piece * size, jnp.int32)
    start = (
      start if isinstance(q_offset, int) and q_offset == 0 else start + q_offset
    )
    outs.append(attention(mine(q), k, v, mine(lam), mine(q_ids), kv_ids, start))
  return jnp.concatenate(outs, axis=1)
