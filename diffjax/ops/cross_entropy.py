"""Cross-entropy fused with the output projection. The logits [B, T, N] are never in memory as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from diffjax.ops.platform import platform, tpu_info
from diffjax.ops.varying import vary_like

# The default chunk has 16 MiB of float32 logits, which fit a CPU's cache, and at least 512 tokens, because every chunk adds to all of the
# embedding's gradient. A byte-level model's batch fits in one chunk, and there is no loop. On TPU that addition takes longer than its
# product (110 ms of 1,442 for diff_1b on v5e:4x4, by the compiler's estimate), so that logits may take a 16th of the memory.
_CHUNK_LOGITS = 1 << 22
_CHUNK_TOKENS = 512
_CHUNK_SHARE = 16


def fused_cross_entropy(
  hidden: Float[Array, "B T E"],
  embedding: Float[Array, "N E"],
  targets: Int[Array, "B T"],
  weights: Float[Array, "B T"],
  *,
  z_loss: float = 0.0,
  chunk: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Σ w·(nll + z_loss·lse²) over tokens, with nll = lse − logit of the target, lse = logsumexp(hidden·embeddingᵀ).

  Chunks are cut along T, which leaves a sharded batch axis as it is. The forward pass computes the gradients of hidden and embedding, chunk
  by chunk; the backward pass only scales them. Inside `shard_map` the gradient of an embedding that all devices share is summed over them
  once, after the last chunk.

  Args:
    hidden: the decoder's output; its dtype is the matmuls' input dtype. Logits and sums are float32.
    embedding: the output matrix, cast to hidden's dtype for the matmuls; its gradient is summed in float32.
    targets: the next tokens; any integer where the weight is 0.
    weights: each token's weight in the sum.
    z_loss: coefficient of lse² (PaLM's is 1e-4).
    chunk: tokens of the batch seen here whose logits exist at once; None chooses 16 MiB of logits, at least 512 tokens, and on TPU
      a 16th of its memory.

  Returns:
    The weighted sum, and its z-loss part (for reporting: no gradient flows through it). The caller divides by Σ w, which may be the sum
    over several batches.

  Raises:
    ValueError: shapes do not fit, or chunk is below 1.
  """
  _check(hidden, embedding, targets, weights, chunk)
  operands = (hidden, embedding, targets, weights)
  hidden, embedding, targets, weights = (
    vary_like(x, *operands) for x in operands
  )
  loss, z_sum = _fused(
    float(z_loss), chunk, hidden, embedding, targets, weights
  )
  return loss, lax.stop_gradient(z_sum)


def per_token_cross_entropy(
  hidden: Float[Array, "B T E"],
  embedding: Float[Array, "N E"],
  targets: Int[Array, "B T"],
  *,
  chunk: int | None = None,
) -> Float[Array, "B T"]:
  """The negative log-likelihood of every target, for evaluation. It is cheap without a gradient.

  Args:
    hidden: the decoder's output.
    embedding: the output matrix.
    targets: the next tokens; where one is out of range the result is meaningless, not an error.
    chunk: as in `fused_cross_entropy`.

  Returns:
    nll in nats, float32.

  Raises:
    ValueError: as `fused_cross_entropy`.
  """
  _check(hidden, embedding, targets, targets, chunk)
  hidden, embedding, targets = (
    vary_like(x, hidden, embedding, targets)
    for x in (hidden, embedding, targets)
  )
  matrix = embedding.astype(hidden.dtype)

  def step(carry, hidden, targets):
    return carry, _negative_log_likelihood(_logits(hidden, matrix), targets)[0]

  return _over_chunks(step, None, chunk, embedding.shape[0], hidden, targets)[1]


def reference_cross_entropy(
  hidden, embedding, targets, weights, *, z_loss: float = 0.0
):
  """The plain formula of `fused_cross_entropy`, all logits at once: the definition, for tests and benchmarks."""
  nll, lse = _negative_log_likelihood(
    _logits(hidden, embedding.astype(hidden.dtype)), targets
  )
  z_sum = z_loss * jnp.sum(weights * jnp.square(lse))
  return jnp.sum(weights * nll) + z_sum, lax.stop_gradient(z_sum)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
  z_loss: float, chunk: int | None, hidden, embedding, targets, weights
):
  matrix = embedding.astype(hidden.dtype)

  def step(carry, hidden, targets, weights):
    nll, lse = _negative_log_likelihood(_logits(hidden, matrix), targets)
    return carry, (weights * nll, weights * jnp.square(lse))

  nll, squares = _over_chunks(
    step, None, chunk, embedding.shape[0], hidden, targets, weights
  )[1]
  z_sum = z_loss * jnp.sum(squares)
  return jnp.sum(nll) + z_sum, z_sum


