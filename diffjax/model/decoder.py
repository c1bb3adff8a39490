"""The decoder: blocks of attention and a gated feed-forward layer, each behind a norm, scanned over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from diffjax.config import ModelConfig
from diffjax.model.attention import (
  PROJECTED,
  attention_class,
  lambda_init_schedule,
  matrix_init,
  stacks,
)
from diffjax.ops.diff_attention import RESIDUAL_NAMES, diff_attention
from diffjax.ops.diff_attention.mask import Windows
from diffjax.ops.layer_norm import layer_norm
from diffjax.ops.platform import platform
from diffjax.ops.poly_norm import poly_norm
from diffjax.ops.rms_norm import SCALE, rms_norm
from diffjax.ops.rope import ANGLES, Scaling
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
REMAT_POLICIES = {
  name: jax.checkpoint_policies.save_only_these_names(*kept)
  for name, kept in _KEPT.items()
}


class FeedForward(nn.Module):
  """y = (f(x W_gate) ∘ x W_up) W_down, without biases; f is silu (SwiGLU; Shazeer, 2020) or PolyNorm."""

  ffn_dim: int
  out_scale: float = 1.0
  dtype: Any = jnp.float32
  activation: str = "silu"

  @nn.compact
  def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    E, F = x.shape[-1], self.ffn_dim
    gate = self.param("gate", matrix_init(E), (E, F))
    up = self.param("up", matrix_init(E), (E, F))
    down = self.param("down", matrix_init(F, scale=self.out_scale), (F, E))
    x = x.astype(self.dtype)
    gated, widened = (
      checkpoint_name(product(x, gate, "gate"), GATE),
      checkpoint_name(product(x, up, "up"), UP),
    )
    if self.activation == "silu":
      hidden = swiglu(gated, widened)
    else:
      weights = self.param(
        "poly_weights", nn.initializers.constant(1 / 3), (3,)
      )
      hidden = (
        poly_norm(
          gated, weights, self.param("poly_constant", nn.initializers.zeros, ())
        )
        * widened
      )
    hidden = nn.with_logical_constraint(hidden, ("batch", "length", "ffn"))
    return product(hidden, down, "down")


class Block(nn.Module):
  """x + attention(norm(x)), then x + ffn(norm(x)). It returns two values, as `nn.scan` requires: the carry and None."""

  config: ModelConfig
  dtype: Any
  attention_fn: Callable[..., jax.Array]
  out_scale: float = (
    1.0  # on the initial matrices that write to the residual stream
  )

  @nn.compact
  def __call__(self, x, lambda_init, which_window, segment_ids, positions):
    config, E = self.config, x.shape[-1]
    sizes = windows(config)[0]
    attention = attention_class(config)(
      num_heads=config.num_heads,
      head_dim=config.head_dim,
      value_dim=config.value_dim,
      num_kv_heads=config.num_kv_heads,
      num_noise_heads=config.num_noise_heads,
      head_norm=config.head_norm,
      causal=config.causal,
      window=sizes[0],
      rope=config.rope,
      rope_base=config.rope_base,
      rope_scaling=None
      if config.rope_scaling == "none"
      else Scaling(
        config.rope_scaling, config.rope_factor, config.rope_original_length
      ),
      rope_dim=config.rope_dim,
      projection_biases=config.projection_biases,
      norm_eps=config.head_norm_eps or config.norm_eps,
      out_scale=self.out_scale,
      dtype=self.dtype,
      attention_fn=self.attention_fn,
      name="attention",
    )
    ffn = FeedForward(
      config.ffn_dim,
      self.out_scale,
      self.dtype,
      config.ffn_activation,
      name="ffn",
    )
    gains = {
      name: self.param(name, init, (E,))
      for name, init in norm_parameters(
        config, "attention_norm", "ffn_norm"
      ).items()
    }
    window = Windows(sizes, which_window) if len(sizes) > 1 else None
    x = x + attention(
      normed(x, gains, "attention_norm", config),
      lambda_init,
      window=window,
      segment_ids=segment_ids,
      positions=positions,
    )
    x = x + ffn(normed(x, gains, "ffn_norm", config))
    x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
    if not self.is_initializing():
      self.sow("intermediates", "hidden", x)
    return x, None


class Decoder(nn.Module):
  """Tokens to hidden states; the vocabulary projection is `logits`, or fused into the loss (ops/cross_entropy.py).

  Initialisation: truncated normals of standard deviation 1/√inputs, the two matrices that write to the residual stream further
  divided by √(2L); embeddings 1/√E, so that tied logits start at unit variance; gains 1. The paper states none of these.

  Parameters, a nested dict of float32 arrays: embedding [N, E], final_norm [E], unembedding [N, E] unless tied, and under `layers`
  with a leading axis L: attention/{query, key, value, out, …}, attention_norm, ffn/{gate, up, down, …}, ffn_norm. Plain layers, where there
  are such, have theirs under `plain_layers`.
  """

  config: ModelConfig
  dtype: Any = jnp.float32
  attention_fn: Callable[..., jax.Array] = diff_attention

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T E"]:
    """Hidden states after the final norm, in the compute dtype."""
    config = self.config
    if tokens.shape[1] > config.max_length:
      raise ValueError(
        f"tokens has length {tokens.shape[1]}, but config.model.max_length is {config.max_length}"
      )
    init = nn.initializers.normal(config.embed_dim**-0.5)
    embedding = self.param(
      "embedding", init, (config.vocab_size, config.embed_dim)
    )
    if not config.tie_embeddings:
      self.param("unembedding", init, (config.vocab_size, config.embed_dim))
    x = embed(embedding.astype(self.dtype), tokens, config)
    x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
    block = Block
    if config.remat != "none":
      block = nn.remat(
        Block, policy=REMAT_POLICIES[config.remat], prevent_cse=False
      )
    for name, stack in stacks(config).items():
      layers = nn.scan(
        block,
        variable_axes={"params": 0, "intermediates": 0, "metrics": 0},
        split_rngs={"params": True},
        in_axes=(0, 0, nn.broadcast, nn.broadcast),
        length=stack.num_layers,
        unroll=stack.num_layers if self._should_unroll() else 1,
        # To check values that a layer returns for all layers together, Flax would
        # trace the layer twice. Our layers return no such values.
        check_constancy_invariants=False,
      )
      per_layer = lambda_inits(stack), jnp.array(windows(stack)[1])
      x, _ = layers(
        stack,
        self.dtype,
        self.attention_fn,
        (2 * config.num_layers) ** -0.5,
        name=name,
      )(x, *per_layer, segment_ids, positions)
    gains = {
      name: self.param(name, init, (config.embed_dim,))
      for name, init in norm_parameters(config, "final_norm").items()
    }
    return normed(x, gains, "final_norm", config)

  def _should_unroll(self) -> bool:
    """Returns True if each layer is compiled separately, without a loop.

    A scan copies the activations for the backward pass into arrays stacked over
    layers, and out of them again. On a CPU these copies take a tenth of a step.
    Compile time grows with each unrolled layer, so deep models keep the scan.
    """
    if self.is_initializing():  # There is no backward pass.
      return False
    if self.config.remat != "none":
      # Without the scan, XLA reuses a layer's activations instead of
      # recomputing them.
      return False
    return platform() == "cpu" and self.config.num_layers <= 8


def lambda_inits(config: ModelConfig) -> Float[Array, L]:
  """λ_init of every layer: the paper's schedule, or the config's constant (unused by the baseline and DIFF V2)."""
  if config.lambda_init is not None:
    return jnp.full(config.num_layers, config.lambda_init, jnp.float32)
  return lambda_init_schedule(
    jnp.arange(config.num_layers) - config.lambda_init_offset
  )


def windows(config: ModelConfig) -> tuple[tuple[int | None, ...], list[int]]:
  """The windows that the layers have, and each layer's by its number among them."""
  pattern = config.window_pattern or "w"
  each = [
    config.window if pattern[layer % len(pattern)] == "w" else None
    for layer in range(config.num_layers)
  ]
  sizes = tuple(dict.fromkeys(each))
  return sizes, [sizes.index(size) for size in each]


