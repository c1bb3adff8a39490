"""Sharding rules: which mesh axis splits which axis of an array.

The rules for parameters use the letters of their axes (diffjax/parameters.py).
The rules for activations use the names that the model gives their axes.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.config import UserError
from diffjax.parameters import FIELDS, PARAMETERS, Parameter

# The mesh axes that split a batch.
BATCH = ("data", "fsdp")
# The mesh axis that splits each row of a batch.
LENGTH = "context"

# The mesh axes of an activation's axes, as Flax's logical axis rules.
ACTIVATIONS = (
  ("batch", BATCH),
  ("length", LENGTH),
  ("embed", None),
  ("ffn", "tensor"),
)

# The mesh axes of a parameter's axes. Other letters are not split.
_MESH_AXES = {
  "E": "fsdp",
  "H": "tensor",
  "Q": "tensor",
  "K": "tensor",
  "F": "tensor",
  "N": "tensor",
}


def parameter_spec(name: str) -> P:
  """Returns the mesh axes that split the axes of a parameter.

  The fsdp axis splits the model width E of matrices, so all of its devices
  store equal parts. The tensor axis splits heads, feed-forward columns and the
  vocabulary.

  Example: the matrix "LEHV" (layers, model width, heads, width of values) →
  P(None, "fsdp", "tensor"). V is not split.

  Args:
    name: a name in the table of parameters.

  Raises:
    KeyError: if the table has no parameter of that name.
  """
  return _spec(PARAMETERS[name])


@functools.cache
def _spec(parameter: Parameter) -> P:
  """Returns the mesh axes that split the axes of a row of the table."""
  if parameter.axes in ("E", "LE"):
    return P()  # Vectors of the model width are small, so they are not split.
  mesh_axes: list[str | None] = []
  for letter in parameter.axes:
    mesh_axis = _MESH_AXES.get(letter)
    if mesh_axis in mesh_axes:
      mesh_axis = None  # A mesh axis can split only one axis of an array.
    mesh_axes.append(mesh_axis)
  # A spec needs no entries for the last axes if they are not split.
  while mesh_axes and mesh_axes[-1] is None:
    mesh_axes.pop()
  return P(*mesh_axes)


def heads_sharding(params: dict[str, Any]) -> NamedSharding | None:
  """Returns the sharding of arrays [rows, heads, …] for a model's mesh.

  The tensor axis splits the heads. A key/value cache has such arrays.

  Args:
    params: the model's parameters. They determine the mesh.

  Returns:
    The sharding, or None if the parameters are on one device.
  """
  sharding = getattr(params["embedding"], "sharding", None)
  if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
    return None
  return NamedSharding(sharding.mesh, P(None, "tensor"))


def shardings(tree: Any, mesh: Mesh) -> Any:
  """Returns a tree with the sharding of each array of a state.

  Arrays with the name of a parameter are split. These are the parameters, and
  the optimizer's arrays with the name and the rank of a parameter. All other
  arrays are replicated.

  Raises:
    UserError: if a mesh axis does not divide the array axis that it splits.
  """
  leaf_sharding = functools.partial(_leaf_sharding, mesh)
  return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def _leaf_sharding(
  mesh: Mesh, path: tuple[Any, ...], leaf: Any
) -> NamedSharding:
  """Returns the sharding of one array of a state.

  The last key of its path names the parameter: ("layers", "attention", "query")
  is split as "query" is. Arrays with another name are replicated.

  Args:
    mesh: the mesh.
    path: the entries that lead to the array in the tree.
    leaf: the array. Only its shape matters.

  Raises:
    UserError: if a mesh axis does not divide the array axis that it splits.
  """
  keys = []
  for entry in path:
    if isinstance(entry, jax.tree_util.DictKey):
      keys.append(entry.key)
  if not keys or keys[-1] not in PARAMETERS:
    return NamedSharding(mesh, P())

  name = keys[-1]
  spec = parameter_spec(name)
  if len(spec) > leaf.ndim:
    # An optimizer of some of the parameters has scalars in place of the others.
    return NamedSharding(mesh, P())
  for axis, mesh_axis in enumerate(spec):
    if mesh_axis is None:
      continue
    size = leaf.shape[axis]
    if size % mesh.shape[mesh_axis] != 0:
      letter = PARAMETERS[name].axes[axis]
      raise UserError(
        f"config.mesh.{mesh_axis} = {mesh.shape[mesh_axis]} does not divide"
        f" the {size} of {'/'.join(keys)} {leaf.shape};"
        f" choose a divisor of config.model.{FIELDS[letter]}"
      )
  return NamedSharding(mesh, spec)


def __getattr__(name: str) -> Any:
  """Returns what version 0.1 offered under another name."""
  if name != "SPECS":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  warnings.warn(
    "SPECS is deprecated, because variants add parameters: use parameter_spec",
    DeprecationWarning,
    stacklevel=2,
  )
  # It adds the parameters of the package's variants.
  importlib.import_module("diffjax.model.attention")
  return {name: parameter_spec(name) for name in PARAMETERS}