def _fused_fwd(
  z_loss: float, chunk: int | None, hidden, embedding, targets, weights
):
  matrix = embedding.astype(hidden.dtype)
  dtype = jnp.promote_types(jnp.float32, hidden.dtype)

  def step(d_embedding, hidden, targets, weights):
    logits = _logits(hidden, matrix)
    nll, lse = _negative_log_likelihood(logits, targets)
    probabilities = jnp.exp(logits - lse[..., None])
    d_logits = (weights * (1 + 2 * z_loss * lse))[..., None] * probabilities
    d_logits = _add_at(d_logits, targets, -weights).astype(hidden.dtype)
    if (
      platform() == "tpu"
    ):  # or XLA would compute it again in both products that read it, for every tile
      d_logits = lax.optimization_barrier(d_logits)
    d_hidden = jnp.einsum("btn,ne->bte", d_logits, matrix)
    part = jnp.einsum(
      "btn,bte->ne", d_logits, hidden, preferred_element_type=dtype
    )
    return part if d_embedding is None else d_embedding + part, (
      d_hidden,
      nll,
      jnp.square(lse),
    )

  zeros = vary_like(
    jnp.zeros(embedding.shape, dtype), hidden, embedding, targets, weights
  )
  d_embedding, (d_hidden, nll, squares) = _over_chunks(
    step, zeros, chunk, embedding.shape[0], hidden, targets, weights
  )
  z_sum = z_loss * jnp.sum(weights * squares)
  d_weights = (nll + z_loss * squares).astype(weights.dtype)
  return (jnp.sum(weights * nll) + z_sum, z_sum), (
    d_hidden,
    d_embedding.astype(embedding.dtype),
    d_weights,
  )


def _fused_bwd(z_loss: float, chunk: int | None, saved, cotangents):
  d_hidden, d_embedding, d_weights = (
    x * cotangents[0].astype(x.dtype) for x in saved
  )
  return d_hidden, d_embedding, None, d_weights


_fused.defvjp(_fused_fwd, _fused_bwd)


def _over_chunks(
  step: Callable,
  carry: Any,
  chunk: int | None,
  vocabulary: int,
  *arrays: jax.Array,
) -> tuple[Any, Any]:
  """Scans step(carry, *chunks of arrays along T); its outputs [B, t, …] come back as [B, T, …]."""
  batch, length = arrays[0].shape[:2]
  size = min(
    length,
    max(1, (_default_chunk(vocabulary) if chunk is None else chunk) // batch),
  )
  if chunk is None and platform() == "tpu":
    size = (
      1 << (size.bit_length() - 1) if size < length else size
    )  # whole tiles, and nothing to pad in the usual lengths
  num_chunks = -(-length // size)
  if num_chunks == 1:
    return step(None, *arrays)
  size = -(-length // num_chunks)  # even chunks, so that little is padded
  padding = num_chunks * size - length
  # Padded tokens have weight 0 and target 0; their outputs are cut off.
  arrays = tuple(
    jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in arrays
  )
  carry, out = lax.scan(
    lambda carry, start: step(
      carry, *(lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in arrays)
    ),
    carry,
    jnp.arange(num_chunks) * size,
  )
  join = lambda x: jnp.moveaxis(x, 0, 1).reshape(
    batch, num_chunks * size, *x.shape[3:]
  )[:, :length]
  return carry, jax.tree.map(join, out)


def _default_chunk(vocabulary: int) -> int:
  """Tokens of a chunk."""
  if platform() != "tpu":
    return max(_CHUNK_TOKENS, _CHUNK_LOGITS // vocabulary)
  return max(
    _CHUNK_TOKENS,
    tpu_info().hbm_capacity_bytes // (_CHUNK_SHARE * 4 * vocabulary),
  )


def _add_at(
  logits: Float[Array, "B T N"],
  targets: Int[Array, "B T"],
  values: Float[Array, "B T"],
) -> Float[Array, "B T N"]:
  """Adds to each token's entry at its target.

  A comparison with iota on TPU, where a scatter turns the logits into a vector and back. On CPU a scatter, which makes XLA write the result
  once, where a comparison is fused, exponentials included, into both products that read it (a fifth slower).
  """
  if platform() == "tpu":
    is_target = (
      lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
      == targets[..., None]
    )
    return logits + jnp.where(
      is_target, values[..., None].astype(logits.dtype), 0
    )
  return jax.vmap(
    jax.vmap(lambda row, target, value: row.at[target].add(value))
  )(logits, targets, values.astype(logits.dtype))


def _logits(
  hidden: Float[Array, "B T E"], matrix: Float[Array, "N E"]
) -> Float[Array, "B T N"]:
  return jnp.einsum(
    "bte,ne->btn",
    hidden,
    matrix,
    preferred_element_type=jnp.promote_types(jnp.float32, hidden.dtype),
  )


def _negative_log_likelihood(
  logits: Float[Array, "B T N"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """nll and lse. A target out of range reads some logit: its token must have weight 0."""
  lse = jax.nn.logsumexp(logits, axis=-1)
  targets = jnp.clip(targets, 0, logits.shape[-1] - 1)
  return lse - jnp.take_along_axis(logits, targets[..., None], axis=-1)[
    ..., 0
  ], lse


def _check(hidden, embedding, targets, weights, chunk) -> None:
  if hidden.ndim != 3:
    raise ValueError(f"hidden must be [B, T, E], got shape {hidden.shape}")
  if embedding.ndim != 2 or embedding.shape[1] != hidden.shape[2]:
    raise ValueError(
      f"embedding must be [N, E] with hidden's E = {hidden.shape[2]}, got shape {embedding.shape}"
    )
  for name, array in (("targets", targets), ("weights", weights)):
    if array.shape != hidden.shape[:2]:
      raise ValueError(
        f"{name} must be hidden's [B, T] = {hidden.shape[:2]}, got shape {array.shape}"
      )
  if not jnp.issubdtype(targets.dtype, jnp.integer):
    raise ValueError(f"targets must be integers, got {targets.dtype}")
  if chunk is not None and chunk < 1:
    raise ValueError(f"chunk must be None or at least 1 token, got {chunk}")
