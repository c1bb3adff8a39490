"""Attention over rows that several devices share, as a ring.

Each device keeps its queries. Keys and values travel from device to device,
along the arrows:

           device 0        device 1        device 2
  step 0   q₀ sees k₀ ──▶  q₁ sees k₁ ──▶  q₂ sees k₂ ──▶ device 0
  step 1   q₀ sees k₂ ──▶  q₁ sees k₀ ──▶  q₂ sees k₁ ──▶ device 0
  step 2   q₀ sees k₁      q₁ sees k₂      q₂ sees k₀

The forward pass, at each step:
  1. Send the keys and values to the next device.
  2. Meanwhile, compute attention from the queries to the present keys.
  3. Merge the output of each map, weighted by the maps' log-sum-exps.

The backward pass, at each step:
  1. Send the keys and values to the next device.
  2. Receive the gradients of the present keys from the previous device.
  3. Meanwhile, compute this device's part of the gradients.
  4. Add it to the gradients of the queries, which stay, and of the keys.
At the end, the gradients of keys and values are sent to their own devices.

Outputs and gradients are summed in float32. No device ever holds the keys of
a whole row. Both maps use the same values, which travel once.

`ring_plan` plans the steps and leaves out those at which no device sees a key.

Axes:
  B: batch.  T: a shard's queries.  S: a shard's keys.  H: heads.
  Q: query groups, one for each head.  K: key heads.
  G: maps of a head.  M: key maps.  D, V: widths of queries and values.
Inside this module tokens are the second last axis, as in the Pallas kernels.
So the transposition before each call costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.ring_plan import (
  Call,
  StepLoop,
  plan_loops,
  plan_steps,
)
from diffjax.ops.diff_attention.sharded import TokenSharding
from diffjax.ops.diff_attention.tiles import EMPTY_ROW_LSE, MASKED_LOGIT
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  Options,
  PartialImplementation,
  PartialResult,
  Saved,
)
from diffjax.ops.platform import platform
from diffjax.ops.varying import vary_like


class _Queries(NamedTuple):
  """The arrays of a shard's queries. They stay on their device."""

  q: Float[Array, "B Q G T D"]
  lam: Float[Array, "B T H"] | None
  ids: Int[Array, "B T"] | None


class _Keys(NamedTuple):
  """The arrays of a shard's keys. They travel round the ring."""

  k: Float[Array, "B K M S D"]
  v: Float[Array, "B K S V"]
  ids: Int[Array, "B S"] | None


class _ForwardCarry(NamedTuple):
  """The state between two steps of the forward pass."""

  keys: _Keys  # that are present
  result: PartialResult  # of all keys up to now


class _BackwardCarry(NamedTuple):
  """The state between two steps of the backward pass."""

  keys: _Keys  # that are present
  # Gradients of the previous step's keys, summed over the devices up to now.
  d_k: Float[Array, "B K M S D"]
  d_v: Float[Array, "B K S V"]
  # Gradient of this device's queries, summed over all keys up to now.
  d_q: Float[Array, "B Q G T D"]


@functools.cache
def ring(
  implementation: Implementation, tokens: TokenSharding
) -> Implementation:
  """Returns an implementation for one shard of rows, inside `shard_map`.

  Its mask has the lengths of a shard, and the offset of the row's first query,
  which must be an int.

  Args:
    implementation: computes the attention to the keys of each shard. It must
      have `partial`.
    tokens: how the shards share a row.
  """
  assert implementation.partial is not None
  return Implementation(
    functools.partial(_forward, implementation.partial, tokens),
    functools.partial(_backward, implementation.partial, tokens),
    functools.partial(_prepare, implementation, tokens),
    output=_tokens_first,
  )


