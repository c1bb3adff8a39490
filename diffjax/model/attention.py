"""Attention layers: the Transformer's, DIFF V1 and DIFF V2.

Each is a linen module that maps [B, T, E] to [B, T, E] and stands alone: it needs no config and no mesh. They differ in how many
softmax maps a head has, where λ comes from and what happens to a head's output; projections and RoPE are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.rms_norm import rms_norm
from diffjax.ops.rope import rope
from diffjax.parallel.product import product, whole

# Name of the four products' results, for remat policies.
PROJECTED = "attention_projected"

Lambda = Float[Array, ""] | Float[Array, "B T H"] | None


def lambda_init_schedule(layer: Int[Array, ...] | int) -> Float[Array, ...]:
  """λ_init of a layer counted from 0: 0.8 − 0.6·exp(−0.3·l) (paper, §2.1)."""
  return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(layer, jnp.float32))


def matrix_init(inputs: int, *, scale: float = 1.0):
  """Truncated normal of standard deviation scale/√inputs, for an array that sums over `inputs` numbers."""
  return nn.initializers.truncated_normal(scale * inputs**-0.5 / 0.87962566103423978)  # std of a unit normal cut at ±2


class Attention(nn.Module):
  """Softmax attention, the Transformer baseline: y = concat_h(softmax(QKᵀ/√D) V) W_O.

  Matrices start from a truncated normal of standard deviation 1/√inputs, `out` further scaled by `out_scale`; gains start at 1.

  Attributes:
    num_heads: H.
    head_dim: D.
    num_kv_heads: K, a divisor of H; None for H.
    head_norm: RMSNorm over each head's output, with one gain vector of width V shared by the heads.
    rope_base: base of the rotary angles; pairs are (j, j + D/2).
    norm_eps: ε of the head norm.
    out_scale: factor on the initial output projection.
    dtype: compute dtype; parameters are float32.
    attention_fn: has the signature of `diff_attention`; a caller with a mesh passes one wrapped in shard_map.
  """

  num_heads: int
  head_dim: int
  num_kv_heads: int | None = None
  head_norm: bool = False
  rope_base: float = 10_000.0
  norm_eps: float = 1e-5
  out_scale: float = 1.0
  dtype: Any = jnp.float32
  attention_fn: Callable[..., jax.Array] = diff_attention

  num_maps: ClassVar[int] = 1  # G
  num_key_maps: ClassVar[int] = 1  # M
  value_heads: ClassVar[int] = 1  # V / D

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B T E"],
    lambda_init: Float[Array, ""] | float | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T E"]:
    """Causal self-attention.

    Args:
      x: input.
      lambda_init: λ_init of this layer, DIFF V1 only; see `lambda_init_schedule`.
      segment_ids: tokens attend within equal ids; None for one document a row.
      positions: positions for RoPE; None for 0 … T−1.
    """
    E, H, D, G, M = x.shape[-1], self.num_heads, self.head_dim, self.num_maps, self.num_key_maps
    K, V = self.num_kv_heads or H, self.value_heads * D
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    x = x.astype(self.dtype)
    q, k, v = (self._project(x, name, heads) for name, heads in (("query", (H, G, D)), ("key", (K, M, D)), ("value", (K, V))))
    q, k = rope(q, positions, self.rope_base), rope(k, positions, self.rope_base)
    self.sow("intermediates", "query", q)
    self.sow("intermediates", "key", k)
    lam = self._lambda(x, lambda_init)
    if lam is not None:
      self.sow("metrics", "lambda", jnp.mean(lam))
    heads = self.attention_fn(q, k, v, lam, q_segment_ids=segment_ids, kv_segment_ids=segment_ids)
    if self.head_norm:
      heads = rms_norm(heads, self.param("head_gain", nn.initializers.ones, (V,)), self.norm_eps)
    heads = self._scale(heads, lambda_init)
    out = self.param("out", matrix_init(H * V, scale=self.out_scale), (H, V, E))
    return checkpoint_name(product(heads, out, "out"), PROJECTED)

  def _project(self, x: Float[Array, "B T E"], name: str, heads: tuple[int, ...]) -> Float[Array, "B T *heads"]:
    w = self.param(name, matrix_init(x.shape[-1]), (x.shape[-1], *heads))
    return checkpoint_name(product(x, w, name), PROJECTED)

  def _lambda(self, x: Float[Array, "B T E"], lambda_init: Any) -> Lambda:
    return None

  def _scale(self, heads: Float[Array, "B T H V"], lambda_init: Any) -> Float[Array, "B T H V"]:
    return heads


class DiffAttention(Attention):
  """DIFF attention, version 1: out = (1 − λ_init) · RMSNorm((A₁ − λA₂) V), V twice as wide as D (paper, eq. 1–3).

  λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init is one number per layer, in float32; its four vectors start from N(0, 0.1²).
  A twin of a baseline with h heads has h/2 heads of the same head_dim. Without `head_norm` the factor (1 − λ_init) stays, since
  the ablation removes the normalisation alone.
  """

  head_norm: bool = True

  num_maps: ClassVar[int] = 2
  num_key_maps: ClassVar[int] = 2
  value_heads: ClassVar[int] = 2

  def _lambda(self, x, lambda_init):
    if lambda_init is None:
      raise ValueError("DiffAttention needs lambda_init: pass lambda_init_schedule(layer) or a constant such as 0.8")
    q1, k1, q2, k2 = (
      self.param(name, nn.initializers.normal(0.1), (self.head_dim,)) for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    )
    return jnp.exp(jnp.dot(q1, k1)) - jnp.exp(jnp.dot(q2, k2)) + lambda_init

  def _scale(self, heads, lambda_init):
    return heads * jnp.asarray(1.0 - lambda_init, heads.dtype)


class DiffAttentionV2(Attention):
  """DIFF attention, version 2: out = A₁V − sigmoid(x W_λ) · A₂V per token and head; both maps share keys and values.

  H is the baseline's own head count; no λ_init, and by default no head norm (authors' V2 post, 2026-01-20).
  """

  num_maps: ClassVar[int] = 2

  def _lambda(self, x, lambda_init):
    return jax.nn.sigmoid(self._lambda_logits(x))

  def _lambda_logits(self, x: Float[Array, "B T E"]) -> Float[Array, "B T H"]:
    E, H = x.shape[-1], self.num_heads
    w = whole(self.param("lambda_hat", matrix_init(E), (E, H)), "lambda_hat", self.dtype)
    return jnp.einsum("BTE,EH->BTH", x, w, preferred_element_type=jnp.float32)


class DiffAttentionV2Linear(DiffAttentionV2):
  """Version 2 whose λ is x W_λ itself, without a sigmoid and so without bounds: an ablation of the authors' (V2 post, 2026-01-20)."""

  def _lambda(self, x, lambda_init):
    return self._lambda_logits(x)


ATTENTION = {"softmax": Attention, "diff": DiffAttention, "diff_v2": DiffAttentionV2, "diff_v2_linear": DiffAttentionV2Linear}
