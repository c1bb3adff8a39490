"""The decoder: pre-RMSNorm blocks of attention and SwiGLU, scanned over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from diffjax.config import ModelConfig
from diffjax.model.attention import PROJECTED, attention_class, lambda_init_schedule, matrix_init
from diffjax.ops.diff_attention import RESIDUAL_NAMES, diff_attention
from diffjax.ops.platform import platform
from diffjax.ops.rms_norm import SCALE, rms_norm
from diffjax.ops.rope import ANGLES
from diffjax.ops.swiglu import swiglu
from diffjax.parallel.product import product

# Names of the SwiGLU's two inputs, for remat policies.
GATE, UP = "ffn_gate", "ffn_up"

# The arrays of a layer that the backward pass keeps, from the least memory to the most; with remat "none" it keeps all of them. They are
# listed by name, because JAX's own policies do not see the products inside `product`, which run on shards.
_ATTENTION = (*RESIDUAL_NAMES, ANGLES, SCALE)
_KEPT = {
  "full": (),
  "attention": _ATTENTION,
  "gate": (*_ATTENTION, GATE),
  "ffn": (*_ATTENTION, GATE, UP),
  "dots": (*_ATTENTION, GATE, UP, PROJECTED),
}
REMAT_POLICIES = {name: jax.checkpoint_policies.save_only_these_names(*kept) for name, kept in _KEPT.items()}


class SwiGLU(nn.Module):
  """y = (silu(x W_gate) ∘ x W_up) W_down, without biases (Shazeer, 2020)."""

  ffn_dim: int
  out_scale: float = 1.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    E, F = x.shape[-1], self.ffn_dim
    gate = self.param("gate", matrix_init(E), (E, F))
    up = self.param("up", matrix_init(E), (E, F))
    down = self.param("down", matrix_init(F, scale=self.out_scale), (F, E))
    x = x.astype(self.dtype)
    hidden = swiglu(checkpoint_name(product(x, gate, "gate"), GATE), checkpoint_name(product(x, up, "up"), UP))
    hidden = nn.with_logical_constraint(hidden, ("batch", "length", "ffn"))
    return product(hidden, down, "down")


class Block(nn.Module):
  """x + attention(norm(x)), then x + ffn(norm(x)). It returns two values, as `nn.scan` requires: the carry and None."""

  config: ModelConfig
  dtype: Any
  attention_fn: Callable[..., jax.Array]

  @nn.compact
  def __call__(self, x, lambda_init, segment_ids, positions):
    config, E = self.config, x.shape[-1]
    out_scale = (2 * config.num_layers) ** -0.5
    attention = attention_class(config)(
      num_heads=config.num_heads,
      head_dim=config.head_dim,
      num_kv_heads=config.num_kv_heads,
      num_noise_heads=config.num_noise_heads,
      head_norm=config.head_norm,
      causal=config.causal,
      window=config.window,
      rope=config.rope,
      rope_base=config.rope_base,
      projection_biases=config.projection_biases,
      norm_eps=config.norm_eps,
      out_scale=out_scale,
      dtype=self.dtype,
      attention_fn=self.attention_fn,
      name="attention",
    )
    ffn = SwiGLU(config.ffn_dim, out_scale, self.dtype, name="ffn")
    normed = rms_norm(x, self.param("attention_norm", nn.initializers.ones, (E,)), config.norm_eps)
    x = x + attention(normed, lambda_init, segment_ids=segment_ids, positions=positions)
    x = x + ffn(rms_norm(x, self.param("ffn_norm", nn.initializers.ones, (E,)), config.norm_eps))
    x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
    self.sow("intermediates", "hidden", x)
    return x, None


class Decoder(nn.Module):
  """Tokens to hidden states; the vocabulary projection is `logits`, or fused into the loss (ops/cross_entropy.py).

  Initialisation: truncated normals of standard deviation 1/√inputs, the two matrices that write to the residual stream further
  divided by √(2L); embeddings 1/√E, so that tied logits start at unit variance; gains 1. The paper states none of these.

  Parameters, a nested dict of float32 arrays: embedding [N, E], final_norm [E], unembedding [N, E] unless tied, and under `layers`
  with a leading axis L: attention/{query, key, value, out, …}, attention_norm, ffn/{gate, up, down}, ffn_norm.
  """

  config: ModelConfig
  dtype: Any = jnp.float32
  attention_fn: Callable[..., jax.Array] = diff_attention

  @nn.compact
  def __call__(
    self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None, positions: Int[Array, "B T"] | None = None
  ) -> Float[Array, "B T E"]:
    """Hidden states after the final norm, in the compute dtype."""
    config = self.config
    if tokens.shape[1] > config.max_length:
      raise ValueError(f"tokens has length {tokens.shape[1]}, but config.model.max_length is {config.max_length}")
    init = nn.initializers.normal(config.embed_dim**-0.5)
    embedding = self.param("embedding", init, (config.vocab_size, config.embed_dim))
    if not config.tie_embeddings:
      self.param("unembedding", init, (config.vocab_size, config.embed_dim))
    x = embed(embedding.astype(self.dtype), tokens, config)
    x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
    block = Block
    if config.remat != "none":
      block = nn.remat(Block, policy=REMAT_POLICIES[config.remat], prevent_cse=False)
    layers = nn.scan(
      block,
      variable_axes={"params": 0, "intermediates": 0, "metrics": 0},
      split_rngs={"params": True},
      in_axes=(0, nn.broadcast, nn.broadcast),
      length=config.num_layers,
      unroll=config.num_layers if self._unrolled() else 1,
    )
    x, _ = layers(config, self.dtype, self.attention_fn, name="layers")(x, lambda_inits(config), segment_ids, positions)
    return rms_norm(x, self.param("final_norm", nn.initializers.ones, (config.embed_dim,)), config.norm_eps)

  def _unrolled(self) -> bool:
    """True if the program holds each layer separately instead of a loop: on CPUs, for a few layers, since it takes longer to compile.

    A scan copies what the backward pass needs into arrays stacked over layers, and out of them again. On a CPU that takes a tenth of a
    step. With remat the scan stays: it keeps XLA from replacing the second computation of a layer by the first.
    """
    return platform() == "cpu" and self.config.num_layers <= 8 and self.config.remat == "none"


def lambda_inits(config: ModelConfig) -> Float[Array, L]:
  """λ_init of every layer: the paper's schedule, or the config's constant (unused by the baseline and DIFF V2)."""
  if config.lambda_init is not None:
    return jnp.full(config.num_layers, config.lambda_init, jnp.float32)
  return lambda_init_schedule(jnp.arange(config.num_layers))


def embed(embedding: Float[Array, "N E"], tokens: Int[Array, "B T"], config: ModelConfig) -> Float[Array, "B T E"]:
  """The rows of the tokens, times the config's embed_scale: what enters the first layer, in the embedding's dtype."""
  x = jnp.take(embedding, tokens, axis=0)
  return x if config.embed_scale == 1 else x * jnp.asarray(config.embed_scale, x.dtype)


def output_embedding(params: dict[str, Any]) -> Float[Array, "N E"]:
  """The matrix of the vocabulary projection: the embedding itself where the two are tied."""
  return params.get("unembedding", params["embedding"])


def logits(params: dict[str, Any], hidden: Float[Array, "B T E"]) -> Float[Array, "B T N"]:
  """Logits in float32. For sampling and tests: training never holds them whole."""
  return jnp.einsum("BTE,NE->BTN", hidden, output_embedding(params).astype(hidden.dtype), preferred_element_type=jnp.float32)
