"""Measurements inside a model: functions that run within its layers, of which only their results leave the layers.

So a measurement of all attention logits or hidden states needs the memory of one layer, and no array of size [L, B, T, …].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from diffjax.model.attention import Attention, MaskArguments
from diffjax.model.decoder import Block, Decoder, WindowSwitch
from diffjax.model.stacks import stacks
from diffjax.ops.diff_attention.arguments import broadcast_lambda
from diffjax.ops.diff_attention.mask import Mask, positions

_COLLECTION, _NAME = "metrics", "measured"


class Attended(NamedTuple):
  """The inputs of attention in one layer.

  Attributes:
    q: Queries after RoPE.
    k: Keys after RoPE.
    v: Values.
    lam: λ per token and head; None with one map.
    segment_ids: The tokens' segments; None for one segment a row.
    window: The number of keys that a query sees, itself included; None for all up to itself.
  """

  q: Float[Array, "B T Q G D"]
  k: Float[Array, "B S K M D"]
  v: Float[Array, "B S K V"]
  lam: Float[Array, "B T H"] | None
  segment_ids: Int[Array, "B T"] | None
  window: int | None = None


def measure(
  model: Decoder,
  params: Any,
  batch: dict[str, Any],
  *,
  attention: Callable[[Attended], Any] | None = None,
  hidden: Callable[[Float[Array, "B T E"]], Any] | None = None,
  plain: bool = True,
) -> dict[str, Any]:
  """Runs a model and measures its layers. The caller jits it.

  Args:
    model: The decoder.
    params: Its parameters.
    batch: tokens, and segment_ids and positions if there are any, [B, T].
    attention: Is called in every attention layer, and returns a tree of arrays.
    hidden: Is called with every layer's output, after both residuals, and returns a tree of arrays.
    plain: Whether the results hold those of plain layers, which have other numbers of heads and maps.

  Returns:
    "attention" and "hidden": the results, with a leading axis L.
  """

  def intercept(call, args, kwargs, context):
    module = context.module
    is_attend_call = (
      isinstance(module, Attention) and context.method_name == "attend"
    )
    if attention is not None and is_attend_call:
      measured = _measure_attention(attention, module, *args)
      module.sow(_COLLECTION, _NAME, measured)
    out = call(*args, **kwargs)
    is_block_call = (
      isinstance(module, Block) and context.method_name == "__call__"
    )
    if hidden is not None and is_block_call:
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
  measured = [
    variables[_COLLECTION][name]
    for name in stacks(model.config)
    if plain or name != "plain_layers"
  ]
  together = lambda parts: jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
  found = {}
  if attention is not None:
    found["attention"] = together(
      [stack["attention"][_NAME][0] for stack in measured]
    )
  if hidden is not None:
    found["hidden"] = together([stack[_NAME][0] for stack in measured])
  return found


def _measure_attention(
  attention: Callable[[Attended], Any],
  layer: Attention,
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: jax.Array | None,
  mask: MaskArguments,
) -> Any:
  """Returns what `attention` returns for the arguments of `Attention.attend`."""

  def measure_window(q, k, v, lam, *, q_segment_ids, window, **_):
    lam = broadcast_lambda(lam, q)
    return attention(Attended(q, k, v, lam, q_segment_ids, window))

  # Where the layers of a scan have different windows, the same switch as for
  # attention chooses the window. It returns the results.
  attention_fn: Callable[..., Any] = measure_window
  if isinstance(layer.attention_fn, WindowSwitch):
    attention_fn = dataclasses.replace(
      layer.attention_fn, attention_fn=measure_window
    )
  return attention_fn(q, k, v, lam, **mask.keywords())


def over_queries(
  step: Callable[[Any, Attended, Bool[Array, "B t S"], Int[Array, ""]], Any],
  start: Any,
  attended: Attended,
  *,
  block: int = 128,
) -> Any:
  """Folds a function over blocks of queries, so that the map of all queries of a row is never in memory.

  Args:
    step: Is called with its last result, a block of queries with all keys, the keys that each query sees (none for padding, which is
      segment 0, and for queries that fill up the last block) and the position of the first query.
    start: The first call's first argument.
    attended: The inputs of a layer.
    block: Number of queries of a block.

  Returns:
    The result of the last call.
  """
  q, k, v, lam, segment_ids, window = attended
  length = q.shape[1]
  size = min(block, length)
  blocks = -(-length // size)
  if segment_ids is None:
    segment_ids = jnp.ones(q.shape[:2], jnp.int32)

  def pad(x):
    return jnp.pad(
      x, [(0, 0), (0, blocks * size - length)] + [(0, 0)] * (x.ndim - 2)
    )

  padded = pad(q), None if lam is None else pad(lam), pad(segment_ids)

  def body(index, carry):
    first = index * size
    q, lam, ids = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, first, size, axis=1), padded
    )
    seen = Mask(size, k.shape[1], window=window).between(
      positions(size, first), positions(k.shape[1], 0), ids, segment_ids
    )
    assert seen is not None  # since it is causal
    return step(
      carry,
      Attended(q, k, v, lam, ids, window),
      seen & (ids > 0)[:, :, None],
      first,
    )

  return jax.lax.fori_loop(0, blocks, body, start)
