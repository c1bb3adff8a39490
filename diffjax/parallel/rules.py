"""One table: array name → mesh axes."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.config import UserError

# Mesh axes that split the batch, and a row.
BATCH, LENGTH = ("data", "fsdp"), "context"

# Activations by the names the model gives their axes (flax's logical axis rules).
ACTIVATIONS = (("batch", BATCH), ("length", LENGTH), ("embed", None), ("ffn", "tensor"))

# Parameters by name; the layers' have a leading axis L. Every matrix is split along E, so that fsdp devices hold equal shares, and along
# heads, feed-forward columns or vocabulary over the tensor axis.
PARAMETERS = {
  "embedding": P("tensor", "fsdp"),
  "unembedding": P("tensor", "fsdp"),
  "final_norm": P(),
  "query": P(None, "fsdp", "tensor"),
  "key": P(None, "fsdp", "tensor"),
  "value": P(None, "fsdp", "tensor"),
  "out": P(None, "tensor", None, "fsdp"),
  "lambda_q1": P(),
  "lambda_k1": P(),
  "lambda_q2": P(),
  "lambda_k2": P(),
  "lambda_hat": P(None, "fsdp", "tensor"),
  "head_gain": P(),
  "attention_norm": P(),
  "ffn_norm": P(),
  "gate": P(None, "fsdp", "tensor"),
  "up": P(None, "fsdp", "tensor"),
  "down": P(None, "tensor", "fsdp"),
}
# What the tensor axis splits, by parameter: the field of config.model that it must divide. The fsdp axis splits embed_dim everywhere.
_TENSOR_FIELDS = {
  "embedding": "vocab_size", "unembedding": "vocab_size", "query": "num_heads", "key": "num_kv_heads", "value": "num_kv_heads",
  "out": "num_heads", "lambda_hat": "num_heads", "gate": "ffn_dim", "up": "ffn_dim", "down": "ffn_dim",
}  # fmt: skip


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
        field = "embed_dim" if axis == "fsdp" else _TENSOR_FIELDS[names[-1]]
        raise UserError(
          f"config.mesh.{axis} = {mesh.shape[axis]} does not divide the {size} of {'/'.join(names)} {leaf.shape}; "
          f"choose a divisor of config.model.{field}"
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(sharding, tree)
