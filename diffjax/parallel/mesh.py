"""The mesh of devices, and what depends on it: shares of a batch, operations.

A mesh has four axes: data, fsdp, context and tensor. The data and fsdp axes
split the batch, the context axis splits rows, and the tensor axis splits heads
and other parts of layers. The fsdp and tensor axes also split parameters
(parallel/rules.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from diffjax.config import MeshConfig, UserError
from diffjax.ops.cross_entropy import fused_cross_entropy
from diffjax.ops.diff_attention import (
  balanced_order,
  diff_attention,
  implementations,
)
from diffjax.ops.varying import vary_like
from diffjax.parallel.product import gather_parameter
from diffjax.parallel.rules import BATCH, LENGTH, parameter_spec

AXES = ("data", "fsdp", "context", "tensor")


def make_mesh(
  config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Returns a mesh of devices with the axes data, fsdp, context and tensor.

  If the devices belong to several TPU slices, only the data axis crosses
  between slices. Then slices exchange only one sum of gradients per step.

  Args:
    config: the sizes of the axes.
    devices: all devices of the mesh. None for all devices that JAX has.

  Raises:
    UserError: if the product of the sizes is not the number of devices, or if
      the size of the data axis is not a multiple of the number of slices.
  """
  if devices is None:
    devices = jax.devices()
  devices = list(devices)
  sizes = _axis_sizes(config, len(devices))
  axis_types = (AxisType.Auto,) * len(AXES)

  num_slices = len({getattr(device, "slice_index", 0) for device in devices})
  if num_slices == 1:
    # An axis of the mesh follows an axis of the torus if the sizes fit. If they
    # do not fit, two axes of the mesh may share one axis of the torus.
    device_array = mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True
    )
    return Mesh(device_array, AXES, axis_types=axis_types)

  # The data axis is divided into equal parts, one for each slice.
  data_size = sizes[0]
  if data_size % num_slices != 0:
    raise UserError(
      f"config.mesh.data = {data_size} must be a multiple of the {num_slices}"
      " slices, because no other axis may cross between slices"
    )
  sizes_in_slice = (data_size // num_slices, *sizes[1:])
  device_array = mesh_utils.create_hybrid_device_mesh(
    mesh_shape=sizes_in_slice,
    dcn_mesh_shape=(num_slices, 1, 1, 1),  # Only data crosses between slices.
    devices=devices,
    allow_split_physical_axes=True,
  )
  return Mesh(device_array, AXES, axis_types=axis_types)


def _axis_sizes(config: MeshConfig, num_devices: int) -> list[int]:
  """Returns the sizes of AXES, with the number of devices as their product.

  Example: data = −1, fsdp = 2, context = 1, tensor = 2 on 8 devices →
  [2, 2, 1, 2]

  Args:
    config: the sizes. One of them may be −1, which is computed.
    num_devices: the number of devices.

  Raises:
    UserError: if the product is not the number of devices.
  """
  sizes = [getattr(config, axis) for axis in AXES]
  if -1 in sizes:
    product_of_others = math.prod(size for size in sizes if size != -1)
    sizes[sizes.index(-1)] = num_devices // product_of_others
  if math.prod(sizes) != num_devices:
    fields = [f"config.mesh.{axis} = {getattr(config, axis)}" for axis in AXES]
    raise UserError(
      f"{', '.join(fields)}: the sizes must multiply to the {num_devices}"
      " devices; set one size to −1 to compute it"
    )
  return sizes


def batch_share(mesh: Mesh) -> tuple[int, int]:
  """Returns the index of this process's share of a batch, and the share count.

  Every batch is split into equal shares of rows. A process reads the rows that
  its devices need. Processes that differ only along the context or tensor axis
  read the same share.

  Example: with data = 4 on two processes of two devices, the shares are the
  first and the second half of a batch. Process 1 gets (1, 2).

  Raises:
    UserError: if the processes' devices do not split a batch into equal shares.
  """
  # The data and fsdp axes split the rows of a batch into row blocks.
  row_blocks_of_process: dict[int, set[int]] = {}
  for index, device in np.ndenumerate(mesh.devices):
    data_index, fsdp_index = index[:2]
    row_block = data_index * mesh.shape["fsdp"] + fsdp_index
    row_blocks = row_blocks_of_process.setdefault(device.process_index, set())
    row_blocks.add(row_block)

  shares = {tuple(sorted(blocks)) for blocks in row_blocks_of_process.values()}
  share_sizes = [len(share) for share in shares]
  # Shares contain every row block. If their sizes add up to more, they overlap.
  is_disjoint = sum(share_sizes) == num_row_blocks(mesh)
  is_equal = len(set(share_sizes)) == 1
  if not is_disjoint or not is_equal:
    raise UserError(
      f"config.mesh = {dict(mesh.shape)}: cannot split the batch into equal"
      " shares for the processes. Two processes must read the same rows or"
      " none in common; choose sizes that are multiples or divisors of the"
      " number of devices of a process"
    )
  local_row_blocks = row_blocks_of_process[jax.process_index()]
  local_share = tuple(sorted(local_row_blocks))
  return sorted(shares).index(local_share), len(shares)


def num_row_blocks(mesh: Mesh) -> int:
  """Returns the number of row blocks into which the mesh splits a batch."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
  """Returns a batch as global arrays, split over the mesh.

  Each process passes the rows that its devices need. A global array consists of
  the rows of all processes.

  If the context axis splits rows, the tokens of each row are also permuted into
  balanced order (see `_select_shards`). `sharded_attention` expects this order.

  Args:
    batch: the rows [rows, T] of this process's share, by name.
    mesh: its data and fsdp axes split the batch, its context axis each row.
  """
  sharding = NamedSharding(mesh, P(BATCH, LENGTH))
  num_shards = mesh.shape["context"]
  local_shards = _local_context_shards(mesh)
  arrays = {}
  for name, rows in batch.items():
    if num_shards > 1:
      rows = _select_shards(rows, num_shards, local_shards)
    arrays[name] = jax.make_array_from_process_local_data(sharding, rows)
  return arrays


def _local_context_shards(mesh: Mesh) -> list[int]:
  """Returns the indices of this process's devices along the context axis.

  The context axis splits each row of a batch into shards. The devices with
  index i have shard i.
  """
  shards = set()
  for index, device in np.ndenumerate(mesh.devices):
    if device.process_index == jax.process_index():
      _, _, context_index, _ = index
      shards.add(context_index)
  return sorted(shards)


def _select_shards(
  rows: np.ndarray, num_shards: int, selected_shards: list[int]
) -> np.ndarray:
  """Returns the tokens of some shards of each row, in balanced order.

  The context axis of a mesh splits a row into equal shards. Under a causal
  mask, later tokens attend to more keys. In balanced order, a shard has tokens
  from both ends of the row, so that all shards have the same work.

  Example: the 8 tokens of a row for 2 shards → 0 1 6 7 | 2 3 4 5

  Args:
    rows: tokens [rows, T] of all shards, in their order.
    num_shards: the number of shards of a row.
    selected_shards: the indices of the shards to return.
  """
  num_rows, length = rows.shape[:2]
  balanced_rows = rows[:, balanced_order(length, num_shards)]
  shards = balanced_rows.reshape(num_rows, num_shards, -1)
  return shards[:, selected_shards].reshape(num_rows, -1)


def sharded_attention(
  mesh: Mesh, implementation: str
) -> Callable[..., jax.Array]:
  """Returns `diff_attention` for arrays that are split over a mesh.

  The data and fsdp axes split the batch, the context axis splits the tokens of
  a row, and the tensor axis splits the heads. The size of the tensor axis must
  divide K, the number of key and value heads. Keys and values are passed along
  the context axis. Nothing else is communicated.

  The tokens of a row are in balanced order: under a causal mask, the devices of
  the context axis then have the same work.

  Args:
    mesh: the mesh.
    implementation: the name of an implementation of `diff_attention`.

  Raises:
    UserError: if the implementation is unknown, or if it does not support the
      context axis.
  """
  names = implementations.names()
  if implementation not in names:
    raise UserError(
      f"config.model.attention_implementation = {implementation!r}:"
      f" must be one of {', '.join(names)}"
    )
  if implementation == "two_call" and mesh.shape["context"] > 1:
    raise UserError(
      "config.model.attention_implementation = 'two_call' takes no offset,"
      f" which config.mesh.context = {mesh.shape['context']} needs; use 'auto'"
      " or 'chunked'"
    )
  return functools.partial(
    diff_attention,
    implementation=implementation,
    sharding=NamedSharding(mesh, P(BATCH, LENGTH, "tensor")),
    token_order="balanced",
  )


def sharded_cross_entropy(
  mesh: Mesh,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Returns `fused_cross_entropy` for tokens that are split over a mesh.

  Each device computes the loss of its own tokens. It gathers the embedding
  before its loop over chunks. After the loop, the embedding's gradient is
  scattered to the devices that store it. The loss is summed once.
  """
  if mesh.size == 1:
    return fused_cross_entropy
  return functools.partial(_sharded_cross_entropy, mesh)


def _sharded_cross_entropy(
  mesh: Mesh,
  hidden: Float[Array, "B T E"],
  embedding: Float[Array, "N E"],
  targets: Int[Array, "B T"],
  weights: Float[Array, "B T"],
  *,
  z_loss: float = 0.0,
  chunk: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Returns two sums over the tokens of all devices: objective and z-loss.

  The objective is the loss (the cross-entropy) plus the z-loss.

  Args:
    mesh: the devices.
    hidden: the decoder's output. This and the other arrays are global.
    embedding: the output matrix.
    targets: the next tokens.
    weights: each token's weight in the loss.
    z_loss: the coefficient of the z-loss, as in `fused_cross_entropy`.
    chunk: how many logits exist at once, as in `fused_cross_entropy`.
  """
  # All devices along the tensor axis have the same hidden states. To divide the
  # work, each computes the loss of some of the tokens.
  tokens_spec = P(BATCH, (LENGTH, "tensor"))
  compute_sums = jax.shard_map(
    functools.partial(_summed_cross_entropy, z_loss=z_loss, chunk=chunk),
    mesh=mesh,
    in_specs=(
      tokens_spec,
      parameter_spec("embedding"),
      tokens_spec,
      tokens_spec,
    ),
    out_specs=P(),  # Every device has the sums.
  )
  return compute_sums(hidden, embedding, targets, weights)


def _summed_cross_entropy(
  hidden: Float[Array, "b t E"],
  embedding: Float[Array, "n e"],
  targets: Int[Array, "b t"],
  weights: Float[Array, "b t"],
  *,
  z_loss: float,
  chunk: int | None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Returns the sums of `_sharded_cross_entropy`, on each device.

  This runs inside `shard_map`: each device has some of the tokens and a part of
  the embedding. Small letters are sizes on one device.

  Args:
    hidden: hidden states of this device's tokens.
    embedding: the part of the embedding that this device stores.
    targets: the target of each of this device's tokens.
    weights: the weight of each of this device's tokens in the loss.
    z_loss: see `fused_cross_entropy`.
    chunk: see `fused_cross_entropy`.
  """
  # In the backward pass, each device computes a gradient from its own tokens.
  # The transpose of `vary_like` is a psum: it sums these gradients once, after
  # the last chunk.
  embedding = vary_like(embedding, hidden)
  # Collect the embedding from the devices that store its parts.
  for array_axis, mesh_axis in enumerate(parameter_spec("embedding")):
    embedding = gather_parameter(embedding, array_axis, mesh_axis, hidden.dtype)
  sums = fused_cross_entropy(
    hidden, embedding, targets, weights, z_loss=z_loss, chunk=chunk
  )
  return jax.lax.psum(sums, AXES)
