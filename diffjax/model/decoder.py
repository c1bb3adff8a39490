"""The decoder: pre-norm layers of attention and a gated feed-forward network.

A scan runs the layers. "The paper" is the Differential Transformer (Ye et al.,
2024, arXiv:2410.05258).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Set
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from diffjax.config import ModelConfig
from diffjax.model.attention import (
  PROJECTED,
  Lambda,
  attention_class,
  lambda_init_schedule,
  matrix_init,
)
from diffjax.model.definition import ALL_KEYS, WeightsFn, by_definition
from diffjax.model.stacks import stacks
from diffjax.ops.diff_attention import RESIDUAL_NAMES, diff_attention
from diffjax.ops.layer_norm import layer_norm
from diffjax.ops.platform import platform
from diffjax.ops.poly_norm import poly_norm
from diffjax.ops.rms_norm import SCALE as RMS_NORM_SCALE
from diffjax.ops.rms_norm import rms_norm
from diffjax.ops.rope import ANGLES
from diffjax.ops.swiglu import swiglu
from diffjax.parallel.product import product
from diffjax.parameters import NUM_POLY_NORM_WEIGHTS

# The names of the feed-forward layer's two hidden arrays, for remat policies.
GATE = "ffn_gate"
UP = "ffn_up"

# The collection of variables for measurements of layers
# (evals/methods/inside.py). What layers sow under "metrics" is not recorded
# with them.
MEASUREMENTS = "measurements"

# Up to this number of layers, a CPU runs them without a loop. More layers would
# take too long to compile.
_MAX_UNROLLED_LAYERS = 8

# The arrays of a layer that each remat policy saves for the backward pass, from
# the least memory to the most. With remat "none", all arrays are saved. JAX's
# own policies, such as `dots_saveable`, do not see the matrix products inside
# `product`, which has a custom VJP. So the arrays are selected by name.
_SAVED_BY_ATTENTION = (
  *RESIDUAL_NAMES,  # outputs of heads and noise maps, and log-sum-exps
  ANGLES,  # the sines and cosines of RoPE
  RMS_NORM_SCALE,  # 1 / RMS of every RMSNorm
)
_SAVED_NAMES = {
  "full": (),  # full rematerialization: everything is computed again
  "attention": _SAVED_BY_ATTENTION,
  "gate": (*_SAVED_BY_ATTENTION, GATE),
  "ffn": (*_SAVED_BY_ATTENTION, GATE, UP),
  "dots": (*_SAVED_BY_ATTENTION, GATE, UP, PROJECTED),
}
REMAT_POLICIES = {
  remat: jax.checkpoint_policies.save_only_these_names(*names)
  for remat, names in _SAVED_NAMES.items()
}


class FeedForward(nn.Module):
  """The gated feed-forward network, without biases.

  y = (f(x W_gate) ∘ (x W_up)) W_down

  Attributes:
    ffn_dim: F, the width between the matrices.
    out_scale: a factor on the initial W_down.
    dtype: compute dtype. Parameters are float32.
    activation: f, "silu" (SwiGLU; Shazeer, 2020) or "poly_norm" (PolyNorm,
      arXiv:2411.03884).
  """

  ffn_dim: int
  out_scale: float = 1.0
  dtype: Any = jnp.float32
  activation: str = "silu"

  @nn.compact
  def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Returns y = (f(x W_gate) ∘ (x W_up)) W_down, in the compute dtype."""
    E = x.shape[-1]
    F = self.ffn_dim  # the width between the matrices
    w_gate = self.param("gate", matrix_init(E), (E, F))
    w_up = self.param("up", matrix_init(E), (E, F))
    w_down = self.param("down", matrix_init(F, scale=self.out_scale), (F, E))

    x = x.astype(self.dtype)
    gate = product(x, w_gate, "gate")  # [B, T, F]
    up = product(x, w_up, "up")  # [B, T, F]
    # Remat policies select the arrays that they save by these names.
    gate = checkpoint_name(gate, GATE)
    up = checkpoint_name(up, UP)
    if self.activation == "poly_norm":
      hidden = self.apply_poly_norm(gate) * up
    else:  # "silu"
      hidden = swiglu(gate, up)
    # parallel/rules.py maps these names of axes to mesh axes.
    hidden = nn.with_logical_constraint(hidden, ("batch", "length", "ffn"))
    return product(hidden, w_down, "down")

  def apply_poly_norm(
    self, gate: Float[Array, "B T F"]
  ) -> Float[Array, "B T F"]:
    """Returns w₀·n(x³) + w₁·n(x²) + w₂·n(x) + c of the gate x (PolyNorm).

    n divides by the root mean square over F. The weights w and the constant c
    are parameters. The weights start equal, with the sum 1, and c starts at 0.
    """
    num_weights = NUM_POLY_NORM_WEIGHTS
    equal_weights = nn.initializers.constant(1 / num_weights)
    weights = self.param("poly_weights", equal_weights, (num_weights,))
    constant = self.param("poly_constant", nn.initializers.zeros, ())
    return poly_norm(gate, weights, constant)


