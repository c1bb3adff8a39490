"""Attention layers: the Transformer's, DIFF V1, DIFF V2 and their variants.

Each layer is a linen module that maps [B, T, E] to [B, T, E]. Its fields are
plain values, and `from_config` takes them from a `ModelConfig`. It needs no
mesh. A variant is a subclass of `Attention` with a name (`register`). It sets
class attributes, such as `has_noise_map`, and overrides methods:

  compute_lambda: where λ comes from.
  weights: the attention weights of queries and keys, which define the variant.
  compute_heads: how queries, keys and values become the outputs of the heads.
  scale_heads: which factor the outputs of the heads get.

docs/variants.md has two examples.

"The paper" is the Differential Transformer (Ye et al., 2024, arXiv:2410.05258).
`diffjax/parameters.py` defines the axis letters.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from diffjax.config import ModelConfig, UserError
from diffjax.int8 import dequantised
from diffjax.model.definition import broadcast_lambda, by_definition
from diffjax.model.registry import ATTENTION as ATTENTION
from diffjax.model.registry import layer_class_of, name_of
from diffjax.model.registry import register as register
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.reference import (
  attention_logits,
  masked_softmax,
  split_maps,
)
from diffjax.ops.rms_norm import rms_norm
from diffjax.ops.rope import Scaling, rope
from diffjax.parallel.product import gather_and_cast, product
from diffjax.parameters import PARAMETERS, Parameter
from diffjax.plots.styles import BLACK, BLUE, GREEN, PURPLE, RED, Style

# The name of the results of `Attention.project`, for the remat policies in
# decoder.py.
PROJECTED = "attention_projected"

# The standard deviation of a unit normal that is truncated at ±2.
_TRUNCATED_NORMAL_STD = 0.87962566103423978

# What a variant may support besides training, evaluation and generation, for
# `Attention.supports`.
CACHED_DECODING = "cached_decoding"  # Weights need no queries of other tokens.
CONTEXT_PARALLELISM = "context_parallelism"  # Several devices share a row.
WINDOWS = "windows"  # config.model.window
QUANTIZED_LOGITS = "quantized_logits"  # `weights` calls `logits`.
FEATURES = frozenset(
  {CACHED_DECODING, CONTEXT_PARALLELISM, WINDOWS, QUANTIZED_LOGITS}
)

# The matrices of every variant. Their sizes depend on the variant.
_COMMON_MATRICES = ("query", "key", "value", "out")
# A twin's feed-forward width is rounded to a multiple of this, so that it can
# be sharded.
FFN_MULTIPLE = 16

# The methods that define the weights of a variant.
_DEFINITION = frozenset({"weights", "maps", "logits"})
# All methods that determine what a layer computes.
_COMPUTATION = _DEFINITION | {
  "__call__",
  "attend",
  "compute_heads",
  "compute_lambda",
  "gate_heads",
  "lambda_logits",
  "project",
  "rotate",
  "scale_heads",
}

# λ_init of a layer: a float or a float32 scalar. Variants without λ_init ignore
# it, so there it may be None.
LambdaInit = Any
# λ of a layer in float32. None in variants without λ.
Lambda = Float[Array, ""] | Float[Array, "H"] | Float[Array, "B T H"] | None
KeysValues = tuple[Float[Array, "B T K M D"], Float[Array, "B T K V"]]


class HeadSizes(NamedTuple):
  """The sizes of a layer's axes, by the letters of `diffjax/parameters.py`.

  A map is a matrix of attention weights. A query group is one or more heads
  that share a noise map, which is subtracted from their own (signal) maps.
  Without noise maps, each head is a group of one map: Q = H and G = 1.

  Example: 8 heads, where two share a noise map: H = 8, Q = 4 and G = 3.
  """

  H: int  # heads
  Q: int  # query groups; the heads of a group share a noise map
  G: int  # maps of a query group: its heads' signal maps, then the noise map
  K: int  # key and value heads
  M: int  # key maps: 2 if noise maps have their own keys, else 1
  D: int  # width of queries and keys
  V: int  # width of values


class MaskArguments(NamedTuple):
  """The arguments of `attention_fn` that select the keys of each query.

  `Attention.attend` passes them on as keyword arguments:

    self.attention_fn(q, k, v, lam, **mask.keywords())

  Attributes:
    q_segment_ids: tokens attend to tokens with an equal id. None if each
      sequence is one document.
    kv_segment_ids: the ids of the keys, for self-attention the same array.
    causal: whether a token sees only itself and earlier tokens.
    window: how many keys a token sees, including its own. None for all keys.
  """

  q_segment_ids: Int[Array, "B T"] | None
  kv_segment_ids: Int[Array, "B S"] | None
  causal: bool
  window: int | None

  def keywords(self) -> dict[str, Any]:
    """Returns the fields as keyword arguments."""
    return self._asdict()


def lambda_init_schedule(layer: Int[Array, ...] | int) -> Float[Array, ...]:
  """Returns λ_init = 0.8 − 0.6·exp(−0.3·l) of layer l (paper, §2.1).

  Example: 0 → 0.2, 1 → 0.356, 2 → 0.471; it approaches 0.8.

  Args:
    layer: the number of the layer, or of several. The first layer is 0.
  """
  layer = jnp.asarray(layer, jnp.float32)
  return 0.8 - 0.6 * jnp.exp(-0.3 * layer)


def matrix_init(
  inputs: int, *, scale: float = 1.0
) -> nn.initializers.Initializer:
  """Returns an initializer: a truncated normal with scale/√inputs as its std.

  Args:
    inputs: how many numbers each output of the matrix sums over.
    scale: a factor on the standard deviation.
  """
  std = scale * inputs**-0.5
  # Truncation at ±2 reduces the standard deviation. The division undoes that.
  return nn.initializers.truncated_normal(std / _TRUNCATED_NORMAL_STD)


# Rows of the table of parameters that several variants have.
LAMBDA_HAT = Parameter("LEH", inputs="E")
HEAD_GATE = Parameter("LEHV", inputs="E")


@register("softmax")
class Attention(nn.Module):
  """Softmax attention, the Transformer baseline.

  y = concat_h(softmax(q kᵀ/√D) v) W_O

  `__call__` computes q, k and v, and then calls the methods that variants
  override. They may create parameters, because `__call__` is compact:

    compute_lambda → λ
    compute_heads → heads. Calls `attend`, which calls `attention_fn`, or
      multiplies `weights` with the values.
    scale_heads → heads times the variant's factor

  `weights` defines what `attend` computes: the weights times the values. The
  head norm, `scale_heads` and what `compute_heads` adds come after it.
  Measurements call `weights`. Training calls it too, unless the variant is
  `fused`.

  What a subclass declares in `fused` and `supports` is about its own methods.
  So a subclass that overrides `weights`, `maps` or `logits` does not inherit
  `fused`, and one that overrides any method of `_COMPUTATION` does not inherit
  `supports`. It declares them again. One that overrides only a helper of its
  parent must check whether they still hold. No subclass inherits `style` and
  `model_name`.

  Initialization: matrices are truncated normals of standard deviation
  1/√inputs, and `out` is also multiplied by `out_scale`. Gains are 1 and biases
  are 0.

  Attributes:
    num_heads: the number of heads, H.
    head_dim: the width of queries and keys, D.
    value_dim: the width of values, V. None for `value_dim_factor` · D.
    num_kv_heads: the number of key and value heads, K. It divides the number of
      query groups, Q. None for Q.
    num_noise_heads: the number of noise maps, which is Q. It divides H. Each
      noise map is subtracted from the maps of H/Q heads (grouped differential
      attention, arXiv:2510.06949). None for H. Only for variants with noise
      maps.
    head_norm: whether each head's output is normalized by an RMSNorm. All heads
      share its gain of width V.
    causal: whether a token sees only itself and earlier tokens.
    window: how many keys a token sees, including its own (see
      `diff_attention`). None for all keys.
    rope: whether queries and keys get rotary position embeddings.
    rope_base: base of the rotary angles.
    rope_scaling: how the angles are scaled for longer sequences than in
      training (see `Scaling`). None for unscaled.
    rope_dim: how many of a head's D numbers are rotated. These are the last
      ones, as in multi-head latent attention. Pairs are (j, j + rope_dim/2)
      among them. None for all.
    projection_biases: whether the query, key, value and output projections have
      biases.
    norm_eps: ε of the head norm.
    out_scale: a factor on the initial output projection.
    dtype: compute dtype. Parameters are float32.
    attention_fn: has the signature of `diff_attention`. With a mesh, this is
      `functools.partial(diff_attention, sharding=…)` of `sharded_attention`
      (parallel/mesh.py). The decoder may wrap it in a `WindowSwitch`.
    logits_transform: a function of the logits [B, Q, G, T, S] and of `mask`
      [B, T, S], which `logits` applies, for example a quantization. The layer
      is then computed from `weights`. Only for variants that support it.
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
  logits_transform: Callable[..., jax.Array] | None = None

  # Whether `diff_attention` computes `weights` @ v for the variant's q, k
  # and λ.
  fused: ClassVar[bool] = True
  # What works besides training, evaluation and generation: some of `FEATURES`.
  supports: ClassVar[Set[str]] = FEATURES
  # Properties of a variant.
  has_noise_map: ClassVar[bool] = False  # whether λ times a map is subtracted
  num_key_maps: ClassVar[int] = 1  # M
  value_dim_factor: ClassVar[int] = 1  # V / D if value_dim is None
  # The parameters that `Attention` lacks, for the table in parameters.py. A
  # subclass lists all.
  extra_parameters: ClassVar[Mapping[str, Parameter]] = {}
  # The sizes of axes that only these parameters have, by letter.
  extra_axes: ClassVar[Mapping[str, int]] = {}
  has_lambda_init: ClassVar[bool] = False
  # The weights as a sum of `maps`, for the titles of figures.
  weights_formula: ClassVar[str] = "A"
  # How figures show the variant: its label, colour and marker. Without a style,
  # it gets the next free one (`variant_styles.style`).
  style: ClassVar[Style | None] = Style("Transformer", BLACK, "o")
  # What model cards call a model of this variant. None for the variant's name.
  model_name: ClassVar[str | None] = "Transformer"

  def __init_subclass__(cls, **kwargs: Any) -> None:
    """Resets declarations that are not about the subclass's own methods."""
    declared = vars(cls)
    overridden = cls._overridden_methods()
    if "fused" not in declared and overridden & _DEFINITION:
      cls.fused = False
    if "supports" not in declared and overridden:
      cls.supports = frozenset()
    if "style" not in declared:
      cls.style = None
    if "model_name" not in declared:
      cls.model_name = None
    unknown = set(cls.supports) - FEATURES
    if unknown:
      raise ValueError(
        f"{cls.__name__}.supports has {min(unknown)!r}: must be some of"
        f" {', '.join(sorted(FEATURES))}"
      )
    super().__init_subclass__(**kwargs)

  @classmethod
  def _overridden_methods(cls) -> set[str]:
    """Returns which methods of `_COMPUTATION` differ from the parent class's.

    Methods of a mixin count. The wrappers of Flax do not, such as those of
    `nn.remat(DiffAttention)`.
    """
    parent = next(
      base for base in cls.__mro__[1:] if issubclass(base, Attention)
    )
    overridden = set()
    for name in _COMPUTATION:
      method = inspect.unwrap(getattr(cls, name))
      parent_method = inspect.unwrap(getattr(parent, name))
      if method is not parent_method:
        overridden.add(name)
    return overridden

  @classmethod
  def check(cls, config: ModelConfig) -> None:
    """Checks that this variant can be built from the config.

    `attention_class` calls this. A subclass may check more, after
    `super().check(config)`.

    Raises:
      UserError: if the config sets a field that this variant lacks or does not
        support.
    """
    if config.num_noise_heads is not None and not cls.has_noise_map:
      raise UserError(
        f"config.model.num_noise_heads = {config.num_noise_heads}:"
        f" {config.attention!r} has no noise map; leave it None"
      )
    if config.lambda_init is not None and not cls.has_lambda_init:
      raise UserError(
        f"config.model.lambda_init = {config.lambda_init}:"
        f" {config.attention!r} has no λ_init; leave it None"
      )
    if config.window is not None and WINDOWS not in cls.supports:
      raise UserError(
        f"config.model.window = {config.window}: {config.attention!r} does not"
        " declare that it supports windows; leave it None, or add 'windows' to"
        f" {cls.__name__}.supports"
      )
    implementation = config.attention_implementation
    if not cls.fused and implementation != "auto":
      raise UserError(
        f"config.model.attention_implementation = {implementation!r}: must be"
        f" 'auto' for {config.attention!r}, which is computed from its weights"
      )
    # An offset shifts the schedule of λ_init. Only positive ones are errors,
    # because users set them. `stacks` makes negative ones, for all variants.
    if config.lambda_init_offset > 0 and not cls.has_lambda_init:
      raise UserError(
        f"config.model.lambda_init_offset = {config.lambda_init_offset}:"
        f" {config.attention!r} has no λ_init; leave it 0"
      )

  @classmethod
  def from_config(cls, config: ModelConfig, **fields: Any) -> Attention:
    """Returns an attention layer of the decoder with this config.

    Args:
      config: the decoder's config.
      fields: the layer's fields that differ between layers, such as `window`,
        or that the caller chooses, such as `dtype` and `name`.
    """
    rope_scaling = None
    if config.rope_scaling != "none":
      rope_scaling = Scaling(
        config.rope_scaling, config.rope_factor, config.rope_original_length
      )
    norm_eps = config.head_norm_eps
    if norm_eps is None:  # The head norm has the ε of the other norms.
      norm_eps = config.norm_eps
    return cls(
      num_heads=config.num_heads,
      head_dim=config.head_dim,
      value_dim=config.value_dim,
      num_kv_heads=config.num_kv_heads,
      num_noise_heads=config.num_noise_heads,
      head_norm=config.head_norm,  # The variant's default is not used.
      causal=config.causal,
      rope=config.rope,
      rope_base=config.rope_base,
      rope_scaling=rope_scaling,
      rope_dim=config.rope_dim,
      projection_biases=config.projection_biases,
      norm_eps=norm_eps,
      **fields,
    )

  @classmethod
  def twin(cls, config: ModelConfig) -> ModelConfig:
    """Returns the config changed to this variant, with as many parameters.

    All heads together keep the width of their values: a variant with V = D gets
    twice the heads of one with V = 2D, such as DIFF V1. `head_norm` is the
    variant's default. The feed-forward layer gives up as many elements as the
    matrices of attention gain. Its width is rounded to a multiple of
    `FFN_MULTIPLE`. Vectors, such as gains and DIFF V1's four λ vectors, are not
    counted, so the numbers of parameters differ by these and by the rounding.

    Example: DIFF V1 with E = 2048 and 8 heads of D = 128 becomes DIFF V2 with
    16 heads. That adds E × E for the queries and E × 16 for λ in each layer.
    The feed-forward layer has three matrices of E × F, so F shrinks by
    (2048 + 16) / 3 = 688.

    Args:
      config: the config of another variant, usually of DIFF V1.

    Raises:
      UserError: if the heads cannot be divided, if nothing would be left of the
        feed-forward layer, or if this variant does not support the config.
    """
    source_class = attention_class(config)
    fields: dict[str, Any] = {
      "attention": name_of(cls),
      "head_norm": cls.head_norm,
    }
    if not cls.has_lambda_init:
      fields.update(lambda_init=None, lambda_init_offset=0)

    # num_heads · value_dim_factor stays, and so does num_heads · value_dim.
    factor = cls.value_dim_factor
    source_factor = source_class.value_dim_factor
    for field in ("num_heads", "num_kv_heads", "num_noise_heads"):
      fields[field] = _rescale(config, field, source_factor, factor)
    if not cls.has_noise_map:
      fields["num_noise_heads"] = None
    fields["value_dim"] = _rescale(config, "value_dim", factor, source_factor)

    twin_config = dataclasses.replace(config, **fields)
    cls.check(twin_config)
    num_added = cls._num_matrix_elements(twin_config)
    num_added -= source_class._num_matrix_elements(config)
    if num_added == 0:
      return twin_config
    return _narrow_ffn(twin_config, num_added)

  @classmethod
  def _num_matrix_elements(cls, config: ModelConfig) -> int:
    """Returns how many elements the matrices of one layer's attention have."""
    layer = cls.from_config(config, parent=None)
    sizes = layer.axis_sizes(config.embed_dim)
    parameters = [PARAMETERS[name] for name in _COMMON_MATRICES]
    parameters += cls.extra_parameters.values()
    total = 0
    for parameter in parameters:
      if parameter.inputs:  # a matrix
        axes = parameter.axes.removeprefix("L")
        total += math.prod(sizes[axis] for axis in axes)
    return total

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B T E"],
    lambda_init: LambdaInit = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    keys_values: KeysValues | None = None,
  ) -> Float[Array, "B T E"]:
    """Returns self-attention, or attention to the keys of another layer.

    Args:
      x: input.
      lambda_init: λ_init of this layer, for variants that have one. See
        `lambda_init_schedule`.
      segment_ids: tokens attend to tokens with an equal id. None if each
        sequence is one document.
      positions: positions for RoPE. None for 0 … T−1.
      keys_values: the keys and values of another layer for the same tokens, as
        its `attention_fn` receives them (keys after RoPE). This layer then has
        no parameters for keys and values. Phi-4-mini-flash has such layers.

    Raises:
      ValueError: if lambda_init is missing, if keys_values do not have this
        layer's shapes, or if the layer's sizes contradict each other.
    """
    if self.has_lambda_init and lambda_init is None:
      raise ValueError(
        f"{type(self).__name__} needs lambda_init:"
        " pass lambda_init_schedule(layer) or a constant such as 0.8"
      )
    B, T, E = x.shape
    sizes = self.head_sizes()
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    x = x.astype(self.dtype)

    q = self.project("query", x, (sizes.Q, sizes.G, sizes.D))  # [B, T, Q, G, D]
    q = self.rotate(q, positions)
    if keys_values is None:
      k = self.project("key", x, (sizes.K, sizes.M, sizes.D))  # [B, T, K, M, D]
      k = self.rotate(k, positions)
      v = self.project("value", x, (sizes.K, sizes.V))  # [B, T, K, V]
    else:
      k, v = keys_values
      _check_shape("keys", k, "K, M, D", (sizes.K, sizes.M, sizes.D))
      _check_shape("values", v, "K, V", (sizes.K, sizes.V))
    self._record("intermediates", "query", q)
    self._record("intermediates", "key", k)

    lam = self.compute_lambda(x, lambda_init)  # None, scalar, [H] or [B, T, H]
    if self.has_noise_map and lam is None:
      raise ValueError(
        f"{type(self).__name__} has a noise map, so compute_lambda must return"
        " λ, the factor of it; got None"
      )
    if lam is not None:
      self.record_metric("lambda", jnp.mean(lam))

    mask = MaskArguments(
      q_segment_ids=segment_ids,
      kv_segment_ids=segment_ids,
      causal=self.causal,
      window=self.window,
    )
    heads = self.compute_heads(q, k, v, lam, mask)  # [B, T, H, V]
    heads = self.scale_heads(heads, x, lambda_init)  # [B, T, H, V]
    return self.project("out", heads, (E,), scale=self.out_scale)  # [B, T, E]

  def compute_lambda(
    self, x: Float[Array, "B T E"], lambda_init: LambdaInit
  ) -> Lambda:
    """Returns λ, or None for variants without λ."""
    return None

  def compute_heads(
    self,
    q: Float[Array, "B T Q G D"],
    k: Float[Array, "B T K M D"],
    v: Float[Array, "B T K V"],
    lam: Lambda,
    mask: MaskArguments,
  ) -> Float[Array, "B T H V"]:
    """Returns the outputs of the heads, before `scale_heads`.

    Applies attention, and then an RMSNorm to each head if `head_norm` is set.
    The norm's gain [V] is a parameter that all heads share.

    Args:
      q: queries after RoPE. If G is 2 or more, a group's last map is its noise
        map.
      k: keys after RoPE. M is 2 if noise maps have their own keys.
      v: values.
      lam: the result of `compute_lambda`: the factor of the noise maps, or of
        the correction in `DexAttention`.
      mask: selects the keys that each query sees.
    """
    heads = self.attend(q, k, v, lam, mask)  # [B, T, H, V]
    if not self.head_norm:
      return heads
    value_dim = heads.shape[-1]
    gain = self.param("head_gain", nn.initializers.ones, (value_dim,))
    return rms_norm(heads, gain, self.norm_eps)

  def scale_heads(
    self,
    heads: Float[Array, "B T H V"],
    x: Float[Array, "B T E"],
    lambda_init: LambdaInit,
  ) -> Float[Array, "B T H V"]:
    """Returns the outputs of the heads times the variant's factor.

    The factor is 1 here. In a variant, it is a number, or a gate of the shape
    of `heads`.

    Args:
      heads: the outputs of the heads.
      x: the input of `__call__` in the compute dtype, for the gate.
      lambda_init: λ_init of this layer, for variants that have one.
    """
    return heads

  def attend(
    self,
    q: Float[Array, "B T Q G D"],
    k: Float[Array, "B T K M D"],
    v: Float[Array, "B T K V"],
    lam: Lambda,
    mask: MaskArguments,
  ) -> Float[Array, "B T H V"]:
    """Returns the heads: `weights` @ v, by the variant's fastest means.

    This is a method so that `nn.intercept_methods` can measure the attention of
    a layer (`diffjax/evals/methods/inside.py`).

    Raises:
      ValueError: if the layer has an option that its variant does not support,
        or if the result has another shape than the heads.
    """
    attention_fn = self.attention_fn
    if self.logits_transform is not None:
      self._check_support(QUANTIZED_LOGITS, "logits_transform")
      if mask.q_segment_ids is not None:
        # Segment 0 is padding in evaluations. Padding must not influence the
        # scales of a quantization, so it sees no key: no key has the id −1.
        is_padding = mask.q_segment_ids == 0
        hidden_ids = jnp.where(is_padding, -1, mask.q_segment_ids)
        mask = mask._replace(q_segment_ids=hidden_ids)
    if mask.window is not None:
      self._check_support(WINDOWS, "window")
    if not self.fused or self.logits_transform is not None:
      attention_fn = by_definition(attention_fn, self.weights, self.supports)
      lam = broadcast_lambda(lam, q, self.num_heads)
    heads = attention_fn(q, k, v, lam, **mask.keywords())
    if heads.shape[2] != self.num_heads:
      raise ValueError(
        f"{type(self).__name__} has {self.num_heads} heads, but its attention"
        f" has {heads.shape[2]}; check head_sizes() and weights()"
      )
    return heads

  def weights(
    self,
    q: Float[Array, "B T Q G D"],
    k: Float[Array, "B S K M D"],
    lam: Float[Array, "B T H"] | None,
    mask: Bool[Array, "B T S"],
  ) -> Float[Array, "B H T S"]:
    """Returns the attention weights of each head: the variant's definition.

    `attend` returns these weights times the values. A parameter of the weights
    comes from `parameter`.

    T and S are usually equal. If the variant supports cached decoding, then q
    may also have only some of the queries, with their rows of the mask.

    Args:
      q: queries after RoPE.
      k: keys after RoPE.
      lam: the result of `compute_lambda` for each token and head, in float32.
        It has further axes if that result has.
      mask: whether a query sees a key. Causality, documents and windows are
        part of it.
    """
    maps = masked_softmax(self.logits(q, k, mask), mask)  # [B, Q, G, T, S]
    if not self.has_noise_map:
      return maps[:, :, 0]
    assert lam is not None  # A variant with a noise map has its factor.
    signal_maps, noise_maps = split_maps(maps)
    return signal_maps - _per_query(lam) * noise_maps

  def maps(
    self,
    q: Float[Array, "B T Q G D"],
    k: Float[Array, "B S K M D"],
    lam: Float[Array, "B T H"] | None,
    mask: Bool[Array, "B T S"],
  ) -> dict[str, Float[Array, "B H T S"]]:
    """Returns the terms that the weights consist of, for figures.

    `weights_formula` has the same titles. A variant with one map returns no
    terms.

    Args:
      q: queries after RoPE.
      k: keys after RoPE.
      lam: as in `weights`.
      mask: as in `weights`.
    """
    if not self.has_noise_map:
      return {}
    assert lam is not None
    maps = masked_softmax(self.logits(q, k, mask), mask)  # [B, Q, G, T, S]
    signal_maps, noise_maps = split_maps(maps)
    return {"A₁": signal_maps, "λA₂": _per_query(lam) * noise_maps}

  def logits(
    self,
    q: Float[Array, "B T Q G D"],
    k: Float[Array, "B S K M D"],
    mask: Bool[Array, "B T S"],
  ) -> Float[Array, "B Q G T S"]:
    """Returns q·k/√D of all maps before any mask, in float32.

    Args:
      q: queries after RoPE.
      k: keys after RoPE. M is 1 if all maps share them, or G.
      mask: as in `weights`, for `logits_transform`.
    """
    logits = attention_logits(q, k)
    if self.logits_transform is None:
      return logits
    return self.logits_transform(logits, mask)

  def parameter(
    self, name: str, init: nn.initializers.Initializer | None = None
  ) -> jax.Array:
    """Returns a parameter of `extra_parameters` in float32, as a whole.

    Its shape follows from its axes. Use this in `weights`, `maps` and `logits`,
    which measurements call in loops. In other methods, `self.param` also works.
    A mesh's parts of it are collected along the fsdp axis. Large matrices that
    multiply tokens should use `project`, which does that in the compute dtype.

    Args:
      name: a name in `extra_parameters`.
      init: draws the initial values. None for a truncated normal of standard
        deviation 1/√inputs, for matrices.

    Raises:
      ValueError: if the parameter is not declared, or has no initialization.
    """
    if name not in self.extra_parameters:
      raise ValueError(
        f"{type(self).__name__} has no parameter {name!r}: add it to"
        " extra_parameters with its axes"
      )
    if self.is_initializing() and not self.has_variable("params", name):
      declared = self.extra_parameters[name]
      query: Any = self.get_variable("params", "query")  # [E, Q, G, D]
      sizes = self.axis_sizes(embed_dim=query.shape[0])
      if init is None and not declared.inputs:
        raise ValueError(f"parameter {name!r} is no matrix, so it needs init")
      if init is None:
        init = matrix_init(math.prod(sizes[axis] for axis in declared.inputs))
      shape = [sizes[axis] for axis in declared.axes.removeprefix("L")]
      self.param(name, init, tuple(shape))
    value: Any = self.get_variable("params", name)
    if value is None:
      raise ValueError(f"the parameters lack {name!r} of {type(self).__name__}")
    return gather_and_cast(dequantised(value), name, jnp.float32)

  def axis_sizes(self, embed_dim: int) -> dict[str, int]:
    """Returns the sizes of the axes that this layer's parameters can have.

    The keys are the letters of `diffjax/parameters.py`, without L. A variant
    overrides this if the size of one of its `extra_axes` depends on the config.

    Args:
      embed_dim: the model width, E.
    """
    sizes = self.head_sizes()._asdict()
    sizes["U"] = sizes["V"]  # for the square matrix [V, U] of DEX
    sizes["E"] = embed_dim
    return {**sizes, **self.extra_axes}

  def _check_support(self, feature: str, option: str) -> None:
    """Raises ValueError if the variant does not support a feature.

    Args:
      feature: one of `FEATURES`.
      option: the layer's field that needs it.
    """
    if feature not in self.supports:
      raise ValueError(
        f"{option}: {type(self).__name__} does not declare that it supports"
        f" {feature}; add it to {type(self).__name__}.supports if it does"
      )

  def head_sizes(self) -> HeadSizes:
    """Returns the sizes of this layer's axes, with all defaults filled in.

    Each head has an attention map, its signal map. In a variant with noise
    maps, a noise map is subtracted from it. The heads that share a noise map
    are a query group.

    Example:
      8 heads and 4 noise maps make Q = 4 groups of G = 3 maps: the signal maps
      of two heads, and the noise map that they share.
      8 heads without noise maps make Q = 8 groups of G = 1 map.

    Raises:
      ValueError: if num_noise_heads is set for a variant without noise maps, or
        does not divide num_heads. `diff_attention` checks num_kv_heads.
    """
    if not self.has_noise_map and self.num_noise_heads is not None:
      raise ValueError(
        f"num_noise_heads must be None for {type(self).__name__}, which has no"
        f" noise map; got {self.num_noise_heads}"
      )
    num_query_groups = self.num_noise_heads
    if num_query_groups is None:
      num_query_groups = self.num_heads
    if num_query_groups < 1 or self.num_heads % num_query_groups != 0:
      raise ValueError(
        f"num_noise_heads must divide num_heads = {self.num_heads},"
        f" or be None for one noise map per head; got {self.num_noise_heads}"
      )
    # Each head of a group has a signal map.
    maps_per_group = self.num_heads // num_query_groups
    if self.has_noise_map:
      maps_per_group += 1  # the noise map that these heads share

    num_kv_heads = self.num_kv_heads
    if num_kv_heads is None:
      num_kv_heads = num_query_groups
    value_dim = self.value_dim
    if value_dim is None:
      value_dim = self.value_dim_factor * self.head_dim
    return HeadSizes(
      H=self.num_heads,
      Q=num_query_groups,
      G=maps_per_group,
      K=num_kv_heads,
      M=self.num_key_maps,
      D=self.head_dim,
      V=value_dim,
    )

  def project(
    self,
    name: str,
    x: Float[Array, "B T *inputs"],
    output_shape: tuple[int, ...],
    *,
    scale: float = 1.0,
  ) -> Float[Array, "B T *outputs"]:
    """Returns the projection x W of each token, plus a bias if configured.

    Creates the parameters: W [*inputs, *outputs] and, if `projection_biases` is
    set, the bias [*outputs]. Only the query, key, value and output projections
    have biases.

    Example:
      project("query", x, (Q, G, D)) maps [B, T, E] to [B, T, Q, G, D] with the
      parameters "query" [E, Q, G, D] and maybe "query_bias" [Q, G, D].

    Args:
      name: the name of W. The name of the bias is f"{name}_bias".
      x: the input. The product sums over all axes after B and T.
      output_shape: the axes of the result after B and T.
      scale: a factor on the standard deviation of the initial W.
    """
    input_shape = x.shape[2:]
    init = matrix_init(math.prod(input_shape), scale=scale)
    matrix = self.param(name, init, (*input_shape, *output_shape))
    # Casts the matrix to x's dtype. The name determines how a mesh splits it.
    y = product(x, matrix, name)  # [B, T, *outputs]
    if self.projection_biases and name in _COMMON_MATRICES:
      bias = self.param(f"{name}_bias", nn.initializers.zeros, output_shape)
      y += bias.astype(y.dtype)
    # Remat policies select the arrays that they save by such names.
    return checkpoint_name(y, PROJECTED)

  def rotate(
    self, x: Float[Array, "B T *heads D"], positions: Int[Array, "B T"]
  ) -> Float[Array, "B T *heads D"]:
    """Returns queries or keys with RoPE, or unchanged if `rope` is False.

    RoPE rotates pairs of a head's D numbers by angles that grow with the
    position. If `rope_dim` is set, only the last `rope_dim`
    numbers are rotated.

    Args:
      x: queries or keys.
      positions: the position of each token in its document.

    Raises:
      ValueError: if `rope_dim` is odd or not from 2 to D.
    """
    if not self.rope:
      return x
    num_unrotated = 0
    if self.rope_dim is not None:
      if self.rope_dim not in range(2, self.head_dim + 1, 2):
        raise ValueError(
          f"rope_dim must be even and from 2 to head_dim = {self.head_dim},"
          f" or None for all; got {self.rope_dim}"
        )
      num_unrotated = self.head_dim - self.rope_dim
    if num_unrotated == 0:
      return rope(x, positions, self.rope_base, self.rope_scaling)
    rotated = rope(
      x[..., num_unrotated:], positions, self.rope_base, self.rope_scaling
    )
    return jnp.concatenate([x[..., :num_unrotated], rotated], axis=-1)

  def lambda_logits(self, x: Float[Array, "B T E"]) -> Float[Array, "B T H"]:
    """Returns x W_λ, one number for each token and head, as float32.

    Variants compute λ from it, most of them as its sigmoid, between 0 and 1.
    W_λ [E, H] is the parameter "lambda_hat".
    """
    embed_dim = x.shape[-1]
    shape = (embed_dim, self.num_heads)
    lambda_hat = self.param("lambda_hat", matrix_init(embed_dim), shape)
    # On a mesh, each device stores a part of the matrix. `product` would also
    # gather it, but it rounds its result to the compute dtype.
    lambda_hat = gather_and_cast(lambda_hat, "lambda_hat", self.dtype)
    return jnp.einsum(
      "BTE,EH->BTH", x, lambda_hat, preferred_element_type=jnp.float32
    )

  def gate_heads(
    self, heads: Float[Array, "B T H V"], x: Float[Array, "B T E"]
  ) -> Float[Array, "B T H V"]:
    """Returns sigmoid(x W_g) ∘ heads, for gated variants.

    Each number of a head's output has its own gate, between 0 and 1. W_g
    [E, H, V] is the parameter "head_gate".
    """
    H, V = heads.shape[2:]
    gate_logits = self.project("head_gate", x, (H, V))
    return heads * jax.nn.sigmoid(gate_logits)

  def record_metric(self, name: str, value: jax.Array) -> None:
    """Makes training log a value of this layer, as `NAME/layer_00` and so on.

    Every method of the computation may call it, also `weights`.

    Args:
      name: the name of the metric.
      value: a number, or an array whose mean is logged.
    """
    self._record("metrics", name, value)

  def _record(self, collection: str, name: str, value: jax.Array) -> None:
    """Sows a value if the caller of `apply` made the collection mutable.

    The collections are "metrics", which training reads, and "intermediates".
    `init` would return the value together with the parameters, so nothing is
    sown there.
    """
    if not self.is_initializing():
      self.sow(collection, name, value)


