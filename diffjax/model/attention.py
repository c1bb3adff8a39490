"""Attention layers: the Transformer's, DIFF V1 and DIFF V2.

Each is a linen module that maps [B, T, E] to [B, T, E] and stands alone: it needs no config and no mesh. They differ in how many
softmax maps a head has, where λ comes from and what happens to a head's output; projections and RoPE are shared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from diffjax.config import ModelConfig, UserError
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.mask import Windows
from diffjax.ops.rms_norm import rms_norm
from diffjax.ops.rope import Scaling, rope
from diffjax.parallel.product import gather_and_cast, product
from diffjax.parameters import FIELDS, PARAMETERS

# Name of the four products' results, for remat policies.
PROJECTED = "attention_projected"

Lambda = Float[Array, ""] | Float[Array, "B T H"] | None


def lambda_init_schedule(layer: Int[Array, ...] | int) -> Float[Array, ...]:
  """λ_init of a layer counted from 0: 0.8 − 0.6·exp(−0.3·l) (paper, §2.1)."""
  return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(layer, jnp.float32))


def _given(layer: nn.Module, lambda_init: Any) -> Any:
  if lambda_init is None:
    raise ValueError(
      f"{type(layer).__name__} needs lambda_init: pass lambda_init_schedule(layer) or a constant such as 0.8"
    )
  return lambda_init


def matrix_init(inputs: int, *, scale: float = 1.0):
  """Truncated normal of standard deviation scale/√inputs, for an array that sums over `inputs` numbers."""
  return nn.initializers.truncated_normal(
    scale * inputs**-0.5 / 0.87962566103423978
  )  # std of a unit normal cut at ±2


class Attention(nn.Module):
  """Softmax attention, the Transformer baseline: y = concat_h(softmax(QKᵀ/√D) V) W_O.

  Matrices start from a truncated normal of standard deviation 1/√inputs, `out` further scaled by `out_scale`; gains start
  at 1, biases at 0.

  Attributes:
    num_heads: H.
    head_dim: D.
    value_dim: V; None for the variant's own, D or 2D.
    num_kv_heads: K, a divisor of Q; None for Q.
    num_noise_heads: Q, a divisor of H: noise maps, each subtracted from H/Q heads' maps (grouped differential attention,
      arXiv:2510.06949); None for H. Variants of two maps only.
    head_norm: RMSNorm over each head's output, with one gain vector of width V shared by the heads.
    causal: a token sees itself and those before it; False for the whole row.
    window: number of keys that a token sees, itself included (see `diff_attention`); None for all.
    rope: rotary position embedding of queries and keys.
    rope_base: base of the rotary angles; pairs are (j, j + D/2).
    rope_scaling: how the angles are stretched for longer rows; None for not.
    rope_dim: how many of the D are rotated, the last ones, as in multi-head latent attention; None for all.
    projection_biases: biases of the query, key, value and output projections.
    norm_eps: ε of the head norm.
    out_scale: factor on the initial output projection.
    dtype: compute dtype; parameters are float32.
    attention_fn: has the signature of `diff_attention`; a caller with a mesh passes one wrapped in shard_map.
  """

  num_heads: int
  head_dim: int
  value_dim: int | None = None
  num_kv_heads: int | None = None
  num_noise_heads: int | None = None
  head_norm: bool = False
  causal: bool = True
  window: int | None = None
  rope: bool = True
  rope_base: float = 10_000.0
  rope_scaling: Scaling | None = None
  rope_dim: int | None = None
  projection_biases: bool = False
  norm_eps: float = 1e-5
  out_scale: float = 1.0
  dtype: Any = jnp.float32
  attention_fn: Callable[..., jax.Array] = diff_attention

  num_maps: ClassVar[int] = 1  # 2: a noise map beside each signal map
  num_key_maps: ClassVar[int] = 1  # M
  value_heads: ClassVar[int] = 1  # V / D, unless value_dim says otherwise
  extra: ClassVar[
    tuple[str, ...]
  ] = ()  # parameters besides those of every layer
  has_lambda_init: ClassVar[bool] = False

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B T E"],
    lambda_init: Float[Array, ""] | float | None = None,
    *,
    window: Windows | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    keys_values: tuple[Float[Array, "B T K M D"], Float[Array, "B T K V"]]
    | None = None,
  ) -> Float[Array, "B T E"]:
    """Self-attention, or attention to the keys and values of another layer.

    Args:
      x: input.
      lambda_init: λ_init of this layer, DIFF V1 only; see `lambda_init_schedule`.
      window: instead of the layer's own, one that data choose.
      segment_ids: tokens attend within equal ids; None for one document a row.
      positions: positions for RoPE; None for 0 … T−1.
      keys_values: another layer's, for the same tokens, as its `attention_fn` is given them (keys after RoPE). This layer then makes none,
        and has no parameters for them.

    Raises:
      ValueError: if keys_values are not of this layer's heads and widths, or the layer's own sizes do not go together.
    """
    x = x.astype(self.dtype)
    q = self._project(x, "query", x.shape[-1])
    k, v = self._checked(keys_values) or (
      self._project(x, name, x.shape[-1]) for name in ("key", "value")
    )
    if self.rope:
      if positions is None:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
      q = self._rotated(q, positions)
      k = self._rotated(k, positions) if keys_values is None else k
    self._sow("intermediates", "query", q)
    self._sow("intermediates", "key", k)
    lam = self._lambda(x, lambda_init)
    if lam is not None:
      self._sow("metrics", "lambda", jnp.mean(lam))
    mask = dict(
      q_segment_ids=segment_ids,
      kv_segment_ids=segment_ids,
      causal=self.causal,
      window=window or self.window,
    )
    heads = self.attention_fn(q, k, v, lam, **mask)
    if self.head_norm:
      heads = rms_norm(
        heads,
        self._parameter("head_gain", nn.initializers.ones, x.shape[-1]),
        self.norm_eps,
      )
    return self._project(
      self._output(heads, x, lambda_init), "out", x.shape[-1], self.out_scale
    )

  def _sow(self, collection: str, name: str, value: jax.Array) -> None:
    """Sows a value, except in `init`, which would return it with the parameters."""
    if not self.is_initializing():
      self.sow(collection, name, value)

  def _checked(
    self, keys_values: tuple[jax.Array, jax.Array] | None
  ) -> tuple[jax.Array, jax.Array] | None:
    for given, axes in zip(keys_values or (), ("KMD", "KV"), strict=False):
      if given.shape[2:] != (
        want := tuple(self._size(axis, given.shape[-1]) for axis in axes)
      ):
        raise ValueError(
          f"keys_values must be [B, T, {', '.join(map(str, want))}] in the axes B T {' '.join(axes)}; got shape {given.shape}"
        )
    return keys_values

  def _rotated(
    self, x: Float[Array, "B T *heads D"], positions: Int[Array, "B T"]
  ) -> Float[Array, "B T *heads D"]:
    if self.rope_dim is not None and self.rope_dim not in range(
      2, self.head_dim + 1, 2
    ):
      raise ValueError(
        f"rope_dim must be even, 2 to head_dim = {self.head_dim}, or None for all; got {self.rope_dim}"
      )
    still = self.head_dim - (self.rope_dim or self.head_dim)
    turned = rope(x[..., still:], positions, self.rope_base, self.rope_scaling)
    return (
      jnp.concatenate([x[..., :still], turned], axis=-1) if still else turned
    )

  def _parameter(
    self, name: str, init: Callable[..., jax.Array], embed_dim: int
  ) -> jax.Array:
    """A parameter of one layer, of the shape that the table of parameters gives it."""
    return self.param(
      name,
      init,
      tuple(self._size(axis, embed_dim) for axis in PARAMETERS[name].axes[1:]),
    )

  def _matrix(self, name: str, embed_dim: int, scale: float = 1.0) -> jax.Array:
    inputs = math.prod(
      self._size(axis, embed_dim) for axis in PARAMETERS[name].inputs
    )
    return self._parameter(name, matrix_init(inputs, scale=scale), embed_dim)

  def _size(self, axis: str, embed_dim: int) -> int:
    maps = map_sizes(
      type(self),
      self.num_heads,
      self.num_noise_heads,
      self.head_dim,
      self.value_dim,
    )
    return {
      "E": embed_dim,
      "H": self.num_heads,
      "K": self.num_kv_heads or maps["Q"],
      "D": self.head_dim,
      **maps,
    }[axis]

  def _project(
    self,
    x: Float[Array, "B T *inputs"],
    name: str,
    embed_dim: int,
    scale: float = 1.0,
  ) -> Float[Array, "B T *outputs"]:
    """x W, plus the bias where projections have one."""
    y = product(x, self._matrix(name, embed_dim, scale), name)
    if self.projection_biases and f"{name}_bias" in PARAMETERS:
      y += self._parameter(
        f"{name}_bias", nn.initializers.zeros, embed_dim
      ).astype(y.dtype)
    return checkpoint_name(y, PROJECTED)

  def _lambda(self, x: Float[Array, "B T E"], lambda_init: Any) -> Lambda:
    """λ, of variants with two maps."""
    return None

  def _lambda_logits(self, x: Float[Array, "B T E"]) -> Float[Array, "B T H"]:
    """x W_λ in float32, for variants whose λ depends on the token."""
    w = gather_and_cast(
      self._matrix("lambda_hat", x.shape[-1]), "lambda_hat", self.dtype
    )
    return jnp.einsum("BTE,EH->BTH", x, w, preferred_element_type=jnp.float32)

  def _gated(
    self, heads: Float[Array, "B T H V"], x: Float[Array, "B T E"]
  ) -> Float[Array, "B T H V"]:
    return heads * jax.nn.sigmoid(self._project(x, "head_gate", x.shape[-1]))

  def _output(
    self,
    heads: Float[Array, "B T H V"],
    x: Float[Array, "B T E"],
    lambda_init: Any,
  ) -> Float[Array, "B T H V"]:
    """A variant's change to the heads' outputs before the output projection."""
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
  extra: ClassVar[tuple[str, ...]] = (
    "lambda_q1",
    "lambda_k1",
    "lambda_q2",
    "lambda_k2",
  )
  has_lambda_init: ClassVar[bool] = True

  def _lambda(self, x, lambda_init):
    q1, k1, q2, k2 = (
      self._parameter(name, nn.initializers.normal(0.1), x.shape[-1])
      for name in self.extra
    )
    return (
      jnp.exp(jnp.dot(q1, k1))
      - jnp.exp(jnp.dot(q2, k2))
      + _given(self, lambda_init)
    )

  def _output(self, heads, x, lambda_init):
    return heads * jnp.asarray(1.0 - lambda_init, heads.dtype)


class DiffAttentionV2(Attention):
  """DIFF attention, version 2: out = A₁V − sigmoid(x W_λ) · A₂V per token and head; both maps share keys and values.

  H is the baseline's own head count; no λ_init, and by default no head norm (authors' V2 post, 2026-01-20).
  """

  num_maps: ClassVar[int] = 2
  extra: ClassVar[tuple[str, ...]] = ("lambda_hat",)

  def _lambda(self, x, lambda_init):
    return jax.nn.sigmoid(self._lambda_logits(x))


class DiffAttentionV2Linear(DiffAttentionV2):
  """Version 2 whose λ is x W_λ itself, without a sigmoid and so without bounds: an ablation of the authors' (V2 post, 2026-01-20)."""

  def _lambda(self, x, lambda_init):
    return self._lambda_logits(x)


