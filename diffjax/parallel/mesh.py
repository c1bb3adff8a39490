"""The mesh of devices, each process's share of a batch, and the operations wrapped for the mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.config import MeshConfig, UserError
from diffjax.ops.cross_entropy import fused_cross_entropy
from diffjax.ops.diff_attention import (
  balanced_order,
  diff_attention,
  implementations,
)
from diffjax.ops.varying import vary_like
from diffjax.parallel.product import gather_parameter
from diffjax.parallel.rules import BATCH, LENGTH, SPECS

AXES = ("data", "fsdp", "context", "tensor")


def make_mesh(
  config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """A mesh with the axes data, fsdp, context and tensor over all devices. Only the data axis crosses between slices, so that they exchange
  one sum of gradients a step.

  Raises:
    UserError: if the sizes do not multiply to the number of devices, or data is no multiple of the slices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = [getattr(config, axis) for axis in AXES]
  fixed = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and len(devices) % fixed == 0:
    sizes[sizes.index(-1)] = len(devices) // fixed
  if math.prod(sizes) != len(devices):
    given = ", ".join(
      f"config.mesh.{axis} = {getattr(config, axis)}" for axis in AXES
    )
    raise UserError(
      f"{given}: the axes must multiply to the {len(devices)} devices; −1 on one axis takes what is left"
    )
  types = (AxisType.Auto,) * len(AXES)
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  if (
    slices == 1
  ):  # axes go along the torus's own where these fit, and share one where they do not
    return Mesh(
      mesh_utils.create_device_mesh(
        sizes, devices, allow_split_physical_axes=True
      ),
      AXES,
      axis_types=types,
    )
  if sizes[0] % slices:
    raise UserError(
      f"config.mesh.data = {sizes[0]} must be a multiple of the {slices} slices: no other axis may cross between slices"
    )
  within = (sizes[0] // slices, *sizes[1:])
  across = mesh_utils.create_hybrid_device_mesh(
    within, (slices, 1, 1, 1), devices, allow_split_physical_axes=True
  )
  return Mesh(across, AXES, axis_types=types)


def batch_share(mesh: Mesh) -> tuple[int, int]:
  """The number of this process's share of every batch, and the number of shares. Processes that differ along context or tensor alone feed
  the same share.

  Raises:
    UserError: if the processes' devices do not split the batch into equal parts.
  """
  shares: dict[int, set[int]] = {}
  for index, device in np.ndenumerate(mesh.devices):
    shares.setdefault(device.process_index, set()).add(
      index[0] * mesh.shape["fsdp"] + index[1]
    )
  distinct = sorted({tuple(sorted(share)) for share in shares.values()})
  if (
    sum(map(len, distinct)) != mesh.shape["data"] * mesh.shape["fsdp"]
    or len(set(map(len, distinct))) > 1
  ):
    raise UserError(
      f"config.mesh = {dict(mesh.shape)}: the devices of each process must hold whole and equal parts of the batch (data × fsdp), or "
      "share one with other whole processes; choose sizes of which each is a multiple or a divisor of the devices a process has"
    )
  return distinct.index(tuple(sorted(shares[jax.process_index()]))), len(
    distinct
  )


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
  """This process's rows [rows, T] of a batch as global arrays, split over the mesh's batch axes, and each row over its context axis."""
  sharding = NamedSharding(mesh, P(BATCH, LENGTH))
  shards = mesh.shape["context"]
  local = sorted(
    {
      index[2]
      for index, device in np.ndenumerate(mesh.devices)
      if device.process_index == jax.process_index()
    }
  )

  def put(rows: np.ndarray) -> jax.Array:
    if shards > 1:
      pieces = rows[:, balanced_order(rows.shape[1], shards)].reshape(
        len(rows), shards, -1
      )
      rows = pieces[:, local].reshape(len(rows), -1)
    return jax.make_array_from_process_local_data(sharding, rows)

  return {name: put(rows) for name, rows in batch.items()}


def sharded_attention(
  mesh: Mesh, implementation: str
) -> Callable[..., jax.Array]:
  """`diff_attention` with the batch, the heads and, in balanced order, the tokens sharded; it takes the same arguments.

  K must be a multiple of the tensor axis. Keys and values travel along the context axis; nothing else is communicated.

  Raises:
    UserError: the implementation is not known, or takes no context axis.
  """
  if implementation not in implementations.names():
    raise UserError(
      f"config.model.attention_implementation = {implementation!r}: must be one of {', '.join(implementations.names())}"
    )
  if implementation == "two_call" and mesh.shape["context"] > 1:
    raise UserError(
      "config.model.attention_implementation = 'two_call' takes no offset, which config.mesh.context needs; use 'auto' or 'chunked'"
    )
  sharding = NamedSharding(mesh, P(BATCH, LENGTH, "tensor"))
  return functools.partial(
    diff_attention,
    implementation=implementation,
    sharding=sharding,
    token_order="balanced",
  )


def sharded_cross_entropy(
  mesh: Mesh,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """`fused_cross_entropy` with the tokens sharded over the whole mesh: each device loops over its own. The embedding is gathered before the
  loop, and its gradient, after it, scattered to the devices that keep it; the sums are reduced once."""
  if mesh.size == 1:
    return fused_cross_entropy

  def sharded(hidden, embedding, targets, weights, *, z_loss=0.0, chunk=None):
    def local(hidden, embedding, targets, weights):
      embedding = vary_like(
        embedding, hidden
      )  # before it is gathered, so that what is summed over data is a share of the gradient
      for axis, name in enumerate(SPECS["embedding"]):
        embedding = gather_parameter(embedding, axis, name, hidden.dtype)
      return jax.lax.psum(
        fused_cross_entropy(
          hidden, embedding, targets, weights, z_loss=z_loss, chunk=chunk
        ),
        AXES,
      )

    # Along the tensor axis, which holds every token's hidden state whole, tokens are split too.
    tokens = P(BATCH, (LENGTH, "tensor"))
    in_specs = (tokens, SPECS["embedding"], tokens, tokens)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P())(
      hidden, embedding, targets, weights
    )

  return sharded