@register("diff")
class DiffAttention(Attention):
  """DIFF attention, version 1 (paper, eq. 1–3).

  head = (1 − λ_init) · RMSNorm((A₁ − λA₂) v)
  λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init

  A₁ and A₂ are the head's signal map and noise map, softmax(q kᵀ/√D). Values
  are 2D wide. The paper's layers have half as many heads as a Transformer with
  the same head_dim; set `num_heads` accordingly. λ is one float32 number per
  layer. Its four vectors start from N(0, 0.1²). Without `head_norm` the factor
  (1 − λ_init) stays, because the paper's ablation removes only the
  normalization.
  """

  head_norm: bool = True

  style: ClassVar[Style | None] = Style("DIFF", RED, "s")
  model_name: ClassVar[str | None] = "DIFF Transformer (V1)"
  has_noise_map: ClassVar[bool] = True
  num_key_maps: ClassVar[int] = 2
  value_dim_factor: ClassVar[int] = 2
  extra_parameters: ClassVar[Mapping[str, Parameter]] = {
    "lambda_q1": Parameter("LD"),
    "lambda_k1": Parameter("LD"),
    "lambda_q2": Parameter("LD"),
    "lambda_k2": Parameter("LD"),
  }
  has_lambda_init: ClassVar[bool] = True
  weights_formula: ClassVar[str] = "A₁ − λA₂"
  supports: ClassVar[Set[str]] = FEATURES

  def compute_lambda(
    self, x: Float[Array, "B T E"], lambda_init: LambdaInit
  ) -> Lambda:
    """Returns λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init, one number."""
    init = nn.initializers.normal(0.1)
    shape = (self.head_dim,)
    q1 = self.param("lambda_q1", init, shape)
    k1 = self.param("lambda_k1", init, shape)
    q2 = self.param("lambda_q2", init, shape)
    k2 = self.param("lambda_k2", init, shape)
    return jnp.exp(jnp.dot(q1, k1)) - jnp.exp(jnp.dot(q2, k2)) + lambda_init

  def scale_heads(
    self,
    heads: Float[Array, "B T H V"],
    x: Float[Array, "B T E"],
    lambda_init: LambdaInit,
  ) -> Float[Array, "B T H V"]:
    """Returns (1 − λ_init) · heads, as in the paper's eq. 3."""
    return heads * jnp.asarray(1.0 - lambda_init, heads.dtype)


