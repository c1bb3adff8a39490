"""Cross-entropy fused with the output projection.

The logits [B, T, N] are computed in chunks of tokens. They are never in memory
all at once.
"""

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

# A chunk has 2²² logits by default: 16 MiB in float32, which fit a CPU's cache.
_CHUNK_LOGITS = 1 << 22
# It has at least 512 tokens, because each chunk adds to the whole gradient of
# the embedding. A byte-level model's batch fits in one chunk.
MIN_CHUNK_TOKENS = 512
# On TPUs that addition takes longer than the product of the chunk (110 ms of a
# step of 1,442 for diff_1b on v5e:4x4, by the compiler's estimate). So the
# logits of a chunk may take 1/16 of the memory there.
_TPU_MEMORY_SHARE = 16


def fused_cross_entropy(
  hidden: Float[Array, "B T E"],
  embedding: Float[Array, "N E"],
  targets: Int[Array, "B T"],
  weights: Float[Array, "B T"],
  *,
  z_loss: float = 0.0,
  chunk: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Returns Σ w·(nll + z_loss·lse²) over tokens.

  nll = lse − the target's logit, lse = logsumexp(hidden · embeddingᵀ)

  The forward pass also computes the gradients of hidden and embedding, chunk by
  chunk. The backward pass only scales them. Chunks are cut along T, so the
  batch axis may be sharded. Inside `shard_map`, the gradient of an embedding
  that all devices share is summed over them once, after the last chunk.

  Args:
    hidden: the decoder's output. The products have inputs in its dtype. Logits
      and sums are float32.
    embedding: the output matrix. Its gradient is summed in float32.
    targets: the next tokens. They may be any integers where the weight is 0.
    weights: each token's weight w.
    z_loss: the coefficient of lse². PaLM's is 1e-4.
    chunk: the number of this device's tokens whose logits exist at once. None
      for 16 MiB of logits and at least 512 tokens, and on TPUs for 1/16 of the
      memory.

  Returns:
    The weighted sum, and the z-loss in it. No gradient flows through the
    second. The caller divides by Σ w, which may be over several batches.

  Raises:
    ValueError: if shapes do not fit, or if chunk is less than 1.
  """
  _check(hidden, embedding, targets, weights, chunk)
  # Inside shard_map, all arrays must vary over the same mesh axes. The gradient
  # of an array that did not is then summed over the devices.
  operands = (hidden, embedding, targets, weights)
  hidden = vary_like(hidden, *operands)
  embedding = vary_like(embedding, *operands)
  targets = vary_like(targets, *operands)
  weights = vary_like(weights, *operands)
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
  """Returns the negative log-likelihood of each target, for evaluation.

  Args:
    hidden: the decoder's output.
    embedding: the output matrix.
    targets: the next tokens. The result is meaningless where one is out of
      range.
    chunk: as in `fused_cross_entropy`.

  Returns:
    The negative log-likelihoods in nats, in float32.

  Raises:
    ValueError: if shapes do not fit, or if chunk is less than 1.
  """
  # There are no weights. The targets have the shape that weights must have.
  _check(hidden, embedding, targets, weights=targets, chunk=chunk)
  # Inside shard_map, all arrays must vary over the same mesh axes.
  operands = (hidden, embedding, targets)
  hidden = vary_like(hidden, *operands)
  embedding = vary_like(embedding, *operands)
  targets = vary_like(targets, *operands)
  matrix = embedding.astype(hidden.dtype)

  def chunk_step(carry, chunk_hidden, chunk_targets):
    logits = _logits(chunk_hidden, matrix)  # [B, t, N]
    nll, _ = _negative_log_likelihood(logits, chunk_targets)
    return carry, nll

  _, nll = _scan_chunks(
    chunk_step,
    None,  # chunks pass nothing on to the next one
    chunk,
    embedding.shape[0],  # the number of logits of a token
    hidden,
    targets,
  )
  return nll


def reference_cross_entropy(
  hidden: Float[Array, "B T E"],
  embedding: Float[Array, "N E"],
  targets: Int[Array, "B T"],
  weights: Float[Array, "B T"],
  *,
  z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Returns the same as `fused_cross_entropy`, from all logits at once.

  This is the definition, for tests and benchmarks:
    Σ w·(nll + z_loss·lse²) with nll = lse − the target's logit

  Returns:
    The weighted sum, and the z-loss in it, without a gradient.
  """
  logits = _logits(hidden, embedding.astype(hidden.dtype))
  nll, lse = _negative_log_likelihood(logits, targets)
  z_sum = z_loss * jnp.sum(weights * jnp.square(lse))
  loss = jnp.sum(weights * nll) + z_sum
  return loss, lax.stop_gradient(z_sum)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
  z_loss: float, chunk: int | None, hidden, embedding, targets, weights
):
  """Returns the loss and its z-loss, without computing gradients.

  This runs if nothing is differentiated. Otherwise `_fused_forward` runs.
  """
  matrix = embedding.astype(hidden.dtype)

  def chunk_step(carry, chunk_hidden, chunk_targets, chunk_weights):
    logits = _logits(chunk_hidden, matrix)  # [B, t, N]
    nll, lse = _negative_log_likelihood(logits, chunk_targets)
    weighted_nll = chunk_weights * nll
    weighted_squares = chunk_weights * jnp.square(lse)
    return carry, (weighted_nll, weighted_squares)

  _, (weighted_nll, weighted_squares) = _scan_chunks(
    chunk_step,
    None,  # chunks pass nothing on to the next one
    chunk,
    embedding.shape[0],  # the number of logits of a token
    hidden,
    targets,
    weights,
  )
  z_sum = z_loss * jnp.sum(weighted_squares)
  return jnp.sum(weighted_nll) + z_sum, z_sum