class DiffAttentionV2Gated(DiffAttentionV2):
  """Version 2 whose heads' outputs are gated, sigmoid(x W_g) ∘ heads: with shared noise maps the form of Motif 3."""

  extra: ClassVar[tuple[str, ...]] = ("lambda_hat", "head_gate")

  def _output(self, heads, x, lambda_init):
    return self._gated(heads, x)


class DiffAttentionPerToken(DiffAttention):
  """Version 1 with version 2's λ: sigmoid(x W_λ + logit(λ_init)) per token and head, which is λ_init where W_λ is 0."""

  extra: ClassVar[tuple[str, ...]] = ("lambda_hat",)

  def _lambda(self, x, lambda_init):
    return jax.nn.sigmoid(
      self._lambda_logits(x) + jax.scipy.special.logit(lambda_init)
    )


class DexAttention(Attention):
  """Softmax attention that takes a part of itself from each head's output: O − λ_h · O W_D (DEX; Kong et al., 2025, arXiv:2505.16333).

  It adapts a Transformer that is trained already. W_D [V, V] is one matrix a layer and starts at 0, so that the first step is the
  Transformer's. λ_h is the layer's λ_init plus a number for each head, which starts at 0 too; a head of λ_h = 0 stays as it is.
  """

  extra: ClassVar[tuple[str, ...]] = ("dex_matrix", "dex_lambda")
  has_lambda_init: ClassVar[bool] = True

  def _output(self, heads, x, lambda_init):
    lam = _given(self, lambda_init) + self._parameter(
      "dex_lambda", nn.initializers.zeros, x.shape[-1]
    )
    self._sow("metrics", "lambda", jnp.mean(lam))
    w = gather_and_cast(
      self._parameter("dex_matrix", nn.initializers.zeros, x.shape[-1]),
      "dex_matrix",
      jnp.float32,
    )
    return heads - jnp.einsum(
      "BTHV,HVU->BTHU", heads, (lam[:, None, None] * w).astype(heads.dtype)
    )


