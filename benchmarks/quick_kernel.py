"""How often a trained model's attention takes the quick forward kernel on a TPU: python -m benchmarks.quick_kernel --workdir=runs/tiny

The kernel takes exponentials of the logits without a running maximum. Its log-sum-exps show whether float32 held them; if not, the online
kernel runs after it. Here the log-sum-exps of validation rows are computed, on any backend. A call is a layer of a batch.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.mask import Mask, positions
from diffjax.ops.diff_attention.tiles import LOG2E
from diffjax.ops.diff_attention.tpu.attention import in_range
from diffjax.training import trained


def log_sum_exps(q, k, causal: bool, window: int | None, q_ids, kv_ids):
  """The log-sum-exps (base 2) of the maps' rows, [B, H, G, T]."""
  (B, T, H, G, D), (S, K, M) = q.shape, k.shape[1:4]
  queries = q.reshape(B, T, K, H // K, M, G // M, D).astype(jnp.float32)
  logits = jnp.einsum("btkrmgd,bskmd->bkrmgts", queries, k.astype(jnp.float32), precision="highest").reshape(B, H, G, T, S) * D**-0.5
  visible = Mask(T, S, causal, window, segments=q_ids is not None).between(positions(T, 0), positions(S, 0), q_ids, kv_ids)
  if visible is not None:
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
  return jax.nn.logsumexp(logits, axis=-1) * LOG2E


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--rows", type=int, default=256)
  parser.add_argument("--batch_size", type=int, default=16)
  flags = parser.parse_args()
  loaded = trained.load(flags.workdir)
  batches = validation_rows("quick_kernel", loaded, flags.rows, batch_size=flags.batch_size)
  calls: list[tuple[bool, float, float]] = []

  def attend(q, k, v, lam, *, q_segment_ids, kv_segment_ids, causal, window):
    lse = log_sum_exps(q, k, causal, window, q_segment_ids, kv_segment_ids)
    jax.debug.callback(lambda *call: calls.append(call), in_range(lse, jnp.swapaxes(v, 1, 2)), jnp.min(lse), jnp.max(lse))
    return diff_attention(q, k, v, lam, q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids, causal=causal, window=window)

  model = loaded.model.clone(attention_fn=attend)
  read = jax.jit(lambda batch: model.apply({"params": loaded.params}, batch["tokens"], batch["segment_ids"], batch["positions"]))
  for batch in batches:
    jax.block_until_ready(read({name: jnp.asarray(batch[name]) for name in ("tokens", "segment_ids", "positions")}))
  jax.effects_barrier()
  quick, least, most = (np.asarray(column) for column in zip(*calls, strict=True))
  print(f"{loaded.name}: {np.sum(quick)} of {len(calls)} calls take the quick kernel ({np.mean(quick):.1%}); log-sum-exps, base 2, from")
  print(f"  {np.min(least):.1f} to {np.max(most):.1f}; it takes −60 to 80")


if __name__ == "__main__":
  main()