def _prepare(
  implementation: Implementation,
  tokens: TokenSharding,
  arrays: Arrays,
  mask: Mask,
) -> tuple[tuple[Mask, Any], ...]:
  """Returns what `implementation.prepare` chooses for each call's mask.

  A call is attention from some queries of a shard to some keys. Calls with
  equal masks have equal shapes, so one of them is prepared.

  Args:
    implementation: computes the calls.
    tokens: how the shards share a row.
    arrays: the arrays of one shard.
    mask: the lengths of a shard, and the offset of the row's first query.

  Returns:
    Pairs of a mask and the choice for it.
  """
  calls_by_mask = {}
  for step in plan_steps(mask, tokens):
    for calls in step.calls:
      for call in calls:
        calls_by_mask[call.mask] = call

  queries = _shard_queries(arrays)
  keys = _shard_keys(arrays)
  choices = []
  for call_mask, call in calls_by_mask.items():
    call_arrays = _call_arrays(call, queries, keys)
    choices.append((call_mask, implementation.prepare(call_arrays, call_mask)))
  return tuple(choices)


@dataclasses.dataclass(frozen=True)
class _ShardAttention:
  """Attention from a shard's queries to the keys that are present."""

  implementation: PartialImplementation
  options: Options
  queries: _Queries

  def forward(self, call: Call, keys: _Keys) -> PartialResult:
    """Returns the result of one call."""
    arrays = _call_arrays(call, self.queries, keys)
    options = self._call_options(call)
    return self.implementation.forward(arrays, call.mask, options)

  def backward(
    self,
    call: Call,
    keys: _Keys,
    result: PartialResult,
    d_out: Float[Array, "B H T V"],
  ) -> tuple[Array, Array, Array]:
    """Returns what one call adds to the gradients of q, k and v.

    Args:
      call: which of this device's queries attend to which of the keys.
      keys: the keys that are on this device at this step of the ring.
      result: the forward result of all queries of this device, over all keys.
      d_out: the gradient of the output of all queries of this device.
    """
    # The results of the call's queries, cut along T.
    noise_out = result.out2
    if noise_out is not None:
      noise_out = _slice_queries(noise_out, call, axis=2)
    call_result = PartialResult(
      out=_slice_queries(result.out, call, axis=2),
      out2=noise_out,
      lse=_slice_queries(result.lse, call, axis=3),
    )
    call_arrays = _call_arrays(call, self.queries, keys)
    call_d_out = _slice_queries(d_out, call, axis=2)  # [B, H, t, V]
    d_q, d_k, d_v = self.implementation.backward(
      call_arrays,
      call.mask,
      self._call_options(call),
      call_result,
      _tokens_first(call_d_out),  # [B, t, H, V]
    )
    return _tokens_last(d_q), _tokens_last(d_k), _tokens_last(d_v)

  def _call_options(self, call: Call) -> Options:
    choices = dict(self.options.chosen)  # of `_prepare`
    return Options(self.options.scale, save=True, chosen=choices[call.mask])


def _forward(
  implementation: PartialImplementation,
  tokens: TokenSharding,
  arrays: Arrays,
  mask: Mask,
  options: Options,
) -> Saved:
  """Returns attention of one shard's queries, and what the backward pass needs.

  At each step of the ring, the keys of another shard are on this device. The
  queries attend to them, and the result is merged with the earlier results.

  Returns:
    `Saved`: the output and A₂V [B, H, T, V] in q's dtype, and the log-sum-exps
    [B, H, G, T] of base 2.
  """
  lam = arrays.lam
  queries = _shard_queries(arrays)
  if lam is not None:
    # Partial results do not depend on λ. It is applied to their sum, below.
    queries = queries._replace(lam=jnp.zeros_like(lam))
  attention = _ShardAttention(implementation, options, queries)
  carry = _ForwardCarry(_departing_keys(arrays), _empty_result(arrays))
  for loop in plan_loops(mask, tokens):
    step = functools.partial(_forward_step, attention, tokens, loop)
    carry = _loop_over_steps(loop, step, carry)

  out, noise_out, lse = carry.result
  if lam is not None:
    assert noise_out is not None
    # The backward pass reads the rounded A₂V. The output is computed from the
    # same numbers, so that the two passes agree.
    noise_out = noise_out.astype(arrays.q.dtype)
    lam = jnp.swapaxes(lam, 1, 2)  # [B, H, T]
    out = out - lam[..., None] * noise_out

  # Here a row without visible keys has an lse of −1e30. The backward pass reads
  # +1e30. Half of it separates that value from the lse of other rows.
  is_empty = lse <= MASKED_LOGIT / 2
  lse = jnp.where(is_empty, EMPTY_ROW_LSE, lse)
  return Saved(out.astype(arrays.q.dtype), noise_out, lse)


