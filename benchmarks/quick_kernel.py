"""Counts how often a trained model could use the quick forward kernel on a TPU.

    python -m benchmarks.quick_kernel --workdir=runs/tiny

The quick kernel computes exponentials of the logits without their running
maximum. Its log-sum-exps show whether float32 could hold them. If it could not,
the online kernel runs after it. This computes the log-sum-exps of validation
rows, on any backend. A call is one layer of one batch.
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
  """Returns the smallest and the largest log-sum-exp of a layer's logits.

  They are in base 2, over all maps. Queries that are padding do not count.
  """

  def add_block(
    bounds: tuple[jax.Array, jax.Array], queries: Queries
  ) -> tuple[jax.Array, jax.Array]:
    smallest, largest = bounds
    is_visible = queries.mask[:, None, None]  # [B, 1, 1, t, S]
    logits = apply_mask(is_visible, queries.logits())  # [B, Q, G, t, S]
    lse = jax.nn.logsumexp(logits, axis=-1) * LOG2E
    sees_keys = jnp.any(is_visible, axis=-1)
    block_min = jnp.min(jnp.where(sees_keys, lse, jnp.inf))
    block_max = jnp.max(jnp.where(sees_keys, lse, -jnp.inf))
    return jnp.minimum(smallest, block_min), jnp.maximum(largest, block_max)

  empty = (jnp.float32(jnp.inf), jnp.float32(-jnp.inf))
  return fold_query_blocks(add_block, empty, attended)


def measure_layer(attended: AttentionInputs) -> tuple[jax.Array, ...]:
  """Returns whether the quick kernel suffices, and the `extremes`."""
  smallest, largest = extremes(attended)
  is_quick = in_range(jnp.stack([smallest, largest]), attended.v)
  return is_quick, smallest, largest


def main() -> None:
  """Counts the calls of a trained model's layers on validation rows."""
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

  @jax.jit
  def measure_batch(batch: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    measured = measure(
      loaded.model, loaded.params, batch, attention=measure_layer
    )
    return measured["attention"]

  batches = validation_rows(
    "quick_kernel", loaded, flags.rows, batch_size=flags.batch_size
  )
  # A number for each call of a kernel.
  is_quick: list[bool] = []
  smallest: list[float] = []
  largest: list[float] = []
  for batch in batches:
    layers = jax.device_get(measure_batch(batch))
    layers_are_quick, layers_smallest, layers_largest = layers
    is_quick += layers_are_quick.tolist()
    smallest += layers_smallest.tolist()
    largest += layers_largest.tolist()
  print(
    f"{loaded.name}: {np.sum(is_quick)} of {len(is_quick)} calls take the quick"
    f" kernel ({np.mean(is_quick):.1%}); log-sum-exps, base 2, from"
  )
  print(
    f"  {np.min(smallest):.1f} to {np.max(largest):.1f}; it takes −60 to 80"
  )


if __name__ == "__main__":
  main()