class GatedAttention(Attention):
  """Softmax attention whose heads' outputs are gated, sigmoid(x W_g) ∘ heads (Qiu et al., 2025, arXiv:2505.06708, elementwise).

  It has about as many parameters as version 2, and a gate per token as that has, but one map: a control for the difference.
  """

  extra: ClassVar[tuple[str, ...]] = ("head_gate",)

  def _output(self, heads, x, lambda_init):
    return self._gated(heads, x)


ATTENTION = {
  "softmax": Attention,
  "diff": DiffAttention,
  "diff_v2": DiffAttentionV2,
  "diff_v2_linear": DiffAttentionV2Linear,
  "diff_v2_gated": DiffAttentionV2Gated,
  "diff_per_token": DiffAttentionPerToken,
  "gated": GatedAttention,
  "dex": DexAttention,
}


def attention_class(config: ModelConfig) -> type[Attention]:
  """The layer that a config names.

  Raises:
    UserError: if there is none of that name, or the config gives a λ_init or noise maps that it cannot have.
  """
  if config.attention not in ATTENTION:
    raise UserError(
      f"config.model.attention = {config.attention!r}: must be one of {', '.join(ATTENTION)}"
    )
  kind = ATTENTION[config.attention]
  if config.num_noise_heads is not None and kind.num_maps == 1:
    raise UserError(
      f"config.model.num_noise_heads = {config.num_noise_heads}: {config.attention!r} has no noise map; leave it None"
    )
  lags = (
    config.lambda_init_offset > 0
  )  # that of layers above plain ones is negative, whatever they are
  for field, plain, is_given in (
    ("lambda_init", None, config.lambda_init is not None),
    ("lambda_init_offset", 0, lags),
  ):
    if is_given and not kind.has_lambda_init:
      having = " or ".join(
        repr(name) for name, other in ATTENTION.items() if other.has_lambda_init
      )
      given = f"config.model.{field} = {getattr(config, field)!r}"
      raise UserError(
        f"{given}: only attention = {having} has a λ_init; leave it {plain} for {config.attention!r}"
      )
  if issubclass(kind, DexAttention) and config.lambda_init == 0:
    raise UserError(
      "config.model.lambda_init = 0.0: must not be 0 for 'dex': with λ and W_D at 0 neither has a gradient"
    )
  if (
    issubclass(kind, DiffAttentionPerToken)
    and not 0 <= (config.lambda_init or 0) <= 1
  ):
    raise UserError(
      f"config.model.lambda_init = {config.lambda_init!r}: must lie between 0 and 1, as a sigmoid's λ does"
    )
  if (
    issubclass(kind, DiffAttentionPerToken)
    and config.lambda_init is None
    and lags
  ):
    raise UserError(
      f"config.model.lambda_init_offset = {config.lambda_init_offset}: must be 0, since a sigmoid's λ cannot be negative"
    )
  return kind