def _forward_step(
  attention: _ShardAttention,
  tokens: TokenSharding,
  loop: StepLoop,
  index: Any,
  carry: _ForwardCarry,
) -> _ForwardCarry:
  """Returns the state after one step of the ring's forward pass.

  Args:
    attention: attention of this device's queries.
    tokens: how the devices share a row.
    loop: consecutive steps that run as one loop.
    index: the index of the step in the loop.
    carry: the state before, with the keys that are on this device.
  """
  merge_calls = functools.partial(_merge_calls, attention)
  # The transfer starts before the attention to the present keys, so that the
  # two overlap.
  next_keys = tokens.shift(carry.keys, loop.shift_after)
  result = _switch_calls(
    loop, tokens, index, merge_calls, carry.keys, carry.result
  )
  return _ForwardCarry(next_keys, result)


def _merge_calls(
  attention: _ShardAttention,
  calls: tuple[Call, ...],
  keys: _Keys,
  result: PartialResult,
) -> PartialResult:
  """Returns `result`, merged with the results of some calls."""
  for call in calls:
    part = attention.forward(call, keys)
    result = _merge_results(result, part, call.q_start)
  return result


def _merge_results(
  total: PartialResult, part: PartialResult, start: int
) -> PartialResult:
  """Returns the result over two sets of keys, merged from two results.

  With L for the log-sum-exps (base 2) of the two results, for each map:

    L = log₂(2^L_total + 2^L_part)
    out = 2^(L_total − L) · out_total + 2^(L_part − L) · out_part

  Args:
    total: the result of the first keys, for all T queries.
    part: the result of the second keys, for t consecutive queries.
    start: the first of these queries. Other queries are unchanged.
  """
  stop = start + part.lse.shape[3]
  total_lse = lax.slice_in_dim(total.lse, start, stop, axis=3)  # [B, H, G, t]

  # A row without visible keys has an lse of +1e30 in `part`, as implementations
  # store it, and of −1e30 in `total`, which gives it a weight of 0. No real lse
  # is near these values, so a comparison with half of 1e30 is safe.
  is_empty = part.lse > EMPTY_ROW_LSE / 2
  part_lse = jnp.where(is_empty, MASKED_LOGIT, part.lse)

  # The weights 2^L are divided by the larger one, so that they do not overflow.
  maximum = jnp.maximum(total_lse, part_lse)
  total_weight = jnp.exp2(total_lse - maximum)
  part_weight = jnp.exp2(part_lse - maximum)
  weight_sum = total_weight + part_weight
  total_share = total_weight / weight_sum
  part_share = part_weight / weight_sum

  # On axis G, 0 is the signal map and 1 is the noise map.
  out = _merge_outputs(
    total.out, part.out, total_share[:, :, 0], part_share[:, :, 0], start
  )
  noise_out = None
  if total.out2 is not None and part.out2 is not None:
    noise_out = _merge_outputs(
      total.out2, part.out2, total_share[:, :, 1], part_share[:, :, 1], start
    )
  lse = lax.dynamic_update_slice_in_dim(
    total.lse, maximum + jnp.log2(weight_sum), start, axis=3
  )
  return PartialResult(out, noise_out, lse)


