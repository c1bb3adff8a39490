"""How often a trained model's attention takes the quick forward kernel on a TPU: python -m benchmarks.quick_kernel --workdir=runs/tiny

The kernel takes exponentials of the logits without a running maximum. Its log-sum-exps show whether float32 held them; if not, the online
kernel runs after it. Here the log-sum-exps of validation rows are computed, on any backend. A call is a layer of a batch.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from diffjax.evals.methods.inside import Attended, measure, over_queries
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.ops.diff_attention.mask import apply_mask
from diffjax.ops.diff_attention.reference import attention_logits
from diffjax.ops.diff_attention.tiles import LOG2E
from diffjax.ops.diff_attention.tpu.forward import in_range
from diffjax.training import trained


def extremes(attended: Attended) -> tuple[jax.Array, jax.Array]:
  """The least and the largest log-sum-exp (base 2) of a layer's maps, padding left out."""

  def step(found, block: Attended, seen, first):
    del first
    lse = (
      jax.nn.logsumexp(
        apply_mask(seen[:, None, None], attention_logits(block.q, block.k)),
        axis=-1,
      )
      * LOG2E
    )
    some = jnp.any(seen, axis=-1)[:, None, None]
    return jnp.minimum(
      found[0], jnp.min(jnp.where(some, lse, jnp.inf))
    ), jnp.maximum(found[1], jnp.max(jnp.where(some, lse, -jnp.inf)))

  return over_queries(step, (jnp.inf, -jnp.inf), attended)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--rows", type=int, default=256)
  parser.add_argument("--batch_size", type=int, default=16)
  flags = parser.parse_args()
  loaded = trained.load(flags.workdir)

  def layer(attended: Attended) -> tuple[jax.Array, ...]:
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
