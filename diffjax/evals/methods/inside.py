"""Measurements inside a model: functions that are called within its layers.

Only the results of these functions leave the layers. So a measurement of all
attention logits or hidden states needs the memory of one layer. No array
[L, B, T, …] is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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

# Where the layers put results: the collection of variables, and the name.
_COLLECTION = MEASUREMENTS
_NAME = "measured"


# Without __eq__ and __hash__, because the fields are traced arrays.
@dataclasses.dataclass(frozen=True, eq=False)
class Queries:
  """Some queries of an attention layer, with all of the layer's keys.

  Attributes:
    layer: the layer. It has its parameters.
    q: queries after RoPE.
    k: keys after RoPE.
    lam: λ of the queries, as `Attention.weights` takes it.
    mask: whether a query sees a key. Queries that are padding see none.
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

  Attributes:
    layer: the layer. It has its parameters.
    q: queries after RoPE.
    k: keys after RoPE.
    v: values.
    lam: λ of each token and head. None if the layer has no λ.
    mask: the segment ids, which are arrays, and the layer's window. The window
      is an array if the layers of the model have different ones.
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
    """Returns consecutive queries, with all keys.

    They must be all queries unless `has_independent_queries`.

    Args:
      first: the index of the first query.
      count: the number of queries. The last one must exist: `fold_query_blocks` pads
        them.
    """

    def select(x: jax.Array) -> jax.Array:
      return jax.lax.dynamic_slice_in_dim(x, first, count, axis=1)

    q, lam, segment_ids = jax.tree.map(
      select, (self.q, self.lam, self.mask.q_segment_ids)
    )
    mask = self.mask._replace(q_segment_ids=segment_ids)
    is_visible = visible_keys(
      (*q.shape[:2], self.k.shape[1]), q_offset=first, **mask.keywords()
    )
    is_padding = segment_ids == 0
    is_visible &= ~is_padding[:, :, None]
    return Queries(self.layer, q, self.k, lam, is_visible)


def measure(
  model: Decoder,
  params: Any,
  batch: dict[str, Any],
  *,
  attention: Callable[[AttentionInputs], Any] | None = None,
  hidden: Callable[[Float[Array, "B T E"]], Any] | None = None,
  include_plain_layers: bool = True,
) -> dict[str, Any]:
  """Runs a model and measures its layers. The caller jits it.

  Args:
    model: the decoder.
    params: its parameters.
    batch: tokens [B, T], and segment_ids and positions if there are any.
    attention: called in every attention layer. Returns a tree of arrays.
    hidden: called with the output of every layer, after both residuals. Returns
      a tree of arrays.
    include_plain_layers: whether the results include plain layers, which have other numbers of
      heads and maps.

  Returns:
    The results of the layers by name, "attention" and "hidden". Their arrays
    have a leading axis L.

  Raises:
    UserError: if the layers of a variant do not call `Attention.attend`.
  """

  def intercept(call, args, kwargs, context):
    module = context.module
    method = context.method_name
    is_attention = isinstance(module, Attention) and method == "attend"
    if attention is not None and is_attention:
      attended = _attended(module, *args, **kwargs)
      module.sow(_COLLECTION, _NAME, attention(attended))
    out = call(*args, **kwargs)
    is_block = isinstance(module, Block) and method == "__call__"
    if hidden is not None and is_block:
      module.sow(_COLLECTION, _NAME, hidden(out[0]))
    return out

  with nn.intercept_methods(intercept):
    _, variables = model.apply(
      {"params": params},
      batch["tokens"],
      batch.get("segment_ids"),
      batch.get("positions"),
      mutable=[_COLLECTION],
    )

  attention_results = []
  hidden_results = []
  for name, stack_config in stacks(model.config).items():
    if name == "plain_layers" and not include_plain_layers:
      continue
    sown = variables.get(_COLLECTION, {}).get(name, {})
    if attention is not None:
      attention_results.append(_attention_result(sown, stack_config))
    if hidden is not None:
      hidden_results.append(sown[_NAME][0])
  results = {}
  if attention is not None:
    results["attention"] = _concatenate(attention_results)
  if hidden is not None:
    results["hidden"] = _concatenate(hidden_results)
  return results


def _attended(
  layer: Attention,
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Lambda,
  mask: MaskArguments,
) -> AttentionInputs:
  """Returns the arguments of `Attention.attend` as measurements take them."""
  lam = broadcast_lambda(lam, q, layer.num_heads)
  if mask.q_segment_ids is None:
    mask = mask._replace(
      q_segment_ids=jnp.ones(q.shape[:2], jnp.int32),
      kv_segment_ids=jnp.ones(k.shape[:2], jnp.int32),
    )
  # The layers of a scan share one program. If they have different windows, a
  # switch determines the window at run time.
  if isinstance(layer.attention_fn, WindowSwitch):
    window: Any = layer.attention_fn.traced_window()
    mask = mask._replace(window=window)
  return AttentionInputs(layer, q, k, v, lam, mask)


def _attention_result(sown: dict[str, Any], config: ModelConfig) -> Any:
  """Returns what the attention layers of a stack recorded.

  Args:
    sown: all that the layers recorded.
    config: the config of the stack.

  Raises:
    UserError: if they did not record a measurement.
  """
  recorded = sown.get("attention", {})
  if _NAME not in recorded:
    raise UserError(
      f"config.model.attention = {config.attention!r}: its attention cannot be"
      " measured, because it does not call Attention.attend; let its"
      " compute_heads call it"
    )
  return recorded[_NAME][0]


def _concatenate(results: list[Any]) -> Any:
  """Returns the results of all stacks as one, along the axis of the layers."""
  return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *results)


def fold_query_blocks(
  step: Callable[[Any, Queries], Any],
  start: Any,
  attended: AttentionInputs,
  *,
  block_size: int = 128,
) -> Any:
  """Folds a function over blocks of queries.

  The blocks keep the map of all queries out of memory. If the layer cannot
  compute the weights of a block, there is one block of all queries. Such a layer
  stores all weights in training, too.

  Args:
    step: called with its last result and a block of queries. The last block is
      filled up with padding.
    start: the first argument of the first call.
    attended: the inputs of a layer.
    block_size: the number of queries in a block.

  Returns:
    The result of the last call.
  """
  length = attended.q.shape[1]
  if not attended.has_independent_queries:
    block_size = length
  block_size = min(block_size, length)
  num_blocks = -(-length // block_size)  # rounded up
  padded = _pad_queries(attended, num_blocks * block_size)

  def step_of_block(index: Int[Array, ""], carry: Any) -> Any:
    return step(carry, padded.queries(index * block_size, block_size))

  return jax.lax.fori_loop(0, num_blocks, step_of_block, start)


def _pad_queries(attended: AttentionInputs, length: int) -> AttentionInputs:
  """Returns the inputs with more queries, which are padding (segment 0)."""

  def pad(x: jax.Array) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, length - x.shape[1])
    return jnp.pad(x, widths)

  q, lam, segment_ids = jax.tree.map(
    pad, (attended.q, attended.lam, attended.mask.q_segment_ids)
  )
  mask = attended.mask._replace(q_segment_ids=segment_ids)
  return dataclasses.replace(attended, q=q, lam=lam, mask=mask)