def _merge_outputs(
  total: Float[Array, "B H T V"],
  part: Float[Array, "B H t V"],
  total_share: Float[Array, "B H t"],
  part_share: Float[Array, "B H t"],
  start: int,
) -> Float[Array, "B H T V"]:
  """Returns the outputs over two sets of keys, as a weighted sum of the two.

  Args:
    total: the outputs over the first keys, for all T queries.
    part: the outputs over the second keys, for the t queries from `start` on.
    total_share: the weight of `total` for these queries.
    part_share: the weight of `part`. The weights of a query sum to 1.
    start: the first of these queries. Other outputs are unchanged.
  """
  stop = start + part.shape[2]
  previous = lax.slice_in_dim(total, start, stop, axis=2)
  merged = previous * total_share[..., None] + part * part_share[..., None]
  return lax.dynamic_update_slice_in_dim(total, merged, start, axis=2)


def _empty_result(arrays: Arrays) -> PartialResult:
  """Returns the result of attention to no keys, to which results are merged.

  Outputs are 0. The log-sum-exp is −1e30, which gives them a weight of 0.
  """
  batch, length, num_heads, num_maps, _ = arrays.q.shape
  value_width = arrays.v.shape[-1]
  dtype = jnp.promote_types(jnp.float32, arrays.q.dtype)
  zeros = jnp.zeros((batch, num_heads, length, value_width), dtype)
  zeros = vary_like(zeros, arrays.q)
  lse_shape = (batch, num_heads, num_maps, length)
  lse = vary_like(jnp.full(lse_shape, MASKED_LOGIT, dtype), arrays.q)
  if num_maps == 1:
    return PartialResult(zeros, None, lse)
  return PartialResult(zeros, zeros, lse)


def _backward(
  implementation: PartialImplementation,
  tokens: TokenSharding,
  arrays: Arrays,
  mask: Mask,
  options: Options,
  saved: Saved,
  d_out: Float[Array, "B T H V"],
) -> tuple[Array, Array, Array, Array | None]:
  """Returns the gradients of q, k, v and λ (None without λ).

  The keys move round the ring as in the forward pass. Their gradients follow
  them, and each device adds the part of its queries.
  """
  d_out = _tokens_last(d_out)  # [B, H, T, V]
  attention = _ShardAttention(implementation, options, _shard_queries(arrays))
  result = PartialResult(out=saved.out, out2=saved.out2, lse=saved.lse)
  keys = _departing_keys(arrays)
  carry = _BackwardCarry(
    keys=keys,
    d_k=_zero_gradient(keys.k, d_out),
    d_v=_zero_gradient(keys.v, d_out),
    d_q=_zero_gradient(attention.queries.q, d_out),
  )
  loops = plan_loops(mask, tokens)
  for loop in loops:
    step = functools.partial(
      _backward_step, attention, tokens, result, d_out, loop
    )
    carry = _loop_over_steps(loop, step, carry)

  # Send the gradients back to the devices that the keys came from.
  last_distance = loops[-1].steps[-1].distance
  d_k, d_v = tokens.shift((carry.d_k, carry.d_v), -last_distance)

  d_lam = None
  if arrays.lam is not None:
    # dλ = −δ₂ = −rowsum(dO ∘ A₂V)
    sum_dtype = carry.d_q.dtype
    products = d_out.astype(sum_dtype) * saved.out2.astype(sum_dtype)
    delta_2 = jnp.sum(products, axis=-1)  # [B, H, T]
    d_lam = -jnp.swapaxes(delta_2, 1, 2).astype(arrays.lam.dtype)
  dtype = arrays.q.dtype
  return (
    _tokens_first(carry.d_q).astype(dtype),
    _tokens_first(d_k).astype(dtype),
    _tokens_first(d_v).astype(dtype),
    d_lam,
  )