def map_sizes(
  kind: type[Attention],
  num_heads: int,
  num_noise_heads: int | None,
  head_dim: int,
  value_dim: int | None,
) -> dict[str, int]:
  """Q, G, M, V and U of a layer.

  Raises:
    ValueError: if its heads cannot share so many noise maps evenly.
  """
  groups = num_heads if num_noise_heads is None else num_noise_heads
  if kind.num_maps == 1 and num_noise_heads is not None:
    raise ValueError(
      f"num_noise_heads must be None for {kind.__name__}, which has one map; got {num_noise_heads}"
    )
  if groups < 1 or num_heads % groups:
    raise ValueError(
      f"num_noise_heads must divide num_heads = {num_heads}, or be None for one a head; got {num_noise_heads}"
    )
  maps = 1 if kind.num_maps == 1 else num_heads // groups + 1
  width = value_dim or kind.value_heads * head_dim
  return {
    "Q": groups,
    "G": maps,
    "M": kind.num_key_maps,
    "V": width,
    "U": width,
  }


def axis_sizes(config: ModelConfig) -> dict[str, int]:
  """The size of every axis of a decoder's parameters, by its letter."""
  maps = map_sizes(
    attention_class(config),
    config.num_heads,
    config.num_noise_heads,
    config.head_dim,
    config.value_dim,
  )
  return (
    {axis: getattr(config, field) for axis, field in FIELDS.items()}
    | maps
    | {"W": 3}
  )


