"""The mesh axes that split arrays: parameters by the letters of their axes (diffjax/parameters.py), activations by name."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.config import UserError
from diffjax.parameters import FIELDS, PARAMETERS, Parameter

# Mesh axes that split the batch, and a row.
BATCH, LENGTH = ("data", "fsdp"), "context"

# Activations by the names the model gives their axes (flax's logical axis rules).
ACTIVATIONS = (
  ("batch", BATCH),
  ("length", LENGTH),
  ("embed", None),
  ("ffn", "tensor"),
)

# The mesh axis that splits an axis of a parameter, by its letter; the others stay whole.
_SPLIT = {
  "E": "fsdp",
  "H": "tensor",
  "Q": "tensor",
  "K": "tensor",
  "F": "tensor",
  "N": "tensor",
}


def _spec(parameter: Parameter) -> P:
  """The mesh axis of each axis: E of matrices over fsdp, so that its devices hold equal shares; heads, feed-forward columns and vocabulary
  over tensor. A vector of width E stays whole."""
  if parameter.axes.strip("L") == "E":
    return P()
  split = [_SPLIT.get(axis) for axis in parameter.axes]
  while split and split[-1] is None:
    split.pop()
  return P(*split)


SPECS = {name: _spec(parameter) for name, parameter in PARAMETERS.items()}


def heads_sharding(params: dict[str, Any]) -> NamedSharding | None:
  """How arrays [rows, heads, …] lie beside a model's parameters: heads over the tensor axis of their mesh. None on one device."""
  sharding = getattr(params["embedding"], "sharding", None)
  return (
    NamedSharding(sharding.mesh, P(None, "tensor"))
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
    else None
  )


def shardings(tree: Any, mesh: Mesh) -> Any:
  """Shardings of a state: arrays named in SPECS (parameters, and the optimizer's arrays of the same name and rank) by the
  table, everything else replicated.

  Raises:
    UserError: if an axis of an array cannot be split evenly.
  """

  def sharding(path, leaf):
    names = [
      entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)
    ]
    spec = SPECS.get(names[-1], P()) if names else P()
    if (
      len(spec) > leaf.ndim
    ):  # the optimizer's scalar stand-ins for arrays it does not treat
      spec = P()
    for number, (size, axis) in enumerate(zip(leaf.shape, spec, strict=False)):
      if axis is not None and size % mesh.shape[axis]:
        field = FIELDS[PARAMETERS[names[-1]].axes[number]]
        raise UserError(
          f"config.mesh.{axis} = {mesh.shape[axis]} does not divide the {size} of {'/'.join(names)} {leaf.shape}; "
          f"choose a divisor of config.model.{field}"
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(sharding, tree)