def _fused_forward(
  z_loss: float, chunk: int | None, hidden, embedding, targets, weights
):
  """Returns the loss and its z-loss, and the gradients as residuals.

  The gradients are computed here, while the logits of a chunk exist. The
  backward pass multiplies them by the gradient of the loss.
  """
  matrix = embedding.astype(hidden.dtype)
  dtype = jnp.promote_types(jnp.float32, hidden.dtype)

  def chunk_step(d_embedding, chunk_hidden, chunk_targets, chunk_weights):
    logits = _logits(chunk_hidden, matrix)  # [B, t, N]
    nll, lse = _negative_log_likelihood(logits, chunk_targets)

    # The gradient of w·(lse − logit + z_loss·lse²) is
    # w·(1 + 2·z_loss·lse) · softmax(logits), minus w at the target.
    probabilities = jnp.exp(logits - lse[..., None])
    factor = chunk_weights * (1 + 2 * z_loss * lse)
    d_logits = factor[..., None] * probabilities
    d_logits = _add_at_targets(d_logits, chunk_targets, -chunk_weights)
    d_logits = d_logits.astype(chunk_hidden.dtype)
    if platform() == "tpu":
      # Without the barrier, XLA would compute d_logits again in both products
      # that read it, for every tile.
      d_logits = lax.optimization_barrier(d_logits)

    d_hidden = jnp.einsum("btn,ne->bte", d_logits, matrix)
    chunk_d_embedding = jnp.einsum(
      "btn,bte->ne", d_logits, chunk_hidden, preferred_element_type=dtype
    )
    if d_embedding is None:  # this is the only chunk
      d_embedding = chunk_d_embedding
    else:
      d_embedding = d_embedding + chunk_d_embedding
    return d_embedding, (d_hidden, nll, jnp.square(lse))

  zeros = jnp.zeros(embedding.shape, dtype)
  zeros = vary_like(zeros, hidden, embedding, targets, weights)
  vocab_size = embedding.shape[0]
  d_embedding, (d_hidden, nll, squares) = _scan_chunks(
    chunk_step, zeros, chunk, vocab_size, hidden, targets, weights
  )
  z_sum = z_loss * jnp.sum(weights * squares)
  loss = jnp.sum(weights * nll) + z_sum
  d_embedding = d_embedding.astype(embedding.dtype)
  d_weights = (nll + z_loss * squares).astype(weights.dtype)
  return (loss, z_sum), (d_hidden, d_embedding, d_weights)


