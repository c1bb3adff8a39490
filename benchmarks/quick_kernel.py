"""How often a trained model's attention takes the quick forward kernel on a TPU: python -m benchmarks.quick_kernel --workdir=runs/tiny

The kernel takes exponentials of the logits without a running maximum. Its log-sum-exps show whether float32 held them; if not, the online
kernel runs after it. Here the log-sum-exps of validation rows are computed, on any backend. A call is a layer of a batch.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from diffjax.evals.methods.inside import (
  AttentionInputs,
  Queries,
  fold_query_blocks,
  measure,
)
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.inference import trained
from diffjax.model.attention import attention_class
from diffjax.model.stacks import stacks
from diffjax.ops.diff_attention.mask import apply_mask
from diffjax.ops.diff_attention.tiles import LOG2E
from diffjax.ops.diff_attention.tpu.forward import in_range


def extremes(attended: AttentionInputs) -> tuple[jax.Array, jax.Array]:
  """Returns the least and the largest log-sum-exp (base 2) of a layer's maps.

  Queries that are padding do not count.
  """

  def add_block(
    found: tuple[jax.Array, jax.Array], queries: Queries
  ) -> tuple[jax.Array, jax.Array]:
    least, largest = found
    is_visible = queries.mask[:, None, None]  # [B, 1, 1, t, S]
    logits = apply_mask(is_visible, queries.logits())  # [B, Q, G, t, S]
    lse = jax.nn.logsumexp(logits, axis=-1) * LOG2E
    sees_keys = jnp.any(is_visible, axis=-1)
    least = jnp.minimum(least, jnp.min(jnp.where(sees_keys, lse, jnp.inf)))
    largest = jnp.maximum(largest, jnp.max(jnp.where(sees_keys, lse, -jnp.inf)))
    return least, largest

  start = jnp.float32(jnp.inf), jnp.float32(-jnp.inf)
  return fold_query_blocks(add_block, start, attended)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--rows", type=int, default=256)
  parser.add_argument("--batch_size", type=int, default=16)
  flags = parser.parse_args()
  loaded = trained.load(flags.workdir)
  for stack in stacks(loaded.config.model).values():
    if not attention_class(stack).fused:
      parser.error(
        f"config.model.attention = {stack.attention!r}: no kernel computes it,"
        " because it is computed from its weights"
      )

  def layer(attended: AttentionInputs) -> tuple[jax.Array, ...]:
    least, most = extremes(attended)
    return in_range(jnp.stack([least, most]), attended.v), least, most

  read = jax.jit(
    lambda batch: measure(loaded.model, loaded.params, batch, attention=layer)[
      "attention"
    ]
  )
  batches = validation_rows(
    "quick_kernel", loaded, flags.rows, batch_size=flags.batch_size
  )
  quick, least, most = (
    np.concatenate(column)
    for column in zip(
      *(jax.device_get(read(batch)) for batch in batches), strict=True
    )
  )
  print(
    f"{loaded.name}: {np.sum(quick)} of {len(quick)} calls take the quick kernel ({np.mean(quick):.1%}); log-sum-exps, base 2, from"
  )
  print(f"  {np.min(least):.1f} to {np.max(most):.1f}; it takes −60 to 80")


if __name__ == "__main__":
  main()