def stacks(config: ModelConfig) -> dict[str, ModelConfig]:
  """The stacks of equal layers that a decoder consists of, from below: the name of their parameters, and the config of such a decoder."""
  kind, plain = attention_class(config), config.plain_layers
  if not plain:
    return {"layers": config}
  pattern = config.window_pattern * -(
    -config.num_layers // max(len(config.window_pattern), 1)
  )
  lower = dataclasses.replace(
    config,
    attention="softmax",
    num_heads=config.num_heads * kind.value_heads,
    num_kv_heads=config.num_kv_heads * kind.value_heads,
    num_noise_heads=None,
    head_norm=False,
    lambda_init=None,
    lambda_init_offset=0,
    num_layers=plain,
    plain_layers=0,
    window_pattern=pattern[:plain],
  )
  upper = dataclasses.replace(
    config,
    num_layers=config.num_layers - plain,
    plain_layers=0,
    window_pattern=pattern[plain:],
    lambda_init_offset=config.lambda_init_offset - plain,
  )
  return {"plain_layers": lower, "layers": upper}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """The shape of every parameter of a decoder, by name, without making one; those of the layers with their leading L. The names of plain
  layers' parameters begin with "plain_layers/".
  """
  shapes: dict[str, tuple[int, ...]] = {}
  for name, stack in stacks(config).items():
    prefix = "" if name == "layers" else f"{name}/"
    shapes |= {
      f"{prefix}{parameter}"
      if PARAMETERS[parameter].axes.startswith("L")
      else parameter: shape
      for parameter, shape in _stack_shapes(stack).items()
    }
  return shapes


def _stack_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  kind = attention_class(config)
  sizes = axis_sizes(config)
  layer = (
    "attention_norm",
    "query",
    "key",
    "value",
    "out",
    *kind.extra,
    "ffn_norm",
    "gate",
    "up",
    "down",
  )
  if config.ffn_activation == "poly_norm":
    layer += ("poly_weights", "poly_constant")
  biases = (
    tuple(name for name in PARAMETERS if name.endswith("_bias"))
    * config.projection_biases
  )
  shifts = tuple(name for name in PARAMETERS if name.endswith("_shift")) * (
    config.norm == "layer"
  )
  outer = (
    "embedding",
    *("unembedding",) * (not config.tie_embeddings),
    "final_norm",
  )
  names = (*outer, *layer, *biases, *shifts, *("head_gain",) * config.head_norm)
  return {
    name: tuple(sizes[axis] for axis in PARAMETERS[name].axes) for name in names
  }
