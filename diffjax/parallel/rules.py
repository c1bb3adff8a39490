"""One table: array name → mesh axes."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.config import UserError

# Mesh axes that split the batch.
BATCH = ("data", "fsdp")

# Activations by the names the model gives their axes (flax's logical axis rules).
ACTIVATIONS = (("batch", BATCH), ("length", None), ("embed", None), ("ffn", None))

# Parameters by name; the layers' have a leading axis L. Every matrix is split along E, so that fsdp devices hold equal shares.
PARAMETERS = {
  "embedding": P(None, "fsdp"),
  "unembedding": P(None, "fsdp"),
  "final_norm": P(),
  "query": P(None, "fsdp"),
  "key": P(None, "fsdp"),
  "value": P(None, "fsdp"),
  "out": P(None, None, None, "fsdp"),
  "lambda_q1": P(),
  "lambda_k1": P(),
  "lambda_q2": P(),
  "lambda_k2": P(),
  "lambda_hat": P(None, "fsdp"),
  "head_gain": P(),
  "attention_norm": P(),
  "ffn_norm": P(),
  "gate": P(None, "fsdp"),
  "up": P(None, "fsdp"),
  "down": P(None, None, "fsdp"),
}


def shardings(tree: Any, mesh: Mesh) -> Any:
  """Shardings of a state: arrays named in PARAMETERS (parameters, and the optimizer's arrays of the same name and rank) by the
  table, everything else replicated.

  Raises:
    UserError: if an axis of an array cannot be split evenly.
  """

  def sharding(path, leaf):
    names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    spec = PARAMETERS.get(names[-1], P()) if names else P()
    if len(spec) > leaf.ndim:  # the optimizer's scalar stand-ins for arrays it does not treat
      spec = P()
    for size, axis in zip(leaf.shape, spec, strict=False):
      if axis is not None and size % mesh.shape[axis]:
        raise UserError(
          f"config.mesh.{axis} = {mesh.shape[axis]} does not divide the {size} of {'/'.join(names)} {leaf.shape}; "
          f"choose a divisor of config.model.embed_dim"
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(sharding, tree)