def _backward_step(
  attention: _ShardAttention,
  tokens: TokenSharding,
  result: PartialResult,
  d_out: Float[Array, "B H T V"],
  loop: StepLoop,
  index: Any,
  carry: _BackwardCarry,
) -> _BackwardCarry:
  """Returns the state after one step of the ring's backward pass.

  Args:
    attention: attention of this device's queries.
    tokens: how the devices share a row.
    result: the forward result of this device's queries.
    d_out: the gradient of their output.
    loop: consecutive steps that run as one loop.
    index: the index of the step in the loop.
    carry: the state before, with the keys that are on this device.
  """
  # Send the keys to the device that attends to them in the next step.
  next_keys = tokens.shift(carry.keys, loop.shift_after)
  # The carry has gradients of the previous step's keys. These keys have moved
  # by `shift_before` since. Send their gradients after them.
  d_k, d_v = tokens.shift((carry.d_k, carry.d_v), loop.shift_before)

  # Both transfers have started, so they overlap with this computation.
  add_calls = functools.partial(_add_gradients, attention, result, d_out)
  d_q, part_d_k, part_d_v = _switch_calls(
    loop, tokens, index, add_calls, carry.keys, carry.d_q
  )
  return _BackwardCarry(
    keys=next_keys, d_k=d_k + part_d_k, d_v=d_v + part_d_v, d_q=d_q
  )


def _add_gradients(
  attention: _ShardAttention,
  result: PartialResult,
  d_out: Float[Array, "B H T V"],
  calls: tuple[Call, ...],
  keys: _Keys,
  d_q: Float[Array, "B Q G T D"],
) -> tuple[Array, Array, Array]:
  """Returns the gradients of some calls: d_q plus their dQ, and their dK, dV.

  A call is attention from some of this device's queries to some of the present
  keys. A device may have several calls at a step, or none.

  Args:
    attention: computes a call.
    result: the forward result of this device's queries.
    d_out: the gradient of their output.
    calls: the calls.
    keys: the keys that are on this device.
    d_q: dQ of this device's queries from earlier steps.
  """
  d_k = None
  d_v = None
  for call in calls:
    call_d_q, call_d_k, call_d_v = attention.backward(call, keys, result, d_out)
    d_q = _add_tokens(d_q, call_d_q, call.q_start)
    if d_k is None or d_v is None:
      d_k = _pad_tokens(call_d_k, call.k_start, keys.k.shape[-2])
      d_v = _pad_tokens(call_d_v, call.k_start, keys.v.shape[-2])
    else:
      d_k = _add_tokens(d_k, call_d_k, call.k_start)
      d_v = _add_tokens(d_v, call_d_v, call.k_start)
  if d_k is None or d_v is None:  # there is no call
    d_k = _zero_gradient(keys.k, d_out)
    d_v = _zero_gradient(keys.v, d_out)
  return d_q, d_k, d_v


def _zero_gradient(x: Array, d_out: Array) -> Array:
  """Returns zeros of x's shape, in at least float32."""
  dtype = jnp.promote_types(jnp.float32, d_out.dtype)
  return vary_like(jnp.zeros(x.shape, dtype), d_out)


def _add_tokens(
  total: Float[Array, "*axes T X"], part: Float[Array, "*axes t X"], start: int
) -> Float[Array, "*axes T X"]:
  """Returns the total with a part added at the t tokens from `start` on.

  Example:
    _add_tokens(total=[1, 1, 1, 1], part=[5, 6], start=1) → [1, 6, 7, 1]
  """
  axis = part.ndim - 2  # of tokens
  stop = start + part.shape[axis]
  updated = lax.slice_in_dim(total, start, stop, axis=axis) + part
  return lax.dynamic_update_slice_in_dim(total, updated, start, axis=axis)


def _pad_tokens(
  part: Float[Array, "*axes t X"], start: int, length: int
) -> Float[Array, "*axes length X"]:
  """Returns `length` tokens: the part from `start` on, and zeros elsewhere.

  Example:
    _pad_tokens(part=[5, 6], start=1, length=4) → [0, 5, 6, 0]
  """
  *axes, num_tokens, width = part.shape
  if num_tokens == length:
    return part
  num_after = length - start - num_tokens
  zeros_before = jnp.zeros((*axes, start, width), part.dtype)
  zeros_after = jnp.zeros((*axes, num_after, width), part.dtype)
  return jnp.concatenate(
    [vary_like(zeros_before, part), part, vary_like(zeros_after, part)],
    axis=-2,
  )