# Without __eq__ and __hash__, because `index` may be a traced array.
@dataclasses.dataclass(frozen=True, eq=False)
class WindowSwitch:
  """An `attention_fn` that selects one of several static windows at run time.

  The layers of a scan share one program, and `attention_fn` needs a static
  window. So the program has a branch for each window, and `lax.switch` selects
  the branch of a layer.

  Attributes:
    attention_fn: has the signature of `diff_attention`.
    windows: the different windows of all layers.
    index: the index of this layer's window.
  """

  attention_fn: Callable[..., Any]
  windows: tuple[int | None, ...]
  index: Int[Array, ""] | int

  def __call__(
    self,
    q: Float[Array, "B T Q G D"],
    k: Float[Array, "B T K M D"],
    v: Float[Array, "B T K V"],
    lam: Lambda,
    *,
    q_segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
    **options: Any,
  ) -> Any:
    """Returns `attention_fn(q, k, v, lam, …, window=windows[index])`.

    The index is known at run time, but `attention_fn` needs a static window. So
    there is one branch per window, and `lax.switch` runs one of them.

    Args:
      q: queries.
      k: keys.
      v: values.
      lam: λ, or None with one map.
      q_segment_ids: the segments of the queries.
      kv_segment_ids: the segments of the keys.
      options: other static arguments of `attention_fn`. If they have a window,
        it is ignored.

    Returns:
      The heads [B, T, H, V].
    """
    segment_ids = {
      "q_segment_ids": q_segment_ids,
      "kv_segment_ids": kv_segment_ids,
    }
    branches = []
    for window in self.windows:
      branch_options = {**options, "window": window}
      branches.append(
        functools.partial(
          _attend_with_segment_ids, self.attention_fn, branch_options
        )
      )
    # A switch passes arrays to its branches by position.
    return jax.lax.switch(self.index, branches, q, k, v, lam, segment_ids)

  def by_definition(
    self, weights_fn: WeightsFn, supports: Set[str]
  ) -> Callable[..., jax.Array]:
    """Returns an `attention_fn` for a variant that is computed by its weights.

    It needs no branches, since the window of a mask may be an array.

    Args:
      weights_fn: the variant's definition (see definition.py).
      supports: what the variant supports.
    """
    attention_fn = by_definition(self.attention_fn, weights_fn, supports)

    def attend(*arrays: Any, window: int | None, **options: Any) -> jax.Array:
      return attention_fn(*arrays, window=self.traced_window(), **options)

    return attend

  def traced_window(self) -> Int[Array, ""]:
    """Returns this layer's window as an array. It is large in full layers."""
    windows = []
    for window in self.windows:
      windows.append(ALL_KEYS if window is None else window)
    return jnp.array(windows)[self.index]


def _attend_with_segment_ids(
  attention_fn: Callable[..., Any],
  options: dict[str, Any],
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Lambda,
  segment_ids: dict[str, Int[Array, "B _"] | None],
) -> Any:
  """Calls `attention_fn` with the segment ids as keyword arguments."""
  return attention_fn(q, k, v, lam, **segment_ids, **options)