@register("diff_v2")
class DiffAttentionV2(Attention):
  """DIFF attention, version 2 (authors' post on V2, 2026-01-20).

  head = (A₁ − λA₂) v
  λ = sigmoid(x W_λ), one number per token and head

  A₁ and A₂ are the head's signal map and noise map, softmax(q kᵀ/√D). They
  share keys and values. The post's layers have as many heads as the Transformer
  baseline. There is no λ_init, and by default no head norm.
  """

  style: ClassVar[Style | None] = Style("DIFF V2", BLUE, "^")
  model_name: ClassVar[str | None] = "DIFF Transformer V2"
  has_noise_map: ClassVar[bool] = True
  extra_parameters: ClassVar[Mapping[str, Parameter]] = {
    "lambda_hat": LAMBDA_HAT
  }
  weights_formula: ClassVar[str] = "A₁ − λA₂"
  supports: ClassVar[Set[str]] = FEATURES

  def compute_lambda(
    self, x: Float[Array, "B T E"], lambda_init: LambdaInit
  ) -> Lambda:
    return jax.nn.sigmoid(self.lambda_logits(x))


@register("diff_v2_linear")
class DiffAttentionV2Linear(DiffAttentionV2):
  """Version 2 with λ = x W_λ, which is unbounded.

  This is an ablation from the authors' post on V2 (2026-01-20).
  """

  style: ClassVar[Style | None] = Style("DIFF V2 with linear λ", BLUE, "^")
  supports: ClassVar[Set[str]] = FEATURES

  def compute_lambda(
    self, x: Float[Array, "B T E"], lambda_init: LambdaInit
  ) -> Lambda:
    return self.lambda_logits(x)