def _loop_over_steps(
  loop: StepLoop, step: Callable[[Any, Any], Any], carry: Any
) -> Any:
  """Returns the carry after carry = step(index, carry) for each step."""
  num_steps = len(loop.steps)
  # On CPU, XLA (0.10) does not order the transfers inside a loop with those
  # outside. Devices that reach different transfers first would wait for each
  # other forever. So there is no loop on CPU.
  if num_steps > 1 and platform() != "cpu":
    return lax.fori_loop(0, num_steps, step, carry)
  for index in range(num_steps):
    carry = step(index, carry)
  return carry


def _switch_calls(
  loop: StepLoop,
  tokens: TokenSharding,
  index: Any,
  function: Callable[..., Any],
  *operands: Any,
) -> Any:
  """Returns function(calls, *operands) for the calls of this shard.

  A call is attention from some queries of a shard to some keys. All devices run
  the same program, which has a branch for each different tuple of calls. Each
  device selects its branch at run time.

  Args:
    loop: consecutive steps of the ring.
    tokens: how the shards share a row.
    index: the index of the step in the loop.
    function: computes the calls.
    *operands: the other arguments of the function.
  """
  branches = loop.branches()
  if len(branches) == 1:
    return function(branches[0], *operands)
  table = jnp.array(loop.branch_table(), jnp.int32)  # [steps, shards]
  functions = [functools.partial(function, calls) for calls in branches]
  branch = table[index, tokens.shard]
  return lax.switch(branch, functions, *operands)


def _shard_queries(arrays: Arrays) -> _Queries:
  return _Queries(_tokens_last(arrays.q), arrays.lam, arrays.q_ids)


def _shard_keys(arrays: Arrays) -> _Keys:
  return _Keys(_tokens_last(arrays.k), _tokens_last(arrays.v), arrays.kv_ids)


def _departing_keys(arrays: Arrays) -> _Keys:
  """Returns a shard's own keys, behind an optimization barrier.

  All layers have the same ids. Without the barrier, JAX would send the ids
  round once, before the first layer, and keep what follows from them at each
  step.
  """
  return lax.optimization_barrier(_shard_keys(arrays))


def _call_arrays(call: Call, queries: _Queries, keys: _Keys) -> Arrays:
  """Returns the queries and keys of a call, as implementations take them.

  Args:
    call: which of the queries attend to which of the keys.
    queries: all queries of this device.
    keys: all keys that are on this device.
  """
  lam = queries.lam
  if lam is not None:
    lam = _slice_queries(lam, call, axis=1)
  q_ids = queries.ids
  if q_ids is not None:
    q_ids = _slice_queries(q_ids, call, axis=1)
  kv_ids = keys.ids
  if kv_ids is not None:
    kv_ids = _slice_keys(kv_ids, call, axis=1)
  return Arrays(
    # Implementations take [B, tokens, …]. The ring has tokens on axis −2.
    q=_tokens_first(_slice_queries(queries.q, call, axis=-2)),
    k=_tokens_first(_slice_keys(keys.k, call, axis=-2)),
    v=_tokens_first(_slice_keys(keys.v, call, axis=-2)),
    lam=lam,
    q_ids=q_ids,
    kv_ids=kv_ids,
    offset=None,  # the mask of the call has it
  )


def _slice_queries(x: Array, call: Call, axis: int) -> Array:
  stop = call.q_start + call.mask.q_length
  return lax.slice_in_dim(x, call.q_start, stop, axis=axis)


def _slice_keys(x: Array, call: Call, axis: int) -> Array:
  stop = call.k_start + call.mask.kv_length
  return lax.slice_in_dim(x, call.k_start, stop, axis=axis)


def _tokens_last(x: Float[Array, "B T *axes X"]) -> Float[Array, "B *axes T X"]:
  return jnp.moveaxis(x, 1, -2)


def _tokens_first(
  x: Float[Array, "B *axes T X"],
) -> Float[Array, "B T *axes X"]:
  return jnp.moveaxis(x, -2, 1)