class Block(nn.Module):
  """A layer of the decoder: attention, then the feed-forward network.

  h = x + attention(norm(x))
  y = h + feed_forward(norm(h))

  Attributes:
    config: the config of the layer's stack (see `stacks`).
    dtype: compute dtype. Parameters are float32.
    attention_fn: has the signature of `diff_attention`.
    out_scale: a factor on the two initial matrices that write to the residual
      stream, `attention/out` and `ffn/down`.
    logits_transform: see `Attention`.
  """

  config: ModelConfig
  dtype: Any
  attention_fn: Callable[..., jax.Array]
  out_scale: float = 1.0
  logits_transform: Callable[..., jax.Array] | None = None

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B T E"],
    lambda_init: Float[Array, ""] | float,
    window_index: Int[Array, ""] | int,
    segment_ids: Int[Array, "B T"] | None,
    positions: Int[Array, "B T"] | None,
  ) -> tuple[Float[Array, "B T E"], None]:
    """Returns the output, and None as the second value that `nn.scan` needs.

    Args:
      x: the residual stream before this layer.
      lambda_init: λ_init of this layer. Ignored by variants without one.
      window_index: the index of this layer's window in
        `distinct_windows(config)`.
      segment_ids: tokens attend to tokens with an equal id. None if each
        sequence is one document.
      positions: positions for RoPE. None for 0 … T−1.
    """
    config = self.config
    windows = distinct_windows(config)  # of all layers that this program runs
    window = windows[0]
    attention_fn = self.attention_fn
    if len(windows) > 1:
      # The layers of a scan share this program. The switch selects this layer's
      # window at run time, and replaces the window that `attention` passes.
      window = None  # a placeholder
      attention_fn = WindowSwitch(attention_fn, windows, window_index)

    attention = attention_class(config).from_config(
      config,
      window=window,
      out_scale=self.out_scale,
      dtype=self.dtype,
      attention_fn=attention_fn,
      logits_transform=self.logits_transform,
      name="attention",
    )
    feed_forward = FeedForward(
      ffn_dim=config.ffn_dim,
      out_scale=self.out_scale,
      dtype=self.dtype,
      activation=config.ffn_activation,
      name="ffn",
    )

    normalized = _normalize(self, "attention_norm", x, config)
    x = x + attention(
      normalized, lambda_init, segment_ids=segment_ids, positions=positions
    )
    normalized = _normalize(self, "ffn_norm", x, config)
    x = x + feed_forward(normalized)
    x = nn.with_logical_constraint(x, ("batch", "length", "embed"))

    # `init` would return the recorded array together with the parameters.
    if not self.is_initializing():
      self.sow("intermediates", "hidden", x)
    return x, None


