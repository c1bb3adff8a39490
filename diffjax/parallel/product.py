"""Matrix products with parameters that are split over fsdp: parameters are gathered before, gradients summed and scattered after.

Each parameter is gathered in the compute dtype, once a layer and pass, so that its product is one product on every device. Left to XLA the
product becomes a loop over the parameter's shards (a windowed einsum), whose partial sums are rounded and pass through memory: on TPU twice
as slow.

The gradient leaves the layer by one reduce-scatter. The sparse cores of v5p and v6e do it in float32 while the products that follow are
computed: nothing is rounded. Elsewhere it is an exchange: every device rounds its own share, a product accumulated in float32, to the
compute dtype once, sends each device the part that this one keeps (an all-to-all), and sums what it receives in float32. That overlaps too,
where the compiler turns XLA's own reduce-scatter over several dimensions of the torus into an all-reduce, twice the bytes, for which
everything waits. Where an exchange would take longer than that, which `exchanges` knows, XLA's own sums in the compute dtype.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from diffjax.int8 import dequantised
from diffjax.ops.linear import linear
from diffjax.parallel.rules import BATCH, LENGTH, SPECS


def product(
  x: Float[Array, "B T *inputs"], parameter: Float[Array, "..."], name: str
) -> Float[Array, "B T *outputs"]:
  """x W in x's dtype: the sum over the inputs of a layer's parameter, [E, *outputs] or [*inputs, E].

  Without a mesh, or on one device, it is `linear`.

  Args:
    x: activations; the tensor axis splits those of their axes that it splits of the parameter.
    parameter: one layer's, float32 or of `diffjax.int8`; the fsdp axis splits E.
    name: the parameter's, in diffjax/parameters.py.
  """
  parameter = dequantised(parameter)
  split = SPECS[name][1:]
  if _is_split():
    return _product(
      x, parameter, (*split, *[None] * (parameter.ndim - len(split)))
    )
  inputs = x.shape[2:]
  w = parameter.reshape(math.prod(inputs), -1)
  return linear(x.reshape(*x.shape[:2], -1), w).reshape(
    *x.shape[:2], *parameter.shape[len(inputs) :]
  )


def gather_and_cast(
  parameter: Float[Array, "..."], name: str, dtype: Any
) -> Float[Array, "..."]:
  """A layer's parameter in the compute dtype, gathered along the fsdp axis; along the tensor axis it stays split."""
  return (
    _whole(parameter, SPECS[name][1:], dtype)
    if _is_split()
    else parameter.astype(dtype)
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_parameter(
  shard: Float[Array, "..."], axis: int, name: str, dtype: Any
) -> Float[Array, "..."]:
  """Inside `shard_map`: the shards of all devices along a mesh axis, in a dtype, whose gradient is summed as a layer's is.

  Args:
    shard: this device's.
    axis: of the array, along which it is split.
    name: the mesh axis.
    dtype: what is sent, there and back.
  """
  return lax.all_gather(shard.astype(dtype), name, axis=axis, tiled=True)


def _gather_forward(shard, axis, name, dtype):
  return gather_parameter(shard, axis, name, dtype), jnp.empty(0, shard.dtype)


def _gather_backward(axis, name, dtype, like, gradient):
  return (_sum_scattered(gradient, axis, name).astype(like.dtype),)


gather_parameter.defvjp(_gather_forward, _gather_backward)


def uses_sparse_cores(mesh: Mesh | jax.sharding.AbstractMesh) -> bool:
  """True where sparse cores gather parameters and sum gradients during computation, by the options of training/program.py: v5p and v6e. v5e
  has none; those of v4 and v7x were not tried."""
  return _device_kind(mesh) in ("TPU v5", "TPU v5p", "TPU v6 lite")


def exchanges(mesh: Mesh | jax.sharding.AbstractMesh) -> bool:
  """True if an exchange sums gradients on this mesh. Otherwise XLA's own reduce-scatter does: in float32 on sparse cores, elsewhere in the
  compute dtype.

  What an exchange sends crosses the middle of the torus, so that it takes longer than even an all-reduce between many devices; and on v5e
  slices of more than 16 chips (in the compiler's words, of limited ICI) computation would wait for it.
  """
  if uses_sparse_cores(mesh):
    return False
  if _device_kind(mesh) in ("TPU v5 lite", "TPU v5e"):
    return mesh.size <= 16
  return mesh.shape["fsdp"] <= 64


def _device_kind(mesh: Mesh | jax.sharding.AbstractMesh) -> str | None:
  device = (
    mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
  ).abstract_device
  return device.device_kind if device is not None else None


def _share_dtype(dtype: Any) -> Any:
  """Inside `shard_map`: the dtype in which a device sends its share of a gradient that it computes in `dtype`."""
  return (
    jnp.promote_types(jnp.float32, dtype)
    if uses_sparse_cores(jax.sharding.get_abstract_mesh())
    else dtype
  )


def _sum_scattered(
  x: Float[Array, "..."], axis: int, name: str
) -> Float[Array, "..."]:
  """Inside `shard_map`: the sum of all devices' x, float32, of which each keeps its part of an axis."""
  dtype = jnp.promote_types(jnp.float32, x.dtype)
  if not exchanges(jax.sharding.get_abstract_mesh()):
    return lax.psum_scatter(
      x.astype(_share_dtype(x.dtype)), name, scatter_dimension=axis, tiled=True
    ).astype(dtype)
  devices = lax.axis_size(name)
  parts = x.reshape(*x.shape[:axis], devices, -1, *x.shape[axis + 1 :])
  parts = (
    lax.all_to_all(parts, name, axis, axis, tiled=True)
    if devices > 1
    else parts
  )
  return jnp.sum(parts.astype(dtype), axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(
  x: Float[Array, "B T *inputs"],
  w: Float[Array, "..."],
  split: tuple[str | None, ...],
) -> Float[Array, "B T *outputs"]:
  return jnp.tensordot(x, _whole(w, split, x.dtype), x.ndim - 2)


def _product_forward(x, w, split):
  return _product(x, w, split), (x, w)


def _product_backward(split, saved, dy):
  x, w = saved
  inputs, kept = (
    x.ndim - 2,
    tuple(None if axis == "fsdp" else axis for axis in split),
  )

  def local(x, dy):
    dw = jnp.tensordot(
      x, dy, ((0, 1), (0, 1)), preferred_element_type=_share_dtype(x.dtype)
    )
    return lax.psum(
      _sum_scattered(dw, split.index("fsdp"), "fsdp"), ("data", LENGTH)
    )

  specs = P(BATCH, LENGTH, *kept[:inputs]), P(BATCH, LENGTH, *kept[inputs:])
  dw = jax.shard_map(local, in_specs=specs, out_specs=P(*split))(x, dy)
  outputs = tuple(range(2, dy.ndim)), tuple(range(inputs, w.ndim))
  return jnp.tensordot(dy, _whole(w, split, x.dtype), outputs), dw.astype(
    w.dtype
  )


_product.defvjp(_product_forward, _product_backward)


def _whole(parameter: jax.Array, split: Any, dtype: Any) -> jax.Array:
  return lax.with_sharding_constraint(
    parameter.astype(dtype),
    P(*(None if axis == "fsdp" else axis for axis in split)),
  )


def _is_split() -> bool:
  """True while tracing for a mesh with an fsdp axis and several devices."""
  mesh = jax.sharding.get_abstract_mesh()
  return "fsdp" in mesh.axis_names and mesh.size > 1