@register("diff_v2_gated")
class DiffAttentionV2Gated(DiffAttentionV2):
  """Version 2 with a gate on the outputs of the heads.

  head = sigmoid(x W_g) ∘ (A₁ − λA₂) v

  With shared noise maps (`num_noise_heads` < `num_heads`), this resembles the
  attention of Motif-3 (docs/family.md lists the differences).
  """

  style: ClassVar[Style | None] = Style("DIFF V2 with gates", BLUE, "X")
  extra_parameters: ClassVar[Mapping[str, Parameter]] = {
    "lambda_hat": LAMBDA_HAT,
    "head_gate": HEAD_GATE,
  }
  supports: ClassVar[Set[str]] = FEATURES

  def scale_heads(
    self,
    heads: Float[Array, "B T H V"],
    x: Float[Array, "B T E"],
    lambda_init: LambdaInit,
  ) -> Float[Array, "B T H V"]:
    return self.gate_heads(heads, x)


@register("diff_per_token")
class DiffAttentionPerToken(DiffAttention):
  """Version 1 with one λ per token and head, as in version 2.

  λ = sigmoid(x W_λ + logit(λ_init)), which is λ_init if x W_λ = 0

  The rest is as in version 1: separate keys of the two maps, the head norm, and
  the factor (1 − λ_init).
  """

  style: ClassVar[Style | None] = Style("DIFF with λ per token", RED, "P")
  extra_parameters: ClassVar[Mapping[str, Parameter]] = {
    "lambda_hat": LAMBDA_HAT
  }
  supports: ClassVar[Set[str]] = FEATURES

  @classmethod
  def check(cls, config: ModelConfig) -> None:
    """Checks that every λ_init is in [0, 1], the range of a sigmoid.

    λ = sigmoid(x W_λ + logit(λ_init)) starts at λ_init. For 0 and 1 the logit
    is infinite, so λ stays there during training.

    Raises:
      UserError: if a λ_init is outside this range.
    """
    super().check(config)
    lambda_init = config.lambda_init
    if lambda_init is not None and not 0 <= lambda_init <= 1:
      raise UserError(
        f"config.model.lambda_init = {lambda_init}:"
        f" must be between 0 and 1 for {config.attention!r},"
        " because its λ is a sigmoid"
      )
    # The schedule is negative before layer 0. An offset of 1 shifts it by one
    # layer, so that layer 0 would have λ_init = −0.01.
    if lambda_init is None and config.lambda_init_offset > 0:
      raise UserError(
        f"config.model.lambda_init_offset = {config.lambda_init_offset}:"
        f" must be 0 for {config.attention!r}, because its λ is a sigmoid"
        " and cannot be negative"
      )

  def compute_lambda(
    self, x: Float[Array, "B T E"], lambda_init: LambdaInit
  ) -> Lambda:
    # The inverse of the sigmoid, so that λ is λ_init if x W_λ is 0.
    offset = jax.scipy.special.logit(lambda_init)
    return jax.nn.sigmoid(self.lambda_logits(x) + offset)