def _fused_backward(z_loss: float, chunk: int | None, residuals, cotangents):
  """Returns the gradients of hidden, embedding, targets (None) and weights.

  The forward pass has computed the gradients of the loss already. They are
  multiplied by the gradient with respect to the loss. The first two arguments
  are the static ones of `_fused`, which JAX passes.
  """
  d_hidden, d_embedding, d_weights = residuals
  d_loss, _ = cotangents  # no gradient flows through the z-loss
  d_hidden = d_hidden * d_loss.astype(d_hidden.dtype)
  d_embedding = d_embedding * d_loss.astype(d_embedding.dtype)
  d_weights = d_weights * d_loss.astype(d_weights.dtype)
  d_targets = None
  return d_hidden, d_embedding, d_targets, d_weights


_fused.defvjp(_fused_forward, _fused_backward)


def _scan_chunks(
  step: Callable,
  initial_carry: Any,
  chunk: int | None,
  vocab_size: int,
  *arrays: jax.Array,
) -> tuple[Any, Any]:
  """Runs `step` on one chunk of tokens after the other.

  So the logits of only one chunk exist at a time. A chunk has the same tokens
  of all rows: arrays [B, T, …] are cut into chunks [B, t, …].

  Args:
    step: (carry, *chunks of the arrays) → (carry, outputs [B, t, …]).
    initial_carry: the carry of the first of several chunks. If one chunk holds
      all tokens, its carry is None instead: there is nothing to add it to.
    chunk: the number of tokens in a chunk of all rows. None for the default.
    vocab_size: the number of logits of a token.
    arrays: arrays [B, T, …].

  Returns:
    The last carry, and the outputs [B, T, …].
  """
  batch, length = arrays[0].shape[:2]
  num_chunks = _count_chunks(batch, length, chunk, vocab_size)
  if num_chunks == 1:
    return step(None, *arrays)

  # Pad the arrays to chunks of equal size. Padded tokens have weight 0 and
  # target 0, and their outputs are cut off below.
  size = -(-length // num_chunks)  # rounded up
  padded_length = num_chunks * size
  padded = []
  for array in arrays:
    widths = [(0, 0)] * array.ndim
    widths[1] = (0, padded_length - length)
    padded.append(jnp.pad(array, widths))

  def scan_step(carry, start):
    chunks = []
    for array in padded:
      chunks.append(lax.dynamic_slice_in_dim(array, start, size, axis=1))
    return step(carry, *chunks)

  def join_chunks(x):  # [chunks, B, t, …] to [B, T, …]
    x = jnp.moveaxis(x, 0, 1)
    x = x.reshape(batch, padded_length, *x.shape[3:])
    return x[:, :length]

  starts = jnp.arange(num_chunks) * size
  carry, outputs = lax.scan(scan_step, initial_carry, starts)
  return carry, jax.tree.map(join_chunks, outputs)


def _count_chunks(
  batch: int, length: int, chunk: int | None, vocab_size: int
) -> int:
  """Returns into how many chunks of tokens the rows of a batch are cut.

  Example:
    _count_chunks(batch=16, length=1024, chunk=4096, vocab_size=50_000) → 4,
    since a chunk of 4096 tokens has 256 tokens of each row.

  Args:
    batch: the number of rows.
    length: the tokens of a row.
    chunk: the tokens of a chunk, over all rows. None for the default.
    vocab_size: the logits of a token.
  """
  chunk_tokens = chunk
  if chunk_tokens is None:
    chunk_tokens = _default_chunk_tokens(vocab_size)
  # The tokens of one row in a chunk.
  size = max(1, chunk_tokens // batch)
  size = min(length, size)
  if chunk is None and platform() == "tpu" and size < length:
    # A power of two fills whole tiles, and divides the usual lengths.
    size = 1 << (size.bit_length() - 1)  # rounded down
  return -(-length // size)  # rounded up


def _default_chunk_tokens(vocab_size: int) -> int:
  """Returns the default number of tokens in a chunk."""
  chunk_logits = _CHUNK_LOGITS
  if platform() == "tpu":
    bytes_per_logit = 4  # float32
    memory = tpu_info().hbm_capacity_bytes
    chunk_logits = memory // (_TPU_MEMORY_SHARE * bytes_per_logit)
  return max(MIN_CHUNK_TOKENS, chunk_logits // vocab_size)


def _add_at_targets(
  logits: Float[Array, "B T N"],
  targets: Int[Array, "B T"],
  values: Float[Array, "B T"],
) -> Float[Array, "B T N"]:
  """Returns logits with each token's value added at its target.

  Example:
    logits [[[0, 0, 0]]], targets [[2]], values [[5]] → [[[0, 0, 5]]]
  """
  values = values.astype(logits.dtype)
  if platform() == "tpu":
    # On TPUs a scatter turns the logits into a vector and back.
    ids = lax.broadcasted_iota(targets.dtype, logits.shape, dimension=2)
    is_target = ids == targets[..., None]
    return logits + jnp.where(is_target, values[..., None], 0)

  # On CPUs a scatter makes XLA write the result once. A comparison is fused,
  # with the exponentials, into both products that read the result, which is a
  # fifth slower.
  def add_to_row(row, target, value):
    return row.at[target].add(value)

  add_to_rows = jax.vmap(jax.vmap(add_to_row))
  return add_to_rows(logits, targets, values)


def _logits(
  hidden: Float[Array, "B T E"], matrix: Float[Array, "N E"]
) -> Float[Array, "B T N"]:
  dtype = jnp.promote_types(jnp.float32, hidden.dtype)
  return jnp.einsum("bte,ne->btn", hidden, matrix, preferred_element_type=dtype)


def _negative_log_likelihood(
  logits: Float[Array, "B T N"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Returns each token's negative log-likelihood, and its log-sum-exp.

  nll = −log softmax(logits)[target] = lse − the target's logit

  A target that is out of range reads some logit. Its token must have weight 0.
  """
  lse = jax.nn.logsumexp(logits, axis=-1)
  vocab_size = logits.shape[-1]
  indices = jnp.clip(targets, 0, vocab_size - 1)
  target_logits = jnp.take_along_axis(logits, indices[..., None], axis=-1)
  nll = lse - target_logits[..., 0]
  return nll, lse


def _check(hidden, embedding, targets, weights, chunk) -> None:
  """Raises ValueError if shapes do not fit, or if chunk is less than 1."""
  if hidden.ndim != 3:
    raise ValueError(f"hidden must be [B, T, E]; got shape {hidden.shape}")
  if embedding.ndim != 2 or embedding.shape[1] != hidden.shape[2]:
    raise ValueError(
      f"embedding must be [N, E] with hidden's E = {hidden.shape[2]};"
      f" got shape {embedding.shape}"
    )
  for name, array in (("targets", targets), ("weights", weights)):
    if array.shape != hidden.shape[:2]:
      raise ValueError(
        f"{name} must be hidden's [B, T] = {hidden.shape[:2]};"
        f" got shape {array.shape}"
      )
  if not jnp.issubdtype(targets.dtype, jnp.integer):
    raise ValueError(f"targets must be integers; got {targets.dtype}")
  if chunk is not None and chunk < 1:
    raise ValueError(f"chunk must be None or at least 1 token; got {chunk}")
