"""Matrix products of activations with parameters that a mesh splits.

The fsdp axis splits E of a parameter. The parameter is gathered in the compute
dtype, once per layer and pass, so its product is one product on every device.
XLA alone would turn the product into a loop over the parts of the parameter (a
windowed einsum). The partial sums would be rounded and would go through memory.
On TPU that took twice as long.

A gradient is summed over the fsdp axis and split over it again, in one of three
ways:

  Sparse cores (v5p and v6e): a reduce-scatter in float32. They run it while
    the next products are computed. Nothing is rounded.
  Exchange: each device computes its summand of the gradient in float32, rounds
    it to the compute dtype once, and sends every device the part that this one
    stores (an all-to-all). The receiver sums in float32. This also overlaps
    with computation.
  XLA's reduce-scatter in the compute dtype: for meshes on which an exchange
    would take longer (see `uses_exchange`). Over several dimensions of the
    torus, the compiler turns it into an all-reduce. That sends twice as many
    bytes, and all computation waits for it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from diffjax.int8 import dequantised
from diffjax.ops.linear import linear
from diffjax.parallel.rules import BATCH, LENGTH, parameter_spec

# The mesh axis that splits each axis of an array, or None.
MeshAxes = tuple[str | None, ...]

# Up to this size of the fsdp axis an exchange takes less time than an
# all-reduce. All that it sends crosses the middle of the torus.
_MAX_EXCHANGE_FSDP = 64
# On larger v5e slices the compiler does not overlap an exchange with
# computation. It calls them slices of limited ICI.
_MAX_EXCHANGE_CHIPS_V5E = 16


def product(
  x: Float[Array, "B T *inputs"], parameter: Float[Array, "..."], name: str
) -> Float[Array, "B T *outputs"]:
  """Returns x W in the dtype of x. The product sums over all inputs.

  Without a mesh, or on one device, this is `linear`.

  Example: x [B, T, E] times the parameter "query" [E, Q, G, D] is
  [B, T, Q, G, D].

  Args:
    x: activations. If the mesh's tensor axis splits an input axis of W, it
      splits this axis of x too.
    parameter: W of one layer, [E, *outputs] or [*inputs, E], in float32 or
      quantized by `diffjax.int8`. The fsdp axis splits E.
    name: the parameter's name in diffjax/parameters.py.
  """
  w = dequantised(parameter)
  if _is_mesh_active():
    # The spec of a parameter begins with the axis of layers, which W of one
    # layer lacks. It omits unsplit axes at the end, which None stands for.
    split_axes = parameter_spec(name)[1:]
    num_unsplit = w.ndim - len(split_axes)
    mesh_axes = (*split_axes, *[None] * num_unsplit)
    return _sharded_product(x, w, mesh_axes)
  return _local_product(x, w)


def _local_product(
  x: Float[Array, "B T *inputs"], w: Float[Array, "..."]
) -> Float[Array, "B T *outputs"]:
  """Returns x W for a W [*inputs, *outputs] that no mesh splits.

  `linear` multiplies matrices, so the inputs become one axis, and so do the
  outputs.
  """
  batch, length, *input_shape = x.shape
  output_shape = w.shape[len(input_shape) :]
  matrix = w.reshape(math.prod(input_shape), -1)
  y = linear(x.reshape(batch, length, -1), matrix)
  return y.reshape(batch, length, *output_shape)


def gather_and_cast(
  parameter: Float[Array, "..."], name: str, dtype: Any
) -> Float[Array, "..."]:
  """Returns a layer's parameter in a dtype, gathered along the fsdp axis.

  The tensor axis still splits it. Without a mesh, it is only cast.

  Args:
    parameter: the parameter of one layer.
    name: its name in diffjax/parameters.py.
    dtype: the compute dtype.
  """
  if not _is_mesh_active():
    return parameter.astype(dtype)
  mesh_axes = parameter_spec(name)[1:]  # without the axis L of layers
  return _gather_over_fsdp(parameter, mesh_axes, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_parameter(
  shard: Float[Array, "..."], axis: int, name: str, dtype: Any
) -> Float[Array, "..."]:
  """Returns a parameter, joined from the shards that the devices store.

  This is for code inside `shard_map`. The gradient is summed over the devices,
  and each device gets the part that belongs to its shard. It is summed in the
  same way as the gradient of a layer's parameter.

  Args:
    shard: the shard of this device.
    axis: the axis of the parameter that is split.
    name: the mesh axis that splits it.
    dtype: the dtype of the result. Shards and gradients are sent in it.
  """
  return lax.all_gather(shard.astype(dtype), name, axis=axis, tiled=True)


def _gather_parameter_forward(
  shard: Float[Array, "..."], axis: int, name: str, dtype: Any
) -> tuple[Array, Array]:
  gathered = gather_parameter(shard, axis, name, dtype)
  # The backward pass needs only the dtype of the shard.
  return gathered, jnp.empty(0, shard.dtype)


def _gather_parameter_backward(
  axis: int, name: str, dtype: Any, empty: Array, gradient: Array
) -> tuple[Array]:
  shard_gradient = _sum_and_scatter(gradient, axis, name)
  return (shard_gradient.astype(empty.dtype),)


gather_parameter.defvjp(_gather_parameter_forward, _gather_parameter_backward)


def uses_sparse_cores(mesh: Mesh | AbstractMesh) -> bool:
  """Returns whether a TPU's sparse cores gather parameters and sum gradients.

  They do on v5p and v6e, with the compiler options of training/program.py. They
  work while the rest of the chip computes. v5e has no sparse cores. The sparse
  cores of v4 and v7x were not tried.
  """
  return _device_kind(mesh) in ("TPU v5", "TPU v5p", "TPU v6 lite")


def uses_exchange(mesh: Mesh | AbstractMesh) -> bool:
  """Returns whether gradients are summed by an exchange of parts on this mesh.

  In an exchange, each device sends every device a part of its gradient, and
  sums the parts that it receives (see `_exchange_and_sum`). Otherwise, XLA's
  reduce-scatter sums them: in float32 on sparse cores, and in the compute dtype
  elsewhere.
  """
  if uses_sparse_cores(mesh):
    return False
  if _device_kind(mesh) in ("TPU v5 lite", "TPU v5e"):
    return mesh.size <= _MAX_EXCHANGE_CHIPS_V5E
  return mesh.shape["fsdp"] <= _MAX_EXCHANGE_FSDP


def _device_kind(mesh: Mesh | AbstractMesh) -> str | None:
  """Returns the kind of a mesh's devices, such as "TPU v5e".

  Returns None if the mesh does not know its devices.
  """
  abstract_mesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
  device = abstract_mesh.abstract_device
  if device is None:
    return None
  return device.device_kind


def _summand_dtype(dtype: Any) -> Any:
  """Returns the dtype in which a device sends its summand of a gradient.

  This is the compute dtype, or float32 for sparse cores, which can sum it.

  Args:
    dtype: the compute dtype.
  """
  if uses_sparse_cores(jax.sharding.get_abstract_mesh()):
    return jnp.promote_types(jnp.float32, dtype)
  return dtype


def _sum_and_scatter(
  x: Float[Array, "..."], axis: int, name: str
) -> Float[Array, "..."]:
  """Returns this device's part of the sum of x over devices, in float32.

  This is for code inside `shard_map`. Which of the two methods takes less time
  depends on the devices (see `uses_exchange`).

  Args:
    x: this device's summand.
    axis: the axis of x that is split into one part per device.
    name: the mesh axis to sum over.
  """
  if uses_exchange(jax.sharding.get_abstract_mesh()):
    return _exchange_and_sum(x, axis, name)
  # This is float32 on sparse cores, and the dtype of x elsewhere, because
  # sending float32 would take longer.
  summand = x.astype(_summand_dtype(x.dtype))
  total = lax.psum_scatter(summand, name, scatter_dimension=axis, tiled=True)
  return total.astype(jnp.promote_types(jnp.float32, x.dtype))


def _exchange_and_sum(
  x: Float[Array, "..."], axis: int, name: str
) -> Float[Array, "..."]:
  """Returns this device's part of the sum of x over devices, in float32.

  Device i receives part i of every device's x, in the dtype of x. It sums these
  parts in float32.

  Args:
    x: this device's summand.
    axis: the axis of x that is split into one part per device.
    name: the mesh axis to sum over.
  """
  sum_dtype = jnp.promote_types(jnp.float32, x.dtype)
  num_devices = lax.axis_size(name)
  # For axis = 1 of [X, size, Y]: [X, devices, size / devices, Y].
  parts = x.reshape(*x.shape[:axis], num_devices, -1, *x.shape[axis + 1 :])
  if num_devices > 1:
    parts = lax.all_to_all(
      parts, name, split_axis=axis, concat_axis=axis, tiled=True
    )
  return jnp.sum(parts.astype(sum_dtype), axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sharded_product(
  x: Float[Array, "B T *inputs"], w: Float[Array, "..."], mesh_axes: MeshAxes
) -> Float[Array, "B T *outputs"]:
  """Returns x W for a W that a mesh splits.

  Args:
    x: activations.
    w: a layer's parameter, [*inputs, *outputs].
    mesh_axes: the mesh axis of each axis of W. One of them is fsdp.
  """
  gathered_w = _gather_over_fsdp(w, mesh_axes, x.dtype)
  num_inputs = x.ndim - 2
  return jnp.tensordot(x, gathered_w, num_inputs)


def _sharded_product_forward(
  x: Float[Array, "B T *inputs"], w: Float[Array, "..."], mesh_axes: MeshAxes
) -> tuple[Array, tuple[Array, Array]]:
  return _sharded_product(x, w, mesh_axes), (x, w)


def _sharded_product_backward(
  mesh_axes: MeshAxes,
  residuals: tuple[Array, Array],
  dy: Float[Array, "B T *outputs"],
) -> tuple[Array, Array]:
  """Returns the gradients dx = dy Wᵀ and dW = xᵀ dy of y = x W.

  Args:
    mesh_axes: the mesh axis of each axis of W [*inputs, *outputs].
    residuals: x and W.
    dy: the gradient of y.
  """
  x, w = residuals
  num_inputs = x.ndim - 2  # all axes except B and T

  # x has the axes B and T and the input axes of W, and dy has B and T and the
  # output axes. A mesh axis splits them as it splits W, with one exception: in
  # x and dy, fsdp splits B. Example: W = "down" [F, E] is split by ("tensor",
  # "fsdp"). Then F of x is split by tensor, and E of dy is not split.
  unsplit_by_fsdp = _without_fsdp(mesh_axes)
  x_spec = P(BATCH, LENGTH, *unsplit_by_fsdp[:num_inputs])
  dy_spec = P(BATCH, LENGTH, *unsplit_by_fsdp[num_inputs:])
  compute_dw = jax.shard_map(
    functools.partial(_summed_dw, fsdp_axis=mesh_axes.index("fsdp")),
    in_specs=(x_spec, dy_spec),
    out_specs=P(*mesh_axes),
  )
  dw = compute_dw(x, dy)

  # dx sums over the output axes, which dy and W have in common.
  gathered_w = _gather_over_fsdp(w, mesh_axes, x.dtype)
  output_axes_of_dy = tuple(range(2, dy.ndim))
  output_axes_of_w = tuple(range(num_inputs, w.ndim))
  dx = jnp.tensordot(dy, gathered_w, axes=(output_axes_of_dy, output_axes_of_w))
  return dx, dw.astype(w.dtype)


_sharded_product.defvjp(_sharded_product_forward, _sharded_product_backward)


def _summed_dw(
  x: Float[Array, "b t *inputs"],
  dy: Float[Array, "b t *outputs"],
  *,
  fsdp_axis: int,
) -> Float[Array, "..."]:
  """Returns this device's part of dW = xᵀ dy, summed over all tokens.

  This runs inside `shard_map`. Each device computes a summand from its tokens.
  The fsdp axis splits both the tokens and W, so the sum over it returns a part.

  Args:
    x: activations of this device's tokens.
    dy: gradients of this device's tokens.
    fsdp_axis: the axis of W that the fsdp axis splits.
  """
  batch_and_length = (0, 1)
  summand = jnp.tensordot(
    x,
    dy,
    axes=(batch_and_length, batch_and_length),
    preferred_element_type=_summand_dtype(x.dtype),
  )
  dw = _sum_and_scatter(summand, fsdp_axis, "fsdp")
  return lax.psum(dw, ("data", LENGTH))


def _gather_over_fsdp(
  parameter: Float[Array, "..."], mesh_axes: MeshAxes, dtype: Any
) -> Float[Array, "..."]:
  """Returns a parameter in a dtype, which the fsdp axis no longer splits.

  XLA gathers it. The parameter is cast first, so that fewer bytes are sent.
  """
  spec = P(*_without_fsdp(mesh_axes))
  return lax.with_sharding_constraint(parameter.astype(dtype), spec)


def _without_fsdp(mesh_axes: MeshAxes) -> MeshAxes:
  """Returns the mesh axes with None in place of fsdp.

  Example: ("fsdp", "tensor") → (None, "tensor")
  """
  return tuple(None if axis == "fsdp" else axis for axis in mesh_axes)


def _is_mesh_active() -> bool:
  """Returns whether a mesh with several devices and an fsdp axis is set."""
  mesh = jax.sharding.get_abstract_mesh()
  return "fsdp" in mesh.axis_names and mesh.size > 1