@register("dex")
class DexAttention(Attention):
  """Softmax attention with a learned correction of its output O (DEX).

  head = O − λ · O W
  λ = λ_init + dex_lambda, one number per head

  O is a head's output, after the head norm if there is one. W [V, V] is the
  parameter "dex_matrix", which the heads of a layer share. W and dex_lambda
  start at 0. DEX adapts a trained Transformer (Kong et al., 2025,
  arXiv:2505.16333), and the adapted model starts as that Transformer. λ is
  trained, so a head can also return to λ = 0, which is no correction.
  """

  style: ClassVar[Style | None] = Style("DEX", PURPLE, "*")
  extra_parameters: ClassVar[Mapping[str, Parameter]] = {
    "dex_matrix": Parameter("LVU", inputs="V", shared="H"),
    "dex_lambda": Parameter("LH"),
  }
  supports: ClassVar[Set[str]] = FEATURES
  has_lambda_init: ClassVar[bool] = True

  @classmethod
  def check(cls, config: ModelConfig) -> None:
    """Checks that λ_init is not 0.

    Otherwise both factors of the correction, λ and O W, would start at 0.
    Neither would then have a gradient.

    Raises:
      UserError: if λ_init is 0.
    """
    super().check(config)
    if config.lambda_init == 0:
      raise UserError(
        f"config.model.lambda_init = {config.lambda_init}:"
        f" must not be 0 for {config.attention!r},"
        " because dex_lambda and dex_matrix would have no gradient"
      )

  def compute_lambda(
    self, x: Float[Array, "B T E"], lambda_init: LambdaInit
  ) -> Lambda:
    """Returns λ = λ_init + dex_lambda, one number per head."""
    zeros = nn.initializers.zeros
    dex_lambda = self.param("dex_lambda", zeros, (self.num_heads,))
    return lambda_init + dex_lambda

  def compute_heads(
    self,
    q: Float[Array, "B T Q G D"],
    k: Float[Array, "B T K M D"],
    v: Float[Array, "B T K V"],
    lam: Lambda,
    mask: MaskArguments,
  ) -> Float[Array, "B T H V"]:
    """Returns O − λ · O W: softmax attention minus DEX's correction.

    DEX adapts a trained Transformer. It multiplies the output O of each head by
    a learned matrix W, which starts at 0, and subtracts λ times the product.

    Args:
      q: queries after RoPE.
      k: keys after RoPE.
      v: values.
      lam: λ of each head [H], a factor of the correction.
      mask: selects the keys that each query sees.
    """
    assert lam is not None  # `compute_lambda` always returns one.
    # This is softmax attention, without a noise map that λ would multiply.
    heads = super().compute_heads(q, k, v, lam=None, mask=mask)  # [B, T, H, V]

    value_dim = heads.shape[-1]
    zeros = nn.initializers.zeros
    dex_matrix = self.param("dex_matrix", zeros, (value_dim, value_dim))
    # On a mesh, each device stores a part of the matrix.
    dex_matrix = gather_and_cast(dex_matrix, "dex_matrix", jnp.float32)
    # λ W of each head, [H, V, U]. U is the output axis, of the same size as V.
    # With λ · (O W), the backward pass would have to store O W for all tokens.
    scaled_matrices = lam[:, None, None] * dex_matrix
    scaled_matrices = scaled_matrices.astype(heads.dtype)
    correction = jnp.einsum("BTHV,HVU->BTHU", heads, scaled_matrices)
    return heads - correction