class Decoder(nn.Module):
  """The language model without its last projection: tokens to hidden states.

  The last projection is to the vocabulary. `logits` applies it for sampling,
  and the loss applies it in training (ops/cross_entropy.py).

  Each scan runs a stack of equal layers (see `stacks`). Most decoders have one
  stack. With `config.plain_layers` = n, the lowest n layers have softmax
  attention and form a stack of their own.

  Initialization: matrices are truncated normals of standard deviation
  1/√inputs. The two matrices of a layer that write to the residual stream,
  `attention/out` and `ffn/down`, are also divided by √(2L), where L counts the
  layers of all stacks. Embeddings are normals of standard deviation 1/√E, so
  that tied logits start with unit variance. Gains are 1. The paper states none
  of these.

  Parameters: a nested dict of float32 arrays with `embedding` [N, E],
  `final_norm` [E] and, unless the embeddings are tied, `unembedding` [N, E].
  Under `layers`, arrays have a leading axis L: `attention/query`, …,
  `attention_norm`, `ffn/gate`, …, `ffn_norm`. The softmax stack has the same
  names under `plain_layers`.

  Attributes:
    config: sizes and options.
    dtype: compute dtype.
    attention_fn: has the signature of `diff_attention`.
    logits_transform: a function of attention logits, such as a quantization
      (see `Attention`).
  """

  config: ModelConfig
  dtype: Any = jnp.float32
  attention_fn: Callable[..., jax.Array] = diff_attention
  logits_transform: Callable[..., jax.Array] | None = None

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T E"]:
    """Returns the hidden states after the final norm, in the compute dtype.

    `logits` turns them into logits of the next tokens.

    Args:
      tokens: token ids.
      segment_ids: tokens attend to tokens with an equal id. None if each
        sequence is one document.
      positions: positions for RoPE. None for 0 … T−1.

    Raises:
      ValueError: if the sequences are longer than `config.max_length`.
    """
    config = self.config
    length = tokens.shape[1]
    if length > config.max_length:
      raise ValueError(
        f"tokens has length {length},"
        f" but config.model.max_length is {config.max_length}"
      )

    init = nn.initializers.normal(config.embed_dim**-0.5)
    shape = (config.vocab_size, config.embed_dim)
    embedding = self.param("embedding", init, shape)
    if not config.tie_embeddings:
      # This only creates the parameter. `output_embedding` reads it from the
      # parameters, for the loss and for `logits`.
      self.param("unembedding", init, shape)

    x = embed(embedding.astype(self.dtype), tokens, config)  # [B, T, E]
    x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
    for name, stack_config in stacks(config).items():
      x = self._scan_layers(name, stack_config, x, segment_ids, positions)
    return _normalize(self, "final_norm", x, config)

  def _scan_layers(
    self,
    name: str,
    stack_config: ModelConfig,
    x: Float[Array, "B T E"],
    segment_ids: Int[Array, "B T"] | None,
    positions: Int[Array, "B T"] | None,
  ) -> Float[Array, "B T E"]:
    """Returns the output of a stack of equal layers, compiled as a scan.

    Args:
      name: the name of the stack's parameters.
      stack_config: the config of the stack (see `stacks`).
      x: the residual stream before the stack.
      segment_ids: tokens attend to tokens with an equal id.
      positions: positions for RoPE.
    """
    # Rematerialization: the backward pass computes again what is not saved.
    # In a scan, XLA cannot undo that by reusing arrays (CSE), so `prevent_cse`
    # is not needed. `_should_unroll` keeps the scan if remat is set.
    block_class = Block
    if stack_config.remat != "none":
      block_class = nn.remat(
        Block, policy=REMAT_POLICIES[stack_config.remat], prevent_cse=False
      )
    unroll = 1
    if self._should_unroll():
      unroll = stack_config.num_layers
    scanned_class = nn.scan(
      block_class,
      # The arrays of the layers are stacked along a leading axis.
      variable_axes={
        "params": 0,
        "intermediates": 0,
        "metrics": 0,
        MEASUREMENTS: 0,
      },
      split_rngs={"params": True},
      # The scan slices λ_init and the window index, one for each layer. All
      # layers get the same segment ids and positions.
      in_axes=(0, 0, nn.broadcast, nn.broadcast),
      length=stack_config.num_layers,
      unroll=unroll,
      # This check traces the layer twice. It is only for outputs that all
      # layers have in common (`nn.broadcast` in `out_axes`). There are none.
      check_constancy_invariants=False,
    )
    layers = scanned_class(
      stack_config,
      self.dtype,
      self.attention_fn,
      # Each layer of the decoder, in any stack, adds two terms to the residual
      # stream.
      out_scale=(2 * self.config.num_layers) ** -0.5,
      logits_transform=self.logits_transform,
      name=name,
    )
    x, _ = layers(
      x,
      lambda_inits(stack_config),
      _window_indices(stack_config),
      segment_ids,
      positions,
    )
    return x

  def _should_unroll(self) -> bool:
    """Returns True if each layer is compiled separately, without a loop.

    A scan copies the activations for the backward pass into arrays stacked over
    layers, and out of them again. On a CPU these copies take a tenth of a step.
    Compile time grows with each unrolled layer, so deep models keep the scan.
    """
    if self.is_initializing():
      # Without a backward pass, unrolling gains nothing.
      return False
    if self.config.remat != "none":
      # Without the scan, XLA reuses a layer's activations instead of
      # recomputing them.
      return False
    is_shallow = self.config.num_layers <= _MAX_UNROLLED_LAYERS
    return platform() == "cpu" and is_shallow


