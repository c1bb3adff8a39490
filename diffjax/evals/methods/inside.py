"""Measurements inside a model: functions that are called within its layers.

A suite gives `measure` a function of a layer's attention (`AttentionInputs`) or
of its hidden states. For example, the largest attention logit of each layer,
from blocks of t queries with all S keys:

    def update_max(running_max, queries: Queries):
      is_visible = queries.mask[:, None, None]  # [B, 1, 1, t, S]
      logits = jnp.where(is_visible, queries.logits(), -jnp.inf)
      return jnp.maximum(running_max, jnp.max(logits))

    def largest_logit(inputs: AttentionInputs):
      return fold_query_blocks(update_max, jnp.float32(-jnp.inf), inputs)

    results = measure(model, params, batch, attention=largest_logit)
    results["attention"]  # [L]

How it works: The model runs as usual, but `nn.intercept_methods` calls an
interceptor in place of each method of its modules. Two calls are measured:

* `Attention.attend`: its arguments are the queries, keys, values and λ.
* `Block.__call__`: its output is the hidden state.

The interceptor passes them to the suite's function and stores the result with
`sow`. The decoder's scan over layers stacks the results along the axis L.

Only the results of these functions leave the layers. So a measurement of all
attention logits or hidden states needs the memory of one layer. No array
[L, B, T, …] is stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from diffjax.config import ModelConfig, UserError
from diffjax.model.attention import (
  CACHED_DECODING,
  Attention,
  Lambda,
  MaskArguments,
)
from diffjax.model.decoder import MEASUREMENTS, Block, Decoder, WindowSwitch
from diffjax.model.definition import broadcast_lambda, visible_keys
from diffjax.model.stacks import stacks

# Layers store their results under this name in the collection MEASUREMENTS.
_NAME = "measured"

Carry = TypeVar("Carry")


# Without __eq__ and __hash__, because the fields are traced arrays.
@dataclasses.dataclass(frozen=True, eq=False)
class Queries:
  """Some queries of an attention layer, with all of the layer's keys.

  Axes: B rows, t queries, S keys, D their width, Q query groups (heads that
  share a noise map), G maps of a group, K key heads, M key maps of a key head,
  H heads.

  Attributes:
    layer: The layer. It has its parameters.
    q: Queries after RoPE.
    k: Keys after RoPE.
    lam: λ of each query and head. None if the layer has no λ.
    mask: Whether a query sees a key. Queries that are padding see none.
  """

  layer: Attention
  q: Float[Array, "B t Q G D"]
  k: Float[Array, "B S K M D"]
  lam: Float[Array, "B t H *rest"] | None
  mask: Bool[Array, "B t S"]

  def weights(self) -> Float[Array, "B H t S"]:
    """Returns the weights that multiply the values (`Attention.weights`)."""
    return self.layer.weights(self.q, self.k, self.lam, self.mask)

  def maps(self) -> dict[str, Float[Array, "B H t S"]]:
    """Returns the terms of the weights, by title (`Attention.maps`)."""
    return self.layer.maps(self.q, self.k, self.lam, self.mask)

  def logits(self) -> Float[Array, "B Q G t S"]:
    """Returns the logits of all maps, before the mask (`Attention.logits`)."""
    return self.layer.logits(self.q, self.k, self.mask)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionInputs:
  """The inputs of attention in one layer: the arguments of `Attention.attend`.

  Axes: as in `Queries`. T is all queries, and V the width of values.

  Attributes:
    layer: The layer. It has its parameters.
    q: Queries after RoPE.
    k: Keys after RoPE.
    v: Values.
    lam: λ of each token and head. None if the layer has no λ.
    mask: What determines the keys that a query sees. The segment ids are not
      None. The window is an array if layers have different ones.
  """

  layer: Attention
  q: Float[Array, "B T Q G D"]
  k: Float[Array, "B S K M D"]
  v: Float[Array, "B S K V"]
  lam: Float[Array, "B T H *rest"] | None
  mask: MaskArguments

  @property
  def has_independent_queries(self) -> bool:
    """Whether each query's weights can be computed without other queries.

    Cached decoding needs the same. A variant that does not declare it is
    measured with all queries at once.
    """
    return CACHED_DECODING in self.layer.supports

  def queries(self, first: int | Int[Array, ""], count: int) -> Queries:
    """Returns a block of consecutive queries, with all keys.

    Without `has_independent_queries`, the block must have all queries.

    Args:
      first: The index of the first query.
      count: The number of queries. `first + count` must not exceed T.
    """

    def take_block(x: Array) -> Array:
      return jax.lax.dynamic_slice_in_dim(x, first, count, axis=1)

    # A variant without λ has None.
    lam = self.lam
    if lam is not None:
      lam = take_block(lam)
    # Measurements always have segment ids (`_attention_inputs`).
    assert self.mask.q_segment_ids is not None
    segment_ids = take_block(self.mask.q_segment_ids)
    block_mask = self.mask._replace(q_segment_ids=segment_ids)
    batch_size, num_keys = self.k.shape[:2]
    is_visible = visible_keys(
      (batch_size, count, num_keys), q_offset=first, **block_mask.keywords()
    )
    # Padding has the segment id 0.
    is_padding = segment_ids == 0
    is_visible &= ~is_padding[:, :, None]
    return Queries(self.layer, take_block(self.q), self.k, lam, is_visible)


# What a suite measures in each layer: from the attention's inputs, or from the
# layer's output. Both return a tree of arrays.
AttentionFunction = Callable[[AttentionInputs], PyTree]
HiddenFunction = Callable[[Float[Array, "B T E"]], PyTree]


def measure(
  model: Decoder,
  params: PyTree,
  batch: Mapping[str, ArrayLike],
  *,
  attention: AttentionFunction | None = None,
  hidden: HiddenFunction | None = None,
  include_plain_layers: bool = True,
) -> dict[str, PyTree]:
  """Runs a model, and applies functions to values inside each of its layers.

  Call it inside `jax.jit`.

  Args:
    model: The decoder.
    params: Its parameters.
    batch: Tokens [B, T], and segment_ids and positions if there are any.
    attention: Called in every attention layer. Returns a tree of arrays.
    hidden: Called with the hidden states that every layer returns. Returns a
      tree of arrays.
    include_plain_layers: Whether the results include the model's plain layers.
      These lowest layers have softmax attention, with other numbers of heads
      and maps. If they are included, the shapes of the results must not depend
      on these numbers.

  Returns:
    The results of the given functions by name, "attention" and "hidden". Their
    arrays have a leading axis L, the layers.

  Raises:
    UserError: if the layers of a variant do not call `Attention.attend`.
  """
  with nn.intercept_methods(_Interceptor(attention, hidden)):
    _, variables = model.apply(
      {"params": params},
      batch["tokens"],
      batch.get("segment_ids"),
      batch.get("positions"),
      mutable=[MEASUREMENTS],
    )
  measurements = variables.get(MEASUREMENTS, {})

  # A stack is a scan over layers with equal configs.
  results_of_stacks = []
  for stack_name, stack_config in stacks(model.config).items():
    if stack_name == "plain_layers" and not include_plain_layers:
      continue
    stored = measurements.get(stack_name, {})
    results_of_stack = {}
    if attention is not None:
      results_of_stack["attention"] = _stored_attention(stored, stack_config)
    if hidden is not None:
      results_of_stack["hidden"] = _stored_result(stored)
    results_of_stacks.append(results_of_stack)
  return jax.tree.map(_concatenate_layers, *results_of_stacks)


@dataclasses.dataclass(frozen=True)
class _Interceptor:
  """Measures attention and hidden states when Flax calls methods of modules.

  `nn.intercept_methods` calls it in place of every method. It runs the method,
  and stores measurements with `sow`.

  Attributes:
    attention: As in `measure`.
    hidden: As in `measure`.
  """

  attention: AttentionFunction | None
  hidden: HiddenFunction | None

  def __call__(
    self,
    run_method: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    context: nn.module.InterceptorContext,
  ) -> PyTree:
    """Runs a method. Measures it if it is `attend` or the call of a block.

    Args:
      run_method: The method.
      args: The positional arguments of the call.
      kwargs: The keyword arguments of the call.
      context: The module and the name of the method.

    Returns:
      The outputs of the method, unchanged.
    """
    module = context.module
    if isinstance(module, Attention) and context.method_name == "attend":
      if self.attention is not None:
        inputs = _attention_inputs(module, *args, **kwargs)
        module.sow(MEASUREMENTS, _NAME, self.attention(inputs))

    outputs = run_method(*args, **kwargs)

    if isinstance(module, Block) and context.method_name == "__call__":
      if self.hidden is not None:
        hidden_states = outputs[0]
        module.sow(MEASUREMENTS, _NAME, self.hidden(hidden_states))
    return outputs


def _attention_inputs(
  layer: Attention,
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Lambda,
  mask: MaskArguments,
) -> AttentionInputs:
  """Returns the arguments of a call of `Attention.attend`, in full form.

  A layer may pass one λ for all tokens, no segment ids, and a window that is
  part of its `attention_fn`. Measurements get λ of each token and head, segment
  ids and the window.

  Args:
    layer: The layer.
    q: Queries, by query group Q (heads that share a noise map) and map G.
    k: Keys, by key head K and key map M.
    v: Values, by key head K.
    lam: λ: a scalar, [H], [B, T, H], or None.
    mask: What determines the keys that a query sees.
  """
  token_lam = broadcast_lambda(lam, q, layer.num_heads)

  q_segment_ids = mask.q_segment_ids
  kv_segment_ids = mask.kv_segment_ids
  if q_segment_ids is None:
    # Each row is one document.
    q_segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    kv_segment_ids = jnp.ones(k.shape[:2], jnp.int32)

  # The layers of a scan share one program. If they have different windows, a
  # switch selects the window at run time, and the window is an array.
  window: Any = mask.window
  if isinstance(layer.attention_fn, WindowSwitch):
    window = layer.attention_fn.traced_window()

  full_mask = MaskArguments(
    q_segment_ids, kv_segment_ids, causal=mask.causal, window=window
  )
  return AttentionInputs(layer, q, k, v, token_lam, full_mask)


def _stored_attention(
  stored: Mapping[str, PyTree], config: ModelConfig
) -> PyTree:
  """Returns the attention measurements of a stack of layers.

  Args:
    stored: What the layers stored with `sow`, by module.
    config: The config of the stack.

  Raises:
    UserError: if the layers stored no measurement of attention.
  """
  stored_attention = stored.get("attention", {})
  if _NAME not in stored_attention:
    raise UserError(
      f"config.model.attention = {config.attention!r}: its attention cannot be"
      " measured, because it does not call Attention.attend; let its"
      " compute_heads call it"
    )
  return _stored_result(stored_attention)


def _stored_result(stored: Mapping[str, PyTree]) -> PyTree:
  """Returns the measurement that a module stored with `sow`."""
  # `sow` stores a tuple with the result of each call. There is one call.
  (result,) = stored[_NAME]
  return result


def _concatenate_layers(
  *arrays: Float[Array, "L ..."],
) -> Float[Array, "L ..."]:
  """Returns the arrays of all stacks as one, along the axis of the layers."""
  return jnp.concatenate(arrays)


def fold_query_blocks(
  step: Callable[[Carry, Queries], Carry],
  start: Carry,
  inputs: AttentionInputs,
  *,
  block_size: int = 128,
) -> Carry:
  """Folds a function over blocks of queries.

  With two blocks, returns step(step(start, first_block), second_block).

  So the attention weights of only one block are in memory at once. If a query's
  weights depend on other queries, all queries are one block.

  Args:
    step: Called with the last result and a block of queries. The last block
      ends with padding if the blocks do not divide the queries.
    start: The first argument of the first call.
    inputs: The inputs of attention in a layer.
    block_size: The number of queries in a block.

  Returns:
    The result of the last call.
  """
  num_queries = inputs.q.shape[1]
  if not inputs.has_independent_queries:
    block_size = num_queries
  block_size = min(block_size, num_queries)
  num_blocks = math.ceil(num_queries / block_size)
  padded_inputs = _pad_queries(inputs, num_blocks * block_size)

  def add_block(index: Int[Array, ""], carry: Carry) -> Carry:
    queries = padded_inputs.queries(index * block_size, block_size)
    return step(carry, queries)

  return jax.lax.fori_loop(0, num_blocks, add_block, start)


def _pad_queries(inputs: AttentionInputs, length: int) -> AttentionInputs:
  """Returns the inputs with `length` queries. New ones are padding (zeros).

  Padding has the segment id 0, so it sees no keys.
  """

  def pad(x: Array) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, length - x.shape[1])
    return jnp.pad(x, widths)

  # λ may be None, which `tree.map` keeps.
  q, lam, segment_ids = jax.tree.map(
    pad, (inputs.q, inputs.lam, inputs.mask.q_segment_ids)
  )
  mask = inputs.mask._replace(q_segment_ids=segment_ids)
  return dataclasses.replace(inputs, q=q, lam=lam, mask=mask)