@register("gated")
class GatedAttention(Attention):
  """Softmax attention with a gate on the outputs of the heads.

  head = sigmoid(x W_g) ∘ O

  This is the elementwise gate of Qiu et al., 2025 (arXiv:2505.06708). The layer
  is a control for version 2: its factor also depends on the token, and W_g has
  as many elements as the noise maps' queries in version 2 (for V = D). But
  there is only one map.
  """

  style: ClassVar[Style | None] = Style("Gated attention", GREEN, "D")
  extra_parameters: ClassVar[Mapping[str, Parameter]] = {"head_gate": HEAD_GATE}
  supports: ClassVar[Set[str]] = FEATURES

  def scale_heads(
    self,
    heads: Float[Array, "B T H V"],
    x: Float[Array, "B T E"],
    lambda_init: LambdaInit,
  ) -> Float[Array, "B T H V"]:
    return self.gate_heads(heads, x)


def attention_class(config: ModelConfig) -> type[Attention]:
  """Returns the layer class that `config.attention` names.

  Raises:
    UserError: if the name is unknown, or if the config sets a field to a value
      that the layer does not support.
  """
  layer_class: type[Attention] = layer_class_of(config.attention)
  layer_class.check(config)
  return layer_class


def _rescale(
  config: ModelConfig, field: str, factor: int, divisor: int
) -> int | None:
  """Returns a field of the config times factor / divisor, or None for None.

  Raises:
    UserError: if the result is not an integer.
  """
  value = getattr(config, field)
  if value is None:
    return None
  quotient, remainder = divmod(value * factor, divisor)
  if remainder:
    raise UserError(
      f"config.model.{field} = {value}: a variant with values of another width"
      f" has {factor}/{divisor} of it, which must be an integer"
    )
  return quotient