def lambda_inits(config: ModelConfig) -> Float[Array, "L"]:
  """Returns λ_init of every layer of a stack, about where its λ starts.

  It is the config's constant, or the paper's schedule, which depends on the
  layer's number minus `lambda_init_offset`. Variants without λ_init ignore it.

  Example: offset 0 → 0.2, 0.356, …; offset −4, above 4 plain layers → 0.619, …
  """
  if config.lambda_init is not None:
    return jnp.full(config.num_layers, config.lambda_init, jnp.float32)
  # A positive offset starts the schedule at a negative layer number. A negative
  # one skips the numbers of the stack below (see `stacks`).
  return lambda_init_schedule(
    jnp.arange(config.num_layers) - config.lambda_init_offset
  )


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
  """Returns the window of every layer of a stack: how many keys a token sees.

  The letters of `window_pattern` are repeated over the layers. "w" is a layer
  with the config's window. "f" is a full layer, without one (None). In an upper
  stack, `stacks` continues the pattern from the stack below.

  Example:
    window = 128, window_pattern = "wf", num_layers = 3 → (128, None, 128)
  """
  pattern = config.window_pattern
  if not pattern:
    return (config.window,) * config.num_layers
  windows: list[int | None] = []
  for layer in range(config.num_layers):
    if pattern[layer % len(pattern)] == "w":
      windows.append(config.window)
    else:
      windows.append(None)
  return tuple(windows)


def distinct_windows(config: ModelConfig) -> tuple[int | None, ...]:
  """Returns the different windows of the layers, in order of appearance.

  Example: layers with the windows 128, None and 128 → (128, None)
  """
  return tuple(dict.fromkeys(layer_windows(config)))


def _window_indices(config: ModelConfig) -> Int[Array, "L"]:
  """Returns the index of every layer's window in `distinct_windows`.

  Example: layers with the windows 128, None and 128 → [0, 1, 0]
  """
  windows = distinct_windows(config)
  return jnp.array([windows.index(window) for window in layer_windows(config)])


def _normalize(
  module: nn.Module, name: str, x: Float[Array, "B T E"], config: ModelConfig
) -> Float[Array, "B T E"]:
  """Returns the normalized x. Creates the norm's parameters in the module.

  They are a gain, which starts at 1, and the shift of a LayerNorm, which starts
  at 0.

  Args:
    module: the module that has the parameters.
    name: the name of the norm and of its gain, such as "ffn_norm".
    x: the residual stream.
    config: determines the kind of norm and its ε.
  """
  shape = x.shape[-1:]  # [E]
  params = {name: module.param(name, nn.initializers.ones, shape)}
  if config.norm == "layer":
    shift_name = f"{name}_shift"
    params[shift_name] = module.param(shift_name, nn.initializers.zeros, shape)
  return apply_norm(params, name, x, config)


def apply_norm(
  params: dict[str, Any],
  name: str,
  x: Float[Array, "B T E"],
  config: ModelConfig,
) -> Float[Array, "B T E"]:
  """Returns the residual stream, normalized.

  Decoding calls this with the parameters of the whole decoder (cache.py).

  Args:
    params: has the norm's parameters, among others: a gain under its name and,
      for a LayerNorm, a shift.
    name: the norm: "attention_norm", "ffn_norm" or "final_norm".
    x: the residual stream.
    config: determines the kind of norm and its ε.
  """
  if config.norm == "layer":
    return layer_norm(x, params[name], params[f"{name}_shift"], config.norm_eps)
  return rms_norm(x, params[name], config.norm_eps)


def embed(
  embedding: Float[Array, "N E"], tokens: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T E"]:
  """Returns the input of the first layer, in the embedding's dtype.

  These are the embeddings of the tokens, times the config's `embed_scale`.
  """
  x = jnp.take(embedding, tokens, axis=0)
  if config.embed_scale == 1:
    return x
  return x * jnp.asarray(config.embed_scale, x.dtype)


def output_embedding(params: dict[str, Any]) -> Float[Array, "N E"]:
  """Returns the matrix of the vocabulary projection.

  If the embeddings are tied, this is the embedding.
  """
  return params.get("unembedding", params["embedding"])


def logits(
  params: dict[str, Any], hidden: Float[Array, "B T E"]
) -> Float[Array, "B T N"]:
  """Returns float32 logits of the next tokens, for sampling and tests.

  In training, the logits of all tokens are never in memory together
  (ops/cross_entropy.py).

  Args:
    params: the decoder's parameters.
    hidden: the decoder's output.
  """
  embedding = output_embedding(params).astype(hidden.dtype)  # [N, E]
  return jnp.einsum(
    "BTE,NE->BTN", hidden, embedding, preferred_element_type=jnp.float32
  )
