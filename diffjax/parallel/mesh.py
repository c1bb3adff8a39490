"""The mesh of devices, and the operations wrapped for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from diffjax.config import MeshConfig, UserError
from diffjax.ops.cross_entropy import fused_cross_entropy
from diffjax.ops.diff_attention import IMPLEMENTATIONS, diff_attention
from diffjax.parallel.rules import BATCH

AXES = ("data", "fsdp")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with the axes data and fsdp over all devices.

  Raises:
    UserError: if the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = [getattr(config, axis) for axis in AXES]
  fixed = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and len(devices) % fixed == 0:
    sizes[sizes.index(-1)] = len(devices) // fixed
  if math.prod(sizes) != len(devices):
    given = ", ".join(f"config.mesh.{axis} = {getattr(config, axis)}" for axis in AXES)
    raise UserError(f"{given}: the axes must multiply to the {len(devices)} devices; −1 on one axis takes what is left")
  return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def sharded_attention(mesh: Mesh, implementation: str) -> Callable[..., jax.Array]:
  """`diff_attention` with the batch and, on a mesh with an axis "tensor", the heads sharded: each device runs its own, without
  communication. K must be a multiple of the tensor axis.
  """
  if implementation not in IMPLEMENTATIONS:
    raise UserError(f"config.model.attention_implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
  attention = functools.partial(diff_attention, implementation=implementation)
  if mesh.size == 1:
    return attention

  def sharded(q, k, v, lam=None, *, q_segment_ids=None, kv_segment_ids=None):
    # λ is broadcast before the shard_map, so that autodiff reduces its gradient over the devices outside.
    lam = None if lam is None else jnp.broadcast_to(lam, q.shape[:3])

    def local(q, k, v, lam, q_segment_ids, kv_segment_ids):
      return attention(q, k, v, lam, q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids)

    heads, ids = P(BATCH, None, "tensor" if "tensor" in mesh.axis_names else None), P(BATCH)
    sharded_call = jax.shard_map(local, mesh=mesh, in_specs=(heads, heads, heads, heads, ids, ids), out_specs=heads)
    return sharded_call(q, k, v, lam, q_segment_ids, kv_segment_ids)

  return sharded


def sharded_cross_entropy(mesh: Mesh) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """`fused_cross_entropy` with the batch sharded: each device loops over its own tokens, and the sums (and the gradient of the
  embedding) are reduced once."""
  if mesh.size == 1:
    return fused_cross_entropy

  def sharded(hidden, embedding, targets, weights, *, z_loss=0.0):
    def local(hidden, embedding, targets, weights):
      return jax.lax.psum(fused_cross_entropy(hidden, embedding, targets, weights, z_loss=z_loss), BATCH)

    return jax.shard_map(local, mesh=mesh, in_specs=(P(BATCH), P(), P(BATCH), P(BATCH)), out_specs=P())(hidden, embedding, targets, weights)

  return sharded