def _narrow_ffn(config: ModelConfig, num_elements: int) -> ModelConfig:
  """Returns the config with fewer elements in the feed-forward layers.

  Args:
    config: a decoder's config.
    num_elements: how many elements each layer gives up, except the
      `plain_layers`. If negative, how many it gains.

  Raises:
    UserError: if nothing would be left.
  """
  # All layers have the same F, so they share what the upper ones give up.
  num_upper_layers = config.num_layers - config.plain_layers
  num_elements_per_layer = num_elements * num_upper_layers / config.num_layers
  # The feed-forward layer has three matrices of E × F.
  ffn_dim = config.ffn_dim - num_elements_per_layer / config.embed_dim / 3
  rounded_ffn_dim = round(ffn_dim / FFN_MULTIPLE) * FFN_MULTIPLE
  if rounded_ffn_dim < FFN_MULTIPLE:
    raise UserError(
      f"config.model.ffn_dim = {config.ffn_dim}: too narrow for"
      f" {config.attention!r}, whose matrices take the place of"
      f" {config.ffn_dim - ffn_dim:.0f} of it; widen it"
    )
  return dataclasses.replace(config, ffn_dim=rounded_ffn_dim)


def _per_query(lam: Float[Array, "B T H"]) -> Float[Array, "B H T 1"]:
  """Returns λ as a factor of weights [B, H, T, S]."""
  return jnp.moveaxis(lam, 2, 1)[..., None]


def _check_shape(
  name: str, array: jax.Array, axes: str, shape: tuple[int, ...]
) -> None:
  """Checks the shape of another layer's keys or values.

  Args:
    name: "keys" or "values", for the error message.
    array: must have the shape [B, T, *shape].
    axes: the letters of `shape`, for the error message.
    shape: the sizes of the axes after B and T.

  Raises:
    ValueError: if the array has another shape.
  """
  if array.shape[2:] == shape:
    return
  sizes = ", ".join(str(size) for size in shape)
  raise ValueError(
    f"the {name} in keys_values must be [B, T, {axes}] = [B, T, {sizes}];"
    f" got shape {array.shape}"
  )