def norm_parameters(
  config: ModelConfig, *names: str
) -> dict[str, Callable[..., jax.Array]]:
  """The parameters of norms, each with its initialisation: a gain, and LayerNorm's shift."""
  shifts = (
    {f"{name}_shift": nn.initializers.zeros for name in names}
    if config.norm == "layer"
    else {}
  )
  return dict.fromkeys(names, nn.initializers.ones) | shifts


def normed(
  x: Float[Array, "B T E"],
  params: dict[str, Any],
  name: str,
  config: ModelConfig,
) -> Float[Array, "B T E"]:
  """The residual stream behind a norm of the decoder: "attention_norm", "ffn_norm" or "final_norm"."""
  if config.norm == "layer":
    return layer_norm(x, params[name], params[f"{name}_shift"], config.norm_eps)
  return rms_norm(x, params[name], config.norm_eps)


def embed(
  embedding: Float[Array, "N E"], tokens: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T E"]:
  """The rows of the tokens, times the config's embed_scale: what enters the first layer, in the embedding's dtype."""
  x = jnp.take(embedding, tokens, axis=0)
  return (
    x
    if config.embed_scale == 1
    else x * jnp.asarray(config.embed_scale, x.dtype)
  )


def output_embedding(params: dict[str, Any]) -> Float[Array, "N E"]:
  """The matrix of the vocabulary projection: the embedding itself where the two are tied."""
  return params.get("unembedding", params["embedding"])


def logits(
  params: dict[str, Any], hidden: Float[Array, "B T E"]
) -> Float[Array, "B T N"]:
  """Logits in float32. For sampling and tests: training never holds them whole."""
  return jnp.einsum(
    "BTE,NE->BTN",
    hidden,
    output_embedding(params).astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )
